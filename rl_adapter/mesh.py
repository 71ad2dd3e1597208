"""The device mesh and where each array lives on it.

axis     what is split over it
data     prompts; the base is replicated
expert   prompts outside the experts, experts inside them: each device keeps only its experts
model    columns of attention weights and the head (rows of the output projection), and experts again
"""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rl_adapter.types import Base, PyTree, Spec

ROWS = ("data", "expert")  # prompts
EXPERTS = ("expert", "model")


def make(data: int = 0, expert: int = 1, model: int = 1, devices=None) -> Mesh:
    """A mesh of data x expert x model devices; data = 0 takes all that the other two leave."""
    devices = jax.local_devices() if devices is None else devices
    if expert < 1 or model < 1 or data < 0:
        raise ValueError(f"mesh: found data={data}, expert={expert}, model={model}; expert and model must be at least 1, data at least 0")
    data = data or len(devices) // (expert * model)
    if not data or data * expert * model > len(devices):
        raise ValueError(f"mesh: data x expert x model = {data} x {expert} x {model} needs more than the {len(devices)} devices present")
    chosen = np.asarray(devices[: data * expert * model]).reshape(data, expert, model)
    return Mesh(chosen, ("data", "expert", "model"), axis_types=(AxisType.Auto,) * 3)


def check(mesh: Mesh, spec: Spec, prompts: int | None = None) -> None:
    """Raise where the model or the batch does not divide over the mesh."""
    ways = mesh.shape["expert"] * mesh.shape["model"]
    if spec.sparse_layers and spec.experts % ways:
        raise ValueError(f"mesh: {spec.experts} experts do not divide over expert x model = {ways} devices")
    heads, kind = (spec.heads, "heads") if spec.mla else (spec.kv_heads, "key-value heads")
    if heads % mesh.shape["model"]:
        raise ValueError(f"mesh.model: found {mesh.shape['model']}, which does not divide the {heads} {kind}")
    if prompts is not None and prompts % row_shards(mesh):
        raise ValueError(f"mesh: {prompts} prompts at a time do not divide over data x expert = {row_shards(mesh)} devices")


def row_shards(mesh: Mesh | None) -> int:
    """Ways that prompts are split; without a mesh 1."""
    return 1 if mesh is None else mesh.shape["data"] * mesh.shape["expert"]


def rows(mesh: Mesh) -> NamedSharding:
    """Leading axis: prompts."""
    return NamedSharding(mesh, P(ROWS))


def rows_behind(mesh: Mesh) -> NamedSharding:
    """Second axis, behind layers: prompts."""
    return NamedSharding(mesh, P(None, ROWS))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def base_shardings(mesh: Mesh, base: Base) -> Base:
    """A tree of shardings like `base`: experts over expert x model, attention by heads and the vocabulary over model."""

    def place(path, leaf):
        keys = [getattr(k, "name", getattr(k, "key", None)) for k in path]
        name = next((k for k in reversed(keys) if k in _AXES), None)
        dims = [None] * leaf.ndim
        if name is not None:
            axis, names = _AXES[name]
            of_inputs = axis == -1 and keys[-1] == "order"
            if leaf.shape[axis] % np.prod([mesh.shape[n] for n in names]) == 0 and not of_inputs:
                dims[axis] = names
        return NamedSharding(mesh, P(*dims))

    return jax.tree_util.tree_map_with_path(place, base)


def place(mesh: Mesh, adapter: PyTree) -> PyTree:
    """An adapter, or a whole state of training, where it lives."""
    return jax.device_put(adapter, adapter_shardings(mesh, adapter))


_AXES = {  # weight -> (axis of its qvalue [.., G, g, N] and scale [.., G, N] that is split, mesh axes)
    **dict.fromkeys(("q", "k", "v", "q_b", "mlp_gate", "mlp_up", "head"), (-1, ("model",))),
    **dict.fromkeys(("k_up", "v_up"), (1, ("model",))),
    **dict.fromkeys(("gate", "up", "down"), (1, EXPERTS)),
}


def adapter_shardings(mesh: Mesh, adapter: PyTree) -> PyTree:
    """Like `adapter`: per-expert matrices with their experts, the small rest replicated. Holds for optimizer moments of the same paths."""

    def place(path, leaf):
        names = {getattr(k, "key", getattr(k, "name", None)) for k in path}
        if names & {"gate", "up", "down"} and leaf.ndim == 4:
            return NamedSharding(mesh, P(None, EXPERTS))
        return replicated(mesh)

    return jax.tree_util.tree_map_with_path(place, adapter)

"""A reward model as a file: `reward_model.safetensors`, float32, with what it belongs to in the header."""

import json
import os
import pathlib

import jax
import numpy as np
import safetensors
import safetensors.numpy

from rl_adapter import config as configs
from rl_adapter import lora
from rl_adapter.types import PyTree

FILE = configs.REWARD_MODEL
KEY = "rl_adapter"  # of the header


def _named(tree: PyTree) -> dict[str, jax.Array]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def save(directory: str | os.PathLike, tree: PyTree, spec: lora.AdapterSpec, digest: str) -> None:
    """Writes a `scalar.Scalar`, whole or not at all."""
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.array(x) for name, x in _named(jax.device_get(tree)).items()}
    temporary = directory / f".{FILE}.{os.getpid()}.tmp"
    # One entry: the library writes several in any order, and equal models should be equal files.
    safetensors.numpy.save_file(arrays, temporary, {KEY: json.dumps({"base_digest": digest, "adapter": _about(spec)})})
    os.replace(temporary, directory / FILE)


def _about(spec: lora.AdapterSpec) -> dict:
    return {
        "ranks": [list(pair) for pair in spec.ranks],
        "alphas": [list(pair) for pair in spec.alphas],
        "rank_stabilized": spec.rank_stabilized,
        "shared_a": spec.shared_a,
    }


def read(directory: str | os.PathLike, like: PyTree, spec: lora.AdapterSpec, digest: str, field: str) -> PyTree:
    """A `scalar.Scalar` on the host, of the shapes of `like`.

    Raises:
        ValueError: no such file, one that is damaged, of another base or of other ranks; names `field`.
    """
    path = pathlib.Path(directory) / FILE
    try:
        with safetensors.safe_open(path, "numpy") as file:
            about = json.loads((file.metadata() or {}).get(KEY, "{}"))
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, ValueError, RecursionError, safetensors.SafetensorError) as error:
        raise ValueError(f"{field}: found {error} at {path}, need the directory of a run with --config.objective=reward") from None
    about = about if isinstance(about, dict) else {}
    if about.get("base_digest") != digest:
        raise ValueError(f"{field}: found a reward model of base {str(about.get('base_digest', ''))[:12]!r}, need {digest[:12]!r}")
    if about.get("adapter") != _about(spec):
        raise ValueError(f"{field}: found a reward model of adapter {about.get('adapter')}, need {_about(spec)}")
    want = _named(like)
    differ = [
        name
        for name in sorted(want.keys() | found.keys())
        if getattr(found.get(name), "shape", None) != getattr(want.get(name), "shape", None)
    ]
    if differ or not all(np.isfinite(x).all() for x in found.values()):
        raise ValueError(f"{field}: found tensors that do not fit ({', '.join(differ[:3]) or 'not finite'}) in {path}")
    return jax.tree.unflatten(jax.tree.structure(like), [found[name].astype(np.float32) for name in want])

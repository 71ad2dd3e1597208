"""LoRA adapters (Hu et al. 2021, arXiv:2106.09685): the only tree that is optimized.

An `Adapter` mirrors `types.Base`: for each run of layers a dict from the name of a matrix to its pair, stacked as the base is:
y = x W + scale (x A) B. Absent names are not adapted. B starts at zero, so a new adapter changes nothing.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import struct

from rl_adapter import numerics, quant
from rl_adapter.types import Array, Base, Numerics, PyTree

# What of a latent becomes keys and values is left alone: engines absorb it into queries and outputs, and ignore adapters on it.
GROUPS = {
    "attention": ("q", "k", "v", "o", "q_a", "q_b", "kv_a"),
    "mlp": ("mlp_gate", "mlp_up", "mlp_down"),
    "experts": ("gate", "up", "down"),
    "router": ("router",),
    "head": ("head",),
}


@struct.dataclass
class Lora:
    a: PyTree  # [..., K, R] f32; of a shared A on experts, without the [E] axis
    b: PyTree  # [..., R, N] f32


@struct.dataclass
class Adapter:
    layers: tuple[dict[str, Lora], ...]  # one a run of `Spec.stacks`
    head: Lora | None = None


@dataclasses.dataclass(frozen=True)
class AdapterSpec:
    """Rank and alpha of each group of GROUPS; rank 0 leaves the group alone.

    `rank_stabilized` scales by alpha / sqrt(R) (Kalajdzievski 2023, arXiv:2312.03732) instead of alpha / R.
    `shared_a`: one A for all experts of a layer, a B for each.
    """

    ranks: tuple[tuple[str, int], ...]
    alphas: tuple[tuple[str, float], ...]
    rank_stabilized: bool = False
    shared_a: bool = False

    def scale(self, name: str) -> float:
        group = next(g for g, names in GROUPS.items() if name in names)
        rank, alpha = dict(self.ranks)[group], dict(self.alphas)[group]
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)


def adapter_spec(config) -> AdapterSpec:
    """From the `adapter` section of a config."""
    return AdapterSpec(
        ranks=tuple((g, int(config[g].rank)) for g in GROUPS),
        alphas=tuple((g, float(config[g].alpha)) for g in GROUPS),
        rank_stabilized=bool(config.rank_stabilized),
        shared_a=bool(config.shared_a),
    )


def init(spec: AdapterSpec, base: Base, key: Array) -> Adapter:
    """A ~ N(0, 1/K), B = 0, float32. `base` may be abstract (shapes are enough)."""
    stacks = [{} for _ in base.layers]
    places = [(layers, stack) for layers, stack in zip(base.layers, stacks)]
    top = {}
    for group, rank in spec.ranks:
        for name in GROUPS[group] if rank else ():
            for layers, stack in places if group != "head" else [(base, top)]:
                w = getattr(layers, name)
                if w is None:
                    continue
                *lead, k, n = quant.shape(w)
                if rank > min(k, n):
                    raise ValueError(f"adapter.{group}.rank: found {rank}, need at most {min(k, n)}, the smaller side of {name}")
                lead_a = lead[:1] if spec.shared_a and group == "experts" else lead
                key, sub = jax.random.split(key)
                a = jax.random.normal(sub, (*lead_a, k, rank), jnp.float32) / math.sqrt(k)
                stack[name] = Lora(a, jnp.zeros((*lead, rank, n), jnp.float32))
    if not top and not any(stacks):
        raise ValueError("adapter: no group that the model has is given a rank above 0, so nothing would be trained")
    return Adapter(tuple(stacks), top.get("head"))


def count(adapter: PyTree) -> int:
    """Number of trained parameters."""
    return sum(x.size for x in jax.tree.leaves(adapter))


def prepare(adapter: Adapter | None, numeric: Numerics) -> Adapter | None:
    """The adapter as the forward pass reads it: each matrix a `quant.Trainable`. Done once per update, outside any loop."""
    return jax.tree.map(lambda w: quant.trainable(w, numeric), adapter)


def linear(x: Array, w: PyTree, lora: Lora | None, scale: float, numeric: Numerics, bias: Array | None = None) -> Array:
    """x [..., K] -> [..., N]: the frozen product with its bias, plus the low-rank one."""
    y = quant.matmul(x, w, numeric)
    if bias is not None:
        y = y + bias
    if lora is None:
        return y
    delta = quant.matmul(quant.matmul(x, lora.a, numeric), lora.b, numeric) * scale
    return y + (numerics.fence(delta) if numeric.exact else delta)

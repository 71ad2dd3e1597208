"""LoRA adapters (Hu et al. 2021, arXiv:2106.09685): the only tree that is optimized.

An adapter is a dict from the name of a weight ("q", ..., "router", "gate", "up", "down", "head") to its pair of matrices, stacked over
layers as the base is: y = x W + scale (x A) B. Absent names are not adapted. B starts at zero, so a new adapter changes nothing.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import struct

from rl_adapter import numerics, quant
from rl_adapter.types import Array, Base, Numerics, PyTree

GROUPS = {"attention": ("q", "k", "v", "o"), "experts": ("gate", "up", "down"), "router": ("router",), "head": ("head",)}


@struct.dataclass
class Lora:
    a: PyTree  # [..., K, R] f32; of a shared A on experts, without the [E] axis
    b: PyTree  # [..., R, N] f32


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


def init(spec: AdapterSpec, base: Base, key: Array) -> dict[str, Lora]:
    """A ~ N(0, 1/K), B = 0, float32. `base` may be abstract (shapes are enough)."""
    weights = {name: getattr(base.layers, name) for g in ("attention", "experts", "router") for name in GROUPS[g]} | {"head": base.head}
    adapter = {}
    for group, rank in spec.ranks:
        for name in GROUPS[group] if rank else ():
            *lead, k, n = quant.shape(weights[name])
            if rank > min(k, n):
                raise ValueError(f"adapter.{group}.rank: found {rank}, need at most {min(k, n)}, the smaller side of {name}")
            lead_a = lead[:1] if spec.shared_a and group == "experts" else lead
            key, sub = jax.random.split(key)
            a = jax.random.normal(sub, (*lead_a, k, rank), jnp.float32) / math.sqrt(k)
            adapter[name] = Lora(a, jnp.zeros((*lead, rank, n), jnp.float32))
    if not adapter:
        raise ValueError("adapter: every group has rank 0, so nothing would be trained; give at least one group a rank")
    return adapter


def count(adapter: PyTree) -> int:
    """Number of trained parameters."""
    return sum(x.size for x in jax.tree.leaves(adapter))


def prepare(adapter: dict[str, Lora] | None, numeric: Numerics) -> dict[str, Lora]:
    """The adapter as the forward pass reads it: each matrix a `quant.Trainable`. Done once per update, outside any loop."""
    return jax.tree.map(lambda w: quant.trainable(w, numeric), adapter or {})


def linear(x: Array, w: PyTree, lora: Lora | None, scale: float, numeric: Numerics) -> Array:
    """x [..., K] -> [..., N]: the frozen product plus the low-rank one."""
    y = quant.matmul(x, w, numeric)
    if lora is None:
        return y
    delta = quant.matmul(quant.matmul(x, lora.a, numeric), lora.b, numeric) * scale
    return y + (numerics.fence(delta) if numeric.exact else delta)

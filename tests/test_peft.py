"""PEFT directories."""

import pathlib

import jax
import numpy as np
import pytest

from rl_adapter import lora
from rl_adapter.hub import families, peft, peft_read
from rl_adapter.lora import Adapter, AdapterSpec, Lora

GOLDEN = pathlib.Path(__file__).parent / "golden"


def spec_of(attention=3, mlp=2, experts=4, router=2, head=1, **options) -> AdapterSpec:
    """Another rank and alpha in each group."""
    ranks = dict(attention=attention, mlp=mlp, experts=experts, router=router, head=head)
    alphas = dict(attention=6.0, mlp=5.0, experts=8.0, router=0.3, head=7.0)
    return AdapterSpec(tuple(ranks.items()), tuple(alphas.items()), **options)


def random_adapter(described: families.Description, spec: AdapterSpec, size: float = 1.0, seed: int = 0) -> Adapter:
    """Of everything that a spec adapts, with A ~ N(0, 1 / K) and B ~ N(0, size)."""
    random, ranks, model = np.random.default_rng(seed), dict(spec.ranks), described.spec

    def pair(shape, rank, lead=(), lead_a=()):
        (out, width), draw = shape, lambda *shape: random.normal(size=shape).astype(np.float32)
        return Lora(draw(*lead_a, width, rank) / np.float32(np.sqrt(width)), np.float32(size) * draw(*lead, rank, out))

    groups = {name: group for group, names in lora.GROUPS.items() for name in names}
    stacks = []
    for _, count, sparse in model.stacks:
        stack = {}
        for name, shape in families.fields(described, sparse).items():
            if name in groups and ranks[groups[name]]:
                lead = (count, model.experts) if families.per_expert(name) else (count,)
                lead_a = lead[:1] if spec.shared_a and families.per_expert(name) else lead
                stack[name] = pair(shape, ranks[groups[name]], lead, lead_a)
        stacks.append(stack)
    return Adapter(tuple(stacks), pair(families.top(model)["head"], ranks["head"]) if ranks["head"] else None)

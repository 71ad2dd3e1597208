"""Microbatches: prompts of a batch that go through the model together, and the loop over them.

All have one size and their number is a loop's length, so no batch compiles anew.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from rl_adapter import mesh as meshes
from rl_adapter.types import Array, PyTree, Rollout

# Packed tokens of a microbatch on a row shard, about, where nobody says: of few tokens experts get tiles that are mostly empty. Measured,
# the quickstart's updates: 5,760 tokens take a fifth less time than 720, though they are padded more.
TOKENS = 8192


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which prompts go together, and how much room they have."""

    rows: np.ndarray  # [P, prompts] int32, prompts of the batch by microbatch; -1: none
    count: int  # microbatches: of `rows` the first so many hold
    size: int  # packed tokens of a microbatch on each row shard
    padding: float  # share of the packed tokens that are none


def size(prompts: int, t: int, group: int, c: int, tokens: int) -> tuple[int, int]:
    """Packed tokens, and prompts, of a microbatch on one row shard that has so many `prompts`. Both come from shapes alone, so no batch
    compiles anew. The longest prompt with its group fits, and three times as many prompts as if all were the longest; where `tokens` are
    asked for, memory is short, and it is twice as many: attention works on rows that are padded. Where none are, it is TOKENS, or twice the
    longest, in parts as equal as prompts allow, so that a batch of the longest leaves little empty."""
    longest = t + group * (c - 1)
    if tokens:
        room = min(max(longest, tokens), prompts * longest)
    else:
        parts = -(-prompts // max(2, TOKENS // longest))
        room = -(-prompts // parts) * longest
    return room, min(prompts, -(-(2 if tokens else 3) * room // longest))


def plan(r: Rollout, shards: int, tokens: int = 0) -> Plan:
    """Distribute the prompts of a batch over microbatches of at most `tokens` tokens (0: as `size` says), so that few slots stay
    empty.

    First-fit decreasing (Johnson 1973), each row shard for itself.
    """
    (p_, t_), (_, g_, c_) = r.prompts.shape, r.tokens.shape
    here = p_ // shards
    room, most = size(here, t_, g_, c_, -(-tokens // shards))
    used = np.asarray(r.prompt_lengths) + np.sum(np.asarray(r.lengths) - 1, 1)
    bins = [[] for _ in range(shards)]  # of each shard: lists of prompts
    for shard in range(shards):
        rows, left = bins[shard], []
        for p in sorted(range(shard * here, (shard + 1) * here), key=lambda p: -used[p]):
            at = next((i for i, free in enumerate(left) if free >= used[p] and len(rows[i]) < most), len(left))
            if at == len(left):
                rows.append([])
                left.append(room)
            rows[at].append(p)
            left[at] -= used[p]
    count = max(map(len, bins))
    out = np.full((p_, shards, most), -1, np.int32)
    for shard, rows in enumerate(bins):
        for i, prompts in enumerate(rows):
            out[i, shard, : len(prompts)] = prompts
    return Plan(out.reshape(p_, -1), count, room, float(1 - used.sum() / (count * shards * room)))


def take(tree: PyTree, prompts: Array | slice) -> PyTree:
    """Some prompts of a tree whose leaves have prompts in front; experts' arrays of a `Rollout` have layers before them."""

    def pick(path, x):
        return x[:, prompts] if is_behind(path) else x[prompts]

    return jax.tree_util.tree_map_with_path(pick, tree)


def is_behind(path) -> bool:
    return getattr(path[-1], "name", "") in ("prompt_choices", "choices")


def part(tree: PyTree, rows: Array, mesh) -> PyTree:
    """The prompts `rows` of a tree that is or holds a `Rollout`. Where a row is -1 nothing is there: its lengths, and all arrays beside the
    rollout, weights among them, are 0."""
    there = rows >= 0
    some = take(tree, jnp.maximum(rows, 0))
    only = lambda x: jnp.where(there.reshape(-1, *(1,) * (x.ndim - 1)), x, 0)

    def emptied(x):
        if isinstance(x, Rollout):
            return x.replace(prompt_lengths=only(x.prompt_lengths), lengths=only(x.lengths), drawn=only(x.drawn).astype(bool))
        return only(x)

    some = jax.tree.map(emptied, some, is_leaf=lambda x: isinstance(x, Rollout))
    if mesh is None:
        return some
    place = lambda path, x: jax.lax.with_sharding_constraint(x, meshes.rows_behind(mesh) if is_behind(path) else meshes.rows(mesh))
    return jax.tree_util.tree_map_with_path(place, some)


def over(of_part: Callable[[Array], PyTree], combine: Callable[[PyTree, PyTree], PyTree], rows: Array, count: Array) -> PyTree:
    """`of_part(rows[i])` of the first `count` microbatches, combined; it starts from zeros."""
    of_part = jax.jit(of_part)  # so that it is traced once, for its shapes and in the loop
    zeros = _zeros(jax.eval_shape(of_part, rows[0]))
    return jax.lax.fori_loop(0, count, lambda i, carry: combine(carry, of_part(rows[i])), zeros)


def by_prompt(of_part: Callable[[Array], tuple[PyTree, PyTree]], prompts: int, rows: Array, count: Array) -> tuple[PyTree, PyTree]:
    """`of_part` gives arrays with a microbatch's prompts in front, and arrays to add up: the former of all `prompts`, the latter's sums."""
    of_part = jax.jit(of_part)
    like, sums = jax.eval_shape(of_part, rows[0])
    whole = jax.tree.map(lambda s: jax.ShapeDtypeStruct((prompts, *s.shape[1:]), s.dtype), like)

    def put(i, carry):
        (some, more), place = of_part(rows[i]), jnp.where(rows[i] >= 0, rows[i], prompts)
        return jax.tree.map(lambda all_, x: all_.at[place].set(x, mode="drop"), carry[0], some), add(carry[1], more)

    return jax.lax.fori_loop(0, count, put, (_zeros(whole), _zeros(sums)))


add = functools.partial(jax.tree.map, jnp.add)
_zeros = functools.partial(jax.tree.map, lambda s: jnp.zeros(s.shape, s.dtype))

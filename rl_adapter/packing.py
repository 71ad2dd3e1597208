"""Packing: of padded rows only the tokens that are there go through the model, in rows of a fixed size.

Matrices and experts see tokens one by one, so they take them packed; attention alone wants them by prompt and completion, and spreads
them out again. Each row shard of the mesh packs its own prompts, so a packed row never crosses devices.
"""

import jax
import jax.numpy as jnp
from flax import struct

from rl_adapter.types import Array


@struct.dataclass
class Packing:
    """Where each token of padded rows [P, M] lies in packed rows [shards, N], and back."""

    source: Array  # [shards, N] index into the shard's P / shards * M padded tokens; past the end where empty
    place: Array  # [shards, P / shards * M] index into the packed row; N where padding
    rows: int = struct.field(pytree_node=False)  # P

    def flat(self, x: Array) -> Array:
        """Padded [P, M, ...] to packed [shards, N, ...]; zeros where empty."""
        return _take(x.reshape(*self.place.shape, *x.shape[2:]), self.source, self.place)

    def spread(self, x: Array) -> Array:
        """Packed [shards, N, ...] to padded [P, M, ...]; zeros in padding."""
        out = _take(x, self.place, self.source)
        return out.reshape(self.rows, self.place.size // self.rows, *x.shape[2:])  # not -1: a model without experts has no choices

    @property
    def used(self) -> Array:
        """[shards, N] bool: a token is there."""
        return self.source < self.place.shape[1]


def pack(valid: Array, size: int, shards: int) -> Packing:
    """Pack the tokens where `valid` [P, M] into `size` a shard. A shard that has more loses them: the caller plans for the size."""
    rows = len(valid)
    valid = valid.reshape(shards, -1)
    padded = valid.shape[1]
    place = jnp.where(valid, jnp.cumsum(valid, 1) - 1, size).astype(jnp.int32)
    index = jnp.broadcast_to(jnp.arange(padded, dtype=jnp.int32), place.shape)
    source = jnp.full((shards, size), padded, jnp.int32)
    source = jax.vmap(lambda s, p, i: s.at[p].set(i, mode="drop"))(source, place, index)
    return Packing(source, place, rows)


@jax.custom_vjp
def _take(x: Array, index: Array, inverse: Array) -> Array:
    """x [shards, n, ...] at index [shards, m] (past the end: 0). `inverse` [shards, n] undoes it, so that the derivative is a take too,
    where autodiff would scatter."""
    return jax.vmap(lambda x, i: jnp.take(x, i, 0, mode="fill", fill_value=0))(x, index)


def _take_forward(x, index, inverse):
    return _take(x, index, inverse), (index, inverse)


def _take_backward(residual, dy):
    index, inverse = residual
    return _take(dy, inverse, index), None, None


_take.defvjp(_take_forward, _take_backward)


def spread_choices(packing: Packing, choices: Array) -> Array:
    """Experts of packed tokens [Ls, shards, N, k] to padded [Ls, P, M, k]."""
    return jnp.moveaxis(packing.spread(jnp.moveaxis(choices, 0, 2)), 2, 0)

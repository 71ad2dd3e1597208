"""The paged cache: keys and values of all completions at work, in one pool of pages that is made once and never grows.

A page has room for the keys of `page` tokens, of all layers. What a token may see is a list of pages (`Table`), so a prompt's pages are
shared by its completions without a copy, a finished completion's pages go to the next one, and a conversation keeps its pages between
turns (Kwon et al. 2023, arXiv:2309.06180). Each row shard of the mesh has a pool of its own: a completion never reads another device's
keys. Masked keys add an exact 0, so which pages they are, and what else lies in these, cannot be seen in the bits.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rl_adapter import mesh as meshes
from rl_adapter.attention import Keys, Rules
from rl_adapter.types import Array

TRASH = 0  # a page that nobody reads: what is written for rows that are not at work goes there


@struct.dataclass
class Table:
    """Contexts [...], whose tokens fill their pages one after another."""

    page: Array  # [..., n] int32 index into the shard's pool
    length: Array  # [...] int32 tokens
    first: Array  # [...] int32 position of the first one


def empty_table(*shape: int) -> Table:
    """Contexts of no token, on the host, with room for shape[-1] pages."""
    zeros = lambda shape: np.zeros(shape, np.int32)
    return Table(zeros(shape), zeros(shape[:-1]), zeros(shape[:-1]))


def pool_like(keys: Keys, shards: int, pages: int) -> Keys:
    """From the shapes of a page's keys, [L, 1, K, 1, page, ...], to those of a pool, [shards, K, L, pages, page, ...].

    What is put at once into one place comes last, or XLA would transpose the whole pool there and back.
    """
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((shards, x.shape[2], x.shape[0], pages, *x.shape[4:]), x.dtype), keys)


def zeros(like: Keys, mesh: Mesh | None) -> Keys:
    """A pool in its place: shards over rows of devices, and heads over `model` where these divide."""
    split = mesh is not None and like.k.shape[1] % mesh.shape["model"] == 0
    sharding = None if mesh is None else NamedSharding(mesh, P(meshes.ROWS, "model" if split else None))
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=sharding), like)


def page_size(pool: Keys) -> int:
    return pool.k.shape[4]


@jax.named_scope("cache")
def read(pool: Keys, layer: Array, table: Table, pages: int) -> Keys:
    """A layer's keys of the first `pages` pages of contexts [P, n] or [P, G, n]: Keys [P, K, (G,) S, ...]."""
    page = table.page[..., :pages]
    *lead, n = page.shape
    shards = len(pool.k)

    def one(leaf, page):  # [K, L, B, page, ...], [P, (G,) n] -> [P, K, (G,) n, page, ...]
        numbers = jax.lax.GatherDimensionNumbers(
            offset_dims=(1, *range(page.ndim + 1, page.ndim + leaf.ndim - 2)), collapsed_slice_dims=(1, 2), start_index_map=(1, 2)
        )
        at = jnp.stack([jnp.broadcast_to(layer, page.shape), page], -1)
        sizes = (leaf.shape[0], 1, 1, *leaf.shape[3:])
        return jax.lax.gather(leaf, at, numbers, sizes, mode=jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS)

    def gathered(leaf):
        rows = jax.vmap(one)(leaf, page.reshape(shards, -1, *lead[1:], n))
        return rows.reshape(lead[0], leaf.shape[1], *lead[1:], -1, *leaf.shape[5:])

    return jax.tree.map(gathered, pool)


def visible(rules: Rules, query: Array, table: Table, slots: int) -> Array:
    """Mask [..., M, slots] of a context's tokens that queries at positions `query` [..., M] see; table leaves broadcast with [...]."""
    index = jnp.arange(slots)
    distance = query[..., None] - (table.first[..., None, None] + index)
    return (index < table.length[..., None, None]) & (distance >= 0) & rules.within(distance)


def write_layer(pool: Keys, layer: Array, new: Keys, page: Array, slot: Array) -> Keys:
    """Put one token of each row, `new` [P, K, G, 1, ...], of one layer at `page` and `slot` [P, G]."""
    shards = len(pool.k)
    by_shard = lambda x: x.reshape(shards, -1, *x.shape[2:])
    put = lambda leaf, new, page, slot: leaf.at[layer, page, slot].set(new, mode="promise_in_bounds")  # of one shard and head
    heads = jax.vmap(put, (0, 1, None, None))  # leaf [K, L, B, page, ...], new [rows, K, ...]

    def of_leaf(leaf, new):
        return jax.vmap(heads)(leaf, by_shard(jnp.swapaxes(new[:, :, :, 0], 1, 2)), by_shard(page), by_shard(slot))

    return jax.tree.map(of_leaf, pool, new)


def write(pool: Keys, new: Keys, page: Array, slot: Array) -> Keys:
    """Put tokens `new` [L, P, K, 1, T, ...] of all layers at `page` and `slot` [P, T]."""
    some = lambda layer, pool: write_layer(pool, layer, jax.tree.map(lambda x: jnp.swapaxes(x[layer], 2, 3), new), page, slot)
    return jax.lax.fori_loop(0, len(new.k), some, pool)

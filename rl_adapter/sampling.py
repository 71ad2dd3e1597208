"""Drawing tokens from logits, on the device.

Randomness is keyed by (seed, prompt, sample, position), so a completion depends on nothing else: not on batch, slot, order, or mesh.
"""

import dataclasses

import jax
import jax.numpy as jnp

from rl_adapter import model as models
from rl_adapter import numerics
from rl_adapter.types import Array

MASKED = -1e30
AT_ONCE = 2**18  # logits, of each row shard, that are worked on at a time


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Static settings of a sampler. temperature 0 is greedy."""

    group: int  # completions of a prompt
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    pad_id: int
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off

    def __post_init__(self):
        if self.temperature < 0:
            raise ValueError(f"rollout.temperature: found {self.temperature}, need 0 (greedy) or more")
        for name in ("group", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"rollout.{name}: found {getattr(self, name)}, need at least 1")


def uniform(keys: Array, n: int) -> Array:
    """Uniform numbers in (0, 1), [..., n], one stream a key; exactly representable, so that no rounding is left to a device."""
    bits = jax.vmap(lambda key: jax.random.bits(key, (n,), jnp.uint32))(keys.reshape(-1))
    return (((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23).reshape(*keys.shape, n)


def row_keys(seed: Array, prompt_ids: Array, samples: Array, positions: Array) -> Array:
    """Keys [N] of tokens at `positions` [N] of completions `samples` [N]. Prompts, unlike rows, have an identity: their id [N]."""
    base = jax.random.key(seed)
    return jax.vmap(lambda p, g, t: jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(base, p), g), t))(
        prompt_ids, samples, positions
    )


def truncate(z: Array, top_k: int, top_p: float) -> Array:
    """Mask all but the top_k logits, then all but the fewest that hold top_p of the probability (Holtzman et al. 2019, arXiv:1904.09751).

    Ties with the last one kept are kept. Probabilities add as integers.
    """
    if 0 < top_k < z.shape[-1]:
        z = _largest(z, jnp.ones_like(z, jnp.int32), top_k)
    if top_p < 1:
        p = numerics.exp(z - jnp.max(z, -1, keepdims=True))
        p = jnp.round(numerics.divide_rows(p, numerics.exact_sum(p)) * 2.0**24).astype(jnp.int32)
        z = _largest(z, p, max(1, round(top_p * 2.0**24)))  # the likeliest token is always kept
    return z


def _largest(z: Array, weight: Array, limit: int) -> Array:
    """Mask logits that have others above them of `limit` or more in sum of their `weight`, int32. What is not a number stays.

    The lowest one that stays is found by halving the range of all floats: a sort takes some ten times as long.
    """
    bits = jax.lax.bitcast_convert_type(jnp.where(z == 0, 0.0, z), jnp.int32)  # one zero, not two
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats

    def halve(_, bounds):
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        over = jnp.sum(jnp.where(key > middle, weight, 0), -1, keepdims=True) >= limit
        return jnp.where(over, middle + 1, low), jnp.where(over, high, middle)

    ends = jnp.iinfo(jnp.int32)
    lowest, _ = jax.lax.fori_loop(0, 32, halve, tuple(jnp.full_like(key[..., :1], end) for end in (ends.min, ends.max)))
    return jnp.where((key < lowest) & ~jnp.isnan(z), MASKED, z)


@jax.named_scope("sample")
def sample(z: Array, keys: Array, s: Sampling, exact: bool, shards: int = 1) -> tuple[Array, Array, Array, Array]:
    """Draw tokens from logits z [N, V] (Gumbel-max), from each row as many as it has keys [N, G]: token, and its sampled, tempered and
    scored logprob, each [N, G].

    Some rows at a time, the same of each of `shards` that hold N / shards rows: else there were several arrays of all logits, and none of
    them would fit into a cache (2 to 3 times as slow on CPU).
    """
    (n, v), g = z.shape, keys.shape[1]
    rows = n // shards
    chunk = min(rows, max(1, AT_ONCE // (v * g)))
    z, keys = z.reshape(shards, rows, v), keys.reshape(shards, rows, g)
    zeros = jnp.zeros((shards, rows, g), jnp.int32), *(jnp.zeros((shards, rows, g)) for _ in range(3))

    def some(i, drawn):
        first = jnp.minimum(i * chunk, rows - chunk)  # the last ones may be drawn twice: the same
        part = lambda x: jax.lax.dynamic_slice_in_dim(x, first, chunk, 1)
        new = _sample(jnp.repeat(part(z).reshape(-1, v), g, 0), part(keys).reshape(-1), s, exact)
        put = lambda whole, x: jax.lax.dynamic_update_slice_in_dim(whole, x.reshape(shards, chunk, g), first, 1)
        return jax.tree.map(put, drawn, new)

    drawn = some(0, zeros) if chunk == rows else jax.lax.fori_loop(0, -(-rows // chunk), some, zeros)
    return tuple(x.reshape(n, g) for x in drawn)


def _sample(z: Array, keys: Array, s: Sampling, exact: bool) -> tuple[Array, Array, Array, Array]:
    if s.temperature == 0:
        token = jnp.argmax(z, -1).astype(jnp.int32)
        scored = models.logprob_of(z, token, exact)
        return token, jnp.zeros_like(scored), scored, scored
    tempered = z if s.temperature == 1 else numerics.fence(z * (1 / s.temperature))
    kept = truncate(tempered, s.top_k, s.top_p)
    perturbed = kept - numerics.log(-numerics.log(uniform(keys, z.shape[-1])))
    token = jnp.argmax(perturbed, -1).astype(jnp.int32)
    # A token drawn from what are no numbers is told by its logprob. (And read twice, the sum is computed in vectors, not inside argmax.)
    is_drawn = jnp.isfinite(jnp.take_along_axis(perturbed, token[:, None], 1)[:, 0])
    scored = jnp.where(is_drawn, models.logprob_of(z, token, exact), jnp.nan)
    at_temperature = scored if s.temperature == 1 else models.logprob_of(tempered, token, exact)
    sampled = at_temperature if kept is tempered else models.logprob_of(kept, token, exact)
    return token, sampled, at_temperature, scored

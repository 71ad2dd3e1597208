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

    Ties with the last one kept are kept. Cumulative probabilities add as integers.
    """
    if 0 < top_k < z.shape[-1]:
        z = jnp.where(z < jax.lax.top_k(z, top_k)[0][..., -1:], MASKED, z)
    if top_p < 1:
        ordered = jax.lax.top_k(z, z.shape[-1])[0]
        p = numerics.exp(ordered - ordered[..., :1])
        p = jnp.round(numerics.divide_rows(p, numerics.exact_sum(p)) * 2.0**24).astype(jnp.int32)
        before = jnp.cumsum(p, -1) - p
        kept = before < jnp.int32(max(1, round(top_p * 2.0**24)))  # the likeliest token is always kept
        z = jnp.where(z < jnp.min(jnp.where(kept, ordered, jnp.inf), -1, keepdims=True), MASKED, z)
    return z


@jax.named_scope("sample")
def sample(z: Array, keys: Array, s: Sampling, exact: bool) -> tuple[Array, Array, Array, Array]:
    """Draw a token from logits z [N, V] (Gumbel-max) with keys [N]: token, and its sampled, tempered and scored logprob, each [N]."""
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

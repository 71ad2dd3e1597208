"""The loss stage: sums over completion tokens, which the update divides by the number of tokens of the whole update."""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from rl_adapter.types import Array


@dataclasses.dataclass(frozen=True)
class GRPO:
    """Static settings of the loss."""

    clip_low: float
    clip_high: float
    kl: float  # coefficient of the KL from the reference
    measure_kl: bool = True  # score the base too where the coefficient is 0


def k3(logprob: Array, reference: Array) -> Array:
    """Non-negative estimate of KL(policy | reference) at sampled tokens: r - 1 - log r, r = reference / policy (Schulman 2020,
    joschu.net/blog/kl-approx.html). Unbiased where the tokens were sampled from the policy itself: temperature 1, no truncation."""
    log_ratio = reference - logprob
    return jnp.expm1(log_ratio) - log_ratio


def grpo(
    cfg: GRPO, tempered: Array, old_tempered: Array, scored: Array, reference: Array | None, advantage: Array, mask: Array
) -> tuple[Array, dict[str, Array]]:
    """Clipped surrogate (Schulman et al. 2017, arXiv:1707.06347) with a k3 penalty, summed over tokens.

    Args:
        tempered, old_tempered: [P, G, C] logprob at the sampling temperature, now and when sampled: their ratio weighs the sample.
        scored, reference: [P, G, C] logprob at temperature 1 of the policy and of the base (None: not scored, no penalty).
        advantage: [P, G].
        mask: [P, G, C] bool, True at sampled tokens. Masking comes before any arithmetic, so that padding may hold anything.

    Returns:
        The sum of losses, and sums for metrics.
    """
    chex.assert_equal_shape([tempered, old_tempered, scored, mask] + ([] if reference is None else [reference]))
    chex.assert_equal_shape_prefix([tempered, advantage], 2)
    log_ratio = jnp.where(mask, tempered - old_tempered, 0.0)
    ratio = jnp.exp(log_ratio)
    a = advantage[..., None]
    clipped = jnp.clip(ratio, 1 - cfg.clip_low, 1 + cfg.clip_high)
    surrogate = jnp.minimum(ratio * a, clipped * a)
    loss = jnp.where(mask, -surrogate, 0.0)
    count = lambda x: jax.lax.stop_gradient(jnp.sum(jnp.where(mask, x, 0.0)))
    metrics = {"ratio/mean": count(ratio), "ratio/clipped": count((ratio != clipped).astype(jnp.float32))}
    if reference is not None:
        kl = k3(jnp.where(mask, scored, 0.0), jnp.where(mask, jax.lax.stop_gradient(reference), 0.0))
        loss = jnp.where(mask, cfg.kl * kl + loss, 0.0)
        metrics["kl/ref"] = count(kl)
    return jnp.sum(loss), metrics

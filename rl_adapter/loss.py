"""The loss stage: what an update minimizes, as sums over the completion tokens of a batch.

Every token [P, G, C] has a weight, its share of the loss (`token_weights`); a token whose weight is 0 has none, and what stands there may
be anything: masking comes before any arithmetic. Weights are made of the whole update, so its microbatches cannot be seen in it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from rl_adapter.types import Array

KINDS = ("ppo", "gspo", "gspo_token", "cispo", "dpo", "ipo", "sft")
PREFERENCE = ("dpo", "ipo")
AGGREGATIONS = ("token", "sequence", "group", "constant")
ESTIMATORS = ("k1", "k2", "k3")
CORRECTIONS = ("none", "truncated", "masked", "icepop")


@dataclasses.dataclass(frozen=True)
class Loss:
    """Static settings.

    kind: of the surrogate, with r the ratio of a token's probability to that when it was sampled, and A its advantage:
        ppo         min(r A, clip(r) A) (Schulman et al. 2017, arXiv:1707.06347); GRPO, DAPO and the others differ in A and aggregation
        gspo        the same of one ratio a completion, the geometric mean of its tokens' (Zheng et al. 2025, arXiv:2507.18071)
        gspo_token  the value of gspo with each token's own gradient, for advantages that differ within a completion (there, eq. 13)
        cispo       A log p, weighed by the clipped ratio without its gradient (MiniMax-M1, arXiv:2506.13585)
        dpo, ipo    of pairs, chosen before rejected (Rafailov et al. 2023, arXiv:2305.18290; Azar et al. 2023, arXiv:2310.12036)
        sft         - log p
    """

    kind: str = "ppo"
    clip_low: float = 0.2  # ratios are clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2
    kl: float = 0.0  # coefficient of the KL from the reference
    kl_estimator: str = "k3"
    entropy: float = 0.0  # coefficient of a bonus
    beta: float = 0.1  # of dpo and ipo
    balance: float = 0.0  # coefficient of the load-balancing loss
    router_z: float = 0.0  # coefficient of the router's z-loss


def from_config(c) -> Loss:
    """From the `loss` section of a config."""
    in_loss = c.kl if c.kl_in == "loss" else 0.0
    return Loss(c.kind, c.clip_low, c.clip_high, in_loss, c.kl_estimator, c.entropy, c.beta, c.balance, c.router_z)


# Weights and importance, on the host, before an update


def token_weights(mask: np.ndarray, aggregation: str, longest: int) -> np.ndarray:
    """Each token's share of the loss: mask [P, G, C] -> f32, 0 outside of it.

    token     the mean over all tokens of the update (DAPO, arXiv:2503.14476)
    sequence  the mean over completions of the mean over a completion's tokens (GRPO, arXiv:2402.03300; GSPO)
    group     the mean over prompts of the mean over their completions' tokens
    constant  the sum over tokens, by `longest` tokens a completion: no completion's tokens count less for its length (Dr.GRPO,
              arXiv:2503.20783)

    Completions and prompts without a token in the mask are not counted.
    """
    tokens = mask.sum(-1, keepdims=True)  # [P, G, 1]
    completions = max(int((tokens > 0).sum()), 1)
    if aggregation == "token":
        each = 1 / max(int(mask.sum()), 1)
    elif aggregation == "sequence":
        each = 1 / (completions * np.maximum(tokens, 1))
    elif aggregation == "group":
        of_prompt = tokens.sum(1, keepdims=True)
        each = 1 / (max(int((of_prompt > 0).sum()), 1) * np.maximum(of_prompt, 1))
    elif aggregation == "constant":
        each = 1 / (completions * longest)
    else:
        raise ValueError(f"loss.aggregation: found {aggregation!r}, need one of {', '.join(AGGREGATIONS)}")
    return np.where(mask, each, 0.0).astype(np.float32)


def importance(proximal: np.ndarray, behaviour: np.ndarray, mask: np.ndarray, kind: str, low: float, high: float) -> np.ndarray:
    """What a token's advantage is multiplied by where it was sampled from another policy than the one that ratios are against.

    With k = exp(proximal - behaviour), all [P, G, C]:

    truncated  min(k, high) (Espeholt et al. 2018, arXiv:1802.01561; "TIS", Yao et al. 2025, fengyao.notion.site/off-policy-rl)
    masked     k where k <= high, else 0
    icepop     k where low <= k <= high, else 0 (Ling Team 2025, arXiv:2510.18855)
    """
    k = np.exp(np.where(mask, proximal, 0.0) - np.where(mask, behaviour, 0.0), dtype=np.float32)
    if kind == "truncated":
        k = np.minimum(k, np.float32(high))
    elif kind == "masked":
        k = np.where(k <= high, k, 0)
    elif kind == "icepop":
        k = np.where((low <= k) & (k <= high), k, 0)
    else:
        raise ValueError(f"loss.correction: found {kind!r}, need one of {', '.join(CORRECTIONS[1:])}")
    return np.where(mask, k, 0).astype(np.float32)


# Losses


def kl(logprob: Array, reference: Array, estimator: str) -> Array:
    """Estimates of KL(policy | reference) at tokens that the policy sampled (Schulman 2020, joschu.net/blog/kl-approx.html), with
    d = log policy - log reference; unbiased or nearly so where they were sampled at temperature 1, without truncation.

    k1  d: unbiased; as a loss its gradient is 0 on average, so it belongs into the reward
    k2  d^2 / 2: biased; as a loss its gradient is, on average, that of the KL
    k3  exp(-d) - 1 + d: unbiased, never negative
    """
    d = logprob - reference
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d * d / 2
    if estimator == "k3":
        return jnp.expm1(-d) + d
    raise ValueError(f"loss.kl_estimator: found {estimator!r}, need one of {', '.join(ESTIMATORS)}")


Terms = tuple[Array, dict[str, Array]]  # the loss, and sums over tokens for metrics


def surrogate(cfg: Loss, tempered: Array, old: Array, advantage: Array, weight: Array) -> Terms:
    """The policy-gradient part.

    Args:
        tempered, old: [P, G, C] logprob at the sampling temperature, now and when sampled.
        advantage, weight: [P, G, C].
    """
    mask = weight > 0
    log_ratio = jnp.where(mask, tempered - old, 0.0)
    a = jnp.where(mask, advantage, 0.0)
    if cfg.kind.startswith("gspo"):
        mean = jnp.sum(log_ratio, -1, keepdims=True) / jnp.maximum(jnp.sum(mask, -1, keepdims=True), 1)
        if cfg.kind == "gspo":
            log_ratio = jnp.broadcast_to(mean, log_ratio.shape)
        else:
            log_ratio = jax.lax.stop_gradient(mean - log_ratio) + log_ratio
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1 - cfg.clip_low, 1 + cfg.clip_high)
    if cfg.kind == "cispo":
        gain = jax.lax.stop_gradient(clipped) * a * jnp.where(mask, tempered, 0.0)
    else:
        gain = jnp.minimum(ratio * a, clipped * a)
    sums = {"ratio/mean": ratio, "ratio/clipped": (ratio != clipped).astype(jnp.float32)}
    return -jnp.sum(weight * gain), _sums(sums, mask)


def penalty(cfg: Loss, scored: Array, reference: Array, weight: Array) -> Terms:
    """The KL from the reference, both at temperature 1 [P, G, C]; the metric is k3 whatever the estimator."""
    mask = weight > 0
    scored, reference = jnp.where(mask, scored, 0.0), jnp.where(mask, jax.lax.stop_gradient(reference), 0.0)
    loss = cfg.kl * jnp.sum(weight * kl(scored, reference, cfg.kl_estimator)) if cfg.kl else 0.0
    return loss, _sums({"kl/ref": kl(scored, reference, "k3")}, mask)


def preference(cfg: Loss, scored: Array, reference: Array, weight: Array) -> Terms:
    """DPO or IPO of pairs.

    Args:
        scored, reference: [P, 2, C] logprob at temperature 1 of the chosen and the rejected completion.
        weight: [P, 2, C]: of its tokens that count, all the same: the pair's share. 0: not of the pair. So a KL or an entropy beside it is
            a sum over the pair's tokens, not a mean.
    """
    mask = weight > 0
    of_pair = jnp.max(weight, (1, 2))
    gain = jnp.sum(jnp.where(mask, scored - jax.lax.stop_gradient(reference), 0.0), -1)  # [P, 2]
    margin = gain[:, 0] - gain[:, 1]
    loss = jax.nn.softplus(-cfg.beta * margin) if cfg.kind == "dpo" else (margin - 1 / (2 * cfg.beta)) ** 2
    there = of_pair > 0
    sums = {"preference/accuracy": margin > 0, "preference/margin": cfg.beta * margin}
    sums |= {"preference/chosen": cfg.beta * gain[:, 0], "preference/rejected": cfg.beta * gain[:, 1]}
    return jnp.sum(of_pair * loss), _sums(sums, there)


def likelihood(scored: Array, weight: Array) -> Terms:
    """Supervised fine-tuning: scored, weight [P, G, C]."""
    mask = weight > 0
    scored = jnp.where(mask, scored, 0.0)
    return -jnp.sum(weight * scored), _sums({"sft/nll": -scored}, mask)


def balance(loads: Array, probabilities: Array, tokens: Array) -> Array:
    """Load-balancing loss (Fedus et al. 2021, arXiv:2101.03961): E sum_e f_e p_e, mean over layers; 1 where all experts get the same.

    Args:
        loads: [Ls, E] routed pairs of each expert, of all that is balanced. No gradient.
        probabilities: [Ls, E] router probabilities, summed over tokens, of any part of it.
        tokens: [] of all of it; so the parts' losses add up to the whole's.
    """
    share = jax.lax.stop_gradient(loads) / jnp.maximum(jnp.sum(loads, -1, keepdims=True), 1)
    return loads.shape[1] * jnp.mean(jnp.sum(share * probabilities, -1)) / jnp.maximum(tokens, 1)


def value(values: Array, old: Array, returns: Array, weight: Array, clip: float) -> Terms:
    """A critic's squared error, clipped around its values `old` from before the update (Schulman et al. 2017; arXiv:2006.05990), all
    [P, G, C]."""
    mask = weight > 0
    values, old, returns = (jnp.where(mask, x, 0.0) for x in (values, old, returns))
    near = old + jnp.clip(values - old, -clip, clip)
    error = jnp.maximum((values - returns) ** 2, (near - returns) ** 2) / 2
    return jnp.sum(weight * error), _sums({"critic/error": (values - returns) ** 2, "critic/value": values}, mask)


def bradley_terry(scores: Array, weight: Array) -> Terms:
    """A reward model's loss on pairs (Bradley and Terry 1952; Christiano et al. 2017, arXiv:1706.03741): scores [P, 2] of the chosen and
    the rejected completion, weight [P]."""
    there = weight > 0
    margin = jnp.where(there, scores[:, 0] - scores[:, 1], 0.0)
    return jnp.sum(weight * jax.nn.softplus(-margin)), _sums({"preference/accuracy": margin > 0, "preference/margin": margin}, there)


def _sums(values: dict[str, Array], mask: Array) -> dict[str, tuple[Array, Array]]:
    """Of each, the sum over the mask and what it is the sum of: their ratio is a mean that microbatches and devices cannot change."""
    count = jnp.sum(mask).astype(jnp.float32)
    return {name: (jax.lax.stop_gradient(jnp.sum(jnp.where(mask, x, 0.0))), count) for name, x in values.items()}

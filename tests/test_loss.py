"""Losses against float64 loops, token by token, in value and gradient; padding may hold anything."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_adapter import loss

f32 = np.float32
C = 7
GARBAGE = np.array([np.nan, np.inf, -np.inf, 1e30, 0])
clip = lambda x, low, high: min(max(x, low), high)


def batch(seed, p=3, g=4):
    """Logprobs close to each other, ragged lengths (one of them 0), holes as environments leave them, and garbage outside the mask."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, C + 1, (p, g))
    lengths[0, 0], lengths[-1, -1] = 0, C
    mask = (np.arange(C) < lengths[..., None]) & (rng.uniform(size=(p, g, C)) < 0.9)
    mask[-1, -1, 0] = True
    now = -rng.exponential(size=mask.shape)
    near = lambda: now + 0.3 * rng.normal(size=mask.shape)
    spoil = lambda x: np.where(mask, x, GARBAGE[rng.integers(5, size=x.shape)]).astype(f32)
    arrays = {"now": spoil(now), "old": spoil(near()), "reference": spoil(near()), "advantage": spoil(rng.normal(size=mask.shape))}
    weight = np.where(mask, rng.uniform(0.1, 1, mask.shape), 0).astype(f32)
    return mask, weight, arrays


def naive_surrogate(cfg, mask, weight, now, old, advantage):
    """One completion at a time."""
    total, ratios, clipped_ones = 0.0, 0.0, 0
    for i in np.ndindex(mask.shape[:2]):
        own = mask[i]
        if not own.any():
            continue
        logs = [float(now[i][t]) - float(old[i][t]) for t in np.flatnonzero(own)]
        for t, log_ratio in zip(np.flatnonzero(own), logs):
            a, w = float(advantage[i][t]), float(weight[i][t])
            ratio = np.exp(np.mean(logs) if cfg.kind.startswith("gspo") else log_ratio)
            bounded = clip(ratio, 1 - cfg.clip_low, 1 + cfg.clip_high)
            gain = bounded * a * float(now[i][t]) if cfg.kind == "cispo" else min(ratio * a, bounded * a)
            total -= w * gain
            ratios += ratio
            clipped_ones += ratio != bounded
    return total, ratios / mask.sum(), clipped_ones / mask.sum()


def slopes(value, x, mask, some):
    """Central differences of a float64 function at some tokens of the mask."""
    found = {}
    for i in map(tuple, np.argwhere(mask)[::some]):
        ends = []
        for h in (-1e-5, 1e-5):
            moved = x.astype(np.float64)
            moved[i] += h
            ends.append(value(moved))
        found[i] = (ends[1] - ends[0]) / 2e-5
    return found


@functools.partial(jax.jit, static_argnums=0)
def run_surrogate(cfg, now, old, advantage, weight):
    return jax.value_and_grad(lambda x: loss.surrogate(cfg, x, old, advantage, weight), has_aux=True)(now)


SURROGATES = [
    loss.Loss("ppo", 0.2, 0.28), loss.Loss("ppo", 0.0, 0.5), loss.Loss("gspo", 0.05, 0.1), loss.Loss("gspo_token", 0.05, 0.1),
    loss.Loss("cispo", 0.9, 0.2),
]  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cfg", SURROGATES, ids=lambda cfg: f"{cfg.kind}-{cfg.clip_low}")
def test_surrogates(cfg, seed):
    mask, weight, b = batch(seed)
    (found, sums), grad = run_surrogate(cfg, b["now"], b["old"], b["advantage"], weight)
    expected, mean, clipped = naive_surrogate(cfg, mask, weight, b["now"], b["old"], b["advantage"])
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    (total, count), (outside, _) = sums["ratio/mean"], sums["ratio/clipped"]
    np.testing.assert_allclose([total / count, outside / count], [mean, clipped], rtol=1e-6)
    grad = np.asarray(grad)
    assert not grad[~mask].any()
    if cfg.kind == "cispo":  # the ratio has no gradient: that of A log p, weighed
        ratio = np.exp((np.where(mask, b["now"], 0) - np.where(mask, b["old"], 0)).astype(np.float64))
        wanted = -weight * np.clip(ratio, 1 - cfg.clip_low, 1 + cfg.clip_high) * np.where(mask, b["advantage"], 0)
        np.testing.assert_allclose(grad, wanted, rtol=1e-5, atol=1e-7)
    elif cfg.kind == "gspo_token":  # each token its own: s_i A_t, where the ratio of the completion is not clipped
        mean = (np.where(mask, b["now"], 0) - np.where(mask, b["old"], 0)).astype(np.float64).sum(-1) / np.maximum(mask.sum(-1), 1)
        ratio, a = np.exp(mean)[..., None], np.where(mask, b["advantage"], 0)
        kept = np.where(a > 0, ratio <= 1 + cfg.clip_high, ratio >= 1 - cfg.clip_low)
        np.testing.assert_allclose(grad, -weight * ratio * a * kept, rtol=1e-5, atol=1e-7)
    else:
        value = lambda now: naive_surrogate(cfg, mask, weight, now, b["old"], b["advantage"])[0]
        for i, slope in slopes(value, b["now"], mask, 5).items():
            np.testing.assert_allclose(grad[i], slope, rtol=1e-4, atol=1e-5)


def test_equal_policies_give_policy_gradients():
    """Where nothing has moved yet every kind's gradient is that of the weighed A log p."""
    mask, _, b = batch(5)
    weight = loss.token_weights(mask, "sequence", C)
    of_completion = np.where(mask, b["advantage"], 0).sum(-1, keepdims=True)  # else gspo's is another
    b["advantage"] = np.where(mask, of_completion, np.nan).astype(f32)
    for kind in ("ppo", "gspo", "gspo_token", "cispo"):
        _, grad = run_surrogate(loss.Loss(kind), b["now"], b["now"], b["advantage"], weight)
        np.testing.assert_allclose(grad, -weight * np.where(mask, b["advantage"], 0), rtol=1e-5, atol=1e-7, err_msg=kind)


@pytest.mark.parametrize(
    "ratio, advantage, loss_, slope",  # slope: of the loss in the logprob
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.6, 0.0),  # enough up: clipped at 1.3
        (0.5, 2.0, -1.0, -1.0),  # a good token that became rare is pushed back
        (1.5, -2.0, 3.0, 3.0),  # a bad token that became likely is pushed back
        (0.9, -2.0, 1.8, 1.8),
        (0.5, -2.0, 1.6, 0.0),  # enough down: clipped at 0.8
        (0.5, 0.0, 0.0, 0.0),
    ],
)
def test_clipping(ratio, advantage, loss_, slope):
    cell = lambda x: np.full((1, 1, 1), x, f32)
    (value, sums), grad = run_surrogate(loss.Loss("ppo", 0.2, 0.3), cell(np.log(ratio) - 1), cell(-1), cell(advantage), cell(1))
    np.testing.assert_allclose([value, grad[0, 0, 0]], [loss_, slope], rtol=1e-5, atol=1e-6)
    assert sums["ratio/clipped"][0] == (ratio in (1.5, 0.5))


# The KL


@pytest.mark.parametrize("estimator", loss.ESTIMATORS)
def test_kl_penalty(estimator):
    """In value and gradient, and nothing from where the mask is not, whatever stands there."""
    mask, weight, b = batch(1)
    cfg = loss.Loss(kl=0.7, kl_estimator=estimator)
    run = jax.jit(jax.value_and_grad(lambda x, y: loss.penalty(cfg, x, y, weight), argnums=(0, 1), has_aux=True))
    (found, sums), (grad, to_reference) = run(b["now"], b["reference"])
    d = (np.where(mask, b["now"], 0) - np.where(mask, b["reference"], 0)).astype(np.float64)
    value = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d}
    slope = {"k1": np.ones_like(d), "k2": d, "k3": 1 - np.exp(-d)}[estimator]
    np.testing.assert_allclose(found, 0.7 * np.sum(weight * value[estimator]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grad, 0.7 * weight * slope, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(sums["kl/ref"][0], value["k3"][mask].sum(), rtol=1e-5)
    assert sums["kl/ref"][1] == mask.sum() and not np.asarray(to_reference).any()


def test_what_the_kl_estimators_estimate():
    """Over all tokens, weighed by the policy: k1 and k3 are the KL; k2's gradient is the KL's, and k1's is nothing."""
    rng = np.random.default_rng(0)
    logits, q = rng.normal(size=50), rng.dirichlet(np.ones(50))
    p = np.exp(logits) / np.exp(logits).sum()
    kl = np.sum(p * np.log(p / q))
    mean = lambda x, estimator: jnp.sum(p * loss.kl(jax.nn.log_softmax(x), jnp.log(q), estimator))  # at tokens that p samples
    for estimator in ("k1", "k3"):
        np.testing.assert_allclose(mean(jnp.array(logits), estimator), kl, rtol=1e-4)
    exact = jax.grad(lambda x: jnp.sum(jax.nn.softmax(x) * (jax.nn.log_softmax(x) - jnp.log(q))))(jnp.array(logits))
    np.testing.assert_allclose(jax.grad(mean)(jnp.array(logits), "k2"), exact, atol=1e-6)
    np.testing.assert_allclose(jax.grad(mean)(jnp.array(logits), "k1"), 0, atol=1e-6)


def test_k3_is_never_negative():
    """Also for policies that hardly differ."""
    rng = np.random.default_rng(0)
    log_p = -rng.exponential(size=4000).astype(f32)
    log_q = (log_p + rng.choice([-1, 1], 4000) * 10 ** rng.uniform(-7, 1, 4000)).astype(f32)
    found, same = jax.jit(lambda p, q: (loss.kl(p, q, "k3"), loss.kl(p, p, "k3")))(log_p, log_q)
    d = log_q.astype(np.float64) - log_p
    assert (np.asarray(found) >= 0).all() and not np.asarray(same).any()
    assert (np.abs(found - (np.expm1(d) - d)) <= 1e-6 * np.abs(np.expm1(d))).all()


# Pairs, supervision, critics


@pytest.mark.parametrize("kind", loss.PREFERENCE)
def test_preference(kind):
    """Pairs one by one; a prompt without a pair is in no mean."""
    mask, _, b = batch(2, p=6, g=2)
    mask[..., 0], mask[3] = True, False
    for x in (b["now"], b["reference"]):
        x[..., 0] = -0.7
    pairs = mask.any(-1).all(-1)
    assert 2 < pairs.sum() < 6
    weight = np.where(mask & pairs[:, None, None], 1 / pairs.sum(), 0).astype(f32)
    cfg = loss.Loss(kind, beta=0.3)

    def naive(now):
        total = 0.0
        for p in np.flatnonzero(pairs):
            gains = [sum(float(now[p, g, t]) - float(b["reference"][p, g, t]) for t in np.flatnonzero(mask[p, g])) for g in (0, 1)]
            margin = gains[0] - gains[1]
            total += np.log1p(np.exp(-0.3 * margin)) if kind == "dpo" else (margin - 1 / 0.6) ** 2
        return total / pairs.sum()

    run = jax.jit(jax.value_and_grad(lambda x: loss.preference(cfg, x, b["reference"], weight), has_aux=True))
    (found, sums), grad = run(b["now"])
    np.testing.assert_allclose(found, naive(b["now"]), rtol=1e-5)
    assert not np.asarray(grad)[weight == 0].any() and sums["preference/accuracy"][1] == pairs.sum()
    for i, slope in slopes(naive, b["now"], weight > 0, 3).items():
        np.testing.assert_allclose(grad[i], slope, rtol=1e-3, atol=1e-5)


def test_likelihood():
    mask, weight, b = batch(3)
    (found, sums), grad = jax.value_and_grad(lambda x: loss.likelihood(x, weight), has_aux=True)(b["now"])
    np.testing.assert_allclose(found, -np.sum(weight[mask] * b["now"][mask].astype(np.float64)), rtol=1e-6)
    np.testing.assert_array_equal(grad, -weight)
    np.testing.assert_allclose(sums["sft/nll"][0] / sums["sft/nll"][1], -b["now"][mask].mean(), rtol=1e-5)


def test_value():
    mask, weight, b = batch(4)

    def naive(values):
        total = 0.0
        for i in map(tuple, np.argwhere(mask)):
            v, old, r = (float(x[i]) for x in (values, b["old"], b["reference"]))
            total += weight[i] * max((v - r) ** 2, (clip(v, old - 0.2, old + 0.2) - r) ** 2) / 2
        return total

    run = jax.value_and_grad(lambda x: loss.value(x, b["old"], b["reference"], weight, 0.2), has_aux=True)
    (found, _), grad = run(b["now"])
    np.testing.assert_allclose(found, naive(b["now"]), rtol=1e-5)
    assert not np.asarray(grad)[~mask].any()
    v, old, r = (np.where(mask, b[n], 0).astype(np.float64) for n in ("now", "old", "reference"))
    held_back = (np.clip(v, old - 0.2, old + 0.2) - r) ** 2 > (v - r) ** 2
    np.testing.assert_allclose(grad, np.where(held_back, 0, weight * (v - r)), rtol=1e-4, atol=1e-6)
    assert 0 < held_back[mask].sum() < mask.sum()


def test_bradley_terry():
    rng = np.random.default_rng(0)
    scores, weight = rng.normal(size=(5, 2)).astype(f32), np.array([0.5, 0.25, 0, 0.25, 0], f32)
    scores[2], scores[4] = np.nan, np.inf
    (found, sums), grad = jax.value_and_grad(lambda s: loss.bradley_terry(s, weight), has_aux=True)(scores)
    margin = scores[weight > 0] @ np.array([1.0, -1.0])
    np.testing.assert_allclose(found, np.sum(weight[weight > 0] * np.log1p(np.exp(-margin))), rtol=1e-6)
    slope = -weight[weight > 0] / (1 + np.exp(margin))
    np.testing.assert_allclose(grad[weight > 0], np.stack([slope, -slope], 1), rtol=1e-5)
    assert not np.asarray(grad)[weight == 0].any()
    assert sums["preference/accuracy"][0] == (margin > 0).sum() and sums["preference/accuracy"][1] == 3


def test_balance():
    """By hand; 1 where all experts get the same; and in parts what it is as a whole, as are its gradients."""
    rng = np.random.default_rng(0)
    loads, p = rng.integers(0, 9, (2, 4)).astype(f32), rng.dirichlet(np.ones(4), (2, 10)).astype(f32)
    whole, grad = jax.value_and_grad(lambda p: loss.balance(loads, p.sum(1), f32(10)))(p)
    expected = np.mean([4 * np.sum(loads[i] / loads[i].sum() * p[i].mean(0)) for i in range(2)])
    np.testing.assert_allclose(whole, expected, rtol=1e-6)
    np.testing.assert_allclose(sum(loss.balance(loads, p[:, s].sum(1), f32(10)) for s in (slice(3), slice(3, 10))), whole, rtol=1e-6)
    np.testing.assert_allclose(grad, np.broadcast_to((loads / loads.sum(1, keepdims=True))[:, None] * 4 / 20, p.shape), rtol=1e-5)
    np.testing.assert_allclose(loss.balance(np.ones((2, 4), f32), np.full((2, 4), 2.5, f32), f32(10)), 1, rtol=1e-6)


# Weights and importance


@pytest.mark.parametrize("seed", range(5))
def test_token_weights(seed):
    """Every denominator counts what its numerator has, and nothing else."""
    mask, _, b = batch(seed, p=4)
    mask[1] = False  # a prompt that has nothing, say because all its completions were cut
    x = np.where(mask, b["advantage"], 0).astype(np.float64)
    mean = lambda over: float(np.sum(loss.token_weights(mask, over, 11) * x))
    own = [(x[i][mask[i]]) for i in np.ndindex(mask.shape[:2]) if mask[i].any()]
    groups = [x[p][mask[p]] for p in range(4) if mask[p].any()]
    np.testing.assert_allclose(mean("token"), x[mask].mean(), rtol=1e-5)
    np.testing.assert_allclose(mean("sequence"), np.mean([y.mean() for y in own]), rtol=1e-5)
    np.testing.assert_allclose(mean("group"), np.mean([y.mean() for y in groups]), rtol=1e-5)
    np.testing.assert_allclose(mean("constant"), np.mean([y.sum() / 11 for y in own]), rtol=1e-5)
    for over in loss.AGGREGATIONS:
        w = loss.token_weights(mask, over, 11)
        assert (w > 0).tolist() == mask.tolist() and w.dtype == f32
        assert over == "constant" or w.sum() == pytest.approx(1, rel=1e-5)
        assert not loss.token_weights(np.zeros_like(mask), over, 11).any()
    with pytest.raises(ValueError, match="loss.aggregation: found 'mean'"):
        loss.token_weights(mask, "mean", 11)


@pytest.mark.parametrize("kind", loss.CORRECTIONS[1:])
def test_importance(kind):
    mask, _, b = batch(6)
    found = loss.importance(b["now"], b["old"], mask, kind, 0.8, 1.3)
    for i in np.ndindex(mask.shape):
        k = np.exp(float(b["now"][i]) - float(b["old"][i])) if mask[i] else 0.0
        expected = {"truncated": min(k, 1.3), "masked": k if k <= 1.3 else 0, "icepop": k if 0.8 <= k <= 1.3 else 0}[kind]
        assert found[i] == pytest.approx(expected, rel=1e-5), i
    same = loss.importance(b["old"], b["old"], mask, kind, 0.8, 1.3)
    np.testing.assert_array_equal(same, mask)  # of one's own completions: exactly 1
    with pytest.raises(ValueError, match="loss.correction"):
        loss.importance(b["now"], b["old"], mask, "none", 0.8, 1.3)

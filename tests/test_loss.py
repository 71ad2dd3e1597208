"""The loss against a float64 loop and by hand; padding may hold anything."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_adapter import loss

f32 = np.float32
P, G, C = 3, 4, 7
NAMES = ("tempered", "old_tempered", "scored", "reference")


def batch(seed):
    """Logprobs close to each other, ragged lengths (one of them 0), and garbage beyond them."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, C + 1, (P, G))
    lengths[0, 0], lengths[-1, -1] = 0, C
    mask = np.arange(C) < lengths[..., None]
    scored = -rng.exponential(size=(P, G, C))
    tables = [scored + 0.3 * rng.normal(size=scored.shape) for _ in range(3)]
    garbage = np.array([np.nan, np.inf, -np.inf, 1e30, 0])
    spoil = lambda x: np.where(mask, x, garbage[rng.integers(5, size=x.shape)]).astype(f32)
    arrays = {n: spoil(x) for n, x in zip(NAMES, (*tables[:2], scored, tables[2]))}
    return arrays | {"advantage": rng.normal(size=(P, G)).astype(f32), "mask": mask}


def expected(cfg, b):
    """The sum of losses and the sums of the metrics, token by token."""
    total, metrics = 0.0, {"kl/ref": 0.0, "ratio/mean": 0.0, "ratio/clipped": 0.0}
    for i in np.ndindex(b["mask"].shape):
        if not b["mask"][i]:
            continue
        tempered, old, scored, reference = (float(b[n][i]) for n in NAMES)
        a, ratio = float(b["advantage"][i[:2]]), np.exp(tempered - old)
        clipped = min(max(ratio, 1 - cfg.clip_low), 1 + cfg.clip_high)
        kl = np.exp(reference - scored) - 1 - (reference - scored)
        total += cfg.kl * kl - min(ratio * a, clipped * a)
        metrics["kl/ref"] += kl
        metrics["ratio/mean"] += ratio
        metrics["ratio/clipped"] += ratio != clipped
    return total, metrics


@jax.jit
def run(low, high, kl, b):
    rest = [b[n] for n in ("old_tempered", "reference", "advantage", "mask")]

    def value(tempered, scored):
        old, reference, advantage, mask = rest
        return loss.grpo(loss.GRPO(low, high, kl), tempered, old, scored, reference, advantage, mask)

    return jax.value_and_grad(value, argnums=(0, 1), has_aux=True)(b["tempered"], b["scored"])


CONFIGS = [loss.GRPO(0.2, 0.2, 0.0), loss.GRPO(0.2, 0.28, 0.1), loss.GRPO(0.0, 0.5, 2.0)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cfg", CONFIGS, ids=str)
def test_loop(cfg, seed):
    b = batch(seed)
    (value, metrics), grads = run(cfg.clip_low, cfg.clip_high, cfg.kl, b)
    total, sums = expected(cfg, b)
    size = b["mask"].sum()
    np.testing.assert_allclose(value / size, total / size, rtol=1e-6, atol=1e-6)
    for name, found in metrics.items():
        np.testing.assert_allclose(found, sums[name], rtol=1e-5, err_msg=name)
    # Central differences of the loop; random numbers are not at a kink.
    for name, grad in zip(("tempered", "scored"), grads):
        assert not np.asarray(grad)[~b["mask"]].any()
        for i in np.argwhere(b["mask"])[::5]:
            ends = []
            for h in (-1e-5, 1e-5):
                moved = {k: v.astype(np.float64) for k, v in b.items() if k != "mask"} | {"mask": b["mask"]}
                moved[name][tuple(i)] += h
                ends.append(expected(cfg, moved)[0])
            np.testing.assert_allclose(grad[tuple(i)], (ends[1] - ends[0]) / 2e-5, rtol=1e-4, atol=1e-5)


def test_padding_cannot_be_seen():
    b = batch(0)
    clean = {k: np.where(b["mask"], v, 0) if k in NAMES else v for k, v in b.items()}
    for found, same in zip(jax.tree.leaves(run(0.2, 0.28, 0.1, b)), jax.tree.leaves(run(0.2, 0.28, 0.1, clean))):
        np.testing.assert_array_equal(found, same)


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
    b = dict(tempered=cell(np.log(ratio) - 1), old_tempered=cell(-1), scored=cell(-2), reference=cell(-2))
    b |= dict(advantage=np.full((1, 1), advantage, f32), mask=np.ones((1, 1, 1), bool))
    (value, metrics), (grad, by_scored) = run(0.2, 0.3, 1.0, b)
    np.testing.assert_allclose([value, grad[0, 0, 0]], [loss_, slope], rtol=1e-5, atol=1e-6)
    assert by_scored[0, 0, 0] == 0 and metrics["kl/ref"] == 0
    assert metrics["ratio/clipped"] == (ratio in (1.5, 0.5))


def test_k3():
    """Never negative, also for policies that hardly differ; and without bias: its mean under the policy is the KL."""
    rng = np.random.default_rng(0)
    log_p = -rng.exponential(size=4000).astype(f32)
    log_q = (log_p + rng.choice([-1, 1], 4000) * 10 ** rng.uniform(-7, 1, 4000)).astype(f32)
    found, same = jax.jit(lambda p, q: (loss.k3(p, q), loss.k3(p, p)))(log_p, log_q)
    d = log_q.astype(np.float64) - log_p
    assert (np.asarray(found) >= 0).all() and not np.asarray(same).any()
    assert (np.abs(found - (np.expm1(d) - d)) <= 1e-6 * np.abs(np.expm1(d))).all()
    p, q = rng.dirichlet(np.ones(50), 2)
    np.testing.assert_allclose(np.sum(p * loss.k3(jnp.log(p), jnp.log(q))), np.sum(p * np.log(p / q)), rtol=1e-4)

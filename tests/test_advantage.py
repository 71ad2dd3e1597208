"""Advantages by hand and against loops over ragged batches."""

import numpy as np
import pytest

from rl_adapter import advantage
from rl_adapter.advantage import estimate

f32 = np.float32
WHOLE = np.ones((2, 1), bool)


def of_rewards(estimator, rewards, eps=1e-9, **more):
    """[P, G], of completions of one token each."""
    rewards = np.asarray(rewards, f32)
    return estimate(estimator, rewards, np.ones((*rewards.shape, 1), bool), eps=eps, **more)[..., 0]


def ragged(seed, p=3, g=4, c=6):
    """Rewards, a mask with holes and an empty completion, token rewards and values with garbage outside of it."""
    rng = np.random.default_rng(seed)
    mask = (np.arange(c) < rng.integers(1, c + 1, (p, g, 1))) & (rng.uniform(size=(p, g, c)) < 0.8)
    mask[0, 0] = False
    spoil = lambda x: np.where(mask, x, np.nan)
    return rng.integers(0, 3, (p, g)).astype(f32), mask, spoil(rng.normal(size=mask.shape)), spoil(rng.normal(size=mask.shape))


@pytest.mark.parametrize(
    "rewards, expected",
    [
        ([0, 1], [-1, 1]),
        ([0, 0, 0, 1], np.array([-1, -1, -1, 3]) / 3**0.5),
        ([1, 3, 5, 7], np.array([-3, -1, 1, 3]) / 5**0.5),
        ([-1, 2, -1], np.array([-1, 2, -1]) / 2**0.5),
    ],
)
def test_grpo(rewards, expected):
    found = of_rewards("grpo", [rewards, rewards[::-1]])
    np.testing.assert_allclose(found, [expected, expected[::-1]], rtol=1e-6)
    assert found.dtype == f32
    np.testing.assert_allclose(of_rewards("grpo", [[0, 1]], eps=0.5), [[-0.5, 0.5]])  # eps is in units of reward


def test_dr_grpo_and_rloo():
    np.testing.assert_allclose(of_rewards("dr_grpo", [[0, 0, 0, 1], [1, 3, 5, 7]]), [[-0.25, -0.25, -0.25, 0.75], [-3, -1, 1, 3]])
    found, rewards = of_rewards("rloo", [[0, 0, 0, 1], [1, 3, 5, 7]]), np.array([[0, 0, 0, 1], [1, 3, 5, 7]])
    for p, g in np.ndindex(2, 4):
        assert found[p, g] == pytest.approx(rewards[p, g] - np.delete(rewards[p], g).mean(), abs=1e-6)


@pytest.mark.parametrize("estimator", advantage.OF_GROUPS)
@pytest.mark.parametrize("reward", (0.0, 1.0, 0.1, 1 / 3, -7.7))
def test_equal_rewards_are_exactly_worth_nothing(estimator, reward):
    """Also where the mean of equal numbers is not that number (0.1, seven times); and 0 is a reward like another."""
    rewards = np.full((3, 7), reward, f32)
    assert advantage.mixed(rewards).tolist() == [False] * 3
    if estimator != "reinforce_pp_baseline":  # which is normalized over the batch after
        rewards[1, 2] += 1
        found = of_rewards(estimator, rewards)
        assert (found[[0, 2]] == 0).all() and (found[1] != 0).all()
        assert advantage.mixed(rewards).tolist() == [False, True, False]
    else:
        assert (of_rewards(estimator, rewards) == 0).all()


@pytest.mark.parametrize("estimator", ("grpo", "dr_grpo", "rloo"))
def test_groups_do_not_mix(estimator):
    rewards = np.random.default_rng(0).uniform(size=(5, 6)).astype(f32)
    found = of_rewards(estimator, rewards, 1e-4)
    for row, alone in zip(found, rewards):
        np.testing.assert_array_equal(row, of_rewards(estimator, alone[None], 1e-4)[0])
    np.testing.assert_allclose(found.mean(1), 0, atol=1e-6)


@pytest.mark.parametrize("estimator", advantage.OF_GROUPS)
def test_a_group_needs_two(estimator):
    with pytest.raises(ValueError, match=f"rollout.group: found 1, need at least 2 for {estimator}"):
        of_rewards(estimator, np.zeros((4, 1)))
    for other in ("reinforce_pp", "distill"):
        assert of_rewards(other, np.zeros((4, 1))).shape == (4, 1)


def naive_to_go(rewards, mask, of_tokens, gamma):
    out = np.zeros(mask.shape)
    for i in np.ndindex(mask.shape[:2]):
        steps = np.flatnonzero(mask[i])
        earned = [of_tokens[i][t] + (rewards[i] if t == steps[-1] else 0) for t in steps]
        for n, t in enumerate(steps):
            out[i][t] = sum(gamma**k * r for k, r in enumerate(earned[n:]))
    return out


def whitened(x, mask, eps):
    return np.where(mask, (x - x[mask].mean()) / (x[mask].std() + eps), 0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("estimator", advantage.ESTIMATORS)
def test_estimators_of_ragged_batches(estimator, seed):
    """To 1e-6 of loops over sampled tokens; what stands elsewhere is nobody's business."""
    rewards, mask, of_tokens, values = ragged(seed)
    found = estimate(estimator, rewards, mask, of_tokens, values, eps=1e-3, gamma=0.9, lam=0.8)
    kls = np.where(mask, of_tokens, 0)
    expected = np.zeros(mask.shape)
    if estimator in ("grpo", "dr_grpo", "rloo"):
        for p in range(3):
            r = rewards[p] + kls[p].sum(-1)
            for g in range(4):
                centre = np.delete(r, g).mean() if estimator == "rloo" else r.mean()
                expected[p, g] = (r[g] - centre) / (r.std() + 1e-3 if estimator == "grpo" else 1)
        expected *= mask
    elif estimator == "reinforce_pp":
        expected = whitened(naive_to_go(rewards, mask, kls, 0.9), mask, 1e-3)
    elif estimator == "reinforce_pp_baseline":
        of_group = np.where(np.ptp(rewards, 1, keepdims=True) > 0, rewards - rewards.mean(1, keepdims=True), 0)
        expected = whitened(of_group[..., None] + naive_to_go(np.zeros((3, 4)), mask, kls, 0.9), mask, 1e-3)
    elif estimator == "gae":
        raw = naive_gae(rewards, mask, kls, values, 0.9, 0.8)
        expected = whitened(raw, mask, 1e-3)
        np.testing.assert_allclose(
            advantage.returns(rewards, mask, of_tokens, values, 0.9, 0.8), np.where(mask, raw + np.where(mask, values, 0), 0), atol=1e-6
        )
    else:
        expected = kls
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert found.dtype == f32 and not found[~mask].any()


def naive_gae(rewards, mask, of_tokens, values, gamma, lam):
    """The definition: discounted sums of temporal differences, over sampled tokens alone."""
    out = np.zeros(mask.shape)
    for i in np.ndindex(mask.shape[:2]):
        steps = np.flatnonzero(mask[i])
        v = [values[i][t] for t in steps] + [0.0]
        r = [of_tokens[i][t] + (rewards[i] if t == steps[-1] else 0) for t in steps]
        deltas = [r[n] + gamma * v[n + 1] - v[n] for n in range(len(steps))]
        for n, t in enumerate(steps):
            out[i][t] = sum((gamma * lam) ** k * d for k, d in enumerate(deltas[n:]))
    return out


def test_gae_by_hand():
    """One token: reward less value; two: with lam 0 the first looks one step ahead."""
    mask, values = np.array([[[True, True]]]), np.array([[[0.25, 0.5]]])
    found = advantage.gae(np.array([[[0.0, 1.0]]]), values, mask, 1.0, 0.0)
    np.testing.assert_allclose(found, [[[0.25, 0.5]]])
    np.testing.assert_allclose(advantage.gae(np.array([[[0.0, 1.0]]]), values, mask, 1.0, 1.0), [[[0.75, 0.5]]])
    with pytest.raises(ValueError, match="found 'gae' without a critic's values"):
        estimate("gae", np.zeros((1, 1)), mask)


def test_overlong():
    """Falls in a line over the buffer, and nothing before it."""
    lengths = np.array([[1, 6, 7, 8, 9, 10]])
    np.testing.assert_allclose(advantage.overlong(lengths, 10, 4, 2.0), [[0, 0, -0.5, -1, -1.5, -2]])
    assert not advantage.overlong(lengths, 10, 0, 2.0).any()


def test_unknown():
    with pytest.raises(ValueError, match="advantage.estimator: found 'ppo'"):
        estimate("ppo", np.zeros((1, 2)), np.ones((1, 2, 1), bool))

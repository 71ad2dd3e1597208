"""Group-normalized advantages by hand."""

import numpy as np
import pytest

from rl_adapter.advantage import group_normalized


@pytest.mark.parametrize(
    "rewards, expected",
    [
        ([0, 1], [-1, 1]),
        ([0, 0, 0, 1], np.array([-1, -1, -1, 3]) / 3**0.5),
        ([1, 3, 5, 7], np.array([-3, -1, 1, 3]) / 5**0.5),
        ([-1, 2, -1], np.array([-1, 2, -1]) / 2**0.5),
    ],
)
def test_table(rewards, expected):
    found = group_normalized(np.array([rewards, rewards[::-1]], np.float32), 1e-9)
    np.testing.assert_allclose(found, [expected, expected[::-1]], rtol=1e-6)
    assert found.dtype == np.float32


def test_eps_is_in_units_of_reward():
    np.testing.assert_allclose(group_normalized(np.array([[0, 1]], np.float32), 0.5), [[-0.5, 0.5]])


@pytest.mark.parametrize("reward", (0.0, 1.0, 0.1, 1 / 3, -7.7))
def test_equal_rewards_are_exactly_worth_nothing(reward):
    """Also where the mean of equal numbers is not that number (0.1, seven times)."""
    rewards = np.full((3, 7), reward, np.float32)
    rewards[1, 2] += 1
    found = group_normalized(rewards, 1e-6)
    assert (found[[0, 2]] == 0).all() and (found[1] != 0).all()


def test_groups_do_not_mix():
    rng = np.random.default_rng(0)
    rewards = rng.uniform(size=(5, 6)).astype(np.float32)
    found = group_normalized(rewards, 1e-4)
    for row, alone in zip(found, rewards):
        np.testing.assert_array_equal(row, group_normalized(alone[None], 1e-4)[0])
    np.testing.assert_allclose(found.mean(1), 0, atol=1e-6)
    np.testing.assert_allclose(found.std(1), 1, rtol=1e-2)
    np.testing.assert_allclose(group_normalized(rewards * 3 + 2, 3e-4), found, atol=1e-5)  # neither offset nor unit matters


@pytest.mark.parametrize("shape", ((4,), (4, 1)))
def test_a_group_needs_two(shape):
    with pytest.raises(ValueError, match="rollout.group: found rewards of shape"):
        group_normalized(np.zeros(shape, np.float32), 1e-6)

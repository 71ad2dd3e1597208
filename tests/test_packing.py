"""Packing against NumPy, and its derivative against that of a plain gather."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_adapter import packing

f32 = np.float32


def case(seed):
    """A random mask [P, M], the size of packed rows, and how many shards; some masks have more tokens than fit, some rows none."""
    rng = np.random.default_rng(seed)
    shards, each, m = rng.integers(1, 4), rng.integers(1, 5), rng.integers(1, 9)
    valid = rng.random((shards * each, m)) < rng.choice([0.1, 0.5, 0.9, 1.0])
    most = valid.reshape(shards, -1).sum(1).max()
    return rng, valid, int(max(1, most + rng.integers(-2, 4))), int(shards)


def kept(valid, size, shards):
    """Of each shard, where its tokens come from: rows and columns, as far as they fit."""
    each = len(valid) // shards
    for shard in range(shards):
        p, m = np.nonzero(valid[shard * each : (shard + 1) * each])
        yield shard, shard * each + p[:size], m[:size]


@pytest.mark.parametrize("seed", range(8))
def test_flat_and_spread(seed):
    """Tokens in their order, those of a shard in its row; zeros where none is; what does not fit is lost, and takes no place."""
    rng, valid, size, shards = case(seed)
    packed = packing.pack(jnp.asarray(valid), size, shards)
    for rest, dtype in (((), np.int32), ((3,), f32), ((2, 2), f32)):
        x = rng.integers(1, 1000, (*valid.shape, *rest)).astype(dtype)
        flat, back = np.zeros((shards, size, *rest), dtype), np.zeros_like(x)
        used = np.zeros((shards, size), bool)
        for shard, p, m in kept(valid, size, shards):
            flat[shard, : len(p)], used[shard, : len(p)], back[p, m] = x[p, m], True, x[p, m]
        found = packed.flat(x)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, flat)
        np.testing.assert_array_equal(packed.used, used)
        np.testing.assert_array_equal(packed.spread(found), back)
    choices = rng.integers(1, 9, (2, shards, size, 3))
    spread = packing.spread_choices(packed, jnp.asarray(choices))
    assert spread.shape == (2, *valid.shape, 3) and packing.spread_choices(packed, jnp.zeros((0, shards, size, 0))).size == 0
    for shard, p, m in kept(valid, size, shards):
        np.testing.assert_array_equal(spread[:, p, m], choices[:, shard, : len(p)])


@pytest.mark.parametrize("seed", range(4))
def test_derivatives(seed):
    """As autodiff has them of a gather and a scatter that are written out: takes, to the bit."""
    rng, valid, size, shards = case(seed)
    packed = packing.pack(jnp.asarray(valid), size, shards)
    place = np.full((shards, size, 2), len(valid))  # row and column of each token; past the end where none is
    for shard, p, m in kept(valid, size, shards):
        place[shard, : len(p)] = np.stack([p, m], -1)
    rows, columns = place[..., 0], place[..., 1]

    def flat(x):
        return x.at[rows, columns].get(mode="fill", fill_value=0)

    def spread(x):
        return jnp.zeros((*valid.shape, x.shape[-1])).at[rows, columns].set(x, mode="drop")

    for ours, plain, shape in ((packed.flat, flat, valid.shape), (packed.spread, spread, (shards, size))):
        x = rng.normal(size=(*shape, 3)).astype(f32)
        (y, back), (expected, expected_back) = (jax.vjp(f, x) for f in (ours, plain))
        np.testing.assert_array_equal(y, expected)
        dy = rng.normal(size=y.shape).astype(f32)
        np.testing.assert_array_equal(back(dy)[0], expected_back(dy)[0])

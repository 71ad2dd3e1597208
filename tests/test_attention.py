"""Attention over segments: parity with a float64 loop, and bits that know no caching, padding, sharing or splitting."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from rl_adapter import attention
from rl_adapter.types import Numerics

f32 = np.float32
FLOAT, A16, A8 = Numerics("float"), Numerics("exact", 16), Numerics("exact", 8)
P, G, T, C = 2, 3, 5, 4
LENGTHS = np.array([5, 3])  # of the prompts
HEADS = [(4, 2, 32), (5, 1, 24)]  # heads, kv heads, head dim


class Case:
    """C tokens of each of G samples of each of P prompts attend to their prompt and to their own past."""

    def __init__(self, heads, kv, d):
        rng = np.random.default_rng(d)
        normal = lambda *shape: (rng.normal(size=shape) * 2.0 ** rng.uniform(-1, 1, (*shape[:-1], 1))).astype(f32)
        self.q = normal(P, G, C, heads, d)
        self.shared = normal(P, T, kv, d), normal(P, T, kv, d)  # k, v
        self.own = normal(P, G, C, kv, d), normal(P, G, C, kv, d)
        self.masks = (np.arange(T) < LENGTHS[:, None])[:, None, None], np.tril(np.ones((C, C), bool))[None, None]

    def expected(self, q, shared, own):
        """Token by token in float64."""
        heads, kv, d = q.shape[3], shared[0].shape[2], q.shape[4]
        out = np.zeros(q.shape)
        for p, g, m, h in np.ndindex(q.shape[:4]):
            k, v = (
                np.concatenate([s[p, : LENGTHS[p], h * kv // heads], o[p, g, : m + 1, h * kv // heads]]).astype(np.float64)
                for s, o in zip(shared, own)
            )
            out[p, g, m, h] = reference.softmax(k @ q[p, g, m, h] / np.sqrt(d)) @ v
        return out


def encoded(numeric, *segments):
    return tuple((attention.encode(k, v, numeric), mask) for (k, v), mask in segments)


@functools.partial(jax.jit, static_argnums=4)
def attend(q, shared, own, masks, numeric):
    """As training does it, and other ways to the same numbers."""
    whole = attention.attend(q, encoded(numeric, (shared, masks[0]), (own, masks[1])), numeric)
    if not numeric.exact:
        return whole, {}
    some = lambda x: x[:1, 1:2, 2:3]
    # Each sample with its own copy of the prompt, in one segment, with garbage where nobody looks.
    pad = lambda x: jnp.concatenate([x, jnp.full_like(x[:, :, :3], 1e4)], 2)
    joined = [pad(jnp.concatenate([jnp.broadcast_to(s[:, None], (P, G, *s.shape[1:])), o], 2)) for s, o in zip(shared, own)]
    mask = jnp.concatenate([jnp.broadcast_to(masks[0], (P, 1, C, T)), jnp.broadcast_to(masks[1], (P, 1, C, C))], -1)
    joined_mask = jnp.pad(mask, ((0, 0), (0, 0), (0, 0), (0, 3)))
    # One token of one sample, as decoding does it: keys that it does not see are there or not.
    past = tuple(jnp.pad(x[:1, 1:2, :3], ((0, 0), (0, 0), (0, 2), (0, 0), (0, 0))) for x in own)
    prompt = tuple(x[:1] for x in shared)
    seen = (jnp.arange(5) <= 2)[None, None, None]
    return whole, {
        "joined": (attention.attend(q, encoded(numeric, (joined, joined_mask)), numeric), whole),
        "swapped": (attention.attend(q, encoded(numeric, (own, masks[1]), (shared, masks[0])), numeric), whole),
        "token": (attention.attend(some(q), encoded(numeric, (prompt, masks[0][:1]), (past, seen)), numeric), some(whole)),
    }


@pytest.mark.parametrize("heads, numeric, tolerance", [(HEADS[0], A8, 8e-2), (HEADS[1], A16, 3e-4)], ids=["8 bits", "16 bits"])
def test_attend(heads, numeric, tolerance):
    """Float to 1e-6 of the largest value. Exact: q, k and the weighted v err by half a step each, so scores by about 2^-14 of the
    product of a query's and a key's norm, and the output by that and 2^-15 of the largest value; with 8 bits, 2^8 times more."""
    case = Case(*heads)
    expected = case.expected(case.q, case.shared, case.own)
    largest = np.abs(case.shared[1]).max()
    for mode, bound in ((FLOAT, 1e-6), (numeric, tolerance)):
        whole, others = attend(case.q, case.shared, case.own, case.masks, mode)
        assert np.abs(whole - expected).max() <= bound * largest
        for name, (found, same) in others.items():
            np.testing.assert_array_equal(found, same, err_msg=name)
    assert set(others) == {"joined", "swapped", "token"}


def test_gradient():
    """Of the exact and of the float function: central differences of the float64 loop, along random directions."""
    case = Case(*HEADS[1])
    inputs = (case.q, case.shared, case.own)
    rng = np.random.default_rng(0)
    dy = rng.normal(size=case.q.shape)

    @functools.partial(jax.jit, static_argnums=1)
    def run(inputs, numeric):
        f = lambda q, *kv: attention.attend_differentiable(q, kv, case.masks, numeric)
        y, vjp = jax.vjp(f, *inputs)
        same = attention.attend(inputs[0], encoded(numeric, *zip(inputs[1:], case.masks)), numeric)
        return y, same, vjp(dy.astype(f32))

    for numeric in (FLOAT, A16):
        y, same, grads = run(inputs, numeric)
        np.testing.assert_array_equal(y, same)
        leaves, structure = jax.tree.flatten(inputs)
        for i, grad in enumerate(jax.tree.leaves(grads)):
            direction = rng.normal(size=grad.shape)
            moved = [[x + h * direction if j == i else x for j, x in enumerate(leaves)] for h in (-1e-5, 1e-5)]
            low, high = (np.sum(case.expected(*structure.unflatten(m)) * dy) for m in moved)
            np.testing.assert_allclose(np.sum(grad * direction), (high - low) / 2e-5, rtol=1e-4, atol=1e-4)


# Rotary embedding


def test_rope_table():
    cos, sin = attention.rope_table(100, 24, 1e6)
    assert cos.shape == sin.shape == (100, 12) and cos.dtype == sin.dtype == f32
    for position, i in ((0, 3), (1, 0), (99, 11), (57, 5)):
        angle = position / 1e6 ** (2 * i / 24)
        assert cos[position, i] == pytest.approx(np.cos(angle), abs=1e-7) and sin[position, i] == pytest.approx(np.sin(angle), abs=1e-7)


@pytest.mark.parametrize("d", (8, 24))
def test_rotate(d):
    """The reference's rotation; and the bits of single operations, which no fusion may make an FMA, for any number of rows."""
    x = np.random.default_rng(d).normal(size=(7, 3, d)).astype(f32)
    cos, sin = attention.rope_table(40, d, 1e4)
    positions = np.array([0, 1, 2, 17, 39, 5, 5])
    angles = cos[positions], sin[positions]
    rotate = functools.partial(jax.jit, attention.rotate, static_argnums=3)
    expected = [[reference.rotate(row, p, 1e4) for row in rows.astype(np.float64)] for rows, p in zip(x, positions)]
    fenced = rotate()(x, *angles, True)
    for y in (fenced, rotate()(x, *angles, False)):
        np.testing.assert_allclose(y, expected, atol=2e-6)
    unfused = rotate(compiler_options={"xla_disable_hlo_passes": "fusion"})
    np.testing.assert_array_equal(unfused(x[2:5], *(t[2:5] for t in angles), True), fenced[2:5])

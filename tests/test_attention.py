"""Attention over segments: parity with a float64 loop, and bits that know no caching, padding, sharing or splitting."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from quick import QUICK

from rl_adapter import attention
from rl_adapter.types import Numerics, Rope

f32 = np.float32
FLOAT, A16, A8, KEYS8 = Numerics("float"), Numerics("exact", 16), Numerics("exact", 8), Numerics("exact", 16, cache_bits=8)
P, G, T, C = 2, 3, 5, 4
LENGTHS = np.array([5, 3])  # of the prompts


class Case:
    """C tokens of each of G samples of each of P prompts attend to their prompt and to their own past."""

    def __init__(self, heads, kv, d, width=0, latent=0, window=None, sinks=False, scale=0.0):
        rng = np.random.default_rng(d)
        normal = lambda *shape: (rng.normal(size=shape) * 2.0 ** rng.uniform(-1, 1, (*shape[:-1], 1))).astype(f32)
        self.q = normal(P, G, C, heads, d)
        value = lambda *shape: None if latent else normal(*shape, kv, width or d)
        self.shared = normal(P, T, kv, d), value(P, T)  # k, v
        self.own = normal(P, G, C, kv, d), value(P, G, C)
        self.scale, self.latent, self.window = scale or d**-0.5, latent, window
        self.sinks = rng.normal(size=heads).astype(f32) * 2 + 1 if sinks else None
        # The prompt's keys lie before the completion, wherever its padding ends.
        at, own = np.arange(T), np.arange(C)
        within = lambda distance: (distance >= 0) & (distance < (window or 10**6))
        before = LENGTHS[:, None, None, None] + own[:, None] - at
        self.masks = (at < LENGTHS[:, None, None, None]) & within(before), within(own[:, None] - own)[None, None]

    @property
    def rules(self):
        return attention.Rules(self.scale, self.latent, sinks=self.sinks)

    def expected(self, q, shared, own):
        """Token by token in float64."""
        heads, kv = q.shape[3], shared[0].shape[2]
        width = self.latent or shared[1].shape[-1]
        out = np.zeros((*q.shape[:4], width))
        for p, g, m, h in np.ndindex(q.shape[:4]):
            k, v = (
                None
                if s is None
                else np.concatenate([s[p, : LENGTHS[p], h * kv // heads], o[p, g, : m + 1, h * kv // heads]]).astype(np.float64)
                for s, o in zip(shared, own)
            )
            v = k[:, : self.latent] if v is None else v
            if self.window:
                k, v = k[-self.window :], v[-self.window :]
            scores = k @ q[p, g, m, h] * self.scale
            if self.sinks is not None:  # a key of its own whose value is nothing
                scores, v = np.append(scores, self.sinks[h]), np.vstack([v, np.zeros(width)])
            out[p, g, m, h] = reference.softmax(scores) @ v
        return out


CASES = {
    "8 bits": (Case(4, 2, 32), A8, 8e-2),
    "16 bits": (Case(5, 1, 24), A16, 3e-4),
    "sinks": (Case(4, 2, 16, sinks=True), A16, 3e-4),
    "window": (Case(4, 2, 16, window=3), A16, 3e-4),
    "window of one, sinks": (Case(2, 1, 16, window=1, sinks=True, scale=0.5), A16, 3e-4),
    "width of values": (Case(4, 2, 24, width=10), A16, 3e-4),
    "latent": (Case(4, 1, 24, latent=16, scale=0.3), A16, 3e-4),
    "latent, 8 bits": (Case(3, 1, 24, latent=16), A8, 8e-2),
    "keys of 8 bits": (Case(4, 2, 24, width=10, sinks=True), KEYS8, 8e-2),
}


def encoded(numeric, *segments):
    return tuple((attention.encode(k, v, numeric), mask) for (k, v), mask in segments)


def attend(q, shared, own, masks, rules, numeric):
    """As training does it, and other ways to the same numbers."""
    whole = attention.attend(q, encoded(numeric, (shared, masks[0]), (own, masks[1])), rules, numeric)
    if not numeric.exact:
        return whole, {}
    some = lambda x: x[:1, 1:2, 2:3]
    each = lambda f, *kv: tuple(None if x[0] is None else f(*x) for x in zip(*kv))
    # Each sample with its own copy of the prompt, in one segment, with garbage where nobody looks.
    pad = lambda x: jnp.concatenate([x, jnp.full_like(x[:, :, :3], 1e4)], 2)
    joined = each(lambda s, o: pad(jnp.concatenate([jnp.broadcast_to(s[:, None], (P, G, *s.shape[1:])), o], 2)), shared, own)
    mask = jnp.concatenate([jnp.broadcast_to(masks[0], (P, 1, C, T)), jnp.broadcast_to(masks[1], (P, 1, C, C))], -1)
    joined_mask = jnp.pad(mask, ((0, 0), (0, 0), (0, 0), (0, 3)))
    # One token of one sample, as decoding does it: keys that it does not see are there or not.
    past = each(lambda x: jnp.pad(x[:1, 1:2, :3], ((0, 0), (0, 0), (0, 2), (0, 0), (0, 0))), own)
    prompt = each(lambda x: x[:1], shared)
    seen = jnp.pad(masks[1][:, :, 2:3, :3], ((0, 0), (0, 0), (0, 0), (0, 2)))
    go = lambda q, *segments: attention.attend(q, encoded(numeric, *segments), rules, numeric)
    return whole, {
        "joined": (go(q, (joined, joined_mask)), whole),
        "swapped": (go(q, (own, masks[1]), (shared, masks[0])), whole),
        "token": (go(some(q), (prompt, masks[0][:1, :, 2:3]), (past, seen)), some(whole)),
    }


@pytest.mark.parametrize("name", CASES)
def test_attend(name):
    """Float to 1e-6 of the largest value. Exact: q, k and the weighted v err by half a step each, so scores by about 2^-14 of the
    product of a query's and a key's norm, and the output by that and 2^-15 of the largest value; with 8 bits, also of keys and values
    alone, 2^8 times more."""
    case, numeric, tolerance = CASES[name]
    expected = case.expected(case.q, case.shared, case.own)
    assert expected.shape == (*case.q.shape[:4], case.latent or case.shared[1].shape[-1])
    largest = np.abs(case.shared[0] if case.latent else case.shared[1]).max()
    run = jax.jit(attend, static_argnums=5, compiler_options=None if name.endswith("6 bits") else QUICK)
    for mode, bound in ((FLOAT, 1e-6), (numeric, tolerance)):
        whole, others = run(case.q, case.shared, case.own, case.masks, case.rules, mode)
        assert np.abs(whole - expected).max() <= bound * largest
        for way, (found, same) in others.items():
            np.testing.assert_array_equal(found, same, err_msg=way)
    assert set(others) == {"joined", "swapped", "token"}


def test_a_latent_is_kept_once():
    keys = attention.encode(np.ones((P, T, 1, 8), f32), None, A16)
    assert keys.v is None and keys.v_scale is None and keys.k.shape == (P, 1, T, 2, 8)
    values, scale = keys.values(attention.Rules(1.0, latent=5))
    assert values.shape == (P, 1, T, 2, 5) and scale is keys.k_scale


def test_rules_within():
    distance = np.arange(-1, 5)
    assert attention.Rules(1.0).within(distance) is True
    assert attention.Rules(1.0, window=jnp.int32(2)).within(distance)[1:].tolist() == [True, True, False, False, False]
    assert attention.Rules(1.0, window=jnp.int32(0)).within(distance).all()  # no window


@pytest.mark.parametrize("name", ("16 bits", "sinks", "window", "width of values", "latent"))
def test_gradient(name):
    """Of the exact and of the float function: central differences of the float64 loop, along random directions."""
    case, *_ = CASES[name]
    inputs = (case.q, case.shared, case.own)
    rng = np.random.default_rng(0)
    dy = rng.normal(size=(*case.q.shape[:4], case.latent or case.shared[1].shape[-1]))

    @functools.partial(jax.jit, static_argnums=1, compiler_options=QUICK)
    def run(inputs, numeric):
        f = lambda q, *kv: attention.attend_differentiable(q, kv, case.masks, case.rules, numeric)
        y, vjp = jax.vjp(f, *inputs)
        same = attention.attend(inputs[0], encoded(numeric, *zip(inputs[1:], case.masks)), case.rules, numeric)
        return y, same, vjp(dy.astype(f32))

    for numeric in (FLOAT, A16):
        y, same, grads = run(inputs, numeric)
        np.testing.assert_array_equal(y, same)
        leaves, structure = jax.tree.flatten(inputs)
        assert len(leaves) == len(jax.tree.leaves(grads))
        for i, grad in enumerate(jax.tree.leaves(grads)):
            direction = rng.normal(size=grad.shape)
            moved = [[x + h * direction if j == i else x for j, x in enumerate(leaves)] for h in (-1e-5, 1e-5)]
            low, high = (np.sum(case.expected(*structure.unflatten(m)) * dy) for m in moved)
            np.testing.assert_allclose(np.sum(grad * direction), (high - low) / 2e-5, rtol=1e-4, atol=1e-4)


# Rotary embedding


def frequencies(pairs, theta=1e4):
    return tuple(theta ** (-i / pairs) for i in range(pairs))


def test_rope_table():
    cos, sin = attention.rope_table(100, Rope(frequencies(12, 1e6), factor=1.25))
    assert cos.shape == sin.shape == (100, 12) and cos.dtype == sin.dtype == f32
    for position, i in ((0, 3), (1, 0), (99, 11), (57, 5)):
        angle = position / 1e6 ** (2 * i / 24)
        assert cos[position, i] == pytest.approx(1.25 * np.cos(angle), abs=1e-7)
        assert sin[position, i] == pytest.approx(1.25 * np.sin(angle), abs=1e-7)


def turned(row, position, pairs, interleaved):
    """One head's vector, a pair of features at a time; what turns comes out as halves, and what does not stays behind it."""
    out = np.array(row)
    for i, frequency in enumerate(frequencies(pairs)):
        a, b = (row[2 * i], row[2 * i + 1]) if interleaved else (row[i], row[i + pairs])
        out[i] = a * np.cos(position * frequency) - b * np.sin(position * frequency)
        out[i + pairs] = a * np.sin(position * frequency) + b * np.cos(position * frequency)
    return out


@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("d, pairs", ((8, 4), (24, 12), (24, 5)))
def test_rotate(d, pairs, interleaved):
    """The rotation of each pair; and the bits of single operations, which no fusion may make an FMA, for any number of rows."""
    x = np.random.default_rng(d).normal(size=(7, 3, d)).astype(f32)
    cos, sin = attention.rope_table(40, Rope(frequencies(pairs)))
    positions = np.array([0, 1, 2, 17, 39, 5, 5])
    angles = cos[positions], sin[positions]
    rotate = functools.partial(jax.jit, attention.rotate, static_argnums=(3, 4))
    expected = [[turned(row, p, pairs, interleaved) for row in rows.astype(np.float64)] for rows, p in zip(x, positions)]
    if d == 2 * pairs and not interleaved:
        np.testing.assert_allclose(expected[3][1], reference.rotate(x[3, 1].astype(np.float64), 17, frequencies(pairs)))
    fenced = rotate()(x, *angles, interleaved, True)
    for y in (fenced, rotate()(x, *angles, interleaved, False)):
        np.testing.assert_allclose(y, expected, atol=2e-6)
    np.testing.assert_array_equal(fenced[..., 2 * pairs :], x[..., 2 * pairs :])
    unfused = rotate(compiler_options={"xla_disable_hlo_passes": "fusion"})
    np.testing.assert_array_equal(unfused(x[2:5], *(t[2:5] for t in angles), interleaved, True), fenced[2:5])

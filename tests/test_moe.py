"""Routed experts: every pair is computed, by a loop in float64 too, and no bit depends on rows, company or mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from test_model import QUICK

from rl_adapter import lora, moe, quant
from rl_adapter import mesh as meshes
from rl_adapter.types import Numerics

f32 = np.float32
FLOAT, A16 = Numerics("float"), Numerics("exact", 16)
N, D, F, E, K = 40, 64, 32, 8, 3
SCALES = (("gate", 1.5), ("up", 2.0), ("down", 0.5))


def normal(rng, *shape):
    return (rng.normal(size=shape) / np.sqrt(shape[-2])).astype(f32)


@pytest.fixture(scope="module")
def layer():
    """Weights of a layer, and adapters (gate's A is shared by all experts)."""
    rng = np.random.default_rng(0)
    weights = {n: quant.quantize(normal(rng, E, *s), "int4_g32", n) for n, s in (("gate", (D, F)), ("up", (D, F)), ("down", (F, D)))}
    adapter = {
        "gate": (normal(rng, D, 2), normal(rng, E, 2, F)),
        "up": (normal(rng, E, D, 2), normal(rng, E, 2, F)),
        "down": (normal(rng, E, F, 2), normal(rng, E, 2, D)),
    }
    return weights, adapter


def pairs(seed, n=N, crowded=False):
    """x, weights, choices and validity of n rows. Crowded: all of them to the same experts."""
    rng = np.random.default_rng(seed)
    choice = np.array([np.arange(K) + 2 if crowded else rng.permutation(E)[:K] for _ in range(n)], np.int32)
    x = rng.normal(size=(n, D)).astype(f32) * 2.0 ** rng.uniform(-2, 2, (n, 1)).astype(f32)
    return x, rng.uniform(size=(n, K)).astype(f32), choice, rng.uniform(size=n) < 0.8


def experts_of(weights, adapter, numeric):
    prepared = lora.prepare({n: lora.Lora(*pair) for n, pair in adapter.items()}, numeric)
    return moe.Experts(weights["gate"], weights["up"], weights["down"], prepared, SCALES if adapter else ())


def program(numeric, mesh=None, grads=False, **options):
    """Jitted (rows, weights, adapter) -> the layer's output and, where asked for, the gradients of its sum weighted by cosines."""

    def value(x, w, adapter, choice, valid, weights):
        return moe.routed(x, w, choice, valid, experts_of(weights, adapter, numeric), E, numeric, mesh)

    def run(rows, weights, adapter):
        x, w, choice, valid = rows
        if not grads:
            return value(x, w, adapter, choice, valid, weights), None
        y, vjp = jax.vjp(lambda *trained: value(*trained, choice, valid, weights), x, w, adapter)
        return y, vjp(cotangent(y))

    return jax.jit(run, **options)


def cotangent(y):
    return jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)


@pytest.fixture(scope="module")
def exact():
    return program(A16, grads=True)


def expected(rows, weights, adapter):
    """Row by row, expert by expert, in float64."""
    x, w, choice, valid = (np.asarray(a) for a in rows)
    x = x.astype(np.float64)
    dense = {n: reference.decode(q) for n, q in weights.items()}
    out = np.zeros(x.shape)

    def linear(h, name, e):
        y = h @ dense[name][e]
        if name in adapter:
            a, b = (np.asarray(m, np.float64) for m in adapter[name])
            y = y + dict(SCALES)[name] * ((h @ (a if a.ndim == 2 else a[e])) @ b[e])
        return y

    for i in np.flatnonzero(valid):
        for weight, e in zip(w[i].astype(np.float64), choice[i]):
            gate, up = linear(x[i], "gate", e), linear(x[i], "up", e)
            out[i] += weight * linear(gate / (1 + np.exp(-gate)) * up, "down", e)
    return out


@pytest.mark.parametrize("crowded", (False, True))
def test_every_pair_counts(exact, layer, crowded):
    """Against the loop, adapters and all, also where all rows crowd into a few experts: float to 1e-5 of a row's largest, A16 to 1e-3
    (three contractions in a row of a few 2^-15 each, steepened by SwiGLU). Rows that are not valid are zero."""
    rows = pairs(1, crowded=crowded)
    found, grads = exact(rows, *layer)
    want = expected(rows, *layer)
    for y, tolerance in ((found, 1e-3), (quick_float()(rows, *layer)[0], 1e-5)):
        assert (np.abs(y - want) <= tolerance * np.abs(want).max(-1, keepdims=True)).all()
        assert not np.asarray(y)[~rows[3]].any()


@functools.cache
def quick_float():
    return program(FLOAT, compiler_options=QUICK)


def test_gradients(exact, layer):
    """Of the exact layer, to rows, router weights and adapters: central differences of the float64 loop along random directions."""
    rows = pairs(2)
    y, grads = exact(rows, *layer)
    dy = np.asarray(cotangent(y), np.float64)
    leaves, structure = jax.tree.flatten((rows[0], rows[1], layer[1]))
    rng = np.random.default_rng(0)
    for i, grad in enumerate(jax.tree.leaves(grads)):
        direction = rng.normal(size=grad.shape)
        ends = []
        for h in (-1e-5, 1e-5):
            x, w, adapter = structure.unflatten([leaf + h * direction if j == i else leaf for j, leaf in enumerate(leaves)])
            ends.append(np.sum(expected((x, w, *rows[2:]), layer[0], adapter) * dy))
        np.testing.assert_allclose(np.sum(grad * direction), (ends[1] - ends[0]) / 2e-5, rtol=1e-4, atol=1e-4)
    assert not np.asarray(grads[0])[~rows[3]].any() and not np.asarray(grads[1])[~rows[3]].any()


def test_bits_know_no_company(exact, layer):
    """The same rows in another order, among crowds, and few of them alone (in tiles of another size, in other code)."""
    rows = pairs(3)
    found = np.asarray(exact(rows, *layer)[0])
    order = np.random.default_rng(0).permutation(N)
    np.testing.assert_array_equal(exact([r[order] for r in rows], *layer)[0], found[order])
    crowd = [np.concatenate([r[:7], c[7:]]) for r, c in zip(rows, pairs(4, crowded=True))]
    np.testing.assert_array_equal(exact(crowd, *layer)[0][:7], found[:7])
    few = program(A16, compiler_options=QUICK)([r[3:8] for r in rows], *layer)[0]
    np.testing.assert_array_equal(few, found[3:8])
    assert np.abs(few).max() > 0


@pytest.mark.parametrize("shape", ((1, 1, 2), (2, 2, 2)), ids=str)
def test_bits_know_no_mesh(exact, layer, shape):
    rows = pairs(5)
    found, grads = exact(rows, *layer)
    on_mesh, mesh_grads = program(A16, meshes.make(*shape), grads=shape == (2, 2, 2), compiler_options=QUICK)(rows, *layer)
    np.testing.assert_array_equal(on_mesh, found)
    if mesh_grads:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max()), mesh_grads, grads)


@pytest.mark.parametrize("norm_topk_prob", (True, False))
def test_route(norm_topk_prob):
    """The k most probable experts of a float64 softmax, and their probabilities; ties go to the lower expert."""
    spec = reference.tiny_spec(d_model=40, experts=7, experts_per_token=3, norm_topk_prob=norm_topk_prob)
    rng = np.random.default_rng(0)
    x, router = rng.normal(size=(33, 40)).astype(f32) * 3, normal(rng, 40, 7)
    router[:, 5] = router[:, 2]
    x[32] = 0  # all tied
    w = quant.quantize(router, "fixed16")

    @jax.jit
    def run(x):
        return [moe.route(x, w, None, 1.0, spec, numeric) for numeric in (FLOAT, A16)], moe.route(x[3:10], w, None, 1.0, spec, A16)

    logits = x.astype(np.float64) @ reference.decode(w)
    p = np.array([reference.softmax(z) for z in logits])
    outs, part = run(x)
    for (weights, choice, probabilities), tolerance in zip(outs, (1e-6, 2e-4)):
        np.testing.assert_allclose(probabilities, p, atol=tolerance)
        weights, choice = np.asarray(weights), np.asarray(choice)
        chosen = np.take_along_axis(np.asarray(probabilities), choice, 1)
        total = chosen.sum(1, keepdims=True) if norm_topk_prob else 1
        np.testing.assert_allclose(weights, chosen / total, rtol=1e-6)
        best = np.argsort(-np.asarray(probabilities), 1, kind="stable")[:, :3]
        np.testing.assert_array_equal(choice, best)
        clear = np.diff(np.sort(-p, 1)[:, :4]).min(1) > 1e-3
        np.testing.assert_array_equal(choice[clear], np.argsort(-p, 1, kind="stable")[clear, :3])
        assert clear.any() and choice[32].tolist() == [0, 1, 2]
    for a, b in zip(part, outs[1]):
        np.testing.assert_array_equal(a, b[3:10])

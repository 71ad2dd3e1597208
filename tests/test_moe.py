"""Routed experts: every pair is computed, by a loop in float64 too, and no bit depends on rows, company or mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from quick import QUICK

from rl_adapter import lora, moe, quant
from rl_adapter import mesh as meshes
from rl_adapter.types import Layer, Numerics

f32 = np.float32
FLOAT, A16 = Numerics("float"), Numerics("exact", 16)
N, D, F, E, K = 40, 64, 32, 8, 3
SCALES = (("gate", 1.5), ("up", 2.0), ("down", 0.5))


LIMIT = 1.0  # of a clamped SwiGLU: about one gate in six is above it


def normal(rng, *shape):
    return (rng.normal(size=shape) / np.sqrt(shape[-2])).astype(f32)


@pytest.fixture(scope="module")
def layer():
    """Weights of a layer, adapters (gate's A is shared by all experts), and no biases."""
    rng = np.random.default_rng(0)
    weights = {n: quant.quantize(normal(rng, E, *s), "int4_g32", n) for n, s in (("gate", (D, F)), ("up", (D, F)), ("down", (F, D)))}
    adapter = {
        "gate": (normal(rng, D, 2), normal(rng, E, 2, F)),
        "up": (normal(rng, E, D, 2), normal(rng, E, 2, F)),
        "down": (normal(rng, E, F, 2), normal(rng, E, 2, D)),
    }
    return weights, adapter, {}


@pytest.fixture(scope="module")
def biased(layer):
    """The same with a bias of every matrix."""
    rng = np.random.default_rng(7)
    return *layer[:2], {n: rng.normal(size=(E, width)).astype(f32) / 2 for n, width in (("gate", F), ("up", F), ("down", D))}


def pairs(seed, n=N, crowded=False):
    """x, weights, choices and validity of n rows. Crowded: all of them to the same experts."""
    rng = np.random.default_rng(seed)
    choice = np.array([np.arange(K) + 2 if crowded else rng.permutation(E)[:K] for _ in range(n)], np.int32)
    x = rng.normal(size=(n, D)).astype(f32) * 2.0 ** rng.uniform(-2, 2, (n, 1)).astype(f32)
    return x, rng.uniform(size=(n, K)).astype(f32), choice, rng.uniform(size=n) < 0.8


def experts_of(weights, adapter, bias, limit, numeric):
    prepared = lora.prepare({n: lora.Lora(*pair) for n, pair in adapter.items()}, numeric)
    return moe.Mlp(weights["gate"], weights["up"], weights["down"], prepared, bias, SCALES if adapter else (), limit)


def program(numeric, mesh=None, grads=False, limit=0.0, **options):
    """Jitted (rows, weights, adapter, bias) -> the layer's output and, where asked for, the gradients of its sum weighted by cosines."""

    def value(x, w, adapter, choice, valid, weights, bias):
        return moe.routed(x, w, choice, valid, experts_of(weights, adapter, bias, limit, numeric), E, numeric, mesh)

    def run(rows, weights, adapter, bias):
        x, w, choice, valid = rows
        if not grads:
            return value(x, w, adapter, choice, valid, weights, bias), None
        y, vjp = jax.vjp(lambda *trained: value(*trained, choice, valid, weights, bias), x, w, adapter)
        return y, vjp(cotangent(y))

    return jax.jit(run, **options)


def cotangent(y):
    return jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)


@pytest.fixture(scope="module")
def exact():
    return program(A16, grads=True)


@pytest.fixture(scope="module")
def clamped():
    return program(A16, grads=True, limit=LIMIT, compiler_options=QUICK)


def expected(rows, weights, adapter, bias, limit=0.0):
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
        return y + bias[name][e] if bias else y

    def activation(gate, up):
        if not limit:
            return gate / (1 + np.exp(-gate)) * up
        gate, up = np.where(gate > limit, limit, gate), np.where(up > limit, limit, np.where(up < -limit, -limit, up))
        return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)

    for i in np.flatnonzero(valid):
        for weight, e in zip(w[i].astype(np.float64), choice[i]):
            gate, up = linear(x[i], "gate", e), linear(x[i], "up", e)
            out[i] += weight * linear(activation(gate, up), "down", e)
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


def test_clamped_with_biases(clamped, biased):
    """As gpt-oss has them. Rows that are not valid are zero: no bias is added to them."""
    rows = pairs(6)
    want = expected(rows, *biased, LIMIT)
    plain = program(FLOAT, limit=LIMIT, compiler_options=QUICK)
    for y, tolerance in ((clamped(rows, *biased)[0], 1e-3), (plain(rows, *biased)[0], 1e-5)):
        assert (np.abs(y - want) <= tolerance * np.abs(want).max(-1, keepdims=True)).all()
        assert not np.asarray(y)[~rows[3]].any()
    for other in (expected(rows, *biased, 1e9), expected(rows, *biased[:2], {}, LIMIT)):  # both limit and bias matter
        assert np.abs(other - want).max() > 0.1


@pytest.mark.parametrize("kind", ("plain", "clamped"))
def test_gradients(request, exact, layer, kind):
    """Of the exact layer, to rows, router weights and adapters: central differences of the float64 loop along random directions."""
    rows, limit = pairs(2), 0.0
    if kind == "clamped":
        exact, layer, limit = request.getfixturevalue("clamped"), request.getfixturevalue("biased"), LIMIT
    y, grads = exact(rows, *layer)
    dy = np.asarray(cotangent(y), np.float64)
    leaves, structure = jax.tree.flatten((rows[0], rows[1], layer[1]))
    rng = np.random.default_rng(0)
    for i, grad in enumerate(jax.tree.leaves(grads)):
        direction = rng.normal(size=grad.shape)
        ends = []
        for h in (-1e-5, 1e-5):
            x, w, adapter = structure.unflatten([leaf + h * direction if j == i else leaf for j, leaf in enumerate(leaves)])
            ends.append(np.sum(expected((x, w, *rows[2:]), layer[0], adapter, layer[2], limit) * dy))
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


def test_biases_are_of_the_experts_that_a_device_holds(clamped, biased):
    rows = pairs(8)
    found, grads = clamped(rows, *biased)
    on_mesh, mesh_grads = program(A16, meshes.make(2, 2, 2), grads=True, limit=LIMIT, compiler_options=QUICK)(rows, *biased)
    np.testing.assert_array_equal(on_mesh, found)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max()), mesh_grads, grads)


# Routing


@pytest.mark.parametrize("norm_topk_prob", (True, False))
def test_route(norm_topk_prob):
    """The k most probable experts of a float64 softmax, and their probabilities; ties go to the lower expert."""
    spec = reference.tiny_spec(d_model=40, experts=7, experts_per_token=3, norm_topk_prob=norm_topk_prob)
    rng = np.random.default_rng(0)
    x, router = rng.normal(size=(33, 40)).astype(f32) * 3, normal(rng, 40, 7)
    router[:, 5] = router[:, 2]
    x[32] = 0  # all tied
    w = quant.quantize(router, "fixed16")
    layer = routing_layer(w)

    @jax.jit
    def run(x):
        return [moe.route(x, layer, None, 1.0, spec, numeric) for numeric in (FLOAT, A16)], moe.route(x[3:10], layer, None, 1.0, spec, A16)

    logits = x.astype(np.float64) @ reference.decode(w)
    p = np.array([reference.softmax(z) for z in logits])
    outs, part = run(x)
    for (weights, choice, probabilities, z), tolerance in zip(outs, (1e-6, 2e-4)):
        np.testing.assert_allclose(z, logits, atol=10 * tolerance * np.abs(logits).max())
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


def routing_layer(router, score_bias=None, bias=None):
    return Layer(attn_norm=None, o=None, mlp_norm=None, router=router, score_bias=score_bias, bias=bias or {})


def naive_route(z, score_bias, spec):
    """One row of logits in float64, by loops: weights, experts, and by how much the least clear of its decisions was taken."""
    scores = {"softmax": reference.softmax, "sigmoid": lambda z: 1 / (1 + np.exp(-z)), "softmax_of_chosen": lambda z: z}[spec.score](z)
    preference = scores if score_bias is None else scores + score_bias
    margin, allowed = np.inf, list(range(spec.experts))
    if spec.expert_groups > 1:
        size = spec.experts // spec.expert_groups
        of_group = [sum(sorted(preference[g * size : (g + 1) * size])[-2:]) for g in range(spec.expert_groups)]
        ranked = sorted(range(spec.expert_groups), key=lambda g: -of_group[g])
        kept = ranked[: spec.groups_per_token]
        margin = of_group[kept[-1]] - of_group[ranked[len(kept)]]
        allowed = [e for e in allowed if e // size in kept]
    ranked = sorted(allowed, key=lambda e: -preference[e])
    chosen = ranked[: spec.experts_per_token]
    margin = min([margin] + [preference[a] - preference[b] for a, b in zip(ranked, ranked[1 : len(chosen) + 1])])
    if spec.score == "softmax_of_chosen":
        return reference.softmax(scores[chosen]), chosen, margin
    weights = scores[chosen] / (scores[chosen].sum() if spec.norm_topk_prob else 1)
    return weights * spec.routed_scale, chosen, margin


@pytest.mark.parametrize(
    "changes, has_score_bias, has_bias",
    [
        (dict(score="sigmoid", expert_groups=4, groups_per_token=2, routed_scale=2.5), True, False),  # DeepSeek-V3
        (dict(score="sigmoid", norm_topk_prob=False, routed_scale=0.7), False, False),
        (dict(score="sigmoid"), True, False),
        (dict(score="softmax", expert_groups=4, groups_per_token=3, norm_topk_prob=False, routed_scale=16.0), False, False),
        (dict(score="softmax_of_chosen"), False, True),  # gpt-oss
    ],
    ids=["deepseek", "sigmoid", "score bias", "groups", "gpt-oss"],
)
def test_route_of_other_families(changes, has_score_bias, has_bias):
    spec = reference.tiny_spec(d_model=40, experts=12, experts_per_token=3, **changes)
    rng = np.random.default_rng(1)
    x, w = rng.normal(size=(65, 40)).astype(f32) * 2, quant.quantize(normal(rng, 40, 12), "fixed16")
    score_bias = rng.normal(size=12).astype(f32) * 0.3 if has_score_bias else None
    bias = {"router": rng.normal(size=12).astype(f32)} if has_bias else {}
    layer = routing_layer(w, score_bias, bias)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(x):
        return [moe.route(x, layer, None, 1.0, spec, numeric) for numeric in (FLOAT, A16)], moe.route(x[3:10], layer, None, 1.0, spec, A16)

    logits = x.astype(np.float64) @ reference.decode(w) + bias.get("router", 0)
    want = [naive_route(z, score_bias, spec) for z in logits]
    clear = np.array([margin > 1e-3 for *_, margin in want])
    assert clear.mean() > 0.8
    outs, part = run(x)
    for (weights, choice, *_), tolerance in zip(outs, (1e-5, 1e-3)):
        np.testing.assert_array_equal(choice[clear], np.array([chosen for _, chosen, _ in want])[clear])
        scale = spec.routed_scale
        np.testing.assert_allclose(np.asarray(weights)[clear] / scale, np.array([w for w, *_ in want])[clear] / scale, atol=tolerance)
    for a, b in zip(part, outs[1]):
        np.testing.assert_array_equal(a, b[3:10])
    if has_score_bias:  # it decides about experts, and so other ones are chosen than without it
        plain = np.array([naive_route(z, None, spec)[1] for z in logits])
        assert (np.sort(plain) != np.sort(outs[0][1])).any()

"""Exact arithmetic: close to float64, and the same bits at any length, in any order, fused or not."""

import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from rl_adapter import numerics

f32 = np.float32
LENGTHS = (1, 3, 7, 13, 16, 33)
UNFUSED = {"xla_disable_hlo_passes": "fusion", "xla_backend_optimization_level": 0}  # a kernel an operation, in scalar code


def bits(x):
    return np.asarray(x, f32).view(np.int32)


def assert_same_bits(a, b):
    np.testing.assert_array_equal(bits(a), bits(b))


def normal(seed, *shape, spread=0.0):
    """Random numbers whose magnitudes span about 2^(+-spread)."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * 2.0 ** rng.uniform(-spread, spread, shape)).astype(f32)


def ulps(found, exact):
    """Error in units of the last place of the exact value."""
    return np.abs(np.asarray(found, np.float64) - exact) / np.spacing(np.abs(exact).astype(f32))


# Elementwise functions


def test_exp_is_within_4_ulp():
    x = np.linspace(-86.9, 87, 1_000_003).astype(f32)
    assert ulps(jax.jit(numerics.exp)(x), np.exp(x.astype(np.float64))).max() <= 4


def test_exp_beyond_its_range():
    x = np.array([-np.inf, -1e30, -87.1, 0, 87.5, 200, np.inf, np.nan], f32)
    top = np.exp(87.0)
    np.testing.assert_allclose(jax.jit(numerics.exp)(x), [0, 0, 0, 1, top, top, top, np.nan], rtol=1e-6)


def test_log_is_within_4_ulp():
    x = np.concatenate([np.geomspace(1.2e-38, 3e38, 500_001), np.linspace(0.5, 2, 500_001), [1 - 2**-24, 1, 1 + 2**-23]]).astype(f32)
    exact = np.log(x.astype(np.float64))
    found = jax.jit(numerics.log)(x)
    assert ulps(found, np.where(exact == 0, 1, exact))[exact != 0].max() <= 4
    assert (np.asarray(found)[exact == 0] == 0).all()


def test_derivatives_are_those_of_the_functions():
    x = normal(0, 64)
    functions = (numerics.exp, lambda x: numerics.log(numerics.exp(x)), lambda x: 3 * numerics.fence(x))
    exp, log, fence = jax.jit(lambda x: [jax.vmap(jax.grad(f))(x) for f in functions])(x)
    np.testing.assert_allclose(exp, np.exp(x), rtol=1e-5)
    np.testing.assert_allclose(log, np.ones(64), rtol=1e-5)
    np.testing.assert_array_equal(fence, np.full(64, 3))


ELEMENTWISE = {
    "exp": numerics.exp,
    "log": lambda x: numerics.log(jnp.abs(x) + 1e-3),
    "sigmoid": numerics.sigmoid,
    "silu": lambda x: numerics.fence(x * numerics.sigmoid(x)) + x,
    "inverse_sqrt": lambda x: numerics.inverse_sqrt(jnp.abs(x) + 1e-3),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_bits_at_any_length_and_position(name):
    """A vector loop and its scalar remainder must round alike, and so must one fused kernel and one kernel an operation."""
    f = ELEMENTWISE[name]
    x = normal(1, 1024, spread=2)
    unfused = np.asarray(jax.jit(f, compiler_options=UNFUSED)(x))
    cuts = [(0, 1024), *((5 * (i % 2), n) for i, n in enumerate(LENGTHS))]
    parts = jax.jit(lambda x: [f(x[a : a + n]) for a, n in cuts])(x)
    for (a, n), part in zip(cuts, parts):
        assert_same_bits(part, unfused[a : a + n])


@pytest.mark.parametrize("n", (7, 1024))
def test_a_fenced_product_is_rounded_before_it_is_added(n):
    """Bit for bit what separate operations of NumPy give, so the compiler made no FMA; one would differ here."""
    a, b, c = normal(2, n), normal(3, n), normal(4, n)
    product = (bits(a * b) & -2).view(f32)
    assert_same_bits(jax.jit(lambda a, b, c: numerics.fence(a * b) + c)(a, b, c), product + c)
    fma = (product.astype(np.float64) * 0 + a.astype(np.float64) * b + c).astype(f32)
    assert (bits(fma) != bits(product + c)).any()


def test_power_of_two_above():
    table = [(1.0, 2), (0.75, 1), (1.999, 2), (2.0, 4), (5e-5, 2.0**-14), (np.inf, np.nan), (np.nan, np.nan)]
    above = jax.jit(numerics.power_of_two_above)
    found = above(np.array([m for m, _ in table], f32))
    np.testing.assert_array_equal(found, np.array([p for _, p in table], f32))
    assert 0 < above(np.zeros(7, f32))[0] < 1e-19
    m = np.abs(normal(5, 4096, spread=60))
    p = np.asarray(above(m))
    assert (np.frexp(p)[0] == 0.5).all() and (m < p).all() and (p <= 2 * m).all()


# Fixed point


@pytest.mark.parametrize("width", (24, 257))
@pytest.mark.parametrize("n_bits", (8, 16))
def test_fixed_point_error(n_bits, width):
    x = normal(width, 200, width, spread=3)
    x[0] = 0
    x[1:40] *= (1 - np.arange(39)[:, None] * 2.0**-9) / np.abs(x[1:40]).max(-1, keepdims=True)  # rows just below a power of two

    @jax.jit
    def run(x):
        q, s = numerics.fixed_point(x, n_bits)
        return q, s, numerics.slices(q, n_bits)

    q, s, parts = jax.device_get(run(x))
    assert (np.abs(q) <= numerics.LIMIT[n_bits]).all() and (q == np.round(q)).all()
    assert (np.frexp(s)[0] == 0.5).all()
    assert (np.abs(q.astype(np.float64) * s - x) <= s / 2).all()
    top = np.abs(x).max(-1, keepdims=True)
    # A row whose largest value only fits under the next scale pays for at most what the largest code falls short of a power of two.
    assert (s[1:] / 2 <= top[1:] * 2.0 ** (1 - n_bits) * (1 + 2.0**-6)).all()
    assert {part.dtype for part in parts} == {np.dtype(np.int8)}
    np.testing.assert_array_equal(functools.reduce(lambda high, low: high * 256 + low, [part.astype(int) for part in parts]), q)


@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf, 3.1e38))
def test_a_bad_number_spoils_its_row_and_no_other(bad):
    x = normal(6, 5, 40)
    x[2, 7] = bad
    expected = np.arange(5) != 2
    for name, y in spoiled(x).items():
        if name not in ("softmax", "log_sum_exp") or np.isnan(bad) or bad == np.inf:  # e^-inf is 0
            np.testing.assert_array_equal(np.isfinite(np.asarray(y)).reshape(5, -1).all(-1), expected, err_msg=name)


@jax.jit
def spoiled(x):
    return {
        "fixed_point 8": numerics.fixed_point(x, 8)[1],
        "fixed_point 16": numerics.fixed_point(x, 16)[1],
        "exact_sum": numerics.exact_sum(x),
        "rms_norm": numerics.rms_norm(x, jnp.ones(40), 1e-6, True),
        "softmax": numerics.softmax(x, True),
        "log_sum_exp": numerics.log_sum_exp(x, True),
    }


# Sums


@pytest.mark.parametrize("n", (1, 100, 2048, 3072, 4099))
def test_exact_sum(n):
    """4099 is prime and 3072 is not: long axes are summed in folds, padded where nothing divides them."""
    x = normal(n, 64, n, spread=2)
    order = np.random.default_rng(0).permutation(n)
    total, others = jax.jit(
        lambda x: (numerics.exact_sum(x), [numerics.exact_sum(x[:, order]), numerics.exact_sum(x.T, 0).T, numerics.exact_sum(x[:1])])
    )(x)
    for other in others[n > 2048 :]:  # where it is folded, the sum knows which terms share a fold
        assert_same_bits(other, total[: len(other)])
    total = np.asarray(total, np.float64)
    assert total.shape == (64, 1)
    # Rounding errors of up to half a step a term add up like a random walk; a second fold rounds a thousandth as often.
    width = min(n, 1024 if n > 2048 else n)
    step = np.abs(x).max(-1, keepdims=True) * 2.0 ** (1 + math.ceil(math.log2(max(width, 2))) - 30)
    fold_step = np.abs(total) * 2**-20 if n > 2048 else 0
    exact = x.astype(np.float64).sum(-1, keepdims=True)
    assert (np.abs(total - exact) <= 6 * step * math.sqrt(n / 12) + fold_step + np.abs(exact) * 2**-23).all()


@pytest.mark.parametrize("n", (1, 40, 1000))
def test_sum_of_probabilities_knows_no_padding_split_or_order(n):
    rng = np.random.default_rng(n)
    p = rng.uniform(size=(6, n)).astype(f32)
    p[0] = 1
    cut, order = n // 3, rng.permutation(n)
    padded = np.pad(p[:, cut:], ((0, 0), (4, 13)))
    ways = ([p], [p[:, order]], [p[:, :cut], padded], [padded, p[:, :cut]], [p[:1]])
    total, *others = jax.jit(lambda ways: [numerics.sum_of_probabilities(parts) for parts in ways])(ways)
    assert (np.abs(total - p.astype(np.float64).sum(-1, keepdims=True)) <= n * 2.0**-25 + np.asarray(total) * 2.0**-22).all()
    for other in others:
        assert_same_bits(other, total[: len(other)])


@pytest.mark.parametrize("groups", (2, 7, 12))
def test_sum_of_groups(groups):
    """The integers that NumPy gives by rounding one term at a time, whatever the order of the groups and the rows beside."""
    rng = np.random.default_rng(groups)
    d = rng.integers(-(2**22), 2**22, (groups, 9, 13)).astype(f32)
    ratio = (2.0 ** rng.uniform(-9, 4, (groups, 13))).astype(f32)
    order = rng.permutation(groups)
    ways = [(d, ratio), (d[order], ratio[order]), (d[:, :1], ratio)]
    total, *others = jax.jit(lambda ways: [numerics.sum_of_groups(*way) for way in ways])(ways)
    assert total.dtype == np.int32
    for other in others:
        np.testing.assert_array_equal(other, total[: len(other)])
    np.testing.assert_array_equal(total, np.round(d * ratio[:, None]).astype(np.int64).sum(0))


@pytest.mark.parametrize("n_bits", (8, 16))
@pytest.mark.parametrize("groups", (1, 5, 48))
def test_product_with_sums(groups, n_bits):
    """Within the 24 bits of a bias, and the last rounding, of float64; whatever the order of groups, features and rows."""
    rng = np.random.default_rng(groups)
    limit = numerics.LIMIT[n_bits]
    q = rng.integers(-limit, limit + 1, (9, groups, 32)).astype(f32)
    bias = (rng.choice([-1, 1], (groups, 13)) * 2.0 ** rng.uniform(-3, 4, (groups, 13))).astype(f32)
    unit = numerics.power_of_two_above(np.abs(bias).max(0)) * 2.0 ** (n_bits + 5 + 6 - 30)
    order = rng.permutation(groups)
    ways = [(q, bias), (q[:, order], bias[order]), (q[..., rng.permutation(32)], bias), (q[:1], bias)]
    total, *others = jax.jit(lambda ways: [numerics.product_with_sums(x, n_bits, b, unit) for x, b in ways])(ways)
    for other in others:
        np.testing.assert_array_equal(other, total[: len(other)])
    exact = np.einsum("mg,gn->mn", q.astype(np.float64).sum(-1), bias.astype(np.float64)) / np.asarray(unit, np.float64)
    size = np.abs(q.astype(np.float64)).sum((1, 2))[:, None] * np.abs(bias).max(0) / np.asarray(unit, np.float64)
    assert total.dtype == np.int32 and (np.abs(total - exact) <= 1 + size * 2.0**-22).all()


# Contractions

CONTRACTIONS = ((1, 1, 40, 5), (3, 3, 32, 1), (16, 2, 37, 33), (2, 1, 192, 3))  # M, G, k, N


@pytest.mark.parametrize("code_bits", (4, 5, 8, 16, 24))
@pytest.mark.parametrize("n_bits", (8, 16))
def test_contract_equals_integers(monkeypatch, n_bits, code_bits):
    rng = np.random.default_rng(code_bits)
    limit = {4: 8, 5: 16, 8: 127, 16: numerics.LIMIT[16], 24: 448 * 512}[code_bits]
    dtype = {4: np.float32, 5: np.float32, 8: np.int8, 16: np.int16, 24: np.float32}[code_bits]
    q = [rng.integers(-numerics.LIMIT[n_bits], numerics.LIMIT[n_bits] + 1, (m, g, k)) for m, g, k, _ in CONTRACTIONS]
    codes = [rng.integers(-limit, limit if code_bits < 8 else limit + 1, (g, k, n)) for _, g, k, n in CONTRACTIONS]
    if code_bits == 24:  # e4m3 numbers: at most four bits in a row of the 18 are set
        codes = [(np.asarray((x / 512).astype(ml_dtypes.float8_e4m3fn), f32) * 512).astype(int) for x in codes]
    small = [np.clip(x, -99, 99) for x in q], [np.clip(x, -99, 99) for x in codes]  # whose sums need no rounding

    def engine(small_integer_dots):
        monkeypatch.setattr(numerics, "small_integer_dots", lambda: small_integer_dots)
        every = jax.jit(lambda q, codes: [numerics.contract(a, n_bits, b, code_bits) for a, b in zip(q, codes)])
        run = lambda q, codes: jax.device_get(every([x.astype(f32) for x in q], [x.astype(dtype) for x in codes]))
        return run(q, codes), run(*small)

    product = functools.partial(np.einsum, "mgk,gkn->gmn")
    (found, plain), (other, _) = engine(True), engine(False)
    for a, b, one, two, easy in zip(q, codes, found, other, plain):
        assert_same_bits(one, two)
        if code_bits <= 5:  # one rounding
            np.testing.assert_array_equal(one, product(a, b).astype(f32))
        else:  # one a place value, of which there are at most four
            assert (np.abs(one - product(a, b)) <= 2.0**-22 * product(abs(a), abs(b))).all()
        np.testing.assert_array_equal(easy, product(np.clip(a, -99, 99), np.clip(b, -99, 99)))


@pytest.mark.parametrize("small_integer_dots", (True, False))
@pytest.mark.parametrize("n_bits", (8, 16))
@pytest.mark.parametrize(
    "code_bits, k, top_code",
    [(4, 8192, 8), (4, 2**16, 8), (5, 4096, 16), (5, 2**16, 16), (8, 2**16, 128), (16, 2**16, 32639), (24, 2**16, 448 * 512)],
)
def test_contract_does_not_overflow(monkeypatch, n_bits, small_integer_dots, code_bits, k, top_code):
    """All codes at their ends over the most features that int32 holds."""
    monkeypatch.setattr(numerics, "small_integer_dots", lambda: small_integer_dots)
    top = numerics.LIMIT[n_bits]
    lowest = [x for x in range(-top, 1) if x % 256 == 128][:1] if n_bits == 16 else []  # whose low slice is as far from 0 as may be
    values = np.array([top, -top, *lowest])
    q = np.broadcast_to(values[:, None, None], (len(values), 1, k)).astype(f32)
    for code in (-top_code, top_code // 2):
        found = jax.jit(numerics.contract, static_argnums=(1, 3))(q, n_bits, np.full((1, k, 1), code, f32), code_bits)
        np.testing.assert_allclose(
            found[0, :, 0], (values * code * float(k)).astype(f32), rtol=0 if code_bits <= 5 and k <= 8192 else 2.0**-22
        )


def test_contract_refuses_what_could_overflow():
    with pytest.raises(ValueError, match="found 65537 input features to a group of scales, need at most 65536"):
        numerics.contract(np.ones((1, 1, 2**16 + 1), f32), 8, np.ones((1, 2**16 + 1, 1), np.int8), 8)


# Norms and normalizers

NORMS = {
    "rms_norm": lambda x, exact: numerics.rms_norm(x, 1.25, 1e-6, exact),
    "softmax": numerics.softmax,
    "log_sum_exp": numerics.log_sum_exp,
}


def float64(name, x):
    x = x.astype(np.float64)
    if name == "rms_norm":
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-6) * 1.25
    top = x.max(-1, keepdims=True)
    total = np.exp(x - top).sum(-1, keepdims=True)
    return np.exp(x - top) / total if name == "softmax" else top + np.log(total)


@pytest.mark.parametrize("width", (257, 2049))
@pytest.mark.parametrize("name", NORMS)
def test_norms(name, width):
    """Close to float64 relative to a row's largest value, whatever the rows beside it and the order of its terms; and the float
    twin's derivative."""
    f = NORMS[name]
    x = normal(width, 13, width, spread=1)
    order = np.random.default_rng(0).permutation(width)
    expected = float64(name, x)
    dy = normal(width + 1, *expected.shape)

    @jax.jit
    def run(x):
        grads = [jax.vjp(functools.partial(f, exact=exact), x)[1](dy)[0] for exact in (True, False)]
        return f(x, True), f(x[:1], True), f(x[:, order], True), grads

    found, first, ordered, grads = jax.device_get(run(x))
    # A sum of n positive terms up to 1 errs by about sqrt(n) halves of a step of 2^(log2(n) - 29): 2^-17 at 2048.
    bound = 1e-5 if name == "softmax" else 1e-6
    assert (np.abs(found - expected) <= bound * np.abs(expected).max(-1, keepdims=True)).all()
    assert_same_bits(first, found[:1])
    if width <= 2048:  # in one fold
        assert_same_bits(ordered, found if found.shape[1] == 1 else found[:, order])
    np.testing.assert_allclose(*grads, atol=1e-5 * np.abs(grads[1]).max())


@pytest.mark.parametrize("vocabulary", (32_001, 151_936))
@pytest.mark.parametrize("tail", (0.1, 1e-3))
def test_log_sum_exp_of_a_vocabulary(vocabulary, tail):
    """Where one token is nearly certain, the rest is small and many: none of it may be rounded away."""
    rng = np.random.default_rng(vocabulary)
    z = rng.normal(size=(2, vocabulary)) * [[0], [2]]
    z += np.log(tail) - np.log(np.sum(np.exp(z), -1, keepdims=True))
    z[:, 5] = 0
    z = z.astype(f32)
    found = jax.jit(functools.partial(numerics.log_sum_exp, exact=True))(z)
    np.testing.assert_allclose(found[:, 0], np.log(np.sum(np.exp(z.astype(np.float64)), -1)), atol=1e-5)


def test_log_sum_exp_adds_integers():
    """Of terms whose integer sum is known: what no float sum gives, whatever its order. One large term swallows the small ones of a
    float accumulator, and a column's order cannot be seen within a fold."""
    width = 2048
    z = np.full((3, width), np.log(2.0**-23 * 0.75), f32)  # a float sum that starts from the 1 adds an ulp or nothing each
    z[:, 0] = 0
    z[1, [0, 77]] = z[1, [77, 0]]
    z[2, [0, -1]] = z[2, [-1, 0]]
    small = np.float64(jax.jit(numerics.exp)(z[:1, 1])[0])
    s = 2.0 * 2.0 ** (11 - 30)  # the sum's unit: the power of two above 1, and 2048 terms in 30 bits
    integers = round(1 / s) + (width - 1) * round(small / s)
    found = jax.jit(functools.partial(numerics.log_sum_exp, exact=True))(z)
    assert_same_bits(found, np.full((3, 1), jax.jit(numerics.log)(f32(integers * s))))
    assert_same_bits(found[:1], jax.jit(numerics.log)(f32(1)).reshape(1, 1))  # the small ones are below half a unit


@pytest.mark.parametrize("name", ("softmax", "log_sum_exp"))
def test_sums_know_no_order_of_many_terms(name):
    """Permutations of rows, of the terms within one, and rows alone, over random terms of one fold: a float sum differs in some."""
    f = functools.partial(NORMS[name], exact=True)
    x = normal(11, 64, 2048, spread=1)
    order = np.random.default_rng(0).permutation(2048)
    rows = np.random.default_rng(1).permutation(64)
    found, ordered, moved, alone = jax.jit(lambda x: (f(x), f(x[:, order]), f(x[rows]), f(x[5:6])))(x)
    assert_same_bits(ordered, found if name == "log_sum_exp" else found[:, order])
    assert_same_bits(moved, found[rows])
    assert_same_bits(alone, found[5:6])
    naive = jnp.sum(jnp.exp(x - x.max(-1, keepdims=True)), -1), jnp.sum(jnp.exp((x - x.max(-1, keepdims=True))[:, order]), -1)
    assert (naive[0] != naive[1]).any()  # so a float sum would have been seen

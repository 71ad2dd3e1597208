"""Packed weights and the product with them: what is stored, what it costs, how far it is from float64, and the bits of a row."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import reference
from quick import QUICK

from rl_adapter import mesh as meshes
from rl_adapter import model as models
from rl_adapter import numerics, quant
from rl_adapter.hub import save
from rl_adapter.types import Numerics

f32 = np.float32
FLOAT, A16, A8 = Numerics("float"), Numerics("exact", 16), Numerics("exact", 8)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(f32)


def columns(seed, k, n, lead=()):
    """Weights whose columns differ in size, as a trained model's do."""
    return normal(seed, *lead, k, n) * 2.0 ** np.random.default_rng(seed).uniform(-4, 0, n).astype(f32) / f32(np.sqrt(k))


# What is stored


@pytest.mark.parametrize("shape", ((2, 6, 5), (3, 1, 32, 7), (2, 4, 2, 40, 3)), ids=str)
def test_int4_packs_two_codes_a_byte(shape):
    rng = np.random.default_rng(0)
    codes = rng.integers(-8, 8, shape).astype(np.int8)
    w = quant.pack(codes, np.ones((*shape[:-2], shape[-1]), f32))
    assert w.qvalue.nbytes * 2 == codes.size and w.qvalue.dtype == np.uint8
    np.testing.assert_array_equal(jax.jit(quant.unpack, static_argnums=0)(w.form, w.qvalue), codes)
    np.testing.assert_array_equal(quant.split_nibbles(w.qvalue).astype(int) - 8, codes)
    assert quant.shape(w) == (*shape[:-3], shape[-3] * shape[-2], shape[-1])


@pytest.mark.parametrize(
    "form, k, lead",
    [("int4", 40, ()), ("int4", 34, (3,)), ("int4_g32", 96, (2, 3)), ("int4_g128", 256, ()), ("int8", 41, (2,)), ("fixed16", 41, (2,))],
)
def test_quantize_rounds_to_the_grid(form, k, lead):
    w = columns(1, k, 17, lead)
    w[..., 3] = 0
    n_bits, group = quant.FORMS[form]
    group = group or k
    q = quant.quantize(w, form)
    assert quant.shape(q) == w.shape and quant.STORED[q.form].bits == n_bits
    assert q.qvalue.nbytes == w.size * n_bits // 8
    scale, grouped = q.scale[0], w.reshape(*lead, k // group, group, 17)
    amax = np.abs(grouped).max(-2)
    if n_bits == 16:
        assert (np.frexp(scale)[0] == 0.5).all() and (scale <= np.maximum(2 * amax / 32639, 1e-33)).all()
    else:
        np.testing.assert_allclose(scale, np.maximum(amax, 1e-30) / {4: 7, 8: 127}[n_bits], rtol=1e-6)
    value = reference.decode(q)
    assert (np.abs(value - w).reshape(grouped.shape) <= scale[..., None, :] / 2 * (1 + 1e-6)).all()
    np.testing.assert_allclose(jax.jit(quant.dequantize)(q), value, rtol=1e-6)
    np.testing.assert_array_equal(reference.decode(quant.quantize(value.astype(f32), form)).astype(f32), value.astype(f32))


def test_fixed16_keeps_bfloat16():
    """Exactly from 2^-7 of a column's largest weight up (8 bits of 15); what is smaller errs by at most half a step, 2^-15 of it."""
    w = columns(2, 300, 9).astype(ml_dtypes.bfloat16).astype(f32)
    top = np.abs(w).max(0)
    error = np.abs(reference.decode(quant.quantize(w, "fixed16")) - w)
    assert (error[np.abs(w) >= top * 2.0**-7] == 0).all()
    assert (error <= top / 32639).all() and (error > 0).any()


def test_quantize_refuses():
    for w, form, message in [
        (np.ones((40, 3)), "int3", "quantize.q: found 'int3'"),
        (np.ones((40, 3)), "int4_g32", "q: 40 input features do not divide into groups of 32"),
        (np.ones((41, 3)), "int4", "q: 41 input features"),
        (np.full((40, 3), np.nan), "int8", "q: holds NaN or Inf"),
        (np.full((40, 3), np.inf), "fixed16", "q: holds NaN or Inf"),
    ]:
        with pytest.raises(ValueError, match=message):
            quant.quantize(w, form, "q")


@pytest.mark.parametrize("group", (32, 40))
def test_fake_quantize_is_the_grid_that_is_saved(group):
    """Under jit, where a pair of casts to bfloat16 and back would have been compiled away. The gradient passes straight through."""
    w = columns(3, 3 * group, 21)
    w[:group, 0] = 0

    @jax.jit
    def run(w):
        y, vjp = jax.vjp(functools.partial(quant.fake_quantize, group=group), w)
        return y, vjp(jnp.cos(w))[0]

    value, grad = run(w)
    np.testing.assert_array_equal(value, reference.decode(save.round_to_grid(w, group)).astype(f32))
    np.testing.assert_array_equal(grad, jnp.cos(w))


def test_digest_is_of_every_byte():
    spec = reference.tiny_spec(vocab=16, experts=2)
    base = reference.random_base(0, spec)
    digest = quant.digest(base)
    assert digest == quant.digest(reference.random_base(0, spec))
    assert digest == quant.digest(jax.tree.map(jnp.asarray, base))
    placed = models.place(spec, base, meshes.make(1, 2, 2), 8).replace(rope=None)
    assert digest == quant.digest(placed)
    leaves, structure = jax.tree.flatten(base)
    others = {digest}
    for i, leaf in enumerate(leaves):
        changed = np.array(leaf)
        changed.view(np.uint8).reshape(-1)[-1] ^= 1
        for other in (changed, np.array(leaf)[None], np.array(leaf).view(f"u{leaf.dtype.itemsize}" if leaf.dtype != np.uint8 else "i1")):
            others.add(quant.digest(structure.unflatten([*leaves[:i], other, *leaves[i + 1 :]])))
    assert len(others) == 1 + 3 * len(leaves)


# The product

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]  # what the lower three bits of a nibble say; the fourth is the sign


def nibble(code, form):
    if form == "fp4":
        return -E2M1[code - 8] if code > 7 else E2M1[code]
    return code - 8 if form == "int4" else code


def made(form, k, n, groups, seed=4, kind="", lead=()):
    """A random weight [*lead, K, N] as a checkpoint may hold it, and its float64 value, read one code at a time.

    kind: "e8m0" scales, fp8 ones "times" a global one, a scale for each of "some" groups only, in another "order".
    """
    rng = np.random.default_rng(seed)
    size = k // groups
    if quant.STORED[form].nibbles:
        codes = rng.integers(0, 16, (*lead, groups, size, n)).astype(np.uint8)
        values = np.vectorize(lambda c: nibble(c, form), otypes=[np.float64])(codes)
        stored = np.zeros((*lead, groups, size // 2, n), np.uint8)
        for i in range(size // 2):
            stored[..., i, :] = codes[..., i, :] + 16 * codes[..., i + size // 2, :]
    elif form == "fp8":
        stored = (rng.normal(size=(*lead, groups, size, n)) * 60).astype(ml_dtypes.float8_e4m3fn)
        stored.reshape(-1)[:4] = [448, -448, 2.0**-9, 0]  # the ends, and the smallest
        values = stored.astype(np.float64)
    else:
        stored = rng.integers(-128, 128, (*lead, groups, size, n)).astype(np.int8)
        values = stored.astype(np.float64)
    typical = 1 / np.sqrt(k) / np.sqrt(np.mean(values**2))
    of_scale = lambda *shape: typical * 2.0 ** rng.uniform(-3, 1, shape)
    if kind == "e8m0":
        exponent = rng.integers(116, 124, (*lead, groups, n)).astype(np.uint8)
        scale, total = [exponent], 2.0 ** (exponent.astype(np.float64) - 127)
    elif kind == "times":
        scale = [(of_scale(*lead, groups, n) * 100).astype(ml_dtypes.float8_e4m3fn), np.full((*lead, 1, 1), 0.0123, f32)]
        total = scale[0].astype(np.float64) * scale[1].astype(np.float64)
    elif kind == "some":
        scale = [of_scale(*lead, 1, n).astype(f32)]
        total = np.broadcast_to(scale[0].astype(np.float64), (*lead, groups, n))
    else:
        scale = [of_scale(*lead, groups, n).astype(ml_dtypes.bfloat16)]
        total = scale[0].astype(np.float64)
    value = values * total[..., None, :]
    bias = None
    if form == "uint4":
        bias = (total * rng.uniform(4, 11, total.shape)).astype(f32)
        value = value - bias[..., None, :]
    value = value.reshape(*lead, k, n)
    if kind != "order":
        return quant.weight(form, stored, *scale, bias=bias), value
    order = np.stack([rng.permutation(k) for _ in range(int(np.prod(lead)))]).reshape(*lead, k).astype(np.int32)
    out = np.zeros_like(value)
    for at in np.ndindex(*lead, k):
        out[at[:-1]][order[at]] = value[at]
    return quant.weight(form, stored, *scale, bias=bias, order=order), out


WEIGHTS = {
    "int4": (40, 17), "int4_g32": (192, 33), "int8": (41, 5), "fixed16": (48, 19), "trainable": (40, 3),  # as `quantize` makes them
    "int4, 12 groups": ("int4", 96, 5, 12), "int4, 13 groups": ("int4", 26 * 13, 5, 13),
    "int4, 16 groups, in order": ("int4", 64, 9, 16, "order"),
    "uint4": ("uint4", 96, 17, 3), "uint4, a channel": ("uint4", 40, 5, 1), "uint4, 11 groups, in order": ("uint4", 88, 5, 11, "order"),
    "fp4, e8m0": ("fp4", 96, 7, 3, "e8m0"), "fp4, fp8 and global": ("fp4", 16 * 9, 7, 9, "times"), "fp4, a channel": ("fp4", 40, 5, 1),
    "int8, groups": ("int8", 90, 7, 10), "int8, in order": ("int8", 41, 5, 1, "order"),
    "fp8": ("fp8", 41, 7, 1), "fp8, groups": ("fp8", 90, 7, 10), "fp8, one scale of all groups": ("fp8", 96, 7, 3, "some"),
}  # fmt: skip
ROWS = slice(0, 1), slice(3, None)


def weight(name, seed=4):
    """A weight and its float64 value."""
    form, *rest = WEIGHTS[name]
    if isinstance(form, str):
        k, n, groups, *kind = rest
        return made(form, k, n, groups, seed, *kind)
    w = columns(seed, form, *rest)
    w = w if name == "trainable" else quant.quantize(w, name)
    return w, reference.decode(w)


def product(x, w, numeric):
    """The product, the gradient of its sum weighted by cosines, and the product of some rows alone."""
    if not quant.is_quantized(w):
        w = quant.trainable(w, numeric)
    y, vjp = jax.vjp(lambda x, w: quant.matmul(x, w, numeric), x, w)
    dx, dw = vjp(jnp.cos(y * 3))
    parts = [quant.matmul(x.reshape(16, -1)[rows], w, numeric) for rows in ROWS if numeric.exact]
    return y, dx, None if quant.is_quantized(w) else dw.master, parts


@pytest.mark.parametrize("name", WEIGHTS)
def test_product(name, monkeypatch):
    """Rows [2, 8, K] with an outlier each. In exact mode an activation errs by half a step, 2^(1 - bits) of its row's largest, so an
    output errs by at most that times the sum of |w|, and like a random walk in fact; a tenth is for what is rounded after. The engine
    of the integers cannot be seen."""
    w, dense = weight(name)
    k = len(dense)
    assert quant.shape(w) == dense.shape
    x = normal(5, 2, 8, k) * np.where(np.arange(k) == 3, f32(6), 1)
    expected = x.astype(np.float64) @ dense
    made_here = isinstance(WEIGHTS[name][0], int)
    options = None if made_here else QUICK
    for numeric in (FLOAT, A16, A8) if made_here else (FLOAT, A16):
        run = jax.jit(product, static_argnums=2, compiler_options=options)
        y, dx, dw, parts = jax.device_get(run(x, w, numeric))
        if numeric.exact:
            step = 2.0 ** (1 - numeric.act_bits) * np.abs(x).max(-1, keepdims=True)
            assert (np.abs(y - expected) <= 1.1 * step * np.abs(dense).sum(0)).all()
            spread = np.sqrt(np.mean((y - expected) ** 2 / (step**2 * (dense**2).sum(0) / 3)))
            assert spread < 1.2
            for rows, part in zip(ROWS, parts):
                np.testing.assert_array_equal(part, y.reshape(16, -1)[rows])
        else:
            np.testing.assert_allclose(y, expected, atol=1e-6 * np.abs(expected).max())
        dy = np.cos(y.astype(np.float64) * 3)
        np.testing.assert_allclose(dx, dy @ dense.T, atol=1e-5 * np.abs(dense).sum())
        if name == "trainable":
            np.testing.assert_allclose(dw, x.reshape(-1, k).T.astype(np.float64) @ dy.reshape(-1, dy.shape[-1]), atol=1e-4)
        elif numeric.exact:
            with monkeypatch.context() as m:
                m.setattr(numerics, "small_integer_dots", lambda: False)
                other = jax.jit(lambda x, w: quant.matmul(x, w, numeric), compiler_options=QUICK)
                np.testing.assert_array_equal(other(x, w), y)


def test_product_of_integers_is_exact():
    """Integer rows and weights whose scales are powers of two: what int64 gives, of every form, where nothing needs rounding."""
    rng = np.random.default_rng(3)
    for form in ("int4", "uint4", "fp4", "int8", "fp8"):
        w, _ = made(form, 96, 9, 3)
        w = quant.weight(form, w.qvalue, np.full((3, 9), 2.0, f32), bias=np.full((3, 9), 14.0, f32) if form == "uint4" else None)
        dense = np.asarray(quant.dequantize(w), np.float64)
        assert (dense * 256 % 1 == 0).all()
        x = rng.integers(-100, 101, (5, 96)).astype(f32)
        found = jax.jit(lambda x, w: quant.matmul(x, w, A16))(x, w)
        unit = 2.0 ** (np.ceil(np.log2(np.abs(dense).max() * 4)) + 7 + 15 - 30) * 2.0**-8  # of the last integer, times a row's scale
        np.testing.assert_allclose(found, x.astype(np.float64) @ dense, atol=0 if form != "fp8" else 3 * unit, rtol=2.0**-23)


def test_sums_of_many_inputs_are_exact():
    """What a bias is multiplied with: the sum of a row's integers, over a group so large that float32 does not hold what it adds up."""
    k = 8192
    x = (1 + 0.9 * np.random.default_rng(8).uniform(size=(9, k))).astype(f32)  # all have the fixed point 2^-14
    w = quant.weight("uint4", np.zeros((1, k // 2, 1), np.uint8), np.full((1, 1), 1 / 16, f32), bias=np.ones((1, 1), f32))
    sums = np.round(x.astype(np.float64) * 2.0**14).sum(-1)
    assert (sums > 2**24).all() and (sums % 16 > 0).any()
    found, again = jax.jit(lambda x, other, w: (quant.matmul(x, w, A16), quant.matmul(other, w, A16)))(x, x[:, ::-1], w)
    np.testing.assert_array_equal(again, found)  # an order of which float32 would show
    np.testing.assert_allclose(found[:, 0], -sums * 2.0**-14, rtol=1.2e-7)


def test_stacked_weights_decode_like_their_parts():
    """Experts of a layer: leading axes of codes, scales, biases and order."""
    for form, kind in (("int4", "order"), ("uint4", "order"), ("fp4", "times"), ("fp8", "some"), ("int8", "")):
        w, dense = made(form, 96, 5, 3, kind=kind, lead=(2, 3))
        assert quant.shape(w) == (2, 3, 96, 5)
        np.testing.assert_allclose(jax.jit(quant.dequantize)(w), dense, rtol=1e-6, atol=1e-7 * np.abs(dense).max())


def test_columns():
    """Of a head that serves as the embedding: rows of its transpose."""
    index = np.array([[0, 4, 4], [6, 2, 0]])
    for args in (("int4", 96, 7, 3), ("uint4", 96, 7, 3, 4, "order"), ("fp4", 96, 7, 6, 4, "times"), ("fp8", 41, 7, 1, 4, "some")):
        w, dense = made(*args)
        found = jax.jit(quant.columns)(w, index)
        assert found.shape == (2, 3, len(dense))
        np.testing.assert_array_equal(found, np.asarray(quant.dequantize(w)).T[index])
        np.testing.assert_allclose(found, dense.T[index], rtol=1e-6, atol=1e-7)
    w = quant.weight("fp8", np.ones((1, 6, 7), ml_dtypes.float8_e4m3fn), np.full((1, 1), 0.5, f32))  # a scale for all columns
    np.testing.assert_array_equal(quant.columns(w, index), np.full((2, 3, 6), 0.5))


def test_codes_of_another_dtype_are_refused():
    with pytest.raises(ValueError, match="fp8: found codes in uint8, need float8_e4m3fn"):
        quant.weight("fp8", np.zeros((1, 4, 3), np.uint8), np.ones((1, 3), f32))


def test_float_weights_are_refused_in_exact_mode():
    with pytest.raises(ValueError, match="numerics: 'exact' needs every weight quantized"):
        quant.matmul(jnp.ones((2, 8)), jnp.ones((8, 4)), A16)


def test_bad_activations_spoil_their_row_and_no_other():
    w, _ = weight("int4_g32")
    x = normal(6, 5, 192)
    x[1, 7], x[3, 0] = np.nan, np.inf
    y = np.asarray(jax.jit(lambda x, w: quant.matmul(x, w, A16))(x, w))
    np.testing.assert_array_equal(np.isfinite(y).all(-1), [True, False, True, False, True])
    assert not np.isfinite(y[[1, 3]]).any()

"""Packed weights and the product with them: what is stored, what it costs, how far it is from float64, and the bits of a row."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import reference

from rl_adapter import mesh as meshes
from rl_adapter import model as models
from rl_adapter import quant
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
    np.testing.assert_array_equal(jax.jit(quant.unpack)(w), codes)
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
    assert quant.shape(q) == w.shape and quant.bits(q) == n_bits
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

WEIGHTS = {"int4": (40, 17), "int4_g32": (192, 33), "int8": (41, 5), "fixed16": (48, 19), "trainable": (40, 3)}


ROWS = slice(0, 1), slice(3, None)


def weight(name, seed=4):
    w = columns(seed, *WEIGHTS[name])
    return w if name == "trainable" else quant.quantize(w, name)


@functools.partial(jax.jit, static_argnums=2)
def product(x, w, numeric):
    """The product, the gradient of its sum weighted by cosines, and the product of some rows alone."""
    if not quant.is_quantized(w):
        w = quant.trainable(w, numeric)
    y, vjp = jax.vjp(lambda x, w: quant.matmul(x, w, numeric), x, w)
    dx, dw = vjp(jnp.cos(y * 3))
    parts = [quant.matmul(x.reshape(16, -1)[rows], w, numeric) for rows in ROWS if numeric.exact]
    return y, dx, None if quant.is_quantized(w) else dw.master, parts


@pytest.mark.parametrize("name", WEIGHTS)
def test_product(name):
    """Rows [2, 8, K] with an outlier each. In exact mode an activation errs by half a step, 2^(1 - bits) of its row's largest, so an
    output errs by at most that times the sum of |w|, and like a random walk in fact; a tenth is for what is rounded after."""
    w, k = weight(name), WEIGHTS[name][0]
    x = normal(5, 2, 8, k) * np.where(np.arange(k) == 3, f32(6), 1)
    dense = reference.decode(w)
    expected = x.astype(np.float64) @ dense
    for numeric in (FLOAT, A16, A8):
        y, dx, dw, parts = jax.device_get(product(x, w, numeric))
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


def test_float_weights_are_refused_in_exact_mode():
    with pytest.raises(ValueError, match="numerics: 'exact' needs every weight quantized"):
        quant.matmul(jnp.ones((2, 8)), jnp.ones((8, 4)), A16)


def test_bad_activations_spoil_their_row_and_no_other():
    w = weight("int4_g32")
    x = normal(6, 5, 192)
    x[1, 7], x[3, 0] = np.nan, np.inf
    y = np.asarray(jax.jit(lambda x, w: quant.matmul(x, w, A16))(x, w))
    np.testing.assert_array_equal(np.isfinite(y).all(-1), [True, False, True, False, True])
    assert not np.isfinite(y[[1, 3]]).any()

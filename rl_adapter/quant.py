"""The frozen base's weights: packed codes with scales, as they lie on disk, and the matrix product with them. The only importer of aqt.

A weight is contracted over its input features, which come in G groups of g with one scale each (G = 1: one scale a channel).

    form     qvalue                          bytes  a code is
    int4     uint8 [..., G, g/2, N]          0.5    a nibble minus 8
    uint4    uint8 [..., G, g/2, N]          0.5    a nibble; `bias` holds what is subtracted
    fp4      uint8 [..., G, g/2, N]          0.5    an e2m1 float in a nibble
    int8     int8  [..., G, g, N]            1      -128..127
    fp8      float8_e4m3fn [..., G, g, N]    1      an e4m3 float
    fixed16  int16 [..., 1, K, N]            2      what 16-bit floats become: fixed point relative to the column's largest weight

Of nibbles the low one is feature j and the high one feature j + g/2 of a group. `scale` is a list of arrays to be multiplied, [..., G, N]
or broadcast against it, in the dtype that they have on disk; uint8 ones are e8m0 exponents. `bias` is an empty list or [b]: value =
code * scale - b. Where features are grouped out of order (GPTQ's act-order), `order` [..., K] says which input each stored one is.

Nibbles are packed by hand: XLA's CPU backend widens a whole `jnp.int4` array, all layers of it, at every call.
"""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from aqt.jax.v2.aqt_tensor import QTensor
from flax import struct

from rl_adapter import numerics
from rl_adapter.types import Array, Numerics, PyTree

f32 = jnp.float32
ROWS, UNROLL = 128, 64  # rows, and groups at most, that are multiplied at once where there are groups
CACHED = 2**14  # elements of a group's product above which a CPU multiplies group by group
FORMS = {"int4": (4, 0), "int4_g32": (4, 32), "int4_g128": (4, 128), "int8": (8, 0), "fixed16": (16, 0)}  # bits, group (0: the channel)


@dataclasses.dataclass(frozen=True)
class Form:
    """How codes of one kind are stored and multiplied."""

    dtype: str
    bits: int  # of the integers that a contraction sees, as `numerics.contract` counts them
    largest: int  # of those integers
    unit: float = 1.0  # value of the integer 1
    nibbles: bool = False


STORED = {
    "int4": Form("uint8", 4, 8, nibbles=True),
    "uint4": Form("uint8", 5, 15, nibbles=True),
    "fp4": Form("uint8", 5, 12, 0.5, nibbles=True),
    "int8": Form("int8", 8, 128),
    "fp8": Form("float8_e4m3fn", 24, 448 * 512, 2.0**-9),
    "fixed16": Form("int16", 16, numerics.LIMIT[16]),
}


@struct.dataclass
class Weight:
    """AQT's QTensor, and what its codes mean."""

    tensor: QTensor
    form: str = struct.field(pytree_node=False)
    order: Array | None = None

    @property
    def qvalue(self) -> Array:
        return self.tensor.qvalue

    @property
    def scale(self) -> list[Array]:
        return self.tensor.scale

    @property
    def bias(self) -> list[Array]:
        return self.tensor.bias


@struct.dataclass
class Trainable:
    """A float32 matrix that is optimized, and the same in fixed point, made once per update, that the exact forward pass reads."""

    master: Array  # [..., K, R]
    fixed: PyTree  # fixed16 Weight; None in float mode


def is_quantized(w: PyTree) -> bool:
    return isinstance(w, Weight)


def weight(form: str, qvalue: Array, *scale: Array, bias: Array | None = None, order: Array | None = None) -> Weight:
    if jnp.dtype(qvalue.dtype) != STORED[form].dtype:
        raise ValueError(f"{form}: found codes in {qvalue.dtype}, need {STORED[form].dtype}")
    bias = [] if bias is None else [bias]
    return Weight(QTensor(qvalue=qvalue, scale=list(scale), scale_t=None, bias=bias, dequant_dtype=f32), form, order)


def shape(w: PyTree) -> tuple[int, ...]:
    """The logical shape [..., K, N] of a weight."""
    if isinstance(w, Trainable):
        return w.master.shape
    if not is_quantized(w):
        return w.shape
    *lead, groups, width, n = w.qvalue.shape
    return (*lead, groups * width * (2 if STORED[w.form].nibbles else 1), n)


def join_nibbles(nibbles: np.ndarray) -> np.ndarray:
    """Nibbles uint8 [..., G, g, N] -> packed qvalue [..., G, g/2, N] (host arrays)."""
    half = nibbles.shape[-2] // 2
    return nibbles[..., :half, :] | (nibbles[..., half:, :] << 4)


def split_nibbles(qvalue: np.ndarray) -> np.ndarray:
    """The inverse of `join_nibbles`."""
    return np.concatenate([qvalue & 15, qvalue >> 4], -2)


def pack(codes: np.ndarray, scale: np.ndarray) -> Weight:
    """Integer codes -8..7 [..., G, g, N] (int8) with scales [..., G, N] -> INT4 Weight (host arrays)."""
    return weight("int4", join_nibbles((codes.astype(np.int8) + 8).astype(np.uint8)), scale)


def unpack(form: str, qvalue: Array) -> Array:
    """Codes as integers [..., G, g, N] in units of the form's `unit`: int8 and int16 as they are, else exact in f32."""
    if form == "fp8":
        return qvalue.astype(f32) / STORED[form].unit
    if not STORED[form].nibbles:
        return qvalue
    shift = jnp.array([0, 4], jnp.int32)[:, None, None]  # a broadcast runs in vectors, a concatenation element by element
    nibbles = (qvalue[..., None, :, :].astype(jnp.int32) >> shift) & 15
    if form == "fp4":
        exponent, mantissa = (nibbles >> 1) & 3, nibbles & 1
        magnitude = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent - 1, 0))
        codes = jnp.where(nibbles > 7, -magnitude, magnitude).astype(f32)
    else:
        codes = nibbles.astype(f32) - (8 if form == "int4" else 0)
    *lead, half, n = qvalue.shape
    return codes.reshape(*lead, 2 * half, n)


def scales(w: Weight) -> Array:
    """The value of a form's unit in each group: f32 [..., G, N]."""

    def value(s):
        if s.dtype == jnp.uint8:  # e8m0: an exponent of 0, 2^-127, is read as 0, as denormal numbers are
            return jax.lax.bitcast_convert_type(s.astype(jnp.int32) << 23, f32)
        return s.astype(f32)

    product = functools.reduce(jnp.multiply, [value(s) for s in w.scale]) * STORED[w.form].unit
    *lead, groups, _, n = w.qvalue.shape
    return jnp.broadcast_to(product, (*lead, groups, n))


def dequantize(w: PyTree) -> Array:
    """The float weight [..., K, N], features in the order of the input."""
    if isinstance(w, Trainable):
        return w.master
    if not is_quantized(w):
        return w
    value = unpack(w.form, w.qvalue).astype(f32) * scales(w)[..., None, :]
    if w.bias:  # fenced: of a tied embedding this enters the bits
        value = numerics.fence(value) - w.bias[0].astype(f32)[..., None, :]
    value = value.reshape(shape(w))
    if w.order is None:
        return value
    return jnp.take_along_axis(value, jnp.argsort(w.order, -1)[..., None], -2)


def columns(w: PyTree, index: Array) -> Array:
    """Columns of a weight [K, N] as rows: index [...] -> f32 [..., K]. An embedding that is tied to a quantized head."""
    flat = index.reshape(-1)
    # `order` is of the inputs, and stays; so does what all columns share.
    picked = w.replace(tensor=jax.tree.map(lambda a: a if a.shape[-1] == 1 else jnp.take(a, flat, axis=-1), w.tensor))
    return dequantize(picked).T.reshape(*index.shape, -1)


def quantize(w, form: str, name: str = "weight") -> Weight:
    """A float weight [..., K, N] -> host Weight: symmetric, codes within +-amax of the grid amax/7 (INT4) or amax/127 (INT8).

    fixed16 has a power-of-two scale, under which a bfloat16 weight loses nothing above 2^-15 of the largest one in its column.
    """
    if form not in FORMS:
        raise ValueError(f"quantize.{name}: found {form!r}, need one of {sorted(FORMS)}")
    n_bits, group = FORMS[form]
    w = np.asarray(w, np.float32)
    *lead, k, n = w.shape
    group = group or k
    if k % group or (n_bits == 4 and group % 2):
        raise ValueError(f"{name}: {k} input features do not divide into groups of {group} for {form}")
    w = w.reshape(*lead, k // group, group, n)
    amax = np.abs(w).max(-2)
    if not np.isfinite(amax).all():
        raise ValueError(f"{name}: holds NaN or Inf; a base must be finite")
    limit = {4: 7, 8: 127, 16: numerics.LIMIT[16]}[n_bits]
    if n_bits == 16:
        scale = np.exp2(np.ceil(np.log2(np.maximum(amax, 1e-30) / limit))).astype(np.float32)
    else:
        scale = (np.maximum(amax, 1e-30) / limit).astype(np.float32)
    codes = np.clip(np.round(w / scale[..., None, :]), -limit, limit)
    if n_bits == 4:
        return pack(codes.astype(np.int8), scale)
    return weight({8: "int8", 16: "fixed16"}[n_bits], codes.astype({8: np.int8, 16: np.int16}[n_bits]), scale)


def trainable(w: Array, numeric: Numerics) -> Trainable:
    """A float32 matrix [..., K, N] with its fixed16 columns, made on the device: how adapters enter the exact forward pass."""
    return Trainable(w, fixed_columns(jax.lax.stop_gradient(w)) if numeric.exact else None)


def fixed_columns(w: Array) -> Weight:
    q, s = numerics.fixed_point(jnp.swapaxes(w, -1, -2), 16)
    return weight("fixed16", jnp.swapaxes(q, -1, -2)[..., None, :, :].astype(jnp.int16), s[..., None, :, 0])


def _forward(x: Array, w: PyTree, numeric: Numerics) -> Array:
    if not numeric.exact:
        return jnp.matmul(x, dequantize(w), precision="highest")
    if isinstance(w, Trainable):
        w = w.fixed
    if not is_quantized(w):
        raise ValueError("numerics: 'exact' needs every weight quantized, found a float array; use 'float' to pretrain")
    form, bits, (k, n) = STORED[w.form], numeric.act_bits, shape(w)
    groups = w.qvalue.shape[0]
    q, s = numerics.fixed_point(x.reshape(-1, k), bits)
    if w.order is not None:
        q = jnp.take(q, w.order, axis=-1)
    q = q.reshape(-1, groups, k // groups)
    scale = scales(w)
    if groups == 1 and not w.bias:
        y = numerics.fence(numerics.contract(q, bits, unpack(w.form, w.qvalue), form.bits)[0] * scale[0])
        return numerics.times_power_of_two(y, s).reshape(*x.shape[:-1], n)
    # |sum over k of x w| <= k 2^(bits - 1) top, times 2 where a bias is subtracted from it.
    largest = jnp.max(scale, 0) * form.largest
    if w.bias:
        bias = w.bias[0].astype(f32)
        largest = 2 * jnp.maximum(largest, jnp.max(jnp.abs(bias), 0))
    unit = numerics.power_of_two_above(largest) * 2.0 ** (math.ceil(math.log2(k)) + bits - 1 - 30)
    ratio = scale / unit

    def products(q, qvalue, ratio):
        return numerics.sum_of_groups(numerics.contract(q, bits, unpack(w.form, qvalue), form.bits), ratio)

    def rows(q):  # [M, G, k] -> int32 [M, N]
        block = _groups_at_once(groups, len(q) * n)
        if block == groups:
            total = products(q, w.qvalue, ratio)
        else:
            split = lambda a: a.reshape(-1, block, *a.shape[1:])
            blocks = jnp.moveaxis(q.reshape(len(q), -1, block, k // groups), 1, 0), split(w.qvalue), split(ratio)
            add = lambda total, part: (total + products(*part), None)
            total, _ = jax.lax.scan(add, jnp.zeros((len(q), n), jnp.int32), blocks)
        return total - numerics.product_with_sums(q, bits, bias, unit) if w.bias else total

    # Some rows and groups at a time, or the products of all groups would be in memory together.
    m = len(q)
    if m <= ROWS:
        total = rows(q)
    else:
        total = jax.lax.map(rows, jnp.pad(q, ((0, -m % ROWS), (0, 0), (0, 0))).reshape(-1, ROWS, *q.shape[1:])).reshape(-1, n)[:m]
    return numerics.times_power_of_two(total.astype(f32) * unit, s).reshape(*x.shape[:-1], n)


def _groups_at_once(groups: int, product: int) -> int:
    """Groups whose products, of so many elements each, are in memory together. A CPU adds each to the sum while it is in its cache,
    unless it is so small that starting an operation takes longer."""
    if numerics.small_integer_dots() and product > CACHED:
        return 1
    return numerics.largest_divisor(groups, UNROLL)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x: Array, w: PyTree, numeric: Numerics) -> Array:
    """x [..., K] @ w [K, N] -> f32 [..., N]. The residual kept for the backward pass is the packed weight.

    The derivative is that of the float twin: a `Weight` has none; a Trainable and a float array (pretraining) have.
    """
    return _forward(x, w, numeric)


def _matmul_forward(x, w, numeric):
    return _forward(x, w, numeric), (x, w)


def _matmul_backward(numeric, residual, dy):
    x, w = residual
    dx = jnp.matmul(dy, dequantize(w).T, precision="highest")
    if is_quantized(w):
        return dx, None
    k, n = shape(w)
    dw = jnp.matmul(x.reshape(-1, k).T, dy.reshape(-1, n), precision="highest")
    return dx, Trainable(dw, None) if isinstance(w, Trainable) else dw


matmul.defvjp(_matmul_forward, _matmul_backward)


def _is_weight(w: PyTree) -> bool:
    return isinstance(w, Weight | Trainable)


def split(tree: PyTree) -> tuple[list[Array], Callable[[list[Array]], PyTree]]:
    """The trained float arrays of a tree of weights, and a function that rebuilds the tree (for float numerics) from their like."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_weight)

    def rebuild(trained):
        rest = iter(trained)
        put = lambda w: w if is_quantized(w) else Trainable(next(rest), None) if isinstance(w, Trainable) else next(rest)
        return structure.unflatten([put(w) for w in leaves])

    return [dequantize(w) for w in leaves if not is_quantized(w)], rebuild


def cotangent(tree: PyTree, grads: list[Array]) -> PyTree:
    """`grads`, in the order of `split`, as the cotangent of `tree`: none for what is frozen."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_weight)
    rest = iter(grads)
    put = lambda w: None if is_quantized(w) else Trainable(next(rest), None) if isinstance(w, Trainable) else next(rest)
    return structure.unflatten([put(w) for w in leaves])


def fake_quantize(w: Array, group: int) -> Array:
    """w [..., K, N] rounded to the INT4 grid amax/7 with bf16 scales, straight-through: quantization-aware pretraining."""
    *lead, k, n = w.shape
    grouped = w.reshape(*lead, k // group, group, n)
    amax = jnp.max(jnp.abs(grouped), -2, keepdims=True)
    scale = jax.lax.reduce_precision(jnp.maximum(amax, 1e-12) / 7, 8, 7)  # bf16; a pair of casts would be compiled away
    rounded = jnp.clip(jnp.round(grouped / scale), -7, 7) * scale
    return w + jax.lax.stop_gradient(rounded.reshape(w.shape) - w)


def digest(base: PyTree) -> str:
    """The identity of a frozen base: SHA-256 over name, shape, dtype and bytes of every leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(base)
    return join_digests({jax.tree_util.keystr(path): leaf_digest(leaf) for path, leaf in leaves})


def leaf_digest(leaf: Array) -> str:
    h = hashlib.sha256(leaf_header(leaf.shape, leaf.dtype))
    h.update(np.ascontiguousarray(jax.device_get(leaf)).view(np.uint8).data)
    return h.hexdigest()


def leaf_header(shape: tuple[int, ...], dtype) -> bytes:
    """What the digest of a leaf begins with; its bytes follow, and may come in parts."""
    return f"{tuple(shape)} {jnp.dtype(dtype)}".encode()


def join_digests(of_leaves: Mapping[str, str]) -> str:
    return hashlib.sha256("\n".join(f"{name} {of_leaves[name]}" for name in sorted(of_leaves)).encode()).hexdigest()

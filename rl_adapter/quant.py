"""The frozen base's weights: AQT `QTensor`s in three packed forms, and the matrix product with them. The only importer of aqt.

A weight is contracted over its input features, which come in G groups of g with one scale each (G = 1: one scale a channel).

    form     qvalue                   bytes  codes
    int4     uint8 [..., G, g/2, N]   0.5    offset 8; the low nibble is feature j, the high one feature j + g/2 of a group
    int8     int8  [..., G, g, N]     1      -127..127
    fixed16  int16 [..., 1, K, N]     2      what 16-bit floats become: fixed point relative to the column's largest weight

`scale` is [..., G, N], in the dtype it has on disk. The form is the dtype of `qvalue`, so a QTensor describes itself.
Nibbles are packed by hand: XLA's CPU backend widens a whole `jnp.int4` array, all layers of it, at every call.
"""

import functools
import hashlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from aqt.jax.v2.aqt_tensor import QTensor
from flax import struct

from rl_adapter import numerics
from rl_adapter.types import Array, Numerics, PyTree

f32 = jnp.float32
BITS = {"uint8": 4, "int8": 8, "int16": 16}
FORMS = {"int4": (4, 0), "int4_g32": (4, 32), "int4_g128": (4, 128), "int8": (8, 0), "fixed16": (16, 0)}  # bits, group (0: the channel)


@struct.dataclass
class Trainable:
    """A float32 matrix that is optimized, and the same in fixed point, made once per update, that the exact forward pass reads."""

    master: Array  # [..., K, R]
    fixed: PyTree  # fixed16 QTensor; None in float mode


def is_quantized(w: PyTree) -> bool:
    return isinstance(w, QTensor)


def qtensor(qvalue: Array, scale: Array) -> QTensor:
    return QTensor(qvalue=qvalue, scale=[scale], scale_t=None, bias=[], dequant_dtype=f32)


def bits(w: QTensor) -> int:
    return BITS[jnp.dtype(w.qvalue.dtype).name]


def shape(w: PyTree) -> tuple[int, ...]:
    """The logical shape [..., K, N] of a weight."""
    if isinstance(w, Trainable):
        return w.master.shape
    if not is_quantized(w):
        return w.shape
    *lead, groups, width, n = w.qvalue.shape
    return (*lead, groups * width * (2 if bits(w) == 4 else 1), n)


def pack(codes: np.ndarray, scale: np.ndarray) -> QTensor:
    """Integer codes [..., G, g, N] (int8; -8..7 where they are to be INT4) with scales [..., G, N] -> INT4 QTensor (host arrays)."""
    half = codes.shape[-2] // 2
    offset = (codes.astype(np.int8) + 8).astype(np.uint8)
    return qtensor(offset[..., :half, :] | (offset[..., half:, :] << 4), scale)


def unpack(w: QTensor) -> Array:
    """The integer codes [..., G, g, N]: f32 of an int4, else as they are."""
    if bits(w) != 4:
        return w.qvalue
    shift = jnp.array([0, 4], jnp.int32)[:, None, None]  # a broadcast runs in vectors, a concatenation element by element
    codes = ((w.qvalue[..., None, :, :].astype(jnp.int32) >> shift) & 15).astype(f32) - 8
    *lead, half, n = w.qvalue.shape
    return codes.reshape(*lead, 2 * half, n)


def dequantize(w: PyTree) -> Array:
    """The float weight [..., K, N]."""
    if isinstance(w, Trainable):
        return w.master
    if not is_quantized(w):
        return w
    value = unpack(w).astype(f32) * w.scale[0].astype(f32)[..., None, :]
    return value.reshape(shape(w))


def quantize(w, form: str, name: str = "weight") -> QTensor:
    """A float weight [..., K, N] -> host QTensor: symmetric, codes within +-amax of the grid amax/7 (INT4) or amax/127 (INT8).

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
    return qtensor(codes.astype({8: np.int8, 16: np.int16}[n_bits]), scale)


def trainable(w: Array, numeric: Numerics) -> Trainable:
    """A float32 matrix [..., K, N] with its fixed16 columns, made on the device: how adapters enter the exact forward pass."""
    return Trainable(w, fixed_columns(jax.lax.stop_gradient(w)) if numeric.exact else None)


def fixed_columns(w: Array) -> QTensor:
    q, s = numerics.fixed_point(jnp.swapaxes(w, -1, -2), 16)
    return qtensor(jnp.swapaxes(q, -1, -2)[..., None, :, :].astype(jnp.int16), s[..., None, :, 0])


def _forward(x: Array, w: PyTree, numeric: Numerics) -> Array:
    if not numeric.exact:
        return jnp.matmul(x, dequantize(w), precision="highest")
    if isinstance(w, Trainable):
        w = w.fixed
    if not is_quantized(w):
        raise ValueError("numerics: 'exact' needs every weight quantized, found a float array; use 'float' to pretrain")
    n_bits, (k, n) = bits(w), shape(w)
    groups = w.qvalue.shape[0]
    q, s = numerics.fixed_point(x.reshape(-1, k), numeric.act_bits)
    d = numerics.contract(q.reshape(-1, groups, k // groups), numeric.act_bits, unpack(w), n_bits)
    y = numerics.sum_of_groups(d, w.scale[0], float(k) * 2.0 ** (numeric.act_bits + n_bits - 2)) * s
    return y.reshape(*x.shape[:-1], n)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x: Array, w: PyTree, numeric: Numerics) -> Array:
    """x [..., K] @ w [K, N] -> f32 [..., N]. The residual kept for the backward pass is the packed weight.

    The derivative is that of the float twin: a QTensor has none; a Trainable and a float array (pretraining) have.
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
    return isinstance(w, QTensor | Trainable)


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
    """SHA-256 over names, shapes, dtypes and bytes of every leaf: the identity of a frozen base."""
    h = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(base):
        array = np.ascontiguousarray(jax.device_get(leaf))
        h.update(f"{jax.tree_util.keystr(path)} {array.shape} {array.dtype}".encode())
        h.update(array.view(np.uint8).data)
    return h.hexdigest()

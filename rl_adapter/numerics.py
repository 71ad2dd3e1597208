"""Exact arithmetic: every reduction of the forward pass runs over integers, so no result depends on shape or placement.

Integer sums are associative. A row of activations becomes fixed point, `x ~ q * s` with integer `q` (8 or 16 bits) and a
power-of-two scale `s`; contractions and sums run over integers; scaling by a power of two is exact. What is left are single
elementwise IEEE operations, which give the same bits in every fusion, batch, padding and mesh, provided that

  * no multiplication is contracted with a following addition into an FMA in one fusion and not in another: `fence`;
  * no transcendental is left to a vector library whose scalar remainder loop rounds differently: `exp` and `log` below are
    polynomials built of single operations;
  * no scale comes from `log2` or `ceil`, but from the exponent bits.

Where a power of two is divided by, rather than its reciprocal multiplied with, that is for speed: XLA recomputes cheap operations in
every consumer that it fuses them into, but not a division, so the chain before it is computed once.

How an integer contraction is carried out (int8 dots into int32, or float32 dots of small integers, which are exact below
2^24) is the backend's choice and cannot be seen in the bits.

The backward pass is float and straight-through: the derivative of each exact operation is that of its float twin.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from rl_adapter.types import Array

f32, i32 = jnp.float32, jnp.int32
GROUPED = (((2,), (1,)), ((1,), (0,)))  # [M, G, k] x [G, k, N] -> [G, M, N]
NARROW = 64  # features or outputs of a matrix that is narrow
LIMIT = {8: 127, 16: 127 * 256 + 127}  # largest |q|: 16 bits are two int8 slices, q = 256 * high + low


@jax.custom_jvp
def fence(y: Array) -> Array:
    """Clear y's last mantissa bit (an error under 2^-23), so that a product cannot become part of an FMA.

    One integer instruction that no compiler pass may remove; `optimization_barrier` is dropped before fusion.
    """
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(y, i32) & -2, f32)


@fence.defjvp
def _(primals, tangents):
    return fence(*primals), tangents[0]


def power_of_two_above(m: Array) -> Array:
    """The smallest power of two strictly above m >= 0, from the exponent bits; NaN where m is not finite."""
    exponent = jax.lax.bitcast_convert_type(jnp.maximum(m, 1e-20).astype(f32), i32) >> 23
    return jnp.where(jnp.isfinite(m), jax.lax.bitcast_convert_type((exponent + 1) << 23, f32), jnp.nan)


def times_power_of_two(x: Array, s: Array) -> Array:
    """x * s, exact, and computed once however often it is read: as a division (see above) by 1 / s. For a compiler the divisor differs
    from element to element, or it would multiply by its reciprocal."""
    inverse = jax.lax.bitcast_convert_type((254 << 23) - jax.lax.bitcast_convert_type(s, i32), f32)
    return x / jnp.where(x == x, jnp.where(jnp.isfinite(s), inverse, s), x)


def fixed_point(x: Array, bits: int) -> tuple[Array, Array]:
    """Rows x [..., K] as integers q [..., K] (f32, |q| <= LIMIT[bits]) and power-of-two scales s [..., 1]: x ~ q * s.

    The error is at most s / 2 <= max|x| * 2^(1 - bits). A row with NaN or Inf gets a NaN scale, so that bad numbers are never laundered.
    """
    s = fixed_point_scale(jnp.max(jnp.abs(x), -1, keepdims=True), bits)
    return to_integers(x, s, bits), s


def fixed_point_scale(m: Array, bits: int) -> Array:
    """The power of two under which values up to m >= 0 take `bits` bits."""
    s = power_of_two_above(m) * 2.0 ** (1 - bits)
    return jnp.where(m > s * LIMIT[bits], s * 2, s)


def to_integers(x: Array, s: Array, bits: int) -> Array:
    return jnp.clip(jnp.round(x / s), -LIMIT[bits], LIMIT[bits])


def slices(q: Array, bits: int) -> tuple[Array, ...]:
    """Integers of 8 or 16 bits as int8 slices: (q,), or (high, low) with q = 256 * high + low."""
    if bits == 8:
        return (q.astype(jnp.int8),)
    q = q.astype(i32)
    high = (q + 128) >> 8
    return high.astype(jnp.int8), (q - (high << 8)).astype(jnp.int8)


def small_integer_dots() -> bool:
    """Whether INT4 contractions run as f32 dots: on CPUs, which multiply int8 no faster without VNNI (measured)."""
    return jax.default_backend() == "cpu"


def int8_dot(a: Array, b: Array, dims) -> Array:
    """The exact integer contraction of two int8 arrays, int32."""
    return jax.lax.dot_general(a, b, dims, preferred_element_type=i32)


def contract(q: Array, bits: int, codes: Array, code_bits: int) -> Array:
    """Sum over k of q [M, G, k] * codes [G, k, N]: f32 [G, M, N].

    Rounded once where a sum of small codes fits int32, else once a place value.

    Args:
        q: integers of `bits` bits, as float32.
        codes: float32 or int integers of `code_bits` bits, |code| <= 2^(code_bits - 1) (up to 8: as int8 holds them).
    """
    k = codes.shape[1]
    if k > 2**16:
        raise ValueError(f"weight: found {k} input features to a group of scales, need at most {2**16}: more could overflow int32")
    if code_bits <= 5 and k <= 2 ** (17 - code_bits):
        return _contract_small(q, bits, codes, code_bits)
    # One dot over stacked slices: four small dots cost more than one of four times the size.
    product = _digits_dot(q, bits, codes, code_bits)
    (m, n), (a, w) = (q.shape[0], codes.shape[2]), (product.shape[1] // q.shape[0], product.shape[2] // codes.shape[2])
    part = lambda i, j: product[:, i * m : (i + 1) * m, j * n : (j + 1) * n]
    places = [sum(part(i, p - i) for i in range(a) if 0 <= p - i < w) for p in range(a + w - 1)]
    total = 0.0  # from the smallest to the largest place value; each product by a power of two is exact
    for place in reversed(range(len(places))):
        total = total + places[place].astype(f32) * 2.0 ** (8 * (len(places) - 1 - place))
    return total


def _digits_dot(q: Array, bits: int, codes: Array, code_bits: int) -> Array:
    """The exact contraction of all digits of q with all of codes, int32 [G, digits * M, digits * N].

    In int8, or on CPU, where a factor is as narrow as an adapter's rank and narrowing to int8 costs more than the dot, in float32.
    """
    k = codes.shape[1]
    if small_integer_dots() and k <= 1024 and min(k, codes.shape[2]) <= NARROW:  # 1024 products of two digits stay below 2^24
        a, w = _stacked(q, bits, 0), _stacked(codes, code_bits, 2)
        return jnp.matmul(jnp.moveaxis(a, 1, 0), w, precision="highest").astype(i32)
    return int8_dot(_stacked(q, bits, 0).astype(jnp.int8), _stacked(codes, code_bits, 2).astype(jnp.int8), GROUPED)


def digits(q: Array, bits: int, axis: int) -> Array:
    """Integers as float32 digits of 8 bits, the highest first, along a new axis; by selection from a broadcast, since XLA's CPU backend
    concatenates element by element."""
    n = -(-bits // 8)
    rest = jnp.expand_dims(q.astype(f32), axis)
    axis %= rest.ndim
    index = jnp.arange(n).reshape([n if a == axis else 1 for a in range(rest.ndim)])
    out = 0.0
    for i in reversed(range(n)):  # from the lowest digit, balanced around 0; the highest takes what is left
        high = jnp.floor((rest + 128) * (1 / 256)) if i else 0.0
        out = jnp.where(index == i, rest - high * 256, out) if n > 1 else rest
        rest = high
    return out


def _stacked(q: Array, bits: int, axis: int) -> Array:
    """`digits`, one after another along `axis`."""
    out = digits(q, bits, axis)
    return out.reshape(*(-1 if a == axis else size for a, size in enumerate(q.shape)))


def _contract_small(q: Array, bits: int, codes: Array, code_bits: int) -> Array:
    """`contract` for codes of at most 5 bits whose whole sum fits int32; an f32 dot of a few terms is exact."""
    if small_integer_dots():
        k = codes.shape[1]
        chunk = largest_divisor(k, 2 ** (26 - bits - code_bits))  # (bits - 1) + (code_bits - 1) + log2(chunk) <= 24
        codes = codes.astype(f32).reshape(-1, chunk, codes.shape[2])
        # Groups in front before the product: XLA's CPU backend transposes the operand that it is given, and slowly.
        q = jnp.moveaxis(q.reshape(q.shape[0], -1, chunk), 1, 0)
        partial = jnp.matmul(q, codes, precision="highest")
        if chunk == k:
            return partial
        return jnp.sum(partial.reshape(-1, k // chunk, *partial.shape[1:]).astype(i32), 1).astype(f32)
    total = 0
    for part in slices(q, bits):
        total = total * 256 + int8_dot(part, codes.astype(jnp.int8), GROUPED)
    return total.astype(f32)


def largest_divisor(n: int, limit: int) -> int:
    return max(d for d in range(1, min(n, limit) + 1) if n % d == 0)


def sum_of_groups(d: Array, ratio: Array) -> Array:
    """Sum over groups g of d [G, M, N] * ratio [G, N], each term rounded once: int32 [M, N].

    Args:
        d: contractions, as float32.
        ratio: the group's scale over the column's fixed-point unit; no sum of terms may reach 2^31.
    """
    # Written out: a reduction inside a fusion does not run in vectors on CPU.
    return sum(jnp.round(d[g] * ratio[g]).astype(i32) for g in range(d.shape[0]))


def product_with_sums(q: Array, bits: int, bias: Array, unit: Array) -> Array:
    """Sum over groups of (sum over k of q [M, G, k]) * bias [G, N], in units [N]: int32 [M, N].

    A contraction over groups, with bias in 24 bits of fixed point: an elementwise product for each group would cost as much as the codes.
    """
    # Through int32, which holds 2^16 numbers of 16 bits: in f32 the order of a sum over a wide group would show.
    sums = jnp.sum(q.astype(i32), -1)[:, None]  # [M, 1, G]
    step = power_of_two_above(jnp.max(jnp.abs(bias), 0)) * 2.0**-23
    total = contract(sums, bits + math.ceil(math.log2(q.shape[-1])), jnp.round(bias / step)[None], 24)[0]
    return jnp.round(total * (step / unit)).astype(i32)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def exact_sum(x: Array, axis: int = -1) -> Array:
    """Sum over one axis (kept, as 1) through int32, in two folds where one would be too coarse.

    Its length must be a property of the model (width, experts, vocabulary), since the fixed point depends on it.
    """
    x = jnp.moveaxis(x, axis, -1)
    n = x.shape[-1]
    if n <= 2048:
        return jnp.moveaxis(_int32_sum(x, fine=False), -1, axis)
    fold = next((d for d in (128, 96, 64) if n % d == 0), 128)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -n % fold)])
    return jnp.moveaxis(_int32_sum(_int32_sum(x.reshape(*x.shape[:-1], -1, fold), fine=False)[..., 0], fine=True), -1, axis)


def _int32_sum(x: Array, fine: bool) -> Array:
    """Fine: with what the first rounding left, to 2^-18 of it, so that many terms too small for the first are not lost together."""
    s = power_of_two_above(jnp.max(jnp.abs(x), -1, keepdims=True)) * 2.0 ** (math.ceil(math.log2(max(x.shape[-1], 2))) - 30)
    q = jnp.round(x / s)
    add = lambda q: jnp.sum(q.astype(i32), -1, keepdims=True).astype(f32)
    if not fine:
        return add(q) * s
    return add(q) * s + add(jnp.round((x - q * s) / (s * 2.0**-18))) * (s * 2.0**-18)  # every product is exact


@exact_sum.defjvp
def _(axis, primals, tangents):
    return exact_sum(primals[0], axis), jnp.sum(tangents[0], axis, keepdims=True)


def sum_of_probabilities(parts: Sequence[Array]) -> Array:
    """Sum over the last axis, and over the parts, of values in [0, 1]: for keys, whose number is a matter of padding and caching.

    Each term is rounded to 24 bits and summed as two 12-bit halves, so the sum depends neither on the length (up to 2^19 keys in
    all) nor on how the keys are split into parts.
    """
    t = [jnp.round(p * 2.0**24).astype(i32) for p in parts]
    high = sum(jnp.sum(u >> 12, -1, keepdims=True) for u in t).astype(f32)
    low = sum(jnp.sum(u & 4095, -1, keepdims=True) for u in t).astype(f32)
    return high * 2.0**-12 + low * 2.0**-24


@jax.custom_jvp
def exp(x: Array) -> Array:
    """e^x to 4 ulp, built of single IEEE operations; 0 below -87, saturated above 87. Cody-Waite reduction, degree-6 Taylor."""
    z = jnp.clip(x, -87.0, 87.0)
    n = jnp.round(fence(z * 1.4426950408889634))
    r = (z - fence(n * 0.693359375)) - fence(n * -2.12194440e-4)
    p = jnp.full_like(r, 1 / 720)
    for c in (1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
        p = fence(p * r) + c
    return jnp.where(x < -87.0, 0.0, p) / jax.lax.bitcast_convert_type((127 - n.astype(i32)) << 23, f32)


@exp.defjvp
def _(primals, tangents):
    y = exp(*primals)
    return y, y * tangents[0]


@jax.custom_jvp
def log(x: Array) -> Array:
    """Natural logarithm of a positive normal x, built of single IEEE operations (atanh series on [sqrt(1/2), sqrt(2)))."""
    bits = jax.lax.bitcast_convert_type(x, i32)
    e = (bits - 0x3F3504F3) >> 23  # x = m * 2^e with m in [sqrt(1/2), sqrt(2))
    m = jax.lax.bitcast_convert_type(bits - (e << 23), f32)
    t = (m - 1.0) / (m + 1.0)
    u = fence(t * t)
    p = jnp.full_like(u, 2 / 11)
    for c in (2 / 9, 2 / 7, 2 / 5, 2 / 3, 2.0):
        p = fence(p * u) + c
    n = e.astype(f32)
    return fence(n * 0.693359375) + (fence(p * t) + fence(n * -2.12194440e-4))


@log.defjvp
def _(primals, tangents):
    return log(*primals), tangents[0] / primals[0]


def inverse_sqrt(x: Array) -> Array:
    """1 / sqrt(x) as two correctly rounded operations: fenced, or the compiler makes them one approximate `rsqrt`."""
    return 1.0 / fence(jnp.sqrt(x))


def divide_rows(x: Array, y: Array) -> Array:
    """x [..., n] / y [..., 1] as a product with the fenced reciprocal: which of the two a compiler makes of a division by a broadcast
    depends on shapes."""
    return x * fence(1.0 / y)


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + exp(-jnp.clip(x, -60.0, 60.0)))


def rms_norm(x: Array, weight: Array, eps: float, exact: bool) -> Array:
    """x / rms(x) * weight over the last axis (Zhang and Sennrich 2019, arXiv:1910.07467)."""
    if not exact:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * weight
    mean = fence(exact_sum(fence(x * x)) * (1 / x.shape[-1]))
    return fence(fence(x * inverse_sqrt(mean + eps)) * weight)


def softmax(x: Array, exact: bool) -> Array:
    """Softmax over the last axis, of fixed length (experts)."""
    if not exact:
        return jax.nn.softmax(x, -1)
    p = exp(x - jax.lax.stop_gradient(jnp.max(x, -1, keepdims=True)))
    return divide_rows(p, exact_sum(p))


def log_sum_exp(x: Array, exact: bool) -> Array:
    """log sum exp over the last axis, kept: fixed length (vocabulary)."""
    m = jax.lax.stop_gradient(jnp.max(x, -1, keepdims=True))
    if not exact:
        return m + jnp.log(jnp.sum(jnp.exp(x - m), -1, keepdims=True))
    return m + log(exact_sum(exp(x - m)))

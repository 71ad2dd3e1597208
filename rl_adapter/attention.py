"""Attention over segments of keys, in integers: a masked key adds an exact 0, so caching, padding and splitting cannot be seen.

Queries are [P, G, M, H, d]: M tokens of each of G samples of each of P prompts. A segment of keys is either one sample's own
([P, K, G, S, d]) or shared by a prompt's samples ([P, K, S, d]), so that a group's prompt is computed and kept once. With heads
before samples both kinds contract without a transpose. r is H / K.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rl_adapter import numerics
from rl_adapter.types import Array, Numerics

f32 = jnp.float32


@struct.dataclass
class Keys:
    """Keys and values as attention reads them: int8 slices with a power-of-two scale a token and head, or float32 (scale None)."""

    k: tuple[Array, ...]  # slices of [P, K, (G,) S, d], the high one first
    k_scale: Array | None  # [P, K, (G,) S]
    v: tuple[Array, ...]
    v_scale: Array | None


def encode(k: Array, v: Array, numeric: Numerics) -> Keys:
    """k, v [P, (G,) S, K, d] -> Keys."""
    k, v = jnp.moveaxis(k, -2, 1), jnp.moveaxis(v, -2, 1)
    if not numeric.exact:
        return Keys((k,), None, (v,), None)
    (kq, ks), (vq, vs) = (numerics.fixed_point(a, numeric.act_bits) for a in (k, v))
    return Keys(numerics.slices(kq, numeric.act_bits), ks[..., 0], numerics.slices(vq, numeric.act_bits), vs[..., 0])


def _shared(keys: Keys) -> bool:
    return keys.k[0].ndim == 4


def _letters(keys: Keys) -> str:
    return "pk" if _shared(keys) else "pkg"


def _over_queries(scale: Array) -> Array:
    """A key scale [P, K, (G,) S] against scores [P, K, G, r, M, S]."""
    if scale.ndim == 3:
        scale = scale[:, :, None]
    return scale[:, :, :, None, None]


def _places(n: int) -> list[list[tuple[int, int]]]:
    """Pairs of slices by place value, the highest first; the product of two low slices is under 2^-15 of the row and left out."""
    return [[(0, 0)]] if n == 1 else [[(0, 0)], [(0, 1), (1, 0)]]


def _integer_einsum(equation: str, a: tuple, b: tuple) -> list[Array]:
    """int32 contractions of slices, one array a place value."""
    dot = functools.partial(jnp.einsum, equation, preferred_element_type=jnp.int32)
    return [sum(dot(a[i], b[j]) for i, j in pairs) for pairs in _places(len(a))]


def _join(places: list[Array], n: int) -> Array:
    """Place values to one float number; every product by a power of two is exact."""
    if n == 1:
        return places[0].astype(f32)
    return places[0].astype(f32) * 65536.0 + places[1].astype(f32) * 256.0


def _tokens_first(x: Array) -> Array:
    """[P, K, G, r, M, d] -> [P, G, M, H, d]."""
    x = jnp.moveaxis(x, (1, 3), (3, 4))
    return x.reshape(*x.shape[:3], -1, x.shape[-1])


def attend(q: Array, segments: tuple[tuple[Keys, Array], ...], numeric: Numerics) -> Array:
    """softmax(q k / sqrt(d)) v over all segments together: [P, G, M, H, d].

    Args:
        q: [P, G, M, H, d].
        segments: pairs of Keys and a mask, broadcastable to [P, G, M, S]; every query must see at least one key.
    """
    p_, g_, m_, h, d = q.shape
    heads = segments[0][0].k[0].shape[1]
    q = jnp.moveaxis(q.reshape(p_, g_, m_, heads, h // heads, d), (3, 4), (1, 3))  # [P, K, G, r, M, d]
    scale = np.float32(1 / np.sqrt(d))
    masks = [mask[:, None, :, None] for _, mask in segments]  # [P, 1, G, 1, M, S]
    if not numeric.exact:
        scores = [jnp.einsum(f"pkgrmd,{_letters(s)}td->pkgrmt", q, s.k[0], precision="highest") * scale for s, _ in segments]
        sizes = np.cumsum([s.shape[-1] for s in scores])[:-1]
        masked = jnp.where(
            jnp.concatenate([jnp.broadcast_to(m, s.shape) for m, s in zip(masks, scores)], -1), jnp.concatenate(scores, -1), -1e30
        )
        parts = jnp.split(jax.nn.softmax(masked, -1), sizes, -1)
        out = sum(jnp.einsum(f"pkgrmt,{_letters(s)}td->pkgrmd", p, s.v[0], precision="highest") for p, (s, _) in zip(parts, segments))
        return _tokens_first(out)
    bits = numeric.act_bits
    q_int, q_scale = numerics.fixed_point(q, bits)
    q_slices = numerics.slices(q_int, bits)
    scores = []
    for (s, _), mask in zip(segments, masks):
        product = _join(_integer_einsum(f"pkgrmd,{_letters(s)}td->pkgrmt", q_slices, s.k), len(q_slices))
        product = numerics.fence(product * scale) * (q_scale * _over_queries(s.k_scale))
        scores.append(jnp.where(mask, product, -1e30))
    top = functools.reduce(jnp.maximum, [jnp.max(s, -1, keepdims=True) for s in scores])
    p = [jnp.where(mask, numerics.exp(s - top), 0.0) for s, mask in zip(scores, masks)]
    total = numerics.sum_of_probabilities(p)
    weighted = [x * _over_queries(s.v_scale) for x, (s, _) in zip(p, segments)]  # exact: the scale is a power of two
    largest = functools.reduce(jnp.maximum, [jnp.max(x, -1, keepdims=True) for x in weighted])
    w_scale = numerics.fixed_point_scale(largest, bits)
    places = None
    for x, (s, _) in zip(weighted, segments):
        x_slices = numerics.slices(numerics.to_integers(x, w_scale, bits), bits)
        part = _integer_einsum(f"pkgrmt,{_letters(s)}td->pkgrmd", x_slices, s.v)
        places = part if places is None else [a + b for a, b in zip(places, part)]
    out = numerics.divide_rows(_join(places, 1 if bits == 8 else 2) * w_scale, total)
    return _tokens_first(out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def attend_differentiable(q: Array, kv: tuple[tuple[Array, Array], ...], masks: tuple[Array, ...], numeric: Numerics) -> Array:
    """`attend` from float keys and values ([P, (G,) S, K, d] each), with the derivative of its float twin at the same inputs."""
    return attend(q, tuple((encode(k, v, numeric), mask) for (k, v), mask in zip(kv, masks)), numeric)


def _forward(q, kv, masks, numeric):
    return attend_differentiable(q, kv, masks, numeric), (q, kv, masks)


def _backward(numeric, residual, dy):
    q, kv, masks = residual
    _, vjp = jax.vjp(lambda q, kv: attend_differentiable.fun(q, kv, masks, Numerics("float")), q, kv)
    return *vjp(dy), None


attend_differentiable.defvjp(_forward, _backward)


def rope_table(length: int, d: int, theta: float) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [length, d/2] of rotary embedding (Su et al. 2021, arXiv:2104.09864) for positions 0 .. length - 1.

    Taken in 64 bits on the host, so that no device's sine enters the bits.
    """
    angles = np.arange(length)[:, None] * theta ** (-np.arange(0, d, 2) / d)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(x: Array, cos: Array, sin: Array, exact: bool) -> Array:
    """Rotate the halves of x [..., H, d] by angles with cos, sin [..., d/2]; the two products of a sum are fenced."""
    cos, sin = cos[..., None, :], sin[..., None, :]
    x1, x2 = jnp.split(x, 2, -1)
    fence = numerics.fence if exact else (lambda y: y)
    return jnp.concatenate([fence(x1 * cos) - fence(x2 * sin), fence(x2 * cos) + fence(x1 * sin)], -1)

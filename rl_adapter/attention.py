"""Attention over segments of keys, in integers: a masked key adds an exact 0, so caching, padding and splitting cannot be seen.

Queries are [P, G, M, H, d]: M tokens of each of G samples of each of P prompts. A segment of keys is either one sample's own
([P, K, G, S, n, d]) or shared by a prompt's samples ([P, K, S, n, d]), so that a group's prompt is computed and kept once. With heads
before samples both kinds contract without a transpose. r is H / K.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rl_adapter import numerics
from rl_adapter.types import Array, Numerics, Rope

f32 = jnp.float32


@struct.dataclass
class Rules:
    """What a layer's attention is told beside queries, keys and values."""

    scale: float = struct.field(pytree_node=False)  # multiplies q k
    latent: int = struct.field(pytree_node=False, default=0)  # values are the first so many features of the keys; 0: they are given
    window: Array | None = None  # [] int32: keys that a query sees, itself included; 0: all before it
    sinks: Array | None = None  # [H]: a logit of each head's softmax that belongs to no key

    def within(self, distance: Array) -> Array | bool:
        """Whether a key so many tokens before its query is seen."""
        return True if self.window is None else (self.window == 0) | (distance < self.window)


@struct.dataclass
class Keys:
    """Keys and values as attention reads them: int8 digits with a power-of-two scale a token and head, or float32 (scale None)."""

    k: Array  # [P, K, (G,) S, n, d]: n digits, the high one first, so that one contraction takes them all
    k_scale: Array | None  # [P, K, (G,) S]
    v: Array | None  # None: `Rules.latent`, so that a token's latent is kept once
    v_scale: Array | None

    def values(self, rules: Rules) -> tuple[Array, Array | None]:
        return (self.k[..., : rules.latent], self.k_scale) if self.v is None else (self.v, self.v_scale)


def encode(k: Array, v: Array | None, numeric: Numerics) -> Keys:
    """k, v [P, (G,) S, K, d] -> Keys."""

    def one(x):
        x = jnp.moveaxis(x, -2, 1)
        if not numeric.exact:
            return x[..., None, :], None
        q, s = numerics.fixed_point(x, numeric.key_bits)
        return numerics.digits(q, numeric.key_bits, -2).astype(jnp.int8), s[..., 0]

    return Keys(*one(k), *(one(v) if v is not None else (None, None)))


def _letters(keys: Keys) -> str:
    return "pk" if keys.k.ndim == 5 else "pkg"  # shared by a prompt's samples, or a sample's own


def _over_queries(scale: Array) -> Array:
    """A key scale [P, K, (G,) S] against scores [P, K, G, r, M, S]."""
    if scale.ndim == 3:
        scale = scale[:, :, None]
    return scale[:, :, :, None, None]


def _places(product: Array, digits: int, axis: int) -> list[Array]:
    """Of products of a (axis 3) and n (`axis`) digits, int32, the sums by place value, the highest first. What is below the lowest digit
    of either factor, under 2^-15 of the row, is left out."""
    pick = lambda i, j: jax.lax.index_in_dim(jax.lax.index_in_dim(product, j, axis, keepdims=False), i, 3, keepdims=False)
    a, n = digits, product.shape[axis]
    return [sum(pick(i, place - i) for i in range(a) if place - i in range(n)) for place in range(max(a, n))]


def _join(places: list[Array], a: int, n: int) -> Array:
    """Place values of products of a and n digits to one float number; every product by a power of two is exact."""
    return sum(x.astype(f32) * 256.0 ** (a + n - 2 - place) for place, x in enumerate(places))


def _largest(scores: list[Array], sinks: Array | None) -> Array:
    """Over all segments, and the logit that belongs to no key: [P, K, G, r, M, 1]."""
    return functools.reduce(jnp.maximum, [jnp.max(s, -1, keepdims=True) for s in scores] + ([] if sinks is None else [sinks]))


def _tokens_first(x: Array) -> Array:
    """[P, K, G, r, M, d] -> [P, G, M, H, d]."""
    x = jnp.moveaxis(x, (1, 3), (3, 4))
    return x.reshape(*x.shape[:3], -1, x.shape[-1])


def attend(q: Array, segments: tuple[tuple[Keys, Array], ...], rules: Rules, numeric: Numerics) -> Array:
    """softmax(scale q k) v over all segments together: [P, G, M, H, width of v].

    Args:
        q: [P, G, M, H, d].
        segments: pairs of Keys and a mask, broadcastable to [P, G, M, S]; every query must see at least one key.
    """
    p_, g_, m_, h, d = q.shape
    heads = segments[0][0].k.shape[1]
    q = jnp.moveaxis(q.reshape(p_, g_, m_, heads, h // heads, d), (3, 4), (1, 3))  # [P, K, G, r, M, d]
    masks = [mask[:, None, :, None] for _, mask in segments]  # [P, 1, G, 1, M, S]
    values = [keys.values(rules) for keys, _ in segments]
    sinks = None if rules.sinks is None else rules.sinks.reshape(1, heads, 1, -1, 1, 1)
    if not numeric.exact:
        dot = functools.partial(jnp.einsum, precision="highest")
        scores = [dot(f"pkgrmd,{_letters(s)}tnd->pkgrmt", q, s.k) * rules.scale for s, _ in segments]
        scores = [jnp.where(m, s, -1e30) for m, s in zip(masks, scores)]
        # Of all segments together, without joining them: XLA's CPU backend concatenates element by element.
        top = jax.lax.stop_gradient(_largest(scores, sinks))
        p = [jnp.exp(s - top) for s in scores]
        total = sum(jnp.sum(x, -1, keepdims=True) for x in p) + (0.0 if sinks is None else jnp.exp(sinks - top))
        out = sum(dot(f"pkgrmt,{_letters(s)}tnd->pkgrmd", x, v) for x, (s, _), (v, _) in zip(p, segments, values))
        return _tokens_first(out / total)
    bits, dot = numeric.act_bits, functools.partial(jnp.einsum, preferred_element_type=jnp.int32)
    a = bits // 8
    q_int, q_scale = numerics.fixed_point(q, bits)
    q_digits = numerics.digits(q_int, bits, 3).astype(jnp.int8)
    scores = []
    for (s, _), mask in zip(segments, masks):
        places = _places(dot(f"pkgarmd,{_letters(s)}tnd->pkgarmtn", q_digits, s.k), a, -1)
        product = numerics.fence(_join(places, a, s.k.shape[-2]) * np.float32(rules.scale)) * (q_scale * _over_queries(s.k_scale))
        scores.append(jnp.where(mask, product, -1e30))
    top = _largest(scores, sinks)
    p = [jnp.where(mask, numerics.exp(s - top), 0.0) for s, mask in zip(scores, masks)]
    total = numerics.sum_of_probabilities(p if sinks is None else [*p, numerics.exp(sinks - top)])
    weighted = [x * _over_queries(scale) for x, (_, scale) in zip(p, values)]  # exact: the scale is a power of two
    largest = functools.reduce(jnp.maximum, [jnp.max(x, -1, keepdims=True) for x in weighted])
    w_scale = numerics.fixed_point_scale(largest, bits)
    summed = None
    for x, (s, _), (v, _) in zip(weighted, segments, values):
        x_digits = numerics.digits(numerics.to_integers(x, w_scale, bits), bits, 3).astype(jnp.int8)
        places = _places(dot(f"pkgarmt,{_letters(s)}tnd->pkgarmnd", x_digits, v), a, -2)
        summed = places if summed is None else [one + other for one, other in zip(summed, places)]
    out = numerics.divide_rows(_join(summed, a, v.shape[-2]) * w_scale, total)
    return _tokens_first(out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def attend_differentiable(q: Array, kv: tuple, masks: tuple[Array, ...], rules: Rules, numeric: Numerics) -> Array:
    """`attend` from float keys and values ([P, (G,) S, K, d] each, values None of a latent), with the derivative of its float twin."""
    return attend(q, tuple((encode(k, v, numeric), mask) for (k, v), mask in zip(kv, masks)), rules, numeric)


def _forward(q, kv, masks, rules, numeric):
    return attend_differentiable(q, kv, masks, rules, numeric), (q, kv, masks, rules)


def _backward(numeric, residual, dy):
    q, kv, masks, rules = residual
    _, vjp = jax.vjp(lambda q, kv: attend_differentiable.fun(q, kv, masks, rules, Numerics("float")), q, kv)
    return *vjp(dy), None, None


attend_differentiable.defvjp(_forward, _backward)


def rope_table(length: int, rope: Rope) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [length, pairs] of positions 0 .. length - 1, times `rope.factor`.

    Taken in 64 bits on the host, so that no device's sine enters the bits.
    """
    angles = np.arange(length)[:, None] * np.asarray(rope.frequencies, np.float64)
    return (np.cos(angles) * rope.factor).astype(np.float32), (np.sin(angles) * rope.factor).astype(np.float32)


def rotate(x: Array, cos: Array, sin: Array, interleaved: bool, exact: bool) -> Array:
    """Rotate pairs of features of x [..., H, d] by angles with cos, sin [..., pairs]; features beyond the pairs stay as they are.

    The two products of a sum are fenced. Interleaved pairs come out as halves: queries and keys alike, so no product of them changes.
    The other feature of each pair is fetched by a product with a matrix of 0, 1 and -1, which is exact: were it by indices, XLA's CPU
    backend would compute all that comes before it once for either, element by element.
    """
    pairs = cos.shape[-1]
    turning = x[..., : 2 * pairs]
    place = np.arange(2 * pairs).reshape(pairs, 2).T.reshape(-1) if interleaved else np.arange(2 * pairs)  # of features, as halves
    swap = np.zeros((2 * pairs, 2 * pairs), np.float32)
    swap[np.roll(place, pairs), np.arange(2 * pairs)] = np.repeat([-1, 1], pairs)
    other = jnp.matmul(turning, swap, precision="highest")
    halves = turning[..., place] if interleaved else turning
    twice = lambda angles: jnp.concatenate([angles, angles], -1)[..., None, :]
    fence = numerics.fence if exact else (lambda y: y)
    turned = fence(halves * twice(cos)) + fence(other * twice(sin))
    return jnp.concatenate([turned, x[..., 2 * pairs :]], -1) if x.shape[-1] > 2 * pairs else turned

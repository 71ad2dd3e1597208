"""`apply`: the only forward pass. Prefill, decoding, scoring, the loss and evaluation call it with the same arrays.

Tokens come as [P, M]: M tokens for each of P prompts. What M holds, and which keys a token may see, is the caller's `Layout`:
a prompt alone, a prompt followed by its G completions (training: the prompt is computed once for its group), or one new token
of each of G completions (decoding).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rl_adapter import lora, moe, numerics
from rl_adapter import mesh as meshes
from rl_adapter.attention import Keys, attend, attend_differentiable, encode, rope_table, rotate
from rl_adapter.types import Array, Base, Numerics, PyTree, Spec


@dataclasses.dataclass(frozen=True)
class Model:
    """What is static about a model at work: hashable, closed over or passed as a static argument."""

    spec: Spec
    adapter: lora.AdapterSpec | None = None
    numeric: Numerics = Numerics()
    mesh: Mesh | None = None
    remat: bool = True


@struct.dataclass
class Cache:
    """Keys and values of every layer: the prompt's, shared by its group, and each completion's own."""

    prompt: Keys  # leaves [L, P, K, T, d]
    own: Keys  # leaves [L, P, K, G, C, d]


@struct.dataclass
class Output:
    hidden: Array  # [P, M, D], after the last norm
    choices: Array  # [L, P, M, k] experts
    router: Array  # [L, E] mean router probability over valid tokens
    keys: PyTree  # prefill: Keys of the prompts; decoding: the updated Cache; else None


def place(spec: Spec, base: Base, mesh: Mesh, context: int) -> Base:
    """The base on the mesh, once, with its rotary table for `context` positions."""
    if context > spec.max_positions:
        raise ValueError(f"context: found {context} tokens (prompt and completion), the model has {spec.max_positions} positions")
    base = base.replace(rope=rope_table(context, spec.head_dim, spec.rope_theta))
    return jax.device_put(base, meshes.base_shardings(mesh, base))


def _heads(x: Array, norm: Array, angles: PyTree, spec: Spec, numeric: Numerics) -> Array:
    x = numerics.rms_norm(x.reshape(*x.shape[:-1], -1, spec.head_dim), norm, spec.norm_eps, numeric.exact)
    return rotate(x, *angles, numeric.exact)


def apply(model: Model, base: Base, adapter: dict | None, tokens: Array, positions: Array, valid: Array, attention, carry=None) -> Output:
    """Run the model on tokens [P, M] at positions [P, M]; `valid` [P, M] is False for padding, which no expert computes.

    Args:
        adapter: from `lora.prepare`; None is the reference policy.
        attention: (layer index, q [P, M, H, d], k and v [P, M, K, d], carry) -> (output [P, M, H, d], carry, emitted): one of the
            three functions below.
        carry: state of `attention` that passes from layer to layer (the Cache when decoding).
    """
    spec, numeric = model.spec, model.numeric
    adapter = adapter or {}
    scale = functools.cache(lambda name: model.adapter.scale(name) if name in adapter else 1.0)
    p_, m_ = tokens.shape
    by_rows = (
        (lambda x: x) if model.mesh is None else (lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(model.mesh, P(meshes.ROWS))))
    )
    angles = tuple(jnp.take(t, positions, axis=0, mode="clip") for t in base.rope)
    expert_scales = tuple((n, scale(n)) for n in lora.GROUPS["experts"] if n in adapter)

    def block(state, inputs):
        x, carry = state
        index, layer, ad = inputs
        linear = lambda h, name: lora.linear(h, getattr(layer, name), ad.get(name), scale(name), numeric)
        h = numerics.rms_norm(x, layer.attn_norm, spec.norm_eps, numeric.exact)
        q = _heads(linear(h, "q"), layer.q_norm, angles, spec, numeric)
        k = _heads(linear(h, "k"), layer.k_norm, angles, spec, numeric)
        v = linear(h, "v").reshape(p_, m_, spec.kv_heads, spec.head_dim)
        a, carry, emitted = attention(index, q, k, v, carry)
        x = by_rows(x + linear(a.reshape(p_, m_, -1), "o"))
        h = numerics.rms_norm(x, layer.mlp_norm, spec.norm_eps, numeric.exact).reshape(p_ * m_, -1)
        weights, choice, p = moe.route(h, layer.router, ad.get("router"), scale("router"), spec, numeric)
        experts = moe.Experts(layer.gate, layer.up, layer.down, {n: ad[n] for n, _ in expert_scales}, expert_scales)
        y = moe.routed(h, weights, choice, valid.reshape(-1), experts, spec.experts, numeric, model.mesh)
        x = by_rows(x + y.reshape(x.shape))
        seen = valid.reshape(-1, 1)
        load = jnp.sum(jnp.where(seen, p, 0.0), 0) / jnp.maximum(jnp.sum(seen), 1)
        return (x, carry), (emitted, choice.reshape(p_, m_, -1), load)

    if model.remat:
        block = jax.checkpoint(block)
    layered = {name: pair for name, pair in adapter.items() if name != "head"}
    x = by_rows(base.embed[tokens].astype(jnp.float32))
    (x, carry), (emitted, choices, router) = jax.lax.scan(block, (x, carry), (jnp.arange(spec.layers), base.layers, layered))
    hidden = numerics.rms_norm(x, base.final_norm, spec.norm_eps, numeric.exact)
    return Output(hidden, choices, router, emitted if carry is None else carry)


def prefill(numeric: Numerics, lengths: Array):
    """Causal attention over prompts [P, T] of given lengths; emits their Keys for a cache."""

    def attention(_, q, k, v, carry):
        mask = causal(q.shape[1], lengths[:, None])
        keys = encode(k, v, numeric)
        return attend(q[:, None], ((keys, mask),), numeric)[:, 0], carry, keys

    return attention


def packed(numeric: Numerics, prompt_lengths: Array, t: int, group: int):
    """Differentiable attention over rows [P, T + G * C]: a prompt, then its completions, which see the prompt and their own past."""

    def attention(_, q, k, v, carry):
        p_ = q.shape[0]
        c = (q.shape[1] - t) // group
        mask = causal(t, prompt_lengths[:, None])
        first = attend_differentiable(q[:, None, :t], ((k[:, :t], v[:, :t]),), (mask,), numeric)[:, 0]
        if not c:
            return first, carry, None
        by_sample = lambda x: x[:, t:].reshape(p_, group, c, *x.shape[2:])
        masks = (keys_before(t, prompt_lengths), jnp.tril(jnp.ones((c, c), bool))[None, None])
        rest = attend_differentiable(by_sample(q), ((k[:, :t], v[:, :t]), (by_sample(k), by_sample(v))), masks, numeric)
        return jnp.concatenate([first, rest.reshape(p_, group * c, *q.shape[2:])], 1), carry, None

    return attention


def decode(numeric: Numerics, prompt_lengths: Array, step: Array):
    """One new token of each completion, tokens [P, G], written to slot `step` of the cache, which it sees up to there."""

    def attention(layer, q, k, v, cache: Cache):
        new = encode(k[:, :, None], v[:, :, None], numeric)  # leaves [P, K, G, 1, (d)]
        own = jax.tree.map(
            lambda c, n: jax.lax.dynamic_update_slice(c, n[None], (layer, 0, 0, 0, step) + (0,) * (c.ndim - 5)), cache.own, new
        )
        here = functools.partial(jax.tree.map, lambda c: jax.lax.dynamic_index_in_dim(c, layer, 0, keepdims=False))
        capacity = own.k[0].shape[-2]
        masks = keys_before(cache.prompt.k[0].shape[-2], prompt_lengths), (jnp.arange(capacity) <= step)[None, None, None]
        segments = tuple(zip((here(cache.prompt), here(own)), masks))
        return attend(q[:, :, None], segments, numeric)[:, :, 0], cache.replace(own=own), None

    return attention


def causal(t: int, lengths: Array) -> Array:
    """[P, G, T, T]: a token sees itself and what is before it; padding beyond `lengths` [P, G] sees itself only, and nobody sees it."""
    i = jnp.arange(t)
    return (i[:, None] >= i) & ((i < lengths[..., None, None]) | (i[:, None] == i))


def keys_before(t: int, lengths: Array) -> Array:
    """[P, 1, 1, T]: the keys of a prompt of `lengths` [P]."""
    return (jnp.arange(t) < lengths[:, None])[:, None, None]


def logits(model: Model, base: Base, adapter: dict | None, hidden: Array) -> Array:
    """hidden [N, D] -> [N, V] f32."""
    head = (adapter or {}).get("head")
    return lora.linear(hidden, base.head, head, model.adapter.scale("head") if head is not None else 1.0, model.numeric)


def token_logprobs(
    model: Model, base: Base, adapter: dict | None, hidden: Array, targets: Array, temperature: float = 1.0, chunk: int = 0
) -> tuple[Array, Array, Array]:
    """Log-probabilities of targets [N] after hidden [N, D] at the temperature and at 1, and the entropy (without gradient), each [N].

    Rows go through the head `chunk` at a time, forward and backward, so no [N, V] array exists.
    """
    n = targets.shape[0]
    chunk = min(n, chunk or max(16, 2**20 // model.spec.vocab))
    pad = -n % chunk
    hidden = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(-1, chunk, hidden.shape[-1])
    targets = jnp.pad(targets, (0, pad)).reshape(-1, chunk)

    @jax.checkpoint
    def rows(args):
        h, target = args
        z = logits(model, base, adapter, h)
        scored = logprob_of(z, target, model.numeric.exact)
        tempered = scored if temperature == 1 else logprob_of(numerics.fence(z * (1 / temperature)), target, model.numeric.exact)
        log_p = jax.lax.stop_gradient(jax.nn.log_softmax(z))
        return tempered, scored, -jnp.sum(jnp.exp(log_p) * log_p, -1)

    return tuple(x.reshape(-1)[:n] for x in jax.lax.map(rows, (hidden, targets)))


def logprob_of(z: Array, target: Array, exact: bool) -> Array:
    """log softmax(z [N, V]) at target [N]: [N]."""
    total = numerics.log_sum_exp(z, exact)
    return (jnp.take_along_axis(z, target[:, None], 1) - total)[:, 0]


def keys_like(model: Model, shape: tuple[int, ...]) -> Keys:
    """Zeroed Keys of leaves [*shape, d]; shape is [L, P, K, (G,) S]."""
    spec, numeric = model.spec, model.numeric
    n = (1 if numeric.act_bits == 8 else 2) if numeric.exact else 1
    dtype = jnp.int8 if numeric.exact else jnp.float32
    codes = lambda: tuple(jnp.zeros((*shape, spec.head_dim), dtype) for _ in range(n))
    scale = lambda: jnp.ones(shape, jnp.float32) if numeric.exact else None
    return Keys(codes(), scale(), codes(), scale())

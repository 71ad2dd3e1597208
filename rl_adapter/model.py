"""`apply`: the only forward pass. Prefill, decoding, scoring, the loss and evaluation call it with the same arrays.

Tokens come as [P, M]. What a row holds, and which keys a token may see, is the business of the attention function that the caller
hands over: prompts, or chunks of them; prompts followed by their G completions (training: the prompt is computed once for its group);
or one new token of each of G completions (decoding). Where rows differ in length their tokens come packed, without the padding.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rl_adapter import cache, lora, moe, numerics, quant
from rl_adapter import mesh as meshes
from rl_adapter.attention import Keys, Rules, attend, attend_differentiable, encode, rope_table, rotate
from rl_adapter.packing import Packing
from rl_adapter.types import Array, Base, Layer, Numerics, PyTree, Spec

# Of a block, beside its input: what attention gives, which is no larger, and costs most to compute again.
KEPT = jax.checkpoint_policies.save_only_these_names("attention")
MLA_EPS = 1e-6  # of the two norms of a latent, whatever the config's rms_norm_eps


@dataclasses.dataclass(frozen=True)
class Model:
    """What is static about a model at work: hashable, closed over or passed as a static argument."""

    spec: Spec
    adapter: lora.AdapterSpec | None = None
    numeric: Numerics = Numerics()
    mesh: Mesh | None = None
    remat: bool = True


@struct.dataclass
class Output:
    hidden: Array  # [P, M, D], after the last norm
    choices: Array  # [Ls, P, M, k] experts
    router: Array  # [Ls, E] router probability, summed over valid tokens
    router_z: Array  # [Ls] squared log-sum-exp of the router's logits, summed over valid tokens
    keys: PyTree  # what attention emitted, stacked by layer, or its carry: keys of a cache; None in training
    stream: PyTree = None  # [L, P, n, D] after each block, where `slots` asks for it


def place(spec: Spec, base: Base, mesh: Mesh, context: int) -> Base:
    """The base on the mesh, once, with its rotary table for `context` positions."""
    if context > spec.max_positions:
        raise ValueError(f"context: found {context} tokens (prompt and completion), the model has {spec.max_positions} positions")
    base = base.replace(rope=rope_table(context, spec.rope))
    return jax.device_put(base, meshes.base_shardings(mesh, base))


@dataclasses.dataclass(frozen=True)
class _Block:
    """One block at work: its layer's weights and adapters, and how to apply them."""

    model: Model
    layer: Layer
    adapter: dict[str, lora.Lora]
    angles: tuple[Array, Array]  # cos and sin [P, M, pairs]

    @property
    def numeric(self) -> Numerics:
        return self.model.numeric

    def scale(self, name: str) -> float:
        return self.model.adapter.scale(name) if name in self.adapter else 1.0

    def linear(self, x: Array, name: str) -> Array:
        bias = self.layer.bias.get(name)
        return lora.linear(x, getattr(self.layer, name), self.adapter.get(name), self.scale(name), self.numeric, bias)

    def norm(self, x: Array, weight: Array, eps: float | None = None) -> Array:
        return numerics.rms_norm(x, weight, eps or self.model.spec.norm_eps, self.numeric.exact)

    def rotate(self, x: Array) -> Array:
        return rotate(x, *self.angles, self.model.spec.rope.interleaved, self.numeric.exact)

    def per_head(self, x: Array, w: PyTree) -> Array:
        """x [..., H, K] times w [H] K -> N: [..., H, N]."""
        return jax.vmap(lambda x, w: quant.matmul(x, w, self.numeric), (-2, 0), -2)(x, w)

    def queries_and_keys(self, h: Array) -> tuple[Array, Array, Array | None]:
        """h [P, M, D] -> q [P, M, H, d], and k and v [P, M, K, d] (no v where it is a part of k)."""
        spec = self.model.spec
        if spec.mla:
            return self._latent_queries_and_keys(h)

        def heads(name, norm):
            x = self.linear(h, name)
            if norm is not None and spec.qk_norm == "full":
                x = self.norm(x, norm)
            if spec.clip_qkv:
                x = jnp.clip(x, -spec.clip_qkv, spec.clip_qkv)
            x = x.reshape(*x.shape[:-1], -1, spec.head_dim)
            return self.norm(x, norm) if norm is not None and spec.qk_norm == "head" else x

        layer = self.layer
        return self.rotate(heads("q", layer.q_norm)), self.rotate(heads("k", layer.k_norm)), heads("v", None)

    def _latent_queries_and_keys(self, h: Array) -> tuple[Array, Array, None]:
        """Queries are taken into the latent, so that all heads share one key: [latent | rotated]. Its values are the latent itself."""
        mla, layer = self.model.spec.mla, self.layer
        if mla.q_rank:
            q = self.linear(self.norm(self.linear(h, "q_a"), layer.q_a_norm, MLA_EPS), "q_b")
        else:
            q = self.linear(h, "q")
        q = q.reshape(*q.shape[:-1], -1, mla.nope + mla.rope)
        q = jnp.concatenate([self.per_head(q[..., : mla.nope], layer.k_up), self.rotate(q[..., mla.nope :])], -1)
        kv = self.linear(h, "kv_a")
        latent = self.norm(kv[..., : mla.kv_rank], layer.kv_a_norm, MLA_EPS)
        return q, jnp.concatenate([latent[..., None, :], self.rotate(kv[..., None, mla.kv_rank :])], -1), None

    def output(self, a: Array) -> Array:
        """What attention gives, [P, M, H, d], into the residual stream."""
        if self.model.spec.mla:
            a = self.per_head(a, self.layer.v_up)
        return self.linear(a.reshape(*a.shape[:2], -1), "o")

    def mlp(self, prefix: str) -> moe.Mlp:
        """The experts (prefix ''), or the MLP that every token passes (prefix 'mlp_')."""
        names = {prefix + n: n for n in ("gate", "up", "down")}
        pick = lambda d: {short: d[name] for name, short in names.items() if name in d}
        scales = tuple((short, self.scale(name)) for name, short in names.items() if name in self.adapter)
        weights = (getattr(self.layer, name) for name in names)
        limit = self.model.spec.swiglu_limit if self.model.spec.activation == "clamped_swiglu" else 0.0
        return moe.Mlp(*weights, pick(self.adapter), pick(self.layer.bias), scales, limit)


def apply(
    model: Model,
    base: Base,
    adapter: lora.Adapter | None,
    tokens: Array,
    positions: Array,
    valid: Array,
    attention,
    carry=None,
    slots: Array | None = None,
) -> Output:
    """Run the model on tokens [P, M] at positions [P, M]; `valid` [P, M] is False for padding, which no expert computes.

    Args:
        adapter: from `lora.prepare`; None is the reference policy.
        attention: (layer index, q [P, M, H, d], k and v [P, M, K, d], Rules, carry) -> (output [P, M, H, d], carry, emitted): one of
            the functions below.
        carry: state of `attention` that passes from layer to layer (the pool of keys when decoding).
        slots: [P, n] int32 below M: of these tokens the residual stream after each block is given too, as `Output.stream`.

    Returns:
        Output.
    """
    spec, numeric = model.spec, model.numeric
    p_, m_ = tokens.shape
    by_rows = (
        (lambda x: x) if model.mesh is None else (lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(model.mesh, P(meshes.ROWS))))
    )
    angles = tuple(jnp.take(t, positions, axis=0, mode="clip") for t in base.rope)
    windows = jnp.array(spec.windows, jnp.int32) if any(spec.windows) else None

    def block(sparse, state, inputs):
        x, carry = state
        index, layer, ad = inputs
        b = _Block(model, layer, ad, angles)
        with jax.named_scope("qkv"):
            q, k, v = b.queries_and_keys(b.norm(x, layer.attn_norm))
        scale = spec.attention_scale or spec.head_dim**-0.5
        rules = Rules(scale, spec.mla.kv_rank if spec.mla else 0, None if windows is None else windows[index], layer.sinks)
        with jax.named_scope("attention"):
            a, carry, emitted = attention(index, q, k, v, rules, carry)
            a = checkpoint_name(a, "attention")
        with jax.named_scope("output"):
            x = by_rows(x + b.output(a))
        h = b.norm(x, layer.mlp_norm).reshape(p_ * m_, -1)
        y, routed = jnp.zeros_like(h), None
        if layer.mlp_gate is not None:
            with jax.named_scope("mlp"):
                y = moe.feed_forward(h, b.mlp("mlp_"), numeric)
        if sparse:
            with jax.named_scope("router"):
                weights, choice, p, z = moe.route(h, layer, ad.get("router"), b.scale("router"), spec, numeric)
            with jax.named_scope("experts"):
                y = y + moe.routed(h, weights, choice, valid.reshape(-1), b.mlp(""), spec.experts, numeric, model.mesh)
            seen = valid.reshape(-1, 1)
            size = jnp.where(seen[:, 0], jax.nn.logsumexp(z, -1) ** 2, 0.0)
            routed = choice.reshape(p_, m_, -1), jnp.sum(jnp.where(seen, p, 0.0), 0), jnp.sum(size)
        x = by_rows(x + y.reshape(x.shape))
        return (x, carry), (emitted, routed, None if slots is None else jnp.take_along_axis(x, slots[..., None], 1))

    x = by_rows(embed(base, tokens))
    emitted, routed, stream = [], [], []
    for (first, count, sparse), layers, ad in zip(spec.stacks, base.layers, adapter.layers if adapter else ({},) * len(base.layers)):
        run = functools.partial(block, sparse)
        run = jax.checkpoint(run, policy=KEPT) if model.remat else run
        (x, carry), (keys, choices, seen) = jax.lax.scan(run, (x, carry), (first + jnp.arange(count), layers, ad))
        emitted.append(keys)
        stream.append(seen)
        routed += [choices] if sparse else []
    join = lambda parts: parts[0] if len(parts) == 1 else jax.tree.map(lambda *a: jnp.concatenate(a), *parts)
    none = jnp.zeros((0, p_, m_, 0), jnp.int32), jnp.zeros((0, 0)), jnp.zeros(0)
    choices, router, router_z = join(routed) if routed else none
    hidden = numerics.rms_norm(x, base.final_norm, spec.norm_eps, numeric.exact)
    return Output(hidden, choices, router, router_z, join(emitted) if carry is None else carry, join(stream))


def embed(base: Base, tokens: Array) -> Array:
    """tokens [...] -> f32 [..., D]; without an embedding of its own a model reads the columns of its quantized head."""
    w = base.head if base.embed is None else base.embed
    if not quant.is_quantized(w):
        return w[tokens].astype(jnp.float32)
    # Codes times scales: XLA unrolls the loop over a run of one layer, and could contract them with the addition of its output.
    return numerics.fence(quant.columns(w, tokens))


def prefill(numeric: Numerics, lengths: Array):
    """Causal attention over prompts [P, T] of given lengths; emits their Keys."""

    def attention(_, q, k, v, rules, carry):
        mask = causal(q.shape[1], lengths[:, None], rules)
        keys = encode(k, v, numeric)
        return attend(q[:, None], ((keys, mask),), rules, numeric)[:, 0], carry, keys

    return attention


def prefill_chunk(numeric: Numerics, packing: Packing, pool: Keys, before: tuple[cache.Table, ...], start: Array, lengths: Array):
    """Causal attention over chunks of text that begin at positions `start` [P] and have `lengths` [P] tokens, after the contexts `before`
    (pages [P, n] each). Tokens are packed; emits the chunks' Keys, padded [P, K, 1, T, ...]."""
    used, sizes = in_use(before, pool), buckets(*(table.page.shape[-1] for table in before), none=True)

    def attention(layer, q, k, v, rules, carry):
        q, k, v = (None if x is None else packing.spread(x) for x in (q, k, v))
        t = q.shape[1]
        chunk = encode(k[:, None], None if v is None else v[:, None], numeric)
        query = start[:, None] + jnp.arange(t)

        def run(*pages):
            segments = [(chunk, causal(t, lengths[:, None], rules))]
            for table, n in zip(before, pages):
                if n:
                    keys = cache.read(pool, layer, table, n)
                    segments.append((keys, cache.visible(rules, query, table, keys.k.shape[-3])[:, None]))
            return attend(q[:, None], tuple(segments), rules, numeric)[:, 0]

        return packing.flat(_switch(used, sizes, run)), carry, chunk

    return attention


def packed(numeric: Numerics, packing: Packing, prompt_lengths: Array, t: int, group: int):
    """Differentiable attention over packed tokens of rows [P, T + G * C]: a prompt, then its completions, which see the prompt and their
    own past."""

    def attention(_, q, k, v, rules, carry):
        q, k, v = (None if x is None else packing.spread(x) for x in (q, k, v))
        p_ = q.shape[0]
        c = (q.shape[1] - t) // group
        prompt = tuple(None if x is None else x[:, :t] for x in (k, v))
        first = attend_differentiable(q[:, None, :t], (prompt,), (causal(t, prompt_lengths[:, None], rules),), rules, numeric)[:, 0]
        if not c:
            return packing.flat(first), carry, None
        by_sample = lambda x: None if x is None else x[:, t:].reshape(p_, group, c, *x.shape[2:])
        own = jnp.arange(c)
        distance = own[:, None] - own
        masks = (keys_before(t, prompt_lengths, own, rules), ((distance >= 0) & rules.within(distance))[None, None])
        rest = attend_differentiable(by_sample(q), (prompt, (by_sample(k), by_sample(v))), masks, rules, numeric)
        return packing.flat(jnp.concatenate([first, rest.reshape(p_, group * c, *rest.shape[3:])], 1)), carry, None

    return attention


def decode(numeric: Numerics, prompts: cache.Table, own: cache.Table, live: Array):
    """One new token of each completion, tokens [P, G], after `own.length` tokens of its own. It is written into the pool of keys, the
    carry, and sees what is there of it, pages [P, G, n], and what the rows of P share, pages [P, n]. Rows that are not `live` [P, G] are
    written nowhere."""
    including = own.replace(length=own.length + 1)
    at = own.first + own.length

    def attention(layer, q, k, v, rules, pool: Keys):
        new = encode(k[:, :, None], None if v is None else v[:, :, None], numeric)  # leaves [P, K, G, 1, ...]
        size = cache.page_size(pool)
        page = jnp.take_along_axis(own.page, jnp.minimum(own.length // size, own.page.shape[-1] - 1)[..., None], -1)[..., 0]
        pool = cache.write_layer(pool, layer, new, jnp.where(live, page, cache.TRASH), own.length % size)

        def run(n_prompt, n_own):
            of_prompt, of_own = cache.read(pool, layer, prompts, n_prompt), cache.read(pool, layer, including, n_own)
            segments = (
                (of_prompt, cache.visible(rules, at, prompts, of_prompt.k.shape[-3])[:, :, None]),
                (of_own, cache.visible(rules, at[..., None], including, of_own.k.shape[-3])),
            )
            return attend(q[:, :, None], segments, rules, numeric)[:, :, 0]

        used = in_use((prompts, including.replace(length=jnp.where(live, including.length, 0))), pool)
        return _switch(used, buckets(prompts.page.shape[-1], own.page.shape[-1]), run), pool, None

    return attention


def buckets(*most: int, none: bool = False) -> list[tuple[int, ...]]:
    """Numbers of pages that attention is compiled for, the largest last: a quarter, a half and all of each of `most`; before that none."""
    parts = [tuple(-(-m // part) for m in most) for part in (4, 2, 1)]
    return list(dict.fromkeys([(0,) * len(most), *parts] if none else parts))


def in_use(tables: tuple[cache.Table, ...], pool: Keys) -> list[Array]:
    """Pages [] of each table that hold tokens."""
    return [-(-jnp.max(table.length) // cache.page_size(pool)) for table in tables]


def _switch(used: list[Array], sizes: list[tuple[int, ...]], run) -> Array:
    """`run` with the smallest of `sizes` that holds what is used: attention reads what is filled, not what could be."""
    too_small = [functools.reduce(jnp.logical_or, [u > s for u, s in zip(used, size)]) for size in sizes[:-1]]
    return jax.lax.switch(sum(x.astype(jnp.int32) for x in too_small), [functools.partial(run, *size) for size in sizes])


def causal(t: int, lengths: Array, rules: Rules) -> Array:
    """[P, G, T, T]: a token sees itself and what is before it; padding beyond `lengths` [P, G] sees itself only, and nobody sees it."""
    i = jnp.arange(t)
    distance = i[:, None] - i
    return (distance >= 0) & rules.within(distance) & ((i < lengths[..., None, None]) | (distance == 0))


def keys_before(t: int, lengths: Array, own: Array, rules: Rules) -> Array:
    """[P, 1, M or 1, T]: the keys of a prompt of `lengths` [P] that the completion's tokens `own` [M] see."""
    i = jnp.arange(t)
    return (i < lengths[:, None, None, None]) & rules.within(lengths[:, None, None, None] + own[:, None] - i)


def logits(model: Model, base: Base, adapter: lora.Adapter | None, hidden: Array) -> Array:
    """hidden [N, D] -> [N, V] f32."""
    head = adapter.head if adapter else None
    with jax.named_scope("head"):
        return lora.linear(hidden, base.head, head, model.adapter.scale("head") if head is not None else 1.0, model.numeric)


def token_logprobs(
    model: Model, base: Base, adapter: lora.Adapter | None, hidden: Array, targets: Array, temperature: float = 1.0, chunk: int = 0,
    entropy_gradient: bool = False,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Log-probabilities of targets [N] after hidden [N, D] at the temperature and at 1, and the entropy, each [N].

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
        log_p = jax.nn.log_softmax(z if entropy_gradient else jax.lax.stop_gradient(z))
        return tempered, scored, -jnp.sum(jnp.exp(log_p) * log_p, -1)

    return tuple(x.reshape(-1)[:n] for x in jax.lax.map(rows, (hidden, targets)))


def logprob_of(z: Array, target: Array, exact: bool) -> Array:
    """log softmax(z [N, V]) at target [N]: [N]."""
    total = numerics.log_sum_exp(z, exact)
    return (jnp.take_along_axis(z, target[:, None], 1) - total)[:, 0]


def keys_like(model: Model, p: int, group: int, length: int) -> Keys:
    """Zeroed Keys of a cache: leaves [L, P, K, G, S, (d)]."""
    spec, numeric = model.spec, model.numeric
    one = lambda: jnp.zeros((p, group, length, spec.kv_heads, spec.head_dim))
    keys = jax.eval_shape(lambda: encode(one(), None if spec.mla else one(), numeric))
    return jax.tree.map(lambda leaf: jnp.zeros((spec.layers, *leaf.shape), leaf.dtype), keys)

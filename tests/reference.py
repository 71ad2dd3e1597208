"""The whole model written naively in float64 NumPy: loops, no tricks, nothing shared with the package but its records.

`random_base` makes the weights that all tests use.
"""

import ml_dtypes
import numpy as np

from rl_adapter import quant
from rl_adapter.hub import rope
from rl_adapter.types import Base, Layer, Spec


def decode(w) -> np.ndarray:
    """A weight as float64 [..., K, N]: a `Weight`'s documented layout, read one feature at a time; a float array as it is."""
    if not quant.is_quantized(w):
        return np.asarray(w, np.float64)
    qvalue, scale = np.asarray(w.qvalue), np.asarray(w.scale[0]).astype(np.float64)
    nibbles = w.form == "int4"
    *lead, groups, width, n = qvalue.shape
    size = width * 2 if nibbles else width
    out = np.zeros((*lead, groups * size, n))
    for g in range(groups):
        for j in range(size):
            if not nibbles:
                code = qvalue[..., g, j, :].astype(np.float64)
            elif j < size // 2:
                code = (qvalue[..., g, j, :] % 16).astype(np.float64) - 8
            else:
                code = (qvalue[..., g, j - size // 2, :] // 16).astype(np.float64) - 8
            out[..., g * size + j, :] = code * scale[..., g, :]
    return out


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * np.asarray(weight, np.float64)


def rotate(x: np.ndarray, position: int, frequencies) -> np.ndarray:
    """RoPE of one head's vector [d]: feature i turns with feature i + d/2."""
    half = len(x) // 2
    angle = position * np.asarray(frequencies)
    a, b = x[:half], x[half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)])


def softmax(x: np.ndarray) -> np.ndarray:
    p = np.exp(x - np.max(x))
    return p / np.sum(p)


def forward(
    spec: Spec, base: Base, tokens, adapter: dict[str, tuple] | None = None, routers: list | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """One row of tokens [T] through the model.

    Args:
        adapter: field ("q", "gate", ..., "head") -> (a [L, (E,) K, R], b [L, (E,) R, N], scale); of "head" without [L]. Experts may
            share a, which then has an axis E of 1, or none.
        routers: gets each layer's logits of experts [T, E] appended.

    Returns:
        logprobs [T, V] of the next token, and the experts [L, T, k] chosen, the most probable first.
    """
    adapter = adapter or {}

    def linear(x, field, *index):
        weight = getattr(base, field) if field == "head" else getattr(base.layers[0], field)
        w = decode(_pick(weight, index))
        y = x @ w
        if field in adapter:
            a, b, scale = adapter[field]
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            for i in index[:1]:
                a, b = a[i], b[i]
            for i in index[1:]:
                a, b = (a if a.ndim == 2 else a[i % len(a)]), b[i]
            y = y + scale * ((x @ a) @ b)
        return y

    tokens = np.asarray(tokens)
    length, group, d = len(tokens), spec.heads // spec.kv_heads, spec.head_dim
    choices = np.zeros((spec.layers, length, spec.experts_per_token), int)
    x = np.asarray(base.embed).astype(np.float64)[tokens]  # [T, D]
    for layer in range(spec.layers):
        norms = {f: np.asarray(getattr(base.layers[0], f))[layer] for f in ("attn_norm", "q_norm", "k_norm", "mlp_norm")}
        h = rms_norm(x, norms["attn_norm"], spec.norm_eps)
        q = rms_norm(linear(h, "q", layer).reshape(length, spec.heads, d), norms["q_norm"], spec.norm_eps)
        k = rms_norm(linear(h, "k", layer).reshape(length, spec.kv_heads, d), norms["k_norm"], spec.norm_eps)
        v = linear(h, "v", layer).reshape(length, spec.kv_heads, d)
        attended = np.zeros((length, spec.heads, d))
        for head in range(spec.heads):
            keys = np.array([rotate(k[s, head // group], s, spec.rope.frequencies) for s in range(length)])
            for t in range(length):
                scores = keys[: t + 1] @ rotate(q[t, head], t, spec.rope.frequencies) / np.sqrt(d)
                attended[t, head] = softmax(scores) @ v[: t + 1, head // group]
        x = x + linear(attended.reshape(length, -1), "o", layer)

        h = rms_norm(x, norms["mlp_norm"], spec.norm_eps)
        router = linear(h, "router", layer)
        if routers is not None:
            routers.append(router)
        out = np.zeros_like(x)
        for t in range(length):
            p = softmax(router[t])
            chosen = np.argsort(-p, kind="stable")[: spec.experts_per_token]
            choices[layer, t] = chosen
            total = np.sum(p[chosen]) if spec.norm_topk_prob else 1.0
            for e in chosen:
                gate, up = linear(h[t], "gate", layer, e), linear(h[t], "up", layer, e)
                out[t] += p[e] / total * linear(gate / (1 + np.exp(-gate)) * up, "down", layer, e)
        x = x + out
    logits = linear(rms_norm(x, base.final_norm, spec.norm_eps), "head")
    top = np.max(logits, -1, keepdims=True)
    return logits - top - np.log(np.sum(np.exp(logits - top), -1, keepdims=True)), choices


def _pick(w, index):
    """One layer's (and expert's) weight of a stacked one."""
    if not quant.is_quantized(w):
        return np.asarray(w)[index]
    return quant.weight(w.form, np.asarray(w.qvalue)[index], np.asarray(w.scale[0])[index])


def tiny_spec(**changes) -> Spec:
    """A model small enough for this file's loops."""
    fields = dict(
        layers=2, d_model=64, heads=4, kv_heads=2, head_dim=32, experts=4, experts_per_token=2, d_expert=32, vocab=48, norm_eps=1e-6
    )  # fmt: skip
    fields |= dict(norm_topk_prob=True, tie_embeddings=False, max_positions=128, qk_norm="head")
    fields |= changes
    return Spec(**fields, rope=rope.plain(10000.0, fields["head_dim"]))


def random_params(seed: int, spec: Spec) -> Base:
    """Random float32 weights [L, (E,) in, out] of a typical size: activations stay near 1."""
    rng = np.random.default_rng(seed)
    d, f, layers, experts = spec.d_model, spec.d_expert, spec.layers, spec.experts

    def weight(*shape):
        return (rng.normal(size=shape) / np.sqrt(shape[-2])).astype(np.float32)

    def norm(*shape):
        return (1 + 0.1 * rng.normal(size=shape)).astype(np.float32)

    embed = (0.5 * rng.normal(size=(spec.vocab, d))).astype(ml_dtypes.bfloat16)
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    stacked = Layer(
        attn_norm=norm(layers, d),
        q=weight(layers, d, q),
        k=weight(layers, d, kv),
        v=weight(layers, d, kv),
        o=weight(layers, q, d),
        q_norm=norm(layers, spec.head_dim),
        k_norm=norm(layers, spec.head_dim),
        mlp_norm=norm(layers, d),
        router=weight(layers, d, experts),
        gate=weight(layers, experts, d, f),
        up=weight(layers, experts, d, f),
        down=weight(layers, experts, f, d),
    )
    head = embed.T.astype(np.float32) if spec.tie_embeddings else weight(d, spec.vocab)
    return Base(embed=embed, layers=(stacked,), final_norm=norm(d), head=head)


def random_base(seed: int, spec: Spec, form: str = "int4_g32") -> Base:
    """`random_params` quantized: attention and experts in `form`, router and head in fixed16. Host arrays."""
    params = random_params(seed, spec)
    forms = dict.fromkeys(("q", "k", "v", "o", "gate", "up", "down"), form) | {"router": "fixed16"}
    (layers,) = params.layers
    layers = layers.replace(**{f: quant.quantize(getattr(layers, f), forms[f], f) for f in forms})
    return params.replace(layers=(layers,), head=quant.quantize(params.head, "fixed16", "head"))

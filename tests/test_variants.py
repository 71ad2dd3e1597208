"""Models of other families than the reference's, against a forward pass in float64 NumPy that is written once for all of them.

Latent attention is written here as its papers have it: keys and values of every head are made out of the latent, nothing is absorbed.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import reference
from quick import QUICK, quickly
from test_model import completions, masks
from test_moe import naive_route

from rl_adapter import evaluate, lora, quant, rollout, scoring
from rl_adapter import mesh as meshes
from rl_adapter import model as models
from rl_adapter.engine import Engine
from rl_adapter.sampling import Sampling
from rl_adapter.types import Base, Layer, Mla, Numerics, Rope

f32 = np.float32
FLOAT, A16 = Numerics("float"), Numerics("exact", 16)
RANKS = (("attention", 2), ("mlp", 2), ("experts", 2), ("router", 0), ("head", 0))
LORA = lora.AdapterSpec(RANKS, tuple((g, 3.0) for g, _ in RANKS))


def rope(pairs, **kwargs):
    return Rope(tuple(100.0 ** (-i / pairs) for i in range(pairs)), **kwargs)


SPECS = {
    "gpt-oss": reference.tiny_spec(
        d_model=32, head_dim=8, heads=4, kv_heads=2, qk_norm="none", windows=(3, 0), score="softmax_of_chosen",
        activation="clamped_swiglu", swiglu_limit=1.0,
    ),
    "deepseek": dataclasses.replace(
        reference.tiny_spec(
            layers=3, d_model=32, heads=3, kv_heads=1, head_dim=16 + 4, qk_norm="none", experts=8, score="sigmoid", expert_groups=4,
            groups_per_token=2, routed_scale=1.5, dense=(0,), d_mlp=40, d_shared=24, attention_scale=0.35,
        ),
        mla=Mla(q_rank=12, kv_rank=16, nope=6, rope=4, v=5), rope=rope(2, interleaved=True, factor=1.1),
    ),
    "between": dataclasses.replace(  # latent attention without a latent for queries; a dense layer between others
        reference.tiny_spec(layers=3, d_model=32, heads=2, kv_heads=1, head_dim=16 + 4, qk_norm="none", dense=(1,), d_mlp=40),
        mla=Mla(q_rank=0, kv_rank=16, nope=6, rope=4, v=5), rope=rope(2),
    ),
    "dense": dataclasses.replace(
        reference.tiny_spec(
            d_model=32, head_dim=8, qk_norm="full", experts=0, experts_per_token=0, d_expert=0, dense=(0, 1), d_mlp=48, clip_qkv=1.2,
        ),
        rope=rope(3), tie_embeddings=True,
    ),
}  # fmt: skip


def random_base(seed, spec):
    """Weights in fixed16, with every bias, norm and sink that the family has."""
    rng = np.random.default_rng(seed)
    d, m = spec.d_model, spec.mla
    weight = lambda *shape: quant.quantize(rng.normal(size=shape) / np.sqrt(shape[-2]), "fixed16")
    vector = lambda *shape: (0.3 * rng.normal(size=shape)).astype(f32)
    norm = lambda *shape: 1 + vector(*shape)
    layers = []
    for _, n, sparse in spec.stacks:
        fields = dict(attn_norm=norm(n, d), mlp_norm=norm(n, d))
        if m:
            queries = spec.heads * (m.nope + m.rope)
            if m.q_rank:
                fields |= dict(q_a=weight(n, d, m.q_rank), q_a_norm=norm(n, m.q_rank), q_b=weight(n, m.q_rank, queries))
            else:
                fields |= dict(q=weight(n, d, queries))
            fields |= dict(kv_a=weight(n, d, m.kv_rank + m.rope), kv_a_norm=norm(n, m.kv_rank), o=weight(n, spec.heads * m.v, d))
            fields |= dict(k_up=weight(n, spec.heads, m.nope, m.kv_rank), v_up=weight(n, spec.heads, m.kv_rank, m.v))
        else:
            q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
            fields |= dict(q=weight(n, d, q), k=weight(n, d, kv), v=weight(n, d, kv), o=weight(n, q, d))
            if spec.qk_norm == "full":
                fields |= dict(q_norm=norm(n, q), k_norm=norm(n, kv))
        width = spec.d_shared if sparse else spec.d_mlp
        if width:
            fields |= dict(mlp_gate=weight(n, d, width), mlp_up=weight(n, d, width), mlp_down=weight(n, width, d))
        if sparse:
            e, f = spec.experts, spec.d_expert
            fields |= dict(router=weight(n, d, e), gate=weight(n, e, d, f), up=weight(n, e, d, f), down=weight(n, e, f, d))
            if spec.score == "sigmoid":
                fields |= dict(score_bias=vector(n, e))
        if spec.windows:  # gpt-oss
            outputs = dict(q=q, k=kv, v=kv, o=d, router=e, gate=(e, f), up=(e, f), down=(e, d))
            fields |= dict(sinks=vector(n, spec.heads) * 3, bias={name: vector(n, *np.atleast_1d(w)) for name, w in outputs.items()})
        layers.append(Layer(**fields))
    head = weight(d, spec.vocab)
    embed = None if spec.tie_embeddings else (0.5 * rng.normal(size=(spec.vocab, d))).astype(f32)
    return Base(embed=embed, layers=tuple(layers), final_norm=norm(d), head=head)


def forward(spec, base, adapter, tokens):
    """tokens [T] -> logprobs [T, V], and the experts of each layer that has some: [Ls, T, k]."""
    length, m, choices, clear = len(tokens), spec.mla, [], []
    embed = reference.decode(base.head).T if base.embed is None else np.asarray(base.embed, np.float64)
    x = embed[tokens]
    for layer in range(spec.layers):
        run, (first, _, sparse) = next((r, s) for r, s in enumerate(spec.stacks) if s[0] <= layer < s[0] + s[1])
        stack, pairs, at = base.layers[run], adapter.layers[run] if adapter else {}, layer - first
        vector = lambda name: np.asarray(getattr(stack, name)[at], np.float64)

        def linear(x, name, *e):
            y = x @ reference.decode(reference._pick(getattr(stack, name), (at, *e)))
            if name in pairs:
                y = y + LORA.scale(name) * (x @ np.asarray(pairs[name].a, np.float64)[(at, *e)] @ pairs[name].b[(at, *e)])
            return y + np.asarray(stack.bias[name][(at, *e)], np.float64) if name in stack.bias else y

        def turn(row, position):
            """Pairs of features of one head stay where they are."""
            out, n = np.array(row), len(spec.rope.frequencies)
            for i, frequency in enumerate(spec.rope.frequencies):
                a, b = (2 * i, 2 * i + 1) if spec.rope.interleaved else (i, i + n)
                c, s = np.cos(position * frequency) * spec.rope.factor, np.sin(position * frequency) * spec.rope.factor
                out[a], out[b] = row[a] * c - row[b] * s, row[b] * c + row[a] * s
            return out

        def mlp(x, prefix, *e):
            gate, up = linear(x, prefix + "gate", *e), linear(x, prefix + "up", *e)
            if spec.swiglu_limit:
                gate, up = np.minimum(gate, spec.swiglu_limit), np.clip(up, -spec.swiglu_limit, spec.swiglu_limit)
                return linear(gate / (1 + np.exp(-1.702 * gate)) * (up + 1), prefix + "down", *e)
            return linear(gate / (1 + np.exp(-gate)) * up, prefix + "down", *e)

        h = reference.rms_norm(x, vector("attn_norm"), spec.norm_eps)
        if m:
            q = h
            if m.q_rank:
                q = linear(reference.rms_norm(linear(h, "q_a"), vector("q_a_norm"), 1e-6), "q_b")
            else:
                q = linear(h, "q")
            q = q.reshape(length, spec.heads, m.nope + m.rope)
            kv = linear(h, "kv_a")
            latent = reference.rms_norm(kv[:, : m.kv_rank], vector("kv_a_norm"), 1e-6)
            k_up, v_up = (reference.decode(reference._pick(getattr(stack, n), (at,))) for n in ("k_up", "v_up"))
            k, v = np.zeros(q.shape), np.zeros((length, spec.heads, m.v))
            for t, i in np.ndindex(length, spec.heads):
                q[t, i, m.nope :] = turn(q[t, i, m.nope :], t)
                k[t, i] = np.concatenate([k_up[i] @ latent[t], turn(kv[t, m.kv_rank :], t)])
                v[t, i] = latent[t] @ v_up[i]
        else:
            q, k, v = linear(h, "q"), linear(h, "k"), linear(h, "v")
            if spec.qk_norm == "full":
                q, k = (reference.rms_norm(y, vector(n), spec.norm_eps) for y, n in ((q, "q_norm"), (k, "k_norm")))
            if spec.clip_qkv:
                q, k, v = (np.clip(y, -spec.clip_qkv, spec.clip_qkv) for y in (q, k, v))
            q, k, v = (y.reshape(length, -1, spec.head_dim) for y in (q, k, v))
            k, v = (np.repeat(y, spec.heads // spec.kv_heads, 1) for y in (k, v))
            q, k = (np.array([[turn(head, t) for head in heads] for t, heads in enumerate(y)]) for y in (q, k))
        scale = spec.attention_scale or spec.head_dim**-0.5
        window = spec.windows[layer] if spec.windows else 0
        attended = np.zeros((length, spec.heads, v.shape[-1]))
        for t, i in np.ndindex(length, spec.heads):
            start = max(0, t + 1 - window) if window else 0
            scores, values = k[start : t + 1, i] @ q[t, i] * scale, v[start : t + 1, i]
            if stack.sinks is not None:
                scores, values = np.append(scores, vector("sinks")[i]), np.vstack([values, 0 * values[:1]])
            attended[t, i] = reference.softmax(scores) @ values
        x = x + linear(attended.reshape(length, -1), "o")

        h = reference.rms_norm(x, vector("mlp_norm"), spec.norm_eps)
        y = mlp(h, "mlp_") if stack.mlp_gate is not None else np.zeros(h.shape)
        if sparse:
            score_bias = None if stack.score_bias is None else vector("score_bias")
            routes = [naive_route(z, score_bias, spec) for z in linear(h, "router")]
            for t, (weights, chosen, margin) in enumerate(routes):
                y[t] += sum(w * mlp(h[t], "", e) for w, e in zip(weights, chosen))
                clear.append(margin)
            choices.append([chosen for _, chosen, _ in routes])
        x = x + y
    z = reference.rms_norm(x, base.final_norm, spec.norm_eps) @ reference.decode(base.head)
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.sum(np.exp(z), -1, keepdims=True)), np.array(choices), min(clear, default=1.0)


@dataclasses.dataclass(frozen=True)
class Family:
    name: str

    @property
    def spec(self):
        return SPECS[self.name]

    @functools.cached_property
    def base(self):
        return random_base(1, self.spec)

    @functools.cached_property
    def adapter(self):
        rng = np.random.default_rng(2)
        shapes = jax.eval_shape(lambda: lora.init(LORA, self.base, jax.random.key(0)))
        return jax.tree.map(lambda s: (rng.normal(size=s.shape) / np.sqrt(s.shape[-2]) / 2).astype(f32), shapes)

    @functools.cached_property
    def rollout(self):
        return completions(5, self.spec, 2, 2, 5, 4)

    def model(self, numeric, mesh=None):
        return models.Model(self.spec, LORA, numeric, mesh or meshes.make(1))

    def place(self, mesh=None):
        return models.place(self.spec, self.base, mesh or meshes.make(1), 32)

    @functools.cache
    def score(self, numeric, mesh=None, differentiate=False):
        """Compiled: rollout -> logprobs and choices, and where asked for the gradient of the logprobs' sum over what was sampled."""

        def value(adapter, base, r, mask):
            s = scoring.score(self.model(numeric, mesh), base, lora.prepare(adapter, numeric), r)
            return (s.scored * mask).sum(), (s.scored, s.choices)

        program = jax.value_and_grad(value, has_aux=True) if differentiate else lambda *args: (value(*args), None)
        program = jax.jit(program, compiler_options=QUICK)
        base = self.place(mesh)

        def run(r):
            adapter = self.adapter
            if mesh:
                adapter = jax.device_put(adapter, meshes.adapter_shardings(mesh, adapter))
            r, mask = jax.device_put((r.replace(prompt_choices=None, choices=None), masks(r)[0]), meshes.rows(mesh) if mesh else None)
            (_, (scored, choices)), grads = jax.device_get(program(adapter, base, r, mask))
            return scored * masks(r)[0], choices, grads

        return run


FAMILIES = {name: Family(name) for name in SPECS}


@pytest.mark.parametrize("name", SPECS)
def test_forward(name):
    """Logprobs of completions, float to 1e-4 and A16 to 2e-3 of their spread, and the experts; no expert of these seeds is chosen by so
    little. The float twin's gradient is a central difference along a random direction of all adapters together."""
    f = FAMILIES[name]
    r = f.rollout

    def expected(adapter):
        out, experts = np.zeros(r.tokens.shape), {}
        for p, g in np.ndindex(r.lengths.shape):
            t, c = r.prompt_lengths[p], r.lengths[p, g]
            row = np.concatenate([r.prompts[p, :t], r.tokens[p, g, :c]])
            logprobs, chosen, clear = forward(f.spec, f.base, adapter, row[:-1])
            out[p, g, :c], experts[p, g] = logprobs[np.arange(t - 1, t + c - 1), row[t:]], chosen
            assert clear > 2e-4
        return out, experts

    want, experts = expected(f.adapter)
    spread = want[masks(r)[0]].std()
    for numeric, tolerance in ((FLOAT, 1e-4), (A16, 2e-3 * spread)):
        scored, choices, grads = f.score(numeric, differentiate=numeric == FLOAT)(r)
        np.testing.assert_allclose(scored, want, atol=tolerance)
        assert len(choices) == f.spec.sparse_layers
        for (p, g), chosen in experts.items() if len(choices) else ():
            n, start = r.prompt_lengths[p], 5 + 4 * g
            found = np.concatenate([choices[:, p, :n], choices[:, p, start : start + r.lengths[p, g] - 1]], 1)
            np.testing.assert_array_equal(np.sort(found), np.sort(chosen))
        if numeric == FLOAT:
            rng = np.random.default_rng(3)
            norm = np.sqrt(sum(np.sum(x**2) for x in jax.tree.leaves(grads)))
            assert min(np.abs(x).max() for x in jax.tree.leaves(grads)) > 0
            direction = jax.tree.map(lambda x: rng.normal(size=x.shape), grads)
            ends = [expected(jax.tree.map(lambda w, d, h=h: w + h * d, f.adapter, direction))[0].sum() for h in (-1e-6, 1e-6)]
            slope = sum(np.sum(x * d) for x, d in zip(jax.tree.leaves(grads), jax.tree.leaves(direction)))
            assert slope / norm == pytest.approx((ends[1] - ends[0]) / 2e-6 / norm, abs=2e-3)


@pytest.mark.parametrize("name", SPECS)
def test_sampled_and_trained_bits_are_the_same(name):
    """Cached decoding against the packed pass of training, windows, sinks, latents and runs of layers and all: over chunks of prompts,
    and pages that hold less than a window."""
    f = FAMILIES[name]
    r, model, sampling, engine = f.rollout, f.model(A16), Sampling(2, 4, (3,), 0), Engine(slots=3, page=2, chunk=2)
    with quickly():
        found = rollout.generate(
            model, sampling, f.place(), evaluate.prepare(model, f.adapter), r.prompts, r.prompt_lengths, np.arange(2), 1, engine
        )
    found = jax.device_get(found)
    scored, choices, _ = f.score(A16)(found)
    np.testing.assert_array_equal(scored, found.scored_logprobs * masks(found)[0])
    assert (found.lengths > 2).any() and found.choices.shape[0] == f.spec.sparse_layers
    fed = np.arange(4) < found.lengths[..., None] - 1
    np.testing.assert_array_equal(choices[:, :, 5:].reshape(found.choices.shape)[:, fed], found.choices[:, fed])


@pytest.mark.parametrize("name, shape", (("deepseek", (1, 2, 1)), ("gpt-oss", (1, 1, 2)), ("dense", (1, 1, 2))))
def test_bits_know_no_mesh(name, shape):
    f = FAMILIES[name]
    meshes.check(meshes.make(*shape), f.spec, 2)
    (scored, choices, _), (other, others, _) = f.score(A16)(f.rollout), f.score(A16, meshes.make(*shape))(f.rollout)
    np.testing.assert_array_equal(other, scored)
    valid = masks(f.rollout)[1][None, ..., None]
    np.testing.assert_array_equal(others * valid, choices * valid)


def test_exact_gradients_are_near_the_float_twins():
    """Straight through latent attention, biases of the router's choice and shared experts, as in the model of the reference."""
    f = FAMILIES["deepseek"]
    grads, twins = (f.score(numeric, differentiate=True)(f.rollout)[2] for numeric in (A16, FLOAT))
    distance = jax.tree.map(lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(b), grads, twins)
    assert max(jax.tree.leaves(distance)) < 5e-3

"""What lies in memory: 0.5 bytes an INT4 weight, no layer of dequantized experts, no [tokens, vocabulary]; and work by pairs, not experts.

Compiled from shapes alone.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference

from rl_adapter import cache, engine, lora, loss, microbatch, moe, quant, sampling, update
from rl_adapter import mesh as meshes
from rl_adapter import model as models
from rl_adapter.sampling import Sampling
from rl_adapter.types import Base, Layer, Numerics, Rollout

P, G, T, C = 4, 16, 8, 8
TOKENS = P * G * C
SCALAR_CODE = {"xla_backend_optimization_level": 0}  # cheaper machine code; buffers are those that users get


def tensor(form, *shape):
    """The shapes of a Weight."""
    n_bits, group = quant.FORMS[form]
    *lead, k, n = shape
    group = group or k
    dtype = {4: jnp.uint8, 8: jnp.int8, 16: jnp.int16}[n_bits]
    width = group // 2 if n_bits == 4 else group
    scale = jnp.bfloat16 if n_bits == 4 else jnp.float32
    struct = jax.ShapeDtypeStruct
    name = {4: "int4", 8: "int8", 16: "fixed16"}[n_bits]
    return quant.weight(name, struct((*lead, k // group, width, n), dtype), struct((*lead, k // group, n), scale))


def shapes(spec, context):
    """A base as `hub.load` gives it, and the bytes that it must take, counted by hand."""
    f32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    layers, d, f, e, v = spec.layers, spec.d_model, spec.d_expert, spec.experts, spec.vocab
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    int4 = functools.partial(tensor, "int4_g32", layers)
    stacked = Layer(
        attn_norm=f32((layers, d)), q=int4(d, q), k=int4(d, kv), v=int4(d, kv), o=int4(q, d),
        q_norm=f32((layers, spec.head_dim)), k_norm=f32((layers, spec.head_dim)), mlp_norm=f32((layers, d)),
        router=tensor("fixed16", layers, d, e), gate=int4(e, d, f), up=int4(e, d, f), down=int4(e, f, d),
    )  # fmt: skip
    base = Base(jax.ShapeDtypeStruct((v, d), jnp.bfloat16), (stacked,), f32((d,)), tensor("fixed16", d, v))
    weights = layers * (2 * d * q + 2 * d * kv + 3 * e * d * f)
    bytes_ = weights / 2 + weights / 32 * 2  # half a byte, and a bfloat16 for each 32
    bytes_ += layers * (2 * d * e + 4 * e) + 2 * d * v + 4 * v  # router and head in 16 bits, a float32 a column
    bytes_ += 2 * v * d + 4 * (layers * (2 * d + 2 * spec.head_dim) + d)  # embedding; norms
    rope = (f32((context, spec.head_dim // 2)),) * 2
    return base.replace(rope=rope), bytes_ + 4 * context * spec.head_dim


def model_of(spec):
    ranks = (("attention", 0), ("experts", 0), ("router", 2), ("head", 0))  # few kernels to compile, but gradients through all layers
    return models.Model(spec, lora.AdapterSpec(ranks, tuple((g, 1.0) for g, _ in ranks)), Numerics("exact", 16), meshes.make(1))


def size(tree):
    return sum(x.size * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def float_buffers(text):
    """Sizes in elements and shapes of the floating-point arrays of a compiled program, those inside fusions aside: they are not stored."""
    fused = set(re.findall(r" fusion\(.*?calls=%?([\w.\-]+)", text))
    found, inside = {}, False
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            inside = header[1] in fused
        elif not inside and (made := re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = (.*?) [\w\-]+\(", line)):
            for dims in re.findall(r"\b(?:f64|f32|f16|bf16)\[([\d,]+)\]", made[1]):
                found[dims] = int(np.prod([int(x) for x in dims.split(",")]))
    return found


def test_float_buffers_finds_a_dequantized_layer():
    w, x = tensor("int4_g32", 8, 64, 48), jax.ShapeDtypeStruct((8, 5, 64), jnp.float32)
    text = jax.jit(lambda w, x: jnp.matmul(x, quant.dequantize(w))).lower(w, x).compile().as_text()
    found = float_buffers(text)
    assert max(found.values()) == 8 * 64 * 48 and 8 * 5 * 48 in found.values()


def test_the_sampler():
    """Arguments by hand; the cache is written where it lies; temporaries smaller than the dequantized experts of one layer."""
    spec = reference.tiny_spec(layers=3, d_model=128, experts=64, d_expert=96)
    base, base_bytes = shapes(spec, T + C)
    model, s = model_of(spec), Sampling(G, C, (1,), 0, temperature=0.7)
    lay = engine.layout(engine.Engine(page=4), 1, P, T, s)
    pool, foretold = engine.cache_like(model, lay), engine.cache_bytes(model, lay)
    struct = jax.ShapeDtypeStruct
    i32 = functools.partial(struct, dtype=jnp.int32)
    as_shapes = lambda table: jax.tree.map(lambda x: struct(x.shape, x.dtype), table)
    table = lambda *shape: as_shapes(cache.empty_table(*shape))
    chunk = {name: i32((P, T)) for name in ("tokens", "page", "slot")} | {name: i32((P,)) for name in ("lengths", "start", "ids")}
    chunk |= {name: i32((P, G)) for name in ("samples", "drawn")}
    rows = {name: i32((P, G)) for name in ("token", "drawn", "limit", "ids", "samples")} | {"live": struct((P, G), jnp.bool_)}
    tables = table(P, lay.prompt_pages), table(P, G, lay.own_pages)
    programs = (
        (engine.prefill.lower(model, s, lay.budget, base, None, pool, chunk, (), i32(())), size(chunk)),
        (engine.decode.lower(model, s, lay.steps, base, None, pool, rows, *tables, i32(()), i32(())), size((rows, tables)) + 4),
    )
    for lowered, others in programs:
        memory = lowered.compile(compiler_options=SCALAR_CODE).memory_analysis()
        assert memory.argument_size_in_bytes == base_bytes + foretold + others + 4
        assert memory.alias_size_in_bytes == foretold
        assert memory.temp_size_in_bytes < 4 * 3 * spec.experts * spec.d_model * spec.d_expert
    (layers,) = base.layers
    int4 = size([w.qvalue for w in (layers.gate, layers.up, layers.down)])
    assert int4 > base_bytes / 2  # so this was about experts


@pytest.mark.parametrize("shards", (1, 4))
def test_sampling_makes_no_copy_of_the_logits(shards):
    """The logits are the one array of rows by vocabulary, on each device its own rows of them."""
    n, v, mesh = 512, 2**15, meshes.make(shards, 1, 1)
    s = Sampling(G, C, (1,), 0, temperature=0.7, top_k=50, top_p=0.9)
    z = jax.ShapeDtypeStruct((n, v), jnp.float32, sharding=meshes.rows(mesh))
    draw = lambda z, ids: sampling.sample(z, sampling.row_keys(0, ids, ids, ids)[:, None], s, True, shards)
    compiled = jax.jit(draw).lower(z, jax.ShapeDtypeStruct((n,), jnp.int32, sharding=meshes.rows(mesh))).compile()
    text, here = compiled.as_text(), n // shards * v
    assert max(count for dims, count in float_buffers(text).items() if not dims.endswith(f"{n // shards},{v}")) < here
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * here
    assert "all-gather" not in text


@pytest.fixture(scope="module")
def step():
    """The train step of a model whose vocabulary and experts nothing else is as large as."""
    spec = reference.tiny_spec(layers=3, d_model=96, experts=60, d_expert=64, vocab=65536)
    base, base_bytes = shapes(spec, T + C)
    struct = jax.ShapeDtypeStruct
    adapter = jax.eval_shape(lambda: lora.init(model_of(spec).adapter, base, jax.random.key(0)))
    tx = optax.adamw(1e-3)
    state = update.State(adapter, jax.eval_shape(tx.init, adapter), struct((), jnp.int32))
    i32, f32 = functools.partial(struct, dtype=jnp.int32), functools.partial(struct, dtype=jnp.float32)
    choices = lambda *shape: struct((spec.layers, P, *shape, spec.experts_per_token), jnp.int16)
    r = Rollout(
        i32((P, T)), i32((P,)), i32((P, G, C)), struct((P, G, C), jnp.bool_), i32((P, G)), struct((P, G), jnp.bool_),
        *(f32((P, G, C)),) * 3, choices(T), choices(G, C),
    )  # fmt: skip
    tokens, prompts = microbatch.size(P, T, G, C, 0)
    planned = i32((P, prompts)), i32(())
    batch = update.Batch(r.replace(stopped=None, sampled_logprobs=None), *(f32((P, G, C)),) * 3)  # as `update.update` passes it
    objective = update.Policy(loss.Loss(kl=0.1))
    lowered = update._update.lower(model_of(spec), tx, objective, tokens, base, state, batch, None, *planned)
    return spec, base_bytes, size((state, batch, planned)), lowered.compile(compiler_options=SCALAR_CODE)


def test_arguments_of_a_step(step):
    spec, base_bytes, other_bytes, compiled = step
    assert compiled.memory_analysis().argument_size_in_bytes == base_bytes + other_bytes


def test_no_layer_of_experts_is_dequantized(step):
    spec, _, _, compiled = step
    layer = spec.experts * spec.d_model * spec.d_expert
    found = {dims: n for dims, n in float_buffers(compiled.as_text()).items() if n >= layer and n % spec.vocab}
    assert not found


def test_no_array_of_tokens_by_vocabulary(step):
    """Temporaries neither: the head's rows come a chunk at a time, forward and backward."""
    spec, _, _, compiled = step
    found = float_buffers(compiled.as_text())
    assert max(found.values()) < TOKENS * spec.vocab and any(n % spec.vocab == 0 for n in found.values())
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * TOKENS * spec.vocab


@pytest.mark.parametrize("experts", (8, 256))
@pytest.mark.parametrize("n", (1, 40))
@pytest.mark.parametrize("at_once", (0, moe.AT_ONCE))
def test_work_grows_with_pairs(monkeypatch, n, experts, at_once):
    """Rows that go through an expert's matrices, counted as they run: pairs, filled up to whole tiles of the experts that are hit, and
    these to whole visits, where one takes several tiles."""
    monkeypatch.setattr(moe, "AT_ONCE", at_once)
    k, d = 3, 32
    rng = np.random.default_rng(experts)
    w = quant.quantize(rng.normal(size=(experts, d, d)), "int4_g32")
    choice = np.array([rng.permutation(experts)[:k] for _ in range(n)], np.int32)
    visits = []
    linear = lora.linear

    def counted(x, *args):
        jax.debug.callback(lambda _, rows=x.shape[0]: visits.append(rows), x[0, 0])
        return linear(x, *args)

    monkeypatch.setattr(lora, "linear", counted)
    experts_ = moe.Mlp(w, w, w, {}, {})
    run = jax.jit(lambda x, choice: moe.routed(x, jnp.ones((n, k)), choice, jnp.ones(n, bool), experts_, experts, Numerics("float"), None))
    jax.block_until_ready(run(rng.normal(size=(n, d)).astype(np.float32), choice))
    jax.effects_barrier()
    pairs, hit = n * k, len(np.unique(choice))
    rows = sum(visits) / 3  # three matrices an expert
    tile = moe.tile_size(pairs, experts)
    many = moe.tiles_at_once(experts_, tile, pairs, experts)
    assert (many == 1) == (at_once == 0) and set(visits) == {tile} and tile <= 128
    assert pairs <= rows <= pairs + (hit + many - 1) * tile
    assert len(visits) <= 3 * (pairs + many - 1)

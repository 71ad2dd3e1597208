"""Equal bits of rollout and training, on one device and on eight, for every family and every format on disk.

The golden checkpoints of test_parity, with a random adapter: what is sampled on one mesh is scored on the other.
"""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from quick import QUICK, quickly
from test_parity import GOLDEN, read
from test_rollout import check_scores

from rl_adapter import evaluate, lora, quant, rollout, scoring
from rl_adapter import mesh as meshes
from rl_adapter import model as models
from rl_adapter.hub import families
from rl_adapter.hub.codecs import compressed_tensors, floats, fp8, ggml, gptq, mxfp4
from rl_adapter.hub.load import open_checkpoint, plan
from rl_adapter.sampling import Sampling
from rl_adapter.types import Numerics

A16 = Numerics("exact", 16)
ALL = tuple(lora.GROUPS)
# Golden case -> data, expert and model of the mesh of eight, and the adapted groups. Most cases adapt what is special to their family:
# every adapted matrix is another three products to compile.
CASES = {
    "qwen3_moe-fp8": ((2, 2, 2), ("experts", "router")),
    "kimi_k25-int4_g32": ((1, 2, 4), ("attention",)),  # DeepSeek's architecture
    "gpt_oss-mxfp4": ((2, 4, 1), ALL),
    "glm4_moe-int8": ((1, 4, 2), ("mlp", "experts")),
    "mixtral-fp8-channel": ((2, 2, 2), ("experts",)),
    "olmoe-gptq_v2-act_order": ((2, 1, 4), ("attention", "router")),
    "llama-nvfp4": ((4, 1, 2), ("head",)),
    "mistral-gptq": ((8, 1, 1), ("attention",)),
    "qwen2-awq": ((4, 1, 2), ALL),
    "qwen3-mxfp4": ((4, 1, 2), ("mlp", "head")),
    "smollm2-gguf-q4_1-tied": ((4, 1, 2), ("mlp",)),
}
GRADIENTS = ("gpt_oss-mxfp4", "qwen2-awq")  # sinks, biases and experts; a dense model. Of latent attention: test_variants
ONE = (1, 1, 1)
P, G, T, C = 8, 2, 5, 7  # longer than the windows, which are of 4
SAMPLING = Sampling(G, C, stop_ids=(3, 5, 11, 21), pad_id=0, temperature=0.7)
RNG = np.random.default_rng(0)
LENGTHS = np.array([5, 1, 2, 4, 3, 5, 2, 4], np.int32)
PROMPTS = RNG.integers(0, 64, (P, T)).astype(np.int32)
WEIGHTS = RNG.uniform(0.5, 1.5, (P, G, C)).astype(np.float32)  # of tokens in the objective whose gradient is taken


def adapter_spec(name):
    groups = CASES[name][1]
    return lora.AdapterSpec(tuple((group, 2 * (group in groups)) for group in ALL), tuple((group, 3.0) for group in ALL))


@functools.cache
def golden(name):
    """The spec, the base, and an adapter whose B is not zero."""
    spec, base = read(GOLDEN / name)
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(lambda: lora.init(adapter_spec(name), base, jax.random.key(0)))
    return spec, base, jax.tree.map(lambda s: (rng.normal(size=s.shape) / np.sqrt(s.shape[-2]) / 2).astype(np.float32), shapes)


def place(name, shape):
    """The model, its base and its adapter on a mesh, and where rows of prompts lie on it."""
    (spec, base, adapter), mesh = golden(name), meshes.make(*shape)
    meshes.check(mesh, spec, P)
    adapter = jax.device_put(adapter, meshes.adapter_shardings(mesh, adapter))
    return models.Model(spec, adapter_spec(name), A16, mesh), models.place(spec, base, mesh, T + C), adapter, meshes.rows(mesh)


@functools.cache
def sample(name, shape):
    model, base, adapter, _ = place(name, shape)
    with quickly():
        r = rollout.generate(model, SAMPLING, base, evaluate.prepare(model, adapter), PROMPTS, LENGTHS, np.arange(P), 5)
    return jax.device_get(r)


@functools.cache
def score(name, shape):
    """`scoring.score` of what one device sampled: (tempered, scored, choices of prompts, of completions); the gradient of GRADIENTS."""
    model, base, adapter, rows = place(name, shape)
    r = sample(name, ONE)

    def value(adapter, base, r, weights):
        s = scoring.score(model, base, lora.prepare(adapter, A16), r, SAMPLING.temperature)
        return (s.scored * weights).sum(), (s.tempered, s.scored, s.choices)

    program = jax.value_and_grad(value, has_aux=True) if name in GRADIENTS else lambda *args: (value(*args), None)
    weights = WEIGHTS * (np.arange(C) < r.lengths[..., None])
    inputs = jax.device_put((r.replace(prompt_choices=None, choices=None), weights), rows)
    (_, (*logprobs, choices)), grads = jax.device_get(jax.jit(program, compiler_options=QUICK)(adapter, base, *inputs))
    return (*logprobs, choices[:, :, :T], choices[:, :, T:].reshape(r.choices.shape)), grads


@pytest.mark.parametrize("name", CASES)
def test_sampled_on_one_scored_on_eight(name):
    scores, _ = score(name, CASES[name][0])
    check_scores(sample(name, ONE), *scores)


@pytest.mark.parametrize("name", GRADIENTS)
def test_sampled_on_eight_scored_on_one(name):
    r = sample(name, CASES[name][0])
    np.testing.assert_array_equal(r.tokens, sample(name, ONE).tokens)
    scores, _ = score(name, ONE)
    check_scores(r, *scores)


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_on_eight(name):
    """Float sums in another order; every matrix of the adapter has a gradient."""
    (_, one), (_, eight) = (score(name, shape) for shape in (ONE, CASES[name][0]))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(eight), strict=True):
        assert np.isfinite(a).all() and np.abs(a).max() > 0
        np.testing.assert_allclose(b, a, atol=2e-5 * np.abs(a).max(), rtol=0)


def test_features_split_over_eight():
    """GPTQ and AWQ with one scale a channel: a zero point is multiplied with the sum of all features, beyond what float32 holds."""
    rng, k, mesh = np.random.default_rng(2), 4096, meshes.make(8)
    nibbles, scale = rng.integers(0, 16, (1, k, 16)).astype(np.uint8), rng.uniform(1, 2, (1, 16)).astype(np.float32)
    w = quant.weight("uint4", quant.join_nibbles(nibbles), scale, bias=8 * scale)
    x = rng.uniform(1, 2, (64, k)).astype(np.float32)
    split = jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "data")))
    run = jax.jit(lambda x, w: quant.matmul(x, w, A16))
    np.testing.assert_array_equal(run(split, jax.device_put(w, meshes.replicated(mesh))), run(x, w))


def test_every_family_and_format_is_here():
    found, forms, codecs = set(), set(), []
    for name in CASES:
        path = GOLDEN / name
        checkpoint = open_checkpoint(path / "model.gguf" if (path / "model.gguf").exists() else path)
        found.add(checkpoint.described.family.architecture)
        codecs += [piece.codec for field in plan(checkpoint)[0] for piece in field.pieces]
        weights = jax.tree.leaves(golden(name)[1], is_leaf=quant.is_quantized)
        forms |= {w.form for w in weights if quant.is_quantized(w)}
    assert found == set(families.FAMILIES) and forms == set(quant.STORED)
    every = (
        *(compressed_tensors.INT4, compressed_tensors.FP4, compressed_tensors.EIGHT, floats.FLOAT),
        *(fp8.BLOCKS, ggml.BLOCKS, gptq.GPTQ, gptq.AWQ, mxfp4.EXPERTS),
    )
    assert all(codec in codecs for codec in every)

"""The same logits as `transformers`, for every family and every format on disk.

tests/golden holds tiny checkpoints with the logits that transformers computed for them (tests/parity/make_golden.py wrote both). Where
torch and the libraries are installed, the same cases are also made anew from other seeds.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import QUICK

from rl_adapter import mesh as meshes
from rl_adapter import model as models
from rl_adapter.hub import families
from rl_adapter.hub.load import load
from rl_adapter.types import Numerics

GOLDEN = pathlib.Path(__file__).parent / "golden"
CASES = sorted(path.name for path in GOLDEN.iterdir())
# Weights that lie as floats are on a grid on which fixed16 is exact, so that only the arithmetic differs.
QUANTIZE = {"linear": "fixed16", "head": "fixed16", "router": "fixed16"}
# The largest error of any logit, in standard deviations of the logits. Float: f32 sums in another order (seen: 5e-6). Exact: activations,
# keys and probabilities of 16 bits (seen: 2.2e-3). A wrong term of any kind, such as a missed norm or bias, is of the order of 1.
FLOAT, A16 = Numerics("float"), Numerics("exact", 16)
BOUNDS = {FLOAT: 3e-5, A16: 6e-3}
# Every case is held in floats; these in exact arithmetic too, every family and every form of a weight: its programs are large.
EXACT = {
    *("deepseek_v3-bf16", "glm4_moe-bf16", "gpt_oss-bf16", "mixtral-bf16", "olmoe-f16", "qwen3_moe-f32-mixed-fused"),
    *("llama-f32-tied", "mistral-bf16", "qwen2-bf16", "qwen3-bf16"),
    *("llama-fp8-tensor", "qwen2-awq", "qwen3-int4_g128", "llama-gguf-q8_0", "llama-nvfp4"),
}
RESCALED = {"deepseek_v3-fp8", "kimi_k2-fp8"}  # kv_b is FP8 on disk and, turned by head, 16-bit fixed point in memory (seen: 4e-4)
LIBRARIES = ("torch", "transformers", "compressed_tensors", "gguf")


def read(directory):
    """The spec and the base of a golden checkpoint, on one device."""
    if (path := directory / "model.gguf").exists():
        pytest.importorskip("gguf")
        directory = path
    loaded = load(directory, QUANTIZE, meshes.make(1))
    return loaded.spec, loaded.base


def logits(spec, base, tokens, numerics):
    """tokens [P, T] -> [P, T, V] of each of `numerics`, by one program."""
    p_, t = tokens.shape
    mesh = meshes.make(1)
    base = models.place(spec, base, mesh, t)

    def one(numeric, base, tokens):
        model = models.Model(spec, None, numeric, mesh)
        positions, all_ = jnp.broadcast_to(jnp.arange(t), (p_, t)), jnp.ones((p_, t), bool)
        attention = models.prefill(numeric, jnp.full(p_, t))
        out = models.apply(model, base, None, tokens, positions, all_, attention)
        return models.logits(model, base, None, out.hidden.reshape(p_ * t, -1)).reshape(p_, t, -1)

    run = jax.jit(lambda *args: [one(numeric, *args) for numeric in numerics], compiler_options=QUICK)
    return jax.device_get(run(base, tokens))


def check(directory):
    spec, base = read(directory)
    tokens, expected = np.load(directory / "tokens.npy"), np.load(directory / "logits.npy")
    numerics = [FLOAT, A16] if directory.name in EXACT else [FLOAT]
    for numeric, found in zip(numerics, logits(spec, base, tokens, numerics)):
        bound = max(BOUNDS[numeric], 2e-3) if directory.name in RESCALED else BOUNDS[numeric]
        error = np.abs(found - expected).max() / expected.std()
        assert error < bound, f"{directory.name}, {numeric.mode}: {error:.1e} standard deviations, need below {bound:.0e}"


@pytest.mark.parametrize("name", CASES)
def test_golden(name):
    check(GOLDEN / name)


@pytest.mark.parametrize("name", CASES)
def test_live(name, tmp_path):
    for library in LIBRARIES:
        pytest.importorskip(library, reason=f"live parity needs {', '.join(LIBRARIES)}")
    from tests.parity import cases, make_golden

    (case,) = (case for case in cases.CASES if case.name == name)
    make_golden.make(case, tmp_path / name, first_seed=1000)
    check(tmp_path / name)


def test_every_family_has_a_golden():
    configs = [json.loads((GOLDEN / name / "config.json").read_text()) for name in CASES if (GOLDEN / name / "config.json").exists()]
    assert {families.describe(config).family.architecture for config in configs} == set(families.FAMILIES)
    assert EXACT < set(CASES)

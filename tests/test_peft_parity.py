"""Exported adapters in `peft` itself: on the model that transformers has, they give the logits that this package computes.

Runs where torch, transformers 5 and peft are installed; a release of peft before 0.19 takes the layout of its own.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_peft import random_adapter, spec_of

from rl_adapter import lora
from rl_adapter import mesh as meshes
from rl_adapter import model as models
from rl_adapter.hub import load, merge, peft
from rl_adapter.types import Numerics

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")
library = pytest.importorskip("peft")

GOLDEN = pathlib.Path(__file__).parent / "golden"
FUSED = "fused" if tuple(map(int, library.__version__.split(".")[:2])) >= (0, 19) else "fused-0.18"
# One of each kind: fused experts as [E, out, in] and as [E, in, out], renamed modules, dense and shared MLPs, latents, tied heads.
MODELS = ("qwen3_moe-f32-mixed-fused", "deepseek_v3-bf16", "gpt_oss-bf16", "mixtral-bf16", "glm4_moe-bf16", "llama-f32-tied")


def logits(loaded: load.Loaded, adapter, spec: lora.AdapterSpec, tokens: np.ndarray) -> np.ndarray:
    """[P, T, V] of this package, in float."""
    numeric = Numerics("float")
    mesh = meshes.make(1)
    model = models.Model(loaded.spec, spec, numeric, mesh, remat=False)
    base = models.place(loaded.spec, loaded.base, mesh, tokens.shape[1])

    @jax.jit
    def run(base, adapter, tokens):
        ready = lora.prepare(adapter, numeric)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        lengths = jnp.full(tokens.shape[0], tokens.shape[1])
        out = models.apply(model, base, ready, tokens, positions, jnp.ones(tokens.shape, bool), models.prefill(numeric, lengths))
        return models.logits(model, base, ready, out.hidden.reshape(-1, loaded.spec.d_model))

    return np.asarray(run(base, adapter, tokens)).reshape(*tokens.shape, -1)


@pytest.fixture(scope="module", params=MODELS)
def case(request):
    """Where a model lies, the same loaded and described, tokens, and its logits for them."""
    path = GOLDEN / request.param
    loaded = load.load(path, {"linear": "fixed16", "head": "fixed16", "router": "fixed16"}, meshes.make(1))
    return path, loaded, load.open_checkpoint(path).described, np.load(path / "tokens.npy"), np.load(path / "logits.npy")


def hf_logits(path, tokens, adapter_dir=None, merged=False) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    if adapter_dir is not None:
        model = library.PeftModel.from_pretrained(model, adapter_dir)
        model = model.merge_and_unload() if merged else model
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long()).logits.numpy()


def check(case, spec, layout, tmp_path, merged=False):
    path, loaded, described, tokens, _ = case
    adapter = random_adapter(described, spec, size=0.1)
    peft.save(tmp_path / "out", described, adapter, spec, layout, str(path))
    ours = logits(loaded, adapter, spec, tokens)
    assert np.abs(ours - np.load(path / "logits.npy")).max() > 0.1  # the adapter moves them
    np.testing.assert_allclose(hf_logits(path, tokens, tmp_path / "out", merged), ours, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("merged", [False, True])
def test_fused_layout_in_peft(case, merged, tmp_path):
    tied = case[2].spec.tie_embeddings  # peft merges an adapter of a tied head into the embedding too
    check(case, spec_of(head=0 if merged and tied else 1, rank_stabilized=not merged), FUSED, tmp_path, merged)


def test_per_expert_layout_in_peft(case, tmp_path):
    """peft turns the pairs of experts, and of experts only, into those of its fused parameters."""
    if case[2].family.architecture not in ("Qwen3MoeForCausalLM", "MixtralForCausalLM", "LlamaForCausalLM"):
        pytest.skip("peft knows how to fuse the experts of Qwen and Mixtral")
    check(case, spec_of(mlp=2 if not case[2].spec.experts else 0, router=0), "per-expert", tmp_path)


def test_merged_checkpoint_in_transformers(case, tmp_path):
    path, loaded, described, tokens, base = case
    spec = spec_of()
    adapter = random_adapter(described, spec, size=0.1)
    merge.save(tmp_path / "out", load.open_checkpoint(path), adapter, spec, shard=20_000)
    ours = logits(loaded, adapter, spec, tokens)
    error = np.abs(hf_logits(tmp_path / "out", tokens) - ours)
    assert error.mean() < 0.03 * np.abs(ours - base).mean()  # bfloat16

"""Exported adapters in `peft` itself: on the model that transformers has, they give the logits that this package computes.

Runs where torch, transformers 5 and peft are installed; a release of peft before 0.19 takes the layout of its own.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_adapter import lora, quant
from rl_adapter import mesh as meshes
from rl_adapter import model as models
from rl_adapter.hub import load, peft, peft_read
from rl_adapter.types import Numerics
from tests.test_peft import random_adapter, spec_of

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
    """A model, a random adapter on all that can be adapted, tokens, and the logits of both together here."""
    path = GOLDEN / request.param
    loaded = load.load(path, {"linear": "fixed16", "head": "fixed16", "router": "fixed16"}, meshes.make(1))
    described = load.open_checkpoint(path).described
    spec = spec_of()
    adapter = random_adapter(described, spec, size=0.1)
    tokens = np.load(path / "tokens.npy")
    ours = logits(loaded, adapter, spec, tokens)
    assert np.abs(ours - np.load(path / "logits.npy")).max() > 0.1  # the adapter moves them
    return path, described, spec, adapter, tokens, ours


def hf_logits(path, tokens, adapter_dir=None, merge=False) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    if adapter_dir is not None:
        model = library.PeftModel.from_pretrained(model, adapter_dir)
        model = model.merge_and_unload() if merge else model
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long()).logits.numpy()


def check(case, layout, tmp_path, merge=False):
    path, described, spec, adapter, tokens, ours = case
    peft.save(tmp_path / "out", described, adapter, spec, layout, str(path))
    np.testing.assert_allclose(hf_logits(path, tokens, tmp_path / "out", merge), ours, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("merge", [False, True])
def test_fused_layout_in_peft(case, merge, tmp_path):
    check(case, FUSED, tmp_path, merge)

"""Configs and checkpoints that transformers writes, and its rotary frequencies. Runs where torch and transformers are installed."""

import json

import numpy as np
import pytest

from rl_adapter.hub import families
from rl_adapter.hub.files import open_tensors

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

SIZES = dict(
    vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, intermediate_size=24,
    max_position_embeddings=4096,
)  # fmt: skip
EXPERTS = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, first_k_dense_replace=1)
LATENT = dict(q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=16, qk_nope_head_dim=4, v_head_dim=4)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 3.0}
CASES = {
    "qwen3_moe": ("Qwen3Moe", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, head_dim=64, rope_parameters=LINEAR)),
    "qwen3_moe biased": ("Qwen3Moe", dict(num_experts=4, num_experts_per_tok=2, mlp_only_layers=[1], head_dim=8, attention_bias=True)),
    "deepseek": ("DeepseekV3", dict(**EXPERTS, **LATENT, n_group=2, topk_group=1, rope_parameters=YARN)),
    "deepseek direct": ("DeepseekV3", dict(**EXPERTS, **(LATENT | {"q_lora_rank": None}), n_group=1, topk_group=1, attention_bias=True)),
    "gpt_oss": ("GptOss", dict(num_local_experts=4, num_experts_per_tok=2, head_dim=64)),
    "glm4_moe": ("Glm4Moe", dict(**EXPERTS, head_dim=32, use_qk_norm=True, attention_bias=True)),
    "mixtral": ("Mixtral", dict(num_local_experts=4, sliding_window=8)),
    "olmoe": ("Olmoe", dict(num_experts=4, num_experts_per_tok=2, clip_qkv=8.0)),
    "llama": ("Llama", dict(head_dim=64, rope_parameters=LLAMA3, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)),
    "mistral": ("Mistral", dict(head_dim=8)),
    "qwen3": ("Qwen3", dict(head_dim=64, use_sliding_window=True, sliding_window=8, max_window_layers=1)),
    "qwen2": ("Qwen2", dict(head_dim=64)),
}


@pytest.mark.parametrize("case", CASES)
def test_saved_model(case, tmp_path):
    name, fields = CASES[case]
    config = getattr(transformers, f"{name}Config")(**SIZES | fields)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    model.save_pretrained(tmp_path)
    described, read = families.read_family(tmp_path)
    assert read == json.loads((tmp_path / "config.json").read_text())
    spec = described.spec

    rotary = model.model.rotary_emb
    np.testing.assert_allclose(spec.rope.frequencies, rotary.inv_freq.numpy(), rtol=1e-6)
    assert spec.rope.factor == pytest.approx(rotary.attention_scaling, rel=1e-6)
    attentions = [layer.self_attn for layer in model.model.layers]
    scale = spec.attention_scale or spec.head_dim**-0.5
    assert all(scale == pytest.approx(attention.scaling, rel=1e-6) for attention in attentions)
    windows = tuple(getattr(attention, "sliding_window", None) or 0 for attention in attentions)
    if name == "Mixtral" or name == "Mistral":
        windows = (config.sliding_window,) * spec.layers
    assert (spec.windows or (0,) * spec.layers) == windows
    assert spec.dense == tuple(i for i, layer in enumerate(model.model.layers) if not hasattr(layer.mlp, "experts"))

    # Every tensor has a place, and every place its tensor, of the right shape, fused or not.
    memory = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    disk = {name: entry.shape for name, entry in open_tensors(tmp_path).entries.items()}
    for tensors in (disk, memory):
        seen = set()
        for layer in range(spec.layers):
            for field, shape in families.fields(described, layer not in spec.dense).items():
                for expert in range(spec.experts) if families.per_expert(field) else [None]:
                    at = families.source(described, field, layer, expert, has=tensors.__contains__)
                    part = np.broadcast_to(0, tensors[at.name])[at.index]
                    assert (part.T if at.transposed else part).shape == shape, field
                    assert not at.whole or at.whole == tensors[at.name]
                    seen.add(at.name)
        for field, shape in families.top(spec).items():
            at = families.source(described, field, has=tensors.__contains__)
            assert tensors[at.name] == shape
            seen.add(at.name)
        assert {name for name in tensors if name not in seen and not families.ignored(described, name)} == set()
    for field in ("gate", "up", "down") if spec.experts else ():
        layer = next(i for i in range(spec.layers) if i not in spec.dense)
        assert families.parameter(described, field, layer).name in memory

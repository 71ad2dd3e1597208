"""Configs as released (from public knowledge), what they must read as, and configs that must be refused."""

import json
import math

import numpy as np
import pytest

from rl_adapter.hub import codecs, families, rope
from rl_adapter.types import Mla

QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
    "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False,
    "pad_token_id": 199999, "quantization_config": {"quant_method": "mxfp4"}, "rms_norm_eps": 1e-05,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                     "rope_type": "yarn", "truncate": False},
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 201088,
}  # fmt: skip
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001, "bos_token_id": 0,
    "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
    "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "quantization_config": {"quant_method": "fp8"}, "rms_norm_eps": 1e-06,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False,
    "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": True,
    "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
KIMI = DEEPSEEK | {
    "model_type": "kimi_k2", "first_k_dense_replace": 1, "max_position_embeddings": 262144, "n_group": 1, "topk_group": 1,
    "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-05, "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "vocab_size": 163840, "dtype": "bfloat16",
    "rope_scaling": DEEPSEEK["rope_scaling"] | {"beta_fast": 32.0, "factor": 64.0},
}  # fmt: skip
KIMI_K25 = {
    "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": KIMI,
    "vision_config": {"hidden_size": 1152}, "media_placeholder_token_id": 163605, "tie_word_embeddings": False,
}  # fmt: skip
GLM = {
    "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "pad_token_id": 151329,
    "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "partial_rotary_factor": 0.5, "initializer_range": 0.02, "intermediate_size": 10944, "max_position_embeddings": 131072,
    "model_type": "glm4_moe", "moe_intermediate_size": 1408, "norm_topk_prob": True, "num_attention_heads": 96, "n_group": 1,
    "topk_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "routed_scaling_factor": 1.0, "num_experts_per_tok": 8,
    "first_k_dense_replace": 1, "num_hidden_layers": 46, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 1000000, "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0", "use_cache": True, "use_qk_norm": False, "vocab_size": 151552,
}  # fmt: skip
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
OLMOE = {
    "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None,
    "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 1024,
    "max_position_embeddings": 4096, "model_type": "olmoe", "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64,
    "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16, "output_router_logits": False,
    "pad_token_id": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.43.0", "use_cache": True,
    "vocab_size": 50304,
}  # fmt: skip
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
                     "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0",
    "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
    "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "model_type": "llama",
    "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True, "vocab_size": 49152,
}  # fmt: skip
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
    "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
ALL = (QWEN3_MOE, GPT_OSS, DEEPSEEK, KIMI, GLM, MIXTRAL, OLMOE, LLAMA, SMOLLM2, QWEN3)
M40, M64 = 0.1 * math.log(40) + 1, 0.1 * math.log(64) + 1
KIMI_FIELDS = dict(
    layers=61, heads=64, kv_heads=1, head_dim=576, experts=384, experts_per_token=8, d_expert=2048, d_shared=2048, d_mlp=18432, dense=(0,),
    score="sigmoid", routed_scale=2.827, expert_groups=1, mla=Mla(1536, 512, 128, 64, 128), attention_scale=192**-0.5 * M64**2,
    norm_eps=1e-5, vocab=163840,
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (QWEN3_MOE, dict(layers=48, d_model=2048, heads=32, kv_heads=4, head_dim=128, experts=128, experts_per_token=8, d_expert=768,
                         norm_topk_prob=True, score="softmax", qk_norm="head", dense=(), windows=(), vocab=151936, max_positions=40960,
                         tie_embeddings=False, d_shared=0, activation="swiglu", mla=None, attention_scale=0.0)),
        (GPT_OSS, dict(layers=24, d_model=2880, heads=64, kv_heads=8, head_dim=64, experts=32, experts_per_token=4, d_expert=2880,
                       score="softmax_of_chosen", activation="clamped_swiglu", swiglu_limit=7.0, windows=(128, 0) * 12, qk_norm="none")),
        (DEEPSEEK, dict(layers=61, d_model=7168, heads=128, kv_heads=1, head_dim=576, experts=256, experts_per_token=8, d_expert=2048,
                        d_shared=2048, d_mlp=18432, dense=(0, 1, 2), score="sigmoid", routed_scale=2.5, expert_groups=8, groups_per_token=4,
                        norm_topk_prob=True, mla=Mla(1536, 512, 128, 64, 128), attention_scale=192**-0.5 * M40**2)),
        (KIMI, KIMI_FIELDS), (KIMI_K25, KIMI_FIELDS),
        (GLM, dict(layers=46, heads=96, kv_heads=8, head_dim=128, experts=128, d_expert=1408, d_shared=1408, d_mlp=10944, dense=(0,),
                   score="sigmoid", routed_scale=1.0, qk_norm="none", mla=None, attention_scale=0.0)),
        (MIXTRAL, dict(layers=32, heads=32, kv_heads=8, head_dim=128, experts=8, experts_per_token=2, d_expert=14336, norm_topk_prob=True,
                       score="softmax", windows=(), qk_norm="none")),
        (OLMOE, dict(layers=16, heads=16, kv_heads=16, head_dim=128, experts=64, experts_per_token=8, d_expert=1024, norm_topk_prob=False,
                     qk_norm="full", clip_qkv=0.0)),
        (LLAMA, dict(layers=16, heads=32, kv_heads=8, head_dim=64, dense=tuple(range(16)), d_mlp=8192, tie_embeddings=True, experts=0)),
        (SMOLLM2, dict(layers=30, heads=9, kv_heads=3, head_dim=64, dense=tuple(range(30)), d_mlp=1536, vocab=49152, tie_embeddings=True)),
        (QWEN3, dict(layers=28, heads=16, kv_heads=8, head_dim=128, qk_norm="head", d_mlp=3072, tie_embeddings=True, windows=())),
    ],
)  # fmt: skip
def test_released(config, expected):
    spec = families.spec_of(config)
    scale = expected.get("attention_scale", 0.0)
    assert spec.attention_scale == pytest.approx(scale, rel=1e-12)
    assert {name: getattr(spec, name) for name in expected} == expected | ({"attention_scale": spec.attention_scale} if scale else {})
    assert hash(spec) == hash(families.spec_of(json.loads(json.dumps(config))))


def naive_yarn(theta, width, factor, fast, slow, original, truncate):
    """As the paper says it: pair i turns original * theta^(-2i/width) / 2 pi times in the original context."""
    index = lambda turns: width / 2 * math.log(original / (2 * math.pi * turns)) / math.log(theta)
    low, high = index(fast), index(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    out = []
    for i in range(width // 2):
        slowed = min(max((i - max(low, 0)) / (min(high, width - 1) - max(low, 0)), 0), 1)
        out.append(theta ** (-2 * i / width) * ((1 - slowed) + slowed / factor))
    return out


def naive_llama3(theta, width, factor, low, high, original):
    out = []
    for i in range(width // 2):
        f = theta ** (-2 * i / width)
        turns = original * f / (2 * math.pi)
        share = min(max((turns - low) / (high - low), 0), 1)
        out.append(f * share + f / factor * (1 - share))
    return out


@pytest.mark.parametrize(
    ("config", "frequencies", "factor", "interleaved"),
    [
        (QWEN3_MOE, [1e6 ** (-i / 64) for i in range(64)], 1.0, False),
        (QWEN3_MOE | {"rope_scaling": {"type": "linear", "factor": 4}}, [1e6 ** (-i / 64) / 4 for i in range(64)], 1.0, False),
        (GPT_OSS, naive_yarn(150000, 64, 32, 32, 1, 4096, False), 0.1 * math.log(32) + 1, False),
        (DEEPSEEK, naive_yarn(10000, 64, 40, 32, 1, 4096, True), 1.0, True),
        (KIMI, naive_yarn(50000, 64, 64, 32, 1, 4096, True), 1.0, True),
        (GLM, [1e6 ** (-i / 32) for i in range(32)], 1.0, False),
        (LLAMA, naive_llama3(500000, 64, 32, 1, 4, 8192), 1.0, False),
    ],
)
def test_rope(config, frequencies, factor, interleaved):
    found = families.spec_of(config).rope
    np.testing.assert_allclose(found.frequencies, frequencies, rtol=3e-6)
    assert (found.factor, found.interleaved) == (pytest.approx(factor, rel=1e-12), interleaved)


def test_rope_is_the_same_wherever_it_is_written():
    flat = {"rope_theta": 150000, **GPT_OSS["rope_scaling"]}
    base = {key: value for key, value in GPT_OSS.items() if not key.startswith("rope")}
    expected = families.spec_of(GPT_OSS)
    assert families.spec_of(base | {"rope_parameters": flat}) == expected
    assert families.spec_of(base | {"rope_parameters": {"full_attention": flat, "sliding_attention": dict(flat)}}) == expected
    half = {key: value for key, value in GLM.items() if key not in ("rope_theta", "partial_rotary_factor")}
    half["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    assert families.spec_of(half) == families.spec_of(GLM)
    assert families.spec_of(SMOLLM2).rope == rope.plain(1e5, 64)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("config", "change", "named"),
    [
        (QWEN3_MOE, {"hidden_act": "gelu"}, "hidden_act"),
        (QWEN3_MOE, {"use_sliding_window": True}, "use_sliding_window"),
        (QWEN3_MOE, {"mlp_only_layers": [48]}, "mlp_only_layers"),
        (QWEN3_MOE, {"mlp_only_layers": ["0"]}, "mlp_only_layers"),
        (QWEN3_MOE, {"layer_types": ["sliding_attention"] * 48}, "sliding_window"),
        (QWEN3_MOE, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (QWEN3_MOE, {"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size"),
        (QWEN3_MOE, {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        (QWEN3_MOE, {"num_local_experts": 64}, "num_experts"),
        (QWEN3_MOE, {"num_experts_per_tok": 129}, "num_experts_per_tok"),
        (QWEN3_MOE, {"num_key_value_heads": 5}, "num_key_value_heads"),
        (QWEN3_MOE, {"head_dim": 127}, "head_dim"),
        (QWEN3_MOE, {"norm_topk_prob": None}, "norm_topk_prob"),
        (QWEN3_MOE, {"rope_theta": None}, "rope_theta"),
        (QWEN3_MOE, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type"),
        (QWEN3_MOE, {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_scaling.rope_type"),
        (QWEN3_MOE, {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}}, "rope_scaling.rope_type"),
        (QWEN3_MOE, {"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 8.0}}, "rope_scaling"),
        (QWEN3_MOE, {"rope_scaling": YARN | {"rope_theta": 5e5}}, "rope_theta"),
        (QWEN3_MOE, {"rope_scaling": YARN | {"mrope_section": 3}}, "rope_scaling.mrope_section"),
        (QWEN3_MOE, {"rope_scaling": YARN | {"factor": 0.5}}, "rope_scaling.factor"),
        (QWEN3_MOE, {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_theta": 1e4}}}, "rope_parameters"),
        (QWEN3_MOE, {"rope_scaling": {"rope_type": "default", "factor": 2.0}}, "rope_scaling.factor"),
        (LLAMA, {"rope_scaling": LLAMA["rope_scaling"] | {"high_freq_factor": 1.0}}, "rope_scaling.high_freq_factor"),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "rope_scaling.low_freq_factor"),
        (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func"),
        (DEEPSEEK, {"topk_method": "greedy"}, "topk_method"),
        (DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq"),
        (DEEPSEEK, {"num_key_value_heads": 8}, "num_key_value_heads"),
        (DEEPSEEK, {"n_group": 7}, "n_group"),
        (DEEPSEEK, {"topk_group": 9}, "topk_group"),
        (DEEPSEEK, {"n_group": 256}, "n_group"),
        (DEEPSEEK, {"num_experts_per_tok": 129}, "num_experts_per_tok"),
        (DEEPSEEK, {"first_k_dense_replace": 62}, "first_k_dense_replace"),
        (DEEPSEEK, {"index_topk": 2048}, "index_topk"),
        (GPT_OSS, {"sliding_window": None}, "sliding_window"),
        (GPT_OSS, {"layer_types": ["full_attention"]}, "layer_types"),
        (GPT_OSS, {"layer_types": ["chunked_attention"] * 24}, "layer_types"),
        (GPT_OSS, {"swiglu_alpha": 1.0}, "swiglu_alpha"),
        (GPT_OSS, {"experts_per_token": 5}, "num_experts_per_tok"),
        (OLMOE, {"clip_qkv": -1.0}, "clip_qkv"),
        (GLM, {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        (MIXTRAL, {"attention_bias": True}, "attention_bias"),
        (SMOLLM2, {"rope_interleaved": True}, "rope_interleaved"),
        (QWEN3, {"layer_types": ["sliding_attention"] * 28}, "sliding_window"),
    ],
)  # fmt: skip
def test_what_is_not_implemented_is_named(config, change, named):
    with pytest.raises(ValueError, match=rf"(?m)^  {named}: found "):
        families.spec_of(config | change)


HOSTILE = [float("nan"), float("inf"), -1, 0, 2**31, 10**400, "4", [4], {"a": [1]}, True, 1.5]


@pytest.mark.parametrize("value", HOSTILE, ids=lambda v: repr(v)[:8])
@pytest.mark.parametrize("config", ALL, ids=lambda c: c["model_type"])
def test_hostile_counts(config, value):
    for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings"):
        with pytest.raises(ValueError, match=rf"(?m)^  {name}: found "):
            families.spec_of(config | {name: value})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 10**400, "4", [4], True], ids=lambda v: repr(v)[:8])
@pytest.mark.parametrize(("config", "name"), [
    (GPT_OSS, "factor"), (GPT_OSS, "beta_fast"), (GPT_OSS, "mscale"), (GPT_OSS, "original_max_position_embeddings"),
    (GPT_OSS, "attention_factor"), (LLAMA, "low_freq_factor"), (LLAMA, "high_freq_factor"),
])  # fmt: skip
def test_hostile_rope(config, name, value):
    with pytest.raises(ValueError, match="rope_scaling"):
        families.spec_of(config | {"rope_scaling": config["rope_scaling"] | {name: value}})


def test_every_field_of_every_family_takes_anything_without_a_crash():
    """A spec or a ValueError, nothing else, whatever one field holds."""
    refused = 0
    for config in ALL:
        for name in config:
            for value in (*HOSTILE, None, [], {}, [[1]], "x" * 10**5, {"rope_type": []}, {"full_attention": None}):
                try:
                    families.spec_of(config | {name: value})
                except ValueError as error:
                    refused += 1
                    assert len(str(error)) < 2000
    assert refused > 1000


def test_all_problems_at_once():
    with pytest.raises(ValueError) as error:
        families.spec_of(DEEPSEEK | {"hidden_size": None, "scoring_func": "softmax", "rope_scaling": {"type": "dynamic"}, "n_group": "8"})
    assert all(f"\n  {name}: " in str(error.value) for name in ("hidden_size", "scoring_func", "rope_scaling.rope_type", "n_group"))


@pytest.mark.parametrize(
    "change", [{"architectures": ["T5Model"]}, {"architectures": 3}, {"architectures": [["x"]]}, {"model_type": "llama"}]
)
def test_other_families(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        families.spec_of(QWEN3_MOE | change)


def test_windows():
    on = QWEN3 | {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 26}
    assert families.spec_of(on).windows == (0,) * 26 + (512,) * 2
    assert families.spec_of(MIXTRAL | {"sliding_window": 4096}).windows == (4096,) * 32
    kinds = {key: value for key, value in GPT_OSS.items() if key != "layer_types"}
    assert families.spec_of(kinds).windows == (128, 0) * 12


def test_dense_layers_of_qwen3_moe():
    spec = families.spec_of(QWEN3_MOE | {"mlp_only_layers": [0, 3], "decoder_sparse_step": 2, "num_hidden_layers": 6})
    assert (spec.dense, spec.d_mlp) == ((0, 2, 3, 4), 6144)


def test_biases():
    expect = {
        "llama": (LLAMA | {"attention_bias": True, "mlp_bias": True}, {"q", "k", "v", "o", "mlp_gate", "mlp_up", "mlp_down"}),
        "glm": (GLM, {"q", "k", "v"}),
        "gpt-oss": (GPT_OSS, {"q", "k", "v", "o", "router", "gate", "up", "down"}),
        "deepseek": (DEEPSEEK | {"attention_bias": True}, {"q_a", "kv_a", "o"}),
        "direct": (DEEPSEEK | {"attention_bias": True, "q_lora_rank": None}, {"kv_a", "o"}),
        "qwen3": (QWEN3, set()),
    }
    for config, names in expect.values():
        described = families.describe(config)
        fields = families.fields(described, sparse=described.spec.experts > 0)
        assert {name.removeprefix("bias.") for name in fields if name.startswith("bias.")} == names
    assert families.fields(families.describe(GPT_OSS), True)["bias.gate"] == (2880,)


def test_sources():
    nothing = lambda name: False
    qwen, kimi, mixtral, gpt = map(families.describe, (QWEN3_MOE, KIMI_K25, MIXTRAL, GPT_OSS))
    assert families.source(qwen, "up", 3, 7, has=nothing).name == "model.layers.3.mlp.experts.7.up_proj.weight"
    fused = families.source(qwen, "up", 3, 7, has={"model.layers.3.mlp.experts.gate_up_proj"}.__contains__)
    assert (fused.name, fused.index, fused.whole, fused.transposed) == (
        "model.layers.3.mlp.experts.gate_up_proj", (7, slice(768, 1536)), (128, 1536, 2048), False)  # fmt: skip
    assert families.source(mixtral, "up", 0, 1, has=nothing).name == "model.layers.0.block_sparse_moe.experts.1.w3.weight"
    in_memory = {"model.layers.0.mlp.experts.gate_up_proj"}.__contains__
    assert families.source(mixtral, "router", 0, has=in_memory).name == "model.layers.0.mlp.gate.weight"
    at = families.source(gpt, "up", 0, 2, has=nothing)
    assert (at.index, at.whole, at.transposed) == ((2, slice(None), slice(1, None, 2)), (32, 2880, 5760), True)
    bias = families.source(gpt, "bias.gate", 0, 2, has=nothing)
    assert (bias.name, bias.index) == ("model.layers.0.mlp.experts.gate_up_proj_bias", (2, slice(0, None, 2)))
    assert families.source(gpt, "sinks", 1, has=nothing).name == "model.layers.1.self_attn.sinks"
    assert families.source(kimi, "mlp_up", 0, has=nothing).name == "language_model.model.layers.0.mlp.up_proj.weight"
    assert families.source(kimi, "mlp_up", 1, has=nothing).name == "language_model.model.layers.1.mlp.shared_experts.up_proj.weight"
    assert families.source(families.describe(LLAMA), "head", has=nothing).name == "model.embed_tokens.weight"
    assert families.module(kimi, "router", 1) == "language_model.model.layers.1.mlp.gate"
    with pytest.raises(ValueError, match="router"):
        families.module(kimi, "router", 0)


def test_ignored():
    deepseek, kimi, llama = map(families.describe, (DEEPSEEK, KIMI_K25, LLAMA))
    assert families.ignored(deepseek, "model.layers.61.mlp.gate.weight")
    for name in ("model.layers.60.mlp.gate.weight", "model.layers.62.mlp.gate.weight", "model.layers.x.y", "lm_head.weight", "extra"):
        assert not families.ignored(deepseek, name)
    assert families.ignored(kimi, "vision_tower.encoder.x") and families.ignored(kimi, "mm_projector.proj.0.weight")
    assert not families.ignored(kimi, "language_model.model.layers.61.x") and not families.ignored(kimi, "model.layers.0.x")
    assert families.ignored(llama, "lm_head.weight") and families.ignored(llama, "model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not families.ignored(llama, "model.layers.16.x")


@pytest.mark.parametrize("top, inner, found", [
    ("absent", "fp8", "fp8"), (None, "fp8", "fp8"), ("fp8", "absent", "fp8"), ("fp8", None, "fp8"), ("fp8", "fp8", "fp8"),
    (None, None, None), ("absent", "absent", None),
])  # fmt: skip
def test_quantization_of_a_text_model_may_be_in_either_place(top, inner, found, tmp_path):
    """null is nothing, in whichever of the two."""
    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    put = lambda config, value: config if value == "absent" else config | {"quantization_config": value and settings}
    text = put({k: v for k, v in KIMI.items() if k != "quantization_config"}, inner)
    (tmp_path / "config.json").write_text(json.dumps(put(KIMI_K25 | {"text_config": text}, top)))
    read = codecs.read_quantization(families.read_family(tmp_path)[1])
    assert (read and read.method) == found


def test_two_quantizations_of_a_text_model_are_refused(tmp_path):
    config = KIMI_K25 | {"text_config": KIMI, "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="quantization_config: found another one in text_config"):
        codecs.read_quantization(families.read_family(tmp_path)[1])

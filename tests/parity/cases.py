"""The models of the parity tests: every family at least once in floats and once in low precision, every format at least once."""

import dataclasses
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.parity import formats
from tests.parity.formats import Format


@dataclasses.dataclass(frozen=True)
class Case:
    """One checkpoint."""

    name: str
    config: PreTrainedConfig
    format: Format | None = None  # None: floats of `dtype`
    dtype: torch.dtype = torch.bfloat16
    shards: int = 1
    fused: bool = False  # experts of a layer as one tensor, as transformers 5 holds them in memory
    old_config: bool = False  # config.json in the style of files from before transformers 5
    gguf: tuple[str, str] = ()  # types of linears and embeddings: a GGUF file instead of all this
    kimi: bool = False  # the names of Kimi-K2 (flat) or, with a prefix, of Kimi-K2.5 (nested)
    prefix: str = ""
    extra: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)  # tensors of parts that are not the text model


TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def rope(theta: float = 100.0, **scaling) -> dict[str, Any]:
    # A small theta: over 12 positions the slow pairs of a usual one would not turn, and errors in them would not show.
    return {"rope_type": "default", "rope_theta": theta} | scaling


def yarn(theta: float = 100.0, **more) -> dict[str, Any]:
    return rope(theta, rope_type="yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=4.0, beta_slow=1.0, **more)


def qwen3_moe(**options) -> PreTrainedConfig:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    return Qwen3MoeConfig(**TINY | {"head_dim": 8, "intermediate_size": 64, "rope_parameters": rope()} | experts | options)


def deepseek(**options) -> PreTrainedConfig:
    mla = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "n_shared_experts": 1}
    experts |= {"moe_intermediate_size": 24, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "num_mtp_layers": 0}
    many = {"num_hidden_layers": 3, "num_key_value_heads": 4, "intermediate_size": 48, "rms_norm_eps": 1e-5}  # MLA's own norms have 1e-6
    return DeepseekV3Config(**TINY | mla | experts | many | {"rope_parameters": yarn(mscale=1.0, mscale_all_dim=1.0)} | options)


def gpt_oss(**options) -> PreTrainedConfig:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "swiglu_limit": 1.5}
    shape = {"head_dim": 8, "sliding_window": 4, "rope_parameters": yarn(truncate=False)}
    return GptOssConfig(**TINY | experts | shape | options)


def glm4_moe(**options) -> PreTrainedConfig:
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 2, "num_mtp_layers": 0}
    shape = {"head_dim": 16, "intermediate_size": 64, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "attention_bias": True}
    turned = {"rope_parameters": rope(partial_rotary_factor=0.5), "partial_rotary_factor": 0.5}
    return Glm4MoeConfig(**TINY | experts | shape | turned | options)


def mixtral(**options) -> PreTrainedConfig:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
    return MixtralConfig(**TINY | experts | {"head_dim": 8, "rope_parameters": rope()} | options)


def olmoe(**options) -> PreTrainedConfig:
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 16, "norm_topk_prob": False}
    return OlmoeConfig(**TINY | experts | {"clip_qkv": 0.9, "rope_parameters": rope()} | options)


def llama(**options) -> PreTrainedConfig:
    return LlamaConfig(**TINY | {"head_dim": 8, "intermediate_size": 64, "rope_parameters": rope()} | options)


def qwen3(**options) -> PreTrainedConfig:
    return Qwen3Config(**TINY | {"head_dim": 8, "intermediate_size": 64, "rope_parameters": rope()} | options)


def mistral(**options) -> PreTrainedConfig:
    return MistralConfig(**TINY | {"head_dim": 8, "intermediate_size": 64, "sliding_window": 4, "rope_parameters": rope()} | options)


def qwen2(**options) -> PreTrainedConfig:
    return Qwen2Config(**TINY | {"intermediate_size": 64, "rope_parameters": rope()} | options)


LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
EXPERTS = r"\.experts\.\d+\.(gate|up|down)_proj$"
NOT_EXPERTS = ("re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*")
NOT_EXPERTS += (r"re:.*mlp\.gate$",)
NO_ROUTER = ("lm_head", r"re:.*mlp\.gate$", r"re:.*block_sparse_moe\.gate$")
VISION = {"vision_tower.patch_embed.proj.weight": (4, 3, 2, 2), "mm_projector.linear_1.weight": (4, 4)}
MTP = {"model.layers.3.eh_proj.weight": (32, 64), "model.layers.3.enorm.weight": (32,), "model.layers.3.self_attn.o_proj.weight": (32, 64)}

FP8 = {"type": "float", "ignore": NO_ROUTER}
FP4 = {"num_bits": 4, "type": "float"}
NVFP4 = formats.compressed("nvfp4-pack-quantized", strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn, **FP4)
MXFP4 = formats.compressed("mxfp4-pack-quantized", strategy="group", group_size=32, scale_dtype=torch.uint8, **FP4)
WIDE = {"hidden_size": 128, "num_attention_heads": 8, "head_dim": 16, "intermediate_size": 128, "num_hidden_layers": 1}
ODD = {"hidden_size": 42, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 14}
SMALL = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1}

CASES = [
    Case("qwen3_moe-bf16-shards", qwen3_moe(num_hidden_layers=3), shards=3, old_config=True),
    Case(
        "qwen3_moe-f32-mixed-fused",
        qwen3_moe(num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[1], attention_bias=True),
        None,
        torch.float32,
        fused=True,
    ),
    Case(
        "qwen3_moe-int4_g32",
        qwen3_moe(num_key_value_heads=1, moe_intermediate_size=32, norm_topk_prob=False),
        formats.int4(32, 7, ignore=NO_ROUTER),
    ),
    Case("qwen3_moe-fp8", qwen3_moe(hidden_size=40, rope_parameters=rope(1e4)), formats.fp8_blocks(128, 128), old_config=True),
    Case("qwen3_moe-gptq", qwen3_moe(), formats.gptq(16)),
    Case(
        "deepseek_v3-bf16",
        deepseek(q_lora_rank=None, rope_parameters=rope(), n_shared_experts=2, first_k_dense_replace=2, attention_bias=True),
    ),
    Case("deepseek_v3-fp8", deepseek(hidden_size=40, num_mtp_layers=1), formats.fp8_blocks(16, 16), old_config=True, extra=MTP),
    Case(
        "kimi_k2-fp8",
        deepseek(n_group=1, topk_group=1, rope_parameters=yarn(50.0, mscale=0.7, mscale_all_dim=1.0)),
        formats.fp8_blocks(128, 128),
        old_config=True,
        kimi=True,
    ),
    Case(
        "kimi_k25-int4_g32",
        deepseek(n_group=1, topk_group=1, moe_intermediate_size=32, rope_parameters=yarn(50.0, mscale=1.0, mscale_all_dim=1.0)),
        formats.int4(32, 7.5, targets=EXPERTS, ignore=NOT_EXPERTS),
        old_config=True,
        kimi=True,
        prefix="language_model.",
        extra=VISION,
    ),
    Case("gpt_oss-bf16", gpt_oss()),
    Case("gpt_oss-mxfp4", gpt_oss(num_hidden_layers=3, num_key_value_heads=1), formats.gpt_oss(), old_config=True),
    Case("glm4_moe-bf16", glm4_moe(use_qk_norm=True), old_config=True),
    Case("glm4_moe-awq", glm4_moe(), formats.awq(32)),
    Case(
        "glm4_moe-int8",
        glm4_moe(n_group=2, topk_group=1),
        formats.compressed("int-quantized", ignore=NO_ROUTER, strategy="channel", dynamic=True),
    ),
    Case("mixtral-bf16", mixtral(), old_config=True),
    Case("mixtral-fp8-channel", mixtral(sliding_window=4), formats.compressed("float-quantized", strategy="channel", **FP8)),
    Case("olmoe-f16", olmoe(), None, torch.float16, old_config=True),
    Case("olmoe-gptq_v2-act_order", olmoe(num_key_value_heads=4), formats.gptq(16, 2, act_order=True)),
    Case("llama-f32-tied", llama(**ODD, tie_word_embeddings=True, rope_parameters=rope() | LLAMA3), None, torch.float32, old_config=True),
    Case(
        "llama-nvfp4",
        llama(rope_parameters=rope() | LLAMA3),
        NVFP4,
    ),
    Case("llama-fp8-tensor", llama(attention_bias=True, mlp_bias=True), formats.compressed("float-quantized", strategy="tensor", **FP8)),
    Case("llama-gguf-q8_0", llama(), gguf=("Q8_0", "Q8_0")),
    Case("llama-gguf-q4_0", llama(num_key_value_heads=1), gguf=("Q4_0", "F16")),
    Case("smollm2-gguf-q4_1-tied", llama(tie_word_embeddings=True), gguf=("Q4_1", "Q8_0")),
    Case("smollm2-bf16-tied", llama(**SMALL, tie_word_embeddings=True), old_config=True),
    Case("mistral-bf16", mistral(), old_config=True),
    Case("mistral-gptq", mistral(num_key_value_heads=1), formats.gptq(32)),
    Case("qwen2-bf16", qwen2(use_sliding_window=True, sliding_window=4, max_window_layers=1), old_config=True),
    Case("qwen2-awq", qwen2(), formats.awq(16)),
    Case("qwen3-bf16", qwen3(head_dim=16)),
    Case("qwen3-int4_g128", qwen3(**WIDE), formats.int4(128, 7.5)),
    Case("qwen3-int4_g128-qat", qwen3(**WIDE), formats.int4(128, 7)),
    Case(
        "qwen3-mxfp4",
        qwen3(tie_word_embeddings=True),
        MXFP4,
    ),
]

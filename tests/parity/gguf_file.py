"""A llama checkpoint as one GGUF file, by the `gguf` package's writer and quantizers, laid out as llama.cpp's converter does."""

import pathlib
import re

import gguf
import numpy as np
import torch
from transformers import LlamaConfig

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write(path: pathlib.Path, config: LlamaConfig, tensors: dict[str, torch.Tensor], linear: str, embed: str) -> dict[str, torch.Tensor]:
    """Writes `tensors` (names and layout of transformers) with linears and embeddings in the given types; returns what they now mean."""
    out = gguf.GGUFWriter(path, "llama")
    out.add_name("tiny")
    out.add_block_count(config.num_hidden_layers)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_freq_base(config.rope_parameters["rope_theta"])
    out.add_rope_dimension_count(config.head_dim)
    out.add_vocab_size(config.vocab_size)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("smollm")
    out.add_token_list(["a", "b", "ab", *(f"<{i}>" for i in range(3, config.vocab_size))])
    out.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    out.add_token_merges(["a b"])
    meaning = {}
    for name, value in tensors.items():
        w = value.float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads:  # rows of a head from (half, pair) to (pair, half): RoPE of this architecture turns neighbours
            w = w.reshape(heads, 2, -1, w.shape[1]).swapaxes(1, 2).reshape(w.shape)
        kind = "F32" if w.ndim == 1 else embed if re.search("embed_tokens|lm_head", name) else linear
        kind = gguf.GGMLQuantizationType[kind]
        stored = gguf.quantize(np.ascontiguousarray(w), kind)
        out.add_tensor(_name(name), stored, raw_dtype=kind)
        w = gguf.dequantize(stored, kind)
        if heads:
            w = w.reshape(heads, -1, 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)
        meaning[name] = torch.from_numpy(np.ascontiguousarray(w))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return meaning


def _name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    layer, module = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name).groups()
    return f"blk.{layer}.{NAMES[module]}.weight"

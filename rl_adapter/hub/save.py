"""Writes a trained float model as a Hugging Face Qwen3-MoE checkpoint with INT4 attention and experts (`pack-quantized`)."""

import dataclasses
import json
import os
import pathlib

import ml_dtypes
import numpy as np

from rl_adapter import quant
from rl_adapter.hub import families, rope
from rl_adapter.hub.codecs import compressed_tensors
from rl_adapter.hub.files import SINGLE, write_tensors
from rl_adapter.types import Base, PyTree, Spec

bf16 = ml_dtypes.bfloat16


def save_checkpoint(directory: str | os.PathLike, spec: Spec, params: Base, group: int = 32, theta: float = 10_000.0) -> None:
    """Writes `config.json` and `model.safetensors`.

    Args:
        directory: made where it is missing; files of these names are replaced.
        spec: the model.
        params: float arrays in place of `Weight`s: in layers [n, (E,) in, out], `head` [D, V] (ignored where it is tied to
            `embed` [V, D]). Attention and experts go to INT4, rounded as `quant.fake_quantize` does; all else to bfloat16.
        group: input features to a scale.
        theta: the base of the frequencies of `spec.rope`.

    Raises:
        ValueError: the model is no Qwen3-MoE, or `params` are not of its shapes, or not finite.
    """
    config = _config(spec, group, theta)
    described = families.describe(config)
    if dataclasses.replace(described.spec, rope=spec.rope) != spec:
        raise ValueError(f"spec: found {spec}, need a Qwen3-MoE, which would be {described.spec}")
    if not np.allclose(spec.rope.frequencies, rope.plain(theta, spec.head_dim).frequencies, rtol=1e-5, atol=0) or spec.rope.factor != 1:
        raise ValueError(f"spec.rope: found {spec.rope}, need plain frequencies with theta {theta}")
    tensors = {}
    name = lambda field, layer=0, expert=None: families.source(described, field, layer, expert, has=lambda _: False).name
    for field, shape in families.top(spec).items():
        if field != "head" or not spec.tie_embeddings:
            value = np.asarray(getattr(params, field))
            tensors[name(field)] = _checked(shape, value.T if field == "head" else value, name(field)).astype(bf16)
    for (first, n, sparse), layer in zip(spec.stacks, params.layers, strict=True):
        for field, shape in families.fields(described, sparse).items():
            stacked = np.asarray(getattr(layer, field))
            lead = (n, spec.experts) if families.per_expert(field) else (n,)
            if stacked.shape[: len(lead)] != lead:
                raise ValueError(f"params.layers.{field}: found shape {list(stacked.shape)}, need {list(lead)} in front")
            for index in np.ndindex(*lead):
                full = name(field, first + index[0], *index[1:])
                value = stacked[index]
                value = _checked(shape, value.T if len(shape) == 2 else value, full)
                if len(shape) == 1 or field == "router":
                    tensors[full] = value.astype(bf16)
                    continue
                packed = round_to_grid(value.T, group, full)
                tensors[full + "_packed"] = compressed_tensors.to_words(packed)
                tensors[full + "_scale"] = packed.scale[0].T
                tensors[full + "_shape"] = np.array(value.shape, np.int64)
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(directory / SINGLE, tensors)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def round_to_grid(w: np.ndarray, group: int, name: str = "weight") -> PyTree:
    """A float weight [K, N] -> INT4 `Weight` with scale bf16(amax/7) and codes -7..7: the grid of `quant.fake_quantize`.

    A weight that already lies on the grid keeps its codes and scales.
    """
    k, n = w.shape
    if group < 2 or group % 2 or k % group or k % 8:
        raise ValueError(f"{name}: found {k} input features, need a multiple of 8 and of the even group size {group}")
    grouped = np.asarray(w, np.float32).reshape(k // group, group, n)
    scale = (np.maximum(np.abs(grouped).max(1), np.float32(1e-12)) / np.float32(7)).astype(bf16)
    codes = np.clip(np.round(grouped / scale.astype(np.float32)[:, None]), -7, 7)
    return quant.pack(codes.astype(np.int8), scale)


def _checked(shape: tuple[int, ...], value: np.ndarray, name: str) -> np.ndarray:
    if value.shape != shape or not np.isfinite(value).all():
        raise ValueError(f"{name}: found shape {list(value.shape)}, need finite values of shape {list(shape)}")
    return value


def _config(spec: Spec, group: int, theta: float) -> dict:
    return {
        "architectures": [families.QWEN3_MOE.architecture],
        "model_type": families.QWEN3_MOE.model_types[0],
        "num_hidden_layers": spec.layers,
        "hidden_size": spec.d_model,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "num_experts": spec.experts,
        "num_experts_per_tok": spec.experts_per_token,
        "moe_intermediate_size": spec.d_expert,
        "vocab_size": spec.vocab,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": theta,
        "norm_topk_prob": spec.norm_topk_prob,
        "tie_word_embeddings": spec.tie_embeddings,
        "max_position_embeddings": spec.max_positions,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(spec.dense),
        "intermediate_size": spec.d_mlp or spec.d_expert,  # transformers wants the field even where no layer is dense
        "torch_dtype": "bfloat16",
        "quantization_config": compressed_tensors.describe(
            group, ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(spec.layers) if layer not in spec.dense)]
        ),
    }

"""Writes a trained float model as a Hugging Face Qwen3-MoE checkpoint with INT4 attention and experts (`pack-quantized`)."""

import json
import os
import pathlib

import ml_dtypes
import numpy as np

from rl_adapter import quant
from rl_adapter.hub import families, pack_quantized
from rl_adapter.hub.files import SINGLE, write_tensors
from rl_adapter.types import Base, PyTree, Spec

bf16 = ml_dtypes.bfloat16


def save_checkpoint(directory: str | os.PathLike, spec: Spec, params: Base, group: int = 32) -> None:
    """Writes `config.json` and `model.safetensors`.

    Args:
        directory: made where it is missing; files of these names are replaced.
        spec: the model.
        params: float arrays in place of `QTensor`s: weights [L, (E,) in, out], `head` [D, V] (ignored where it is tied to
            `embed` [V, D]). Attention and experts go to INT4, rounded as `quant.fake_quantize` does; all else to bfloat16.
        group: input features to a scale.
    """
    family, tensors = families.QWEN3_MOE, {}
    for field, name in family.base.items():
        if field != "head" or not spec.tie_embeddings:
            value = np.asarray(getattr(params, field))
            tensors[name] = _checked(spec, field, value.T if field == "head" else value, name).astype(bf16)
    for field, name in family.layer.items():
        stacked = np.asarray(getattr(params.layers, field))
        lead = (spec.layers, spec.experts) if field in families.EXPERTS else (spec.layers,)
        if stacked.shape[: len(lead)] != lead:
            raise ValueError(f"params.layers.{field}: found shape {list(stacked.shape)}, need {list(lead)} in front")
        for index in np.ndindex(*lead):
            full = name.format(**dict(zip("le", index, strict=False)))
            value = stacked[index]
            value = _checked(spec, field, value.T if field in families.LINEARS else value, full)
            if field not in families.LINEARS or field == "router":
                tensors[full] = value.astype(bf16)
                continue
            packed = round_to_grid(value.T, group, full)
            tensors[full + "_packed"] = pack_quantized.to_words(packed)
            tensors[full + "_scale"] = packed.scale[0].T
            tensors[full + "_shape"] = np.array(value.shape, np.int64)
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(directory / SINGLE, tensors)
    (directory / "config.json").write_text(json.dumps(_config(spec, family, group), indent=2) + "\n", encoding="utf-8")


def round_to_grid(w: np.ndarray, group: int, name: str = "weight") -> PyTree:
    """A float weight [K, N] -> INT4 `QTensor` with scale bf16(amax/7) and codes -7..7: the grid of `quant.fake_quantize`.

    A weight that already lies on the grid keeps its codes and scales.
    """
    k, n = w.shape
    if group < 2 or group % 2 or k % group or k % 8:
        raise ValueError(f"{name}: found {k} input features, need a multiple of 8 and of the even group size {group}")
    grouped = np.asarray(w, np.float32).reshape(k // group, group, n)
    scale = (np.maximum(np.abs(grouped).max(1), np.float32(1e-12)) / np.float32(7)).astype(bf16)
    codes = np.clip(np.round(grouped / scale.astype(np.float32)[:, None]), -7, 7)
    return quant.pack(codes.astype(np.int8), scale)


def _checked(spec: Spec, field: str, value: np.ndarray, name: str) -> np.ndarray:
    need = families.shapes(spec)[field]
    if value.shape != need or not np.isfinite(value).all():
        raise ValueError(f"{name}: found shape {list(value.shape)}, need finite values of shape {list(need)}")
    return value


def _config(spec: Spec, family: families.Family, group: int) -> dict:
    ignore = ["lm_head", *(family.layer["router"].format(l=layer).removesuffix(".weight") for layer in range(spec.layers))]
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{name: getattr(spec, field) for field, name in family.fields.items()},
        **{name: values[0] for name, values in family.neutral.items() if None not in values or name == "mlp_only_layers"},
        "intermediate_size": spec.d_expert,  # of dense layers, of which there are none; transformers wants the field
        "torch_dtype": "bfloat16",
        "quantization_config": pack_quantized.describe(group, ignore),
    }

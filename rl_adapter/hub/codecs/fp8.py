"""FP8 with a scale to each block of weights, as DeepSeek-V3 and Qwen3-FP8 store it.

`X.weight` float8_e4m3fn [out, in], `X.weight_scale_inv` [ceil(out / 128), ceil(in / 128)], which multiplies, despite its name.
Blocks at the edges are partial. Fused experts have one more axis in front of both.
"""

from typing import Any

import ml_dtypes
import numpy as np

from rl_adapter import quant
from rl_adapter.hub.codecs import codec
from rl_adapter.hub.codecs.codec import Codec, Expected, Quantization, Scheme, Source
from rl_adapter.hub.files import Tensors

# Activations that are quantized as they come ("dynamic") are not here: this package keeps the weights, and has its own activations.
_FIELDS = {"fmt": ("e4m3", ("e4m3",)), "activation_scheme": ("dynamic", ("dynamic",)), "scale_fmt": (None, (None, "ue8m0", "float"))}


def read_config(config: dict[str, Any]) -> tuple[list[Scheme], list[str]]:
    problems = codec.unsupported("quantization_config", config, _FIELDS)
    block = config.get("weight_block_size", [128, 128])
    if not (isinstance(block, list) and len(block) == 2 and all(map(codec.is_count, block))):
        return [], [*problems, f"quantization_config.weight_block_size: found {block!r}, need two positive integers"]
    return [Scheme("fp8", block=tuple(block))], problems


def _expected(source: Source, shape: tuple[int, int], tensors: Tensors, quantization: Quantization) -> Expected:
    _, whole = source.packed(shape)
    scales = *whole[:-2], *codec.block_counts(quantization.schemes[0].block, whole[-2:])
    return {source.name: ([whole], ("F8_E4M3",)), source.name + "_scale_inv": ([scales], ("F32", "BF16", "F8_E8M0"))}


def _read(source: Source, shape: tuple[int, int], tensors: Tensors, quantization: Quantization) -> quant.Weight:
    index, whole = source.packed(shape)
    experts, rows = index[: len(whole) - 2], index[len(whole) - 2 :]
    codes = tensors.read(source.name, index)
    codec.check_fp8(source.name, codes)
    scale = codec.as_e8m0(tensors.read(source.name + "_scale_inv", experts))
    codec.check_scale(source.name + "_scale_inv", scale)
    block = quantization.schemes[0].block
    scale = codec.read_block_scales(scale, block, whole[-2:])[:, rows[0] if rows else slice(None)]
    return quant.weight("fp8", codes.T.reshape(len(scale), -1, len(codes)), scale)


def _write(weight: quant.Weight, name: str, quantization: Quantization) -> dict[str, np.ndarray]:
    width, out = quant.shape(weight)
    blocks = codec.write_block_scales(name, weight.scale[0], quantization.schemes[0].block, (out, width))
    if blocks.dtype == np.uint8:
        blocks = blocks.view(ml_dtypes.float8_e8m0fnu)
    return {name: weight.qvalue.reshape(width, out).T, name + "_scale_inv": blocks}


BLOCKS = Codec(_expected, _read, _write)

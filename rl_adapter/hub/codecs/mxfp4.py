"""MXFP4 experts as gpt-oss stores them: fused, with nothing unpacked.

`X_blocks` uint8 [E, out, in/32, 16], the even feature in the low nibble, `X_scales` uint8 [E, out, in/32], e8m0 exponents. Rows of
`gate_up_proj` are gate and up in turn: `Source.index` picks every other one.
"""

from typing import Any

import numpy as np

from rl_adapter import quant
from rl_adapter.hub.codecs import codec
from rl_adapter.hub.codecs.codec import Codec, Expected, Quantization, Scheme, Source
from rl_adapter.hub.files import Tensors

GROUP = 32


def read_config(config: dict[str, Any]) -> tuple[list[Scheme], list[str]]:
    return [Scheme("mxfp4", GROUP)], []


def _expected(source: Source, shape: tuple[int, int], tensors: Tensors, quantization: Quantization) -> Expected:
    _, (*lead, width) = source.packed(shape)
    if width % GROUP:
        raise ValueError(f"{source.name}: found {width} input features, need a multiple of {GROUP} for MXFP4")
    scales = *lead, width // GROUP
    return {source.name + "_blocks": ([(*scales, GROUP // 2)], ("U8",)), source.name + "_scales": ([scales], ("U8", "F8_E8M0"))}


def _read(source: Source, shape: tuple[int, int], tensors: Tensors, quantization: Quantization) -> quant.Weight:
    index, _ = source.packed(shape)
    blocks = tensors.read(source.name + "_blocks", index)
    scale = codec.as_e8m0(tensors.read(source.name + "_scales", index))
    codec.check_scale(source.name + "_scales", scale)
    return quant.weight("fp4", codec.from_pairs(blocks.reshape(len(blocks), -1), scale.shape[1]), scale.T)


def _write(weight: quant.Weight, name: str, quantization: Quantization) -> dict[str, np.ndarray]:
    scale = weight.scale[0].T
    return {name + "_blocks": codec.to_pairs(weight.qvalue).reshape(*scale.shape, GROUP // 2), name + "_scales": scale}


EXPERTS = Codec(_expected, _read, _write)

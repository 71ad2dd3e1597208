"""Blocks of 32 weights as llama.cpp stores them in GGUF files, rows [out, in/32 blocks] of bytes.

Q8_0: f16 scale d, 32 int8. Q4_0: d, 16 bytes of nibbles. Q4_1: d, f16 minimum m, 16 bytes. A low nibble is feature j, a high one
j + 16, as in quant.py. Q4_0 means (nibble - 8) * d, and llama.cpp takes the sign of d from the largest weight. Scales in quant.py
are magnitudes, so a block with d < 0 is kept as (15 - nibble) * |d| - 7 |d|, the same value.
"""

import numpy as np

from rl_adapter import quant
from rl_adapter.hub.codecs import codec
from rl_adapter.hub.codecs.codec import Codec, Expected, Quantization, Source
from rl_adapter.hub.files import Tensors

GROUP = 32
BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}


def _expected(source: Source, shape: tuple[int, int], tensors: Tensors, quantization: Quantization | None) -> Expected:
    codec.whole_only(source)
    return {source.name: ([shape], tuple(BLOCK_BYTES))}


def _read(source: Source, shape: tuple[int, int], tensors: Tensors, quantization: Quantization | None) -> quant.Weight:
    kind = tensors.entries[source.name].dtype
    blocks = tensors.read(source.name).reshape(shape[0], -1, BLOCK_BYTES[kind])
    half = lambda at: np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0].T  # [G, N]
    scale, start = half(0), 4 if kind == "Q4_1" else 2
    codes = blocks[..., start:].transpose(1, 2, 0)
    if kind == "Q4_0":
        codes, scale, bias = _fold_sign(codes, scale)
    codec.check_scale(source.name, scale)
    if kind == "Q8_0":
        return quant.weight("int8", codes.view(np.int8), scale)
    if kind == "Q4_1":
        bias = -half(2)
        if not np.isfinite(bias).all():
            raise ValueError(f"{source.name}: found a minimum that is NaN or Inf, need finite ones")
    return quant.weight("uint4", codes, scale, bias=bias)


def _fold_sign(codes: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Q4_0 codes [G, 16, N] and scales [G, N] of either sign -> codes, magnitudes, biases. Where d is -0.0, the bias is."""
    negative, size = np.signbit(scale), np.abs(scale)
    bias = np.where(negative, np.float32(7), np.float32(8)) * size.astype(np.float32)
    bias = np.where(negative & (size == 0), np.float32(-0.0), bias)
    return np.where(negative[:, None], 255 - codes, codes), size, bias


def _unfold_sign(weight: quant.Weight) -> tuple[np.ndarray, np.ndarray]:
    size, bias = weight.scale[0], weight.bias[0]
    negative = np.where(size == 0, np.signbit(bias), bias < 7.5 * size.astype(np.float32))
    return np.where(negative[:, None], 255 - weight.qvalue, weight.qvalue), np.where(negative, -size, size)


def _write(weight: quant.Weight, name: str, quantization: Quantization | None) -> dict[str, np.ndarray]:
    """Blocks uint8 [out, bytes]. A minimum lies in f16, the bias that stands for a sign in f32: so is Q4_1 told from Q4_0."""
    codes, halves = weight.qvalue, [weight.scale[0]]
    if weight.form == "uint4" and weight.bias[0].dtype == np.float16:
        halves.append(-weight.bias[0])
    elif weight.form == "uint4":
        codes, halves[0] = _unfold_sign(weight)
    parts = [np.ascontiguousarray(h.T).astype("<f2")[..., None].view(np.uint8) for h in halves]
    blocks = np.concatenate([*parts, codes.transpose(2, 0, 1).view(np.uint8)], -1)
    return {name: blocks.reshape(len(blocks), -1)}


BLOCKS = Codec(_expected, _read, _write)

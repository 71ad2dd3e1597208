"""Merged weights rounded to the format that their base has: the least that is rounded, and never without being asked."""

import ml_dtypes
import numpy as np

from rl_adapter import quant
from rl_adapter.hub import codecs
from rl_adapter.hub.codecs import Quantization

FP8_LARGEST, FP4_LARGEST = 448.0, 6.0
_NEED = "need int4, int8, fp8 or mxfp4 without zero points to quantize to: use layout 'merged'"
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def refuses(codec: codecs.Codec, stored: codecs.Expected, name: str) -> str | None:
    """Why `like` cannot take a matrix, told by the tensors that hold it; None where it can."""
    if codec in (codecs.gptq.GPTQ, codecs.gptq.AWQ, codecs.ggml.BLOCKS):
        found = {codecs.gptq.GPTQ: "gptq", codecs.gptq.AWQ: "awq", codecs.ggml.BLOCKS: "gguf"}[codec]
    elif name + "_global_scale" in stored:
        found = "nvfp4"
    elif name + "_zero_point" in stored:
        found = "uint4"
    else:
        return None
    return f"{name}: found {found}, {_NEED}"


def like(old: quant.Weight, w: np.ndarray, name: str, quantization: Quantization | None) -> quant.Weight:
    """w [K, N], f32, in the form, groups and dtype of scales of `old`. Symmetric: the largest of a group gets the largest code.

    Raises:
        ValueError: forms with zero points or two scales (GPTQ, AWQ, NVFP4), whose calibration a rounding cannot repeat.
    """
    if old.form not in ("int4", "int8", "fp8", "fp4") or len(old.scale) != 1 or old.order is not None:
        form = "nvfp4" if old.form == "fp4" else old.form
        raise ValueError(f"{name}: found {form}, {_NEED}")
    groups = old.qvalue.shape[0]
    w = w.reshape(groups, -1, w.shape[1])
    if old.form == "fp4":
        return _mxfp4(w)
    largest = {"int4": 7.0, "int8": 127.0, "fp8": FP8_LARGEST}[old.form]
    amax = _shared_amax(np.abs(w).max(1), old, quantization)
    scale = np.maximum(amax / np.float32(largest), 1e-30).astype(np.float32)
    if old.scale[0].dtype == np.uint8:  # exponents: a power of two that is not below
        exponent = np.clip(np.ceil(np.log2(scale)) + 127, 1, 254).astype(np.uint8)
        stored, scale = exponent, np.exp2(exponent.astype(np.float32) - 127)
    else:
        stored = scale.astype(old.scale[0].dtype)
        if not np.isfinite(stored.astype(np.float32)).all():
            raise ValueError(f"{name}: merged weights are too large for scales in {stored.dtype}")
        scale = np.maximum(stored.astype(np.float32), 1e-30)
    codes = w / scale[:, None]
    if old.form == "fp8":
        codes = np.clip(codes, -FP8_LARGEST, FP8_LARGEST).astype(ml_dtypes.float8_e4m3fn)
    else:
        codes = np.clip(np.round(codes), -largest - (old.form == "int4"), largest).astype(np.int8)
    return quant.pack(codes, stored) if old.form == "int4" else quant.weight(old.form, codes, stored)


def _shared_amax(amax: np.ndarray, old: quant.Weight, quantization: Quantization | None) -> np.ndarray:
    """amax [G, N], the largest over what shares a scale: one tensor, or blocks of outputs and groups."""
    if old.scale[0].shape == (1, 1):
        return amax.max(keepdims=True)
    blocks = [s.block for s in quantization.schemes if s.block] if quantization else []
    if old.form != "fp8" or not blocks:
        return amax
    (rows, width), (groups, n) = blocks[0], amax.shape
    block = np.arange(groups) * (np.prod(old.qvalue.shape[:2]) // groups) // width
    of_inputs = np.stack([amax[block == i].max(0) for i in range(block[-1] + 1)])
    of_outputs = np.maximum.reduceat(of_inputs, np.arange(0, n, rows), axis=1)
    return of_outputs[block][:, np.arange(n) // rows]


def _mxfp4(w: np.ndarray) -> quant.Weight:
    """w [G, g, N]: the exponent of OCP's Microscaling Formats (arXiv:2310.10537), the nearest codes, ties to the lower one."""
    amax = np.abs(w).max(1)
    exponent = np.clip(np.floor(np.log2(np.maximum(amax, 1e-30))) - 2 + 127, 1, 254).astype(np.uint8)
    scaled = np.clip(w / np.exp2(exponent.astype(np.float32) - 127)[:, None], -FP4_LARGEST, FP4_LARGEST)
    nearest = np.searchsorted((FP4[1:] + FP4[:-1]) / 2, np.abs(scaled)).astype(np.uint8)
    return quant.weight("fp4", quant.join_nibbles(nearest | (scaled < 0).astype(np.uint8) << 3), exponent)

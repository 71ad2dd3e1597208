"""Matrices in 16- or 32-bit floats: the caller quantizes them."""

import numpy as np

from rl_adapter.hub.codecs.codec import FLOATS, Codec, Expected, Quantization, Source
from rl_adapter.hub.files import Tensors


def _expected(source: Source, shape: tuple[int, int], tensors: Tensors, quantization: Quantization | None) -> Expected:
    return {source.name: ([source.whole or (shape[::-1] if source.transposed else shape)], FLOATS)}


def _read(source: Source, shape: tuple[int, int], tensors: Tensors, quantization: Quantization | None) -> np.ndarray:
    value = tensors.read(source.name, source.index)
    if not np.isfinite(value).all():
        raise ValueError(f"{source.name}: holds NaN or Inf; a base must be finite")
    return value.T if source.transposed else value


def _write(value: np.ndarray, name: str, quantization: Quantization | None) -> dict[str, np.ndarray]:
    return {name: value}


FLOAT = Codec(_expected, _read, _write)

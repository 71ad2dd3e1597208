"""What the modules of this package share: where a matrix lies, what its format's settings are, and the order of nibbles."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from rl_adapter.hub.files import Tensors
from rl_adapter.quant import Weight

FLOATS = ("BF16", "F16", "F32")
LARGEST_EXPONENT = 64  # of a scale: far beyond any weight, and its product with a code or another scale is finite


@dataclasses.dataclass(frozen=True)
class Source:
    """Where one matrix lies, by the names and shapes that the unquantized model has."""

    name: str  # of the float tensor: "model.layers.0.mlp.experts.3.gate_proj.weight", or fused "model.layers.0.mlp.experts.gate_up_proj"
    index: tuple[slice | int, ...] = ()  # the part of a fused tensor
    whole: tuple[int, ...] = ()  # shape of that fused tensor; () where the tensor is the matrix
    transposed: bool = False  # float tensors only: lies as [in, out]; packed ones are [out, in] whatever their float relatives are

    def packed(self, shape: tuple[int, int]) -> tuple[tuple[slice | int, ...], tuple[int, ...]]:
        """The index, and the shape [..., out, in] of the tensor that it picks from, as packed tensors lie."""
        index, whole = self.index, self.whole or shape
        if self.transposed and self.whole:
            whole = (*whole[:-2], whole[-1], whole[-2])
            index += (slice(None),) * (len(whole) - len(index))
            index = (*index[:-2], index[-1], index[-2])
        return index, whole


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How weights are quantized, as far as config.json tells."""

    format: str
    group: int = 0  # input features to a scale; 0: all of a channel
    block: tuple[int, int] | None = None  # (out, in) to a scale
    tensor: bool = False  # one scale in all
    symmetric: bool = True
    ordered: bool = False  # GPTQ: features are grouped out of order (`desc_act`)
    stored_minus: int = 0  # GPTQ: what is subtracted from zero points on disk


@dataclasses.dataclass(frozen=True)
class Quantization:
    """`quantization_config`: the method, and the schemes that its weights may have."""

    method: str
    schemes: tuple[Scheme, ...]


Expected = dict[str, tuple[list[tuple[int, ...]], tuple[str, ...]]]  # tensor -> (shapes, dtypes) that it may have


@dataclasses.dataclass(frozen=True)
class Codec:
    """One format on disk.

    expected(source, (out, in), tensors, quantization): the tensors that hold the matrix, told by headers alone. ValueError: the
        format cannot hold a matrix of that shape.
    read(source, (out, in), tensors, quantization): once `problems` finds none in what is expected, a host Weight [in, out], or of
        `floats.FLOAT` a float array [out, in]. ValueError: values that are no weight, such as NaN or a negative scale.
    write(weight, name, quantization): the inverse of `read` for the matrix or the part that `index` picks: tensor -> host array.
    """

    expected: Callable[[Source, tuple[int, int], Tensors, Quantization | None], Expected]
    read: Callable[[Source, tuple[int, int], Tensors, Quantization | None], Weight | np.ndarray]
    write: Callable[[Weight | np.ndarray, str, Quantization | None], dict[str, np.ndarray]]


def problems(expected: Expected, tensors: Tensors) -> list[str]:
    """What is wrong with the names, shapes and dtypes of a file: nothing, before a `read`."""
    found = []
    for name, (shapes, dtypes) in expected.items():
        if name not in tensors:
            found.append(f"{name}: missing")
            continue
        entry = tensors.entries[name]
        if entry.shape not in shapes:
            need = " or ".join(str(list(shape)) for shape in shapes) or "a group_size that divides the input features"
            found.append(f"{name}: found shape {list(entry.shape)}, need {need}")
        if entry.dtype not in dtypes:
            found.append(f"{name}: found {entry.dtype}, need {' or '.join(dtypes)}")
    return found


def from_pairs(pairs: np.ndarray, groups: int) -> np.ndarray:
    """Bytes [N, K/2], feature 2i in the low nibble of byte i -> qvalue [G, g/2, N], j and j + g/2 of a group in a byte."""
    rows = np.ascontiguousarray(pairs.T)  # turned first: half of what to move, and then all lies in rows
    nibbles = np.stack([rows & 15, rows >> 4], 1).reshape(groups, 2, -1, len(pairs))
    return nibbles[:, 0] | nibbles[:, 1] << 4


def to_pairs(qvalue: np.ndarray) -> np.ndarray:
    """The inverse of `from_pairs`; leading axes stay in front."""
    *lead, groups, half, n = qvalue.shape
    nibbles = np.concatenate([qvalue & 15, qvalue >> 4], -2).reshape(*lead, groups * half * 2, n).swapaxes(-1, -2)
    return np.ascontiguousarray(nibbles[..., 0::2] | nibbles[..., 1::2] << 4)


def words_to_nibbles(words: np.ndarray) -> np.ndarray:
    """int32 [R, C] -> uint8 [R, 8C]: nibble j of word c is element 8c + j."""
    pairs = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    return np.stack([pairs & 15, pairs >> 4], -1).reshape(len(words), -1)


def nibbles_to_words(nibbles: np.ndarray) -> np.ndarray:
    """uint8 [..., 8C] -> int32 [..., C]: the inverse of `words_to_nibbles`."""
    return np.ascontiguousarray(nibbles[..., 0::2] | nibbles[..., 1::2] << 4).view("<i4").astype(np.int32, copy=False)


def check_scale(name: str, scale: np.ndarray) -> None:
    """Refuses what exact sums over groups cannot take: they read scales as magnitudes, and a code times its scale must be finite."""
    if scale.dtype == np.uint8:
        if (scale > 127 + LARGEST_EXPONENT).any():
            raise ValueError(f"{name}: found the e8m0 code {scale.max()} (255 is NaN), need at most {127 + LARGEST_EXPONENT}")
        return
    value = scale.astype(np.float32)
    if not ((value >= 0) & (value <= 2.0**LARGEST_EXPONENT)).all():
        need = f"finite scales from 0 to 2^{LARGEST_EXPONENT}"
        raise ValueError(f"{name}: found NaN, Inf, a negative value or a larger one, need {need}")


def check_fp8(name: str, codes: np.ndarray) -> None:
    if ((codes.view(np.uint8) & 127) == 127).any():
        raise ValueError(f"{name}: holds NaN, need finite float8_e4m3fn codes")


def as_e8m0(scale: np.ndarray) -> np.ndarray:
    """Scales as `quant.Weight` wants them: exponents in uint8, whichever of its two dtypes a file gives them."""
    return scale.view(np.uint8) if scale.dtype == ml_dtypes.float8_e8m0fnu else scale


def read_block_scales(scale: np.ndarray, block: tuple[int, int], shape: tuple[int, int]) -> np.ndarray:
    """Scales [ceil(out / bo), ceil(in / bi)] of blocks -> [G, out], of groups of `block_group` features that no block's edge cuts."""
    out, width = shape
    starts = np.arange(0, width, block_group(block, width)) // block[1]
    return scale[np.arange(out) // block[0]][:, starts].T


def write_block_scales(name: str, scale: np.ndarray, block: tuple[int, int], shape: tuple[int, int]) -> np.ndarray:
    """The inverse of `read_block_scales`."""
    group = block_group(block, shape[1])
    columns = np.arange(0, shape[1], block[1]) // group
    blocks = scale[columns][:, :: block[0]].T
    if not np.array_equal(read_block_scales(blocks, block, shape), scale):
        raise ValueError(f"{name}: found scales that differ within a block of {block}, need one a block")
    return blocks


def block_group(block: tuple[int, int], width: int) -> int:
    return math.gcd(block[1], width)


def block_counts(block: tuple[int, int], shape: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def unsupported(where: str, found: dict[str, Any], fields: dict[str, tuple[Any, tuple]]) -> list[str]:
    """What is wrong with fields of a config: name -> (what an absent one means, values that are implemented)."""
    values = {name: found.get(name, default) for name, (default, _) in fields.items()}
    return [
        f"{where}.{name}: found {value!r}, need {' or '.join(map(repr, fields[name][1]))}"
        for name, value in values.items()
        if not any(type(value) is type(v) and value == v for v in fields[name][1])
    ]


def is_count(value: Any, least: int = 1) -> bool:
    return type(value) is int and least <= value < 2**31


def whole_only(source: Source) -> None:
    if source.index:
        raise ValueError(f"{source.name}: found a part of a fused tensor, need a matrix of its own in this format")

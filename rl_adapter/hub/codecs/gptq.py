"""INT4 with zero points, as GPTQ and AWQ store it: value = (nibble - zero) * scale, `scales` [in/g, out].

GPTQ: `qweight` int32 [in/8, out], nibble j of row r is feature 8r + j; `qzeros` int32 [in/g, out/8], less by one in the first
version of the format; `g_idx` int32 [in], the group of each feature. AWQ (gemm): `qweight` int32 [in, out/8] and `qzeros`,
nibble i of word c is row 8c + AWQ_ORDER[i].
"""

from typing import Any

import numpy as np

from rl_adapter import quant
from rl_adapter.hub.codecs import codec
from rl_adapter.hub.codecs.codec import Codec, Expected, Quantization, Scheme, Source
from rl_adapter.hub.files import Tensors

AWQ_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])
_GPTQ = {
    "bits": (None, (4,)),
    "sym": (True, (True, False)),
    "desc_act": (False, (True, False)),
    "checkpoint_format": ("gptq", ("gptq", "gptq_v2")),
    "is_marlin_format": (False, (False, None)),
    "pack_dtype": ("int32", ("int32", None)),
}
_AWQ = {
    "bits": (None, (4,)),
    "zero_point": (True, (True,)),
    "version": ("gemm", ("gemm", "GEMM")),
    "backend": ("autoawq", ("autoawq", None)),
}


def read_gptq_config(config: dict[str, Any]) -> tuple[list[Scheme], list[str]]:
    problems = codec.unsupported("quantization_config", config, _GPTQ)
    overrides = config.get("dynamic") or {}
    # A rule that starts with "-:" leaves modules unquantized, as their tensors tell; any other gives them settings of their own.
    if not isinstance(overrides, dict) or not all(str(rule).startswith("-:") for rule in overrides):
        problems.append(f"quantization_config.dynamic: found {overrides!r}, need no settings for single modules")
    group = _group(config, "group_size", problems)
    minus = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
    scheme = Scheme("gptq", group, symmetric=config.get("sym", True), ordered=config.get("desc_act", False), stored_minus=minus)
    return [scheme], problems


def read_awq_config(config: dict[str, Any]) -> tuple[list[Scheme], list[str]]:
    aliases = {"w_bit": "bits", "q_group_size": "group_size"}
    config = {aliases.get(name, name): value for name, value in config.items()}
    problems = codec.unsupported("quantization_config", config, _AWQ)
    return [Scheme("awq", _group(config, "group_size", problems), symmetric=False)], problems


def _group(config: dict[str, Any], name: str, problems: list[str]) -> int:
    size = config.get(name)
    if size == -1 and type(size) is int:
        return 0
    if not codec.is_count(size, 2) or size % 2:
        problems.append(f"quantization_config.{name}: found {size!r}, need -1 or an even number of at least 2")
        return 0
    return size


def _stem(source: Source) -> str:
    codec.whole_only(source)
    return source.name.removesuffix("weight")


def _shapes(source: Source, shape: tuple[int, int], scheme: Scheme) -> tuple[int, int, int]:
    out, width = shape
    group = scheme.group or width
    if width % group or width % 8 or out % 8:
        raise ValueError(f"{source.name}: found shape {list(shape)}, need input features in groups of {group}, and multiples of 8")
    return out, width, width // group


def _expected_gptq(source: Source, shape: tuple[int, int], tensors: Tensors, quantization: Quantization) -> Expected:
    stem, (scheme,) = _stem(source), quantization.schemes
    out, width, groups = _shapes(source, shape, scheme)
    expected = {
        stem + "qweight": ([(width // 8, out)], ("I32",)),
        stem + "qzeros": ([(groups, out // 8)], ("I32",)),
        stem + "scales": ([(groups, out)], codec.FLOATS),
    }
    if scheme.ordered or stem + "g_idx" in tensors:
        expected[stem + "g_idx"] = ([(width,)], ("I32",))
    return expected


def _read_gptq(source: Source, shape: tuple[int, int], tensors: Tensors, quantization: Quantization) -> quant.Weight:
    stem, (scheme,) = _stem(source), quantization.schemes
    out, width, groups = _shapes(source, shape, scheme)
    nibbles = codec.words_to_nibbles(tensors.read(stem + "qweight").T).T
    scale = tensors.read(stem + "scales")
    zeros = codec.words_to_nibbles(tensors.read(stem + "qzeros")) + np.uint8(scheme.stored_minus)
    order = None
    if stem + "g_idx" in tensors:
        index = tensors.read(stem + "g_idx")
        if ((index < 0) | (index >= groups)).any():
            raise ValueError(f"{stem}g_idx: found groups from {index.min()} to {index.max()}, need 0 to {groups - 1}")
        if (np.bincount(index, minlength=groups) != width // groups).any():
            raise ValueError(f"{stem}g_idx: found groups of unequal sizes, need {width // groups} features in each")
        order = np.argsort(index, kind="stable").astype(np.int32)
        if not scheme.ordered and (order != np.arange(width)).any():
            raise ValueError(f"{stem}g_idx: found features out of order, but quantization_config.desc_act is false")
    if scheme.ordered:
        nibbles = nibbles[order]
    return _weight(stem, nibbles, scale, zeros, scheme, order if scheme.ordered else None)


def _weight(
    stem: str, nibbles: np.ndarray, scale: np.ndarray, zeros: np.ndarray, scheme: Scheme, order: np.ndarray | None = None
) -> quant.Weight:
    """Nibbles [in, out] in the order of their groups, scales and zero points [G, out]."""
    codec.check_scale(stem + "scales", scale)
    qvalue = quant.join_nibbles(nibbles.reshape(len(scale), -1, nibbles.shape[1]))
    if scheme.symmetric:
        if (zeros != 8).any():
            raise ValueError(f"{stem}qzeros: found other zero points than 8, but quantization_config.sym is true")
        return quant.weight("int4", qvalue, scale, order=order)
    return quant.weight("uint4", qvalue, scale, bias=bias_of(zeros, scale), order=order)


def bias_of(zeros: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """zero * scale in f32: exact for 16-bit scales."""
    return zeros.astype(np.float32) * scale.astype(np.float32)


def zeros_of(name: str, weight: quant.Weight) -> np.ndarray:
    """The zero points uint8 [G, N] of a uint4 Weight: the inverse of `bias_of`."""
    scale = weight.scale[0].astype(np.float32)
    if not scale.all():
        raise ValueError(f"{name}: found a scale of 0, under which its zero point is lost")
    return np.round(weight.bias[0] / scale).astype(np.uint8)


def _parts(weight: quant.Weight, stem: str, scheme: Scheme) -> tuple[np.ndarray, np.ndarray]:
    """Nibbles [in, out] in the order of the groups, zero points [G, out]."""
    nibbles = quant.split_nibbles(weight.qvalue).reshape(quant.shape(weight))
    return nibbles, np.full(weight.scale[0].shape, 8, np.uint8) if scheme.symmetric else zeros_of(stem + "scales", weight)


def _write_gptq(weight: quant.Weight, name: str, quantization: Quantization) -> dict[str, np.ndarray]:
    stem, (scheme,) = name.removesuffix("weight"), quantization.schemes
    nibbles, zeros = _parts(weight, stem, scheme)
    group = np.repeat(np.arange(len(zeros), dtype=np.int32), len(nibbles) // len(zeros))
    if weight.order is not None:
        back = np.argsort(weight.order)
        nibbles, group = nibbles[back], group[back]
    return {
        stem + "qweight": codec.nibbles_to_words(nibbles.T).T,
        stem + "qzeros": codec.nibbles_to_words(zeros - np.uint8(scheme.stored_minus)),
        stem + "scales": weight.scale[0],
        stem + "g_idx": group,
    }


def _expected_awq(source: Source, shape: tuple[int, int], tensors: Tensors, quantization: Quantization) -> Expected:
    stem = _stem(source)
    out, width, groups = _shapes(source, shape, quantization.schemes[0])
    return {
        stem + "qweight": ([(width, out // 8)], ("I32",)),
        stem + "qzeros": ([(groups, out // 8)], ("I32",)),
        stem + "scales": ([(groups, out)], codec.FLOATS),
    }


def _read_awq(source: Source, shape: tuple[int, int], tensors: Tensors, quantization: Quantization) -> quant.Weight:
    stem = _stem(source)

    def nibbles(name):
        stored = codec.words_to_nibbles(tensors.read(stem + name))
        return stored.reshape(len(stored), -1, 8)[:, :, np.argsort(AWQ_ORDER)].reshape(len(stored), -1)

    return _weight(stem, nibbles("qweight"), tensors.read(stem + "scales"), nibbles("qzeros"), quantization.schemes[0])


def _write_awq(weight: quant.Weight, name: str, quantization: Quantization) -> dict[str, np.ndarray]:
    stem = name.removesuffix("weight")
    words = lambda a: codec.nibbles_to_words(a.reshape(len(a), -1, 8)[:, :, AWQ_ORDER].reshape(len(a), -1))
    nibbles, zeros = _parts(weight, stem, quantization.schemes[0])
    return {stem + "qweight": words(nibbles), stem + "qzeros": words(zeros), stem + "scales": weight.scale[0]}


GPTQ = Codec(_expected_gptq, _read_gptq, _write_gptq)
AWQ = Codec(_expected_awq, _read_awq, _write_awq)

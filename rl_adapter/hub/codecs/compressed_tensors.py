"""The formats of the compressed-tensors library, bit for bit. `X.weight` [out, in] becomes

pack-quantized        X.weight_packed int32 [out, in/8], nibble j of word m is feature 8m + j; X.weight_scale [out, G];
                      X.weight_shape (out, in); X.weight_zero_point int32 [out/8, G], packed along out, if asymmetric
int-, float-quantized X.weight int8 or float8_e4m3fn; X.weight_scale [out, G], [out, 1], [1], or of blocks
nvfp4-pack-quantized  X.weight_packed uint8 [out, in/2], low nibble first; X.weight_scale float8_e4m3fn [out, in/16];
                      X.weight_global_scale f32 [1], by which that scale is divided
mxfp4-pack-quantized  the same with e8m0 scales uint8 [out, in/32] alone

Which weights are quantized is read from the names of the tensors, not from `targets` and `ignore`: those are regular expressions
over the modules of one implementation, and a tensor says what it is.
"""

import dataclasses
from typing import Any

import numpy as np

from rl_adapter import quant
from rl_adapter.hub.codecs import codec, gptq
from rl_adapter.hub.codecs.codec import FLOATS, Codec, Expected, Quantization, Scheme, Source
from rl_adapter.hub.files import Tensors

PACKED, INT, FLOAT, NVFP4, MXFP4 = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
)
# format -> bits, type, strategies, group sizes (any even one where there are none)
_FORMATS = {
    PACKED: (4, "int", ("group", "channel"), ()),
    INT: (8, "int", ("group", "channel", "tensor"), ()),
    FLOAT: (8, "float", ("group", "channel", "tensor", "block"), ()),
    NVFP4: (4, "float", ("tensor_group",), (16,)),
    MXFP4: (4, "float", ("group",), (32,)),
}
_TOP = {
    "kv_cache_scheme": (None, (None, {})),
    "transform_config": (None, (None, {}, {"config_groups": {}})),
    "moe_sparsity_config": (None, (None, {})),
}
_WEIGHTS = {"actorder": (None, (None, False, "weight", "static")), "dynamic": (False, (False,))}
_SIZES = ("I32", "I64")


def read_config(config: dict[str, Any]) -> tuple[list[Scheme], list[str]]:
    """The schemes of `config_groups`, and what is wrong with the config."""
    where = "quantization_config"
    problems = codec.unsupported(where, config, _TOP)
    sparsity = config.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        problems.append(f"{where}.sparsity_config: found {sparsity!r}, need none: sparse weights are not implemented")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        return [], [*problems, f"{where}.config_groups: found {groups!r}, need an object with at least one group"]
    schemes = []
    for name, group in groups.items():
        at = f"{where}.config_groups.{name}"
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            problems.append(f"{at}: found {group!r}, need an object with `weights`")
            continue
        problems += codec.unsupported(at, group, {"output_activations": (None, (None,))}) + _activations(at, group)
        scheme = _scheme(at, group.get("format") or config.get("format"), weights, problems)
        schemes += [scheme] if scheme else []
    return schemes, problems


def _activations(at: str, group: dict[str, Any]) -> list[str]:
    """Activations that are quantized as they come are accepted: this package keeps the weights, and has its own activations."""
    found = group.get("input_activations")
    if found is None or (isinstance(found, dict) and found.get("dynamic") in (True, "local")):
        return []
    return [f"{at}.input_activations: found {found!r}, need none, or `dynamic` ones: static scales are not implemented"]


def _scheme(at: str, kind: Any, weights: dict[str, Any], problems: list[str]) -> Scheme | None:
    if not isinstance(kind, str) or kind not in _FORMATS:
        problems.append(f"{at}.format: found {kind!r}, need {' or '.join(map(repr, _FORMATS))}")
        return None
    bits, number, strategies, sizes = _FORMATS[kind]
    size = weights.get("group_size")
    inferred = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.get("strategy") or inferred
    fields = {
        **_WEIGHTS,
        "num_bits": (8, (bits,)),
        "type": ("int", (number,)),
        "symmetric": (True, (True, False) if kind == PACKED else (True,)),
    }
    found = codec.unsupported(f"{at}.weights", {**weights, "strategy": strategy}, {**fields, "strategy": (None, strategies)})
    scheme = Scheme(kind, symmetric=weights.get("symmetric", True), tensor=strategy == "tensor")
    if strategy in ("group", "tensor_group"):
        if not codec.is_count(size, 2) or size % 2 or (sizes and size not in sizes):
            found.append(f"{at}.weights.group_size: found {size!r}, need {sizes[0] if sizes else 'an even number of at least 2'}")
        scheme = dataclasses.replace(scheme, group=size)
    elif strategy == "block":
        block = weights.get("block_structure")
        if not (isinstance(block, list) and len(block) == 2 and all(map(codec.is_count, block))):
            found.append(f"{at}.weights.block_structure: found {block!r}, need two positive integers")
        else:
            scheme = dataclasses.replace(scheme, block=tuple(block))
    problems += found
    return None if found else scheme


def describe(group: int, ignore: list[str]) -> dict[str, Any]:
    """The `quantization_config` of a model whose linears, but for `ignore`, are INT4 in groups of `group`."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group, "dynamic": False}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": PACKED,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def _scale_shapes(schemes: list[Scheme], shape: tuple[int, int]) -> dict[tuple[int, ...], Scheme]:
    """The shapes that `weight_scale` may have, and which scheme each tells of."""
    out, width = shape
    found = {}
    for s in sorted(schemes, key=lambda s: s.block is not None):
        if s.block:
            counts = codec.block_counts(s.block, shape)
            if found.setdefault(counts, s) != s:
                raise ValueError(f"quantization_config: found schemes that cut {list(shape)} into the same number of blocks, need one")
        elif s.tensor:
            found[(1,)] = s
        elif width % (s.group or width) == 0:
            found[out, width // (s.group or width)] = s
    return found


def _schemes(source: Source, quantization: Quantization, *formats: str) -> list[Scheme]:
    codec.whole_only(source)
    schemes = [s for s in quantization.schemes if s.format in formats]
    if not schemes:
        raise ValueError(f"quantization_config: describes no weights in {' or '.join(formats)}, as those of {source.name} are")
    return schemes


def _expected_int4(source: Source, shape: tuple[int, int], tensors: Tensors, quantization: Quantization) -> Expected:
    schemes, name, (out, width) = _schemes(source, quantization, PACKED), source.name, shape
    if width % 2:
        raise ValueError(f"{name}: found {width} input features, need an even number for INT4")
    scales = list(_scale_shapes(schemes, shape))
    expected = {
        name + "_packed": ([(out, -(-width // 8))], ("I32",)),
        name + "_scale": (scales, FLOATS),
        name + "_shape": ([(2,)], _SIZES),
    }
    if _asymmetric(name, schemes, tensors):
        expected[name + "_zero_point"] = ([(-(-out // 8), groups) for _, groups in scales], ("I32",))
    return expected


def _asymmetric(name: str, schemes: list[Scheme], tensors: Tensors) -> bool:
    kinds = {s.symmetric for s in schemes}
    return name + "_zero_point" in tensors if len(kinds) == 2 else kinds == {False}


def _read_int4(source: Source, shape: tuple[int, int], tensors: Tensors, quantization: Quantization) -> quant.Weight:
    schemes, name, (out, width) = _schemes(source, quantization, PACKED), source.name, shape
    sizes = tuple(tensors.read(name + "_shape").ravel().tolist())
    if sizes != shape:
        raise ValueError(f"{name}_shape: found the value {list(sizes)}, need {list(shape)}")
    scale = tensors.read(name + "_scale").T
    codec.check_scale(name + "_scale", scale)
    words = np.ascontiguousarray(tensors.read(name + "_packed")).astype("<i4", copy=False)
    qvalue = codec.from_pairs(words.view(np.uint8)[:, : width // 2], len(scale))
    if not _asymmetric(name, schemes, tensors):
        return quant.weight("int4", qvalue, scale)
    # Codes and zero points are both stored plus 8, so that their difference is that of the nibbles.
    zeros = codec.words_to_nibbles(tensors.read(name + "_zero_point").T)[:, :out]
    return quant.weight("uint4", qvalue, scale, bias=gptq.bias_of(zeros, scale))


def _write_int4(weight: quant.Weight, name: str, quantization: Quantization | None = None) -> dict[str, np.ndarray]:
    width, out = quant.shape(weight)
    tensors = {
        name + "_packed": to_words(weight),
        name + "_scale": weight.scale[0].T,
        name + "_shape": np.array([out, width], np.int64),
    }
    if weight.form == "uint4":
        tensors[name + "_zero_point"] = codec.nibbles_to_words(_padded(gptq.zeros_of(name + "_scale", weight), 8)).T
    return tensors


def to_words(w: quant.Weight) -> np.ndarray:
    """The nibbles of a Weight [..., K, N] -> `weight_packed` int32 [..., N, ceil(K / 8)]."""
    return _padded(codec.to_pairs(np.asarray(w.qvalue)), 4).view("<i4").astype(np.int32, copy=False)


def _padded(a: np.ndarray, multiple: int) -> np.ndarray:
    """Zeros behind the last axis, up to a multiple, as the library fills its words."""
    return np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, -a.shape[-1] % multiple)])


def _expected_eight(source: Source, shape: tuple[int, int], tensors: Tensors, quantization: Quantization) -> Expected:
    schemes = _schemes(source, quantization, *_eight(source, tensors))
    dtypes = {INT: "I8", FLOAT: "F8_E4M3"}
    codes = tuple(dict.fromkeys(dtypes[s.format] for s in schemes))
    return {source.name: ([shape], codes), source.name + "_scale": (list(_scale_shapes(schemes, shape)), FLOATS)}


def _eight(source: Source, tensors: Tensors) -> tuple[str, ...]:
    dtype = tensors.entries[source.name].dtype
    return {"I8": (INT,), "F8_E4M3": (FLOAT,)}.get(dtype, (INT, FLOAT))


def _read_eight(source: Source, shape: tuple[int, int], tensors: Tensors, quantization: Quantization) -> quant.Weight:
    name = source.name
    codes, scale = tensors.read(name), tensors.read(name + "_scale")
    codec.check_scale(name + "_scale", scale)
    scheme = _scale_shapes(_schemes(source, quantization, *_eight(source, tensors)), shape)[scale.shape]
    if scheme.format == FLOAT:
        codec.check_fp8(name, codes)
    if scheme.block:
        scale = codec.read_block_scales(scale, scheme.block, shape)
    else:
        scale = scale.reshape(1, 1) if scheme.tensor else scale.T
    return quant.weight("fp8" if scheme.format == FLOAT else "int8", codes.T.reshape(len(scale), -1, shape[0]), scale)


def _write_eight(weight: quant.Weight, name: str, quantization: Quantization) -> dict[str, np.ndarray]:
    width, out = quant.shape(weight)
    kind = FLOAT if weight.form == "fp8" else INT
    scale, blocks = weight.scale[0], [s.block for s in quantization.schemes if s.format == kind and s.block]
    if scale.shape == (1, 1) and out > 1:
        scale = scale.reshape(1)
    elif blocks:
        scale = codec.write_block_scales(name, scale, blocks[0], (out, width))
    else:
        scale = scale.T
    return {name: weight.qvalue.reshape(width, out).T, name + "_scale": scale}


def _expected_fp4(source: Source, shape: tuple[int, int], tensors: Tensors, quantization: Quantization) -> Expected:
    name, (out, width) = source.name, shape
    fine = _is_nvfp4(source, tensors, quantization)
    group = 16 if fine else 32
    if width % group:
        raise ValueError(f"{name}: found {width} input features, need a multiple of {group}")
    expected = {
        name + "_packed": ([(out, width // 2)], ("U8",)),
        name + "_scale": ([(out, width // group)], ("F8_E4M3",) if fine else ("U8", "F8_E8M0")),
    }
    if fine:
        expected[name + "_global_scale"] = ([(1,)], ("F32",))
        activations = name.removesuffix("weight") + "input_global_scale"
        if activations in tensors:  # of activations in NVFP4, which this package does not have
            expected[activations] = ([(1,)], ("F32",))
    return expected


def _is_nvfp4(source: Source, tensors: Tensors, quantization: Quantization) -> bool:
    formats = {s.format for s in _schemes(source, quantization, NVFP4, MXFP4)}
    return source.name + "_global_scale" in tensors if len(formats) == 2 else formats == {NVFP4}


def _read_fp4(source: Source, shape: tuple[int, int], tensors: Tensors, quantization: Quantization) -> quant.Weight:
    name = source.name
    scale = codec.as_e8m0(tensors.read(name + "_scale")).T
    codec.check_scale(name + "_scale", scale)
    qvalue = codec.from_pairs(tensors.read(name + "_packed"), len(scale))
    if not _is_nvfp4(source, tensors, quantization):
        return quant.weight("fp4", qvalue, scale)
    divisor = tensors.read(name + "_global_scale").reshape(1, 1)
    with np.errstate(all="ignore"):
        factor = np.float32(1) / divisor  # a Weight's scales are multiplied
    # Both normal, as a device may take denormal numbers for 0.
    if not np.finfo(np.float32).tiny <= factor.item() <= 2.0**codec.LARGEST_EXPONENT or not divisor.item() < np.inf:
        raise ValueError(f"{name}_global_scale: found {divisor.item()}, need a finite number of at least 2^-{codec.LARGEST_EXPONENT}")
    return quant.weight("fp4", qvalue, scale, factor)


def _write_fp4(weight: quant.Weight, name: str, quantization: Quantization) -> dict[str, np.ndarray]:
    """Not byte for byte in one number: where two global scales have one f32 reciprocal, either may be written."""
    tensors = {name + "_packed": codec.to_pairs(weight.qvalue), name + "_scale": weight.scale[0].T}
    if len(weight.scale) == 2:
        tensors[name + "_global_scale"] = (np.float32(1) / weight.scale[1]).reshape(1)
    return tensors


INT4 = Codec(_expected_int4, _read_int4, _write_int4)
EIGHT = Codec(_expected_eight, _read_eight, _write_eight)
FP4 = Codec(_expected_fp4, _read_fp4, _write_fp4)

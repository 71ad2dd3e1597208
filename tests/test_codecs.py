"""Formats of low-precision weights: codes and scales are those of the file, and a file is written back as it was."""

import json

import ml_dtypes
import numpy as np
import pytest

from rl_adapter import quant
from rl_adapter.hub import codecs
from rl_adapter.hub.codecs import compressed_tensors
from rl_adapter.hub.codecs.codec import nibbles_to_words
from rl_adapter.hub.files import open_tensors, write_tensors

bf16, fp8, e8m0 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
NAME = "model.layers.0.mlp.up_proj.weight"
STEM = NAME.removesuffix("weight")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
rng = np.random.default_rng(0)


def nibbles(*shape):
    return rng.integers(0, 16, shape, np.uint8)


def scales(*shape, dtype=np.float16):
    return rng.uniform(0.01, 2, shape).astype(dtype)


def eight(*shape):
    """Any finite float8 codes, -0 and denormals among them."""
    return rng.choice(np.array([c for c in range(256) if c & 127 != 127], np.uint8), shape).view(fp8)


def pairs(codes):
    return codes[..., 0::2] | codes[..., 1::2] << 4


def ct(kind="pack-quantized", activations=None, **weights):
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups}


def open_files(directory, tensors):
    write_tensors(directory / "model.safetensors", tensors)
    return open_tensors(directory)


def read(directory, tensors, settings, shape, source=None):
    """Reads as the loader does: config, headers, weight."""
    source = source or codecs.Source(NAME)
    files = open_files(directory, tensors)
    quantization = codecs.read_quantization({"quantization_config": settings} if settings else {})
    codec = codecs.find(source, files, quantization)
    problems = codecs.problems(codec.expected(source, shape, files, quantization), files)
    if problems:
        raise ValueError("\n".join(problems))
    return codec.read(source, shape, files, quantization), lambda w, name=NAME: codec.write(w, name, quantization)


def same_bytes(written, tensors):
    assert set(written) == set(tensors)
    for name, value in tensors.items():
        assert written[name].dtype == value.dtype and written[name].shape == value.shape, name
        assert np.ascontiguousarray(written[name]).tobytes() == np.ascontiguousarray(value).tobytes(), name


def check(directory, tensors, settings, value, form, equal=True):
    """A matrix [out, in] of its own: the value that it means, and its way back to the file."""
    w, write = read(directory, tensors, settings, value.shape)
    assert w.form == form and quant.shape(w) == value.shape[::-1]
    found = np.asarray(quant.dequantize(w)).T
    np.testing.assert_allclose(found, value, rtol=0 if equal else 1e-6, atol=0 if equal else 1e-6)
    same_bytes(write(w), tensors)
    return w


# Each case: tensors, quantization_config, value [out, in], form, whether value is exact.


def pack_quantized(group=32, dtype=bf16, out=24, width=128, zeros=False):
    codes, s = nibbles(out, width), scales(out, width // (group or width), dtype=dtype)
    zero = nibbles(*s.shape) if zeros else np.full(s.shape, 8, np.uint8)
    wide = lambda a: np.repeat(a, group or width, 1)
    padded = np.pad(codes, [(0, 0), (0, -width % 8)])
    tensors = {NAME + "_packed": nibbles_to_words(padded), NAME + "_scale": s, NAME + "_shape": np.array([out, width])}
    if zeros:
        tensors[NAME + "_zero_point"] = nibbles_to_words(np.pad(zero, [(0, -out % 8), (0, 0)]).T).T
    how = {"strategy": "group", "group_size": group} if group else {"strategy": "channel", "group_size": None}
    value = wide(s.astype(np.float32)) * (codes.astype(np.float32) - wide(zero))
    return tensors, ct(symmetric=not zeros, **how), value, "uint4" if zeros else "int4", not zeros


def eight_bits(kind, strategy, out=20, width=96):
    codes = rng.integers(-128, 128, (out, width)).astype(np.int8) if kind == "int" else eight(out, width)
    how = {"num_bits": 8, "type": kind, "strategy": strategy, "group_size": 32 if strategy == "group" else None}
    if strategy == "block":
        how["block_structure"] = [8, 64]
        s = scales(3, 2, dtype=np.float32)
        wide = np.repeat(np.repeat(s, 8, 0), 64, 1)[:out, :width]
    else:
        s = scales(*{"tensor": (1,), "channel": (out, 1), "group": (out, 3)}[strategy], dtype=bf16)
        wide = np.broadcast_to(np.repeat(s, 32, 1) if strategy == "group" else s, codes.shape)
    value = codes.astype(np.float32) * wide.astype(np.float32)
    dynamic = {"dynamic": True, "num_bits": 8, "strategy": "token"}
    tensors = {NAME: codes, NAME + "_scale": s}
    return tensors, ct(f"{kind}-quantized", dynamic, **how), value, "int8" if kind == "int" else "fp8", True


def nvfp4(out=12, width=64):
    codes, s = nibbles(out, width), np.abs(eight(out, width // 16).astype(np.float32)).astype(fp8)
    divisor = np.float32([2688 / 1.7])
    value = E2M1[codes] * np.repeat(s.astype(np.float32) / divisor, 16, 1)
    tensors = {NAME + "_packed": pairs(codes), NAME + "_scale": s, NAME + "_global_scale": divisor}
    return tensors, ct("nvfp4-pack-quantized", type="float", strategy="tensor_group", group_size=16), value, "fp4", False


def mxfp4(out=12, width=64):
    codes, s = nibbles(out, width), rng.integers(100, 140, (out, width // 32), np.uint8)
    value = E2M1[codes] * np.repeat(np.exp2(s.astype(np.float32) - 127), 32, 1)
    return {NAME + "_packed": pairs(codes), NAME + "_scale": s}, ct("mxfp4-pack-quantized", type="float"), value, "fp4", True


def deepseek(out=300, width=200, block=(128, 128), dtype=np.float32):
    codes, s = eight(out, width), scales(-(-out // block[0]), -(-width // block[1]), dtype=np.float32).astype(dtype)
    codes[:128, :128], s[0, 0] = 0, s[0, 0] if dtype == e8m0 else 0
    value = np.empty((out, width), np.float32)
    for i in range(out):
        for j in range(width):
            value[i, j] = np.float32(codes[i, j]) * np.float32(s[i // block[0], j // block[1]])
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block), "activation_scheme": "dynamic"}
    return {NAME: codes, NAME + "_scale_inv": s}, settings, value, "fp8", True


def gptq(group=32, sym=True, ordered=False, version="gptq", out=16, width=64):
    groups = width // (group if group > 0 else width)
    q, s = nibbles(width, out), scales(groups, out)
    stored = np.full((groups, out), 7 if version == "gptq" else 8, np.uint8) if sym else nibbles(groups, out)
    index = np.repeat(np.arange(groups, dtype=np.int32), width // groups)
    index = rng.permutation(index) if ordered else index
    words, zeros = np.zeros((width // 8, out), np.uint32), np.zeros((groups, out // 8), np.uint32)
    for i in range(width):
        words[i // 8] |= q[i].astype(np.uint32) << np.uint32(4 * (i % 8))
    for i in range(out):
        zeros[:, i // 8] |= stored[:, i].astype(np.uint32) << np.uint32(4 * (i % 8))
    value = np.empty((out, width), np.float32)
    for i in range(width):
        zero = stored[index[i]].astype(np.float32) + (1 if version == "gptq" else 0)
        value[:, i] = np.float32(s[index[i]]) * (q[i].astype(np.float32) - zero)
    tensors = {STEM + "qweight": words.view(np.int32), STEM + "qzeros": zeros.view(np.int32), STEM + "scales": s, STEM + "g_idx": index}
    settings = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": sym, "desc_act": ordered, "checkpoint_format": version}
    return tensors, settings, value, "int4" if sym else "uint4", sym


def awq(out=24, width=64, group=32):
    q, zeros, s = nibbles(width, out), nibbles(width // group, out), scales(width // group, out)

    def words(a):
        packed = np.zeros((len(a), out // 8), np.uint32)
        for c in range(out // 8):
            for i, column in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
                packed[:, c] |= a[:, 8 * c + column].astype(np.uint32) << np.uint32(4 * i)
        return packed.view(np.int32)

    value = np.empty((out, width), np.float32)
    for i in range(width):
        value[:, i] = (q[i].astype(np.float32) - zeros[i // group]) * s[i // group].astype(np.float32)
    tensors = {STEM + "qweight": words(q), STEM + "qzeros": words(zeros), STEM + "scales": s}
    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return tensors, settings, value, "uint4", False


CASES = {
    "pack 32": lambda: pack_quantized(),
    "pack 128 f16": lambda: pack_quantized(128, np.float16),
    "pack channel f32": lambda: pack_quantized(0, np.float32),
    "pack odd shapes": lambda: pack_quantized(6, out=7, width=42),
    "pack padded words": lambda: pack_quantized(0, out=3, width=10),
    "pack asymmetric": lambda: pack_quantized(zeros=True),
    "pack asymmetric, odd": lambda: pack_quantized(6, zeros=True, out=7, width=42),
    **{f"int8 {s}": lambda s=s: eight_bits("int", s) for s in ("tensor", "channel", "group")},
    **{f"fp8 {s}": lambda s=s: eight_bits("float", s) for s in ("tensor", "channel", "group", "block")},
    "nvfp4": nvfp4,
    "mxfp4": mxfp4,
    "deepseek partial blocks": deepseek,
    "deepseek small": lambda: deepseek(24, 48, (16, 16)),
    "deepseek bf16": lambda: deepseek(24, 40, (16, 16), bf16),
    "deepseek e8m0": lambda: deepseek(24, 40, (16, 16), e8m0),
    "gptq": gptq,
    "gptq v2": lambda: gptq(version="gptq_v2"),
    "gptq channel": lambda: gptq(-1),
    "gptq act-order": lambda: gptq(ordered=True),
    "gptq asymmetric": lambda: gptq(sym=False),
    "gptq asymmetric act-order v2": lambda: gptq(sym=False, ordered=True, version="gptq_v2"),
    "awq": awq,
}


@pytest.mark.parametrize("case", CASES)
def test_value_and_bytes(case, tmp_path):
    check(tmp_path, *CASES[case]())


def test_layout_is_that_of_quant(tmp_path):
    tensors, settings, *_ = pack_quantized(32, out=8, width=64)
    w, _ = read(tmp_path, tensors, settings, (8, 64))
    for n in range(8):
        for k in range(64):
            word = int(tensors[NAME + "_packed"][n, k // 8]) >> 4 * (k % 8) & 15
            byte = int(w.qvalue[k // 32, k % 16, n])
            assert (byte >> 4 if k % 32 >= 16 else byte & 15) == word
    assert np.array_equal(w.scale[0], tensors[NAME + "_scale"].T) and w.scale[0].dtype == bf16


def test_scales_keep_their_dtypes(tmp_path):
    for case, dtypes in {"nvfp4": [fp8, np.float32], "mxfp4": [np.uint8], "awq": [np.float16], "deepseek e8m0": [np.uint8]}.items():
        tensors, settings, value, *_ = CASES[case]()
        w, _ = read(tmp_path, tensors, settings, value.shape)
        assert [s.dtype for s in w.scale] == dtypes, case


def test_global_scale_of_nvfp4_comes_back_but_for_its_last_bit(tmp_path):
    tensors, settings, value, *_ = nvfp4(2, 16)
    for divisor in rng.uniform(1, 2, 40).astype(np.float32):
        tensors[NAME + "_global_scale"] = divisor.reshape(1)
        w, write = read(tmp_path, tensors, settings, value.shape)
        assert w.scale[1] == 1 / divisor
        (back,) = write(w)[NAME + "_global_scale"]
        assert abs(back - divisor) <= np.spacing(divisor) and np.float32(1) / back == w.scale[1]


def test_zero_blocks_of_fp8_are_zeros(tmp_path):
    tensors, settings, value, *_ = deepseek()
    w, _ = read(tmp_path, tensors, settings, value.shape)
    assert w.qvalue.shape == (25, 8, 300)  # 8 features: the widest groups that edges of blocks at 128 and 200 do not cut
    assert (np.asarray(quant.dequantize(w))[:128, :128] == 0).all()


@pytest.mark.parametrize("fused", ["float", "fp8", "mxfp4"])
def test_gate_and_up_of_fused_experts(fused, tmp_path):
    experts, f, width, name = 3, 16, 64, "model.layers.0.mlp.experts.gate_up_proj"
    if fused == "float":  # as gpt-oss in BF16: [E, in, 2 out]
        stored = rng.normal(size=(experts, width, 2 * f)).astype(bf16)
        tensors, settings, value = {name: stored}, None, stored.swapaxes(1, 2).astype(np.float32)
    elif fused == "fp8":
        codes, s = eight(experts, 2 * f, width), scales(experts, 4, 3, dtype=np.float32)
        settings = {"quant_method": "fp8", "weight_block_size": [10, 24]}
        value = codes.astype(np.float32) * np.repeat(np.repeat(s, 10, 1), 24, 2)[:, : 2 * f, :width]
        tensors = {name: codes, name + "_scale_inv": s}
    else:
        codes, s = nibbles(experts, 2 * f, width), rng.integers(100, 140, (experts, 2 * f, width // 32), np.uint8)
        value = E2M1[codes] * np.repeat(np.exp2(s.astype(np.float32) - 127), 32, 2)
        settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
        tensors = {name + "_blocks": pairs(codes).reshape(experts, 2 * f, -1, 16), name + "_scales": s}
    back = {n: np.zeros_like(t) for n, t in tensors.items()}
    for e in range(experts):
        for part in range(2):
            rows = slice(part * f, (part + 1) * f) if fused == "fp8" else slice(part, None, 2)
            if fused == "fp8":
                source = codecs.Source(name, (e, rows), (experts, 2 * f, width))
            else:
                source = codecs.Source(name, (e, slice(None), rows), (experts, width, 2 * f), transposed=True)
            w, write = read(tmp_path, tensors, settings, (f, width), source)
            found = np.asarray(w, np.float32) if fused == "float" else np.asarray(quant.dequantize(w)).T
            assert np.array_equal(found, value[e, rows])
            if fused == "mxfp4":
                for n, t in write(w, name).items():
                    back[n][e, rows] = t
    if fused == "mxfp4":
        same_bytes(back, tensors)
    with pytest.raises(ValueError, match=r"found shape \[3, .*need \[4, "):
        wrong = (4, 2 * f, width) if fused == "fp8" else (4, width, 2 * f)
        read(tmp_path, tensors, settings, (f, width), codecs.Source(name, source.index, wrong, source.transposed))


def test_floats_are_left_to_the_caller(tmp_path):
    value = rng.normal(size=(4, 6)).astype(bf16)
    found, write = read(tmp_path, {NAME: value}, None, (4, 6))
    assert found.dtype == bf16 and np.array_equal(found, value)
    same_bytes(write(found), {NAME: value})


HOSTILE = {
    # case: (change of the tensors, message)
    ("pack 32", "words of floats"): ({NAME + "_packed": np.zeros((24, 16), np.float32)}, r"_packed: found F32, need I32"),
    ("pack 32", "too wide"): ({NAME + "_packed": np.zeros((24, 17), np.int32)}, r"_packed: found shape \[24, 17\], need \[24, 16\]"),
    ("pack 32", "scale missing"): ({NAME + "_scale": None}, "_scale: missing"),
    ("pack 32", "another group"): ({NAME + "_scale": scales(24, 8)}, r"_scale: found shape \[24, 8\], need \[24, 4\]"),
    ("pack 32", "NaN"): ({NAME + "_scale": np.full((24, 4), np.nan, np.float32)}, "_scale: found NaN"),
    ("pack 32", "negative"): ({NAME + "_scale": np.full((24, 4), -1, np.float16)}, "negative"),
    ("pack 32", "another shape"): ({NAME + "_shape": np.array([24, 127])}, r"_shape: found the value \[24, 127\], need \[24, 128\]"),
    ("pack asymmetric", "no zeros"): ({NAME + "_zero_point": None}, "_zero_point: missing"),
    ("fp8 channel", "NaN code"): ({NAME: np.full((20, 96), 0x7F, np.uint8).view(fp8)}, "holds NaN"),
    ("fp8 channel", "int8 codes"): ({NAME: np.zeros((20, 96), np.int8)}, "describes no weights in int-quantized"),
    ("nvfp4", "negative"): ({NAME + "_scale": np.full((12, 4), -1).astype(fp8)}, "negative"),
    ("nvfp4", "NaN scale"): ({NAME + "_scale": np.full((12, 4), 0x7F, np.uint8).view(fp8)}, "NaN"),
    **{("nvfp4", f"global {v}"): ({NAME + "_global_scale": np.float32([v])}, "_global_scale") for v in (0, -1, np.nan, np.inf, 1e-45)},
    ("nvfp4", "global of two"): ({NAME + "_global_scale": np.float32([1, 1])}, r"_global_scale: found shape \[2\]"),
    ("mxfp4", "NaN"): ({NAME + "_scale": np.full((12, 2), 255, np.uint8)}, "255"),
    ("deepseek small", "NaN code"): ({NAME: np.full((24, 48), 0xFF, np.uint8).view(fp8)}, "holds NaN"),
    ("deepseek small", "no scale"): ({NAME + "_scale_inv": None}, "_scale_inv: missing"),
    ("deepseek small", "shape"): ({NAME + "_scale_inv": scales(2, 2, dtype=np.float32)}, r"found shape \[2, 2\], need \[2, 3\]"),
    ("deepseek small", "Inf"): ({NAME + "_scale_inv": np.full((2, 3), np.inf, np.float32)}, "Inf"),
    ("gptq", "range"): ({STEM + "g_idx": np.full(64, 2, np.int32)}, "g_idx: found groups from 2 to 2, need 0 to 1"),
    ("gptq", "below 0"): ({STEM + "g_idx": np.full(64, -1, np.int32)}, "need 0 to 1"),
    ("gptq", "out of order"): ({STEM + "g_idx": np.tile(np.int32([0, 1]), 32)}, "desc_act is false"),
    ("gptq", "zeros"): ({STEM + "qzeros": np.zeros((2, 2), np.int32)}, "sym is true"),
    ("gptq act-order", "unequal"): ({STEM + "g_idx": np.zeros(64, np.int32)}, "unequal"),
    ("gptq act-order", "no g_idx"): ({STEM + "g_idx": None}, "g_idx: missing"),
    ("gptq", "negative"): ({STEM + "scales": np.full((2, 16), -1, np.float16)}, "negative"),
    ("awq", "shape"): ({STEM + "qweight": np.zeros((8, 24), np.int32)}, r"found shape \[8, 24\], need \[64, 3\]"),
    ("awq", "Inf"): ({STEM + "scales": np.full((2, 24), np.inf, np.float16)}, "Inf"),
}


@pytest.mark.parametrize("case, what", HOSTILE, ids=map(", ".join, HOSTILE))
def test_hostile_tensors(case, what, tmp_path):
    tensors, settings, value, *_ = CASES[case]()
    change, message = HOSTILE[case, what]
    tensors = {name: t for name, t in (tensors | change).items() if t is not None}
    with pytest.raises(ValueError, match=message):
        read(tmp_path, tensors, settings, value.shape)


def test_shapes_that_a_format_cannot_hold(tmp_path):
    for case, shape in {"pack 32": (24, 127), "mxfp4": (12, 48), "nvfp4": (12, 24), "gptq": (16, 72), "awq": (20, 64)}.items():
        tensors, settings, *_ = CASES[case]()
        with pytest.raises(ValueError, match="input features|even number"):
            read(tmp_path, tensors, settings, shape)


def test_tensors_of_another_method(tmp_path):
    for case in ("pack 32", "int8 channel", "fp8 channel", "nvfp4", "deepseek small", "gptq"):
        tensors, *_, value, _, _ = CASES[case]()
        for settings in (None, {"quant_method": "mxfp4"}):
            with pytest.raises(ValueError, match="quantization_config names"):
                read(tmp_path, tensors, settings, value.shape)


def test_config_of_a_text_model():
    inner = {"text_config": {"quantization_config": ct()}}
    assert codecs.read_quantization(inner) == codecs.read_quantization({"quantization_config": ct()})
    assert codecs.read_quantization({"text_config": {}}) is None
    with pytest.raises(ValueError, match="another one in text_config"):
        codecs.read_quantization(inner | {"quantization_config": {"quant_method": "mxfp4"}})


def test_what_save_describes_is_read():
    described = codecs.read_quantization({"quantization_config": compressed_tensors.describe(32, ["lm_head"])})
    assert described.schemes == (codecs.Scheme("pack-quantized", 32),)


STATIC = {"dynamic": False, "num_bits": 8}
AWQ, GPTQ = ({"quant_method": m, "bits": 4, "group_size": 128} for m in ("awq", "gptq"))
REFUSED = [
    ("quantization_config", "int4"),
    ("quant_method", {"quant_method": "bitsandbytes"}),
    ("quant_method", {"quant_method": ["fp8"]}),
    ("config_groups", ct() | {"config_groups": {}}),
    ("group_0", ct() | {"config_groups": {"group_0": 1}}),
    ("format", ct("marlin-24")),
    ("kv_cache_scheme", ct() | {"kv_cache_scheme": {"num_bits": 8}}),
    ("sparsity_config", ct() | {"sparsity_config": {"format": "sparse-24-bitmask"}}),
    ("transform_config", ct() | {"transform_config": {"config_groups": {"u": {}}}}),
    ("input_activations", ct(activations=STATIC)),
    ("num_bits", ct(num_bits=8)),
    ("type", ct(type="float")),
    ("strategy", ct(strategy="block")),
    ("actorder", ct(actorder="group")),
    ("group_size", ct(group_size=33)),
    ("group_size", ct(group_size=2.0)),
    ("group_size", ct("mxfp4-pack-quantized", type="float", group_size=16)),
    ("symmetric", ct("int-quantized", num_bits=8, strategy="channel", group_size=None, symmetric=False)),
    ("block_structure", ct("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[0, 128])),
    ("weight_block_size", {"quant_method": "fp8", "weight_block_size": None}),
    ("weight_block_size", {"quant_method": "fp8", "weight_block_size": [128, -1]}),
    ("activation_scheme", {"quant_method": "fp8", "activation_scheme": "static"}),
    ("fmt", {"quant_method": "fp8", "fmt": "e5m2"}),
    ("bits", GPTQ | {"bits": 3}),
    ("checkpoint_format", GPTQ | {"checkpoint_format": "marlin"}),
    ("dynamic", GPTQ | {"dynamic": {"+:.*down": {"bits": 8}}}),
    ("group_size", GPTQ | {"group_size": 0}),
    ("version", AWQ | {"version": "gemv"}),
    ("zero_point", AWQ | {"zero_point": False}),
    ("backend", AWQ | {"backend": "llm-awq"}),
]


@pytest.mark.parametrize("field, settings", REFUSED)
def test_refused_config(field, settings):
    with pytest.raises(ValueError, match=field):
        codecs.read_quantization({"quantization_config": settings})


def test_all_problems_in_one_error():
    settings = ct(num_bits=3, activations=STATIC) | {"kv_cache_scheme": {"num_bits": 8}}
    with pytest.raises(ValueError, match=r"(?s)kv_cache_scheme.*input_activations.*num_bits"):
        codecs.read_quantization({"quantization_config": settings})


# Files of safetensors.


def test_eight_bit_floats_are_read(tmp_path):
    tensors = {"a": eight(6, 4), "b": np.arange(8, dtype=np.uint8).view(e8m0), "c": nibbles(3, 3), "d": np.zeros((0, 4), bf16)}
    files = open_files(tmp_path, tensors)
    same_bytes({name: files.read(name) for name in tensors}, tensors)
    assert np.array_equal(files.read("a", (slice(1, None, 2), 3)).view(np.uint8), tensors["a"][1::2, 3].view(np.uint8))
    with pytest.raises(ValueError, match="cannot read a"):
        files.read("a", (6,))


def test_dtype_that_no_matrix_has(tmp_path):
    header = json.dumps({"a": {"dtype": "F8_E5M2", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ValueError, match="cannot read a: found F8_E5M2"):
        open_tensors(tmp_path).read("a")


def test_a_whole_file_is_needed(tmp_path):
    open_files(tmp_path, {"a": nibbles(64)})
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="need a whole safetensors file"):
        open_tensors(tmp_path)

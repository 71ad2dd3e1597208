"""Formats against the libraries that define them: compressed-tensors, and the MXFP4 and FP8 code of transformers."""

import importlib.util

import ml_dtypes
import numpy as np
import pytest
from test_codecs import NAME, ct, deepseek, nibbles, pairs, read, rng, same_bytes

from rl_adapter import quant
from rl_adapter.hub import codecs

_NEEDS = [name for name in ("torch", "transformers", "compressed_tensors") if importlib.util.find_spec(name) is None]
if _NEEDS:
    pytest.skip(f"needs {', '.join(_NEEDS)}", allow_module_level=True)
import torch  # noqa: E402
from compressed_tensors.compressors.base import BaseCompressor  # noqa: E402
from compressed_tensors.quantization import QuantizationScheme  # noqa: E402

OUT, WIDTH = 24, 128


def to_numpy(t):
    names = {torch.bfloat16: ml_dtypes.bfloat16, torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn}
    return t.contiguous().view(torch.uint8).numpy().view(names[t.dtype]).reshape(t.shape) if t.dtype in names else t.numpy()


def group(symmetric=True, size=32, bits=4, kind="int"):
    return {"num_bits": bits, "type": kind, "strategy": "group", "group_size": size, "symmetric": symmetric}


FORMATS = {
    "pack-quantized": ("pack-quantized", group()),
    "pack-quantized 128": ("pack-quantized", group(size=128)),
    "pack-quantized asymmetric": ("pack-quantized", group(symmetric=False)),
    "pack-quantized channel": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": True}),
    "int-quantized channel": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "int-quantized tensor": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "tensor"}),
    "int-quantized group": ("int-quantized", group(bits=8)),
    "float-quantized channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "float-quantized tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "float-quantized block": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 48]}),
    "nvfp4-pack-quantized": ("nvfp4-pack-quantized", {**group(size=16, kind="float"), "strategy": "tensor_group"}),
    "mxfp4-pack-quantized": ("mxfp4-pack-quantized", group(kind="float")),
}


@pytest.mark.parametrize("name", FORMATS)
def test_compressed_tensors(name, tmp_path):
    kind, weights = FORMATS[name]
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    w = torch.tensor(rng.normal(size=(OUT, WIDTH)).astype(np.float32))
    lead = {"tensor": (1,), "channel": (OUT, 1), "block": (2, 3)}.get(weights["strategy"])
    lead = lead or (OUT, WIDTH // weights["group_size"])
    state = {"weight": w, "weight_scale": torch.tensor(rng.uniform(0.2, 0.5, lead).astype(np.float32))}
    if weights.get("symmetric") is False:
        state["weight_zero_point"] = torch.tensor(rng.integers(-8, 8, lead).astype(np.int8))
    if kind == "nvfp4-pack-quantized":
        state["weight_global_scale"] = torch.tensor([37.3])
        state["weight_scale"] = (state["weight_scale"] * 37.3).to(torch.float8_e4m3fn).float()
    if kind == "mxfp4-pack-quantized":
        state["weight_scale"] = torch.exp2(torch.tensor(rng.integers(-4, 2, lead).astype(np.float32)))
    compressor = BaseCompressor.get_value_from_registry(kind)
    stored = compressor.compress(state, scheme)
    value = compressor.decompress(stored, scheme)["weight"]
    tensors = {NAME.removesuffix("weight") + n: to_numpy(t) for n, t in stored.items()}
    found, write = read(tmp_path, tensors, ct(kind, **{"group_size": None, **weights}), (OUT, WIDTH))
    ours = np.asarray(quant.dequantize(found)).T
    if value.dtype == torch.bfloat16:  # the library's FP4 is rounded once more
        np.testing.assert_allclose(ours, value.float().numpy(), rtol=2**-8)
    elif weights.get("symmetric") is False:  # (code - zero) * scale, against code * scale - zero * scale
        np.testing.assert_allclose(ours, value.numpy(), rtol=0, atol=1e-6)
    else:
        assert np.array_equal(ours, value.numpy())
    same_bytes(write(found), tensors)


def test_mxfp4_of_transformers(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    experts, out, width, name = 2, 8, 96, "model.layers.0.mlp.experts.down_proj"
    blocks = pairs(nibbles(experts, out, width)).reshape(experts, out, width // 32, 16)
    scale = rng.integers(90, 150, (experts, out, width // 32), np.uint8)
    need = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scale), dtype=torch.float32).numpy()
    for e in range(experts):
        source = codecs.Source(name, (e,), (experts, out, width))
        found, _ = read(tmp_path, {name + "_blocks": blocks, name + "_scales": scale}, {"quant_method": "mxfp4"}, (out, width), source)
        assert np.array_equal(np.asarray(quant.dequantize(found)), need[e])  # [in, out], as transformers has it


def test_fp8_of_transformers(tmp_path):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    tensors, settings, *_ = deepseek(48, 80, (16, 40))
    codes = torch.tensor(tensors[NAME].view(np.uint8)).view(torch.float8_e4m3fn)
    need = Fp8Dequantize(None)._dequantize_one(codes, torch.tensor(tensors[NAME + "_scale_inv"]), torch.float32)
    found, _ = read(tmp_path, tensors, settings, (48, 80))
    assert np.array_equal(np.asarray(quant.dequantize(found)).T, need.numpy())

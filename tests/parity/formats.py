"""Writers of low-precision checkpoints: a weight [out, in] f32 -> the tensors that stand for it on disk, and the weight that they mean.

Where a library defines a format its own code writes it (compressed-tensors here, `gguf` in gguf_file.py). The others are written
naively from their definition, one loop or reshape a step, and share nothing with the package: they are what its readers are tested against.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

Tensors = dict[str, torch.Tensor]
Writer = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]  # (name of the module, weight) -> (tensors, meaning)
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclasses.dataclass(frozen=True)
class Format:
    """How the weights whose module names match `targets` are stored."""

    write: Writer
    config: dict[str, Any]  # quantization_config of config.json
    targets: str = r"\.(q|k|v|o|gate|up|down|w1|w2|w3|q_a|q_b|kv_b|kv_a)(_proj|_proj_with_mqa)?$"  # no router, no head


def compressed(
    kind: str, divisor: float = 0.0, targets: str = Format.targets, ignore: tuple[str, ...] = ("lm_head",), dynamic: bool = False, **weights
) -> Format:
    """A format of compressed-tensors. With a `divisor` INT4 scales are bf16(amax / divisor), else they are the library's own.

    `dynamic` says in the config that activations are quantized too, as files of W8A8 models do. The meaning has products in f32:
    the library's own decompression rounds each to the dtype of the scale.
    """
    args = QuantizationArgs(**weights)
    inputs = QuantizationArgs(num_bits=args.num_bits, type=args.type, strategy="token", dynamic=True) if dynamic else None
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=inputs)
    codec = BaseCompressor.get_value_from_registry(kind)

    def write(name: str, w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        parts = {"tensor": 1, "channel": w.shape[0]}.get(args.strategy, w.numel() // (args.group_size or 1))
        blocks = w.reshape(parts, -1)
        shape = {"tensor": (1,), "channel": (-1, 1)}.get(args.strategy, (w.shape[0], -1))
        low, high = blocks.amin(1).reshape(shape), blocks.amax(1).reshape(shape)
        state = {"weight": w}
        if args.strategy == "tensor_group":
            state["weight_global_scale"] = generate_gparam(w.min(), w.max()).float()
        scale, _ = calculate_qparams(low, high, args, state.get("weight_global_scale"))
        if divisor:
            scale = torch.maximum(-low, high) / divisor
        # What a library keeps in fp8 or e8m0 it rounds itself; plain scales lie on disk in bf16.
        state["weight_scale"] = scale.float() if args.scale_dtype else scale.to(torch.bfloat16).float()
        tensors = codec.compress(state, scheme)
        if args.num_bits == 4 and args.type == "float":  # as codec.decompress does it, but not in bf16
            codes = unpack_fp4_from_uint8(tensors["weight_packed"], *w.shape, dtype=torch.float32)
            scale = codec._decompress_scale(tensors["weight_scale"], torch.float32)
            meaning = dequantize(codes, scale, args=args, global_scale=tensors.get("weight_global_scale"), dtype=torch.float32)
        else:
            meaning = codec.decompress(tensors, scheme)["weight"]
            tensors["weight_scale"] = tensors["weight_scale"].to(torch.bfloat16)
        return {f"{name}.{part}": value for part, value in tensors.items()}, meaning

    config = QuantizationConfig(config_groups={"group_0": scheme}, format=kind, ignore=list(ignore), quantization_status="compressed")
    return Format(write, config.model_dump(mode="json") | {"quant_method": "compressed-tensors"}, targets)


def int4(group: int, divisor: float, **options) -> Format:
    """pack-quantized INT4: divisor 7 is the grid of quantization-aware training, 7.5 that of plain rounding."""
    return compressed("pack-quantized", divisor, num_bits=4, type="int", symmetric=True, strategy="group", group_size=group, **options)


def fp8_blocks(rows: int, columns: int) -> Format:
    """DeepSeek's FP8: one f32 scale a block, which multiplies although it is called scale_inv; blocks at the edges are partial."""

    def write(name: str, w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, meaning = torch.zeros(w.shape, dtype=torch.float8_e4m3fn), torch.zeros_like(w)
        scale = torch.zeros(-(-w.shape[0] // rows), -(-w.shape[1] // columns))
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                block = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
                scale[i, j] = w[block].abs().max() / 448
                codes[block] = (w[block] / scale[i, j]).to(torch.float8_e4m3fn)
                meaning[block] = codes[block].float() * scale[i, j]
        return {f"{name}.weight": codes, f"{name}.weight_scale_inv": scale}, meaning

    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [rows, columns], "activation_scheme": "dynamic"}
    return Format(write, config)


def mxfp4(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[..., out, in] -> blocks uint8 [..., out, in/32, 16], scales uint8 [..., out, in/32], meaning [..., out, in]."""
    blocks = w.reshape(*w.shape[:-1], -1, 32)
    exponent = torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True))) - 2  # so that the largest lies in 4..8, clipped to 6
    codes = (blocks[..., None] / 2 ** exponent[..., None] - FP4).abs().argmin(-1).to(torch.uint8)
    meaning = (FP4[codes.long()] * 2**exponent).reshape(w.shape)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), (exponent[..., 0] + 127).to(torch.uint8), meaning


def gpt_oss() -> Format:
    """MXFP4 of gpt-oss: the experts of a layer are one tensor, in memory [E, in, out] and on disk [E, out, in]."""

    def write(name: str, w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        blocks, scales, meaning = mxfp4(w.mT)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}, meaning.mT.contiguous()

    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return Format(write, {"quant_method": "mxfp4", "modules_to_not_convert": skipped}, r"\.experts\.(gate_up|down)_proj$")


def _asymmetric(w: torch.Tensor, group: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes 0..15 [in, out], zeros 1..15 and f16 scales [groups, out] of w [out, in], whose input i is in group[i]."""
    codes, zeros, scales = [torch.zeros(w.T.shape)], [], []
    for g in range(int(group.max()) + 1):
        part = w.T[group == g]
        low, high = part.amin(0).clamp(max=0), part.amax(0).clamp(min=0)
        scale = ((high - low) / 15).to(torch.float16).float()
        zero = torch.round(-low / scale).clamp(1, 15)  # v1 cannot store a zero of 0
        codes[0][group == g] = (torch.round(part / scale) + zero).clamp(0, 15)
        zeros.append(zero)
        scales.append(scale)
    return codes[0].int(), torch.stack(zeros).int(), torch.stack(scales)


def _pack(codes: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """[..., n] codes 0..15 -> int32 [..., n/8]; nibble i of a word holds its code order[i]."""
    words = codes.reshape(*codes.shape[:-1], -1, 8).long()
    return sum(words[..., code] << (4 * i) for i, code in enumerate(order)).to(torch.int32)  # wraps beyond 2^31: the same bits


def gptq(group_size: int, version: int = 1, act_order: bool = False) -> Format:
    """GPTQ: words run along the input; zeros along the output, minus one in version 1. With act_order groups are of arbitrary inputs."""

    def write(name: str, w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        group = torch.arange(w.shape[1]) // group_size
        if act_order:
            group = group[torch.randperm(len(group), generator=torch.Generator().manual_seed(len(name) + w.shape[0]))]
        codes, zeros, scales = _asymmetric(w, group)
        tensors = {
            "qweight": _pack(codes.T).T.contiguous(),
            "qzeros": _pack(zeros - int(version == 1)),
            "scales": scales.to(torch.float16),
            "g_idx": group.to(torch.int32),
        }
        return {f"{name}.{part}": value for part, value in tensors.items()}, (scales[group] * (codes - zeros[group])).T.contiguous()

    config = {"quant_method": "gptq", "bits": 4, "group_size": group_size, "desc_act": act_order, "sym": False}
    return Format(write, config | {"checkpoint_format": "gptq" if version == 1 else "gptq_v2"})


def awq(group_size: int) -> Format:
    """AWQ (gemm): words run along the output, in an order of its own."""

    def write(name: str, w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        group = torch.arange(w.shape[1]) // group_size
        codes, zeros, scales = _asymmetric(w, group)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {"qweight": _pack(codes, order), "qzeros": _pack(zeros, order), "scales": scales.to(torch.float16)}
        return {f"{name}.{part}": value for part, value in tensors.items()}, (scales[group] * (codes - zeros[group])).T.contiguous()

    return Format(write, {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm", "zero_point": True})

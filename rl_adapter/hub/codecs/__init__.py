"""Low-precision weights as files hold them, to and from `quant.Weight`: codes and scales as they are, never through floats.

One module a family of formats. `find` tells which codec holds a matrix by the tensors that are there.
"""

from typing import Any

from rl_adapter.hub.codecs import compressed_tensors, floats, fp8, ggml, gptq, mxfp4
from rl_adapter.hub.codecs.codec import Codec, Expected, Quantization, Scheme, Source, problems
from rl_adapter.hub.files import Tensors

__all__ = ["Codec", "Expected", "Quantization", "Scheme", "Source", "find", "problems", "read_quantization"]

_METHODS = {  # quant_method -> what reads its settings
    "compressed-tensors": compressed_tensors.read_config,
    "fp8": fp8.read_config,
    "mxfp4": mxfp4.read_config,
    "gptq": gptq.read_gptq_config,
    "awq": gptq.read_awq_config,
}


def read_quantization(config: dict[str, Any]) -> Quantization | None:
    """`quantization_config` of a config.json, at its top or in `text_config`; None if there is none.

    Raises:
        ValueError: every field that changes what weights mean, or asks for quantized activations with static scales, and is not
            implemented.
    """
    inner = config.get("text_config")
    places = {"": config, "text_config.": inner if isinstance(inner, dict) else {}}
    found = [(p + "quantization_config", c["quantization_config"]) for p, c in places.items() if c.get("quantization_config") is not None]
    if not found:
        return None
    (where, settings), *others = found
    if any(other != settings for _, other in others):
        raise ValueError("config.json: quantization_config: found another one in text_config, need one")
    if not isinstance(settings, dict):
        raise ValueError(f"config.json: {where}: found {settings!r}, need an object")
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise ValueError(f"config.json: {where}.quant_method: found {method!r}, need {' or '.join(map(repr, _METHODS))}")
    schemes, wrong = _METHODS[method](settings)
    if wrong:
        raise ValueError("config.json:\n  " + "\n  ".join(wrong))
    return Quantization(method, tuple(dict.fromkeys(schemes)))


def find(source: Source, tensors: Tensors, quantization: Quantization | None) -> Codec:
    """The codec of the tensors that hold a matrix; that of plain floats where there is none at all.

    Raises:
        ValueError: the tensors are those of a method that `quantization_config` does not name.
    """
    name, method = source.name, quantization and quantization.method
    entry = tensors.entries.get(name)
    if name + "_packed" in tensors:
        eight = tensors.entries[name + "_packed"].dtype == "U8"
        need, found = "compressed-tensors", compressed_tensors.FP4 if eight else compressed_tensors.INT4
    elif name + "_blocks" in tensors:
        need, found = "mxfp4", mxfp4.EXPERTS
    elif name.removesuffix("weight") + "qweight" in tensors:
        need, found = ("awq", gptq.AWQ) if method == "awq" else ("gptq", gptq.GPTQ)
    elif entry and entry.dtype in ggml.BLOCK_BYTES:
        return ggml.BLOCKS
    elif entry and entry.dtype in ("F8_E4M3", "I8"):
        blocks = method == "fp8" or (method is None and name + "_scale_inv" in tensors)
        need, found = ("fp8", fp8.BLOCKS) if blocks else ("compressed-tensors", compressed_tensors.EIGHT)
    else:
        return floats.FLOAT
    if method != need:
        raise ValueError(f"{name}: found tensors of the method {need!r}, but quantization_config names {method!r}")
    return found

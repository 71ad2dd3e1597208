"""INT4 weights as compressed-tensors writes them (`pack-quantized`), to and from the layout of quant.py, bit for bit.

On disk a weight [out, in] is `weight_packed` int32 [out, in/8] (element 8m + j is bits 4j.. of word m, minus 8) with
`weight_scale` [out, in/g] and `weight_shape` (out, in). In a `QTensor` [G, g/2, out], a byte holds features j and j + g/2
of a group. Both keep a code offset by 8, so that nothing but the order of nibbles changes.
"""

from typing import Any

import numpy as np

from rl_adapter.types import PyTree

# Fields of quantization_config: what an absent one means, and the values that are implemented.
_TOP = {
    "quant_method": (None, ("compressed-tensors",)),
    "format": (None, ("pack-quantized",)),
    "kv_cache_scheme": (None, (None, {})),
    "sparsity_config": (None, (None, {})),
    "transform_config": (None, (None, {})),
    "moe_sparsity_config": (None, (None, {})),
}
_GROUP = {
    "format": (None, (None, "pack-quantized")),
    "input_activations": (None, (None,)),
    "output_activations": (None, (None,)),
}
_WEIGHTS = {
    "num_bits": (8, (4,)),
    "type": ("int", ("int",)),
    "symmetric": (True, (True,)),
    "strategy": (None, ("group", "channel")),
    "actorder": (None, (None, False)),
    "dynamic": (False, (False,)),
    "block_structure": (None, (None,)),
}


def group_sizes(config: dict[str, Any]) -> set[int]:
    """The group sizes that `quantization_config` declares (0: one scale a channel); none if the model is not quantized.

    Which weights are packed is read from the names of the tensors, not from `targets` and `ignore`: those are regular
    expressions over the modules of one implementation, and a tensor says what it is.

    Raises:
        ValueError: names every field that asks for another format than symmetric INT4.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return set()
    where = "quantization_config"
    if not isinstance(quantization, dict):
        raise ValueError(f"{where}: found {quantization!r}, need an object")
    problems = _unsupported(where, quantization, _TOP)
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        problems.append(f"{where}.config_groups: found {groups!r}, need an object with at least one group")
        groups = {}
    sizes = set()
    for name, group in groups.items():
        at = f"{where}.config_groups.{name}"
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            problems.append(f"{at}: found {group!r}, need an object with `weights`")
            continue
        problems += _unsupported(at, group, _GROUP) + _unsupported(f"{at}.weights", weights, _WEIGHTS)
        size = weights.get("group_size")
        if weights.get("strategy") == "channel":
            sizes.add(0)
        elif type(size) is not int or size < 2 or size % 2:
            problems.append(f"{at}.weights.group_size: found {size!r}, need an even number of at least 2")
        else:
            sizes.add(size)
    if problems:
        raise ValueError("config.json:\n  " + "\n  ".join(problems))
    return sizes


def _unsupported(where: str, found: dict[str, Any], fields: dict[str, tuple[Any, tuple]]) -> list[str]:
    values = {name: found.get(name, default) for name, (default, _) in fields.items()}
    return [
        f"{where}.{name}: found {value!r}, need {' or '.join(map(repr, fields[name][1]))}"
        for name, value in values.items()
        if not any(type(value) is type(v) and value == v for v in fields[name][1])
    ]


def describe(group: int, ignore: list[str]) -> dict[str, Any]:
    """The `quantization_config` of a model whose linears, but for `ignore`, are INT4 in groups of `group`."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group, "dynamic": False}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def from_words(words: np.ndarray, groups: int) -> np.ndarray:
    """`weight_packed` [N, K/8] -> `qvalue` uint8 [G, g/2, N]."""
    pairs = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    nibbles = np.stack([pairs & 15, pairs >> 4], -1).reshape(len(words), groups, 2, -1)
    return (nibbles[:, :, 0] | nibbles[:, :, 1] << 4).transpose(1, 2, 0)


def to_words(w: PyTree) -> np.ndarray:
    """The INT4 `QTensor` of a weight [..., K, N] -> `weight_packed` [..., N, K/8]: the inverse of `from_words`."""
    qvalue = np.asarray(w.qvalue)
    if qvalue.dtype != np.uint8:
        raise ValueError(f"weight: found codes in {qvalue.dtype}, need INT4 codes in uint8")
    *lead, groups, half, n = qvalue.shape
    if groups * half % 4:
        raise ValueError(f"weight: found {2 * groups * half} input features, need a multiple of 8 to fill int32 words")
    nibbles = np.concatenate([qvalue & 15, qvalue >> 4], -2).reshape(*lead, groups * half * 2, n).swapaxes(-1, -2)
    pairs = np.ascontiguousarray(nibbles[..., 0::2] | nibbles[..., 1::2] << 4)
    return pairs.view("<i4").astype(np.int32, copy=False)

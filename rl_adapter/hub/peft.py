"""Adapters as PEFT directories: `adapter_config.json` and `adapter_model.safetensors`, f32.

A pair lies under `base_model.model.<module>.lora_A.weight` [R, in] and `.lora_B.weight` [out, R]; y = x W + alpha / R (x A^T) B^T.
Experts lie in one of these layouts:

per-expert   a pair for each expert, named as in released checkpoints: what serving engines read
fused        a pair for each parameter [E, out, in] that transformers 5 has: A [E * R, in], the expert slowest; B [out, R * E], the
             expert fastest. `experts.base_layer.lora_*` is that of gate_up_proj, `experts.lora_*` that of down_proj. Gate and up are one
             parameter, so they have one pair of twice the rank: A = [A_gate; A_up], B block-diagonal, alpha doubled
fused-0.18   as releases of peft before 0.19 have it: they take [E, out, in] for [E, in, out], so A [E * R, out] holds our B, and B our A

`hub.peft_read` reads them.
"""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterator

import numpy as np

from rl_adapter.hub import families
from rl_adapter.hub.files import write_tensors
from rl_adapter.lora import GROUPS, Adapter, AdapterSpec, Lora

LAYOUTS = ("per-expert", "fused", "fused-0.18")
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."


@dataclasses.dataclass(frozen=True)
class Pair:
    """One A and B on disk, and what of an `Adapter` it holds."""

    module: str  # what its keys begin with, after PREFIX
    target: str  # as `target_modules` or `target_parameters`, and the patterns of ranks, name it: an ending of paths
    parameter: bool
    group: str
    run: int | None  # None: the head
    index: tuple[int, ...]  # in the stack of its run
    fields: tuple[str, ...]  # gate and up where they are one parameter
    outputs: tuple[slice, ...]  # of each field
    inputs: int
    width: int  # of all outputs
    experts: int = 0  # of a fused pair; 0: the pair of one matrix
    swapped: bool = False  # A and B have changed places

    @property
    def keys(self) -> tuple[str, str]:
        return tuple(f"{PREFIX}{self.module}.lora_{ab}.weight" for ab in "AB")

    def shapes(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of A and B on disk, of a rank (that of the pair, which is twice the adapter's for gate and up together)."""
        rows, (a, b) = max(1, self.experts) * rank, (self.inputs, self.width)[:: -1 if self.swapped else 1]
        return (rows, a), (b, rows)


def pairs(described: families.Description, layout: str) -> Iterator[Pair]:
    """All that an adapter of a model may hold, in the order of the model.

    Raises:
        ValueError: a family whose experts have no modules of their own has no layout `per-expert`.
    """
    spec, fused = described.spec, layout != "per-expert"
    group_of = {name: group for group, names in GROUPS.items() for name in names}
    for run, (first, count, sparse) in enumerate(spec.stacks):
        shapes = families.fields(described, sparse)
        names = [name for name in shapes if name in group_of and not (fused and families.per_expert(name))]
        for i in range(count):
            for name in names:
                out, inputs = shapes[name]
                for e in range(spec.experts) if families.per_expert(name) else [None]:
                    try:
                        module = families.module(described, name, first + i, e)
                    except ValueError as error:
                        raise ValueError(f"layout: found 'per-expert', need 'fused': {error}") from None
                    if fused and spec.experts and described.family.renamed[0]:
                        module = module.replace(*described.family.renamed)
                    ending = module.split(f"layers.{first + i}.", 1)[1]
                    # Where there are experts, peft takes these names in `target_modules` for those of experts; and routers are no Linears.
                    parameter = fused and bool(spec.experts) and group_of[name] in ("mlp", "router")
                    target = ending + ".weight" if parameter else ending if e is None else ending.rsplit(".", 1)[1]
                    index = (i,) if e is None else (i, e)
                    yield Pair(module, target, parameter, group_of[name], run, index, (name,), (slice(None),), inputs, out)
            for fields in (("gate", "up"), ("down",)) if fused and sparse else ():
                out, inputs = shapes[fields[0]]
                parts = [families.parameter(described, name, first + i) for name in fields]
                path, leaf = parts[0].name.rsplit(".", 1)
                inner, outputs = ".base_layer" if len(fields) == 2 else "", tuple(part.outputs for part in parts)
                swapped = layout == "fused-0.18" and not parts[0].transposed
                yield Pair(
                    path + inner, f"mlp.experts.{leaf}", True, "experts",
                    run, (i,), fields, outputs, inputs, out * len(fields), spec.experts, swapped,
                )  # fmt: skip
    module = families.module(described, "head")
    out, inputs = families.top(spec)["head"]
    yield Pair(module, module, False, "head", None, (), ("head",), (slice(None),), inputs, out)


def save(
    directory: str | os.PathLike, described: families.Description, adapter: Adapter, spec: AdapterSpec, layout: str, base_model: str
) -> list[tuple[str, int, int, float, int]]:
    """Writes an adapter.

    Args:
        directory: there must be none of this name, or an empty one.
        adapter: host arrays, f32.
        layout: one of LAYOUTS.
        base_model: recorded as `base_model_name_or_path`.

    Returns:
        What was written, a row for each group and rank: (group, pairs, rank, scale, parameters).

    Raises:
        ValueError: something at `directory`, a layout that the model does not have, or an adapter that changes nothing.
    """
    check_learned(adapter)
    directory, tensors, rows = new_directory(directory), {}, {}
    ranks = dict(spec.ranks)
    used = [pair for pair in pairs(described, layout) if ranks[pair.group] and _has(adapter, pair)]
    settings: dict[str, tuple[int, float]] = {}  # target -> rank, alpha
    for pair in used:
        a, b = to_disk(adapter, pair)
        tensors |= zip(pair.keys, (a, b))
        rank = ranks[pair.group] * len(pair.fields)
        settings[pair.target] = rank, _alpha(spec, pair)
        name, scale = pair.group, spec.scale(pair.fields[0])
        *_, many, size = rows.get((name, rank, scale), (0, 0))
        rows[name, rank, scale] = many + 1, size + a.size + b.size
    # The experts' comes first: only their targets may end names of other modules, so only they must not be in patterns.
    default = min(used, key=lambda pair: (pair.group != "experts", len(pair.fields))).target
    default = settings[default]
    config = {
        "peft_type": "LORA",
        "peft_version": "0.18.1" if layout == "fused-0.18" else "0.19.0",  # that the layout of fused experts belongs to
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": default[0],
        "lora_alpha": default[1],
        "rank_pattern": {t: rank for t, (rank, _) in settings.items() if rank != default[0]},
        "alpha_pattern": {t: alpha for t, (_, alpha) in settings.items() if alpha != default[1]},
        "use_rslora": spec.rank_stabilized,
        "target_modules": sorted({pair.target for pair in used if not pair.parameter}),
        "target_parameters": sorted({pair.target for pair in used if pair.parameter}) or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_dora": False,
        "modules_to_save": None,
        "init_lora_weights": True,
    }
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_tensors(directory / WEIGHTS, tensors)
    return [(group, many, rank, scale, size) for (group, rank, scale), (many, size) in rows.items()]


def new_directory(directory: str | os.PathLike) -> pathlib.Path:
    """Makes a directory; a ValueError where one holds anything: an export replaces nothing."""
    directory = pathlib.Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory}: found something there already, need a directory that is empty or absent: nothing is overwritten")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def check_learned(adapter: Adapter) -> None:
    """Refuses an adapter that has learned nothing: what came of it would be the base, and `hub.peft_read` would not take it."""
    loras = [lora for stack in adapter.layers for lora in stack.values()] + ([adapter.head] if adapter.head else [])
    if not any(lora.b.any() for lora in loras):
        raise ValueError("adapter: the adapter changes nothing: every B is zero; need one that was trained")
    if not any(lora.a.any() and lora.b.any() for lora in loras):
        raise ValueError("adapter: the adapter changes nothing: of every pair, A or B is zero; need one that was trained")


def _has(adapter: Adapter, pair: Pair) -> bool:
    return all(lora_of(adapter, pair.run, field) is not None for field in pair.fields)


def lora_of(adapter: Adapter, run: int | None, field: str) -> Lora | None:
    return adapter.head if run is None and field == "head" else None if run is None else adapter.layers[run].get(field)


def _alpha(spec: AdapterSpec, pair: Pair) -> float | int:
    """Under which a pair of several times the rank has the scale of its group."""
    alpha = dict(spec.alphas)[pair.group] * (math.sqrt(len(pair.fields)) if spec.rank_stabilized else len(pair.fields))
    return int(alpha) if float(alpha).is_integer() else alpha


def to_disk(adapter: Adapter, pair: Pair) -> tuple[np.ndarray, np.ndarray]:
    """A and B of a pair, as they lie on disk."""
    loras = [lora_of(adapter, pair.run, field) for field in pair.fields]
    if not pair.experts:
        ((a, b),) = [(_a_of(lora, pair.index), lora.b[pair.index]) for lora in loras]
        return np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)
    b = [lora.b[pair.index] for lora in loras]  # [E, R, N]
    a = [np.broadcast_to(lora.a[pair.index], (pair.experts, *lora.a.shape[-2:])) for lora in loras]  # [E, K, R]
    rank, size = b[0].shape[1], b[0].shape[1] * len(b)
    whole = np.zeros((pair.experts, size, pair.width), np.float32)
    for i, (part, outputs) in enumerate(zip(b, pair.outputs)):
        whole[:, i * rank : (i + 1) * rank, outputs] = part
    a = np.concatenate(a, -1)
    if pair.swapped:
        a, whole = whole.swapaxes(1, 2), a.swapaxes(1, 2)
    return a.swapaxes(1, 2).reshape(pair.experts * size, -1), whole.transpose(2, 1, 0).reshape(-1, size * pair.experts)


def _a_of(lora: Lora, index: tuple[int, ...]) -> np.ndarray:
    """One A: it has no axis of experts where they share it."""
    return lora.a[index[: lora.a.ndim - 2]]

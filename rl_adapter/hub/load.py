"""From a checkpoint directory to the frozen base, as host arrays.

First everything that can be told without reading weights is checked, and all that is wrong is raised as one error; then
the stacked arrays are allocated once, in their packed form, and filled tensor by tensor, so that no float copy of the
model ever exists. INT4 weights keep the codes and scales that they have on disk.
"""

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np

from rl_adapter import quant
from rl_adapter.hub import families, pack_quantized
from rl_adapter.hub.files import Tensors, open_tensors
from rl_adapter.types import Base, Layer, PyTree, Spec

FLOATS, INTEGERS = ("BF16", "F16", "F32"), ("I32", "I64")
TOP = ("embed", "final_norm", "head")


@dataclasses.dataclass(frozen=True)
class Slice:
    """Where one weight [out, in] or one norm of a stacked field lies."""

    weight: str
    shape: tuple[int, ...]  # of the tensor: words where it is packed, all experts where it is fused
    packed: bool = False
    index: tuple[slice | int, ...] = ()  # the part of a fused tensor

    @property
    def tensor(self) -> str:
        return self.weight + "_packed" if self.packed else self.weight


def load(
    directory: str | os.PathLike, quantize: Mapping[str, str], progress: Callable[[int, int], None] | None = None
) -> tuple[Spec, Base, dict]:
    """Reads a model.

    Args:
        directory: holds config.json and model.safetensors, or shards with their index.
        quantize: form (a key of `quant.FORMS`) that unquantized weights take: "linear" (attention and experts), "head", "router".
        progress: called with the number of slices done, and of all.

    Returns:
        The spec, the base (numpy leaves), and a report: {"bytes": {form: bytes in memory}, "taken": weights that are as they
        lie on disk, "quantized": weights quantized on load}.

    Raises:
        ValueError: config fields that are not implemented; or all tensors that are missing, unexpected, misshapen, of a wrong
            dtype, or not finite.
    """
    spec = families.read_spec(directory)
    family, config = families.read_family(directory)
    forms = _forms(quantize)
    groups = pack_quantized.group_sizes(config)
    tensors = open_tensors(directory)
    plan = _plan(spec, family, tensors)
    _raise(directory, _headers(spec, plan, forms, groups, tensors) + _scales(spec, plan, tensors))

    filled, problems, done, total = {}, [], 0, sum(map(len, plan.values()))
    for field, slices in plan.items():
        lead = _lead(spec, field)
        for index, piece in zip(np.ndindex(*lead), slices, strict=True):
            try:
                part = _read(tensors, piece, field, forms)
            except ValueError as error:
                problems.append(str(error))
                continue
            if field not in filled:
                filled[field] = jax.tree.map(lambda x: np.empty((*lead, *x.shape), x.dtype), part)  # noqa: B023
            jax.tree.map(lambda whole, x: whole.__setitem__(index, x), filled[field], part)  # noqa: B023
            done += 1
            if progress:
                progress(done, total)
    _raise(directory, problems)

    size, origin = Counter(), Counter()
    for field, value in filled.items():
        size[_form(value)] += sum(x.nbytes for x in jax.tree.leaves(value))
        origin.update(piece.packed for piece in plan[field] if field in forms)
    base = Base(**{field: filled.pop(field) for field in TOP}, layers=Layer(**filled))
    return spec, base, {"bytes": dict(size), "taken": origin[True], "quantized": origin[False]}


def _raise(directory: str | os.PathLike, problems: list[str]) -> None:
    if problems:
        raise ValueError(f"{directory}:\n  " + "\n  ".join(dict.fromkeys(problems)))


def _forms(quantize: Mapping[str, str]) -> dict[str, str]:
    """field -> the form that its weights take where they are not packed on disk."""
    if set(quantize) != {"linear", "head", "router"}:
        raise ValueError(f"quantize: found {sorted(quantize)}, need linear, head and router")
    for name, form in quantize.items():
        if form not in quant.FORMS:
            raise ValueError(f"quantize.{name}: found {form!r}, need one of {', '.join(quant.FORMS)}")
    return dict.fromkeys(families.LINEARS, quantize["linear"]) | {"router": quantize["router"], "head": quantize["head"]}


def _lead(spec: Spec, field: str) -> tuple[int, ...]:
    """The axes along which a field is stacked."""
    if field in TOP:
        return ()
    return (spec.layers, spec.experts) if field in families.EXPERTS else (spec.layers,)


def _plan(spec: Spec, family: families.Family, tensors: Tensors) -> dict[str, list[Slice]]:
    """field -> its slices, in the order in which they are stacked."""
    # Counts from an untrusted config must not make this loop for hours before a first tensor is found missing.
    have = len(tensors.entries)
    per_expert = not any(name.format(l=0) in tensors for name, *_ in family.fused.values())
    if spec.layers > have or (per_expert and spec.experts > have):
        counts = f"num_hidden_layers {spec.layers}, num_experts {spec.experts}"
        raise ValueError(f"config.json: {counts}: need as many tensors, found only {have} in the files")
    names = {**family.base, "head": family.base["embed" if spec.tie_embeddings else "head"]}
    plan = {field: [_whole(spec, field, name, tensors)] for field, name in names.items()}
    return plan | {field: list(_slices(spec, family, field, tensors)) for field in family.layer}


def _slices(spec: Spec, family: families.Family, field: str, tensors: Tensors) -> Iterator[Slice]:
    for layer in range(spec.layers):
        if field not in families.EXPERTS:
            yield _whole(spec, field, family.layer[field].format(l=layer), tensors)
            continue
        name, part, parts = family.fused[field]
        fused, (out, width) = name.format(l=layer), families.shapes(spec)[field]
        for expert in range(spec.experts):
            if fused in tensors:
                rows = slice(part * out, (part + 1) * out)
                yield Slice(fused, (spec.experts, parts * out, width), index=(expert, rows))
            else:
                yield _whole(spec, field, family.layer[field].format(l=layer, e=expert), tensors)


def _whole(spec: Spec, field: str, weight: str, tensors: Tensors) -> Slice:
    shape = families.shapes(spec)[field]
    if field in (*families.LINEARS, "head") and weight + "_packed" in tensors:
        return Slice(weight, (shape[0], -(-shape[1] // 8)), packed=True)
    return Slice(weight, shape)


def _headers(spec: Spec, plan: dict[str, list[Slice]], forms: dict[str, str], groups: set[int], tensors: Tensors) -> list[str]:
    """What is wrong with names, shapes and dtypes."""
    expected, problems = {}, []  # tensor -> (shapes, dtypes)
    for field, slices in plan.items():
        out, width = (*families.shapes(spec)[field], 1)[:2]
        counts = sorted(width // (g or width) for g in groups if width % (g or width) == 0)
        kinds = set()
        for piece in slices:
            expected[piece.tensor] = [piece.shape], ("I32",) if piece.packed else FLOATS
            if piece.packed:
                expected[piece.weight + "_scale"] = [(out, n) for n in counts], FLOATS
                expected[piece.weight + "_shape"] = [(2,)], INTEGERS
            if not piece.packed:
                kinds.add("not quantized")
            elif piece.weight + "_scale" in tensors:  # a missing one is a problem of its own
                scale = tensors.entries[piece.weight + "_scale"]
                kinds.add(f"INT4 with scales {scale.dtype} {list(scale.shape)}")
        if len(kinds) > 1:
            problems.append(f"{field}: found {' and '.join(sorted(kinds))}, need one form in all layers and experts")
        if any(piece.packed for piece in slices):
            if width % 8:
                problems.append(f"{field}: found INT4 with {width} input features, need a multiple of 8")
            if not groups:
                problems.append(f"quantization_config: absent from config.json, but {slices[0].tensor} is packed")
        else:
            bits, group = quant.FORMS[forms[field]] if field in forms else (16, 0)
            if width % (group or (2 if bits == 4 else 1)):
                problems.append(f"{field}: found {width} input features, which do not divide into groups for {forms[field]}")
    for name, (shapes, dtypes) in expected.items():
        if name not in tensors:
            problems.append(f"{name}: missing")
            continue
        entry = tensors.entries[name]
        if entry.shape not in shapes:
            need = " or ".join(str(list(shape)) for shape in shapes) or "a group_size that divides the input features"
            problems.append(f"{name}: found shape {list(entry.shape)}, need {need}")
        if entry.dtype not in dtypes:
            problems.append(f"{name}: found {entry.dtype}, need {' or '.join(dtypes)}")
    return problems + [f"{name}: unexpected" for name in tensors.entries if name not in expected]


def _scales(spec: Spec, plan: dict[str, list[Slice]], tensors: Tensors) -> list[str]:
    """What is wrong with the values beside packed weights: small tensors, read before the weights so that all problems come together."""
    problems = []
    for field, slices in plan.items():
        for name in (piece.weight for piece in slices if piece.packed):
            scale, sizes = tensors.entries.get(name + "_scale"), tensors.entries.get(name + "_shape")
            # A negative scale is refused too: exact sums over groups take scales as magnitudes.
            if scale and scale.dtype in FLOATS:
                value = tensors.read(name + "_scale").astype(np.float32)
                if not (np.isfinite(value) & (value >= 0)).all():
                    problems.append(f"{name}_scale: found NaN, Inf or a negative value, need finite scales of at least 0")
            if sizes and sizes.dtype in INTEGERS:
                value = tuple(tensors.read(name + "_shape").ravel().tolist())
                if value != families.shapes(spec)[field]:
                    problems.append(f"{name}_shape: found the value {list(value)}, need {list(families.shapes(spec)[field])}")
    return problems


def _read(tensors: Tensors, piece: Slice, field: str, forms: dict[str, str]) -> PyTree:
    """One slice in the form that it has in the base; weights turn from [out, in] to [in, out]."""
    value = tensors.read(piece.tensor, piece.index)
    if piece.packed:
        scale = tensors.read(piece.weight + "_scale").T
        return quant.qtensor(pack_quantized.from_words(value, len(scale)), scale)
    if field in forms:
        return quant.quantize(value.T, forms[field], piece.weight)
    if not np.isfinite(value).all():
        raise ValueError(f"{piece.weight}: holds NaN or Inf; a base must be finite")
    return value if field == "embed" else value.astype(np.float32)


def _form(value: PyTree) -> str:
    return {4: "int4", 8: "int8", 16: "fixed16"}[quant.bits(value)] if quant.is_quantized(value) else value.dtype.name

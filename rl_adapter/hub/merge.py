"""An adapter merged into its base: a Hugging Face checkpoint of W + scale A B.

W is what the files say, each matrix read by its codec as a load reads it. What the adapter does not touch and is stored in floats is
copied bit for bit. Written a file at a time, so that the host never holds more than one file and one tensor.
"""

import json
import os
import pathlib
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from rl_adapter import quant
from rl_adapter.hub import codecs, families, load, requantize
from rl_adapter.hub.files import INDEX, SINGLE, read_json, write_tensors
from rl_adapter.hub.peft import check_learned, lora_of, new_directory
from rl_adapter.lora import GROUPS, Adapter, AdapterSpec

SHARD = 4 * 2**30  # bytes of a file
_COPIED = re.compile(
    r"(tokenizer|special_tokens|added_tokens|vocab|merges|chat_template|generation_config|LICENSE).*|.*\.(jinja|tiktoken|model)"
)
_COPIED_BELOW = 2**28  # bytes

Part = tuple[load.Field, load.Piece]


class _Errors:
    """What rounding costs, by format: squared sums of the error, of the merged weights, and of the adapter's part of them."""

    def __init__(self):
        self.sums, self.matrices = defaultdict(lambda: np.zeros(3)), defaultdict(int)

    def add(self, name: str, written: np.ndarray, merged: np.ndarray, delta: np.ndarray) -> None:
        self.sums[name] += [np.square(x, dtype=np.float64).sum() for x in (written - merged, merged, delta)]
        self.matrices[name] += 1

    def report(self) -> dict[str, dict]:
        ratio = lambda a, b: float(np.sqrt(a / max(b, 1e-300)))
        return {
            name: {
                "matrices": self.matrices[name],
                "relative_error": ratio(error, size),
                "error_over_adapter": ratio(error, delta),
            }
            for name, (error, size, delta) in self.sums.items()
        }


def save(
    directory: str | os.PathLike,
    checkpoint: load.Checkpoint,
    adapter: Adapter,
    spec: AdapterSpec,
    in_format: bool = False,
    shard: int = SHARD,
) -> dict[str, dict]:
    """Writes the merged model.

    Args:
        directory: there must be none of this name, or an empty one.
        adapter: host arrays.
        in_format: quantize adapted matrices again, to the format that the file has them in; all others keep their bytes. Otherwise every
            matrix that is quantized or adapted is written in bfloat16.
        shard: bytes of a file, about.

    Returns:
        What rounding cost adapted matrices: format -> "matrices", "relative_error" (of the merged weights, in the Frobenius norm) and
        "error_over_adapter" (the same error over the adapter's own change: at 1 as much is lost as was learned).

    Raises:
        ValueError: what `check` refuses; an adapter that changes nothing; merged weights that are too large for their format.
    """
    check(checkpoint, spec, in_format)
    check_learned(adapter)
    directory, errors = new_directory(directory), _Errors()
    writer, head = _Writer(directory, shard), families.module(checkpoint.described, "head")
    untied = checkpoint.spec.tie_embeddings and adapter.head is not None and bool(adapter.head.a.any() and adapter.head.b.any())
    from_packed = False
    for name, parts in _tensors(checkpoint).items():
        from_packed |= name == head + ".weight" and _is_quantized(parts[0][1])
        made = _merge(checkpoint, name, parts, adapter, spec, in_format, errors)
        for key, value in made.items():
            writer.add(key, value)
    for name in checkpoint.tensors.entries:
        if (
            families.ignored(checkpoint.described, name)
            and (in_format or not _is_further_ahead(checkpoint, name))
            and not writer.has(name)
            and not (untied and name.startswith(head + "."))  # a copy of the embedding, which is the head no more
        ):
            writer.add(name, checkpoint.tensors.read(name))
    writer.finish()
    _copy_others(checkpoint.path, directory, untied, in_format, packed=head if untied and in_format and from_packed else "")
    return errors.report()


def check(checkpoint: load.Checkpoint, spec: AdapterSpec, in_format: bool) -> None:
    """Refuses, by headers alone, what `save` cannot merge.

    Raises:
        ValueError: a GGUF file; with `in_format`, a base of floats, or adapted matrices in a format that cannot be quantized to here.
    """
    if not (checkpoint.path / "config.json").is_file():
        raise ValueError(
            f"model: found {checkpoint.path}, need a directory in Hugging Face layout to merge into; export the adapter instead"
        )
    if in_format and checkpoint.quantization is None:
        raise ValueError("layout: found 'merged-requantized' for a base that is not quantized, need 'merged'")
    ranks = dict(spec.ranks)
    adapted = {name for group, names in GROUPS.items() if ranks[group] for name in names}
    for name, parts in _tensors(checkpoint).items() if in_format else ():
        for field, piece in parts:
            if field.name not in adapted or not _is_quantized(piece):
                continue
            if piece.source.index and piece.codec is not codecs.mxfp4.EXPERTS:
                raise ValueError(f"{name}: found a part of a fused tensor, which cannot be quantized again; need layout 'merged'")
            stored = piece.codec.expected(piece.source, field.shape, checkpoint.tensors, checkpoint.quantization)
            if problem := requantize.refuses(piece.codec, stored, piece.source.name):
                raise ValueError(problem)


def _tensors(checkpoint: load.Checkpoint) -> dict[str, list[Part]]:
    """What each tensor, by its name in floats, is made of."""
    fields, problems = load.plan(checkpoint)
    if problems:
        raise ValueError(f"{checkpoint.path}:\n  " + "\n  ".join(problems[:20]))
    tensors: dict[str, list[Part]] = {}
    for field in fields:
        for piece in field.pieces:
            name = piece.source.name
            if field.name == "head" and checkpoint.spec.tie_embeddings:
                name = families.module(checkpoint.described, "head") + ".weight"
            tensors.setdefault(name, []).append((field, piece))
    return tensors


def _is_quantized(piece: load.Piece) -> bool:
    return piece.codec not in (None, codecs.floats.FLOAT)


def _lora(field: load.Field, piece: load.Piece, adapter: Adapter) -> tuple[np.ndarray, np.ndarray] | None:
    """A and B; None where there are none, or they change nothing, as those of an expert that no token went to."""
    lora = lora_of(adapter, field.run, field.name)
    if lora is None:
        return None
    a, b = lora.a[piece.index[: lora.a.ndim - 2]], lora.b[piece.index]
    return (a, b) if a.any() and b.any() else None


def _delta(field: load.Field, piece: load.Piece, adapter: Adapter, spec: AdapterSpec) -> np.ndarray | None:
    """scale A B as [out, in], f32; None where that is 0."""
    lora = _lora(field, piece, adapter)
    if lora is None:
        return None
    delta = (np.float32(spec.scale(field.name)) * (lora[0] @ lora[1])).T
    return delta if delta.any() else None


def _merge(
    checkpoint: load.Checkpoint, name: str, parts: list[Part], adapter: Adapter, spec: AdapterSpec, in_format: bool, errors: _Errors
) -> dict[str, np.ndarray]:
    """The tensors, by their names on disk, in which a tensor ends up."""
    field, piece = parts[0]
    adapted = any(_lora(*part, adapter) is not None for part in parts)
    if field.name == "head" and checkpoint.spec.tie_embeddings and not adapted:
        return {}
    quantized = _is_quantized(piece)
    if not adapted and (in_format or not quantized):
        shape = field.shape
        stored = (
            piece.codec.expected(piece.source, shape, checkpoint.tensors, checkpoint.quantization) if quantized else [piece.source.name]
        )
        return {key: checkpoint.tensors.read(key) for key in stored}
    if in_format and quantized:
        return _merge_in_format(checkpoint, name, parts, adapter, spec, errors)
    whole = np.zeros(piece.source.whole or field.shape, ml_dtypes.bfloat16)
    for field, piece in parts:
        value = _value(checkpoint, field, piece)
        delta = _delta(field, piece, adapter, spec)
        merged = value if delta is None else value + delta
        rounded = merged.astype(ml_dtypes.bfloat16)
        if delta is not None:
            errors.add("bf16", rounded.astype(np.float32), merged, delta)
        whole[piece.source.index] = rounded.T if piece.source.transposed else rounded
    return {name: whole}


def _merge_in_format(
    checkpoint: load.Checkpoint, name: str, parts: list[Part], adapter: Adapter, spec: AdapterSpec, errors: _Errors
) -> dict[str, np.ndarray]:
    """`name` is where it goes: a head that was tied leaves the embedding, from which it is read, as it is."""
    tensors: dict[str, np.ndarray] = {}
    for field, piece in parts:
        source = piece.source
        old = piece.codec.read(source, field.shape, checkpoint.tensors, checkpoint.quantization)
        new, delta = old, _delta(field, piece, adapter, spec)
        if delta is not None:  # others keep their bytes
            merged = np.asarray(quant.dequantize(old)).T + delta
            new = requantize.like(old, merged.T, name, checkpoint.quantization)
            errors.add(old.form, np.asarray(quant.dequantize(new)).T, merged, delta)
        for key, value in piece.codec.write(new, name, checkpoint.quantization).items():
            if not source.index:
                tensors[key] = value
                continue
            whole = tensors.setdefault(key, np.zeros(checkpoint.tensors.entries[key].shape, value.dtype))
            whole[source.packed(field.shape)[0]] = value
    return tensors


def _value(checkpoint: load.Checkpoint, field: load.Field, piece: load.Piece) -> np.ndarray:
    """A matrix [out, in] of the base, f32."""
    value = piece.codec.read(piece.source, field.shape, checkpoint.tensors, checkpoint.quantization)
    return np.asarray(quant.dequantize(value)).T if quant.is_quantized(value) else value.astype(np.float32)


def _is_further_ahead(checkpoint: load.Checkpoint, name: str) -> bool:
    """Of layers that predict tokens further ahead: they are left out where quantization is, of which they may be a part."""
    return name.startswith(checkpoint.described.prefix + "model.layers.")


class _Writer:
    """Tensors into files of about one size, and their index."""

    def __init__(self, directory: pathlib.Path, size: int):
        self._directory, self._size = directory, size
        self._now, self._bytes, self._files = {}, 0, []

    def has(self, name: str) -> bool:
        return name in self._now or any(name in file for file in self._files)

    def add(self, name: str, value: np.ndarray) -> None:
        if self.has(name):
            raise ValueError(f"{name}: two tensors would be written under this name")
        if self._now and self._bytes + value.nbytes > self._size:
            self._flush()
        self._now[name] = value
        self._bytes += value.nbytes

    def _flush(self) -> None:
        write_tensors(self._directory / f"part-{len(self._files)}", self._now)
        self._files.append({name: value.nbytes for name, value in self._now.items()})
        self._now, self._bytes = {}, 0

    def finish(self) -> None:
        self._flush()
        many = len(self._files)
        names = [SINGLE] if many == 1 else [f"model-{i + 1:05}-of-{many:05}.safetensors" for i in range(many)]
        for i, name in enumerate(names):
            os.rename(self._directory / f"part-{i}", self._directory / name)
        if many > 1:
            where = {tensor: name for name, file in zip(names, self._files) for tensor in file}
            index = {"metadata": {"total_size": sum(sum(file.values()) for file in self._files)}, "weight_map": where}
            (self._directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _copy_others(source: pathlib.Path, directory: pathlib.Path, untied: bool, in_format: bool, packed: str) -> None:
    """config.json, as the merged model needs it, and the files of the tokenizer. `packed`: a head that is quantized only now, or ''."""
    config = read_json(source / "config.json")
    for part in _parts(config):
        if not in_format:
            part.pop("quantization_config", None)
            part.update({key: 0 for key in ("num_nextn_predict_layers", "num_mtp_layers") if key in part})
            part.update({key: "bfloat16" for key in ("dtype", "torch_dtype") if key in part})
        settings = part.get("quantization_config")
        if packed and isinstance(settings, dict) and isinstance(settings.get("ignore"), list):
            settings["ignore"] = [name for name in settings["ignore"] if name != packed]  # engines would look for floats
        if untied:
            part["tie_word_embeddings"] = False
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for path in sorted(source.iterdir()):
        if _COPIED.fullmatch(path.name) and path.is_file() and path.stat().st_size < _COPIED_BELOW:
            shutil.copyfile(path, directory / path.name)


def _parts(config: dict) -> Iterator[dict]:
    yield config
    if isinstance(config.get("text_config"), dict):
        yield config["text_config"]

"""The files of a checkpoint directory: JSON, and tensors read lazily one by one. The only importer of safetensors.

A checkpoint is untrusted: whatever is wrong with a file ends in a ValueError that names the file.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
from safetensors.numpy import save_file

# By memory and these names, not by the library's reader, which knows no 8-bit floats and no steps in slices.
DTYPES = {
    **{"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu, "BF16": ml_dtypes.bfloat16},
    **{"F16": np.float16, "F32": np.float32, "F64": np.float64, "U8": np.uint8, "I8": np.int8, "I32": np.int32, "I64": np.int64},
}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """The JSON object in a file."""
    path = pathlib.Path(path)
    if path.exists() and not path.is_file():  # a pipe or a device would be read forever
        raise ValueError(f"{path}: need a JSON file, found something else")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: need a JSON file, found {_reason(error)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: need a JSON object, found {type(value).__name__}")
    return value


@dataclasses.dataclass(frozen=True)
class Entry:
    """What the header of a file says about one tensor."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors names it: BF16, F16, F32, I32, ...
    path: pathlib.Path
    data: np.ndarray = dataclasses.field(repr=False)  # its bytes, memory-mapped


@dataclasses.dataclass(frozen=True)
class Tensors:
    """The tensors of a checkpoint by name. Files are memory-mapped: nothing but headers is read before `read`."""

    entries: Mapping[str, Entry]

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def read(self, name: str, index: tuple[slice | int, ...] = ()) -> np.ndarray:
        """A copy of one tensor (bfloat16 and 8-bit floats as ml_dtypes has them), or of the part of it that `index` picks."""
        entry = self.entries[name]
        if entry.dtype not in DTYPES:
            raise ValueError(f"{entry.path}: cannot read {name}: found {entry.dtype}, need one of {', '.join(DTYPES)}")
        try:
            return np.array(entry.data.view(DTYPES[entry.dtype]).reshape(entry.shape)[index])
        except (ValueError, IndexError) as error:
            raise ValueError(f"{entry.path}: cannot read {name}: {_reason(error)}") from None


def weight_files(directory: str | os.PathLike) -> list[pathlib.Path]:
    """The files that hold a checkpoint's tensors: `model.safetensors`, or the shards that `model.safetensors.index.json` names, which
    need not be there; none where there is neither.

    Raises:
        ValueError: there are both, and the index names other files: which of them are the model cannot be told.
    """
    directory = pathlib.Path(directory)
    single = [directory / SINGLE] if (directory / SINGLE).is_file() else []
    if not (directory / INDEX).is_file():
        return single
    shards = [directory / shard for shard in sorted(set(_weight_map(directory / INDEX).values()))]
    if single and shards != single:
        raise ValueError(
            f"{directory}: found both {SINGLE} and {INDEX}, which names {shards[0].name}; need one of the two: delete the other"
        )
    return shards


def open_tensors(directory: str | os.PathLike) -> Tensors:
    """The tensors of a checkpoint's `weight_files`."""
    directory = pathlib.Path(directory)
    files = weight_files(directory)
    if not files:
        raise ValueError(f"{directory}: need {SINGLE} or {INDEX}, found neither")
    shards = {path.name: _open_file(path) for path in files}
    if not (directory / INDEX).is_file():
        return Tensors(shards[SINGLE])
    where = _weight_map(directory / INDEX)
    problems = [f"{n}: not in {shard}, where the index places it" for n, shard in where.items() if n not in shards[shard]]
    strays = [(n, shard) for shard in shards for n in shards[shard] if where.get(n) != shard]
    problems += [f"{n}: in {shard}, but the index does not place it there" for n, shard in strays]
    if problems:
        raise ValueError(f"{directory / INDEX}: disagrees with its shards:\n  " + "\n  ".join(problems))
    return Tensors({name: shards[shard][name] for name, shard in where.items()})


def open_file(path: str | os.PathLike) -> Tensors:
    """The tensors of one file."""
    return Tensors(_open_file(pathlib.Path(path)))


def write_tensors(path: str | os.PathLike, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes host arrays as one safetensors file."""
    # The metadata is what transformers asks for. The library writes memory as it lies, so a transposed view must be copied.
    save_file({name: np.ascontiguousarray(t) for name, t in tensors.items()}, path, metadata={"format": "pt"})
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(path, 0o666 & ~umask)  # the library lets only the owner read


def _weight_map(path: pathlib.Path) -> dict[str, str]:
    where = read_json(path).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise ValueError(f"{path}: weight_map: need an object of tensor name to file name, found {where!r}")
    for name, shard in where.items():
        # A plain name only: an index must not reach outside its directory.
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or "/" in shard or "\\" in shard or "\0" in shard:
            raise ValueError(f"{path}: weight_map: need names of .safetensors files in the same directory, found {shard!r} for {name!r}")
    return where


def _open_file(path: pathlib.Path) -> dict[str, Entry]:
    if not os.path.isfile(path):  # pathlib's raises where a name is too long
        raise ValueError(f"{path}: no such file, need the shard that the index names")
    try:
        with safetensors.safe_open(path, "numpy") as file:  # checks the header, whose offsets it keeps to itself
            slices = {name: file.get_slice(name) for name in file.keys()}
            headers = {name: (tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
        data = np.memmap(path, np.uint8, "r")
        start = 8 + int.from_bytes(data[:8].tobytes(), "little")
        offsets = {name: at["data_offsets"] for name, at in json.loads(data[8:start].tobytes()).items() if name in headers}
        return {name: Entry(*headers[name], path, data[start + a : start + b]) for name, (a, b) in offsets.items()}
    except Exception as error:  # the library raises its own class, and plain Exceptions
        raise ValueError(f"{path}: need a whole safetensors file, found {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

"""Files of records: JSON lines and Parquet, row by row, each with the place that errors name. The only importer of pyarrow.

Nothing in a file is trusted: not its size, its encoding, the depth of its JSON or what a column holds.
"""

import contextlib
import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import pyarrow
from pyarrow import parquet

from rl_adapter import config as configs

ROWS = 2**22  # of a source
LINE = 2**24  # bytes of a line
DEPTH = 32  # of a value: lists in objects in lists
BATCH = 64  # rows of Parquet in memory at a time: few bytes on disk can be many here
SHOWN = 60  # characters of a value in an error message

Row = tuple[str, dict[str, Any]]  # where it stands, and what it holds


def read(path: str, field: str) -> Iterator[Row]:
    """Rows of a file named .jsonl or .parquet; what is null in a row counts as absent. `field` names the setting in errors."""
    file = pathlib.Path(path)
    try:
        there = file.is_file()
    except (OSError, ValueError):  # a name too long, or with a null byte
        there = False
    if not there:
        raise ValueError(f"{field}: found no file at {short(path)}, need a JSONL or Parquet file")
    rows = _parquet(file, field) if file.suffix.lower() == ".parquet" else _jsonl(file, field)
    for count, (where, row) in enumerate(rows):
        if count == ROWS:
            raise ValueError(f"{where}: found more than {ROWS} rows, need fewer")
        yield where, {k: v for k, v in row.items() if v is not None}


def _jsonl(file: pathlib.Path, field: str) -> Iterator[Row]:
    """Blank lines are skipped."""
    with file.open("rb") as lines:
        number = 0
        while line := lines.readline(LINE + 1):
            number += 1
            where = f"{field}: {file}:{number}"
            if len(line) > LINE:
                raise ValueError(f"{where}: found a line of more than {LINE} bytes, need shorter ones")
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}: found bytes that are not UTF-8 ({error.reason}), need a JSONL file") from error
            if text.strip():
                yield where, json_object(text, where)


def json_object(text: str, where: str) -> dict[str, Any]:
    """The JSON object that a text is: no NaN, and no key twice."""
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: found {short(text.strip())} ({error}), need a JSON object") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where}: found {short(text.strip())}, need a JSON object")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a key comes twice")
    return found


def _parquet(file: pathlib.Path, field: str) -> Iterator[Row]:
    with _reading(file, field):
        opened = parquet.ParquetFile(file)
    with opened:
        with _reading(file, field):
            names, batches = opened.schema_arrow.names, opened.iter_batches(BATCH)
        if len(set(names)) < len(names):
            raise ValueError(f"{field}: {file}: found columns {short(names)}, need distinct names")
        number = 0
        while True:
            with _reading(file, field):
                batch = next(batches, None)
            if batch is None:
                return
            for i in range(len(batch)):
                number += 1
                yield (where := f"{field}: {file}: row {number}"), _row(batch.slice(i, 1), where)


@contextlib.contextmanager
def _reading(file: pathlib.Path, field: str) -> Iterator[None]:
    """A damaged file makes the library raise all kinds of errors."""
    try:
        yield
    except Exception as error:
        reason = short(str(error).strip())
        raise ValueError(f"{field}: found {str(file)!r}, which cannot be read ({reason}), need a Parquet file") from error


def _row(batch: pyarrow.RecordBatch, where: str) -> dict[str, Any]:
    try:
        return batch.to_pylist(maps_as_pydicts="strict")[0]
    except Exception as error:  # bytes that are not UTF-8, dates out of range, a key twice, ...
        raise ValueError(f"{where}: found what is no plain value ({short(str(error))}), need text, numbers, lists and objects") from error


def plain(value: Any, where: str, depth: int = DEPTH) -> Any:
    """The value as JSON would give it back: tuples as lists. Anything that JSON cannot hold is an error."""
    if value is None or isinstance(value, bool | int):
        return value if abs(value or 0) < 2**63 else _refuse(value, where, "a number of 64 bits")
    if isinstance(value, float):
        return value if math.isfinite(value) else _refuse(value, where, "a finite number")
    if isinstance(value, str):
        if half := configs.half_character(value):
            raise ValueError(f"{where}: found {half!a}, half a character, in {short(value)}, need whole ones")
        return value
    if not depth:
        raise ValueError(f"{where}: found lists or objects nested deeper than {DEPTH}, need them flatter")
    if isinstance(value, list | tuple):
        return [plain(v, where, depth - 1) for v in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {plain(k, where): plain(v, where, depth - 1) for k, v in value.items()}
    return _refuse(value, where, "what JSON can hold: text, numbers, true, false, null, lists, objects")


def _refuse(value: Any, where: str, need: str) -> None:
    raise ValueError(f"{where}: found {short(value)}, a {type(value).__name__}, need {need}")


def short(value: Any) -> str:
    """A value for an error message."""
    try:
        text = repr(value[: 2 * SHOWN] if isinstance(value, str | bytes) else value)
    except (ValueError, RecursionError):  # a number too long to print, lists too deep
        text = f"a {type(value).__name__}"
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."

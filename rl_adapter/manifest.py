"""Which files of samples there are, as a chain of hashes: a line for each, in `manifest.jsonl`, that holds the SHA-256 of the line before.

    {"previous": 64 zeros, "step": 0, "run": {"base": ..., "identity": ...}}        whose samples follow; again where that changes
    {"previous": ..., "step": 0, "file": "000000.parquet", "sha256": ..., "bytes": ..., "rows": ...}
    {"previous": ..., "step": 5, "removed": "000003.parquet"}                       at step 5 retention took that file away

The hash of the last line is the chain's head: nothing before it can be changed, reordered or taken away under the same head. The trainer
puts it into each checkpoint and into summary.json, so that a tail taken away shows too. (Whoever may rewrite those as well can rewrite
all: a head kept elsewhere tells.)

A file is on disk before its line, its line before the checkpoint after it. So what a kill leaves is a file without a line, a part of a
line, or a temporary file; `rewind` takes these away, and the steps after the checkpoint, which are made again.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from rl_adapter.files import TEMPORARY, append, private_directory, write_atomically

NAME = "manifest.jsonl"
FILE = re.compile(r"\d{6,}\.parquet")
NOTHING = "0" * 64  # hash before the first line
CUT = "found a line without an end"
_SHAPES = {"run": {"run"}, "file": {"file", "sha256", "bytes", "rows"}, "removed": {"removed"}}
_TYPES = {"run": dict, "step": int, "bytes": int, "rows": int}  # else str


@dataclasses.dataclass(frozen=True)
class Line:
    raw: bytes  # without its newline
    entry: Mapping[str, Any]  # {} where it is none
    fault: str = ""  # why it is none, or does not continue the chain

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.raw).hexdigest()

    @property
    def step(self) -> int:
        return self.entry["step"]


def name(step: int) -> str:
    return f"{step:06d}.parquet"


def run_of(identity: Mapping[str, Any]) -> dict[str, str]:
    """What a chain is bound to: the base's digest, and that of all that the run's bits depend on (`evaluate.identity`)."""
    return {"base": identity["base_digest"], "identity": digest(identity)}


def digest(identity: Mapping[str, Any]) -> str:
    """SHA-256 of its JSON, however that is laid out."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def lines(directory: str | os.PathLike) -> list[Line]:
    """All lines, each told whether it continues the chain. One that a kill has cut short is the last, and no entry."""
    path = pathlib.Path(directory) / NAME
    *whole, cut = (path.read_bytes() if path.exists() else b"").split(b"\n")
    found, previous = [], NOTHING
    for raw in whole:
        entry, fault = _parse(raw)
        if not fault and entry["previous"] != previous:
            fault = f"found {entry['previous'][:12]} for the line before it, need {previous[:12]}"
        found.append(Line(raw, entry, fault))
        previous = found[-1].hash
    return found + ([Line(cut, {}, CUT)] if cut else [])


def _parse(raw: bytes) -> tuple[dict, str]:
    try:
        entry = json.loads(raw)
    except (ValueError, RecursionError):
        return {}, "found no JSON"
    kind = next((k for k in _SHAPES if isinstance(entry, dict) and k in entry), None)
    if kind is None or entry.keys() != {"previous", "step"} | _SHAPES[kind]:
        return {}, "found no entry of a manifest"
    if not all(isinstance(entry[k], _TYPES.get(k, str)) for k in entry) or any(entry.get(k, 0) < 0 for k in ("step", "bytes", "rows")):
        return {}, "found an entry of wrong types"
    file = entry.get("file", entry.get("removed", name(0)))
    if not FILE.fullmatch(file) or ("file" in entry and file != name(entry["step"])):
        return {}, f"found {file[:60]!r}, which is not the name of the step's file"
    return entry, ""


def stored(chain: list[Line]) -> dict[str, Mapping[str, Any]]:
    """{file: its entry} of those that should be there."""
    found = {}
    for line in chain:
        if "file" in line.entry:
            found[line.entry["file"]] = line.entry
        found.pop(line.entry.get("removed"), None)
    return found


def before(chain: list[Line], step: int) -> list[Line]:
    """The lines of steps before `step`, as far as the chain holds."""
    return list(itertools.takewhile(lambda line: not line.fault and line.step < step, chain))


def hash_of(chain: list[Line]) -> str:
    return chain[-1].hash if chain else ""


def head(directory: str | os.PathLike) -> str:
    """The hash of the last line; '' where there is none."""
    return hash_of([line for line in lines(directory) if line.entry])


def rewind(directory: str | os.PathLike, step: int, run: Mapping[str, str], expected: str | None = None) -> None:
    """Makes the directory what it was when `step` steps were done: later lines and files go, and what a kill has left.

    Args:
      directory: of the samples; made if absent.
      step: steps done; 0 starts anew.
      run: from `run_of`; a change of it gets a line.
      expected: the head that the checkpoint of that step holds; None: whatever is there will do.

    Raises:
      ValueError: the chain does not lead to that head; nothing has been changed then.
    """
    directory, chain = pathlib.Path(directory), lines(directory)
    kept = before(chain, step)
    if expected is not None and hash_of(kept) != expected:
        need = f"{expected[:12] or 'none'} as in the checkpoint of step {step}, or --override_identity to go on with what is there"
        raise ValueError(f"{directory / NAME}: found head {hash_of(kept)[:12] or 'none'} after {len(kept)} lines, need {need}")
    there = stored(kept)
    # Retention of a step that is undone may have taken a file away for good.
    undone = {line.entry.get("removed") for line in chain[len(kept) :]}
    gone = [file for file in sorted(undone & there.keys()) if not (directory / file).exists()]
    more = [{"step": step, "removed": file} for file in gone]
    bound = [line.entry["run"] for line in kept if "run" in line.entry]
    reached = max((line.step for line in kept if "file" in line.entry), default=None)
    if bound[-1:] != [dict(run)] or reached != step - 1:  # another run, or steps without samples
        more.insert(0, {"step": step, "run": dict(run)})
    raw = [line.raw for line in kept]
    for entry in more:
        raw.append(_raw(entry, hashlib.sha256(raw[-1]).hexdigest() if raw else NOTHING))
    private_directory(directory)
    write_atomically(directory / NAME, b"".join(one + b"\n" for one in raw), private=True)
    # The last one first, so that what a kill leaves of them follows on the manifest: the audit takes nothing else for a kill's.
    unknown = sorted((path for path in directory.glob("*.parquet") if path.name not in there), reverse=True)
    for path in (*unknown, *directory.glob(TEMPORARY)):
        path.unlink()


def record(directory: str | os.PathLike, step: int, data: bytes, rows: int, keep: int = 0, keep_every: int = 0) -> str:
    """Writes a step's file, then its line; then takes away all files but those of the last `keep` steps (0: of all) and of every
    `keep_every`-th (0: none), after a line for each. Returns the head.

    Raises:
      ValueError: the manifest is not at a step before this one: there has been no `rewind`.
    """
    directory, chain = pathlib.Path(directory), lines(directory)
    if not chain or chain[-1].fault or any(line.step >= step for line in chain if "file" in line.entry):
        raise ValueError(f"{directory / NAME}: found {len(chain)} lines that are not of the steps before {step}, need a rewind to it")
    write_atomically(directory / name(step), data, private=True)
    sha256 = hashlib.sha256(data).hexdigest()
    last = _append(directory, {"step": step, "file": name(step), "sha256": sha256, "bytes": len(data), "rows": rows}, chain[-1].hash)
    for file, entry in stored(chain).items() if keep else ():
        if entry["step"] <= step - keep and not (keep_every and entry["step"] % keep_every == 0):
            last = _append(directory, {"step": step, "removed": file}, last)
            (directory / file).unlink(missing_ok=True)
    return last


def _append(directory: pathlib.Path, entry: Mapping[str, Any], previous: str) -> str:
    raw = _raw(entry, previous)
    append(directory / NAME, raw + b"\n")
    return hashlib.sha256(raw).hexdigest()


def _raw(entry: Mapping[str, Any], previous: str) -> bytes:
    return json.dumps({"previous": previous} | dict(entry), separators=(", ", ": ")).encode()

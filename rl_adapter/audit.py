"""`--mode=audit`: whether a run's samples are those that it wrote, all of them, in order. Reads the run directory and nothing else.

Checked are the chain of `samples/manifest.jsonl`; every file against its line; the chain against the heads that the checkpoints and
summary.json hold; and the chain's run against config.json and the checkpoints' identity.json.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rl_adapter import checkpoint, manifest, monitor
from rl_adapter import config as configs
from rl_adapter.files import TEMPORARY

SHOWN = 100  # faults listed in an error message


@dataclasses.dataclass(frozen=True)
class Heads:
    """What the rest of the run says the chain's heads are."""

    final: str | None = None  # of summary.json; None: the run is unfinished
    checkpoints: Mapping[int, str] = dataclasses.field(default_factory=dict)  # by steps done


def run(workdir: str | os.PathLike) -> dict[str, Any]:
    """Prints a table; returns what it shows.

    Raises:
      ValueError: something is not as it was written; lists what.
    """
    workdir = pathlib.Path(workdir)
    directory = workdir / "samples"
    if not (directory / manifest.NAME).is_file():
        raise ValueError(f"--workdir: found no {manifest.NAME} in {directory}, need a run that keeps samples (samples.write)")
    heads, faults = heads_of(workdir)
    changed, left = verify(directory, heads)
    chain = manifest.lines(directory)
    faults += changed + verify_run(workdir, chain)
    there = manifest.stored(chain)
    found = {
        "files": len(there),
        "rows": sum(entry["rows"] for entry in there.values()),
        "bytes": sum(entry["bytes"] for entry in there.values()),
        "removed": sum("removed" in line.entry for line in chain),
        "head": manifest.head(directory),
        "checkpoints": sorted(heads.checkpoints),
        "finished": heads.final is not None,
        "left_by_a_kill": left,
        "faults": faults,
    }
    table = Table("what", "found", title=f"samples of {escape(str(workdir))}")
    for key, value in found.items():
        shown = len(value) if key == "faults" else ", ".join(map(str, value)) if isinstance(value, list) else value
        table.add_row(key.replace("_", " "), escape(str(shown)))
    Console().print(table)
    if faults:
        shown = [f"  {fault}" for fault in faults[:SHOWN]] + [f"  and {len(faults) - SHOWN} more"] * (len(faults) > SHOWN)
        raise ValueError("\n".join([f"samples of {workdir}: found {len(faults)} faults, need what the run wrote:", *shown]))
    return found


def heads_of(workdir: pathlib.Path) -> tuple[Heads, list[str]]:
    """And which files that should hold some cannot be read."""
    faults, saved, final = [], {}, None
    if (workdir / "summary.json").exists():
        summary, faults = _read(workdir, "summary.json")
        final = summary.get("samples/head", "")
        if not isinstance(final, str):
            faults.append(f"summary.json: found samples/head = {str(final)[:60]}, need a text")
            final = ""
    directory = workdir / "checkpoints"
    numbered = [path.name for path in directory.glob("*") if path.name.isdigit()]
    if numbered and not (directory / "identity.json").is_file():
        faults.append(f"checkpoints/identity.json: found none beside checkpoints of {', '.join(sorted(numbered, key=int))} steps")
    elif numbered:
        identity, unread = _read(workdir, "checkpoints/identity.json")
        faults += unread
        with checkpoint.Checkpoints(directory, identity, 0, 1, override=True, read_only=True) as of_run:
            for step in of_run.steps():
                try:
                    head = of_run.cursor(step).get("samples")
                    if head is not None and not isinstance(head, str):
                        raise ValueError(f"samples: found {str(head)[:60]}, need a text")
                    saved[step] = head
                except Exception as error:  # whatever a damaged file makes of Orbax or JSON
                    faults.append(f"checkpoints/{step}: found no cursor ({str(error).strip()[:200]})")
    # A run of before there were heads has none.
    return Heads(final, {step: head for step, head in saved.items() if head is not None}), faults


def _read(workdir: pathlib.Path, name: str) -> tuple[dict, list[str]]:
    try:
        found = json.loads((workdir / name).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        return {}, [f"{name}: found {str(error)[:200]}, need JSON"]
    return (found, []) if isinstance(found, dict) else ({}, [f"{name}: found no JSON object"])


def verify(directory: pathlib.Path, heads: Heads) -> tuple[list[str], list[str]]:
    """What is wrong with a directory of samples; and what a kill has left in that of an unfinished run, which resuming takes away."""
    chain, unfinished, left = manifest.lines(directory), heads.final is None, []
    if unfinished and chain and chain[-1].fault == manifest.CUT:
        left.append(f"a cut last line of {manifest.NAME}")
        chain = chain[:-1]
    faults = [f"{manifest.NAME}: line {i}: {line.fault}" for i, line in enumerate(chain, 1) if line.fault]
    faults += _order(chain)
    there = manifest.stored(chain)
    written = reached = _reached(chain)
    while (directory / manifest.name(reached + 1)).exists():  # a kill leaves one, or all of those that it was about to take away
        reached += 1
    for path in sorted(directory.iterdir()):
        if path.name in there or path.name == manifest.NAME:
            continue
        later = manifest.FILE.fullmatch(path.name) and written < int(path.stem) <= reached
        by_kill = later or path.match(TEMPORARY) or any(line.entry.get("removed") == path.name for line in chain[-1:])
        (left if unfinished and by_kill else faults).append(f"{path.name}: found a file that no line is of")
    owner = {entry["sha256"]: file for file, entry in there.items()}
    for file, entry in there.items():
        faults += _file(directory / file, entry, owner)
    for step, head in heads.checkpoints.items():
        found = manifest.hash_of(manifest.before(chain, step))
        if found != head:
            faults.append(
                f"{manifest.NAME}: found head {_short(found)} after {step} steps, need {_short(head)} of the checkpoint of that step"
            )
    found = manifest.hash_of(chain)
    if not unfinished and found != heads.final:
        faults.append(f"{manifest.NAME}: found head {_short(found)}, need {_short(heads.final)} of summary.json")
    return faults, left


def _reached(chain: list[manifest.Line]) -> int:
    return max((line.step for line in chain if "file" in line.entry), default=-1)


def _order(chain: list[manifest.Line]) -> list[str]:
    """Steps follow each other; only a new run may begin elsewhere."""
    faults, expected = [], None
    for i, line in enumerate(chain, 1):
        if "run" in line.entry:
            expected = line.step
        elif "file" in line.entry:
            if line.step != expected:
                faults.append(f"{manifest.NAME}: line {i}: found step {line.step}, need {'a run' if expected is None else expected}")
            expected = line.step + 1
    return faults


def _file(path: pathlib.Path, entry: Mapping[str, Any], owner: Mapping[str, str]) -> list[str]:
    try:
        with path.open("rb") as file:
            size, sha256 = os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return [f"{path.name}: found none ({error.strerror}), need {entry['bytes']} bytes"]
    if sha256 == entry["sha256"]:
        return []
    if sha256 in owner:
        return [f"{path.name}: found what was written as {owner[sha256]}"]
    return [f"{path.name}: found {size} bytes with SHA-256 {_short(sha256)}, need {entry['bytes']} with {_short(entry['sha256'])}"]


def verify_run(workdir: pathlib.Path, chain: list[manifest.Line]) -> list[str]:
    """Whether the run that the samples are bound to is that of config.json, of the steps that were logged, and of the checkpoints."""
    bound = [line.entry["run"] for line in chain if "run" in line.entry]
    about, faults = _read(workdir, "config.json")
    if faults or not bound:
        return faults or [f"{manifest.NAME}: found no run that it is of"]
    base, needed = str(about.get("base_digest")), str(bound[-1].get("base"))
    if base != needed:
        faults.append(f"config.json: found base {_short(base)}, need {_short(needed)} of {manifest.NAME}")
    try:
        logged = max((row["step"] for row in monitor.rows(workdir)), default=-1)
        if about["config"]["samples"]["write"] and logged > _reached(chain):  # a step is logged once its samples are written
            faults.append(f"{manifest.NAME}: found samples up to step {_reached(chain)}, need those of step {logged} of metrics.jsonl")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        faults.append(f"metrics.jsonl: found no steps of such a run ({type(error).__name__}: {error})"[:200])
    identity, unread = _read(workdir, "checkpoints/identity.json")
    if not (workdir / "checkpoints/identity.json").exists() or unread:
        return faults  # killed before its first checkpoint; or told by `heads_of`
    if manifest.digest(identity) != bound[-1].get("identity"):
        faults.append(f"checkpoints/identity.json: found another run than that of {manifest.NAME}")
    try:
        now, then = configs.deciding(ConfigDict(about["config"])), dict(identity["config"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return [*faults, f"config.json: found no whole config that can be compared ({error})"]
    # What is compared by its content may lie elsewhere by now.
    compared = {key for key in now.keys() | then.keys() if key not in configs.FILES and ":" not in key}
    differ = sorted(key for key in compared if now.get(key) != then.get(key))
    return faults + [f"config.json: found {key} = {now.get(key)!r}, need {then.get(key)!r} of checkpoints/identity.json" for key in differ]


def _short(digest: str) -> str:
    return digest[:12] or "none"

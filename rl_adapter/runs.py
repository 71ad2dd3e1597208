"""What every training run does alike, whatever it learns from: a run that is finished, its first step, its data report, its totals."""

import json
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from rl_adapter import checkpoint, monitor, runtime, samples
from rl_adapter.data.checks import Report
from rl_adapter.files import write_atomically

COMPILING = "the first step compiles its programs, which takes a minute or more, or loads those of an earlier run"


def finished(config: ConfigDict, workdir: str | os.PathLike) -> dict | None:
    """The summary of a run of this config that has ended in `workdir`, shown; None if there is none."""
    if not monitor.finished(workdir, config):
        return None
    summary = monitor.summary(workdir)
    print(f"{workdir} holds a finished run of this config; its summary:\n{json.dumps(summary, indent=1)}")
    return summary


def checkpoints(config: ConfigDict, workdir: pathlib.Path, identity: dict, override: bool) -> checkpoint.Checkpoints:
    return checkpoint.Checkpoints(workdir / "checkpoints", identity, config.checkpoint.every, config.checkpoint.keep, override)


def first_step(config: ConfigDict, workdir: pathlib.Path, saved: checkpoint.Checkpoints) -> int:
    """Where a run goes on: the steps that its last checkpoint has done, or 0. What else it goes on from can be read, or is named."""
    monitor.rows(workdir)
    start = saved.latest() or 0
    if start > config.steps:
        raise ValueError(f"steps: found {config.steps}, need at least the {start} that the last checkpoint in {workdir} has done")
    return start


def at(cursor: Any, where: str, **types: tuple[type, ...]) -> dict[str, Any]:
    """A checkpoint's cursor, whose fields are of these types."""
    for name, wanted in types.items():
        found = cursor.get(name) if isinstance(cursor, dict) else None
        if not isinstance(found, wanted):
            need = " or ".join("nothing" if t is type(None) else t.__name__ for t in wanted)
            raise ValueError(f"{where}: cursor.{name}: found {found!r:.60}, need {need}; an earlier checkpoint may have it")
    return cursor


def about(session, trained: int) -> dict:
    """What config.json says beside the config."""
    return {"trained_parameters": trained, "base": session.report, "mesh": dict(session.model.mesh.shape)}


def begin(log: monitor.Monitor, workdir: pathlib.Path, config: ConfigDict, reports: Sequence[Report], trained: int, start: int) -> None:
    """Shows what is trained, on what; data_report.json keeps the latter."""
    log.note("\n".join(report.text() for report in reports))
    kept = [samples.told_report(report.as_json(), config.samples) for report in reports]
    write_atomically(workdir / "data_report.json", json.dumps(kept, indent=1), private=True)
    log.note(f"trained parameters: {trained:,}" + (f"  resuming after step {start}" if start else ""))


def totals(config: ConfigDict, session, trained: int, started: float) -> dict:
    """Of summary.json, what every run has. `started`: by `time.monotonic`."""
    return {
        "wall_s": time.monotonic() - started,
        "steps": config.steps,
        "trained_parameters": trained,
        "base_digest": session.digest,
        "compilations": runtime.compilations(),
        "compile_s": runtime.compile_seconds(),
    }

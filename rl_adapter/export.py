"""`--mode=export`: a run's adapter as a PEFT directory, or merged into its base as a Hugging Face checkpoint."""

import json
import os
import pathlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table

from rl_adapter import config as configs
from rl_adapter import config_check, evaluate, lora
from rl_adapter import session as sessions
from rl_adapter.hub import load, merge, peft

MERGED, REQUANTIZED = "merged", "merged-requantized"
REPORT = "export.json"
MUCH = 0.1  # of the adapter's change of the weights


def run(
    config: ConfigDict, workdir: str | os.PathLike, layout: str, out: str | os.PathLike = "", override_identity: bool = False
) -> pathlib.Path:
    """Writes the adapter of the run's last checkpoint, or that of `adapter.init` where there is no run.

    Args:
        layout: one of `peft.LAYOUTS`, "merged" (bfloat16), or "merged-requantized" (in the format that the base has; never but by name).
        out: where to; '': WORKDIR/export-LAYOUT.

    Returns:
        The directory: complete, since it gets its name last.

    Raises:
        ValueError: nothing to export, something at `out` already, no way to make it, or a layout that the model does not have: all
            before any weight is read; or an adapter that changes nothing.
    """
    config_check.validate(config)
    workdir, out = pathlib.Path(workdir), pathlib.Path(out or pathlib.Path(workdir) / f"export-{layout}")
    evaluate.check_run(config, workdir)
    checkpoint = load.open_checkpoint(configs.model_path(config))
    if layout in peft.LAYOUTS:
        list(peft.pairs(checkpoint.described, layout))  # refuses a layout that the model does not have
    else:
        merge.check(checkpoint, lora.adapter_spec(config.adapter), layout == REQUANTIZED)
    with _directory(out) as partial:
        table, rows = _write(partial, config, workdir, layout, checkpoint, override_identity)
    for row in rows:
        table.add_row(*(f"{x:.3g}" if isinstance(x, float) else f"{x:,}" if isinstance(x, int) else x for x in row))
    Console().print(table)
    if layout in (MERGED, REQUANTIZED) and (lost := max((row[-1] for row in rows), default=0)) > MUCH:
        print(f"rounding changed some weights by {lost:.0%} of what the adapter does: evaluate the merged model before using it")
    print(f"written to {out}")
    return out


@contextmanager
def _directory(out: pathlib.Path) -> Iterator[pathlib.Path]:
    """A directory beside `out`, of nobody else's, that takes its name at the end; whatever goes wrong, nothing is left of it.

    Raises:
        ValueError: `out` cannot be made, or holds something.
    """
    if out.name in ("", ".."):
        raise ValueError(f"--out: found {str(out)!r}, need a name for a directory of its own")
    out = out.absolute()
    try:
        if out.is_symlink() or out.is_mount():
            raise ValueError(
                f"--out: found a link or a mount at {out}, which an export cannot take the place of, need an empty or absent path"
            )
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"--out: found something in {out} already, need a directory that is empty or absent: nothing is overwritten")
        out.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix=".export-", dir=out.parent)
    except OSError as error:
        raise ValueError(f"--out: found {out}, need where a directory can be made: {error}") from None
    with scratch:
        partial = pathlib.Path(scratch.name) / "whole"  # one further down, as that of tempfile is for its owner only
        partial.mkdir()
        yield partial
        os.rename(partial, out)  # over an empty directory at most: the system refuses others


def _write(
    partial: pathlib.Path, config: ConfigDict, workdir: pathlib.Path, layout: str, checkpoint: load.Checkpoint, override_identity: bool
) -> tuple[Table, list[tuple]]:
    """All files of the export; a table of what was written, and its rows."""
    session = sessions.open_session(config)
    step, adapter = evaluate.last_adapter(config, workdir, session, override_identity)
    adapter = jax.device_get(adapter)
    if layout in peft.LAYOUTS:
        rows = peft.save(partial, checkpoint.described, adapter, session.model.adapter, layout, config.model or str(checkpoint.path))
        table = Table("group", "pairs", "rank", "scale", "parameters", title=f"adapter of step {step}, layout {layout}")
        report = [dict(zip(("group", "pairs", "rank", "scale", "parameters"), row)) for row in rows]
    else:
        report = merge.save(partial, checkpoint, adapter, session.model.adapter, layout == REQUANTIZED)
        table = Table("format", "matrices", "relative error", "error / adapter", title=f"merged adapter of step {step}, {layout}")
        rows = [(name, c["matrices"], c["relative_error"], c["error_over_adapter"]) for name, c in report.items()]
    about = {
        "step": step,
        "layout": layout,
        "base_digest": session.digest,
        "trained_parameters": lora.count(adapter),
        "written": report,
    }
    (partial / REPORT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return table, rows

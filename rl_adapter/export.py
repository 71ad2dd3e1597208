"""`--mode=export`: a run's adapter as a PEFT directory, or merged into its base as a Hugging Face checkpoint."""

import json
import os
import pathlib
import shutil

import jax
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table

from rl_adapter import config as configs
from rl_adapter import evaluate, lora
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
        ValueError: nothing to export, something at `out` already, or a layout that the model does not have.
    """
    workdir, out = pathlib.Path(workdir), pathlib.Path(out or pathlib.Path(workdir) / f"export-{layout}")
    evaluate.check_run(config, workdir)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out: found something in {out} already, need a directory that is empty or absent: nothing is overwritten")
    checkpoint = load.open_checkpoint(configs.model_path(config))
    if layout in peft.LAYOUTS:
        list(peft.pairs(checkpoint.described, layout))  # refuses a layout that the model does not have
    session = sessions.open_session(config)
    step, adapter = evaluate.last_adapter(config, workdir, session, override_identity)
    adapter = jax.device_get(adapter)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
    try:
        if layout in peft.LAYOUTS:
            rows = peft.save(partial, checkpoint.described, adapter, session.model.adapter, layout, config.model or str(checkpoint.path))
            table = Table("group", "pairs", "rank", "scale", "parameters", title=f"adapter of step {step}, layout {layout}")
            report = [dict(zip(("group", "pairs", "rank", "scale", "parameters"), row)) for row in rows]
        else:
            costs = merge.save(partial, checkpoint, adapter, session.model.adapter, layout == REQUANTIZED)
            table = Table("format", "matrices", "relative error", "error / adapter", title=f"merged adapter of step {step}, {layout}")
            rows = [(name, c["matrices"], c["relative_error"], c["error_over_adapter"]) for name, c in costs.items()]
            report = costs
        about = {
            "step": step,
            "layout": layout,
            "base_digest": session.digest,
            "trained_parameters": lora.count(adapter),
            "written": report,
        }
        (partial / REPORT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        if out.exists():
            out.rmdir()  # empty: checked above, and refused by the system if it no longer is
        os.rename(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for row in rows:
        table.add_row(*(f"{x:.3g}" if isinstance(x, float) else f"{x:,}" if isinstance(x, int) else x for x in row))
    Console().print(table)
    if layout in (MERGED, REQUANTIZED) and (lost := max(row[-1] for row in rows)) > MUCH:
        print(f"rounding changed some weights by {lost:.0%} of what the adapter does: evaluate the merged model before using it")
    print(f"written to {out}")
    return out

"""The run directory, and what a run shows while it runs.

    config.json     resolved config, git revision, package versions, seed, base digest, devices
    metrics.jsonl   one JSON object a step; keys in METRICS
    tensorboard/    the same as events
    summary.json    written at the end; a run that has none is unfinished
    checkpoints/, samples/   are others' (checkpoint.py and the trainer)

JSON has no NaN or infinity, so these are written as the strings "NaN", "Infinity" and "-Infinity", which `rows` turns
back into numbers: a plot has a gap where the run did.
"""

import contextlib
import datetime
import fnmatch
import importlib.metadata
import json
import math
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import tensorboardX
from ml_collections import ConfigDict
from rich import console as rich_console
from rich import progress

from rl_adapter import config as config_lib
from rl_adapter.files import write_atomically

# Every key that metrics.jsonl may hold. `*` stands for a name that the data brings. One that is not here cannot be logged.
METRICS = {
    "step": "number of the step, from 0",
    "reward/mean": "mean reward of the step's completions",
    "reward/std": "their standard deviation",
    "reward/kind/*": "mean reward of one kind of task",
    "reward/part/*": "mean of one scorer's value, unweighted",
    "reward/failures": "share of completions that a scorer could not score",
    "reward/held_out/mean": "mean of the scorer that is held out: scored, not rewarded",
    "reward/held_out/gap": "mean reward less that",
    "reward/held_out/correlation": "Pearson correlation of the two over the step's completions; not there where either is constant",
    "reward/mixed_groups": "share of prompts whose completions differ in reward: only these have an advantage by their group",
    "advantage/abs_mean": "mean absolute advantage",
    "kl/ref": "k3 estimate of the KL of the policy from the reference, nats a token, at the scored logprobs",
    "entropy": "mean entropy of the policy's next-token distribution at temperature 1, nats",
    "loss": "the minimized loss, mean over the step's updates",
    "grad_norm": "global norm of the adapter's gradient before clipping, mean over the step's updates",
    "learning_rate": "of the step's last update",
    "ratio/mean": "mean ratio of new to old probability of a completion token",
    "ratio/max": "largest such ratio",
    "ratio/clipped": "share of completion tokens whose ratio is outside the clip range",
    "rollout/tries": "batches that were drawn to fill the step",
    "rollout/discarded": "prompts of them that were left out, since their completions do not differ in reward",
    "rollout/version": "steps that the adapter which sampled had learned from",
    "response/length": "mean completion length in tokens, stop token included",
    "response/truncated": "share of completions cut at rollout.max_new_tokens",
    "response/tokens": "completion tokens in the step",
    "env/turns": "mean turns of the policy in a conversation",
    "env/calls": "mean calls of tools in a conversation, malformed ones included",
    "env/malformed": "share of calls that could not be read, or whose tool or arguments there are not",
    "env/failed": "share of conversations that an error of their environment ended",
    "mismatch/max_abs_logprob_diff": "largest |logprob scored while sampling - logprob in the training forward|, nats",
    "mismatch/mean_abs_logprob_diff": "mean of the same",
    "mismatch/expert_flips": "expert choices that differ between sampling and the training forward",
    "moe/load": "share of routed pairs that each expert gets, [layers][experts]",
    "moe/base_load": "the same without the adapter, on the same tokens",
    "moe/load_max_over_mean": "tokens of the busiest expert over the mean expert's, mean over layers",
    "moe/load_shift_from_base": "total-variation distance of expert loads with the adapter from those without, mean over layers",
    "eval/accuracy": "held-out mean reward, greedy (accuracy, where right earns 1 and all else 0), at the steps that evaluate",
    "critic/error": "mean squared error of the critic's values",
    "critic/value": "their mean",
    "critic/explained": "share of the returns' variance that the critic foresaw",
    "preference/accuracy": "share of pairs in which the chosen completion gains more than the rejected one",
    "preference/margin": "by how much: of dpo and ipo beta times the difference of log-ratios to the reference, else of scores",
    "preference/chosen": "beta times the log-ratio of the chosen completions to the reference",
    "preference/rejected": "the same of the rejected",
    "sft/nll": "mean negative log-likelihood of a trained token, nats",
    "eval/nll": "mean negative log-likelihood of held-out completions, nats a token",
    "eval/preference_accuracy": "share of held-out pairs whose chosen completion gains, or scores, more",
    "update/padding": "share of the update's packed tokens that hold none",
    "update/microbatches": "forward and backward passes of an update",
    "rollout/slots_used": "share of decoded tokens that a completion wanted; the rest are slots that waited",
    "compilations": "programs that the step compiled, or read from the cache: 0 after the first steps",
    "time/rollout_s": "seconds of sampling",
    "time/reward_s": "seconds that the step waited for rewards once all was sampled: most are computed while the device samples",
    "time/update_s": "seconds of the training forward, backward and optimizer",
    "time/step_s": "seconds of the whole step",
    "time/eval_s": "seconds of evaluation",
    "throughput/rollout_tokens_per_s": "completion tokens sampled a second",
    "throughput/update_tokens_per_s": "tokens, prompt and completion, trained on a second",
}
# What the line of a step shows: key -> (label, format).
LINE = {
    "reward/mean": ("reward", ".3f"),
    "kl/ref": ("kl", ".4f"),
    "entropy": ("entropy", ".3f"),
    "loss": ("loss", "+.4f"),
    "grad_norm": ("grad", ".3f"),
    "response/length": ("length", ".1f"),
    "reward/failures": ("failures", ".1%"),
    "mismatch/max_abs_logprob_diff": ("mismatch", ".3g"),
    "mismatch/expert_flips": ("flips", ".0f"),
    "eval/accuracy": ("accuracy", ".1%"),
    "time/step_s": ("s", ".2f"),
}
IF_ANY = ("reward/failures",)  # of LINE: 0 is not worth a place
PACKAGES = ("rl-adapter", "jax", "jaxlib", "numpy", "flax", "optax", "aqtp", "orbax-checkpoint", "grain", "tokenizers")
PACKAGES += ("reasoning-gym", "math-verify", "jsonschema")  # tasks and scorers
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a run's bits may depend on."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def git_revision() -> str:
    """Commit of the checkout that this package runs from, '+dirty' if tracked files differ from it, '' outside git."""

    def git(*args):
        here = pathlib.Path(__file__).parent
        return subprocess.run(["git", "-C", str(here), *args], capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        # A package installed inside somebody else's repository is not at that repository's revision.
        if not git("ls-files", "--", pathlib.Path(__file__).name):
            return ""
        return git("rev-parse", "HEAD") + ("+dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def encode(value: Any) -> Any:
    """`value` as JSON allows it: arrays as numbers or lists, NaN and infinities as strings."""
    if isinstance(value, Mapping):
        return {str(k): encode(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [encode(v) for v in value]
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return encode(np.asarray(value).tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def decode(value: Any) -> Any:
    """Undoes `encode` for numbers."""
    if isinstance(value, dict):
        return {k: decode(v) for k, v in value.items()}
    if isinstance(value, list):
        return [decode(v) for v in value]
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def rows(workdir: str | os.PathLike) -> list[dict[str, Any]]:
    """The steps logged so far, in order. A last line cut short by a kill is left out."""
    path = pathlib.Path(workdir) / "metrics.jsonl"
    lines = path.read_text(errors="replace").split("\n") if path.exists() else []
    # A whole line ends in a newline, so the last part is "" or cut.
    return [_row(line, f"{path}: line {n}") for n, line in enumerate(lines[:-1], 1)]


def _row(line: str, where: str) -> dict[str, Any]:
    found = _json(line, where)
    if type(found.get("step")) is not int:
        raise ValueError(f"{where}: found no step, need one")
    return decode(found)


def _json(text: str, where: str | pathlib.Path) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: found no JSON ({error}), need an object") from None
    if not isinstance(found, dict):
        raise ValueError(f"{where}: found {text[:40]!r}, need a JSON object")
    return found


def summary(workdir: str | os.PathLike) -> dict[str, Any] | None:
    """summary.json of a finished run, or None."""
    path = pathlib.Path(workdir) / "summary.json"
    return decode(_json(path.read_text(errors="replace"), path)) if path.exists() else None


def finished(workdir: str | os.PathLike, config: ConfigDict) -> bool:
    """Whether `workdir` holds a finished run of exactly this config."""
    path = pathlib.Path(workdir) / "config.json"
    if summary(workdir) is None or not path.exists():
        return False
    return _json(path.read_text(errors="replace"), path).get("config") == config_lib.plain(config)


def timeless(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without what the clock and the compiler say: equal between two runs of one seed on one mesh."""
    return {k: v for k, v in row.items() if not k.startswith(("time/", "throughput/")) and k != "compilations"}


class Monitor:
    """Writes the run directory and shows progress. Use as a context manager.

    Args:
      workdir: the run directory; made if absent.
      config: the run's config.
      base_digest: of the frozen base.
      start: first step that will be logged; lines of this step and later, left by a killed run, are dropped.
      extra: more fields for config.json.
      console: where to show progress; default: stdout.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        config: ConfigDict,
        *,
        base_digest: str,
        start: int = 0,
        extra: Mapping[str, Any] | None = None,
        console: rich_console.Console | None = None,
    ):
        self._workdir = pathlib.Path(workdir)
        self._workdir.mkdir(parents=True, exist_ok=True)
        kept = [row for row in rows(workdir) if row["step"] < start]  # first of all: what cannot be read must not cost what can
        # Before config.json: a summary must never stand beside a config that it is not of.
        (self._workdir / "summary.json").unlink(missing_ok=True)
        device = jax.devices()[0]
        about = {
            "config": config_lib.plain(config),
            "seed": config.seed,
            "base_digest": base_digest,
            "git_revision": git_revision(),
            "packages": versions(),
            "devices": {"platform": device.platform, "kind": device.device_kind, "count": jax.device_count()},
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "start_step": start,
        }
        # For the owner alone: what is not to be kept (samples.redact) may be spelt in it.
        write_atomically(self._workdir / "config.json", json.dumps(encode({**about, **(extra or {})}), indent=1), private=True)
        path = self._workdir / "metrics.jsonl"
        write_atomically(path, "".join(json.dumps(encode(row)) + "\n" for row in kept))
        self._file = path.open("a")
        self._events = tensorboardX.SummaryWriter(str(self._workdir / "tensorboard"), purge_step=start, flush_secs=10)
        self._steps, self._done, self._start, self._since = config.steps, start, start, time.monotonic()
        self._console = console or rich_console.Console()
        columns = (progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeElapsedColumn(), "{task.fields[eta]}")
        self._bar = progress.Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._task = self._bar.add_task("training", total=self._steps, completed=start, eta="")
        self._bar.start()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends a step's metrics (scalars; lists of numbers stay out of TensorBoard) and shows its line."""
        unknown = [k for k in metrics if k not in METRICS and not any(fnmatch.fnmatchcase(k, p) for p in METRICS if "*" in p)]
        if unknown:
            raise ValueError(f"metrics: found {', '.join(unknown)}, need keys that monitor.METRICS describes")
        row = {"step": int(step)} | {k: encode(metrics[k]) for k in sorted(metrics) if k != "step"}
        # One write, flushed: what a killed process logged is there, and whole but for the last line.
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        values = decode(row)
        for key, value in values.items():
            if key != "step" and isinstance(value, int | float):
                self._events.add_scalar(key, value, step)
        self._done = step + 1
        # The first step compiles, and tells nothing of the others.
        done, now = self._done - self._start - 1, time.monotonic()
        self._since = self._since if done else now
        left = (now - self._since) / done * max(self._steps - self._done, 0) if done else 0
        eta = f"ETA {datetime.timedelta(seconds=round(left))}" if done else ""
        there = lambda key: isinstance(values.get(key), int | float) and (values[key] or key not in IF_ANY)
        shown = [f"{label} {values[key]:{fmt}}" for key, (label, fmt) in LINE.items() if there(key)]
        self.note("  ".join([f"step {self._done}/{self._steps}", *shown] + ([eta] if eta and not self._console.is_terminal else [])))
        self._bar.update(self._task, completed=self._done, eta=eta)

    def note(self, text: str) -> None:
        """Shows a line above the bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()

    def finish(self, fields: Mapping[str, Any]) -> None:
        """Writes summary.json, which marks the run as finished, and shows it."""
        write_atomically(self._workdir / "summary.json", json.dumps(encode(fields), indent=1, allow_nan=False))
        for key, value in fields.items():
            if isinstance(value, int | float):
                self._events.add_scalar(f"summary/{key}", value, self._done)
        self.note("  ".join(f"{k} {v:.6g}" if isinstance(v, float) else f"{k} {v}" for k, v in fields.items()))

    def close(self) -> None:
        """Stops the bar and closes the files."""
        self._bar.stop()
        self._events.close()
        self._file.close()

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, *_) -> None:
        self.close()


@contextlib.contextmanager
def loading(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal: gives a function of (done, of all)."""
    console = rich_console.Console()
    with progress.Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)

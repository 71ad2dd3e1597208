"""A sweep: the points of a config's `get_hyper()`, each trained in a directory of its own, gathered in sweep.csv."""

import csv
import io
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from rl_adapter import config as config_lib
from rl_adapter import config_check, monitor, offline, train
from rl_adapter.files import write_atomically

Point = Mapping[str, Any]  # {dotted key of the config: value}


def load_hyper(config_file: str) -> list[dict[str, Any]]:
    """Calls `get_hyper` of the experiment FILE[:arg], with arg as `get_config` has it.

    Raises:
      ValueError: the file has none, or it gives no list of {dotted key: value}.
    """
    path, *argument = str(config_file).split(":", 1)
    module = config_lib.load_module(path)
    if not callable(getattr(module, "get_hyper", None)):
        raise ValueError(f"--config: found {path} without get_hyper(), need it for --mode=sweep: a list of {{dotted key: value}}")
    hyper = list(module.get_hyper(*argument))
    if not hyper or not all(isinstance(point, Mapping) for point in hyper):
        raise ValueError(f"get_hyper of {path}: found {hyper!r}, need a list of at least one {{dotted key: value}}")
    return [dict(point) for point in hyper]


def name(index: int, point: Point) -> str:
    """Directory of a point, such as `03-seed=1,adapter.rank=4`."""
    text = ",".join(f"{key}={value}" for key, value in point.items())
    return f"{index:02d}-" + re.sub(r"[^\w.,=+-]+", "_", text)[:120]


def run(config: ConfigDict, hyper: Sequence[Point], workdir: str | os.PathLike, train_run: Callable[..., Any] | None = None) -> list[dict]:
    """Trains every point; returns the rows of sweep.csv, which is written anew after each.

    A finished point is not run again, an unfinished one resumes. A point that diverges (`FloatingPointError`) is recorded
    as such and the sweep goes on; any other error stops it, and the same command goes on from there.

    Args:
      config: what the points are set upon.
      hyper: the points.
      workdir: holds sweep.csv and a directory a point.
      train_run: called as `train_run(config, directory)`; that of the point's `objective`, unless a test passes another.
    """
    workdir = pathlib.Path(workdir)
    points = []
    for index, point in enumerate(hyper):  # all checked before the first one costs an hour
        try:
            point_config = config_lib.override(config, point)
            config_check.validate(point_config)
        except ValueError as error:
            raise ValueError(f"get_hyper, point {index}: {error}") from error
        points.append((workdir / name(index, point), point, point_config))

    table = []
    workdir.mkdir(parents=True, exist_ok=True)
    for directory, point, point_config in points:
        status = "finished"
        if not monitor.finished(directory, point_config):
            try:
                learn = train_run or (train.run if point_config.objective == "rl" else offline.run)
                learn(point_config, directory)
            except FloatingPointError as error:
                status = f"diverged: {error}"
        table.append({"point": directory.name, "status": status, **point, **(monitor.summary(directory) or {})})
        write_table(workdir / "sweep.csv", table)
    return table


def write_table(path: pathlib.Path, table: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows as CSV under the union of their keys, in order of appearance."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in table for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    write_atomically(path, text.getvalue())

"""A sweep over `experiments/algorithms.py` as one table: held-out accuracy before and after, mean and interval over seeds.

python -m experiments.learning_table runs/algorithms
"""

import csv
import math
import pathlib
import sys

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments import algorithms
from rl_adapter import config as config_lib
from rl_adapter import monitor

# Student's t, two-sided 95 %, by degrees of freedom; of more, those of the last, which is a little too wide.
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def rows(workdir: pathlib.Path) -> list[dict]:
    """Of each algorithm of the sweep: seeds, accuracies, and what its points cost."""
    with (workdir / "sweep.csv").open() as file:
        points = list(csv.DictReader(file))
    plain = config_lib.flatten(algorithms.quickstart.get_config())
    found = []
    for name, changes in algorithms.ALGORITHMS.items():
        wanted = {field: str((plain | changes)[field]) for other in algorithms.ALGORITHMS.values() for field in other}
        own = [p for p in points if p["status"] == "finished" and all(p[field] == value for field, value in wanted.items())]
        if own:
            steps = [row for p in own for row in monitor.rows(workdir / p["point"])]
            found.append(
                {
                    "algorithm": name,
                    "seeds": len(own),
                    "base": np.array([float(p["eval/base_accuracy"]) for p in own]),
                    "after": np.array([float(p["eval/accuracy"]) for p in own]),
                    "mismatch": max(row.get("mismatch/max_abs_logprob_diff", 0.0) for row in steps),
                    "step_s": float(np.median([row["time/step_s"] for row in steps])),
                }
            )
    return found


def interval(values: np.ndarray) -> float:
    """Half of a 95 % interval of the mean over seeds, by Student's t; nan of one seed."""
    n = len(values)
    return T_95.get(n - 1, 2.262) * float(values.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan


def main(argv: list[str]) -> None:
    if len(argv) != 2 or not (pathlib.Path(argv[1]) / "sweep.csv").is_file():
        raise SystemExit("need the directory of a sweep over experiments/algorithms.py, with its sweep.csv")
    table = Table("algorithm", "seeds", "base", "adapter", "95 % over seeds", "gain", "mismatch", "s a step")
    for row in rows(pathlib.Path(argv[1])):
        half = interval(row["after"])
        table.add_row(
            row["algorithm"], str(row["seeds"]), f"{row['base'].mean():.1%}", f"{row['after'].mean():.1%}", f"+/- {half:.1%}",
            f"{(row['after'] - row['base']).mean():+.1%}", f"{row['mismatch']:g}", f"{row['step_s']:.2f}",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main(sys.argv)

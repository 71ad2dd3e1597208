"""A sweep runs each point once, resumes where it stopped, and keeps a table. Training is a stand-in."""

import csv
import io
import pathlib

import pytest
from rich.console import Console

from rl_adapter import config as config_lib
from rl_adapter import monitor, sweep

HYPER = [{"seed": 0, "adapter.rank": 2}, {"seed": 1, "adapter.rank": 4}, {"seed": 2}]


class Trainer:
    """Finishes a run at once, except that seeds in `fails` raise what they map to."""

    def __init__(self, fails=None):
        self.fails, self.seen = fails or {}, []

    def __call__(self, config, directory):
        self.seen.append((config.seed, config.adapter.attention.rank))
        with monitor.Monitor(directory, config, base_digest="abc", console=Console(file=io.StringIO())) as m:
            if config.seed in self.fails:
                raise self.fails[config.seed]
            m.finish({"eval/accuracy": config.seed / 10})


def table(workdir):
    with open(workdir / "sweep.csv") as file:
        return list(csv.DictReader(file))


def test_every_point_once_in_its_own_directory(tmp_path):
    train = Trainer()
    rows = sweep.run(config_lib.default(), HYPER, tmp_path, train)
    assert train.seen == [(0, 2), (1, 4), (2, 8)]
    assert [r["point"] for r in table(tmp_path)] == ["00-seed=0,adapter.rank=2", "01-seed=1,adapter.rank=4", "02-seed=2"]
    assert [r["eval/accuracy"] for r in table(tmp_path)] == ["0.0", "0.1", "0.2"]
    assert [r["adapter.rank"] for r in table(tmp_path)] == ["2", "4", ""] and len(rows) == 3
    again = Trainer()
    assert sweep.run(config_lib.default(), HYPER, tmp_path, again) == rows and again.seen == [], "finished points are not run again"
    longer = Trainer()
    sweep.run(config_lib.override(config_lib.default(), {"steps": 200}), HYPER, tmp_path, longer)
    assert len(longer.seen) == 3, "a summary of another config does not count"


def test_stops_at_an_error_and_goes_on_from_there(tmp_path):
    with pytest.raises(RuntimeError):
        sweep.run(config_lib.default(), HYPER, tmp_path, Trainer({1: RuntimeError("power cut")}))
    assert len(table(tmp_path)) == 1, "written after every point"
    train = Trainer()
    sweep.run(config_lib.default(), HYPER, tmp_path, train)
    assert [seed for seed, _ in train.seen] == [1, 2]


def test_a_point_that_diverges_is_a_row(tmp_path):
    rows = sweep.run(config_lib.default(), HYPER, tmp_path, Trainer({0: FloatingPointError("loss is NaN at step 3")}))
    assert [r["status"] for r in rows] == ["diverged: loss is NaN at step 3", "finished", "finished"]


@pytest.mark.parametrize("point,message", [({"sed": 1}, "point 1: sed: no such field"), ({"steps": 0}, "point 1: steps: found 0")])
def test_bad_points_are_found_before_any_runs(tmp_path, point, message):
    train = Trainer()
    with pytest.raises(ValueError, match=message):
        sweep.run(config_lib.default(), [{"seed": 1}, point], tmp_path, train)
    assert train.seen == []


def test_load_hyper(tmp_path):
    experiments = pathlib.Path(__file__).parents[1] / "experiments"
    hyper = sweep.load_hyper(str(experiments / "quickstart_sweep.py"))
    assert len(hyper) > 1 and all("adapter.rank" in point for point in hyper)
    with pytest.raises(ValueError, match=r"without get_hyper\(\)"):
        sweep.load_hyper(str(experiments / "quickstart.py"))
    path = tmp_path / "experiment.py"
    path.write_text("def get_config(a): ...\ndef get_hyper(a): return [{'seed': int(a)}]\n")
    assert sweep.load_hyper(f"{path}:7") == [{"seed": 7}]
    path.write_text("def get_config(): ...\ndef get_hyper(): return []\n")
    with pytest.raises(ValueError, match="need a list of at least one"):
        sweep.load_hyper(str(path))

"""The table of `--mode=eval` says what the data says; completions are drawn as in training, and depend on nothing but the seed."""

import json
import types

import numpy as np
import pytest
from quick import quickly
from test_peft import random_adapter
from test_train import make_config, write_base

from rl_adapter import checkpoint, engine, evaluate, statistics, update
from rl_adapter import config as config_lib
from rl_adapter import session as sessions
from rl_adapter.hub import load
from rl_adapter.types import Problem


@pytest.mark.parametrize("kind", ["[/x]", "[red]", "[bold]sums[/bold]", "a\\[b]"])
def test_kinds_are_shown_as_they_are(kind, tmp_path, capsys, monkeypatch):
    data = types.SimpleNamespace(problems=[Problem(0, "1+1?", "2", kind), Problem(1, "1+2?", "3", "file")])
    monkeypatch.setattr(sessions, "open_session", lambda *_: types.SimpleNamespace(data={"eval": data}))
    monkeypatch.setattr(evaluate, "check_run", lambda *_: None)
    monkeypatch.setattr(evaluate, "last_adapter", lambda *_: (3, None))
    monkeypatch.setattr(evaluate, "greedy", lambda *_: (np.array([1.0, 0.0]), ["2", "4"]))
    monkeypatch.setenv("COLUMNS", "200")
    result = evaluate.run(config_lib.default(), tmp_path)
    printed = capsys.readouterr().out
    assert kind in printed and "greedy, step 3" in printed
    assert {row["kind"]: row["base"] for row in result["measures"]} == {"": 0.5, kind: 1.0, "file": 0.0}


def test_measures_of_completions_that_are_known(monkeypatch):
    """mean@n of rewards; pass@k and maj@k of those that are high enough, by the answers that the reward reads."""
    texts = [["Answer: 2", "Answer: 2.", "Answer: 3", "hm"], ["Answer: 5", "Answer: 6", "Answer: 6", "Answer: 6"]]
    rewards = np.array([[1, 1, 0.1, 0], [1, 0.7, 0.7, 0.7]], np.float32)
    data = types.SimpleNamespace(problems=[Problem(0, "1+1?", "2", "a"), Problem(1, "2+3?", "5", "b")])
    monkeypatch.setattr(evaluate, "greedy", lambda *_: (np.array([1.0, 0.0], np.float32), ["", ""]))
    monkeypatch.setattr(evaluate, "sampled", lambda *_: (rewards, texts))
    found = evaluate.measures(config_lib.override(config_lib.default(), {"eval.samples": 4}), None, data, None)
    needed = {"greedy": [1, 0], "mean@4": [0.525, 0.775], "pass@1": [1 / 2, 1 / 4], "pass@2": [5 / 6, 1 / 2], "pass@4": [1, 1]}
    needed |= {"maj@1": [1 / 2, 1 / 4], "maj@2": [(1 + 2 * 1 / 2 + 2) / 6, 3 / 2 / 6], "maj@4": [1, 0]}
    assert list(found) == list(needed)
    for name, values in needed.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-7)
    rows = list(evaluate.compare(data.problems, found, found | {"maj@4": np.array([1.0, 1.0])}))
    assert [(row["kind"], row["problems"], row["measure"]) for row in rows] == [
        (k, n, m) for k, n in (("", 2), ("a", 1), ("b", 1)) for m in needed
    ]
    assert {row["measure"]: row["change"] for row in rows if not row["kind"]} == {name: 0.5 * (name == "maj@4") for name in needed}
    config = config_lib.override(config_lib.default(), {"eval.samples": 4, "eval.k": (3,), "eval.solved": 0.7})
    lower = evaluate.measures(config, None, data, None)
    assert list(lower) == ["greedy", "mean@4", "pass@3", "maj@3"] and lower["pass@3"].tolist() == [1, 1]
    np.testing.assert_allclose(lower["maj@3"], [3 / 4, 1])


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A config of four sampled completions, the directory of a run with some adapter, and its session."""
    changes = {
        "eval.samples": 4,
        "eval.examples": 6,
        "eval.batch": 8,
        "eval.temperature": 0.7,
        "eval.top_p": 0.9,
        "reward.mark": "",
        "numerics": "float",
    }
    config = make_config(write_base(tmp_path_factory.mktemp("base")), **changes, seed=3)
    session = sessions.open_session(config, "eval")
    adapter = random_adapter(load.open_checkpoint(config.model).described, session.model.adapter)
    directory = tmp_path_factory.mktemp("run")
    with checkpoint.Checkpoints(directory / "checkpoints", evaluate.identity(config, session.digest), 1, 2) as saved:
        saved.save(3, update.start(evaluate.optimizer(config), adapter), {}, force=True)
    with quickly((engine,)):
        yield config, directory, session


def test_completions_depend_on_the_seed_alone(world):
    config, _, session = world
    draw = lambda **changes: evaluate.sampled(config_lib.override(config, changes), session, session.data["eval"], None)[1]
    texts = draw()
    assert len(texts) == 6 and all(len(row) == 4 for row in texts) and len({text for row in texts for text in row}) > 12
    assert draw() == texts
    assert draw(**{"eval.examples": 5}) == texts[:5], "nor on the others"
    assert draw(seed=4) != texts


def test_an_evaluation_of_many_completions(world, capsys, monkeypatch):
    config, directory, session = world
    monkeypatch.setattr(evaluate, "greedy", lambda *_: (np.zeros(6, np.float32), [""] * 6))  # tests/test_train.py has it
    monkeypatch.setenv("COLUMNS", "200")
    result = evaluate.run(config, directory)
    printed = capsys.readouterr().out
    assert json.loads((directory / "eval.json").read_text()) == result
    assert (result["step"], result["examples"], result["samples"], result["seed"]) == (3, 6, 4, 3)
    assert "4 completions at temperature 0.7, step 3" in printed and all(
        name in printed for name in ("mean@4", "pass@2", "maj@4", "all: 6")
    )
    _, adapter = evaluate.last_adapter(config, directory, session)
    problems, of_all = session.data["eval"].problems, {row["measure"]: row for row in result["measures"] if not row["kind"]}
    drawn = {}
    for name, weights in (("base", None), ("adapter", adapter)):
        rewards, drawn[name] = evaluate.sampled(config, session, session.data["eval"], weights)
        for problem, texts, row in zip(problems, drawn[name], rewards):
            assert row.tolist() == [float(text.split()[:1] == [problem.answer]) for text in texts]
        assert of_all["mean@4"][name] == pytest.approx(rewards.mean())
        assert of_all["pass@2"][name] == pytest.approx(statistics.pass_at(rewards == 1)[:, 1].mean())
    assert drawn["base"] != drawn["adapter"]

"""The table of `--mode=eval` says what the data says."""

import types

import numpy as np
import pytest

from rl_adapter import config as config_lib
from rl_adapter import evaluate
from rl_adapter import session as sessions
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
    assert result["base"]["kinds"] == {kind: 1.0, "file": 0.0}

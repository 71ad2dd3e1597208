"""A run whose completions are conversations, with programs run in the sandbox by its reward and its tool, killed at any moment."""

import pathlib
import random
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from test_train import assert_same_run, make_config, settings, write_base

from rl_adapter import audit, monitor, samples, sandbox, train
from rl_adapter.rewards import formats

STEPS = 3
WORKS = [kind for kind in sandbox.KINDS if not sandbox.trouble(kind)]
CHANGES = {
    "steps": STEPS, "env.name": "tools", "env.tools": ("python",), "env.calls": "equals", "env.max_turns": 3, "env.max_result_tokens": 6,
    "rollout.stop": tuple("=+-*?0123"), "rollout.max_new_tokens": 24, "rollout.prompts": 4, "rollout.group": 2, "eval.examples": 2,
    "eval.batch": 2, "reward.exact.weight": 0.0, "reward.code.weight": 1.0, "reward.code.seconds": 5.0, "loss.measure_kl": False,
    "data.train": ("python:test_multi_turn:problems",), "data.eval_size": 2,
}  # fmt: skip


def problems():
    """Each wants a program that prints how many digits were said."""
    for n in range(40):
        yield {"prompt": f"{n}+1? ", "answer": "", "cases": [{"stdin": "", "stdout": str(n % 2)}]}


def program(text, *_):
    """Stands for the fenced block that a random model never writes: what it said, as a program."""
    return f"print(len({[c for c in text if c.isdigit()]!r}) % 2)"


@pytest.fixture(scope="module", autouse=True)
def programs():
    if not WORKS:
        pytest.skip("no sandbox works on this machine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "last_block", program)
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base"))


RUN = textwrap.dedent(
    """
    import sys
    sys.path.insert(0, "tests")
    import conftest, launch, test_multi_turn
    test_multi_turn.formats.last_block = test_multi_turn.program
    launch.main(["launch.py", *sys.argv[1:]])
    """
)


def killed(arguments, directory, after, delay):
    """Starts a run, and kills it so many seconds after a step; the number of steps that it logged."""
    with (directory.parent / "output").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", RUN, *arguments], stdout=output, stderr=output, cwd=pathlib.Path(__file__).parents[1]
        )
        try:
            deadline = time.monotonic() + 300
            while len(monitor.rows(directory)) < after and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(delay)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    return len(monitor.rows(directory))


def test_a_kill_loses_and_doubles_no_sample(base, tmp_path):
    config = make_config(base, **CHANGES)
    train.run(config, tmp_path / "whole")
    whole = samples.read(tmp_path / "whole")
    rows = whole.to_pylist()
    assert len(rows) == STEPS * 8 and 0 < sum(row["reward"] for row in rows) < len(rows) and not any(row["failures"] for row in rows)
    assert any(not all(row["drawn"]) for row in rows), "no turn called the tool"
    (tmp_path / "experiment.py").write_text("from rl_adapter import config\nget_config = config.default\n")
    arguments = [f"--config={tmp_path / 'experiment.py'}", f"--workdir={tmp_path / 'run'}"]
    arguments += [f"--config.{key}={value}" for key, value in settings(base, **CHANGES).items()]
    after, delay = random.randint(1, STEPS - 1), random.uniform(0, 1.0)
    reached = killed(arguments, tmp_path / "run", after, delay)
    assert reached >= after and not (tmp_path / "run/summary.json").exists(), (tmp_path / "output").read_text()
    print(f"killed {delay:.3f} s after step {after}, with {reached} steps logged")
    train.run(config, tmp_path / "run")
    assert samples.read(tmp_path / "run").equals(whole)
    assert_same_run(config, tmp_path / "run", tmp_path / "whole")
    assert audit.run(tmp_path / "run")["rows"] == len(rows)

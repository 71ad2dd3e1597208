"""The run directory is whole after a kill, and what is read back is what was logged."""

import io
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from tensorboardX.proto import event_pb2

from rl_adapter import config as config_lib
from rl_adapter import monitor

CONFIG = config_lib.override(config_lib.default(), {"steps": 3})


def open_monitor(path, **kwargs):
    return monitor.Monitor(path, CONFIG, base_digest="abc", console=Console(file=io.StringIO()), **kwargs)


def test_rows_are_what_was_logged(tmp_path):
    with open_monitor(tmp_path) as m:
        m.log(0, {"reward/mean": jnp.float32(0.1), "loss": float("nan"), "mismatch/expert_flips": np.int32(0), "reward/kind/sum": 1.0})
        m.log(1, {"reward/mean": 0.5, "loss": -math.inf})
        assert len(monitor.rows(tmp_path)) == 2, "flushed at once"
    first, second = monitor.rows(tmp_path)
    assert first["step"] == 0 and first["reward/mean"] == float(np.float32(0.1)) and math.isnan(first["loss"])
    assert first["mismatch/expert_flips"] == 0 and isinstance(first["mismatch/expert_flips"], int)
    assert second == {"step": 1, "reward/mean": 0.5, "loss": -math.inf}
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))


def test_resume_drops_later_and_cut_lines(tmp_path):
    with open_monitor(tmp_path) as m:
        for step in range(3):
            m.log(step, {"loss": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert [r["step"] for r in monitor.rows(tmp_path)] == [0, 1, 2]
    with open_monitor(tmp_path, start=2) as m:
        assert [r["step"] for r in monitor.rows(tmp_path)] == [0, 1]
        m.log(2, {"loss": 9.0})
    assert [r["loss"] for r in monitor.rows(tmp_path)] == [0.0, 1.0, 9.0]


def test_undocumented_metric_is_refused(tmp_path):
    with open_monitor(tmp_path) as m, pytest.raises(ValueError, match="reward/men"):
        m.log(0, {"reward/men": 1.0})
    assert set(monitor.LINE) <= set(monitor.METRICS)


def test_config_json_says_how_to_repeat_the_run(tmp_path):
    open_monitor(tmp_path, extra={"trained_parameters": 7}).close()
    about = json.loads((tmp_path / "config.json").read_text())
    assert about["config"] == config_lib.plain(CONFIG) and about["seed"] == CONFIG.seed and about["base_digest"] == "abc"
    assert about["packages"]["jax"] == monitor.versions()["jax"] and about["devices"]["count"] == 8
    assert {"git_revision", "started"} <= about.keys() and about["trained_parameters"] == 7


def test_finished_means_a_summary_of_this_config(tmp_path):
    assert not monitor.finished(tmp_path, CONFIG) and monitor.summary(tmp_path) is None
    with open_monitor(tmp_path) as m:
        assert not monitor.finished(tmp_path, CONFIG)
        m.finish({"eval/accuracy": np.float32(0.5), "steps": 3})
    assert monitor.finished(tmp_path, CONFIG) and monitor.summary(tmp_path) == {"eval/accuracy": 0.5, "steps": 3}
    assert not monitor.finished(tmp_path, config_lib.override(CONFIG, {"seed": 1}))
    open_monitor(tmp_path).close()
    assert not monitor.finished(tmp_path, CONFIG), "started again"


@pytest.mark.parametrize("terminal", [True, False])
def test_one_readable_line_a_step(tmp_path, terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=200)
    with monitor.Monitor(tmp_path, CONFIG, base_digest="abc", console=console) as m:
        m.log(0, {"reward/mean": 0.25, "reward/failures": 0.0, "mismatch/max_abs_logprob_diff": 0.0, "time/step_s": 1.5})
        m.log(1, {"reward/mean": 0.0, "reward/failures": 1.0})
    text = console.file.getvalue()
    assert "step 1/3  reward 0.250  mismatch 0  s 1.50" in text and "ETA 0:00:" in text
    assert text.count("step 1/3") == 1 and "ETA" not in text.split("step 2/3")[0], "the first step compiles"
    assert "step 2/3  reward 0.000  failures 100.0%" in text, "shown where there are any"
    assert terminal or "\x1b" not in text, "plain where there is no terminal"


def test_tensorboard_has_the_keys_as_tags(tmp_path):
    with open_monitor(tmp_path) as m:
        m.log(0, {"reward/mean": 0.25})
    (path,) = (tmp_path / "tensorboard").iterdir()
    data, tags = path.read_bytes(), {}
    while data:  # records of: length u64, its crc u32, payload, its crc u32
        length = int.from_bytes(data[:8], "little")
        event = event_pb2.Event.FromString(data[12 : 12 + length])
        tags |= {v.tag: v.simple_value for v in event.summary.value}
        data = data[16 + length :]
    assert tags == {"reward/mean": 0.25}


def test_timeless_leaves_out_the_clock():
    row = {"step": 1, "loss": 2.0, "time/step_s": 3.0, "throughput/rollout_tokens_per_s": 4.0, "compilations": 5}
    assert monitor.timeless(row) == {"step": 1, "loss": 2.0}

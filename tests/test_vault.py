"""A tool that must be learnt, on the base that ships: what is behind it cannot be known, and training finds out to ask."""

import numpy as np
from quick import quickly

from experiments import vault
from rl_adapter import config as config_lib
from rl_adapter import monitor, samples, train


def test_training_learns_to_use_the_tool(tmp_path):
    changes = {"steps": 13, "eval.examples": 128, "loss.measure_kl": False, "mesh.data": 1}
    config = config_lib.override(vault.get_config(), changes)
    with quickly():
        summary = train.run(config, tmp_path)
    rows = monitor.rows(tmp_path)
    assert rows[0]["reward/mean"] < 0.15 and np.mean([row["reward/mean"] for row in rows[-2:]]) > 0.5
    assert rows[0]["env/calls"] < 0.3 and rows[-1]["env/calls"] > 0.7
    assert summary["eval/base_accuracy"] < 0.1 and summary["eval/accuracy"] > 0.6
    assert all(row["mismatch/max_abs_logprob_diff"] == 0 and row["mismatch/expert_flips"] == 0 for row in rows)
    # What the tool said is in the completion and in no loss; without a call nothing is earned but by a lucky guess.
    table = samples.read(tmp_path, [12]).to_pylist()
    asked = [row for row in table if not all(row["drawn"])]
    assert len(asked) > 64 and all(row["completion_tokens"][row["drawn"].index(False) - 1] for row in asked)
    for row in asked:
        told = [t for t, own in zip(row["completion_tokens"], row["drawn"]) if not own]
        assert 1 <= len(told) <= 8 and all(p == 0 for p, own in zip(row["scored_logprobs"], row["drawn"]) if not own)
    assert np.mean([row["reward"] for row in table if all(row["drawn"])] or [0]) < 0.1

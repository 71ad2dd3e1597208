"""Learning from given completions through the entry point: what is learned, that it resumes to the bit, and a judge that rewards."""

import json

import jax
import numpy as np
import pytest
from quick import quickly
from test_train import make_config, write_base

from rl_adapter import evaluate, export, monitor, offline, sweep, train


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Pairs and examples of a rule that a tiny model can learn: right completions say 7, wrong ones 3."""
    directory = tmp_path_factory.mktemp("data")
    rows = [{"prompt": f"{n}+{n}? ", "answer": "7", "chosen": "7 7", "rejected": "3 3", "completion": "7 7"} for n in range(40)]
    for name, keys in (("pairs", ("prompt", "answer", "chosen", "rejected")), ("examples", ("prompt", "answer", "completion"))):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps({k: row[k] for k in keys}) + "\n" for row in rows))
    return directory


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base"))


def config_of(base, data, objective, **changes):
    source = data / ("examples.jsonl" if objective == "sft" else "pairs.jsonl")
    fields = {"objective": objective, "data.train": (str(source),), "steps": 12, "rollout.prompts": 8, "checkpoint.every": 4}
    return make_config(base, **(fields | {"data.eval_size": 8, "optimizer.learning_rate": 0.02, "loss.beta": 0.5} | changes))


@pytest.mark.parametrize("objective", ["sft", "dpo", "ipo", "reward"])
def test_it_learns_what_is_given(base, data, tmp_path, objective):
    rate = 0.0005 if objective == "ipo" else 0.02  # which stops at a margin, and must not jump over it
    with quickly():
        summary = offline.run(config_of(base, data, objective, **{"optimizer.learning_rate": rate}), tmp_path)
    losses = [row["loss"] for row in monitor.rows(tmp_path)]
    assert losses[-1] < 0.8 * losses[0]
    if objective == "sft":
        assert summary["eval/nll"] < 1.5 < monitor.rows(tmp_path)[0]["sft/nll"]
    else:
        assert summary["eval/preference_accuracy"] == 1
    assert (tmp_path / "reward_model").exists() == (objective == "reward")


def test_it_resumes_to_the_bit_and_a_judge_rewards(base, data, tmp_path):
    """A run in two parts is the whole run; what a reward model scores is a part of the reward, and a policy learns from it alone."""
    with quickly():
        offline.run(config_of(base, data, "reward"), tmp_path / "whole")
        offline.run(config_of(base, data, "reward", steps=5), tmp_path / "parts")
        offline.run(config_of(base, data, "reward"), tmp_path / "parts")
        rows = [[monitor.timeless(row) for row in monitor.rows(tmp_path / name)] for name in ("whole", "parts")]
        assert rows[0] == rows[1] and len(rows[0]) == 12
        with pytest.raises(ValueError, match="^steps: found 5, need at least the 12 "):
            offline.run(config_of(base, data, "reward", steps=5), tmp_path / "whole")
        for mode in (lambda *args: export.run(*args, "per-expert"), evaluate.run):
            with pytest.raises(ValueError, match="^objective: found 'reward', whose run has no policy"):
                mode(config_of(base, data, "reward"), tmp_path / "whole")
        files = [(tmp_path / name / "reward_model/reward_model.safetensors").read_bytes() for name in ("whole", "parts")]
        assert files[0] == files[1]
        judged = {"reward.exact.weight": 0.0, "reward.model.weight": 1.0, "reward.model.path": str(tmp_path / "whole/reward_model")}
        config = make_config(base, **judged, steps=6, **{"rollout.max_new_tokens": 4, "optimizer.learning_rate": 0.03})
        train.run(config, tmp_path / "policy")
    means = [row["reward/part/model"] for row in monitor.rows(tmp_path / "policy")]
    assert np.mean(means[-2:]) > np.mean(means[:2]) + 0.1
    assert all(row["reward/mean"] == pytest.approx(row["reward/part/model"], abs=1e-5) for row in monitor.rows(tmp_path / "policy"))


def test_rows_may_be_split_any_number_of_ways(base, data, tmp_path):
    with quickly():
        summary = offline.run(config_of(base, data, "sft", steps=1, **{"mesh.data": 3, "rollout.prompts": 6}), tmp_path)
    assert summary["eval/nll"] > 0


def test_a_sweep_learns_by_each_points_objective(base, data, tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(offline, "run", lambda config, directory: called.append(config.objective))
    monkeypatch.setattr(train, "run", lambda config, directory: called.append("rl"))
    sweep.run(config_of(base, data, "dpo"), [{"seed": 1}, {"objective": "reward"}, {"objective": "rl"}], tmp_path)
    assert called == ["dpo", "reward", "rl"]
    monkeypatch.undo()
    with pytest.raises(ValueError, match="^objective: found 'dpo', need 'rl' here"):
        train.run(config_of(base, data, "dpo"), tmp_path)


def test_what_does_not_fit_is_said_before_anything_compiles(base, data, tmp_path):
    for changes, message in (
        ({"rollout.prompts": 64}, "rollout.prompts: found 64, need at most the 3[0-9] records of data.train"),
        ({"rollout.max_new_tokens": 2}, "rollout.max_new_tokens: found 2, need "),
        ({"data.train": ("chain_sum",)}, "data.train: found 'chain_sum', need files or functions, whose rows give chosen, rejected"),
    ):
        with pytest.raises(ValueError, match=message):
            offline.run(config_of(base, data, "dpo", **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="reward.model.path: found no reward_model.safetensors in 'nowhere'"):
        train.run(make_config(base, **{"reward.model.weight": 1.0, "reward.model.path": "nowhere"}), tmp_path / "run")


def test_padding_of_given_completions(base, data):
    with quickly():
        session = offline.sessions.open_session(config_of(base, data, "dpo"))
    given = offline.open_given(config_of(base, data, "dpo"), session, "train")
    r = given.rollout([2, 0])
    assert r.tokens.shape == (2, 2, 8) and r.drawn.sum(-1).tolist() == r.lengths.tolist()
    for p, row in enumerate((2, 0)):
        np.testing.assert_array_equal(r.prompts[p, : r.prompt_lengths[p]], given.encoded.prompts[row])
        for g in range(2):
            np.testing.assert_array_equal(r.tokens[p, g, : r.lengths[p, g]], given.encoded.completions[row][g])
            assert r.tokens[p, g, r.lengths[p, g] - 1] == session.tokenizer.stop_ids[0]
    assert jax.tree.leaves(r.choices) == []

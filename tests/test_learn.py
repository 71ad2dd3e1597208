"""From experience to updates: its parts by hand, and every algorithm through the loop on a tiny base."""

import types

import jax
import numpy as np
import pytest
from quick import quickly
from test_train import make_config, share_of_digits, write_base

from rl_adapter import advantage, audit, config_check, experience, learn, loss, monitor, play, samples, train
from rl_adapter import config as configs
from rl_adapter import session as sessions
from rl_adapter.rewards.score import Rewards
from rl_adapter.types import Outcome, Rollout

f32 = np.float32


def rollout(seed, p=3, g=4, c=5, t=2):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, c + 1, (p, g)).astype(np.int32)
    drawn = np.arange(c) < lengths[..., None]
    logprobs = (-rng.exponential(size=(3, p, g, c))).astype(f32)
    choices = [rng.integers(0, 4, (2, p, *shape, 2)).astype(np.int16) for shape in ((t,), (g, c))]
    prompts = np.ones((p, t), np.int32), np.full(p, t, np.int32)
    return Rollout(*prompts, rng.integers(0, 9, (p, g, c)), drawn, lengths, rng.uniform(size=(p, g)) < 0.5, *logprobs, *choices)


def test_pairs_are_the_best_and_the_worst():
    """Of each prompt, with all that belongs to them; where all are equal there is none, nor where nothing is to be trained on."""
    r = rollout(0)
    rewards = np.array([[0, 2, 1, 0], [1, 1, 1, 1], [-1, 0, 3, 3]], f32)
    mask = r.drawn & (np.arange(4) != 2)[:, None]
    reference = r.scored_logprobs - 1
    found, of_reference = learn.pairs(jax.tree.map(np.asarray, r), reference, rewards, mask)
    for p, chosen in enumerate(((1, 0), (0, 0), (2, 0))):
        for side, g in enumerate(chosen):
            np.testing.assert_array_equal(found.tokens[p, side], r.tokens[p, g])
            np.testing.assert_array_equal(found.choices[:, p, side], r.choices[:, p, g])
            np.testing.assert_array_equal(of_reference[p, side], reference[p, g])
            assert found.lengths[p, side] == r.lengths[p, g]
    there = np.asarray(found.drawn)
    assert there[0].any() and not there[1].any()
    weight = learn.pair_weights(there)
    assert set(np.unique(weight)) == {0, 1} and not weight[1:].any()  # the third one's best is not trained on


def test_what_earns_what():
    """Nearness to the reference in the reward, long completions, and completions that were cut."""
    r, config = rollout(1), make_config("x", **{"loss.kl": 0.5, "loss.kl_in": "reward", "loss.kl_estimator": "k1"})
    reference = types.SimpleNamespace(scored=r.scored_logprobs - 2)
    np.testing.assert_allclose(learn.token_rewards(config, r, reference), np.full(r.drawn.shape, -1), rtol=1e-6)
    assert learn.token_rewards(make_config("x", **{"loss.kl": 0.5}), r, reference) is None
    distill = make_config("x", **{"advantage.estimator": "distill"})
    np.testing.assert_allclose(learn.token_rewards(distill, r, reference), np.full(r.drawn.shape, -2), rtol=1e-6)
    long = make_config("x", **{"advantage.overlong_buffer": 2, "rollout.max_new_tokens": 5})
    found = types.SimpleNamespace(played=types.SimpleNamespace(samples=r, rewards=np.ones((3, 4), f32)))
    np.testing.assert_allclose(learn.shaped_rewards(long, found), 1 - np.clip((r.lengths - 3) / 2, 0, 1))
    cut = make_config("x", **{"loss.mask_truncated": True})
    np.testing.assert_array_equal(learn.trained_tokens(cut, r), r.drawn & r.stopped[..., None])
    np.testing.assert_array_equal(learn.trained_tokens(config, r), r.drawn)


def test_metrics_are_means_of_updates():
    """Mismatch is the first update's, and none where rollouts are behind; the largest ratio is the largest; loads are held against the
    base's whatever the number of passes."""
    one = {"loss": f32(1), "ratio/max": f32(2), "mismatch/max_abs_logprob_diff": f32(0), "loads": np.array([[3, 1]], f32)}
    two = one | {"loss": f32(3), "ratio/max": f32(1.5), "mismatch/max_abs_logprob_diff": f32(9), "loads": np.array([[1, 3]], f32)}
    found = learn.combine([one, two], np.array([[4, 4]], f32), on_policy=True)
    assert (found["loss"], found["ratio/max"], found["mismatch/max_abs_logprob_diff"]) == (2, 2, 0)
    assert found["moe/load"] == [[0.5, 0.5]] and found["moe/load_shift_from_base"] == 0
    assert not any(name.startswith("mismatch") for name in learn.combine([one, two]))
    assert learn.combine([]) == {}
    some = learn.combine([one, two | {"preference/accuracy": f32(0.5)}, two | {"preference/accuracy": f32(1)}])
    assert some["preference/accuracy"] == 0.75, "updates without pairs say nothing of pairs"


def test_names_in_the_config_are_those_of_the_modules():
    assert configs.ESTIMATORS == advantage.ESTIMATORS and configs.OF_GROUPS == advantage.OF_GROUPS
    assert (*configs.KINDS, "sft") == loss.KINDS
    choices = config_check._choices(configs.default())
    assert choices["loss.aggregation"] == loss.AGGREGATIONS and choices["loss.correction"] == loss.CORRECTIONS
    assert choices["loss.kl_estimator"] == loss.ESTIMATORS


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rollout.group": 1}, "rollout.group: found 1, need at least 2 for advantage.estimator = grpo"),
        ({"rollout.group": 1, "loss.kind": "dpo", "advantage.estimator": "reinforce_pp"}, "rollout.group: found 1, .* loss.kind = dpo"),
        ({"rollout.group": 1, "rollout.tries": 2, "advantage.estimator": "gae"}, "rollout.group: found 1, .* rollout.tries above 1"),
        ({"loss.kind": "gspo"}, "loss.aggregation: found 'token', need 'sequence'"),
        ({"loss.kind": "gspo", "loss.aggregation": "sequence", "advantage.estimator": "gae"}, "loss.kind: found 'gspo', need 'gspo_token'"),
        ({"loss.kind": "ipo", "loss.kl_in": "reward"}, "loss.kl_in: found 'reward' with loss.kind = ipo"),
        ({"loss.kind": "dpo", "loss.correction": "icepop"}, "loss.kind: found 'dpo'"),
        ({"loss.kind": "gspo", "loss.aggregation": "sequence", "loss.correction": "masked"}, "loss.kind: found 'gspo', need 'gspo_token'"),
        ({"advantage.estimator": "distill"}, "loss.reference: found '' with advantage.estimator = distill, need a teacher"),
        ({"objective": "sft", "optimizer.epochs": 2}, "optimizer.epochs: found 2 with objective = sft, need 1"),
        ({"objective": "dpo", "optimizer.minibatches": 2}, "optimizer.minibatches: found 2 with objective = dpo"),
        ({"objective": "sft", "loss.kl": 0.1}, "loss.kl: found 0.1 with objective = sft"),
        ({"objective": "ipo", "loss.kl_in": "reward"}, "loss.kl_in: found 'reward' with objective = ipo"),
        ({"objective": "reward", "rollout.max_staleness": 1}, "rollout.max_staleness: found 1 with objective = reward"),
        ({"objective": "dpo", "advantage.estimator": "gae"}, "advantage.estimator: found 'gae' with objective = dpo"),
        ({"advantage.overlong_buffer": 99}, "advantage.overlong_buffer: found 99"),
        ({"advantage.estimator": "gae", "critic.warmup_steps": 6}, "critic.warmup_steps: found 6"),
    ],
)
def test_what_does_not_go_together(changes, message):
    with pytest.raises(ValueError, match=message):
        config_check.validate(make_config("", **changes))
    config_check.validate(make_config("", **{"rollout.group": 1, "advantage.estimator": "reinforce_pp"}))
    config_check.validate(make_config("", **{"rollout.group": 1, "objective": "dpo"}))


# Through the loop


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(autouse=True)
def rewarded(monkeypatch):
    monkeypatch.setattr(Rewards, "score", share_of_digits)


RUNS = {
    "critic": {"advantage.estimator": "gae", "advantage.lam": 0.9, "optimizer.minibatches": 2, "critic.warmup_steps": 1, "loss.kl": 0.1},
    "corrected": {
        "loss.correction": "icepop", "rollout.max_staleness": 1, "optimizer.epochs": 2, "loss.kl": 0.1, "loss.kl_in": "reward",
        "loss.kl_estimator": "k1", "advantage.estimator": "reinforce_pp",
    },
    "router": {
        "loss.balance": 0.1, "loss.router_z": 0.1, "loss.entropy": 0.1, "loss.kl": 0.1, "loss.kl_estimator": "k2", "adapter.router.rank": 2,
    },
    "pairs": {"loss.kind": "dpo", "rollout.tries": 2, "loss.mask_truncated": False},
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_algorithms_through_the_loop(base, tmp_path, monkeypatch, name):
    """They run, resume to the bit, move what they should, and agree with their sampler where they are on policy."""
    monkeypatch.setattr(train, "evaluation", lambda *_: 0.0)
    config = make_config(base, steps=3, **RUNS[name])
    with quickly():
        train.run(config, tmp_path / "whole")
        train.run(make_config(base, steps=2, **RUNS[name]), tmp_path / "parts")
        train.run(config, tmp_path / "parts")
    rows, again = ([monitor.timeless(row) for row in monitor.rows(tmp_path / part)] for part in ("whole", "parts"))
    assert rows == again and len(rows) == 3
    assert samples.read(tmp_path / "whole").equals(samples.read(tmp_path / "parts"))
    audit.run(tmp_path / "parts")
    if name == "critic":
        assert "loss" not in rows[0] and rows[0]["critic/error"] > rows[-1]["critic/error"] > 0
        assert rows[1]["mismatch/max_abs_logprob_diff"] == 0
    elif name == "corrected":
        assert [row["rollout/version"] for row in rows] == [0, 0, 1] and not any("mismatch/expert_flips" in row for row in rows)
        assert rows[0]["ratio/max"] > 1  # the second pass
    elif name == "router":
        assert all(row["mismatch/max_abs_logprob_diff"] == 0 for row in rows)
    else:
        assert not any("moe/load_shift_from_base" in row for row in rows)  # of other tokens than the base's
        assert rows[0]["preference/accuracy"] == 0 and rows[0]["preference/margin"] == 0 and rows[-1]["preference/margin"] != 0


def test_dynamic_sampling_replaces_groups_that_are_equal(base, monkeypatch):
    """The first prompts whose completions differ are kept, in order; what is drawn is kept too; and tries are bounded."""
    config = make_config(base, **{"rollout.tries": 3})
    drawn = []

    def playing(config, session, data, indices, adapter, settings, seed, counts):
        counts["waited_ns"] += 1
        drawn.append((indices.tolist(), seed))
        r = rollout(seed % 1000, p=4)
        rewards = np.zeros((4, 4), f32)
        rewards[:, 0] = indices % mixed_every == 0
        return play.Played(r, [None] * 16, [f"{i}" for i in indices for _ in range(4)], [Outcome(x) for x in rewards.reshape(-1)], [])

    class Batches:
        at = 0

        def __next__(self):
            self.at += 4
            return np.arange(self.at - 4, self.at)

        observe = lambda self, indices, rates: None
        get_state = lambda self: {"at": self.at}

    monkeypatch.setattr(play, "play", playing)
    monkeypatch.setattr(experience.evaluate, "prepare", lambda *_: None)
    monkeypatch.setattr(sessions, "sampling", lambda *_: None)
    gather = lambda: experience.gather(config, types.SimpleNamespace(model=None), None, Batches(), None, 0, 5)
    for mixed_every, tries, kept in (  # noqa: B007 (playing reads it)
        (1, 1, [0, 1, 2, 3]), (2, 2, [0, 2, 4, 6]), (5, 3, [0, 1, 5, 10]), (100, 3, [0, 1, 2, 3]),
    ):  # fmt: skip
        drawn.clear()
        found, cursor = gather()
        assert (found.tries, found.kept.tolist(), cursor["at"]) == (tries, kept, 4 * tries)
        assert found.played.texts[::4] == [str(i) for i in kept] and found.drawn.texts[::4] == [str(i) for i in range(4 * tries)]
        seeds = [seed for _, seed in drawn]
        assert len(set(seeds)) == tries and found.seeds.tolist() == np.repeat(seeds, 4).tolist()

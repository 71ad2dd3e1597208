"""reasoning-gym by name: questions split, entries that its scorers still take."""

import json

import pytest
from data_files import config

from rl_adapter.data import gym, prompts

NO_ITEMS = {"composite"}  # needs a config
TUPLES = {"arc_agi", "rearc"}  # their scorers compare tuples, which JSON gives back as lists


def test_entries_can_be_scored_after_json():
    """Of every data set: entries survive JSON, and the scorer takes them."""
    tried = 0
    for name in sorted(gym.DATASETS.keys() - NO_ITEMS):
        (problem,) = gym.problems(f"gym:{name}", 1, 0, "train", "data.train")
        metadata = json.loads(json.dumps(problem.metadata))
        assert metadata == problem.metadata and metadata["gym"] == problem.kind == name and metadata["entry"]["question"] == problem.prompt
        assert problem.answer == (metadata["entry"]["answer"] or "")
        if problem.answer and name not in TUPLES:
            scorer = gym.reasoning_gym.create_dataset(name, size=1, seed=0)
            assert scorer.score_answer(problem.answer, metadata["entry"]) == 1, name
            tried += 1
    assert tried > 90


def test_gym_takes_a_config_and_keeps_it():
    (problem,) = gym.problems('gym:countdown:{"min_numbers": 3, "max_numbers": 3}', 1, 0, "train", "data.train")
    assert len(problem.metadata["entry"]["metadata"]["numbers"]) == 3
    assert problem.metadata["config"] == {"min_numbers": 3, "max_numbers": 3}


def test_gym_order_does_not_depend_on_what_was_asked_before():
    name, config_text = "gcd", "{}"
    a, b = gym._Pool(name, json.loads(config_text), 3), gym._Pool(name, json.loads(config_text), 3)
    train = a.first("train", 30)
    assert b.first("eval", 40) and b.first("train", 30) == train and a.first("eval", 40) == b.first("eval", 40)


@pytest.mark.parametrize(
    "source, message",
    [
        ("gym:nothing", "data.train: found 'gym:nothing', need gym: and one of .*countdown"),
        ("gym:", "data.train: found 'gym:', need"),
        ("gym:gcd:{nonsense", "data.train: 'gym:gcd:.*need a JSON object"),
        ("gym:gcd:[1]", "need a JSON object"),
        ('gym:gcd:{"seed": 1}', "data.train: found \\['seed'\\] in .*data.seed decide"),
        ('gym:gcd:{"nope": 1}', "data.train: found .*which fails .TypeError.*need another config"),
        ('gym:gcd:{"min_numbers": -5}', "data.train: found .*which fails"),
        ('gym:products:{"min_digits": 1, "max_digits": 1}', r"data.train_size: found 300 wanted of .*need at most \d+, as many"),
    ],
)
def test_what_gym_cannot_give_is_named(source, message):
    with pytest.raises(ValueError, match=message):
        prompts.load(config(train=(source,), train_size=300), "train")

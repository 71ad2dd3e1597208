"""The data stage: splits never meet, errors say what to mend, the order resumes exactly."""

import json
import subprocess
import sys

import ml_collections
import numpy as np
import pytest

from rl_adapter import prompts
from rl_adapter.config import SHIPPED_BASE as ASSETS
from rl_adapter.hub.tokenizer import load_tokenizer


def config(**overrides):
    defaults = dict(kinds=("base_conversion",), train_size=50, eval_size=20, seed=0, train_path="", eval_path="")
    return ml_collections.ConfigDict(defaults | overrides)


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def test_generated_splits_are_distinct_disjoint_and_repeatable():
    train, held_out = prompts.load(config(), "train"), prompts.load(config(), "eval")
    assert (len(train), len(held_out)) == (50, 20)
    assert len({p.prompt for p in train} | {p.prompt for p in held_out}) == 70
    assert train == prompts.load(config(), "train")
    assert train != prompts.load(config(seed=1), "train")
    assert all(0 <= p.id < 2**31 for p in train)


def test_no_seed_makes_the_splits_meet():
    train = {p.prompt for seed in range(5) for p in prompts.load(config(train_size=200, seed=seed), "train")}
    assert not train & {p.prompt for seed in range(5, 10) for p in prompts.load(config(eval_size=100, seed=seed), "eval")}


def test_files_are_read_with_and_without_a_kind(tmp_path):
    path = write(tmp_path / "train.jsonl", {"prompt": "1+1? ", "answer": "2"}, "", {"prompt": "é? ", "answer": "e", "kind": "letters"})
    problems = prompts.load(config(train_path=path), "train")
    assert [(p.prompt, p.answer, p.kind) for p in problems] == [("1+1? ", "2", "file"), ("é? ", "e", "letters")]
    assert problems[0].id != problems[1].id


GOOD = {"prompt": "a", "answer": "1"}


@pytest.mark.parametrize(
    "lines, message",
    [
        ([GOOD, "{nonsense"], r"train.jsonl:2: found '\{nonsense'"),
        ([GOOD, "[1]"], "train.jsonl:2: found .* need a JSON object"),
        (["[" * 100_000], "train.jsonl:1: found"),
        ([GOOD, {"prompt": "b"}], r"train.jsonl:2: answer: found only \['prompt'\]"),
        ([GOOD, {"prompt": "b", "answer": 7}], "train.jsonl:2: answer: found 7, need a string"),
        ([{"prompt": " ", "answer": "7"}], "train.jsonl:1: prompt: found ' ', need a string that is not blank"),
        ([{"prompt": "b", "answer": "7", "kind": None}], "train.jsonl:1: kind: found None"),
        ([GOOD, {"prompt": "b", "answer": "1"}, GOOD], "train.jsonl:3: found the prompt of line 1 again"),
        ([""], "found no problems in"),
        ([GOOD, {"prompt": "b\ud800", "answer": "1"}], r"train.jsonl:2: prompt: found '\\ud800', half a character"),
        ([{"prompt": "b", "answer": "\udcff"}], r"train.jsonl:1: answer: found '\\udcff', half a character"),
        ([{"prompt": "b", "answer": "1", "kind": "\ud83d!"}], r"train.jsonl:1: kind: found '\\ud83d', half a character"),
    ],
)
def test_bad_lines_are_named(tmp_path, lines, message):
    with pytest.raises(ValueError, match=message) as error:
        prompts.load(config(train_path=write(tmp_path / "train.jsonl", *lines)), "train")
    assert str(error.value).startswith("data.train_path: ") and len(str(error.value)) < 500


@pytest.mark.parametrize(
    "overrides, message",
    [
        (dict(train_path="/no/such.jsonl"), "data.train_path: found no file at '/no/such.jsonl'"),
        (dict(kinds=("gcd", "base_conversion")), r"data.kinds: found \['gcd'\], need some of \['base_conversion', 'chain_sum'"),
        (dict(kinds=()), "data.kinds: found none"),
        (dict(train_size=0), "data.train_size: found 0, need at least 1"),
        (dict(train_size=10**6), "size: found 1000000 .* need at most"),
    ],
)
def test_bad_settings_are_named(overrides, message):
    with pytest.raises(ValueError, match=message):
        prompts.load(config(**overrides), "train")


def test_a_prompt_in_both_files_is_an_error(tmp_path):
    both = config(
        train_path=write(tmp_path / "train.jsonl", GOOD, {"prompt": "b", "answer": "2"}),
        eval_path=write(tmp_path / "eval.jsonl", {"prompt": "b", "answer": "2"}),
    )
    for split in ("train", "eval"):
        with pytest.raises(ValueError, match="found 1 prompts in both \\('b'\\)"):
            prompts.load(both, split)


def test_an_unknown_split_is_an_error():
    with pytest.raises(ValueError, match="split: found 'test'"):
        prompts.load(config(), "test")


def test_batches_are_padded_on_the_right():
    encoded = [np.array([5, 6, 7], np.int32), np.array([8], np.int32)]
    tokens, lengths = prompts.batch(encoded, np.array([1, 0, 1]), length=4)
    np.testing.assert_array_equal(tokens, [[8, 0, 0, 0], [5, 6, 7, 0], [8, 0, 0, 0]])
    np.testing.assert_array_equal(lengths, [1, 3, 1])
    assert tokens.dtype == lengths.dtype == np.int32
    with pytest.raises(ValueError, match="length: found 2, need at least 3"):
        prompts.batch(encoded, np.array([0]), length=2)


def test_encode_never_cuts_a_prompt():
    tokenizer, problems = load_tokenizer(ASSETS, 145), prompts.load(config(), "train")
    encoded = prompts.encode(tokenizer.encode, problems, max_length=10)
    assert [tokenizer.decode(ids.tolist()) for ids in encoded] == [p.prompt for p in problems]
    longest = max(len(ids) for ids in encoded)
    with pytest.raises(ValueError, match=f"data.max_prompt_tokens: found 2, need {longest} for 50 of 50 prompts") as error:
        prompts.encode(tokenizer.encode, problems, max_length=2)
    assert str(error.value).count(" tokens: ") == 5 and str(error.value).endswith(", ...)")


def test_every_epoch_visits_every_problem_in_a_new_order():
    iterator = prompts.make_iterator(count=7, batch_size=3, seed=4)
    order = np.concatenate([next(iterator) for _ in range(14)]).reshape(6, 7)
    assert all(sorted(epoch) == list(range(7)) for epoch in order.tolist())
    assert len({tuple(epoch) for epoch in order.tolist()}) > 1


@pytest.mark.parametrize("count, batch_size", [(7, 3), (2, 5), (1, 1)])
def test_the_iterator_resumes_exactly(count, batch_size):
    iterator = prompts.make_iterator(count, batch_size, seed=1)
    for _ in range(6):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    expected = [next(iterator).tolist() for _ in range(8)]
    resumed = prompts.make_iterator(count, batch_size, seed=1)
    resumed.set_state(state)
    assert [next(resumed).tolist() for _ in range(8)] == expected
    assert all(len(indices) == batch_size for indices in expected)


def test_a_fresh_process_gives_the_same_problems_and_resumes_the_same_order():
    iterator = prompts.make_iterator(50, 4, seed=2)
    for _ in range(20):
        next(iterator)
    script = f"""
import json
from rl_adapter import prompts
from rl_adapter.config import SHIPPED_BASE as ASSETS
from rl_adapter.hub.tokenizer import load_tokenizer
from rl_adapter.environments import generated
iterator = prompts.make_iterator(50, 4, seed=2)
iterator.set_state(json.loads('{json.dumps(iterator.get_state())}'))
ids = [p.id for p in generated.problems(("base_conversion",), 50, 0, "train")]
print(json.dumps([ids, [next(iterator).tolist() for _ in range(20)]]))
"""
    ids, order = json.loads(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)
    assert ids == [p.id for p in prompts.load(config(), "train")]
    assert order == [next(iterator).tolist() for _ in range(20)]


@pytest.mark.parametrize("count, batch_size, message", [(0, 1, "count: found 0"), (1, 0, "batch_size: found 0")])
def test_empty_iterators_are_errors(count, batch_size, message):
    with pytest.raises(ValueError, match=message):
        prompts.make_iterator(count, batch_size, seed=0)

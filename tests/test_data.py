"""The data stage: splits never meet, faults are refused or counted, prompts are rendered whole."""

import dataclasses
import json
import random
import subprocess
import sys

import numpy as np
import pytest
from data_files import GOOD, config, files, function, write
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_adapter import config as configs
from rl_adapter.config import SHIPPED_BASE as ASSETS
from rl_adapter.data import checks, prompts, sources
from rl_adapter.environments import generated
from rl_adapter.hub.tokenizer import load_tokenizer
from rl_adapter.types import Problem


def test_generated_splits_are_distinct_disjoint_and_repeatable():
    train, held_out = prompts.load(config(), "train").problems, prompts.load(config(), "eval").problems
    assert (len(train), len(held_out)) == (50, 20)
    assert len({p.prompt for p in train} | {p.prompt for p in held_out}) == 70
    assert train == prompts.load(config(), "train").problems == generated.problems(("base_conversion",), 50, 0, "train")
    assert train != prompts.load(config(seed=1), "train").problems
    assert all(0 <= p.id < 2**31 for p in train)


@pytest.mark.parametrize("source", ["base_conversion", 'gym:products:{"max_digits": 2}'])
def test_no_seed_makes_the_splits_meet(source):
    asked = lambda split, seeds: {p.prompt for s in seeds for p in prompts.load(config(train=(source,), seed=s), split).problems}
    assert not asked("train", range(4)) & asked("eval", range(4, 9))


def test_sizes_are_shared_among_generated_sources(tmp_path):
    path = write(tmp_path / "x.jsonl", GOOD, {"prompt": "b", "answer": "2"})
    names = ("gym:gcd", "largest", path, "base_conversion")
    split = prompts.load(config(train=names, eval=("largest",), train_size=50), "train")
    assert split.report.kept == {"gym:gcd": 17, "largest": 17, path: 2, "base_conversion": 16}
    for problem, source in zip(split.problems, split.sources):
        assert problem.kind == {"gym:gcd": "gcd", path: "file"}.get(names[source], names[source])


@pytest.mark.parametrize(
    "overrides, message",
    [
        (dict(train=("/no/such.jsonl",)), "data.train: found no file at '/no/such.jsonl'"),
        (dict(train=("x" * 5000 + ".jsonl",)), "data.train: found no file at 'xxx"),
        (dict(train=("\0.parquet",)), "data.train: found no file at"),
        (dict(train=("gcd", "base_conversion")), "data.train: found 'gcd', need some of base_conversion, chain_sum"),
        (dict(train=("x.csv",)), "data.train: found 'x.csv', need .*a file named .jsonl or .parquet"),
        (dict(train_size=10**6), "size: found 1000000 .* need at most"),
    ],
)
def test_bad_settings_are_named(overrides, message):
    with pytest.raises(ValueError, match=message):
        prompts.load(config(**overrides), "train")


def test_one_file_serves_both_splits(tmp_path):
    """A tenth of the questions is held out, whichever other questions there are."""
    lines = [{"prompt": f"{i}+1?", "answer": str(i + 1)} for i in range(300)]
    of = lambda split: {p.prompt for p in prompts.load(config(train=(write(tmp_path / "x.jsonl", *lines),)), split).problems}
    train, held_out = of("train"), of("eval")
    assert len(train) + len(held_out) == 300 and not train & held_out and 10 <= len(held_out) <= 60
    random.Random(0).shuffle(lines)
    lines = lines[:150]
    assert of("eval") <= held_out and of("train") <= train
    lines = [line for line in lines if line["prompt"] in train][:3]
    with pytest.raises(ValueError, match="data.train: found none of .*x.jsonl for eval, need at least one problem"):
        of("eval")


def test_an_unknown_split_is_an_error():
    with pytest.raises(ValueError, match="split: found 'test'"):
        prompts.load(config(), "test")


# Checks


@given(
    st.lists(st.sampled_from(["a", "b", "c", " ", "d", ""]), min_size=1, max_size=12),
    st.lists(st.sampled_from(["a", "b", "x"]), min_size=1, max_size=3, unique=True),
)
@settings(max_examples=60, deadline=None)
def test_nothing_is_dropped_without_a_word(tmp_path_factory, train, held_out):
    """What is left and what was dropped are what was read; with "refuse" any fault is an error."""
    path, row = tmp_path_factory.mktemp("checks"), lambda text: {"prompt": text, "answer": "1"}
    drop = dict.fromkeys(("duplicates", "empty", "overlap"), "drop")
    expected = [text for text in dict.fromkeys(train) if text.strip() and text not in held_out]
    data = files(path, map(row, train), map(row, held_out), **drop)
    if expected:
        split = prompts.load(data, "train")
        assert [p.prompt for p in split.problems] == expected
        counts = {fault.name: fault.count for fault in split.report.dropped}
        blank, texts = sum(not t.strip() for t in train), [t for t in train if t.strip()]
        wanted = {"empty": blank, "duplicates": len(texts) - len(set(texts)), "overlap": len(set(texts) & set(held_out))}
        assert counts == {f"data.{name}": n for name, n in wanted.items() if n}
        assert sum(split.report.read.values()) == len(train) == len(expected) + sum(counts.values())
        text = split.report.text()
        assert all(f"dropped {n} ({name}):" in text for name, n in counts.items())
        assert json.loads(json.dumps(split.report.as_json()))["kept"] == {data.train[0]: len(expected)}
    if expected != train:
        with pytest.raises(ValueError, match=r"^data\.(empty|duplicates|overlap): found .*(need|were dropped)"):
            prompts.load(files(path, map(row, train), map(row, held_out)), "train")
            prompts.load(data, "train")


def test_faults_are_shown_by_line(tmp_path):
    data = files(tmp_path, [GOOD, {"prompt": "b", "answer": "1"}, GOOD], [{"prompt": "b", "answer": "2"}])
    with pytest.raises(ValueError, match=r"found 1 of 3 records that repeat .*train.jsonl:3: 'a' again, as in .*train.jsonl:1\), need"):
        prompts.load(data, "train")
    data = files(tmp_path, [GOOD, {"prompt": "b", "answer": "1"}], [{"prompt": "b", "answer": "2"}])
    for split in ("train", "eval"):
        with pytest.raises(ValueError, match=r"data.overlap: found 1 of 2 records to train on .*train.jsonl:2: 'b'\), need .*='drop'"):
            prompts.load(data, split)


def test_environments_must_be_known(tmp_path):
    data = files(tmp_path, [{"prompt": "p", "env": "game"}], [GOOD])
    assert prompts.load(data, "train", envs={"game"}).report.envs == {"game": 1}
    with pytest.raises(ValueError, match="train.jsonl:1: env: found 'game', need one of calculator, search"):
        prompts.load(data, "train", envs={"search", "calculator"})
    with pytest.raises(ValueError, match="need one of none, since none is known"):
        prompts.load(data, "train", envs=())


def test_encode_never_cuts_a_prompt():
    tokenizer, data = load_tokenizer(ASSETS, 145), config(max_prompt_tokens=10)
    split = prompts.load(data, "train")
    left, encoded = prompts.encode(tokenizer, data, split)
    assert [tokenizer.decode(ids.tolist()) for ids in encoded] == [p.prompt for p in split.problems]
    sizes = [len(ids) for ids in encoded]
    assert left.report.tokens == (min(sizes), np.median(sizes), max(sizes)) and left.items == split.items
    with pytest.raises(ValueError, match=f"data.max_prompt_tokens: found 2, need {max(sizes)} for 50 of 50 records") as error:
        prompts.encode(tokenizer, config(max_prompt_tokens=2), split)
    assert str(error.value).count(" tokens: ") == checks.SHOWN and "; ...)" in str(error.value)
    limit = max(sizes) - 1
    left, encoded = prompts.encode(tokenizer, config(max_prompt_tokens=limit, too_long="drop"), split)
    assert [p for p, n in zip(split.problems, sizes) if n <= limit] == left.problems and max(map(len, encoded)) <= limit
    assert left.report.dropped[-1].count == sum(n > limit for n in sizes) and len(left.problems) == len(encoded) == len(left.sources)
    with pytest.raises(ValueError, match="data.too_long: found none left when 50 records of more tokens"):
        prompts.encode(tokenizer, config(max_prompt_tokens=1, too_long="drop"), split)


def test_a_prompt_stands_in_its_text(tmp_path):
    tokenizer, data = load_tokenizer(ASSETS, 145), config(prompt="1+1={prompt}=2")
    problem = Problem(0, "3+{prompt}", "", "")
    assert prompts.asked(data, problem) == "1+1=3+{prompt}=2"
    assert prompts.tokens_of(tokenizer, data, problem).tolist() == tokenizer.encode("1+1=3+{prompt}=2")


def test_messages_need_a_template_and_get_variables(tmp_path):
    tokenizer, data = load_tokenizer(ASSETS, 145), config()
    problem = Problem(0, "2", "", "", messages=({"role": "user", "content": "2+2"},))
    with pytest.raises(ValueError, match="chat_template: found none in the checkpoint"):
        prompts.tokens_of(tokenizer, data, problem)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools[0].n }}"
    told = prompts.tokens_of(dataclasses.replace(tokenizer, template=template), data, problem, lambda p: {"tools": [{"n": "1" + p.prompt}]})
    assert tokenizer.decode(told.tolist()) == "2+212"
    asks = config(chat=True, prompt="1+{prompt}")
    assert prompts.asked(asks, dataclasses.replace(problem, messages=())) == ({"role": "user", "content": "1+2"},)


def test_batches_are_padded_on_the_right():
    encoded = [np.array([5, 6, 7], np.int32), np.array([8], np.int32)]
    tokens, lengths = prompts.batch(encoded, np.array([1, 0, 1]), length=4)
    np.testing.assert_array_equal(tokens, [[8, 0, 0, 0], [5, 6, 7, 0], [8, 0, 0, 0]])
    np.testing.assert_array_equal(lengths, [1, 3, 1])
    assert tokens.dtype == lengths.dtype == np.int32
    with pytest.raises(ValueError, match="length: found 2, need at least 3"):
        prompts.batch(encoded, np.array([0]), length=2)


# Identity


def test_identity_follows_what_files_and_functions_give(tmp_path):
    path = write(tmp_path / "train.jsonl", GOOD)
    names = ("base_conversion", path, function(lambda: [GOOD]))
    before = sources.identity(config(train=names))
    assert before.keys() == set(names[1:])
    write(tmp_path / "train.jsonl", GOOD, {"prompt": "b", "answer": "1"})
    after = sources.identity(config(train=names))
    assert after[path] != before[path] and after[names[2]] == before[names[2]]
    function(lambda: [GOOD | {"answer": "3"}])
    assert sources.identity(config(train=names))[names[2]] != after[names[2]]
    held_out = write(tmp_path / "eval.jsonl", {"prompt": "z", "answer": "1"})
    assert held_out not in sources.identity(config(train=names, eval=(held_out,)))
    assert held_out in sources.identity(config(train=names, eval=(held_out,), overlap="drop"))
    whole = lambda **values: configs.identity(configs.override(configs.default(), {f"data.{k}": v for k, v in values.items()}))
    for change in ({"weights": (1, 2, 3)}, {"curriculum": "pass_rate"}, {"floor": 0.1}, {"overlap": "drop"}):
        assert whole(**change) != whole()


def test_a_fresh_process_gives_the_same_problems():
    script = """
from rl_adapter import config
from rl_adapter.data import prompts
data = config.override(config.default(), {"data.train": ("largest", "gym:gcd"), "data.train_size": 40}).data
print(sum(p.id * i for i, p in enumerate(prompts.load(data, "train").problems)))
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    here = prompts.load(config(train=("largest", "gym:gcd"), train_size=40), "train").problems
    assert int(found) == sum(p.id * i for i, p in enumerate(here))

"""The data stage: splits never meet, faults are named or counted, what is hostile is refused, whatever the file format."""

import json
import pathlib
import random
import subprocess
import sys
import types

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from rl_adapter import config as configs
from rl_adapter.config import SHIPPED_BASE as ASSETS
from rl_adapter.data import checks, gym, offline, prompts, records, rows, sources
from rl_adapter.environments import generated
from rl_adapter.hub.tokenizer import load_tokenizer
from rl_adapter.types import Example, Pair, Problem

GOOD = {"prompt": "a", "answer": "1"}


def config(**overrides):
    defaults = {"train": ("base_conversion",), "train_size": 50, "eval_size": 20}
    return configs.override(configs.default(), {f"data.{k}": v for k, v in (defaults | overrides).items()}).data


def write(path: pathlib.Path, *lines) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def write_parquet(path: pathlib.Path, lines: list[dict]) -> str:
    names = dict.fromkeys(name for line in lines for name in line)
    parquet.write_table(pyarrow.table({name: [line.get(name) for line in lines] for name in names}), path)
    return str(path)


def files(tmp_path, train, held_out, **overrides):
    paths = write(tmp_path / "train.jsonl", *train), write(tmp_path / "eval.jsonl", *held_out)
    return config(train=paths[:1], eval=paths[1:], **overrides)


# Generated


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


# reasoning-gym

NO_ITEMS = {"composite"}  # needs a config
TUPLES = {"arc_agi", "rearc"}  # their scorers compare tuples, which JSON gives back as lists
SLOW = {"acre", "figlet_font", "futoshiki", "group_anagrams", "knight_swap", "list_functions", "puzzle24", "zebra_puzzles"}


def test_entries_can_be_scored_after_json():
    """Of every data set: entries survive JSON, and the scorer takes them (those that are slow to generate aside)."""
    tried = 0
    for name in sorted(gym.DATASETS.keys() - NO_ITEMS - SLOW):
        (problem,) = gym.problems(f"gym:{name}", 1, 0, "train", "data.train")
        metadata = json.loads(json.dumps(problem.metadata))
        assert metadata == problem.metadata and metadata["gym"] == problem.kind == name and metadata["entry"]["question"] == problem.prompt
        assert problem.answer == (metadata["entry"]["answer"] or "")
        if problem.answer and name not in TUPLES | {"gsm_symbolic"}:
            scorer = gym.reasoning_gym.create_dataset(name, size=1, seed=0)
            assert scorer.score_answer(problem.answer, metadata["entry"]) == 1, name
            tried += 1
    assert tried > 80


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


# Files


def test_files_are_read_with_and_without_a_kind(tmp_path):
    data = files(tmp_path, [{"prompt": "1+1? ", "answer": "2"}, "", {"prompt": "é? ", "answer": "e", "kind": "letters"}], [GOOD])
    problems = prompts.load(data, "train").problems
    assert [(p.prompt, p.answer, p.kind) for p in problems] == [("1+1? ", "2", "file"), ("é? ", "e", "letters")]
    assert problems[0].id != problems[1].id


def test_messages_environments_and_metadata(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "2+2?"}], "name": None}]
    lines = [
        {"messages": chat, "answer": "4", "level": 3, "metadata": {"x": [1, {"y": None}]}},
        {"prompt": "play", "env": "game", "metadata": {"seed": 1}},
        {"prompt": "play", "env": "game", "metadata": '{"seed": 2}'},
        {"prompt": "prove it", "theorem": "t"},
    ]
    a, b, c, d = prompts.load(files(tmp_path, lines, [GOOD]), "train").problems
    assert a.prompt == "2+2?" and a.messages == (chat[0], {"role": "user", "content": [{"type": "text", "text": "2+2?"}]})
    assert a.metadata == {"x": [1, {"y": None}], "level": 3} and a.answer == "4" and a.env == ""
    assert (b.env, b.metadata, c.metadata, d.metadata) == ("game", {"seed": 1}, {"seed": 2}, {"theorem": "t"})
    assert len({p.id for p in (a, b, c, d)}) == 4, "in an environment, what is seen depends on metadata"


def test_a_chat_of_one_message_asks_what_its_text_asks(tmp_path):
    both = [GOOD, {"messages": [{"role": "user", "content": "a"}], "answer": "1"}]
    with pytest.raises(ValueError, match="data.duplicates: found 1 of 2 records that repeat another"):
        prompts.load(files(tmp_path, both, [{"prompt": "c", "answer": "1"}]), "train")


BAD_LINES = [
    ([GOOD, "{nonsense"], r"train.jsonl:2: found '\{nonsense'"),
    ([GOOD, "[1]"], "train.jsonl:2: found .* need a JSON object"),
    (["[" * 100_000], "train.jsonl:1: found"),
    ([GOOD, "\0\0\0\0"], r"train.jsonl:2: found '\\x00"),
    (['{"prompt": "a", "prompt": "b", "answer": "1"}'], "train.jsonl:1: .*a key comes twice"),
    (['{"prompt": "a", "x": NaN}'], "train.jsonl:1: .*NaN is no JSON"),
    (['{"prompt": "a", "x": 1e999}'], "train.jsonl:1: found inf, a float, need a finite number"),
    (['{"prompt": "a", "x": 1%s}' % ("0" * 40)], "train.jsonl:1: found 1000.*, a int, need a number of 64 bits"),
    (['{"prompt": "a", "x": 1%s}' % ("0" * 5000)], "train.jsonl:1: found .*need a JSON object"),
    (['{"prompt": "a", "x": ' + "[" * 50 + "]" * 50 + "}"], "train.jsonl:1: found lists or objects nested deeper than 32"),
    (['{"prompt": "a", "x": "%s"}' % ("x" * rows.LINE)], "train.jsonl:1: found a line of more than"),
    ([GOOD, {"prompt": "b"}], r"train.jsonl:2: answer: found only \['prompt'\]"),
    ([GOOD, {"prompt": "b", "answer": " "}], "train.jsonl:2: answer: found ' ', need a text that is not blank, or"),
    ([GOOD, {"answer": "b"}], r"train.jsonl:2: prompt: found only \['answer'\], need either"),
    ([GOOD, {"prompt": "b", "answer": 7}], "train.jsonl:2: answer: found 7, need a text"),
    ([GOOD, {"prompt": ["b"], "answer": "7"}], "train.jsonl:2: prompt: found .*, need a text"),
    ([{"prompt": "b", "answer": "7", "kind": 3}], "train.jsonl:1: kind: found 3"),
    ([{"prompt": "b", "answer": "7", "kind": "x\0"}], "train.jsonl:1: kind: found"),
    ([{"prompt": "b", "answer": "7", "env": "e" * 500}], "train.jsonl:1: env: found .*at most 100 characters"),
    ([{"prompt": "b", "answer": "7", "metadata": [1]}], "train.jsonl:1: metadata: found .*need an object"),
    ([{"prompt": "b", "answer": "7", "metadata": "[1]"}], "train.jsonl:1: metadata: found .*need a JSON object"),
    ([{"prompt": "b", "answer": "7", "metadata": {"x": 1}, "x": 2}], "train.jsonl:1: metadata: found .*beside it too"),
    ([{"prompt": "b", "messages": [], "answer": "7"}], "train.jsonl:1: prompt: found only .*need either"),
    ([{"messages": [], "answer": "7"}], r"train.jsonl:1: messages: found \[\], need a list"),
    ([{"messages": ["x"], "answer": "7"}], "train.jsonl:1: messages: found .*at least one object"),
    ([{"messages": [{"content": "x"}], "answer": "7"}], "train.jsonl:1: messages: found .*need objects with a role"),
    ([{"messages": [{"role": "user", "content": 3}], "answer": "7"}], "train.jsonl:1: messages: found .*content"),
    ([{"messages": [{"role": "assistant", "content": "x"}], "answer": "7"}], "train.jsonl:1: messages: found the assistant's last"),
    ([""], "found no problems in"),
    ([GOOD, {"prompt": "b\ud800", "answer": "1"}], r"train.jsonl:2: found '\\ud800', half a character"),
    ([{"prompt": "b", "answer": "\udcff"}], r"train.jsonl:1: found '\\udcff', half a character"),
    ([{"prompt": "b", "answer": "1", "deep": {"\ud83d!": 1}}], r"train.jsonl:1: found '\\ud83d', half a character"),
]


@pytest.mark.parametrize("lines, message", BAD_LINES, ids=range(len(BAD_LINES)))
def test_bad_lines_are_named(tmp_path, lines, message):
    with pytest.raises(ValueError, match=message) as error:
        prompts.load(files(tmp_path, lines, [GOOD]), "train")
    assert str(error.value).startswith("data.train: ") and len(str(error.value)) < 500


def test_bytes_that_are_no_text_are_named(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(json.dumps(GOOD).encode() + b'\n{"prompt": "\xff"}')
    (tmp_path / "x.parquet").write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    texts = pyarrow.array([b"a", b"\xff"]).cast(pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"prompt": texts, "answer": ["1", "2"]}), tmp_path / "y.parquet")
    for name, message in (
        ("x.jsonl", "x.jsonl:2: found bytes that are not UTF-8"),
        ("x.parquet", "x.parquet', which cannot be read"),
        ("y.parquet", "y.parquet: row 2: found what is no plain value"),
    ):
        with pytest.raises(ValueError, match=f"^data.train: .*{message}"):
            prompts.load(config(train=(str(tmp_path / name),)), "train")


@pytest.mark.parametrize("value", [b"x", 1.5, float("nan"), [1], {"a": 1}, True, pyarrow.scalar(3, pyarrow.timestamp("s"))])
def test_odd_columns_are_named_by_row(tmp_path, value):
    column = pyarrow.array([value.as_py()], value.type) if isinstance(value, pyarrow.Scalar) else [value]
    parquet.write_table(pyarrow.table({"prompt": ["a"], "answer": column}), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="x.parquet: row 1: (answer: )?found .*need"):
        prompts.load(config(train=(str(tmp_path / "x.parquet"),)), "train")


def test_columns_of_one_name_are_refused(tmp_path):
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["prompt", "prompt"])
    parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="x.parquet: found columns .*need distinct names"):
        prompts.load(config(train=(str(tmp_path / "x.parquet"),)), "train")


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
JSONS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
ROW = st.fixed_dictionaries(
    {"answer": TEXT.filter(str.strip), "prompt": TEXT},
    optional={
        "metadata": st.dictionaries(TEXT, JSONS, max_size=3).map(json.dumps),
        "kind": st.sampled_from("ab"),
        "level": st.integers(0, 9),
    },
)


@given(st.lists(ROW, min_size=1, max_size=6, unique_by=lambda row: row["prompt"]))
@settings(max_examples=40, deadline=None)
def test_parquet_and_jsonl_give_the_same_problems(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("parity")
    lines = [{k: v for k, v in row.items() if k != "level" or "level" not in json.loads(row.get("metadata", "{}"))} for row in lines]
    both = write(path / "x.jsonl", *lines), write_parquet(path / "x.parquet", lines)
    read = lambda file: [records.parse(row, "", 0).problem for _, row in rows.read(file, "")]
    a, b = map(read, both)
    assert a == b and [p.prompt for p in a] == [row["prompt"] for row in lines]


@given(st.binary(max_size=200) | JSONS.map(lambda v: json.dumps(v).encode()))
@settings(max_examples=150, deadline=None)
def test_no_file_does_worse_than_a_named_error(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "hostile.jsonl"
    path.write_bytes(content)
    data = config(train=(str(path),), eval=(write(tmp_path_factory.getbasetemp() / "other.jsonl", {"prompt": "?" * 99, "answer": "1"}),))
    try:
        assert prompts.load(data, "train").problems
    except ValueError as error:
        assert str(error).startswith("data.") and len(str(error)) < 600


@given(JSONS | st.dictionaries(st.sampled_from(records.OWN), JSONS))
@settings(max_examples=150, deadline=None)
def test_no_row_does_worse_than_a_named_error(row):
    try:
        item = records.parse(row if isinstance(row, dict) else {"prompt": row}, "here", 0)
        json.dumps(item.problem.metadata), records.key(item.problem)
    except ValueError as error:
        assert str(error).startswith("here: ")


def test_damaged_parquet_is_refused_or_read(tmp_path):
    """Bytes changed at random: an error by name, or rows. Never another exception."""
    path, rng = tmp_path / "x.parquet", random.Random(0)
    write_parquet(path, [{"prompt": f"p{i}", "answer": str(i), "metadata": json.dumps({"i": i})} for i in range(50)])
    whole = path.read_bytes()
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 6)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged[: rng.choice([len(whole), rng.randrange(len(whole))])])
        try:
            prompts.load(config(train=(str(path),), eval=("base_conversion",), duplicates="drop", empty="drop"), "train")
        except ValueError as error:
            assert str(error).startswith("data.")


# Functions

MODULE = types.ModuleType("functions_of_a_test")
sys.modules["functions_of_a_test"] = MODULE


def function(yields) -> str:
    MODULE.made = yields
    return "python:functions_of_a_test:made"


def test_a_function_yields_rows_or_problems():
    given = [Problem(7, "a", "1", "k", env="e", metadata={"x": (1, 2)}), {"prompt": "b", "answer": "2"}]
    given += [Problem(7, "c", "3", "k", messages=({"role": "user", "content": "c"},))]
    a, b, c = prompts.load(config(train=(function(lambda: given),), eval=("base_conversion",)), "train").problems
    assert (a.env, a.metadata, b.answer, c.messages) == ("e", {"x": [1, 2]}, "2", ({"role": "user", "content": "c"},))


def _raises():
    yield GOOD
    raise RuntimeError("broken")


@pytest.mark.parametrize(
    "source, message",
    [
        ("python:", "need python:MODULE:FUNCTION"),
        ("python:no.such.module:f", "item 1: found a failure .ModuleNotFoundError.*need python:MODULE:FUNCTION"),
        ("python:json:nothing", "item 1: found a failure .AttributeError"),
        (lambda: 3, "item 1: found a failure .TypeError"),
        (lambda: [GOOD, 3], "item 2: found 3, a int, need a dict or a Problem"),
        (lambda: [GOOD, None], "item 2: found None, a NoneType, need a dict"),
        (lambda: [{3: "x"}], "item 1: found .*need what JSON can hold"),
        (lambda: [GOOD | {"x": {1, 2}}], "item 1: found .*need what JSON can hold"),
        (_raises, "item 2: found a failure .RuntimeError: broken"),
        (lambda: [], "found no problems"),
    ],
)
def test_what_a_function_does_wrong_is_named(source, message):
    name = source if isinstance(source, str) else function(source)
    with pytest.raises(ValueError, match=f"^data.train: .*{message}"):
        prompts.load(config(train=(name,), eval=("base_conversion",)), "train")


# Splits


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
        assert counts == {name: n for name, n in wanted.items() if n}
        assert sum(split.report.read.values()) == len(train) == len(expected) + sum(counts.values())
        text = split.report.text()
        assert all(f"dropped {n} (data.{name}):" in text for name, n in counts.items())
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
    import dataclasses

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


# Given completions


def test_pairs_and_examples(tmp_path):
    tokenizer = load_tokenizer(ASSETS, 145)
    lines = [
        {"prompt": "1+1? ", "chosen": "2", "rejected": "3"},
        {"prompt": "1+1? ", "chosen": "2", "rejected": "4"},
        {"messages": [{"role": "user", "content": "2? "}], "chosen": "1+1=2", "rejected": "1", "level": 2},
    ]
    for path in (write(tmp_path / "p.jsonl", *lines), write_parquet(tmp_path / "p.parquet", lines)):
        split = offline.load_pairs(
            config(train=(path,), eval=(write(tmp_path / "e.jsonl", {"prompt": "9", "chosen": "1", "rejected": "2"}),)), "train"
        )
        a, b, c = offline.pairs(split)
        assert a == Pair(records.problem("1+1? ", "", "file"), "2", "3") and b.rejected == "4" and c.problem.metadata == {"level": 2}
    plain = dict(train=(write(tmp_path / "x.jsonl", *({"prompt": f"{i}? ", "completion": f"{i}"} for i in (7, 1234))),))
    data = config(**plain, eval=(write(tmp_path / "y.jsonl", {"prompt": "5", "completion": "6"}),), too_long="drop")
    split = offline.load_examples(data, "train")
    assert offline.examples(split)[0] == Example(records.problem("7? ", "", "file"), "7")
    left, encoded = offline.encode(tokenizer, data, split, 3, stop=0)
    assert [item.completions for item in left.items] == [("7",)] and left.report.dropped[0].count == 1
    ((completion,),) = encoded.completions
    assert completion.tolist() == [*tokenizer.encode("7", special=False), 0] and len(encoded.prompts) == 1
    with pytest.raises(ValueError, match="rollout.max_new_tokens: found 3, need 5 for 1 of 2 records"):
        offline.encode(tokenizer, config(**plain), split, 3, stop=0)


@pytest.mark.parametrize(
    "row, message",
    [
        ({"chosen": "a"}, "x.jsonl:1: rejected: found only"),
        ({"chosen": "a", "rejected": 3}, "x.jsonl:1: rejected: found 3, need a text"),
        ({"chosen": "a", "rejected": " "}, "data.empty: found 1 of 1 records with a blank text .*x.jsonl:1: ' ' is blank"),
        ({"chosen": "a", "rejected": "a"}, "data.empty: .*'a' is both chosen and rejected"),
    ],
)
def test_bad_pairs_are_named(tmp_path, row, message):
    path = write(tmp_path / "x.jsonl", {"prompt": "p"} | row)
    with pytest.raises(ValueError, match=message):
        offline.load_pairs(config(train=(path,), eval=(path,)), "train")


def test_generated_problems_have_no_pairs():
    with pytest.raises(ValueError, match="data.train: found 'base_conversion', need files or functions, whose rows give chosen, rejected"):
        offline.load_pairs(config(), "train")


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

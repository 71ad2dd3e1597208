"""Files and functions of the user's: what they say is what is read, whatever the format; what is hostile is named."""

import json
import random

import pyarrow
import pytest
from data_files import GOOD, config, files, function, write, write_parquet
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from rl_adapter.data import prompts, records, rows
from rl_adapter.types import Problem


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

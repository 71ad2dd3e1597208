"""Tools: signatures become schemas, calls are checked by them, and nothing that a call does is more than its result."""

import dataclasses
import fractions
import io
import json
import string
import time
import types
from collections.abc import Callable
from typing import Any, Literal

import jsonschema
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_adapter import config, config_check, sandbox, session
from rl_adapter.environments import retrieval, toolbox
from rl_adapter.environments.calculator import calculator
from rl_adapter.environments.calls import Call, Malformed
from rl_adapter.environments.signatures import tool
from rl_adapter.environments.tools import check, message, result
from rl_adapter.rewards import score


def mixed(
    text: str,
    number: int,
    share: float = 0.5,
    items: list[int] = (),
    mode: Literal["a", "b"] = "a",
    json: bool = False,
    title: str | None = None,
) -> Any:
    """Takes one of each."""
    return [text, number, share, list(items), mode, json, title]


def fails(text: str) -> str:
    """Fails."""
    raise RuntimeError(f"broken by {text}")


TOOLS = {one.name: one for one in map(tool, (mixed, fails, calculator))}
run = lambda name, arguments, **how: result(TOOLS, check(TOOLS, Call(name, arguments, **how)))


def test_the_schema_is_the_signature():
    schema = TOOLS["mixed"].schema
    assert schema["type"] == "function" and schema["function"]["name"] == "mixed"
    assert schema["function"]["description"] == "Takes one of each."
    parameters = schema["function"]["parameters"]
    jsonschema.Draft202012Validator.check_schema(parameters)
    assert parameters["required"] == ["text", "number"] and parameters["additionalProperties"] is False
    assert list(parameters["properties"]) == ["text", "number", "share", "items", "mode", "json", "title"]
    assert parameters["properties"]["items"] == {"type": "array", "items": {"type": "integer"}}
    assert parameters["properties"]["mode"] == {"enum": ["a", "b"], "type": "string"}
    json.dumps(schema)  # templates print it


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["a", "b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(["text", "number", "share", "items", "mode", "json", "title", "other"]), values))
@settings(max_examples=150, deadline=None)
def test_what_is_accepted_is_what_the_schema_says(arguments):
    """By another library's reading of the schema. It takes 1.0 for an integer, and JSON has no infinity."""
    found = check(TOOLS, Call("mixed", arguments))
    try:
        text = json.dumps(arguments, allow_nan=False)
    except ValueError:
        assert isinstance(found, Malformed)
        return
    valid = jsonschema.Draft202012Validator(TOOLS["mixed"].parameters).is_valid(json.loads(text))
    whole = [arguments.get("number"), *(arguments["items"] if isinstance(arguments.get("items"), list) else [])]
    assert isinstance(found, Call) == (valid and not any(isinstance(value, float) for value in whole))
    if isinstance(found, Call):
        assert json.loads(result(TOOLS, found))[:2] == [arguments["text"], arguments["number"]]


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"number": 1}, "text: Field required"),
        ({"text": "x", "number": "1"}, "number: Input should be a valid integer"),
        ({"text": "x", "number": True}, "number: Input should be a valid integer"),
        ({"text": "x", "number": 1, "other": 2}, "other: Extra inputs"),
        ({"text": "x", "number": 1, "mode": "c"}, "mode: Input should be 'a' or 'b'"),
        ({"text": "x", "number": 1, "items": nested(150)}, "items.0"),
        ({"text": "x", "number": 1, "items": nested(900)}, "arguments: Invalid JSON: recursion limit"),
        ({"text": "\ud800", "number": 1}, "arguments: Invalid JSON"),
        ({"text": "x", "number": 1, "share": float("inf")}, "share"),
        ("x", "2 required parameters"),
    ],
)
def test_wrong_arguments_are_named(arguments, reason):
    found = check(TOOLS, Call("mixed", arguments))
    assert isinstance(found, Malformed) and reason in found.reason and found.name == "mixed" and len(found.reason) < 1000
    assert result(TOOLS, found) == f"Error: {found.reason}"


def test_huge_arguments_pass_in_a_bounded_time():
    began = time.process_time()
    assert len(run("mixed", {"text": "x" * 10**6, "number": 10**4000})) <= 2**18
    assert run("mixed", {"text": "x", "number": 1} | {str(n): n for n in range(10**4)}).count("Extra inputs") == 3
    assert time.process_time() - began < 2


def test_texts_that_spell_values():
    spelled = {"text": "12", "number": "12", "items": "[1, 2]", "json": "true", "title": "null"}
    assert json.loads(run("mixed", spelled, spelled=True)) == ["12", 12, 0.5, [1, 2], "a", True, None]
    assert "number" in run("mixed", spelled | {"number": "twelve"}, spelled=True)
    assert run("calculator", "3*4") == "12" and result(
        {"c": TOOLS["calculator"]}, check({"calculator": TOOLS["calculator"]}, Call("", "1"))
    )


def test_unknown_tools_and_failing_ones():
    assert run("nothing", {}) == "Error: found no tool 'nothing', need one of mixed, fails, calculator"
    assert run("", "1").startswith("Error: found no tool ''")
    assert run("fails", {"text": "me"}) == "Error: RuntimeError: broken by me"
    assert message(TOOLS, Malformed("no JSON", id="c1")) == {
        "role": "tool",
        "content": "Error: no JSON",
        "name": "tool",
        "tool_call_id": "c1",
    }


def test_half_a_character_is_no_result():
    half = lambda: "\ud800"
    half.__doc__ = "Half."
    half.__name__ = "half"
    half.__annotations__ = {}
    made = {"half": tool(half)}
    assert result(made, check(made, Call("half", {}))) == "?"


def unannotated(x):
    """Bad."""


def starred(*x: int):
    """Bad."""


def no_json(x: io.StringIO):
    """Bad."""


def function(x: Callable[[int], int]):
    """Bad."""


def undefined(x: "Nothing"):  # noqa: F821
    """Bad."""


def silent(x: int): ...


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (unannotated, "tool unannotated: parameter x: found no annotation"),
        (starred, r"tool starred: parameter x: found \*x: int"),
        (no_json, "tool no_json: parameter x: found .*StringIO.* need what JSON holds"),
        (function, "tool function: parameter x: .* need what JSON holds"),
        (undefined, "tool undefined: .*Nothing"),
        (silent, "tool silent: found no docstring"),
    ],
)
def test_functions_that_are_no_tools(bad, match):
    with pytest.raises(ValueError, match=match):
        tool(bad)


# The calculator


def joined(parts):
    """An expression and its value, of two such."""
    (a, x), operator, (b, y) = parts
    if operator == "/":
        return (f"({a}) / ({b})", x / y) if y else (a, x)
    return f"({a}){operator}({b})", {"+": x + y, "-": x - y, "*": x * y}[operator]


expressions = st.recursive(
    st.integers(0, 999).map(lambda n: (str(n), fractions.Fraction(n))),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(joined),
    max_leaves=5,
)


@given(expressions)
@settings(deadline=None)
def test_arithmetic(made):
    expression, value = made
    if len(expression) <= 200:
        assert float(calculator(expression)) == pytest.approx(float(value), rel=1e-9, abs=1e-9)


@given(st.text(string.digits + "+-*/%.()^ e,abcminsqrtlambda:[]{}'\"_=", max_size=60) | st.text(max_size=300))
@settings(max_examples=150, deadline=None)
def test_any_expression_ends_at_once(expression):
    said = run("calculator", {"expression": expression})
    assert said.startswith("Error: ") or len(said) <= 1300


@pytest.mark.parametrize(
    "expression",
    ["9**9**9**9", "9**" * 50 + "9", "1/0", "(-8)**0.5", "1e308*10", "().__class__", "__import__('os')", "True", "1j", "min()", "x", "",
     "(" * 200, "9" * 201, "1if", "10**-9**9**9", "2**4097", "0**-1", "max(*[1])", "abs(1, 2)", "(lambda: 1)()", "'a'*9"],
)  # fmt: skip
def test_bad_expressions(expression):
    began = time.process_time()
    assert run("calculator", {"expression": expression}).startswith("Error: ")
    assert time.process_time() - began < 0.5


def test_what_the_calculator_prints():
    table = {"3*4": "12", "7/2": "3.5", "6/2": "3", "2^10": "1024", "0.1+0.2": "0.3", "7//2": "3", "-7%3": "2", "2**0.5": "1.41421356237",
             "sqrt(16)+max(1,2)-abs(-3)": "3", " 1 + 1 ": "2"}  # fmt: skip
    assert {expression: calculator(expression) for expression in table} == table


# A program in the sandbox, by a stand-in


@pytest.mark.parametrize(
    ("ran", "said"),
    [
        ((b"12\n", b"", 0, ""), "12"),
        ((b"", b"\n", 0, ""), "The program printed nothing."),
        ((b"1\n", b"Traceback", 1, ""), "Error: exit code 1\n1\nTraceback"),
        ((b"\xff", b"", 137, "time"), "Error: limit of time\n\ufffd"),
    ],
)
def test_python(ran, said):
    codes, names = [], ("stdout", "stderr", "returncode", "reason")
    made = {"python": tool(toolbox.interpreter(lambda code: codes.append(code) or types.SimpleNamespace(**dict(zip(names, ran)))))}
    assert result(made, check(made, Call("python", {"code": "print(12)"}))) == said and codes == ["print(12)"]


@pytest.mark.skipif(all(map(sandbox.trouble, sandbox.KINDS)), reason="no sandbox works on this machine")
def test_python_in_the_sandbox_that_a_run_gives_it():
    c = config.override(config.default(), {"env.name": "tools", "env.tools": ("python",), "env.calls": "hermes"})
    environment = session.open_environments(c, score.open_rewards(c), [])[""]
    ask = lambda code: result(environment.tools, check(environment.tools, Call("python", {"code": code})))
    assert ask("print(6 * 7, 'é')") == "42 é"
    assert ask("import sys; print(1); sys.exit(3)") == "Error: exit code 3\n1"
    assert "Error: " in ask("1/0") and "ZeroDivisionError" in ask("1/0")


# Search


PASSAGES = ["The cat sat on the mat.", "A dog ran 7 miles.", "The cat ran after the dog.", "Größe matters, says the cat"]


def corpus(tmp_path, kind):
    path = tmp_path / f"corpus.{kind}"
    if kind == "txt":
        path.write_text("\n\n".join(PASSAGES) + "\n\n\n", encoding="utf-8")
    elif kind == "jsonl":
        path.write_text("\n".join(json.dumps({"contents": p}) for p in PASSAGES), encoding="utf-8")
    else:
        pyarrow.parquet.write_table(pyarrow.table({"text": PASSAGES, "other": range(4)}), path)
    return str(path)


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_search(tmp_path, kind):
    search = retrieval.make(corpus(tmp_path, kind), 2)
    assert search("7") == f"[1] {PASSAGES[1]}"
    assert search("GRÖSSE größe") == f"[1] {PASSAGES[3]}"
    both = search("cat ran")
    assert both.startswith(f"[1] {PASSAGES[2]}\n\n[2] ") and "[3]" not in both
    for nothing in ("", "zebra", "the", "\x00", "?"):
        assert search(nothing) == "Nothing found."
    assert search("cat ran " * 20_000) == both


def test_titles_and_equal_scores_in_order(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps({"title": f"T{n}", "text": "same words"}) + "\n" for n in range(50)))
    assert retrieval.make(str(path), 3)("words") == "[1] T0\nsame words\n\n[2] T1\nsame words\n\n[3] T2\nsame words"


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("c.jsonl", b"{}", r"env.corpus: .*c.jsonl:1: text: found None"),
        ("c.jsonl", b'\n{"text": " "}', r"c.jsonl:2: text: found ' '"),
        ("c.jsonl", b"[1]", "c.jsonl:1: text: found None"),
        ("c.jsonl", b"nope", "need a JSON object"),
        ("c.txt", b"\xff", "UTF-8"),
        ("c.txt", b" \n\n ", "no passage"),
        ("c.parquet", b"nope", "need a Parquet file"),
    ],
)
def test_corpora_that_are_none(tmp_path, name, content, match):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=match):
        retrieval.make(str(tmp_path / name), 3)


# The tools of a config


def settings_of(**fields):
    return dataclasses.make_dataclass("Env", [(k, Any) for k in ("tools", "corpus", "results")])(
        **{"tools": (), "corpus": "", "results": 3} | fields
    )


def test_the_toolbox(tmp_path):
    names = ("calculator", "python", "retrieval", "test_tools:mixed")
    made = toolbox.make(settings_of(tools=names, corpus=corpus(tmp_path, "txt")), run=lambda code: None)
    assert list(made) == ["calculator", "python", "retrieval", "mixed"] and all(name == one.name for name, one in made.items())


@pytest.mark.parametrize(
    ("tools", "match"),
    [
        (("calculators",), "env.tools: found 'calculators', need one of 'calculator', 'python', 'retrieval', or an import path"),
        (("python",), "env.tools: found 'python' and no sandbox"),
        (("retrieval",), "env.corpus: found ''"),
        (("nowhere:x",), "env.tools: found 'nowhere:x', which cannot be imported"),
        (("test_tools:PASSAGES",), "which is no class or function"),
        (("test_tools:silent",), "tool silent: found no docstring"),
        (("calculator", "rl_adapter.environments.calculator:calculator"), "two tools named 'calculator'"),
    ],
)
def test_tools_that_there_are_not(tools, match):
    with pytest.raises(ValueError, match=match):
        toolbox.make(settings_of(tools=tools))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"env.calls": "xml"}, "env.calls"),
        ({"env.max_turns": 0}, "env.max_turns"),
        ({"env.max_result_tokens": 0}, "env.max_result_tokens"),
        ({"env.attempts": 0}, "env.attempts"),
        ({"env.tools": ("calculator", "calculator")}, "env.tools"),
        ({"env.tools": ("retrieval",)}, "env.corpus"),
    ],
)
def test_the_config_is_checked(change, field):
    with pytest.raises(ValueError, match=f"^{field}: found"):
        config_check.validate(config.override(config.default(), change))


def test_a_run_is_known_by_what_its_corpus_holds(tmp_path):
    one, other = (str(tmp_path / name) for name in ("a.txt", "b.txt"))
    of = lambda path, text: open(path, "w").write(text) and config.identity(config.override(config.default(), {"env.corpus": path}))
    assert of(one, "same") == of(other, "same") != of(one, "changed")

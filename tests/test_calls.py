"""Tool calls are read from every family's words; whatever a model writes, parsing ends and never raises."""

import json
import time

import chat_templates
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_adapter import config
from rl_adapter.environments import calls
from rl_adapter.environments.calls import Call, Malformed

FORMATS = tuple(calls.FORMATS)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True)
# No string may spell a mark: of these formats only Hermes, Llama and Mistral's list are read by JSON's own end.
plain = st.text(st.characters(codec="utf-8", exclude_characters="<>[]｜|"), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False) | plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(plain, inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(names, values, max_size=4)
several = st.lists(st.tuples(names, arguments), min_size=1, max_size=4)
dump = lambda value: json.dumps(value, ensure_ascii=False)

# How each family's own template writes calls.
WRITTEN = {
    "kimi": lambda made: (
        "<|tool_calls_section_begin|>"
        + "".join(
            f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{dump(a)}<|tool_call_end|>" for i, (n, a) in enumerate(made)
        )
        + "<|tool_calls_section_end|>"
    ),
    "deepseek": lambda made: (
        "<｜tool▁calls▁begin｜>"
        + "\n".join(f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{dump(a)}\n```<｜tool▁call▁end｜>" for n, a in made)
        + "<｜tool▁calls▁end｜>"
    ),
    "deepseek 3.1": lambda made: "".join(f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{dump(a)}<｜tool▁call▁end｜>" for n, a in made),
    "mistral": lambda made: "[TOOL_CALLS] " + dump([{"name": n, "arguments": a} for n, a in made]),
    "mistral 11": lambda made: "".join(f"[TOOL_CALLS]{n}[ARGS]{dump(a)}" for n, a in made),
    "harmony": lambda made: "<|start|>assistant".join(
        ["<|channel|>analysis<|message|>hm to=functions.no<|end|>"]
        + [f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{dump(a)}<|call|>" for n, a in made]
    ),
    "hermes": lambda made: "Well.\n" + "\n".join(f"<tool_call>\n{dump({'name': n, 'arguments': a})}\n</tool_call>" for n, a in made),
    "llama3": lambda made: "<|python_tag|>" + "; ".join(dump({"name": n, "parameters": a}) for n, a in made),
    "llama3 bare": lambda made: "; ".join(dump({"name": n, "parameters": a}) for n, a in made),
}


@pytest.mark.parametrize("style", WRITTEN)
@given(several)
@settings(max_examples=20, deadline=None)
def test_what_a_family_writes_is_read_back(style, made):
    found = calls.parse(style.split()[0], WRITTEN[style](made))
    assert [(c.name, c.arguments) for c in found] == made
    if style == "kimi":
        assert [c.id for c in found] == [f"functions.{n}:{i}" for i, (n, _) in enumerate(made)]


@given(st.lists(st.tuples(names, st.dictionaries(names, plain, max_size=3)), min_size=1, max_size=4))
def test_glm_spells_its_arguments(made):
    pairs = lambda a: "\n".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>" for k, v in a.items())
    text = "<think>\nno <tool_call>x</tool_call>\n</think>\n" + "\n".join(f"<tool_call>{n}\n{pairs(a)}\n</tool_call>" for n, a in made)
    assert calls.parse("glm", text) == [Call(n, a, spelled=True) for n, a in made]


@given(st.lists(st.tuples(names, st.dictionaries(names, plain, max_size=3)), min_size=1, max_size=4))
def test_qwen_coder_spells_its_arguments(made):
    pairs = lambda a: "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in a.items())
    text = "\n".join(f"<tool_call>\n<function={n}>\n{pairs(a)}</function>\n</tool_call>" for n, a in made)
    assert calls.parse("qwen_coder", text) == [Call(n, a, spelled=True) for n, a in made]


@given(names, plain)
def test_plain_formats_are_read_at_the_end_of_a_turn(name, words):
    words = " ".join(words.split())
    assert calls.parse("brackets", f"First [this]. [{name} {words}]") == [Call(name, words)]
    assert calls.parse("brackets", f"[{name} {words}] is done.") == []
    expression = "".join(words.split()).replace("=", "")
    found = calls.parse("equals", f"so {expression}=")
    assert found == [Call("", expression)] if expression else isinstance(found[0], Malformed)
    assert calls.parse("equals", f"so {expression}= no") == []


MARKS = (
    """<tool_call> </tool_call> [TOOL_CALLS] [ARGS] [CALL_ID] <arg_key> </arg_key> <arg_value> </arg_value> <|python_tag|> <function=x>
<parameter=y> </parameter> </function> to=functions.x <|message|> <|start|> <|call|> <think> </think> <｜tool▁call▁begin｜> <｜tool▁sep｜>
<｜tool▁call▁end｜> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|> ```json "name":"x" "arguments":{ { } [ ] , : " ; = [x
NaN 1e999""".split()
    + [" ", "\n", "\ud800", "9" * 5000]
)


@pytest.mark.parametrize("format", FORMATS)
@given(st.text(), st.lists(st.sampled_from(MARKS)))
@settings(max_examples=40, deadline=None)
def test_any_text_is_read(format, text, parts):
    for words in (text, "".join(parts)):
        found = calls.parse(format, words)
        assert all(isinstance(one, Call | Malformed) for one in found) and len(found) <= calls.MOST + 1
        assert all(len(one.text) <= calls.SHOWN and one.reason for one in found if isinstance(one, Malformed))


HOSTILE = [
    "<tool_call>" * 20_000,
    '<tool_call>"' * 20_000,
    "<tool_call>" + "[" * 200_000,
    '<tool_call>{"a": ["</tool_call>", ' * 10_000,
    "<tool_call>x" + "<arg_key>" * 20_000,
    "<tool_call>x" + "<arg_key>a</arg_key><arg_value>" * 10_000 + "</tool_call>",
    "<tool_call><function=x>" + "<parameter=y>" * 20_000 + "</tool_call>",
    "[TOOL_CALLS]" * 20_000,
    "[TOOL_CALLS]" + "[" * 200_000,
    "<|start|>to=x" * 20_000,
    "to=" * 60_000,
    "<|python_tag|>" + '{"name": "x"};' * 20_000,
    "{" * 200_000,
    '{"name": ' * 30_000,
    "<｜tool▁call▁begin｜>" * 10_000,
    "<|tool_call_begin|>" * 10_000 + "<|tool_call_end|>",
    "[a " * 60_000,
    "[a" * 100_000 + "]",
    " " * 200_000 + "=",
    "=" * 200_000,
    "</think><think>" * 10_000,
]


@pytest.mark.parametrize("format", FORMATS)
def test_long_hostile_texts_take_no_time(format):
    began = time.process_time()
    for text in HOSTILE:
        assert len(calls.parse(format, text)) <= calls.MOST + 1
    assert time.process_time() - began < 2  # a quadratic scan of 200,000 characters takes minutes


# format, text -> what the reason must say
BAD = [
    ("hermes", '<tool_call>{"name": "a", "arguments": {}}', "need </tool_call>"),
    ("hermes", "<tool_call>{'name': 'a'}</tool_call>", "no JSON"),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', "NaN"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "name"),
    ("hermes", '<tool_call>{"name": ["a"]}</tool_call>', "name"),
    ("hermes", '<tool_call>{"name": "a", "arguments": "{}"}</tool_call>', "JSON object"),
    ("hermes", "<tool_call>" + "[" * 10**5 + "</tool_call>", "nested too deep"),
    ("glm", "<tool_call>a<arg_key>x</arg_key></tool_call>", "pairs"),
    ("glm", "<tool_call>a", "need </tool_call>"),
    ("glm", "<tool_call></tool_call>", "name"),
    ("qwen_coder", "<tool_call><function=a>", "need <function=name>"),
    ("qwen_coder", "<tool_call><function=a><parameter=b>1</function></tool_call>", "pairs"),
    ("qwen_coder", '<tool_call>{"name": "a"}</tool_call>', "need <function=name>"),
    ("llama3", "<|python_tag|>import os", "JSON object"),
    ("llama3", '{"name": "a", "parameters": {', "no JSON"),
    ("mistral", "[TOOL_CALLS]a", "no JSON"),
    ("mistral", "[TOOL_CALLS]{}", "list"),
    ("mistral", "[TOOL_CALLS]a[ARGS][]", "JSON object"),
    ("deepseek", "<｜tool▁call▁begin｜>a{}<｜tool▁call▁end｜>", "sep"),
    ("deepseek", "<｜tool▁call▁begin｜>a", "end"),
    ("kimi", "<|tool_call_begin|>functions.a:0{}<|tool_call_end|>", "argument_begin"),
    ("kimi", "<|tool_call_begin|>functions.a:0<|tool_call_argument_begin|>{} {}<|tool_call_end|>", "one JSON object"),
    ("harmony", "<|channel|>commentary to=functions.a", "<|message|>"),
    ("harmony", " to=functions.a<|message|>1<|call|>", "JSON object"),
    ("brackets", "so [calculator 3*4", "need ]"),
    ("equals", "so =", "before ="),
]


@pytest.mark.parametrize(("format", "text", "reason"), BAD)
def test_malformed_calls_say_what_is_wrong(format, text, reason):
    (found,) = calls.parse(format, text)
    assert isinstance(found, Malformed) and reason in found.reason


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("text", ["", "Answer: 4", "{}", '{"a": 1}', "[1, 2]", "a = 4", "<think>[x]=<tool_call>"])
def test_answers_are_no_calls(format, text):
    assert calls.parse(format, text) == []


def test_a_string_may_spell_the_mark():
    code = "print('</tool_call><tool_call>')"
    text = f"<tool_call>{dump({'name': 'python', 'arguments': {'code': code}})}</tool_call>"
    assert calls.parse("hermes", text) == [Call("python", {"code": code})]


def test_more_calls_than_a_turn_may_have():
    found = calls.parse("hermes", '<tool_call>{"name": "a"}</tool_call>' * 30)
    assert found[: calls.MOST] == [Call("a", {})] * calls.MOST and isinstance(found[-1], Malformed) and len(found) == calls.MOST + 1


# Signs out of the templates that the families publish
SIGNS = {
    "kimi": "{%- for tool_call in message['tool_calls'] -%}<|tool_call_begin|>{{ tool_call['id'] }}<|tool_call_argument_begin|>",
    "deepseek": "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name']}}",
    "glm": "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n</tool_call>",
    "mistral": '{{- "[TOOL_CALLS][" }}',
    "harmony": chat_templates.HARMONY,
    "qwen_coder": "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n</function>",
    "hermes": chat_templates.QWEN3,
    "llama3": chat_templates.LLAMA3,
}


@pytest.mark.parametrize("format", SIGNS)
def test_a_template_tells_its_format(format):
    assert calls.detect(SIGNS[format]) == format


def test_templates_that_tell_none():
    assert calls.detect(None) == "brackets"
    with pytest.raises(ValueError, match="env.calls: found 'auto' and a chat template of no known format, need one of"):
        calls.detect(chat_templates.CHATML)


def test_the_config_knows_the_formats():
    assert config.CALLS == ("auto", *calls.FORMATS)

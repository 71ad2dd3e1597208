"""Tool calls in a model's own words: text of a turn, special tokens included -> the calls in it.

Each format is what one family's chat template shows the model. The text comes from a model that is being optimised: a parser never
raises, looks at each character a bounded number of times, and gives what it cannot read as `Malformed`, which the model is told.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

MOST = 16  # calls of one turn; what follows is one malformed call
SHOWN = 80  # characters of a malformed call that are kept


@dataclasses.dataclass(frozen=True)
class Call:
    name: str  # "": the format names none, the only tool is meant
    arguments: Mapping[str, Any] | str  # by parameter; a text is the one required parameter
    id: str = ""  # where the format has one: the result is told under it
    spelled: bool = False  # values are texts, which mean JSON where the parameter is no text


@dataclasses.dataclass(frozen=True)
class Malformed:
    reason: str
    text: str = ""  # the call as it was written, cut
    name: str = ""  # of the tool, as far as it is known
    id: str = ""


Found = Iterator[Call | Malformed]


@dataclasses.dataclass(frozen=True)
class Format:
    """How one family calls tools."""

    read: Callable[[str], Found]
    sign: str = ""  # text of a chat template that has this format; "": of none
    stop: str = ""  # text that ends a call and must end the turn too (rollout.stop); "": the model's own stop tokens do
    nameless: bool = False  # a call is one text: of the only tool, for its one required parameter
    told: Callable[[str], str] = lambda result: result  # a result as plain text, for models without a chat template


def parse(format: str, text: str) -> list[Call | Malformed]:
    """The calls of one turn, at most `MOST`, in their order; [] where the model calls nothing."""
    found = []
    for one in FORMATS[format].read(text):
        if len(found) == MOST:
            return [*found, Malformed(f"found more than {MOST} calls in one turn, need at most {MOST}")]
        found.append(one)
    return found


def detect(template: str | None) -> str:
    """The format that a chat template shows: the first of `FORMATS` whose sign stands in it. Without a template, `brackets`.

    Raises:
        ValueError: the template has no sign of a known format.
    """
    if template is None:
        return "brackets"
    for name, format in FORMATS.items():
        if format.sign and format.sign in template:
            return name
    raise ValueError(f"env.calls: found 'auto' and a chat template of no known format, need one of {', '.join(FORMATS)}")


# Parts


def cut(text: str) -> str:
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def _malformed(reason: str, text: str, name: str = "", id: str = "") -> Malformed:
    return Malformed(reason, cut(text), name, id)


def _no_number(text: str) -> None:
    raise ValueError(f"found {text}, which JSON has not")


_DECODER = json.JSONDecoder(parse_constant=_no_number)
_BLANK = re.compile(r"\s*")


def _json(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at a place, after blanks, and where it ends; ValueError where there is none."""
    try:
        return _DECODER.raw_decode(text, _BLANK.match(text, at).end())
    except RecursionError:
        raise ValueError("found JSON that is nested too deep") from None


def _arguments(text: str, name: str, id: str = "") -> Call | Malformed:
    """A call whose arguments are one JSON object and nothing else."""
    try:
        value, end = _json(text, 0)
    except ValueError as error:
        return _malformed(f"found arguments that are no JSON ({error})", text, name, id)
    if not isinstance(value, dict) or text[end:].strip():
        return _malformed("need arguments that are one JSON object", text, name, id)
    return Call(name, value, id) if name else _malformed("need the name of a tool", text, name, id)


def _named(value: Any, text: str) -> Call | Malformed:
    """A call from an object that holds a name and arguments."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return _malformed("need a JSON object with a name and arguments", text)
    id = value["id"] if isinstance(value.get("id"), str) else ""
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return _malformed("need arguments that are a JSON object", text, value["name"], id)
    return Call(value["name"], arguments, id)


def _between(text: str, begin: str, end: str) -> Iterator[str | None]:
    """What stands between each pair of marks; None where the last is not closed."""
    at = text.find(begin)
    while at >= 0:
        start = at + len(begin)
        close = text.find(end, start)
        yield None if close < 0 else text[start:close]
        at = -1 if close < 0 else text.find(begin, close + len(end))


def _spoken(text: str) -> str:
    """Without thinking: what a model only considers is no call."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


# Formats


def _hermes(text: str) -> Found:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, several"""
    text, begin, end = _spoken(text), "<tool_call>", "</tool_call>"
    at = text.find(begin)
    while at >= 0:
        start = at + len(begin)
        try:
            value, stop = _json(text, start)  # by JSON's own end, since a string may spell the mark
            stop = _BLANK.match(text, stop).end()
            closed = text.startswith(end, stop)
            yield _named(value, text[start:stop]) if closed else _malformed(f"need {end} after one JSON object", text[start:])
        except ValueError as error:
            stop, closed = text.find(end, start), False
            yield _malformed(f"found no JSON ({error})", text[start:stop] if stop >= 0 else text[start:])
        at = text.find(begin, stop) if stop >= 0 else -1


_PAIR = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>")


def _glm(text: str) -> Found:
    """<tool_call>name <arg_key>k</arg_key> <arg_value>v</arg_value> ...</tool_call> (GLM-4.5)"""
    for inside in _between(_spoken(text), "<tool_call>", "</tool_call>"):
        if inside is None:
            yield Malformed("need </tool_call> after the call")
            continue
        name, at, arguments = inside.partition("<arg_key>")[0].strip(), inside.find("<arg_key>"), {}
        while at >= 0 and (pair := _PAIR.match(inside, at)) and (end := inside.find("</arg_value>", pair.end())) >= 0:
            arguments[pair[1].strip()] = inside[pair.end() : end]
            at = end + len("</arg_value>")
        if not name or (at >= 0 and inside[at:].strip()):
            yield _malformed("need a name, then pairs of <arg_key> and <arg_value>", inside, name)
        else:
            yield Call(name, arguments, spelled=True)


_FUNCTION = re.compile(r"\s*<function=([^<>\s]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\s]+)>\n?")


def _qwen_coder(text: str) -> Found:
    """<tool_call><function=name><parameter=k>v</parameter> ...</function></tool_call> (Qwen3-Coder)"""
    for inside in _between(_spoken(text), "<tool_call>", "</tool_call>"):
        function = _FUNCTION.match(inside or "")
        if not function:
            yield _malformed("need <function=name> in <tool_call> and </tool_call>", inside or "")
            continue
        at, arguments = function.end(), {}
        while (pair := _PARAMETER.match(inside, at)) and (end := inside.find("</parameter>", pair.end())) >= 0:
            arguments[pair[1]] = inside[pair.end() : end].removesuffix("\n")
            at = end + len("</parameter>")
        if inside[at:].strip() == "</function>":
            yield Call(function[1], arguments, spelled=True)
        else:
            yield _malformed("need pairs of <parameter=key> and </parameter>, then </function>", inside, function[1])


def _deepseek(text: str) -> Found:
    """DeepSeek-V3 (type, name, JSON in a code block) and V3.1 (name, JSON), between special tokens"""
    for inside in _between(_spoken(text), "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"):
        if inside is None:
            yield Malformed("need <｜tool▁call▁end｜> after the call")
            continue
        head, there, tail = inside.partition("<｜tool▁sep｜>")
        name, block, code = tail.partition("```json")
        if block:  # V3: the head is the type
            head, tail = name, code.strip().removesuffix("```")
        yield _arguments(tail, head.strip()) if there else _malformed("need <｜tool▁sep｜> in the call", inside)


def _kimi(text: str) -> Found:
    """<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|> (Kimi-K2)"""
    for inside in _between(_spoken(text), "<|tool_call_begin|>", "<|tool_call_end|>"):
        if inside is None:
            yield Malformed("need <|tool_call_end|> after the call")
            continue
        id, there, tail = inside.partition("<|tool_call_argument_begin|>")
        id = id.strip()
        name = id.removeprefix("functions.").rpartition(":")[0] or id.removeprefix("functions.")
        yield _arguments(tail, name, id) if there else _malformed("need <|tool_call_argument_begin|> in the call", inside)


def _mistral(text: str) -> Found:
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or since version 11 [TOOL_CALLS]name[ARGS]{...}, several"""
    for part in text.split("[TOOL_CALLS]")[1 : MOST + 2]:
        head, there, tail = part.partition("[ARGS]")
        if there:
            name, _, id = head.partition("[CALL_ID]")
            yield _arguments(tail, name.strip(), id.strip())
            continue
        try:
            value, end = _json(part, 0)
        except ValueError as error:
            yield _malformed(f"found no JSON ({error})", part)
            continue
        if not isinstance(value, list) or not value or part[end:].strip():
            yield _malformed("need one JSON list of calls", part)
            continue
        for one in value:
            yield _named(one, part)


def _harmony(text: str) -> Found:
    """gpt-oss: a message to functions.name, as in ` to=functions.add<|channel|>commentary json<|message|>{...}<|call|>`"""
    for part in text.split("<|start|>"):
        head, there, body = part.partition("<|message|>")
        recipient = re.search(r"to=([^\s<]+)", head)
        if not recipient or recipient[1] in ("user", "all"):
            continue
        name = recipient[1].removeprefix("functions.")
        body = re.split(r"<\|(?:call|end|return)\|>", body, maxsplit=1)[0]
        yield _arguments(body, name) if there else _malformed("need <|message|> and arguments after the recipient", part, name)


def _llama3(text: str) -> Found:
    """{"name": ..., "parameters": {...}}, after <|python_tag|> or alone; several are parted by ;"""
    tag, text = "<|python_tag|>" in text, text.rpartition("<|python_tag|>")[2].strip()
    if not text.startswith("{"):
        if tag:
            yield _malformed("need a JSON object with a name and parameters", text)
        return
    at = 0
    while at < len(text):
        try:
            value, end = _json(text, at)
        except ValueError as error:
            if tag or at or '"name"' in text:  # else it is an answer that begins with a brace
                yield _malformed(f"found no JSON ({error})", text[at:])
            return
        if tag or at or (isinstance(value, dict) and "name" in value):
            yield _named(value, text[at:end])
        else:
            return
        at = end + len(text[end:]) - len(text[end:].lstrip(" \n;"))


_OPEN = re.compile(r"\[([A-Za-z_]\w{0,63})(?=[\s\]])")


def _brackets(text: str) -> Found:
    """[calculator 3*4], at the end of a turn (Toolformer, arXiv:2302.04761): for models without a template"""
    opened = list(_OPEN.finditer(text))
    if not opened:
        return
    last = opened[-1]
    said = text[last.end() :].rstrip()
    if said.endswith("]"):
        yield Call(last[1], said[:-1].strip())
    elif "]" not in said:
        yield _malformed("need ] after the call", text[last.start() :], last[1])


def _equals(text: str) -> Found:
    """3*4=, at the end of a turn: the only tool says what follows (as in Cobbe et al. 2021, arXiv:2110.14168)"""
    said = text.rstrip()
    if said.endswith("="):
        words = said[:-1].rsplit(maxsplit=1)
        alone = words and not said[:-1][-1:].isspace()
        yield Call("", words[-1]) if alone else _malformed("need text before =", said[-SHOWN:])


# In the order in which `detect` looks for their signs: templates of GLM and Qwen3-Coder say <tool_call> too.
FORMATS: Mapping[str, Format] = {
    "kimi": Format(_kimi, "<|tool_call_begin|>"),
    "deepseek": Format(_deepseek, "<｜tool▁call▁begin｜>"),
    "glm": Format(_glm, "<arg_key>"),
    "mistral": Format(_mistral, "[TOOL_CALLS]"),
    "harmony": Format(_harmony, "<|channel|>"),
    "qwen_coder": Format(_qwen_coder, "<function="),
    "hermes": Format(_hermes, "<tool_call>"),
    "llama3": Format(_llama3, "<|start_header_id|>"),
    "brackets": Format(_brackets, stop="]", told=lambda result: f" {result}\n"),
    "equals": Format(_equals, stop="=", nameless=True),
}

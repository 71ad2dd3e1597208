"""One record of a data set: a row becomes a `Problem`, with the completions that are given for it if any."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from rl_adapter.data.rows import json_object, plain, short
from rl_adapter.environments import arithmetic
from rl_adapter.types import Problem

NAME = 100  # characters of a kind or an environment
OWN = ("prompt", "messages", "answer", "env", "kind", "metadata")  # all other keys are metadata

PROBLEM, EXAMPLE, PAIR = (), ("completion",), ("chosen", "rejected")  # which completions the rows of a data set give


@dataclasses.dataclass(frozen=True)
class Item:
    problem: Problem
    where: str  # file and line, or which one of which source
    source: int  # index of the source
    completions: tuple[str, ...] = ()  # as PROBLEM, EXAMPLE or PAIR names them


def parse(row: Mapping[str, Any], where: str, source: int, completions: tuple[str, ...] = PROBLEM) -> Item:
    """A row with `prompt` or `messages`, `answer`, `env`, `kind` (default: 'file') and metadata.

    Metadata are an object under `metadata`, or its JSON text (Parquet has no free objects), and all keys that have no meaning here.
    A problem needs what tells a right answer: `answer`, or an environment or metadata. Blank prompts pass: `checks` counts them.
    """
    row = {k: v for k, v in plain(dict(row), where).items() if v is not None}
    messages, prompt = _asked(row, where)
    answer = _text(row, "answer", where) if "answer" in row else ""
    kind, env = (_name(row.get(key, default), key, where) for key, default in (("kind", "file"), ("env", "")))
    metadata = _metadata(row, where, OWN + completions)
    if not completions and not answer.strip() and not env and not metadata:
        found = f"only {sorted(row)}" if "answer" not in row else short(answer)
        raise ValueError(f"{where}: answer: found {found}, need a text that is not blank, or an env or metadata that can tell a right one")
    given = tuple(_text(row, key, where) for key in completions)
    return Item(problem(prompt, answer, kind, messages, env, metadata), where, source, given)


def problem(
    prompt: str, answer: str, kind: str, messages: tuple[Mapping[str, Any], ...] = (), env: str = "", metadata: Mapping | None = None
) -> Problem:
    """A problem whose id depends on nothing but what is asked."""
    one = dataclasses.replace(arithmetic.problem(prompt, answer, kind), messages=messages, env=env, metadata=dict(metadata or {}))
    return dataclasses.replace(one, id=int(key(one)[:8], 16) & 0x7FFFFFFF) if messages or env else one


def key(problem: Problem) -> str:
    """Hash of what is asked: problems are the same where it is. A chat of one message by the user asks what its plain text asks; in an
    environment, what is seen first depends on its metadata too."""
    messages = problem.messages or ({"role": "user", "content": problem.prompt},)
    asked = [messages, problem.env, problem.metadata if problem.env else None]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def held_out(problem: Problem) -> bool:
    """Whether the problem is of the tenth of all that is not trained on where one source serves both splits."""
    return int(key(problem)[-8:], 16) % 10 == 0


def _asked(row: Mapping[str, Any], where: str) -> tuple[tuple[Mapping[str, Any], ...], str]:
    """Messages, () for plain text; and the prompt."""
    if ("prompt" in row) == ("messages" in row):
        raise ValueError(f"{where}: prompt: found only {sorted(row)}, need either 'prompt' or 'messages'")
    if "prompt" in row:
        return (), _text(row, "prompt", where)
    messages = row["messages"]
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise ValueError(f"{where}: messages: found {short(messages)}, need a list of at least one object")
    messages = tuple({k: v for k, v in m.items() if v is not None} for m in messages)
    for m in messages:
        said = m.get("content", "")
        parts = isinstance(said, list) and all(isinstance(p, dict) and isinstance(p.get("text", ""), str) for p in said)
        if not isinstance(m.get("role"), str) or not (isinstance(said, str) or parts):
            raise ValueError(
                f"{where}: messages: found {short(m)}, need objects with a role, and a content that is text or a list of parts"
            )
    if messages[-1]["role"] == "assistant":
        raise ValueError(f"{where}: messages: found the assistant's last, need one that it can answer")
    said = messages[-1].get("content", "")
    return messages, said if isinstance(said, str) else "".join(part.get("text", "") for part in said)


def _metadata(row: Mapping[str, Any], where: str, own: tuple[str, ...]) -> dict[str, Any]:
    found = row.get("metadata", {})
    if isinstance(found, str):
        found = plain(json_object(found, f"{where}: metadata"), f"{where}: metadata")
    if not isinstance(found, dict):
        raise ValueError(f"{where}: metadata: found {short(found)}, need an object, or its JSON text")
    others = {k: v for k, v in row.items() if k not in own}
    if clash := sorted(found.keys() & others.keys()):
        raise ValueError(f"{where}: metadata: found {short(clash)} beside it too, need each once")
    return found | others


def _text(row: Mapping[str, Any], name: str, where: str) -> str:
    if name not in row:
        raise ValueError(f"{where}: {name}: found only {short(sorted(row))}, need {name!r}")
    if not isinstance(row[name], str):
        raise ValueError(f"{where}: {name}: found {short(row[name])}, need a text")
    return row[name]


def _name(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str) or len(value) > NAME or not (value.isprintable() and value == value.strip()):
        raise ValueError(f"{where}: {name}: found {short(value)}, need a printable text of at most {NAME} characters")
    return value

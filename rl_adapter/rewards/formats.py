"""Scorers of form: a regular expression, a JSON schema. Runs in a killable worker, since both can be made to take for ever."""

import functools
import json
import pathlib
import re

from rl_adapter.rewards.exact import tail

BLOCK = re.compile(r"^[ \t]*(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[^\s`~]*)[^\n`~]*\n(?P<body>.*?)^[ \t]*(?P=fence)[ \t]*$", re.M | re.S)


def last_block(text: str, *languages: str) -> str | None:
    """What the last fenced block holds, of one of `languages` or of none; None where there is no such block that is closed."""
    blocks = [m for m in BLOCK.finditer(text) if m["language"].lower() in ("", *languages)]
    return blocks[-1]["body"] if blocks else None


@functools.cache
def pattern(source: str) -> re.Pattern:
    return re.compile(source, re.DOTALL)


def matches(text: str, source: str) -> float:
    """1.0 if the whole completion matches; a dot matches line ends too."""
    return float(pattern(source).fullmatch(text) is not None)


@functools.cache
def validator(path: str):
    """Of the JSON schema in a file, which says its draft or is of 2020-12."""
    import jsonschema

    schema = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    kind.check_schema(schema)
    return kind(schema)


def fits(text: str, mark: str, path: str) -> float:
    """1.0 if the last fenced block, or without one what follows the last mark, is JSON that satisfies the schema."""
    source = last_block(text, "json")
    source = tail(text, mark) if source is None else source
    try:
        value = json.loads(source or "", parse_constant=_refuse, object_pairs_hook=_distinct)
    except (ValueError, RecursionError):
        return 0.0
    return float(validator(path).is_valid(value))


def _refuse(name: str):
    raise ValueError(f"found {name}, which is not JSON")


def _distinct(pairs: list) -> dict:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("found a key twice")
    return dict(pairs)

"""The scorers of reasoning-gym. Runs in a killable worker.

Some of them run the answer as code (`EVALUATED`), and a few give reward for nothing. What they get to see is decided here:

- The answer is what follows the last mark, without blanks around it. 1.0 counts and nothing less, unless partial credit is asked for:
  most give a little to any text that contains the answer.
- Where an answer is evaluated, one with attributes, keywords, quotes or calls (but of `FUNCTIONS`) is no answer: what is left has no way
  out of arithmetic, only a way to take for ever, which the worker's clock ends.
- "nan" is at no distance from anything, so it is no answer where the gold answer does not say it.
- Where the gold answer is true or false the answer must say which: the library takes any text for true.
- puzzle24 asks for the problem's own four numbers: the library takes any four.
"""

import functools
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import reasoning_gym

from rl_adapter.rewards.exact import tail

LONGEST = 10_000  # characters of an answer; boards and texts are answers too
EVALUATED = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
EVALUATED += ("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration")
FUNCTIONS = (
    "sin",
    "cos",
    "tan",
    "exp",
    "log",
    "ln",
    "sqrt",
    "Abs",
    "abs",
    "sec",
    "csc",
    "cot",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "tanh",
)
_LISTED = EVALUATED[:4]  # compare a list of Python with the answer; its items may be quoted
_WORD = re.compile(r"[^\W\d]\w*")
_KEYWORDS = ("lambda", "import", "for", "if", "while", "yield", "await", "async", "class", "def")


@functools.cache
def scorer(name: str, config: str = "{}"):
    """The scorer of a data set made with a config, as JSON: some look at it."""
    return reasoning_gym.create_dataset(name, size=1, seed=0, **json.loads(config)).score_answer


def entry_of(problem: Mapping[str, Any]) -> tuple[str, dict]:
    """Name of the data set, from `metadata.gym`, and the entry as the library made it, from `metadata.entry`."""
    entry = problem["metadata"].get("entry")
    if not isinstance(entry, dict) or not isinstance(entry.get("metadata"), dict):
        raise ValueError("metadata.entry: found none, need an entry of reasoning-gym with its metadata")
    return problem["metadata"].get("gym") or entry["metadata"].get("source_dataset") or problem["kind"], entry


def score(text: str, problem: Mapping[str, Any], mark: str, partial: bool) -> float:
    name, entry = entry_of(problem)
    answer = (tail(text, mark) or "").strip()
    gold = entry.get("answer")
    if not answer or len(answer) > LONGEST or (_says_nan(answer) and not _says_nan(str(gold))):
        return 0.0
    if isinstance(gold, bool) or name == "game_of_life_halting":
        return float(answer.lower() == str(gold).lower())
    if name in EVALUATED and answer != gold and not harmless(answer, quotes=name in _LISTED):
        return 0.0
    if name == "puzzle24" and sorted(map(int, re.findall(r"\d+", answer))) != sorted(entry["metadata"]["numbers"]):
        return 0.0
    value = float(scorer(name, json.dumps(problem["metadata"].get("config") or {}, sort_keys=True))(answer, entry))
    if not 0 <= value <= 1:
        raise ValueError(f"score_answer of {name}: found {value}, need a number in [0, 1]")
    return value if partial else math.floor(value)


def harmless(answer: str, quotes: bool) -> bool:
    """Whether evaluating a text can do no more than arithmetic."""
    words = _WORD.findall(answer)
    if re.search(r"[\\#@:;!`]|__|\.\s*[^\W\d]", answer) or any(word in _KEYWORDS for word in words):
        return False
    if not quotes and re.search(r"['\"]", answer):
        return False
    # Whatever stands before a parenthesis is called: a closing bracket or a quote can be, as can a name.
    called = [head.strip() for head in re.findall(r"([^\W\d]\w*\s*|[\])}'\"]\s*|)\(", answer)]
    return all(head in ("", *(() if quotes else FUNCTIONS)) for head in called)


def _says_nan(text: str) -> bool:
    return bool(re.search(r"(?<![a-z])nan(?![a-hk-z])", text.lower()))

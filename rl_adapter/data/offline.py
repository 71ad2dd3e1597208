"""Given completions: pairs of which one is preferred, and examples to imitate, read and checked as problems are.

Rows are those of files and functions (`records.parse`) with `chosen` and `rejected`, or with `completion`, each a text.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from rl_adapter.data import checks, prompts, records
from rl_adapter.data.prompts import Split
from rl_adapter.hub.tokenizer import Tokenizer
from rl_adapter.types import Example, Pair


def load_pairs(data: Any, split: str) -> Split:
    """As `prompts.load`; the records are what `pairs` makes of it, once encoded."""
    return prompts.load(data, split, completions=records.PAIR)


def load_examples(data: Any, split: str) -> Split:
    return prompts.load(data, split, completions=records.EXAMPLE)


def pairs(split: Split) -> list[Pair]:
    return [Pair(item.problem, *item.completions) for item in split.items]


def examples(split: Split) -> list[Example]:
    return [Example(item.problem, *item.completions) for item in split.items]


@dataclasses.dataclass(frozen=True)
class Encoded:
    """Tokens of records, int32."""

    prompts: list[np.ndarray]
    completions: list[tuple[np.ndarray, ...]]  # of each record, in the order of its fields; each ends with the stop token


def encode(
    tokenizer: Tokenizer,
    data: Any,
    split: Split,
    max_new_tokens: int,
    stop: int | None,
    variables_of: prompts.VariablesOf | None = None,
) -> tuple[Split, Encoded]:
    """Tokens of what is left: no prompt of more than `data.max_prompt_tokens`, no completion of more than `max_new_tokens` with its stop.

    A completion is encoded by itself, as a sampled one is kept apart from its prompt; `stop` ends it, as if sampled (None: nothing does).
    """
    split, encoded = prompts.encode(tokenizer, data, split, variables_of)
    end = () if stop is None else (stop,)
    one: Callable[[str], np.ndarray] = lambda text: np.array((*tokenizer.encode(text, special=False), *end), np.int32)
    answers = [tuple(map(one, item.completions)) for item in split.items]
    sizes = [max(map(len, some)) for some in answers]
    items, long = checks.lengths(split.items, sizes, max_new_tokens, "rollout.max_new_tokens", data.too_long)
    left = {id(item) for item in items}
    keep = [i for i, item in enumerate(split.items) if id(item) in left]
    narrowed = prompts.narrowed(split, items, long)
    report = checks.with_tokens(narrowed.report, [len(encoded[i]) for i in keep])
    return dataclasses.replace(narrowed, report=report), Encoded([encoded[i] for i in keep], [answers[i] for i in keep])

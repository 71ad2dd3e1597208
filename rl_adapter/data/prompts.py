"""The data stage: problems of a split, checked, rendered, encoded and padded.

Life of a prompt: `load` -> `encode` (once, before anything compiles) -> `iterator` says which -> `batch` pads them.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from rl_adapter.data import checks, records, sources
from rl_adapter.data.checks import Report
from rl_adapter.data.records import Item
from rl_adapter.hub import chat
from rl_adapter.hub.tokenizer import Tokenizer
from rl_adapter.types import Problem

VariablesOf = Callable[[Problem], Mapping[str, Any]]  # what the chat template gets beside messages, such as tools


@dataclasses.dataclass(frozen=True)
class Split:
    """What is left of the records of a split when the checks are done."""

    items: list[Item]
    names: tuple[str, ...]  # of sources
    report: Report

    @property
    def problems(self) -> list[Problem]:
        return [item.problem for item in self.items]

    @property
    def sources(self) -> np.ndarray:
        """[n] int32, the source of each: an index into `names`."""
        return np.array([item.source for item in self.items], np.int32)


def load(data: Any, split: str, envs: Collection[str] | None = None, completions: tuple[str, ...] = records.PROBLEM) -> Split:
    """Records of one split ("train" or "eval").

    Args:
      data: the `data` section of the config.
      split: which one. The other is looked at too where they could meet, since a prompt in both voids the evaluation.
      envs: names of the environments that there are; None: any goes.
      completions: what rows give beside problems (`records`).
    """
    if split not in ("train", "eval"):
        raise ValueError(f"split: found {split!r}, need 'train' or 'eval'")
    read = sources.read(data, split, completions)
    items, dropped = checks.content(read, data, envs)
    # Where sources are split by question, the splits do not meet.
    if data.eval and any(map(sources.is_given, (*data.train, *data.eval))):
        other = sources.read(data, "eval" if split == "train" else "train", completions)
        train, held_out = (items, other) if split == "train" else (other, items)
        kept, both = checks.overlap(train, {records.key(item.problem) for item in held_out}, data)
        if split == "train":
            items, dropped = kept, dropped + both
    if not items:
        found = f"none of {', '.join(sources.names(data, split))} for {split}"
        need = "at least one problem (where data.eval is (), a tenth is held out)"
        raise ValueError(f"{sources.field_of(data, split)}: found {found}, need {need}")
    names = sources.names(data, split)
    return Split(items, names, checks.report(split, names, read, items, dropped))


def asked(data: Any, problem: Problem) -> tuple[Mapping[str, Any], ...] | str:
    """What the model is asked: messages to render by its chat template, or text."""
    if problem.messages:
        return problem.messages
    text = data.prompt.replace("{prompt}", problem.prompt)
    return ({"role": "user", "content": text},) if data.chat else text


def tokens_of(tokenizer: Tokenizer, data: Any, problem: Problem, variables_of: VariablesOf | None = None) -> np.ndarray:
    """Token ids of a prompt, int32."""
    told = asked(data, problem)
    if isinstance(told, str):
        return np.array(tokenizer.encode(told), np.int32)
    return np.array(chat.start(tokenizer, told, **(variables_of(problem) if variables_of else {})).ids, np.int32)


def encode(tokenizer: Tokenizer, data: Any, split: Split, variables_of: VariablesOf | None = None) -> tuple[Split, list[np.ndarray]]:
    """Token ids of every prompt, int32, of those that are left: none empty, none of more than `data.max_prompt_tokens`."""
    encoded = []
    for item in split.items:
        try:
            encoded.append(tokens_of(tokenizer, data, item.problem, variables_of))
        except ValueError as error:
            raise ValueError(f"{item.where}: {error}") from error
    ids = {id(item): tokens for item, tokens in zip(split.items, encoded)}
    none = {i: f"{item.problem.prompt!r:.60}" for i, (item, tokens) in enumerate(zip(split.items, encoded)) if not len(tokens)}
    items, empty = checks.sift(split.items, none, "empty", data.empty, "that encode to no token", "at least one")
    sizes = [len(ids[id(item)]) for item in items]
    items, long = checks.lengths(items, sizes, data.max_prompt_tokens, "data.max_prompt_tokens", data.too_long)
    return with_lengths(narrowed(split, items, empty + long), encoded := [ids[id(item)] for item in items]), encoded


def with_lengths(split: Split, encoded: list[np.ndarray]) -> Split:
    """Whose report tells them."""
    return dataclasses.replace(split, report=checks.with_tokens(split.report, [len(tokens) for tokens in encoded]))


def narrowed(split: Split, items: list[Item], dropped: tuple[checks.Fault, ...]) -> Split:
    """The split with only `items` left."""
    now = checks.report(split.report.split, split.names, items, items, split.report.dropped + dropped)
    return Split(items, split.names, dataclasses.replace(now, read=split.report.read))


def without(split: Split, keep: list[int], name: str, reasons: list[str]) -> Split:
    """The split with the records `keep` alone; the others are a fault, dropped as the field `name` says."""
    return narrowed(split, [split.items[i] for i in keep], (checks.Fault(name, len(reasons), tuple(reasons[: checks.SHOWN])),))


def batch(encoded: list[np.ndarray], indices: np.ndarray, length: int, pad: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The chosen prompts, padded on the right to one length: tokens [P, T] int32 and lengths [P] int32."""
    lengths = np.array([len(encoded[i]) for i in indices], np.int32)
    if lengths.size and lengths.max() > length:
        raise ValueError(f"length: found {length}, need at least {lengths.max()}, the longest prompt of the batch")
    tokens = np.full((len(lengths), length), pad, np.int32)
    for row, i in enumerate(indices):
        tokens[row, : lengths[row]] = encoded[i]
    return tokens, lengths

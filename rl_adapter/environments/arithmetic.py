"""Small verifiable problems with a known way to work them, made from reasoning-gym items.

Three kinds. Each is hard to answer in one go for a tiny model, and easy in steps that each are one small lookup:

    chain_sum        7+9-3+8?                     7+9=16 16-3=13 13+8=21 Answer: 21
    leg_counting     legs: 3 dog, 2 ant?          3*4=12 2*6=12 12+12=24 Answer: 24
    base_conversion  352 in base 7?               3*7=21 21+5=26 26*7=182 182+2=184 Answer: 184

The gold answer is reasoning-gym's; only the wording is ours, because every prompt token costs compute. The steps are
derived from the prompt alone, so a test can hold them against the gold answer.
"""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import reasoning_gym
from reasoning_gym.arithmetic.leg_counting import ANIMALS

from rl_adapter.types import Problem

SPLITS = {"pretrain": range(0, 70), "train": range(70, 90), "eval": range(90, 100)}  # percent of the questions
POOL_SEED = 0  # the pool is fixed: a seed chooses from it, so that no choice of seeds makes two splits meet
LONGEST_STEPS = 36  # characters; keeps a worked completion within 42 tokens and a document within 52


@dataclasses.dataclass(frozen=True)
class Kind:
    """How one reasoning-gym data set becomes problems."""

    config: Mapping[str, Any]  # of the reasoning-gym data set
    draws: int  # items drawn to make the pool, before duplicates are removed
    ask: Callable[[dict], str | None]  # metadata -> prompt; None to skip the item
    steps: Callable[[str], list[str]]  # prompt -> worked steps


def _ask_chain(metadata: dict) -> str:
    return metadata["expression"].replace(" ", "") + "? "


def _chain_steps(prompt: str) -> list[str]:
    first, *rest = re.findall(r"[+-]?\d+", prompt)
    return _accumulate(int(first), rest)


def _accumulate(total: int, signed: list[str]) -> list[str]:
    steps = []
    for term in signed:
        steps.append(f"{total}{term}={total + int(term)}")
        total += int(term)
    return steps


def _ask_legs(metadata: dict) -> str:
    return "legs: " + ", ".join(f"{count} {animal}" for animal, count in metadata["animals"].items()) + "? "


def _leg_steps(prompt: str) -> list[str]:
    steps, total = [], None
    for count, animal in re.findall(r"(\d+) ([a-z ]+)", prompt):
        legs = int(count) * ANIMALS[animal]
        steps.append(f"{count}*{ANIMALS[animal]}={legs}")
        if total is not None:
            steps.append(f"{total}+{legs}={total + legs}")
        total = legs if total is None else total + legs
    return steps


def _ask_base(metadata: dict) -> str | None:
    digits, base = metadata["source_repr"], metadata["source_base"]
    return f"{digits} in base {base}? " if metadata["target_base"] == 10 and base > 2 and 2 <= len(digits) <= 3 else None


def _base_steps(prompt: str) -> list[str]:
    digits, base = re.findall(r"\d+", prompt)
    steps, total = [], int(digits[0])
    for digit in digits[1:]:  # Horner's rule
        steps += [f"{total}*{base}={total * int(base)}", f"{total * int(base)}+{digit}={total * int(base) + int(digit)}"]
        total = total * int(base) + int(digit)
    return steps


KINDS: dict[str, Kind] = {
    "chain_sum": Kind(dict(min_terms=4, max_terms=5, min_digits=1, max_digits=1), 80_000, _ask_chain, _chain_steps),
    "leg_counting": Kind(dict(min_animals=2, max_animals=3, min_instances=1, max_instances=9), 50_000, _ask_legs, _leg_steps),
    "base_conversion": Kind(dict(min_base=3, max_base=10, min_value=3, max_value=728), 70_000, _ask_base, _base_steps),
}


def pool(kind: str, split: str) -> tuple[Problem, ...]:
    """All problems of one kind in one split."""
    if split not in SPLITS:
        raise ValueError(f"split: found {split!r}, need one of {sorted(SPLITS)}")
    if kind not in KINDS:
        raise ValueError(f"kinds: found {kind!r}, need one of {sorted(KINDS)}")
    return _pools(kind)[split]


@functools.cache
def _pools(name: str) -> dict[str, tuple[Problem, ...]]:
    kind, seen = KINDS[name], {}
    for item in reasoning_gym.create_dataset(name, size=kind.draws, seed=POOL_SEED, **kind.config):
        prompt = kind.ask(item["metadata"])
        # Negative running totals would double the lookups a tiny model has to learn, so those items are left out.
        if prompt is None or prompt in seen or "=-" in (worked := " ".join(kind.steps(prompt))) or len(worked) > LONGEST_STEPS:
            continue
        seen[prompt] = problem(prompt, item["answer"], name)
    split_of = {percent: split for split, percents in SPLITS.items() for percent in percents}
    pools = {split: [] for split in SPLITS}
    for prompt, one in seen.items():
        pools[split_of[percent(prompt)]].append(one)
    return {split: tuple(members) for split, members in pools.items()}


def percent(question: str) -> int:
    """Which percent of all questions this one belongs to: what splits are made by."""
    return _digest("split", question) % 100


def problem(prompt: str, answer: str, kind: str) -> Problem:
    """A problem whose id depends on nothing but its prompt."""
    return Problem(id=_digest("id", prompt) & 0x7FFFFFFF, prompt=prompt, answer=answer, kind=kind)


def quick(problem: Problem) -> str:
    """The completion that answers directly."""
    return f"Answer: {problem.answer}"


def worked(problem: Problem) -> str:
    """The completion that works the problem in steps."""
    return " ".join([*KINDS[problem.kind].steps(problem.prompt), quick(problem)])


def _digest(purpose: str, text: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{purpose}:{text}".encode()).digest()[:8], "big")

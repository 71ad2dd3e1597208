"""Small verifiable tasks for pretrained base models, which follow examples better than instructions.

A prompt is two answered questions and one to answer, a line each; the answer is what stands on the rest of that line. Questions are drawn
from a fixed pool; splits are made by question, as in arithmetic.py.
"""

import dataclasses
import functools
import random
from collections.abc import Callable

from rl_adapter.environments import arithmetic
from rl_adapter.types import Problem

POOL = 4000  # questions of a kind at most


@dataclasses.dataclass(frozen=True)
class Kind:
    numbers: Callable[[random.Random], tuple[int, ...]]  # draws what a question is about
    ask: Callable[[tuple[int, ...]], str]
    answer: Callable[[tuple[int, ...]], int]
    examples: tuple[tuple[int, ...], ...]


_three = lambda rng: tuple(rng.sample(range(10, 100), 3))
KINDS = {
    "two_digit_sum": Kind(
        lambda rng: (rng.randint(10, 99), rng.randint(10, 99)), lambda n: f"{n[0]} + {n[1]} =", sum, ((23, 45), (67, 18))
    ),
    "largest": Kind(_three, lambda n: f"max({n[0]},{n[1]},{n[2]}) =", max, ((41, 87, 12), (93, 24, 58))),
    "smallest": Kind(_three, lambda n: f"min({n[0]},{n[1]},{n[2]}) =", min, ((41, 87, 12), (93, 24, 58))),
}


def pool(name: str, split: str) -> tuple[Problem, ...]:
    """All problems of one kind in one split."""
    if split not in arithmetic.SPLITS or name not in KINDS:
        raise ValueError(f"kind, split: found {name!r}, {split!r}, need one of {sorted(KINDS)} and one of {sorted(arithmetic.SPLITS)}")
    return tuple(p for p, percent in _pool(name) if percent in arithmetic.SPLITS[split])


@functools.cache
def _pool(name: str) -> tuple[tuple[Problem, int], ...]:
    kind, rng = KINDS[name], random.Random(arithmetic.POOL_SEED)
    shots = "".join(f"{kind.ask(n)} {kind.answer(n)}\n" for n in kind.examples)
    drawn = dict.fromkeys(kind.numbers(rng) for _ in range(4 * POOL))
    questions = [n for n in drawn if n not in kind.examples][:POOL]
    return tuple((arithmetic.problem(shots + kind.ask(n), str(kind.answer(n)), name), arithmetic.percent(kind.ask(n))) for n in questions)

"""The reward stage: completions -> one number each, by exact match with the gold answer.

The text comes from a model that is being optimised against this file, so it is treated as hostile: it is only ever
compared as a string, looked at within a bounded window, and a failure costs no other sample anything.
"""

from collections.abc import Callable

import numpy as np

from rl_adapter.types import Outcome, Problem

WINDOW = 10_000  # characters from the end that are looked at; an answer comes last
LONGEST_ANSWER = 200  # characters
TRAILING = ".,;:!?"  # punctuation that ends a sentence and is no part of an answer


def extract(text: str, mark: str, words: int = 1) -> str | None:
    """What follows the last `mark`, or stands first where that is '': so many words, without trailing punctuation; None for nothing.

    The last one counts, so that a model may correct itself; only as many words as the gold answer has, so that listing
    candidates gains nothing.
    """
    _, there, tail = text[-WINDOW:].rpartition(mark) if mark else ("", True, text)
    found = _clean(tail[: 2 * LONGEST_ANSWER].split()[:words])
    return found if there and 0 < len(found) <= LONGEST_ANSWER else None


def exact_match(text: str, problem: Problem, mark: str = "Answer:") -> float:
    """1.0 if the extracted answer is the gold answer, character by character; else 0.0."""
    gold = problem.answer.split()
    return float(extract(text, mark, len(gold)) == _clean(gold))


def _clean(words: list[str]) -> str:
    answer = " ".join(words)
    return answer.rstrip(TRAILING) or answer


def score(
    texts: list[str], problems: list[Problem], reward: Callable[[str, Problem], float] = exact_match
) -> tuple[np.ndarray, list[str | None]]:
    """Scores each text against its own problem.

    Args:
      texts: B completions, decoded.
      problems: B problems, row by row.
      reward: how one is scored.

    Returns:
      Rewards [B] f32, and per row None or why scoring failed. A row that fails, or whose reward is not finite, gets 0.
    """
    if len(texts) != len(problems):
        raise ValueError(f"texts: found {len(texts)} for {len(problems)} problems, need one problem a text")
    found = [score_one(text, problem, reward) for text, problem in zip(texts, problems, strict=True)]
    return np.array([value for value, _ in found], np.float32), [failure for _, failure in found]


def score_one(text: str, problem: Problem, reward: Callable[[str, Problem], float] = exact_match) -> tuple[float, str | None]:
    """The reward of one text, and None or why scoring failed: then the reward is 0."""
    try:
        value = float(reward(text, problem))
    except Exception as error:  # whatever one sample provokes stays with that sample
        return 0.0, f"{type(error).__name__}: {error}"[:200]
    return (value, None) if np.isfinite(value) else (0.0, f"reward: found {value}, need a finite number")


class Judge:
    def __init__(self, reward):
        self.reward, self.workers = reward, 1

    def score(self, problem, text, truncated=False) -> Outcome:
        value, failure = score_one(text, problem, self.reward)
        return Outcome(value, {"exact": value}, {"exact": failure} if failure else {})

"""Exact match with the gold answer.

The text comes from a model that is being optimised against this file, so it is treated as hostile: it is only ever
compared as a string, and looked at within a bounded window.
"""

from rl_adapter.types import Problem

WINDOW = 10_000  # characters from the end that are looked at; an answer comes last
LONGEST_ANSWER = 200  # characters
TRAILING = ".,;:!?"  # punctuation that ends a sentence and is no part of an answer


def tail(text: str, mark: str) -> str | None:
    """What follows the last `mark`, or the whole text where that is ''; None where there is no mark."""
    _, there, rest = text[-WINDOW:].rpartition(mark) if mark else ("", True, text)
    return rest if there else None


def extract(text: str, mark: str, words: int = 1) -> str | None:
    """What follows the last `mark`, or stands first where that is '': so many words, without trailing punctuation; None for nothing.

    The last one counts, so that a model may correct itself; only as many words as the gold answer has, so that listing
    candidates gains nothing.
    """
    found = _clean((tail(text, mark) or "")[: 2 * LONGEST_ANSWER].split()[:words])
    return found if 0 < len(found) <= LONGEST_ANSWER else None


def exact_match(text: str, problem: Problem, mark: str = "Answer:") -> float:
    """1.0 if the extracted answer is the gold answer, character by character; else 0.0. ValueError without a gold answer."""
    gold = problem.answer.split()
    if not gold:
        raise ValueError("answer: found none, need a gold answer to match")
    return float(extract(text, mark, len(gold)) == _clean(gold))


def _clean(words: list[str]) -> str:
    answer = " ".join(words)
    return answer.rstrip(TRAILING) or answer

"""The reward stage: exact answers only, and hostile text costs nobody anything."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_adapter import reward
from rl_adapter.types import Problem


def problem(answer="27"):
    return Problem(id=1, prompt="20+7? ", answer=answer, kind="chain_sum")


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Answer: 27", "27"),
        ("20+7=27 Answer: 27", "27"),
        ("Answer:27.", "27"),
        ("Answer: 26 no, Answer: 27\n", "27"),  # the last one counts
        ("Answer: 27 28 29", "27"),  # a list of guesses is its first guess
        ("Answer: -3", "-3"),
        ("Answer: 1.5", "1.5"),
        ("Answer: 27 Answer:", None),
        ("Answer: ", None),
        ("27", None),
        ("", None),
        ("answer: 27", None),
        ("Answer: " + "9" * 1000, None),
    ],
)
def test_extract(text, expected):
    assert reward.extract(text, "Answer:") == expected


@pytest.mark.parametrize(
    "text, gold, expected",
    [
        ("Answer: 27", "27", 1.0),
        ("Answer: 27", " 27 ", 1.0),
        ("Answer: 027", "27", 0.0),
        ("Answer: 27.0", "27", 0.0),
        ("Answer: 26+1", "27", 0.0),
        ("Answer: 2 7", "27", 0.0),
        ("Answer: New  York, of course", "New York", 1.0),  # as many words as the gold answer has
        ("Answer: the U.S.", "the U.S.", 1.0),
        ("Answer: !", "!", 1.0),
        ("no idea", "27", 0.0),
    ],
)
def test_exact_match(text, gold, expected):
    assert reward.exact_match(text, problem(gold)) == expected


def test_score_keeps_rows_apart():
    def moody(text, problem):
        if text == "raise":
            raise RuntimeError("boom")
        return float("nan") if text == "nan" else reward.exact_match(text, problem)

    texts = ["Answer: 27", "raise", "nan", "Answer: 27", "Answer: 1"]
    rewards, failures = reward.score(texts, [problem()] * 5, moody)
    np.testing.assert_array_equal(rewards, np.array([1, 0, 0, 1, 0], np.float32))
    assert rewards.dtype == np.float32
    assert failures == [None, "RuntimeError: boom", "reward: found nan, need a finite number", None, None]


def test_what_is_no_text_fails_alone():
    rewards, failures = reward.score([None, "Answer: 27"], [problem()] * 2)
    assert rewards.tolist() == [0.0, 1.0] and failures[0].startswith("TypeError") and failures[1] is None


def test_one_problem_a_text():
    with pytest.raises(ValueError, match="texts: found 1 for 2 problems"):
        reward.score(["Answer: 27"], [problem()] * 2)


@settings(max_examples=30, deadline=None)
@given(st.text())
def test_any_text_scores_without_failure(text):
    rewards, failures = reward.score([text, "Answer: " + text], [problem()] * 2)
    assert set(rewards.tolist()) <= {0.0, 1.0} and failures == [None, None]


def test_hostile_text_takes_no_time():
    texts = ["Answer: 9**9**9**9", "Answer:" * 1_000_000, "Answer: " + " " * 10_000_000, "9" * 10_000_000, "\x00\ud800Answer: \u202e27"]
    start = time.perf_counter()
    rewards, failures = reward.score(texts, [problem()] * len(texts))
    assert time.perf_counter() - start < 1.0
    assert not rewards.any() and failures == [None] * len(texts)

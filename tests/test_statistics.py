"""Estimators against all subsets, one by one; intervals against hand tables, and against how often they hold the truth."""

import collections
import fractions
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_adapter import statistics

ROWS = st.lists(st.tuples(st.sampled_from([None, "a", "b", "c", "d"]), st.sampled_from([0.0, 0.25, 1.0])), min_size=1, max_size=7)


def over_subsets(row, k, value):
    """Mean of `value` over all subsets of k."""
    found = [value(subset) for subset in itertools.combinations(row, k)]
    return math.fsum(found) / len(found)


def majority(subset, row):
    """The mean worth of the answers that most give; an answer is worth the mean of all that give it."""
    votes = collections.Counter(answer for answer, _ in subset if answer is not None)
    tied = [answer for answer, n in votes.items() if n == max(votes.values())]
    worth = {answer: np.mean([value for other, value in row if other == answer]) for answer in tied}
    return np.mean(list(worth.values())) if tied else 0.0


@settings(max_examples=60, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=3))
def test_estimators_are_means_over_all_subsets(rows):
    n = min(map(len, rows))
    rows = [row[:n] for row in rows]
    answers, values = [[a for a, _ in row] for row in rows], np.array([[v for _, v in row] for row in rows])
    needed = [[over_subsets(row, k, lambda subset: max(v == 1 for _, v in subset)) for k in range(1, n + 1)] for row in rows]
    np.testing.assert_allclose(statistics.pass_at(values == 1), needed, rtol=0, atol=1e-12)
    needed = [[over_subsets(row, k, lambda subset: majority(subset, row)) for k in range(1, n + 1)] for row in rows]
    np.testing.assert_allclose(statistics.majority_at(answers, values), needed, rtol=0, atol=1e-12)


def test_pass_at_k_by_hand():
    """1 - C(n - c, k) / C(n, k), of 4 completions with 0 .. 4 right ones."""
    solved = np.tri(5, 4, -1)
    for k, needed in {1: [0, 1 / 4, 1 / 2, 3 / 4, 1], 2: [0, 1 / 2, 5 / 6, 1, 1], 3: [0, 3 / 4, 1, 1, 1], 4: [0, 1, 1, 1, 1]}.items():
        np.testing.assert_allclose(statistics.pass_at(solved)[:, k - 1], needed, rtol=0, atol=1e-15)


def test_majority_by_hand():
    """Of a, a, b, c with a right: pairs are aa (1), ab and ac twice each (1/2), bc (0); triples aab, aac (1), abc twice (1/3)."""
    answers, values = [["a", "a", "b", "c"]], np.array([[1.0, 1, 0, 0]])
    needed = [1 / 2, (1 + 4 / 2) / 6, (2 + 2 / 3) / 4, 1]
    np.testing.assert_allclose(statistics.majority_at(answers, values), [needed], rtol=0, atol=1e-15)


@pytest.mark.parametrize("n", [64, statistics.LARGEST])
def test_many_completions_stay_exact(n):
    """Against rational numbers where the answers are two, one of them right."""
    c = n // 3
    answers, values = [["a"] * c + ["b"] * (n - c)], np.array([[1.0] * c + [0.0] * (n - c)])
    found, solved = statistics.majority_at(answers, values)[0], statistics.pass_at(values)[0]
    for k in (1, 2, n // 2, n):
        ways = [math.comb(c, t) * math.comb(n - c, k - t) * fractions.Fraction((2 * t > k) + (2 * t >= k), 2) for t in range(k + 1)]
        needed = float(sum(ways) / math.comb(n, k))
        np.testing.assert_allclose(found[k - 1], needed, rtol=1e-12, atol=1e-300)
        needed = float(1 - fractions.Fraction(math.comb(n - c, k), math.comb(n, k)))
        np.testing.assert_allclose(solved[k - 1], needed, rtol=1e-15)


@pytest.mark.parametrize("answers", [2, 3, 30])
def test_shares_stay_shares(answers):
    """To the bit, or their interval would be another one; with so many completions rounding would pass 1."""
    rows = np.random.default_rng(0).integers(0, answers, (3, 128)).tolist()
    found = statistics.majority_at(rows, np.ones((3, 128)))
    assert (found <= 1).all() and found.min() > 1 - 1e-12


def test_what_does_not_fit_is_refused():
    for function in (statistics.pass_at, lambda values: statistics.majority_at([["a"] * 4] * 3, values)):
        for shape in ((3,), (3, 0), (3, statistics.LARGEST + 1)):
            with pytest.raises(ValueError, match="^completions: found shape"):
                function(np.zeros(shape))
    with pytest.raises(ValueError, match="^answers: found 2 rows, need 3 of 4"):
        statistics.majority_at([["a"] * 4] * 2, np.zeros((3, 4)))


def test_interval_of_a_share_is_wilsons():
    """Newcombe 1998 (doi:10.1002/(SICI)1097-0258(19980430)17:8<857::AID-SIM777>3.0.CO;2-E), table I, method 3."""
    for right, n, needed in ((81, 263, (0.2553, 0.3662)), (15, 148, (0.0624, 0.1605)), (0, 20, (0.0, 0.1611)), (1, 29, (0.0061, 0.1718))):
        found = statistics.interval(np.arange(n) < right)
        np.testing.assert_allclose(found, needed, atol=6e-5)
    assert statistics.interval(np.ones(20))[1] == pytest.approx(1)


def test_interval_of_other_values_is_normal():
    low, high = statistics.interval(np.array([-1.0, 0, 1, 4]))
    np.testing.assert_allclose([low, high], 1 + np.array([-1, 1]) * 1.96 * np.sqrt((4 + 1 + 0 + 9) / 3 / 4))


def test_intervals_hold_the_truth_as_often_as_they_say():
    """Means of 4 completions a problem, and paired differences, in 600 draws of 60 problems, easy and hard ones."""
    rng = np.random.default_rng(0)
    held = collections.Counter()
    for a, b in ((0.5, 0.5), (4, 1), (0.2, 2)):
        for _ in range(200):
            p = rng.beta(a, b, 60)
            x, y = (rng.binomial(4, q) / 4 for q in (p, p**1.3))
            low, high = statistics.interval(x)
            held["mean"] += low <= a / (a + b) <= high
            low, high = statistics.paired_interval(x, y)
            truth = a / (a + b) - math.gamma(a + 1.3) * math.gamma(a + b) / math.gamma(a) / math.gamma(a + b + 1.3)
            held["change"] += low <= truth <= high
    assert all(0.92 <= n / 600 <= 0.99 for n in held.values()), held


def test_values_between_tell_more_than_shares():
    rng = np.random.default_rng(1)
    many = rng.binomial(8, 0.5, 100) / 8
    width = lambda x: np.subtract(*statistics.interval(x)[::-1])
    assert width(many) < 0.6 * width(np.arange(100) < 50)
    assert width(np.full(10, 0.5)) == pytest.approx(width(np.arange(10) < 5)), "few equal values are no certainty"


def test_paired_interval_of_shares():
    a, b = np.array([1.0] * 30 + [0] * 70), np.array([1.0] * 24 + [0] * 76)  # 6 gained, none lost
    low, high = statistics.paired_interval(a, b)
    middle = 6 / 102
    half = 1.96 * np.sqrt((7 / 102 - middle**2) / 102)
    np.testing.assert_allclose([low, high], [middle - half, middle + half])
    low, high = statistics.paired_interval(a[:10], a[:10])
    assert low == -high and 0.1 < high < 0.3, "ten equal answers do not show that all are equal"
    low, high = statistics.paired_interval(a * 5, b * 5)
    np.testing.assert_allclose([low, high], 0.3 + np.array([-1, 1]) * 1.96 * np.sqrt((25 * 6 / 100 - 0.09) / 99))
    assert statistics.interval(np.array([3.0])) == (-math.inf, math.inf), "one value tells nothing of a mean"

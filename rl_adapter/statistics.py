"""What n completions of each of a set of problems show: pass@k, maj@k, and how sure of a mean one may be. NumPy alone, float64.

Intervals are of 95 %, and take problems as what was drawn: completions of one problem depend on each other.
"""

import functools
import itertools
import math
from collections.abc import Hashable, Sequence

import numpy as np

NORMAL = 1.96  # of a 95 % interval
LARGEST = 512  # n; counts of subsets stay within float64


def pass_at(solved: np.ndarray) -> np.ndarray:
    """The share of subsets of k of a problem's n completions that hold a right one: pass@k, unbiased (Chen et al. 2021, arXiv:2107.03374).

    Args:
      solved: [P, n] bool.

    Returns:
      [P, n]: k = 1 .. n. The mean over problems is the estimate.
    """
    n = _checked(solved)
    counts, of = np.unique(np.asarray(solved, bool).sum(1), return_inverse=True)
    # Of integers, so exact but for one rounding.
    return np.array([[1 - math.comb(n - c, k) / math.comb(n, k) for k in range(1, n + 1)] for c in counts.tolist()])[of]


def majority_at(answers: Sequence[Sequence[Hashable | None]], values: np.ndarray) -> np.ndarray:
    """What the answer that most of k completions give is worth, as the mean over all subsets of k of a problem's n completions: maj@k.

    One of the answers that tie is taken at random, each with one probability; the result is the exact mean over that too.
    (Self-consistency, Wang et al. 2022, arXiv:2203.11171.)

    Args:
      answers: [P][n]; None is no answer and no vote. Without a vote the value is 0.
      values: [P, n], what each completion is worth; an answer is worth the mean of those that give it.

    Returns:
      [P, n]: k = 1 .. n.
    """
    n = _checked(values)
    if [len(row) for row in answers] != [n] * len(values):
        raise ValueError(f"answers: found {len(answers)} rows, need {len(values)} of {n} each, as values")
    subsets = np.array([float(math.comb(n, k)) for k in range(1, n + 1)])
    found = np.array([_majority(row, worth) / subsets for row, worth in zip(answers, np.asarray(values, np.float64))])
    return np.clip(found, min(0.0, np.min(values)), max(0.0, np.max(values)))  # rounding may pass a share's bounds


def _majority(answers: Sequence[Hashable | None], values: np.ndarray) -> np.ndarray:
    """[n]: the sum over subsets of k = 1 .. n completions of what the answers with most votes are worth, their mean where they tie.

    Subsets are counted by t, the most votes; answer by answer, by how many completions they hold and how many answers have t votes.
    """
    of_answer: dict[Hashable, list[float]] = {}
    for answer, value in zip(answers, values):
        if answer is not None:
            of_answer.setdefault(answer, []).append(value)
    n = len(answers)
    found = np.zeros(n + 1)
    for t in range(1, max(map(len, of_answer.values()), default=0) + 1):
        rivals = [x for x in of_answer.values() if len(x) >= t]
        # By answers with t votes and completions held: the number of subsets, and what those answers are worth in all of them.
        state = np.zeros((2, min(len(rivals), n // t) + 1, n + 1))
        free = n - sum(map(len, rivals))  # completions of which any may be held, since their answer cannot have t votes
        state[0, 0, : free + 1] = _choices(free)
        for i, x in enumerate(rivals):
            ways = _choices(len(x))
            grown = np.zeros_like(state)
            for part, tied in itertools.product(range(2), range(min(i + 1, state.shape[1]))):
                grown[part, tied] = np.convolve(state[part, tied], ways[:t])[: n + 1]
            state[1] += np.mean(x) * state[0]
            grown[:, 1:, t:] += ways[t] * state[:, :-1, : n + 1 - t]
            state = grown
        found += (state[1, 1:] / np.arange(1, state.shape[1])[:, None]).sum(0)
    return found[1:]


@functools.lru_cache(maxsize=LARGEST + 1)
def _choices(size: int) -> np.ndarray:
    """[size + 1]: in how many ways 0 .. size of so many are chosen."""
    return np.array([float(math.comb(size, k)) for k in range(size + 1)])


def _checked(x: np.ndarray) -> int:
    """n, once x is [P, n]."""
    shape = np.shape(x)
    if len(shape) != 2 or not 1 <= shape[1] <= LARGEST:
        raise ValueError(f"completions: found shape {shape}, need [problems, n] with n in 1 .. {LARGEST}")
    return shape[1]


def interval(values: np.ndarray) -> tuple[float, float]:
    """Of the mean of values [P]. In [0, 1] Wilson's (1927), which stays there and holds near the ends; else the normal one.

    Wilson's is of trials that give 0 or 1. Values in between spread less, so they are worth more trials: as many as would have a mean
    of this variance (the effective number of Korn & Graubard 1998). Values that do not spread at all count as one trial each.
    """
    values = np.asarray(values, np.float64)
    if not _shares(values):
        return _normal(values)
    n, p, z = len(values), min(1.0, float(values.mean())), NORMAL
    spread = float(values.var(ddof=1)) if n > 1 else 0.0
    trials = max(n, p * (1 - p) * n / (n - 1) / spread * n) if spread > 0 else n
    middle, half = p + z * z / (2 * trials), z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def paired_interval(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Of the mean of a - b, of values [P] of the same problems. In [0, 1] with half a trial added to each of four outcomes: +1, -1, and
    twice 0 (of shares: Agresti & Min 2005, doi:10.1002/sim.1781), so no difference seen in few trials is not taken for certainty."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if not _shares(a, b):
        return _normal(a - b)
    n = len(a) + 2
    middle = float((a - b).sum()) / n
    half = NORMAL * math.sqrt((float(((a - b) ** 2).sum() + 1) / n - middle**2) / n)
    return max(middle - half, -1.0), min(middle + half, 1.0)


def _shares(*values: np.ndarray) -> bool:
    return all(0 <= x.min() and x.max() <= 1 for x in values)


def _normal(values: np.ndarray) -> tuple[float, float]:
    n, mean = len(values), float(values.mean())
    half = NORMAL * math.sqrt(float(values.var(ddof=1)) / n) if n > 1 else math.inf
    return mean - half, mean + half

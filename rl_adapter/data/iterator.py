"""Which problems come next: shuffled epochs, mixtures with weights, and a curriculum by measured pass rate; all resume exactly.

    batches = make_iterator(sources, batch_size, seed, weights, curriculum)
    indices = next(batches)           # [batch_size]
    more = batches.draw(n)            # [n], further along the same stream
    batches.observe(indices, rates)   # pass rates, of a curriculum
    state = batches.get_state()       # JSON-able; set_state of it on a fresh iterator goes on with the very same draws

Without weights all problems are one pool, and each comes once before any comes again. With weights a source's share of draws is its
weight's share of their sum (to 1 %, as grain rounds weights), and each of its problems comes once before any of it comes again.

The curriculum (`ByPassRate`) takes the place of the epochs inside a source.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import grain
import numpy as np

ENDLESS = 2**40  # draws; more than any run makes


class Iterator(Protocol):
    def __next__(self) -> np.ndarray: ...
    def draw(self, count: int) -> np.ndarray: ...
    def observe(self, indices: Sequence[int], rates: Sequence[float]) -> None: ...
    def get_state(self) -> dict[str, Any]: ...
    def set_state(self, state: Mapping[str, Any]) -> None: ...


@dataclasses.dataclass(frozen=True)
class Curriculum:
    explore: float = 0.5  # in (0, 1]: share of draws for problems never drawn, while there are any
    floor: float = 0.05  # in (0, 1]: weight of a problem that always or never passes; at a rate of 1/2 it is 1
    newest: float = 0.5  # in (0, 1]: share of the newest measurement in a problem's running rate


def make_iterator(
    sources: Sequence[int], batch_size: int, seed: int, weights: Sequence[float] = (), curriculum: Curriculum | None = None
) -> Iterator:
    """An endless iterator over problems.

    Args:
      sources: [n] of each problem, the index of its source.
      batch_size: of what `next` gives.
      seed: of the order.
      weights: one a source; () for one pool of all.
      curriculum: None for epochs.
    """
    sources = np.asarray(sources, np.int64)
    if not sources.size:
        raise ValueError("sources: found no problem, need at least one")
    if batch_size < 1:
        raise ValueError(f"batch_size: found {batch_size}, need at least 1")
    pools = [np.flatnonzero(sources == n) for n in range(len(weights))] if weights else [np.arange(len(sources))]
    if sum(map(len, pools)) < len(sources) or not all(map(len, pools)):
        has = [len(pool) for pool in pools]
        raise ValueError(f"weights: found {tuple(weights)} for sources of {has} problems, need one for each source, each with a problem")
    return ByPassRate(pools, batch_size, seed, weights, curriculum) if curriculum else Epochs(pools, batch_size, seed, weights)


def from_config(data: Any, sources: Sequence[int], batch_size: int) -> Iterator:
    """The iterator that the `data` section of the config asks for."""
    curriculum = Curriculum(data.explore, data.floor, data.newest) if data.curriculum == "pass_rate" else None
    return make_iterator(sources, batch_size, data.seed, tuple(data.weights), curriculum)


def _mixed(datasets: list[grain.MapDataset], weights: Sequence[float]) -> grain.MapDataset:
    return grain.MapDataset.mix(datasets, [float(w) for w in weights]) if len(datasets) > 1 else datasets[0]


def _shuffled(pool: np.ndarray, seed: int) -> grain.MapDataset:
    # Not `repeat()`: its length is the largest int there is, which overflows in what follows.
    return grain.MapDataset.source(pool).shuffle(seed=seed).repeat(ENDLESS // len(pool) + 1)


class Epochs:
    """Shuffled anew every epoch; a batch may straddle two. The state is how many were drawn: data sets of grain are read at any place."""

    def __init__(self, pools: list[np.ndarray], batch_size: int, seed: int, weights: Sequence[float]) -> None:
        self.order = _mixed([_shuffled(pool, (seed + n) % 2**32) for n, pool in enumerate(pools)], weights)
        self.batch_size, self.drawn = batch_size, 0

    def __next__(self) -> np.ndarray:
        return self.draw(self.batch_size)

    def draw(self, count: int) -> np.ndarray:
        count = _count(count)
        self.drawn += count
        return np.array([self.order[i] for i in range(self.drawn - count, self.drawn)], np.int64)

    def observe(self, indices: Sequence[int], rates: Sequence[float]) -> None:
        """Changes nothing here."""

    def get_state(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.drawn = _drawn(state, ("drawn",))


class ByPassRate:
    """Prefers problems that pass sometimes: where all completions of a group pass or all fail, there is nothing to learn from.

    A draw is of a problem never drawn, in shuffled order, with probability `explore`, or where none was measured yet; else of a measured
    one, with probability proportional to

        w(r) = floor + (1 - floor) 4 r (1 - r)        r: running pass rate; r <- r + newest (measured - r), at first r = measured

    which is the variance of a pass at rate r, its largest value made 1. No problem comes twice in a draw while its source has others. What
    was drawn and not yet measured waits until it is, or nothing else is left.
    """

    def __init__(self, pools: list[np.ndarray], batch_size: int, seed: int, weights: Sequence[float], settings: Curriculum) -> None:
        self.pools, self.batch_size, self.seed, self.settings = pools, batch_size, seed, settings
        self.fresh = [grain.MapDataset.source(pool).shuffle(seed=(seed + n) % 2**32) for n, pool in enumerate(pools)]
        self.turns = _mixed([grain.MapDataset.source([n]).repeat(ENDLESS) for n in range(len(pools))], weights)
        self.drawn, self.tried = 0, [0] * len(pools)  # all draws; problems of each pool that were drawn at least once
        self.rates = np.full(sum(map(len, pools)), np.nan)

    def __next__(self) -> np.ndarray:
        return self.draw(self.batch_size)

    def draw(self, count: int) -> np.ndarray:
        count = _count(count)
        taken = np.zeros(len(self.rates), bool)
        found = []
        for _ in range(count):
            found.append(self._one(self.turns[self.drawn], taken))
            taken[found[-1]] = True
            self.drawn += 1
        return np.array(found, np.int64)

    def _one(self, turn: int, taken: np.ndarray) -> int:
        pool = self.pools[turn]
        # Keyed by the place in the stream, so that the state needs no generator's.
        first, second = np.random.Generator(np.random.Philox(key=self.seed, counter=self.drawn)).random(2)
        rates, left = self.rates[pool], ~taken[pool]
        weights = np.where(np.isfinite(rates) & left, self.settings.floor + (1 - self.settings.floor) * 4 * rates * (1 - rates), 0.0)
        if self.tried[turn] < len(pool) and (first < self.settings.explore or not weights.any()):
            self.tried[turn] += 1
            return int(self.fresh[turn][self.tried[turn] - 1])
        if not weights.any():
            weights = left.astype(float) if left.any() else np.ones(len(pool))
        total = np.cumsum(weights)
        # The product may round up to the total, which stands behind the last problem that has a weight.
        return int(pool[min(np.searchsorted(total, second * total[-1], side="right"), np.flatnonzero(weights)[-1])])

    def observe(self, indices: Sequence[int], rates: Sequence[float]) -> None:
        """Pass rates, in [0, 1], of problems that were drawn; in order, where one stands there twice."""
        indices, rates = np.asarray(indices, np.int64), np.asarray(rates, float)
        known = ((indices >= 0) & (indices < len(self.rates))).all()
        if indices.shape != rates.shape or indices.ndim != 1 or not known:
            raise ValueError(f"indices: found {indices}, with {rates.shape} rates, need problems, and one rate each")
        if not ((rates >= 0) & (rates <= 1)).all():
            raise ValueError(f"rates: found {rates}, need all in [0, 1]")
        for i, rate in zip(indices, rates):
            old = self.rates[i]
            self.rates[i] = rate if np.isnan(old) else old + self.settings.newest * (rate - old)

    def get_state(self) -> dict[str, Any]:
        measured = np.flatnonzero(np.isfinite(self.rates))
        rates = {"measured": measured.tolist(), "rates": self.rates[measured].tolist()}
        return {"drawn": self.drawn, "tried": list(self.tried)} | rates

    def set_state(self, state: Mapping[str, Any]) -> None:
        drawn = _drawn(state, ("drawn", "tried", "measured", "rates"))
        tried, measured, rates = list(state["tried"]), np.array(state["measured"], np.int64), np.array(state["rates"], float)
        fits = len(tried) == len(self.pools) and all(0 <= n <= len(pool) for n, pool in zip(tried, self.pools))
        fits &= measured.shape == rates.shape and bool(((measured >= 0) & (measured < len(self.rates)) & (rates >= 0) & (rates <= 1)).all())
        if not fits:
            raise ValueError(f"state: found one of other data, need that of {len(self.rates)} problems in {len(self.pools)} pools")
        self.drawn, self.tried = drawn, tried
        self.rates = np.full(len(self.rates), np.nan)
        self.rates[measured] = rates


def _count(count: int) -> int:
    if count < 0:
        raise ValueError(f"count: found {count}, need at least 0")
    return int(count)  # numpy's would end up in the state, which JSON must hold


def _drawn(state: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    """The number of draws of a state that has these keys."""
    if set(state) != set(keys) or not isinstance(state["drawn"], int) or not 0 <= state["drawn"] < ENDLESS:
        raise ValueError(f"state: found {sorted(state)}, need {', '.join(keys)} of an iterator made with the same arguments")
    return state["drawn"]

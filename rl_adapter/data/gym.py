"""Problems from reasoning-gym, by the name of a data set: distinct questions, split by question.

A problem keeps its whole entry as `metadata`: {"gym": name, "entry": {"question", "answer", "metadata"}}, and "config" where one was
given, so that the data set's own scorer can judge an answer later. Entries went through JSON: tuples in them are lists.
"""

import functools
import json
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS

from rl_adapter.data import records
from rl_adapter.data.rows import json_object, short
from rl_adapter.types import Problem

BLOCK = 500  # items of one reasoning-gym data set: some make all of theirs at once
STALE = 1000  # draws in a row that give no new question: there are no more


def parse(source: str, field: str) -> tuple[str, str]:
    """Name and config, canonical JSON, of "gym:NAME" or "gym:NAME:{config}"."""
    _, name, *config = source.split(":", 2)
    if name not in DATASETS:
        raise ValueError(f"{field}: found {short(source)}, need gym: and one of {', '.join(sorted(DATASETS))}")
    config = json_object(config[0], f"{field}: {short(source)}") if config else {}
    if clash := {"size", "seed"} & config.keys():
        raise ValueError(f"{field}: found {sorted(clash)} in {short(source)}, which data.train_size, data.eval_size and data.seed decide")
    return name, json.dumps(config, sort_keys=True)


def problems(source: str, size: int, seed: int, split: str, field: str) -> list[Problem]:
    """The first `size` distinct problems of a split. Nine tenths of all questions are for training, one is held out, whatever the seed."""
    name, config = parse(source, field)
    try:
        return _pool(name, config, seed).first(split, size)
    except _Exhausted as error:
        found = f"data.{split}_size: found {size} wanted of {short(source)}, need at most {error}, as many as were found in {split}"
        raise ValueError(found) from None
    except Exception as error:  # a generator may raise anything where its config is odd
        raise ValueError(f"{field}: found {short(source)}, which fails ({type(error).__name__}: {error}), need another config") from error


class _Exhausted(Exception):
    pass


@functools.cache
def _pool(name: str, config: str, seed: int) -> "_Pool":
    return _Pool(name, json.loads(config), seed)


class _Pool:
    """Questions drawn so far; the order of each split is the order of drawing, so that more may be drawn at any time."""

    def __init__(self, name: str, config: dict[str, Any], seed: int) -> None:
        self.name, self.config, self.seed = name, config, seed
        self.drawn, self.stale, self.seen = 0, 0, set()
        self.splits: dict[str, list[Problem]] = {"train": [], "eval": []}
        self.block = None

    def first(self, split: str, size: int) -> list[Problem]:
        while len(self.splits[split]) < size:
            if self.stale == STALE:
                raise _Exhausted(len(self.splits[split]))
            self._draw()
        return self.splits[split][:size]

    def _draw(self) -> None:
        at = self.drawn % BLOCK
        if not at:
            # Items are seeded by seed + index. Random seeds of numpy have 32 bits.
            seed = (self.seed * 1_000_003 + self.drawn) % 2**31
            self.block = reasoning_gym.create_dataset(self.name, size=BLOCK, seed=seed, **self.config)
        one = self._problem(self.block[at])
        self.drawn += 1
        if (question := records.key(one)) in self.seen:
            self.stale += 1
            return
        self.stale = 0
        self.seen.add(question)
        self.splits["eval" if records.held_out(one) else "train"].append(one)

    def _problem(self, item: dict[str, Any]) -> Problem:
        entry = json.loads(json.dumps({name: item[name] for name in ("question", "answer", "metadata")}))
        metadata = {"gym": self.name, "entry": entry} | ({"config": self.config} if self.config else {})
        return records.problem(entry["question"], entry["answer"] or "", self.name, metadata=metadata)

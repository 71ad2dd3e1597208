"""The reward stage: a completion -> one number, out of weighted parts.

    with open_rewards(config) as rewards:
        outcome = rewards.score(problem, text)  # from any thread

Exact match is computed here. Everything else reads what the model wrote with somebody's code: programs run in sandboxes of their own
(`code.py`), the rest in workers (`pool.py`). A scorer that fails costs its part of its own completion, and says why.
"""

import importlib.util
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent import futures
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from rl_adapter import config as configs
from rl_adapter import sandbox
from rl_adapter.rewards import code, exact, pool
from rl_adapter.types import Outcome, Problem

Part = tuple[float | None, str | None]  # a scorer's value, or why there is none
POOLED = "math", "gym", "regex", "json", "function"
PACKAGES = {"math": "math_verify", "json": "jsonschema"}  # of the extra `rewards`


def open_rewards(config: ConfigDict) -> "Rewards":
    """The rewards of a config. Starts nothing yet; ValueError for what can be seen to be missing."""
    return Rewards(config.reward)


class Rewards:
    """What `reward` of a config asks for. Entered as a context it starts a worker, where a part needs one, and so finds what cannot work;
    without that, one starts at the first completion."""

    def __init__(self, section: ConfigDict):
        self.section = section
        self.names = tuple(n for n in configs.SCORERS if section[n].weight or section.held_out == n)
        for name, package in PACKAGES.items():
            if name in self.names and importlib.util.find_spec(package) is None:
                raise ValueError(f"reward.{name}: found no package {package}, need it: pip install 'rl-adapter[rewards]'")
        settings = {n: {k: v for k, v in section[n].items() if k != "weight"} | {"mark": section.mark} for n in POOLED if n in self.names}
        reads = []
        if "json" in self.names:
            settings["json"]["schema"] = os.path.abspath(section.json.schema)
            reads.append(settings["json"]["schema"])
        if "function" in self.names:  # its module may lie anywhere, and read what lies beside it
            reads += [os.path.abspath(path) for path in sys.path]
        self._pool = pool.Pool(settings, section.workers, reads) if settings else None
        self._programs = threading.BoundedSemaphore(section.workers)

    def __enter__(self) -> "Rewards":
        self.describe()
        if self._pool:
            self._pool.check()
        return self

    def __exit__(self, *_) -> None:
        if self._pool:
            self._pool.close()

    def describe(self, talks: bool = False) -> str:
        """One line: the parts, and what keeps them apart. `talks`: there are environments that answer, and so may reward."""
        parts = (*self.names, "model", *(("env",) if talks else ()))
        weights = [f"{self.section[n].weight:g} {n}" for n in parts if self.section[n].weight]
        held = [f"{self.section.held_out} held out"] if self.section.held_out else []
        guarded = [sandbox.describe()] if set(self.names) - {"exact"} else []
        return "  ".join([f"reward: {' + '.join(weights)}", *held, *guarded])

    def score(self, problem: Problem, text: str, truncated: bool = False, given: Mapping[str, Part] = {}) -> Outcome:  # noqa: B006
        """What a completion earned. Blocks; thread-safe.

        Args:
          problem: the one it answers.
          text: the completion, decoded.
          truncated: whether it was cut before a stop token.
          given: parts that are known, such as an environment's.
        """
        return combine(self.section, {name: self.part(name, problem, text, truncated) for name in self.names} | dict(given))

    def score_all(self, problems: Sequence[Problem], texts: Sequence[str], truncated: Sequence[bool] | None = None) -> list[Outcome]:
        """Of each completion, in order; several at a time."""
        if len(texts) != len(problems):
            raise ValueError(f"texts: found {len(texts)} for {len(problems)} problems, need one problem a text")
        with futures.ThreadPoolExecutor(self.section.workers) as threads:
            return list(threads.map(self.score, problems, texts, truncated if truncated is not None else [False] * len(texts)))

    def part(self, name: str, problem: Problem, text: str, truncated: bool = False) -> Part:
        """One scorer's value, or None and why there is none."""
        try:
            if name == "exact":
                value = exact.exact_match(text, problem, self.section.mark)
            elif name == "code":
                with self._programs:
                    value = code.score(text, problem.metadata, limits(self.section.code))
            else:
                return self._pool.ask(name, text, fields(problem), bool(truncated), self.section.seconds)
        except Exception as error:  # whatever one sample provokes stays with that sample
            return None, f"{type(error).__name__}: {error}"[:300]
        return value, None


def with_part(section: ConfigDict, outcome: Outcome, name: str, value: float) -> Outcome:
    """The outcome with one more part, such as a reward model's, which scores a batch at a time."""
    found = {n: (v, outcome.failures.get(n)) for n, v in outcome.parts.items()} | {name: (value, None)}
    return combine(section, found)


def limits(section: ConfigDict) -> sandbox.Limits:
    return sandbox.Limits(section.seconds, section.memory_mb, section.processes, section.output_kb)


def fields(problem: Problem) -> dict[str, Any]:
    """A problem as JSON has it."""
    return {
        "id": problem.id,
        "prompt": problem.prompt,
        "answer": problem.answer,
        "kind": problem.kind,
        "messages": [dict(message) for message in problem.messages],
        "env": problem.env,
        "metadata": dict(problem.metadata),
    }


def combine(section: ConfigDict, found: Mapping[str, Part]) -> Outcome:
    """The reward of a completion's parts.

    Args:
      section: with `failure`, and by scorer its `weight`.
      found: by scorer its value, which counts as `failure` if it is no finite number, and why it failed.
    """
    parts, failures = {}, {}
    for name, (value, failure) in found.items():
        # A value of 0.0 is a value.
        if failure is None and not (isinstance(value, int | float | np.number) and np.isfinite(value)):
            failure = f"found {value!r}, need a finite number"
        if failure is not None:
            failures[name] = failure
        parts[name] = float(value) if failure is None else section.failure
    return Outcome(float(sum(section[name].weight * value for name, value in parts.items())), parts, failures)

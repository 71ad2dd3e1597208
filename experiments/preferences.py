"""Learning from pairs on the base that ships with the package: preferences between worked and careless answers.

    python launch.py --config=experiments/preferences.py:dpo --workdir=runs/dpo            or ipo, sft
    python launch.py --config=experiments/preferences.py:reward --workdir=runs/judge       a reward model of the same pairs
    python launch.py --config=experiments/quickstart.py --config.reward.exact.weight=0.0 --config.reward.model.weight=1.0 \\
        --config.reward.model.path=runs/judge/reward_model --workdir=runs/judged          a policy that it trains

A pair is of one problem: the chosen completion works it step by step and is right; the rejected one is wrong, half of them careless and
half with a wrong step. No problem of a pair is held out anywhere.
"""

import random
import re
from collections.abc import Iterator

from ml_collections import ConfigDict

from experiments import quickstart
from rl_adapter.environments import arithmetic, generated

SIZE = 900
OBJECTIVES = "dpo", "ipo", "sft", "reward"


def get_config(objective: str = "dpo") -> ConfigDict:
    if objective not in OBJECTIVES:
        raise ValueError(f"--config: found {objective!r}, need one of {', '.join(OBJECTIVES)}")
    c = quickstart.get_config().unlock()
    c.objective = objective
    c.data.train = ("python:experiments.preferences:examples" if objective == "sft" else "python:experiments.preferences:pairs",)
    c.steps = 20
    c.rollout.prompts = 32
    c.optimizer.learning_rate = 1e-3
    return c.lock()


def problems():
    return generated.problems(tuple(arithmetic.KINDS), SIZE, 0, "train")


def wrong(rng: random.Random, number: str) -> str:
    """Another number, near it."""
    return str(int(number) + rng.choice([-10, -2, -1, 1, 2, 10]))


def pairs() -> Iterator[dict]:
    rng = random.Random(0)
    for one in problems():
        chosen = arithmetic.worked(one)
        if rng.random() < 0.5:
            rejected = f"Answer: {wrong(rng, one.answer)}"
        else:
            *steps, last = re.findall(r"\S+=-?\d+", chosen)
            left, _, value = last.rpartition("=")
            value = wrong(rng, value)
            rejected = " ".join([*steps, f"{left}={value}", f"Answer: {value}"])
        yield {"prompt": one.prompt, "answer": one.answer, "kind": one.kind, "chosen": chosen, "rejected": rejected}


def examples() -> Iterator[dict]:
    for one in problems():
        yield {"prompt": one.prompt, "answer": one.answer, "kind": one.kind, "completion": arithmetic.worked(one)}

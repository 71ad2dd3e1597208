"""Environments of any task: one turn, tools between turns, several attempts."""

import dataclasses

from rl_adapter.environments import Environment, Kit, Said, Turn, tools
from rl_adapter.types import Problem


class SingleTurn(Environment):
    """The model speaks once."""

    def __init__(self, kit: Kit):
        pass

    def start(self, problem: Problem, seed: int) -> None:
        return None

    def reply(self, state: None, said: Said) -> tuple[None, Turn]:
        return None, Turn()


class ToolUse(Environment):
    """Each call is answered by its tool; the first turn that calls nothing is the last."""

    def __init__(self, kit: Kit):
        if not kit.tools:
            raise ValueError("env.tools: found none, need at least one for the environment 'tools'")
        self.tools = kit.tools

    def start(self, problem: Problem, seed: int) -> None:
        return None

    def reply(self, state: None, said: Said) -> tuple[None, Turn]:
        return None, Turn([tools.message(self.tools, call) for call in said.calls])


@dataclasses.dataclass(frozen=True)
class _Tried:
    problem: Problem
    times: int = 0


class Attempts(Environment):
    """After a wrong answer the model is told so and may try again. Earns 1.0 for being right at once, less by an equal part for each
    further attempt, 0.0 for never. Any single-turn problem with a scorer becomes one of several turns."""

    told = "That is wrong. Try again."

    def __init__(self, kit: Kit):
        if kit.score is None:
            raise ValueError("env.name: found 'attempts' and no scorer, need one")
        self.score, self.attempts = kit.score, kit.attempts

    def start(self, problem: Problem, seed: int) -> _Tried:
        return _Tried(problem)

    def reply(self, state: _Tried, said: Said) -> tuple[_Tried, Turn]:
        if self.score(said.text, state.problem) >= 1:
            return state, Turn(reward=1 - state.times / self.attempts)
        after = dataclasses.replace(state, times=state.times + 1)
        again = after.times < self.attempts
        return after, Turn([{"role": "user", "content": self.told}] if again else [], reward=0.0)

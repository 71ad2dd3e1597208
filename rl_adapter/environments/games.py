"""Two small games, made for tiny models; each brings its problems."""

import dataclasses
import functools
import hashlib
import random
import re

from rl_adapter.environments import Environment, Kit, Said, Turn, arithmetic, tools
from rl_adapter.environments.tools import Tool
from rl_adapter.types import Problem

NUMBER = re.compile(r"-?\d{1,18}")


# A hidden number


@dataclasses.dataclass(frozen=True)
class _Hidden:
    number: int


class Guess(Environment):
    """A hidden number between `low` and `high` of the problem's metadata; each guess is answered by "higher" or "lower". Earns 1.0 when it
    is found, which ends the game. The last number of a turn is the guess. Each sample has its own number."""

    def __init__(self, kit: Kit):
        pass

    def start(self, problem: Problem, seed: int) -> _Hidden:
        low, high = (problem.metadata.get(name) for name in ("low", "high"))
        if type(low) is not int or type(high) is not int or low > high:
            raise ValueError(f"metadata: found low {low!r} and high {high!r}, need whole numbers, the first not above the second")
        return _Hidden(random.Random(seed).randint(low, high))

    def reply(self, state: _Hidden, said: Said) -> tuple[_Hidden, Turn]:
        guesses = NUMBER.findall(said.text)
        if guesses and int(guesses[-1]) == state.number:
            return state, Turn(reward=1.0)
        told = "say a number" if not guesses else "higher" if int(guesses[-1]) < state.number else "lower"
        return state, Turn([{"role": "user", "content": told}], reward=0.0)


def guess_pool(kind: str, split: str) -> tuple[Problem, ...]:
    """All ranges of 5 to 16 numbers below 100."""
    ranges = ((low, low + n - 1) for n in range(5, 17) for low in range(0, 100 - n))
    problems = (
        dataclasses.replace(arithmetic.problem(f"{low}-{high}? ", "", kind), env="guess", metadata={"low": low, "high": high})
        for low, high in ranges
    )
    return tuple(p for p in problems if arithmetic.percent(p.prompt) in arithmetic.SPLITS[split])


# A vault


class Vault(Environment):
    """The prompt names a vault; what lies in it follows from a keyed hash, and its only tool tells. So no model can know it, and to
    ask is all there is to learn: whatever the words of the call are, the answer is the vault's."""

    def __init__(self, kit: Kit):
        self.tools = {"ask": Tool("ask", "Tells what lies in the vault.", _QUESTION, lambda **asked: "", dict)}

    def start(self, problem: Problem, seed: int) -> str:
        return inside(problem.prompt)

    def reply(self, state: str, said: Said) -> tuple[str, Turn]:
        of_this = {"ask": dataclasses.replace(self.tools["ask"], function=lambda **asked: state)}
        return state, Turn([tools.message(of_this, call) for call in said.calls])


_QUESTION = {"type": "object", "properties": {"question": {"type": "string"}}, "required": ["question"], "additionalProperties": False}


def inside(prompt: str) -> str:
    """The two digits that lie in a vault."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8, key=b"rl_adapter.environments.games:Vault").digest()
    return f"{int.from_bytes(digest, 'big') % 100:02}"


def vault_pool(kind: str, split: str) -> tuple[Problem, ...]:
    """All vaults of four digits."""
    return tuple(p for p in _vaults(kind) if arithmetic.percent(p.prompt) in arithmetic.SPLITS[split])


@functools.cache
def _vaults(kind: str) -> tuple[Problem, ...]:
    prompts = (f"vault {n:04}? " for n in range(10_000))
    return tuple(dataclasses.replace(arithmetic.problem(prompt, inside(prompt), kind), env="vault") for prompt in prompts)

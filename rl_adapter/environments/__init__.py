"""Environments: what answers a model between its turns, and what a whole conversation earns.

An environment is a class, made once a run from its `Kit`. Its methods are pure, so that a resumed run repeats them: what they draw is
keyed by the seed that `start` gets. It sees text and tool calls; tokens and chat templates are the business of `rl_adapter/episodes.py`.
"""

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from rl_adapter.environments.calls import Call, Malformed
from rl_adapter.environments.tools import Tool
from rl_adapter.types import Problem

SHIPPED = {  # name -> import path, which is the name of a user's own
    "": "rl_adapter.environments.turns:SingleTurn",
    "tools": "rl_adapter.environments.turns:ToolUse",
    "attempts": "rl_adapter.environments.turns:Attempts",
    "guess": "rl_adapter.environments.games:Guess",
    "vault": "rl_adapter.environments.games:Vault",
}


@dataclasses.dataclass(frozen=True)
class Said:
    """One turn of the policy."""

    text: str  # without special tokens
    calls: Sequence[Call | Malformed] = ()  # checked against the environment's tools: arguments are what the functions take


@dataclasses.dataclass(frozen=True)
class Turn:
    """What an environment answers."""

    messages: Sequence[Mapping[str, Any]] = ()  # of role user or tool, with text as content; none: the episode ends
    reward: float | None = None  # the part `env` of what the episode earns, as it stands; None: as it stood


class Environment(Protocol):
    tools: Mapping[str, Tool] = {}  # what the model may call, by name
    whole: bool = False  # scorers get all that the policy said, else its last turn

    def start(self, problem: Problem, seed: int) -> Any:
        """The state before the first turn. `seed`, 64 bits, is another one for each (seed of the rollout, prompt id, sample).

        Raises:
            ValueError: the problem is none of this environment's.
        """

    def reply(self, state: Any, said: Said) -> tuple[Any, Turn]:
        """The state after a turn of the policy, and the answer to it. An exception ends this episode, and no other."""


@dataclasses.dataclass(frozen=True)
class Kit:
    """What a run gives its environments."""

    tools: Mapping[str, Tool] = dataclasses.field(default_factory=dict)  # those of `env.tools`
    score: Callable[[str, Problem], float] | None = None  # text of a turn -> 1.0 where it is right
    attempts: int = 3  # at one problem, >= 1


def make(name: str, kit: Kit, field: str = "env.name") -> Environment:
    """The environment of a name in `SHIPPED`, or of an import path, `module:Class`, whose class takes a `Kit`.

    Raises:
        ValueError: there is no such class, or what it makes is no environment; names `field`.
    """
    kind = load(SHIPPED.get(name, name), field, SHIPPED)
    try:
        made = kind(kit)
    except ValueError:
        raise
    except (Exception, SystemExit) as error:  # of a user's class
        raise ValueError(f"{field}: found {name!r}, which fails ({type(error).__name__}: {error}), need one that takes a Kit") from error
    lacks = [part for part in ("tools", "whole", "start", "reply") if not hasattr(made, part)]
    if lacks:
        raise ValueError(f"{field}: found {name!r} without {', '.join(lacks)}, need a class that is an Environment")
    return made


def make_all(names: Iterable[str], default: str, kit: Kit) -> dict[str, Environment]:
    """The environments of problems, by `Problem.env`; problems that name none get the one that `env.name` names."""
    made = {default: make(default, kit)}
    made |= {name: make(name, kit, "env") for name in sorted(set(names) - {"", default})}
    return made | {"": made[default]}


def load(path: str, field: str, known: Iterable[str] = ()) -> Callable:
    """What an import path, `module:name`, leads to; `known` are names that would have done too."""
    module, colon, name = path.partition(":")
    need = " or ".join([*([f"one of {', '.join(map(repr, known))},"] if known else []), "an import path, module:name"])
    if not (module and colon and name):
        raise ValueError(f"{field}: found {path!r}, need {need}")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{field}: found {path!r}, which cannot be imported ({error}), need {need}") from None
    if not callable(found):
        raise ValueError(f"{field}: found {path!r}, which is no class or function, need {need}")
    return found

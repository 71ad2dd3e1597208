"""Conversations of a batch: what environments say becomes tokens, and what the policy sampled stays as it was sampled.

The engine asks `Episodes.respond` whenever the policy has stopped. With a chat template the environment's messages become the tokens
that follow the turn (`hub/chat.py`); without one they are text, tokenized by itself. Nothing that was sampled is tokenized again, and
what is appended is marked as not drawn by the engine, so it carries no loss.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rl_adapter.environments import Environment, Said, calls, tools
from rl_adapter.environments.turns import SingleTurn
from rl_adapter.hub import chat
from rl_adapter.hub.tokenizer import Tokenizer
from rl_adapter.types import Problem

CUT = " ... [cut]"
WIDEST = 64  # characters of a token that are counted on: what is longer is cut before it is tokenized


@dataclasses.dataclass(frozen=True)
class Setting:
    """How the model and its environments talk, for a whole run. `setting` makes and checks one."""

    environments: Mapping[str, Environment]  # by `Problem.env`
    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]  # the model's, and those of rollout.stop
    opening: Callable[[Problem], Sequence[chat.Message]] | None  # the messages that a prompt was rendered from; None: plain text
    calls: str  # of `calls.FORMATS`
    max_turns: int  # of the policy
    max_result_tokens: int  # of a tool's result
    roles: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of a tool's message, by environment: tool, or user

    @property
    def talks(self) -> bool:
        """Whether any environment answers: if not, the engine needs no `respond`, and its programs are smaller."""
        return talk(self.environments)


@dataclasses.dataclass(frozen=True)
class Episode:
    """One finished conversation."""

    texts: tuple[str, ...]  # of the policy's turns, without special tokens
    scored_text: str  # what scorers get
    calls: int  # of tools, malformed ones included
    malformed: int  # calls that could not be read, of no tool, or with wrong arguments
    reward: float | None  # the part `env`; None: the environment gives none
    failure: str | None  # why the environment ended it early

    @property
    def turns(self) -> int:
        return len(self.texts)


def talk(environments: Mapping[str, Environment]) -> bool:
    """Whether any of them answers the policy."""
    return not all(isinstance(e, SingleTurn) for e in environments.values())


def variables(environment: Environment) -> dict[str, Any]:
    """What the chat template gets beside the messages."""
    return {"tools": [tool.schema for tool in environment.tools.values()]} if environment.tools else {}


def setting(
    env: Any,
    environments: Mapping[str, Environment],
    tokenizer: Tokenizer,
    stop_ids: Sequence[int],
    opening: Callable[[Problem], Sequence[chat.Message]] | None,
    problems: Sequence[Problem] = (),
) -> Setting:
    """A setting that works: formats, templates and problems are tried here, before anything compiles.

    Args:
        env: the `env` section of the config: `calls`, `max_turns`, `max_result_tokens`.
        environments: by `Problem.env`.
        stop_ids: all that end a turn.
        opening: the messages of a problem's prompt; None for plain text.
        problems: each is started once, to see that its environment takes it.

    Raises:
        ValueError: what cannot work, by field.
    """
    template = None if opening is None else tokenizer.template
    called = any(e.tools for e in environments.values())
    form = env.calls if env.calls != "auto" else calls.detect(template) if called else "brackets"
    stop = calls.FORMATS[form].stop
    if called and stop and not set(tokenizer.encode(stop, special=False)) <= set(stop_ids):
        raise ValueError(f"rollout.stop: found no {stop!r}, need it for env.calls {form!r}: it ends a turn that calls a tool")
    for e in environments.values() if calls.FORMATS[form].nameless else ():
        if e.tools and [len(tool.parameters.get("required", ())) for tool in e.tools.values()] != [1]:
            need = "exactly one, with one required parameter: such a call names neither"
            raise ValueError(f"env.tools: found {', '.join(e.tools)} with env.calls {form!r}, need {need}")
    found = Setting(environments, tokenizer, tuple(stop_ids), opening, form, env.max_turns, env.max_result_tokens)
    if opening is not None:
        roles = {name: _role(found, e) for name, e in environments.items() if not isinstance(e, SingleTurn)}
        found = dataclasses.replace(found, roles=roles)
    for problem in problems:
        if problem.env not in environments:
            raise ValueError(f"env: found {problem.env!r} of prompt {problem.prompt[:60]!r}, need one of {sorted(environments)}")
        try:
            environments[problem.env].start(problem, 0)
        except ValueError as error:
            raise ValueError(f"{_where(problem)}: {error}") from None
        except (Exception, SystemExit) as error:  # of a user's class
            raise ValueError(f"{_where(problem)}: found {_reason(error)}, need a start") from error
    return found


def _where(problem: Problem) -> str:
    return f"environment {problem.env!r}: prompt {problem.prompt[:60]!r}"


def _role(of: Setting, environment: Environment) -> str:
    """The role under which the chat template takes a tool's result."""
    said, asked = of.tokenizer.encode("x", special=False), {"role": "user", "content": "x"}
    told = {"role": "tool", "content": "x", "name": next(iter(environment.tools), "tool")}
    try:
        talk = chat.add_completion(chat.start(of.tokenizer, [asked], **variables(environment)), [*said, of.tokenizer.stop_ids[0]])
    except ValueError as error:
        raise ValueError(f"chat_template: cannot begin a conversation ({error})") from None
    try:
        chat.add_messages(talk, [told if environment.tools else asked])
        return "tool"
    except ValueError:  # a template that knows no tools
        try:
            chat.add_messages(talk, [asked])
            return "user"
        except ValueError as error:
            raise ValueError(f"chat_template: takes no message after a turn, which an environment needs ({error})") from None


@dataclasses.dataclass(eq=False)
class _Talk:
    """A conversation at work."""

    name: str  # of its environment
    environment: Environment
    state: Any = None
    conversation: chat.Conversation | None = None  # None: plain text
    known: int = 0  # tokens, of both sides, that are dealt with
    texts: list[str] = dataclasses.field(default_factory=list)
    calls: int = 0
    malformed: int = 0
    reward: float | None = None
    failure: str | None = None


class Episodes:
    """The conversations of one batch, by (prompt, sample)."""

    def __init__(self, setting: Setting, problems: Sequence[Problem], prompts: Sequence[np.ndarray], seed: int):
        """`problems` [P] and their `prompts` as tokens; `seed` of the rollout, which with prompt id and sample keys what is drawn."""
        self.setting, self.problems, self.prompts, self.seed = setting, problems, prompts, seed
        self.talks: dict[tuple[int, int], _Talk] = {}

    def respond(self, prompt: int, sample: int, tokens: np.ndarray) -> list[int] | None:
        """Tokens that follow a turn of the policy; None ends the episode. `tokens` are all so far after the prompt. Never raises: what
        fails is the episode's `failure`."""
        talk, of = self._talk(prompt, sample), self.setting
        new, talk.known = [int(t) for t in tokens[talk.known :]], len(tokens)
        said = self._hear(talk, new)
        if talk.failure or not new or new[-1] not in of.stop_ids:  # a turn that was cut is not answered
            return None
        try:
            talk.state, turn = talk.environment.reply(talk.state, said)
            if turn.reward is not None:
                talk.reward = _finite(turn.reward)
            if not turn.messages or len(talk.texts) >= of.max_turns:
                return None
            more = self._tokens(talk, new, turn.messages)
        except (Exception, SystemExit) as error:  # whatever one sample provokes stays with that sample
            talk.failure = _reason(error)
            return None
        talk.known += len(more)
        return more

    def finish(self, prompt: int, sample: int, tokens: np.ndarray) -> Episode:
        """The conversation once the engine has ended it, of which `tokens` are all after the prompt. It is forgotten here."""
        talk = self._talk(prompt, sample)
        if len(tokens) > talk.known:  # the engine asked for no answer
            self._hear(talk, [int(t) for t in tokens[talk.known :]])
        del self.talks[prompt, sample]
        text = "".join(talk.texts) if talk.environment.whole else talk.texts[-1] if talk.texts else ""
        return Episode(tuple(talk.texts), text, talk.calls, talk.malformed, talk.reward, talk.failure)

    def _talk(self, prompt: int, sample: int) -> _Talk:
        if talk := self.talks.get((prompt, sample)):
            return talk
        problem = self.problems[prompt]
        talk = self.talks[prompt, sample] = _Talk(problem.env, self.setting.environments[problem.env])
        try:
            talk.state = talk.environment.start(problem, _seed(self.seed, problem.id, sample))
            if self.setting.opening is not None:
                ids, opening = tuple(map(int, self.prompts[prompt])), tuple(self.setting.opening(problem))
                talk.conversation = chat.Conversation(
                    self.setting.tokenizer, opening, variables(talk.environment), ids, (False,) * len(ids)
                )
        except (Exception, SystemExit) as error:
            talk.failure = _reason(error)
        return talk

    def _hear(self, talk: _Talk, new: list[int]) -> Said:
        """A turn of the policy, as text and calls."""
        of = self.setting
        text, found = of.tokenizer.decode(new), []
        if talk.environment.tools:
            end = len(new) - bool(new and new[-1] in of.stop_ids and new[-1] in of.tokenizer.special_ids)
            found = [tools.check(talk.environment.tools, c) for c in calls.parse(of.calls, of.tokenizer.decode(new[:end], special=True))]
        talk.texts.append(text)
        talk.calls += len(found)
        talk.malformed += sum(isinstance(call, calls.Malformed) for call in found)
        return Said(text, found)

    def _tokens(self, talk: _Talk, new: list[int], messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """What the environment says, as tokens."""
        of = self.setting
        messages = [self._bounded(message) for message in messages]
        if talk.conversation is None:
            told = calls.FORMATS[of.calls].told
            text = "".join(told(m["content"]) if m["role"] == "tool" else f"\n{m['content']}\n" for m in messages)
            return of.tokenizer.encode(text, special=False)
        role = of.roles[talk.name]
        messages = [{"role": role, "content": m["content"]} if m["role"] == "tool" and role != "tool" else m for m in messages]
        said = chat.add_completion(talk.conversation, new)
        talk.conversation = chat.add_messages(said, messages)
        return list(talk.conversation.ids[len(said.ids) :])

    def _bounded(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message without special tokens in its text, and cut where it is a tool's."""
        content, tokenizer = message["content"], self.setting.tokenizer
        if not isinstance(content, str):
            raise ValueError(f"content: found {content!r:.60}, need text")
        if message["role"] == "tool":
            content = cut(tokenizer, content, self.setting.max_result_tokens)
        return {**message, "content": defused(tokenizer, content)}


def cut(tokenizer: Tokenizer, text: str, most: int) -> str:
    """The text, at most so many tokens of it, and a mark where some are left out."""
    some = text[: most * WIDEST]
    offsets = tokenizer.backend.encode(some, add_special_tokens=False).offsets
    kept = some if len(offsets) <= most else some[: offsets[most - 1][1]]
    return text if len(kept) == len(text) else kept + CUT


def defused(tokenizer: Tokenizer, text: str) -> str:
    """The text with every special token that it spells broken up: else what a tool prints could end a turn, or begin another's."""
    for token in sorted((tokenizer.backend.id_to_token(i) for i in tokenizer.special_ids), key=len, reverse=True):
        text = text.replace(token, f"{token[:1]} {token[1:]}")
    return text


def describe(episodes: Sequence[Episode]) -> dict[str, float]:
    """Metrics of a step's conversations."""
    called, n = sum(e.calls for e in episodes), max(1, len(episodes))
    return {
        "env/turns": sum(e.turns for e in episodes) / n,
        "env/calls": called / n,
        "env/malformed": sum(e.malformed for e in episodes) / max(1, called),
        "env/failed": sum(e.failure is not None for e in episodes) / n,
    }


def _seed(seed: int, id: int, sample: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{id}:{sample}".encode()).digest()[:8], "big")


def _finite(reward: Any) -> float:
    value = float(reward)
    if not math.isfinite(value):
        raise ValueError(f"reward: found {value}, need a finite number")
    return value


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]

"""Chats as tokens: messages are rendered by the checkpoint's template, and what was sampled stays as it was sampled.

`start` gives the tokens of the first prompt, `add_completion` appends what the model said, `add_messages` what it is told next:

    chat = start(tokenizer, [{"role": "user", "content": "2+2?"}])
    chat = add_completion(chat, sampled_ids)
    chat = add_messages(chat, [{"role": "user", "content": "And 3+3?"}])
    chat.ids, chat.sampled  # the tokens, and which of them carry loss

Rendering the whole chat again at each turn would tokenize the model's text anew, and other tokens can spell the same text; templates
that drop thinking from earlier turns would even move the loss to other words. So only new messages are rendered, as what follows a
stand-in for the turn before them.
"""

import atexit
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from rl_adapter.hub.tokenizer import Tokenizer

SECONDS = 10.0  # that one rendering may take; a long chat takes some milliseconds
TEXT = 2**22  # characters that one rendering may give; several million tokens fit no model

Message = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Conversation:
    """The tokens of a chat, only ever appended to."""

    tokenizer: Tokenizer = dataclasses.field(repr=False)
    opening: tuple[Message, ...]  # the messages that it began with
    variables: Mapping[str, Any]  # what else the template gets
    ids: tuple[int, ...]
    sampled: tuple[bool, ...]  # per id; true for what the model said, with the stop token that it ended with

    @property
    def stopped(self) -> bool:
        """Whether the last token is a stop token that was sampled."""
        return self.sampled[-1] and self.ids[-1] in self.tokenizer.stop_ids


def start(tokenizer: Tokenizer, messages: Sequence[Message], /, **variables: Any) -> Conversation:
    """A chat up to where the model speaks.

    Args:
      tokenizer: with a chat template.
      messages: objects with `role` and `content`, as the template wants them.
      variables: for the template, such as `tools`, `documents` (lists of objects) or `enable_thinking`.
    """
    messages = _check(messages)
    ids = tokenizer.encode(render(tokenizer, messages, True, **variables), special=False)
    if not ids:
        raise ValueError("chat_template: found no token for the messages, need at least one")
    return Conversation(tokenizer, messages, dict(variables), tuple(ids), (False,) * len(ids))


def add_completion(chat: Conversation, ids: Sequence[int]) -> Conversation:
    """Appends what the model said, token by token.

    Args:
      chat: one that waits for the model, or whose last completion was cut and is continued.
      ids: as sampled, without padding; the last may be a stop token (also if that is what pads), no other.
    """
    ids = tuple(int(i) for i in ids)
    if chat.stopped:
        raise ValueError("completion: found one after a completion that ended, need messages between them (add_messages)")
    if not ids or min(ids) < 0:
        raise ValueError(f"completion: found {ids}, need at least one token id, none negative")
    for place, i in enumerate(ids[:-1]):
        if i in chat.tokenizer.stop_ids:
            raise ValueError(f"completion: found stop token {i} at {place} of {len(ids)}, need it last: what follows is padding")
    return dataclasses.replace(chat, ids=chat.ids + ids, sampled=chat.sampled + (True,) * len(ids))


def add_messages(chat: Conversation, messages: Sequence[Message]) -> Conversation:
    """Appends messages that the model is told (user, tool), up to where it speaks again.

    A completion that was cut before a stop token is ended first, as the template ends a turn; those tokens are not sampled. Raises
    ValueError where the template gives no text that could follow the turn.
    """
    messages = _check(messages)
    if not chat.sampled[-1]:
        raise ValueError("messages: found a chat that waits for the model, need a completion first (add_completion)")
    ids = _suffix(chat, messages)
    return dataclasses.replace(chat, ids=chat.ids + ids, sampled=chat.sampled + (False,) * len(ids))


def render(tokenizer: Tokenizer, messages: Sequence[Message], add_generation_prompt: bool = False, /, **variables: Any) -> str:
    """The text that the template makes of messages, as `apply_chat_template` of transformers has it.

    A template may print today's date (`strftime_now`); most take it from a variable if one is given. Text of messages that spells a
    special token becomes that token, as everywhere.
    """
    if tokenizer.template is None:
        raise ValueError("chat_template: found none in the checkpoint, need chat_template.jinja, or chat_template in tokenizer_config.json")
    given = {"messages": [_plain(m) for m in messages], "tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
    clash = sorted({"messages", "add_generation_prompt"} & variables.keys())
    if clash:
        raise ValueError(f"variables: found {clash}, which chats set themselves")
    request = {"template": tokenizer.template, "variables": {**tokenizer.special, **given, **variables}, "seconds": SECONDS, "limit": TEXT}
    try:
        line = json.dumps(request).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"messages: need what JSON can hold, found {error}") from None
    reply = _WORKER.ask(line)
    if "error" in reply:
        raise ValueError(f"chat_template: {reply['error']}")
    try:
        reply["text"].encode()
    except UnicodeEncodeError as error:  # JSON can spell half a character, tokenizers cannot read it
        raise ValueError(f"chat_template or messages: found half a character ({error.reason}), need text in Unicode") from None
    return reply["text"]


def _check(messages: Sequence[Message]) -> tuple[Message, ...]:
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"messages: found {messages!r}, need a list of at least one")
    for m in messages:
        if not isinstance(m, Mapping) or not isinstance(m.get("role"), str):
            raise ValueError(f"messages: found {m!r}, need objects with a role")
    return tuple(dict(m) for m in messages)


def _plain(message: Message) -> dict[str, Any]:
    """As transformers hands a message over: without empty fields, which templates would print as "None", and reasoning under each of its
    names."""
    message = {k: v for k, v in message.items() if v is not None}
    names = [n for n in ("reasoning_content", "thinking", "reasoning") if n in message]
    return {"thinking": message[names[0]], **message, "reasoning_content": message[names[0]]} if names else message


# Suffixes


def _suffix(chat: Conversation, messages: tuple[Message, ...]) -> tuple[int, ...]:
    """Tokens to append to a completion so that `messages` follow it and the model can speak."""
    spoken = json.dumps([chat.opening, messages, dict(chat.variables)], default=str)
    n = 0
    while f"XQ{n}Z" in spoken or f"XW{n}Z" in spoken:
        n += 1
    turn, told = f"XQ{n}Z", f"XW{n}Z"  # letters and digits: no template strips or escapes them
    calls = _calls(messages, turn)
    if calls:
        # After tool calls some templates need to see the call, others know no calls.
        try:
            return _follow(chat, {"role": "assistant", "content": "", "tool_calls": calls}, messages, turn, told, inside=True)
        except ValueError as error:
            reason = f" (with tool calls in the turn before: {error})"
    else:
        reason = ""
    try:
        parts = any(isinstance(m.get("content"), list) for m in (*chat.opening, *messages))  # such templates take nothing else
        said = [{"type": "text", "text": turn}] if parts else turn
        return _follow(chat, {"role": "assistant", "content": said}, messages, turn, told, inside=False)
    except ValueError as error:
        raise ValueError(f"{error}{reason}") from None


def _calls(messages: tuple[Message, ...], turn: str) -> list[dict]:
    """Tool calls that the leading tool messages answer; `turn` is an argument of the last."""
    answers = []
    for m in messages:
        if m["role"] != "tool":
            break
        answers.append(m)
    call = lambda m, i: {
        "id": m.get("tool_call_id") or "call00000",
        "type": "function",
        "function": {"name": m.get("name") or "tool", "arguments": {"value": turn} if i == len(answers) - 1 else {}},
    }
    return [call(m, i) for i, m in enumerate(answers)]


def _follow(chat: Conversation, stand_in: dict, messages: tuple[Message, ...], turn: str, told: str, inside: bool) -> tuple[int, ...]:
    """What the template puts after the stand-in for the completion.

    Args:
      stand_in: assistant message that ends with `turn`.
      told: stands for what the messages say in a second rendering, which shows where the text of the template ends.
      inside: whether `turn` lies inside of the stand-in (an argument of a call), so that the turn ends later.
    """
    tokenizer, before = chat.tokenizer, (*chat.opening, stand_in)
    after = lambda said, go: _after(render(tokenizer, (*before, *said), go, **chat.variables), turn)
    tail, last = after(messages, True), after((), False)
    marked = after([_mark(m, told) for m in messages], True)
    if told not in marked and any(_mark(m, told) != m for m in messages):
        raise ValueError(
            "chat_template: found no trace of the new messages after the turn before them, need templates that append messages"
        )
    own = len(os.path.commonprefix([tail, marked]))

    ids, starts = _tokens(tokenizer, turn, tail)
    if not inside and not chat.stopped:
        return ids
    place = _end(tokenizer, [i for i, s in zip(ids, starts) if s < own])
    if place is None:
        if inside:
            raise ValueError("chat_template: found no special token between turns, need one to know where tool calls end")
        return ids
    found = ids[place]
    closing = _tokens(tokenizer, turn, last)[0]
    end = _end(tokenizer, closing)
    end = None if end is None else closing[end]  # of the chat, if nothing followed
    # The model may have said another stop token than the template has (several end a turn; harmony writes <|end|> over <|return|>). It
    # stays, in place of the template's, unless that begins the next message: where it is not what ends the chat.
    if chat.stopped and (found == chat.ids[-1] or end in (found, chat.ids[-1])):
        return ids[place + 1 :]
    return ids[place if inside else 0 :]


def _end(tokenizer: Tokenizer, ids: Sequence[int]) -> int | None:
    """Where the turn ends in what the template puts after it: at the first stop token (others may close a part of the turn), else at the
    first special one. That may be the next message's already, where the template ends no turn."""
    for ends in (tokenizer.stop_ids, tokenizer.special_ids):
        for place, i in enumerate(ids):
            if i in ends:
                return place
    return None


def _after(text: str, turn: str) -> str:
    """The text after the turn's only mark."""
    if text.count(turn) != 1:
        raise ValueError(f"chat_template: found the turn before the new messages {text.count(turn)} times, need it once to append to it")
    return text.partition(turn)[2]


def _mark(message: Message, told: str) -> Message:
    """The message with its text replaced."""
    content = message.get("content")
    if isinstance(content, str) and content:
        return {**message, "content": told}
    if isinstance(content, list):
        return {**message, "content": [{**part, "text": told} if isinstance(part, dict) and part.get("text") else part for part in content]}
    return message


def _tokens(tokenizer: Tokenizer, turn: str, tail: str) -> tuple[tuple[int, ...], list[int]]:
    """Token ids of `tail`, tokenized as what follows a word, and where in it each begins (characters)."""
    encoding = tokenizer.backend.encode(turn + tail, add_special_tokens=False)
    kept = [(i, s - len(turn)) for i, (s, e) in zip(encoding.ids, encoding.offsets) if s >= len(turn)]
    if any(s < len(turn) < e for s, e in encoding.offsets):
        raise ValueError("chat_template: found a token across the end of the turn, need a special token or a space there")
    return tuple(i for i, _ in kept), [s for _, s in kept]


# The process that renders


class _Worker:
    """One process of `template_worker.py`, started when first asked and again after it died."""

    def __init__(self) -> None:
        self.lock, self.process = threading.Lock(), None
        os.register_at_fork(after_in_child=self.forget)

    def ask(self, line: bytes) -> dict:
        """The reply to one request; an error too if the process died of it."""
        with self.lock:
            process = self.start()
            try:
                try:
                    process.stdin.write(line + b"\n")
                    process.stdin.flush()
                except BrokenPipeError:
                    pass  # it died; the empty reply tells
                reply = process.stdout.readline()
            except BaseException:  # an interrupt: its reply must not be read as the next one's
                self.stop()
                raise
            if reply.endswith(b"\n"):
                return json.loads(reply)
            code = process.wait()
            self.stop()
        if code == -signal.SIGALRM:
            return {"error": f"found no end within {SECONDS:g} s, need templates that end"}
        return {"error": f"the process that renders it died (exit code {code}); need jinja2, and a template within its limits"}

    def start(self) -> subprocess.Popen:
        if self.process is None or self.process.poll() is not None:
            self.stop()
            # -P: nothing in this directory may pass for an installed module.
            command = [sys.executable, "-P", str(pathlib.Path(__file__).with_name("template_worker.py"))]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        return self.process

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()
            try:
                self.process.stdin.close()
            except BrokenPipeError:
                pass  # what it never read
            self.process = None

    def forget(self) -> None:
        """After a fork the parent's process is not the child's to talk to."""
        self.lock, self.process = threading.Lock(), None


_WORKER = _Worker()
atexit.register(_WORKER.stop)

"""The tools that ship, and a user's own, by the names that `env.tools` has for them."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rl_adapter.environments import load, retrieval, signatures
from rl_adapter.environments.calculator import calculator
from rl_adapter.environments.tools import Tool

SHIPPED = "calculator", "python", "retrieval"


class Ran(Protocol):
    """What became of a program in the sandbox."""

    returncode: int
    stdout: bytes
    stderr: bytes
    reason: str  # the limit that ended it; "": it ended by itself


def make(env: Any, run: Callable[[str], Ran] | None = None, field: str = "env.tools") -> dict[str, Tool]:
    """The tools of `env.tools`, by name.

    Args:
        env: the `env` section of the config: `tools`, `corpus`, `results`.
        run: runs the source of a Python program in a sandbox; needed for the tool `python`.

    Raises:
        ValueError: a tool that there is not, or whose signature, corpus or sandbox is missing; names the field.
    """
    made: dict[str, Tool] = {}
    for name in env.tools:
        one = signatures.tool(_function(name, env, run, field))
        if one.name in made:
            raise ValueError(f"{field}: found two tools named {one.name!r} in {tuple(env.tools)}, need distinct names")
        made[one.name] = one
    return made


def _function(name: str, env: Mapping[str, Any], run: Callable[[str], Ran] | None, field: str) -> Callable[..., Any]:
    if name == "calculator":
        return calculator
    if name == "python":
        if run is None:
            raise ValueError(f"{field}: found 'python' and no sandbox to run it in, need one")
        return interpreter(run)
    if name == "retrieval":
        if not env.corpus:
            raise ValueError("env.corpus: found '', need a file for the tool 'retrieval'")
        return retrieval.make(env.corpus, env.results)
    return load(name, field, SHIPPED)


def interpreter(run: Callable[[str], Ran]) -> Callable[[str], str]:
    """The function `python(code)`: what a program printed, and what ended it."""

    def python(code: str) -> str:
        """Runs a Python program and gives what it prints. Nothing is kept from one call to the next; there is no network."""
        ran = run(code)
        said = [text for out in (ran.stdout, ran.stderr) if (text := out.decode("utf-8", "replace").strip())]
        ended = f"limit of {ran.reason}" if ran.reason else f"exit code {ran.returncode}" if ran.returncode else ""
        return "\n".join([f"Error: {ended}", *said] if ended else said) or "The program printed nothing."

    return python

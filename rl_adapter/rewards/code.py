"""Reward for a program that passes its tests.

The program is the completion's last fenced block. A problem's metadata says how it is tested, by either or both of:

    tests, entry_point, setup    Python: asserts on what the program defines, or `check(candidate)`, called with `entry_point`.
                                 `setup` is code that runs before the program and before the tests: imports, and helpers that the
                                 tests may trust. Without `entry_point` what the tests use and do not define is the program's.
    cases                        a list of {"stdin": text, "stdout": text}: the program is run for each, and its output compared,
                                 blanks at the ends of lines and at the end aside.

The program runs in a sandbox, where it sees calls and input but neither tests nor what is expected of it. The tests run in another, and
ask the program by value (`code_harness.py`); output is compared here. So a verdict is not the program's to give.
"""

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from rl_adapter import sandbox
from rl_adapter.rewards import code_harness, formats

WINDOW = 100_000  # characters from the end of a completion that are looked at


def score(text: str, metadata: Mapping[str, Any], limits: sandbox.Limits, kind: str | None = None) -> float:
    """1.0 if the program passes all tests within the limits, which hold for all of them together; else 0.0.

    Raises ValueError for tests that cannot be run.
    """
    tests, entry_point, setup, cases = check(metadata)
    program = formats.last_block(text[-WINDOW:], "python", "py", "python3")
    if program is None:
        return 0.0
    deadline = time.monotonic() + limits.seconds
    program = program.encode(errors="replace")
    passed = all(_answers(program, case, limits, deadline, kind) for case in cases)
    return float(passed and (not tests or _passes(program, tests, entry_point, setup, limits, deadline, kind)))


def check(metadata: Mapping[str, Any]) -> tuple[str, str, str, list[Mapping[str, str]]]:
    """The tests of a problem; a ValueError where there are none, or not as they must be."""
    tests, entry_point, setup = (metadata.get(name) or "" for name in ("tests", "entry_point", "setup"))
    cases = metadata.get("cases") or []
    for name, value in {"tests": tests, "entry_point": entry_point, "setup": setup}.items():
        if not isinstance(value, str):
            raise ValueError(f"metadata.{name}: found {type(value).__name__}, need a text")
    fine = lambda case: isinstance(case, Mapping) and all(isinstance(case.get(name), str) for name in ("stdin", "stdout"))
    if not isinstance(cases, list | tuple) or not all(map(fine, cases)):
        raise ValueError('metadata.cases: found others, need a list of {"stdin": text, "stdout": text}')
    if not tests and not cases:
        raise ValueError("metadata: found neither tests nor cases, need some")
    if entry_point and not entry_point.isidentifier():
        raise ValueError(f"metadata.entry_point: found {entry_point!r}, need a name")
    return tests, entry_point, setup, list(cases)


def _answers(program: bytes, case: Mapping[str, str], limits: sandbox.Limits, deadline: float, kind: str | None) -> bool:
    left = deadline - time.monotonic()
    if left <= 0:
        return False
    command = [sys.executable, "-I", "solution.py"]
    found = sandbox.run(command, {"solution.py": program}, case["stdin"].encode(), _within(limits, left), kind=kind)
    if found.returncode == sandbox.BROKEN and found.stderr.startswith(b"sandbox: "):
        raise RuntimeError(found.stderr.decode(errors="replace")[:300])
    return not found.reason and not found.returncode and _lines(found.stdout.decode(errors="replace")) == _lines(case["stdout"])


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _within(limits: sandbox.Limits, seconds: float) -> sandbox.Limits:
    return sandbox.Limits(seconds, limits.memory_mb, limits.processes, limits.output_kb, limits.disk_mb)


def _passes(program: bytes, tests: str, entry_point: str, setup: str, limits: sandbox.Limits, deadline: float, kind: str | None) -> bool:
    harness = code_harness.__file__
    command = [sys.executable, "-I", harness]
    files = {"setup.py": setup.encode()}
    limits = _within(limits, max(0.01, deadline - time.monotonic()))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    solution = sandbox.start([*command, "solution"], files | {"solution.py": program}, limits, [harness], kind, **pipes)
    asking = None
    try:
        wire = {"stdin": solution.stdout, "stdout": solution.stdin, "stderr": subprocess.PIPE}
        asking = sandbox.start([*command, "tests", entry_point], files | {"tests.py": tests.encode()}, limits, [harness], kind, **wire)
        solution.stdout.close()  # so that each sees the other end
        solution.stdin.close()
        said, met = sandbox.read(asking, asking.stderr, 4096, deadline)
    finally:
        solution.kill()
        if asking:
            asking.kill()
            asking.stderr.close()
    return not met and _verdict(said)


def _verdict(said: bytes) -> bool:
    if said.startswith(b"sandbox: "):
        raise RuntimeError(said.decode(errors="replace")[:300])
    try:
        verdict, why = json.loads(said)
    except ValueError:
        return False  # the tests died, of what the solution gave them
    if verdict == code_harness.BROKEN:
        raise ValueError(f"metadata.tests: found some that cannot be run, need others: {why}")
    return verdict == "passed"

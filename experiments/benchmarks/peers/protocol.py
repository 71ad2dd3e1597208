"""How a peer's worker talks: a job in a file, then a line of JSON for each command and for its answer. Standard library only.

A worker is a script run by its peer's own Python: `WORKER JOB.json`. It answers {"ready": {...}} once its model is loaded and warm, then
each command {"do": NAME} with {"seconds": ..., "tokens": ...}, or {"error": ...}; the end of its input ends it.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from importlib import metadata


class Channel:
    """Commands in, answers out. What libraries print goes to standard error, which is the worker's log."""

    def __init__(self):
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def read(self) -> dict | None:
        """The next command; None at the end."""
        line = sys.stdin.readline()
        return json.loads(line) if line.strip() else None

    def answer(self, **values) -> None:
        print(json.dumps(values), file=self._out, flush=True)


def read_job() -> dict:
    with open(sys.argv[1], encoding="utf-8") as f:
        return json.load(f)


def versions(*packages: str) -> dict[str, str]:
    return {package: metadata.version(package) for package in packages}


class Clock:
    """Seconds since it was made: of the wall, and of all threads of this process, which other jobs on the machine do not add to."""

    def __init__(self):
        self._start = time.perf_counter(), time.process_time()

    def read(self) -> dict:
        return {"seconds": time.perf_counter() - self._start[0], "cpu_seconds": time.process_time() - self._start[1]}


def timed(run: Callable[[], int]) -> dict:
    """What `run` took, and the tokens that it says to have made."""
    clock = Clock()
    tokens = run()
    return clock.read() | {"tokens": tokens}


def serve(channel: Channel, about: dict, handlers: dict[str, Callable[[], dict]]) -> None:
    """Says that the worker is ready, then answers commands until there are no more. An error is an answer too."""
    channel.answer(ready=about)
    while (command := channel.read()) is not None:
        try:
            channel.answer(**handlers[command["do"]]())
        except Exception as error:
            traceback.print_exc()
            channel.answer(error=f"{type(error).__name__}: {error}")

"""Workers that score completions, each a sandboxed process of its own, killed and replaced when it dies or takes too long."""

import itertools
import json
import os
import queue
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rl_adapter import sandbox
from rl_adapter.rewards import worker

STARTING = 120.0  # seconds in which a worker must have imported its scorers; alone on a CPU it takes about two
GRACE = 5.0  # seconds beyond a request's own, after which the worker itself is taken for dead
LIMITS = sandbox.Limits(seconds=STARTING, memory_mb=2048, processes=32, disk_mb=16)


class Pool:
    """Scores in several workers at a time. Thread-safe; a thread waits for a free worker, and gets the reply to its own request.

    Args:
      scorers: name -> settings, as `worker.prepare` takes them.
      count: of workers; each is started when first needed.
      reads: absolute paths that the scorers read, beside the interpreter's.
    """

    def __init__(self, scorers: Mapping[str, Mapping[str, Any]], count: int, reads: Sequence[str] = ()):
        package = os.path.dirname(os.path.dirname(os.path.abspath(worker.__file__)))
        self._reads = (package, *reads)
        self._config = {"path": [os.path.dirname(package), *map(os.path.abspath, sys.path)], "scorers": scorers}
        self._numbers, self._closed, self._lock = itertools.count(), False, threading.Lock()
        self._alive: set[sandbox.Process] = set()
        self._idle: queue.LifoQueue = queue.LifoQueue()  # the last one used first: no more are started than are needed
        for _ in range(count):
            self._idle.put(None)

    def check(self) -> None:
        """Starts a worker; raises the ValueError of a scorer that cannot be prepared."""
        process = self._idle.get()
        try:
            process = self._ready(process)
        finally:
            self._idle.put(process)

    def ask(self, scorer: str, text: str, problem: Mapping[str, Any], truncated: bool, seconds: float) -> tuple[float | None, str | None]:
        """The value, or None and why there is none.

        Args:
          scorer: name of one.
          text: the completion.
          problem: the fields of one; what JSON can hold.
          truncated: whether the completion was cut.
          seconds: that it may take, once a worker is free.
        """
        number = next(self._numbers)
        request = {"id": number, "scorer": scorer, "text": text, "problem": problem, "truncated": truncated, "seconds": seconds}
        line = json.dumps(request).encode() + b"\n"
        process, kept = self._idle.get(), None
        try:
            process = self._ready(process)
            reply = _exchange(process, line, seconds + GRACE)
            if reply is None or reply.get("id") != number:
                return None, "the worker that scored it died or hung"
            kept = process
        finally:
            # One that broke off, at whatever point, may still say what the next request must not take for its reply.
            if kept is None:
                self._drop(process)
            self._idle.put(kept)
        return (float(reply["value"]), None) if "value" in reply else (None, str(reply["error"]))

    def close(self) -> None:
        """Ends all workers, also those at work."""
        with self._lock:
            self._closed = True
            alive = tuple(self._alive)
        for process in alive:
            self._drop(process)

    def _ready(self, process: sandbox.Process | None) -> sandbox.Process:
        """The worker, or one in place of it if it is none or dead."""
        if process is not None and process.poll() is None:
            return process
        self._drop(process)
        command = [sys.executable, "-I", os.path.abspath(worker.__file__)]
        with self._lock:
            if self._closed:
                raise RuntimeError("pool: found it closed, need an open one")
            process = sandbox.start(command, limits=LIMITS, reads=self._reads, lasting=True, stderr=subprocess.DEVNULL)
            self._alive.add(process)
        reply = _exchange(process, json.dumps(self._config).encode() + b"\n", STARTING)
        if reply is not None and "ready" in reply:
            return process
        self._drop(process)
        if reply is None:
            raise RuntimeError(f"reward: the worker that scores did not start within {STARTING:g} s ({sandbox.describe()})")
        raise ValueError(f"reward.{reply['scorer']}: found one that cannot be prepared, need one that can: {reply['error']}")

    def _drop(self, process: sandbox.Process | None) -> None:
        if process is None:
            return
        with self._lock:
            if process not in self._alive:
                return
            self._alive.discard(process)
        process.kill()
        for stream in (process.stdin, process.stdout):
            try:
                stream.close()
            except BrokenPipeError:
                pass  # what it never read


def _exchange(process: sandbox.Process, line: bytes, seconds: float) -> dict | None:
    """The reply to one request; None if the process died or the time was up."""
    deadline, found, left = time.monotonic() + seconds, b"", memoryview(line)
    os.set_blocking(process.stdin.fileno(), False)  # one that is stopped reads nothing
    with selectors.DefaultSelector() as waiting:
        waiting.register(process.stdout, selectors.EVENT_READ)
        waiting.register(process.stdin, selectors.EVENT_WRITE)
        while not found.endswith(b"\n"):
            ready = {key.fileobj for key, _ in waiting.select(max(0, deadline - time.monotonic()))}
            if not ready:
                return None
            if process.stdin in ready:
                try:
                    left = left[os.write(process.stdin.fileno(), left[:65536]) :]
                except BrokenPipeError:
                    return None
                if not left:
                    waiting.unregister(process.stdin)
            if process.stdout in ready:
                piece = os.read(process.stdout.fileno(), 65536)
                found += piece
                if not piece or len(found) > 2 * worker.LONGEST_REPLY:
                    return None
    try:
        return json.loads(found)
    except ValueError:
        return None

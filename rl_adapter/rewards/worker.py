"""Scores completions, one JSON request a line on stdin, one JSON reply a line on stdout. `pool.py` runs it as a script in a sandbox.

Each request is scored in a fork, which cannot change this process: a scorer that runs what a model wrote leaves nothing behind for the next
completion. A fork that is still at work when its time is up, and whatever it started, is killed. Imports no JAX.
"""

import ctypes
import importlib
import json
import math
import os
import resource
import select
import signal
import sys
import time

LONGEST_REPLY = 65536  # bytes
MEMORY = 2**30  # bytes of address space that a fork may take beside what it begins with


def prepare(name, settings):
    """The function (text, problem, truncated) -> number of a scorer; imports what it needs once, before any request."""
    mark = settings["mark"]
    if name == "math":
        from rl_adapter.rewards import maths

        maths.equal("\\frac{1}{2}", "0.5")  # loads the grammar, which forks then share
        return lambda text, problem, truncated: maths.score(text, problem["answer"], mark)
    if name == "gym":
        from rl_adapter.rewards import gym

        return lambda text, problem, truncated: gym.score(text, problem, mark, settings["partial"])
    if name == "regex":
        from rl_adapter.rewards import formats

        formats.pattern(settings["pattern"])
        return lambda text, problem, truncated: formats.matches(text, settings["pattern"])
    if name == "json":
        from rl_adapter.rewards import formats

        formats.validator(settings["schema"])
        return lambda text, problem, truncated: formats.fits(text, mark, settings["schema"])
    module, _, attribute = settings["path"].partition(":")
    function = getattr(importlib.import_module(module), attribute)
    if not callable(function):
        raise TypeError(f"found {function!r}, which cannot be called")
    return lambda text, problem, truncated: function(text, {**problem, "truncated": truncated})


def score(scorer, request):
    try:
        value = scorer(request["text"], request["problem"], request["truncated"])
        if hasattr(value, "item"):  # of NumPy
            value = value.item()
        if not isinstance(value, bool | int | float) or not math.isfinite(value):
            raise ValueError(f"found {value!r}, need a finite number")
        return {"value": float(value)}
    except MemoryError:
        return {"error": "out of memory"}
    except BaseException as error:  # whatever one sample provokes stays with that sample; SystemExit too
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def limit(seconds):
    """Of a fork: CPU seconds, and memory beside what it begins with."""
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1,) * 2)
    try:
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return  # a container without /proc: the worker's own limit holds
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY,) * 2)


def in_fork(scorer, request):
    """The reply of a fork, or that it gave none."""
    mine, its = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(mine)
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            os.closerange(its + 1, 128)
            limit(request["seconds"])
            reply = json.dumps(score(scorer, request)).encode()
            while reply:
                reply = reply[os.write(its, reply) :]
        finally:
            os._exit(0)
    os.close(its)
    deadline = time.monotonic() + request["seconds"]
    found = b""
    while len(found) <= LONGEST_REPLY:
        if not select.select([mine], [], [], max(0, deadline - time.monotonic()))[0]:
            found = json.dumps({"error": f"found no end within {request['seconds']:g} s"}).encode()
            break
        piece = os.read(mine, LONGEST_REPLY)
        if not piece:
            break
        found += piece
    os.close(mine)
    try:
        os.kill(-1, signal.SIGKILL)  # the fork, and whatever it started: nobody else is in this process namespace but its first process
    except ProcessLookupError:
        pass
    os.waitpid(child, 0)
    try:
        reply = json.loads(found)
        assert set(reply) <= {"value", "error"} and reply
        return reply
    except Exception:
        return {"error": "the process that scored it died"}


def main():
    if (os.getpid(), os.getppid()) != (2, 1):
        raise SystemExit("worker: run by hand, need to be run in a sandbox: it kills every process that it can see")
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # not dumpable: a fork cannot open its files and speak for it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no reply

    def say(reply):
        out.write(json.dumps(reply).encode() + b"\n")
        out.flush()

    config = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = config["path"]
    scorers = {}
    for name, settings in config["scorers"].items():
        try:
            scorers[name] = prepare(name, settings)
        except Exception as error:
            say({"scorer": name, "error": f"{type(error).__name__}: {error}"[:500]})
            return
    say({"ready": sorted(scorers)})
    for line in sys.stdin.buffer:
        request = json.loads(line)
        say({"id": request["id"]} | in_fork(scorers[request["scorer"]], request))


if __name__ == "__main__":
    main()

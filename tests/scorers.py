"""Functions that tests name as `reward.function.path`. They run in a sandboxed worker."""

import json
import os
import signal
import socket
import sys
import time

NUMBER = 7
COUNT = []


def raises(text, fields):
    raise RuntimeError("always")


def wants_three(text, fields, more):
    return 1.0


def no_number(text, fields):
    return float("nan")


def moody(text, fields):
    word = text.split()[-1] if text.split() else ""
    if word == "sleep":
        time.sleep(60)
    if word == "exit":
        raise SystemExit(0)
    if word == "raise":
        raise RuntimeError("boom")
    if word == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "memory":
        return len(bytearray(10**11))
    if word == "big":
        raise ValueError("x" * 10**6)
    if word == "fields":
        raise ValueError("fields " + json.dumps(fields, separators=(",", ":")))
    if word == "count":
        COUNT.append(1)
        return len(COUNT)
    if word == "jax":
        return float("jax" in sys.modules)
    if word == "network":
        try:
            socket.create_connection(("127.0.0.1", 1), 0.1)
        except ConnectionRefusedError:
            return 1.0  # there was somebody to refuse
        except OSError:
            return 0.0
    return {"nan": float("nan"), "text": "1.0"}.get(word, len(text))

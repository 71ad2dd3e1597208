"""Tests of a solution, and the solution, each a sandboxed process of its own. `code.py` runs this file as a script in both.

    python code_harness.py solution             requests on stdin, replies on stdout, one JSON value a line
    python code_harness.py tests ENTRY_POINT    requests on stdout, replies on stdin; the verdict on stderr

The tests call the solution by value: what they expect never reaches its process, and nothing that its process does to itself, to files or
to its exit code reaches theirs. All that a solution can do is to answer, and a right answer is right. Results that are no values (objects,
generators) stay with the solution; the tests hold a `Remote`, which is equal to nothing but itself: no question that would tell what is
expected (`==`, `in`, `<`) is put to the solution.
"""

import ast
import builtins
import importlib
import json
import math
import operator
import os
import sys

LONGEST = 2**22  # bytes of a message
DEEPEST = 50  # levels of a value
ENDED = "ended"  # verdicts beside "passed": the solution's process is gone,
FAILED = "failed"  # an assertion or an exception,
BROKEN = "broken"  # the tests themselves cannot be run
OPERATIONS = {"getitem": operator.getitem, "len": len, "iter": iter, "next": next, "str": str, "bool": bool}
OPERATIONS |= {
    "getattr": getattr,
    "setattr": setattr,
    "setitem": operator.setitem,
    "call": lambda function, *args, **kw: function(*args, **kw),
}


class Remote:
    """An object of the solution's."""

    def __init__(self, wire, reference):
        self.__dict__.update(_wire=wire, _reference=reference)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._wire.ask("getattr", self, name)

    def __setattr__(self, name, value):
        self._wire.ask("setattr", self, name, value)

    def __call__(self, *args, **kwargs):
        return self._wire.ask("call", self, *args, **kwargs)

    def __getitem__(self, key):
        return self._wire.ask("getitem", self, key)

    def __setitem__(self, key, value):
        self._wire.ask("setitem", self, key, value)

    def __len__(self):
        return self._wire.ask("len", self)

    def __bool__(self):
        return self._wire.ask("bool", self) is True

    def __iter__(self):
        found = self._wire.ask("iter", self)
        return found if isinstance(found, Remote) else iter(found)

    def __next__(self):
        return self._wire.ask("next", self)

    def __str__(self):
        return str(self._wire.ask("str", self))


class Stop(BaseException):
    """Not for the tests to catch: why there is no verdict on them."""


def encode(value, hold, depth=0):
    """A value as JSON; `hold` makes a reference of what is none."""
    if depth > DEEPEST:
        raise RecursionError("found a value nested too deep")
    inner = lambda items: [encode(item, hold, depth + 1) for item in items]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value) if abs(value) < 2**53 else ["int", hex(value)]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else ["float", repr(float(value))]
    if isinstance(value, complex):
        return ["complex", inner((value.real, value.imag))]
    if isinstance(value, bytes | bytearray):
        return ["bytes", bytes(value).hex()]
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, inner(value)]
    if isinstance(value, dict):
        return ["dict", [inner(pair) for pair in value.items()]]
    if not isinstance(value, Remote) and hasattr(value, "tolist"):  # of NumPy
        return encode(value.tolist(), hold, depth + 1)
    return ["object", hold(value)]


def decode(value, find):
    """Undoes `encode`."""
    if not isinstance(value, list):
        return value
    kind, payload = value
    if kind == "object":
        return find(payload)
    if kind in ("int", "float", "bytes"):
        return {"int": lambda x: int(x, 16), "float": float, "bytes": bytes.fromhex}[kind](payload)
    if kind == "dict":
        return {decode(k, find): decode(v, find) for k, v in payload}
    items = [decode(item, find) for item in payload]
    return complex(*items) if kind == "complex" else {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](items)


class Wire:
    """Asks the solution."""

    def __init__(self, source, sink):
        self.source, self.sink = source, sink
        self.stopped = None

    def ask(self, operation, *args, **kwargs):
        try:
            return self.answer(operation, args, kwargs)
        except Stop as error:
            self.stopped = error.args  # tests that catch everything would pass over it
            raise

    def answer(self, operation, args, kwargs):
        try:
            line = json.dumps([operation, encode(args, self.reference), encode(kwargs, self.reference)])
        except RecursionError as error:
            raise Stop(BROKEN, f"an argument: {error}") from None
        try:
            self.sink.write(line.encode() + b"\n")
            self.sink.flush()
            reply = self.source.readline(LONGEST)
        except OSError:
            reply = b""
        if not reply.endswith(b"\n"):
            raise Stop(ENDED, "the solution's process ended" if len(reply) < LONGEST else "the solution answered too much")
        try:
            reply = json.loads(reply)
            if "raised" in reply:
                raised = str(reply["raised"]), str(reply["message"])[:1000]
            else:
                result, changed, raised = decode(reply["result"], self.find), decode(reply["changed"], self.find), None
        except Exception as error:  # it can say anything
            raise Stop(FAILED, f"the solution's answer: {type(error).__name__}") from None
        if raised:
            kind = getattr(builtins, raised[0], None)
            fine = isinstance(kind, type) and issubclass(kind, Exception) and kind is not AssertionError
            error = _made(kind, raised[1]) if fine else RuntimeError(": ".join(raised))
            error.of_solution = True
            raise error
        for place, value in changed.items() if isinstance(changed, dict) else ():
            _update(args[1:], place, value)
        return result

    def reference(self, value):
        if isinstance(value, Remote):
            return value._reference
        raise Stop(BROKEN, f"an argument: found {type(value).__name__}, need values: numbers, text, lists, dicts, sets")

    def find(self, reference):
        return Remote(self, reference if isinstance(reference, int) else 0)


def _made(kind, message):
    try:
        return kind(message)
    except TypeError:  # such as UnicodeDecodeError
        return ValueError(message)


def _update(args, place, value):
    """What the solution did to an argument, done to the tests' own."""
    if isinstance(place, int) and 0 <= place < len(args) and type(args[place]) is type(value):
        if isinstance(value, list):
            args[place][:] = value
        elif isinstance(value, dict | set):
            args[place].clear()
            args[place].update(value)


def serve(source, sink):
    """The solution's side."""
    held, names = {}, {"__name__": "solution", "__builtins__": builtins}

    def hold(value):
        held[id(value)] = value
        return id(value)

    failure = None
    try:
        for name in ("setup.py", "solution.py"):
            with open(name, encoding="utf-8") as file:
                exec(compile(file.read(), name, "exec"), names)
    except BaseException as error:
        failure = error
    for line in source:
        try:
            if failure:
                raise failure
            operation, args, kwargs = json.loads(line)
            find = lambda reference: names[reference] if isinstance(reference, str) else held[reference]
            args, kwargs = decode(args, find), decode(kwargs, find)
            mutable = {i: arg for i, arg in enumerate(args[1:]) if isinstance(arg, list | dict | set)} if operation == "call" else {}
            before = {i: json.dumps(encode(arg, hold)) for i, arg in mutable.items()}
            result = encode(OPERATIONS[operation](*args, **kwargs), hold)
            changed = {i: arg for i, arg in mutable.items() if json.dumps(encode(arg, hold)) != before[i]}
            reply = json.dumps({"result": result, "changed": encode(changed, hold)})
        except BaseException as error:
            kind = next((k.__name__ for k in type(error).__mro__ if getattr(builtins, k.__name__, None) is k), "Exception")
            reply = json.dumps({"raised": kind, "message": str(error)[:1000]})
        sink.write(reply.encode() + b"\n")
        sink.flush()


def test(source, sink, entry_point):
    """The tests' side. Returns the verdict and why."""
    with open("setup.py", encoding="utf-8") as file:
        setup = file.read()
    with open("tests.py", encoding="utf-8") as file:
        tests = file.read()
    wire = Wire(source, sink)
    names = {"__name__": "tests"}
    try:
        tree = ast.parse(tests, "tests.py")
        exec(compile(setup, "setup.py", "exec"), names)
        for name in [entry_point] if entry_point else free_names(tree, names):
            module = name in sys.stdlib_module_names and not entry_point
            names[name] = importlib.import_module(name) if module else Remote(wire, name)
    except BaseException as error:
        return BROKEN, f"{type(error).__name__}: {error}"
    try:
        exec(compile(tree, "tests.py", "exec"), names)
        if entry_point and callable(names.get("check")) and not isinstance(names["check"], Remote):
            names["check"](names[entry_point])
    except BaseException as error:
        broken = isinstance(error, NameError) and not hasattr(error, "of_solution")
        return wire.stopped or (BROKEN if broken else FAILED, f"{type(error).__name__}: {error}")
    return wire.stopped or ("passed", "")


def free_names(tree, known):
    """What tests use and neither define nor import: the solution is to define it."""
    used, made = set(), set(known) | set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else made).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            made.add(node.name)
        elif isinstance(node, ast.arg):
            made.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            made.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            made |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return sorted(used - made)


def main():
    # The wire is not where prints go, nor where input comes from.
    source, sink, verdict = (os.fdopen(os.dup(fd), mode) for fd, mode in ((0, "rb"), (1, "wb"), (2, "wb")))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    if sys.argv[1] == "solution":
        serve(source, sink)
        return
    found = test(source, sink, sys.argv[2])
    verdict.write(json.dumps([str(part)[:300] for part in found]).encode())
    verdict.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

"""A program earns its reward by passing its tests, and in no other way."""

import dataclasses
import time

import pytest

from rl_adapter import sandbox
from rl_adapter.rewards import code

pytestmark = pytest.mark.skipif(all(map(sandbox.trouble, sandbox.KINDS)), reason="no sandbox works on this machine")

LIMITS = sandbox.Limits(seconds=10.0, memory_mb=256, processes=8, output_kb=64, disk_mb=8)
FACTORIAL = {
    "entry_point": "factorial",
    "tests": """
def check(candidate):
    assert candidate(0) == 1
    assert candidate(5) == 120
    assert candidate(20) == 2432902008176640000
    try:
        candidate(-1)
        assert False, "no error"
    except ValueError:
        pass
""",
}
RIGHT = "def factorial(n):\n    if n < 0: raise ValueError(n)\n    return 1 if n < 2 else n * factorial(n - 1)"
DOUBLE = {"cases": [{"stdin": "4\n", "stdout": "8\n"}, {"stdin": "-7", "stdout": "-14"}]}


@pytest.fixture(params=sandbox.KINDS)
def kind(request):
    if why := sandbox.trouble(request.param):
        pytest.skip(f"{request.param} does not work here: {why}")
    return request.param


def block(source, language="python"):
    return f"Let me think.\n```{language}\n{source}\n```\nDone."


def score(source, metadata, kind=None):
    return code.score(block(source), metadata, LIMITS, kind)


def test_right_programs_pass_and_wrong_ones_do_not(kind):
    assert score(RIGHT, FACTORIAL, kind) == 1.0
    assert score(RIGHT.replace("n < 2", "n < 3"), FACTORIAL, kind) == 0.0
    assert score(RIGHT.replace("raise ValueError(n)", "return 1"), FACTORIAL, kind) == 0.0
    assert score("print(2 * int(input()))", DOUBLE, kind) == 1.0
    assert score("print(8)", DOUBLE, kind) == 0.0
    both = FACTORIAL | {"cases": [{"stdin": "", "stdout": ""}]}
    assert score(RIGHT, both, kind) == 1.0 and score(RIGHT + "\nprint()\nprint(1)", both, kind) == 0.0


@pytest.mark.parametrize(
    "text, want",
    [
        (block(RIGHT, "py"), 1.0),
        (block(RIGHT, ""), 1.0),
        (block("raise SystemExit") + block(RIGHT), 1.0),  # the last block counts
        (block(RIGHT) + block("def factorial(n): return 1"), 0.0),
        (block(RIGHT) + block('{"a": 1}', "json"), 1.0),
        (RIGHT, 0.0),  # no block
        (f"```python\n{RIGHT}", 0.0),  # cut off
        ("", 0.0),
        ("```\n" * 1000, 0.0),
        ("`" * 100_000, 0.0),
        (block("x = '\ud800'\n" + RIGHT), 1.0),
        (block("\x00"), 0.0),
    ],
)
def test_the_program_is_the_last_whole_block(text, want):
    assert code.score(text, FACTORIAL, LIMITS) == want


# What a program may try in place of solving the task. Each is run as a solution with tests, and as one of input and output.
TRICKS = {
    "exit 0": "import os; os._exit(0)",
    "sys.exit": "import sys; sys.exit(0)",
    "SystemExit in the call": "def factorial(n): raise SystemExit(0)",
    "os._exit in the call": "import os\ndef factorial(n): os._exit(0)",
    "atexit": "import atexit, os\natexit.register(lambda: print('passed'))\natexit.register(os._exit, 0)",
    "equal to all": "class A(int):\n  def __eq__(self, o): return True\n  __ne__ = lambda s, o: False\n  __hash__ = int.__hash__\n"
    "def factorial(n): return A(1)",
    "an object equal to all": "class A:\n  __eq__ = __contains__ = __lt__ = __rsub__ = lambda s, o: True\n"
    "  __bool__ = lambda s: True\ndef factorial(n): return A()",
    "builtins": "import builtins\nbuiltins.AssertionError = ValueError\nbuiltins.exec = builtins.compile = lambda *a: None\n"
    "class E(Exception): pass\nbuiltins.AssertionError = E\ndef factorial(n): return 0",
    "the files": """import os, sys
for path in (*os.listdir('.'), sys.argv[0], sys.modules['__main__'].__file__, 'tests.py', '../tests.py', '/proc/1/fd/0'):
    try: open(path, 'w').write('def check(f): pass')
    except OSError: pass
def factorial(n): return 0""",
    "the verdict, printed": """import os, sys
for fd in range(64):
    for said in (b'["passed", ""]\\n', b'{"result": 1, "changed": ["dict", []]}\\n' * 9):
        try: os.write(fd, said)
        except OSError: pass
os._exit(0)""",
    "frames and garbage": """import gc, sys
def factorial(n):
    frame, seen = sys._getframe(), []
    while frame:
        seen += [v for v in (*frame.f_locals.values(), *frame.f_globals.values()) if type(v) is int]
        frame = frame.f_back
    seen += [x for o in gc.get_objects() if type(o) in (list, tuple, dict) for x in o if type(x) is int and x in (120, 2432902008176640000)]
    return ([x for x in seen if x == 120] or [0])[0] if n == 5 else 1""",
    "the harness": """import sys
main = sys.modules['__main__']
for name in dir(main):
    if callable(getattr(main, name)) and not name.startswith('__'):
        try: setattr(main, name, lambda *a, **k: True)
        except Exception: pass
def factorial(n): return True""",
    "the parent": "import os\nfor p in (os.getppid(), 1, -1):\n  try: os.kill(p, 9)\n  except OSError: pass\ndef factorial(n): return 0",
    "a loop": "while True: pass",
    "a loop in the call": "def factorial(n):\n  while True: pass",
    "fork bomb": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "memory": "x = []\nwhile True: x.append(bytearray(10**7))",
    "too long an answer": "def factorial(n): return 'x' * 10**8",
    "too deep an answer": "def factorial(n):\n  x = []\n  for _ in range(10**5): x = [x]\n  return x",
    "an endless answer": "def factorial(n):\n  x = []\n  x.append(x)\n  return x",
    "a huge answer": "def factorial(n): return 1 << 10**7",
    "no answer": "def factorial(n): pass",
    "an error for an answer": "def factorial(n): raise AssertionError",
    "output": "while True: print('passed')",
    "threads": "import threading, time\nfor _ in range(999): threading.Thread(target=time.sleep, args=(99,)).start()",
}


@pytest.mark.parametrize("name", TRICKS)
def test_no_trick_earns_reward_or_takes_longer(name, kind):
    started = time.monotonic()
    limits = dataclasses.replace(LIMITS, seconds=0.6)
    assert code.score(block(TRICKS[name]), FACTORIAL, limits, kind) == 0.0
    assert code.score(block(TRICKS[name]), DOUBLE, limits, kind) == 0.0
    assert time.monotonic() - started < 20.0  # beside the limits, starting and ending a sandbox twice on a busy machine


def test_dying_is_not_the_error_that_tests_wait_for():
    lenient = {"entry_point": "f", "tests": "def check(f):\n    try:\n        f(1)\n        assert False\n    except:\n        pass"}
    assert score("def f(x): raise KeyError", lenient) == 1.0
    assert score("import os\ndef f(x): os._exit(1)", lenient) == 0.0
    assert score("import os; os._exit(0)", lenient) == 0.0


VALUES = """None, True, 0, -1, 2**70, -(2**70), 0.1, float('inf'), 1e-300, 1j, '', 'é\\ud800', b'\\x00', [], [[1], (2,)], (), (1,), set(),
{1, 'a'}, frozenset({1}), {}, {1: [2], 'a': {None: (3,)}}"""


def test_values_keep_their_type_and_value_both_ways():
    tests = f"for x in ({VALUES}):\n    y = same(x)\n    assert y == x and type(y) is type(x), x\nassert same(float('nan')) != 0"
    assert score("def same(x): return x", {"tests": tests}) == 1.0
    tests = f"for x in ({VALUES}):\n    assert given(repr(x)) == x and type(given(repr(x))) is type(x)"
    assert score("inf, nan = float('inf'), float('nan')\ndef given(x): return eval(x)", {"tests": tests}) == 1.0


def test_nothing_that_tells_what_is_expected_is_asked_of_the_program():
    """An object that agrees to all it is asked earns nothing."""
    agrees = "".join(f"  __{n}__ = lambda *a: True\n" for n in "eq ne lt le gt ge contains sub rsub add abs round and or xor".split())
    for question in ("f() == 5", "5 == f()", "5 in f()", "f() in [5]", "f() < 5", "abs(f() - 5) < 1", "{5: 1}[f()]", "sorted([f(), 5])"):
        assert score(f"class A:\n{agrees}  __hash__ = lambda s: 5\ndef f(): return A()", {"tests": f"assert {question}"}) == 0.0, question


@pytest.mark.parametrize(
    "program, tests",
    [
        ("def sort(x): x.sort()", "a = [3, 1, 2]\nb = sort(a)\nassert a == [1, 2, 3] and b is None"),
        ("def put(d, k): d[k] = [k]; del d['x']", "d = {'x': 1}\nput(d, 'y')\nassert d == {'y': ['y']}"),
        ("class S:\n  def __init__(s): s.v = []\n  def push(s, x): s.v.append(x); return s",
         "s = S()\ns.push(1).push(2)\nassert s.v == [1, 2]"),
        ("def gen():\n  yield from 'abc'", "assert list(gen()) == ['a', 'b', 'c'] and next(gen()) == 'a'"),
        ("class N:\n  def __init__(s, v, n=None): s.v, s.n = v, n\ndef tail(n): return n.n", "assert tail(N(1, N(2))).v == 2"),
        ("class V:\n  def __len__(s): return 3\n  def __getitem__(s, i): return [4, 5, 6][i]\n  def __str__(s): return 'V'",
         "v = V()\nassert len(v) == 3 and v[1] == 5 and list(v) == [4, 5, 6] and 5 in v and str(v) == 'V'"),
        ("def half(x): return x / 2", "assert math.isclose(half(1.0), 0.5)"),  # a module of the standard library is meant
        ("def f(*a, k=1, **m): return a, k, m", "assert f(1, 2, k=3, z=4) == ((1, 2), 3, {'z': 4})"),
        ("def boom(): raise ZeroDivisionError('x')",
         "try:\n    boom()\n    assert False\nexcept ZeroDivisionError as e:\n    assert str(e) == 'x'"),
        ("class Own(ValueError): pass\ndef boom(): raise Own('x')", "try:\n    boom()\n    assert False\nexcept ValueError:\n    pass"),
        ("import numpy as np\ndef f(): return np.arange(3), np.float64(0.5), np.int64(3)", "assert f() == ([0, 1, 2], 0.5, 3)"),
        ("from collections import *\nT = namedtuple('T', 'a b')\ndef f(): return T(1, 2), Counter('aab'), OrderedDict(x=1)",
         "assert f() == ((1, 2), {'a': 2, 'b': 1}, {'x': 1})"),
    ],
)  # fmt: skip
def test_what_is_no_value_stays_with_the_solution(program, tests):
    assert score(program, {"tests": tests}) == 1.0
    assert score("def other(): pass", {"tests": tests}) == 0.0


def test_setup_is_for_both_and_the_tests_own_is_not_the_programs_to_change():
    setup = "from typing import List\ndef poly(xs, x): return sum(c * x**i for i, c in enumerate(xs))"
    metadata = {"setup": setup, "entry_point": "root", "tests": "def check(f):\n    assert abs(poly([-4, 2], f([-4, 2]))) < 1e-6"}
    assert score("def root(xs: List[float]): return -xs[0] / xs[1] if poly(xs, 0) else 0", metadata) == 1.0
    assert score("def poly(xs, x): return 0\ndef root(xs): return 7", metadata) == 0.0


@pytest.mark.parametrize(
    "metadata, found",
    [
        ({}, "found neither tests nor cases"),
        ({"tests": 3}, "metadata.tests: found int"),
        ({"cases": [{"stdin": "x"}]}, "metadata.cases: found others"),
        ({"cases": "x"}, "metadata.cases: found others"),
        ({"tests": "pass", "entry_point": "a b"}, "metadata.entry_point: found 'a b'"),
        ({"tests": "assert f("}, "metadata.tests: found some that cannot be run.*SyntaxError"),
        ({"tests": "assert f() == nowhere", "entry_point": "f"}, "cannot be run.*NameError: name 'nowhere'"),
        ({"tests": "f(object())"}, "cannot be run.*an argument: found object"),
        ({"tests": "f()", "setup": "1 / 0"}, "cannot be run.*ZeroDivisionError"),
    ],
)
def test_tests_that_cannot_be_run_are_an_error_and_no_reward(metadata, found):
    with pytest.raises(ValueError, match=found):
        score("def f(*x): return 1", metadata)


def test_a_name_error_of_the_program_is_the_programs():
    assert score("def f(): return nowhere", {"tests": "assert f() == 1"}) == 0.0


def test_output_is_compared_line_by_line():
    case = lambda stdout: {"cases": [{"stdin": "", "stdout": stdout}]}
    assert score("print('a  '); print('b'); print()", case("a\nb")) == 1.0
    assert score("print('a b')", case("a  b")) == 0.0
    assert score("print('ab')", case("a\nb")) == 0.0
    assert score("print('a'); raise SystemExit(3)", case("a")) == 0.0
    assert score("import sys; print('a'); print('note', file=sys.stderr)", case("a")) == 1.0

"""Where a program's time goes: by operation, and by part of the model. A library; `throughput.py --profile=DIR` is its command.

The profiler tells when each operation of a compiled program ran, by its name in the program; the program's text tells which line of
the model it came from (`op_name`), in which `jax.named_scope`s stand as components. A fusion counts where its last operation belongs.

Times are of the operation itself: a loop's is what its body and condition leave. Operations that run at once on several threads each
count in full, so a total may exceed the wall time.
"""

import bisect
import collections
import dataclasses
import gzip
import json
import os
import pathlib
import re
import time

import jax

from experiments.benchmarks import common, measure

# Named scopes of the model; the innermost decides, but 'linear' only where there is no other.
PARTS = ("qkv", "attention", "output", "mlp", "router", "experts", "head", "sample", "cache", "linear")
CONTROL = ("while", "call", "conditional")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\([^=]*\)|\S+) ([\w\-]+)\((?:%?([\w.\-]+))?")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLS = re.compile(r"calls=%?([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Op:
    """An instruction of a compiled program."""

    name: str
    kind: str  # its opcode
    shape: str  # of its result; of several, ''
    source: str  # op_name: the path of transformations, scopes and the primitive that it came from; '' if XLA made it of nothing known


@dataclasses.dataclass(frozen=True)
class Event:
    """One execution of an operation, in microseconds."""

    thread: tuple
    program: str
    op: str
    start: float
    duration: float

    @property
    def end(self) -> float:
        return self.start + self.duration


def instructions(text: str) -> dict[str, Op]:
    """Of a compiled program's text. What has no source takes, after '<- ', the last of the computation that it calls, or its operand's."""
    found, inside, called, operand, current = {}, {}, {}, {}, ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = header[1]
        elif made := _INSTRUCTION.match(line):
            source = match[1] if (match := _OP_NAME.search(line)) else ""
            found[made[1]] = Op(made[1], made[3], "" if made[2].startswith("(") else made[2].partition("{")[0], source)
            operand[made[1]] = made[4]
            if source:
                inside[current] = source
            if match := _CALLS.search(line):
                called[made[1]] = match[1]
    for name, op in found.items():  # operands come first in a text
        if not op.source:
            source = inside.get(called.get(name)) or (found[operand[name]].source if operand[name] in found else "")
            found[name] = dataclasses.replace(op, source=f"<- {source.removeprefix('<- ')}" if source else "")
    return found


def compiled() -> dict[str, list[dict[str, Op]]]:
    """All programs that live in this process, by name; several compilations may share one."""
    found = collections.defaultdict(list)
    for executable in jax.local_devices()[0].client.live_executables():
        for module in executable.hlo_modules():
            found[module.name].append(instructions(module.to_string()))
    return found


def read(directory: str | os.PathLike) -> list[Event]:
    """The operations of the last trace under a directory."""
    files = sorted(pathlib.Path(directory).rglob("*.trace.json.gz"), key=os.path.getmtime)
    if not files:
        raise ValueError(f"--profile: found no *.trace.json.gz under {str(directory)!r}, need a trace by jax.profiler")
    with gzip.open(files[-1]) as file:
        events = json.load(file)["traceEvents"]
    return [
        Event((e["pid"], e["tid"]), e["args"].get("hlo_module", ""), e["args"]["hlo_op"], e["ts"], e.get("dur", 0.0))
        for e in events
        if e.get("ph") == "X" and "hlo_op" in e.get("args", {})
    ]


def own_times(events: list[Event], is_control) -> list[float]:
    """Of each event, the microseconds that no event inside it takes.

    Inside an operation is what ran in it on its thread; inside a loop, all that ran meanwhile on any thread, as its body may.
    """
    order = sorted(range(len(events)), key=lambda i: (events[i].start, -events[i].duration))
    own, starts = [0.0] * len(events), [events[i].start for i in order]
    open_on = collections.defaultdict(list)  # thread -> events that have not ended, the innermost last
    for place, i in enumerate(order):
        event, stack = events[i], open_on[events[i].thread]
        own[i] += event.duration
        while stack and events[stack[-1]].end <= event.start:
            stack.pop()
        if stack and not is_control(events[stack[-1]]):
            own[stack[-1]] -= event.duration
        stack.append(i)
        if is_control(event):
            inside = order[place + 1 : bisect.bisect_left(starts, event.end)]
            own[i] -= _union([(events[j].start, min(events[j].end, event.end)) for j in inside])
    return own


def _union(intervals: list[tuple[float, float]]) -> float:
    """Length of what intervals, in the order of their starts, cover."""
    total, reached = 0.0, float("-inf")
    for start, end in intervals:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def part(source: str) -> str:
    """Of the model, by the named scopes in an op_name; of a backward pass 'transpose(jvp(experts))' is one."""
    scopes = re.findall(r"[\w.\-]+", source.rsplit("/", 1)[0])
    known = [s for s in scopes if s in PARTS]
    narrow = [s for s in known if s != "linear"]
    found = narrow[-1] if narrow else known[-1] if known else "rest"
    return f"{found}, backward" if "transpose(" in source else found


@dataclasses.dataclass(frozen=True)
class Line:
    """What one operation took in all its executions."""

    op: Op
    count: int
    milliseconds: float


@dataclasses.dataclass(frozen=True)
class Profile:
    wall: float  # milliseconds
    lines: list[Line]  # the most costly first

    def by_part(self) -> dict[str, float]:
        total = collections.Counter()
        for line in self.lines:
            total[part(line.op.source)] += line.milliseconds
        return dict(total.most_common())


def summarize(events: list[Event], programs: dict[str, list[dict[str, Op]]], wall: float) -> Profile:
    """Of programs that share a name, an event belongs to the one that holds most of the operations seen under that name."""
    seen = collections.defaultdict(set)
    for event in events:
        seen[event.program].add(event.op)
    known = {name: max(programs.get(name) or [{}], key=lambda ops: len(ops.keys() & names)) for name, names in seen.items()}
    op_of = lambda e: known[e.program].get(e.op, Op(e.op, re.sub(r"[.\d]+$", "", e.op), "", ""))
    is_control = lambda e: op_of(e).kind in CONTROL
    times, counts, ops = collections.Counter(), collections.Counter(), {}
    for event, own in zip(events, own_times(events, is_control)):
        key = event.program, event.op
        times[key] += own / 1e3
        counts[key] += 1
        ops[key] = op_of(event)
    lines = [Line(ops[key], counts[key], ms) for key, ms in times.most_common()]
    return Profile(wall, lines)


def trace(program: common.Program, directory: str | os.PathLike) -> Profile:
    """One run of a program, after one that compiles it; the trace stays in the directory, for TensorBoard or Perfetto."""
    jax.block_until_ready(program.run(*program.ready()))
    arguments = jax.block_until_ready(program.ready())
    with jax.profiler.trace(directory):
        start = time.perf_counter()
        jax.block_until_ready(program.run(*arguments))
        wall = time.perf_counter() - start
    return summarize(read(directory), compiled(), 1e3 * wall)


def report(title: str, profile: Profile, most: int = 30) -> None:
    """Prints it by part and by operation."""
    total = sum(line.milliseconds for line in profile.lines) or 1.0
    share = lambda ms: f"{ms / total:.1%}"
    measure.show(f"{title}: {profile.wall:.0f} ms, of operations {total:.0f} ms", ("part", "ms", "share"),
                 [(name, ms, share(ms)) for name, ms in profile.by_part().items()])  # fmt: skip
    shorten = lambda source: re.sub(r"(^jit\(\w+\)/|closed_call/|while/body/|jit\((\w+)\))", r"\2", source)
    rows = [(x.op.name, x.milliseconds, share(x.milliseconds), x.count, x.op.shape, shorten(x.op.source)) for x in profile.lines[:most]]
    title = f"{title}: the {len(rows)} costliest of {len(profile.lines)} operations"
    measure.show(title, ("operation", "ms", "share", "runs", "result", "from"), rows)

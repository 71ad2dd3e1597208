"""Timing in turns, in this process or in one child a variant; what a machine is; tables and JSON."""

import collections
import datetime
import json
import multiprocessing
import os
import pathlib
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import jax
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from experiments.benchmarks import common, floors
from rl_adapter import evaluate, monitor, runtime, update

COMPILE = "/jax/core/compile/backend_compile_duration"
CACHE_HIT = "/jax/compilation_cache/cache_hits"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
WIDTH = 150  # columns of a table that goes to a file


def timed(program: common.Program, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one run, to its end. `time.process_time` counts those of all this process's threads, which other jobs do not burden
    much: for work on a CPU on a busy machine."""
    arguments = jax.block_until_ready(program.ready())
    start = clock()
    jax.block_until_ready(program.run(*arguments))
    return clock() - start


def in_turns(timers: Mapping[object, Callable[[], float]], rounds: int, warm: bool = True) -> dict:
    """Seconds of each timer, one a round. They take turns, so that a busy machine burdens all of them; with `warm` after a round that
    is not kept, since it compiles."""
    seconds = {name: [] for name in timers}
    for r in range(rounds + warm):
        for name, timer in timers.items():
            value = timer()
            if r >= warm:
                seconds[name].append(value)
    return seconds


def medians(seconds: Mapping) -> dict:
    return {name: statistics.median(values) for name, values in seconds.items()}


def ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """Median of a / b round by round: what burdens the machine for a while burdens both of a round."""
    return statistics.median(x / y for x, y in zip(a, b))


# --- a child a variant -------------------------------------------------------------------------------------------------------------


def peak_bytes() -> int:
    """The most host memory that this process has had, since `forget_peak` where the kernel lets one forget it."""
    try:
        status = pathlib.Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])
    except (OSError, IndexError):  # not Linux
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def forget_peak() -> None:
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass  # then the peak is that of compiling too


def executables() -> collections.Counter:
    """Programs that live in this process, by name and bytes of temporaries."""
    found = jax.local_devices()[0].client.live_executables()
    return collections.Counter((e.hlo_modules()[0].name, e.get_compiled_memory_stats().temp_size_in_bytes) for e in found)


def serve(connection, variant: common.Variant, cold: bool) -> None:
    """The child: builds, compiles, reports; then runs what it is told to and answers with the seconds, until it is told None."""
    try:
        runtime.setup(0)
        jax.config.update("jax_enable_compilation_cache", not cold)
        hits, compiling = collections.Counter(), []
        jax.monitoring.register_event_listener(lambda event, **_: hits.update([event]))
        jax.monitoring.register_event_duration_secs_listener(lambda e, s, **_: compiling.append(s) if e == COMPILE else None)
        start = peak_bytes()
        work = common.build(variant)
        programs = common.programs(work)
        report = {"compile": {}, "temporaries": {}, "host_before": start}
        for name, program in programs.items():
            before, count, seconds, cached = executables(), len(compiling), time.perf_counter(), hits[CACHE_HIT]
            jax.block_until_ready(program.run(*program.ready()))
            report["temporaries"][name] = max((temporaries for _, temporaries in executables() - before), default=0)
            report["compile"][name] = {
                "first_call_s": time.perf_counter() - seconds,
                "compile_s": sum(compiling[count:]),
                "programs": len(compiling) - count,
                "from_cache": hits[CACHE_HIT] - cached,
            }
        report["host_compiling"] = peak_bytes()
        forget_peak()
        report["host_resting"] = peak_bytes()
        state = update.start(evaluate.optimizer(common.config_of(variant)), work.adapter)
        parts = {"base": work.base, "adapter": work.adapter, "optimizer": state.optimizer}
        report["device"] = {name: common.size(tree) for name, tree in parts.items()} | {"cache": common.cache_bytes(work)}
        del state, parts
        connection.send(report | {"costs": floors.costs(work, variant), "spec": work.model.spec})
        while (name := connection.recv()) is not None:
            connection.send(timed(programs[name]))
        connection.send(peak_bytes())
    except Exception as error:  # the parent tells it, with the variant; as text, since not every error can be sent
        connection.send(RuntimeError(f"{type(error).__name__}: {error}"))
        raise


class Child:
    """A process of its own for one variant, so that its memory and compilations are its own."""

    def __init__(self, variant: common.Variant, cold: bool = False):
        self._variant = variant
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, variant, cold), daemon=True)
        self._process.start()
        theirs.close()
        self.report = self._receive()

    def _receive(self):
        try:
            answer = self._connection.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"{self._variant}: its process ended with {self._process.exitcode}, and no answer") from None
        if isinstance(answer, Exception):
            raise RuntimeError(f"{self._variant}: {answer}") from answer
        return answer

    def run(self, name: str) -> float:
        self._connection.send(name)
        return self._receive()

    def close(self) -> int:
        """Ends it; the peak of its host memory since it had compiled."""
        self._connection.send(None)
        peak = self._receive()
        self._process.join()
        return peak


# --- what is shown -----------------------------------------------------------------------------------------------------------------


def machine() -> dict:
    """Where and when: to be read beside any number."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
        features = next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), set())
    except OSError:
        features = set()
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "features": sorted(f for f in features if f in ("avx", "avx2", "fma") or f.startswith(("avx512", "avx_", "amx"))),
        "devices": [d.device_kind for d in jax.local_devices()],
        "packages": monitor.versions(),
        "revision": monitor.git_revision(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "load": os.getloadavg(),  # of 1, 5 and 15 minutes: this benchmark's own is in it
    }


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence], console: Console | None = None) -> None:
    """A table; floats to three digits, None as nothing. The first column is text, and the others too where their first value is."""
    table = Table(box=box.SIMPLE)
    for i, column in enumerate(columns):
        is_text = not i or (rows and isinstance(rows[0][i], str))
        table.add_column(column, justify="left" if is_text else "right", overflow="fold")
    for row in rows:
        table.add_row(*(escape(text(value)) for value in row))
    console = console or Console()
    if not console.is_terminal:
        console.width = WIDTH
    console.print(escape(title), style="bold")
    console.print(table)


def text(value) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}" if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}"


def write(path: str, result: Mapping) -> None:
    """JSON, where a path is given."""
    if path:
        with open(path, "w") as file:
            json.dump(monitor.encode({**result, "load_after": os.getloadavg()}), file, indent=1)

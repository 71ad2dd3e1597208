"""Rollout, scoring and update of a batch: tokens a second, memory, compilation, each beside the least that this machine could need.

    python -m experiments.benchmarks.throughput                                                     # numerics x form, quickstart's shape
    python -m experiments.benchmarks.throughput --model= --form=stored --numerics=a16               # the shipped base
    python -m experiments.benchmarks.throughput --experts=16,64 --batch=4,16,64 --rounds=5 --out=FILE
    python -m experiments.benchmarks.throughput --numerics=a16 --form=int4_g32 --profile=DIR        # where the time goes

Every flag of a shape takes a list, and all combinations are measured. Each variant has a process of its own, so that peak memory and
compilations are its own; they take turns round by round, so that a busy machine burdens all of them.

A row's `x floor` is its time over the larger of two: that of its multiply-adds at the rate of a large matrix product, and that of its
bytes at memory's rate (`floors.py` says what is counted). `x rows` takes the rate at the few rows that one expert gets of a decoding
step. Update tokens are prompts and completions; the update scores the base too, as the trainer does.
"""

import dataclasses
import itertools

from absl import app, flags

from experiments.benchmarks import common, floors, measure, profile
from rl_adapter import runtime

FLAGS = flags.FLAGS

PROGRAMS = ("rollout", "scoring", "update")
AXES = tuple(f.name for f in dataclasses.fields(common.Variant) if f.type is int)


def whole(axis: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"--{axis}: found {text!r}, need whole numbers with commas between them") from None


def variants(values: dict[str, list]) -> list[common.Variant]:
    """All combinations."""
    return [common.Variant(**dict(zip(values, point))) for point in itertools.product(*values.values())]


def tokens(v: common.Variant) -> dict[str, int]:
    """What each program's rate is told in: sampled, scored, and trained on."""
    return {"rollout": v.completion_tokens, "scoring": v.completion_tokens, "update": v.tokens}


def rows_of(v: common.Variant, seconds: dict[str, float], cost: dict[str, floors.Cost], rate: dict) -> dict[str, dict]:
    """By program: time, rate and floors; the step is rollout and update together."""
    found = {}
    for name in PROGRAMS:
        floor = floors.floor(name, cost[name], rate)
        found[name] = {
            "seconds": seconds[name],
            "tokens_per_s": tokens(v)[name] / seconds[name],
            "floor_s": floor,
            "over_floor": seconds[name] / floor["floor"],
            "over_rows": seconds[name] / max(floor["rows"], floor["bytes"]),
        }
    step = seconds["rollout"] + seconds["update"]
    found["step"] = {"seconds": step, "tokens_per_s": v.completion_tokens / step}
    return found


def measured(points: list[common.Variant], rounds: int, cold: bool) -> list[dict]:
    """What each variant's process tells, its times, and its floors at the rates of this machine."""
    children = [measure.Child(v, cold=cold) for v in points]
    timers = {(i, name): lambda child=child, name=name: child.run(name) for i, child in enumerate(children) for name in PROGRAMS}
    seconds = measure.in_turns(timers, rounds)
    middle, rates, results = measure.medians(seconds), {}, []
    for i, (v, child) in enumerate(zip(points, children)):
        report, running = dict(child.report), child.close()
        cost, spec = report.pop("costs"), report.pop("spec")
        shape = floors.rows_of(v, spec), spec
        if shape not in rates:
            rates[shape] = floors.rates(v, spec)
        times = {name: middle[i, name] for name in PROGRAMS}
        results.append(
            {
                "variant": dataclasses.asdict(v),
                "rounds": {name: seconds[i, name] for name in PROGRAMS},
                "programs": rows_of(v, times, cost, rates[shape]),
                "rates": rates[shape],
                **report,
                "host_running": running,
            }
        )
    return results


def label(v: common.Variant, varied: list[str]) -> str:
    return " ".join(f"{axis}={getattr(v, axis)}" for axis in varied) or "one variant"


def define_flags() -> None:
    for axis in AXES:
        flags.DEFINE_list(axis, [str(getattr(common.Variant, axis))], f"comma-separated, see common.Variant.{axis}")
    flags.DEFINE_list("numerics", ["float", "a16", "a8"], "float | a16 | a8, comma-separated")
    flags.DEFINE_list("form", ["int4_g32", "int8"], f"of the linears, comma-separated: {' | '.join(common.FORMS)}")
    flags.DEFINE_string("model", "random", "'random' | '' (the shipped base) | a checkpoint; its shape is then its own")
    flags.DEFINE_integer("rounds", 5, "measurements of each variant, taken in turn")
    flags.DEFINE_boolean("cold", False, "compile anew, without the persistent cache: else its hits are told instead of seconds")
    flags.DEFINE_string("profile", "", "directory: trace one round of each program of the first variant into it, and print a table")
    flags.DEFINE_list("programs", list(PROGRAMS), "which of them --profile traces, comma-separated")
    flags.DEFINE_string("out", "", "file for the JSON result")


def main(_):
    about = measure.machine()
    runtime.setup(0)
    values = {"model": [FLAGS.model], "form": FLAGS.form, "numerics": FLAGS.numerics}
    values |= {axis: [whole(axis, x) for x in FLAGS[axis].value] for axis in AXES}
    points = variants(values)
    varied = [axis for axis, options in values.items() if len(options) > 1]
    if FLAGS.profile:
        programs = common.programs(common.build(points[0]))
        if unknown := set(FLAGS.programs) - {*programs}:
            raise ValueError(f"--programs: found {', '.join(sorted(unknown))}, need some of {', '.join(programs)}")
        for name in FLAGS.programs:
            profile.report(f"{name} of {label(points[0], varied)}", profile.trace(programs[name], f"{FLAGS.profile}/{name}"))
        return
    results = measured(points, FLAGS.rounds, FLAGS.cold)
    print_tables(points, results, varied)
    measure.write(FLAGS.out, {"machine": about, "variants": results})


def print_tables(points: list, results: list[dict], varied: list[str]) -> None:
    ms, mb, giga = (lambda s: None if s is None else 1e3 * s), (lambda n: n / 2**20), (lambda n: n / 1e9)
    times, memory, machine = [], [], []
    for v, r in zip(points, results):
        name, rate = label(v, varied), r["rates"]
        for program, row in r["programs"].items():
            floor = [ms(row.get("floor_s", {}).get(kind)) for kind in ("compute", "rows", "bytes")]
            over = row.get("over_floor"), row.get("over_rows")
            times.append((name, program, ms(row["seconds"]), row["tokens_per_s"], *floor, *over))
        compiled, cached = r["compile"].values(), sum(c["from_cache"] for c in r["compile"].values())
        compiling = f"{cached} from the cache" if cached else f"{sum(c['compile_s'] for c in compiled):.1f}"
        device = [mb(r["device"][kind]) for kind in ("base", "adapter", "optimizer", "cache")] + [mb(max(r["temporaries"].values()))]
        host = [mb(r[f"host_{when}"]) for when in ("compiling", "resting", "running")]
        memory.append((name, *device, *host, sum(c["programs"] for c in compiled), compiling))
        rows = [x for p in ("rollout", "update") for x in (rate["rows"][p]["rows"], *(2 * giga(rate["rows"][p][t]) for t in floors.TYPES))]
        machine.append((name, *(2 * giga(rate["best"][t]) for t in floors.TYPES), *rows, *map(giga, rate["bytes"].values())))
    columns = ("variant", "program", "ms", "tokens/s", "compute ms", "at its rows", "bytes ms", "x floor", "x rows")
    measure.show("medians, and least times", columns, times)
    columns = ("variant", "base", "adapter", "optimizer", "cache", "temporaries", "host: compiling", "resting", "running", "programs",
               "compile s")  # fmt: skip
    measure.show("MiB on the device and, as peaks, on the host", columns, memory)
    columns = ("variant", "float32", "int8", "rows of a step", "float32", "int8", "rows of a batch", "float32", "int8", "GB/s read", "r+w")
    measure.show("measured here: GFLOP/s and GOP/s of matrix products, GB/s", columns, machine)


if __name__ == "__main__":
    define_flags()
    app.run(main)

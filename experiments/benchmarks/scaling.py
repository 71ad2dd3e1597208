"""Is cost linear in work? Against routed pairs, tokens and layers over a range of 8, by rollout, scoring and update.

    python -m experiments.benchmarks.scaling [--axes=pairs,tokens,layers,experts,compile] [--numerics=a16] [--rounds=5] [--out=FILE]
    python -m experiments.benchmarks.scaling --axes=tokens --shape=length=32,d_model=256

Points take turns, and of each the fastest round counts: other jobs of a machine only add to a time. A line a + b x is fitted by least
squares of relative deviations; a is the part of a program that does not grow. The goal is that no point is more than 10 % off the line.

Beside them stand two costs that should not grow: that of more experts at constant experts a token, as a share of the step, and that of
compiling a deeper model (16 layers against 2, without the cache).
"""

import dataclasses

import numpy as np
from absl import app, flags

from experiments.benchmarks import common, measure
from rl_adapter import runtime

FLAGS = flags.FLAGS

PROGRAMS = ("rollout", "scoring", "update", "step")
GOAL = 0.1  # largest deviation from the line
AXES = {  # name -> (field of Variant, its values, what x is)
    "pairs": ("experts_per_token", (1, 2, 4, 8), lambda v: v.experts_per_token * v.layers * v.tokens),
    "tokens": ("batch", (4, 8, 16, 32), lambda v: v.tokens),
    "layers": ("layers", (2, 4, 8, 16), lambda v: v.layers),
    "experts": ("experts", (8, 16, 32, 64), lambda v: v.experts),
}
DEPTHS = (2, 16)
SHAPE = {"batch": 8, "group": 8, "length": 12, "layers": 2}  # a run of one program takes a tenth of a second or some


def shape(settings: list[str]) -> common.Variant:
    changes, known = dict(SHAPE), {f.name for f in dataclasses.fields(common.Variant) if f.type is int}
    for setting in settings:
        field, _, value = setting.partition("=")
        if field not in known or not value.isdecimal():
            raise ValueError(f"--shape: found {setting!r}, need field=number of {', '.join(sorted(known))}")
        changes[field] = int(value)
    return common.Variant(numerics=FLAGS.numerics, form=FLAGS.form, **changes)


@dataclasses.dataclass(frozen=True)
class Line:
    """seconds = fixed + each * x."""

    fixed: float
    each: float
    deviation: float  # the largest of a point from the line, as a share of the line

    @property
    def is_linear(self) -> bool:
        return self.deviation <= GOAL


def fit(x, seconds) -> Line:
    """Least squares of relative deviations, or the costliest point alone would decide."""
    x, seconds = np.asarray(x, float), np.asarray(seconds, float)
    columns = np.stack([np.ones_like(x), x], 1)
    fixed, each = np.linalg.lstsq(columns / seconds[:, None], np.ones_like(x), rcond=None)[0]
    line = fixed + each * x
    return Line(float(fixed), float(each), float(np.max(np.abs(seconds / line - 1))))


def measured(points: list[common.Variant], rounds: int, clock: str) -> list[dict[str, float]]:
    """Seconds of each program's fastest round, and of a step, at each point."""
    programs = {(i, name): program for i, v in enumerate(points) for name, program in common.programs(common.build(v)).items()}
    seconds = measure.in_turns({key: lambda p=p: measure.timed(p, measure.CLOCKS[clock]) for key, p in programs.items()}, rounds)
    found = [{name: min(seconds[i, name]) for name in PROGRAMS if name != "step"} for i in range(len(points))]
    return [times | {"step": times["rollout"] + times["update"]} for times in found]


def along(axis: str, start: common.Variant, rounds: int, clock: str) -> dict:
    """What an axis gives: points, times and lines."""
    field, values, x_of = AXES[axis]
    points = [dataclasses.replace(start, **{field: value}) for value in values]
    x, times = [x_of(v) for v in points], measured(points, rounds, clock)
    lines = {name: fit(x, [t[name] for t in times]) for name in PROGRAMS}
    result = {"field": field, "values": values, "x": x, "seconds": times, "programs": {}}
    for name, line in lines.items():
        first, last = times[0][name], times[-1][name]
        result["programs"][name] = {
            **dataclasses.asdict(line),
            "linear": line.is_linear,
            "fixed_share": line.fixed / first,
            "last_over_first": last / first,
            "x_last_over_first": x[-1] / x[0],
        }
    return result


def compile_times(start: common.Variant) -> dict[int, dict]:
    """Seconds until the first result of each program, compiled anew, at each depth."""
    found = {}
    for depth in DEPTHS:
        child = measure.Child(dataclasses.replace(start, layers=depth), cold=True)
        found[depth] = child.report["compile"]
        child.close()
    return found


def define_flags() -> None:
    flags.DEFINE_list("axes", ["pairs", "tokens", "layers", "experts", "compile"], "what is varied")
    flags.DEFINE_string("numerics", "a16", "float | a16 | a8")
    flags.DEFINE_string("form", "int4_g32", "of the linears")
    flags.DEFINE_list("shape", [], "field=value of common.Variant, comma-separated: what is not varied")
    flags.DEFINE_integer("rounds", 5, "measurements of each point, taken in turn")
    flags.DEFINE_enum("clock", "wall", list(measure.CLOCKS), "wall: time that passes; cpu: of all threads, for a machine with other jobs")
    flags.DEFINE_string("out", "", "file for the JSON result")


def main(_):
    runtime.setup(0)
    unknown = set(FLAGS.axes) - {*AXES, "compile"}
    if unknown:
        raise ValueError(f"--axes: found {', '.join(sorted(unknown))}, need some of {', '.join([*AXES, 'compile'])}")
    start, about = shape(FLAGS.shape), measure.machine()
    result = {"machine": about, "shape": dataclasses.asdict(start), "rounds": FLAGS.rounds, "clock": FLAGS.clock, "axes": {}}
    ms = lambda s: 1e3 * s
    for axis in AXES:
        if axis not in FLAGS.axes:
            continue
        found = result["axes"][axis] = along(axis, start, FLAGS.rounds, FLAGS.clock)
        rows = []
        for name, p in found["programs"].items():
            growth = p["last_over_first"] - 1 if axis == "experts" else p["last_over_first"]
            verdict = () if axis == "experts" else (ms(p["fixed"]), f"{p['fixed_share']:.0%}", f"{p['deviation']:.1%}", p["linear"])
            rows.append((name, *(ms(t[name]) for t in found["seconds"]), f"{growth:.1%}" if axis == "experts" else growth, *verdict))
        titles = [f"{found['field']}={value}" for value in found["values"]]
        last = ("added",) if axis == "experts" else ("last / first", "fixed ms", "of first", "off the line", "within 10 %")
        measure.show(f"ms ({FLAGS.clock}) against {axis}", ("program", *titles, *last), rows)
    if "compile" in FLAGS.axes:
        found = result["compile"] = compile_times(start)
        few, many = (found[d] for d in DEPTHS)
        seconds = lambda c: c["first_call_s"]
        rows = [(name, seconds(few[name]), seconds(many[name]), seconds(many[name]) / seconds(few[name])) for name in few]
        measure.show("seconds until the first result, compiled anew", ("program", *(f"layers={d}" for d in DEPTHS), "ratio"), rows)
    measure.write(FLAGS.out, result)


if __name__ == "__main__":
    define_flags()
    app.run(main)

"""Time of exact numerics against the float twin, and of an INT4 base against an INT8 one, in one run on the shipped base.

    python -m experiments.benchmarks.exact_vs_float [--rounds=5] [--prompts=16] [--out=FILE]

Variants take turns, so that a busy machine burdens all of them; a ratio is the median of those of the rounds. Completions run to full
length (no stop token is drawn), so that all variants do the same work. The INT8 base is the shipped one, quantized again.
"""

import dataclasses

from absl import app, flags

from experiments.benchmarks import common, measure
from rl_adapter import runtime

FLAGS = flags.FLAGS


NUMERICS = {"float": "float", "exact A16": "a16", "exact A8": "a8"}
PROGRAMS = ("rollout", "scoring", "update", "step")  # a step is rollout and update
TO_FLOAT = {("exact A16", "rollout"): 1.0, ("exact A16", "step"): 1.1, ("exact A8", "rollout"): 0.8, ("exact A8", "step"): 0.8}  # at most
TO_INT8 = 1.0  # at most, in exact numerics


def variants(prompts: int) -> dict[tuple[str, str], common.Variant]:
    of = lambda form, numerics: common.Variant(model="", form=form, numerics=numerics, batch=prompts)
    forms = {"INT4": "stored", "INT8": "int8"}
    return {(form, name): of(stored, numerics) for form, stored in forms.items() for name, numerics in NUMERICS.items()}


def measured(points: dict, rounds: int) -> dict[tuple, list[float]]:
    """(form, numerics, program) -> seconds of each round."""
    timers = {
        (*key, name): lambda program=program: measure.timed(program)
        for key, variant in points.items()
        for name, program in common.programs(common.build(variant)).items()
    }
    seconds = measure.in_turns(timers, rounds)
    for key in points:
        seconds[*key, "step"] = [a + b for a, b in zip(seconds[*key, "rollout"], seconds[*key, "update"])]
    return seconds


def ratios(seconds: dict[tuple, list[float]]) -> dict[str, dict]:
    """To the float twin on the same base, and of INT4 to INT8 in the same numerics: value, and the goal where there is one."""
    to_float, to_int8 = {}, {}
    for name in NUMERICS:
        for program in PROGRAMS:
            mine = seconds["INT4", name, program]
            if name != "float":
                goal = TO_FLOAT.get((name, program))
                to_float[f"{name} {program}"] = {"ratio": measure.ratio(mine, seconds["INT4", "float", program]), "goal": goal}
            goal = TO_INT8 if name != "float" else None
            to_int8[f"{name} {program}"] = {"ratio": measure.ratio(mine, seconds["INT8", name, program]), "goal": goal}
    return {"to_float": to_float, "int4_to_int8": to_int8}


def define_flags() -> None:
    flags.DEFINE_integer("rounds", 5, "measurements of each variant, taken in turn")
    flags.DEFINE_string("out", "", "file for the JSON result")
    flags.DEFINE_integer("prompts", 16, "prompts of a batch, 8 completions each")


def main(_):
    runtime.setup(0)
    about, points = measure.machine(), variants(FLAGS.prompts)
    seconds = measured(points, FLAGS.rounds)
    middle, found = measure.medians(seconds), ratios(seconds)
    columns = ("program", *(f"{form} {name}" for form, name in points))
    measure.show("seconds, medians", columns, [(p, *(middle[*key, p] for key in points)) for p in PROGRAMS])
    for title, kind in (("time over the float twin's, INT4", "to_float"), ("time with an INT4 base over that with INT8", "int4_to_int8")):
        met = lambda r: None if r["goal"] is None else r["ratio"] <= r["goal"]
        rows = [(name, r["ratio"], r["goal"], met(r)) for name, r in found[kind].items()]
        measure.show(title, ("numerics and program", "ratio", "goal, at most", "met"), rows)
    result = {"machine": about, "rounds": FLAGS.rounds, "prompts": FLAGS.prompts, **found}
    named = lambda values: {" ".join(key): value for key, value in values.items()}
    shapes = {" ".join(key): dataclasses.asdict(v) for key, v in points.items()}
    measure.write(FLAGS.out, result | {"variants": shapes, "seconds": named(middle), "all_seconds": named(seconds)})


if __name__ == "__main__":
    define_flags()
    app.run(main)

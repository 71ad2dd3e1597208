"""What continuous batching and shared prompts are worth.

    python -m experiments.benchmarks.continuous [--slots=32] [--numerics=a16] [--rounds=5] [--out=FILE]

(a) Completions of mixed length (1/8 to 8/8 of the longest, uniform) through fewer slots than completions: a slot takes the next one as
soon as it is free, against batches of as many completions as slots, each of which ends with its longest. Same engine, same completions.
Goal: 1.5 times faster. `steps` is the gain in decoding steps, and what is missing to it is the host's work and what a step costs besides
its slots. `possible` is the gain if no slot were ever idle, at the end neither: the mean of the batches' longest over the mean length.

(b) A group of completions of one long prompt, which is prefilled once, against as many single prompts that are prefilled each for itself.
Goal: 3 times faster.
"""

import collections
import dataclasses

import numpy as np
from absl import app, flags

from experiments.benchmarks import common, measure
from rl_adapter import engine, evaluate, rollout, runtime

FLAGS = flags.FLAGS

GOALS = {"mixed lengths": 1.5, "shared prompt": 3.0}  # at least


def run(work: common.Work, prompts: slice, limits: np.ndarray | None, counts: collections.Counter) -> int:
    """Completes some prompts with the work's engine; tokens that came out."""
    some = work.prompts[prompts]
    ids = np.arange(len(work.prompts), dtype=np.int32)[prompts]
    adapter = evaluate.prepare(work.model, work.adapter)
    limits = None if limits is None else limits[prompts]
    out = rollout.stream(work.model, work.sampling, work.base, adapter, list(some), ids, 0, work.engine, limits, counts=counts)
    return sum(len(completion.tokens) for completion in out)


def mixed_lengths(prompts: int, group: int, longest: int) -> np.ndarray:
    """[P, G] most tokens of each completion, uniform over eighths of the longest."""
    eighths = np.random.default_rng(0).integers(1, 9, size=(prompts, group))
    return np.maximum(1, eighths * longest // 8).astype(np.int32)


def continuous(start: common.Variant, batches: int, page: int) -> tuple[dict, dict]:
    """Programs `continuous` and `static`, which make the same completions, and what is known of them beforehand."""
    work = dataclasses.replace(common.build(start), engine=engine.Engine(slots=start.slots, lanes=1, page=page))
    each = start.slots // start.group  # prompts of a static batch
    limits = mixed_lengths(start.batch, start.group, start.length)
    counts = {name: collections.Counter() for name in ("continuous", "static")}
    parts = [slice(i * each, (i + 1) * each) for i in range(batches)]
    all_at_once = lambda: run(work, slice(None), limits, counts["continuous"])
    one_by_one = lambda: sum(run(work, part, limits, counts["static"]) for part in parts)
    possible = np.mean([limits[part].max() for part in parts]) / limits.mean()
    about = {"tokens": int(limits.sum()), "possible": float(possible), "counts": counts}
    return {"continuous": common.Program(all_at_once), "static": common.Program(one_by_one)}, about


def shared(start: common.Variant, page: int) -> dict:
    """Programs `shared`, a group of one prompt, and `separate`, as many prompts with one completion each."""
    names = {"shared": start, "separate": dataclasses.replace(start, batch=start.group, group=1)}
    works = {name: dataclasses.replace(common.build(v), engine=engine.Engine(page=page)) for name, v in names.items()}
    return {name: common.Program(lambda w=w: run(w, slice(None), None, collections.Counter())) for name, w in works.items()}


def compare(title: str, programs: dict, rounds: int) -> dict:
    """Seconds of two programs in turns; the second over the first is the gain."""
    seconds = measure.in_turns({name: lambda p=p: measure.timed(p) for name, p in programs.items()}, rounds)
    first, second = seconds.values()
    gain = measure.ratio(second, first)
    return {"seconds": seconds, "medians": measure.medians(seconds), "gain": gain, "goal": GOALS[title], "met": gain >= GOALS[title]}


def define_flags() -> None:
    flags.DEFINE_string("numerics", "a16", "float | a16 | a8")
    flags.DEFINE_string("form", "int4_g32", "of the linears")
    flags.DEFINE_integer("slots", 32, "(a) completions decoded at once")
    flags.DEFINE_integer("batches", 8, "(a) static batches, each of --slots completions")
    flags.DEFINE_integer("length", 64, "(a) tokens of the longest completion")
    flags.DEFINE_integer("page", 16, "tokens of a page of the cache, and most of a dispatch")
    flags.DEFINE_integer("prompt", 512, "(b) tokens of the long prompt")
    flags.DEFINE_integer("group", 8, "(b) its completions")
    flags.DEFINE_integer("answer", 8, "(b) tokens of each")
    flags.DEFINE_integer("rounds", 5, "measurements of each, taken in turn")
    flags.DEFINE_string("out", "", "file for the JSON result")


def main(_):
    runtime.setup(0)
    about, group = measure.machine(), 8
    if FLAGS.slots % group:
        raise ValueError(f"--slots: found {FLAGS.slots}, need a multiple of {group}, the completions of a prompt")
    variant = lambda **shape: common.Variant(numerics=FLAGS.numerics, form=FLAGS.form, **shape)
    prompts = FLAGS.batches * FLAGS.slots // group
    mixed = variant(batch=prompts, group=group, prompt=16, length=FLAGS.length, slots=FLAGS.slots)
    long = variant(batch=1, group=FLAGS.group, prompt=FLAGS.prompt, length=FLAGS.answer)
    two, known = continuous(mixed, FLAGS.batches, FLAGS.page)
    results = {"mixed lengths": compare("mixed lengths", two, FLAGS.rounds) | known}
    steps = {name: c["slot_steps"] for name, c in known["counts"].items()}
    results["mixed lengths"]["steps"] = steps["static"] / steps["continuous"]
    results["shared prompt"] = compare("shared prompt", shared(long, FLAGS.page), FLAGS.rounds)
    rows = [
        (title, *r["medians"].values(), r["gain"], r.get("steps"), r.get("possible"), r["goal"], r["met"]) for title, r in results.items()
    ]
    columns = ("", "s, continuous or shared", "s, static or separate", "gain", "steps", "possible", "goal, at least", "met")
    measure.show("medians, and gain", columns, rows)
    used = {name: c["decoded"] / max(1, c["slot_steps"]) for name, c in known["counts"].items()}
    measure.show("mixed lengths: share of slots at work", ("", "share"), list(used.items()))
    shapes = {"mixed lengths": dataclasses.asdict(mixed), "shared prompt": dataclasses.asdict(long)}
    measure.write(FLAGS.out, {"machine": about, "rounds": FLAGS.rounds, "shapes": shapes, "results": results, "slots_used": used})


if __name__ == "__main__":
    define_flags()
    app.run(main)

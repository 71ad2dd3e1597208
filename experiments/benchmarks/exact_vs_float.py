"""Time of exact numerics against the float twin, in one run: rollout, scoring and a whole update, on the shipped base.

    python -m experiments.benchmarks.exact_vs_float [--rounds=5] [--out=FILE]

Each measurement is the median over rounds in which the variants take turns, so that a busy machine burdens all of them; ratios are to
the float twin of the same program. Completions run to full length (no stop token is reached), so that all variants do the same work.
"""

import dataclasses
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from rich.console import Console
from rich.table import Table

from rl_adapter import config as configs
from rl_adapter import evaluate, loss, monitor, prompts, rollout, runtime, update
from rl_adapter import session as sessions

_ROUNDS = flags.DEFINE_integer("rounds", 5, "measurements of each variant, taken in turn")
_OUT = flags.DEFINE_string("out", "", "file for the JSON result")
_PROMPTS = flags.DEFINE_integer("prompts", 16, "prompts of a batch, 8 completions each")

VARIANTS = {"float": ("float", 16), "exact A16": ("exact", 16), "exact A8": ("exact", 8)}


def programs(numerics: str, act_bits: int) -> dict:
    """Name -> function that runs one rollout, scoring pass or update to its end."""
    c = configs.load_module("experiments/quickstart.py").get_config().unlock()
    c.numerics, c.act_bits, c.rollout.prompts, c.mesh.data = numerics, act_bits, _PROMPTS.value, 1
    session = sessions.open_session(c, "train")
    data = session.data["train"]
    model, base = session.model, session.base
    adapter = jax.tree.map(lambda x: x + 0.01 * jax.random.normal(jax.random.key(x.size), x.shape), sessions.init_adapter(c, session))
    prepared = evaluate.prepare(model, adapter)
    tokens, lengths = prompts.batch(data.encoded, np.arange(_PROMPTS.value), data.length, session.tokenizer.pad_id)
    ids = np.arange(_PROMPTS.value, dtype=np.int32)
    endless = dataclasses.replace(sessions.sampling(c, session), stop_ids=(model.spec.vocab,))
    tx, _ = evaluate.optimizer(c)
    samples = rollout.generate(model, endless, base, prepared, tokens, lengths, ids, jnp.int32(0))
    score = jax.jit(lambda base, adapter, r: update.score(model, base, adapter, r)[0])
    cfg, advantage = loss.GRPO(c.loss.clip_low, c.loss.clip_high, c.loss.kl), jnp.ones(samples.lengths.shape)

    def one_update():
        state = evaluate.new_state(c, jax.tree.map(jnp.copy, adapter))
        return update.update(model, tx, cfg, c.rollout.temperature, 1, base, state, samples, advantage)

    return {
        "rollout": lambda: rollout.generate(model, endless, base, prepared, tokens, lengths, ids, jnp.int32(0)),
        "scoring": lambda: score(base, prepared, samples),
        "update": one_update,
    }


def main(_):
    runtime.setup(0)
    runs = {name: programs(*settings) for name, settings in VARIANTS.items()}
    seconds = {(name, what): [] for name in runs for what in runs[name]}
    for r in range(_ROUNDS.value + 1):
        for name, what in seconds:
            start = time.perf_counter()
            jax.block_until_ready(runs[name][what]())
            if r:  # the first round compiles
                seconds[name, what].append(time.perf_counter() - start)
    median = {key: statistics.median(values) for key, values in seconds.items()}
    table = Table("program", *VARIANTS, *(f"{n} / float" for n in VARIANTS if n != "float"), title="seconds, median")
    result = {"rounds": _ROUNDS.value, "prompts": _PROMPTS.value, "packages": monitor.versions(), "seconds": {}, "ratio": {}}
    whole = {name: median[name, "rollout"] + median[name, "update"] for name in VARIANTS}
    median |= {(name, "step (rollout + update)"): s for name, s in whole.items()}
    for what in ("rollout", "scoring", "update", "step (rollout + update)"):
        times = {name: median[name, what] for name in VARIANTS}
        ratios = {name: times[name] / times["float"] for name in VARIANTS if name != "float"}
        result["seconds"][what], result["ratio"][what] = times, ratios
        table.add_row(what, *(f"{t:.3f}" for t in times.values()), *(f"{x:.2f}" for x in ratios.values()))
    Console().print(table)
    if _OUT.value:
        with open(_OUT.value, "w") as f:
            json.dump(result, f, indent=1)


if __name__ == "__main__":
    app.run(main)

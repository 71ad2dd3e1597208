"""Held-out problems: greedy accuracy, and what many completions of each show, by the very sampler and numerics that training uses."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rl_adapter import checkpoint, engine, lora, monitor, play, programs, statistics, update
from rl_adapter import config as configs
from rl_adapter import mesh as meshes
from rl_adapter import session as sessions
from rl_adapter.data import sources
from rl_adapter.files import write_atomically
from rl_adapter.play import Played
from rl_adapter.rewards import exact
from rl_adapter.sampling import Sampling
from rl_adapter.types import Numerics, Problem


def greedy(
    config: ConfigDict, session: sessions.Session, data: sessions.Data, adapter: lora.Adapter | None
) -> tuple[np.ndarray, list[str]]:
    """What the first `eval.examples` problems earn [n] (`earned`), and their completions; `adapter` is raw (not prepared) or None for the
    base."""
    found = _complete(config, session, data, adapter, sessions.sampling(config, session, greedy=True), 0)
    return earned(config, found)[:, 0], found.texts


def sampled(
    config: ConfigDict, session: sessions.Session, data: sessions.Data, adapter: lora.Adapter | None
) -> tuple[np.ndarray, list[list[str]]]:
    """Of the first `eval.examples` problems' completions, the same for the same `seed`: what they earn [n, eval.samples] (`earned`), and
    what was scored of each."""
    e = config.eval
    settings = dataclasses.replace(sessions.sampling(config, session), group=e.samples, temperature=e.temperature, top_k=0, top_p=e.top_p)
    found = _complete(config, session, data, adapter, settings, config.seed % 2**31)
    said = [episode.scored_text for episode in found.episodes] or found.texts
    return earned(config, found), [said[i : i + e.samples] for i in range(0, len(said), e.samples)]


def earned(config: ConfigDict, found: Played) -> np.ndarray:
    """[P, G] f32: by the scorer that is held out where there is one, since what is trained on is gamed first; else rewards."""
    name = config.reward.held_out
    return np.array([o.parts[name] for o in found.outcomes], np.float32).reshape(found.rewards.shape) if name else found.rewards


def answer_of(config: ConfigDict) -> Callable[[str, Problem], str | None]:
    """The answer that a completion gives, as the reward reads it: what completions vote for in maj@k. None: it gives none."""
    return lambda text, problem: exact.extract(text, config.reward.mark, max(1, len(problem.answer.split())))


def _complete(config, session, data, adapter, settings: Sampling, seed: int) -> Played:
    """The first `eval.examples` problems, `settings.group` completions of each."""
    n = min(config.eval.examples, len(data.problems))
    shards = meshes.row_shards(session.model.mesh)
    size = -(-min(max(1, config.eval.batch // settings.group), n) // shards) * shards
    prepared = None if adapter is None else prepare(session.model, adapter)
    sizes, found = engine.from_config(config.rollout), []
    sizes = dataclasses.replace(sizes, slots=min(sizes.slots or config.eval.batch, config.eval.batch))  # of one problem there may be more
    for start in range(0, n, size):
        rows = np.arange(start, start + size) % n  # the last batch is filled up from the front, to one shape
        found.append(play.play(config, session, data, rows, prepared, settings, seed, sizes))
    return play.joined(found).rows(np.arange(n))


def prepare(model, adapter: lora.Adapter) -> lora.Adapter:
    """`lora.prepare`, compiled once."""
    return _prepare(model.numeric, adapter)


@programs.jit(static_argnames=("numeric",))
def _prepare(numeric: Numerics, adapter: lora.Adapter) -> lora.Adapter:
    return lora.prepare(adapter, numeric)


def by_kind(problems: list, rewards: np.ndarray) -> dict[str, float]:
    kinds = np.array([p.kind for p in problems[: len(rewards)]])
    return {kind: float(rewards[kinds == kind].mean()) for kind in sorted(set(kinds))}


def identity(config: ConfigDict, digest: str) -> dict:
    """What a checkpoint belongs to."""
    data = sources.identity(config.data)
    return {"base_digest": digest, "data": data, "config": configs.identity(config), "packages": monitor.versions()}


def run(config: ConfigDict, workdir: str | os.PathLike, override_identity: bool = False) -> dict:
    """`--mode=eval`: the base against the run's last adapter (or that of `adapter.init`), by kind, as a table and `eval.json`.

    Greedy, and where eval.samples = n is above 1: mean@n, pass@k and maj@k of n completions of each problem. A change is the adapter's
    less the base's, over the same problems.
    """
    directory = pathlib.Path(workdir)
    check_run(config, directory)
    session = sessions.open_session(config, "eval")
    data = session.data["eval"]
    step, adapter = last_adapter(config, directory, session, override_identity)
    base, trained = (measures(config, session, data, weights) for weights in (None, adapter))
    rows = list(compare(data.problems, base, trained))
    how = {"samples": config.eval.samples, "temperature": config.eval.temperature, "top_p": config.eval.top_p, "seed": config.seed}
    result = {"step": step, "examples": len(base["greedy"]), **how, "measures": rows}
    Console().print(_table(result))
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / "eval.json", json.dumps(monitor.encode(result), indent=1))
    return result


def measures(config: ConfigDict, session: sessions.Session, data: sessions.Data, adapter: lora.Adapter | None) -> dict[str, np.ndarray]:
    """{name: a value for each problem}."""
    found = {"greedy": np.asarray(greedy(config, session, data, adapter)[0], np.float64)}
    n = config.eval.samples
    if n == 1:
        return found
    rewards, texts = sampled(config, session, data, adapter)
    answer = answer_of(config)
    answers = [[answer(text, problem) for text in row] for row, problem in zip(texts, data.problems)]
    solved = rewards >= np.float32(config.eval.solved)  # as rewards are kept: 0.7 is less than 0.7 in float64
    found[f"mean@{n}"] = rewards.mean(1, dtype=np.float64)
    ks = config.eval.k or sorted({*(2**i for i in range(n.bit_length()) if 2**i <= n), n})
    for name, of_k in {"pass": statistics.pass_at(solved), "maj": statistics.majority_at(answers, solved)}.items():
        found |= {f"{name}@{k}": of_k[:, k - 1] for k in ks}
    return found


def compare(problems: list[Problem], base: dict[str, np.ndarray], adapter: dict[str, np.ndarray]) -> Iterator[dict]:
    """A row for each measure of all problems (kind ''), then of each kind."""
    kinds = np.array([problem.kind for problem in problems[: len(base["greedy"])]])
    for kind in ("", *sorted(set(kinds.tolist()))):
        of_kind = kinds == kind if kind else slice(None)
        for name in base:
            a, b = base[name][of_kind], adapter[name][of_kind]
            yield {
                **{"kind": kind, "problems": len(a), "measure": name},
                **{"base": float(a.mean()), "base_interval": [*statistics.interval(a)]},
                **{"adapter": float(b.mean()), "adapter_interval": [*statistics.interval(b)]},
                **{"change": float((b - a).mean()), "change_interval": [*statistics.paired_interval(b, a)]},
            }


def _table(result: dict) -> Table:
    drawn = f", {result['samples']} completions at temperature {result['temperature']:g}" if result["samples"] > 1 else ""
    table = Table("problems", "", "base", "adapter", "change", title=f"greedy{drawn}, step {result['step']}", caption="intervals of 95 %")
    last = None
    for row in result["measures"]:
        if last not in (None, row["kind"]):
            table.add_section()
        cells = [_cell(row, "base"), _cell(row, "adapter"), _cell(row, "change", "+")]
        table.add_row("" if row["kind"] == last else f"{escape(row['kind']) or 'all'}: {row['problems']}", row["measure"], *cells)
        last = row["kind"]
    return table


def _cell(row: dict, key: str, sign: str = "") -> str:
    low, high = row[f"{key}_interval"]
    return f"{row[key]:{sign}.1%} ({low:{sign}.1%} to {high:{sign}.1%})"


def check_run(config: ConfigDict, directory: pathlib.Path) -> None:
    """Raises where there is no adapter: neither a run's nor one to start from."""
    if config.objective == "reward":
        raise ValueError("objective: found 'reward', whose run has no policy, need another; its result is for reward.model.path")
    if not (directory / "checkpoints").is_dir() and not config.adapter.init:
        raise ValueError(f"--workdir: found no checkpoints in {directory}; train there first (--mode=train), or give an --adapter")


def last_adapter(
    config: ConfigDict, directory: pathlib.Path, session: sessions.Session, override_identity: bool = False
) -> tuple[int, lora.Adapter]:
    """The step of the run's last checkpoint, and its adapter; without a run, 0 and the adapter that one would start from."""
    adapter = sessions.init_adapter(config, session)
    if not (directory / "checkpoints").is_dir():
        return 0, adapter
    with checkpoint.Checkpoints(
        directory / "checkpoints", identity(config, session.digest), 0, config.checkpoint.keep, override_identity, read_only=True
    ) as saved:
        step = saved.latest()
        if step is None:
            raise ValueError(f"--workdir: found no checkpoint in {directory}; train there first (--mode=train)")
        return step, saved.restore(step, new_state(config, session))[0].adapter


def new_state(config: ConfigDict, session: sessions.Session) -> update.State:
    """A state that has made no update."""
    state = update.start(optimizer(config), sessions.init_adapter(config, session))
    previous = tuple(jax.tree.map(jnp.copy, state.adapter) for _ in range(config.rollout.max_staleness))
    critic = None
    if config.advantage.estimator == "gae":
        critic = update.start(critic_optimizer(config), sessions.new_scalar(session, config.seed ^ 0x5CA1A2))
    return state.replace(previous=previous, critic=critic)


def optimizer(config: ConfigDict) -> update.Optimizer:
    """The config's optimizer, of the policy or of whatever else is trained."""
    waits = config.critic.warmup_steps if config.advantage.estimator == "gae" else 0  # steps that train the critic alone
    return _optimizer(config, config.optimizer.learning_rate, (config.steps - waits) * config.optimizer.epochs)


def critic_optimizer(config: ConfigDict) -> update.Optimizer:
    """The same for the critic, at its own rate."""
    return _optimizer(config, config.critic.learning_rate, config.steps * config.critic.epochs)


def _optimizer(config: ConfigDict, learning_rate: float, epochs: int) -> update.Optimizer:
    o = config.optimizer
    # Only a decay depends on the number of updates: else runs of different lengths share a program.
    updates = 0 if o.schedule == "constant" else epochs * o.minibatches
    return update.Optimizer(
        learning_rate, o.b1, o.b2, o.eps, o.weight_decay, o.max_grad_norm, o.warmup_steps, o.schedule, updates
    )  # fmt: skip

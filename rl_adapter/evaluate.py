"""Held-out greedy accuracy, by the very sampler and numerics that training uses."""

import functools
import hashlib
import json
import os
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rl_adapter import checkpoint, engine, lora, monitor, prompts, rollout, update
from rl_adapter import config as configs
from rl_adapter import mesh as meshes
from rl_adapter import session as sessions
from rl_adapter.files import write_atomically


def greedy(
    config: ConfigDict, session: sessions.Session, data: sessions.Data, adapter: lora.Adapter | None
) -> tuple[np.ndarray, list[str]]:
    """Rewards [n] and completions of the first `eval.examples` problems; `adapter` is raw (not prepared) or None for the base."""
    n = min(config.eval.examples, len(data.problems))
    shards = meshes.row_shards(session.model.mesh)
    size = -(-min(config.eval.batch, n) // shards) * shards
    prepared = None if adapter is None else prepare(session.model, adapter)
    texts = []
    for start in range(0, n, size):
        rows = np.arange(start, start + size) % n  # the last batch is filled up from the front, to one shape
        tokens, lengths = prompts.batch(data.encoded, rows, data.length, session.tokenizer.pad_id)
        ids = np.array([data.problems[i].id for i in rows], np.int32)
        out = rollout.generate(
            session.model,
            sessions.sampling(config, session, greedy=True),
            session.base,
            prepared,
            tokens,
            lengths,
            ids,
            0,
            engine.from_config(config.rollout),
        )
        texts += [session.tokenizer.decode(row) for row in rollout.completions(out)][: n - start]
    outcomes = session.rewards.score_all(data.problems[:n], texts)
    return np.array([outcome.reward for outcome in outcomes], np.float32), texts


def prepare(model, adapter: lora.Adapter) -> lora.Adapter:
    """`lora.prepare`, compiled once."""
    return _prepare(model.numeric, adapter)


_prepare = jax.jit(lambda numeric, adapter: lora.prepare(adapter, numeric), static_argnums=0)


def interval(rewards: np.ndarray) -> tuple[float, float]:
    """Wilson 95 % interval of a share (Wilson 1927), which stays in [0, 1] and holds near its ends."""
    n, p, z = len(rewards), float(np.mean(rewards)), 1.96
    middle, half = (p + z * z / (2 * n)), z * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return float((middle - half) / (1 + z * z / n)), float((middle + half) / (1 + z * z / n))


def by_kind(problems: list, rewards: np.ndarray) -> dict[str, float]:
    kinds = np.array([p.kind for p in problems[: len(rewards)]])
    return {kind: float(rewards[kinds == kind].mean()) for kind in sorted(set(kinds))}


def identity(config: ConfigDict, digest: str) -> dict:
    """What a checkpoint belongs to."""
    path = config.data.train_path
    file = hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest() if path else ""
    return {"base_digest": digest, "train_file": file, "config": configs.identity(config), "packages": monitor.versions()}


def run(config: ConfigDict, workdir: str | os.PathLike, override_identity: bool = False) -> dict:
    """`--mode=eval`: the base against the run's last adapter (or that of `adapter.init`), by kind, as a table and `eval.json`."""
    directory = pathlib.Path(workdir)
    check_run(config, directory)
    session = sessions.open_session(config, "eval")
    data = session.data["eval"]
    step, adapter = last_adapter(config, directory, session, override_identity)
    names = list(by_kind(data.problems, np.zeros(min(config.eval.examples, len(data.problems)))))
    table = Table("model", "accuracy", "95 % interval", *map(escape, names), title=f"greedy, step {step}")
    result = {"step": step}
    for name, weights in (("base", None), ("adapter", adapter)):
        rewards, _ = greedy(config, session, data, weights)
        kinds = by_kind(data.problems, rewards)
        low, high = interval(rewards)
        result[name] = {"accuracy": float(rewards.mean()), "interval": [low, high], "examples": len(rewards), "kinds": kinds}
        table.add_row(
            name,
            f"{rewards.mean():.1%}",
            f"{low:.1%} - {high:.1%}",
            *(f"{kinds[k]:.1%}" for k in names),
        )
    Console().print(table)
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / "eval.json", json.dumps(result, indent=1))
    return result


def check_run(config: ConfigDict, directory: pathlib.Path) -> None:
    """Raises where there is no adapter: neither a run's nor one to start from."""
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
        return step, saved.restore(step, new_state(config, adapter))[0].adapter


def new_state(config: ConfigDict, adapter: lora.Adapter) -> update.State:
    """A state that has made no update."""
    tx, _ = optimizer(config)
    previous = jax.tree.map(jnp.copy, adapter) if config.rollout.ahead else None
    return update.State(adapter, tx.init(adapter), jnp.zeros((), jnp.int32), previous)


def optimizer(config: ConfigDict):
    """The config's optimizer and its schedule; the same objects for the same settings, so that a later run finds the update compiled."""
    settings = config.optimizer
    updates = 0 if settings.schedule == "constant" else config.steps * settings.minibatches  # only a decay depends on it
    return _optimizer(tuple(sorted(settings.items())), updates)


@functools.lru_cache
def _optimizer(settings: tuple, updates: int):
    return update.optimizer(types.SimpleNamespace(**dict(settings)), updates)

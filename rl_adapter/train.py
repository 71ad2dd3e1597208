"""The loop: prompts -> rollout -> reward -> advantage -> loss and update -> checkpoint, a stage a line."""

import json
import os
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from rl_adapter import advantage, checkpoint, evaluate, lora, loss, monitor, prompts, reward, rollout, runtime, update
from rl_adapter import mesh as meshes
from rl_adapter import session as sessions
from rl_adapter.files import write_atomically
from rl_adapter.types import Rollout


def run(config: ConfigDict, workdir: str | os.PathLike, override_identity: bool = False) -> dict:
    """Train in `workdir`, from its last checkpoint if it has one. Returns what summary.json holds.

    Raises:
        ValueError: bad input, before anything compiles.
        FloatingPointError: a loss or gradient is not finite; names the step. The last good checkpoint is kept.
    """
    started = time.monotonic()
    workdir = pathlib.Path(workdir)
    if monitor.finished(workdir, config) and not override_identity:
        print(f"{workdir} holds a finished run of this config; its summary:\n{json.dumps(monitor.summary(workdir), indent=1)}")
        return monitor.summary(workdir)
    session = sessions.open_session(config, "train", "eval")
    train_data, eval_data = session.data["train"], session.data["eval"]
    if len(train_data.problems) < config.rollout.prompts:
        raise ValueError(f"rollout.prompts: found {config.rollout.prompts}, need at most the {len(train_data.problems)} training problems")
    batches = prompts.make_iterator(len(train_data.problems), config.rollout.prompts, config.data.seed)
    tx, schedule = evaluate.optimizer(config)
    identity = evaluate.identity(config, session.digest)
    with checkpoint.Checkpoints(
        workdir / "checkpoints", identity, config.checkpoint.every, config.checkpoint.keep, override_identity
    ) as saved:
        start, cursor = saved.latest() or 0, {}
        if start > config.steps:
            raise ValueError(f"steps: found {config.steps}, need at least the {start} that the last checkpoint in {workdir} has done")
        state = place(session, evaluate.new_state(config, sessions.init_adapter(config, session)))
        if start:
            state, cursor = saved.restore(start, state)
            batches.set_state(cursor["data"])
        about = {"trained_parameters": lora.count(state.adapter), "base": session.report, "mesh": dict(session.model.mesh.shape)}
        with monitor.Monitor(workdir, config, base_digest=session.digest, start=start, extra=about) as log:
            log.note(f"base {session.digest[:12]}  {session.report['bytes']} bytes  mesh {dict(session.model.mesh.shape)}")
            log.note(f"trained parameters: {lora.count(state.adapter):,}" + (f"  resuming after step {start}" if start else ""))
            examples = min(config.eval.examples, len(eval_data.problems))
            base_accuracy = cursor.get("base_accuracy")
            if base_accuracy is None or cursor["examples"] != examples:
                base_accuracy = evaluation(config, session, eval_data, None, workdir / "eval_base.json")
            log.note(f"base accuracy {base_accuracy:.1%} on {examples} held-out problems")
            for step in range(start, config.steps):
                state, metrics = train_step(config, session, train_data, next(batches), state, tx, step, workdir)
                metrics["learning_rate"] = float(schedule(int(state.step) - 1))
                if config.eval.every and (step + 1) % config.eval.every == 0:
                    metrics["eval/accuracy"] = evaluation(config, session, eval_data, state.adapter, None)
                log.log(step, metrics)
                at = {"data": batches.get_state(), "base_accuracy": base_accuracy, "examples": examples}
                saved.save(step + 1, state, at, force=step + 1 == config.steps)
            accuracy = evaluation(config, session, eval_data, state.adapter, workdir / "eval_adapter.json")
            saved.wait()
            summary = {
                "eval/base_accuracy": base_accuracy,
                "eval/accuracy": accuracy,
                "eval/examples": examples,
                "wall_s": time.monotonic() - started,
                "steps": config.steps,
                "trained_parameters": lora.count(state.adapter),
                "base_digest": session.digest,
                "compilations": runtime.compilations(),
            }
            log.finish(summary)
    return summary


def train_step(config, session, data, indices, state, tx, step: int, workdir) -> tuple[update.State, dict]:
    """One batch of prompts, from rollout to update."""
    times = [time.monotonic()]
    model, base = session.model, session.base
    samples = sample(config, session, data, indices, state.adapter, step)
    jax.block_until_ready(samples)
    times.append(time.monotonic())
    problems = [data.problems[i] for i in indices for _ in range(config.rollout.group)]
    texts = [session.tokenizer.decode(row) for row in rollout.completions(samples)]
    rewards, failures = reward.score(texts, problems, sessions.reward_of(config))
    rewards = rewards.reshape(len(indices), -1)
    advantages = advantage.group_normalized(rewards, config.loss.advantage_eps)
    keep_samples(workdir / "samples", step, texts, problems, rewards, failures)
    times.append(time.monotonic())
    cfg = loss.GRPO(config.loss.clip_low, config.loss.clip_high, config.loss.kl, config.loss.measure_kl)
    parts, each = config.optimizer.minibatches, len(indices) // config.optimizer.minibatches
    rows = meshes.rows(model.mesh)
    updates = []
    for i in range(parts):
        batch = samples if parts == 1 else update.take(samples, i * each, each)
        a = jax.device_put(advantages[i * each : (i + 1) * each], rows)
        state, m = update.update(model, tx, cfg, config.rollout.temperature, config.optimizer.accumulate, base, state, batch, a)
        updates.append(jax.device_get(m))
    times.append(time.monotonic())
    metrics = combine(updates) | describe(samples, rewards, advantages, problems)
    check_finite(step, metrics, state)
    seconds = np.diff(times)
    tokens = metrics["response/tokens"]
    metrics |= {"time/rollout_s": seconds[0], "time/reward_s": seconds[1], "time/update_s": seconds[2], "time/step_s": times[-1] - times[0]}
    metrics |= {"throughput/rollout_tokens_per_s": tokens / seconds[0], "throughput/update_tokens_per_s": tokens / seconds[2]}
    return state, metrics


def sample(config, session, data, indices, adapter, step: int) -> Rollout:
    """The step's completions."""
    tokens, lengths = prompts.batch(data.encoded, indices, data.length, session.tokenizer.pad_id)
    ids = np.array([data.problems[i].id for i in indices], np.int32)
    placed = jax.device_put((tokens, lengths, ids), meshes.rows(session.model.mesh))
    # A prompt that comes again in a later epoch gets other noise: the step is part of the seed.
    seed = jnp.int32((config.seed * 1_000_003 + step) % 2**31)
    settings = sessions.sampling(config, session)
    return rollout.generate(session.model, settings, session.base, evaluate.prepare(session.model, adapter), *placed, seed)


def place(session, state: update.State) -> update.State:
    return jax.device_put(state, meshes.adapter_shardings(session.model.mesh, state))


def combine(updates: list[dict]) -> dict:
    """Means over a step's updates. Sampling and training agree only before the first of them, so its mismatch is the step's."""
    mean = {k: np.mean([u[k] for u in updates], 0).tolist() for k in updates[0]}
    return (
        mean
        | {k: float(v) for k, v in updates[0].items() if k.startswith("mismatch/")}
        | {"ratio/max": float(max(u["ratio/max"] for u in updates))}
    )


def describe(samples: Rollout, rewards, advantages, problems) -> dict:
    lengths, stopped = jax.device_get((samples.lengths, samples.stopped))
    flat = rewards.reshape(-1)
    return {
        "reward/mean": float(flat.mean()),
        "reward/std": float(flat.std()),
        "reward/mixed_groups": float((np.ptp(rewards, 1) > 0).mean()),
        "advantage/abs_mean": float(np.abs(advantages).mean()),
        "response/length": float(lengths.mean()),
        "response/truncated": float(1 - stopped.mean()),
        "response/tokens": int(lengths.sum()),
    } | {f"reward/kind/{kind}": value for kind, value in evaluate.by_kind(problems, flat).items()}


def check_finite(step: int, metrics: dict, state: update.State) -> None:
    """The new state too: its metrics are from before the update, and a checkpoint must not keep what the next step would stop at."""
    bad = [k for k, v in metrics.items() if not np.isfinite(v).all()] + ([] if _finite(state) else ["the updated adapter or optimizer"])
    if bad:
        raise FloatingPointError(
            f"step {step}: {', '.join(bad)} not finite; the run stops, and its last checkpoint is from before this step"
        )


@jax.jit
def _finite(tree) -> jax.Array:
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]))


def keep_samples(directory: pathlib.Path, step: int, texts, problems, rewards, failures) -> None:
    """samples/STEP.jsonl: every completion with its reward. One file a step, so that a resumed run writes it again as it was."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = (
        {"prompt": p.prompt, "completion": text, "answer": p.answer, "kind": p.kind, "reward": float(r), "failure": failure}
        for text, p, r, failure in zip(texts, problems, rewards.reshape(-1), failures)
    )
    write_atomically(directory / f"{step:06d}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def evaluation(config, session, data, adapter, path: pathlib.Path | None) -> float:
    """Greedy accuracy; `path` gets the completions."""
    rewards, texts = evaluate.greedy(config, session, data, adapter)
    if path is not None:
        rows = [
            {"prompt": p.prompt, "completion": t, "answer": p.answer, "kind": p.kind, "reward": float(r)}
            for p, t, r in zip(data.problems, texts, rewards)
        ]
        write_atomically(path, json.dumps(rows, indent=0))
    return float(rewards.mean())

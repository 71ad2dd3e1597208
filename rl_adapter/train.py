"""The loop: prompts -> rollout -> reward -> advantage -> loss and update -> checkpoint, a stage a line."""

import collections
import dataclasses
import functools
import json
import os
import pathlib
import time
from collections.abc import Callable
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from rl_adapter import advantage, checkpoint, engine, evaluate, lora, loss, monitor, prompts, rollout, runtime, update
from rl_adapter import mesh as meshes
from rl_adapter import session as sessions
from rl_adapter.files import write_atomically
from rl_adapter.types import Problem, Rollout


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
            log.note(cache_note(config, session, train_data))
            batch = functools.partial(next_batch, config, session, train_data, batches)
            upcoming = []  # the next step's batch, where it is sampled while the update runs
            for step in range(start, config.steps):
                began = time.monotonic()
                scored, at_data = upcoming.pop() if upcoming else batch(state.previous if config.rollout.ahead else state.adapter, step)
                meanwhile = None
                if config.rollout.ahead and step + 1 < config.steps:
                    adapter = jax.tree.map(jnp.copy, state.adapter)  # the update takes the state's own
                    meanwhile = functools.partial(lambda adapter, step: upcoming.append(batch(adapter, step)), adapter, step + 1)
                state, metrics = learn(config, session, scored, state, tx, step, workdir, meanwhile)
                metrics["time/step_s"] = time.monotonic() - began
                metrics["learning_rate"] = float(schedule(int(state.step) - 1))
                if config.eval.every and (step + 1) % config.eval.every == 0:
                    metrics["eval/accuracy"] = evaluation(config, session, eval_data, state.adapter, None)
                log.log(step, metrics)
                if metrics["compilations"]:
                    log.note(f"compiled {metrics['compilations']} programs, {runtime.compile_seconds():.1f} s in all so far")
                at = {"data": at_data, "base_accuracy": base_accuracy, "examples": examples}
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
                "compile_s": runtime.compile_seconds(),
            }
            log.finish(summary)
    return summary


@dataclasses.dataclass(frozen=True)
class Scored:
    """A step's completions, with what they earned."""

    samples: Rollout
    problems: list[Problem]  # B
    texts: list[str]  # B
    rewards: np.ndarray  # [P, G] f32
    failures: list[str | None]  # B
    counts: dict[str, int]  # of the engine's work
    sampling_s: float
    waiting_s: float  # for rewards, once all was sampled


def train_step(config, session, data, indices, state, tx, step: int, workdir) -> tuple[update.State, dict]:
    """One batch of prompts, from rollout to update."""
    return learn(config, session, sample(config, session, data, indices, state.adapter, step), state, tx, step, workdir)


def next_batch(config, session, data, batches, adapter, step: int) -> tuple[Scored, dict]:
    """A step's completions, and the data's cursor after it."""
    scored = sample(config, session, data, next(batches), adapter, step)
    return scored, batches.get_state()


def learn(
    config, session, scored: Scored, state, tx, step: int, workdir, meanwhile: Callable[[], None] | None = None
) -> tuple[update.State, dict]:
    """From rewards to the update. `meanwhile` is done after the device has got its work and before anything waits for it: on one thread,
    so that all devices of a mesh get programs in one order."""
    started, before = time.monotonic(), runtime.compilations()
    model, samples = session.model, scored.samples
    advantages = advantage.group_normalized(scored.rewards, config.loss.advantage_eps)
    cfg = loss.GRPO(config.loss.clip_low, config.loss.clip_high, config.loss.kl, config.loss.measure_kl)
    parts, each = config.optimizer.minibatches, len(samples.prompts) // config.optimizer.minibatches
    rows = meshes.rows(model.mesh)
    previous = jax.tree.map(jnp.copy, state.adapter) if config.rollout.ahead else None  # an update takes the state's own
    updates = []
    for i in range(parts):
        some = slice(i * each, (i + 1) * each)
        batch = samples if parts == 1 else update.take(samples, some)
        a = jax.device_put(advantages[some], rows)
        tokens = config.optimizer.microbatch_tokens
        state, m = update.update(model, tx, cfg, config.rollout.temperature, tokens, session.base, state, batch, a)
        if not i:
            keep_samples(workdir / "samples", step, scored)  # while the device works
        updates.append(m)
    state = state.replace(previous=previous)
    compiled = runtime.compilations() - before
    if meanwhile:
        meanwhile()
    updates = jax.device_get(updates)
    updating_s = time.monotonic() - started
    metrics = combine(updates, on_policy=not config.rollout.ahead) | describe(scored, advantages)
    check_finite(step, metrics, state)
    tokens = metrics["response/tokens"]
    metrics |= {"time/rollout_s": scored.sampling_s, "time/reward_s": scored.waiting_s, "time/update_s": updating_s}
    metrics |= {"throughput/rollout_tokens_per_s": tokens / scored.sampling_s, "throughput/update_tokens_per_s": tokens / updating_s}
    return state, metrics | {"compilations": compiled + scored.counts["compilations"]}


def cache_note(config, session, data) -> str:
    """What the rollout's cache takes."""
    r, shards = config.rollout, meshes.row_shards(session.model.mesh)
    lay = engine.layout(engine.from_config(r), shards, r.prompts, data.length, sessions.sampling(config, session))
    size = engine.cache_bytes(session.model, lay) / 1e6
    return f"cache: {size:.1f} MB on each of {shards} row shards, {lay.pages * lay.page} tokens, for {lay.tiles * lay.lanes} slots in all"


def sample(config, session, data, indices, adapter, step: int) -> Scored:
    """The step's completions; each is scored as soon as it is finished, while the device decodes the others."""
    started, compiled = time.monotonic(), runtime.compilations()
    settings, group = sessions.sampling(config, session), config.rollout.group
    tokens, lengths = prompts.batch(data.encoded, indices, data.length, session.tokenizer.pad_id)
    problems = [data.problems[i] for i in indices for _ in range(group)]
    ids = [data.problems[i].id for i in indices]
    # A prompt that comes again in a later epoch gets other noise: the step is part of the seed.
    seed = (config.seed * 1_000_003 + step) % 2**31
    counts = collections.Counter()
    prepared = evaluate.prepare(session.model, adapter)
    texts, found = [""] * len(problems), [None] * len(problems)

    def scored(completion, row):
        texts[row] = session.tokenizer.decode(completion.tokens.tolist())
        found[row] = session.rewards.score(problems[row], texts[row], not completion.stopped)

    jobs = []
    with futures.ThreadPoolExecutor(config.reward.workers) as scorer:

        def passing(completions):
            for one in completions:
                jobs.append(scorer.submit(scored, one, one.prompt * group + one.sample))
                yield one

        encoded = [data.encoded[i] for i in indices]
        sizes = engine.from_config(config.rollout)
        completions = rollout.stream(
            session.model, settings, session.base, prepared, encoded, ids, seed, sizes, counts=counts, longest=data.length
        )
        samples = rollout.collect(session.model, settings, tokens, lengths, passing(completions))
        sampled = time.monotonic()
    waiting_s = time.monotonic() - sampled
    for job in jobs:
        job.result()  # raises what it raised
    rewards = np.array([outcome.reward for outcome in found], np.float32).reshape(-1, group)
    failures = ["; ".join(f"{name}: {why}" for name, why in outcome.failures.items()) or None for outcome in found]
    counts["compilations"] = runtime.compilations() - compiled
    return Scored(samples, problems, texts, rewards, failures, counts, sampled - started, waiting_s)


def place(session, state: update.State) -> update.State:
    return jax.device_put(state, meshes.adapter_shardings(session.model.mesh, state))


def combine(updates: list[dict], on_policy: bool) -> dict:
    """Means over a step's updates. Sampling and training agree only before the first of them, so its mismatch is the step's; where the
    adapter has moved on since sampling there is none to tell."""
    mean = {k: np.mean([u[k] for u in updates], 0).tolist() for k in updates[0] if not k.startswith("mismatch/")}
    mismatch = {k: float(v) for k, v in updates[0].items() if k.startswith("mismatch/")} if on_policy else {}
    return mean | mismatch | {"ratio/max": float(max(u["ratio/max"] for u in updates))}


def describe(scored: Scored, advantages) -> dict:
    lengths, stopped, drawn = jax.device_get((scored.samples.lengths, scored.samples.stopped, scored.samples.drawn))
    flat, counts = scored.rewards.reshape(-1), scored.counts
    return {
        "reward/mean": float(flat.mean()),
        "reward/std": float(flat.std()),
        "reward/mixed_groups": float((np.ptp(scored.rewards, 1) > 0).mean()),
        "advantage/abs_mean": float(np.abs(advantages).mean()),
        "response/length": float(lengths.mean()),
        "response/truncated": float(1 - stopped.mean()),
        "response/tokens": int(drawn.sum()),
        "rollout/slots_used": counts["decoded"] / max(1, counts["slot_steps"]),
    } | {f"reward/kind/{kind}": value for kind, value in evaluate.by_kind(scored.problems, flat).items()}


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


def keep_samples(directory: pathlib.Path, step: int, scored: Scored) -> None:
    """samples/STEP.jsonl: every completion with its reward. One file a step, so that a resumed run writes it again as it was."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = (
        {"prompt": p.prompt, "completion": text, "answer": p.answer, "kind": p.kind, "reward": float(r), "failure": failure}
        for text, p, r, failure in zip(scored.texts, scored.problems, scored.rewards.reshape(-1), scored.failures)
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

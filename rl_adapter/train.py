"""The loop: experience -> learning -> checkpoint, and what watches it."""

import functools
import json
import os
import pathlib
import time

import numpy as np
import pyarrow as pa
from ml_collections import ConfigDict

from rl_adapter import advantage, engine, episodes, evaluate, experience, learn, lora, manifest, monitor, runs, runtime, samples
from rl_adapter import mesh as meshes
from rl_adapter import session as sessions
from rl_adapter.data import iterator
from rl_adapter.experience import Experience
from rl_adapter.files import write_atomically
from rl_adapter.rewards import hygiene


def run(config: ConfigDict, workdir: str | os.PathLike, override_identity: bool = False) -> dict:
    """Train in `workdir`, from its last checkpoint if it has one. Returns what summary.json holds.

    Raises:
        ValueError: bad input, before anything compiles.
        FloatingPointError: a loss or gradient is not finite; names the step. The last good checkpoint is kept.
    """
    if config.objective != "rl":
        raise ValueError(f"objective: found {config.objective!r}, need 'rl' here: what learns from given completions is `offline.run`")
    started = time.monotonic()
    workdir = pathlib.Path(workdir)
    if not override_identity and (summary := runs.finished(config, workdir)):
        return summary
    session = sessions.open_session(config, "train", "eval")
    train_data, eval_data = session.data["train"], session.data["eval"]
    if len(train_data.problems) < config.rollout.prompts:
        raise ValueError(f"rollout.prompts: found {config.rollout.prompts}, need at most the {len(train_data.problems)} training problems")
    batches = iterator.from_config(config.data, train_data.sources, config.rollout.prompts)
    tx = evaluate.optimizer(config)
    identity = evaluate.identity(config, session.digest)
    with session.rewards, runs.checkpoints(config, workdir, identity, override_identity) as saved:
        start, cursor = runs.first_step(config, workdir, saved), {}
        state = meshes.place(session.model.mesh, evaluate.new_state(config, session))
        if start:
            state, cursor = saved.restore(start, state)
            fields = {"data": (dict,), "examples": (int,), "base_accuracy": (float,), "samples": (str, type(None))}
            cursor = runs.at(cursor, f"{workdir / 'checkpoints' / str(start)}", **fields)
            batches.set_state(cursor["data"])
        chain = {}  # the head of the samples' manifest, as checkpoints keep it
        # Also where no more are written: those that were stay what the audit says of them.
        if config.samples.write or (workdir / "samples" / manifest.NAME).exists():
            manifest.rewind(workdir / "samples", start, manifest.run_of(identity), None if override_identity else cursor.get("samples"))
            chain["samples"] = manifest.head(workdir / "samples")
        trained = lora.count(state.adapter) + (lora.count(state.critic.adapter) if state.critic else 0)
        with monitor.Monitor(workdir, config, base_digest=session.digest, start=start, extra=runs.about(session, trained)) as log:
            log.note(f"base {session.digest[:12]}  {session.report['bytes']} bytes  mesh {dict(session.model.mesh.shape)}")
            runs.begin(log, workdir, config, (train_data.report, eval_data.report), trained, start)
            examples = min(config.eval.examples, len(eval_data.problems))
            base_accuracy = cursor.get("base_accuracy")
            if base_accuracy is None or cursor["examples"] != examples:
                base_accuracy = evaluation(config, session, eval_data, None, workdir / "eval_base.json")
            log.note(f"base accuracy {base_accuracy:.1%} on {examples} held-out problems")
            log.note(cache_note(config, session, train_data))
            log.note(session.rewards.describe(session.talk.talks))
            for warning in hygiene.run_probes(session.rewards, train_data.problems, config.seed):
                log.note(f"warning: {warning}")
            log.note(runs.COMPILING)
            behind = config.rollout.max_staleness
            gather = functools.partial(experience.gather, config, session, train_data, batches)
            upcoming = []  # the next step's experience, where it is sampled while the update runs
            for step in range(start, config.steps):
                began = time.monotonic()
                if not upcoming:
                    upcoming.append(gather(state.previous[0] if behind else state.adapter, max(0, step - behind), step))
                found, at_data = upcoming.pop()

                def meanwhile(previous, step=step, found=found):
                    if config.samples.write:  # while the device works
                        chain["samples"] = samples.write(workdir / "samples", step, sample_rows(session, step, found), config.samples)
                    if behind and step + 1 < config.steps:
                        upcoming.append(gather(previous[0], max(0, step + 1 - behind), step + 1))

                state, metrics = learn.learn(config, session, found, state, tx, step, meanwhile)
                metrics = metrics | describe(config, found, metrics["time/update_s"])
                metrics["compilations"] += found.counts["compilations"]
                learn.check_finite(step, metrics, state)
                metrics["time/step_s"] = time.monotonic() - began
                metrics["learning_rate"] = float(tx.rate()(max(int(state.step) - 1, 0)))
                if config.eval.every and (step + 1) % config.eval.every == 0:
                    metrics["eval/accuracy"] = evaluation(config, session, eval_data, state.adapter, None)
                log.log(step, metrics)
                if metrics["compilations"]:
                    log.note(f"compiled {metrics['compilations']} programs, {runtime.compile_seconds():.1f} s in all so far")
                at = {"data": at_data, "base_accuracy": base_accuracy, "examples": examples, **chain}
                saved.save(step + 1, state, at, force=step + 1 == config.steps)
            accuracy = evaluation(config, session, eval_data, state.adapter, workdir / "eval_adapter.json")
            saved.wait()
            summary = {
                "eval/base_accuracy": base_accuracy,
                "eval/accuracy": accuracy,
                "eval/examples": examples,
                **runs.totals(config, session, trained, started),
                **{f"{name}/head": head for name, head in chain.items()},
            }
            log.finish(summary)
    return summary


def cache_note(config, session, data) -> str:
    """What the rollout's cache takes."""
    r, shards = config.rollout, meshes.row_shards(session.model.mesh)
    lay = engine.layout(engine.from_config(r), shards, r.prompts, data.length, sessions.sampling(config, session))
    size = engine.cache_bytes(session.model, lay) / 1e6
    return f"cache: {size:.1f} MB on each of {shards} row shards, {lay.pages * lay.page} tokens, for {lay.tiles * lay.lanes} slots in all"


def describe(config: ConfigDict, found: Experience, updating_s: float) -> dict:
    """What a step's completions say of themselves."""
    played, counts, rewards = found.played, found.counts, found.played.rewards
    flat, tokens = rewards.reshape(-1), int(played.samples.drawn.sum())
    return {
        "reward/mean": float(flat.mean()),
        "reward/std": float(flat.std()),
        "reward/mixed_groups": float(advantage.mixed(rewards).mean()),
        "response/length": float(played.samples.lengths.mean()),
        "response/truncated": float(1 - played.samples.stopped.mean()),
        "response/tokens": tokens,
        "rollout/slots_used": counts["decoded"] / max(1, counts["slot_steps"]),
        "rollout/tries": found.tries,
        "rollout/discarded": len(found.seeds) - len(found.kept),
        "rollout/version": found.version,
        "time/rollout_s": found.sampling_s,
        "time/reward_s": found.waiting_s,
        "throughput/rollout_tokens_per_s": tokens / found.sampling_s,
        "throughput/update_tokens_per_s": tokens / updating_s,
        **{f"reward/kind/{kind}": value for kind, value in evaluate.by_kind(played.problems, flat).items()},
        **hygiene.divergence(played.outcomes, config.reward.held_out),
        **(episodes.describe(played.episodes) if played.episodes else {}),
    }


def sample_rows(session: sessions.Session, step: int, found: Experience) -> pa.Table:
    """All that a step drew, what it left out included, as `samples.SCHEMA` has it."""
    tables, drawn = [], found.drawn
    for seed in dict.fromkeys(found.seeds.tolist()):  # one for each try
        rows = np.flatnonzero(found.seeds == seed)
        some = drawn.rows(rows)
        shape = some.samples.tokens.shape
        trained = np.broadcast_to(np.isin(rows, found.kept)[:, None], shape[:2])
        prompts = [session.tokenizer.decode(row[:n].tolist()) for row, n in zip(some.samples.prompts, some.samples.prompt_lengths)]
        versions = np.full(shape, found.version, np.int32)
        tables.append(samples.rows_of(step, some.samples, some.problems, prompts, some.texts, some.outcomes, versions, seed, trained))
    return pa.concat_tables(tables)


def evaluation(config, session, data, adapter, path: pathlib.Path | None) -> float:
    """Mean reward of greedy completions, their accuracy where it is 1 or 0; `path` gets them."""
    rewards, texts = evaluate.greedy(config, session, data, adapter)
    if path is not None:
        rows = [
            samples.told({"prompt_text": p.prompt, "completion_text": t, "answer": p.answer}, config.samples)
            | {"kind": p.kind, "reward": float(r)}
            for p, t, r in zip(data.problems, texts, rewards)
        ]
        write_atomically(path, json.dumps(rows, indent=0), private=True)
    return float(rewards.mean())

"""Learning from given completions: imitation (`objective` sft), preferences (dpo, ipo), a reward model of preferences (reward).

The same program as in reinforcement learning computes the updates; what is trained is a policy's adapter, which `--mode=eval` and
`--mode=export` take, or of `reward` an adapter with a head, which `reward.model.path` takes.
"""

import dataclasses
import os
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from rl_adapter import evaluate, learn, lora, loss, monitor, runs, runtime, scalar, scoring, update
from rl_adapter import mesh as meshes
from rl_adapter import session as sessions
from rl_adapter.data import iterator, offline
from rl_adapter.hub import scalars
from rl_adapter.types import Rollout


def run(config: ConfigDict, workdir: str | os.PathLike, override_identity: bool = False) -> dict:
    """Train in `workdir`, from its last checkpoint if it has one. Returns what summary.json holds. Raises as `train.run`."""
    started, workdir = time.monotonic(), pathlib.Path(workdir)
    if not override_identity and (summary := runs.finished(config, workdir)):
        return summary
    session = sessions.open_session(config)
    train, held_out = (open_given(config, session, split) for split in ("train", "eval"))
    if len(train) < config.rollout.prompts:
        raise ValueError(f"rollout.prompts: found {config.rollout.prompts}, need at most the {len(train)} records of data.train")
    batches = iterator.from_config(config.data, train.sources, config.rollout.prompts)
    tx = evaluate.optimizer(config)
    identity = evaluate.identity(config, session.digest)
    with runs.checkpoints(config, workdir, identity, override_identity) as saved:
        start = runs.first_step(config, workdir, saved)
        state = meshes.place(session.model.mesh, new_state(config, session))
        if start:
            state, cursor = saved.restore(start, state)
            batches.set_state(runs.at(cursor, f"{workdir / 'checkpoints' / str(start)}", data=(dict,))["data"])
        trained = lora.count(state.adapter)
        with monitor.Monitor(workdir, config, base_digest=session.digest, start=start, extra=runs.about(session, trained)) as log:
            runs.begin(log, workdir, config, (train.report, held_out.report), trained, start)
            log.note(runs.COMPILING)
            for step in range(start, config.steps):
                began, compiled = time.monotonic(), runtime.compilations()
                r = train.rollout(next(batches))
                state, metrics = one_update(config, session, tx, state, r)
                metrics = learn.combine([jax.device_get(metrics)]) | {"learning_rate": float(tx.rate()(step))}
                learn.check_finite(step, metrics, state)
                metrics |= {"time/step_s": time.monotonic() - began, "compilations": runtime.compilations() - compiled}
                if config.eval.every and (step + 1) % config.eval.every == 0:
                    metrics |= measured(config, session, held_out, state.adapter)
                log.log(step, metrics)
                saved.save(step + 1, state, {"data": batches.get_state()}, force=step + 1 == config.steps)
            found = measured(config, session, held_out, state.adapter)
            saved.wait()
            if config.objective == "reward":
                scalars.save(workdir / "reward_model", state.adapter, session.model.adapter, session.digest)
            summary = found | runs.totals(config, session, trained, started)
            log.finish(summary)
    return summary


class Given:
    """Encoded records of a split: completions, one or two a prompt."""

    def __init__(self, split, encoded: offline.Encoded, longest: tuple[int, int], pad: int):
        self.report, self.sources, self.encoded, self.longest, self.pad = split.report, split.sources, encoded, longest, pad

    def __len__(self) -> int:
        return len(self.encoded.prompts)

    def rollout(self, rows) -> Rollout:
        """Some records on the host, padded to one shape, as if they had been sampled."""
        (t_, c_), group = self.longest, len(self.encoded.completions[0])
        fill = lambda texts, width: np.stack([np.pad(x, (0, width - len(x)), constant_values=self.pad) for x in texts]).astype(np.int32)
        prompts = [self.encoded.prompts[i] for i in rows]
        texts = [x for i in rows for x in self.encoded.completions[i]]
        lengths = np.array([len(x) for x in texts], np.int32).reshape(-1, group)
        there = np.arange(c_) < lengths[..., None]
        nothing = np.zeros(there.shape, np.float32)
        return Rollout(
            fill(prompts, t_), np.array(list(map(len, prompts)), np.int32), fill(texts, c_).reshape(there.shape), there, lengths,
            np.ones(lengths.shape, bool), nothing, nothing, nothing, None, None,
        )  # fmt: skip


def open_given(config: ConfigDict, session: sessions.Session, split: str) -> Given:
    data, stop = config.data, session.tokenizer.stop_ids[0]
    read = offline.load_examples(data, split) if config.objective == "sft" else offline.load_pairs(data, split)
    kept, encoded = offline.encode(session.tokenizer, data, read, config.rollout.max_new_tokens, stop)
    if not kept.items:
        raise ValueError(f"data.{split}: found no record that is left of {read.report.read}, need at least one")
    return Given(kept, encoded, (data.max_prompt_tokens, config.rollout.max_new_tokens), session.tokenizer.pad_id)


def new_state(config: ConfigDict, session: sessions.Session) -> update.State:
    if config.objective != "reward":
        return evaluate.new_state(config, session)
    return update.start(evaluate.optimizer(config), sessions.new_scalar(session, config.seed))


def objective_of(config: ConfigDict):
    cfg = dataclasses.replace(loss.from_config(config.loss), kind=config.objective)
    return update.Preference() if config.objective == "reward" else update.Policy(cfg)


def one_update(config: ConfigDict, session: sessions.Session, tx, state: update.State, r: Rollout) -> tuple[update.State, dict]:
    model, base, tokens, experts = session.model, session.base, config.optimizer.microbatch_tokens, None
    objective, rows = objective_of(config), meshes.rows(session.model.mesh)
    placed = jax.device_put(r, rows)
    if config.objective == "reward":
        end = session.tokenizer.stop_ids[0]
        batch = update.PairBatch(scalar.closed(placed, end), jax.device_put(np.full(len(r.prompts), 1 / len(r.prompts), np.float32), rows))
        return update.update(model, tx, objective, tokens, base, state, batch)
    if config.objective == "sft":
        weight, reference = loss.token_weights(r.drawn, config.loss.aggregation, r.tokens.shape[2]), None
    else:
        weight, reference = learn.pair_weights(r.drawn), scoring.score_all(model, base, session.reference, placed, 1.0, tokens).scored
    if config.loss.balance or config.loss.router_z:
        fed = jnp.sum(scoring.packed_inputs(placed)[2]).astype(jnp.float32)
        experts = update.Experts(scoring.score_all(model, base, state.adapter, placed, 1.0, tokens).loads, fed)
    batch = update.Batch(placed, jax.device_put(weight, rows), None, reference)
    return update.update(model, tx, objective, tokens, base, state, batch, experts)


def measured(config: ConfigDict, session: sessions.Session, held_out: Given, adapter) -> dict[str, float]:
    """Of held-out records: how likely is what is to be imitated, or how many pairs are told apart."""
    n, (model, base, tokens) = min(config.eval.examples, len(held_out)), (session.model, session.base, config.optimizer.microbatch_tokens)
    logprobs = lambda adapter, r: np.asarray(scoring.score_all(model, base, adapter, r, 1.0, tokens).scored)
    gains, sizes, shards = [], [], meshes.row_shards(model.mesh)
    at_once = -(-min(config.eval.batch, n) // shards) * shards
    for first in range(0, n, at_once):
        r = held_out.rollout(np.arange(first, first + at_once) % n)  # the last is filled up from the front, to one shape
        placed = jax.device_put(r, meshes.rows(model.mesh))
        if config.objective == "reward":
            gain = scalar.score_all(model, base, adapter, placed, session.tokenizer.stop_ids[0], tokens)
        else:
            of_tokens = logprobs(adapter, placed)
            if config.objective != "sft":
                of_tokens = of_tokens - logprobs(session.reference, placed)
            gain = np.where(r.drawn, of_tokens, 0.0).sum(-1)
        gains.append(gain)
        sizes.append(r.lengths)
    gains, sizes = np.concatenate(gains)[:n], np.concatenate(sizes)[:n]
    if config.objective == "sft":
        return {"eval/nll": float(-gains.sum() / sizes.sum())}
    return {"eval/preference_accuracy": float((gains[:, 0] > gains[:, 1]).mean())}

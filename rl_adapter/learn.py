"""From a step's experience to new parameters: reference and critic, advantages, loss, updates. One function a stage, in this order."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from rl_adapter import advantage, evaluate, lora, loss, microbatch, programs, rollout, runtime, scalar, scoring, update
from rl_adapter import mesh as meshes
from rl_adapter.experience import Experience
from rl_adapter.types import Rollout


def learn(
    config, session, experience: Experience, state: update.State, tx: update.Optimizer, step: int,
    meanwhile: Callable[[tuple[lora.Adapter, ...]], None] = lambda previous: None,
) -> tuple[update.State, dict]:  # fmt: skip
    """One step's updates. `meanwhile` is called with the state's new `previous` after the device has got its work and before anything waits
    for it: on one thread, so that all devices of a mesh get programs in one order."""
    started, before = time.monotonic(), runtime.compilations()
    r = rollout.place(session.model, experience.played.samples)
    mask = trained_tokens(config, experience.played.samples)
    reference = reference_of(config, session, r)
    values = None if state.critic is None else scalar.values_all(session.model, session.base, state.critic.adapter, r, _tokens(config))
    of_tokens = token_rewards(config, experience.played.samples, reference)
    rewards = shaped_rewards(config, experience)
    values = None if values is None else np.asarray(values)
    advantages = advantages_of(config, rewards, mask, of_tokens, values)
    if config.loss.correction != "none":
        r, advantages = corrected(config, session, state.adapter, r, experience.played.samples, mask, advantages)
    n = config.rollout.max_staleness
    previous = (*state.previous, jax.tree.map(jnp.copy, state.adapter))[-n:] if n else ()
    # An update takes all arrays of the state that it gets.
    critic, state = state.critic, state.replace(previous=(), critic=None)
    # An update on pairs is of other tokens than were scored.
    loads = None if reference is None or config.loss.kind in loss.PREFERENCE else reference.loads
    reference = None if reference is None else reference.scored
    updates = []
    if critic is None or step >= config.critic.warmup_steps:
        state, updates = policy_updates(config, session, state, tx, r, mask, advantages, reference, rewards)
    critic_updates = []
    if critic is not None:
        returns = advantage.returns(rewards, mask, of_tokens, values, config.advantage.gamma, config.advantage.lam)
        critic, critic_updates = update_critic(config, session, critic, r, mask, values, returns)
    state = state.replace(previous=previous, critic=critic)
    compiled = runtime.compilations() - before
    meanwhile(previous)
    updates, critic_updates, loads = jax.device_get((updates, critic_updates, loads))
    metrics = combine(updates, loads, on_policy=not n) | {k: v for k, v in combine(critic_updates).items() if k.startswith("critic/")}
    metrics["advantage/abs_mean"] = float(np.abs(advantages[mask]).mean()) if mask.any() else 0.0
    if values is not None:
        metrics["critic/explained"] = explained(values[mask], returns[mask])
    metrics |= {"time/update_s": time.monotonic() - started, "compilations": compiled}
    return state, metrics


def _tokens(config) -> int:
    return config.optimizer.microbatch_tokens


def trained_tokens(config, samples: Rollout) -> np.ndarray:
    """[P, G, C] bool: drawn by the policy, of completions that count."""
    counted = samples.stopped if config.loss.mask_truncated else np.ones_like(samples.stopped)
    return samples.drawn & counted[..., None]


def needs_reference(config) -> bool:
    lo = config.loss
    return bool(lo.kl or lo.measure_kl or lo.kind in loss.PREFERENCE or config.advantage.estimator == "distill")


def reference_of(config, session, r: Rollout) -> scoring.Logprobs | None:
    """What the reference gives the completions, where anything asks for it."""
    if not needs_reference(config):
        return None
    return scoring.score_all(session.model, session.base, session.reference, r, 1.0, _tokens(config))


def token_rewards(config, samples: Rollout, reference: scoring.Logprobs | None) -> np.ndarray | None:
    """[P, G, C]: what nearness to the reference earns, or None."""
    lo = config.loss
    if config.advantage.estimator == "distill":
        return np.asarray(reference.scored) - samples.scored_logprobs
    if lo.kl and lo.kl_in == "reward":
        return -lo.kl * np.asarray(loss.kl(samples.scored_logprobs, np.asarray(reference.scored), lo.kl_estimator))
    return None


def shaped_rewards(config, experience: Experience) -> np.ndarray:
    """[P, G]: rewards less what long completions lose."""
    a, samples = config.advantage, experience.played.samples
    longest = config.rollout.max_new_tokens
    return experience.played.rewards + advantage.overlong(samples.lengths, longest, a.overlong_buffer, a.overlong_penalty)


def advantages_of(config, rewards: np.ndarray, mask: np.ndarray, of_tokens: np.ndarray | None, values: np.ndarray | None) -> np.ndarray:
    a = config.advantage
    if config.loss.kind in loss.PREFERENCE:
        return np.zeros(mask.shape, np.float32)  # pairs have none
    return advantage.estimate(a.estimator, rewards, mask, of_tokens, values, a.eps, a.gamma, a.lam)


def corrected(config, session, adapter, r: Rollout, samples: Rollout, mask: np.ndarray, advantages: np.ndarray):
    """Ratios against the policy as it is now, and advantages weighed by its own ratio to the one that sampled: `loss.importance`."""
    lo = config.loss
    now = scoring.score_all(session.model, session.base, adapter, r, config.rollout.temperature, _tokens(config)).tempered
    factor = loss.importance(np.asarray(now), samples.tempered_logprobs, mask, lo.correction, lo.correction_low, lo.correction_high)
    return r.replace(tempered_logprobs=now), advantages * factor


def policy_updates(config, session, state, tx, r: Rollout, mask, advantages, reference, rewards) -> tuple[update.State, list[dict]]:
    """`optimizer.epochs` passes over the step's completions, in `optimizer.minibatches` updates each."""
    model, objective = session.model, update.Policy(loss.from_config(config.loss), config.rollout.temperature)
    aggregation, longest = config.loss.aggregation, config.rollout.max_new_tokens
    if config.loss.kind in loss.PREFERENCE:
        r, reference, weights_of = *pairs(r, reference, rewards, mask), pair_weights
        mask, advantages = np.asarray(r.drawn), None
    else:
        weights_of = lambda some: loss.token_weights(some, aggregation, longest)
    of_router = objective.cfg.balance or objective.cfg.router_z
    updates = []
    for _ in range(config.optimizer.epochs):
        for some in parts(config, len(mask)):
            arrays = weights_of(mask[some]), None if advantages is None else advantages[some]
            mine, of_reference = (r, reference) if config.optimizer.minibatches == 1 else microbatch.take((r, reference), some)
            batch = update.Batch(mine, *jax.device_put(arrays, meshes.rows(model.mesh)), of_reference)
            experts = update.sampled_experts(model.spec.experts, batch.rollout) if of_router else None
            state, metrics = update.update(model, tx, objective, _tokens(config), session.base, state, batch, experts)
            none = config.loss.kind in loss.PREFERENCE and not mask[some].any()  # all of these prompts' completions earned the same
            updates.append({k: v for k, v in metrics.items() if not (none and k.startswith("preference/"))})
    return state, updates


def parts(config, prompts: int) -> list[slice]:
    each = prompts // config.optimizer.minibatches
    return [slice(start, start + each) for start in range(0, prompts, each)]


def pairs(r: Rollout, reference, rewards: np.ndarray, mask: np.ndarray) -> tuple[Rollout, jax.Array]:
    """Each prompt's best and worst completion, [P, 2, C]; where all are equal there is no pair, and nothing is drawn."""
    chosen = np.stack([rewards.argmax(1), rewards.argmin(1)], 1)
    there = advantage.mixed(rewards)[:, None, None] & np.take_along_axis(mask, chosen[..., None], 1)

    def pick(x, axis):
        index = chosen.reshape((1,) * (axis - 1) + chosen.shape + (1,) * (x.ndim - axis - 1))
        return jnp.take_along_axis(x, jnp.asarray(index), axis)

    own = {name: pick(getattr(r, name), 1) for name in ("tokens", "lengths", "stopped")}
    own |= {name: pick(getattr(r, name), 1) for name in ("sampled_logprobs", "tempered_logprobs", "scored_logprobs")}
    return r.replace(**own, drawn=jnp.asarray(there), choices=pick(r.choices, 2)), pick(reference, 1)


def pair_weights(mask: np.ndarray) -> np.ndarray:
    """[P, 2, C] bool -> f32: each pair's share of the loss, at all its tokens."""
    there = mask.any(-1).all(-1)
    return np.where(mask & there[:, None, None], 1 / max(there.sum(), 1), 0).astype(np.float32)


def update_critic(config, session, critic: update.State, r: Rollout, mask, values, returns) -> tuple[update.State, list[dict]]:
    """`critic.epochs` passes over the step's completions."""
    objective, tx = update.Value(config.critic.clip), evaluate.critic_optimizer(config)
    updates = []
    for _ in range(config.critic.epochs):
        for some in parts(config, len(mask)):
            weight = loss.token_weights(mask[some], "token", 0)
            arrays = jax.device_put((weight, values[some], returns[some].astype(np.float32)), meshes.rows(session.model.mesh))
            batch = update.ValueBatch(scoring.texts(microbatch.take(r, some)), *arrays)
            critic, metrics = update.update(session.model, tx, objective, _tokens(config), session.base, critic, batch)
            updates.append(metrics)
    return critic, updates


def explained(values: np.ndarray, returns: np.ndarray) -> float:
    """Share of the returns' variance that a critic foresaw."""
    spread = returns.var() if returns.size else 0.0
    return float(1 - (returns - values).var() / spread) if spread > 0 else 0.0


def combine(updates: list[dict], base_loads: np.ndarray | None = None, on_policy: bool = False) -> dict:
    """Means over a step's updates. Sampling and training agree only before the first of them, so its mismatch is the step's; where the
    adapter has moved on since sampling there is none to tell."""
    if not updates:
        return {}
    largest = {k: float(max(u[k] for u in updates)) for k in ("ratio/max",) if k in updates[0]}
    names = [k for k in dict.fromkeys(k for u in updates for k in u) if k != "loads" and not k.startswith("mismatch/")]
    mean = {k: float(np.mean([u[k] for u in updates if k in u])) for k in names}
    mismatch = {k: float(v) for k, v in updates[0].items() if k.startswith("mismatch/")} if on_policy else {}
    experts = {}
    if "loads" in updates[0]:
        loads = np.mean([u["loads"] for u in updates], 0)
        whole = None if base_loads is None else base_loads * loads.sum() / max(base_loads.sum(), 1)
        experts = update.expert_metrics(loads, whole)
    return mean | mismatch | largest | experts


def check_finite(step: int, metrics: dict, state: update.State) -> None:
    """The new state too: its metrics are from before the update, and a checkpoint must not keep what the next step would stop at."""
    bad = [k for k, v in metrics.items() if not np.isfinite(v).all()] + ([] if _finite(state) else ["the updated adapter or optimizer"])
    if bad:
        raise FloatingPointError(
            f"step {step}: {', '.join(bad)} not finite; the run stops, and its last checkpoint is from before this step"
        )


@programs.jit
def _finite(tree) -> jax.Array:
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]))

"""The update stage: one jitted step from a batch of completions to new parameters of an adapter.

The forward pass inside the gradient is the sampler's: its logprobs are compared with the sampled ones at every step. What is minimized
is an objective: a policy's, a critic's or a reward model's. All go through one program, `_update`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from rl_adapter import lora, microbatch, programs, scalar, scoring
from rl_adapter import loss as losses
from rl_adapter import model as models
from rl_adapter.types import Array, Base, PyTree, Rollout


@struct.dataclass
class State:
    """All that a run changes: saved whole, restored whole."""

    adapter: PyTree  # `lora.Adapter` of a policy, `scalar.Scalar` of a critic or a reward model
    optimizer: PyTree
    step: Array  # [] int32: updates done
    previous: tuple[lora.Adapter, ...] = ()  # adapters of the last `rollout.max_staleness` steps, the oldest first
    critic: "State | None" = None


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101) on gradients of at most `max_grad_norm`, with warm-up and decay.

    It has the methods of an `optax.GradientTransformation`. Equal by its settings, as a static argument must be.
    """

    learning_rate: float
    b1: float
    b2: float
    eps: float
    weight_decay: float
    max_grad_norm: float
    warmup_steps: int
    schedule: str  # constant | linear | cosine
    updates: int  # of the run: where a decay ends

    def rate(self) -> optax.Schedule:
        peak, warm = self.learning_rate, self.warmup_steps
        rest = max(self.updates - warm, 1)
        after = {
            "constant": optax.constant_schedule(peak),
            "linear": optax.linear_schedule(peak, 0.0, rest),
            "cosine": optax.cosine_decay_schedule(peak, rest),
        }[self.schedule]
        # The first update of a warm-up is already one step up: a rate of 0 would waste a rollout.
        return optax.join_schedules([optax.linear_schedule(peak / (warm + 1), peak, warm), after], [warm]) if warm else after

    def _transformation(self) -> optax.GradientTransformation:
        adamw = optax.adamw(self.rate(), b1=self.b1, b2=self.b2, eps=self.eps, weight_decay=self.weight_decay)
        return optax.chain(optax.clip_by_global_norm(self.max_grad_norm), adamw)

    def init(self, parameters: PyTree) -> PyTree:
        return self._transformation().init(parameters)

    def update(self, gradient: PyTree, state: PyTree, parameters: PyTree) -> tuple[PyTree, PyTree]:
        return self._transformation().update(gradient, state, parameters)


def start(tx: Optimizer, parameters: PyTree) -> State:
    """A state that has made no update."""
    return State(parameters, tx.init(parameters), jnp.zeros((), jnp.int32))


@struct.dataclass
class Parts:
    """What an objective says of a microbatch, beside its loss."""

    means: dict[str, tuple[Array, Array]]  # sums, and what they are sums of
    totals: dict[str, Array]
    largest: dict[str, Array]


# --- objectives: (model, base, packed size, parameters, some prompts of a batch, the whole update's experts) -> loss, Parts


@struct.dataclass
class Batch:
    """What a policy learns from. Arrays [P, G, C] f32, where a completion's tokens are."""

    rollout: Rollout
    weight: Array  # share of the loss; 0: no part of it
    advantage: Array | None = None
    reference: Array | None = None  # logprob at temperature 1 of the reference


@struct.dataclass
class Experts:
    """Of a whole update, for losses on the router."""

    loads: Array  # [Ls, E] routed pairs
    tokens: Array  # [] that were fed


@dataclasses.dataclass(frozen=True)
class Policy:
    cfg: losses.Loss
    temperature: float = 1.0

    def __call__(self, model, base, size: int, adapter: lora.Adapter, b: Batch, experts: Experts | None) -> tuple[Array, Parts]:
        cfg, r = self.cfg, b.rollout
        s = scoring.score(model, base, lora.prepare(adapter, model.numeric), r, self.temperature, size, entropy_gradient=cfg.entropy > 0)
        mask = b.weight > 0
        terms = []
        if cfg.kind == "sft":
            terms.append(losses.likelihood(s.scored, b.weight))
        elif cfg.kind in losses.PREFERENCE:
            terms.append(losses.preference(cfg, s.scored, b.reference, b.weight))
        else:
            terms.append(losses.surrogate(cfg, s.tempered, r.tempered_logprobs, b.advantage, b.weight))
        if b.reference is not None:
            terms.append(losses.penalty(cfg, s.scored, b.reference, b.weight))
        loss = sum(value for value, _ in terms)
        if cfg.entropy:
            loss -= cfg.entropy * jnp.sum(b.weight * jnp.where(mask, s.entropy, 0.0))
        if cfg.balance:
            loss += cfg.balance * losses.balance(experts.loads, s.router, experts.tokens)
        if cfg.router_z:
            loss += cfg.router_z * jnp.mean(s.router_z) / experts.tokens
        means = {name: pair for _, sums in terms for name, pair in sums.items()}
        return loss, jax.lax.stop_gradient(_watched(model, s, b, means))


def _watched(model, s: scoring.Scores, b: Batch, means: dict) -> Parts:
    """Entropy, expert loads, and how far what was sampled is from what is scored."""
    r = b.rollout
    _, _, valid = scoring.packed_inputs(r)
    over = lambda x, mask: (jnp.sum(jnp.where(mask, x, 0.0)), jnp.sum(mask).astype(jnp.float32))
    means = means | {"entropy": over(s.entropy, r.drawn)}
    totals, largest = {"loads": scoring.expert_loads(s.choices, valid, model.spec.experts)}, {}
    if r.choices is not None:
        gap = jnp.where(r.drawn, jnp.abs(s.scored - r.scored_logprobs), 0.0)
        means["mismatch/mean_abs_logprob_diff"] = over(gap, r.drawn)
        totals["mismatch/expert_flips"] = jnp.sum((sampled_choices(r) != s.choices) & valid[None, ..., None]).astype(jnp.float32)
        largest["mismatch/max_abs_logprob_diff"] = jnp.max(gap)
        ratio = jnp.exp(jnp.where(b.weight > 0, s.tempered - r.tempered_logprobs, 0.0))
        largest["ratio/max"] = jnp.max(jnp.where(b.weight > 0, ratio, 0.0))
    return Parts(means, totals, largest)


@struct.dataclass
class ValueBatch:
    """What a critic learns from, [P, G, C] f32."""

    rollout: Rollout
    weight: Array
    old: Array  # its values before the update
    returns: Array


@dataclasses.dataclass(frozen=True)
class Value:
    clip: float

    def __call__(self, model, base, size: int, critic: scalar.Scalar, b: ValueBatch, _) -> tuple[Array, Parts]:
        found = scalar.values(model, base, critic, b.rollout, size)
        loss, means = losses.value(found, b.old, b.returns, b.weight, self.clip)
        return loss, Parts(means, {}, {})


@struct.dataclass
class PairBatch:
    """What a reward model learns from: completions [P, 2, C], closed, the chosen one first."""

    rollout: Rollout
    weight: Array  # [P] f32


@dataclasses.dataclass(frozen=True)
class Preference:
    def __call__(self, model, base, size: int, judge: scalar.Scalar, b: PairBatch, _) -> tuple[Array, Parts]:
        found = scalar.of_completions(scalar.values(model, base, judge, b.rollout, size), b.rollout)
        loss, means = losses.bradley_terry(found, b.weight)
        return loss, Parts(means, {}, {})


# --- the program


@programs.jit(static_argnames=("model", "tx", "objective", "size"), donate_argnames=("state",))
def _update(
    model: models.Model, tx: Optimizer, objective: Any, size: int, base: Base, state: State, batch: PyTree,
    experts: Experts | None, rows: Array, count: Array,
) -> tuple[State, dict[str, Array]]:  # fmt: skip
    """`rows` [P, prompts]: prompts of each microbatch, of which the first `count` hold. The loop's length is no part of the program."""
    gradient = jax.value_and_grad(functools.partial(objective, model, base, size), has_aux=True)

    def of_part(some):
        (value, parts), grads = gradient(state.adapter, microbatch.part(batch, some, model.mesh), experts)
        return value, parts, grads

    def combine(a, b):
        largest = jax.tree.map(jnp.maximum, a[1].largest, b[1].largest)
        (value, parts, grads) = microbatch.add(a, b)
        return value, parts.replace(largest=largest), grads

    value, parts, grads = microbatch.over(of_part, combine, rows, count)
    updates, optimizer_state = tx.update(grads, state.optimizer, state.adapter)
    new = state.replace(adapter=optax.apply_updates(state.adapter, updates), optimizer=optimizer_state, step=state.step + 1)
    means = {name: total / jnp.maximum(count_, 1) for name, (total, count_) in parts.means.items()}
    return new, means | parts.totals | parts.largest | {"loss": value, "grad_norm": optax.tree.norm(grads)}


def update(
    model: models.Model, tx: Optimizer, objective: Any, tokens: int, base: Base, state: State, batch: PyTree,
    experts: Experts | None = None,
) -> tuple[State, dict[str, Array]]:  # fmt: skip
    """One optimizer update of `state` by `objective` on `batch`, in microbatches of about `tokens` (see `microbatch.plan`), which cannot be
    seen in it. `state` is donated."""
    planned = scoring.plan(model, batch.rollout, tokens)
    # What nobody reads need not be there.
    batch = batch.replace(rollout=batch.rollout.replace(stopped=None, sampled_logprobs=None))
    new, metrics = _update(model, tx, objective, planned.size, base, state, batch, experts, planned.rows, np.int32(planned.count))
    return new, metrics | {"update/padding": planned.padding, "update/microbatches": planned.count}


@programs.jit(static_argnames=("experts",))
def sampled_experts(experts: int, r: Rollout) -> Experts:
    """Where the tokens of completions went when they were sampled."""
    _, _, valid = scoring.packed_inputs(r)
    return Experts(scoring.expert_loads(sampled_choices(r), valid, experts), jnp.sum(valid).astype(jnp.float32))


def sampled_choices(r: Rollout) -> Array:
    """Experts [Ls, P, T + G * C, k] that sampling chose, laid out as `scoring.packed_inputs`."""
    layers, p_, group, c_, k = r.choices.shape
    return jnp.concatenate([r.prompt_choices, r.choices.reshape(layers, p_, group * c_, k)], 2)


def expert_metrics(loads: np.ndarray, base_loads: np.ndarray | None) -> dict:
    """From routed pairs [Ls, E] with the adapter, and without it where that was measured, of the same tokens."""
    if not loads.size:
        return {}
    share = lambda x: x / np.maximum(x.sum(-1, keepdims=True), 1)
    found = {"moe/load": share(loads).tolist(), "moe/load_max_over_mean": float(np.mean(share(loads).max(-1)) * loads.shape[1])}
    if base_loads is not None:
        # Both route the same pairs, so the counts compare as they are: equal loads give an exact 0.
        shift = np.abs(loads - base_loads).sum() / max(2 * loads.sum(), 1)
        found |= {"moe/base_load": share(base_loads).tolist(), "moe/load_shift_from_base": float(shift)}
    return found

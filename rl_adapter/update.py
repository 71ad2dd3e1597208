"""The update stage: one jitted step from a batch of completions to new adapter parameters.

The forward pass inside the gradient is the sampler's: its logprobs are compared with the sampled ones at every step.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from rl_adapter import lora, packing
from rl_adapter import loss as losses
from rl_adapter import mesh as meshes
from rl_adapter import model as models
from rl_adapter.types import Array, Base, PyTree, Rollout


@struct.dataclass
class State:
    """All that a run changes: saved whole, restored whole."""

    adapter: lora.Adapter
    optimizer: PyTree
    step: Array  # [] int32: updates done
    previous: lora.Adapter | None = None  # the adapter before the last step's updates, where `rollout.ahead` samples with it


def optimizer(cfg, updates: int) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101) with warm-up and decay over `updates`, from the config's `optimizer`."""
    peak, warm = cfg.learning_rate, cfg.warmup_steps
    rest = max(updates - warm, 1)
    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, 0.0, rest),
        "cosine": optax.cosine_decay_schedule(peak, rest),
    }[cfg.schedule]
    # The first update of a warm-up is already one step up: a rate of 0 would waste a rollout.
    schedule = optax.join_schedules([optax.linear_schedule(peak / (warm + 1), peak, warm), after], [warm]) if warm else after
    adamw = optax.adamw(schedule, b1=cfg.b1, b2=cfg.b2, eps=cfg.eps, weight_decay=cfg.weight_decay)
    return optax.chain(optax.clip_by_global_norm(cfg.max_grad_norm), adamw), schedule


def packed_inputs(r: Rollout) -> tuple[Array, Array, Array]:
    """Rows [P, T + G * C] of a prompt and its completions: tokens, positions, and which are fed to the model.

    A completion's last token predicts nothing, so it is not fed.
    """
    p_, t_ = r.prompts.shape
    g_, c_ = r.tokens.shape[1:]
    own = jnp.arange(c_)
    tokens = jnp.concatenate([r.prompts, r.tokens.reshape(p_, -1)], 1)
    positions = jnp.concatenate([jnp.broadcast_to(jnp.arange(t_), (p_, t_)), jnp.tile(r.prompt_lengths[:, None] + own, (1, g_))], 1)
    fed = (own < r.lengths[..., None] - 1).reshape(p_, -1)
    return tokens, positions, jnp.concatenate([jnp.arange(t_) < r.prompt_lengths[:, None], fed], 1)


@struct.dataclass
class Scores:
    """Of every completion token, [P, G, C]; and experts and router as `models.Output` has them, experts padded [Ls, P, T + G * C, k]."""

    tempered: Array
    scored: Array
    entropy: Array
    choices: Array
    router: Array


def score(model: models.Model, base: Base, adapter: lora.Adapter | None, r: Rollout, temperature: float = 1.0, size: int = 0) -> Scores:
    """Logprobs of every completion token by one forward pass over packed tokens, `size` on each row shard (0: room for all padding)."""
    tokens, positions, valid = packed_inputs(r)
    (p_, t_), (_, g_, c_) = r.prompts.shape, r.tokens.shape
    shards = 1 if model.mesh is None else meshes.row_shards(model.mesh)
    size = size or valid.size // shards
    packed = packing.pack(valid, size, shards)
    attention = models.packed(model.numeric, packed, r.prompt_lengths, t_, g_)
    out = models.apply(model, base, adapter, packed.flat(tokens), packed.flat(positions), packed.used, attention)
    # A completion token is told by what was fed before it: its own predecessor, or the prompt's last token.
    own = t_ + jnp.arange(g_ * c_).reshape(g_, c_) - 1
    before = jnp.where(jnp.arange(c_) > 0, own, (r.prompt_lengths - 1)[:, None, None])  # [P, G, C] in padded rows
    told = packing.pack(
        (jnp.arange(c_) < r.lengths[..., None]).reshape(p_, -1), min(size + p_ * g_ // shards, p_ * g_ * c_ // shards), shards
    )
    rows = jnp.arange(p_ // shards)[:, None] * (t_ + g_ * c_)
    fed = before.reshape(shards, p_ // shards, -1) + rows  # in the shard's padded tokens
    source = told.flat(jnp.take_along_axis(packed.place, fed.reshape(shards, -1), 1).reshape(p_, -1))
    hidden = jnp.take_along_axis(out.hidden, source[..., None], 1)
    targets = told.flat(r.tokens.reshape(p_, -1))
    logprobs = models.token_logprobs(model, base, adapter, hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1), temperature)
    padded = (told.spread(x.reshape(targets.shape)).reshape(p_, g_, c_) for x in logprobs)
    return Scores(*padded, packing.spread_choices(packed, out.choices), out.router)


def expert_loads(choices: Array, valid: Array, experts: int) -> Array:
    """Routed pairs of valid tokens: choices [L, P, M, k], valid [P, M] -> [L, E] f32."""
    layers = choices.shape[0]
    weight = jnp.broadcast_to(valid[None, ..., None], choices.shape).astype(jnp.float32)
    flat = choices.astype(jnp.int32) + experts * jnp.arange(layers)[:, None, None, None]
    return jnp.zeros(layers * experts, jnp.float32).at[flat.reshape(-1)].add(weight.reshape(-1)).reshape(layers, experts)


def _microbatch(model, base, cfg, temperature, size, adapter, r: Rollout, advantage: Array, tokens: Array):
    """Loss of some prompts as their share of an update over `tokens` drawn tokens, and sums for metrics."""
    mask = r.drawn
    s = score(model, base, lora.prepare(adapter, model.numeric), r, temperature, size)
    reference = ref = None
    if cfg.kl or cfg.measure_kl:
        ref = jax.lax.stop_gradient(score(model, base, None, r, 1.0, size))
        reference = ref.scored
    total, sums = losses.grpo(cfg, s.tempered, r.tempered_logprobs, s.scored, reference, advantage, mask)
    _, _, valid = packed_inputs(r)
    p_ = len(r.prompts)
    layers, _, group, c_, k = r.choices.shape
    sampled = jnp.concatenate([r.prompt_choices, r.choices.reshape(layers, p_, group * c_, k)], 2)
    gap = jnp.where(mask, jnp.abs(s.scored - r.scored_logprobs), 0.0)
    sums |= {
        "entropy": jnp.sum(jnp.where(mask, s.entropy, 0.0)),
        "mismatch/mean_abs_logprob_diff": jnp.sum(gap),
        "mismatch/expert_flips": jnp.sum((sampled != s.choices) & valid[None, ..., None]).astype(jnp.float32),
        "loads": expert_loads(s.choices, valid, model.spec.experts),
    }
    if ref is not None:
        sums["base_loads"] = expert_loads(ref.choices, valid, model.spec.experts)
    largest = {
        "mismatch/max_abs_logprob_diff": jnp.max(gap),
        "ratio/max": jnp.max(jnp.where(mask, jnp.exp(s.tempered - r.tempered_logprobs), 0.0)),
    }
    return total / tokens, jax.lax.stop_gradient((sums, largest))


@dataclasses.dataclass(frozen=True)
class Plan:
    """Microbatches of an update: which prompts go together, and how much room they have."""

    rows: np.ndarray  # [count, prompts] int32, prompts of the batch by microbatch; -1: none
    size: int  # packed tokens of a microbatch on each row shard
    padding: float  # share of the packed tokens that are none


def microbatch(prompts: int, t: int, group: int, c: int, tokens: int) -> tuple[int, int]:
    """Packed tokens, and prompts, of a microbatch on one row shard that has so many `prompts`. Both come from shapes alone, so no batch
    compiles anew. The longest prompt with its group fits, and three times as many prompts as if all were the longest; where `tokens` are
    asked for, memory is short, and it is twice as many: attention works on rows that are padded."""
    longest = t + group * (c - 1)
    size = min(max(longest, tokens or 2 * longest), prompts * longest)
    return size, min(prompts, -(-(2 if tokens else 3) * size // longest))


def plan(r: Rollout, shards: int, tokens: int = 0) -> Plan:
    """Distribute the prompts of a batch over microbatches of at most `tokens` tokens (0: twice the longest that a prompt with its group
    could be, on each row shard), so that few slots stay empty.

    First-fit decreasing (Johnson 1973), each row shard for itself.
    """
    (p_, t_), (_, g_, c_) = r.prompts.shape, r.tokens.shape
    here = p_ // shards
    size, most = microbatch(here, t_, g_, c_, -(-tokens // shards))
    used = np.asarray(r.prompt_lengths) + np.sum(np.asarray(r.lengths) - 1, 1)
    bins = [[] for _ in range(shards)]  # of each shard: lists of prompts
    for shard in range(shards):
        rows, room = bins[shard], []
        for p in sorted(range(shard * here, (shard + 1) * here), key=lambda p: -used[p]):
            at = next((i for i, left in enumerate(room) if left >= used[p] and len(rows[i]) < most), len(room))
            if at == len(room):
                rows.append([])
                room.append(size)
            rows[at].append(p)
            room[at] -= used[p]
    count = max(map(len, bins))
    out = np.full((count, shards, most), -1, np.int32)
    for shard, rows in enumerate(bins):
        for i, prompts in enumerate(rows):
            out[i, shard, : len(prompts)] = prompts
    return Plan(out.reshape(count, -1), size, float(1 - used.sum() / (count * shards * size)))


@functools.partial(jax.jit, static_argnames=("model", "tx", "cfg", "temperature", "size"), donate_argnames=("state",))
def _update(
    model: models.Model, tx: optax.GradientTransformation, cfg: losses.GRPO, temperature: float, size: int, base: Base, state: State,
    r: Rollout, advantage: Array, rows: Array, count: Array,
) -> tuple[State, dict[str, Array]]:  # fmt: skip
    """`rows` [P, prompts]: prompts of each microbatch, of which the first `count` hold. The loop's length is no part of the program."""
    tokens = jnp.maximum(jnp.sum(r.drawn), 1).astype(jnp.float32)
    objective = jax.value_and_grad(functools.partial(_microbatch, model, base, cfg, temperature, size), has_aux=True)

    def microbatch(i):
        some = take(r.replace(stopped=None, sampled_logprobs=None), jnp.maximum(rows[i], 0))  # which nobody reads
        there = rows[i] >= 0
        some = some.replace(
            prompt_lengths=jnp.where(there, some.prompt_lengths, 0),
            lengths=jnp.where(there[:, None], some.lengths, 0),
            drawn=some.drawn & there[:, None, None],
        )
        if model.mesh is not None:
            behind = NamedSharding(model.mesh, P(None, meshes.ROWS))
            put = lambda x: jax.lax.with_sharding_constraint(
                x, behind if x is some.choices or x is some.prompt_choices else meshes.rows(model.mesh)
            )
            some = jax.tree.map(put, some)
        return objective(state.adapter, some, advantage[jnp.maximum(rows[i], 0)], tokens)

    def part(i, carry):
        (value, (sums, largest)), grads = microbatch(i)
        total, total_sums, top, total_grads = carry
        add = functools.partial(jax.tree.map, jnp.add)
        return total + value, add(total_sums, sums), jax.tree.map(jnp.maximum, top, largest), add(total_grads, grads)

    zeros = functools.partial(jax.tree.map, lambda s: jnp.zeros(s.shape, s.dtype))
    (value, (sums, largest)), grads = zeros(jax.eval_shape(microbatch, 0))
    value, sums, largest, grads = jax.lax.fori_loop(0, count, part, (value, sums, largest, grads))
    updates, optimizer_state = tx.update(grads, state.optimizer, state.adapter)
    new = State(optax.apply_updates(state.adapter, updates), optimizer_state, state.step + 1, state.previous)
    loads, base_loads = sums.pop("loads"), sums.pop("base_loads", None)
    share = lambda x: x / jnp.maximum(jnp.sum(x, -1, keepdims=True), 1)
    flips = sums.pop("mismatch/expert_flips")
    metrics = {name: x / tokens for name, x in sums.items()} | largest
    metrics |= {
        "loss": value,
        "grad_norm": optax.tree.norm(grads),
        "mismatch/expert_flips": flips,
    }
    if model.spec.sparse_layers:
        metrics |= {
            "moe/load": share(loads),
            "moe/load_max_over_mean": jnp.mean(jnp.max(share(loads), -1)) * model.spec.experts,
        }
        if base_loads is not None:
            # Both route the same pairs, so the counts compare as they are: equal loads give an exact 0.
            shift = jnp.sum(jnp.abs(loads - base_loads)) / jnp.maximum(2 * jnp.sum(loads), 1)
            metrics |= {"moe/base_load": share(base_loads), "moe/load_shift_from_base": shift}
    return new, metrics


def update(
    model: models.Model, tx: optax.GradientTransformation, cfg: losses.GRPO, temperature: float, tokens: int, base: Base, state: State,
    r: Rollout, advantage: Array,
) -> tuple[State, dict[str, Array]]:  # fmt: skip
    """One optimizer update on completions `r` with `advantage` [P, G], in microbatches of about `tokens` (see `plan`).

    The loss is the mean over all drawn tokens of the update, so that it does not depend on how they are split.
    """
    planned = plan(
        jax.device_get(r.replace(prompt_choices=None, choices=None)), 1 if model.mesh is None else meshes.row_shards(model.mesh), tokens
    )
    rows = np.full((len(r.prompts), planned.rows.shape[1]), -1, np.int32)
    rows[: len(planned.rows)] = planned.rows
    new, metrics = _update(model, tx, cfg, temperature, planned.size, base, state, r, advantage, rows, np.int32(len(planned.rows)))
    return new, metrics | {"update/padding": planned.padding, "update/microbatches": len(planned.rows)}


def take(r: Rollout, prompts: Array | slice) -> Rollout:
    """The completions of some prompts; the experts' arrays have layers in front."""
    rest = jax.tree.map(lambda x: x[prompts], r.replace(prompt_choices=None, choices=None))
    return rest.replace(prompt_choices=r.prompt_choices[:, prompts], choices=r.choices[:, prompts])

"""The update stage: one jitted step from a batch of completions to new adapter parameters.

The forward pass inside the gradient is the sampler's: its logprobs are compared with the sampled ones at every step.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import struct

from rl_adapter import lora
from rl_adapter import loss as losses
from rl_adapter import model as models
from rl_adapter.types import Array, Base, PyTree, Rollout


@struct.dataclass
class State:
    """All that a run changes: saved whole, restored whole."""

    adapter: lora.Adapter
    optimizer: PyTree
    step: Array  # [] int32: updates done


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


def score(model: models.Model, base: Base, adapter: lora.Adapter | None, r: Rollout, temperature: float = 1.0):
    """Logprobs of every completion token by one forward pass over packed rows.

    Returns:
        (tempered, scored, entropy) each [P, G, C], and the model's Output.
    """
    tokens, positions, valid = packed_inputs(r)
    (p_, t_), (_, g_, c_) = r.prompts.shape, r.tokens.shape
    out = models.apply(model, base, adapter, tokens, positions, valid, models.packed(model.numeric, r.prompt_lengths, t_, g_))
    last = jnp.take_along_axis(out.hidden, (r.prompt_lengths - 1)[:, None, None], 1)[:, None]
    own = out.hidden[:, t_:].reshape(p_, g_, c_, -1)[:, :, :-1]
    hidden = jnp.concatenate([jnp.broadcast_to(last, (p_, g_, *last.shape[2:])), own], 2)
    logprobs = models.token_logprobs(model, base, adapter, hidden.reshape(p_ * g_ * c_, -1), r.tokens.reshape(-1), temperature)
    return tuple(x.reshape(p_, g_, c_) for x in logprobs), out


def expert_loads(choices: Array, valid: Array, experts: int) -> Array:
    """Routed pairs of valid tokens: choices [L, P, M, k], valid [P, M] -> [L, E] f32."""
    layers = choices.shape[0]
    weight = jnp.broadcast_to(valid[None, ..., None], choices.shape).astype(jnp.float32)
    flat = choices.astype(jnp.int32) + experts * jnp.arange(layers)[:, None, None, None]
    return jnp.zeros(layers * experts, jnp.float32).at[flat.reshape(-1)].add(weight.reshape(-1)).reshape(layers, experts)


def _microbatch(model, base, cfg, temperature, adapter, r: Rollout, advantage: Array, tokens: Array):
    """Loss of some prompts as their share of an update over `tokens` completion tokens, and sums for metrics."""
    mask = jnp.arange(r.tokens.shape[-1]) < r.lengths[..., None]
    (tempered, scored, entropy), out = score(model, base, lora.prepare(adapter, model.numeric), r, temperature)
    reference = ref = None
    if cfg.kl or cfg.measure_kl:
        (_, reference, _), ref = jax.lax.stop_gradient(score(model, base, None, r, 1.0))
    total, sums = losses.grpo(cfg, tempered, r.tempered_logprobs, scored, reference, advantage, mask)
    _, _, valid = packed_inputs(r)
    p_, t_ = r.prompts.shape
    layers, _, group, c_, k = r.choices.shape
    sampled = jnp.concatenate([r.prompt_choices, r.choices.reshape(layers, p_, group * c_, k)], 2)
    gap = jnp.where(mask, jnp.abs(scored - r.scored_logprobs), 0.0)
    sums |= {
        "entropy": jnp.sum(jnp.where(mask, entropy, 0.0)),
        "mismatch/mean_abs_logprob_diff": jnp.sum(gap),
        "mismatch/expert_flips": jnp.sum((sampled != out.choices) & valid[None, ..., None]).astype(jnp.float32),
        "loads": expert_loads(out.choices, valid, model.spec.experts),
    }
    if ref is not None:
        sums["base_loads"] = expert_loads(ref.choices, valid, model.spec.experts)
    largest = {
        "mismatch/max_abs_logprob_diff": jnp.max(gap),
        "ratio/max": jnp.max(jnp.where(mask, jnp.exp(tempered - r.tempered_logprobs), 0.0)),
    }
    return total / tokens, jax.lax.stop_gradient((sums, largest))


@functools.partial(jax.jit, static_argnames=("model", "tx", "cfg", "temperature", "accumulate"), donate_argnames=("state",))
def update(
    model: models.Model, tx: optax.GradientTransformation, cfg: losses.GRPO, temperature: float, accumulate: int, base: Base, state: State,
    r: Rollout, advantage: Array,
) -> tuple[State, dict[str, Array]]:  # fmt: skip
    """One optimizer update on completions `r` with `advantage` [P, G], `accumulate` microbatches of prompts at a time.

    The loss is the mean over all completion tokens of the update, so that it does not depend on `accumulate`.
    """
    tokens = jnp.maximum(jnp.sum(r.lengths), 1).astype(jnp.float32)
    r_parts = _split(r, accumulate)
    objective = jax.value_and_grad(functools.partial(_microbatch, model, base, cfg, temperature), has_aux=True)

    def part(carry, inputs):
        (value, (sums, largest)), grads = objective(state.adapter, *inputs, tokens)
        total, total_sums, top, total_grads = carry
        add = functools.partial(jax.tree.map, jnp.add)
        return (total + value, add(total_sums, sums), jax.tree.map(jnp.maximum, top, largest), add(total_grads, grads)), None

    inputs = (r_parts, advantage.reshape(accumulate, -1, advantage.shape[1]))
    shapes = jax.eval_shape(objective, state.adapter, *jax.tree.map(lambda x: x[0], inputs), tokens)
    zeros = functools.partial(jax.tree.map, lambda s: jnp.zeros(s.shape, s.dtype))
    (value, (sums, largest)), grads = zeros(shapes)
    if accumulate == 1:
        (value, sums, largest, grads), _ = part((value, sums, largest, grads), jax.tree.map(lambda x: x[0], inputs))
    else:
        (value, sums, largest, grads), _ = jax.lax.scan(part, (value, sums, largest, grads), inputs)
    updates, optimizer_state = tx.update(grads, state.optimizer, state.adapter)
    new = State(optax.apply_updates(state.adapter, updates), optimizer_state, state.step + 1)
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


def _split(r: Rollout, parts: int) -> Rollout:
    """Along prompts into [parts, ...]; the experts' arrays have layers in front."""
    front = lambda x: x.reshape(parts, -1, *x.shape[1:])
    behind = lambda x: jnp.moveaxis(x.reshape(x.shape[0], parts, x.shape[1] // parts, *x.shape[2:]), 1, 0)  # no -1: layers may be 0
    split = jax.tree.map(front, r.replace(prompt_choices=None, choices=None))
    return split.replace(prompt_choices=behind(r.prompt_choices), choices=behind(r.choices))


def take(r: Rollout, start: int, count: int) -> Rollout:
    """The completions of `count` prompts from `start`."""
    rows = slice(start, start + count)
    rest = jax.tree.map(lambda x: x[rows], r.replace(prompt_choices=None, choices=None))
    return rest.replace(prompt_choices=r.prompt_choices[:, rows], choices=r.choices[:, rows])

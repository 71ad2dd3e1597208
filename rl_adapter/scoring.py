"""Scoring: log-probabilities of given completions by one forward pass, the sampler's own.

`score` is what a gradient goes through; `score_all` runs it over a whole batch, for whoever needs the numbers before an update: the
reference's, those of the policy at the start of a step, a critic's.
"""

import jax.numpy as jnp
import numpy as np
from flax import struct

from rl_adapter import lora, microbatch, packing, programs
from rl_adapter import mesh as meshes
from rl_adapter import model as models
from rl_adapter.types import Array, Base, Rollout


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
    """Of every completion token, [P, G, C]; and of the experts, padded [Ls, P, T + G * C, k]."""

    tempered: Array
    scored: Array
    entropy: Array
    choices: Array
    router: Array  # [Ls, E], sums over tokens: router probabilities
    router_z: Array  # [Ls], sums over tokens: squared log-sum-exp of the router's logits


@struct.dataclass
class Seen:
    """The state before each completion token: packed rows [shards, N, D], and where they belong."""

    hidden: Array
    told: packing.Packing
    output: models.Output
    fed: packing.Packing


def before_tokens(model: models.Model, base: Base, adapter: lora.Adapter | None, r: Rollout, size: int = 0) -> Seen:
    """One forward pass over packed tokens, `size` on each row shard (0: room for all padding)."""
    tokens, positions, valid = packed_inputs(r)
    (p_, t_), (_, g_, c_) = r.prompts.shape, r.tokens.shape
    shards = meshes.row_shards(model.mesh)
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
    return Seen(jnp.take_along_axis(out.hidden, source[..., None], 1), told, out, packed)


def score(
    model: models.Model, base: Base, adapter: lora.Adapter | None, r: Rollout, temperature: float = 1.0, size: int = 0,
    entropy_gradient: bool = False,
) -> Scores:  # fmt: skip
    """Logprobs of every completion token at `temperature` and at 1; the entropy is differentiated only where asked for."""
    seen = before_tokens(model, base, adapter, r, size)
    p_, (g_, c_) = len(r.prompts), r.tokens.shape[1:]
    targets = seen.told.flat(r.tokens.reshape(p_, -1))
    hidden = seen.hidden.reshape(-1, seen.hidden.shape[-1])
    logprobs = models.token_logprobs(model, base, adapter, hidden, targets.reshape(-1), temperature, entropy_gradient=entropy_gradient)
    padded = (seen.told.spread(x.reshape(targets.shape)).reshape(p_, g_, c_) for x in logprobs)
    out = seen.output
    return Scores(*padded, packing.spread_choices(seen.fed, out.choices), out.router, out.router_z)


def expert_loads(choices: Array, valid: Array, experts: int) -> Array:
    """Routed pairs of valid tokens: choices [L, P, M, k], valid [P, M] -> [L, E] f32."""
    layers = choices.shape[0]
    weight = jnp.broadcast_to(valid[None, ..., None], choices.shape).astype(jnp.float32)
    flat = choices.astype(jnp.int32) + experts * jnp.arange(layers)[:, None, None, None]
    return jnp.zeros(layers * experts, jnp.float32).at[flat.reshape(-1)].add(weight.reshape(-1)).reshape(layers, experts)


@struct.dataclass
class Logprobs:
    """Of a batch: [P, G, C] f32, and pairs that each expert got, [Ls, E] f32."""

    tempered: Array
    scored: Array
    loads: Array


@programs.jit(static_argnames=("model", "temperature", "size"))
def _score_all(model, temperature: float, size: int, base: Base, adapter: lora.Adapter | None, r: Rollout, rows: Array, count: Array):
    prepared = lora.prepare(adapter, model.numeric)

    def of_part(some):
        some = microbatch.part(r, some, model.mesh)
        s = score(model, base, prepared, some, temperature, size)
        return (s.tempered, s.scored), expert_loads(s.choices, packed_inputs(some)[2], model.spec.experts)

    (tempered, scored), loads = microbatch.by_prompt(of_part, len(r.prompts), rows, count)
    return Logprobs(tempered, scored, loads)


def score_all(
    model: models.Model, base: Base, adapter: lora.Adapter | None, r: Rollout, temperature: float = 1.0, tokens: int = 0
) -> Logprobs:
    """`score` of a whole batch on the device, in microbatches of about `tokens`, without gradients. `adapter` is raw; None: the base."""
    planned = plan(model, r, tokens)
    return _score_all(model, temperature, planned.size, base, adapter, texts(r), planned.rows, np.int32(planned.count))


def texts(r: Rollout) -> Rollout:
    """What a forward pass reads of completions."""
    return r.replace(stopped=None, sampled_logprobs=None, tempered_logprobs=None, scored_logprobs=None, prompt_choices=None, choices=None)


def plan(model: models.Model, r: Rollout, tokens: int) -> microbatch.Plan:
    """`microbatch.plan` of completions that may lie on devices."""
    lengths = texts(r).replace(prompt_lengths=np.asarray(r.prompt_lengths), lengths=np.asarray(r.lengths))
    return microbatch.plan(lengths, meshes.row_shards(model.mesh), tokens)

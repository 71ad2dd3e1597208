"""The rollout stage: a jitted sampler on the same `apply` as training.

A prompt is prefilled once, and its keys are shared by its group. Each completion then decodes into a cache of its own, one token of
all completions a step, until every one has met a stop token or the longest allowed length is reached.

Randomness is keyed by (seed, prompt, sample, position), so a completion depends on nothing else: not on batch, row, or mesh.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from rl_adapter import model as models
from rl_adapter import numerics
from rl_adapter.types import Array, Base, Rollout

MASKED = -1e30


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Static settings of a sampler. temperature 0 is greedy."""

    group: int  # completions of a prompt
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    pad_id: int
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off

    def __post_init__(self):
        if self.temperature < 0:
            raise ValueError(f"rollout.temperature: found {self.temperature}, need 0 (greedy) or more")


def bucket(length: int, limit: int, smallest: int = 16) -> int:
    """The padded length that serves `length`: a power of two from `smallest`, at most `limit`. Few lengths, few compilations."""
    size = smallest
    while size < length:
        size *= 2
    return min(size, limit)


def uniform(keys: Array, n: int) -> Array:
    """Uniform numbers in (0, 1), [..., n], one stream a key; exactly representable, so that no rounding is left to a device."""
    bits = jax.vmap(lambda key: jax.random.bits(key, (n,), jnp.uint32))(keys.reshape(-1))
    return (((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23).reshape(*keys.shape, n)


def row_keys(seed: Array, prompt_ids: Array, group: int, position: Array) -> Array:
    """Keys [P, G] of the tokens at `position` of each completion. Prompts, unlike rows, have an identity: their id."""
    base = jax.random.key(seed)
    of_row = lambda p, g: jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(base, p), g), position)
    return jax.vmap(lambda p: jax.vmap(lambda g: of_row(p, g))(jnp.arange(group)))(prompt_ids)


def truncate(z: Array, top_k: int, top_p: float) -> Array:
    """Mask all but the top_k logits, then all but the fewest that hold top_p of the probability (Holtzman et al. 2019, arXiv:1904.09751).

    Ties with the last one kept are kept. Cumulative probabilities add as integers.
    """
    if 0 < top_k < z.shape[-1]:
        z = jnp.where(z < jax.lax.top_k(z, top_k)[0][..., -1:], MASKED, z)
    if top_p < 1:
        ordered = jax.lax.top_k(z, z.shape[-1])[0]
        p = numerics.exp(ordered - ordered[..., :1])
        p = jnp.round(numerics.divide_rows(p, numerics.exact_sum(p)) * 2.0**24).astype(jnp.int32)
        before = jnp.cumsum(p, -1) - p
        kept = before < jnp.int32(max(1, round(top_p * 2.0**24)))  # the likeliest token is always kept
        z = jnp.where(z < jnp.min(jnp.where(kept, ordered, jnp.inf), -1, keepdims=True), MASKED, z)
    return z


def sample(z: Array, keys: Array, s: Sampling, exact: bool) -> tuple[Array, Array, Array, Array]:
    """Draw a token from logits z [N, V] (Gumbel-max) with keys [N]: token, and its sampled, tempered and scored logprob, each [N]."""
    if s.temperature == 0:
        token = jnp.argmax(z, -1).astype(jnp.int32)
        scored = models.logprob_of(z, token, exact)
        return token, jnp.zeros_like(scored), scored, scored
    tempered = z if s.temperature == 1 else numerics.fence(z * (1 / s.temperature))
    kept = truncate(tempered, s.top_k, s.top_p)
    gumbel = -numerics.log(-numerics.log(uniform(keys, z.shape[-1])))
    token = jnp.argmax(kept + gumbel, -1).astype(jnp.int32)
    scored = models.logprob_of(z, token, exact)
    at_temperature = scored if s.temperature == 1 else models.logprob_of(tempered, token, exact)
    sampled = at_temperature if kept is tempered else models.logprob_of(kept, token, exact)
    return token, sampled, at_temperature, scored


@functools.partial(jax.jit, static_argnames=("model", "sampling"))
def generate(
    model: models.Model,
    sampling: Sampling,
    base: Base,
    adapter: dict | None,
    prompts: Array,
    lengths: Array,
    prompt_ids: Array,
    seed: Array,
) -> Rollout:
    """Complete prompts [P, T] of `lengths` [P], `sampling.group` times each.

    Args:
        adapter: from `lora.prepare`, or None.
        prompt_ids: [P] int32, identity of each prompt for its randomness.
        seed: int32 scalar; another one gives other completions of the same prompts.
    """
    spec, numeric = model.spec, model.numeric
    (p_, t_), g_, c_ = prompts.shape, sampling.group, sampling.max_new_tokens
    stops = jnp.array(sampling.stop_ids, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(t_), (p_, t_))
    first = models.apply(model, base, adapter, prompts, positions, positions < lengths[:, None], models.prefill(numeric, lengths))
    cache = models.Cache(first.keys, models.keys_like(model, p_, g_, c_))
    last = jnp.take_along_axis(first.hidden, (lengths - 1)[:, None, None], 1)[:, 0]
    z = jnp.repeat(models.logits(model, base, adapter, last), g_, 0)  # [P * G, V]

    def draw(z, t, live):
        keys = row_keys(seed, prompt_ids, g_, t).reshape(-1)
        token, *logprobs = sample(z, keys, sampling, numeric.exact)
        shape = lambda x: x.reshape(p_, g_)
        token = jnp.where(live, shape(token), sampling.pad_id)
        return token, [jnp.where(live, shape(x), 0.0) for x in logprobs], live & ~jnp.isin(token, stops)

    live = jnp.ones((p_, g_), bool)
    token, logprobs, going = draw(z, jnp.int32(0), live)
    put = lambda buffer, x, t: jax.lax.dynamic_update_slice_in_dim(buffer, x[..., None], t, -1)
    buffers = [put(jnp.full((p_, g_, c_), fill, x.dtype), x, 0) for x, fill in zip([token, *logprobs], (sampling.pad_id, 0.0, 0.0, 0.0))]
    choices = jnp.zeros((c_, spec.sparse_layers, p_, g_, spec.experts_per_token), jnp.int16)

    def more(state):
        return (state[0] + 1 < c_) & jnp.any(state[2])

    def step(state):
        t, token, going, counts, buffers, choices, cache = state
        at = jnp.broadcast_to(lengths[:, None] + t, (p_, g_))
        out = models.apply(model, base, adapter, token, at, going, models.decode(numeric, lengths, t), cache)
        z = models.logits(model, base, adapter, out.hidden.reshape(p_ * g_, -1))
        choices = jax.lax.dynamic_update_slice_in_dim(choices, out.choices.astype(jnp.int16)[None], t, 0)
        token, logprobs, still = draw(z, t + 1, going)
        buffers = [put(b, x, t + 1) for b, x in zip(buffers, [token, *logprobs])]
        return t + 1, token, still, counts + going, buffers, choices, out.keys

    state = (jnp.int32(0), token, going, jnp.ones((p_, g_), jnp.int32), buffers, choices, cache)
    _, _, going, counts, buffers, choices, _ = jax.lax.while_loop(more, step, state)
    tokens, sampled, tempered, scored = buffers
    return Rollout(
        prompts, lengths, tokens, counts, ~going, sampled, tempered, scored,
        first.choices.astype(jnp.int16), jnp.moveaxis(choices, 0, 3),
    )  # fmt: skip


def completions(r: Rollout) -> list[list[int]]:
    """Token ids of each completion, without padding, in the order P, G."""
    tokens, lengths = jax.device_get((r.tokens, r.lengths))
    return [row[:n].tolist() for row, n in zip(tokens.reshape(-1, tokens.shape[-1]), lengths.reshape(-1))]

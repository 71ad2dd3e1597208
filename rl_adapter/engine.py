"""The rollout engine's sizes, and its two programs of static shapes, on the same `apply` as training.

    prefill   chunks of text into pages of the cache, and the first token after them for every completion of a prompt
    decode    some tokens of every slot, in one loop on the device: no host in between

Who gets which slot and page is `scheduler`'s business.
"""

import dataclasses

import jax
import jax.numpy as jnp

from rl_adapter import cache, packing, programs
from rl_adapter import model as models
from rl_adapter import sampling as sampling_
from rl_adapter.attention import Keys
from rl_adapter.lora import Adapter
from rl_adapter.sampling import Sampling
from rl_adapter.types import Array, Base


@dataclasses.dataclass(frozen=True)
class Engine:
    """How completions are batched: what it costs, never what comes out."""

    slots: int = 0  # completions decoded at a time; 0: all
    lanes: int = 0  # slots that share one prompt's keys, and take its completions only; 0: the group where all have a slot, else 1
    steps: int = 16  # tokens of a slot that are decoded in one dispatch, at most
    page: int = 16  # tokens of a page of the cache
    chunk: int = 256  # tokens of a prompt that are prefilled at a time
    prefill: int = 16  # prompts that are prefilled at a time, on each row shard
    cache_tokens: int = 0  # tokens that the cache holds, on each row shard; 0: as many as the slots may need

    def __post_init__(self):
        for name, least in {"steps": 1, "page": 1, "chunk": 1, "prefill": 1, "slots": 0, "lanes": 0, "cache_tokens": 0}.items():
            if getattr(self, name) < least:
                raise ValueError(f"rollout.{name}: found {getattr(self, name)}, need at least {least}")


def from_config(c) -> Engine:
    """From the `rollout` section of a config."""
    return Engine(c.slots, c.lanes, c.steps, c.page, c.chunk, c.prefill, c.cache_tokens)


@dataclasses.dataclass(frozen=True)
class Layout:
    """What an `Engine` comes to for a batch: the sizes of everything, all over `shards` row shards."""

    shards: int
    tiles: int  # rows of slots; each row has the completions of one prompt at a time
    lanes: int
    steps: int
    page: int
    prompt_pages: int  # of a prompt at most
    own_pages: int  # of a completion at most
    chunk: int  # tokens
    prefill: int  # prompts
    budget: int  # tokens that are prefilled at a time on a shard
    pages: int  # of a shard's pool, the first being trash


def layout(engine: Engine, shards: int, prompts: int, t: int, sampling: Sampling) -> Layout:
    """For `prompts` of at most `t` tokens. Raises where the cache cannot hold a single completion."""
    group, c = sampling.group, sampling.max_new_tokens
    page, steps = min(engine.page, max(t, c)), min(engine.steps, max(1, c - 1))
    slots = min(engine.slots or prompts * group, prompts * group)
    lanes = min(engine.lanes or (group if slots >= prompts * group else 1), group)
    tiles = -(-slots // (lanes * shards)) * shards
    prompt_pages, own_pages = -(-t // page), -(-c // page)
    chunk = min(engine.chunk, t)
    prefill = min(engine.prefill, -(-prompts // shards))
    # Prompts differ in length: with room for all padding, half of the work would often be padding. Little work is not worth a second call.
    budget = min(prefill * chunk, max(chunk, prefill * chunk // 2, 512))
    here = tiles // shards
    enough = 1 + min(here + prefill, -(-prompts // shards)) * prompt_pages + here * lanes * own_pages
    least = 1 + prompt_pages + own_pages
    pages = engine.cache_tokens // page if engine.cache_tokens else enough
    if pages < least:
        need = f"at least {least * page}: one prompt of {t} tokens and one completion of {c}, in pages of {page}"
        raise ValueError(f"rollout.cache_tokens: found {engine.cache_tokens}, need {need}")
    return Layout(shards, tiles, lanes, steps, page, prompt_pages, own_pages, chunk, prefill * shards, budget, min(pages, enough))


def cache_like(model: models.Model, lay: Layout) -> Keys:
    """Shapes of the pool."""
    one_page = jax.eval_shape(lambda: models.keys_like(model, 1, 1, lay.page))
    return cache.pool_like(one_page, lay.shards, lay.pages)


def cache_bytes(model: models.Model, lay: Layout) -> int:
    """Of the pool on one row shard, whose devices hold a share each where heads are split over them."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache_like(model, lay))) // lay.shards


@programs.jit(static_argnames=("model", "sampling", "budget"), donate_argnames=("pool",))
def prefill(
    model: models.Model,
    sampling: Sampling,
    budget: int,
    base: Base,
    adapter: Adapter | None,
    pool: Keys,
    chunk: dict[str, Array],
    before: tuple[cache.Table, ...],
    seed: Array,
) -> tuple[Keys, dict[str, Array]]:
    """Chunks of text into the cache, and the token after each for all samples of its prompt (which means something after the last chunk).

    Args:
        chunk: tokens, page and slot [P, T]; lengths, start (position) and ids [P]; samples and drawn (tokens so far) [P, G].
        before: contexts of each, pages [P, n].

    Returns:
        The pool; tokens and logprobs (sampled, tempered, scored) [P, G] and choices [Ls, P, T, k].
    """
    tokens, lengths, start = chunk["tokens"], chunk["lengths"], chunk["start"]
    (p_, t_), g_ = tokens.shape, chunk["samples"].shape[1]
    packed = packing.pack(jnp.arange(t_) < lengths[:, None], budget, len(pool.k))
    positions = start[:, None] + jnp.arange(t_)
    attention = models.prefill_chunk(model.numeric, packed, pool, before, start, lengths)
    out = models.apply(model, base, adapter, packed.flat(tokens), packed.flat(positions), packed.used, attention)
    pool = cache.write(pool, out.keys, chunk["page"], chunk["slot"])
    last = jnp.take_along_axis(packed.spread(out.hidden), jnp.maximum(lengths - 1, 0)[:, None, None], 1)[:, 0]
    z = models.logits(model, base, adapter, last)
    keys = sampling_.row_keys(seed, jnp.repeat(chunk["ids"], g_), chunk["samples"].reshape(-1), chunk["drawn"].reshape(-1))
    drawn = sampling_.sample(z, keys.reshape(p_, g_), sampling, model.numeric.exact, len(pool.k))
    choices = packing.spread_choices(packed, out.choices).astype(jnp.int16)
    return pool, {"tokens": drawn[0], "logprobs": jnp.stack(drawn[1:], -1), "choices": choices}


@programs.jit(static_argnames=("model", "sampling", "steps"), donate_argnames=("pool",))
def decode(
    model: models.Model,
    sampling: Sampling,
    steps: int,
    base: Base,
    adapter: Adapter | None,
    pool: Keys,
    rows: dict[str, Array],
    prompts: cache.Table,
    own: cache.Table,
    enough: Array,
    seed: Array,
) -> tuple[Keys, dict[str, Array]]:
    """Decode up to `steps` tokens of every slot, until `enough` completions have ended, or all.

    Args:
        rows: [P, G] each: token (the last one drawn), drawn (tokens so far), limit, live, ids, samples.
        prompts, own: pages [P, n] of what the rows of P share, and [P, G, n] of each completion; with room for `steps` more tokens.

    Returns:
        The pool; what was drawn, [steps, P, G] each and choices [steps, Ls, P, G, k], of which the first `steps` hold; `live`: the slot
        was at work.
    """
    numeric, spec = model.numeric, model.spec
    p_, g_ = rows["token"].shape
    stops = jnp.array(sampling.stop_ids, jnp.int32)
    flat = lambda x: x.reshape(-1)
    at_work = jnp.sum(rows["live"])

    def more(state):
        step, _, live, _, _ = state
        left = jnp.sum(live)
        return (step < steps) & (left > 0) & (at_work - left < enough)

    def body(state):
        step, token, live, out, pool = state
        so_far = own.replace(length=own.length + step)
        attention = models.decode(numeric, prompts, so_far, live)
        result = models.apply(model, base, adapter, token, own.first + so_far.length, live, attention, pool)
        z = models.logits(model, base, adapter, result.hidden.reshape(p_ * g_, -1))
        drawn = rows["drawn"] + step
        keys = sampling_.row_keys(seed, flat(rows["ids"]), flat(rows["samples"]), flat(drawn))
        token, *logprobs = (x.reshape(p_, g_) for x in sampling_.sample(z, keys[:, None], sampling, numeric.exact, len(pool.k)))
        new = {"tokens": token, "logprobs": jnp.stack(logprobs, -1), "choices": result.choices.astype(jnp.int16), "live": live}
        out = jax.tree.map(lambda buffer, x: jax.lax.dynamic_update_index_in_dim(buffer, x, step, 0), out, new)
        return step + 1, token, live & ~jnp.isin(token, stops) & (drawn + 1 < rows["limit"]), out, result.keys

    buffer = lambda shape, dtype: jnp.zeros((steps, *shape), dtype)
    out = {
        "tokens": buffer((p_, g_), jnp.int32),
        "logprobs": buffer((p_, g_, 3), jnp.float32),
        "choices": buffer((spec.sparse_layers, p_, g_, spec.experts_per_token), jnp.int16),
        "live": buffer((p_, g_), bool),
    }
    done, _, _, out, pool = jax.lax.while_loop(more, body, (jnp.int32(0), rows["token"], rows["live"], out, pool))
    return pool, out | {"steps": done}

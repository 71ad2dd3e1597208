"""The rollout stage: prompts -> completions, by continuous batching.

A fixed number of slots decodes; between two dispatches a slot whose completion has ended takes the next one, without recompiling. A
prompt is prefilled once, in chunks, and its pages are shared by its group. A conversation keeps its pages between turns.
"""

import collections
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from rl_adapter import engine as engines
from rl_adapter import mesh as meshes
from rl_adapter import microbatch
from rl_adapter import model as models
from rl_adapter.engine import Engine
from rl_adapter.lora import Adapter
from rl_adapter.sampling import Sampling
from rl_adapter.scheduler import Completion, Respond, Scheduler
from rl_adapter.types import Array, Base, Rollout

DEFAULT = Engine()


def bucket(length: int, limit: int, smallest: int = 16) -> int:
    """The padded length that serves `length`: a power of two from `smallest`, at most `limit`. Few lengths, few compilations."""
    size = smallest
    while size < length:
        size *= 2
    return min(size, limit)


def stream(
    model: models.Model,
    sampling: Sampling,
    base: Base,
    adapter: Adapter | None,
    prompts: Sequence[np.ndarray],
    ids: Sequence[int],
    seed: int,
    engine: Engine = DEFAULT,
    limits: np.ndarray | None = None,
    respond: Respond | None = None,
    counts: collections.Counter | None = None,
    longest: int = 0,
) -> Iterator[Completion]:
    """Complete `prompts` (token ids of each), `sampling.group` times each; yields what is finished while the device decodes the rest.

    Args:
        adapter: from `lora.prepare`, or None.
        ids: int32 identity of each prompt for its randomness.
        seed: int32; another one gives other completions of the same prompts.
        limits: [P, G] most tokens of each completion; default: `sampling.max_new_tokens`, which bounds them.
        respond: what an environment adds after a completion has stopped; its pages stay.
        counts: gets the engine's work added: `dispatches`, `prefills`, `slot_steps` (slots x steps), of which `decoded` had a
            completion, `prefill_room` (tokens), of which `prefilled` held one.
        longest: tokens of a prompt, at most, that programs are made for, so that batches share them; 0: of these prompts.

    Raises:
        ValueError: a limit or the cache's size is out of range; before anything compiles.
    """
    limits = _checked(model, sampling, base, prompts, ids, seed, limits)
    shards = meshes.row_shards(model.mesh)
    lay = engines.layout(engine, shards, len(prompts), max(longest, *map(len, prompts)), sampling)
    counts = collections.Counter() if counts is None else counts
    work = Scheduler(model, sampling, lay, base, adapter, prompts, ids, seed, limits, respond, counts)
    work.admit()
    while True:
        out = work.dispatch()
        finished, work.done = work.done, []
        yield from finished
        if out is None:
            if work.queue or work.prefilling or any(work.ready):
                raise RuntimeError("rollout: completions are waiting, and none can start: a fault of the scheduler")
            return
        work.collect(out)
        work.admit()


def _checked(model, sampling, base, prompts, ids, seed, limits) -> np.ndarray:
    """The limits, once all is checked."""
    if not len(prompts) or not all(map(len, prompts)):
        raise ValueError("prompts: found none, or one of no token, need at least one of at least one")
    if len(ids) != len(prompts) or not all(0 <= i < 2**31 for i in (*ids, seed)):
        raise ValueError(f"ids: found {len(ids)} for {len(prompts)} prompts, need one a prompt; ids, and seed, in 0 .. 2^31 - 1")
    low, high = min(int(np.min(p)) for p in prompts), max(int(np.max(p)) for p in prompts)
    if low < 0 or high >= model.spec.vocab:
        raise ValueError(f"prompts: found token ids {low} .. {high}, need 0 .. {model.spec.vocab - 1}")
    context = max(map(len, prompts)) + sampling.max_new_tokens
    if base is not None and base.rope is not None and context > len(base.rope[0]):
        raise ValueError(f"prompts: found {context} tokens with their completions, need at most the base's {len(base.rope[0])} positions")
    shape = len(prompts), sampling.group
    limits = np.full(shape, sampling.max_new_tokens, np.int32) if limits is None else np.asarray(limits)
    if limits.shape != shape or limits.dtype.kind not in "iu" or limits.min() < 1 or limits.max() > sampling.max_new_tokens:
        found = f"shape {limits.shape} with {limits.min(initial=1)} .. {limits.max(initial=1)}"
        raise ValueError(f"limits: found {found}, need shape {shape} with 1 .. {sampling.max_new_tokens} tokens")
    return limits


def generate(
    model: models.Model,
    sampling: Sampling,
    base: Base,
    adapter: Adapter | None,
    prompts: Array,
    lengths: Array,
    prompt_ids: Array,
    seed: int,
    engine: Engine = DEFAULT,
    limits: np.ndarray | None = None,
    respond: Respond | None = None,
) -> Rollout:
    """`stream` to its end: prompts [P, T] of `lengths` [P] with `prompt_ids` [P], as one batch in its place on the mesh."""
    prompts, lengths, prompt_ids = jax.device_get((prompts, lengths, prompt_ids))
    texts, longest = [row[:n] for row, n in zip(prompts, lengths)], prompts.shape[1]
    completions = stream(model, sampling, base, adapter, texts, prompt_ids, seed, engine, limits, respond, longest=longest)
    return place(model, collect(model, sampling, prompts, lengths, completions))


def collect(
    model: models.Model, sampling: Sampling, prompts: np.ndarray, lengths: np.ndarray, completions: Iterator[Completion]
) -> Rollout:
    """All completions of prompts [P, T] as padded arrays, on the host."""
    spec, (p_, t_), (g_, c_) = model.spec, prompts.shape, (sampling.group, sampling.max_new_tokens)
    tokens, drawn = np.full((p_, g_, c_), sampling.pad_id, np.int32), np.zeros((p_, g_, c_), bool)
    counts, stopped = np.zeros((p_, g_), np.int32), np.zeros((p_, g_), bool)
    logprobs = np.zeros((3, p_, g_, c_), np.float32)
    of_prompts = np.zeros((spec.sparse_layers, p_, t_, spec.experts_per_token), np.int16)
    choices = np.zeros((spec.sparse_layers, p_, g_, c_, spec.experts_per_token), np.int16)
    for one in completions:
        row, n = (one.prompt, one.sample), len(one.tokens)
        tokens[row][:n], drawn[row][:n], counts[row], stopped[row] = one.tokens, one.drawn, n, one.stopped
        logprobs[(slice(None), *row, slice(n))] = one.logprobs.T
        choices[(slice(None), *row, slice(n - 1))] = np.moveaxis(one.choices, 1, 0)
        of_prompts[:, one.prompt, : lengths[one.prompt]] = np.moveaxis(one.prompt_choices, 1, 0)
    return Rollout(prompts, lengths, tokens, drawn, counts, stopped, *logprobs, of_prompts, choices)


def place(model: models.Model, r: Rollout) -> Rollout:
    """Completions in their place on the mesh."""
    if model.mesh is None:
        return jax.device_put(r)
    behind = lambda path, x: meshes.rows_behind(model.mesh) if microbatch.is_behind(path) else meshes.rows(model.mesh)
    return jax.device_put(r, jax.tree_util.tree_map_with_path(behind, r))


def completions(r: Rollout) -> list[list[int]]:
    """Token ids of each completion, without padding, in the order P, G."""
    tokens, lengths = jax.device_get((r.tokens, r.lengths))
    return [row[:n].tolist() for row, n in zip(tokens.reshape(-1, tokens.shape[-1]), lengths.reshape(-1))]

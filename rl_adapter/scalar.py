"""Numbers read off the frozen base by an adapter of their own and a linear head: a critic's values, a reward model's scores."""

import math

import jax.numpy as jnp
import numpy as np
from flax import struct

from rl_adapter import lora, microbatch, programs, scoring
from rl_adapter import model as models
from rl_adapter.types import Array, Base, Rollout


@struct.dataclass
class Scalar:
    adapter: lora.Adapter
    weight: Array  # [D] f32
    bias: Array  # [] f32


def init(spec: lora.AdapterSpec, base: Base, d_model: int, key: Array) -> Scalar:
    """One that gives 0 everywhere, as an untrained critic should; `base` may be abstract."""
    return Scalar(lora.init(spec, base, key), jnp.zeros(d_model), jnp.zeros(()))


def values(model: models.Model, base: Base, scalar: Scalar, r: Rollout, size: int = 0) -> Array:
    """[P, G, C]: of the state before each completion token, by one forward pass over packed tokens."""
    prepared = lora.prepare(scalar.adapter, model.numeric)
    seen = scoring.before_tokens(model, base, prepared, r, size)
    found = seen.hidden @ scalar.weight / math.sqrt(model.spec.d_model) + scalar.bias
    return seen.told.spread(found).reshape(r.tokens.shape)


def closed(r: Rollout, token: int) -> Rollout:
    """Each completion with `token` after its end, so that the state before that has seen all of it."""
    c_ = r.tokens.shape[2] + 1
    at_end = jnp.arange(c_) == r.lengths[..., None]
    grown = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, 1)))
    lengths = jnp.where(r.lengths > 0, r.lengths + 1, 0)
    return scoring.texts(r).replace(tokens=jnp.where(at_end, token, grown(r.tokens)), drawn=grown(r.drawn), lengths=lengths)


def of_completions(values: Array, r: Rollout) -> Array:
    """[P, G, C] of `closed` completions -> [P, G]: each after all of its tokens."""
    return jnp.take_along_axis(values, jnp.maximum(r.lengths - 1, 0)[..., None], -1)[..., 0]


@programs.jit(static_argnames=("model", "size"))
def _values_all(model, size: int, base: Base, scalar: Scalar, r: Rollout, rows: Array, count: Array) -> Array:
    of_part = lambda some: (values(model, base, scalar, microbatch.part(r, some, model.mesh), size), ())
    return microbatch.by_prompt(of_part, len(r.prompts), rows, count)[0]


def values_all(model: models.Model, base: Base, scalar: Scalar, r: Rollout, tokens: int = 0) -> Array:
    """`values` of a whole batch, in microbatches of about `tokens`."""
    planned = scoring.plan(model, r, tokens)
    return _values_all(model, planned.size, base, scalar, scoring.texts(r), planned.rows, np.int32(planned.count))


def score_all(model: models.Model, base: Base, scalar: Scalar, r: Rollout, end: int, tokens: int = 0) -> np.ndarray:
    """[P, G] f32: what a reward model gives whole completions; `end` is the token that closes them."""
    whole = closed(r, end)
    return np.asarray(of_completions(values_all(model, base, scalar, whole, tokens), whole))

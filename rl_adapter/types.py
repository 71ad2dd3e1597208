"""Glossary of shapes, and the records that flow between the stages of a batch.

Letters used in shape comments and einsums throughout the package:

    B rows (prompts x group)   P prompts in a batch       G group: samples of one prompt
    T prompt length (padded)   C completion length        S keys attended to
    N tokens, flat             D model width              H heads    K kv heads    d head width
    E experts                  k experts of one token     F expert hidden width
    L layers                   V vocabulary               R adapter rank
"""

import dataclasses
from typing import Any

import jax
from flax import struct

Array = jax.Array
PyTree = Any


@dataclasses.dataclass(frozen=True)
class Spec:
    """Static description of a model: hashable, so that it can be a static argument of jit."""

    layers: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    experts_per_token: int
    d_expert: int
    vocab: int
    norm_eps: float
    rope_theta: float
    norm_topk_prob: bool
    tie_embeddings: bool
    max_positions: int


@dataclasses.dataclass(frozen=True)
class Numerics:
    """How contractions and sums are computed: `mode` is "exact" or "float"; `act_bits` (8 or 16) matters in exact mode."""

    mode: str = "exact"
    act_bits: int = 16

    def __post_init__(self):
        if self.mode not in ("exact", "float"):
            raise ValueError(f"numerics: found {self.mode!r}, need 'exact' or 'float'")
        if self.act_bits not in (8, 16):
            raise ValueError(f"act_bits: found {self.act_bits!r}, need 8 or 16")

    @property
    def exact(self) -> bool:
        return self.mode == "exact"


@struct.dataclass
class Layer:
    """One block; in `Base` every leaf is stacked along a leading [L]. Weights are QTensors (see quant.py)."""

    attn_norm: PyTree  # [D] f32
    q: PyTree  # D -> H*d
    k: PyTree  # D -> K*d
    v: PyTree  # D -> K*d
    o: PyTree  # H*d -> D
    q_norm: PyTree  # [d] f32
    k_norm: PyTree  # [d] f32
    mlp_norm: PyTree  # [D] f32
    router: PyTree  # D -> E
    gate: PyTree  # [E] D -> F
    up: PyTree  # [E] D -> F
    down: PyTree  # [E] F -> D


@struct.dataclass
class Base:
    """The frozen model. Never donated, never differentiated, never written."""

    embed: PyTree  # [V, D] as on disk (bf16, f16 or f32)
    layers: Layer
    final_norm: PyTree  # [D] f32
    head: PyTree  # D -> V
    rope: PyTree = None  # (cos, sin), each [positions, d/2] f32: derived, made when the base is placed


@struct.dataclass
class Rollout:
    """What the sampler gives. Completions are padded on the right; `lengths` counts the stop token where there is one.

    The three log-probabilities of a sampled token are kept apart by name: that of the distribution it was drawn from (temperature,
    top-k, top-p), that of the policy at the temperature but untruncated, and that of the policy itself (temperature 1).
    """

    prompts: Array  # [P, T] int32
    prompt_lengths: Array  # [P] int32
    tokens: Array  # [P, G, C] int32
    lengths: Array  # [P, G] int32
    stopped: Array  # [P, G] bool: ended by a stop token; else cut at C
    sampled_logprobs: Array  # [P, G, C] f32
    tempered_logprobs: Array  # [P, G, C] f32
    scored_logprobs: Array  # [P, G, C] f32
    prompt_choices: Array  # [L, P, T, k] int16: experts of the prompt tokens
    choices: Array  # [L, P, G, C, k] int16: experts of the completion tokens that were fed back (the last one is not)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One verifiable task."""

    id: int  # 31-bit hash of the prompt: keys the randomness of its rollouts
    prompt: str
    answer: str
    kind: str

"""Glossary of shapes, and the records that flow between the stages of a batch.

Letters used in shape comments and einsums throughout the package:

    B rows (prompts x group)   P prompts in a batch       G group: samples of one prompt
    T prompt length (padded)   C completion length        S keys attended to
    N tokens, flat             D model width              H heads    K kv heads    d head width
    E experts                  k experts of one token     F expert hidden width
    L layers                   Ls layers with experts     V vocabulary    R adapter rank
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import jax
from flax import struct

Array = jax.Array
PyTree = Any


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embedding (Su et al. 2021, arXiv:2104.09864), whatever stretches it: what scaling does is in the frequencies already."""

    frequencies: tuple[float, ...]  # radians a position, one a pair of features; features beyond the pairs do not turn
    factor: float = 1.0  # multiplies cos and sin (yarn's attention factor)
    interleaved: bool = False  # pairs are (2i, 2i + 1), else (i, i + pairs)


@dataclasses.dataclass(frozen=True)
class Mla:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values are read from one small latent a token."""

    q_rank: int  # width of the query latent; 0: queries are projected directly
    kv_rank: int  # width of the key-value latent
    nope: int  # features of a head's query that meet the latent
    rope: int  # features of a head's query that are rotated
    v: int  # features of a head's value


@dataclasses.dataclass(frozen=True)
class Spec:
    """Static description of a model, one for all families: hashable, so that it can be a static argument of jit."""

    layers: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int  # of queries and keys; of Mla it is kv_rank + rope, as attention sees them
    vocab: int
    norm_eps: float
    rope: Rope
    tie_embeddings: bool
    max_positions: int
    # experts; none of these matter where every layer is dense
    experts: int = 0
    experts_per_token: int = 0
    d_expert: int = 0
    norm_topk_prob: bool = True  # the weights of the chosen sum to 1 (then times routed_scale)
    score: str = "softmax"  # of all experts | "sigmoid" of each | "softmax_of_chosen"
    routed_scale: float = 1.0
    expert_groups: int = 1  # experts are chosen from the best `groups_per_token` of these
    groups_per_token: int = 1
    dense: tuple[int, ...] = ()  # layers that have no experts, but one MLP of width d_mlp
    d_mlp: int = 0
    d_shared: int = 0  # width of the experts that every token passes, as one MLP; 0: none
    activation: str = "swiglu"  # | "clamped_swiglu" (gpt-oss)
    swiglu_limit: float = 0.0  # of clamped_swiglu
    # attention
    qk_norm: str = "none"  # | "head": RMSNorm of each head's queries and keys | "full": of all heads together
    attention_scale: float = 0.0  # multiplies q k; 0: 1 / sqrt(head_dim)
    windows: tuple[int, ...] = ()  # keys that a query of each layer sees, itself included; 0: all before it. (): all layers see all
    clip_qkv: float = 0.0  # bound on |q|, |k|, |v| after their projection; 0: none
    mla: Mla | None = None

    @property
    def stacks(self) -> tuple[tuple[int, int, bool], ...]:
        """Runs of layers of one kind, (first, count, has experts): each is stacked and scanned as a whole."""
        kinds = [layer not in self.dense for layer in range(self.layers)]
        runs = [(kind, len(list(run))) for kind, run in itertools.groupby(kinds)]
        firsts = itertools.accumulate((n for _, n in runs), initial=0)
        return tuple((first, n, kind) for first, (kind, n) in zip(firsts, runs))

    @property
    def sparse_layers(self) -> int:
        return self.layers - len(self.dense)


@dataclasses.dataclass(frozen=True)
class Numerics:
    """How contractions and sums are computed: `mode` is "exact" or "float"; the bits matter in exact mode."""

    mode: str = "exact"
    act_bits: int = 16
    cache_bits: int = 0  # of keys and values in exact mode; 0: act_bits

    def __post_init__(self):
        if self.cache_bits not in (0, 8, 16) or self.cache_bits > self.act_bits:
            raise ValueError(f"cache_bits: found {self.cache_bits!r}, need 0 (as act_bits), 8 or 16, at most act_bits = {self.act_bits}")
        if self.mode not in ("exact", "float"):
            raise ValueError(f"numerics: found {self.mode!r}, need 'exact' or 'float'")
        if self.act_bits not in (8, 16):
            raise ValueError(f"act_bits: found {self.act_bits!r}, need 8 or 16")

    @property
    def exact(self) -> bool:
        return self.mode == "exact"

    @property
    def key_bits(self) -> int:
        return self.cache_bits or self.act_bits


@struct.dataclass
class Layer:
    """One block; in `Base` every leaf is stacked along a leading [n] of its run. Matrices are `quant.Weight`s. None: the model has none."""

    attn_norm: PyTree  # [D] f32
    o: PyTree  # H*d -> D (of Mla H*v -> D)
    mlp_norm: PyTree  # [D] f32
    q: PyTree = None  # D -> H*d (of Mla without a query latent: D -> H*(nope + rope))
    k: PyTree = None  # D -> K*d
    v: PyTree = None  # D -> K*d
    q_norm: PyTree = None  # [d] or [H*d] f32
    k_norm: PyTree = None  # [d] or [K*d] f32
    sinks: PyTree = None  # [H] f32: a logit of each head's softmax that belongs to no key
    q_a: PyTree = None  # Mla: D -> q_rank
    q_a_norm: PyTree = None  # [q_rank] f32
    q_b: PyTree = None  # q_rank -> H*(nope + rope)
    kv_a: PyTree = None  # D -> kv_rank + rope
    kv_a_norm: PyTree = None  # [kv_rank] f32
    k_up: PyTree = None  # [H] nope -> kv_rank: a head's query into the latent
    v_up: PyTree = None  # [H] kv_rank -> v: a head's value out of the latent
    mlp_gate: PyTree = None  # D -> d_mlp, or d_shared beside experts
    mlp_up: PyTree = None
    mlp_down: PyTree = None
    router: PyTree = None  # D -> E
    score_bias: PyTree = None  # [E] f32: added to scores where experts are chosen, not where they are weighed
    gate: PyTree = None  # [E] D -> F
    up: PyTree = None  # [E] D -> F
    down: PyTree = None  # [E] F -> D
    bias: PyTree = struct.field(default_factory=dict)  # name of a matrix -> f32 [N], or [E, N]


@struct.dataclass
class Base:
    """The frozen model. Never donated, never differentiated, never written."""

    embed: PyTree  # [V, D]: bf16, f16 or f32 as on disk, or a `quant.Weight` (V outputs)
    layers: tuple[Layer, ...]  # one a run of `Spec.stacks`
    final_norm: PyTree  # [D] f32
    head: PyTree  # D -> V
    rope: PyTree = None  # (cos, sin), each [positions, pairs] f32: derived, made when the base is placed


@struct.dataclass
class Rollout:
    """What the sampler gives. Completions are padded on the right; `lengths` counts the stop token where there is one.

    The three log-probabilities of a sampled token are kept apart by name: that of the distribution it was drawn from (temperature,
    top-k, top-p), that of the policy at the temperature but untruncated, and that of the policy itself (temperature 1).
    """

    prompts: Array  # [P, T] int32
    prompt_lengths: Array  # [P] int32
    tokens: Array  # [P, G, C] int32
    drawn: Array  # [P, G, C] bool: by the policy; False for padding, and for what an environment added
    lengths: Array  # [P, G] int32
    stopped: Array  # [P, G] bool: ended by a stop token; else cut at C
    sampled_logprobs: Array  # [P, G, C] f32
    tempered_logprobs: Array  # [P, G, C] f32
    scored_logprobs: Array  # [P, G, C] f32
    prompt_choices: Array  # [Ls, P, T, k] int16: experts of the prompt tokens
    choices: Array  # [Ls, P, G, C, k] int16: experts of the completion tokens that were fed back (the last one is not)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One verifiable task."""

    id: int  # 31-bit hash of the prompt: keys the randomness of its rollouts
    prompt: str  # of a chat: what its last message says
    answer: str  # gold; "" where the scorer or the environment needs none
    kind: str
    messages: tuple[Mapping[str, Any], ...] = dataclasses.field(default=(), hash=False)  # the chat that asks it; (): plain text
    env: str = ""  # environment that answers the completions; "": single turn
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)  # JSON: what scorers and environments need


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one completion earned."""

    reward: float  # of all parts, weighted
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)  # by scorer, unweighted; also of scorers that are only watched
    failures: Mapping[str, str] = dataclasses.field(default_factory=dict)  # by scorer that could not score it: why


@dataclasses.dataclass(frozen=True)
class Example:
    """A completion to imitate."""

    problem: Problem
    completion: str


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two completions, of which one is preferred."""

    problem: Problem
    chosen: str
    rejected: str

"""What the benchmarks run: a model of a given shape or a checkpoint, an adapter, prompts, and the programs that a step consists of.

Prompts are full and completions run to their full length (no stop token is ever drawn), so that all variants of one shape do the same
work, and the work can be counted.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from rl_adapter import config as configs
from rl_adapter import engine, evaluate, lora, loss, quant, rollout, scoring, update
from rl_adapter import mesh as meshes
from rl_adapter import model as models
from rl_adapter import session as sessions
from rl_adapter.hub import rope
from rl_adapter.sampling import Sampling
from rl_adapter.types import Base, Layer, Numerics, Rollout, Spec

LINEARS = ("q", "k", "v", "o", "q_a", "q_b", "kv_a", "mlp_gate", "mlp_up", "mlp_down", "gate", "up", "down")
FORMS = ("stored", *quant.FORMS)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One point that is measured. The defaults are the quickstart's; those from `layers` on describe `model='random'` alone."""

    model: str = "random"  # | '' (the shipped base) | a directory or .gguf file
    form: str = "int4_g32"  # of the linears, one of FORMS; 'stored': as the checkpoint has them
    numerics: str = "a16"  # float | a16 | a8
    batch: int = 16  # prompts
    group: int = 8  # completions of each
    prompt: int = 16  # tokens
    length: int = 44  # tokens of a completion
    rank: int = 8
    slots: int = 0  # completions decoded at once; 0: all
    lanes: int = 0  # slots that share a prompt's keys; 0: the engine's choice
    cache_bits: int = 0  # 0 (as the activations') | 8 | 16
    layers: int = 4
    experts: int = 16
    experts_per_token: int = 2
    d_model: int = 128
    d_expert: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    vocab: int = 145

    def __post_init__(self):
        for field, allowed in {"numerics": tuple(configs.VARIANTS), "form": FORMS[self.model == "random" :]}.items():
            if getattr(self, field) not in allowed:
                raise ValueError(f"--{field}: found {getattr(self, field)!r}, need one of {', '.join(allowed)}")
        for field in dataclasses.fields(self):
            least = 0 if field.name in ("slots", "lanes", "cache_bits") else 1
            if field.type is int and getattr(self, field.name) < least:
                raise ValueError(f"--{field.name}: found {getattr(self, field.name)}, need at least {least}")
        if self.experts_per_token > self.experts:
            raise ValueError(f"--experts_per_token: found {self.experts_per_token}, need at most the {self.experts} experts")

    @property
    def engine(self) -> engine.Engine:
        return engine.Engine(slots=self.slots, lanes=self.lanes)

    @property
    def completion_tokens(self) -> int:
        return self.batch * self.group * self.length

    @property
    def tokens(self) -> int:
        """Of prompts and completions, each prompt once."""
        return self.batch * (self.prompt + self.group * self.length)


def spec_of(v: Variant) -> Spec:
    """A Qwen3-MoE of the variant's shape."""
    return Spec(
        layers=v.layers, d_model=v.d_model, heads=v.heads, kv_heads=v.kv_heads, head_dim=v.head_dim, experts=v.experts,
        experts_per_token=v.experts_per_token, d_expert=v.d_expert, vocab=v.vocab, norm_eps=1e-6, rope=rope.plain(10_000.0, v.head_dim),
        qk_norm="head", tie_embeddings=False, max_positions=v.prompt + v.length,
    )  # fmt: skip


def random_weight(rng: np.random.Generator, form: str, *shape: int) -> quant.Weight:
    """A weight [..., K, N] about as large as N(0, 1/K), made of random codes: no float copy of it is ever in memory."""
    *lead, k, n = shape
    bits, group = quant.FORMS[form]
    group = group or k
    if k % group:
        raise ValueError(f"--form: found {form}, whose groups of {group} do not divide {k} input features")
    groups, full = k // group, 2**bits
    scale = np.full((*lead, groups, n), np.sqrt(12 / k) / full)  # codes are uniform
    if bits == 4:
        nibbles = rng.integers(1, full, size=(*lead, groups, group, n), dtype=np.uint8)
        return quant.weight("int4", quant.join_nibbles(nibbles), scale.astype(ml_dtypes.bfloat16))
    if bits == 16:
        scale, limit = 2.0 ** np.round(np.log2(scale)), 2**15 - 2**8  # as numerics.LIMIT
    else:
        limit = 127
    codes = rng.integers(-limit, limit + 1, size=(*lead, groups, group, n), dtype={8: np.int8, 16: np.int16}[bits])
    return quant.weight({8: "int8", 16: "fixed16"}[bits], codes, scale.astype(np.float32))


def random_base(spec: Spec, form: str, seed: int = 0) -> Base:
    """A base on the host as `hub.load` would give it: linears in `form`, router and head in fixed16, the embedding in bfloat16."""
    rng = np.random.default_rng(seed)
    n, d, e, f = spec.layers, spec.d_model, spec.experts, spec.d_expert
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    linear = lambda *shape: random_weight(rng, form, n, *shape)
    ones = lambda *shape: np.ones(shape, np.float32)
    layers = Layer(
        attn_norm=ones(n, d), q=linear(d, q), k=linear(d, kv), v=linear(d, kv), o=linear(q, d), q_norm=ones(n, spec.head_dim),
        k_norm=ones(n, spec.head_dim), mlp_norm=ones(n, d), router=random_weight(rng, "fixed16", n, d, e),
        gate=linear(e, d, f), up=linear(e, d, f), down=linear(e, f, d),
    )  # fmt: skip
    embed = rng.standard_normal((spec.vocab, d), np.float32).astype(ml_dtypes.bfloat16)
    return Base(embed, (layers,), ones(d), random_weight(rng, "fixed16", d, spec.vocab))


def requantize(base: Base, form: str) -> Base:
    """The base with its linears in `form`, on the host; 'stored' leaves them. For models that fit the host as floats."""
    if form == "stored":
        return base
    convert = lambda w: quant.quantize(jax.device_get(quant.dequantize(w)), form)
    change = lambda layer: layer.replace(**{n: convert(getattr(layer, n)) for n in LINEARS if getattr(layer, n) is not None})
    return base.replace(layers=tuple(map(change, base.layers)))


@dataclasses.dataclass(frozen=True)
class Work:
    """A model on the device, and a batch for it."""

    model: models.Model
    base: Base
    adapter: lora.Adapter  # as it is trained
    sampling: Sampling
    prompts: np.ndarray  # [P, T]
    lengths: np.ndarray  # [P]
    engine: engine.Engine


def config_of(v: Variant):
    """The run's config that a variant stands for: what is not the variant's is the default, as it is in the quickstart."""
    c = configs.default().unlock()
    c.model = "" if v.model == "random" else v.model
    (c.numerics, c.act_bits), c.cache_bits = configs.VARIANTS[v.numerics], v.cache_bits
    c.quantize.linear = "int8" if v.form == "stored" else v.form
    c.adapter.rank, c.mesh.data, c.remat = v.rank, 1, False
    c.rollout.prompts, c.rollout.group, c.rollout.max_new_tokens, c.data.max_prompt_tokens = v.batch, max(2, v.group), v.length, v.prompt
    return c


def build(v: Variant) -> Work:
    """The variant's model with an adapter that does something, and random prompts."""
    config = config_of(v)
    if v.model == "random":
        spec, mesh = spec_of(v), meshes.make(1)
        numeric = Numerics(config.numerics, config.act_bits, config.cache_bits)
        model = models.Model(spec, lora.adapter_spec(config.adapter), numeric, mesh, config.remat)
        base = models.place(spec, random_base(spec, v.form), mesh, v.prompt + v.length)
    else:
        session = sessions.open_session(config)
        model, spec = session.model, session.model.spec
        base = models.place(spec, requantize(session.base, v.form), model.mesh, v.prompt + v.length)
    noisy = lambda x: x + 0.01 * jax.random.normal(jax.random.key(x.size), x.shape)
    adapter = jax.jit(lambda base: jax.tree.map(noisy, lora.init(model.adapter, base, jax.random.key(0))))(base)
    prompts = np.random.default_rng(0).integers(spec.vocab, size=(v.batch, v.prompt), dtype=np.int32)
    sampling = Sampling(v.group, v.length, (spec.vocab,), 0)
    return Work(model, base, adapter, sampling, prompts, np.full(v.batch, v.prompt, np.int32), v.engine)


@dataclasses.dataclass(frozen=True)
class Program:
    """What is timed is `run(*ready())`, without `ready`."""

    run: Callable
    ready: Callable[[], tuple] = tuple


def sample(work: Work, seed: int = 0) -> Rollout:
    prepared, ids = evaluate.prepare(work.model, work.adapter), np.arange(len(work.prompts), dtype=np.int32)
    return rollout.generate(work.model, work.sampling, work.base, prepared, work.prompts, work.lengths, ids, seed, work.engine)


def programs(work: Work) -> dict[str, Program]:
    """The rollout, the scoring pass and the update of a batch. Scoring and the update run on what the first rollout gave."""
    config = configs.default()
    model, base, tx = work.model, work.base, evaluate.optimizer(config)
    objective = update.Policy(loss.from_config(config.loss))
    samples = []  # made once, by whoever comes first

    def rolled_out():
        if not samples:
            samples.append(jax.block_until_ready(sample(work)))
        return samples[0]

    @jax.jit
    def score(base, adapter, r):
        s = scoring.score(model, base, adapter, r)
        return s.tempered, s.scored, s.entropy

    def learn(state, r, weight, advantage):
        """With the reference's scores, which a step of the default config measures too."""
        batch = update.Batch(r, weight, advantage, scoring.score_all(model, base, None, r).scored)
        return update.update(model, tx, objective, 0, base, state, batch)

    def before_update():  # the state is donated
        r = rolled_out()
        ones = jnp.ones(r.tokens.shape)
        return update.start(tx, jax.tree.map(jnp.copy, work.adapter)), r, ones / ones.size, ones

    return {
        "rollout": Program(lambda: sample(work)),
        "scoring": Program(score, lambda: (base, evaluate.prepare(model, work.adapter), rolled_out())),
        "update": Program(learn, before_update),
    }


def cache_bytes(work: Work) -> int:
    """Of the rollout's cache."""
    lay = engine.layout(work.engine, 1, len(work.prompts), work.prompts.shape[1], work.sampling)
    return engine.cache_bytes(work.model, lay)


def size(tree) -> int:
    """Bytes of a tree's arrays; shapes suffice."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

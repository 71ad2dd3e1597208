"""What training, evaluation and the consistency check start from: a config turned into a model, a base on a mesh, and data."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import rich.markup
from ml_collections import ConfigDict

from rl_adapter import config as configs
from rl_adapter import engine, lora, monitor, prompts, rollout
from rl_adapter import mesh as meshes
from rl_adapter import model as models
from rl_adapter.hub import chat, load, peft_read, prepared
from rl_adapter.hub import tokenizer as tokenizers
from rl_adapter.rewards.score import Rewards, open_rewards
from rl_adapter.sampling import Sampling
from rl_adapter.types import Array, Base, Numerics, Problem

PROBE = 64  # tokens that an adapter is tried on


@dataclasses.dataclass(frozen=True)
class Session:
    model: models.Model
    base: Base
    digest: str  # of the base
    tokenizer: tokenizers.Tokenizer
    report: dict  # of the loader: what was taken as it lies on disk, what was quantized
    initial: lora.Adapter | None  # that of `adapter.init`, on the host
    data: dict[str, "Data"]  # by split
    rewards: Rewards


def open_session(config: ConfigDict, *splits: str) -> Session:
    """Check the config against the model, the devices and the data of `splits`; then load the base onto the mesh.

    Nothing compiles, and no weight is read, before all checks.
    """
    configs.validate(config)
    mesh = meshes.make(config.mesh.data, config.mesh.expert, config.mesh.model)
    checkpoint = load.open_checkpoint(configs.model_path(config))
    spec = checkpoint.spec
    meshes.check(mesh, spec, prompts=config.rollout.prompts // config.optimizer.minibatches)
    context = config.context or config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if context > spec.max_positions:
        raise ValueError(
            f"context: found {context} tokens (prompt and completion), need at most the model's {spec.max_positions} positions"
        )
    tokenizer = checkpoint.tokenizer()
    stop_ids(config, tokenizer)
    adapter = lora.adapter_spec(config.adapter)
    jax.eval_shape(lambda: lora.init(adapter, load.outline(checkpoint.described), jax.random.key(0)))  # refuses ranks that do not fit
    data = {split: open_data(config, tokenizer, split) for split in splits}
    rewards = open_rewards(config)
    r = config.rollout
    for held in data.values():  # refuses a cache that is too small
        sizes = Sampling(r.group, r.max_new_tokens, (), 0)
        engine.layout(engine.from_config(r), meshes.row_shards(mesh), r.prompts, held.length, sizes)
    initial = peft_read.read(config.adapter.init, checkpoint.described, adapter)[0] if config.adapter.init else None
    with monitor.loading(f"loading {rich.markup.escape(checkpoint.path.name)}") as progress:
        source = checkpoint, config.quantize, mesh, progress
        loaded = prepared.load_prepared(config.prepared, *source) if config.prepared else load.load(*source)
    model = models.Model(spec, adapter, Numerics(config.numerics, config.act_bits, config.cache_bits), mesh, config.remat)
    base = models.place(spec, loaded.base, mesh, context)
    session = Session(model, base, loaded.digest, tokenizer, loaded.report, initial, data, rewards)
    if initial is not None and not moves_logits(session, init_adapter(config, session)):
        raise ValueError(
            f"adapter.init: found {config.adapter.init!r}, which changes no logit of {PROBE} tokens, need an adapter that does"
        )
    return session


@dataclasses.dataclass(frozen=True)
class Data:
    """Problems of a split and their prompts as tokens."""

    problems: list[Problem]
    encoded: list  # int32 arrays
    length: int  # the padded length that serves every prompt: one compilation


def open_data(config: ConfigDict, tokenizer: tokenizers.Tokenizer, split: str) -> Data:
    problems = prompts.load(config.data, split)
    text = lambda prompt: config.data.prompt.replace("{prompt}", prompt)
    if config.data.chat:
        tokens_of = lambda prompt: chat.start(tokenizer, [{"role": "user", "content": text(prompt)}]).ids
    else:
        tokens_of = lambda prompt: tokenizer.encode(text(prompt))
    encoded = prompts.encode(tokens_of, problems, config.data.max_prompt_tokens)
    return Data(problems, encoded, rollout.bucket(max(map(len, encoded)), config.data.max_prompt_tokens))


def sampling(config: ConfigDict, session: Session, greedy: bool = False) -> Sampling:
    r, pad, stops = config.rollout, session.tokenizer.pad_id, stop_ids(config, session.tokenizer)
    if greedy:
        return Sampling(1, r.max_new_tokens, stops, pad, temperature=0.0)
    return Sampling(r.group, r.max_new_tokens, stops, pad, r.temperature, r.top_k, r.top_p)


def stop_ids(config: ConfigDict, tokenizer: tokenizers.Tokenizer) -> tuple[int, ...]:
    """The model's own stop tokens, and those of `rollout.stop`."""
    more = []
    for text in config.rollout.stop:
        ids = tokenizer.encode(text, special=False)
        if len(ids) != 1:
            raise ValueError(f"rollout.stop: found {text!r}, which is {len(ids)} tokens of the model, need texts of one token")
        more += ids
    return tuple(dict.fromkeys((*tokenizer.stop_ids, *more)))


def init_adapter(config: ConfigDict, session: Session) -> lora.Adapter:
    """A new adapter on the mesh, or the one to start from."""
    adapter = session.initial or lora.init(session.model.adapter, session.base, jax.random.key(config.seed))
    return jax.device_put(adapter, meshes.adapter_shardings(session.model.mesh, adapter))


def moves_logits(session: Session, adapter: lora.Adapter) -> bool:
    """Whether any logit of a few random tokens is another than without the adapter's B."""
    rows = meshes.row_shards(session.model.mesh)
    length = min(session.base.rope[0].shape[0], -(-PROBE // rows))
    tokens = np.random.default_rng(0).integers(session.model.spec.vocab, size=(rows, length), dtype=np.int32)
    tokens = jax.device_put(tokens, meshes.rows(session.model.mesh))
    is_pair = lambda x: isinstance(x, lora.Lora)
    silent = jax.tree.map(lambda pair: pair.replace(b=jnp.zeros_like(pair.b)), adapter, is_leaf=is_pair)
    # One program for both, or they could differ by how each rounds; and in float, which compiles in seconds.
    model = dataclasses.replace(session.model, numeric=Numerics("float"))
    first, second = (_probe(model, session.base, a, tokens) for a in (adapter, silent))
    return bool(jnp.any(first != second))


@functools.partial(jax.jit, static_argnums=0)
def _probe(model: models.Model, base: Base, adapter: lora.Adapter, tokens: Array) -> Array:
    """The logits [N, V] of whole rows."""
    exact = lora.prepare(adapter, model.numeric)
    lengths, valid = jnp.full(len(tokens), tokens.shape[1]), jnp.ones(tokens.shape, bool)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    out = models.apply(model, base, exact, tokens, positions, valid, models.prefill(model.numeric, lengths))
    return models.logits(model, base, exact, out.hidden.reshape(-1, model.spec.d_model))

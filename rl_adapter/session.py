"""What training, evaluation and the consistency check start from: a config turned into a model, a base on a mesh, and data."""

import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import rich.markup
from ml_collections import ConfigDict

from rl_adapter import config as configs
from rl_adapter import config_check, engine, environments, episodes, lora, monitor, programs, rollout, sandbox, scalar
from rl_adapter import mesh as meshes
from rl_adapter import model as models
from rl_adapter.data import prompts
from rl_adapter.environments import Environment, toolbox
from rl_adapter.hub import load, peft_read, prepared, scalars
from rl_adapter.hub import tokenizer as tokenizers
from rl_adapter.rewards import hygiene
from rl_adapter.rewards.score import Rewards, limits, open_rewards
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
    reference: lora.Adapter | None  # that of `loss.reference`, in its place; None: the base itself
    data: dict[str, "Data"]  # by split
    rewards: Rewards
    judge: scalar.Scalar | None  # the reward model, in its place
    talk: episodes.Setting  # how environments answer


def open_session(config: ConfigDict, *splits: str) -> Session:
    """Check the config against the model, the devices and the data of `splits`; then load the base onto the mesh.

    Nothing compiles, and no weight is read, before all checks.
    """
    config_check.validate(config)
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
    rewards = open_rewards(config)
    adapter = lora.adapter_spec(config.adapter)
    jax.eval_shape(lambda: lora.init(adapter, load.outline(checkpoint.described), jax.random.key(0)))  # refuses ranks that do not fit
    read = {split: prompts.load(config.data, split) for split in splits}
    answering = open_environments(config, rewards, [problem for found in read.values() for problem in found.problems])
    data = {split: open_data(config, tokenizer, found, answering, rewards) for split, found in read.items()}
    talk = open_talk(config, tokenizer, answering, [problem for found in data.values() for problem in found.problems])
    r = config.rollout
    for held in data.values():  # refuses a cache that is too small
        sizes = Sampling(r.group, r.max_new_tokens, (), 0)
        engine.layout(engine.from_config(r), meshes.row_shards(mesh), r.prompts, held.length, sizes)
    peft = lambda path: peft_read.read(path, checkpoint.described, adapter)[0] if path else None
    initial, reference = peft(config.adapter.init), peft(config.loss.reference)
    with monitor.loading(f"loading {rich.markup.escape(checkpoint.path.name)}") as progress:
        source = checkpoint, config.quantize, mesh, progress
        loaded = prepared.load_prepared(config.prepared, *source) if config.prepared else load.load(*source)
    model = models.Model(spec, adapter, Numerics(config.numerics, config.act_bits, config.cache_bits), mesh, config.remat)
    reference = None if reference is None else meshes.place(mesh, reference)
    placed, judge = models.place(spec, loaded.base, mesh, context), None
    if config.reward.model.weight:
        like = jax.eval_shape(lambda: scalar.init(adapter, placed, spec.d_model, jax.random.key(0)))
        judge = scalars.read(config.reward.model.path, like, adapter, loaded.digest, "reward.model.path")
        judge = meshes.place(mesh, judge)
    session = Session(model, placed, loaded.digest, tokenizer, loaded.report, initial, reference, data, rewards, judge, talk)
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
    sources: np.ndarray  # [n] int32, of each problem: which of data.train, or data.eval
    report: prompts.Report  # what was read, and what of it dropped


def open_data(
    config: ConfigDict, tokenizer: tokenizers.Tokenizer, read: prompts.Split, answering: Mapping[str, Environment], rewards: Rewards
) -> Data:
    """What is left of a split, encoded; problems whose gold answer earns nothing are refused or dropped, as `reward.gold` says."""
    found, encoded = prompts.encode(tokenizer, config.data, read, lambda problem: episodes.variables(answering[problem.env]))
    length = rollout.bucket(max(map(len, encoded)), config.data.max_prompt_tokens)
    with monitor.loading("checking gold answers") as progress:
        sound, bad = hygiene.check_gold(rewards, found.problems, config.reward.gold, progress)
    if bad:
        good = {id(problem) for problem in sound}
        keep = [i for i, problem in enumerate(found.problems) if id(problem) in good]
        found = prompts.without(found, keep, "reward.gold", [f"{problem.prompt!r:.60}: {why}" for problem, why in bad])
        encoded = [encoded[i] for i in keep]
        found = prompts.with_lengths(found, encoded)
    return Data(found.problems, encoded, length, found.sources, found.report)


def open_environments(config: ConfigDict, rewards: Rewards, problems: Sequence[Problem]) -> dict[str, Environment]:
    """The environments that problems name, with the tools of `env.tools`."""
    tools = toolbox.make(config.env, functools.partial(_run_python, limits(config.reward.code))) if config.env.tools else {}
    right = lambda text, problem: rewards.score(problem, text).reward
    return environments.make_all({p.env for p in problems}, config.env.name, environments.Kit(tools, right, config.env.attempts))


def _run_python(bounds: sandbox.Limits, code: str) -> sandbox.Result:
    return sandbox.run([sys.executable, "-I", "main.py"], {"main.py": code.encode(errors="replace")}, limits=bounds)


def open_talk(
    config: ConfigDict, tokenizer: tokenizers.Tokenizer, answering: Mapping[str, Environment], problems: Sequence[Problem]
) -> episodes.Setting:
    """How the model and its environments talk: as chats where prompts are chats, else as text."""
    chats = {config.data.chat or bool(problem.messages) for problem in problems}
    if episodes.talk(answering) and len(chats) > 1:
        raise ValueError("env: found problems that are chats and problems that are plain text, need one of them where environments answer")
    opening = (lambda problem: prompts.asked(config.data, problem)) if chats == {True} else None
    return episodes.setting(config.env, answering, tokenizer, stop_ids(config, tokenizer), opening, problems)


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
    return meshes.place(session.model.mesh, adapter)


def new_scalar(session: Session, seed: int) -> scalar.Scalar:
    """A critic or a reward model that has learned nothing, of the shape of the policy's adapter."""
    return scalar.init(session.model.adapter, session.base, session.model.spec.d_model, jax.random.key(seed))


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


@programs.jit(static_argnames=("model",))
def _probe(model: models.Model, base: Base, adapter: lora.Adapter, tokens: Array) -> Array:
    """The logits [N, V] of whole rows."""
    exact = lora.prepare(adapter, model.numeric)
    lengths, valid = jnp.full(len(tokens), tokens.shape[1]), jnp.ones(tokens.shape, bool)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    out = models.apply(model, base, exact, tokens, positions, valid, models.prefill(model.numeric, lengths))
    return models.logits(model, base, exact, out.hidden.reshape(-1, model.spec.d_model))

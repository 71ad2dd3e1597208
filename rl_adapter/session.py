"""What training, evaluation and the consistency check start from: a config turned into a model, a base on a mesh, and data."""

import dataclasses

import jax
from ml_collections import ConfigDict

from rl_adapter import config as configs
from rl_adapter import lora, prompts, quant, rollout
from rl_adapter import mesh as meshes
from rl_adapter import model as models
from rl_adapter.hub import families, load
from rl_adapter.hub import tokenizer as tokenizers
from rl_adapter.types import Base, Numerics, Problem


@dataclasses.dataclass(frozen=True)
class Session:
    model: models.Model
    base: Base
    digest: str  # of the base
    tokenizer: tokenizers.Tokenizer
    report: dict  # of the loader: what was taken as it lies on disk, what was quantized


def open_session(config: ConfigDict) -> Session:
    """Check the config against the model and the devices, then load the base onto the mesh. Nothing compiles before all checks."""
    configs.validate(config)
    directory = configs.model_dir(config)
    mesh = meshes.make(config.mesh.data, config.mesh.expert, config.mesh.model)
    spec = families.read_spec(directory)
    parts = config.optimizer.minibatches * config.optimizer.accumulate
    meshes.check(mesh, spec, prompts=config.rollout.prompts // parts)
    context = config.context or config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if context > spec.max_positions:
        raise ValueError(
            f"context: found {context} tokens (prompt and completion), need at most the model's {spec.max_positions} positions"
        )
    tokenizer = tokenizers.load_tokenizer(directory, spec.vocab)
    spec, base, report = load.load(directory, config.quantize)
    adapter = lora.adapter_spec(config.adapter)
    jax.eval_shape(lambda: lora.init(adapter, base, jax.random.key(0)))  # refuses ranks that do not fit
    digest = quant.digest(base)
    model = models.Model(spec, adapter, Numerics(config.numerics, config.act_bits), mesh, config.remat)
    return Session(model, models.place(spec, base, mesh, context), digest, tokenizer, report)


@dataclasses.dataclass(frozen=True)
class Data:
    """Problems of a split and their prompts as tokens."""

    problems: list[Problem]
    encoded: list  # int32 arrays
    length: int  # the padded length that serves every prompt: one compilation


def open_data(config: ConfigDict, session: Session, split: str) -> Data:
    problems = prompts.load(config.data, split)
    encoded = prompts.encode(session.tokenizer, problems, config.data.max_prompt_tokens)
    return Data(problems, encoded, rollout.bucket(max(map(len, encoded)), config.data.max_prompt_tokens))


def sampling(config: ConfigDict, session: Session, greedy: bool = False) -> rollout.Sampling:
    r, t = config.rollout, session.tokenizer
    if greedy:
        return rollout.Sampling(1, r.max_new_tokens, t.stop_ids, t.pad_id, temperature=0.0)
    return rollout.Sampling(r.group, r.max_new_tokens, t.stop_ids, t.pad_id, r.temperature, r.top_k, r.top_p)


def init_adapter(config: ConfigDict, session: Session) -> dict:
    """A new adapter on the mesh."""
    adapter = lora.init(session.model.adapter, session.base, jax.random.key(config.seed))
    return jax.device_put(adapter, meshes.adapter_shardings(session.model.mesh, adapter))

"""Our side: the variants of numerics, each a session with an adapter that does something, whose completions run to their full length."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from rl_adapter import config as configs
from rl_adapter import evaluate, experience, learn, lora, rollout, update
from rl_adapter import mesh as meshes
from rl_adapter import model as models
from rl_adapter import session as sessions
from rl_adapter.data import iterator, prompts

VARIANTS = {"exact A16": ("exact", 16), "exact A8": ("exact", 8), "float": ("float", 16)}
EXPERIMENTS = {"moe": "experiments/quickstart.py", "smollm2": "experiments/smollm2.py"}


def config_of(model: str, batch: int, group: int, new_tokens: int) -> ConfigDict:
    """The experiment's config, of this shape."""
    c = configs.load_module(EXPERIMENTS[model]).get_config().unlock()
    c.rollout.prompts, c.rollout.group, c.rollout.max_new_tokens, c.mesh.data = batch, group, new_tokens, 1
    c.rollout.stop, c.optimizer.minibatches = (), 1
    c.loss.measure_kl = False  # no side scores the base
    return c


class Variant:
    """One session, and what a round does with it."""

    def __init__(self, config: ConfigDict, name: str, workdir: pathlib.Path):
        self.config = config.copy_and_resolve_references()
        self.config.numerics, self.config.act_bits = VARIANTS[name]
        session = sessions.open_session(self.config, "train")
        # No token has this id.
        self.session = dataclasses.replace(session, tokenizer=dataclasses.replace(session.tokenizer, stop_ids=(session.model.spec.vocab,)))
        adapter = sessions.init_adapter(self.config, session)
        adapter = jax.tree.map(lambda x: x + 0.01 * jax.random.normal(jax.random.key(x.size), x.shape), adapter)
        self.tx = evaluate.optimizer(self.config)
        self.state = meshes.place(session.model.mesh, update.start(self.tx, adapter))
        self.indices, self.step_number = np.arange(self.config.rollout.prompts), 0
        self.batches = iterator.make_iterator([0] * len(self.indices), len(self.indices), 0)

    @property
    def data(self) -> sessions.Data:
        return self.session.data["train"]

    def rollout(self) -> int:
        self.step_number += 1
        session, data = self.session, self.data
        tokens, lengths = prompts.batch(data.encoded, self.indices, data.length, session.tokenizer.pad_id)
        ids = np.array([data.problems[i].id for i in self.indices], np.int32)
        adapter = evaluate.prepare(session.model, self.state.adapter)
        sampling = sessions.sampling(self.config, session)
        samples = rollout.generate(session.model, sampling, session.base, adapter, tokens, lengths, ids, self.step_number)
        return int(jax.block_until_ready(samples).lengths.sum())

    def step(self) -> int:
        self.step_number += 1
        found, _ = experience.gather(self.config, self.session, self.data, self.batches, self.state.adapter, 0, self.step_number)
        self.state, _ = learn.learn(self.config, self.session, found, self.state, self.tx, self.step_number)
        jax.block_until_ready(self.state)
        return int(found.played.samples.drawn.sum())

    def trained(self) -> int:
        return lora.count(self.state.adapter)

    def base_logprobs(self) -> np.ndarray:
        """[P, V]: of the base without an adapter, after each prompt."""
        encoded = [self.data.encoded[i] for i in self.indices]
        return np.concatenate([_last_logprobs(self.session.model, self.session.base, tokens[None]) for tokens in encoded])


def _last_logprobs(model: models.Model, base, tokens: np.ndarray) -> np.ndarray:
    n = tokens.shape[1]
    padded = np.zeros((1, max(32, n)), np.int32)  # one length, one compilation
    padded[:, :n] = tokens
    return np.asarray(_logprobs(model, base, padded, np.array([n], np.int32)))


def _logprobs_of(model: models.Model, base, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    out = models.apply(model, base, None, tokens, positions, positions < lengths[:, None], models.prefill(model.numeric, lengths))
    last = jnp.take_along_axis(out.hidden, (lengths - 1)[:, None, None], 1)[:, 0]
    return jax.nn.log_softmax(models.logits(model, base, None, last))


_logprobs = jax.jit(_logprobs_of, static_argnums=0)

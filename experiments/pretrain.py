"""Makes the base that ships with the package: a small Qwen3-MoE, pretrained quantization-aware with this package's own model code.

    python -m experiments.pretrain --steps=4500 --stop=2000 --rate=3e-3 --out=rl_adapter/assets/base

Every linear weight of attention and experts is rounded to its INT4 grid (groups of 32) in each forward pass, straight-through, so
that what is written as compressed-tensors INT4 is the model that was trained. The corpus (experiments/corpus.py) answers 60 % of its
problems at once and works the other 40 % in steps; questions of the `train` and `eval` splits never occur in it.

Each report has the accuracy of either style on held-out questions, given that the completion begins in that style. The shipped base is
stopped while quick answers are still mostly wrong: a longer run would teach a model of this size to answer at once.
"""

import functools
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

from experiments import corpus
from rl_adapter import attention, model, packing, quant, runtime, scoring
from rl_adapter import loss as losses
from rl_adapter.hub import rope, save
from rl_adapter.types import Base, Layer, Numerics, Spec

SPEC = Spec(
    layers=4, d_model=128, heads=4, kv_heads=2, head_dim=32, experts=16, experts_per_token=2, d_expert=128, vocab=145,
    norm_eps=1e-6, rope=rope.plain(10_000.0, 32), qk_norm="head", norm_topk_prob=True, tie_embeddings=False, max_positions=512,
)  # fmt: skip
GROUP = 32  # input features that share a scale
MODEL = model.Model(SPEC, None, Numerics("float"), None, remat=False)

_STEPS = flags.DEFINE_integer("steps", 6000, "optimizer steps")
_STOP = flags.DEFINE_integer("stop", 0, "stop after this many steps, the schedule still being that of --steps; 0 = do not")
_ROWS = flags.DEFINE_integer("rows", 64, "documents a step")
_RATE = flags.DEFINE_float("rate", 4e-3, "peak learning rate")
_OUT = flags.DEFINE_string("out", "", "directory for the HF checkpoint")
_SEED = flags.DEFINE_integer("seed", 0, "seed of weights and order")


def init(key) -> Base:
    """Float parameters in the layout of a Base; weights N(0, 1/K), those that write to the residual stream smaller by depth."""
    s = SPEC
    keys = iter(jax.random.split(key, 16))
    weight = lambda *shape: jax.random.normal(next(keys), shape) / np.sqrt(shape[-2])
    ones = lambda *shape: jnp.ones(shape, jnp.float32)
    deep = 1 / np.sqrt(2 * s.layers)
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    layers = Layer(
        attn_norm=ones(s.layers, s.d_model), q=weight(s.layers, s.d_model, q), k=weight(s.layers, s.d_model, kv),
        v=weight(s.layers, s.d_model, kv), o=weight(s.layers, q, s.d_model) * deep, q_norm=ones(s.layers, s.head_dim),
        k_norm=ones(s.layers, s.head_dim), mlp_norm=ones(s.layers, s.d_model), router=weight(s.layers, s.d_model, s.experts),
        gate=weight(s.layers, s.experts, s.d_model, s.d_expert), up=weight(s.layers, s.experts, s.d_model, s.d_expert),
        down=weight(s.layers, s.experts, s.d_expert, s.d_model) * deep,
    )  # fmt: skip
    return Base(jax.random.normal(next(keys), (s.vocab, s.d_model)) * 0.5, (layers,), ones(s.d_model), weight(s.d_model, s.vocab))


def round_weights(params: Base) -> Base:
    """The model as it will be deployed."""
    (layers,) = params.layers
    rounded = {n: quant.fake_quantize(getattr(layers, n), GROUP) for n in ("q", "k", "v", "o", "gate", "up", "down")}
    return params.replace(layers=(layers.replace(**rounded),), rope=attention.rope_table(64, SPEC.rope))


def token_losses(rounded: Base, tokens, lengths, mask):
    """Cross-entropy of masked tokens, whether each is likeliest, and the load-balancing loss (Fedus et al. 2021, arXiv:2101.03961)."""
    n, t = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(t), (n, t))
    valid = positions < lengths[:, None]
    packed = packing.pack(valid, n * t, 1)
    attention = model.packed(MODEL.numeric, packed, lengths, t, 1)
    out = model.apply(MODEL, rounded, None, packed.flat(tokens), packed.flat(positions), packed.used, attention)
    z = model.logits(MODEL, rounded, None, packed.spread(out.hidden)[:, :-1])
    target, mask = tokens[:, 1:], mask[:, 1:]
    loss = jnp.where(mask, -jnp.take_along_axis(jax.nn.log_softmax(z), target[..., None], -1)[..., 0], 0.0)
    loads = scoring.expert_loads(out.choices, packed.used, SPEC.experts)
    balance = losses.balance(loads, out.router, valid.sum())
    return loss, (jnp.argmax(z, -1) == target) | ~mask, balance


def train_step(tx, params, state, batches):
    def objective(params):
        rounded = round_weights(params)
        parts = [token_losses(rounded, *b) for b in batches]
        tokens = sum(b[2][:, 1:].sum() for b in batches)
        loss = sum(p[0].sum() for p in parts) / tokens
        return loss + 0.01 * sum(p[2] for p in parts) / len(parts), loss

    grads, loss = jax.grad(objective, has_aux=True)(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def accuracy(params, documents, first: int):
    """Share of documents [kinds] whose every completion token from the `first`-th on is the likeliest one given those before."""
    _, hit, _ = token_losses(round_weights(params), documents.tokens, documents.lengths, documents.mask)
    start = np.argmax(documents.mask[:, 1:], 1)
    hit = np.asarray(hit) | (np.arange(hit.shape[1]) < start[:, None] + first)
    return [float(hit[documents.kinds == i].all(1).mean()) for i in range(len(corpus.WEIGHTS))]


def main(_):
    runtime.setup(0)
    steps, rows = _STEPS.value, _ROWS.value
    stop = _STOP.value or steps
    quick_rows = round(rows * corpus.QUICK)
    tokenizer = corpus.make_tokenizer()
    table, held_out = (corpus.encode_table(tokenizer, split) for split in ("pretrain", "eval"))
    draw = lambda step, quick, n, t=table: corpus.documents(t, seed=_SEED.value * 10**9 + 2 * step + int(quick), size=n, quick=float(quick))
    schedule = optax.warmup_cosine_decay_schedule(0.0, _RATE.value, min(200, steps // 4), steps, 0.02 * _RATE.value)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01))
    params = init(jax.random.key(_SEED.value))
    state = tx.init(params)
    step_fn = jax.jit(functools.partial(train_step, tx), donate_argnums=(0, 1))
    tests = [corpus.documents(held_out, seed=i, size=512, quick=1.0 - i) for i in (0, 1)]
    start, tokens = time.time(), 0
    for step in range(stop):
        documents = draw(step, True, quick_rows), draw(step, False, rows - quick_rows)
        params, state, loss = step_fn(params, state, [(d.tokens, d.lengths, d.mask) for d in documents])
        tokens += sum(int(d.lengths.sum()) for d in documents)
        if (step + 1) % 250 == 0 or step + 1 == stop or step == 30:
            quick, worked = (accuracy(params, d, first) for d, first in zip(tests, (1, 1)))
            show = lambda xs: dict(zip(corpus.WEIGHTS, np.round(xs, 3).tolist()))
            print(json.dumps({"step": step + 1, "loss": round(float(loss), 4), "tokens": tokens, "seconds": round(time.time() - start),
                              "quick": show(quick), "worked": show(worked)}), flush=True)  # fmt: skip
            if _OUT.value:
                out = pathlib.Path(_OUT.value)
                save.save_checkpoint(out, SPEC, jax.device_get(params), group=GROUP)
                (out / "generation_config.json").write_text(
                    json.dumps({"eos_token_id": corpus.EOS, "pad_token_id": corpus.PAD}, indent=2) + "\n"
                )


if __name__ == "__main__":
    app.run(main)

"""Tunix: the sampler that its GRPO learner rolls out with, on its Qwen3-MoE, with a LoRA of qwix."""

import functools
import os

import protocol

channel, job = protocol.Channel(), protocol.read_job()
os.environ |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}

import json  # noqa: E402
import pathlib  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import qwix  # noqa: E402
from tunix.generate import sampler as samplers  # noqa: E402
from tunix.models.qwen3 import model as qwen3  # noqa: E402
from tunix.models.qwen3 import params  # noqa: E402


class Ids:
    """A tokenizer whose texts are the ids themselves, so that all peers get the same tokens."""

    encode = staticmethod(lambda text, **_: [int(i) for i in text.split()])
    decode = staticmethod(lambda ids, **_: " ".join(map(str, ids)))
    bos_id = staticmethod(lambda: 0)  # 0: none is added
    eos_id = staticmethod(lambda: job["vocab"])  # no token's id: completions run to their full length
    pad_id = staticmethod(lambda: job["pad"])


def load(config: dict) -> qwen3.Qwen3:
    settings = qwen3.ModelConfig(
        num_layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"],
        embed_dim=config["hidden_size"],
        hidden_dim=config["moe_intermediate_size"],
        num_heads=config["num_attention_heads"],
        head_dim=config["head_dim"],
        num_kv_heads=config["num_key_value_heads"],
        rope_theta=int(config["rope_theta"]),
        norm_eps=config["rms_norm_eps"],
        use_tied_embedding=config["tie_word_embeddings"],
        num_experts=config["num_experts"],
        num_experts_per_tok=config["num_experts_per_tok"],
        dtype=jnp.dtype(job["dtype"]),
        param_dtype=jnp.dtype(job["dtype"]),
    )
    # Its attention leaves the config's rope_theta out and rotates by 1,000,000: mended, or it would be another model.
    qwen3.apply_rope = functools.partial(qwen3.apply_rope, rope_theta=settings.rope_theta)
    return params.create_model_from_safe_tensors(job["weights"], settings, dtype=settings.param_dtype)


def make_sampler(model: qwen3.Qwen3, config: dict) -> samplers.Sampler:
    cache = samplers.CacheConfig(length + job["new_tokens"], config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"])
    return samplers.Sampler(model, Ids(), cache)


config = json.loads((pathlib.Path(job["weights"]) / "config.json").read_text())
length = max(map(len, job["prompts"]))
base = load(config)
# Experts are no modules of their own, so that qwix has no place for pairs on them: less work than on our side.
provider = qwix.LoraProvider(module_path=r".*attn.(q|k|v|o)_proj", rank=job["rank"], alpha=job["alpha"])
lora = qwix.apply_lora_to_model(base, provider, **base.get_model_input())
sampler = make_sampler(lora, config)
texts = [" ".join(map(str, ids)) for ids in job["prompts"]]


def generate(seed: int = 0) -> int:
    out = sampler(
        [text for text in texts for _ in range(job["group"])],
        max_generation_steps=job["new_tokens"],
        max_prompt_length=length,
        temperature=1.0,
        top_p=1.0,
        return_logprobs=True,
        seed=seed,
    )
    return sum(map(len, out.tokens))


def check() -> dict:
    """Logprobs that the base gives the probed tokens after each prompt."""
    found = []
    for ids, probe in zip(job["prompts"], job["probe"]):
        tokens, positions = jnp.array([ids]), jnp.arange(len(ids))[None]
        mask = jnp.tril(jnp.ones((1, len(ids), len(ids)), bool))
        logits, _ = base(tokens, positions, None, mask)
        found.append(jax.nn.log_softmax(logits[0, -1])[jnp.array(probe)].tolist())
    return {"logprobs": found}


for _ in range(job["warm_up"]):
    generate()
trained = sum(x.size for path, x in jax.tree.leaves_with_path(sampler.transformer_state) if "lora" in jax.tree_util.keystr(path))
about = {
    "versions": protocol.versions("google-tunix", "qwix", "flax", "jax"),
    "threads": len(os.sched_getaffinity(0)),
    "dtype": job["dtype"],
    "adapter": f"qwix LoRA on attention, {trained:,} parameters",
    "mended": "rope_theta of the config, which Tunix leaves out",
}
protocol.serve(channel, about, {"rollout": lambda: protocol.timed(generate), "check": check})

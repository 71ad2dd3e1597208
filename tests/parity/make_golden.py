"""Writes the golden checkpoints of tests/golden: tiny random models, with the logits that `transformers` computes for them.

    python -m tests.parity.make_golden [name ...]      # from the root of the repository; all cases without names

Needs torch, transformers, compressed-tensors and gguf (the committed files: torch 2.13 CPU, transformers 5.24, compressed-tensors
0.20.1, gguf 0.19). A case is a directory: config.json and safetensors, or one GGUF file; tokens.npy [2, 12] int32; logits.npy
[2, 12, vocab] f32, of the float32 model with eager attention that holds the *dequantized* weights.

Weights that stay float lie on a coarse binary grid, on which neither bf16 nor 16-bit fixed point loses anything, so that what is
compared is the arithmetic of the model. Seeds are tried in order until no choice of experts hangs on the last bits of a score.
"""

import json
import pathlib
import re
import shutil
import sys
import tempfile

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.parity import gguf_file
from tests.parity.cases import CASES, Case
from tests.parity.formats import Tensors

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
LENGTH = 12


def randomize(model: PreTrainedModel, seed: int) -> None:
    """Every parameter and buffer that a checkpoint holds, at scales at which each part of the model shows in the logits."""
    random = torch.Generator().manual_seed(seed)

    def draw(shape, mean, deviation, bits):
        value = torch.randn(shape, generator=random) * deviation + mean
        return (value * 2**bits).round().clamp(-255, 255) / 2**bits

    with torch.no_grad():
        for name, value in model.state_dict().items():
            if "e_score_correction_bias" in name:
                value.copy_(torch.randn(value.shape, generator=random) * 0.2)
            elif "norm" in name:
                value.copy_(draw(value.shape, 1, 0.3, 6))
            elif name.endswith("sinks"):
                value.copy_(draw(value.shape, 0, 1, 6))
            elif name.endswith("bias"):
                value.copy_(draw(value.shape, 0, 0.2, 7))
            elif "embed_tokens" in name:
                value.copy_(draw(value.shape, 0, 1, 6))
            else:
                inputs = value.shape[-2] if "gpt_oss" in type(model).__module__ and "experts" in name else value.shape[-1]
                value.copy_(draw(value.shape, 0, 1.2 * inputs**-0.5, 8))


def make(case: Case, directory: pathlib.Path, first_seed: int = 0) -> None:
    """Writes one case, anew."""
    for seed in range(first_seed, first_seed + 20):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(case.config, dtype=torch.float32, attn_implementation="eager")
        randomize(model, seed)
        reference = write(case, model, directory)
        tokens = torch.randint(case.config.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            logits = reference(tokens).logits
            if stable(reference, tokens, logits):
                break
    else:
        raise ValueError(f"{case.name}: no seed of {first_seed}..{seed} has clear choices of experts")
    np.save(directory / "tokens.npy", tokens.numpy().astype(np.int32))
    np.save(directory / "logits.npy", logits.numpy())


def stable(model: PreTrainedModel, tokens: torch.Tensor, logits: torch.Tensor) -> bool:
    """Whether small changes of the embeddings make small changes of the logits: an expert that another replaces makes a jump."""
    embedded = model.get_input_embeddings()(tokens)
    for seed in range(4):
        noise = 1e-3 * embedded.std() * torch.randn(embedded.shape, generator=torch.Generator().manual_seed(seed))
        if (model(inputs_embeds=embedded + noise).logits - logits).abs().max() > 0.03 * logits.std():
            return False
    return True


def write(case: Case, model: PreTrainedModel, directory: pathlib.Path) -> PreTrainedModel:
    """The checkpoint of a model, and the float32 model that it means, loaded by transformers from dequantized tensors."""
    with tempfile.TemporaryDirectory() as temporary:
        saved = pathlib.Path(temporary)
        model.save_pretrained(saved, save_original_format=not case.fused)
        config = json.loads((saved / "config.json").read_text())
        tensors = load_file(saved / "model.safetensors")
        if case.gguf:
            meaning = gguf_file.write(directory / "model.gguf", case.config, tensors, *case.gguf)
        else:
            stored, meaning = quantize(case, tensors)
            write_config(case, config, directory)
            write_tensors(case, stored, directory)
        save_file(meaning, saved / "model.safetensors", {"format": "pt"})
        reference, info = AutoModelForCausalLM.from_pretrained(
            saved, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager", output_loading_info=True
        )
    wrong = {name: found for name, found in info.items() if found and not (case.config.tie_word_embeddings and name == "missing_keys")}
    if wrong:
        raise ValueError(f"{case.name}: transformers loads its own tensors with {wrong}")
    return reference.eval()


def quantize(case: Case, tensors: Tensors) -> tuple[Tensors, Tensors]:
    """What is stored, and what it means, tensor by tensor."""
    stored, meaning = {}, {}
    for name, value in tensors.items():
        module = name.removesuffix(".weight")
        if case.format and re.search(case.format.targets, module):
            parts, meaning[name] = case.format.write(module, value)
            stored |= parts
        else:
            kept = torch.float32 if name.endswith("e_score_correction_bias") else case.dtype
            stored[name] = value.to(kept)
            meaning[name] = stored[name].float()
    if case.format and len(stored) == len(tensors):
        raise ValueError(f"{case.name}: no tensor matches {case.format.targets}")
    return stored, meaning


def write_tensors(case: Case, stored: Tensors, directory: pathlib.Path) -> None:
    stored = {case.prefix + name: value for name, value in stored.items()}
    stored |= {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in case.extra.items()}
    stored = {name: value.contiguous() for name, value in sorted(stored.items())}
    if case.shards == 1:
        save_file(stored, directory / "model.safetensors", {"format": "pt"})
        return
    index = {}
    for shard in range(case.shards):
        file = f"model-{shard + 1:05d}-of-{case.shards:05d}.safetensors"
        part = dict(list(stored.items())[shard :: case.shards])
        save_file(part, directory / file, {"format": "pt"})
        index |= dict.fromkeys(part, file)
    size = sum(value.nbytes for value in stored.values())
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": index}, indent=1))


def write_config(case: Case, config: dict, directory: pathlib.Path) -> None:
    config |= {"dtype": str(case.dtype).removeprefix("torch.")}
    if case.old_config:
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        config |= {key: rope.pop(key) for key in ("partial_rotary_factor",) if key in rope}
        rope = {("type" if case.kimi and key == "rope_type" else key): value for key, value in rope.items()}
        config["rope_scaling"] = None if "default" in rope.values() else rope
        config["torch_dtype"] = config.pop("dtype")
        for new, old in {"num_local_experts": "num_experts"}.items():
            if config["model_type"] in ("qwen3_moe", "olmoe") and new in config:
                config[old] = config.pop(new)
    if case.kimi:
        config |= {"model_type": "kimi_k2", "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "ep_size": 1}
    if case.format:
        config["quantization_config"] = case.format.config
    if case.prefix:
        outer = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"}
        outer |= {"vision_config": {"model_type": "kimi_k25_vision"}}
        config = outer | {"text_config": config, "tie_word_embeddings": False, "torch_dtype": config.pop("torch_dtype")}
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def main(names: list[str]) -> None:
    known = {case.name: case for case in CASES}
    if unknown := set(names) - set(known):
        raise SystemExit(f"found {sorted(unknown)}, need names of {sorted(known)}")
    for name in names or known:
        make(known[name], GOLDEN / name)
        logits = np.load(GOLDEN / name / "logits.npy")
        size = sum(file.stat().st_size for file in (GOLDEN / name).iterdir())
        print(f"{name:28} {size / 1024:6.0f} KiB  logits std {logits.std():.2f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])

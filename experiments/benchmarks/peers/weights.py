"""A base as a Hugging Face directory in float32, every matrix dequantized exactly as a load reads it: the weights that peers get."""

import json
import pathlib

import numpy as np

from rl_adapter import quant
from rl_adapter.hub import load
from rl_adapter.hub.files import SINGLE, read_json, write_tensors


def write(directory: pathlib.Path, checkpoint: load.Checkpoint) -> None:
    """Writes config.json, generation_config.json, the tokenizer's files and one file of weights."""
    fields, problems = load.plan(checkpoint)
    if problems:
        raise ValueError(f"{checkpoint.path}:\n  " + "\n  ".join(problems))
    tensors = {}
    for field in fields:
        if field.name == "head" and checkpoint.spec.tie_embeddings:
            continue
        for piece in field.pieces:
            tensors[piece.source.name] = _value(checkpoint, field, piece)
    write_tensors(directory / SINGLE, tensors)
    _write(directory / "config.json", _config(checkpoint))
    tokenizer = checkpoint.tokenizer()
    tokenizer.backend.save(str(directory / "tokenizer.json"))
    names = {"pad_token": tokenizer.pad_id, "eos_token": tokenizer.stop_ids[0]}
    text = {name: tokenizer.backend.id_to_token(i) for name, i in names.items()}
    _write(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "padding_side": "left"} | text)
    _write(directory / "generation_config.json", {"eos_token_id": list(tokenizer.stop_ids), "pad_token_id": tokenizer.pad_id})


def _config(checkpoint: load.Checkpoint) -> dict:
    config = read_json(checkpoint.path / "config.json") if checkpoint.gguf is None else dict(checkpoint.gguf.config)
    config.pop("quantization_config", None)
    dtype = {"dtype": "float32", "torch_dtype": "float32"}  # of transformers 5, and of those before
    return config | dtype | {"vocab_size": checkpoint.spec.vocab, "tie_word_embeddings": checkpoint.spec.tie_embeddings}


def _value(checkpoint: load.Checkpoint, field: load.Field, piece: load.Piece) -> np.ndarray:
    if piece.codec is None:
        return checkpoint.tensors.read(piece.source.name, piece.source.index).astype(np.float32)
    value = piece.codec.read(piece.source, field.shape, checkpoint.tensors, checkpoint.quantization)
    return np.ascontiguousarray(np.asarray(quant.dequantize(value)).T) if quant.is_quantized(value) else value.astype(np.float32)


def _write(path: pathlib.Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")

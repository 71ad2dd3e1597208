"""GGUF files of llama models, as if they were a Hugging Face checkpoint: its config, its names of tensors, its tokenizer.json.

The only importer of gguf, which is an optional extra. Tensors keep their blocks of bytes: `codecs.ggml` reads those.
"""

import dataclasses
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from rl_adapter.hub import files

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Field of config.json -> key below "llama.", kind, default (... where there is none).
_FIELDS = {
    "num_hidden_layers": ("block_count", int, ...),
    "max_position_embeddings": ("context_length", int, ...),
    "hidden_size": ("embedding_length", int, ...),
    "intermediate_size": ("feed_forward_length", int, ...),
    "num_attention_heads": ("attention.head_count", int, ...),
    "num_key_value_heads": ("attention.head_count_kv", int, None),
    "rms_norm_eps": ("attention.layer_norm_rms_epsilon", float, ...),
    "rope_theta": ("rope.freq_base", float, 10000.0),
}
_HEAD_DIM = ("rope.dimension_count", "attention.key_length", "attention.value_length")
_NEUTRAL = {"rope.scaling.type": "none", "rope.scale_linear": 1.0, "expert_count": 0, "expert_used_count": 0}
_DIGITS = {"type": "Digits", "individual_digits": True}
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# tokenizer.ggml.pre -> how tokenizer.json says it
_SPLITS = {
    "gpt-2": [_BYTES],
    "smollm": [_DIGITS, _BYTES],
    "llama-bpe": [
        {"type": "Split", "pattern": {"Regex": _LLAMA3}, "behavior": "Isolated", "invert": False},
        _BYTES | {"use_regex": False},
    ],
}
_CONTROL, _USER_DEFINED = 3, 4  # token types
_LIMIT = 1 << 24  # reads of one value: three arrays of a vocabulary take some 10^6


@dataclasses.dataclass(frozen=True)
class Entry(files.Entry):
    """One tensor: its logical shape [out, in], and its GGUF type (or BF16, F16, F32); data are floats, or blocks uint8 [out, bytes]."""

    heads: int = 0  # of query and key projections, whose rows llama.cpp permutes


@dataclasses.dataclass(frozen=True)
class Tensors(files.Tensors):
    """The tensors of a file by their Hugging Face names."""

    entries: Mapping[str, Entry]

    def read(self, name: str, index: tuple[slice | int, ...] = ()) -> np.ndarray:
        """Floats [out, in], or blocks uint8 [out, bytes], rows in the order of Hugging Face; or the part that `index` picks."""
        entry = self.entries[name]
        data = rotate_half_rows(entry.data, entry.heads) if entry.heads else entry.data
        data = data.view(ml_dtypes.bfloat16) if entry.dtype == "BF16" else data
        return np.array(data[index])

    def to_file(self, name: str, rows: np.ndarray) -> np.ndarray:
        """What `read` gives, as it lies in the file."""
        heads = self.entries[name].heads
        return interleaved_rows(rows, heads) if heads else rows


@dataclasses.dataclass(frozen=True)
class Gguf:
    """A file, in the terms of a Hugging Face directory."""

    config: dict[str, Any]  # config.json, with bos_token_id, eos_token_id and pad_token_id (absent where unknown)
    tensors: Tensors
    tokenizer: dict[str, Any]  # tokenizer.json
    chat_template: str | None


def rotate_half_rows(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a projection in the order for interleaved RoPE (pairs 2i, 2i + 1) -> that for rotate-half (i, i + head_dim / 2)."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def interleaved_rows(rows: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `rotate_half_rows`."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def open_gguf(path: str | os.PathLike) -> Gguf:
    """Opens a file; tensors stay on disk until they are read.

    Raises:
        ValueError: not a whole GGUF file of the llama architecture with a byte-level BPE tokenizer; or what of it is not implemented.
    """
    path = pathlib.Path(path)
    fields, stored = _read_file(path)
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise ValueError(f"{path}: general.architecture: found {architecture!r}, need 'llama'")
    problems = []
    config = _config(fields, problems)
    entries = _entries(path, stored, config, problems)
    if "model.embed_tokens.weight" not in entries:
        problems.append("token_embd.weight: missing")
    else:
        config["vocab_size"] = entries["model.embed_tokens.weight"].shape[0]
    config["tie_word_embeddings"] = "lm_head.weight" not in entries
    for name, key in (("eos", "eos"), ("pad", "padding")):  # that there is an end at all is asked for with the tokenizer
        value = config.get(f"{name}_token_id")
        if value is not None and not (type(value) is int and 0 <= value < config.get("vocab_size", 2**31)):
            problems.append(f"tokenizer.ggml.{key}_token_id: found {value!r}, need the id of a token of the file")
    tokenizer = _tokenizer(fields, config, problems)
    template = fields.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        problems.append(f"tokenizer.chat_template: found {type(template).__name__}, need text")
    if problems:
        raise ValueError(f"{path}:\n  " + "\n  ".join(problems))
    return Gguf(config, Tensors(entries), tokenizer, template)


def _read_file(path: pathlib.Path) -> tuple[dict[str, Any], list[Any]]:
    """Values by key, and the library's tensors."""
    try:
        import gguf  # an optional extra
    except ImportError:
        raise ValueError(f"{path}: need the package gguf to read it: pip install gguf") from None

    class Reader(gguf.GGUFReader):
        """The library reads beyond the end of a file as if nothing were there, as often as a count in the file says."""

        reads = 0

        def _get(self, offset, dtype, count=1, override_order=None):
            self.reads += 1
            if offset + np.dtype(dtype).itemsize * int(count) > len(self.data) or self.reads > _LIMIT:
                raise ValueError(f"{count} x {np.dtype(dtype)} at byte {offset}, beyond what the file or a header can hold")
            return super()._get(offset, dtype, count, override_order)

    try:
        reader = Reader(path)
        if reader.endianess != gguf.GGUFEndian.LITTLE:
            raise ValueError("numbers in big-endian order")
        return {name: field.contents() for name, field in reader.fields.items()}, reader.tensors
    except Exception as error:  # whatever a reader that trusts its input meets
        raise ValueError(f"{path}: need a whole GGUF file, found {type(error).__name__}: {error}") from None


def _config(fields: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """config.json without vocab_size and tie_word_embeddings."""
    llama = {name.removeprefix("llama."): value for name, value in fields.items() if name.startswith("llama.")}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    config |= {"attention_bias": False, "mlp_bias": False, "rope_scaling": None}
    for name, (key, kind, default) in _FIELDS.items():
        value = llama.pop(key, default)
        if value is None:
            value = config.get("num_attention_heads")
        if not _is(kind, value):
            need = "an integer from 1 to 2^31 - 1" if kind is int else "a finite number above 0"
            problems.append(f"llama.{key}: found {'nothing' if value is ... else repr(value)}, need {need}")
        else:  # a float is f32 in the file: 1e-5 again, not 9.999999747378752e-06
            config[name] = value if kind is int else float(str(np.float32(value)))
    if not problems:
        config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
        if config["hidden_size"] % config["num_attention_heads"] or config["head_dim"] % 2:
            problems.append(f"llama.embedding_length: found {config['hidden_size']}, need an even number of features to a head")
        for key in _HEAD_DIM:
            if llama.pop(key, config["head_dim"]) != config["head_dim"]:
                problems.append(f"llama.{key}: found another number than {config['head_dim']}, the features of a head")
    llama.pop("vocab_size", None)  # the rows of the embedding are
    wrong = {key: value for key, value in llama.items() if key not in _HEAD_DIM and (key not in _NEUTRAL or value != _NEUTRAL[key])}
    problems += [f"llama.{key}: found {str(value)[:80]}, which is not implemented" for key, value in wrong.items()]
    for name in ("bos", "eos", "pad"):
        value = fields.get(f"tokenizer.ggml.{'padding' if name == 'pad' else name}_token_id")
        if value is not None:
            config[f"{name}_token_id"] = value
    return config


def _is(kind: type, value: Any) -> bool:
    return type(value) is kind and (1 <= value < 2**31 if kind is int else 0 < value < 1e38)


def _entries(path: pathlib.Path, stored: list[Any], config: dict[str, Any], problems: list[str]) -> dict[str, Entry]:
    entries = {}
    heads = {"attn_q": config.get("num_attention_heads", 0), "attn_k": config.get("num_key_value_heads", 0)}
    for tensor in stored:
        name, part = _name(tensor.name)
        shape = tuple(int(n) for n in reversed(tensor.shape.tolist()))
        count = heads.get(part, 0)
        if name is None:
            problems.append(f"{tensor.name}: found a tensor that is not implemented")
        elif count and (len(shape) != 2 or shape[0] % (2 * count)):
            problems.append(f"{tensor.name}: found shape {list(shape)}, need an even number of rows to each of {count} heads")
        else:
            entries[name] = Entry(shape, tensor.tensor_type.name, path, tensor.data, count)
    return entries


def _name(name: str) -> tuple[str | None, str]:
    """The Hugging Face name of a tensor (None: there is none), and its part of a layer."""
    match = re.fullmatch(r"(?:blk\.(0|[1-9][0-9]*)\.)?(\w+)\.weight", name, re.ASCII)
    layer, part = match.groups() if match else (None, "")
    if match and layer is None and part in _TOP:
        return f"{_TOP[part]}.weight", part
    if layer is not None and part in _BLOCK:
        return f"model.layers.{layer}.{_BLOCK[part]}.weight", part
    return None, part


def _tokenizer(fields: dict[str, Any], config: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """tokenizer.json: BPE over bytes, whose control tokens are special."""
    ggml = {name.removeprefix("tokenizer.ggml."): v for name, v in fields.items() if name.startswith("tokenizer.ggml.")}
    tokens, types, merges = (ggml.get(name) for name in ("tokens", "token_type", "merges"))
    before = len(problems)
    if ggml.get("model") != "gpt2":
        problems.append(f"tokenizer.ggml.model: found {ggml.get('model')!r}, need 'gpt2': nothing but byte-level BPE is implemented")
    if ggml.get("pre") not in tuple(_SPLITS):
        problems.append(f"tokenizer.ggml.pre: found {ggml.get('pre')!r}, need {' or '.join(map(repr, _SPLITS))}")
    if ggml.get("add_space_prefix", False) is not False or ggml.get("add_eos_token", False) is not False:
        problems.append("tokenizer.ggml: found add_space_prefix or add_eos_token, which are not implemented")
    if not _texts(tokens) or len(set(tokens)) != len(tokens) or len(tokens) != config.get("vocab_size"):
        problems.append("tokenizer.ggml.tokens: need as many distinct texts as the embedding has rows")
    elif not isinstance(types, list) or len(types) != len(tokens):
        problems.append("tokenizer.ggml.token_type: need a number for each token")
    if not _texts(merges) or not all(merge.count(" ") == 1 for merge in merges):
        problems.append("tokenizer.ggml.merges: need pairs of texts with a space between")
    begin = ggml.get("add_bos_token", False)
    if begin and not (isinstance(tokens, list) and type(config.get("bos_token_id")) is int and 0 <= config["bos_token_id"] < len(tokens)):
        problems.append(f"tokenizer.ggml.bos_token_id: found {config.get('bos_token_id')!r}, need an id, as add_bos_token is true")
    if len(problems) > before:
        return {}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": i, "content": token, "special": kind == _CONTROL, **flags}
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    bos = {"SpecialToken": {"id": tokens[config["bos_token_id"]], "type_id": 0}} if begin else None
    text = [{"Sequence": {"id": name, "type_id": at}} for at, name in enumerate("AB")]
    after = {
        "type": "TemplateProcessing",
        "single": [bos, text[0]],
        "pair": [bos, *text],
        "special_tokens": {tokens[config["bos_token_id"]]: _special(config["bos_token_id"], tokens)} if begin else {},
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _SPLITS[ggml["pre"]]},
        "post_processor": after if begin else None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
            "ignore_merges": ggml["pre"] == "llama-bpe",
        },
    }


def _special(i: int, tokens: list[str]) -> dict[str, Any]:
    return {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]}


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)

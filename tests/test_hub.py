"""Checkpoints: what is loaded is what lies on disk, bit for bit, and what is wrong is one clear ValueError."""

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
import reference
from safetensors.numpy import load_file, save_file

from rl_adapter import quant
from rl_adapter.hub import families, pack_quantized
from rl_adapter.hub.files import open_tensors
from rl_adapter.hub.load import load
from rl_adapter.hub.save import round_to_grid, save_checkpoint
from rl_adapter.hub.tokenizer import load_tokenizer

SPEC = reference.tiny_spec()
FORMS = {"linear": "int8", "head": "fixed16", "router": "fixed16"}
Q0 = "model.layers.0.self_attn.q_proj.weight"
EXPERT = "model.layers.1.mlp.experts.2.down_proj.weight"


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    save_checkpoint(directory, SPEC, reference.random_params(0, SPEC))
    return directory


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def change_config(directory, **fields):
    path = directory / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))


def change_tensors(directory, **changes):
    """Each value a function of the old array; None takes the tensor out."""
    tensors = load_file(directory / "model.safetensors")
    for name, change in changes.items():
        tensors[name] = change and change(tensors.get(name))
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items() if v is not None}, directory / "model.safetensors")


def write_float(directory, spec, params, fused=False, dtype=np.float32):
    """The same model unquantized, written without save.py."""
    tensors = {"model.embed_tokens.weight": params.embed, "model.norm.weight": params.final_norm}
    if not spec.tie_embeddings:
        tensors["lm_head.weight"] = params.head.T
    for field, name in families.QWEN3_MOE.layer.items():
        for index in np.ndindex(spec.layers, *(spec.experts,) * (field in families.EXPERTS)):
            full = name.format(**dict(zip("le", index, strict=False)))
            tensors[full] = getattr(params.layers, field)[index].T
    if fused:
        for layer in range(spec.layers):
            at = f"model.layers.{layer}.mlp.experts."
            parts = {f: np.stack([tensors.pop(f"{at}{e}.{f}_proj.weight") for e in range(spec.experts)]) for f in families.EXPERTS}
            tensors[at + "gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], 1)
            tensors[at + "down_proj"] = parts["down"]
    directory.mkdir()
    save_file({k: np.ascontiguousarray(v.astype(dtype)) for k, v in tensors.items()}, directory / "model.safetensors")
    return directory


def write_sharded(saved, directory):
    directory.mkdir()
    shutil.copy(saved / "config.json", directory)
    tensors = load_file(saved / "model.safetensors")
    where = {name: f"model-{i % 3 + 1:05}-of-00003.safetensors" for i, name in enumerate(sorted(tensors))}
    for shard in set(where.values()):
        save_file({n: tensors[n] for n in tensors if where[n] == shard}, directory / shard)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return directory


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert [x.dtype for x in jax.tree.leaves(a)] == [x.dtype for x in jax.tree.leaves(b)]


def decode_words(words):
    """The codes [out, in] of `weight_packed`, as the format's description has it."""
    n, m = words.shape
    codes = np.zeros((n, m * 8), np.int8)
    for j in range(8):
        codes[:, j::8] = ((words.view(np.uint32) >> (4 * j)) & 0xF).astype(np.int8) - 8
    return codes


# What is taken from disk


@pytest.mark.parametrize("group", [32, 16, 0])
def test_packed_weights_are_taken_bit_for_bit(copy, group):
    """Random words, including codes of -8 and scales on no grid: nothing may be re-quantized."""
    rng = np.random.default_rng(1)
    tensors = load_file(copy / "model.safetensors")
    for name, value in tensors.items():
        if name.endswith("_packed"):
            tensors[name] = rng.integers(-(2**31), 2**31, value.shape).astype(np.int32)
            scale = name.removesuffix("_packed") + "_scale"
            groups = value.shape[1] * 8 // group if group else 1
            tensors[scale] = rng.uniform(0, 1, (len(value), groups)).astype(ml_dtypes.bfloat16)
    save_file(tensors, copy / "model.safetensors")
    config = json.loads((copy / "config.json").read_text())
    weights = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    weights |= {"strategy": "group", "group_size": group} if group else {"strategy": "channel", "group_size": None}
    change_config(copy, quantization_config=config["quantization_config"])

    spec, base, report = load(copy, FORMS)
    assert spec == SPEC
    for field in families.LINEARS:
        if field == "router":
            continue
        w = getattr(base.layers, field)
        assert w.scale[0].dtype == ml_dtypes.bfloat16
        words = pack_quantized.to_words(w)
        for index in np.ndindex(*w.qvalue.shape[:-3]):
            name = families.QWEN3_MOE.layer[field].format(**dict(zip("le", index, strict=False)))
            codes = np.asarray(quant.unpack(quant.qtensor(w.qvalue[index], w.scale[0][index])))
            np.testing.assert_array_equal(codes.reshape(-1, codes.shape[-1]).T, decode_words(tensors[name + "_packed"]))
            np.testing.assert_array_equal(w.scale[0][index].T, tensors[name + "_scale"])
            np.testing.assert_array_equal(words[index], tensors[name + "_packed"])
    assert report["taken"] == SPEC.layers * (4 + 3 * SPEC.experts)
    assert report["quantized"] == SPEC.layers + 1
    assert sum(report["bytes"].values()) == sum(x.nbytes for x in jax.tree.leaves(base))
    assert set(report["bytes"]) == {"int4", "fixed16", "bfloat16", "float32"}


def test_a_saved_model_is_the_one_that_fake_quantize_trained(saved):
    params = reference.random_params(0, SPEC)
    _, base, _ = load(saved, FORMS)
    for field in ("q", "k", "v", "o", "gate", "up", "down"):
        trained = np.asarray(quant.fake_quantize(getattr(params.layers, field), 32))
        # Straight-through, w + (rounded - w), itself rounds once more.
        np.testing.assert_allclose(reference.decode(getattr(base.layers, field)), trained, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(base.embed, params.embed)
    np.testing.assert_array_equal(base.final_norm, params.final_norm.astype(ml_dtypes.bfloat16))
    assert base.layers.attn_norm.dtype == np.float32


def test_the_grid_is_a_fixed_point(saved):
    _, base, _ = load(saved, FORMS)
    w = quant.qtensor(base.layers.q.qvalue[0], base.layers.q.scale[0][0])
    again = round_to_grid(reference.decode(w), 32)
    np.testing.assert_array_equal(again.qvalue, w.qvalue)
    np.testing.assert_array_equal(again.scale[0], w.scale[0])


def test_shards_equal_one_file(saved, tmp_path):
    spec, base, report = load(write_sharded(saved, tmp_path / "shards"), FORMS)
    expected = load(saved, FORMS)
    assert (spec, report) == (expected[0], expected[2])
    assert_equal(base, expected[1])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_unquantized_weights_are_quantized_as_asked(saved, tmp_path, fused, tied, dtype):
    spec = reference.tiny_spec(tie_embeddings=tied)
    params = reference.random_params(3, spec)
    directory = write_float(tmp_path / "float", spec, params, fused, dtype)
    shutil.copy(saved / "config.json", directory)
    change_config(directory, quantization_config="absent", tie_word_embeddings=tied)
    found, base, report = load(directory, {"linear": "int4_g32", "head": "int8", "router": "fixed16"})
    assert found == spec and report["taken"] == 0
    for field in families.LINEARS:
        w = getattr(params.layers, field).astype(dtype)
        assert_equal(getattr(base.layers, field), quant.quantize(w, "fixed16" if field == "router" else "int4_g32"))
    assert_equal(base.head, quant.quantize(params.head.astype(dtype), "int8"))
    assert base.embed.dtype == dtype


def test_reads_lazily_and_reports_progress(saved):
    tensors = open_tensors(saved)
    assert tensors.entries[Q0 + "_packed"].shape == (SPEC.heads * SPEC.head_dim, SPEC.d_model // 8)
    assert tensors.read("model.norm.weight").dtype == ml_dtypes.bfloat16
    calls = []
    load(saved, FORMS, lambda done, total: calls.append((done, total)))
    assert calls == [(i + 1, len(calls)) for i in range(len(calls))]


# What is refused


def test_config_as_newer_writers_have_it(copy):
    change_config(copy, rope_theta="absent", rope_parameters={"rope_type": "default", "rope_theta": 10000})
    change_config(copy, num_experts="absent", num_local_experts=SPEC.experts)
    assert families.read_spec(copy) == SPEC


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architectures", ["LlamaForCausalLM"]),
        ("architectures", "absent"),
        ("model_type", "qwen3"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("use_sliding_window", True),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("rope_parameters", {"rope_type": "linear", "rope_theta": 1e4}),
        ("rope_theta", None),
        ("rope_theta", float("inf")),
        ("decoder_sparse_step", 2),
        ("mlp_only_layers", [0]),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", True),
        ("num_hidden_layers", 2**30),
        ("num_experts", 2**30),
        ("hidden_size", "64"),
        ("vocab_size", 10**400),
        ("norm_topk_prob", "absent"),
        ("num_key_value_heads", 3),
        ("head_dim", 31),
        ("num_experts_per_tok", 5),
        ("num_local_experts", 7),
        ("partial_rotary_factor", 0.5),
    ],
)
def test_config_fields_that_are_not_implemented(copy, field, value):
    change_config(copy, **{field: value})
    with pytest.raises(ValueError, match=field.replace("num_local_experts", "num_experts")):
        load(copy, FORMS)


def test_an_unknown_architecture_lists_the_known(copy):
    change_config(copy, architectures=["LlamaForCausalLM"])
    with pytest.raises(ValueError, match="found .'LlamaForCausalLM'., need one of Qwen3MoeForCausalLM"):
        families.read_spec(copy)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("quant_method",), "fp8"),
        (("format",), "nvfp4-pack-quantized"),
        (("kv_cache_scheme",), {"num_bits": 8}),
        (("transform_config",), {"config_groups": {"u": {}}}),
        (("config_groups",), {}),
        (("config_groups",), {"W4A16": ["Linear"]}),
        (("config_groups", "group_0", "input_activations"), {"num_bits": 8}),
        (("config_groups", "group_0", "weights", "num_bits"), 8),
        (("config_groups", "group_0", "weights", "type"), "float"),
        (("config_groups", "group_0", "weights", "symmetric"), False),
        (("config_groups", "group_0", "weights", "strategy"), "block"),
        (("config_groups", "group_0", "weights", "actorder"), "group"),
        (("config_groups", "group_0", "weights", "group_size"), 7),
    ],
)
def test_formats_that_are_not_implemented(copy, where, value):
    config = json.loads((copy / "config.json").read_text())["quantization_config"]
    inner = config
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    change_config(copy, quantization_config=config)
    with pytest.raises(ValueError, match=where[-1] if value != {"W4A16": ["Linear"]} else "W4A16"):
        load(copy, FORMS)


def test_all_that_is_wrong_is_listed_at_once(copy):
    changes = {
        "model.norm.weight": lambda x: x[:-1],
        Q0 + "_packed": lambda x: x.astype(np.int64),
        "model.layers.0.self_attn.k_proj.weight_scale": lambda x: np.full_like(x, np.nan),
        "model.layers.1.self_attn.k_proj.weight_scale": lambda x: -x,
        "model.layers.1.self_attn.q_proj.weight_shape": lambda x: x[::-1],
        EXPERT + "_scale": None,
        "model.layers.0.mlp.gate.bias": lambda _: np.zeros(4, np.float32),
    }
    change_tensors(copy, **changes)
    with pytest.raises(ValueError) as error:
        load(copy, FORMS)
    message = str(error.value)
    for name in changes:
        assert name in message
    for words in ("missing", "unexpected", "need [64]", "found I64, need I32", "NaN", "need [128, 64]"):
        assert words in message
    assert message.count("\n") == len(changes)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.gate.weight"])
def test_floats_must_be_finite(copy, name):
    change_tensors(copy, **{name: lambda x: (x * np.inf).astype(x.dtype)})
    with pytest.raises(ValueError, match=name):
        load(copy, FORMS)


def test_one_form_in_all_layers(copy):
    floats = {EXPERT: lambda _: np.zeros((SPEC.d_model, SPEC.d_expert), np.float32)}
    change_tensors(copy, **floats, **{EXPERT + s: None for s in ("_packed", "_scale", "_shape")})
    with pytest.raises(ValueError, match="down: found INT4 .* and not quantized, need one form"):
        load(copy, FORMS)


def test_packed_weights_need_a_quantization_config(copy):
    change_config(copy, quantization_config="absent")
    with pytest.raises(ValueError, match="quantization_config: absent"):
        load(copy, FORMS)


@pytest.mark.parametrize("forms", [{"linear": "int8"}, FORMS | {"head": "int3"}, FORMS | {"router": "int4_g128"}])
def test_forms_that_cannot_be(saved, forms):
    with pytest.raises(ValueError, match="quantize|router"):
        load(saved, forms)


def test_index_and_shards_must_agree(saved, tmp_path):
    index = "model.safetensors.index.json"
    for i, change in enumerate([
        lambda d, w: (d / w[Q0 + "_packed"]).unlink(),
        lambda d, w: w.update({"model.extra": w[Q0 + "_packed"]}),
        lambda d, w: w.pop(Q0 + "_packed"),
        lambda d, w: w.update({Q0 + "_packed": "../saved/model.safetensors"}),
        lambda d, w: w.update({Q0 + "_packed": str(saved / "model.safetensors")}),
        lambda d, w: w.update({Q0 + "_packed": ".."}),
        lambda d, w: w.update({Q0 + "_packed": 3}),
        lambda d, w: w.clear(),
    ]):  # fmt: skip
        directory = write_sharded(saved, tmp_path / str(i))
        where = json.loads((directory / index).read_text())["weight_map"]
        change(directory, where)
        (directory / index).write_text(json.dumps({"weight_map": where}))
        with pytest.raises(ValueError, match="weight_map|no such file|disagrees"):
            load(directory, FORMS)


def test_files_that_are_not_there(saved, tmp_path):
    with pytest.raises(ValueError, match="config.json"):
        load(tmp_path, FORMS)
    shutil.copy(saved / "config.json", tmp_path)
    with pytest.raises(ValueError, match="found neither"):
        load(tmp_path, FORMS)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="config.json"):
        load(tmp_path, FORMS)


def test_mutated_files_end_in_an_error_or_in_the_same_tensors(saved, tmp_path):
    """Cuts, and flipped bytes of header, config and data: a ValueError, or a load whose arrays have the shapes of the model."""
    rng = np.random.default_rng(0)
    weights, config = (saved / "model.safetensors").read_bytes(), (saved / "config.json").read_bytes()
    header = 8 + int.from_bytes(weights[:8], "little")
    shapes = jax.tree.map(np.shape, load(saved, FORMS)[1])
    for trial in range(90):
        mutated, text = bytearray(weights), bytearray(config)
        if trial % 3 == 0:
            mutated = mutated[: rng.integers(len(mutated))]
        else:
            target, end = ((mutated, 8), (mutated, header), (text, len(text)))[rng.integers(3)]
            for at in rng.integers(end, size=rng.integers(1, 4)):
                target[at] = rng.integers(256)
        (tmp_path / "model.safetensors").write_bytes(mutated)
        (tmp_path / "config.json").write_bytes(text)
        try:
            _, base, _ = load(tmp_path, FORMS)
        except ValueError:
            continue
        assert jax.tree.map(np.shape, base) == shapes


# Tokenizer


@pytest.fixture
def tokenizer_dir(copy):
    import tokenizers

    tok = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2, "b": 3}, unk_token="<pad>"))
    tok.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tok.enable_truncation(1)
    tok.enable_padding(length=8)
    tok.save(str(copy / "tokenizer.json"))
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3], "pad_token_id": 0}))
    return copy


def test_tokenizer(tokenizer_dir):
    tok = load_tokenizer(tokenizer_dir, 48)
    assert tok.encode("a b a") == [2, 3, 2] and tok.decode([2, 3]) == "a b"
    assert tok.stop_ids == (1, 3) and tok.pad_id == 0
    (tokenizer_dir / "generation_config.json").unlink()
    change_config(tokenizer_dir, eos_token_id=1)
    tok = load_tokenizer(tokenizer_dir, 48)
    assert tok.stop_ids == (1,) and tok.pad_id == 1


@pytest.mark.parametrize(
    ("generation", "vocab", "match"),
    [
        ({}, 48, "config.json: eos_token_id"),
        ({"eos_token_id": 48}, 48, "generation_config.json: eos_token_id"),
        ({"eos_token_id": []}, 48, "eos_token_id"),
        ({"eos_token_id": 1, "pad_token_id": -1}, 48, "pad_token_id"),
        ({"eos_token_id": 1}, 3, "vocab_size"),
    ],
)
def test_tokenizer_errors(tokenizer_dir, generation, vocab, match):
    (tokenizer_dir / "generation_config.json").write_text(json.dumps(generation))
    with pytest.raises(ValueError, match=match):
        load_tokenizer(tokenizer_dir, vocab)


@pytest.mark.parametrize("text", [None, "{", "{}", '{"model": {"type": "None"}}'])
def test_tokenizer_file_errors(tokenizer_dir, text):
    path = tokenizer_dir / "tokenizer.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(ValueError, match="tokenizer.json"):
        load_tokenizer(tokenizer_dir, 48)

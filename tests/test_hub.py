"""What save writes is what load reads: INT4 bit for bit, floats quantized as asked, in one file or in shards, single experts or fused."""

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
import reference
from safetensors.numpy import load_file, save_file

from rl_adapter import mesh as meshes
from rl_adapter import quant
from rl_adapter.hub import families, files, load
from rl_adapter.hub.codecs import compressed_tensors
from rl_adapter.hub.files import open_tensors
from rl_adapter.hub.save import round_to_grid, save_checkpoint

SPEC = reference.tiny_spec()
FORMS = {"linear": "int8", "head": "fixed16", "router": "fixed16"}
PACKED = ("q", "k", "v", "o", "gate", "up", "down")
Q0 = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    save_checkpoint(directory, SPEC, reference.random_params(0, SPEC))
    return directory


def read(directory, forms=FORMS):
    return load.load(directory, forms, meshes.make(1))


def change_config(directory, **fields):
    path = directory / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))


def name_of(field, *index):
    """By the format's own names, written without families.py."""
    module = {"router": "mlp.gate", "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    module |= {f: f"self_attn.{f}_proj" for f in "qkvo"} | {f: f"self_attn.{f}" for f in ("q_norm", "k_norm")}
    path = f"mlp.experts.{index[1]}.{field}_proj" if len(index) == 2 else module[field]
    return f"model.layers.{index[0]}.{path}.weight"


def slices(layer):
    """(field, index of a slice, the slice) of all fields of a layer that holds arrays."""
    for field in (*PACKED, "router", "attn_norm", "mlp_norm", "q_norm", "k_norm"):
        lead = (SPEC.layers, SPEC.experts) if field in ("gate", "up", "down") else (SPEC.layers,)
        for index in np.ndindex(*lead):
            yield field, index, jax.tree.map(lambda x: np.asarray(x)[index], getattr(layer, field))  # noqa: B023


def write_float(directory, spec, params, fused, dtype):
    """The same model unquantized, written without save.py."""
    tensors = {"model.embed_tokens.weight": params.embed, "model.norm.weight": params.final_norm}
    if not spec.tie_embeddings:
        tensors["lm_head.weight"] = params.head.T
    tensors |= {name_of(field, *index): value.T for field, index, value in slices(params.layers[0])}
    for layer in range(spec.layers if fused else 0):
        at = f"model.layers.{layer}.mlp.experts."
        stack = lambda field: np.stack([tensors.pop(name_of(field, layer, e)) for e in range(spec.experts)])  # noqa: B023
        tensors[at + "gate_up_proj"] = np.concatenate([stack("gate"), stack("up")], 1)
        tensors[at + "down_proj"] = stack("down")
    directory.mkdir()
    save_file({k: np.ascontiguousarray(v.astype(dtype)) for k, v in tensors.items()}, directory / "model.safetensors")
    return directory


def decode_words(words):
    """The codes [out, in] of `weight_packed`, as the format's description has it."""
    n, m = words.shape
    codes = np.zeros((n, m * 8), np.int8)
    for j in range(8):
        codes[:, j::8] = ((words.view(np.uint32) >> (4 * j)) & 0xF).astype(np.int8) - 8
    return codes


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert [x.dtype for x in jax.tree.leaves(a)] == [x.dtype for x in jax.tree.leaves(b)]


@pytest.mark.parametrize("group", [32, 16, 0])
def test_packed_weights_are_taken_bit_for_bit(saved, tmp_path, group):
    """Random words, including codes of -8 and scales on no grid: nothing may be re-quantized."""
    copy = shutil.copytree(saved, tmp_path / "copy")
    rng = np.random.default_rng(1)
    tensors = load_file(copy / "model.safetensors")
    for name, value in tensors.items():
        if name.endswith("_packed"):
            tensors[name] = rng.integers(-(2**31), 2**31, value.shape).astype(np.int32)
            groups = value.shape[1] * 8 // group if group else 1
            tensors[name.removesuffix("_packed") + "_scale"] = rng.uniform(0, 1, (len(value), groups)).astype(ml_dtypes.bfloat16)
    save_file(tensors, copy / "model.safetensors")
    settings = json.loads((copy / "config.json").read_text())["quantization_config"]
    weights = settings["config_groups"]["group_0"]["weights"]
    weights |= {"strategy": "group", "group_size": group} if group else {"strategy": "channel", "group_size": None}
    change_config(copy, quantization_config=settings)
    loaded = read(copy)
    assert loaded.spec == SPEC
    for field, index, w in slices(loaded.base.layers[0]):
        if field in PACKED:
            name = name_of(field, *index)
            codes = np.asarray(quant.unpack("int4", w.qvalue)).astype(np.int8)
            np.testing.assert_array_equal(codes.reshape(-1, codes.shape[-1]).T, decode_words(tensors[name + "_packed"]))
            np.testing.assert_array_equal(w.scale[0].T, tensors[name + "_scale"])
            np.testing.assert_array_equal(compressed_tensors.to_words(w), tensors[name + "_packed"])


def test_a_saved_model_is_the_one_that_fake_quantize_trained(saved):
    params = reference.random_params(0, SPEC)
    base = read(saved).base
    for field in PACKED:
        trained = np.asarray(quant.fake_quantize(getattr(params.layers[0], field), 32))
        # Straight-through, w + (rounded - w), itself rounds once more.
        np.testing.assert_allclose(reference.decode(getattr(base.layers[0], field)), trained, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(base.embed, params.embed)
    np.testing.assert_array_equal(base.final_norm, params.final_norm.astype(ml_dtypes.bfloat16))
    assert base.layers[0].attn_norm.dtype == np.float32


def test_the_grid_is_a_fixed_point(saved):
    for field, _, w in slices(read(saved).base.layers[0]):
        if field in PACKED:
            again = round_to_grid(np.asarray(reference.decode(w), np.float32), 32)
            np.testing.assert_array_equal(again.qvalue, w.qvalue)
            np.testing.assert_array_equal(again.scale[0], w.scale[0])


def test_shards_equal_one_file(saved, tmp_path):
    shutil.copy(saved / "config.json", tmp_path)
    tensors = load_file(saved / "model.safetensors")
    where = {name: f"model-{i % 3 + 1:05}-of-00003.safetensors" for i, name in enumerate(sorted(tensors))}
    for shard in set(where.values()):
        save_file({n: tensors[n] for n in tensors if where[n] == shard}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    shards, whole = read(tmp_path), read(saved)
    assert (shards.spec, shards.digest, shards.report) == (whole.spec, whole.digest, whole.report)
    assert_equal(shards.base, whole.base)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_unquantized_weights_are_quantized_as_asked(saved, tmp_path, fused, tied, dtype):
    spec = reference.tiny_spec(tie_embeddings=tied)
    params = reference.random_params(3, spec)
    directory = write_float(tmp_path / "float", spec, params, fused, dtype)
    shutil.copy(saved / "config.json", directory)
    change_config(directory, quantization_config="absent", tie_word_embeddings=tied)
    loaded = read(directory, {"linear": "int4_g32", "head": "int8", "router": "fixed16"})
    assert loaded.spec == spec and loaded.report["kept"] == 0
    for field in (*PACKED, "router"):
        w = getattr(params.layers[0], field).astype(dtype)
        assert_equal(getattr(loaded.base.layers[0], field), quant.quantize(w, "fixed16" if field == "router" else "int4_g32"))
    assert_equal(loaded.base.head, quant.quantize(params.head.astype(dtype), "int8"))
    assert loaded.base.embed.dtype == dtype


def test_tensors_are_read_one_by_one(saved):
    tensors = open_tensors(saved)
    assert tensors.entries[Q0 + "_packed"].shape == (SPEC.heads * SPEC.head_dim, SPEC.d_model // 8)
    assert tensors.read("model.norm.weight").dtype == ml_dtypes.bfloat16
    rows = tensors.read(Q0 + "_packed", (slice(2, 4),))
    np.testing.assert_array_equal(rows, load_file(saved / "model.safetensors")[Q0 + "_packed"][2:4])


def test_config_as_newer_writers_have_it(saved, tmp_path):
    copy = shutil.copytree(saved, tmp_path / "copy")
    change_config(copy, rope_theta="absent", rope_parameters={"rope_type": "default", "rope_theta": 10000})
    change_config(copy, num_experts="absent", num_local_experts=SPEC.experts)
    assert families.read_spec(copy) == SPEC and read(copy).digest == read(saved).digest


def test_packed_weights_need_a_quantization_config(saved, tmp_path):
    copy = shutil.copytree(saved, tmp_path / "copy")
    change_config(copy, quantization_config="absent")
    with pytest.raises(ValueError, match="'compressed-tensors', but quantization_config names None"):
        read(copy)


def test_one_file_beside_an_index_of_others_is_refused(saved, tmp_path):
    """Which of the two is the model cannot be told: whichever were taken, the other might be meant."""
    directory = shutil.copytree(saved, tmp_path / "both")
    names = list(load_file(directory / "model.safetensors"))
    for shard, good in (("model.safetensors", True), ("model-00001-of-00001.safetensors", False), ("gone.safetensors", False)):
        index = {"weight_map": dict.fromkeys(names, shard)}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        shutil.copy(saved / "model.safetensors", directory / "model-00001-of-00001.safetensors")
        if good:
            assert open_tensors(directory).entries.keys() == open_tensors(saved).entries.keys()
            continue
        with pytest.raises(ValueError, match=f"both: found both model.safetensors and .*index.json, which names {shard}"):
            open_tensors(directory)


def test_files_are_as_open_to_others_as_any(tmp_path):
    files.write_tensors(tmp_path / "a.safetensors", {"x": np.zeros(3, np.float32)})
    (tmp_path / "b").write_text("")
    assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "b").stat().st_mode

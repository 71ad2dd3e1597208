"""The loader: what lies on a mesh is what lies on disk, each device gets its own part alone, and the host never has the model."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import reference
from safetensors.numpy import load_file, save_file

from rl_adapter import mesh as meshes
from rl_adapter import quant
from rl_adapter.hub import codecs, families, stream
from rl_adapter.hub.load import load, open_checkpoint
from rl_adapter.hub.save import save_checkpoint

GOLDEN = pathlib.Path(__file__).parent / "golden"
FORMS = {"linear": "int8", "head": "fixed16", "router": "fixed16"}
SHAPES = [(1, 1, 1), (2, 2, 2), (1, 8, 1)]
SPEC = reference.tiny_spec(experts=8)
K0 = "model.layers.0.self_attn.k_proj.weight"
K1 = "model.layers.1.self_attn.k_proj.weight"
EXPERT = "model.layers.1.mlp.experts.2.down_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    save_checkpoint(directory, SPEC, reference.random_params(0, SPEC))
    return directory


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def change_tensors(directory, **changes):
    """Each value a function of the old array; None takes the tensor out."""
    tensors = load_file(directory / "model.safetensors")
    for name, change in changes.items():
        tensors[name] = change and change(tensors.get(name))
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items() if v is not None}, directory / "model.safetensors")


def on_host(path, forms=FORMS):
    """{(run, field): tree of host arrays}, read slice by slice and stacked, without the loader."""
    checkpoint, out = open_checkpoint(path), {}
    described, tensors, config = checkpoint.described, checkpoint.tensors, checkpoint.quantization
    spec = described.spec

    def read(field, shape, *index):
        source = families.source(described, field, *index, has=tensors.__contains__)
        if len(shape) == 1:
            return tensors.read(source.name, source.index).astype(np.float32)
        value = codecs.find(source, tensors, config).read(source, shape, tensors, config)
        if quant.is_quantized(value) or field == "embed":
            return value
        return quant.quantize(value.T, forms.get(field, forms["linear"]))

    for field, shape in families.top(spec).items():
        out[None, field] = read(field, shape)
    for run, (first, count, sparse) in enumerate(spec.stacks):
        for field, shape in families.fields(described, sparse).items():
            lead = (count, spec.experts) if families.per_expert(field) else (count,)
            slices = [read(field, shape, first + i[0], *i[1:]) for i in np.ndindex(*lead)]
            out[run, field] = jax.tree.map(lambda *x: np.stack(x).reshape(*lead, *x[0].shape), *slices)  # noqa: B023
    return out


def field_of(base, run, name):
    if run is None:
        return getattr(base, name)
    layer = base.layers[run]
    return layer.bias[name.removeprefix("bias.")] if name.startswith("bias.") else getattr(layer, name)


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert [x.dtype for x in jax.tree.leaves(a)] == [x.dtype for x in jax.tree.leaves(b)]


# --- what is loaded ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["saved", "gpt_oss-mxfp4", "glm4_moe-awq", "qwen3_moe-fp8", "olmoe-gptq_v2-act_order", "llama-nvfp4", "qwen3_moe-f32-mixed-fused"],
)
def test_every_mesh_holds_what_the_disk_holds(name, saved):
    path = saved if name == "saved" else GOLDEN / name
    expected, digests = on_host(path), set()
    for shape in SHAPES:
        loaded = load(path, FORMS, meshes.make(*shape))
        for (run, field), value in expected.items():
            assert_equal(field_of(loaded.base, run, field), value)
        # And nothing else: bytes of all leaves together.
        assert sum(x.nbytes for x in jax.tree.leaves(loaded.base)) == sum(x.nbytes for x in jax.tree.leaves(list(expected.values())))
        assert loaded.spec == open_checkpoint(path).spec
        digests.add(loaded.digest)
    assert digests == {quant.digest(loaded.base)}


def test_latents_of_mla():
    """kv_b [H * (nope + v), kv_rank] is taken apart by heads, k_up as it multiplies a query, v_up a latent."""
    path = GOLDEN / "deepseek_v3-bf16"
    loaded = load(path, FORMS, meshes.make(2, 2, 2))
    tensors, spec = load_file(path / "model.safetensors"), loaded.spec
    assert len(spec.stacks) == 2
    for run, (first, count, _) in enumerate(spec.stacks):
        for i in range(count):
            w = tensors[f"model.layers.{first + i}.self_attn.kv_b_proj.weight"].astype(np.float32)
            w = w.reshape(spec.heads, spec.mla.nope + spec.mla.v, spec.mla.kv_rank)
            layer = jax.tree.map(lambda x: x[i], loaded.base.layers[run])  # noqa: B023
            # fixed16 keeps a bf16 weight to 2^-15 of the largest in its column.
            np.testing.assert_allclose(quant.dequantize(layer.k_up), w[:, : spec.mla.nope], atol=np.abs(w).max() * 2**-15)
            expected = w[:, spec.mla.nope :].swapaxes(1, 2)
            np.testing.assert_allclose(quant.dequantize(layer.v_up), expected, atol=np.abs(w).max() * 2**-15)
    assert quant.digest(loaded.base) == loaded.digest


@pytest.mark.parametrize("form", ["int4_g32", "int8", "fixed16"])
def test_quantizing_a_part_at_a_time_is_quantizing_the_whole(form, tmp_path, monkeypatch):
    from rl_adapter.hub import load as module

    path, mesh = GOLDEN / "qwen3_moe-f32-mixed-fused", meshes.make(1)
    forms = {**FORMS, "head": form}
    whole = load(path, forms, mesh)
    monkeypatch.setattr(module, "BLOCK", 100)
    parts = load(path, forms, mesh)
    assert_equal(parts.base, whole.base)
    assert parts.digest == whole.digest and parts.report["loss"].keys() == whole.report["loss"].keys()
    for a, b in zip(parts.report["loss"].values(), whole.report["loss"].values()):
        assert a == pytest.approx(b, rel=1e-9)


def test_report(saved):
    """One matrix in a hundred off its grid would be seen: figures are recomputed from what was loaded."""
    report = load(saved, FORMS, meshes.make(2, 2, 2)).report
    assert report["kept"] == SPEC.layers * (4 + 3 * SPEC.experts) and report["quantized"] == SPEC.layers + 1
    base = load(saved, FORMS, meshes.make(1)).base
    assert sum(report["bytes"].values()) == sum(x.nbytes for x in jax.tree.leaves(base))
    assert set(report["bytes"]) == {"int4", "fixed16", "bfloat16", "float32"}
    tensors = load_file(saved / "model.safetensors")
    names = ["lm_head.weight", *(f"model.layers.{i}.mlp.gate.weight" for i in range(SPEC.layers))]
    exact = [tensors[n].astype(np.float64).T for n in names]
    held = [base.head, *(jax.tree.map(lambda x: x[i], base.layers[0].router) for i in range(SPEC.layers))]  # noqa: B023
    held = [np.asarray(quant.dequantize(w), np.float64) for w in held]
    (form,) = report["loss"]
    loss = report["loss"][form]
    error, size = (sum(np.sum(x**2) for x in parts) for parts in ([a - b for a, b in zip(held, exact)], exact))
    assert form == "fixed16" and loss["matrices_relative_error"] == pytest.approx(np.sqrt(error / size), rel=1e-6)
    changed = sum(np.sum(a != b) for a, b in zip(held, exact)) / sum(a.size for a in exact)
    assert loss["share_not_lossless"] == pytest.approx(changed)
    largest = max(np.max(np.abs(a - b) / np.abs(b).max(0)) for a, b in zip(held, exact))
    assert loss["largest_error_of_column_max"] == pytest.approx(largest, rel=1e-6)


def test_progress_counts_every_slice(saved):
    calls = []
    load(saved, FORMS, meshes.make(1), lambda done, total: calls.append((done, total)))
    slices = 3 + SPEC.layers * (4 + 4 + 1 + 3 * SPEC.experts)
    assert calls == [(i + 1, slices) for i in range(slices)]


def test_an_embedding_tied_to_a_quantized_head_is_the_head(copy):
    """Written once as INT4: the embedding's rows are the head's columns, and no float copy of them is kept."""
    config = json.loads((copy / "config.json").read_text()) | {"tie_word_embeddings": True}
    (copy / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    words = rng.integers(-(2**31), 2**31, (SPEC.vocab, SPEC.d_model // 8)).astype(np.int32)
    scale = rng.uniform(0.5, 1, (SPEC.vocab, SPEC.d_model // 32)).astype(ml_dtypes.bfloat16)
    at = "model.embed_tokens.weight"
    new = {at: None, "lm_head.weight": None, at + "_packed": lambda _: words, at + "_scale": lambda _: scale}
    change_tensors(copy, **new, **{at + "_shape": lambda _: np.array([SPEC.vocab, SPEC.d_model])})
    for shape in SHAPES:
        loaded = load(copy, FORMS, meshes.make(*shape))
        assert loaded.base.embed is None and loaded.base.head.form == "int4"
        np.testing.assert_array_equal(loaded.base.head.scale[0], scale.T)
        assert quant.digest(loaded.base) == loaded.digest
        token = 17
        row = np.repeat(scale[token].astype(np.float32), 32) * [((int(words[token, j // 8]) >> 4 * (j % 8)) & 15) - 8 for j in range(64)]
        np.testing.assert_array_equal(quant.columns(loaded.base.head, jnp.array([token]))[0], row)


def test_an_embedding_tied_to_floats_is_kept_beside_the_head():
    loaded = load(GOLDEN / "smollm2-bf16-tied", FORMS, meshes.make(1))
    embed = np.asarray(loaded.base.embed)
    assert embed.dtype == ml_dtypes.bfloat16
    assert_equal(loaded.base.head, quant.quantize(embed.T, "fixed16"))


# --- where it goes -----------------------------------------------------------------------------------------------------------------


def test_a_device_holds_only_its_part(saved):
    mesh = meshes.make(2, 2, 2)
    base = load(saved, FORMS, mesh).base
    (layer,) = base.layers
    parts = {"gate": 4, "up": 4, "down": 4, "q": 2, "k": 2, "v": 2, "o": 1, "router": 1, "attn_norm": 1}
    for name, ways in parts.items():
        for leaf in jax.tree.leaves(getattr(layer, name)):
            assert {s.data.nbytes for s in leaf.addressable_shards} == {leaf.nbytes // ways}, name
            assert len(leaf.addressable_shards) == 8
    assert {s.data.nbytes for s in base.head.qvalue.addressable_shards} == {base.head.qvalue.nbytes // 2}
    assert jax.tree.leaves(jax.tree.map(lambda x: x.sharding, base)) == jax.tree.leaves(meshes.base_shardings(mesh, base))


def test_a_device_is_sent_only_its_part(saved, monkeypatch):
    """Bytes that cross from the host to each of eight devices are the bytes that it then holds."""
    sent, write = {}, stream._write

    def count(buffer, piece, index, device):
        sent[device] = sent.get(device, 0) + piece.nbytes
        return write(buffer, piece, index, device)

    monkeypatch.setattr(stream, "_write", count)
    for shape in SHAPES:
        sent.clear()
        base = load(saved, FORMS, meshes.make(*shape)).base
        held = {}
        for leaf in jax.tree.leaves(base):
            for shard in leaf.addressable_shards:
                held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
        assert sent == held


def test_devices_with_memory_of_their_own(saved, monkeypatch):
    """The way of a GPU, on CPU devices: buffers are JAX arrays, into which every piece is written in place."""
    mesh, written, write = meshes.make(1, 2, 1), [], stream._write_in_place
    expected = load(saved, FORMS, mesh)
    monkeypatch.setattr(stream, "_zeros", lambda shape, dtype, device: jnp.zeros(shape, dtype, device=device))
    monkeypatch.setattr(stream, "_write_in_place", lambda b, p, i: written.append((b, write(b, p, i))) or written[-1][1])
    loaded = load(saved, FORMS, mesh)
    assert_equal(loaded.base, expected.base)
    assert loaded.digest == expected.digest == quant.digest(loaded.base)
    assert len(written) > 2 * SPEC.layers * 20 and all(before.is_deleted() for before, _ in written)  # donated: no second copy


def test_pieces_must_agree():
    """A slice that differs from the first in shape, dtype or form is refused where it is put."""
    sharding = meshes.replicated(meshes.make(1))
    stack = stream.Stack((2,), lambda tree: jax.tree.map(lambda _: sharding, tree))
    stack.put((0,), np.zeros((2, 3), np.float32))
    for wrong in (np.zeros((3, 2), np.float32), np.zeros((2, 3), np.float16)):
        with pytest.raises(ValueError, match=r"need float32 \[2, 3\]"):
            stack.put((1,), wrong)
    with pytest.raises(ValueError, match="another format"):
        stack.put((1,), quant.quantize(np.ones((2, 3)), "int8"))


# --- what is refused ---------------------------------------------------------------------------------------------------------------


def test_all_that_is_wrong_is_one_error(copy):
    changes = {
        "model.norm.weight": lambda x: x[:-1],
        "model.layers.0.self_attn.q_proj.weight_packed": lambda x: x.astype(np.int64),
        EXPERT + "_scale": None,
        "model.layers.0.mlp.gate.bias": lambda _: np.zeros(4, np.float32),
    }
    change_tensors(copy, **changes)
    with pytest.raises(ValueError) as error:
        load(copy, FORMS, meshes.make(1))
    lines = str(error.value).split("\n")[1:]
    assert len(lines) == len(changes)
    for name, what in zip(changes, ("found shape [63], need [64]", "found I64, need I32", "missing", "unexpected")):
        assert sum(name in line and what in line for line in lines) == 1, (name, lines)


def test_all_values_that_are_wrong_are_one_error(copy):
    changes = {
        K0 + "_scale": lambda x: np.full_like(x, np.nan),
        K1 + "_scale": lambda x: -x,
        "model.layers.1.self_attn.q_proj.weight_shape": lambda x: x[::-1],
        "model.embed_tokens.weight": lambda x: x * np.inf,
        "model.layers.1.mlp.gate.weight": lambda x: x * np.inf,
        "model.layers.1.self_attn.q_norm.weight": lambda x: x * np.nan,
    }
    change_tensors(copy, **changes)
    with pytest.raises(ValueError) as error:
        load(copy, FORMS, meshes.make(1))
    lines = str(error.value).split("\n")[1:]
    assert len(lines) == len(changes) and all(any(name in line for line in lines) for name in changes)


def test_one_format_in_all_layers(copy):
    """Told from the headers: one error for the field, however many of its experts differ."""
    names = [f"model.layers.1.mlp.experts.{e}.down_proj.weight" for e in range(SPEC.experts)]
    zeros = lambda _: np.zeros((SPEC.d_model, SPEC.d_expert), np.float32)
    change_tensors(copy, **{n: zeros for n in names}, **{n + s: None for n in names for s in ("_packed", "_scale", "_shape")})
    with pytest.raises(ValueError) as error:
        load(copy, FORMS, meshes.make(1))
    assert str(error.value).count("\n") == 1
    assert "layers[0].down: found more than one format" in str(error.value)


def test_one_dtype_of_scales_in_all_layers(copy):
    change_tensors(copy, **{K1 + "_scale": lambda x: x.astype(np.float32)})
    with pytest.raises(ValueError, match=r"layers\[0\].k: found float32 .*, need bfloat16"):
        load(copy, FORMS, meshes.make(1))


def test_truncated_files(copy):
    path = copy / "model.safetensors"
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for size in (0, 7, 8, header // 2, header - 1, header, header + 1000, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="model.safetensors: need a whole safetensors file"):
            load(copy, FORMS, meshes.make(1))


@pytest.mark.parametrize(
    "forms, field",
    [({"linear": "int8"}, "quantize"), (FORMS | {"head": "int3"}, "quantize.head"), (FORMS | {"router": "int4_g128"}, "router")],
)
def test_forms_that_cannot_be(saved, forms, field):
    with pytest.raises(ValueError, match=field):
        load(saved, forms, meshes.make(1))


def test_counts_beyond_what_a_file_can_hold(copy):
    config = json.loads((copy / "config.json").read_text())
    for change in ({"num_hidden_layers": 4096}, {"num_experts": 2**31 - 1}):
        (copy / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=next(iter(change))):
            load(copy, FORMS, meshes.make(1))


# --- memory ------------------------------------------------------------------------------------------------------------------------

LAYERS, EXPERTS, WIDTH, HIDDEN, VOCAB = 3, 128, 1024, 512, 2048
PROGRAM = """
import ctypes, json, sys, threading, time
import conftest, jax
from rl_adapter import mesh as meshes
from rl_adapter.hub import stream
from rl_adapter.hub.load import load

def anonymous():  # bytes that are the process's own; mapped files are the kernel's to drop
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))

def watch():
    while not done:
        over[0] = max(over[0], anonymous() - before - written[0])
        time.sleep(0.001)

def count(buffer, piece, index, device):
    buffer = write(buffer, piece, index, device)
    written[0] += piece.nbytes
    return buffer

write, stream._write = stream._write, count

out = []
for shape in ((1, 1, 1), (1, 8, 1)):
    mesh, forms = meshes.make(*shape), dict(linear="int8", head="fixed16", router="fixed16")
    written = [0]
    load(sys.argv[2], forms, mesh)  # what the first load of any model allocates once
    ctypes.CDLL(None).malloc_trim(0)
    done, over, written, before = [], [0], [0], anonymous()
    thread = threading.Thread(target=watch)
    thread.start()
    start = time.time()
    base = load(sys.argv[1], forms, mesh).base
    seconds = time.time() - start
    done.append(True)
    thread.join()
    held = sum(s.data.nbytes for x in jax.tree.leaves(base) for s in x.addressable_shards)
    assert written[0] == held
    out.append(dict(base=held, over=over[0], seconds=seconds))
    del base
print(json.dumps(out))
"""


def write_sparse(directory):
    """A Qwen3-MoE whose INT4 codes and scales are holes in the file: large to read, nothing to write."""
    sizes = dict(layers=LAYERS, d_model=WIDTH, heads=4, kv_heads=2, experts=EXPERTS, d_expert=HIDDEN, vocab=VOCAB)
    small = reference.tiny_spec(layers=1, experts=8)
    save_checkpoint(directory / "small", small, reference.random_params(0, small))
    names = dict(num_hidden_layers="layers", hidden_size="d_model", num_experts="experts", moe_intermediate_size="d_expert")
    names |= dict(vocab_size="vocab", num_attention_heads="heads", num_key_value_heads="kv_heads")
    config = json.loads((directory / "small" / "config.json").read_text())
    config |= {key: sizes[name] for key, name in names.items()}
    (directory / "large").mkdir()
    (directory / "large" / "config.json").write_text(json.dumps(config))
    described, _ = families.read_family(directory / "large")
    header, values, offset = {}, {}, 0

    def add(name, dtype, shape, value=None):
        nonlocal offset
        size = int(np.prod(shape)) * {"BF16": 2, "I32": 4, "I64": 8}[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        if value is not None:
            values[offset] = np.asarray(value, np.int64).tobytes()
        offset += size

    where = lambda *at: families.source(described, *at, has=lambda _: False).name
    for field, shape in families.top(described.spec).items():
        add(where(field), "BF16", shape)
    for field, shape in families.fields(described, True).items():
        lead = (LAYERS, EXPERTS) if families.per_expert(field) else (LAYERS,)
        for index in np.ndindex(*lead):
            name = where(field, *index)
            if len(shape) == 1 or field == "router":
                add(name, "BF16", shape)
            else:
                add(name + "_shape", "I64", (2,), shape)
                add(name + "_packed", "I32", (shape[0], shape[1] // 8))
                add(name + "_scale", "BF16", (shape[0], shape[1] // 32))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(directory / "large" / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for at, value in values.items():
            file.seek(8 + len(text) + at)
            file.write(value)
        file.truncate(8 + len(text) + offset)


def test_the_host_holds_no_model(tmp_path):
    """The process's own memory beyond the packed base stays below a few tensors while 340 MiB are loaded.

    A CPU's devices are the process's own memory (RssAnon, sampled every ms), so what has been written to all of them so far is
    subtracted; a buffer takes memory only where it is written. Mapped files do not count: the kernel may drop them at any time.
    The bound is that of quantizing the largest tensor, the head, which takes several copies in f32.
    """
    write_sparse(tmp_path)
    root = pathlib.Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "large"), str(tmp_path / "small")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(done.stdout)
    print(*(f"base {f['base'] / 2**20:.0f} MiB, over it {f['over'] / 2**20:.1f} MiB, {f['seconds']:.1f} s" for f in figures), sep="\n")
    bound = 8 * VOCAB * WIDTH * 4
    for found in figures:
        assert found["base"] > 5 * bound and found["over"] < bound, figures


def test_a_gguf_without_an_end_loads_but_has_no_tokenizer():
    pytest.importorskip("gguf")
    checkpoint = open_checkpoint(GOLDEN / "llama-gguf-q8_0" / "model.gguf")
    with pytest.raises(ValueError, match="model.gguf: tokenizer.ggml.eos_token_id: found .None., need token ids"):
        checkpoint.tokenizer()

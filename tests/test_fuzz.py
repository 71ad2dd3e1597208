"""Damaged checkpoints: a clear ValueError, or a base of the right shapes whose every weight is finite. Never anything else."""

import json
import os
import pathlib
import shutil
import time

import jax
import numpy as np
import pytest

from rl_adapter import mesh as meshes
from rl_adapter import quant
from rl_adapter.config import SHIPPED_BASE
from rl_adapter.hub import families
from rl_adapter.hub.files import SINGLE, open_tensors, write_tensors
from rl_adapter.hub.load import load, open_checkpoint
from rl_adapter.hub.tokenizer import load_tokenizer

GOLDEN = pathlib.Path(__file__).parent / "golden"
DIRECTORIES = sorted(path for path in GOLDEN.iterdir() if (path / "config.json").is_file())
ONE_FILE = [path for path in DIRECTORIES if (path / SINGLE).is_file()]
SHARDS, INDEX = GOLDEN / "qwen3_moe-bf16-shards", "model.safetensors.index.json"
FORMS = {"linear": "int8", "head": "fixed16", "router": "fixed16"}
TRIALS = int(os.environ.get("FUZZ_TRIALS", "1"))  # times as many
DEEP = "[" * 100_000
ODD = [
    None,
    True,
    -1,
    0,
    1,
    3,
    2**16,
    2**31 - 1,
    2**31,
    10**400,
    0.5,
    float("nan"),
    float("inf"),
    "",
    "4",
    "x" * 10**4,
    [],
    [1],
    [[]],
    {},
    {"a": 1},
]


def sound(path) -> bool:
    """Whether `path` loads, as a finite base of the shapes that its config tells; False: it ends in a ValueError that is no novel."""
    try:
        loaded = load(path, FORMS, meshes.make(1))
    except ValueError as error:
        assert 0 < len(str(error)) < 200_000
        return False
    described = open_checkpoint(path).described
    spec, base = loaded.spec, loaded.base
    assert len(base.layers) == len(spec.stacks) and loaded.digest == quant.digest(base)
    for name, shape in families.top(spec).items():
        value = getattr(base, name)
        turned = shape[::-1] if name == "head" or quant.is_quantized(value) else shape
        assert (value is None and spec.tie_embeddings) or quant.shape(value) == turned
    for (_, count, sparse), layer in zip(spec.stacks, base.layers):
        for name, shape in families.fields(described, sparse).items():
            if name != "kv_b":
                value = layer.bias[name.removeprefix("bias.")] if name.startswith("bias.") else getattr(layer, name)
                assert quant.shape(value) == (count, *(spec.experts,) * families.per_expert(name), *shape[::-1])
    for weight in jax.tree.leaves(base, is_leaf=quant.is_quantized):
        assert largest(weight) < np.inf
    return True


def largest(weight) -> float:
    """A bound on the magnitudes of a weight, NaN where it has none."""
    if not quant.is_quantized(weight):
        return float(np.abs(np.asarray(weight, np.float32)).max())
    scale = 1.0
    for s in map(np.asarray, weight.scale):
        scale = scale * float((np.exp2(s.astype(np.float32) - 127) if s.dtype == np.uint8 else s.astype(np.float32)).max())
    codes = np.abs(np.asarray(weight.qvalue).astype(np.float32)).max() if weight.form == "fp8" else quant.STORED[weight.form].largest
    return float(np.float32(scale) * np.float32(codes) + sum(np.abs(np.asarray(b, np.float32)).max() for b in weight.bias))


def copies(tmp_path, sources, count, seed):
    """(copy of a checkpoint, generator) so many times, the sources in turn."""
    rng = np.random.default_rng(seed)
    for i in range(count * TRIALS):
        source, directory = sources[i % len(sources)], tmp_path / "copy"
        shutil.rmtree(directory, ignore_errors=True)
        yield shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.npy")), rng


def pick(rng, values):
    return values[rng.integers(len(values))]


def contents(directory) -> dict:
    tensors = open_tensors(directory)
    return {name: tensors.read(name) for name in tensors.entries}


def header_of(whole: bytes) -> dict:
    return json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])


def with_header(whole: bytes, header: str) -> bytes:
    text = header.encode()
    return len(text).to_bytes(8, "little") + text + whole[8 + int.from_bytes(whole[:8], "little") :]


def places(value, path=()):
    """Paths of all that lies in nested objects and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def change(config, rng) -> None:
    """Something in it becomes something odd, or goes."""
    *path, last = pick(rng, list(places(config)))
    for key in path:
        config = config[key]
    if rng.random() < 0.2:
        del config[last]
    else:
        config[last] = pick(rng, ODD)


# --- files of weights --------------------------------------------------------------------------------------------------------------


def test_every_golden_file_is_sound():
    assert len(DIRECTORIES) > 20
    assert all(sound(path) for path in (*DIRECTORIES, SHIPPED_BASE))


def test_cut_files(tmp_path):
    for directory, rng in copies(tmp_path, ONE_FILE, 90, seed=1):
        whole = (directory / SINGLE).read_bytes()
        header = 8 + int.from_bytes(whole[:8], "little")
        size = rng.integers(pick(rng, [8, header, len(whole)]))
        (directory / SINGLE).write_bytes(whole[:size])
        assert not sound(directory)


def test_flipped_bytes(tmp_path):
    """Bytes of weights cannot be told from others; those of headers may name another shape, dtype or tensor."""
    held = 0
    for directory, rng in copies(tmp_path, ONE_FILE, 80, seed=2):
        whole = bytearray((directory / SINGLE).read_bytes())
        header = 8 + int.from_bytes(whole[:8], "little")
        low, high = pick(rng, [(0, 8), (8, header), (8, header), (header, len(whole))])
        for at in rng.integers(low, high, size=rng.integers(1, 4)):
            whole[at] = rng.integers(256)
        (directory / SINGLE).write_bytes(whole)
        held += sound(directory)
    assert held  # not every flip is found, or the weights were not reached


def test_headers(tmp_path):
    for directory, rng in copies(tmp_path, ONE_FILE, 90, seed=3):
        whole = (directory / SINGLE).read_bytes()
        header = header_of(whole)
        name, other = (pick(rng, [n for n in header if n != "__metadata__"]) for _ in range(2))
        entry, pair = header[name], [header[name], header[other]]
        kind = rng.integers(8)
        if kind == 0:
            entry["dtype"] = pick(rng, ["F64", "I8", "U8", "BOOL", "F8_E5M2", "F4", "I32", "BF16", "C64", "x"])
        elif kind == 1:
            entry["shape"] = pick(rng, [[], [0], [2**31, 2**33], [-1], [1.5], entry["shape"][::-1] + [1], [1] * 70, entry["shape"][:-1]])
        elif kind == 2:
            begin, end = entry["data_offsets"]
            entry["data_offsets"] = pick(rng, [[end, begin], [begin, end - 1], [0, end], [-1, end], [begin, 2**63], [begin], []])
        elif kind == 3:
            pair[0]["data_offsets"], pair[1]["data_offsets"] = pair[1]["data_offsets"], pair[0]["data_offsets"]
        elif kind == 4:
            header[name + pick(rng, ["x", "/../y", "\0", ""])] = header.pop(name)
        elif kind == 5:
            header["x"] = entry  # two tensors over the same bytes
        else:
            change(header, rng)
        text = json.dumps(header)
        if kind == 7:  # one name twice
            text = text[:-1] + f", {json.dumps(name)}: {json.dumps(header[other] if other in header else entry)}}}"
        (directory / SINGLE).write_bytes(with_header(whole, text))
        sound(directory)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', DEEP, '{"a":' * 10**5, "{}", "\x00", '{"x": 1}', '{"x": {}}'])
def test_headers_that_are_none(text, tmp_path):
    directory, _ = next(copies(tmp_path, ONE_FILE, 1, 0))
    whole = (directory / SINGLE).read_bytes()
    (directory / SINGLE).write_bytes(with_header(whole, text))
    assert not sound(directory)


@pytest.mark.parametrize("length", [0, 1, 2**20, 2**31, 2**40, 2**63, 2**64 - 1])
def test_lengths_of_headers(length, tmp_path):
    directory, _ = next(copies(tmp_path, ONE_FILE, 1, 0))
    whole = (directory / SINGLE).read_bytes()
    (directory / SINGLE).write_bytes(length.to_bytes(8, "little") + whole[8:])
    assert not sound(directory)


def test_tensors(tmp_path):
    """Whole files that hold something else: all of it is refused."""
    for directory, rng in copies(tmp_path, ONE_FILE, 90, seed=4):
        tensors = contents(directory)
        name = pick(rng, sorted(tensors))
        value, kind = tensors.pop(name), rng.integers(5)
        if kind == 0:
            tensors[name + "x"] = value
        elif kind == 1:
            tensors[name] = np.concatenate([value, value])
        elif kind == 2:
            tensors[name] = value[..., None]
        elif kind == 3:
            tensors[name] = value.astype(np.float64)
        write_tensors(directory / SINGLE, tensors)
        assert not sound(directory) or is_spare(directory, name), (directory, name, kind)


def is_spare(directory, name) -> bool:
    """A tensor that a model need not have: of layers that predict further ahead, and an index of groups in their order."""
    described = families.read_family(directory)[0]
    return families.ignored(described, name) or name.endswith("g_idx")


def test_values_that_are_no_weights(tmp_path):
    """NaN, Inf and negative values wherever floats lie: refused, or no harm."""
    for directory, rng in copies(tmp_path, ONE_FILE, 60, seed=5):
        tensors = contents(directory)
        floats = sorted(n for n in tensors if tensors[n].dtype.kind in "fV" and tensors[n].itemsize > 1)
        name, bad = pick(rng, floats), pick(rng, [np.nan, np.inf, -np.inf, -1.0, 3e38, 1e-40])
        value = tensors[name].copy()
        with np.errstate(over="ignore"):
            value.reshape(-1)[rng.integers(value.size)] = bad
        finite = np.isfinite(value.astype(np.float32)).all()
        tensors[name] = value
        write_tensors(directory / SINGLE, tensors)
        spare = is_spare(directory, name) or name.endswith("input_global_scale")
        assert not (sound(directory) and not finite and not spare), (directory, name, bad)


# --- shards ------------------------------------------------------------------------------------------------------------------------


def lie(where, shards, rng):
    name, other = pick(rng, sorted(where)), pick(rng, sorted(where))
    outside = ["../x.safetensors", "/etc/passwd", str(SHIPPED_BASE / SINGLE), "..", ".", "", "a/../" + shards[0], "\0.safetensors"]
    kind = rng.integers(6)
    if kind == 0:
        where[name] = pick(rng, outside)
    elif kind == 1:
        where[name] = next(s for s in shards if s != where[name])
    elif kind == 2:
        del where[name]
    elif kind == 3:
        where[name + "x"] = where[other]
    elif kind == 4:
        where[name] = pick(rng, [3, None, [], {}, True, "model.bin", "x" * 10**4 + ".safetensors"])
    else:
        where.clear()


def test_an_index_that_lies(tmp_path):
    for directory, rng in copies(tmp_path, [SHARDS], 40, seed=6):
        index = json.loads((directory / INDEX).read_text())
        lie(index["weight_map"], sorted(set(index["weight_map"].values())), rng)
        (directory / INDEX).write_text(json.dumps(index))
        assert not sound(directory)


def test_an_index_that_is_none(tmp_path):
    for text in ("", "[]", "{}", DEEP, '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": null}', "\x00"):
        directory, _ = next(copies(tmp_path, [SHARDS], 1, 0))
        (directory / INDEX).write_text(text)
        assert not sound(directory)


def test_shards_that_are_not_files(tmp_path):
    link = lambda target: lambda path: path.symlink_to(target)
    puts = [lambda path: None, pathlib.Path.mkdir, os.mkfifo, link("/dev/zero"), link("nowhere")]
    for put in puts:
        directory, _ = next(copies(tmp_path, [SHARDS], 1, 0))
        shard = next(directory.glob("model-*.safetensors"))
        shard.unlink()
        put(shard)
        assert not sound(directory)
        for file in (INDEX, "config.json"):
            directory, _ = next(copies(tmp_path, [SHARDS], 1, 0))
            (directory / file).unlink()
            put(directory / file)
            assert not sound(directory)


def test_links_to_shards_are_how_caches_lie(tmp_path):
    directory, _ = next(copies(tmp_path, [SHARDS], 1, 0))
    for i, shard in enumerate(sorted(directory.glob("model-*.safetensors"))):
        blob = tmp_path / f"blob{i}"
        shard.rename(blob)
        shard.symlink_to(blob)
    assert sound(directory)


# --- configs -----------------------------------------------------------------------------------------------------------------------


def test_configs(tmp_path):
    """Each field of each family in turn, at whatever depth, some values in range and far too large."""
    for directory, rng in copies(tmp_path, DIRECTORIES, 120, seed=7):
        config = json.loads((directory / "config.json").read_text())
        for _ in range(rng.integers(1, 3)):
            change(config, rng)
        (directory / "config.json").write_text(json.dumps(config))
        sound(directory)


def test_quantization_configs(tmp_path):
    quantized = [d for d in DIRECTORIES if "quantization_config" in json.loads((d / "config.json").read_text())]
    assert len(quantized) > 10
    for directory, rng in copies(tmp_path, quantized, 80, seed=8):
        config = json.loads((directory / "config.json").read_text())
        if rng.random() < 0.2:
            config["quantization_config"] = pick(rng, ODD)
        else:
            change(config["quantization_config"], rng)
        (directory / "config.json").write_text(json.dumps(config))
        sound(directory)


def test_counts_that_would_loop_for_hours(tmp_path):
    for directory, rng in copies(tmp_path, DIRECTORIES, 50, seed=11):
        config = json.loads((directory / "config.json").read_text())
        inner = config.get("text_config", config)
        inner[pick(rng, [n for n, v in inner.items() if type(v) is int])] = pick(rng, [2**31 - 1, 4096, 65536])
        (directory / "config.json").write_text(json.dumps(config))
        start = time.monotonic()
        sound(directory)
        assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    "text", ["", "[]", "null", DEEP, '{"a": ' * 10**5, "\x00", '{"architectures": NaN}', '{"architectures": ["\\ud800"]}']
)
def test_configs_that_are_none(text, tmp_path):
    directory, _ = next(copies(tmp_path, ONE_FILE, 1, 0))
    (directory / "config.json").write_text(text)
    assert not sound(directory)


# --- GGUF --------------------------------------------------------------------------------------------------------------------------


def test_gguf_files(tmp_path):
    pytest.importorskip("gguf")
    files, held = sorted(GOLDEN.glob("*/model.gguf")), 0
    assert files
    rng, path = np.random.default_rng(9), tmp_path / "model.gguf"
    for i in range(60 * TRIALS):
        whole = bytearray(files[i % len(files)].read_bytes())
        if i % 3 == 0:
            whole = whole[: rng.integers(len(whole))]
        else:
            for at in rng.integers(pick(rng, [32, 700, 3000, len(whole)]), size=rng.integers(1, 4)):
                whole[at] = rng.integers(256)
        path.write_bytes(whole)
        good = sound(path)
        held += good
        assert not (good and i % 3 == 0)
    assert held


# --- tokenizers --------------------------------------------------------------------------------------------------------------------


def test_tokenizers(tmp_path):
    """A tokenizer that encodes into ids below the vocabulary, or a ValueError."""
    vocab = json.loads((SHIPPED_BASE / "config.json").read_text())["vocab_size"]
    rng = np.random.default_rng(10)
    files = ["tokenizer.json", "tokenizer.json", "generation_config.json"]
    for i in range(250 * TRIALS):
        for name in {"config.json", *files}:
            shutil.copy(SHIPPED_BASE / name, tmp_path / name)
        path = tmp_path / pick(rng, files)
        text = bytearray(path.read_bytes())
        if i % 3 == 0:
            text = text[: rng.integers(len(text))]
        elif i % 3 == 1:
            for at in rng.integers(len(text), size=rng.integers(1, 4)):
                text[at] = rng.integers(256)
        else:
            value = json.loads(text)
            change(value, rng)
            text = json.dumps(value).encode()
        path.write_bytes(text)
        try:
            tokenizer = load_tokenizer(tmp_path, vocab)
        except ValueError:
            continue
        assert all(0 <= i < vocab for i in (*tokenizer.stop_ids, tokenizer.pad_id, *tokenizer.encode("1 + 2 = ")))

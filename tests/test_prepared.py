"""Prepared copies: the same bits as from the source on any mesh, used for nothing but that source, and never when damaged."""

import json
import os
import pathlib
import shutil

import jax
import numpy as np
import pytest
from test_load import FORMS, GOLDEN, SHAPES, assert_equal

from rl_adapter import config as configs
from rl_adapter import mesh as meshes
from rl_adapter import quant, session
from rl_adapter.hub import load, prepared

CASES = [
    ("qwen3_moe-int4_g32", (1, 2, 2)),
    ("olmoe-gptq_v2-act_order", (1, 1, 1)),
    ("gpt_oss-mxfp4", (2, 2, 2)),
    ("llama-nvfp4", (1, 1, 1)),
]


@pytest.fixture
def source(tmp_path):
    return shutil.copytree(GOLDEN / "qwen3_moe-int4_g32", tmp_path / "source")


@pytest.fixture
def copied(source, tmp_path):
    """(directory of copies, source, what it loads as)"""
    return tmp_path / "copies", source, prepared.load_prepared(tmp_path / "copies", source, FORMS, meshes.make(1))


@pytest.mark.parametrize("name, saved_on", CASES)
def test_restored_is_loaded_bit_for_bit_on_every_mesh(name, saved_on, tmp_path):
    path = GOLDEN / name
    loaded = prepared.load_prepared(tmp_path, path, FORMS, meshes.make(*saved_on))
    assert (tmp_path / loaded.digest).is_dir()
    for shape in SHAPES:
        mesh = meshes.make(*shape)
        restored = prepared.restore(tmp_path, path, FORMS, mesh)
        assert_equal(restored.base, loaded.base)
        assert jax.tree.structure(restored.base) == jax.tree.structure(loaded.base)
        assert (restored.spec, restored.report) == (loaded.spec, loaded.report)
        assert restored.digest == loaded.digest == quant.digest(restored.base)
        assert jax.tree.map(lambda x: x.sharding, restored.base) == meshes.base_shardings(mesh, restored.base)


def test_the_copy_is_what_is_read(copied, monkeypatch):
    directory, source, loaded = copied
    monkeypatch.setattr(prepared, "load", lambda *_: pytest.fail("read the source"))
    assert prepared.load_prepared(directory, source, FORMS, meshes.make(1)).digest == loaded.digest


def bytes_of_weights(source):
    """Changes one byte of a scale, keeping the file's time."""
    path = source / "model.safetensors"
    times, whole = path.stat(), bytearray(path.read_bytes())
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    at = header["model.layers.0.self_attn.q_proj.weight_packed"]["data_offsets"][0]
    whole[8 + int.from_bytes(whole[:8], "little") + at] ^= 1
    path.write_bytes(whole)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def config_of_model(source):
    path = source / "config.json"
    path.write_text(path.read_text().replace("{", '{"initializer_range": 1.0, ', 1))


def test_another_source_or_other_options_are_not_the_copy(copied):
    directory, source, _ = copied
    mesh = meshes.make(1)
    assert prepared.restore(directory, source, FORMS, mesh)
    assert prepared.restore(directory, source, FORMS | {"head": "int8"}, mesh) is None
    assert prepared.restore(directory, GOLDEN / "qwen3_moe-gptq", FORMS, mesh) is None
    changes = [bytes_of_weights, config_of_model, lambda s: os.utime(s / "model.safetensors", ns=(1, 1))]
    for change in changes:
        change(source)
        assert prepared.restore(directory, source, FORMS, mesh) is None, change
        assert prepared.load_prepared(directory, source, FORMS, mesh).digest == load.load(source, FORMS, mesh).digest
        assert prepared.restore(directory, source, FORMS, mesh)


def test_other_code_is_not_the_copy(copied, tmp_path, monkeypatch):
    directory, source, _ = copied
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "load.py").write_text("")
    monkeypatch.setattr(prepared, "_HUB", tmp_path / "hub")
    assert prepared.restore(directory, source, FORMS, meshes.make(1)) is None


def test_two_sources_of_one_base_share_a_copy(copied, tmp_path):
    directory, source, loaded = copied
    again = prepared.load_prepared(directory, GOLDEN / "qwen3_moe-int4_g32", FORMS, meshes.make(1))
    assert again.digest == loaded.digest
    assert [p.name for p in directory.iterdir() if p.is_dir()] == [loaded.digest]
    assert len(list(directory.glob("*.json"))) in (1, 2)  # 1 where the copy of the file kept its time


def test_damage_is_an_error_that_names_the_copy(copied):
    directory, source, loaded = copied
    mesh, rng = meshes.make(1), np.random.default_rng(0)
    index = next(directory.glob("*.json"))
    files = [p for p in directory.rglob("*") if p.is_file() and p != index]
    assert len(files) > 3
    for path in files:
        whole = path.read_bytes()
        changed = bytearray(whole)
        if whole:
            changed[rng.integers(len(whole))] ^= 1
        for damage in (bytes(changed) if whole else b"x", whole[: len(whole) // 2] if whole else None, None):
            path.unlink() if damage is None else path.write_bytes(damage)
            with pytest.raises(ValueError, match=f"{loaded.digest}: the prepared copy of .* is damaged; delete it"):
                prepared.restore(directory, source, FORMS, mesh)
            path.write_bytes(whole)
    assert prepared.restore(directory, source, FORMS, mesh).digest == loaded.digest
    record = json.loads(index.read_text())
    wrong = {"digest": ["../x", 3, None, loaded.digest.upper()], "copy": [None, "", ["x"]], "report": [None, [], {}, {"bytes": {"a": "b"}}]}
    changed = [json.dumps(record | {name: value}) for name, values in wrong.items() for value in values]
    lacking = [json.dumps({k: v for k, v in record.items() if k != name}) for name in wrong]
    for text in ("", "{}", "[]", "3", '"\\ud800"', *changed, *lacking):
        index.write_text(text)
        with pytest.raises(ValueError, match=f"^{index}: .*record of a prepared copy is damaged: delete it"):
            prepared.restore(directory, source, FORMS, mesh)


def test_a_copy_that_was_not_finished_is_made_again(copied):
    """A process that is killed leaves a directory without its description, which is written last."""
    directory, source, loaded = copied
    (directory / loaded.digest / prepared.COPY).unlink()
    next(directory.glob("*.json")).unlink()
    assert prepared.restore(directory, source, FORMS, meshes.make(1)) is None
    prepared.load_prepared(directory, source, FORMS, meshes.make(1))
    assert prepared.restore(directory, source, FORMS, meshes.make(1)).digest == loaded.digest


def test_a_copy_that_is_gone_is_made_again(copied):
    directory, source, loaded = copied
    shutil.rmtree(directory / loaded.digest)
    assert prepared.restore(directory, source, FORMS, meshes.make(1)) is None
    prepared.load_prepared(directory, source, FORMS, meshes.make(1))
    assert prepared.restore(directory, source, FORMS, meshes.make(1)).digest == loaded.digest


def test_files_that_are_not_loaded_do_not_matter(copied):
    directory, source, _ = copied
    before = prepared.fingerprint(source, FORMS)
    (source / "notes.json").mkdir()
    (source / "gone.json").symlink_to(source / "nowhere")
    (source / "trainer_state.json").write_text("{}")
    (source / "consolidated.safetensors").write_text("x")
    assert prepared.fingerprint(source, FORMS) == before
    shards = GOLDEN / "qwen3_moe-bf16-shards"
    for change in sorted(shards.glob("*.safetensors")):
        other = shutil.copytree(shards, source.parent / f"of-{change.name}", dirs_exist_ok=True)
        before = prepared.fingerprint(other, FORMS)
        os.utime(other / change.name, ns=(1, 1))
        assert prepared.fingerprint(other, FORMS) != before, "every shard counts"


@pytest.mark.parametrize("where", ["file", "file/below", "/proc/none", "x" * 5000, "half\ud800"])
def test_a_directory_that_cannot_be_written_is_refused_before_the_load(where, source, tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "load", lambda *_: pytest.fail("loaded"))
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="^prepared: found .*need a directory that can be written"):
        prepared.load_prepared(tmp_path / where, source, FORMS, meshes.make(1))


def test_two_processes_may_make_the_same_copy(source, tmp_path, monkeypatch):
    """The other one finishes while this one is writing: its copy stays, and both records are of it."""
    directory, loaded = tmp_path / "copies", load.load(source, FORMS, meshes.make(1))
    hashes = prepared._hashes

    def overtaken(arrays):
        monkeypatch.setattr(prepared, "_hashes", hashes)
        prepared.save(directory, "of-the-other", loaded, source)
        return hashes(arrays)

    monkeypatch.setattr(prepared, "_hashes", overtaken)
    prepared.save(directory, prepared.fingerprint(source, FORMS), loaded, source)
    assert [path.name for path in directory.iterdir() if path.is_dir()] == [loaded.digest], "nothing is left behind"
    assert len({json.loads(path.read_text())["copy"] for path in directory.glob("*.json")}) == 1
    assert_equal(prepared.restore(directory, source, FORMS, meshes.make(1)).base, loaded.base)


def test_nothing_is_written_where_the_source_is_refused(tmp_path):
    directory = pathlib.Path(tmp_path / "copies")
    with pytest.raises(ValueError, match="config.json"):
        prepared.load_prepared(directory, tmp_path, FORMS, meshes.make(1))
    assert not directory.exists()


def test_a_session_uses_it(tmp_path, monkeypatch):
    config = configs.override(configs.default(), {"prepared": str(tmp_path), "mesh.data": 1})
    first = session.open_session(config)
    monkeypatch.setattr(prepared, "load", lambda *_: pytest.fail("read the source"))
    again = session.open_session(config)
    assert again.digest == first.digest and again.report == first.report
    assert_equal(again.base, first.base)
    assert not any("prepared" in name for name in configs.identity(config))

"""Exports of a run, and runs that start from one; merged checkpoints."""

import dataclasses
import json
import math
import pathlib

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from test_peft import SPEC, assert_same, random_adapter, rewrite, spec_of
from test_train import make_config, write_base

from rl_adapter import checkpoint, config_check, evaluate, export, lora, quant, update
from rl_adapter import config as config_lib
from rl_adapter import session as sessions
from rl_adapter.hub import codecs, load, merge, peft, requantize
from rl_adapter.hub.files import SINGLE, write_tensors

GOLDEN = pathlib.Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A config, the directory of a run that has done 3 steps, and its adapter."""
    config = make_config(write_base(tmp_path_factory.mktemp("base")))
    session = sessions.open_session(config)
    described = load.open_checkpoint(config.model).described
    adapter = random_adapter(described, session.model.adapter)
    directory = tmp_path_factory.mktemp("run")
    with checkpoint.Checkpoints(directory / "checkpoints", evaluate.identity(config, session.digest), 1, 2) as saved:
        saved.save(3, update.start(evaluate.optimizer(config), adapter), {}, force=True)
    return config, directory, adapter


@pytest.mark.parametrize("layout", peft.LAYOUTS)
def test_an_exported_adapter_is_the_run_s_to_the_bit(run, layout, tmp_path, capsys):
    config, directory, adapter = run
    out = export.run(config, directory, layout, tmp_path / "out")
    assert f"adapter of step 3, layout {layout}" in capsys.readouterr().out
    about = json.loads((out / export.REPORT).read_text())
    assert about["step"] == 3 and about["trained_parameters"] == lora.count(adapter)
    again = config_lib.override(config, {"adapter.init": str(out)})
    session = sessions.open_session(again)
    assert_same(session.initial, adapter)
    assert_same(jax.device_get(sessions.init_adapter(again, session)), adapter)
    # Without a run, what an evaluation and an export take is the adapter itself: an export turns one layout into another.
    step, found = evaluate.last_adapter(again, tmp_path / "none", session)
    assert step == 0
    assert_same(jax.device_get(found), adapter)


def test_an_export_overwrites_nothing_and_leaves_nothing_by_halves(run, tmp_path, monkeypatch):
    config, directory, _ = run
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(ValueError, match="--out: found something in .* nothing is overwritten"):
        export.run(config, directory, "fused", tmp_path / "out")
    with pytest.raises(ValueError, match="--workdir: found no checkpoints"):
        export.run(config, tmp_path / "nothing", "fused")
    with pytest.raises(ValueError, match="checkpoint identity"):
        export.run(config_lib.override(config, {"seed": 5}), directory, "fused", tmp_path / "new")
    monkeypatch.setattr(peft, "write_tensors", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export.run(config, directory, "fused", tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize(
    "out,message",
    [
        ("file/out", "need where a directory can be made"),
        ("file", "found something"),
        ("link", "found a link"),
        ("dangling", "found a link"),
        ("x" * 300, "need where a directory can be made"),
        ("/proc/x", "need where a directory can be made"),
        ("/proc", "found a link or a mount"),
        (".", "need a name for a directory"),
        ("empty/..", "need a name for a directory"),
        ("/", "need a name for a directory"),
    ],
)
def test_an_out_that_cannot_be_made_is_refused_before_weights_are_read(out, message, run, tmp_path, monkeypatch):
    config, directory, _ = run
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    monkeypatch.setattr(sessions, "open_session", lambda *_: pytest.fail("weights would be read"))
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(ValueError, match="--out: .*" + message):
        export.run(config, directory, "fused", out if out == "." else tmp_path / out)
    assert {path.name for path in tmp_path.rglob("*")} == {"file", "empty", "link", "dangling"}


def test_an_export_takes_no_directory_but_its_own(run, tmp_path, monkeypatch):
    """Whatever lies beside it stays, however it is named; out may be an empty directory, and is one that others may read."""
    config, directory, _ = run
    for name in ("out.partial", "out.tmp", ".out", "whole"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("x")
    (tmp_path / "out").mkdir()
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with monkeypatch.context() as patch:
        patch.setattr(peft, "write_tensors", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            export.run(config, directory, "fused", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    monkeypatch.chdir(tmp_path)
    out = export.run(config, directory, "fused", "out")
    assert out.stat().st_mode == (tmp_path / "whole").stat().st_mode
    assert sorted(path.name for path in tmp_path.rglob("*") if path.parent != tmp_path / "out") == before


def test_a_run_that_learned_nothing_is_not_exported(run, tmp_path):
    """A new adapter: its B is zero."""
    config, _, _ = run
    session = sessions.open_session(config)
    with checkpoint.Checkpoints(tmp_path / "run/checkpoints", evaluate.identity(config, session.digest), 1, 2) as saved:
        saved.save(1, evaluate.new_state(config, session), {}, force=True)
    for layout in ("per-expert", export.MERGED, export.REQUANTIZED):
        with pytest.raises(ValueError, match="adapter changes nothing: every B is zero"):
            export.run(config, tmp_path / "run", layout, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_adapter_is_a_part_of_a_run_s_identity(run, tmp_path):
    config, directory, _ = run
    out = export.run(config, directory, "per-expert", tmp_path / "out")
    started = config_lib.override(config, {"adapter.init": str(out)})
    moved = out.rename(tmp_path / "moved")
    assert config_lib.identity(config_lib.override(config, {"adapter.init": str(moved)})) != config_lib.identity(config)
    before = config_lib.identity(config_lib.override(config, {"adapter.init": str(moved)}))
    with pytest.raises(ValueError, match=r"adapter\.init: found no adapter_config\.json"):
        config_check.validate(started)
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    rewrite(moved, tensors=lambda tensors: tensors | {key: tensors[key] * 2})
    assert config_lib.identity(config_lib.override(config, {"adapter.init": str(moved)})) != before


def test_an_adapter_that_moves_no_logit_is_refused(run, tmp_path):
    """Its B is not zero, but all that it adds is rounded away (sglang 27381, vllm 41754)."""
    config, directory, _ = run
    out = export.run(config, directory, "fused", tmp_path / "out")
    tiny = lambda tensors: {key: t * np.float32(1e-30) if "lora_B" in key else t for key, t in tensors.items()}
    rewrite(out, tensors=tiny)
    with pytest.raises(ValueError, match=r"adapter\.init: found .* which changes no logit of 64 tokens"):
        sessions.open_session(config_lib.override(config, {"adapter.init": str(out)}))


# --- merged ------------------------------------------------------------------------------------------------------------------------


def matrices(path: pathlib.Path) -> dict:
    """(run, field, index) -> f32 [out, in] or [width], as the files hold it."""
    opened = load.open_checkpoint(path)
    fields, problems = load.plan(opened)
    assert not problems + load.check(opened, fields, lambda _: "fixed16")
    out = {}
    for field in fields:
        for piece in field.pieces:
            if piece.codec is None:
                value = opened.tensors.read(piece.source.name, piece.source.index)
            else:
                value = piece.codec.read(piece.source, field.shape, opened.tensors, opened.quantization)
                value = np.asarray(quant.dequantize(value)).T if quant.is_quantized(value) else value
            out[field.run, field.name, piece.index] = value.astype(np.float32)
    return out


def delta_of(adapter, spec, where) -> np.ndarray | None:
    run, field, index = where
    pair = adapter.head if run is None and field == "head" else adapter.layers[run].get(field) if run is not None else None
    return None if pair is None else (np.float32(spec.scale(field)) * (pair.a[index].astype(np.float64) @ pair.b[index])).T


MERGED = ["deepseek_v3-fp8", "gpt_oss-mxfp4", "kimi_k25-int4_g32", "llama-f32-tied", "mistral-gptq", "qwen3_moe-f32-mixed-fused"]


@pytest.mark.parametrize("name", MERGED)
def test_a_merged_checkpoint_is_the_base_plus_the_adapter(name, tmp_path):
    opened = load.open_checkpoint(GOLDEN / name)
    adapter = random_adapter(opened.described, SPEC, size=0.1)
    report = merge.save(tmp_path / "out", opened, adapter, SPEC, shard=20_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert 0 < report["bf16"]["relative_error"] < 2**-8 and report["bf16"]["matrices"] > 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config | config.get("text_config", {})
    before, after = matrices(GOLDEN / name), matrices(tmp_path / "out")
    assert before.keys() == after.keys()
    for where, value in before.items():
        delta = delta_of(adapter, SPEC, where)
        if delta is None and where[1] in ("embed", "final_norm", "attn_norm", "mlp_norm", "score_bias"):
            assert after[where].tobytes() == value.tobytes(), where
        else:
            np.testing.assert_allclose(after[where], value if delta is None else value + delta, rtol=2**-8, atol=1e-6, err_msg=str(where))


@pytest.mark.parametrize(
    "name", ["deepseek_v3-fp8", "gpt_oss-mxfp4", "kimi_k25-int4_g32", "glm4_moe-int8", "llama-fp8-tensor", "qwen3-mxfp4"]
)
def test_requantizing_reports_its_error_and_keeps_what_is_not_adapted(name, tmp_path):
    """peft 1043 and 2586: to merge into four bits changes outputs; only those who ask for it get it, and are told how much."""
    opened = load.open_checkpoint(GOLDEN / name)
    spec = spec_of(attention=0)
    adapter = random_adapter(opened.described, spec, size=0.1)
    report = merge.save(tmp_path / "out", opened, adapter, spec, in_format=True)
    old, new = (json.loads((directory / "config.json").read_text()) for directory in (GOLDEN / name, tmp_path / "out"))
    assert new == old | ({"tie_word_embeddings": False} if old["tie_word_embeddings"] else {})
    before, after = matrices(GOLDEN / name), matrices(tmp_path / "out")
    errors, sizes = {}, {}
    for where, value in before.items():
        delta = delta_of(adapter, spec, where)
        if delta is None:
            assert after[where].tobytes() == value.tobytes(), where
            continue
        field = where[1]
        error = np.square(after[where] - (value + delta)).sum()
        form = "bf16" if error < np.square(value + delta).sum() * 2**-16 else "low"
        errors[form], sizes[form] = errors.get(form, 0) + error, sizes.get(form, 0) + np.square(value + delta).sum()
        assert error < np.square(value + delta).sum() * 0.2**2, field
    (low,) = report.keys() - {"bf16"}
    assert report[low]["relative_error"] == pytest.approx(np.sqrt(errors["low"] / sizes["low"]), rel=0.01)
    assert report[low]["error_over_adapter"] > report[low]["relative_error"] > 1e-3


def tie_quantized(name: str, codec, form: str, directory: pathlib.Path) -> pathlib.Path:
    """A golden model whose head is its embedding, which is quantized."""
    opened = load.open_checkpoint(GOLDEN / name)
    spec, random = opened.spec, np.random.default_rng(0)
    tensors = {key: opened.tensors.read(key) for key in opened.tensors.entries if not key.startswith(("lm_head", "model.embed_tokens"))}
    group = math.gcd(128, spec.d_model)
    codes = random.integers(-7, 8, (spec.d_model // group, group, spec.vocab)).astype(np.int8)
    scale = np.full((len(codes), spec.vocab), 0.05, np.float32)
    weight = quant.pack(codes, scale) if form == "int4" else quant.weight(form, codes.astype(ml_dtypes.float8_e4m3fn), scale)
    tensors |= codec.write(weight, "model.embed_tokens.weight", opened.quantization)
    directory.mkdir()
    write_tensors(directory / SINGLE, tensors)
    config = json.loads((GOLDEN / name / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    return directory


@pytest.mark.parametrize("in_format", [True, False])
@pytest.mark.parametrize(
    "name,codec,form", [("qwen3-int4_g128-qat", codecs.compressed_tensors.INT4, "int4"), ("qwen3_moe-fp8", codecs.fp8.BLOCKS, "fp8")]
)
def test_a_head_that_was_tied_to_a_quantized_embedding_gets_tensors_of_its_own(name, codec, form, in_format, tmp_path):
    base = tie_quantized(name, codec, form, tmp_path / "base")
    opened, spec = load.open_checkpoint(base), spec_of(attention=0, mlp=0, experts=0, router=0)
    adapter = random_adapter(opened.described, spec, size=0.1)
    report = merge.save(tmp_path / "out", opened, adapter, spec, in_format)
    merged = load.open_checkpoint(tmp_path / "out")
    assert not merged.spec.tie_embeddings
    before, after = matrices(base), matrices(tmp_path / "out")
    head, embed = (None, "head", ()), (None, "embed", ())
    wanted = before[embed] + delta_of(adapter, spec, head)
    np.testing.assert_allclose(after[head], wanted, atol=np.abs(wanted).max() * (0.1 if in_format else 2**-8))
    if in_format:
        assert report.keys() == {form}
        for key in opened.tensors.entries:
            assert merged.tensors.read(key).tobytes() == opened.tensors.read(key).tobytes(), key
        of = lambda tensors, module: {key.removeprefix(module): e.dtype for key, e in tensors.entries.items() if key.startswith(module)}
        new, old = of(merged.tensors, "lm_head."), of(opened.tensors, "model.embed_tokens.")
        assert new == old
        settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
        assert "lm_head" not in settings.get("ignore", ())
    else:
        np.testing.assert_allclose(after[embed], before[embed], rtol=2**-8)


def test_no_tensor_is_written_twice(tmp_path):
    writer = merge._Writer(tmp_path, 8)
    for name in ("a", "b"):
        writer.add(name, np.zeros(2, np.float32))
    for name in ("a", "b"):  # of a file that is written, and of the one that is not yet
        with pytest.raises(ValueError, match=f"{name}: two tensors"):
            writer.add(name, np.zeros(2, np.float32))


@pytest.mark.parametrize("name", ["gpt_oss-mxfp4", "kimi_k25-int4_g32", "qwen3_moe-fp8"])
def test_experts_that_learned_nothing_keep_their_bytes(name, tmp_path):
    """No token went to them. Of a fused tensor the others are quantized again."""
    opened, spec = load.open_checkpoint(GOLDEN / name), spec_of(attention=0, mlp=0, router=0, head=0)
    adapter = random_adapter(opened.described, spec, size=0.1)
    for stack in adapter.layers:
        for pair in stack.values():
            pair.b[:, 1:] = 0
    report = merge.save(tmp_path / "out", opened, adapter, spec, in_format=True)
    (costs,) = report.values()
    assert costs["matrices"] == 3 * opened.spec.sparse_layers and costs["error_over_adapter"] < 100
    before, after = matrices(GOLDEN / name), matrices(tmp_path / "out")
    for where, value in before.items():
        learned = where[1] in lora.GROUPS["experts"] and where[2][1] == 0
        assert (after[where].tobytes() == value.tobytes()) != learned, where


@pytest.mark.parametrize(
    "name", ["deepseek_v3-fp8", "glm4_moe-awq", "kimi_k25-int4_g32", "llama-nvfp4", "mixtral-fp8-channel", "qwen3-mxfp4"]
)
def test_headers_tell_what_can_be_quantized_again(name):
    opened = load.open_checkpoint(GOLDEN / name)
    fields, _ = load.plan(opened)
    for codec, field, piece in {p.codec: (p.codec, f, p) for f in fields for p in f.pieces if merge._is_quantized(p)}.values():
        where = piece.source, field.shape, opened.tensors, opened.quantization
        told = requantize.refuses(codec, codec.expected(*where), piece.source.name)
        old = codec.read(*where)
        if told is None:
            requantize.like(old, np.asarray(quant.dequantize(old)), piece.source.name, opened.quantization)
        else:
            with pytest.raises(ValueError, match="without zero points"):
                requantize.like(old, np.asarray(quant.dequantize(old)), piece.source.name, opened.quantization)


def test_a_qat_base_is_a_fixed_point_of_requantizing():
    opened = load.open_checkpoint(GOLDEN / "qwen3-int4_g128-qat")
    fields, _ = load.plan(opened)
    (field,) = [field for field in fields if field.name == "down" or field.name == "mlp_down"]
    source = field.pieces[0].source
    old = field.pieces[0].codec.read(source, field.shape, opened.tensors, opened.quantization)
    new = requantize.like(old, np.asarray(quant.dequantize(old)), source.name, opened.quantization)
    assert new.qvalue.tobytes() == old.qvalue.tobytes() and new.scale[0].tobytes() == old.scale[0].tobytes()


@pytest.mark.parametrize(
    "name,in_format,message",
    [
        ("qwen3_moe-gptq", True, "found gptq, need int4, int8, fp8 or mxfp4"),
        ("glm4_moe-awq", True, "found awq"),
        ("llama-nvfp4", True, "found nvfp4"),
        ("mixtral-bf16", True, "found 'merged-requantized' for a base that is not quantized, need 'merged'"),
    ],
)
def test_what_cannot_be_merged_says_so_before_weights_are_read(name, in_format, message, run, tmp_path, monkeypatch):
    opened, (config, directory, _) = load.open_checkpoint(GOLDEN / name), run
    monkeypatch.setattr(sessions, "open_session", lambda *_: pytest.fail("weights would be read"))
    with pytest.raises(ValueError, match=message):
        layout = export.REQUANTIZED if in_format else export.MERGED
        export.run(config_lib.override(config, {"model": str(GOLDEN / name)}), directory, layout, tmp_path / "out")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=message):
        merge.save(tmp_path / "out", opened, random_adapter(opened.described, SPEC), SPEC, in_format)


@pytest.mark.parametrize("in_format", [True, False])
def test_a_gguf_file_is_not_merged_into(in_format, run, tmp_path, monkeypatch):
    """Whose headers are read, but not its weights."""
    config, directory, _ = run
    opened = dataclasses.replace(load.open_checkpoint(config.model), path=tmp_path / "model.gguf", quantization=None)
    monkeypatch.setattr(load, "open_checkpoint", lambda *_: opened)
    monkeypatch.setattr(sessions, "open_session", lambda *_: pytest.fail("weights would be read"))
    with pytest.raises(ValueError, match="model: found .*gguf, need a directory in Hugging Face layout"):
        export.run(config, directory, export.REQUANTIZED if in_format else export.MERGED, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_merged_run_is_a_base_of_its_own(run, tmp_path):
    """With its tokenizer beside it, which a session opens."""
    config, directory, adapter = run
    out = export.run(config, directory, "merged", tmp_path / "out")
    assert (out / "tokenizer.json").read_bytes() == (pathlib.Path(config.model) / "tokenizer.json").read_bytes()
    session = sessions.open_session(config_lib.override(config, {"model": str(out)}))
    assert session.report["kept"] == 0
    names = load_file(out / "model.safetensors").keys()
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in names and not any("packed" in name for name in names)

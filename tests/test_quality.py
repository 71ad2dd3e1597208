"""`--mode=quality`: its numbers against logits of transformers (golden checkpoints) and NumPy, what it refuses, and the launcher's path."""

import io
import json
import pathlib
import shutil
import weakref

import jax
import numpy as np
import pytest
import rich.console
import tokenizers
from quick import QUICK, quickly

import launch
from rl_adapter import config as config_lib
from rl_adapter import config_check, quality, quality_show
from rl_adapter import session as sessions
from rl_adapter.hub import load
from rl_adapter.types import Numerics

GOLDEN = pathlib.Path(__file__).parent / "golden"


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(quality, "_observe", jax.jit(quality._observe.__wrapped__, static_argnames="model", compiler_options=QUICK))
    with quickly():
        yield


def write_tokenizer(directory: pathlib.Path, shift: int = 0) -> None:
    """Words t0 .. t63 of a vocabulary of 64."""
    vocab = {f"t{i}": (i + shift) % 64 for i in range(64)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="t0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.save(str(directory / "tokenizer.json"))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "pad_token_id": 0}))


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """Golden checkpoints by name, with a tokenizer, and the text of their tokens."""
    directory = tmp_path_factory.mktemp("golden")
    for name in ("qwen3_moe-bf16-shards", "mistral-bf16", "mistral-gptq", "qwen3-bf16"):
        write_tokenizer(shutil.copytree(GOLDEN / name, directory / name))
    tokens = np.load(GOLDEN / "mistral-bf16" / "tokens.npy")
    (directory / "text.txt").write_text(" ".join(f"t{i}" for i in tokens.ravel()))
    return directory


def settings(golden, model: str, **changes):
    fields = {"model": str(golden / model), "mesh.data": 1, "data.max_prompt_tokens": 16, "rollout.max_new_tokens": 8}
    fields |= {f"quality.{k}": v for k, v in dict(tokens=12, rows=4, positions=16, batch=4, tasks=False, plot=False).items()}
    fields |= {"quality.text_path": str(golden / "text.txt"), "quality.variants": ("float",)}
    return config_lib.override(config_lib.default(), fields | changes)


def logprobs(name):
    """[2, 12, V] by transformers, and of tokens 1 .. 11 of each row."""
    z = np.load(GOLDEN / name / "logits.npy").astype(np.float64)
    z = z - np.log(np.exp(z).sum(-1, keepdims=True))
    return z, np.take_along_axis(z[:, :-1], np.load(GOLDEN / name / "tokens.npy")[:, 1:, None], -1)[..., 0]


def test_forms_of_one_model_rank_as_they_must(golden, tmp_path, quick, monkeypatch):
    opened, open_session = [], sessions.open_session

    def one_at_a_time(config, *splits):
        assert not any(base() for base in opened), "a base is still held while the next one is loaded"
        session = open_session(config, *splits)
        opened.append(weakref.ref(session.base))
        return session

    monkeypatch.setattr(sessions, "open_session", one_at_a_time)
    variants = ("float:fixed16", "float:int8", "float:int4")
    result = quality.run(settings(golden, "qwen3_moe-bf16-shards", **{"quality.variants": variants}), tmp_path)
    same, int8, int4 = result["variants"]
    _, scored = logprobs("qwen3_moe-bf16-shards")
    assert result["reference"]["perplexity"] == pytest.approx(np.exp(-scored.mean()), rel=1e-3)
    assert result["text"] == {"path": str(golden / "text.txt"), "rows": 2, "tokens": 22, "compared": 22}
    assert same["kl_max"] == same["perplexity_change"] == 0 and same["same_top"] == same["experts_same_set"] == same["experts_shared"] == 1
    assert same["layer_error"] == [0, 0, 0] and same["perplexity_change_interval"] == [0, 0]
    assert 0 < int8["kl_mean"] < int4["kl_mean"] / 10 and int8["experts_shared"] >= int4["experts_shared"]
    assert all(0 < a < b / 4 for a, b in zip(int8["layer_error"], int4["layer_error"]))
    assert len(opened) == 3, "the reference is loaded as the first variant is"
    assert int8["base_digest"] != int4["base_digest"] and set(int4["forms"]) >= {"int4", "fixed16"}
    assert json.loads((tmp_path / "quality.json").read_text()) == result and not (tmp_path / "quality.png").exists()


def test_divergence_from_another_checkpoint_is_that_of_transformers(golden, tmp_path, quick):
    result = quality.run(settings(golden, "mistral-gptq", **{"quality.against": str(golden / "mistral-bf16")}), tmp_path)
    (p, of_a), (q, of_b) = logprobs("mistral-bf16"), logprobs("mistral-gptq")
    kl = (np.exp(p) * (p - q)).sum(-1)[:, :-1]
    (found,) = result["variants"]
    measured = [found[key] for key in ("kl_mean", "kl_max", "same_top", "perplexity")]
    needed = [kl.mean(), kl.max(), np.mean((p.argmax(-1) == q.argmax(-1))[:, :-1]), np.exp(-of_b.mean())]
    np.testing.assert_allclose(measured, needed, rtol=2e-3)
    change, rows = of_a - of_b, (of_a - of_b).sum(1)
    half = 1.96 * np.sqrt(2 * ((rows - 11 * change.mean()) ** 2).sum()) / 22
    np.testing.assert_allclose(np.log1p(found["perplexity_change_interval"]), change.mean() + np.array([-half, half]), rtol=1e-2)
    assert "experts_shared" not in found and result["reference"]["path"].endswith("mistral-bf16")


def test_launcher_measures_the_shipped_base_with_tasks(tmp_path, capsys, quick):
    pytest.importorskip("matplotlib")
    sums = [{"prompt": f"{a}+{a + 1}-1? ", "answer": str(2 * a)} for a in range(2, 10)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, sums)))
    small = {"data.eval": tmp_path / "sums.jsonl", "data.train": tmp_path / "more.jsonl"}
    (tmp_path / "more.jsonl").write_text('{"prompt": "1+1? ", "answer": "2"}')  # else the train split is generated, to compare with
    small |= {"eval.examples": 8, "eval.batch": 8, "rollout.max_new_tokens": 4, "data.max_prompt_tokens": 16, "mesh.data": 1}
    small |= {"quality.rows": 8, "quality.batch": 8, "quality.variants": "a8"}
    launch.main(["launch.py", "--mode=quality", f"--workdir={tmp_path}", *(f"--config.{k}={v}" for k, v in small.items())])
    result = json.loads((tmp_path / "quality.json").read_text())
    (a8,) = result["variants"]
    assert a8["base_digest"] == result["reference"]["base_digest"] and (a8["numerics"], a8["act_bits"]) == ("exact", 8)
    assert 0 < a8["kl_mean"] < 0.05 and 0.9 < a8["experts_shared"] <= 1 and all(1e-4 < e < 0.1 for e in a8["layer_error"])
    assert a8["examples"] == 8 and a8["accuracy_interval"][0] <= a8["accuracy"] <= a8["accuracy_interval"][1]
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("perplexity", "KL, mean nats", "same experts", "accuracy", "a8"))


def test_bases_that_load_alike_are_loaded_once(golden):
    def sources(model, *variants):
        config = settings(golden, model, **{"quality.variants": variants})
        reference, *rest = quality.plan(config, {config.model: load.open_checkpoint(config.model)})
        return reference, rest

    reference, (a16, a8, int4) = sources("qwen3_moe-bf16-shards", "a16", "a8:fixed16", "a8:int4")
    assert reference.numeric == Numerics("float") and a16.numeric == Numerics("exact", 16) and a8.numeric == Numerics("exact", 8)
    assert a8.source == reference.source and a16.source.linear == "int8" and int4.source.linear == "int4"
    reference, (a16, a8) = sources("mistral-gptq", "a16", "a8")
    assert reference.source == a16.source == a8.source, "its matrices are as they lie on disk"
    with pytest.raises(ValueError, match="quality.variants: found 'a8:int4', need 'a8': the matrices of .* have a form already"):
        sources("mistral-gptq", "a8:int4")


def test_refused_before_anything_is_loaded(golden, tmp_path, monkeypatch):
    monkeypatch.setattr(sessions, "open_session", lambda *_: pytest.fail("loaded"))

    (tmp_path / "others.jsonl").write_text('{"prompt": "t9", "answer": "t3"}')
    (tmp_path / "problems.jsonl").write_text('{"prompt": "t1 t2", "answer": "t3"}')
    files = {"data.train": (str(tmp_path / "others.jsonl"),), "data.eval": (str(tmp_path / "problems.jsonl"),)}

    def refused(message, model="mistral-bf16", **changes):
        changes = {f"quality.{k}": v for k, v in changes.items()} | files
        with pytest.raises(ValueError, match=message):
            quality.run(settings(golden, model, **changes), tmp_path / "out")
        assert not (tmp_path / "out").exists()

    refused("quality: layers: found 2 in .*mistral-bf16, need 3 as in", against=str(golden / "qwen3_moe-bf16-shards"))
    write_tokenizer(moved := shutil.copytree(golden / "mistral-gptq", tmp_path / "moved"), shift=1)
    refused(r"quality: tokenizer: found 64 tokens with other ids \(such as 't", against=str(moved))
    refused(r"quality.tokens: found 80, need at most 64, the positions", tokens=80, text_path=str(long_text(tmp_path)))
    refused("quality.tokens: found 3, need at least 4 for the longest problem", tokens=3, text_path="")  # t1 t2 Answer: t3
    (tmp_path / "problems.jsonl").write_text(json.dumps({"prompt": "t1 " * 80, "answer": "t3"}))
    refused("data: found a problem of 8. tokens with its answer, need at most 64", tokens=256, text_path="")
    misfit = r"quality.variants: found 'float:int4_g128', need what .*mistral-bf16 can be loaded as:\n.*groups for int4_g128"
    refused(misfit, variants=("float", "float:int4_g128"))
    (tmp_path / "latin").write_bytes(b"t1 \xff t2")
    refused("quality.text_path: found bytes that are not UTF-8", text_path=str(tmp_path / "latin"))
    (tmp_path / "empty").write_text("t1")
    refused("quality.text_path: found 1 tokens in .*, need at least 2", text_path=str(tmp_path / "empty"))
    monkeypatch.setattr(quality.importlib.util, "find_spec", lambda name: None)
    refused(r"quality.plot: found no matplotlib, need `pip install 'rl-adapter\[plot\]'`", plot=True)


def long_text(directory):
    (directory / "long.txt").write_text("t1 " * 200)
    return directory / "long.txt"


def test_without_tasks_no_completion_need_fit(golden, quick):
    changes = {"data.max_prompt_tokens": 64, "rollout.max_new_tokens": 64, "context": 128}
    config = settings(golden, "mistral-bf16", **changes)
    checkpoint = load.open_checkpoint(config.model)
    rows = quality.read_rows(config, quality.check({config.model: checkpoint}), checkpoint.spec.max_positions)
    reference = quality.plan(config, {config.model: checkpoint})[0]
    ((_, _, parts, rewards),) = quality.measure(config, reference.source, [reference], rows)
    assert rewards is None and np.isfinite(next(parts).logits).all()
    with pytest.raises(ValueError, match="context: found 128 tokens"):
        next(quality.measure(config_lib.override(config, {"quality.tasks": True}), reference.source, [reference], rows))


def test_labels_are_names_of_directories_and_stems_of_files(golden, tmp_path, monkeypatch):
    one = shutil.copytree(golden / "mistral-bf16", tmp_path / "Qwen2.5-7B")
    two = shutil.copytree(golden / "mistral-bf16", tmp_path / "[x]Qwen2.5-14B")
    monkeypatch.chdir(one)
    config = settings(golden, str(two), **{"quality.against": ".", "quality.also": (str(golden / "mistral-gptq") + "/",)})
    paths = (".", str(two), *config.quality.also)
    labels = [variant.label for variant in quality.plan(config, {path: load.open_checkpoint(path) for path in paths})]
    assert labels == ["Qwen2.5-7B, reference", "[x]Qwen2.5-14B, float", "mistral-gptq, float"]


@pytest.mark.parametrize("name", ["[/x]", "[red]a", "[bold]", "a\\[b]"])
def test_names_are_shown_as_they_are(name):
    column = {"label": name, "forms": {"int8": 10}, "perplexity": 2.0}
    result = {
        "text": {"path": f"/texts/{name.replace('/', '')}", "rows": 1, "tokens": 3, "compared": 3},
        "reference": column,
        "variants": [column],
    }
    console = rich.console.Console(width=200, record=True, file=io.StringIO())
    console.print(quality_show.table(result))
    shown = console.export_text()
    assert shown.count(name) >= 3 and shown.count(name.replace("/", "")) >= 1


@pytest.mark.parametrize(
    "changes,field",
    [
        ({"quality.variants": ()}, "quality.variants"),
        ({"quality.variants": ("a8", "a8")}, "quality.variants"),
        ({"quality.variants": ("a4",)}, "quality.variants"),
        ({"quality.variants": ("a8:int3",)}, "quality.variants"),
        ({"quality.variants": ("a8:",)}, "quality.variants"),
        ({"quality.variants": (8,)}, "quality.variants"),
        ({"quality.against": "/nowhere"}, "quality.against"),
        ({"quality.also": ("",)}, "quality.also"),
        ({"quality.also": (3,)}, "quality.also"),
        ({"quality.text_path": "/nowhere"}, "quality.text_path"),
        ({"quality.rows": 0}, "quality.rows"),
        ({"quality.tokens": 1}, "quality.tokens"),
        ({"quality.positions": 0}, "quality.positions"),
        ({"quality.batch": 0}, "quality.batch"),
    ],
)
def test_config_refuses(changes, field):
    with pytest.raises(ValueError, match=rf"^{field}: found .*need"):
        config_check.validate(config_lib.override(config_lib.default(), changes))


def test_compare_in_numpy():
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(2, 3, 7)) for _ in "ab")
    p, q = (np.exp(z) / np.exp(z).sum(-1, keepdims=True) for z in (a, b))
    np.testing.assert_allclose(quality.divergence(a[0], b[0]), (p * np.log(p / q)).sum(-1)[0], rtol=1e-12)
    np.testing.assert_allclose(quality.divergence(a[0], a[0] + 700.0), 0, atol=1e-12)

    choices = np.array([[[[0, 1], [2, 3], [4, 5]]]] * 2, np.int16)  # [2, 1, 3, 2]
    other = choices.copy()
    other[0, 0, 0] = [1, 0]  # the same set
    other[1, 0, 2] = [5, 9]
    stream = np.ones((2, 1, 3, 4), np.float32)
    one = quality.Seen(np.zeros((1, 2), np.float32), choices, stream, a[:1].astype(np.float32))
    gap = quality.compare(one, quality.Seen(one.logprobs - 1, other, stream * np.float32(1.5), one.logits))
    assert gap.shared.tolist() == [[[1, 1, 1]], [[1, 1, 0.5]]] and gap.worse.tolist() == [[1, 1]] and gap.same_top.all()
    np.testing.assert_allclose(gap.error, 0.5)


def test_padding_and_what_is_given_count_for_nothing():
    tokens, starts, lengths = np.zeros((2, 4), np.int32), np.array([1, 2]), np.array([4, 3])
    slots, used = np.array([[0, 1, 2], [1, 0, 0]], np.int32), np.array([[1, 1, 1], [1, 0, 0]], bool)
    rows = quality.Rows(tokens, starts, lengths, slots, used)
    assert rows.predicted.tolist() == [[True, True, True], [False, True, False]]
    noise = np.full((2, 3), 1e9)
    worse, kl = np.where(rows.predicted, 0.1, noise), np.where(used, 0.2, noise)
    error, shared = np.where(used, 0.3, noise)[None], np.where(rows.valid, 0.5, 1e9)[None]
    seen = quality.Seen(np.where(rows.predicted, -1.0, -1e9).astype(np.float32), *[np.zeros(())] * 3)
    found = quality.summary([quality.Gap(worse, kl, used, error, shared)], [seen], rows)
    measured = [found[k] for k in ("perplexity", "kl_mean", "kl_max", "same_top", "experts_shared")]
    np.testing.assert_allclose(measured, [np.exp(1.1), 0.2, 0.2, 1, 0.5])
    np.testing.assert_allclose([*found["layer_error"], *found["perplexity_change_interval"]], [0.3, *[np.expm1(0.1)] * 2])


def test_table_and_plot_of_few_numbers(tmp_path):
    """Without tasks, experts or a second row: what is not measured is not shown."""
    pytest.importorskip("matplotlib")
    column = {"label": "a8", "forms": {"int8": 10}, "perplexity": 2.0, "perplexity_change": 0.0, "perplexity_change_interval": None}
    column |= {"kl_mean": 0.0, "kl_p99": 0.0, "kl_max": 0.0, "same_top": 1.0, "layer_error": [0.0]}
    reference = {"label": "x, reference", "forms": {"int8": 10}, "perplexity": 2.0}
    result = {"text": {"path": "", "rows": 1, "tokens": 3, "compared": 3}, "reference": reference, "variants": [column]}
    names = list(quality_show.table(result).columns[0].cells)
    assert "accuracy" not in names and "same experts" not in names and "perplexity" in names
    quality_show.plot(result, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000

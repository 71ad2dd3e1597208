"""Every field is checked, references follow and are not shared, and the quickstarts are valid."""

import json
import pathlib

import pytest

import launch
from rl_adapter import config as config_lib
from rl_adapter import config_check

EXPERIMENTS = pathlib.Path(__file__).parents[1] / "experiments"

# Changes to the default that must be refused -> the field that the message must begin with.
BAD = [
    ({"seed": -1}, "seed"),
    ({"steps": 0}, "steps"),
    ({"model": "/nowhere"}, "model"),
    ({"numerics": "flot"}, "numerics"),
    ({"act_bits": 4}, "act_bits"),
    ({"context": 1}, "context"),
    ({"context": 16}, "context"),
    ({"quantize.linear": "int3"}, "quantize.linear"),
    ({"quantize.head": ""}, "quantize.head"),
    ({"quantize.router": "f32"}, "quantize.router"),
    ({"mesh.data": -1}, "mesh.data"),
    ({"mesh.expert": 0}, "mesh.expert"),
    ({"adapter.rank": 0}, "adapter"),
    ({"adapter.rank": -2}, "adapter.rank"),
    ({"adapter.head.rank": -1}, "adapter.head.rank"),
    ({"adapter.alpha": 0.0}, "adapter.alpha"),
    ({"data.train": ()}, "data.train"),
    ({"data.train": ("a", "a")}, "data.train"),
    ({"data.train": ("a", "/nowhere.jsonl")}, "data.train"),
    ({"data.eval_size": 8}, "eval.examples"),
    ({"rollout.group": 1}, "rollout.group"),
    ({"rollout.prompts": 15, "optimizer.minibatches": 2}, "rollout.prompts"),
    ({"rollout.page": 0}, "rollout.page"),
    ({"rollout.chunk": 0}, "rollout.chunk"),
    ({"rollout.steps": 0}, "rollout.steps"),
    ({"rollout.prefill": 0}, "rollout.prefill"),
    ({"rollout.slots": -1}, "rollout.slots"),
    ({"rollout.cache_tokens": -1}, "rollout.cache_tokens"),
    ({"rollout.max_staleness": -1}, "rollout.max_staleness"),
    ({"cache_bits": 4}, "cache_bits"),
    ({"act_bits": 8, "cache_bits": 16}, "cache_bits"),
    ({"optimizer.microbatch_tokens": -1}, "optimizer.microbatch_tokens"),
    ({"rollout.temperature": 0.0}, "rollout.temperature"),
    ({"rollout.top_p": 0.0}, "rollout.top_p"),
    ({"rollout.top_p": float("nan")}, "rollout.top_p"),
    ({"loss.clip_low": 1.0}, "loss.clip_low"),
    ({"loss.kl": -0.1}, "loss.kl"),
    ({"optimizer.learning_rate": float("inf")}, "optimizer.learning_rate"),
    ({"optimizer.schedule": "step"}, "optimizer.schedule"),
    ({"checkpoint.keep": 0}, "checkpoint.keep"),
    ({"adapter.mlp.rank": -1}, "adapter.mlp.rank"),
    ({"adapter.init": "/nowhere"}, "adapter.init"),
    ({"data.prompt": "no place"}, "data.prompt"),
    ({"data.prompt": "{prompt} {prompt}"}, "data.prompt"),
    ({"rollout.stop": ("",)}, "rollout.stop"),
    ({"rollout.stop": (12,)}, "rollout.stop"),
    ({"rollout.stop": ("a", "\ud800")}, "rollout.stop"),
    ({"data.prompt": "\udcff{prompt}"}, "data.prompt"),
    ({"data.train": ("\udfff",)}, "data.train"),
    ({"reward.mark": "\ud83d:"}, "reward.mark"),
    ({"reward.exact.weight": 0.0}, "reward"),
    ({"reward.exact.weight": float("nan")}, "reward.exact.weight"),
    ({"reward.failure": float("-inf")}, "reward.failure"),
    ({"reward.seconds": 0.0}, "reward.seconds"),
    ({"reward.code.seconds": -1.0}, "reward.code.seconds"),
    ({"reward.workers": 0}, "reward.workers"),
    ({"reward.gold": "keep"}, "reward.gold"),
    ({"reward.held_out": "maths"}, "reward.held_out"),
    ({"reward.held_out": "exact"}, "reward.held_out"),
    ({"reward.code.memory_mb": 0}, "reward.code.memory_mb"),
    ({"reward.regex.weight": 1.0}, "reward.regex.pattern"),
    ({"reward.held_out": "regex", "reward.regex.pattern": "(a"}, "reward.regex.pattern"),
    ({"reward.json.weight": -1.0, "reward.json.schema": "/nowhere"}, "reward.json.schema"),
    ({"reward.function.weight": 1.0, "reward.function.path": "os.path"}, "reward.function.path"),
    ({"model": "x" * 5000}, "model"),
    ({"model": "x" * 5000 + ".gguf"}, "model"),
    ({"quality.also": ("\0",)}, "quality.also"),
    ({"adapter.init": "x" * 5000}, "adapter.init"),
    ({"data.eval": ("x" * 5000 + ".jsonl",)}, "data.eval"),
    ({"data.eval": (3,)}, "data.eval"),
    ({"data.eval": ("\0.parquet",)}, "data.eval"),
    ({"data.weights": (1, 2)}, "data.weights"),
    ({"data.weights": (1, 2, 0)}, "data.weights"),
    ({"data.weights": (1, 2, float("nan"))}, "data.weights"),
    ({"data.curriculum": "yes"}, "data.curriculum"),
    ({"data.explore": 0.0}, "data.explore"),
    ({"data.too_long": "cut"}, "data.too_long"),
    ({"eval.samples": 0}, "eval.samples"),
    ({"eval.samples": 513}, "eval.samples"),
    ({"eval.samples": 4, "eval.k": (5,)}, "eval.k"),
    ({"eval.samples": 4, "eval.k": (2, 2)}, "eval.k"),
    ({"eval.samples": 4, "eval.k": (True,)}, "eval.k"),
    ({"eval.temperature": 0.0}, "eval.temperature"),
    ({"eval.top_p": 1.5}, "eval.top_p"),
    ({"eval.solved": float("nan")}, "eval.solved"),
    ({"samples.keep": -1}, "samples.keep"),
    ({"samples.keep_every": -1}, "samples.keep_every"),
    ({"samples.omit": ("reward",)}, "samples.omit"),
    ({"samples.omit": ("completion_text",)}, "samples.omit"),
    ({"samples.omit": ("prompt_text", "prompt_tokens")}, "samples.omit"),
    ({"samples.redact": ("(",)}, "samples.redact"),
    ({"samples.redact": ("a*",)}, "samples.redact"),
    ({"samples.redact": (3,)}, "samples.redact"),
    ({"samples.redact": ("\udfff",)}, "samples.redact"),
    ({"quality.tokens": 1}, "quality.tokens"),
    ({"quality.rows": 0}, "quality.rows"),
    ({"quality.variants": ()}, "quality.variants"),
    ({"quality.variants": ("a16", "a16")}, "quality.variants"),
    ({"quality.variants": ("a4",)}, "quality.variants"),
    ({"quality.variants": ("a8:int3",)}, "quality.variants"),
    ({"quality.text_path": "/nowhere.txt"}, "quality.text_path"),
    ({"quality.against": "/nowhere"}, "quality.against"),
    ({"quality.also": ("/nowhere",)}, "quality.also"),
]


def test_default_is_valid_and_locked():
    config = config_lib.default()
    config_check.validate(config)
    with pytest.raises(AttributeError):
        config.stepz = 3
    assert config_lib.model_path(config) == config_lib.SHIPPED_BASE


@pytest.mark.parametrize("change,field", BAD, ids=[f"{f}-{i}" for i, (_, f) in enumerate(BAD)])
def test_bad_value_names_its_field(change, field):
    with pytest.raises(ValueError, match=rf"^{field}: .*need"):
        config_check.validate(config_lib.override(config_lib.default(), change))


def test_a_model_is_told_as_the_loader_tells_it(tmp_path):
    """By its ending: what it takes for a GGUF file must be a file."""
    for name in ("x.gguf", "X.GGUF", "X.GGUF.d", "dir"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "file.gguf").write_text("")
    (tmp_path / "FILE.GGUF").write_text("")
    for name, good in (("x.gguf", False), ("X.GGUF", True), ("dir", True), ("file.gguf", True), ("FILE.GGUF", False)):
        for field in ("model", "quality.against"):
            config = config_lib.override(config_lib.default(), {field: str(tmp_path / name)})
            if good:
                config_check.validate(config)
                continue
            with pytest.raises(ValueError, match=rf"^{field}: .*need a directory .* not named .gguf, or a file named .gguf, in lower case"):
                config_check.validate(config)


@pytest.mark.parametrize("given, found", [("12", r"\(12,\)"), ("12,13", r"\(12, 13\)"), ("", r"\('',\)")])
def test_stop_texts_on_the_command_line(given, found):
    read = lambda text: launch.parse(["launch.py", f"--config.rollout.stop={text}"])[0].config
    for text, stop in (("()", ()), ("'12'", ("12",)), ("('a', 'b')", ("a", "b")), ("a", ("a",))):
        config_check.validate(read(text))
        assert read(text).rollout.stop == stop
    with pytest.raises(ValueError, match=rf"^rollout.stop: found {found}, need texts .*\(\) for none; .*\"'12'\""):
        config_check.validate(read(given))


def test_every_number_and_choice_has_a_check():
    free = {
        "remat",
        "adapter.rank_stabilized",
        "adapter.shared_a",
        "data.chat",
        "loss.measure_kl",
        "quality.tasks",
        "quality.plot",
        "samples.write",
        "loss.mask_truncated",
    }  # yes or no
    free |= {"model", "prepared", "adapter.init", "quality.text_path"}  # paths
    free |= {"data.train", "data.eval", "data.weights", "data.prompt", "rollout.stop", "reward.mark"}  # by hand
    free |= {"quality.against", "quality.also", "quality.variants"}
    free |= {"eval.k", "samples.omit", "samples.redact"}  # by hand too
    free |= {"reward.gym.partial", "reward.regex.pattern", "reward.json.schema", "reward.function.path"}
    free |= {"env.name", "env.tools", "env.corpus", "reward.model.path", "loss.reference"}  # by hand
    config = config_lib.default()
    checked = set(config_check._RANGES) | set(config_check._choices(config))
    assert set(config_lib.flatten(config)) == checked | free


def test_ranks_follow_adapter_rank_until_set_on_their_own():
    default = config_lib.default()
    config = config_lib.override(default, {"adapter.rank": 4, "adapter.alpha": 4.0})
    assert [config.adapter[g].rank for g in config_lib.GROUPS] == [4, 4, 4, 0, 0]
    assert [config.adapter[g].alpha for g in config_lib.GROUPS] == [4.0] * 5
    own = config_lib.override(config, {"adapter.experts.rank": 2})
    assert (own.adapter.rank, own.adapter.attention.rank, own.adapter.experts.rank) == (4, 4, 2)
    assert config.adapter.experts.rank == 4 and default.adapter.attention.rank == 8, "a copy shares no reference"


@pytest.mark.parametrize(
    "change,message",
    [
        ({"adapter.rnk": 1}, r"^adapter\.rnk: no such field.*close: adapter\.rank"),
        ({"learning_rate": 0.1}, r"^learning_rate: no such field.*optimizer\.learning_rate"),
        ({"optimizer.lr": 0.1}, r"^optimizer\.lr: no such field.*optimizer\.learning_rate"),
        ({"adapter": 3}, r"^adapter: no such field"),
        ({"steps": "x"}, r"^steps: found 'x', need int"),
        ({"steps": 2.5}, r"^steps: found 2\.5, need int"),
        ({"numerics": 3}, r"^numerics: found 3, need str"),
    ],
)
def test_override_refuses_unknown_keys_and_wrong_types(change, message):
    with pytest.raises(ValueError, match=message):
        config_lib.override(config_lib.default(), change)


def test_plain_survives_json():
    plain = config_lib.plain(config_lib.default())
    assert json.loads(json.dumps(plain)) == plain


def test_identity_holds_what_decides_the_bits(tmp_path, monkeypatch):
    config = config_lib.default()
    same = {"steps": 7, "eval.every": 3, "checkpoint.every": 1, "prepared": "x", "quality.rows": 3, "samples.keep": 1}
    assert config_lib.identity(config_lib.override(config, same)) == config_lib.identity(config)
    for change in ({"seed": 1}, {"adapter.rank": 4}, {"data.train": ("x",)}, {"numerics": "float"}):
        assert config_lib.identity(config_lib.override(config, change)) != config_lib.identity(config)
    module = tmp_path / "my_reward.py"
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for code in ("def f(text, problem): return 1.0", "def f(text, problem): return 2.0", "def f(text, problem): return 1.0"):
        module.write_text(code)
        named = {"reward.function.weight": 1.0, "reward.function.path": "my_reward:f"}
        found.append(config_lib.identity(config_lib.override(config, named)))
    assert found[0] == found[2] != found[1], "what a function does is part of it"
    cosine = config_lib.override(config, {"optimizer.schedule": "cosine"})
    assert config_lib.identity(config_lib.override(cosine, {"steps": 7})) != config_lib.identity(cosine)


@pytest.mark.parametrize("path", ["vault.py", *sorted(p.name for p in EXPERIMENTS.glob("quickstart*.py"))])
def test_experiments_are_valid(path):
    config = config_lib.load_module(EXPERIMENTS / path).get_config()
    config_check.validate(config)
    assert config.is_locked


def test_load_module_refuses_what_is_no_experiment(tmp_path):
    with pytest.raises(ValueError, match="which is no file"):
        config_lib.load_module(tmp_path / "missing.py")
    (tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"without get_config\(\)"):
        config_lib.load_module(tmp_path / "empty.py")
    (tmp_path / "text.txt").write_text("x\n")
    with pytest.raises(ValueError, match="Python file"):
        config_lib.load_module(tmp_path / "text.txt")

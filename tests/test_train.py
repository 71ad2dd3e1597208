"""The loop through its entry points, on a tiny base: a run repeats, resumes and survives kills to the bit, and says what is wrong.

All runs here share one configuration of shapes, so that it compiles once.
"""

import collections
import hashlib
import json
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types

import jax
import numpy as np
import pytest
import reference
from quick import quickly

from rl_adapter import (
    advantage,
    audit,
    checkpoint,
    evaluate,
    experience,
    learn,
    lora,
    monitor,
    play,
    quant,
    rollout,
    runtime,
    samples,
    scoring,
    train,
    update,
)
from rl_adapter import config as config_lib
from rl_adapter import session as sessions
from rl_adapter.data import iterator
from rl_adapter.hub.save import save_checkpoint
from rl_adapter.rewards.score import Rewards
from rl_adapter.types import Outcome

STEPS = 6
SPEC = reference.tiny_spec(d_model=32, heads=2, head_dim=16, experts=8, vocab=145)
LOGGED = """step reward/mean reward/std kl/ref entropy loss grad_norm response/length response/truncated mismatch/max_abs_logprob_diff
    mismatch/expert_flips moe/load_max_over_mean moe/load_shift_from_base time/rollout_s time/update_s time/step_s
    throughput/rollout_tokens_per_s""".split()


def write_base(directory: pathlib.Path, seed: int = 0) -> pathlib.Path:
    """A random tiny model as it lies on disk, with the shipped tokenizer."""
    save_checkpoint(directory, SPEC, reference.random_params(seed, SPEC))
    shutil.copy(config_lib.SHIPPED_BASE / "tokenizer.json", directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "pad_token_id": 0}))
    return directory


def settings(base: pathlib.Path, **changes) -> dict:
    fields = {"model": str(base), "steps": STEPS, "mesh.data": 1, "adapter.rank": 2, "rollout.prompts": 4, "rollout.group": 4}
    fields |= {"rollout.max_new_tokens": 8, "data.max_prompt_tokens": 32, "data.train_size": 16, "data.eval_size": 8}
    fields |= {"eval.examples": 8, "eval.batch": 8, "checkpoint.every": 1, "optimizer.learning_rate": 0.01}
    return fields | changes


def make_config(base: pathlib.Path, **changes):
    return config_lib.override(config_lib.default(), settings(base, **changes))


def share_of_digits(_, problem, text, truncated=False, given=()):
    """A reward that a random model gets some of."""
    return Outcome(float(np.mean([c.isdigit() for c in text] or [0])))


@pytest.fixture(scope="module", autouse=True)
def rewarded():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rewards, "score", share_of_digits)
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base"))


def digest_of_files(directory):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    """The uninterrupted run: (its directory, its summary). What must hold while it runs is asserted here."""
    opened, before = [], digest_of_files(base)
    with pytest.MonkeyPatch.context() as patch:
        open_session = sessions.open_session
        patch.setattr(sessions, "open_session", lambda *args: opened.append(open_session(*args)) or opened[-1])
        directory = tmp_path_factory.mktemp("whole")
        summary = train.run(make_config(base), directory)
    (session,) = opened
    assert quant.digest(session.base.replace(rope=None)) == session.digest == summary["base_digest"], "the base changed in memory"
    assert digest_of_files(base) == before, "the base changed on disk"
    return directory, summary


def timeless(directory):
    return [monitor.timeless(row) for row in monitor.rows(directory)]


def last_state(config, directory):
    """The step of the last checkpoint and its state."""
    session = sessions.open_session(config)
    template = evaluate.new_state(config, session)
    with checkpoint.Checkpoints(directory / "checkpoints", evaluate.identity(config, session.digest), 0, 2) as saved:
        step = saved.latest()
        return step, saved.restore(step, template)[0]


def assert_same_run(config, directory, whole):
    assert timeless(directory) == timeless(whole)
    (step, state), (whole_step, whole_state) = (last_state(config, d) for d in (directory, whole))
    assert step == whole_step
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(whole_state)):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)


def test_a_run_logs_every_step_and_agrees_with_its_sampler(base, whole):
    directory, summary = whole
    rows = monitor.rows(directory)
    assert [row["step"] for row in rows] == list(range(STEPS))
    for row in rows:
        assert not set(LOGGED) - row.keys()
        assert [v for k, v in row.items() if k.startswith("mismatch/")] == [0, 0, 0]
        assert row["reward/std"] > 0 and row["grad_norm"] > 0 and row["update/microbatches"] >= 1 and 0 <= row["update/padding"] < 1
        assert 0 < row["rollout/slots_used"] <= 1 and (row["compilations"] > 0) == (row["step"] == 0)
    assert rows[0]["kl/ref"] == 0 and rows[0]["moe/load_shift_from_base"] == 0, "a new adapter changes nothing"
    assert rows[-1]["kl/ref"] > 0 and rows[-1]["moe/load_shift_from_base"] > 1e-3
    found = json.loads((directory / "summary.json").read_text())
    assert found == summary and summary["steps"] == STEPS and summary["eval/examples"] == 8
    assert {"eval/base_accuracy", "eval/accuracy", "wall_s", "compilations"} <= summary.keys()
    assert summary["trained_parameters"] == lora.count(last_state(make_config(base), directory)[1].adapter)
    assert list((directory / "tensorboard").iterdir())
    found = audit.run(directory)
    assert found["rows"] == STEPS * 16 and found["head"] == summary["samples/head"] and not found["faults"]


def test_one_seed_gives_one_run_and_compiles_nothing_again(base, whole, tmp_path):
    made = runtime.compilations()
    train.run(make_config(base), tmp_path)
    assert_same_run(make_config(base), tmp_path, whole[0])
    assert runtime.compilations() == made
    assert (tmp_path / "samples/000003.parquet").read_bytes() == (whole[0] / "samples/000003.parquet").read_bytes()


def test_a_run_goes_on_to_the_bits_of_the_uninterrupted_one(base, whole, tmp_path):
    train.run(make_config(base, steps=2), tmp_path)
    assert len(timeless(tmp_path)) == 2
    train.run(make_config(base), tmp_path)
    assert_same_run(make_config(base), tmp_path, whole[0])
    with pytest.raises(ValueError, match=f"^steps: found 3, need at least the {STEPS} "):
        train.run(make_config(base, steps=3), tmp_path)


def test_what_is_not_to_be_kept_is_in_no_file_of_a_run_that_stops_keeping(base, tmp_path):
    """Rules hold for all that a run writes of texts; and samples that it wrote before stay what the audit says of them."""
    rules = {"samples.redact": (r"[0-9]+",), "samples.omit": ("answer", "metadata", "failures")}
    rules["optimizer.warmup_steps"] = 9  # longer than the run
    train.run(make_config(base, steps=2, **rules), tmp_path)
    train.run(make_config(base, steps=3, **rules, **{"samples.write": False}), tmp_path)
    assert audit.run(tmp_path)["files"] == 2 and len(monitor.rows(tmp_path)) == 3
    for name in ("eval_base.json", "eval_adapter.json", "data_report.json"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    for row in json.loads((tmp_path / "eval_adapter.json").read_text()):
        assert row.keys() == {"prompt_text", "completion_text", "kind", "reward"}
        assert not any(c.isdigit() for c in row["prompt_text"] + row["completion_text"]) and "[redacted]" in row["prompt_text"]


def test_the_notebook_reads_a_run(whole, monkeypatch):
    monkeypatch.setenv("RUN", str(whole[0]))
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = json.loads((config_lib.SHIPPED_BASE.parents[2] / "notebooks" / "quickstart.ipynb").read_text())["cells"]
    shown = []
    names = {"display": shown.append}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert len(shown) == 3 and len(names["both"]) == 8
    names["plt"].close("all")


DAMAGES = {  # of a file of the run: what it holds then, and what is said
    "no JSON": ("metrics.jsonl", "{garbage\n", r"metrics.jsonl: line 1: found no JSON"),
    "no step": ("metrics.jsonl", '{"a": 1}\n', r"metrics.jsonl: line 1: found no step"),
    "no text": ("metrics.jsonl", b"\xff\n", r"metrics.jsonl: line 1: found no JSON"),
    "no summary": ("summary.json", "{oops", r"summary.json: found no JSON"),
    "no config": ("config.json", "[]", r"config.json: found '\[\]', need a JSON object"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_file_of_a_run_is_named_and_nothing_else_changes(base, whole, tmp_path, what):
    name, text, message = DAMAGES[what]
    shutil.copytree(whole[0], tmp_path / "run")
    (tmp_path / "run" / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    before = contents(tmp_path / "run")
    with pytest.raises(ValueError, match=message):
        train.run(make_config(base, steps=STEPS + (name == "metrics.jsonl")), tmp_path / "run")
    assert contents(tmp_path / "run") == before


@pytest.mark.parametrize("field, value", [("data", None), ("examples", "8"), ("base_accuracy", "hi"), ("samples", 3)])
def test_a_damaged_cursor_is_named(base, whole, tmp_path, field, value, monkeypatch):
    shutil.copytree(whole[0], tmp_path / "run")
    restore = checkpoint.Checkpoints.restore
    damaged = lambda self, *args: (lambda state, cursor: (state, cursor | {field: value}))(*restore(self, *args))
    monkeypatch.setattr(checkpoint.Checkpoints, "restore", damaged)
    with pytest.raises(ValueError, match=rf"checkpoints.{STEPS}: cursor.{field}: found {value!r}, need"):
        train.run(make_config(base, steps=STEPS + 1), tmp_path / "run")


def contents(directory):
    return {path: path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def test_evaluation_finds_what_training_found(base, whole, capsys):
    directory, summary = whole
    result = evaluate.run(make_config(base), directory)
    assert result["step"] == STEPS and json.loads((directory / "eval.json").read_text()) == result
    (accuracy,) = (row for row in result["measures"] if row["kind"] == "")
    assert accuracy["base"] == pytest.approx(summary["eval/base_accuracy"], rel=1e-6)
    assert accuracy["adapter"] == pytest.approx(summary["eval/accuracy"], rel=1e-6)


RUN = textwrap.dedent(
    """
    import sys, time
    sys.path.insert(0, "tests")
    import conftest, launch, test_train
    def slow(*args, **kwargs):
        time.sleep(0.01)
        return test_train.share_of_digits(*args, **kwargs)
    test_train.Rewards.score = slow
    launch.main(["launch.py", *sys.argv[1:]])
    """
)


def test_a_killed_run_resumes_to_the_bits_of_the_uninterrupted_one(base, whole, tmp_path):
    (tmp_path / "experiment.py").write_text("from rl_adapter import config\nget_config = config.default\n")
    arguments = [f"--config={tmp_path / 'experiment.py'}", f"--workdir={tmp_path / 'run'}"]
    arguments += [f"--config.{key}={value}" for key, value in settings(base).items()]
    after, delay = random.randrange(1, 4), random.uniform(0, 0.3)
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", RUN, *arguments], stdout=output, stderr=output, cwd=pathlib.Path(__file__).parents[1]
        )
        try:
            deadline = time.monotonic() + 300
            while len(monitor.rows(tmp_path / "run")) < after and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(delay)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    reached = len(monitor.rows(tmp_path / "run"))
    assert reached >= after, (tmp_path / "output").read_text()
    assert not (tmp_path / "run" / "summary.json").exists(), "killed too late to show anything"
    train.run(make_config(base), tmp_path / "run")
    print(f"killed {delay:.3f} s after step {after}, with {reached} steps logged")
    assert_same_run(make_config(base), tmp_path / "run", whole[0])


def bits(adapter):
    return [x.tobytes() for x in jax.tree.leaves(jax.device_get(adapter))]


@pytest.mark.parametrize("behind", [1, 2])
def test_sampling_may_be_behind_and_resumes_too(base, tmp_path, monkeypatch, behind):
    """A step's completions are those of the adapter from so many steps ago, also of the first step after a crash; each token says so."""
    config = make_config(base, **{"rollout.max_staleness": behind, "optimizer.minibatches": 2})
    used, after = collections.defaultdict(list), {}
    sample, step_of, log = experience.gather, learn.learn, monitor.Monitor.log

    def sampled(config, session, data, batches, adapter, version, step):
        used[step].append(bits(adapter))
        assert version == max(0, step - behind)
        return sample(config, session, data, batches, adapter, version, step)

    def learned(config, session, found, state, tx, step, *rest):
        after[step] = bits(state.adapter)  # so many steps
        return step_of(config, session, found, state, tx, step, *rest)

    def logged(self, step, metrics):
        if step == 3 and len(used[3]) == 1:
            raise RuntimeError("a crash")
        return log(self, step, metrics)

    monkeypatch.setattr(experience, "gather", sampled)
    monkeypatch.setattr(learn, "learn", learned)
    with quickly((update, scoring)):
        train.run(config, tmp_path / "whole")
        used.clear()
        monkeypatch.setattr(monitor.Monitor, "log", logged)
        with pytest.raises(RuntimeError, match="a crash"):
            train.run(config, tmp_path / "run")
        assert last_state(config, tmp_path / "run")[0] == 3
        train.run(config, tmp_path / "run")
    assert_same_run(config, tmp_path / "run", tmp_path / "whole")
    assert (tmp_path / "run/samples/000003.parquet").read_bytes() == (tmp_path / "whole/samples/000003.parquet").read_bytes()
    assert len(used[3]) == 2 and sorted(used) == list(range(STEPS)) and len(set(map(tuple, after.values()))) == STEPS
    for step, adapters in used.items():
        assert all(adapter == after[max(0, step - behind)] for adapter in adapters), step
        tokens = samples.read(tmp_path / "run", [step])["adapter_versions"].combine_chunks().flatten()
        assert set(tokens.to_pylist()) == {max(0, step - behind)}
    for row in monitor.rows(tmp_path / "run"):
        assert not any(name.startswith("mismatch/") for name in row), "there is nothing to hold scoring against"


def test_rewards_are_found_while_others_are_sampled(base, monkeypatch):
    """And are those of scoring at the end; what goes wrong on the way is not lost."""
    config = make_config(base)
    session = sessions.open_session(config, "train")
    adapter, scored, stream = sessions.init_adapter(config, session), threading.Event(), rollout.stream

    def scoring(*args, **kwargs):
        scored.set()
        return share_of_digits(*args, **kwargs)

    def watched(*args, **kwargs):
        for i, one in enumerate(stream(*args, **kwargs)):
            assert i < 8 or scored.wait(60), "half of the completions are there, and none is scored"
            yield one

    monkeypatch.setattr(rollout, "stream", watched)
    monkeypatch.setattr(Rewards, "score", scoring)
    settings = sessions.sampling(config, session)
    step = lambda: play.play(config, session, session.data["train"], np.arange(4), evaluate.prepare(session.model, adapter), settings, 3)
    found = step()
    assert found.texts == [session.tokenizer.decode(row) for row in rollout.completions(found.samples)]
    assert found.problems == [session.data["train"].problems[i] for i in range(4) for _ in range(4)]
    rewards = np.array([outcome.reward for outcome in session.rewards.score_all(found.problems, found.texts)], np.float32)
    np.testing.assert_array_equal(found.rewards.reshape(-1), rewards)
    assert not any(outcome.failures for outcome in found.outcomes) and len(set(rewards)) > 2
    monkeypatch.setattr(type(session.tokenizer), "decode", lambda *_: {}["no text"])
    with pytest.raises(KeyError, match="no text"):
        step()


@pytest.mark.parametrize("what", ["advantage", "state"])
def test_a_number_that_is_not_finite_stops_the_run_and_keeps_what_was_good(base, whole, tmp_path, monkeypatch, what):
    calls = []
    if what == "advantage":
        estimate = advantage.estimate
        poisoned = lambda *args: estimate(*args) * np.float32(np.nan if calls.append(0) or len(calls) == 3 else 1)
        monkeypatch.setattr(advantage, "estimate", poisoned)
    else:  # the update itself overflows: the metrics of its step are fine
        real = update.update

        def poisoned(*args):
            state, metrics = real(*args)
            calls.append(0)
            return (jax.tree.map(lambda x: x * np.float32(np.inf), state) if len(calls) == 3 else state), metrics

        monkeypatch.setattr(update, "update", poisoned)
    with pytest.raises(FloatingPointError, match="^step 2: "):
        train.run(make_config(base), tmp_path)
    monkeypatch.undo()
    assert timeless(tmp_path) == timeless(whole[0])[:2] and not (tmp_path / "summary.json").exists()
    assert last_state(make_config(base), tmp_path)[0] == 2
    train.run(make_config(base), tmp_path)
    assert_same_run(make_config(base), tmp_path, whole[0])


def test_a_checkpoint_of_another_run_is_refused(base, whole, tmp_path):
    directory = shutil.copytree(whole[0], tmp_path / "run")
    rows, made = timeless(directory), runtime.compilations()
    with pytest.raises(ValueError, match="base_digest: the checkpoint has"):
        train.run(make_config(write_base(tmp_path / "other", seed=1)), directory)
    with pytest.raises(ValueError, match="found 1 differences.*\n  config.seed: the checkpoint has 0, this run 1"):
        train.run(make_config(base, seed=1), directory)
    assert timeless(directory) == rows and (directory / "summary.json").exists() and runtime.compilations() == made
    assert train.run(make_config(base, seed=1), directory, override_identity=True)["steps"] == STEPS


def truncate(base):
    path = base / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def rename_architecture(base):
    path = base / "config.json"
    path.write_text(path.read_text().replace("Qwen3MoeForCausalLM", "GrokForCausalLM"))


@pytest.mark.parametrize(
    "changes,damage,message",
    [
        ({"model": "/no/such/base"}, None, "model: found '/no/such/base', need a directory"),
        ({}, truncate, r"model\.safetensors: need a whole safetensors file"),
        ({}, rename_architecture, "config.json: architectures: found .*Grok"),
        ({"mesh.data": 3}, None, "mesh: 4 prompts at a time do not divide over data x expert = 3"),
        ({"mesh.model": 4}, None, "mesh.model: found 4, which does not divide the 2 key-value heads"),
        ({"mesh.data": 16}, None, "mesh: data x expert x model = 16 x 1 x 1 needs more than the 8 devices"),
        ({"data.max_prompt_tokens": 4}, None, "data.max_prompt_tokens: found 4, need"),
        ({"rollout.max_new_tokens": 120}, None, "context: found 152 tokens .*need at most the model's 128 positions"),
        ({"context": 16}, None, "context: found 16, need 0 or at least"),
        ({"rollout.cache_tokens": 32}, None, r"rollout.cache_tokens: found 32, need at least \d+: one prompt of \d+ tokens and .* of 8"),
        ({"data.train": ("empty.jsonl",)}, None, "data.train: found no problems in"),
        ({"data.eval": ("/no/such.jsonl",)}, None, "data.eval: found '/no/such.jsonl', which is no file"),
        ({"data.train_size": 2}, None, "rollout.prompts: found 4, need at most the 2 training problems"),
        ({"adapter.experts.rank": 33}, None, "adapter.experts.rank: found 33, need at most 32"),
        ({"numerics": "exakt"}, None, "numerics: found 'exakt'"),
    ],
)
def test_bad_input_is_one_clear_error_before_anything_compiles(base, tmp_path, changes, damage, message):
    (tmp_path / "empty.jsonl").write_text("\n")
    if damage:
        damage(shutil.copytree(base, tmp_path / "base"))
        changes = {"model": str(tmp_path / "base")}
    changes = {k: (str(tmp_path / v[0]),) if v == ("empty.jsonl",) else v for k, v in changes.items()}
    config, made = config_lib.override(make_config(base), changes), runtime.compilations()
    with pytest.raises(ValueError, match=message):
        train.run(config, tmp_path / "run")
    assert runtime.compilations() == made and not (tmp_path / "run").exists()


def test_a_curriculum_resumes_with_the_same_prompts(monkeypatch):
    """The cursor that a checkpoint keeps knows the pass rates of all that was drawn before it, so that a resumed run draws the same."""
    config = config_lib.override(config_lib.default(), {"data.curriculum": "pass_rate", "rollout.prompts": 4})

    class Drawn(types.SimpleNamespace):
        rows = lambda self, kept: self

    def playing(config, session, data, indices, adapter, settings, seed, counts):
        counts["waited_ns"] = 0
        return Drawn(rewards=np.repeat(((indices * 7 + seed) % 9 / 8)[:, None], 2, 1), indices=indices.tolist())

    monkeypatch.setattr(play, "play", playing)
    monkeypatch.setattr(evaluate, "prepare", lambda *_: None)
    monkeypatch.setattr(sessions, "sampling", lambda *_: None)

    def go_on(batches, steps):
        session = types.SimpleNamespace(model=None)
        found = (experience.gather(config, session, None, batches, None, 0, step) for step in steps)
        return [(one.played.indices, at) for one, at in found]

    fresh = lambda: iterator.from_config(config.data, [0] * 150, 4)
    whole = go_on(fresh(), range(12))
    assert all(set(drawn) <= set(at["measured"]) for drawn, at in whole)
    for step in (1, 5, 11):
        resumed = fresh()
        resumed.set_state(json.loads(json.dumps(whole[step - 1][1])))
        assert go_on(resumed, range(step, 12)) == whole[step:]


def test_float_numerics_show_their_mismatch(base, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "evaluation", lambda *_: 0.0)  # would compile twice more
    train.run(make_config(base, steps=1, numerics="float"), tmp_path)
    (row,) = monitor.rows(tmp_path)
    assert 0 < row["mismatch/mean_abs_logprob_diff"] <= row["mismatch/max_abs_logprob_diff"] < 1e-3

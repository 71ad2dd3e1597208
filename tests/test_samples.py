"""What is kept of a step: the rows bit for bit, for their owner alone, and nothing that was to be left out."""

import json
import os
import stat
import types

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_collections import ConfigDict

from rl_adapter import config as configs
from rl_adapter import files, manifest, samples
from rl_adapter.data import checks
from rl_adapter.types import Outcome, Problem, Rollout

ALL = configs.default().samples
IDENTITY = {"base_digest": "b", "config": configs.identity(configs.default())}
RUN = manifest.run_of(IDENTITY)
TEXTS = st.text(st.characters() | st.sampled_from('\ud83d\udcff\0\\"'), max_size=8)  # half characters too


def rules(**changes):
    return types.SimpleNamespace(**(dict(ALL) | changes))


def bits(rng, *shape):
    """Any float32: NaNs of every payload, both zeros, infinities, subnormal numbers."""
    special = np.array([0x7FC00001, 0xFFC00002, 0x7F800001, 0, 0x80000000, 1, 0x7F800000], np.uint32)
    drawn = rng.integers(0, 2**32, shape, np.uint32)
    return np.where(rng.random(shape) < 0.5, rng.choice(special, shape), drawn).view(np.float32)


def rollout_of(rng, p=2, g=3, t=4, c=5):
    ints = lambda *shape: rng.integers(0, 1000, shape).astype(np.int32)
    bools = lambda *shape: rng.random(shape) < 0.5
    lengths, prompt_lengths = rng.integers(1, c + 1, (p, g)).astype(np.int32), rng.integers(1, t + 1, p).astype(np.int32)
    logprobs = (bits(rng, p, g, c) for _ in range(3))
    return Rollout(ints(p, t), prompt_lengths, ints(p, g, c), bools(p, g, c), lengths, bools(p, g), *logprobs, None, None)


def table_of(seed=0, step=0, texts=None, problem=None, **shape):
    """(table, what it was made of)."""
    rng = np.random.default_rng([seed, step])
    r = rollout_of(rng, **shape)
    p, g, c = r.tokens.shape
    problems = [problem or Problem(int(rng.integers(2**31)), f"{i}+1?", str(i + 1), "sums") for i in range(p) for _ in range(g)]
    texts = texts or [f"it is {i}" for i in range(p * g)]
    outcomes = [Outcome(float(rng.random()), {"format": 1.0, "answer": float(i)}, {"judge": "too late"} if i else {}) for i in range(p * g)]
    versions, trained = np.full((p, g, c), step, np.int32), rng.random((p, g)) < 0.5
    shown = [problems[i * g].prompt for i in range(p)]
    return samples.rows_of(step, r, problems, shown, texts, outcomes, versions, 7, trained), (r, problems, texts, outcomes, trained)


def row_of(table, i):
    return {name: table[name][i].as_py() for name in table.column_names}


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), *(st.integers(1, 4) for _ in range(4)))
def test_rows_come_back_bit_for_bit(seed, p, g, t, c):
    table, (r, problems, texts, outcomes, trained) = table_of(seed, 3, p=p, g=g, t=t, c=c)
    data = samples.encode(table)
    assert data == samples.encode(table_of(seed, 3, p=p, g=g, t=t, c=c)[0]), "the same rows give the same bytes"
    found = pa.parquet.read_table(pa.BufferReader(data))
    assert found.schema.equals(samples.SCHEMA) and found.schema.metadata == samples.SCHEMA.metadata and len(found) == p * g
    for i, (problem, text, outcome) in enumerate(zip(problems, texts, outcomes)):
        at, n, row = (i // g, i % g), r.lengths[i // g, i % g], row_of(found, i)
        assert [row[k] for k in ("step", "prompt_id", "sample", "seed", "kind", "env")] == [3, problem.id, i % g, 7, "sums", ""]
        assert (row["prompt_text"], row["completion_text"], row["answer"]) == (problem.prompt, text, problem.answer)
        assert row["prompt_tokens"] == r.prompts[at[0], : r.prompt_lengths[at[0]]].tolist()
        assert row["completion_tokens"] == r.tokens[at][:n].tolist() and row["drawn"] == r.drawn[at][:n].tolist()
        for name in ("sampled_logprobs", "tempered_logprobs", "scored_logprobs"):
            kept = found[name].combine_chunks()[i].values.to_numpy()
            assert kept.tobytes() == getattr(r, name)[at][:n].tobytes()
        assert row["adapter_versions"] == [3] * n and row["stopped"] == r.stopped[at] and row["trained"] == trained[at]
        assert (row["reward"], dict(row["parts"]), dict(row["failures"])) == (outcome.reward, outcome.parts, outcome.failures)


@settings(max_examples=25, deadline=None)
@given(TEXTS, st.recursive(TEXTS | st.integers() | st.none(), lambda x: st.lists(x, max_size=2) | st.dictionaries(TEXTS, x, max_size=2)))
def test_no_text_stops_a_run(text, value):
    """Not even half a character, which an environment or an error message may bring."""
    problem = Problem(1, text, text, "x", ({"role": "user", "content": text},), "", {"a": value})
    shape = {"p": 1, "g": 1}
    r, outcome = rollout_of(np.random.default_rng(0), **shape), Outcome(0.0, {text: 1.0}, {text: text})
    table = samples.rows_of(0, r, [problem], [text], [text], [outcome], r.tokens, 0, r.stopped)
    row = row_of(pa.parquet.read_table(pa.BufferReader(samples.encode(samples.redact(table, (), ("no such text",))))), 0)
    shown = text.encode("utf-8", "backslashreplace").decode()
    assert row["completion_text"] == shown and row["failures"] == [(shown, shown)]
    assert json.loads(row["metadata"]) == {"a": value} and json.loads(row["messages"])[0]["content"] == text


def test_what_is_left_out_is_nowhere_in_the_file():
    secret = "0123-SECRET"
    message = {"role": "user", "content": [{"text": f"my number is {secret}"}]}
    problem = Problem(1, "who?", f"\u00e9 {secret}", "x", (message,), "", {"deep": [{secret: secret}], "n": 3})
    texts = [f"it is {secret}.", "it is not", secret + secret]
    table, _ = table_of(texts=texts, problem=problem, p=1, g=3)
    why = pa.array([[("judge", f"found {secret}")]] * 3, samples.SCHEMA.field("failures").type)
    table = table.set_column(table.column_names.index("failures"), samples.SCHEMA.field("failures"), why)
    assert "SECRET" in str(table.to_pylist())
    found = samples.redact(table, ("metadata", "parts"), (r"\d{4}-[A-Z]+",))
    assert found.schema.equals(samples.SCHEMA) and "SECRET" not in str(found.to_pylist())
    rows = [row_of(found, i) for i in range(3)]
    assert [row["completion_text"] for row in rows] == ["it is [redacted].", "it is not", "[redacted][redacted]"]
    assert [row["completion_tokens"] is None for row in rows] == [True, False, True], "tokens that spell it are left out"
    assert all(row["prompt_tokens"] is None for row in rows), "a message is part of the prompt"
    assert all(row["metadata"] is None and row["parts"] is None for row in rows) and rows[0]["answer"] == "\u00e9 [redacted]"
    kept = samples.redact(table, (), (r"\d{4}-[A-Z]+",))
    assert json.loads(kept["metadata"][0].as_py()) == {"deep": [{"[redacted]": "[redacted]"}], "n": 3}
    data = pa.BufferOutputStream()
    pa.parquet.write_table(found, data, compression="none", use_dictionary=False)  # as `encode`, but to be searched
    assert b"SECRET" not in data.getvalue().to_pybytes()
    numbers = table["completion_tokens"].combine_chunks()[0].values.to_numpy()
    assert len(numbers) > 1 and numbers.tobytes() not in data.getvalue().to_pybytes()


@pytest.mark.parametrize("omit", [(), ("answer",), ("prompt_text", "prompt_tokens", "messages", "metadata")])
def test_other_files_of_the_run_keep_to_the_rules(omit):
    rules = ConfigDict({"omit": omit, "redact": (r"\d{4}-[A-Z]+",)})
    told = samples.told({"prompt_text": "a 0123-SECRET", "answer": "42", "completion_text": "b"}, rules)
    assert told == {k: v for k, v in {"prompt_text": "a [redacted]", "answer": "42", "completion_text": "b"}.items() if k not in omit}
    fault = checks.Fault("data.empty", 2, ("x.jsonl:1: 'my 0123-SECRET'", "x.jsonl:2: 'y'"))
    report = checks.Report("train", {"x.jsonl": 3}, {"x.jsonl": 1}, {"k": 1}, {"": 1}, (fault,), (1, 2.0, 3))
    kept = samples.told_report(report.as_json(), rules)
    assert "SECRET" not in json.dumps(kept) and kept["read"] == {"x.jsonl": 3} and kept["dropped"][0]["count"] == 2
    assert list(kept["dropped"][0]["examples"]) == ([] if omit else ["x.jsonl:1: 'my [redacted]'", "x.jsonl:2: 'y'"])


def test_fields_that_may_be_left_out_are_fields():
    assert set(configs.OMITTABLE) < set(samples.SCHEMA.names)
    table, _ = table_of()
    found = samples.redact(table, configs.OMITTABLE, ())
    for name in samples.SCHEMA.names:
        assert found[name].null_count == (len(table) if name in configs.OMITTABLE else 0), name


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0, 0o022, 0o777])
def test_files_are_for_their_owner_alone(tmp_path, umask):
    run = tmp_path / "run"
    run.mkdir()
    old = os.umask(umask)
    try:
        manifest.rewind(run / "samples", 0, RUN)
        samples.write(run / "samples", 0, table_of()[0], ALL)
        files.write_atomically(run / "eval_base.json", "[]", private=True)
    finally:
        os.umask(old)
    assert mode(run / "samples") == 0o700
    for path in (*(run / "samples").iterdir(), run / "eval_base.json"):
        assert mode(path) == 0o600, path


STEPS = 3
TABLES = [table_of(1, step, p=1, g=2)[0] for step in range(STEPS)]


@pytest.fixture
def workdir(tmp_path):
    manifest.rewind(tmp_path / "samples", 0, RUN)
    for step, table in enumerate(TABLES):
        samples.write(tmp_path / "samples", step, table, ALL)
    return tmp_path


def test_read_gives_the_steps_that_are_asked_for(workdir, tmp_path_factory):
    assert samples.read(workdir)["step"].to_pylist() == [step for step in range(STEPS) for _ in range(2)]
    needed = pa.concat_tables([TABLES[2], TABLES[1]])
    assert samples.encode(samples.read(workdir, [2, 1])) == samples.encode(needed)
    assert samples.read(tmp_path_factory.mktemp("none")).num_rows == 0
    with pytest.raises(ValueError, match=r"^steps: found no samples of \[9\]"):
        samples.read(workdir, [9])


def test_read_refuses_what_are_no_samples(tmp_path):
    path = tmp_path / "samples" / manifest.name(0)
    path.parent.mkdir()
    whole, other = samples.encode(TABLES[0]), pa.BufferOutputStream()
    pa.parquet.write_table(pa.table({"step": [1]}), other)
    for data, message in ((whole[:-9], "no whole Parquet file"), (b"", "no whole"), (other.getvalue().to_pybytes(), "schema none")):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=message):
            samples.read(tmp_path)


def test_other_readers_take_the_files(workdir):
    """SQL over all files at once, and pandas where it is there."""
    late = "count(*) filter (failures['judge'] = 'too late')"
    query = f"""select step, avg(reward), max(parts['answer']), sum(len(completion_tokens)), {late}
                from read_parquet('{workdir}/samples/*.parquet') group by step order by step"""
    for (step, reward, answer, tokens, late), table in zip(duckdb.sql(query).fetchall(), TABLES, strict=True):
        rows = table.to_pylist()
        assert step == rows[0]["step"] and answer == 1.0 and late == 1
        assert reward == pytest.approx(np.mean([row["reward"] for row in rows]))
        assert tokens == sum(len(row["completion_tokens"]) for row in rows)
    pytest.importorskip("pandas")
    frame = samples.read(workdir).to_pandas()
    assert frame.groupby("step").size().tolist() == [2] * STEPS

"""Every completion of a step, with all that is known of it, as `WORKDIR/samples/STEP.parquet`: the rows of `SCHEMA`, prompt by prompt.

What is not to be kept is left out before anything is written (`redact`), so the manifest is over what is stored. The same rows give the
same bytes: nothing in a file tells the time. Any Parquet reader takes them:

    samples.read(workdir).to_pandas()
    duckdb.sql("select step, avg(reward) from read_parquet('runs/quickstart/samples/*.parquet') group by step order by step")
"""

import json
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rl_adapter import manifest
from rl_adapter.types import Outcome, Problem, Rollout

VERSION = "1"  # of SCHEMA; another one where a field is removed or means something else
_KEY = b"rl_adapter.samples"  # of the version, in a file's metadata
_INTS, _BOOLS, _FLOATS = pa.list_(pa.int32()), pa.list_(pa.bool_()), pa.list_(pa.float32())
SCHEMA = pa.schema(
    [
        ("step", pa.int32()),  # from 0
        ("prompt_id", pa.int32()),  # with `seed` and `sample` it keys the completion's randomness
        ("sample", pa.int32()),  # number in its group
        ("seed", pa.int32()),  # of the step's sampling
        ("kind", pa.string()),
        ("env", pa.string()),  # environment that answered; '': single turn
        ("prompt_text", pa.string()),  # the prompt's tokens as text, without special ones
        ("messages", pa.string()),  # JSON: the chat that asks; [] where the problem is plain text
        ("answer", pa.string()),  # gold
        ("metadata", pa.string()),  # JSON, of the problem
        ("prompt_tokens", _INTS),
        ("completion_text", pa.string()),
        ("completion_tokens", _INTS),  # n, the stop token included; the five lists below have n elements too
        ("drawn", _BOOLS),  # by the policy, so in the loss; else an environment's
        ("sampled_logprobs", _FLOATS),  # of the distribution that the token was drawn from; nats; 0 where not drawn
        ("tempered_logprobs", _FLOATS),  # of the policy at the temperature, untruncated
        ("scored_logprobs", _FLOATS),  # of the policy at temperature 1
        ("adapter_versions", _INTS),  # updates that the adapter had seen when it drew the token
        ("stopped", pa.bool_()),  # by a stop token; else cut at its limit
        ("reward", pa.float64()),
        ("parts", pa.map_(pa.string(), pa.float64())),  # by scorer, unweighted
        ("failures", pa.map_(pa.string(), pa.string())),  # by scorer that could not score it: why
        ("trained", pa.bool_()),  # False: sampled, and not used by the update
    ],
    metadata={_KEY: VERSION},
)
MASK = "[redacted]"  # in place of what a pattern of samples.redact finds
_TEXTS = ("prompt_text", "completion_text", "answer")
_JSON = ("messages", "metadata")
_SPELT = {"prompt_tokens": ("prompt_text", "messages"), "completion_tokens": ("completion_text",)}  # tokens give the texts away


def rows_of(
    step: int,
    rollout: Rollout,
    problems: Sequence[Problem],
    prompt_texts: Sequence[str],
    texts: Sequence[str],
    outcomes: Sequence[Outcome],
    versions: np.ndarray,
    seed: int,
    trained: np.ndarray,
) -> pa.Table:
    """The rows of one rollout; a step that sampled more than once concatenates them (`pa.concat_tables`).

    Args:
      rollout: on the host (`jax.device_get`).
      problems, texts, outcomes: [B], in the order P, G.
      prompt_texts: [P], decoded.
      versions: [P, G, C] int32, of each token's adapter.
      trained: [P, G] bool.
    """
    (p, g, c), lengths = rollout.tokens.shape, np.asarray(rollout.lengths).reshape(-1)
    assert len(problems) == len(texts) == len(outcomes) == p * g and len(prompt_texts) == p and versions.shape == (p, g, c)
    real = np.arange(c) < lengths[:, None]
    lists = lambda x: _lists(np.asarray(x).reshape(p * g, c), real)
    prompt_lengths = np.repeat(rollout.prompt_lengths, g)
    prompts = np.repeat(rollout.prompts, g, 0)
    flat = lambda x: np.asarray(x).reshape(-1)
    columns = {
        "step": np.full(p * g, step),
        "prompt_id": [problem.id for problem in problems],
        "sample": np.tile(np.arange(g), p),
        "seed": np.full(p * g, seed),
        "kind": _whole(problem.kind for problem in problems),
        "env": _whole(problem.env for problem in problems),
        "prompt_text": _whole(text for text in prompt_texts for _ in range(g)),
        "messages": [_dump(problem.messages) for problem in problems],
        "answer": _whole(problem.answer for problem in problems),
        "metadata": [_dump(problem.metadata) for problem in problems],
        "prompt_tokens": _lists(prompts, np.arange(prompts.shape[1]) < prompt_lengths[:, None]),
        "completion_text": _whole(texts),
        "completion_tokens": lists(rollout.tokens),
        "drawn": lists(rollout.drawn),
        "sampled_logprobs": lists(rollout.sampled_logprobs),
        "tempered_logprobs": lists(rollout.tempered_logprobs),
        "scored_logprobs": lists(rollout.scored_logprobs),
        "adapter_versions": lists(versions),
        "stopped": flat(rollout.stopped),
        "reward": [one.reward for one in outcomes],
        "parts": [sorted(zip(_whole(one.parts), one.parts.values())) for one in outcomes],
        "failures": [sorted(zip(_whole(one.failures), _whole(one.failures.values()))) for one in outcomes],
        "trained": flat(trained),
    }
    arrays = [x if isinstance(x, pa.Array) else pa.array(x, field.type) for field in SCHEMA for x in (columns[field.name],)]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _lists(x: np.ndarray, real: np.ndarray) -> pa.Array:
    """A list for each row of x [B, n], of the elements that are real."""
    offsets = np.concatenate([[0], np.cumsum(real.sum(1))]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(x[real]))


def _whole(texts: Iterable[str]) -> list[str]:
    """Half a character, which no file in UTF-8 holds, is written as its escape: what a sample holds must not stop a run."""
    return [text.encode("utf-8", "backslashreplace").decode() for text in texts]


def _dump(value: Any) -> str:
    """JSON with characters as they are, so that patterns find them; `dict`: a Mapping need not be one."""
    return _whole([json.dumps(value, default=dict, ensure_ascii=False)])[0]


def redact(table: pa.Table, omit: Sequence[str], patterns: Sequence[str]) -> pa.Table:
    """Without the fields `omit`, which are null, and with MASK for whatever one of `patterns` finds.

    Patterns (RE2's, which takes time linear in a text, whatever a model writes) are sought in texts, in reasons of failures, and in each
    string of messages and metadata; not in numbers, kinds or names of scorers. Where one is found in a text, tokens that spell it are null.
    """
    hidden = {name: np.full(len(table), name in omit) for name in table.column_names}
    for name in (*_TEXTS, *_JSON, "failures") if patterns else ():
        old = table[name].to_pylist()
        new = [_masked(value, name, patterns) for value in old]
        touched = np.array([a != b for a, b in zip(old, new)], bool)
        for tokens, spelt in _SPELT.items():
            hidden[tokens] |= touched & (name in spelt)
        table = table.set_column(table.column_names.index(name), SCHEMA.field(name), pa.array(new, SCHEMA.field(name).type))
    for i, field in enumerate(SCHEMA):
        if hidden[field.name].any():
            kept = pc.if_else(pa.array(hidden[field.name]), pa.scalar(None, field.type), table[field.name])
            table = table.set_column(i, field, kept)
    return table


def _masked(value: Any, name: str, patterns: Sequence[str]) -> Any:
    clean = lambda text: mask(text, patterns)
    if name == "failures":
        return [(scorer, clean(why)) for scorer, why in value]
    return _dump(_each_string(json.loads(value), clean)) if name in _JSON else clean(value)


def mask(text: str, patterns: Sequence[str]) -> str:
    """A text with MASK for whatever one of `patterns` finds, one after the other."""
    whole = clean = _whole([text])[0]
    for pattern in patterns:
        clean = pc.replace_substring_regex(pa.scalar(clean), pattern, MASK).as_py()
    return text if clean == whole else clean


def told(texts: Mapping[str, str], settings: Any) -> dict[str, str]:
    """Texts under names of SCHEMA's fields as the rules let other files of the run hold them. `settings`: the config's `samples`."""
    return {name: mask(text, settings.redact) for name, text in texts.items() if name not in settings.omit}


def told_report(report: Mapping[str, Any], settings: Any) -> dict[str, Any]:
    """The same for a data report, whose faults have examples: prompts, answers and completions."""
    left_out = not {"prompt_text", "messages", "completion_text", "answer"}.isdisjoint(settings.omit)
    faults = [fault | {"examples": ()} if left_out else fault for fault in report["dropped"]]
    return _each_string(dict(report) | {"dropped": faults}, lambda text: mask(text, settings.redact))


def _each_string(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {change(key): _each_string(x, change) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_each_string(x, change) for x in value]
    return change(value) if isinstance(value, str) else value


def write(directory: str | os.PathLike, step: int, table: pa.Table, settings: Any) -> str:
    """Writes a step's rows and their line of the manifest, and takes away what is old; returns the manifest's head. The trainer has
    called `manifest.rewind` before.

    Args:
      settings: the `samples` section of the config.
    """
    table = redact(table, settings.omit, settings.redact)
    return manifest.record(directory, step, encode(table), len(table), settings.keep, settings.keep_every)


def encode(table: pa.Table) -> bytes:
    """A Parquet file. A dictionary would merge numbers that compare as equal, such as NaNs: so only texts get one."""
    texts = [field.name for field in SCHEMA if field.type == pa.string()]
    floats = {f"{field.name}.list.element": "BYTE_STREAM_SPLIT" for field in SCHEMA if field.type == _FLOATS}
    out = pa.BufferOutputStream()
    # Without statistics, which would hold texts that need not be read to be seen, and cost room.
    pq.write_table(table.combine_chunks(), out, compression="zstd", use_dictionary=texts, column_encoding=floats, write_statistics=False)
    return out.getvalue().to_pybytes()


def read(workdir: str | os.PathLike, steps: Iterable[int] | None = None) -> pa.Table:
    """The samples of a run, of `steps` or of all that are there, in the order of steps.

    Raises:
      ValueError: a step that is not there, or a file that is damaged or of another schema.
    """
    directory = pathlib.Path(workdir) / "samples"
    there = {int(path.stem): path for path in sorted(directory.glob("*.parquet")) if manifest.FILE.fullmatch(path.name)}
    wanted = sorted(there) if steps is None else list(steps)
    if missing := [step for step in wanted if step not in there]:
        raise ValueError(f"steps: found no samples of {missing} in {directory}, need some of its {len(there)} files")
    return pa.concat_tables([_read(there[step]) for step in wanted]) if wanted else SCHEMA.empty_table()


def _read(path: pathlib.Path) -> pa.Table:
    try:
        table = pq.ParquetFile(path).read()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: found no whole Parquet file ({str(error)[:200]}), need one") from error
    version = (table.schema.metadata or {}).get(_KEY, b"none").decode(errors="replace")
    if version != VERSION or not table.schema.equals(SCHEMA):
        raise ValueError(f"{path}: found samples of schema {version[:20]}, need {VERSION}")
    return table.cast(SCHEMA)  # Parquet has its own names for the elements of a list

"""The data stage: problems from a generator or a file, encoded, batched, in an order that resumes exactly.

Life of a prompt: `load` -> `encode` (once, before anything compiles) -> `make_iterator` says which -> `batch` pads them.
"""

import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

from rl_adapter import config as configs
from rl_adapter.environments import arithmetic, generated
from rl_adapter.types import Problem

ENDLESS = 2**40  # indices; more than any run draws
SHOWN = 5  # offenders listed in an error message


def load(data: Any, split: str) -> list[Problem]:
    """Problems of one split ("train" or "eval").

    Args:
      data: the `data` section of the config: `kinds`, `train_size`, `eval_size`, `seed`, and `train_path`, `eval_path`
        (JSONL with `prompt`, `answer` and optionally `kind` on each line, read whole; '' generates that many problems
        of `kinds` instead).
      split: which one. With a file the other split is looked at too, since a prompt in both voids the evaluation.
    """
    if split not in ("train", "eval"):
        raise ValueError(f"split: found {split!r}, need 'train' or 'eval'")
    problems = _load(data, split)
    if data.train_path or data.eval_path:  # generated splits are disjoint by construction
        other = {p.prompt for p in _load(data, "eval" if split == "train" else "train")}
        shared = [_short(p.prompt) for p in problems if p.prompt in other]
        if shared:
            raise ValueError(f"data.train_path and data.eval_path: found {len(shared)} prompts in both {_some(shared)}, need none")
    return problems


def _load(data: Any, split: str) -> list[Problem]:
    path, size = data[f"{split}_path"], data[f"{split}_size"]
    if path:
        return read_jsonl(path, f"data.{split}_path")
    unknown = sorted(set(data.kinds) - generated.POOLS.keys())
    if unknown or not data.kinds:
        raise ValueError(f"data.kinds: found {unknown or 'none'}, need some of {sorted(generated.POOLS)}")
    if size < 1:
        raise ValueError(f"data.{split}_size: found {size}, need at least 1")
    return generated.problems(tuple(data.kinds), size, data.seed, split)


def read_jsonl(path: str, field: str = "path") -> list[Problem]:
    """Reads problems, one JSON object a line; blank lines are skipped. `field` names the setting in errors."""
    file = pathlib.Path(path)
    if not file.is_file():
        raise ValueError(f"{field}: found no file at {path!r}, need a JSONL file")
    problems, lines = [], {}
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{field}: found bytes that are not UTF-8 in {path!r} ({error.reason}), need a JSONL file") from error
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        one = _parse(line, f"{field}: {path}:{number}")
        if one.prompt in lines:
            raise ValueError(f"{field}: {path}:{number}: found the prompt of line {lines[one.prompt]} again, need distinct prompts")
        lines[one.prompt] = number
        problems.append(one)
    if not problems:
        raise ValueError(f"{field}: found no problems in {path!r}, need at least one")
    return problems


def _parse(line: str, where: str) -> Problem:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: found {_short(line)} ({error}), need a JSON object") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: found {_short(line)}, need a JSON object")
    for key in ("prompt", "answer"):
        if key not in record:
            raise ValueError(f"{where}: {key}: found only {sorted(record)}, need {key!r}")
    record.setdefault("kind", "file")
    for key in ("prompt", "answer", "kind"):
        if not isinstance(record[key], str) or not record[key].strip():
            raise ValueError(f"{where}: {key}: found {_short(record[key])}, need a string that is not blank")
        if half := configs.half_character(record[key]):
            raise ValueError(f"{where}: {key}: found {half!a}, half a character, in {_short(record[key])}, need whole ones")
    return arithmetic.problem(record["prompt"], record["answer"], record["kind"])


def encode(
    tokens_of: Callable[[str], Sequence[int]], problems: list[Problem], max_length: int, field: str = "data.max_prompt_tokens"
) -> list[np.ndarray]:
    """Token ids of every prompt, int32. A prompt is never cut: longer ones are an error that lists them."""
    encoded = [np.array(tokens_of(p.prompt), np.int32) for p in problems]
    empty = [_short(p.prompt) for p, ids in zip(problems, encoded, strict=True) if len(ids) == 0]
    if empty:
        raise ValueError(f"prompt: found {len(empty)} that encode to no token {_some(empty)}, need at least one")
    long = [(len(ids), p.prompt) for p, ids in zip(problems, encoded, strict=True) if len(ids) > max_length]
    if long:
        need = max(length for length, _ in long)
        shown = _some([f"{length} tokens: {_short(prompt)}" for length, prompt in long])
        raise ValueError(f"{field}: found {max_length}, need {need} for {len(long)} of {len(problems)} prompts {shown}")
    return encoded


def batch(encoded: list[np.ndarray], indices: np.ndarray, length: int, pad: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The chosen prompts, padded on the right to one length: tokens [P, T] int32 and lengths [P] int32."""
    lengths = np.array([len(encoded[i]) for i in indices], np.int32)
    if lengths.size and lengths.max() > length:
        raise ValueError(f"length: found {length}, need at least {lengths.max()}, the longest prompt of the batch")
    tokens = np.full((len(lengths), length), pad, np.int32)
    for row, i in enumerate(indices):
        tokens[row, : lengths[row]] = encoded[i]
    return tokens, lengths


def make_iterator(count: int, batch_size: int, seed: int) -> grain.DatasetIterator:
    """Endless batches of indices below `count`, shuffled anew every epoch; a batch may straddle two epochs.

    Each `next()` gives an array [batch_size]. `get_state()` is a small JSON-able dict; `set_state()` of it on a fresh
    iterator made with the same arguments continues with the very same batches.
    """
    if count < 1:
        raise ValueError(f"count: found {count}, need at least one problem")
    if batch_size < 1:
        raise ValueError(f"batch_size: found {batch_size}, need at least 1")
    # Not `repeat()`: its length is the largest int there is, which `batch(1)` overflows.
    dataset = grain.MapDataset.range(count).shuffle(seed=seed).repeat(ENDLESS // count + 1).batch(batch_size)
    # Threads and workers would buy nothing here, and a worker forks a process that already runs jax.
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _some(values: list[str]) -> str:
    return f"({', '.join(values[:SHOWN])}{', ...' if len(values) > SHOWN else ''})"

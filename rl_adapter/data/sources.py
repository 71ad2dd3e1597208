"""Where problems come from, by name:

    chain_sum                   a kind that this package generates (`environments.generated`)
    gym:countdown               a data set of reasoning-gym; gym:countdown:{"min_numbers": 3} with its config
    tasks/sums.jsonl            JSON lines, or .parquet: `records.parse` says what a row holds
    python:mine.tasks:hard      what the function `hard` of the module `mine.tasks` yields: rows as dicts, or `Problem`s

Generated kinds and reasoning-gym are always split by question, so that no seeds make two splits meet. Files and functions are taken whole
where `data.eval` names its own sources, else split by question too: a tenth is held out.
"""

import dataclasses
import hashlib
import importlib
import itertools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from rl_adapter import config as configs
from rl_adapter.data import gym, records, rows
from rl_adapter.data.records import Item
from rl_adapter.environments import generated
from rl_adapter.types import Problem


def names(data: Any, split: str) -> tuple[str, ...]:
    return tuple(data.eval if split == "eval" and data.eval else data.train)


def field_of(data: Any, split: str) -> str:
    return "data.eval" if split == "eval" and data.eval else "data.train"


def is_given(source: str) -> bool:
    """Whether the source has a size of its own: a file or a function. Others make as many problems as are asked for."""
    return configs.is_file(source) or source.startswith("python:")


def read(data: Any, split: str, completions: tuple[str, ...] = records.PROBLEM) -> list[Item]:
    """All of a split ("train" or "eval"), unchecked, in an order that the config decides.

    Args:
      data: the `data` section of the config.
      split: which.
      completions: what rows give beside problems (`records`); only files and functions have any.
    """
    sources, field = names(data, split), field_of(data, split)
    _check(sources, field, completions)
    made = [source for source in sources if not is_given(source)]
    size = data[f"{split}_size"]
    if made and size < 1:
        raise ValueError(f"data.{split}_size: found {size}, need at least 1")
    share = {source: size // len(made) + (i < size % len(made)) for i, source in enumerate(made)}
    kinds = tuple(source for source in made if source in generated.POOLS)
    items = _generated(kinds, sum(share[kind] for kind in kinds), data.seed, split, sources)
    for n, source in enumerate(sources):
        if source.startswith("gym:"):
            found = gym.problems(source, share[source], data.seed, split, field)
            items += [Item(problem, f"{field}: {source}: question {i}", n) for i, problem in enumerate(found, 1)]
        elif is_given(source):
            given = _given(source, n, field, completions)
            items += given if data.eval else [i for i in given if records.held_out(i.problem) == (split == "eval")]
    return items


def identity(data: Any) -> dict[str, str]:
    """Digests of what files and functions give: with the config, which names all sources, what decides the problems of a run."""
    # Held-out problems decide what is trained on only where they are taken out of it.
    sources = (*data.train, *data.eval) if data.overlap == "drop" else data.train
    return {source: _digest(source) for source in sources if is_given(source)}


def _digest(source: str) -> str:
    if configs.is_file(source):
        with pathlib.Path(source).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    digest = hashlib.sha256()
    for where, row in _yielded(source, "data.train"):
        digest.update(json.dumps(rows.plain(row, where), sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def _check(sources: tuple[str, ...], field: str, completions: tuple[str, ...]) -> None:
    for source in sources:
        if completions and not is_given(source):
            raise ValueError(f"{field}: found {rows.short(source)}, need files or functions, whose rows give {', '.join(completions)}")
        if not is_given(source) and not source.startswith("gym:") and source not in generated.POOLS:
            need = f"some of {', '.join(sorted(generated.POOLS))}, gym:NAME, a file named .jsonl or .parquet, or python:MODULE:FUNCTION"
            raise ValueError(f"{field}: found {rows.short(source)}, need {need}")


def _generated(kinds: tuple[str, ...], size: int, seed: int, split: str, sources: tuple[str, ...]) -> list[Item]:
    if not size:
        return []
    found = generated.problems(kinds, size, seed, split)
    return [Item(problem, f"{problem.kind}: question {i}", sources.index(problem.kind)) for i, problem in enumerate(found, 1)]


def _given(source: str, number: int, field: str, completions: tuple[str, ...]) -> list[Item]:
    found = rows.read(source, field) if configs.is_file(source) else _yielded(source, field)
    items = [records.parse(row, where, number, completions) for where, row in found]
    if not items:
        raise ValueError(f"{field}: found no problems in {source!r}, need at least one")
    return items


def _yielded(source: str, field: str) -> Iterator[rows.Row]:
    """Rows that a function of the user's yields. It is trusted as code, what it yields is not."""
    _, module, function = (source.split(":") + ["", ""])[:3]
    found = None
    for n in itertools.count(1):
        where = f"{field}: {source}: item {n}"
        try:
            found = iter(getattr(importlib.import_module(module), function)()) if found is None else found
            row = next(found)
        except StopIteration:
            return
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"{where}: found a failure ({reason}), need python:MODULE:FUNCTION that yields") from error
        if n > rows.ROWS:
            raise ValueError(f"{where}: found more than {rows.ROWS} items, need an end")
        yield where, _row(row, where)


def _row(row: Any, where: str) -> dict[str, Any]:
    if isinstance(row, Problem):
        row = dataclasses.asdict(row)
        del row["id"]
        del row["prompt" if row["messages"] else "messages"]
    if not isinstance(row, dict):
        raise ValueError(f"{where}: found {rows.short(row)}, a {type(row).__name__}, need a dict or a Problem")
    return row

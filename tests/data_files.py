"""Configs and files of the tests of data."""

import json
import pathlib
import sys
import types

import pyarrow
from pyarrow import parquet

from rl_adapter import config as configs

GOOD = {"prompt": "a", "answer": "1"}


def config(**overrides):
    defaults = {"train": ("base_conversion",), "train_size": 50, "eval_size": 20}
    return configs.override(configs.default(), {f"data.{k}": v for k, v in (defaults | overrides).items()}).data


def write(path: pathlib.Path, *lines) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def write_parquet(path: pathlib.Path, lines: list[dict]) -> str:
    names = dict.fromkeys(name for line in lines for name in line)
    parquet.write_table(pyarrow.table({name: [line.get(name) for line in lines] for name in names}), path)
    return str(path)


def files(tmp_path, train, held_out, **overrides):
    paths = write(tmp_path / "train.jsonl", *train), write(tmp_path / "eval.jsonl", *held_out)
    return config(train=paths[:1], eval=paths[1:], **overrides)


MODULE = types.ModuleType("functions_of_a_test")
sys.modules["functions_of_a_test"] = MODULE


def function(yields) -> str:
    MODULE.made = yields
    return "python:functions_of_a_test:made"

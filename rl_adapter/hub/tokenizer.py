"""Text to tokens and back, and the tokens that end a completion. The only importer of tokenizers."""

import dataclasses
import os
import pathlib
from typing import Any

import tokenizers

from rl_adapter.hub.files import read_json


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A checkpoint's `tokenizer.json`, with the ids that the model's config adds to it."""

    backend: tokenizers.Tokenizer = dataclasses.field(repr=False)
    stop_ids: tuple[int, ...]  # any of them ends a completion
    pad_id: int  # fills rows; never attended to

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that the tokenizer's own post-processor adds."""
        return self.backend.encode(text).ids

    def decode(self, ids: list[int]) -> str:
        """Text without special tokens."""
        return self.backend.decode([int(i) for i in ids])


def load_tokenizer(directory: str | os.PathLike, vocab: int) -> Tokenizer:
    """Reads `tokenizer.json`, and stop and pad ids from `generation_config.json`, else from `config.json`.

    Args:
        directory: of the checkpoint.
        vocab: rows of the embedding; every id must lie below.
    """
    directory = pathlib.Path(directory)
    path = directory / "tokenizer.json"
    read_json(path)  # the library's messages name no file
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exceptions
        raise ValueError(f"{path}: need a tokenizer of the `tokenizers` library, found {error}") from None
    # A file may carry the truncation and padding of whoever saved it: a prompt is never cut, and rows are padded elsewhere.
    backend.no_truncation()
    backend.no_padding()
    largest = max(backend.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= vocab:
        raise ValueError(f"{path}: found token id {largest}, need ids below the model's vocab_size {vocab}")
    stop, where = _setting(directory, "eos_token_id")
    stop = stop if isinstance(stop, list) else [stop]
    if not stop or not all(_is_id(i, vocab) for i in stop):
        raise ValueError(f"{where}: eos_token_id: found {stop}, need token ids from 0 to {vocab - 1}")
    pad, where = _setting(directory, "pad_token_id")
    pad = stop[0] if pad is None else pad
    if not _is_id(pad, vocab):
        raise ValueError(f"{where}: pad_token_id: found {pad!r}, need a token id from 0 to {vocab - 1}")
    return Tokenizer(backend, tuple(dict.fromkeys(stop)), pad)


def _setting(directory: pathlib.Path, name: str) -> tuple[Any, pathlib.Path]:
    """A field of `generation_config.json`, else of `config.json` (None if neither has it), and the file that it is from."""
    path = directory / "generation_config.json"
    if path.exists():
        value = read_json(path).get(name)
        if value is not None:
            return value, path
    path = directory / "config.json"
    return read_json(path).get(name), path


def _is_id(value: Any, vocab: int) -> bool:
    return type(value) is int and 0 <= value < vocab

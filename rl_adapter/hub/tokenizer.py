"""Text to tokens and back, the tokens that end a completion, and the chat template. The only importer of tokenizers."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from rl_adapter.hub.files import read_json


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A checkpoint's tokenizer, with what its other files add to it. `make_tokenizer` checks the parts."""

    backend: tokenizers.Tokenizer = dataclasses.field(repr=False)
    stop_ids: tuple[int, ...]  # any of them ends a completion
    pad_id: int  # fills rows; never attended to. May be a stop id: lengths, not pad ids, say what is padding
    special: Mapping[str, str] = dataclasses.field(default_factory=dict)  # as templates know them: bos_token, eos_token, ... -> text
    template: str | None = dataclasses.field(default=None, repr=False)  # jinja source that renders chats

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids; `special`: with those that the tokenizer's own post-processor adds. A rendered chat has them already.

        Raises:
            ValueError: the text holds half a character (a lone surrogate), which is no Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            found = f"half a character, {text[error.start]!a}, at index {error.start} of {text[:60]!a}"
            raise ValueError(f"text to encode: found {found}, need whole ones") from None
        return self.backend.encode(text, add_special_tokens=special).ids

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Text; `special`: with special tokens as they are written."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=not special)

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that are no text, such as those around a turn."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)


def make_tokenizer(
    backend: tokenizers.Tokenizer,
    vocab: int,
    stop_ids: int | Sequence[int],
    pad_id: int | None = None,
    *,
    bos_id: int | None = None,
    special: Mapping[str, str] | None = None,
    template: str | None = None,
    fields: tuple[str, str, str] = ("tokenizer", "eos_token_id", "pad_token_id"),
) -> Tokenizer:
    """A tokenizer from its parts.

    Args:
        backend: of the `tokenizers` library; its truncation and padding are switched off.
        vocab: rows of the embedding; every id must lie below.
        stop_ids: all that end a completion, at least one.
        pad_id: None takes the first stop id.
        bos_id: only for its text.
        special: texts of special tokens by the names that templates have for them; bos_token, eos_token and pad_token are known by id too.
        template: jinja source that renders chats.
        fields: how errors call backend, stop_ids and pad_id.
    """
    # A file may carry the truncation and padding of whoever saved it: a prompt is never cut, and rows are padded elsewhere.
    backend.no_truncation()
    backend.no_padding()
    largest = max(backend.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= vocab:
        raise ValueError(f"{fields[0]}: found token id {largest}, need ids below the model's vocab_size {vocab}")
    stop = list(stop_ids) if isinstance(stop_ids, list | tuple) else [stop_ids]
    if not stop or not all(_is_id(i, vocab) for i in stop):
        raise ValueError(f"{fields[1]}: found {stop}, need token ids from 0 to {vocab - 1}")
    pad = stop[0] if pad_id is None else pad_id
    if not _is_id(pad, vocab):
        raise ValueError(f"{fields[2]}: found {pad!r}, need a token id from 0 to {vocab - 1}")
    ids = {"bos_token": bos_id, "eos_token": stop[0], "pad_token": pad_id}
    by_id = {name: backend.id_to_token(i) for name, i in ids.items() if _is_id(i, vocab)}
    by_id = {name: text for name, text in by_id.items() if text is not None}
    return Tokenizer(backend, tuple(dict.fromkeys(stop)), pad, by_id | dict(special or {}), template)


def parse_backend(text: str, field: str = "tokenizer") -> tokenizers.Tokenizer:
    """The tokenizer that the text of a `tokenizer.json` describes; `field` is what errors call it."""
    try:
        return tokenizers.Tokenizer.from_str(text)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises plain Exceptions; its panics are not even that
        raise ValueError(f"{field}: need a tokenizer of the `tokenizers` library, found {error}") from None


def load_tokenizer(directory: str | os.PathLike, vocab: int) -> Tokenizer:
    """Reads `tokenizer.json`, and beside it, each where present:

    - stop and pad ids from `generation_config.json`, else from `config.json`;
    - texts of special tokens from `tokenizer_config.json`, else `special_tokens_map.json`, else by their ids;
    - the chat template from `chat_template.jinja`, else `tokenizer_config.json`.

    Args:
        directory: of the checkpoint.
        vocab: rows of the embedding; every id must lie below.
    """
    directory = pathlib.Path(directory)
    path = directory / "tokenizer.json"
    read_json(path)  # the library's messages name no file
    backend = parse_backend(path.read_text(encoding="utf-8"), str(path))
    stop, stop_path = _setting(directory, "eos_token_id")
    pad, pad_path = _setting(directory, "pad_token_id")
    bos, _ = _setting(directory, "bos_token_id")
    fields = (str(path), f"{stop_path}: eos_token_id", f"{pad_path}: pad_token_id")
    return make_tokenizer(backend, vocab, stop, pad, bos_id=bos, special=_special(directory), template=_template(directory), fields=fields)


def _special(directory: pathlib.Path) -> dict[str, str]:
    """Texts of special tokens by name: every `..._token` of the two files that have them."""
    found: dict[str, str] = {}
    for path in (directory / "special_tokens_map.json", directory / "tokenizer_config.json"):
        if not path.exists():
            continue
        config = read_json(path)
        extra = config.get("extra_special_tokens")
        for name, value in {**(extra if isinstance(extra, dict) else {}), **config}.items():
            if not name.endswith("_token") or value is None or isinstance(value, bool):  # add_bos_token and its like are flags
                continue
            text = value.get("content") if isinstance(value, dict) else value
            if not isinstance(text, str):
                raise ValueError(f"{path}: {name}: found {value!r}, need text, or an object whose content is text")
            found[name] = text
    return found


def _template(directory: pathlib.Path) -> str | None:
    path = directory / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: need a text file in UTF-8, found {error}") from None
    path = directory / "tokenizer_config.json"
    value = read_json(path).get("chat_template") if path.exists() else None
    if isinstance(value, list):
        named = {v.get("name"): v.get("template") for v in value if isinstance(v, dict) and isinstance(v.get("name"), str)}
        if not isinstance(named.get("default"), str):
            raise ValueError(f"{path}: chat_template: found templates named {sorted(named)}, need one named 'default'")
        return named["default"]
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{path}: chat_template: found {type(value).__name__}, need text, or a list of named templates")
    return value


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

"""A search tool over a user's own corpus. The only importer of bm25s, which is an optional extra.

Scores are BM25 (Robertson & Zaragoza 2009) in Lucene's variant, over lower-case words without English stop words.
"""

import functools
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

FIELDS = "text", "contents"  # which of them a record has
WORDS = r"(?u)\b\w+\b"  # bm25s's own pattern drops words of one character, and so every digit


def make(path: str, count: int, fields: tuple[str, str] = ("env.corpus", "env.tools")) -> Callable[[str], str]:
    """The function `retrieval(query)`, over an index that is built once and only read.

    Args:
        path: .jsonl or .parquet, whose records hold `text` (or `contents`) and perhaps `title`; else text, whose blank lines part passages.
        count: passages that one search gives, at most.
        fields: how errors call the path, and the tool.
    """
    try:
        import bm25s  # an optional extra
    except ImportError:
        raise ValueError(f"{fields[1]}: found no package bm25s, need the extra tools: pip install 'rl-adapter[tools]'") from None
    passages = tuple(_passages(pathlib.Path(path), fields[0]))
    if not passages:
        raise ValueError(f"{fields[0]}: found no passage in {path!r}, need at least one")
    split = functools.partial(bm25s.tokenize, stopwords="en", token_pattern=WORDS, show_progress=False, return_ids=False)
    index = bm25s.BM25(method="lucene")
    index.index(split(list(passages)), show_progress=False)

    def retrieval(query: str) -> str:
        """Searches the corpus and gives the passages that fit the words of the query best."""
        words = [word for word in split([query])[0] if word in index.vocab_dict]
        if not words:
            return "Nothing found."
        scores = index.get_scores(words)
        best = np.argsort(-scores, kind="stable")[:count]  # stable: passages of equal score in the corpus's order
        return "\n\n".join(f"[{n}] {passages[i]}" for n, i in enumerate(best, 1) if scores[i] > 0) or "Nothing found."

    return retrieval


def _passages(path: pathlib.Path, field: str) -> Iterator[str]:
    if path.suffix == ".parquet":
        yield from (_passage(record, f"{field}: {path}: row {n}") for n, record in enumerate(_rows(path, field), 1))
        return
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{field}: found {str(path)!r} ({error}), need a file of text in UTF-8") from None
    if path.suffix != ".jsonl":
        yield from (part.strip() for part in text.split("\n\n") if part.strip())
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{field}: {path}:{number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: found {line[:60]!r} ({error}), need a JSON object") from None
            yield _passage(record, where)


def _rows(path: pathlib.Path, field: str) -> Iterator[dict]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{field}: found {str(path)!r} and no package pyarrow, need it to read Parquet") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = [name for name in (*FIELDS, "title") if name in file.schema_arrow.names]
            for batch in file.iter_batches(columns=names):
                yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{field}: found {str(path)!r} ({error}), need a Parquet file") from None


def _passage(record: Any, where: str) -> str:
    """Title and text of a record."""
    found = record if isinstance(record, dict) else {}
    name = next((name for name in FIELDS if name in found), FIELDS[0])
    text, title = found.get(name), found.get("title")
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where}: {name}: found {text!r:.60}, need text that is not blank")
    return f"{title.strip()}\n{text.strip()}" if isinstance(title, str) and title.strip() else text.strip()

"""The pretraining corpus of the base that ships with the package, and its tokenizer.

One document a row: prompt, completion, `<eos>`, padding. Most documents answer at once, the others work the problem
in steps first. A model trained on the mixture therefore knows how to work but mostly does not: what RL then finds.

    python -m experiments.corpus            writes rl_adapter/assets/base/tokenizer.json
"""

import dataclasses
import pathlib
import string

import numpy as np
from reasoning_gym.arithmetic.leg_counting import ANIMALS
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from rl_adapter.environments import arithmetic

SPECIALS = ("<pad>", "<eos>", "<unk>")
PAD, EOS = 0, 1
WORDS = ("Answer: ", "? ", ", ", "legs: ", " in base ")
QUICK = 0.6  # share of documents that answer at once
WEIGHTS = {"chain_sum": 0.4, "leg_counting": 0.35, "base_conversion": 0.25}  # the last has far fewer questions
TOKENIZER = pathlib.Path(__file__).parents[1] / "rl_adapter/assets/base/tokenizer.json"


def make_tokenizer() -> Tokenizer:
    """Words of the templates are one token each, everything else is one token a character (printable ASCII, blanks).

    Digits stay apart, so that a sum is a lookup of digits; decoding is concatenation, so that it undoes encoding.
    """
    words = (*WORDS, *(f" {animal}" for animal in ANIMALS))
    vocab = (*SPECIALS, *string.digits, *(c for c in string.printable if c not in string.digits), *words)
    by_length = sorted(words, key=len, reverse=True)  # the longest alternative first: " sea slug" before " s"
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocab)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(map(_escape, by_length)) + r"|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return tokenizer


def _escape(text: str) -> str:
    return text.replace("?", r"\?")


@dataclasses.dataclass(frozen=True)
class Table:
    """Every pretraining document, encoded once; the first axis of `tokens` is quick, worked."""

    tokens: np.ndarray  # [2, n, T] int32, padded
    prompt_lengths: np.ndarray  # [n] int32
    lengths: np.ndarray  # [2, n] int32, with <eos>
    kinds: np.ndarray  # [n] int32, index into WEIGHTS


@dataclasses.dataclass(frozen=True)
class Documents:
    """A sample of the corpus."""

    tokens: np.ndarray  # [n, T] int32: prompt, completion, <eos>, padding
    mask: np.ndarray  # [n, T] bool: True at completion tokens and <eos>
    lengths: np.ndarray  # [n] int32: with <eos>; a loss over the prompt as well masks by this
    worked: np.ndarray  # [n] bool
    kinds: np.ndarray  # [n] int32, index into WEIGHTS


def encode_table(tokenizer: Tokenizer, split: str = "pretrain") -> Table:
    """Encodes all documents of a split: seconds, once; `documents` then only indexes."""
    pools = [arithmetic.pool(kind, split) for kind in WEIGHTS]
    problems = [problem for pool in pools for problem in pool]
    prompts = _encode(tokenizer, [p.prompt for p in problems])
    rows = [
        [prompt + completion + [EOS] for prompt, completion in zip(prompts, _encode(tokenizer, completions), strict=True)]
        for completions in ([arithmetic.quick(p) for p in problems], [arithmetic.worked(p) for p in problems])
    ]
    lengths = np.array([[len(row) for row in style] for style in rows], np.int32)
    tokens = np.full((2, len(problems), lengths.max()), PAD, np.int32)
    tokens[np.arange(tokens.shape[2]) < lengths[..., None]] = np.concatenate([np.concatenate(style) for style in rows])
    return Table(
        tokens=tokens,
        prompt_lengths=np.array([len(prompt) for prompt in prompts], np.int32),
        lengths=lengths,
        kinds=np.repeat(np.arange(len(pools), dtype=np.int32), [len(pool) for pool in pools]),
    )


def documents(table: Table, seed: int, size: int, quick: float = QUICK) -> Documents:
    """Samples documents with replacement: kinds by `WEIGHTS`, then a problem, then quick or worked.

    Quick documents are a third as long as worked ones, so padding both to one length wastes more than half of it: with
    `quick` 1 or 0 the rows are padded only to the longest of that style, and a batch can be made of two such parts.
    """
    rng = np.random.default_rng(seed)
    counts = np.bincount(table.kinds, minlength=len(WEIGHTS))
    kinds = rng.choice(len(WEIGHTS), size, p=np.array(list(WEIGHTS.values())))
    # The table is sorted by kind: a position within the kind plus where the kind begins.
    index = (rng.random(size) * counts[kinds]).astype(np.int64) + (np.cumsum(counts) - counts)[kinds]
    worked = rng.random(size) >= quick
    lengths = table.lengths[worked.astype(int), index]
    longest = table.lengths[0 if quick >= 1 else 1].max()
    positions = np.arange(longest)
    return Documents(
        tokens=table.tokens[worked.astype(int), index, :longest],
        mask=(positions >= table.prompt_lengths[index, None]) & (positions < lengths[:, None]),
        lengths=lengths,
        worked=worked,
        kinds=table.kinds[index],
    )


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]


if __name__ == "__main__":
    TOKENIZER.parent.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save(str(TOKENIZER))

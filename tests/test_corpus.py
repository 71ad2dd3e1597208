"""The problems, their worked steps, the tokenizer and the pretraining documents."""

import random
import re
import string

import numpy as np
import pytest
from tokenizers import Tokenizer

from experiments import corpus
from rl_adapter.environments import arithmetic, fewshot, generated
from rl_adapter.rewards import exact

TOKENIZER = corpus.make_tokenizer()
OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


@pytest.fixture(scope="module")
def table():
    return corpus.encode_table(TOKENIZER, "eval")  # the smallest split; the others go the same way


def evaluate(expression):
    operator = next(c for c in expression[1:] if c in OPERATIONS)
    left, right = expression.split(operator)
    return OPERATIONS[operator](int(left), int(right))


@pytest.mark.parametrize("kind", arithmetic.KINDS)
def test_splits_are_disjoint_and_large_enough(kind):
    pools = {split: {p.prompt for p in arithmetic.pool(kind, split)} for split in arithmetic.SPLITS}
    assert sum(map(len, pools.values())) == len(set.union(*pools.values()))
    assert len(pools["pretrain"]) > len(pools["train"]) > len(pools["eval"]) > 100
    assert all(len(pools[split]) == len(arithmetic.pool(kind, split)) for split in pools)  # no duplicates


@pytest.mark.parametrize("kind", arithmetic.KINDS)
def test_worked_steps_are_right_and_end_in_the_gold_answer(kind):
    for problem in arithmetic.pool(kind, "eval"):
        steps = arithmetic.KINDS[kind].steps(problem.prompt)
        assert all(evaluate(left) == int(right) for left, right in (step.split("=") for step in steps)), steps
        assert steps[-1].endswith(f"={problem.answer}")
        assert exact.exact_match(arithmetic.worked(problem), problem) == exact.exact_match(arithmetic.quick(problem), problem) == 1.0


def test_problems_mix_kinds_evenly():
    chosen = generated.problems(tuple(arithmetic.KINDS), 100, 0, "eval")
    counts = [sum(p.kind == kind for p in chosen) for kind in arithmetic.KINDS]
    assert counts == [34, 33, 33] and len({p.prompt for p in chosen}) == 100


def test_a_problem_looks_the_same_everywhere():
    problem = arithmetic.problem("352 in base 7? ", "184", "base_conversion")
    assert problem.id == 1598835193  # a golden value: rollouts are keyed by it, so a change makes old runs unrepeatable
    assert arithmetic.worked(problem) == "3*7=21 21+5=26 26*7=182 182+2=184 Answer: 184"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((("chain",), 1, 0, "eval"), r"kinds: found \['chain'\], need some of"),
        (((), 1, 0, "eval"), "kinds: found none, need some of"),
        ((("base_conversion",), 0, 0, "eval"), "size: found 0"),
        ((("base_conversion",), 1, 0, "test"), "split: found 'test'"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        generated.problems(*arguments)


def test_the_tokenizer_round_trips_the_corpus_with_no_unknown():
    for kind in arithmetic.KINDS:
        for problem in random.Random(0).sample(arithmetic.pool(kind, "pretrain"), 200):
            text = problem.prompt + arithmetic.worked(problem)
            ids = TOKENIZER.encode(text).ids
            assert TOKENIZER.decode(ids) == text and min(ids) >= len(corpus.SPECIALS)
            # A prompt and its completion encode apart to what they encode to together.
            assert ids == TOKENIZER.encode(problem.prompt).ids + TOKENIZER.encode(arithmetic.worked(problem)).ids


def test_the_tokenizer_round_trips_any_ascii():
    rng = random.Random(0)
    texts = ["".join(rng.choices(string.printable, k=rng.randrange(50))) for _ in range(500)] + [string.printable, " sea slugs"]
    assert [TOKENIZER.decode(TOKENIZER.encode(text).ids) for text in texts] == texts


def test_the_vocabulary_is_small_and_starts_with_the_specials():
    assert [TOKENIZER.id_to_token(i) for i in range(3)] == list(corpus.SPECIALS)
    assert TOKENIZER.get_vocab_size() <= 256
    assert TOKENIZER.encode("é").ids == [corpus.SPECIALS.index("<unk>")]
    assert len(TOKENIZER.encode("1234567890").ids) == 10


def test_the_shipped_tokenizer_is_the_one_made_here():
    """Regenerate with `python -m experiments.corpus`, and then pretrain the base anew: its embeddings follow the ids."""
    assert Tokenizer.from_file(str(corpus.TOKENIZER)).to_str() == TOKENIZER.to_str()


def test_documents_are_prompt_completion_eos_padding(table):
    documents = corpus.documents(table, seed=0, size=300)
    gold = {p.prompt: p for kind in corpus.WEIGHTS for p in arithmetic.pool(kind, "eval")}
    for tokens, mask, length, worked, kind in zip(
        documents.tokens, documents.mask, documents.lengths, documents.worked, documents.kinds, strict=True
    ):
        assert tokens[length - 1] == corpus.EOS and not tokens[length:].any() and tokens[:length].all()
        problem = gold[TOKENIZER.decode(tokens[:length][~mask[:length]].tolist())]
        assert TOKENIZER.decode(tokens[mask].tolist()) == (arithmetic.worked if worked else arithmetic.quick)(problem)
        assert problem.kind == list(corpus.WEIGHTS)[kind] and not mask[length:].any() and mask[length - 1]


def test_documents_follow_the_shares_and_the_seed(table):
    documents, again = (corpus.documents(table, seed=3, size=20_000) for _ in range(2))
    np.testing.assert_array_equal(documents.tokens, again.tokens)
    assert abs(1 - documents.worked.mean() - corpus.QUICK) < 0.02
    np.testing.assert_allclose(np.bincount(documents.kinds) / 20_000, list(corpus.WEIGHTS.values()), atol=0.02)
    assert not np.array_equal(documents.tokens, corpus.documents(table, seed=4, size=20_000).tokens)


def test_documents_of_one_style_are_padded_to_that_style(table):
    quick, worked = corpus.documents(table, 0, 100, quick=1.0), corpus.documents(table, 0, 100, quick=0.0)
    assert not quick.worked.any() and worked.worked.all()
    assert quick.tokens.shape[1] == table.lengths[0].max() < worked.tokens.shape[1] == table.lengths[1].max() <= 52


@pytest.mark.parametrize("kind", fewshot.KINDS)
def test_fewshot_tasks(kind):
    pools = {split: fewshot.pool(kind, split) for split in arithmetic.SPLITS}
    questions = {split: {p.prompt.splitlines()[-1] for p in pool} for split, pool in pools.items()}
    assert not questions["train"] & questions["eval"] and min(map(len, questions.values())) > 300
    for problem in pools["eval"]:
        *shots, question = problem.prompt.splitlines()
        assert question not in "".join(shots) and question.endswith("=")
        for line in (*shots, f"{question} {problem.answer}"):
            numbers = [int(n) for n in re.findall(r"\d+", line)]
            compute = {"two_digit_sum": sum, "largest": max, "smallest": min}[kind]
            assert compute(numbers[:-1]) == numbers[-1]
        assert exact.exact_match(f" {problem.answer}\n", problem, mark="") == 1
        assert exact.exact_match(f" 1{problem.answer}", problem, mark="") == exact.exact_match("", problem, mark="") == 0

"""reasoning-gym's scorers, without what they give away and without running what a model wrote."""

import importlib
import inspect
import json
import pkgutil
import textwrap

import pytest
import reasoning_gym

from rl_adapter.rewards import gym

NAMES = (
    *gym.EVALUATED,
    "chain_sum",
    "complex_arithmetic",
    "game_of_life_halting",
    "basic_arithmetic",
    "word_sorting",
    "propositional_logic",
)


def problem(name, index=0, **config):
    entry = json.loads(json.dumps(reasoning_gym.create_dataset(name, size=index + 1, seed=3, **config)[index], default=str))
    return {"prompt": entry["question"], "kind": "gym", "answer": "", "metadata": {"entry": entry}}


def score(answer, one, partial=False):
    return gym.score(f"Thinking.\nAnswer: {answer}", one, "Answer:", partial)


@pytest.mark.parametrize("name", NAMES)
def test_gold_earns_one_and_nonsense_nothing(name):
    one = problem(name)
    gold = one["metadata"]["entry"]["answer"]
    if gold is not None and gold != "None":
        assert score(gold, one) == score(f"  {gold}\n", one) == 1.0
    for nonsense in ("", "the", "nan", "nan+nanj", "-nan", "inf", "None", "()", "[]", "0 0 0 0 0 0 0", "x" * 20_000):
        assert score(nonsense, one) == 0.0, nonsense
    assert gym.score(str(gold), one, "Answer:", False) == 0.0  # without the mark


HARMFUL = [
    "__import__('os').system('touch {path}')",
    "open('{path}', 'w')",
    "(open)('{path}', 'w')",
    "[open][0]('{path}', 'w')",
    "open\n('{path}', 'w')",
    "ｏｐｅｎ('{path}', 'w')",
    'sin(\'open("{path}", "w")\')',
    "f\"{{open('{path}', 'w')}}\"",
    "[open for x in '1'][0]('{path}', 'w')",
    "(lambda: open('{path}', 'w'))()",
    "Symbol('x').__class__",
    "open#\n('{path}', 'w')",
    "open\\\n('{path}', 'w')",
    "{{1: open}}[1]('{path}', 'w')",
    '\'open("{path}", "w")\' + x',
    'sympify(\'open("{path}", "w")\')',
    'exec(\'open("{path}", "w")\')',
]


@pytest.mark.parametrize("name", gym.EVALUATED)
def test_no_answer_is_run_as_a_program(name, tmp_path):
    one = problem(name)
    for i, harmful in enumerate(HARMFUL):
        path = tmp_path / str(i)
        assert score(harmful.format(path=path), one) == 0.0
        assert not path.exists(), harmful


def test_every_scorer_that_evaluates_is_known():
    """A newer version may bring others. number_sorting evaluates its gold answer, propositional_logic what it has parsed."""
    found = set()
    for module in pkgutil.walk_packages(reasoning_gym.__path__, "reasoning_gym."):
        if any(part in module.name for part in (".gsm_symbolic.", "composite", "coaching", ".contrib.")):
            continue
        for _, kind in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            method = vars(kind).get("score_answer")
            source = textwrap.dedent(inspect.getsource(method)) if method else ""
            if any(call in source for call in (" eval(", "(eval(", "parse_expr(", "exec(", "sympify(")):
                found.add(kind.__module__.rpartition(".")[2])
    assert found - {"propositional_logic", "number_sorting"} <= set(gym.EVALUATED), "rl_adapter/rewards/gym.py must guard these too"
    assert len(found) >= 9


def test_equivalent_answers_count_where_the_library_says_so():
    one = problem("countdown")
    meta = one["metadata"]["entry"]["metadata"]
    gold = one["metadata"]["entry"]["answer"]
    assert score(f"({gold})", one) == 1.0 and score(f"{gold} + 0", one) == 0.0
    assert score(str(meta["target"]), one) == 0.0
    one = problem("simple_integration")
    gold = one["metadata"]["entry"]["answer"].replace("+ C", "+ C + sin(1)")
    assert score(gold, one) == 1.0


def test_puzzle24_wants_its_own_numbers():
    one = problem("puzzle24")
    gold = one["metadata"]["entry"]["answer"]
    assert score(gold, one) == 1.0
    assert sorted(one["metadata"]["entry"]["metadata"]["numbers"]) != [1, 1, 4, 6] and score("6*4*1*1", one) == 0.0


def test_true_and_false_must_be_said():
    for index in range(6):
        one = problem("game_of_life_halting", index)
        gold = str(one["metadata"]["entry"]["answer"])
        assert (score("True", one), score("False", one)) == (float(gold == "True"), float(gold == "False")) and score("yes", one) == 0.0


def test_partial_credit_is_asked_for():
    one = problem("chain_sum")
    gold = one["metadata"]["entry"]["answer"]
    assert score(f"it is {gold}", one) == 0.0 and 0 < score(f"it is {gold}", one, partial=True) < 1


def test_an_entry_is_needed_and_names_its_data_set():
    with pytest.raises(ValueError, match="metadata.entry: found none, need an entry of reasoning-gym"):
        gym.score("Answer: 1", {"metadata": {}, "kind": "chain_sum"}, "Answer:", False)
    one = problem("chain_sum")
    assert gym.entry_of(one)[0] == "chain_sum"
    assert gym.entry_of(one | {"metadata": {"gym": "other"} | one["metadata"]})[0] == "other"

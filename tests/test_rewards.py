"""The reward stage: each scorer counts what its rule says, failures stay where they are, and hostile text costs nobody anything."""

import dataclasses
import json
import subprocess
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_adapter import config as config_lib
from rl_adapter import config_check, sandbox
from rl_adapter.rewards import exact, score
from rl_adapter.types import Problem

pytestmark = pytest.mark.skipif(all(map(sandbox.trouble, sandbox.KINDS)), reason="no sandbox works on this machine")

OFF = {"reward.exact.weight": 0.0}


def problem(answer="27", **more):
    return Problem(id=1, prompt="20+7? ", answer=answer, kind="chain_sum", **more)


def rewards(**changes):
    config = config_lib.override(config_lib.default(), {key.replace("__", "."): value for key, value in changes.items()})
    config_check.validate(config)
    return score.open_rewards(config)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Answer: 27", "27"),
        ("20+7=27 Answer: 27", "27"),
        ("Answer:27.", "27"),
        ("Answer: 26 no, Answer: 27\n", "27"),  # the last one counts
        ("Answer: 27 28 29", "27"),  # a list of guesses is its first guess
        ("Answer: -3", "-3"),
        ("Answer: 1.5", "1.5"),
        ("Answer: 27 Answer:", None),
        ("Answer: ", None),
        ("27", None),
        ("", None),
        ("answer: 27", None),
        ("Answer: " + "9" * 1000, None),
    ],
)
def test_extract(text, expected):
    assert exact.extract(text, "Answer:") == expected


@pytest.mark.parametrize(
    "text, gold, expected",
    [
        ("Answer: 27", "27", 1.0),
        ("Answer: 27", " 27 ", 1.0),
        ("Answer: 027", "27", 0.0),
        ("Answer: 27.0", "27", 0.0),
        ("Answer: 26+1", "27", 0.0),
        ("Answer: 2 7", "27", 0.0),
        ("Answer: New  York, of course", "New York", 1.0),  # as many words as the gold answer has
        ("Answer: the U.S.", "the U.S.", 1.0),
        ("Answer: !", "!", 1.0),
        ("no idea", "27", 0.0),
    ],
)
def test_exact_match(text, gold, expected):
    assert exact.exact_match(text, problem(gold)) == expected


def test_exact_match_alone_starts_no_process(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: pytest.fail("a process was started"))
    with rewards() as scoring:
        assert scoring.describe() == "reward: 1 exact"
        found = scoring.score_all([problem(), problem("3"), problem("")], ["Answer: 27", "Answer: 27", "Answer: "])
    assert [(o.reward, o.parts) for o in found] == [(1.0, {"exact": 1.0}), (0.0, {"exact": 0.0}), (0.0, {"exact": 0.0})]
    assert [list(o.failures) for o in found] == [[], [], ["exact"]]  # no gold answer is no reason to reward


@settings(max_examples=30, deadline=None)
@given(st.text())
def test_any_text_scores_without_failure(text):
    found = rewards().score_all([problem()] * 2, [text, "Answer: " + text])
    assert all(o.reward in (0.0, 1.0) and not o.failures for o in found)


def test_hostile_text_takes_no_time():
    texts = ["Answer: 9**9**9**9", "Answer:" * 1_000_000, "Answer: " + " " * 10_000_000, "9" * 10_000_000, "\x00\ud800Answer: \u202e27"]
    start = time.perf_counter()
    found = rewards().score_all([problem()] * len(texts), texts)
    assert time.perf_counter() - start < 1.0
    assert not any(o.reward or o.failures for o in found)


def test_what_is_no_text_fails_alone_and_a_text_has_a_problem():
    found = rewards(reward__failure=-1.0).score_all([problem()] * 2, [None, "Answer: 27"])
    assert [o.reward for o in found] == [-1.0, 1.0] and "TypeError" in found[0].failures["exact"] and not found[1].failures
    with pytest.raises(ValueError, match="texts: found 1 for 2 problems"):
        rewards().score_all([problem()] * 2, ["Answer: 27"])


VALUES = st.one_of(st.floats(), st.integers(-9, 9), st.booleans(), st.none(), st.text(max_size=3), st.just([1.0]), st.just(np.float32(0.5)))


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(config_lib.SCORERS), VALUES), st.floats(-2, 2), st.lists(st.floats(-3, 3), min_size=7, max_size=7))
def test_a_reward_is_the_weighted_sum_of_parts_and_a_failure_counts_as_configured(values, failure, weights):
    section = config_lib.default().reward.copy_and_resolve_references()
    with section.unlocked():
        section.failure = failure
        for name, weight in zip(config_lib.SCORERS, weights):
            section[name].weight = weight
    found = score.combine(section, {name: (value, None) for name, value in values.items()})
    good = {n for n, v in values.items() if isinstance(v, int | float | np.floating) and np.isfinite(v)}
    assert set(found.failures) == set(values) - good and set(found.parts) == set(values)
    assert all(found.parts[n] == (values[n] if n in good else failure) for n in values)
    want = sum(section[n].weight * found.parts[n] for n in values)
    assert np.isfinite(found.reward) and found.reward == pytest.approx(want, abs=1e-9)


def test_a_value_of_zero_is_not_missing():
    section = config_lib.override(config_lib.default(), {"reward.failure": -1.0}).reward
    found = score.combine(section, {"exact": (0.0, None)})
    assert (found.reward, found.parts, found.failures) == (0.0, {"exact": 0.0}, {})
    assert score.combine(section, {"exact": (None, "boom")}).reward == -1.0


def test_a_package_that_is_missing_names_its_extra(monkeypatch):
    monkeypatch.setattr(score.importlib.util, "find_spec", lambda name: None)
    for name, more in (("math", {}), ("json", {"reward.json.schema": __file__})):
        with pytest.raises(ValueError, match=rf"^reward.{name}: found no package \w+, need it: pip install 'rl-adapter\[rewards\]'"):
            rewards(**{f"reward.{name}.weight": 1.0}, **more)


@pytest.fixture(scope="module")
def all_kinds(tmp_path_factory):
    """All scorers at once, and what they score."""
    schema = tmp_path_factory.mktemp("schema") / "schema.json"
    schema.write_text(json.dumps({"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}))
    on = {f"reward.{name}.weight": 2.0**i for i, name in enumerate(config_lib.SCORERS)}
    more = {"reward.regex.pattern": "(a+)+b|Answer: .*", "reward.json.schema": str(schema), "reward.function.path": "tests.scorers:moody"}
    with rewards(**on, **more, **{"reward.seconds": 2.0}) as scoring:
        yield scoring


def test_parts_are_weighted_and_told_apart(all_kinds):
    entry = {"question": "20+7?", "answer": "27", "metadata": {"source_dataset": "chain_sum"}}
    one = problem(metadata={"entry": entry, "tests": "assert f() == 27"})
    found = all_kinds.score(one, "Answer: 27")
    assert found.parts == {"exact": 1, "math": 1, "code": 0, "gym": 1, "regex": 1, "json": 0, "function": 10.0} and not found.failures
    assert found.reward == 1 + 2 + 8 + 16 + 64 * 10.0
    found = all_kinds.score(one, '```python\ndef f(): return 27\n```\n```json\n{"n": 3}\n```', truncated=True)
    assert found.parts | {"function": 0} == {"exact": 0, "math": 0, "code": 1, "gym": 0, "regex": 0, "json": 1, "function": 0}
    assert "sandbox: " in all_kinds.describe() and "1 exact + 2 math + 4 code" in all_kinds.describe()
    without = all_kinds.score(problem(), "Answer: 27")
    assert set(without.failures) == {"code", "gym"} and without.parts["math"] == 1.0


def test_failures_stay_with_their_sample_and_order_is_kept(all_kinds):
    """Under samples that hang, die, and answer nonsense; from several threads."""
    texts = [f"Answer: {n}" for n in range(8)]
    bad = ["Answer: sleep", "Answer: exit", "Answer: raise", "Answer: nan", "Answer: kill", "Answer: text", "Answer: memory", "Answer: big"]
    mixed = [text for pair in zip(texts, bad) for text in pair]
    started = time.monotonic()
    found = [None] * len(mixed)

    def ask(places):
        for i in places:
            found[i] = all_kinds.part("function", problem(), mixed[i])

    threads = [threading.Thread(target=ask, args=(range(start, len(mixed), 4),)) for start in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert [value for value, _ in found[::2]] == [float(len(text)) for text in texts]
    assert all(value is None and why for value, why in found[1::2])
    why = dict(zip(bad, (why for _, why in found[1::2])))
    assert "no end within 2 s" in why["Answer: sleep"] and "SystemExit" in why["Answer: exit"] and "boom" in why["Answer: raise"]
    assert "need a finite number" in why["Answer: nan"] and "died" in why["Answer: kill"] and "memory" in why["Answer: memory"]
    assert time.monotonic() - started < 20


def test_a_function_gets_the_problem_and_leaves_nothing_behind(all_kinds):
    one = problem(metadata={"a": [1]}, messages=({"role": "user", "content": "x"},))
    value, why = all_kinds.part("function", one, "fields", True)
    want = dataclasses.asdict(one) | {"messages": [{"role": "user", "content": "x"}], "metadata": {"a": [1]}, "truncated": True}
    assert why is not None and json.loads(why.partition("fields ")[2]) == want and value is None
    assert [all_kinds.part("function", one, "count")[0] for _ in range(3)] == [1.0] * 3
    for impossible in ({"a": object()}, {"a": float}):
        assert all_kinds.part("function", problem(metadata=impossible), "x")[1].startswith("TypeError")
    assert all_kinds.part("function", one, "\ud800\x00") == (2.0, None)


@pytest.mark.parametrize("name, text", [("regex", "a" * 60), ("math", "Answer: 9^{9^{9^9}}"), ("gym", "Answer: 9**9**9**9")])
def test_the_endless_cost_their_time_only(all_kinds, name, text):
    entry = {"question": "", "answer": "6*4*1*1", "metadata": {"source_dataset": "countdown", "numbers": [9, 9, 9, 9], "target": 24}}
    one = problem("x^2", metadata={"entry": entry})
    started = time.monotonic()
    value, why = all_kinds.part(name, one, text)
    assert value in (None, 0.0) and time.monotonic() - started < 4, why
    assert name == "math" or "no end within 2 s" in why
    assert all_kinds.part(name, one, "Answer: x^2")[1] is None


def test_a_scorer_that_cannot_be_prepared_is_refused_at_the_start(tmp_path):
    bad = tmp_path / "schema.json"
    bad.write_text('{"type": 7}')
    for name, more in (
        ("function", {"reward.function.path": "tests.scorers:missing"}),
        ("function", {"reward.function.path": "tests.scorers:NUMBER"}),
        ("json", {"reward.json.schema": str(bad)}),
    ):
        with pytest.raises(ValueError, match=f"^reward.{name}: found .*need one that can"):
            with rewards(**{f"reward.{name}.weight": 1.0}, **more):
                pass


def test_a_worker_that_dies_is_replaced_and_none_is_left():
    scoring = rewards(**OFF, **{"reward.function.weight": 1.0, "reward.function.path": "tests.scorers:moody", "reward.workers": 1})
    with scoring:
        (process,) = scoring._pool._alive
        process.kill()
        assert scoring.part("function", problem(), "four") == (4.0, None)
        (other,) = scoring._pool._alive
        assert other.poll() is None
    assert other.poll() is not None
    assert "closed" in scoring.part("function", problem(), "four")[1]


def test_a_worker_imports_no_jax_and_sees_no_network():
    with rewards(**OFF, **{"reward.function.weight": 1.0, "reward.function.path": "tests.scorers:moody"}) as scoring:
        assert scoring.part("function", problem(), "jax") == (0.0, None)
        assert scoring.part("function", problem(), "network") == (0.0, None)
        assert sandbox.describe() in scoring.describe()

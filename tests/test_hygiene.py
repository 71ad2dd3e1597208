"""Gold answers earn their reward, empty words do not, and drift from a scorer that is not rewarded shows."""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_adapter import config as config_lib
from rl_adapter import config_check, monitor, sandbox
from rl_adapter.rewards import hygiene, score
from rl_adapter.types import Outcome, Problem

pytestmark = pytest.mark.skipif(all(map(sandbox.trouble, sandbox.KINDS)), reason="no sandbox works on this machine")


def rewards(**changes):
    config = config_lib.override(config_lib.default(), changes)
    config_check.validate(config)
    return score.open_rewards(config)


def problem(answer, prompt="20+7?", **metadata):
    return Problem(id=1, prompt=prompt, answer=answer, kind="x", metadata=metadata)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["27", "New York", "x" * 300, "-1.5", "!"]), min_size=1, max_size=6))
def test_problems_are_kept_where_gold_earns_one(answers):
    problems = [problem(a, prompt=str(i)) for i, a in enumerate(answers)]
    good = [p for p in problems if len(p.answer) < 200]
    if len(good) == len(problems):
        told = []
        assert hygiene.check_gold(rewards(), problems, progress=lambda *of: told.append(of)) == (problems, [])
        assert told == [(i + 1, len(problems)) for i in range(len(problems))]
        return
    with pytest.raises(
        ValueError, match=f"^answer: found {len(problems) - len(good)} of {len(problems)} that do not earn 1.0 .*exact: earns 0"
    ):
        hygiene.check_gold(rewards(), problems)
    if good:
        kept, dropped = hygiene.check_gold(rewards(), problems, "drop")
        assert kept == good and {p.prompt for p, _ in dropped} == {p.prompt for p in problems} - {p.prompt for p in good}
    else:
        with pytest.raises(ValueError, match="need a gold answer that earns"):
            hygiene.check_gold(rewards(), problems, "drop")


def test_each_scorer_checks_its_own_gold():
    entry = {"question": "", "answer": "27", "metadata": {"source_dataset": "chain_sum"}}
    good = problem("27", entry=entry, tests="assert f() == 27", solution="def f(): return 27")
    none = problem("27", entry=entry | {"answer": None}, tests="assert f() == 27")  # no gold for two of them
    named_otherwise = {"test": "assert f() == 27", "canonical_solution": "def f(): return 27"}  # as HumanEval does
    bad = [
        (problem("\\frac{", entry=entry, tests="x"), "math: ValueError: answer: found .*cannot read"),
        (problem("27", entry=entry, tests="assert f() == 27", solution="def f(): return 28"), "code: earns 0"),
        (problem("27", entry=entry, solution="def f(): pass"), "code: ValueError: metadata: found neither tests"),
        (problem("27", entry={"metadata": {}, "answer": "27"}, tests="x"), "gym: "),
        (problem("27", entry=entry, **named_otherwise), "code: ValueError: metadata: found neither tests"),
        (problem("", entry=entry, tests="x"), "math: ValueError: answer: found ''"),
        (problem("27", tests="assert f() == 27"), "gym: ValueError: metadata.entry: found none"),
    ]
    on = {f"reward.{name}.weight": 1.0 for name in ("math", "gym")} | {"reward.held_out": "code", "reward.exact.weight": 0.0}
    with rewards(**on) as scoring:
        kept, dropped = hygiene.check_gold(scoring, [good, *(p for p, _ in bad), none], "drop")
        assert kept == [good, none] and [p for p, _ in dropped] == [p for p, _ in bad]
        for (_, reason), (_, want) in zip(dropped, bad):
            assert re.match(want, reason), reason


def test_a_problem_that_no_scorer_can_score_is_told():
    """A misspelt answer is metadata; it may be missing where an environment rewards."""
    bare = problem("", anwser="27")
    with pytest.raises(ValueError, match="found 1 of 2 that do not .*exact: ValueError: answer: found none.* metadata are 'anwser'"):
        hygiene.check_gold(rewards(), [problem("27"), bare])
    played = dataclasses.replace(bare, env="guess")
    assert hygiene.check_gold(rewards(), [played]) == ([played], [])
    with pytest.raises(ValueError, match="exact: ValueError"):
        hygiene.check_gold(rewards(**{"reward.env.weight": 0.0}), [played])
    assert hygiene.run_probes(rewards(), [problem("27"), played])[-1] == (
        "reward: exact cannot score 1 of 2 problems, whatever is said (ValueError: answer: found none, need a gold answer to match)"
    )


@pytest.mark.parametrize("name, failed", [("raises", 3), ("wants_three", 3), ("no_number", 3), ("moody", 0)])
def test_a_function_that_always_fails_is_told(name, failed):
    with rewards(**{"reward.exact.weight": 0.0, "reward.function.weight": 1.0, "reward.function.path": f"scorers:{name}"}) as scoring:
        problems = [problem("1", prompt=str(i)) for i in range(3)]
        assert hygiene.check_gold(scoring, problems) == (problems, [])
        found = [w for w in hygiene.run_probes(scoring, problems) if "function cannot score" in w]
    assert [w.split(" problems")[0] for w in found] == [f"reward: function cannot score {failed} of 3"] * bool(failed)


def test_probes_earn_nothing_from_exact_match_and_are_told_where_they_do():
    problems = [problem(str(n), prompt=f"{n}-1+1=?") for n in range(20)]
    assert hygiene.run_probes(rewards(), problems) == []
    assert len(set(hygiene.probes(problems[0]).values())) == len(hygiene.probes(problems[0]))
    lenient = rewards(**{"reward.regex.weight": 0.5, "reward.regex.pattern": "(<think>.*</think><answer>.*</answer>)?"})
    with lenient:
        found = hygiene.run_probes(lenient, problems)
    assert [f.split(" earns")[0] for f in found] == ["reward: empty", "reward: empty tags"]
    assert found[0].endswith("earns 0.5 on 16 of 16 problems (regex)")
    copied = [problem("the", prompt="the?"), problem("3", prompt="3 and 4?")]
    found = hygiene.run_probes(rewards(), copied)
    assert {f.split(" earns")[0] for f in found} == {"reward: a word for an answer", "reward: the prompt copied as the answer"}


PART = st.floats(-1, 1).map(lambda x: round(x, 3))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(PART, PART, st.booleans()), min_size=1, max_size=20))
def test_divergence_against_numpy(rows):
    outcomes = [Outcome(2 * a, {"exact": a, "math": b}, {"math": "x"} if failed else {}) for a, b, failed in rows]
    found = hygiene.divergence(outcomes, "math")
    a, b = np.array([[a, b] for a, b, _ in rows]).T
    assert found["reward/part/exact"] == pytest.approx(a.mean()) and found["reward/failures"] == np.mean([failed for *_, failed in rows])
    assert found["reward/held_out/mean"] == found["reward/part/math"] == pytest.approx(b.mean())
    assert found["reward/held_out/gap"] == pytest.approx(2 * a.mean() - b.mean())
    varied = np.ptp(a) > 0 and np.ptp(b) > 0
    assert ("reward/held_out/correlation" in found) == varied
    assert not varied or found["reward/held_out/correlation"] == pytest.approx(np.corrcoef(2 * a, b)[0, 1])
    assert not any(key.startswith("reward/held_out") for key in hygiene.divergence(outcomes))
    assert set(found) - {"reward/part/exact", "reward/part/math"} <= set(monitor.METRICS)

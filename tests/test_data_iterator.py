"""The order of problems: fair, mixed as told, led by pass rates, and the same after any resume."""

import json
import subprocess
import sys

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_adapter import config as configs
from rl_adapter.data import iterator
from rl_adapter.data.iterator import Curriculum, make_iterator

ORDERS = st.tuples(
    st.lists(st.sampled_from([120, 133, 2]), min_size=1, max_size=3),  # sizes of sources
    st.sampled_from([None, Curriculum(), Curriculum(explore=1.0), Curriculum(0.2, 0.5, 1.0)]),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)


def build(sizes, curriculum, weighted, seed, batch_size=4):
    sources = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    weights = tuple(range(1, len(sizes) + 1)) if weighted else ()
    return make_iterator(sources, batch_size, seed, weights, curriculum)


def play(order, steps, rng):
    """What a trainer draws: batches, some more, and pass rates of all or some of them."""
    drawn = []
    for _ in range(steps):
        indices = next(order) if rng.random() < 0.7 else order.draw(rng.integers(0, 6))
        drawn.append(indices.tolist())
        if rng.random() < 0.8:
            some = indices[: rng.integers(0, len(indices) + 1)]
            order.observe(some, rng.integers(0, 9, len(some)) / 8)
    return drawn


@given(ORDERS, st.integers(0, 20), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_any_order_resumes_exactly_at_any_point(made, before, seed):
    order, rng = build(*made), np.random.default_rng(seed)
    play(order, before, rng)
    state = order.get_state()
    text, middle = json.dumps(state), rng.bit_generator.state
    expected = play(order, 6, rng)
    assert json.dumps(state) == text, "what is drawn later changes no state that was taken"
    rng.bit_generator.state = middle
    resumed = build(*made)
    resumed.set_state(json.loads(text))
    assert resumed.get_state() == state
    assert play(resumed, 6, rng) == expected and resumed.get_state() == order.get_state()


def test_a_fresh_process_resumes_the_same_order():
    make = "make_iterator([0, 1] * 150, 4, 2, (1, 3), Curriculum())"
    order = eval(make)
    for _ in range(20):
        indices = next(order)
        order.observe(indices, (indices % 9) / 8)
    script = f"""
import json
from rl_adapter.data.iterator import Curriculum, make_iterator
order = {make}
order.set_state(json.loads('{json.dumps(order.get_state())}'))
print(json.dumps([next(order).tolist() for _ in range(20)]))
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert json.loads(found) == [next(order).tolist() for _ in range(20)]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_without_curriculum_it_is_grains_order_however_it_is_cut(cuts, seed):
    order = make_iterator([0] * 150, 4, seed)
    found = np.concatenate([order.draw(n) for n in cuts])
    plain = iter(grain.MapDataset.range(150).shuffle(seed=seed).repeat(1000).to_iter_dataset())
    assert found.tolist() == [int(next(plain)) for _ in found]


def test_every_epoch_visits_every_problem_in_a_new_order():
    order = make_iterator([0] * 7, batch_size=3, seed=4)
    drawn = np.concatenate([next(order) for _ in range(14)]).reshape(6, 7)
    assert all(sorted(epoch) == list(range(7)) for epoch in drawn.tolist())
    assert len({tuple(epoch) for epoch in drawn.tolist()}) > 1


@given(st.lists(st.integers(100, 180), min_size=2, max_size=3), st.data(), st.integers(0, 2**32 - 1))
@settings(max_examples=8, deadline=None)
def test_mixtures_keep_their_shares_and_exhaust_each_source_first(sizes, data, seed):
    weights = data.draw(st.lists(st.sampled_from([0.5, 1, 2, 3.7]), min_size=len(sizes), max_size=len(sizes)))
    sources = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    drawn = make_iterator(sources, 4, seed, tuple(weights)).draw(600)
    for n, size in enumerate(sizes):
        own = drawn[sources[drawn] == n]
        share = weights[n] / sum(weights)
        assert abs(len(own) / 600 - share) < 0.01 * share + 2 / 600
        for start in range(0, len(own) - size + 1, size):
            assert len(set(own[start : start + size])) == size


@pytest.mark.parametrize("curriculum", [None, Curriculum(explore=1.0)])
@pytest.mark.parametrize("weights", [(), (1, 2)])
def test_unseen_problems_come_first(curriculum, weights):
    """An order that explores only is the order without curriculum, until all were seen."""
    sources = [0] * 20 + [1] * 40
    plain = make_iterator(sources, 4, 9, weights).draw(60)
    order = make_iterator(sources, 4, 9, weights, curriculum)
    found = []
    for _ in range(15):
        found += next(order).tolist()
        order.observe(found[-4:], [0.5] * 4)
    assert found == plain.tolist() and sorted(found) == list(range(60))


def test_shares_follow_the_formula():
    """4 problems of rates 0, 1/4, 1/2, 1: draws by floor + (1 - floor) 4 r (1 - r)."""
    rates, floor = np.array([0, 0.25, 0.5, 1]), 0.1
    order = make_iterator([0] * 4, 1, 3, (), Curriculum(explore=1.0, floor=floor))
    order.observe(order.draw(4), rates[make_iterator([0] * 4, 4, 3).draw(4)])
    counts = np.bincount(np.concatenate([next(order) for _ in range(4000)]), minlength=4)
    expected = floor + (1 - floor) * 4 * rates * (1 - rates)
    np.testing.assert_allclose(counts / 4000, expected / expected.sum(), atol=0.03)


def test_what_passes_sometimes_is_drawn_more_often_than_without():
    """Against a policy whose pass rate differs by problem: more groups with both outcomes, which are what a step learns from."""
    rng = np.random.default_rng(0)
    chance = rng.permutation(np.r_[np.zeros(70), np.ones(70), np.full(60, 0.5)])

    def mixed(curriculum):
        order, found = make_iterator([0] * 200, 8, 1, (), curriculum), []
        for _ in range(60):
            indices = next(order)
            assert len(set(indices.tolist())) == 8
            rates = rng.binomial(8, chance[indices]) / 8
            order.observe(indices, rates)
            found += ((rates > 0) & (rates < 1)).tolist()
        return np.mean(found)

    plain, led = mixed(None), mixed(Curriculum())
    assert 0.2 < plain < 0.4 and led > 1.7 * plain


def test_the_running_rate_moves_by_its_share():
    order = make_iterator([0] * 3, 1, 0, (), Curriculum(newest=0.25))
    order.observe([1, 1, 2], [0.0, 1.0, 0.5])
    assert order.get_state() == {"drawn": 0, "tried": [0], "measured": [1, 2], "rates": [0.25, 0.5]}


@given(st.integers(1, 6), st.integers(1, 20), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_a_draw_repeats_nothing_while_there_are_others(count, size, seed):
    order, rng = make_iterator([0] * count, 2, seed, (), Curriculum()), np.random.default_rng(seed)
    for _ in range(6):
        drawn = order.draw(size)
        assert len(set(drawn.tolist())) == min(size, count)
        order.observe(drawn, rng.random(size))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: make_iterator([], 1, 0), "sources: found no problem"),
        (lambda: make_iterator([0], 0, 0), "batch_size: found 0"),
        (lambda: make_iterator([0, 0], 1, 0, (1, 1)), r"weights: found \(1, 1\) for sources of \[2, 0\] problems"),
        (lambda: make_iterator([0, 2], 1, 0, (1,)), "weights: found"),
        (lambda: make_iterator([0], 1, 0).draw(-1), "count: found -1"),
        (lambda: make_iterator([0], 1, 0, (), Curriculum()).observe([0], [1.5]), "rates: found"),
        (lambda: make_iterator([0], 1, 0, (), Curriculum()).observe([0], [float("nan")]), "rates: found"),
        (lambda: make_iterator([0], 1, 0, (), Curriculum()).observe([1], [0.5]), "indices: found"),
        (lambda: make_iterator([0], 1, 0, (), Curriculum()).observe([0], [0.5, 0.5]), "indices: found"),
        (lambda: make_iterator([0], 1, 0).set_state({"next_index": 3}), "state: found"),
        (lambda: make_iterator([0], 1, 0).set_state({"drawn": -1}), "state: found"),
        (lambda: make_iterator([0], 1, 0, (), Curriculum()).set_state({"drawn": 3}), "state: found"),
    ],
)
def test_misuse_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_state_of_other_data_is_refused():
    order = make_iterator([0] * 9, 4, 0, (), Curriculum())
    order.observe(next(order), [0.5] * 4)
    for other in ([0] * 3, [0, 1] * 9):
        with pytest.raises(ValueError, match="state: found one of other data"):
            make_iterator(other, 4, 0, (1,) * (max(other) + 1), Curriculum()).set_state(order.get_state())


def test_the_config_chooses():
    data = configs.override(configs.default(), {"data.train": ("a", "b"), "data.weights": (1, 2)}).data
    assert isinstance(iterator.from_config(data, [0, 1], 2), iterator.Epochs)
    led = configs.override(configs.default(), {"data.curriculum": "pass_rate", "data.floor": 0.3, "data.explore": 0.7}).data
    assert iterator.from_config(led, [0, 1], 2).settings == Curriculum(0.7, 0.3, 0.5)

"""The contract of exact numerics, by the mode that lets a user check it; and that this mode would see it broken.

What all is held against is compiled as for users; the rest with QUICK, for time. No bit may differ between the two either.
"""

import contextlib
import dataclasses
import json

import jax
import numpy as np
import pytest
from quick import QUICK, quickly
from test_train import SPEC, make_config, write_base

from rl_adapter import consistency, rollout
from rl_adapter.types import Mla

P, G, C, T, L, K = 2, 2, 4, 3, 1, 2


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(autouse=True)
def quick_after_the_first(monkeypatch):
    score = consistency._score
    ways = [score, jax.jit(score.__wrapped__, static_argnames="model", compiler_options=QUICK)]
    monkeypatch.setattr(consistency, "_score", lambda *args: (ways.pop(0) if len(ways) > 1 else ways[0])(*args))
    generate, first = rollout.generate, []

    def generated(*args):
        first.append(not first)
        with contextlib.nullcontext() if first[-1] else quickly():
            return generate(*args)

    monkeypatch.setattr(rollout, "generate", generated)


def test_exact_gives_the_same_bits_however_it_is_computed(base, tmp_path, capsys):
    result = consistency.run(make_config(base), tmp_path, shapes=[(2, 1, 1), (2, 2, 2)])
    rows = result["comparisons"]
    names = [
        "decode / full forward",
        "1 / 4 prompts at a time",
        "padding",
        "order of rows",
        "mesh 1x1x1 / 2x1x1",
        "mesh 1x1x1 / 2x2x2",
    ]
    assert list(dict.fromkeys(row["comparison"] for row in rows)) == names
    for row in rows:
        assert row["logprobs_equal"] == row["choices_equal"] == row.get("completions_equal", 1) == 1, row
        assert row["max_abs_logprob_diff"] == 0, row
    assert result["all_equal"] and json.loads((tmp_path / "consistency.json").read_text()) == result
    printed = capsys.readouterr().out
    assert all(name in printed for name in names) and "the same bits everywhere" in printed


def test_float_does_not_and_is_said_to(base, tmp_path, capsys):
    result = consistency.run(make_config(base, numerics="float"), tmp_path, shapes=())
    decoded = result["comparisons"][0]
    assert decoded["logprobs_equal"] < 1 and 0 < decoded["max_abs_logprob_diff"] < 1e-3
    assert not result["all_equal"] and "not the same bits everywhere" in capsys.readouterr().out


def seen():
    rng = np.random.default_rng(0)
    integers = lambda *shape: rng.integers(0, 4, shape)
    return consistency.Seen(integers(P, G, C), rng.normal(size=(P, G, C)).astype(np.float32), integers(L, P, T, K), integers(L, P, G, C, K))


LENGTHS, PROMPTS = np.array([[4, 3], [2, 1]]), np.array([3, 2])  # 10 tokens; 6 of them are fed back, and 5 of prompts: 22 choices


@pytest.mark.parametrize(
    "field,at,shares",
    [
        ("logprobs", (0, 0, 3), (0.9, 1, 1)),
        ("logprobs", (1, 1, 1), (1, 1, 1)),  # padding
        ("choices", (0, 0, 0, 2, 1), (1, 21 / 22, 1)),
        ("choices", (0, 0, 0, 3, 1), (1, 1, 1)),  # of the last token, which is not fed back
        ("prompt_choices", (0, 1, 1, 0), (1, 21 / 22, 1)),
        ("prompt_choices", (0, 1, 2, 0), (1, 1, 1)),  # padding
        ("tokens", (0, 0, 1), (0.7, 18 / 22, 0.75)),  # takes the logprobs from there on with it, and the choices of tokens 1 and 2
    ],
)
def test_compare_counts_what_differs(field, at, shares):
    a, b = seen(), seen()
    getattr(b, field)[at] += 1
    got = consistency.compare(a, b, LENGTHS, PROMPTS, sampled=True)
    assert [got[k] for k in ("logprobs_equal", "choices_equal", "completions_equal")] == pytest.approx(shares)
    moved = field == "logprobs" and shares[0] < 1
    assert got["max_abs_logprob_diff"] == pytest.approx(1 if moved else 0), "a logprob after another text is another quantity"


def test_compare_sees_one_bit_and_takes_what_both_hold():
    a, b = seen(), seen()
    b.logprobs[0, 0, 0] = np.nextafter(b.logprobs[0, 0, 0], np.float32(0))
    assert consistency.compare(a, b, LENGTHS, PROMPTS, sampled=False)["logprobs_equal"] == 0.9
    wider = dataclasses.replace(
        a,
        tokens=np.pad(a.tokens, ((0, 0), (0, 0), (0, 2))),
        logprobs=np.pad(a.logprobs, ((0, 0), (0, 0), (0, 2))),
        prompt_choices=np.pad(a.prompt_choices, ((0, 0), (0, 0), (0, 1), (0, 0))),
    )
    assert consistency.compare(a, wider, LENGTHS, PROMPTS, sampled=False)["choices_equal"] == 1


def test_compare_of_a_model_without_experts():
    a = dataclasses.replace(seen(), prompt_choices=np.zeros((0, P, T, 0), int), choices=np.zeros((0, P, G, C, 0), int))
    assert consistency.compare(a, a, LENGTHS, PROMPTS, sampled=True)["choices_equal"] == 1


@pytest.mark.parametrize(
    "devices,changes,prompts,shapes",
    [
        (1, {}, 4, ["111"]),
        (2, {}, 4, ["111", "211", "121", "112"]),
        (2, {"kv_heads": 1}, 3, ["111"]),
        (8, {}, 8, ["111", "211", "811", "222"]),
        (8, {}, 4, ["111", "211", "222"]),
        (8, {"experts": 7}, 16, ["111", "211", "811"]),
        (8, {"kv_heads": 1, "mla": Mla(0, 8, 4, 4, 4)}, 8, ["111", "211", "811", "222"]),  # of latent attention, heads are split
    ],
)
def test_meshes_are_those_that_divide(devices, changes, prompts, shapes):
    found = consistency.mesh_shapes(devices, dataclasses.replace(SPEC, **changes), prompts)
    assert ["".join(map(str, shape)) for shape in found] == shapes

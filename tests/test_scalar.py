"""Values and scores off the frozen base: what they see, that packing cannot be seen, and files that come back."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import QUICK
from test_model import EVEN, completions

from rl_adapter import lora, scalar
from rl_adapter.hub import scalars
from rl_adapter.types import Numerics

FLOAT = Numerics("float")
SMALL = dataclasses.replace(EVEN, adapter_spec=lora.AdapterSpec((("attention", 2),), (("attention", 2.0),)))


@pytest.fixture(scope="module")
def judge():
    """A `Scalar` that gives something."""
    rng = np.random.default_rng(0)
    d = SMALL.spec.d_model
    return scalar.Scalar(SMALL.adapter, rng.normal(size=d).astype(np.float32), np.float32(0.25))


@functools.cache
def program(size):
    model, base = SMALL.model(FLOAT), SMALL.place()
    return jax.jit(lambda s, r: scalar.values(model, base, s, r, size), compiler_options=QUICK)


def read(r):
    return r.replace(prompt_choices=None, choices=None)


def test_a_new_one_gives_nothing_and_learns_everywhere(judge):
    r = read(completions(3, SMALL.spec, 4, 2, 6, 5))
    new = scalar.init(SMALL.adapter_spec, SMALL.base, SMALL.spec.d_model, jax.random.key(0))
    assert not np.asarray(program(0)(new, r)).any()
    model, base = SMALL.model(FLOAT), SMALL.place()
    total = lambda s: jnp.sum(scalar.values(model, base, s, r) ** 2)
    grads = jax.jit(jax.grad(total), compiler_options=QUICK)(judge)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads))


def test_values_know_what_came_before_them_alone(judge):
    """Neither the token itself nor later ones, nor another completion; and packing cannot be seen."""
    r = read(completions(3, SMALL.spec, 4, 2, 6, 5))
    mask = np.arange(5) < r.lengths[..., None]
    values = np.asarray(program(0)(judge, r))
    assert not values[~mask].any() and len(np.unique(values[mask])) > 8
    fed = int(r.prompt_lengths.sum() + (r.lengths - 1).sum())
    np.testing.assert_allclose(program(fed)(judge, r), values, atol=1e-5)
    c = 2
    changed = r.replace(tokens=np.where(np.arange(5) == c, (r.tokens + 1) % SMALL.spec.vocab, r.tokens))
    after = np.asarray(program(0)(judge, changed))
    np.testing.assert_allclose(after[..., : c + 1], values[..., : c + 1], atol=1e-6)
    moved = np.abs(after - values)[..., c + 1 :][mask[..., c + 1 :]]
    assert moved.max() > 1e-3


def test_a_score_has_seen_the_whole_completion(judge):
    """`closed`: the value before the token that ends it; of a completion cut at any token that of the shorter one."""
    r = read(completions(4, SMALL.spec, 4, 2, 6, 5))
    whole = scalar.closed(jax.tree.map(jnp.asarray, r), 9)
    assert whole.tokens.shape == (4, 2, 6)
    for i in np.ndindex(4, 2):
        n = r.lengths[i]
        assert whole.lengths[i] == n + 1 and whole.tokens[i][n] == 9
        np.testing.assert_array_equal(whole.tokens[i][:n], r.tokens[i][:n])
    values = jax.jit(lambda s, r: scalar.values(SMALL.model(FLOAT), SMALL.place(), s, r), compiler_options=QUICK)(judge, whole)
    scores = np.asarray(scalar.of_completions(values, whole))
    before = np.asarray(program(0)(judge, r))
    long = r.lengths > 1
    shorter = scalar.of_completions(before, r)  # has not seen the last token
    assert (np.abs(scores - shorter)[long] > 1e-4).all()
    other = whole.replace(tokens=jnp.where(whole.tokens == 9, 10, whole.tokens).at[..., -1].set(3))
    found = scalar.of_completions(jax.jit(lambda s, r: scalar.values(SMALL.model(FLOAT), SMALL.place(), s, r))(judge, other), other)
    same = ~(np.asarray(r.tokens) == 9).any(-1)
    np.testing.assert_allclose(np.asarray(found)[same], scores[same], atol=1e-5)  # what closes it is not looked at


def test_files(judge, tmp_path):
    like = jax.eval_shape(lambda: judge)
    scalars.save(tmp_path, judge, SMALL.adapter_spec, "abc")
    read_again = lambda **changes: scalars.read(
        changes.get("directory", tmp_path), like, changes.get("spec", SMALL.adapter_spec), changes.get("digest", "abc"), "reward.model.path"
    )
    for a, b in zip(jax.tree.leaves(judge), jax.tree.leaves(read_again())):
        assert np.asarray(a).tobytes() == b.tobytes()
    for changes, message in (
        ({"digest": "abd"}, "found a reward model of base 'abc', need 'abd'"),
        ({"spec": EVEN.adapter_spec}, "found a reward model of adapter"),
        ({"directory": tmp_path / "no"}, "need the directory of a run"),
    ):
        with pytest.raises(ValueError, match=f"^reward.model.path: .*{message}"):
            read_again(**changes)
    scalars.save(tmp_path, judge.replace(weight=judge.weight * np.float32(np.nan)), SMALL.adapter_spec, "abc")
    with pytest.raises(ValueError, match="not finite"):
        read_again()
    whole = (tmp_path / scalars.FILE).read_bytes()
    (tmp_path / scalars.FILE).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="need the directory of a run"):
        read_again()

"""The update: its rows, its schedule, the loss that it descends, and all that it must leave alone."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
import test_loss
from quick import QUICK, quickly
from test_model import EVEN, completions, masks

from rl_adapter import lora, loss, microbatch, quant, scoring, update
from rl_adapter.types import Numerics, Rollout

f32 = np.float32
FLOAT, A16 = Numerics("float"), Numerics("exact", 16)
CFG, TEMPERATURE = loss.Loss(clip_low=0.2, clip_high=0.3, kl=0.1), 0.7
RATE = 1.0
ALPHAS = (("router", 2.0), ("head", 1.5))
SMALL = dataclasses.replace(EVEN, adapter_spec=lora.AdapterSpec((("router", 2), ("head", 3)), ALPHAS))  # gradients through all layers
SMALLER = dataclasses.replace(EVEN, adapter_spec=lora.AdapterSpec((("router", 0), ("head", 3)), ALPHAS))
ADVANTAGE = np.random.default_rng(0).normal(size=(4, 2)).astype(f32)


def updater(world, numeric, tokens=0, cfg=CFG):
    """`update.update` by plain gradient descent, in microbatches of so many tokens: (rollout, advantage) -> state, metrics; its base."""
    model, base, tx = world.model(numeric), world.place(), optax.sgd(RATE)

    def run(r, advantage=ADVANTAGE):
        state = jax.device_put(update.State(world.adapter, tx.init(world.adapter), np.int32(41)))
        with quickly():
            r = jax.device_put(r)
            reference = scoring.score_all(model, base, None, r, tokens=tokens)
            weight = loss.token_weights(np.asarray(r.drawn), "token", 0)
            batch = update.Batch(r, weight, np.broadcast_to(advantage[..., None], weight.shape), reference.scored)
            experts = update.sampled_experts(model.spec.experts, r)
            state, metrics = jax.device_get(update.update(model, tx, update.Policy(cfg, TEMPERATURE), tokens, base, state, batch, experts))
        return state, metrics | update.expert_metrics(metrics.pop("loads"), np.asarray(reference.loads))

    return run, base


@functools.cache
def scores(size):
    """SMALL's (adapter, rollout) -> `scoring.Scores` by packed rows of `size`."""
    model, base = SMALL.model(A16), SMALL.place()
    score = lambda adapter, r: scoring.score(model, base, lora.prepare(adapter, A16), r, TEMPERATURE, size)
    program = jax.jit(score, compiler_options=QUICK)
    return lambda r: jax.device_get(program(SMALL.adapter, r.replace(prompt_choices=None, choices=None)))


@pytest.fixture(scope="module")
def on_policy():
    """Completions with what the sampler of the same adapter would have recorded of them."""
    r = completions(6, SMALL.spec, 4, 2, 6, 5)
    s = scores(0)(r)
    choices = s.choices.astype(np.int16)
    experts = dict(prompt_choices=choices[:, :, :6], choices=choices[:, :, 6:].reshape(r.choices.shape))
    return r.replace(tempered_logprobs=s.tempered, scored_logprobs=s.scored, **experts)


@pytest.fixture(scope="module")
def exact():
    return updater(SMALL, A16, 2 * 14)


# One update


def test_nothing_but_the_state_changes(exact, on_policy):
    run, base = exact
    before = quant.digest(base)
    state, _ = run(on_policy)
    assert quant.digest(base) == before
    assert state.step == 42 and state.step.dtype == np.int32
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), state.adapter, SMALL.adapter)
    assert min(jax.tree.leaves(moved)) > 0
    for a, b in zip(jax.tree.leaves(run(on_policy)), jax.tree.leaves(run(on_policy))):
        np.testing.assert_array_equal(a, b)  # nor do two runs differ


def test_the_gradient_sees_the_samplers_bits(exact, on_policy):
    """Inside `value_and_grad`, with rematerialization and in microbatches, the forward pass is the one that scored the completions."""
    _, metrics = exact[0](on_policy)
    assert metrics["update/microbatches"] > 1
    for name in ("mismatch/max_abs_logprob_diff", "mismatch/mean_abs_logprob_diff", "mismatch/expert_flips", "ratio/clipped"):
        assert metrics[name] == 0, name
    assert metrics["ratio/max"] == 1 and metrics["ratio/mean"] == 1
    mask, valid = masks(on_policy)
    off = on_policy.scored_logprobs.copy()
    off[tuple(np.argwhere(mask)[3])] += 0.25
    off[~mask] = np.nan  # what padding holds is nobody's business
    choices = on_policy.prompt_choices.copy()
    choices[1, 0, 0, 0] += 1
    _, metrics = exact[0](on_policy.replace(scored_logprobs=off, prompt_choices=choices))
    assert metrics["mismatch/max_abs_logprob_diff"] == pytest.approx(0.25, rel=1e-5) and metrics["mismatch/expert_flips"] == 1
    assert metrics["mismatch/mean_abs_logprob_diff"] == pytest.approx(0.25 / mask.sum(), rel=1e-5)


def test_it_descends_the_loss(exact, on_policy):
    """The step, of completions that are off policy, is that down the gradient of the mean loss: central differences of the float64
    reference and loss, along random directions. A16, so within 1e-2; the metrics too."""
    rng = np.random.default_rng(2)
    mask, valid = masks(on_policy)
    old = on_policy.tempered_logprobs + rng.normal(size=mask.shape).astype(f32) / 4
    r = on_policy.replace(tempered_logprobs=np.where(mask, old, np.inf))
    state, metrics = exact[0](r)
    grads = jax.tree.map(lambda new, old: (old - new) / RATE, state.adapter, SMALL.adapter)
    reference, _, base_choices = SMALL.reference(r)

    def objective(adapter):
        scored, entropy, choices = SMALL.reference(r, adapter)
        tempered, _, _ = SMALL.reference(r, adapter, TEMPERATURE)
        a, each = np.broadcast_to(ADVANTAGE[..., None], mask.shape), mask / mask.sum()
        total, ratio, clipped = test_loss.naive_surrogate(CFG, mask, each, tempered, old, a)
        d = np.where(mask, scored - reference, 0)
        kl = np.sum(each * (np.exp(-d) - 1 + d))
        sums = {"ratio/mean": ratio, "ratio/clipped": clipped, "kl/ref": kl, "loss": total + CFG.kl * kl}
        return sums | {"entropy": entropy.sum() / mask.sum()}, choices

    expected, choices = objective(SMALL.adapter)
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-2, abs=1e-3), name
    assert expected["ratio/clipped"] > 0.1 and expected["kl/ref"] > 0.01
    norm = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(grads)))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    for _ in range(3):
        direction = jax.tree.map(lambda g: rng.normal(size=g.shape) * np.abs(g).max(), grads)
        ends = [objective(jax.tree.map(lambda w, d, h=h: w + h * d, SMALL.adapter, direction))[0]["loss"] for h in (-1e-4, 1e-4)]
        slope = sum(np.sum(g * d) for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(direction)))
        size = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(direction)))
        assert slope / size / norm == pytest.approx((ends[1] - ends[0]) / 2e-4 / size / norm, abs=1e-2)

    # Loads of the experts, by the definitions of the metrics; none of this seed is chosen by a hair.
    loads, base_loads = (np.zeros((SMALL.spec.layers, SMALL.spec.experts)) for _ in range(2))
    for counts, chosen in ((loads, choices), (base_loads, base_choices)):
        for (p, g), experts in chosen.items():
            t = r.prompt_lengths[p]
            for layer, row in enumerate(experts[:, 0 if g == 0 else t :]):  # a prompt is computed once for its group
                np.add.at(counts[layer], row.reshape(-1), 1)
    share, base_share = (x / x.sum(1, keepdims=True) for x in (loads, base_loads))
    assert metrics["moe/load_max_over_mean"] == pytest.approx(share.max(1).mean() * SMALL.spec.experts, rel=1e-5)
    assert metrics["moe/load_shift_from_base"] == pytest.approx(np.abs(share - base_share).sum(1).mean() / 2, rel=1e-5)


def test_it_descends_the_losses_on_entropy_and_routers(on_policy):
    """The entropy bonus, the load-balancing loss and the z-loss, alone: the float64 reference's, and its central differences."""
    cfg = loss.Loss(entropy=0.3, balance=0.5, router_z=0.2)
    run, _ = updater(SMALL, FLOAT, cfg=cfg)
    state, metrics = run(on_policy, np.zeros_like(ADVANTAGE))
    grads = jax.tree.map(lambda new, old: (old - new) / RATE, state.adapter, SMALL.adapter)
    mask, valid = masks(on_policy)
    r, experts = on_policy, SMALL.spec.experts
    sampled = np.concatenate([r.prompt_choices, r.choices.reshape(*r.choices.shape[:2], -1, r.choices.shape[-1])], 2)
    loads = np.stack([np.bincount(layer[valid].reshape(-1), minlength=experts) for layer in sampled])

    def objective(adapter):
        routers = {}
        _, entropy, _ = SMALL.reference(r, adapter, routers=routers)
        # A prompt is computed once for its group.
        z = np.concatenate([rows[:, 0 if g == 0 else r.prompt_lengths[p] :] for (p, g), rows in routers.items()], 1)
        p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
        balance = np.mean([experts * np.sum(f / f.sum() * q.mean(0)) for f, q in zip(loads, p)])
        return -0.3 * entropy.sum() / mask.sum() + 0.5 * balance + 0.2 * np.mean(np.log(np.exp(z).sum(-1)) ** 2)

    assert metrics["loss"] == pytest.approx(objective(SMALL.adapter), rel=1e-3)
    rng = np.random.default_rng(3)
    norm = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(grads)))
    for _ in range(2):
        direction = jax.tree.map(lambda g: rng.normal(size=g.shape) * np.abs(g).max(), grads)
        ends = [objective(jax.tree.map(lambda w, d, h=h: w + h * d, SMALL.adapter, direction)) for h in (-1e-4, 1e-4)]
        slope = sum(np.sum(g * d) for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(direction)))
        size = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(direction)))
        assert slope / size / norm == pytest.approx((ends[1] - ends[0]) / 2e-4 / size / norm, abs=1e-2)


def test_equal_rewards_still_move_by_the_penalty(exact, on_policy):
    """A group of equal rewards has no advantage, and the KL's gradient all the same."""
    state, metrics = exact[0](on_policy, np.zeros_like(ADVANTAGE))
    assert metrics["loss"] == pytest.approx(CFG.kl * metrics["kl/ref"], rel=1e-5) and metrics["grad_norm"] > 0


def test_microbatches_cannot_be_seen(on_policy):
    """One or more of them, of prompts whose completions differ in length: the same update to 1e-6, the same metrics."""
    mask, _ = masks(on_policy)
    assert len(set(mask.sum((1, 2)).tolist())) > 2
    (state, metrics), *others = (updater(SMALLER, FLOAT, tokens)[0](on_policy) for tokens in (4 * 14, 2 * 14, 1))
    assert [metrics["update/microbatches"]] + [m["update/microbatches"] for _, m in others] == [1, 2, 3]
    for other, other_metrics in others:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), other.adapter, state.adapter)
        for name, value in metrics.items():
            if not name.startswith("update/"):
                np.testing.assert_allclose(other_metrics[name], value, rtol=2e-5, atol=1e-6, err_msg=name)
    step = jax.tree.map(lambda a, b: np.abs(a - b).max(), state.adapter, SMALLER.adapter)
    assert min(jax.tree.leaves(step)) > 1e-2


def test_what_an_environment_added_is_no_sample(exact, on_policy):
    """It is fed, but has no loss and is in no mean: what stands there for its logprobs is nobody's business."""
    (row, sample), c = np.argwhere(on_policy.lengths > 3)[0], 1
    drawn = on_policy.drawn.copy()
    drawn[row, sample, c] = False
    off = on_policy.tempered_logprobs.copy()
    off[row, sample, c] = np.nan
    state, metrics = exact[0](on_policy.replace(drawn=drawn, tempered_logprobs=off, scored_logprobs=off))
    assert metrics["mismatch/max_abs_logprob_diff"] > 0  # tempered ones are no scored ones
    state, metrics = exact[0](on_policy.replace(drawn=drawn, tempered_logprobs=off))
    assert metrics["mismatch/max_abs_logprob_diff"] == 0 and metrics["ratio/mean"] == 1 and np.isfinite(metrics["loss"])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.adapter))
    a = np.broadcast_to(ADVANTAGE[..., None], drawn.shape)[drawn]
    assert metrics["loss"] == pytest.approx(-a.mean() + CFG.kl * metrics["kl/ref"], rel=1e-4)


# Its parts


def test_packed_scores_are_those_with_room_for_all_padding(on_policy):
    """To the bit: where not one slot is left over, where there are a few, and beside prompts that hold nothing."""
    mask, valid = masks(on_policy)
    empty = on_policy.replace(
        prompt_lengths=on_policy.prompt_lengths * np.array([1, 0, 1, 1], np.int32), lengths=on_policy.lengths * (np.arange(4) != 1)[:, None]
    )
    for r in (on_policy, empty):
        fed, expected = masks(r)[1], scores(0)(r)
        for room in (0, 3):
            found = scores(int(valid.sum()) + room)(r)
            for name in ("tempered", "scored", "entropy"):
                np.testing.assert_array_equal(getattr(found, name), np.where(masks(r)[0], getattr(expected, name), 0))
            np.testing.assert_array_equal(found.choices[:, fed], expected.choices[:, fed])
    np.testing.assert_array_equal(expected.scored[mask & (np.arange(4) != 1)[:, None, None]], found.scored[masks(empty)[0]])
    assert len(np.unique(expected.scored)) > 10


@pytest.mark.parametrize("seed", range(40))
def test_plan(monkeypatch, seed):
    """Every prompt once, on its own shard; no microbatch above its size; first fit, so that no two could be one; and sizes that come from
    shapes alone."""
    rng = np.random.default_rng(seed)
    shards, here, t, g, c = rng.integers(1, 5), rng.integers(1, 9), *rng.integers(1, 20, 3)
    p, tokens = shards * here, int(rng.choice([0, 1, rng.integers(1, 2000)]))
    monkeypatch.setattr(microbatch, "TOKENS", int(rng.integers(1, 2000)))
    like = Rollout(np.zeros((p, t), int), None, np.zeros((p, g, c), int), *(None,) * 8)
    random = lambda: like.replace(prompt_lengths=rng.integers(1, t + 1, p), lengths=rng.integers(1, c + 1, (p, g)))
    r = random()
    found = microbatch.plan(r, shards, tokens)
    count = found.count
    rows, used = found.rows.reshape(p, shards, -1)[:count], r.prompt_lengths + (r.lengths - 1).sum(1)
    assert sorted(found.rows[found.rows >= 0]) == list(range(p)) and count <= p and found.rows.dtype == np.int32
    for shard in range(shards):
        bins = [batch[batch >= 0] for batch in rows[:, shard]]
        assert all(set(batch) <= set(range(shard * here, (shard + 1) * here)) for batch in bins)
        sums = [used[batch].sum() for batch in bins]
        assert max(sums) <= found.size
        for i, batch in enumerate(bins):
            for later in range(i + 1, len(bins)):
                if len(bins[later]):
                    assert len(batch) == rows.shape[2] or sums[i] + used[bins[later]].min() > found.size
    longest = t + g * (c - 1)
    assert longest <= found.size <= max(longest, -(-tokens // shards) or max(microbatch.TOKENS, 2 * longest))
    assert found.padding == pytest.approx(1 - used.sum() / (count * shards * found.size))
    other = microbatch.plan(random(), shards, tokens)
    assert (other.size, other.rows.shape[1]) == (found.size, found.rows.shape[1])
    assert (found.size, rows.shape[2]) == microbatch.size(here, t, g, c, -(-tokens // shards))


def test_a_plan_of_full_rows(monkeypatch):
    """Where all are as long as can be, they go in one microbatch, in equal parts, or each alone, without a slot left over."""
    r = Rollout(np.zeros((8, 6), int), np.full(8, 6), np.zeros((8, 2, 5), int), None, np.full((8, 2), 5), *(None,) * 6)
    for shards, tokens, count in ((1, 8 * 14, 1), (1, 10**9, 1), (1, 0, 1), (1, 1, 8), (2, 0, 1), (4, 1, 2), (2, 4 * 14, 2), (8, 0, 1)):
        found = microbatch.plan(r, shards, tokens)
        assert (found.count, found.padding) == (count, 0), (shards, tokens)
    for at_most, shards, count in ((1, 1, 4), (2 * 14, 2, 2), (7 * 14, 1, 2), (5 * 14, 2, 1)):
        monkeypatch.setattr(microbatch, "TOKENS", at_most)
        found = microbatch.plan(r, shards)
        assert (found.count, found.padding) == (count, 0), (at_most, shards)


OPTIMIZER = dict(
    learning_rate=0.5, warmup_steps=3, schedule="linear", b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.0, max_grad_norm=1.0, updates=7
)


@pytest.mark.parametrize(
    "schedule, warm, rates",
    [
        ("constant", 0, [8, 8, 8, 8, 8, 8, 8]),
        ("constant", 3, [2, 4, 6, 8, 8, 8, 8]),
        ("linear", 3, [2, 4, 6, 8, 6, 4, 2]),
        ("linear", 0, [8, 48 / 7, 40 / 7, 32 / 7, 24 / 7, 16 / 7, 8 / 7]),
        ("cosine", 3, [2, 4, 6, 8, 4 + 8**0.5, 4, 4 - 8**0.5]),
        ("linear", 9, [0.8, 1.6, 2.4, 3.2, 4.0, 4.8, 5.6]),  # over before it is warm
    ],
)
def test_schedule(schedule, warm, rates):
    found = update.Optimizer(**OPTIMIZER | dict(learning_rate=8.0, warmup_steps=warm, schedule=schedule)).rate()
    np.testing.assert_allclose([found(i) for i in range(7)], rates, rtol=1e-5)


def test_adamw():
    """The first update by hand: clipped to the norm, g / (|g| + eps) of it, decoupled decay, the first warm-up rate."""
    tx = update.Optimizer(**OPTIMIZER | dict(eps=0.5, weight_decay=0.1, max_grad_norm=2.0))
    w, g = {"q": np.array([1.0, -2.0, 0.5], f32)}, {"q": np.array([3.0, -4.0, 0.0], f32)}
    step, _ = jax.jit(lambda g, w: tx.update(g, tx.init(w), w))(g, w)
    clipped = g["q"] * 2 / 5
    np.testing.assert_allclose(step["q"], -0.5 / 4 * (clipped / (np.abs(clipped) + 0.5) + 0.1 * w["q"]), rtol=1e-5, atol=1e-7)


def test_packed_inputs():
    """A prompt, then its completions at the positions that follow it; the last token of each predicts nothing and is not fed."""
    logprobs = np.zeros((2, 2, 3), f32)
    r = Rollout(
        np.array([[5, 6, 0], [7, 8, 9]]), np.array([2, 3]), np.arange(12).reshape(2, 2, 3) + 20, np.ones((2, 2, 3), bool),
        np.array([[3, 1], [2, 3]]), np.ones((2, 2), bool), logprobs, logprobs, logprobs, None, None,
    )  # fmt: skip
    tokens, positions, fed = scoring.packed_inputs(r)
    assert tokens.tolist() == [[5, 6, 0, 20, 21, 22, 23, 24, 25], [7, 8, 9, 26, 27, 28, 29, 30, 31]]
    assert positions.tolist() == [[0, 1, 2, 2, 3, 4, 2, 3, 4], [0, 1, 2, 3, 4, 5, 3, 4, 5]]
    assert fed.astype(int).tolist() == [[1, 1, 0, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 1, 1, 0]]


def test_expert_loads():
    choices = np.array([[[[0, 2], [2, 1]]], [[[1, 0], [0, 1]]]], np.int16)  # [L, P, M, k]
    assert scoring.expert_loads(choices, np.array([[True, True]]), 3).tolist() == [[1, 1, 2], [2, 2, 0]]
    assert scoring.expert_loads(choices, np.array([[True, False]]), 3).tolist() == [[1, 0, 1], [1, 1, 0]]


def test_take(on_policy):
    for rows, same in ((slice(1, 3), slice(1, 3)), (np.array([3, 0]), [3, 0])):
        part = microbatch.take(on_policy, rows)
        assert part.tokens.shape == (2, 2, 5) and part.choices.shape == (2, 2, 2, 5, 2) and part.prompt_choices.shape == (2, 2, 6, 2)
        np.testing.assert_array_equal(part.scored_logprobs, on_policy.scored_logprobs[same])
        np.testing.assert_array_equal(part.drawn, on_policy.drawn[same])
        np.testing.assert_array_equal(part.choices, on_policy.choices[:, same])
        np.testing.assert_array_equal(part.prompt_choices, on_policy.prompt_choices[:, same])

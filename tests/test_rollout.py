"""The sampler: the bits of scoring, completions that depend on nothing but their key, honest probabilities, stops."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from quick import QUICK, quickly
from test_model import EVEN, ODD, World

from rl_adapter import evaluate, lora, rollout, scoring
from rl_adapter import mesh as meshes
from rl_adapter import sampling as sampling_
from rl_adapter.engine import Engine
from rl_adapter.sampling import MASKED, Sampling, row_keys, sample, truncate, uniform
from rl_adapter.types import Numerics

f32 = np.float32
FLOAT, A16, A8 = Numerics("float"), Numerics("exact", 16), Numerics("exact", 8)
P, G, T, C = 8, 2, 6, 7
STOPS, PAD = (3, 5, 11, 21, 30, 40), 47
SAMPLING = Sampling(G, C, STOPS, PAD, temperature=0.7, top_k=20, top_p=0.9)
RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(1, T + 1, P).astype(np.int32)
PROMPTS = np.where(np.arange(T) < LENGTHS[:, None], RNG.integers(0, 40, (P, T)), PAD).astype(np.int32)
IDS = RNG.integers(0, 2**31, P).astype(np.int32)


def sampler(world, numeric, sampling=SAMPLING, mesh=None, quick=True):
    """(prompts, lengths, ids, seed, adapter, options of `rollout.generate`) -> Rollout on the host."""
    model, base = world.model(numeric, mesh), world.place(mesh)

    def run(prompts=PROMPTS, lengths=LENGTHS, ids=IDS, seed=5, adapter=None, **options):
        if adapter is not None:
            adapter = evaluate.prepare(model, jax.device_put(adapter, meshes.adapter_shardings(model.mesh, adapter)))
        with quickly() if quick else contextlib.nullcontext():
            return jax.device_get(rollout.generate(model, sampling, base, adapter, prompts, lengths, ids, seed, **options))

    return run


def scores(world, numeric, r, adapter=None, temperature=1.0):
    """`scoring.score` of a rollout: tempered and scored logprobs, and experts, laid out as in it."""
    model, base = world.model(numeric), world.place()

    def program(base, adapter, r):
        s = scoring.score(model, base, None if adapter is None else lora.prepare(adapter, numeric), r, temperature)
        t = r.prompts.shape[1]
        return s.tempered, s.scored, s.choices[:, :, :t], s.choices[:, :, t:].reshape(r.choices.shape)

    return jax.device_get(jax.jit(program, compiler_options=QUICK)(base, adapter, r))


def sampled(r):
    """Which tokens were sampled, [P, G, C]; which were fed back; and which prompt tokens are real, [P, T]."""
    at = np.arange(r.tokens.shape[2])
    return at < r.lengths[..., None], at < r.lengths[..., None] - 1, np.arange(r.prompts.shape[1]) < r.prompt_lengths[:, None]


def same_bits(a, b, rows=slice(None), c=C):
    """Completions, logprobs and experts of `a` are those of `b`'s rows, as far as they are sampled."""
    np.testing.assert_array_equal(a.tokens[..., :c], b.tokens[rows])
    done = a.lengths <= c
    np.testing.assert_array_equal(np.minimum(a.lengths, c), b.lengths[rows])
    np.testing.assert_array_equal(a.stopped & done, b.stopped[rows])
    for name in ("sampled_logprobs", "tempered_logprobs", "scored_logprobs"):
        np.testing.assert_array_equal(getattr(a, name)[..., :c], getattr(b, name)[rows])
    _, fed, real = sampled(b)
    np.testing.assert_array_equal(a.choices[:, :, :, :c][:, fed[rows]], b.choices[:, rows][:, fed[rows]])
    np.testing.assert_array_equal(a.prompt_choices[:, :, :T][:, real[rows]], b.prompt_choices[:, rows][:, real[rows]])


@pytest.fixture(scope="module")
def generate():
    """The exact sampler with an adapter, as users get it."""
    return sampler(EVEN, A16, quick=False)


@pytest.fixture(scope="module")
def adapted(generate):
    return generate(adapter=EVEN.adapter)


@pytest.fixture(scope="module")
def new(generate):
    """With an adapter that is new, and so the base."""
    return generate(adapter=EVEN.new_adapter)


# Bits


def check_scores(r, tempered, scored, prompt_choices, choices):
    mask, fed, real = sampled(r)
    np.testing.assert_array_equal(scored[mask], r.scored_logprobs[mask])
    np.testing.assert_array_equal(tempered[mask], r.tempered_logprobs[mask])
    np.testing.assert_array_equal(prompt_choices[:, real], r.prompt_choices[:, real])
    np.testing.assert_array_equal(choices[:, fed], r.choices[:, fed])
    assert fed.any() and mask.sum() > mask.size / 3 and len(np.unique(r.scored_logprobs[mask])) > mask.sum() / 2


def test_sampled_and_trained_bits_are_the_same(adapted):
    """Cached decoding, one token at a time, against the packed forward pass of training."""
    check_scores(adapted, *scores(EVEN, A16, adapted, EVEN.adapter, SAMPLING.temperature))


@pytest.mark.parametrize("seed", range(2))
def test_of_any_shape(seed):
    """The same for random models, adapters, samplers, batches and engines, with 8 bits and with 16."""
    rng = np.random.default_rng(seed)
    pick = lambda *choices: choices[rng.integers(len(choices))]
    kv, numeric, group = pick(1, 2, 3), (A8, A16)[seed], pick("attention", "experts", "router", "head")  # no layer is dense
    spec = dict(layers=pick(1, 2, 3), d_model=pick(32, 40, 72), kv_heads=kv, heads=kv * pick(1, 2, 3), head_dim=pick(8, 16, 24))
    spec |= dict(experts=pick(3, 5, 9), experts_per_token=pick(1, 2, 3), d_expert=pick(18, 32, 50), vocab=pick(31, 100, 257))
    ranks = tuple((g, 2 * (g == group)) for g in lora.GROUPS)
    adapter_spec = lora.AdapterSpec(ranks, tuple((g, 3.0) for g in lora.GROUPS), pick(True, False), pick(True, False))
    world = World(seed, pick("int4", "int8"), adapter_spec, tuple((spec | {"norm_topk_prob": pick(True, False)}).items()))
    p, g, t, c = pick(1, 3, 5), pick(2, 3), pick(2, 7, 13), pick(5, 9)
    sampling = Sampling(g, c, (1, 2, 3), 0, pick(0.7, 1.0, 1.3), pick(0, 5), pick(0.8, 1.0))
    inputs = rng.integers(0, 31, (p, t)).astype(np.int32), rng.integers(1, t + 1, p).astype(np.int32), np.arange(p, dtype=np.int32)
    engine = Engine(pick(0, 1, 2, 4), pick(0, 1, 2), pick(1, 4, 16), pick(1, 2, 3, 5), pick(1, 4, 8), pick(1, 2))
    r = sampler(world, numeric, sampling)(*inputs, seed, world.adapter, engine=engine)
    check_scores(r, *scores(world, numeric, r, world.adapter, sampling.temperature))


def test_completions_know_no_row(generate, adapted):
    order = np.random.default_rng(1).permutation(P)
    same_bits(generate(PROMPTS[order], LENGTHS[order], IDS[order], adapter=EVEN.adapter), adapted, order)


def test_completions_know_no_company_and_no_padding(new):
    """A prompt alone, padded further, with room for longer completions, and without the adapter that changes nothing."""
    longer = dataclasses.replace(SAMPLING, max_new_tokens=C + 4)
    alone = sampler(EVEN, A16, longer)
    padded = np.pad(PROMPTS, ((0, 0), (0, 5)), constant_values=PAD)
    for row in (0, 3):
        one = slice(row, row + 1)
        same_bits(alone(padded[one], LENGTHS[one], IDS[one]), new, one)


def test_completions_know_no_mesh(new):
    same_bits(sampler(EVEN, A16, mesh=meshes.make(2, 2, 2))(), new)


def test_randomness_is_keyed(generate, adapted):
    """By seed, prompt id and sample, and by nothing else: equal keys, equal tokens, wherever they stand."""
    run = lambda *args: generate(*args, adapter=EVEN.adapter).tokens
    other = run(PROMPTS, LENGTHS, IDS, 6)
    assert (other != adapted.tokens).any((1, 2)).all()  # another seed
    twice = np.array([0, 0, 1, 1, 2, 2, 0, 0])
    ids = IDS[twice]
    ids[6:] = 1, 2
    tokens = run(PROMPTS[twice], LENGTHS[twice], ids, 5)
    for a, b in ((0, 1), (2, 3), (4, 5)):
        np.testing.assert_array_equal(tokens[a], tokens[b])
        np.testing.assert_array_equal(tokens[a], adapted.tokens[twice[a]])
    assert (tokens[6] != tokens[0]).any() and (tokens[7] != tokens[6]).any()  # another id
    assert (adapted.tokens[:, 0] != adapted.tokens[:, 1]).any(1).all()  # another sample


# What is sampled


def test_stops(adapted, new):
    lengths = []
    for r in (adapted, new):
        mask, fed, _ = sampled(r)
        assert not np.isin(r.tokens[fed], STOPS).any()
        last = np.take_along_axis(r.tokens, r.lengths[..., None] - 1, 2)[..., 0]
        np.testing.assert_array_equal(np.isin(last, STOPS), r.stopped)
        assert (r.lengths[~r.stopped] == C).all() and (r.lengths >= 1).all()
        assert (r.tokens[~mask] == PAD).all() and (r.drawn == mask).all()
        for logprobs in (r.sampled_logprobs, r.tempered_logprobs, r.scored_logprobs):
            assert (logprobs[~mask] == 0).all() and (logprobs[mask] < 0).any() and (logprobs[mask] <= 0).all()
        assert (r.sampled_logprobs[mask] >= r.tempered_logprobs[mask]).all()  # truncation leaves less to share
        assert rollout.completions(r) == [row[:n].tolist() for row, n in zip(r.tokens.reshape(-1, C), r.lengths.reshape(-1))]
        lengths += r.lengths[r.stopped].tolist()
        assert not r.stopped.all() and len(set(last[r.stopped])) > 1
    assert len(set(lengths)) > 3  # so all of this was seen


def test_greedy_is_the_argmax_of_the_reference():
    """Token by token. The probability of what is certain is 1; scores are the policy's own."""
    sampling = Sampling(1, 5, (), 0, temperature=0.0)
    rows = slice(0, 3)
    r = sampler(ODD, FLOAT, sampling)(PROMPTS[rows], LENGTHS[rows], IDS[rows])
    for p, c in np.ndindex(3, 5):
        row = np.concatenate([r.prompts[p, : r.prompt_lengths[p]], r.tokens[p, 0, :c]])
        logprobs = reference.forward(ODD.spec, ODD.dense, row)[0][-1]
        assert r.tokens[p, 0, c] == np.argmax(logprobs)
        assert r.scored_logprobs[p, 0, c] == pytest.approx(logprobs.max(), abs=1e-4)
    assert (r.sampled_logprobs == 0).all() and (r.tempered_logprobs == r.scored_logprobs).all()
    assert (r.lengths == 5).all() and not r.stopped.any()


@pytest.mark.parametrize("temperature, top_k, top_p", ((1.0, 0, 1.0), (0.7, 3, 1.0), (1.0, 0, 0.6), (0.7, 5, 0.8)))
def test_samples_follow_the_sampled_probabilities(temperature, top_k, top_p):
    """Over a vocabulary of 7: the sampled logprobs are those of the distribution that temperature, top-k and top-p define (found by
    hand here), they sum to 1, and tokens are drawn as often as they say."""
    z = np.array([0.5, 2.0, -1.0, 1.1, 0.2, 1.9, -3.0], f32)
    p = np.exp(z.astype(np.float64) / temperature)
    ranked = np.argsort(-p)
    kept = ranked[: top_k or 7]
    held = np.cumsum(p[kept] / p[kept].sum())
    kept = kept[: np.searchsorted(held, top_p) + 1] if top_p < 1 else kept
    expected = np.zeros(7)
    expected[kept] = p[kept] / p[kept].sum()

    n, s = 20_000, Sampling(1, 1, (), 0, temperature, top_k, top_p)
    draw = jax.jit(lambda z, key: sample(z[None], jax.random.split(key, n)[None], s, True))
    token, drawn, tempered, scored = (x[0] for x in jax.device_get(draw(z, jax.random.key(0))))
    found = {int(t): float(np.exp(drawn[token == t][0])) for t in np.unique(token)}
    assert sorted(found) == sorted(kept) and sum(found.values()) == pytest.approx(1, abs=1e-6)
    for t, probability in found.items():
        assert probability == pytest.approx(expected[t], rel=1e-5)
        sigma = np.sqrt(probability * (1 - probability) / n)
        assert abs(np.mean(token == t) - probability) <= 4 * sigma + 1e-9
    np.testing.assert_allclose(tempered, np.log(p / p.sum())[token], rtol=1e-5)
    np.testing.assert_allclose(scored, np.log(np.exp(z) / np.exp(z).sum())[token], rtol=1e-5)


def test_truncate_keeps_ties():
    z = np.array([[1, 3, 2, 2, 0], [5, 5, 5, 5, 5], [0, 0, 9, 0, 0]], f32)
    kept = lambda **how: (np.asarray(truncate(jnp.asarray(z), **how)) > MASKED).astype(int).tolist()
    assert kept(top_k=2, top_p=1.0) == [[0, 1, 1, 1, 0], [1] * 5, [1] * 5]
    assert kept(top_k=9, top_p=1.0) == [[1] * 5] * 3
    assert kept(top_k=0, top_p=0.7) == [[0, 1, 1, 1, 0], [1] * 5, [0, 0, 1, 0, 0]]
    assert kept(top_k=0, top_p=1e-6) == [[0, 1, 0, 0, 0], [1] * 5, [0, 0, 1, 0, 0]]


LOGITS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, -3e38, 3e38, -1e30, float("-inf")]) | st.floats(-20, 20, width=32)
LOGITS = LOGITS.filter(lambda x: x == 0 or abs(x) > 1e-30)  # XLA takes what is nearer to 0 for 0


truncated = jax.jit(truncate, static_argnums=(1, 2), compiler_options=QUICK)


@settings(max_examples=100, deadline=None)
@given(hnp.arrays(f32, (3, 6), elements=LOGITS), st.sampled_from([(0, 0.999), (0, 0.5), (0, 1e-9), (1, 1.0), (4, 1.0), (6, 0.9), (3, 0.5)]))
def test_truncate_against_a_sort(z, how):
    """Of whatever floats, both zeros being one: the largest k, then the fewest that hold p."""
    top_k, top_p = how
    found = np.asarray(truncated(z, top_k, top_p))
    for row, kept in zip(z, found):
        if row.max() == -np.inf:  # no distribution
            continue
        there = row >= np.sort(row)[::-1][top_k - 1] if 0 < top_k < 6 else np.full(6, True)
        e = np.exp(np.where(there, row, MASKED).astype(np.float64) - row.max())
        p = np.round((e / e.sum()).astype(f32) * 2.0**24)
        above = np.array([p[there & (row > x)].sum() for x in row])
        sure = np.abs(above - top_p * 2**24) > 4  # of rounding
        expected = there & (above < max(1, round(top_p * 2**24))) if top_p < 1 else there
        np.testing.assert_array_equal((kept == row)[sure], (expected | (row == MASKED))[sure])
        assert (kept[kept != row] == f32(MASKED)).all()


@pytest.mark.parametrize(
    "group, shards, temperature, top_p, at_once", ((1, 1, 0.7, 0.9, 1), (1, 2, 1.0, 1.0, 64), (3, 4, 0.7, 0.9, 200), (2, 1, 0.0, 1.0, 450))
)
def test_rows_are_drawn_some_at_a_time(group, shards, temperature, top_p, at_once, monkeypatch):
    """To the same bits, also where the last part is a smaller one; a row that is no numbers stays its own."""
    z, keys = jax.random.normal(jax.random.key(1), (20, 32)), jax.random.split(jax.random.key(2), (20, group))
    z, s = z.at[3].set(jnp.nan).at[19].set(-jnp.inf), Sampling(1, 1, (), 0, temperature, 0, top_p)
    program = lambda z, keys: sample(z, keys, s, True, shards)
    draw = lambda: jax.device_get(jax.jit(lambda *x: program(*x), compiler_options=QUICK)(z, keys))
    whole = draw()
    monkeypatch.setattr(sampling_, "AT_ONCE", at_once)
    for one, other in zip(whole, draw()):
        np.testing.assert_array_equal(one, other)
    assert whole[0].shape == (20, group) and (np.isnan(whole[3]).all(1) == [i in (3, 19) for i in range(20)]).all()


def test_uniform_and_keys():
    """Multiples of 2^-24 strictly inside (0, 1), evenly spread; a key for each prompt, sample and position."""
    prompts, samples, positions = np.array([[7, 0, 5], [7, 1, 5], [8, 0, 5], [8, 1, 5], [7, 0, 5], [7, 0, 6]]).T
    keys = jax.jit(row_keys)(jnp.int32(3), prompts, samples, positions)
    data = np.asarray(jax.random.key_data(keys))
    assert len({tuple(k) for k in data.tolist()}) == 5 and (data[0] == data[4]).all()
    u = np.asarray(jax.jit(lambda k: uniform(k, 50_000))(keys[:3, None]), np.float64)
    assert u.shape == (3, 1, 50_000) and (u > 0).all() and (u < 1).all() and (u * 2**24 % 2 == 1).all()
    np.testing.assert_allclose([u.mean(), u.std()], [0.5, 12**-0.5], rtol=0.01)


def test_bucket():
    assert [rollout.bucket(n, 100) for n in (1, 16, 17, 32, 33, 64, 65, 100)] == [16, 16, 32, 32, 64, 64, 100, 100]


def test_temperature_is_not_negative():
    with pytest.raises(ValueError, match="rollout.temperature: found -0.5, need 0"):
        Sampling(1, 1, (), 0, temperature=-0.5)

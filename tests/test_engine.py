"""The rollout's engine: bits know no slots, pages, chunks or order; the cache is bounded; nothing compiles anew; environments answer.

The scheduler is held against a loop, a token at a time, of a model that is told nothing but what its pages hold; the programs are held
against the default engine's, which test_rollout holds against scoring.
"""

import collections
import dataclasses
import functools
import re
import threading
import zlib

import jax
import numpy as np
import pytest
from quick import QUICK, quickly
from test_model import World

from rl_adapter import cache, engine, evaluate, lora, rollout, runtime, scoring
from rl_adapter import mesh as meshes
from rl_adapter.engine import Engine
from rl_adapter.sampling import Sampling
from rl_adapter.types import Numerics, Rollout

A16, KEYS8 = Numerics("exact", 16), Numerics("exact", 16, cache_bits=8)
P, G, T, C = 8, 3, 9, 8
STOPS, PAD = (3, 5, 11, 21), 47
SAMPLING = Sampling(G, C, STOPS, PAD, temperature=0.8)
RNG = np.random.default_rng(0)
LENGTHS = np.array([9, 1, 4, 7, 2, 9, 3, 6], np.int32)
PROMPTS = np.where(np.arange(T) < LENGTHS[:, None], RNG.integers(0, 40, (P, T)), PAD).astype(np.int32)
IDS = RNG.integers(0, 2**31, P).astype(np.int32)
RANKS = (("attention", 2), ("experts", 0), ("router", 0), ("head", 0))
WORLD = World(
    seed=5, form="int4", adapter_spec=lora.AdapterSpec(RANKS, tuple((g, 2.0) for g, _ in RANKS)),
    changes=(("d_model", 32), ("heads", 4), ("head_dim", 16)),
)  # fmt: skip
FEW = Engine(slots=5, lanes=2, steps=3, page=3, chunk=4, prefill=2)  # two of a prompt's three completions share its pages
ENGINES = {
    "one slot, one token": Engine(slots=1, steps=1, page=1, chunk=2, prefill=1),
    "lanes between one and the group": FEW,
    "lanes for the group, pages longer than all": Engine(slots=7, lanes=3, steps=5),
}
MESHED = Engine(slots=8, steps=2, page=2, chunk=4, prefill=1)


@functools.cache
def place(numeric=A16, shape=(1, 1, 1)):
    """A model, its base, and its adapter as the programs take it."""
    mesh = meshes.make(*shape)
    model, base = WORLD.model(numeric, mesh), WORLD.place(mesh)
    adapter = jax.device_put(WORLD.adapter, meshes.adapter_shardings(mesh, WORLD.adapter))
    return model, base, evaluate.prepare(model, adapter)


def generate(sizes=rollout.DEFAULT, sampling=SAMPLING, rows=slice(None), numeric=A16, shape=(1, 1, 1), seed=5, **options):
    model, base, adapter = place(numeric, shape)
    with quickly():
        batch = PROMPTS[rows], LENGTHS[rows], IDS[rows]
        return jax.device_get(rollout.generate(model, sampling, base, adapter, *batch, seed, sizes, **options))


@functools.cache
def score(numeric=A16):
    model, base, adapter = place(numeric)
    program = jax.jit(lambda base, adapter, r: scoring.score(model, base, adapter, r, SAMPLING.temperature), compiler_options=QUICK)
    return lambda r: jax.device_get(program(base, adapter, r.replace(prompt_choices=None, choices=None)))


def assert_scored(r, numeric=A16):
    """Logprobs that were sampled are those of scoring, to the bit; so are experts of what was fed."""
    s, t = score(numeric)(r), r.prompts.shape[1]
    np.testing.assert_array_equal(np.where(r.drawn, s.scored, 0), r.scored_logprobs)
    np.testing.assert_array_equal(np.where(r.drawn, s.tempered, 0), r.tempered_logprobs)
    fed, real = np.arange(r.tokens.shape[2]) < r.lengths[..., None] - 1, np.arange(t) < r.prompt_lengths[:, None]
    np.testing.assert_array_equal(s.choices[:, :, t:].reshape(r.choices.shape)[:, fed], r.choices[:, fed])
    np.testing.assert_array_equal(s.choices[:, :, :t][:, real], r.prompt_choices[:, real])
    assert len(np.unique(r.scored_logprobs[r.drawn])) > r.drawn.sum() / 2


def same_bits(a, b, rows=slice(None)):
    """All of `a`, its padding too, is what `b` holds in `rows`."""
    for name in (f.name for f in dataclasses.fields(Rollout)):
        found = getattr(b, name)
        np.testing.assert_array_equal(getattr(a, name), found[:, rows] if name in ("choices", "prompt_choices") else found[rows], name)


@pytest.fixture(scope="module")
def default():
    r = generate()
    assert 0.2 < r.stopped.mean() < 0.9 and len(np.unique(r.lengths)) > 4
    return r


# Bits


@pytest.mark.parametrize("name", ENGINES)
def test_bits_know_no_engine(default, name):
    same_bits(generate(ENGINES[name]), default)


def test_bits_know_no_engine_on_a_mesh(default):
    """Of eight devices: a shard has fewer slots than completions, and no more pages than it must."""
    model, _, _ = place(A16, (2, 2, 2))
    needed = 2 * (1 + -(-T // 2) + -(-C // 2))
    lay = engine.layout(dataclasses.replace(MESHED, cache_tokens=needed), 4, P, T, SAMPLING)
    assert lay.tiles * lay.lanes == 8 < P * G and lay.pages * lay.page == needed
    same_bits(generate(dataclasses.replace(MESHED, cache_tokens=needed), shape=(2, 2, 2)), default)


def test_bits_know_no_order(default):
    order = np.random.default_rng(1).permutation(P)
    same_bits(generate(FEW, rows=order), default, order)


@pytest.mark.parametrize("sizes", (FEW, rollout.DEFAULT), ids=("few slots", "all at once"))
def test_a_limited_completion_is_the_start_of_the_unlimited_one(default, sizes):
    limits = np.random.default_rng(2).integers(1, C + 1, (P, G))
    assert ((limits < default.lengths) & (limits > 1)).any() and (limits == 1).any() and (limits > default.lengths).any()
    r = generate(sizes, limits=limits)
    kept, fed = (np.arange(C) < (limits - less)[..., None] for less in (0, 1))
    zero = lambda name: np.where(kept, getattr(default, name), 0)
    expected = default.replace(
        tokens=np.where(kept, default.tokens, PAD), drawn=default.drawn & kept, lengths=np.minimum(default.lengths, limits),
        stopped=default.stopped & (default.lengths <= limits), choices=np.where(fed[None, ..., None], default.choices, 0),
        **{name: zero(name) for name in ("sampled_logprobs", "tempered_logprobs", "scored_logprobs")},
    )  # fmt: skip
    same_bits(r, expected)


@pytest.mark.parametrize("limits", (np.full((P, G), C + 1), np.zeros((P, G), int), np.full((P, 1), 2)), ids=("long", "none", "shape"))
def test_limits_are_checked(limits):
    with pytest.raises(ValueError, match=rf"^limits: found shape .*, need shape \(8, 3\) with 1 .. {C} tokens"):
        generate(limits=limits)


def test_a_prompt_of_no_token_is_refused():
    model, base, adapter = place()
    with pytest.raises(ValueError, match="^prompts: found none, or one of no token"):
        next(rollout.stream(model, SAMPLING, base, adapter, [PROMPTS[0], PROMPTS[1][:0]], IDS[:2], 5))


# Memory, work and compilations


def test_the_cache_is_bounded(default, monkeypatch):
    """What is made for keys is `engine.cache_bytes`, to the byte, and that is all there ever is; with the least that is allowed all
    completions end, the same ones; with less nothing starts."""
    model, _, _ = place()
    made, zeros = [], cache.zeros
    monkeypatch.setattr(cache, "zeros", lambda *args: made.append(zeros(*args)) or made[-1])
    refusal = r"^rollout.cache_tokens: found 12, need at least (\d+): .* 9 tokens .* of 8, in pages of 3$"
    with pytest.raises(ValueError, match=refusal) as error:
        generate(dataclasses.replace(FEW, cache_tokens=12))
    assert not made
    least = int(re.match(refusal, str(error.value))[1])
    for tokens in (least, 0, 10**6):
        sizes = dataclasses.replace(FEW, cache_tokens=tokens)
        lay = engine.layout(sizes, 1, P, T, SAMPLING)
        foretold = engine.cache_bytes(model, lay)
        same_bits(generate(sizes), default)
        assert sum(x.nbytes for x in jax.tree.leaves(made.pop())) == foretold and not made
    assert lay == engine.layout(FEW, 1, P, T, SAMPLING), "no more than all slots need"
    assert engine.layout(dataclasses.replace(FEW, cache_tokens=least), 1, P, T, SAMPLING).pages < lay.pages / 2


def test_nothing_compiles_anew(default):
    """Other prompts, lengths, limits and seeds, and slots that are taken again: the programs are those of the first batch."""
    generate(FEW)
    made = runtime.compilations()
    rng = np.random.default_rng(3)
    for lengths in (np.full(P, 2), np.full(P, T), rng.integers(1, T, P)):
        model, base, adapter = place()
        prompts, counts = rng.integers(0, 40, (P, T)).astype(np.int32), collections.Counter()
        with quickly():
            batch = [row[:n] for row, n in zip(prompts, lengths)]
            stream = rollout.stream(model, SAMPLING, base, adapter, batch, IDS, 6, FEW, rng.integers(1, C + 1, (P, G)), None, counts, T)
            rollout.collect(model, SAMPLING, prompts, lengths, stream)
        assert counts["prefills"] > 2 and counts["dispatches"] > 3
    assert runtime.compilations() == made


def test_work_is_counted(default):
    for sizes in (rollout.DEFAULT, FEW):
        model, base, adapter = place()
        counts = collections.Counter()
        with quickly():
            texts = [row[:n] for row, n in zip(PROMPTS, LENGTHS)]
            done = list(rollout.stream(model, SAMPLING, base, adapter, texts, IDS, 5, sizes, counts=counts))
        assert len(done) == P * G and counts["prefilled"] == LENGTHS.sum() <= counts["prefill_room"]
        assert counts["decoded"] == default.lengths.sum() - P * G <= counts["slot_steps"]  # prefill draws the first token of each
        used = counts["decoded"] / counts["slot_steps"]
        assert used > 0.5
    assert [(one.prompt, one.sample) for one in done] != sorted((one.prompt, one.sample) for one in done)  # as they end


# Environments that answer

LONG = dataclasses.replace(SAMPLING, max_new_tokens=20)


def answer(prompt, sample, tokens):
    """One to six tokens, up to a length that depends on the sample."""
    if len(tokens) > 6 + 5 * sample:
        return None
    return [(int(tokens[-1]) + 7 * i) % 40 for i in range(1 + (prompt + len(tokens)) % 6)]


@pytest.fixture(scope="module")
def conversations():
    return generate(Engine(page=4, chunk=4), LONG, respond=answer)


def test_what_follows_an_answer_is_what_scoring_gives(conversations):
    r = conversations
    assert_scored(r)
    given = (np.arange(20) < r.lengths[..., None]) & ~r.drawn
    assert (r.tokens[~r.drawn & ~given] == PAD).all() and given.any((1, 2)).all()
    for logprobs in (r.sampled_logprobs, r.tempered_logprobs, r.scored_logprobs):
        assert (logprobs[given] == 0).all()
    turns = set()
    for p, g in np.ndindex(r.lengths.shape):
        n, at, turn = r.lengths[p, g], 0, 0
        tokens, drawn = r.tokens[p, g, :n], r.drawn[p, g, :n]
        assert drawn[0] and drawn[-1]
        while True:  # the policy's words end at a stop, and the answer is the whole answer to what there was
            end = at + int(np.argmin(np.append(drawn[at:], False)))
            assert not np.isin(tokens[at : end - 1], STOPS).any()
            turn += 1
            if end == n:
                break
            assert tokens[end - 1] in STOPS
            said = answer(p, g, tokens[:end])
            assert tokens[end : end + len(said)].tolist() == said and not drawn[end : end + len(said)].any()
            at = end + len(said)
        assert (tokens[-1] in STOPS) == r.stopped[p, g]
        if n < 20 and tokens[-1] in STOPS:
            said = answer(p, g, tokens)
            assert said is None or n + len(said) >= 20  # else it would have gone on
        turns.add(turn)
    assert len(turns) > 2


def test_conversations_know_no_engine(conversations):
    sizes = Engine(slots=4, lanes=1, steps=2, page=3, chunk=5, prefill=1, cache_tokens=3 * (1 + 3 + 7))
    same_bits(generate(sizes, LONG, respond=answer), conversations)


@pytest.mark.parametrize("said", (None, [], [1] * 40), ids=("none", "nothing", "too much"))
def test_an_answer_that_ends_it(default, said):
    """As without an environment; it is asked once of each."""
    asked = []
    r = generate(Engine(page=4, chunk=4), LONG, respond=lambda *about: asked.append(about) or said)
    assert sorted(about[:2] for about in asked) == list(np.ndindex(P, G))
    for p, g, tokens in asked:
        assert tokens.tolist() == r.tokens[p, g, : r.lengths[p, g]].tolist()
    np.testing.assert_array_equal(r.tokens[..., :C][default.drawn], default.tokens[default.drawn])
    np.testing.assert_array_equal(r.scored_logprobs[..., :C][default.drawn], default.scored_logprobs[default.drawn])


def test_environments_of_a_dispatch_answer_at_the_same_time():
    """A slow tool keeps the others waiting no longer than itself: all completions end at once here, and one answer waits for another."""
    met = threading.Barrier(2)

    def slow(*_):
        met.wait(60)  # breaks, and raises, unless two come

    generate(Engine(page=4, chunk=4), LONG, limits=np.ones((P, G), np.int32), respond=slow)


# Keys of 8 bits under activations of 16


def test_keys_of_eight_bits():
    """Sampled and scored bits are the same; the cache is little more than half as large; and logprobs move by what 2^-7 of a key may."""
    r = generate(Engine(page=4), numeric=KEYS8)
    assert_scored(r, KEYS8)
    expected, _, _ = WORLD.reference(r, WORLD.adapter)
    gap = np.abs(r.scored_logprobs - expected)[r.drawn]
    assert 1e-3 < gap.max() < 0.1 and gap.mean() < 0.02
    sizes = [engine.cache_bytes(WORLD.model(n), engine.layout(FEW, 1, P, T, SAMPLING)) for n in (KEYS8, A16)]
    spec = WORLD.spec
    assert sizes[0] / sizes[1] == (spec.head_dim + 4) / (2 * spec.head_dim + 4)


def test_keys_are_no_finer_than_activations():
    with pytest.raises(ValueError, match="^cache_bits: found 16, need .* at most act_bits = 8"):
        Numerics("exact", 8, cache_bits=16)
    assert [Numerics("exact", *bits).key_bits for bits in ((16,), (8,), (16, 8), (16, 16), (8, 8))] == [16, 8, 8, 16, 8]


# The scheduler, of a model that is told nothing but what its pages hold


def draw(context, id_, sample, drawn):
    """The next token, of all that came before."""
    return zlib.crc32(np.array([*context, id_, sample, drawn], np.int64).tobytes()) % 40


class Told:
    """Stands in for the engine's programs. Keys are the tokens themselves, and what a token's expert is its id tells."""

    def __init__(self, lay, ids):
        self.lay, self.ids, self.steps = lay, set(ids.tolist()), []

    def zeros(self, like, mesh):
        return np.full((self.lay.shards, self.lay.pages, self.lay.page), -1)

    def read(self, pool, row, rows, *tables):
        shard, found = row[0] // (rows // self.lay.shards), []
        for table in tables:
            page, length = np.asarray(table.page)[row], int(np.asarray(table.length)[row])
            held = page[: -(-length // self.lay.page)]
            assert len(set(held)) == len(held) and cache.TRASH not in held and len(held) * self.lay.page >= length
            assert int(np.asarray(table.first)[row]) == len(found)
            found += pool[shard, held].reshape(-1)[:length].tolist()
        return found

    def prefill(self, model, sampling, budget, base, adapter, pool, chunk, before, seed):
        chunk = {name: np.asarray(x) for name, x in chunk.items()}
        (rows, t), spec = chunk["tokens"].shape, model.spec
        assert (chunk["lengths"].reshape(self.lay.shards, -1).sum(1) <= budget).all()
        out = np.full((rows, sampling.group), -1)
        for row in np.flatnonzero(chunk["lengths"]):
            n, shard = chunk["lengths"][row], row // (rows // self.lay.shards)
            table = lambda i: jax.tree.map(lambda x: np.asarray(x)[:rows], before[i])
            known = self.read(pool, (row,), rows, *(table(i) for i in range(len(before)) if np.asarray(before[i].length)[row]))
            assert len(known) == chunk["start"][row] and chunk["ids"][row] in self.ids
            text, at = chunk["tokens"][row, :n], (shard, chunk["page"][row, :n], chunk["slot"][row, :n])
            assert cache.TRASH not in at[1]
            pool[at] = text
            out[row] = [draw([*known, *text], chunk["ids"][row], *x) for x in zip(chunk["samples"][row], chunk["drawn"][row])]
        choices = np.broadcast_to(chunk["tokens"][None, ..., None], (spec.sparse_layers, rows, t, spec.experts_per_token))
        return pool, {"tokens": out, "logprobs": self.logprobs(out), "choices": choices.astype(np.int16)}

    def decode(self, model, sampling, steps, base, adapter, pool, rows, prompts, own, enough, seed):
        rows, spec = {name: np.array(x) for name, x in rows.items()}, model.spec
        own = jax.tree.map(np.array, own)
        shape, live = rows["token"].shape, rows["live"].copy()
        at_work, out = live.sum(), {name: np.zeros((steps, *shape), int) for name in ("tokens", "live")}
        choices, done = np.zeros((steps, spec.sparse_layers, *shape, spec.experts_per_token), np.int16), 0
        while done < steps and live.any() and at_work - live.sum() < enough:
            out["live"][done] = live
            for row in map(tuple, np.argwhere(live)):
                index, shard = own.length[row], row[0] // (shape[0] // self.lay.shards)
                page = own.page[row][index // self.lay.page]
                pool[shard, page, index % self.lay.page] = rows["token"][row]
                own.length[row] += 1
                context = self.read(pool, row[:1], shape[0], prompts)
                context += self.read_own(pool, row, shape[0], own, len(context))
                choices[done, :, *row] = rows["token"][row]
                token = draw(context, rows["ids"][row], rows["samples"][row], rows["drawn"][row])
                out["tokens"][done][row] = rows["token"][row] = token
                rows["drawn"][row] += 1
                live[row] = token not in sampling.stop_ids and rows["drawn"][row] < rows["limit"][row]
            done += 1
        self.steps.append((done, at_work))
        return pool, {
            "tokens": out["tokens"], "live": out["live"].astype(bool), "logprobs": self.logprobs(out["tokens"]), "choices": choices,
            "steps": done,
        }  # fmt: skip

    def read_own(self, pool, row, rows, own, before):
        shard, length = row[0] // (rows // self.lay.shards), own.length[row]
        held = own.page[row][: -(-length // self.lay.page)]
        assert own.first[row] == before and len(set(held)) == len(held) and cache.TRASH not in held
        return pool[shard, held].reshape(-1)[:length].tolist()

    @staticmethod
    def logprobs(tokens):
        return -np.stack([tokens, tokens + 1, tokens + 2], -1).astype(np.float32)


def completion(text, id_, sample, limit, stops, respond, prompt):
    """Tokens, and which were drawn; a token at a time."""
    fed, tokens, drawn = list(text), [], []
    while True:
        tokens.append(draw(fed, id_, sample, len(tokens)))
        drawn.append(True)
        fed.append(tokens[-1])
        if tokens[-1] not in stops and len(tokens) < limit:
            continue
        more = respond(prompt, sample, np.array(tokens)) if respond else None
        if not more or len(tokens) + len(more) >= limit:
            return tokens, drawn
        tokens, drawn, fed = tokens + more, drawn + [False] * len(more), fed + more


@pytest.mark.parametrize("seed", range(60))
def test_scheduler(monkeypatch, seed):
    """Any engine, batch, limits and mesh: every completion is that of a loop, from pages that are its own, and the work is bounded."""
    rng = np.random.default_rng(seed)
    shards, each, group, c, t = (1, 1, 2, 4)[rng.integers(4)], rng.integers(1, 5), *rng.integers(1, 5, 1), *rng.integers(1, 14, 2)
    p, group, c, t = int(shards * each), int(group), int(c), int(t)
    integers = lambda *ends: int(rng.integers(*ends))
    sizes = Engine(integers(p * group + 2), integers(group + 2), integers(1, 7), integers(1, 6), integers(1, 8), integers(1, 5))
    sampling = Sampling(group, c, tuple(rng.integers(0, 40, rng.integers(0, 9)).tolist()), PAD)
    if rng.random() < 0.5:
        least = 1 + -(-t // sizes.page) + -(-c // sizes.page)
        sizes = dataclasses.replace(sizes, cache_tokens=sizes.page * (least + integers(3)))
    respond = answer if rng.random() < 0.5 else None
    lengths, limits = rng.integers(1, t + 1, p), rng.integers(1, c + 1, (p, group))
    texts, ids = [rng.integers(0, 40, n).astype(np.int32) for n in lengths], rng.integers(0, 2**31, p)
    model = WORLD.model(A16, meshes.make(shards))
    lay = engine.layout(sizes, shards, p, t, sampling)
    told, counts = Told(lay, ids), collections.Counter()
    for module, name in ((cache, "zeros"), (engine, "prefill"), (engine, "decode")):
        monkeypatch.setattr(module, name, getattr(told, name))
    done = list(rollout.stream(model, sampling, None, None, texts, ids, seed, sizes, limits, respond, counts, t))
    assert sorted((one.prompt, one.sample) for one in done) == list(np.ndindex(p, group))
    for one in done:
        tokens, drawn = completion(
            texts[one.prompt], ids[one.prompt], one.sample, limits[one.prompt, one.sample], sampling.stop_ids, respond, one.prompt
        )
        assert one.tokens.tolist() == tokens and one.drawn.tolist() == drawn and one.stopped == (tokens[-1] in sampling.stop_ids)
        np.testing.assert_array_equal(one.logprobs, np.where(one.drawn[:, None], Told.logprobs(one.tokens), 0))
        shape = model.spec.sparse_layers, model.spec.experts_per_token
        np.testing.assert_array_equal(one.choices, np.broadcast_to(one.tokens[:-1, None, None], (len(tokens) - 1, *shape)))
        np.testing.assert_array_equal(one.prompt_choices, np.broadcast_to(texts[one.prompt][:, None, None], (lengths[one.prompt], *shape)))
    assert counts["dispatches"] == len(told.steps) and counts["slot_steps"] == sum(n for n, _ in told.steps) * lay.tiles * lay.lanes
    assert all(0 < n <= sizes.steps for n, _ in told.steps)

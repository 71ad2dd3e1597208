"""The whole model: parity with the float64 reference, gradients against its differences, and equal bits.

Programs compiled with QUICK, scalar and hardly fused, are held against ones that the compiler optimized as it does for users: no bit
may depend on that either.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from quick import QUICK

from rl_adapter import lora, numerics, scoring
from rl_adapter import mesh as meshes
from rl_adapter import model as models
from rl_adapter.attention import Rules
from rl_adapter.types import Numerics, Rollout

f32 = np.float32
FLOAT, A16 = Numerics("float"), Numerics("exact", 16)


@dataclasses.dataclass(frozen=True)
class World:
    """A random model with a random adapter on every group."""

    seed: int
    form: str
    adapter_spec: lora.AdapterSpec
    changes: tuple

    @functools.cached_property
    def spec(self):
        return reference.tiny_spec(**dict(self.changes))

    @functools.cached_property
    def base(self):
        return reference.random_base(self.seed, self.spec, self.form)

    @functools.cached_property
    def adapter(self):
        rng = np.random.default_rng(self.seed)
        shapes = jax.eval_shape(lambda: lora.init(self.adapter_spec, self.base, jax.random.key(0)))
        return jax.tree.map(lambda s: (rng.normal(size=s.shape) / np.sqrt(s.shape[-2]) / 2).astype(f32), shapes)

    @property
    def new_adapter(self):
        is_pair = lambda x: isinstance(x, lora.Lora)
        return jax.tree.map(lambda pair: pair.replace(b=np.zeros_like(pair.b)), self.adapter, is_leaf=is_pair)

    def model(self, numeric, mesh=None):
        return models.Model(self.spec, self.adapter_spec, numeric, mesh or meshes.make(1))

    def place(self, mesh=None):
        return models.place(self.spec, self.base, mesh or meshes.make(1), 64)

    @functools.cached_property
    def dense(self):
        """The base with float64 weights, which the reference takes too and need not decode each time."""
        fields = ("q", "k", "v", "o", "router", "gate", "up", "down")
        (layers,) = self.base.layers
        layers = layers.replace(**{f: reference.decode(getattr(layers, f)) for f in fields})
        return self.base.replace(layers=(layers,), head=reference.decode(self.base.head))

    def reference(self, r, adapter=None, temperature=1.0, routers=None):
        """Logprobs (at the temperature) and entropies [P, G, C] of completions, 0 beyond their ends; experts of what is fed, by (p, g).
        `routers` gets their logits, [L, T, E] by (p, g), added."""
        pairs = {} if adapter is None else adapter.layers[0] | ({} if adapter.head is None else {"head": adapter.head})
        adapter = {name: (pair.a, pair.b, self.adapter_spec.scale(name)) for name, pair in pairs.items()}
        out, entropy, choices = np.zeros(r.tokens.shape), np.zeros(r.tokens.shape), {}
        for p, g in np.ndindex(r.lengths.shape):
            t, c = r.prompt_lengths[p], r.lengths[p, g]
            row = np.concatenate([r.prompts[p, :t], r.tokens[p, g, :c]])
            logits = []
            logprobs, chosen = reference.forward(self.spec, self.dense, row[:-1], adapter, logits)
            if routers is not None:
                routers[p, g] = np.stack(logits)
            entropy[p, g, :c] = -np.sum(np.exp(logprobs) * logprobs, -1)[t - 1 :]
            tempered = np.log([reference.softmax(z / temperature) for z in logprobs])
            out[p, g, :c] = tempered[np.arange(t - 1, t + c - 1), row[t:]]
            choices[p, g] = chosen
        return out, entropy, choices


RANKS = (("attention", 4), ("experts", 2), ("router", 2), ("head", 3))
ALPHAS = (("attention", 4.0), ("experts", 3.0), ("router", 2.0), ("head", 1.5))
ODD = World(
    seed=1, form="int4", adapter_spec=lora.AdapterSpec(RANKS, ALPHAS), changes=tuple(dict(
        d_model=40, heads=5, kv_heads=1, head_dim=24, experts=7, experts_per_token=3, d_expert=34, vocab=257, norm_topk_prob=False
    ).items()),
)  # fmt: skip
EVEN = World(
    seed=2, form="int4_g32", adapter_spec=lora.AdapterSpec(RANKS, ALPHAS, rank_stabilized=True, shared_a=True),
    changes=(("experts", 8),),
)  # fmt: skip


def completions(seed, spec, p, g, t, c):
    """Random prompts and completions of random lengths; what lies beyond them is random too."""
    rng = np.random.default_rng(seed)
    ids = lambda *shape: rng.integers(0, spec.vocab, shape).astype(np.int32)
    prompt_lengths, lengths = rng.integers(2, t + 1, p).astype(np.int32), rng.integers(1, c + 1, (p, g)).astype(np.int32)
    prompt_lengths[0], lengths[0, 0] = t, c
    zeros = [np.zeros((p, g, c), f32)] * 3
    choices = [np.zeros((spec.layers, p, *x, spec.experts_per_token), np.int16) for x in ((t,), (g, c))]
    drawn = np.arange(c) < lengths[..., None]
    return Rollout(ids(p, t), prompt_lengths, ids(p, g, c), drawn, lengths, np.ones((p, g), bool), *zeros, *choices)


def masks(r):
    """Sampled tokens [P, G, C], and fed tokens [P, T + G * C]."""
    return np.arange(r.tokens.shape[2]) < r.lengths[..., None], np.asarray(scoring.packed_inputs(r)[2])


@dataclasses.dataclass
class Scores:
    """What a program gives where it means something; padding is set to zero."""

    logprobs: np.ndarray  # [P, G, C]
    entropy: np.ndarray
    choices: np.ndarray  # [L, P, T + G * C, k]
    grads: dict | None

    def same_bits(self, other, rows=slice(None)):
        np.testing.assert_array_equal(self.logprobs, other.logprobs[rows])
        np.testing.assert_array_equal(self.choices, other.choices[:, rows])


def scorer(world, numeric, mesh=None, grads=False, adapted=True, **options):
    """A compiled (adapter, rollout) -> Scores; the gradients are those of the weighted sum of logprobs."""
    model, base = world.model(numeric, mesh), world.place(mesh)

    def value(adapter, base, r, weights):
        s = scoring.score(model, base, lora.prepare(adapter, numeric) if adapted else None, r)
        return jnp.sum(jnp.where(weights != 0, s.scored * weights, 0)), (s.scored, s.entropy, s.choices)

    def program(adapter, base, r, weights):
        if grads:
            return jax.value_and_grad(value, has_aux=True)(adapter, base, r, weights)
        return value(adapter, base, r, weights), None

    program = jax.jit(program, **options)

    def run(adapter, r):
        mask, valid = masks(r)
        where = meshes.rows(mesh) if mesh else None
        r = r.replace(prompt_choices=None, choices=None)
        if mesh:
            adapter = jax.device_put(adapter, meshes.adapter_shardings(mesh, adapter))
        (_, (scored, entropy, choices)), gradient = jax.device_get(program(adapter, base, *jax.device_put((r, weights_of(r)), where)))
        return Scores(np.where(mask, scored, 0), np.where(mask, entropy, 0), np.where(valid[None, ..., None], choices, 0), gradient)

    return run


def weights_of(r):
    """Of tokens in the objective whose gradient is taken."""
    rng = np.random.default_rng(0)
    return np.where(masks(r)[0], rng.uniform(-1, 1, r.tokens.shape), 0).astype(f32)


@pytest.fixture(scope="module")
def odd():
    """The exact packed forward pass as users get it."""
    return scorer(ODD, A16)


@pytest.fixture(scope="module")
def odd_float():
    return scorer(ODD, FLOAT, grads=True, compiler_options=QUICK)


@pytest.fixture(scope="module")
def even():
    return scorer(EVEN, A16, grads=True, compiler_options=QUICK)


@pytest.fixture(scope="module")
def even_float():
    return scorer(EVEN, FLOAT, grads=True, compiler_options=QUICK)


ROLLOUT = {ODD: completions(3, ODD.spec, 3, 2, 5, 4), EVEN: completions(4, EVEN.spec, 8, 2, 5, 4)}


# Parity with the reference


@pytest.mark.parametrize("world", ("odd", "even"))
@pytest.mark.parametrize("adapted", (True, False))
def test_reference(request, world, adapted):
    """The float twin to 1e-4; A16 to 1e-3 of the spread of the logprobs. A row that is contracted errs by up to 2^-15 of its largest value,
    about 4e-5 of its size; some 18 contractions follow each other, whose errors add up like a random walk to 2e-4, or a few times
    that where a norm or SwiGLU steepens them. No expert of these seeds is chosen by so little."""
    w = {"odd": ODD, "even": EVEN}[world]
    r = ROLLOUT[w]
    adapter = w.adapter if adapted else w.new_adapter
    expected, entropy, chosen = w.reference(r, w.adapter if adapted else None)
    spread = expected[masks(r)[0]].std()
    for name, tolerance in ((f"{world}_float", 1e-4), (world, 1e-3 * spread)):
        found = request.getfixturevalue(name)(adapter, r)
        np.testing.assert_allclose(found.logprobs, expected, atol=tolerance)
        np.testing.assert_allclose(found.entropy, entropy, atol=tolerance)
        t, c = r.prompts.shape[1], r.tokens.shape[2]
        for (p, g), choices in chosen.items():
            n = r.prompt_lengths[p]
            prompt, own = found.choices[:, p, :n], found.choices[:, p, t + g * c :][:, : r.lengths[p, g] - 1]
            np.testing.assert_array_equal(np.concatenate([prompt, own], 1), choices)


# Equal bits


def test_a_new_adapter_changes_nothing(odd):
    """And neither do batch, padding, or the compiler's optimizations: one prompt without adapter, padded further, in other code."""
    r = ROLLOUT[ODD]
    whole = odd(ODD.new_adapter, r)
    alone = scorer(ODD, A16, adapted=False, compiler_options=QUICK)
    for p in range(3):
        part = jax.tree.map(lambda x, p=p: x[p : p + 1], r.replace(prompt_choices=None, choices=None))
        pad = lambda x, n: np.concatenate([x, np.full((*x.shape[:-1], n), 7, x.dtype)], -1)
        tokens, logprobs = pad(part.tokens, 3), [pad(x, 3) for x in (part.sampled_logprobs,) * 3]
        drawn = np.pad(part.drawn, ((0, 0), (0, 0), (0, 3)))
        longer = Rollout(pad(part.prompts, 4), part.prompt_lengths, tokens, drawn, part.lengths, part.stopped, *logprobs, None, None)
        found = alone(None, longer)
        np.testing.assert_array_equal(found.logprobs[..., :4], whole.logprobs[p : p + 1])
        choices = found.choices
        own = choices[:, :, 9:].reshape(*choices.shape[:2], 2, 7, -1)[:, :, :, :4].reshape(*choices.shape[:2], 8, -1)
        np.testing.assert_array_equal(np.concatenate([choices[:, :, :5], own], 2), whole.choices[:, p : p + 1])
    assert np.abs(odd(ODD.adapter, r).logprobs - whole.logprobs).max() > 0.1  # while an adapter that is not new changes much


def test_bits_know_no_row_and_no_padding(odd):
    r = ROLLOUT[ODD]
    found = odd(ODD.adapter, r)
    order = np.array([2, 0, 1])
    moved = jax.tree.map(lambda x: x[order], r.replace(prompt_choices=None, choices=None))
    odd(ODD.adapter, moved).same_bits(found, order)
    mask, _ = masks(r)
    prompts = np.where(np.arange(5) < r.prompt_lengths[:, None], r.prompts, 0)
    odd(ODD.adapter, r.replace(prompts=prompts, tokens=np.where(mask, r.tokens, 0))).same_bits(found)


def test_bits_know_no_engine(odd, monkeypatch):
    """Integer contractions as int8 dots, as on accelerators, or as float dots of small integers, as on CPUs."""
    monkeypatch.setattr(numerics, "small_integer_dots", lambda: jax.default_backend() != "cpu")
    other = scorer(ODD, A16, adapted=False, compiler_options=QUICK)
    other(None, ROLLOUT[ODD]).same_bits(odd(ODD.new_adapter, ROLLOUT[ODD]))


@pytest.mark.parametrize("shape, adapted", [((1, 1, 2), False), ((1, 4, 2), False), ((2, 2, 2), True)], ids=str)
def test_bits_know_no_mesh(even, shape, adapted):
    on_mesh = scorer(EVEN, A16, meshes.make(*shape), adapted=adapted, compiler_options=QUICK)
    adapter = EVEN.adapter if adapted else EVEN.new_adapter
    on_mesh(adapter, ROLLOUT[EVEN]).same_bits(even(adapter, ROLLOUT[EVEN]))


# Gradients


@pytest.mark.parametrize("world", ("odd", "even"))
def test_gradients_are_differences_of_the_reference(request, world):
    """The float twin's, of each adapter matrix, along a random direction: central differences in float64."""
    w = {"odd": ODD, "even": EVEN}[world]
    r = ROLLOUT[w]
    grads = request.getfixturevalue(f"{world}_float")(w.adapter, r).grads
    weights, rng = weights_of(r), np.random.default_rng(1)
    leaves, structure = jax.tree.flatten(w.adapter)
    for i, grad in enumerate(jax.tree.leaves(grads)):
        direction = rng.normal(size=grad.shape)
        ends = []
        for h in (-1e-5, 1e-5):
            moved = structure.unflatten([leaf + h * direction if j == i else leaf for j, leaf in enumerate(leaves)])
            ends.append(np.sum(w.reference(r, moved)[0] * weights))
        scale = np.linalg.norm(grad)
        assert scale > 0
        np.testing.assert_allclose(np.sum(grad * direction) / scale, (ends[1] - ends[0]) / 2e-5 / scale, atol=1e-3)


def test_exact_gradients_are_near_the_float_twins(even, even_float):
    """Straight through: the float derivative at activations that differ by a few 1e-4 of their size, so 2e-3 of a matrix's norm."""
    grads = [f(EVEN.adapter, ROLLOUT[EVEN]).grads for f in (even, even_float)]
    distance = jax.tree.map(lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(b), *grads)
    assert max(jax.tree.leaves(distance)) < 2e-3


def test_mesh_gradients(even_float):
    on_mesh = scorer(EVEN, FLOAT, meshes.make(2, 2, 2), grads=True, compiler_options=QUICK)
    one, many = (f(EVEN.adapter, ROLLOUT[EVEN]).grads for f in (even_float, on_mesh))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max()), many, one)


# Small things


def test_masks():
    lengths, rules = jnp.array([3, 2]), Rules(1.0)
    own = jnp.arange(2)
    assert models.keys_before(4, lengths, own[:1], rules)[:, 0, 0].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]
    assert models.causal(3, lengths[:, None], rules)[:, 0].astype(int).tolist() == [
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]],
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]],  # padding sees itself, so that it has something to see
    ]
    window = Rules(1.0, window=jnp.int32(2))
    assert models.causal(3, lengths[:, None], window)[0, 0].astype(int).tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    # The completion follows the prompt's last token, not its padding: its first token sees that one, its second one none of them.
    assert models.keys_before(4, lengths, own, window)[:, 0].astype(int).tolist() == [
        [[0, 0, 1, 0], [0, 0, 0, 0]],
        [[0, 1, 0, 0], [0, 0, 0, 0]],
    ]
    everything = Rules(1.0, window=jnp.int32(0))
    assert models.keys_before(4, lengths, own, everything)[:, 0].astype(int).tolist() == [[[1, 1, 1, 0]] * 2, [[1, 1, 0, 0]] * 2]


def test_context_must_fit():
    with pytest.raises(ValueError, match="context: found 129 tokens .* the model has 128 positions"):
        models.place(EVEN.spec, EVEN.base, meshes.make(1), 129)

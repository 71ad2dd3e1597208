"""Adapters: their shapes and count, what a new one changes (nothing), and the low-rank product against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from ml_collections import ConfigDict

from rl_adapter import lora, quant
from rl_adapter.types import Base, Layer, Numerics

SPEC = reference.tiny_spec(d_model=96, heads=5, kv_heads=1, head_dim=24, experts=7, d_expert=64, vocab=257)
ALPHAS = (("attention", 8.0), ("mlp", 3.0), ("experts", 6.0), ("router", 4.0), ("head", 2.0))
FLOAT, A16, A8 = Numerics("float"), Numerics("exact", 16), Numerics("exact", 8)


def adapter_spec(attention=0, experts=0, router=0, head=0, mlp=0, **kwargs):
    ranks = (("attention", attention), ("mlp", mlp), ("experts", experts), ("router", router), ("head", head))
    return lora.AdapterSpec(ranks, ALPHAS, **kwargs)


@pytest.fixture(scope="module")
def base():
    return jax.eval_shape(lambda: reference.random_base(0, SPEC, "int4"))  # shapes are enough


def shapes_of(spec, base):
    return jax.eval_shape(lambda: lora.init(spec, base, jax.random.key(0)))


def pairs(layer):
    return {name: (pair.a.shape, pair.b.shape) for name, pair in layer.items()}


def test_shapes_and_count(base):
    adapter = shapes_of(adapter_spec(4, 3, 2, 5), base)
    assert pairs(adapter.layers[0]) == {
        "q": ((2, 96, 4), (2, 4, 120)),
        "k": ((2, 96, 4), (2, 4, 24)),
        "v": ((2, 96, 4), (2, 4, 24)),
        "o": ((2, 120, 4), (2, 4, 96)),
        "gate": ((2, 7, 96, 3), (2, 7, 3, 64)),
        "up": ((2, 7, 96, 3), (2, 7, 3, 64)),
        "down": ((2, 7, 64, 3), (2, 7, 3, 96)),
        "router": ((2, 96, 2), (2, 2, 7)),
    }
    assert len(adapter.layers) == 1 and pairs({"head": adapter.head}) == {"head": ((96, 5), (5, 257))}
    attention, experts, router, head = 2 * 4 * (216 + 120 + 120 + 216), 2 * 7 * 3 * 160 * 3, 2 * 2 * 103, 5 * 353
    assert lora.count(adapter) == attention + experts + router + head
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(adapter))


def test_a_shared_a_has_no_expert_axis(base):
    adapter = shapes_of(adapter_spec(experts=3, shared_a=True), base)
    assert adapter.head is None
    assert pairs(adapter.layers[0]) == {
        "gate": ((2, 96, 3), (2, 7, 3, 64)),
        "up": ((2, 96, 3), (2, 7, 3, 64)),
        "down": ((2, 64, 3), (2, 7, 3, 96)),
    }


def test_runs_of_layers():
    """A dense layer between two runs with experts: each run has pairs of the matrices that it holds, and a group may be in one only."""
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    sparse = lambda n: Layer(None, shape(n, 96, 96), None, q=shape(n, 96, 96), router=shape(n, 96, 4), gate=shape(n, 4, 96, 32))
    dense = Layer(None, shape(1, 96, 96), None, q_a=shape(1, 96, 16), mlp_gate=shape(1, 96, 40), k_up=shape(1, 4, 24, 16))
    base = Base(embed=None, layers=(sparse(1), dense, sparse(2)), final_norm=None, head=shape(96, 50))
    adapter = shapes_of(adapter_spec(4, 3, mlp=2), base)
    of_sparse = lambda n: {"q": ((n, 96, 4), (n, 4, 96)), "o": ((n, 96, 4), (n, 4, 96)), "gate": ((n, 4, 96, 3), (n, 4, 3, 32))}
    of_dense = {"o": ((1, 96, 4), (1, 4, 96)), "q_a": ((1, 96, 4), (1, 4, 16)), "mlp_gate": ((1, 96, 2), (1, 2, 40))}
    assert [pairs(layer) for layer in adapter.layers] == [of_sparse(1), of_dense, of_sparse(2)] and adapter.head is None
    only = shapes_of(adapter_spec(mlp=2), base)
    assert [list(layer) for layer in only.layers] == [[], ["mlp_gate"], []]
    with pytest.raises(ValueError, match="adapter: no group that the model has is given a rank"):
        shapes_of(adapter_spec(mlp=2), base.replace(layers=(sparse(3),)))


def test_initial_values(base):
    init = jax.jit(lambda seed: lora.init(adapter_spec(experts=8), base, jax.random.key(seed)))
    adapter, same, other = init(1), init(1), init(2)
    for pair in adapter.layers[0].values():
        assert not np.asarray(pair.b).any()
        a = np.asarray(pair.a)
        assert abs(a.std() * np.sqrt(a.shape[-2]) - 1) < 0.06 and abs(a.mean() * np.sqrt(a.shape[-2])) < 0.06
    gate = np.asarray(adapter.layers[0]["gate"].a)
    assert (gate != np.asarray(adapter.layers[0]["up"].a)).all()
    jax.tree.map(np.testing.assert_array_equal, adapter, same)
    assert (gate != np.asarray(other.layers[0]["gate"].a)).all()


def test_refusals(base):
    with pytest.raises(ValueError, match="adapter.router.rank: found 8, need at most 7, the smaller side of router"):
        lora.init(adapter_spec(router=8), base, jax.random.key(0))
    with pytest.raises(ValueError, match="adapter: no group that the model has is given a rank above 0"):
        lora.init(adapter_spec(), base, jax.random.key(0))


def test_scale():
    plain, stabilized = (adapter_spec(4, 3, 2, 1, 9, rank_stabilized=stable) for stable in (False, True))
    table = {
        "q": (2, 4),
        "o": (2, 4),
        "down": (2, 6 / 3**0.5),
        "router": (2, 4 / 2**0.5),
        "head": (2, 2),
        "mlp_up": (1 / 3, 1),
        "kv_a": (2, 4),
    }
    for name, (a, b) in table.items():
        assert plain.scale(name) == pytest.approx(a) and stabilized.scale(name) == pytest.approx(b)


def test_from_config():
    ranks = {"attention": 4, "mlp": 5, "experts": 0, "router": 2, "head": 0}
    config = ConfigDict({g: {"rank": r, "alpha": dict(ALPHAS)[g]} for g, r in ranks.items()} | {"rank_stabilized": True, "shared_a": False})
    assert lora.adapter_spec(config) == adapter_spec(4, 0, 2, 0, 5, rank_stabilized=True)


def test_linear():
    """Against float64, within the bounds of its three products; a new adapter (B = 0) leaves the bits of the frozen product."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: (rng.normal(size=shape) / np.sqrt(shape[-2])).astype(np.float32)
    w = quant.quantize(normal(96, 41), "int4_g32")
    x, a, b, bias = normal(13, 96) * 3, normal(96, 5), normal(5, 41), normal(1, 41)[0]
    dense = x.astype(np.float64) @ reference.decode(w)
    low_rank = 1.7 * (x.astype(np.float64) @ a @ b)

    @jax.jit
    def run(x, a, b):
        out = []
        for numeric in (FLOAT, A16, A8):
            adapters = [lora.prepare({"q": lora.Lora(a, b)}, numeric)["q"] for b in (b, 0 * b)]
            out.append([quant.matmul(x, w, numeric), *(lora.linear(x, w, pair, 1.7, numeric) for pair in (None, *adapters))])
            out[-1].append(lora.linear(x, w, adapters[0], 1.7, numeric, bias))
        return out

    for (frozen, absent, adapted, new, with_bias), tolerance in zip(run(x, a, b), (1e-6, 2e-4, 4e-2)):
        np.testing.assert_allclose(with_bias, adapted + bias, atol=1e-6)
        np.testing.assert_array_equal(absent, frozen)
        np.testing.assert_array_equal(new, frozen)
        np.testing.assert_allclose(adapted, dense + low_rank, atol=tolerance * np.abs(dense + low_rank).max())
        assert np.abs(low_rank).max() > 0.3 * np.abs(dense).max()


def test_prepare():
    """The forward pass reads 16-bit columns, within 2^-15 of a column's largest; float mode reads the masters themselves."""
    a = np.random.default_rng(0).normal(size=(2, 40, 3)).astype(np.float32) * np.float32([1, 1e-3, 1e3])
    adapter = {"q": lora.Lora(a, np.zeros((2, 3, 8), np.float32))}
    prepared = jax.jit(lambda a: lora.prepare(a, A16))(adapter)["q"].a
    np.testing.assert_array_equal(prepared.master, a)
    assert prepared.fixed.form == "fixed16" and quant.shape(prepared) == a.shape
    assert (np.abs(reference.decode(prepared.fixed) - a) <= np.abs(a).max(1, keepdims=True) * 2.0**-15 * 1.01).all()
    assert lora.prepare(adapter, FLOAT)["q"].a.fixed is None
    assert lora.prepare(None, A16) is None

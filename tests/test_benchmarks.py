"""The benchmarks count, fit and read traces rightly. How fast anything is belongs to them, not here."""

import collections
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmarks import common, continuous, exact_vs_float, floors, measure, profile, scaling, throughput
from rl_adapter import lora, quant
from rl_adapter import model as models
from rl_adapter.types import Numerics

TINY = common.Variant(
    numerics="float", batch=2, group=2, prompt=3, length=4, rank=2, layers=1, experts=4, d_model=32, d_expert=32, heads=2, kv_heads=1,
    head_dim=16, vocab=20,
)  # fmt: skip


@pytest.mark.parametrize(
    "change, message",
    (
        (dict(numerics="a4"), "--numerics: found 'a4', need one of float, a16, a8"),
        (dict(form="stored"), "--form: found 'stored'"),
        (dict(batch=0), "--batch: found 0, need at least 1"),
        (dict(slots=-1), "--slots: found -1, need at least 0"),
        (dict(experts_per_token=5), "--experts_per_token: found 5, need at most the 4 experts"),
    ),
)
def test_a_variant_is_checked(change, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        dataclasses.replace(TINY, **change)


@pytest.mark.parametrize("form", quant.FORMS)
def test_random_weights_are_as_large_as_a_models(form):
    w = common.random_weight(np.random.default_rng(0), form, 2, 128, 96)
    value = np.asarray(quant.dequantize(w))
    assert quant.shape(w) == value.shape == (2, 128, 96)
    assert 0.6 < value.std() * np.sqrt(128) < 1.7 and abs(value.mean()) < 0.1 * value.std()


def test_requantized_linears_are_near_and_the_rest_stays():
    base = common.random_base(common.spec_of(TINY), "int4_g32")
    again = common.requantize(base, "int8")
    (before,), (after,) = base.layers, again.layers
    for name in ("q", "o", "gate", "down"):
        assert getattr(after, name).form == "int8"
        a, b = (np.asarray(quant.dequantize(getattr(x, name))) for x in (before, after))
        assert np.abs(a - b).max() <= np.abs(a).max() / 127
    assert after.router is before.router and again.head is base.head
    assert common.requantize(base, "stored") is base


# --- floors ------------------------------------------------------------------------------------------------------------------------


def work_of(v: common.Variant) -> common.Work:
    """By shapes: nothing is on a device, nothing compiles."""
    model, base = model_of(v), common.random_base(common.spec_of(v), v.form)
    adapter = jax.eval_shape(lambda: lora.init(model.adapter, base, jax.random.key(0)))
    return common.Work(model, base, adapter, None, np.zeros((v.batch, v.prompt)), np.zeros(v.batch), v.engine)


def model_of(v: common.Variant) -> models.Model:
    c = common.config_of(v)
    return models.Model(common.spec_of(v), lora.adapter_spec(c.adapter), Numerics(c.numerics, c.act_bits))


def test_multiply_adds_are_those_of_a_hand_count():
    v = dataclasses.replace(TINY, layers=2, d_expert=64)
    d, f, q, kv, e, k, r = 32, 64, 32, 16, 4, 2, 2
    linears = 2 * (d * q + 2 * d * kv + q * d + d * e + k * 3 * d * f)
    adapters = 2 * r * (2 * (d + q) + 2 * (d + kv) + k * 3 * (d + f))
    work = work_of(v)
    each = floors.per_token(work)
    assert each.forward == each.products == linears + adapters
    assert each.backward == linears + 2 * adapters
    assert floors.head(work).forward == 32 * 20


@pytest.mark.parametrize("numerics, linear, sixteen", (("float", 1, 1), ("a8", 1, 2), ("a16", 2, 4)))
def test_products_of_slices(numerics, linear, sixteen):
    numeric = model_of(dataclasses.replace(TINY, numerics=numerics)).numeric
    assert floors.products(numeric, 4) == floors.products(numeric, 8) == linear and floors.products(numeric, 16) == sixteen


def test_attention_counts_the_keys_that_are_seen():
    work = work_of(TINY)
    keys = sum(1 for query in range(3, 7) for key in range(20) if key <= query)
    assert floors.attention(work, range(3, 7)).forward == keys * TINY.heads * 2 * TINY.head_dim


def test_costs_grow_with_the_batch_and_fewer_slots_read_more():
    work = work_of(TINY)
    once, twice = (floors.costs(work, dataclasses.replace(TINY, batch=b)) for b in (2, 4))
    for name in throughput.PROGRAMS:
        assert twice[name].forward == 2 * once[name].forward and twice[name].backward == 2 * once[name].backward
        assert once[name].bytes < twice[name].bytes < 2 * once[name].bytes  # weights are shared
    assert once["rollout"].backward == once["scoring"].backward == 0 < once["update"].backward
    fewer = floors.costs(work, dataclasses.replace(TINY, slots=2))
    assert fewer["rollout"].forward == once["rollout"].forward and fewer["rollout"].bytes > once["rollout"].bytes


def test_the_floor_is_the_larger_of_two():
    found = {"bytes": {"read": 10.0, "read_and_write": 5.0}, "best": {"float32": 4.0, "int8": 8.0}}
    found["rows"] = {"rollout": {"rows": 1, "float32": 1.0, "int8": 1.0}}
    floor = floors.floor("rollout", floors.Cost(forward=8.0, products=32.0, backward=4.0, bytes=50.0), found)
    assert floor == {"compute": 2.0 + 1.0, "rows": 8.0 + 4.0, "bytes": 5.0, "floor": 5.0}


# --- programs ----------------------------------------------------------------------------------------------------------------------


def test_the_programs_run_and_completions_are_full():
    """Scoring and update are only traced: other tests compile them."""
    work = common.build(TINY)
    programs = common.programs(work)
    r = programs["rollout"].run()
    assert r.tokens.shape == (2, 2, 4) and (np.asarray(r.lengths) == 4).all() and not np.asarray(r.stopped).any()
    scores = jax.eval_shape(programs["scoring"].run, *programs["scoring"].ready())
    assert [s.shape for s in scores] == [(2, 2, 4)] * 3
    state, *rest = programs["update"].ready()
    new, _ = jax.eval_shape(lambda state: programs["update"].run(state, *rest), state)
    assert jax.tree.map(jnp.shape, new.adapter) == jax.tree.map(jnp.shape, work.adapter)
    assert state.adapter is not work.adapter  # which an update would take
    assert common.cache_bytes(work) > 0 and measure.timed(common.Program(lambda x: x, lambda: (jnp.ones(3),))) > 0


def test_a_child_that_fails_tells_its_variant():
    with pytest.raises(RuntimeError, match="model='/nowhere'.*model: found '/nowhere'"):
        measure.Child(dataclasses.replace(TINY, model="/nowhere"))


def test_all_combinations_are_measured():
    points = throughput.variants({"numerics": ["float", "a8"], "batch": [1, 2], "experts": [4]})
    assert [(v.numerics, v.batch, v.experts) for v in points] == [("float", 1, 4), ("float", 2, 4), ("a8", 1, 4), ("a8", 2, 4)]
    with pytest.raises(ValueError, match="--batch: found 'x'"):
        throughput.whole("batch", "x")


# --- times -------------------------------------------------------------------------------------------------------------------------


def test_turns_are_taken_and_the_first_is_dropped():
    calls = []
    timer = lambda name: lambda: calls.append(name) or float(len(calls))
    seconds = measure.in_turns({"a": timer("a"), "b": timer("b")}, 2)
    assert calls == ["a", "b"] * 3 and seconds == {"a": [3.0, 5.0], "b": [4.0, 6.0]}
    assert measure.medians(seconds) == {"a": 4.0, "b": 5.0}


def test_a_ratio_is_taken_round_by_round():
    """A machine that is ten times slower in one round changes nothing."""
    assert measure.ratio([1.0, 10.0, 1.0], [2.0, 20.0, 2.0]) == 0.5


def test_a_line_is_found_with_its_fixed_part():
    line = scaling.fit([1, 2, 4, 8], [3 + 2 * x for x in (1, 2, 4, 8)])
    assert line.fixed == pytest.approx(3) and line.each == pytest.approx(2) and line.deviation < 1e-9 and line.is_linear
    assert not scaling.fit([1, 2, 4, 8], [1, 4, 16, 64]).is_linear
    near = scaling.fit([1, 2, 4, 8], [5, 7 * 1.05, 11, 19])
    assert 0.01 < near.deviation < 0.05


def test_goals_of_exact_numerics():
    seconds = {(form, name, program): [2.0 if name == "float" else 1.0] for form in ("INT4", "INT8") for name in exact_vs_float.NUMERICS
               for program in exact_vs_float.PROGRAMS}  # fmt: skip
    found = exact_vs_float.ratios(seconds)
    assert found["to_float"]["exact A16 step"] == {"ratio": 0.5, "goal": 1.1}
    assert found["to_float"]["exact A8 scoring"] == {"ratio": 0.5, "goal": None}
    assert found["int4_to_int8"]["exact A8 rollout"] == {"ratio": 1.0, "goal": 1.0}


def test_lengths_are_mixed():
    limits = continuous.mixed_lengths(50, 8, 64)
    assert limits.min() == 8 and limits.max() == 64 and 30 < limits.mean() < 42


def test_tables_and_json(tmp_path):
    measure.show("[title]", ("a", "b"), [("[x]", 0.5), ("y", None)])
    assert [measure.text(v) for v in (None, True, False, 3, 1234.5, 0.25, 2e-5, 0.0)] == [
        "", "yes", "NO", "3", "1234", "0.25", "2.0e-05", "0"
    ]  # fmt: skip
    measure.write(str(tmp_path / "a.json"), {"machine": measure.machine(), "nan": float("nan")})
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["nan"] == "NaN" and found["machine"]["cores"] >= 1 and len(found["load_after"]) == 3


# --- profiles ----------------------------------------------------------------------------------------------------------------------

HLO = """HloModule jit_f

%fused (p.1: f32[4]) -> f32[4] {
  %p.1 = f32[4]{0} parameter(0)
  ROOT %mul.1 = f32[4]{0} multiply(%p.1, %p.1), metadata={op_name="jit(f)/experts/mul" stack_frame_id=3}
}

%body (t.1: (s32[], f32[4])) -> (s32[], f32[4]) {
  %t.1 = (s32[], f32[4]{0}) parameter(0)
  %fusion.2 = f32[4]{0} fusion(%t.1), kind=kLoop, calls=%fused
  ROOT %tuple.3 = (s32[], f32[4]{0}) tuple(%t.1, %fusion.2)
}

ENTRY %main (x.1: f32[4]) -> f32[4] {
  %x.1 = f32[4]{0} parameter(0)
  ROOT %while.4 = (s32[], f32[4]{0}) while(%x.1), condition=%c, body=%body, metadata={op_name="jit(f)/while" stack_frame_id=6}
}
"""


def test_instructions_of_a_program():
    found = profile.instructions(HLO)
    assert found["while.4"] == profile.Op("while.4", "while", "", "jit(f)/while")
    assert found["fusion.2"] == profile.Op("fusion.2", "fusion", "f32[4]", "<- jit(f)/experts/mul")  # by what it calls


def event(op, start, end, thread=0):
    return profile.Event((0, thread), "jit_f", op, start, end - start)


def test_own_times_count_nothing_twice():
    """A loop in a loop, with a body on two threads: it keeps what no thread covers."""
    events = [
        event("while.1", 0, 100), event("while.2", 10, 60), event("a", 10, 30), event("b", 20, 50, 1), event("a", 70, 90, 1),
        event("part", 72, 80, 1), event("c", 120, 130),
    ]  # fmt: skip
    own = profile.own_times(events, lambda e: e.op.startswith("while"))
    assert own == [100 - 50 - 20, 50 - 40, 20, 30, 20 - 8, 8, 10]


@pytest.mark.parametrize(
    "source, part",
    (
        ("jit(f)/while/body/experts/linear/dot_general", "experts"),
        ("jit(f)/attention/linear/dot_general", "attention"),
        ("jit(f)/linear/mul", "linear"),
        ("jit(f)/transpose(jvp(experts))/while/body/mul", "experts, backward"),
        ("jit(f)/jvp(head)/exp", "head"),
        ("<- jit(f)/attention/transpose;attention/vmap()/transpose", "attention"),
        ("jit(f)/mul", "rest"),
        ("", "rest"),
    ),
)
def test_parts_of_the_model(source, part):
    assert profile.part(source) == part


def test_a_trace_is_read(tmp_path):
    """Every operation of a loop's body is counted as often as it ran, and the parts add up."""

    @jax.jit
    def f(x):
        def body(_, y):
            with jax.named_scope("experts"):
                return jnp.sort(jnp.tanh(y), -1)

        return jax.lax.fori_loop(0, 7, body, x)

    x = jnp.ones((50, 50))
    found = profile.trace(common.Program(f, lambda: (x,)), tmp_path)
    sorts = [line for line in found.lines if line.op.kind == "sort"]
    assert sorts and all(line.count % 7 == 0 and profile.part(line.op.source) == "experts" for line in sorts)
    parts = found.by_part()
    assert sum(parts.values()) == pytest.approx(sum(line.milliseconds for line in found.lines)) and parts["experts"] > 0
    assert collections.Counter(line.op.kind for line in found.lines)["while"] == 1
    profile.report("f", found, 3)
    with pytest.raises(ValueError, match="found no"):
        profile.read(tmp_path / "empty")

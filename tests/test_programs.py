"""Programs that are kept: loaded without a trace, equal to the bit, and never for another's."""

import os
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from rl_adapter import programs, runtime


@struct.dataclass
class Pair:
    a: jax.Array
    b: jax.Array
    power: int = struct.field(pytree_node=False, default=2)


traced = []  # by every trace, what it saw


def work(scale, pair: Pair, pool: dict):
    traced.append((scale, pair.a.shape))
    return pair.replace(a=jnp.sin(pair.a) ** pair.power * scale), jax.tree.map(lambda x: x + pair.b.sum(), pool)


def other(scale, pair: Pair, pool: dict):
    traced.append(scale)
    return pair, pool


def jitted(function=work):
    """As another process would have it: nothing known but what is on disk."""
    jax.clear_caches()
    return programs.jit(function, static_argnames=("scale",), donate_argnames=("pool",))


@pytest.fixture
def kept(tmp_path):
    traced.clear()
    programs.keep(tmp_path / "programs")
    yield tmp_path / "programs"
    programs.keep(None)


def given(rows=3, place=lambda x: x):
    rng = np.random.default_rng(0)
    return Pair(*(place(rng.normal(size=(rows, 8)).astype(np.float32)) for _ in range(2))), {"x": place(np.ones((rows, 8), np.float32))}


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("spec", [None, P("rows"), P(None, "rows"), P()], ids=str)
def test_kept_program_is_loaded_without_a_trace_and_does_the_same(kept, spec):
    mesh = jax.make_mesh((8,), ("rows",))
    place = jnp.asarray if spec is None else lambda x: jax.device_put(x, NamedSharding(mesh, spec))
    first = jitted()(2.0, *given(16, place))
    assert len(traced) == 1
    counted = runtime.compilations()
    pair, pool = given(16, place)
    second = jitted()(2.0, pair, pool)
    assert len(traced) == 1 and runtime.compilations() == counted + 1
    assert bits(first) == bits(second)
    assert isinstance(second[0], Pair) and second[0].power == 2
    assert all(x.sharding.is_equivalent_to(y.sharding, x.ndim) for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(second)))
    assert pool["x"].is_deleted() and not pair.a.is_deleted()  # donated, as asked for
    assert (os.stat(kept).st_mode & 0o777, {os.stat(f).st_mode & 0o777 for f in kept.iterdir()}) == (0o700, {0o600})


def test_what_comes_out_goes_in_again_without_another_program(kept):
    mesh = jax.make_mesh((8,), ("rows",))
    f = jitted()
    pair, pool = given(8, lambda x: jax.device_put(x, NamedSharding(mesh, P("rows"))))
    pair, pool = f(2.0, pair, pool)
    made = runtime.compilations()
    for _ in range(3):
        pair, pool = f(2.0, pair, pool)
    assert runtime.compilations() == made and len(traced) == 1


def change_scale(pair, pool):
    return 3.0, pair, pool


def change_shape(pair, pool):
    return 2.0, *given(4, jnp.asarray)


def change_type(pair, pool):
    return 2.0, pair.replace(b=pair.b.astype(jnp.bfloat16)), pool


def change_static_field(pair, pool):
    return 2.0, pair.replace(power=3), pool


def change_place(pair, pool):
    return 2.0, *jax.device_put((pair, pool), jax.devices()[1])


def change_structure(pair, pool):
    return 2.0, pair, pool | {"y": pool["x"] + 1}


@pytest.mark.parametrize("change", [change_scale, change_shape, change_type, change_static_field, change_place, change_structure])
def test_another_call_is_another_program(kept, change):
    jitted()(2.0, *given(place=jnp.asarray))
    arguments = change(*given(place=jnp.asarray))
    expected = bits(jax.jit(work, static_argnums=0)(*arguments))
    traced.clear()
    assert bits(jitted()(*arguments)) == expected and len(traced) == 1


def test_another_function_is_another_program(kept):
    jitted()(2.0, *given())
    pair, _ = jitted(other)(2.0, *given())
    np.testing.assert_array_equal(pair.a, given()[0].a)


def test_programs_that_differ_in_what_they_read_or_give_are_told_apart(kept):
    """Though their text is the same but for that, and shapes are too."""
    x, y = jnp.float32([1, 2]), jnp.float32([3, 4])
    for which in (1, 0):
        one = programs.jit(lambda which, a, b: (a if which else b) + 1, static_argnames=("which",))
        np.testing.assert_array_equal(one(which, x, y), (x if which else y) + 1)
    outs = [(x, None), (x,), [x], Pair(x, x, 2), Pair(x, x, 3)]
    for number, out in enumerate(outs):
        give = programs.jit(lambda number, a: jax.tree.map(lambda _: a, outs[number]), static_argnames=("number",))
        found = give(number, x)
        assert jax.tree.structure(found) == jax.tree.structure(out)


def test_static_arguments_have_names_and_defaults(kept):
    scaled = programs.jit(scale_and_shift, static_argnames=("p", "q"))
    x = jnp.float32(5)
    for given, expected in (({"p": 2}, 11), ({"q": 2}, 7), ({}, 6), ({"p": 1, "q": 1}, 6), ({"p": 3, "q": 0}, 15)):
        assert float(scaled(x, **given)) == expected


def scale_and_shift(x, p=1, q=1):
    return x * p + q


def test_edited_source_is_traced_again_and_compiled_again_only_where_the_program_changed(kept, monkeypatch):
    jitted()(2.0, *given())
    files = {f.name: f.stat().st_ino for f in kept.iterdir()}  # another one where it was written again
    monkeypatch.setattr(programs, "_source", lambda: "edited")
    jitted()(2.0, *given())
    assert len(traced) == 2
    after = {f.name: f.stat().st_ino for f in kept.iterdir()}
    assert {name: after[name] for name in files} == files  # the compiled program was found
    assert [name for name in after if name not in files and name.endswith(".program")] == []
    jitted()(2.0, *given())
    assert len(traced) == 2


@pytest.mark.parametrize("setting", ["jax_default_matmul_precision", "jax_enable_checks"])
def test_another_setting_of_jax_is_another_program(kept, setting):
    jitted()(2.0, *given())
    before = getattr(jax.config, setting)
    jax.config.update(setting, "highest" if before is None else not before)
    try:
        jitted()(2.0, *given())
    finally:
        jax.config.update(setting, before)
    assert len(traced) == 2


def test_closures_are_not_kept(kept):
    for power in (2, 3):
        scale = lambda x, power=power: x**power  # noqa: E731
        function = programs.jit(lambda scale, x: scale(x), static_argnames=("scale",))
        assert float(function(scale, jnp.float32(2))) == 2**power
    assert list(kept.iterdir()) == []


@pytest.mark.parametrize(
    "damage", [lambda data: b"", lambda data: data[:-1], lambda data: data[:100] + b"x" + data[101:], lambda data: b"x" * 99]
)
def test_damaged_file_costs_a_compilation_and_is_mended(kept, damage):
    expected = bits(jitted()(2.0, *given()))
    (file,) = kept.glob("*.program")
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    with pytest.warns(UserWarning, match=file.name):
        assert bits(jitted()(2.0, *given())) == expected
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        traced.clear()
        assert bits(jitted()(2.0, *given())) == expected and traced == []


def test_files_of_others_are_not_read(kept, monkeypatch):
    jitted()(2.0, *given())
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.warns(UserWarning, match="another user's file"):
        jitted()(2.0, *given())
    assert len(traced) == 2


def test_without_a_place_to_write_programs_still_run(kept, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(programs, "write_atomically", full)
    with pytest.warns(UserWarning, match="not kept .*No space left"):
        first = jitted()(2.0, *given())
    with pytest.warns(UserWarning, match="not kept"):
        assert bits(jitted()(2.0, *given())) == bits(first)
    monkeypatch.setattr(programs, "private_directory", full)
    with pytest.warns(UserWarning, match="are not kept"):
        programs.keep(kept)
    assert bits(jitted()(2.0, *given())) == bits(first)


def test_what_was_not_used_for_long_goes(kept):
    for rows in (3, 4):
        jitted()(2.0, *given(rows))
    old = {f.name for f in kept.iterdir()}
    for file in kept.iterdir():
        os.utime(file, (0, 0))
    jitted()(2.0, *given(3))  # is used again
    programs.keep(kept)
    left = {f.name for f in kept.iterdir()}
    assert len(old) == 4 and len(left) == 2 and left < old
    traced.clear()
    jitted()(2.0, *given(3))
    assert traced == []


def test_within_another_program_it_is_a_part_of_it(kept):
    f = jitted()
    whole = jax.jit(lambda pair, pool: f(2.0, pair, pool)[0].a.sum())
    assert float(whole(*given())) == pytest.approx(float(f(2.0, *given())[0].a.sum()), rel=1e-6)

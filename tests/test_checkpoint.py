"""Restored bits are the saved bits, on the template's shardings; a kill at any moment leaves a directory that restores."""

import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rl_adapter.checkpoint import Checkpoints

IDENTITY = {"base_digest": "abc", "config": {"seed": 0}, "packages": {"jax": "0.10.2"}}


def make_tree(value: float = 1.0):
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    params = {
        "a": jax.device_put(jnp.arange(16.0) * value + 1e-7, sharding),
        "b": {"odd/name": jnp.full((2, 3), value, jnp.bfloat16), "off": None, "empty": jnp.zeros((0, 3))},
        "special": jnp.array([jnp.nan, -0.0, jnp.inf, 1e-45], jnp.float32),
    }
    opt_state = optax.adamw(1e-3).init(params)
    return {"params": params, "opt": opt_state, "step": jnp.int32(value), "key": jnp.array([1, 2**32 - 1], jnp.uint32), "np": np.arange(3)}


def assert_same_bits(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert g.dtype == w.dtype and np.asarray(g).tobytes() == np.asarray(w).tobytes()
        if isinstance(w, jax.Array):
            assert g.sharding.is_equivalent_to(w.sharding, w.ndim)


def directory(tmp_path, saves=3, keep=2):
    """`tmp_path` with that many checkpoints in it."""
    with Checkpoints(tmp_path, IDENTITY, every=1, keep=keep) as checkpoints:
        for step in range(1, saves + 1):
            assert checkpoints.save(step, make_tree(step), {"step": step, "order": [step, "x"]})
    return tmp_path


def test_round_trip_is_bit_exact_and_sharded(tmp_path):
    with Checkpoints(directory(tmp_path), IDENTITY, every=1, keep=2) as checkpoints:
        assert checkpoints.latest() == 3
        tree, cursor = checkpoints.restore(3, make_tree(0))
        assert_same_bits(tree, make_tree(3))
        assert cursor == {"step": 3, "order": [3, "x"]}
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if isinstance(x, jax.Array) else x, make_tree(0)
        )
        assert_same_bits(checkpoints.restore(2, abstract)[0], make_tree(2))


def test_saves_when_due_and_keeps_the_last(tmp_path):
    tree = {"x": jnp.zeros(2)}
    with Checkpoints(tmp_path, IDENTITY, every=2, keep=2) as checkpoints:
        assert checkpoints.latest() is None
        assert [checkpoints.save(step, tree, {}) for step in range(1, 8)] == [step % 2 == 0 for step in range(1, 8)]
        assert checkpoints.save(7, tree, {}, force=True)
        assert not checkpoints.save(7, tree, {}, force=True), "there already"
        checkpoints.wait()
        assert checkpoints.latest() == 7
    assert sorted(p.name for p in tmp_path.iterdir()) == ["6", "7", "identity.json"]


def test_saved_arrays_may_be_donated_at_once(tmp_path):
    bump = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.zeros(1 << 20)
    with Checkpoints(tmp_path, IDENTITY, every=1, keep=9) as checkpoints:
        for step in range(3):
            checkpoints.save(step, {"x": x}, {})
            x = bump(x)
        checkpoints.wait()
        for step in range(3):
            assert jnp.all(checkpoints.restore(step, {"x": x})[0]["x"] == step)


def test_a_reader_passes_over_what_is_damaged_and_moves_nothing(tmp_path):
    with Checkpoints(tmp_path, {}, every=1, keep=2) as saved:
        for step in (1, 2):
            saved.save(step, {"x": np.arange(1000.0)}, {})
        saved.wait()
    for path in (tmp_path / "2" / "tree").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-50])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with Checkpoints(tmp_path, {}, every=0, keep=2, read_only=True) as reader:
        assert reader.latest() == 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_other_identity_is_refused_by_field_unless_overridden(tmp_path):
    directory(tmp_path)
    other = {"base_digest": "xyz", "config": {"seed": 0, "new": 1}, "packages": {"jax": "0.10.2"}}
    with pytest.raises(ValueError) as error:
        Checkpoints(tmp_path, other, every=1, keep=2)
    assert "base_digest: the checkpoint has 'abc', this run 'xyz'" in str(error.value)
    assert "config.new: the checkpoint has '(absent)', this run 1" in str(error.value)
    assert "jax" not in str(error.value)
    with Checkpoints(tmp_path, other, every=1, keep=2, override=True) as checkpoints:
        assert checkpoints.latest() == 3
        with pytest.raises(ValueError, match="found extra = nothing"):
            checkpoints.restore(3, make_tree() | {"extra": jnp.float32(0)})
    with Checkpoints(tmp_path, IDENTITY, every=1, keep=2):  # what did not fit has taken nothing from the run that it was tried on
        pass
    with Checkpoints(tmp_path, other, every=1, keep=2, override=True) as checkpoints:
        checkpoints.restore(3, make_tree())
    Checkpoints(tmp_path, other, every=1, keep=2).close()  # the new identity is the directory's now


def test_template_of_another_shape_names_the_leaf(tmp_path):
    with Checkpoints(directory(tmp_path), IDENTITY, every=1, keep=2) as checkpoints:
        with pytest.raises(ValueError, match=r"step = int32\[\], need float32\[2\]"):
            checkpoints.restore(3, make_tree() | {"step": jnp.zeros(2)})
        with pytest.raises(ValueError, match=r"found extra = nothing, need float32\[\]"):
            checkpoints.restore(3, make_tree() | {"extra": jnp.float32(0)})


@pytest.mark.parametrize("damage", ["truncate", "cursor", "remove"])
def test_damaged_latest_falls_back(tmp_path, damage):
    step = directory(tmp_path) / "3"
    if damage == "truncate":
        for file in (step / "tree").rglob("d/*"):
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    elif damage == "cursor":
        (step / "cursor" / "metadata").write_text('{"ste')
    else:
        (step / "tree" / "_METADATA").unlink()
    with Checkpoints(tmp_path, IDENTITY, every=1, keep=2) as checkpoints:
        assert checkpoints.latest() == 2
        assert_same_bits(checkpoints.restore(2, make_tree(0))[0], make_tree(2))
        assert checkpoints.save(3, make_tree(30), {}), "the damaged one is out of the way"
        checkpoints.wait()
        assert checkpoints.latest() == 3
    assert len(list((tmp_path / "damaged").iterdir())) == 1, "set aside, not deleted"


def test_only_damaged_checkpoints_are_an_error_not_a_fresh_start(tmp_path):
    for file in directory(tmp_path, saves=1).rglob("_METADATA"):
        file.unlink()
    with Checkpoints(tmp_path, IDENTITY, every=1, keep=2) as checkpoints:
        with pytest.raises(ValueError, match="found none that can be read"):
            checkpoints.latest()


SAVE_FOREVER = textwrap.dedent(
    """
    import sys
    import jax.numpy as jnp
    from rl_adapter.checkpoint import Checkpoints
    checkpoints = Checkpoints(sys.argv[1], {}, every=1, keep=1)
    step = checkpoints.latest() or 0
    while True:
        step += 1
        checkpoints.save(step, {"x": jnp.full(1 << 16, step), "y": {"z": jnp.full((8, 512), -step)}}, {"step": step})
        print(step, flush=True)
    """
)


def test_sigkill_at_any_moment_leaves_a_restorable_directory(tmp_path):
    template = {"x": jnp.zeros(1 << 16, int), "y": {"z": jnp.zeros((8, 512), int)}}
    reached = 0
    for delay in (0.0, 0.04, 0.13):
        command = [sys.executable, "-c", SAVE_FOREVER, str(tmp_path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=pathlib.Path(__file__).parents[1])
        for _ in range(3):  # the third save has begun, so the first is complete
            started = int(process.stdout.readline())
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        with Checkpoints(tmp_path, {}, every=1, keep=1) as checkpoints:
            step = checkpoints.latest()
            assert step is not None and step >= max(started - 2, reached)
            tree, cursor = checkpoints.restore(step, template)
            assert cursor == {"step": step}
            assert jnp.all(tree["x"] == step) and jnp.all(tree["y"]["z"] == -step)
        assert not (tmp_path / "damaged").exists()
        assert not list(tmp_path.glob("*tmp*")), "leftovers are cleared"
        reached = step

"""What `plan` foretells of memory is what is placed, byte for byte; what it estimates is above what the compiler plans."""

import functools
import io
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import optax
import pytest
from rich.console import Console

from rl_adapter import config as configs
from rl_adapter import engine, lora, loss, microbatch, plan, update
from rl_adapter import mesh as meshes
from rl_adapter import model as models
from rl_adapter.hub import codecs, families, load
from rl_adapter.sampling import Sampling
from rl_adapter.types import Numerics, Rollout

ROOT = pathlib.Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
QUANTIZE = {"linear": "int8", "head": "fixed16", "router": "fixed16"}
EXPERIMENTS = "qwen3_30b_a3b", "gpt_oss_20b", "gpt_oss_120b", "deepseek_v3", "kimi_k2_thinking"
AS_RELEASED = "deepseek_v3-fp8", "gpt_oss-mxfp4", "kimi_k25-int4_g32", "qwen3_moe-bf16-shards"
CONTEXT = 16


def shapes(tree):
    return jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree)


@pytest.mark.parametrize("path", sorted(GOLDEN.iterdir()) + [configs.SHIPPED_BASE], ids=lambda path: path.name)
def test_the_base_is_foretold(path):
    """The tree, and each device's bytes of it, are those of the arrays that loading places."""
    path = next(path.glob("*.gguf"), path)
    opened = load.open_checkpoint(path)
    spec = opened.spec
    mesh = meshes.make(1, 2, 1) if spec.experts % 2 == 0 else meshes.make(1, 1, 1)
    foretold = plan.abstract_base(opened.described, opened.quantization, QUANTIZE, {}, opened.tensors, CONTEXT)
    base = models.place(spec, load.load(opened, QUANTIZE, mesh).base, mesh, CONTEXT)
    assert shapes(foretold) == shapes(base)
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(base))
    assert plan.on_device(foretold, meshes.base_shardings(mesh, foretold)) == held


@pytest.mark.parametrize("name", AS_RELEASED)
def test_a_config_alone_tells_what_the_files_do(name):
    opened = load.open_checkpoint(GOLDEN / name)
    described, config = families.read_family(GOLDEN / name)
    alone = plan.abstract_base(described, codecs.read_quantization(config), QUANTIZE, config, None, CONTEXT)
    # Releases keep routers as floats; the maker of one of these files packed them too.
    but_routers = lambda base: shapes(base.replace(layers=tuple(layer.replace(router=None) for layer in base.layers)))
    assert but_routers(alone) == but_routers(
        plan.abstract_base(opened.described, opened.quantization, QUANTIZE, {}, opened.tensors, CONTEXT)
    )


def test_a_config_that_tells_too_little_is_refused():
    described, config = families.read_family(GOLDEN / "qwen3_moe-gptq")
    with pytest.raises(ValueError, match=r"quantization_config: found 'gptq'.*need the checkpoint's files"):
        plan.abstract_base(described, codecs.read_quantization(config), QUANTIZE, config)


@pytest.mark.parametrize("rule", ["re:(a+)+$", "re:" + "a" * 300, "re:.*.*.*.*.*x", "re:["])
def test_hostile_ignore_rules_are_refused(rule):
    described, config = families.read_family(GOLDEN / "kimi_k25-int4_g32")
    config["quantization_config"]["ignore"] = [rule]
    with pytest.raises(ValueError, match=r"quantization_config\.ignore: found"):
        plan.abstract_base(described, codecs.read_quantization(config), QUANTIZE, config)


def shipped(**changes):
    return configs.override(configs.default(), {name.replace("__", "."): value for name, value in changes.items()})


@pytest.mark.parametrize("devices, sizes", [(8, (4, 4, 1)), (8, (0, 16, 1)), (8, (0, 3, 3)), (1, (2, 1, 1)), (1024, (1025, 1, 1))])
def test_devices_that_are_not_there_are_refused(devices, sizes):
    config = shipped(**dict(zip(("mesh__data", "mesh__expert", "mesh__model"), sizes)))
    with pytest.raises(ValueError, match=rf"^mesh: data x expert x model = .* needs more than --devices={devices}$"):
        plan.plan(config, devices)


@pytest.mark.parametrize("devices", [-1, -8, 1025])
def test_no_such_number_of_devices(devices):
    with pytest.raises(ValueError, match=rf"^--devices: found {devices}, need 0 .* to 1024"):
        plan.plan(shipped(), devices)


def test_data_takes_what_the_other_two_leave():
    for sizes, need in (((0, 2, 1), (4, 2, 1)), ((0, 3, 1), (2, 3, 1)), ((1, 2, 2), (1, 2, 2)), ((8, 1, 1), (8, 1, 1))):
        config = shipped(**dict(zip(("mesh__data", "mesh__expert", "mesh__model"), sizes)))
        assert tuple(plan.abstract_mesh(config, 8).shape.values()) == need


def test_an_index_whose_shards_are_not_there_yet(tmp_path):
    """A download that has begun: the config is what tells, as without the index."""
    directory = shutil.copytree(GOLDEN / "qwen3_moe-bf16-shards", tmp_path / "model")
    config = shipped(model=str(directory), mesh__data=1, data__max_prompt_tokens=8, rollout__max_new_tokens=8)
    whole, _ = plan.plan(config)
    for shard in sorted(directory.glob("*.safetensors")):
        shard.unlink()
        assert plan.plan(config)[0] == whole


@pytest.mark.parametrize("field", ["linear", "head", "router"])
def test_a_form_that_does_not_divide_is_named(field):
    described, settings = families.read_family(GOLDEN / "qwen3_moe-bf16-shards")
    with pytest.raises(ValueError, match=rf"^quantize\.{field}: found 'int4_g128', need a form that fits .*weight"):
        plan.abstract_base(described, None, QUANTIZE | {field: "int4_g128"}, settings)


@functools.cache
def small():
    """A run on the shapes of a golden checkpoint that is widened, and what is placed for it."""
    config = configs.default().unlock()
    config.mesh.data, config.mesh.expert = 1, 2
    config.adapter.experts.rank = 0
    config.data.max_prompt_tokens, config.rollout.max_new_tokens = 32, 32
    config.rollout.prompts, config.rollout.group, config.eval.batch, config.loss.measure_kl = 8, 4, 8, False
    described, settings = families.read_family(GOLDEN / "qwen3_moe-bf16-shards")
    wide = {"hidden_size": 128, "num_hidden_layers": 2, "num_experts": 16, "moe_intermediate_size": 64, "vocab_size": 2048}
    described = families.describe({**settings, **wide})
    base = plan.abstract_base(described, None, QUANTIZE, settings, None, 64)
    return config, described.spec, base


def placed(tree, shardings):
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def test_a_step_against_the_compiler():
    """Its arguments to the byte; its temporaries are below the estimate, and not so far that the estimate tells nothing."""
    config, spec, base = small()
    mesh, (p, g, t, c) = meshes.make(1, 2, 1), (8, 4, 32, 32)
    model = models.Model(spec, lora.adapter_spec(config.adapter), Numerics(), mesh, True)
    found = plan.need(spec, base, config, plan.abstract_mesh(config, 2))
    adapter = jax.eval_shape(lambda: lora.init(model.adapter, base, jax.random.key(0)))
    tx = optax.adamw(1e-3)
    state = update.State(adapter, jax.eval_shape(tx.init, adapter), jax.ShapeDtypeStruct((), jnp.int32))
    state = placed(state, meshes.adapter_shardings(mesh, state))
    rows, layers = meshes.rows(mesh), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, meshes.ROWS))
    row = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=rows)
    choice = lambda *shape: jax.ShapeDtypeStruct((spec.sparse_layers, p, *shape, spec.experts_per_token), jnp.int16, sharding=layers)
    i32, f32 = jnp.int32, jnp.float32
    r = Rollout(
        row((p, t), i32), row((p,), i32), row((p, g, c), i32), row((p, g, c), jnp.bool_), row((p, g), i32), row((p, g), jnp.bool_),
        *(row((p, g, c), f32),) * 3, choice(t), choice(g, c),
    )  # fmt: skip
    base = placed(base, meshes.base_shardings(mesh, base))
    tokens, prompts = microbatch.size(p // 2, t, g, c, -(-config.optimizer.microbatch_tokens // 2))
    planned = placed((jax.ShapeDtypeStruct((p, 2 * prompts), i32), jax.ShapeDtypeStruct((), i32)), (meshes.replicated(mesh),) * 2)
    batch = update.Batch(r.replace(stopped=None, sampled_logprobs=None), *(row((p, g, c), f32),) * 3)  # as `update.update` passes it
    lowered = update._update.lower(model, tx, update.Policy(loss.Loss()), tokens, base, state, batch, None, *planned)
    memory = lowered.compile(compiler_options={"xla_backend_optimization_level": 0}).memory_analysis()
    passed = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(batch)) // 2
    assert memory.argument_size_in_bytes == found.held + passed + 4 * (p * 2 * prompts + 1) + 2 * 4
    assert memory.temp_size_in_bytes < found.training < 4 * memory.temp_size_in_bytes


@pytest.mark.parametrize("numerics", ["exact", "float"])
@pytest.mark.parametrize("family", ["qwen3_moe-bf16-shards", "deepseek_v3-bf16"])
def test_the_cache_is_that_of_the_sampler(family, numerics):
    spec = families.read_spec(GOLDEN / family)
    model = models.Model(spec, numeric=Numerics(numerics))
    lay = engine.layout(engine.Engine(slots=4, page=3), 2, 6, 5, Sampling(3, 7, (), 0))
    keys = jax.tree.leaves(engine.cache_like(model, lay))
    assert engine.cache_bytes(model, lay) == sum(x.size * x.dtype.itemsize for x in keys) / 2
    width = spec.head_dim * (1 if spec.mla else 2) * spec.kv_heads  # a latent is kept once
    scales = (1 if spec.mla else 2) * spec.kv_heads * 4
    each = width * 2 + scales if numerics == "exact" else width * 4
    # A shard's three prompts, of two pages each, two completions, of three, and the page that nobody reads.
    assert engine.cache_bytes(model, lay) == spec.layers * (3 * 2 + 2 * 3 + 1) * 3 * each


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_released_model(name, monkeypatch):
    """The config is valid without weights, divides over 8 devices, and its docstring says what the planner says."""
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    module = configs.load_module(ROOT / "experiments" / f"{name}.py")
    found, mesh = plan.plan(module.get_config())
    assert mesh.size == 8
    assert re.search(r"Memory: ([\d.]+) GB of the 141 GB of each", module.__doc__)[1] == f"{found.total / plan.GB:.1f}"
    assert "Not run on that hardware" in module.__doc__
    said = re.search(r"XLA_PYTHON_CLIENT_MEM_FRACTION=(\d\.\d+)", module.__doc__)
    assert plan.verdict(found, plan.H200, float(said[1]) if said else plan.share()).startswith("fits: ")
    assert module.get_config("elsewhere").model == "elsewhere"


def test_kimi_by_hand():
    """Experts: half a byte a weight and a bfloat16 for each 32 of them, an eighth on each device."""
    config = configs.load_module(ROOT / "experiments" / "kimi_k2_thinking.py").get_config()
    found, _ = plan.plan(config)
    experts = 60 * 384 * 3 * 7168 * 2048 * (1 / 2 + 2 / 32) / 8
    o_and_embedding = 61 * 64 * 128 * 7168 + 163840 * 7168 * 2
    assert experts + o_and_embedding < found.weights < experts + 3 * o_and_embedding


def test_verdicts_and_table(monkeypatch):
    need = plan.Need(60 * plan.GB, 1, 2, 3, 4, 5)
    assert plan.verdict(need, 100 * plan.GB, 0.75).startswith("fits: 60.0 GB of the 75.0 GB")
    assert "MEM_FRACTION=0.61" in plan.verdict(need, 100 * plan.GB, 0.5)
    assert plan.verdict(need, 61 * plan.GB, 0.75) == "does not fit: 60.0 GB of 61 GB"
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "many")
    with pytest.raises(ValueError, match=r"XLA_PYTHON_CLIENT_MEM_FRACTION: found 'many'"):
        plan.share()
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    config = configs.load_module(ROOT / "experiments" / "gpt_oss_20b.py").get_config()
    text = io.StringIO()
    found = plan.run(config, console=Console(file=text, width=100))
    assert f"{found.weights / plan.GB:.2f}" in text.getvalue() and "126.9 GB that JAX takes" in text.getvalue()


def test_what_an_algorithm_keeps_beside_the_policy():
    """A critic has an adapter and moments of its own; rollouts that are behind keep what sampled them."""
    config, spec, base = small()
    mesh = plan.abstract_mesh(config, 2)
    plain = plan.need(spec, base, config, mesh)
    critic = plan.need(spec, base, configs.override(config, {"advantage.estimator": "gae"}), mesh)
    assert (critic.adapters, critic.optimizer) == (2 * plain.adapters, 2 * plain.optimizer)
    behind = plan.need(spec, base, configs.override(config, {"rollout.max_staleness": 3}), mesh)
    assert (behind.adapters, behind.optimizer) == (4 * plain.adapters, plain.optimizer)

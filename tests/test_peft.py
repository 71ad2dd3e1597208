"""PEFT directories: layouts against the formulas of peft, bit-equal round trips, and all that must be refused."""

import dataclasses
import json
import pathlib
import re

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rl_adapter import lora
from rl_adapter.hub import families, peft, peft_read
from rl_adapter.lora import Adapter, AdapterSpec, Lora

GOLDEN = pathlib.Path(__file__).parent / "golden"


def spec_of(attention=3, mlp=2, experts=4, router=2, head=1, **options) -> AdapterSpec:
    """Another rank and alpha in each group."""
    ranks = dict(attention=attention, mlp=mlp, experts=experts, router=router, head=head)
    alphas = dict(attention=6.0, mlp=5.0, experts=8.0, router=0.3, head=7.0)
    return AdapterSpec(tuple(ranks.items()), tuple(alphas.items()), **options)


def random_adapter(described: families.Description, spec: AdapterSpec, size: float = 1.0, seed: int = 0) -> Adapter:
    """Of everything that a spec adapts, with A ~ N(0, 1 / K) and B ~ N(0, size)."""
    random, ranks, model = np.random.default_rng(seed), dict(spec.ranks), described.spec

    def pair(shape, rank, lead=(), lead_a=()):
        (out, width), draw = shape, lambda *shape: random.normal(size=shape).astype(np.float32)
        return Lora(draw(*lead_a, width, rank) / np.float32(np.sqrt(width)), np.float32(size) * draw(*lead, rank, out))

    groups = {name: group for group, names in lora.GROUPS.items() for name in names}
    stacks = []
    for _, count, sparse in model.stacks:
        stack = {}
        for name, shape in families.fields(described, sparse).items():
            if name in groups and ranks[groups[name]]:
                lead = (count, model.experts) if families.per_expert(name) else (count,)
                lead_a = lead[:1] if spec.shared_a and families.per_expert(name) else lead
                stack[name] = pair(shape, ranks[groups[name]], lead, lead_a)
        stacks.append(stack)
    return Adapter(tuple(stacks), pair(families.top(model)["head"], ranks["head"]) if ranks["head"] else None)


SPEC = spec_of()
MODELS = ("qwen3_moe-f32-mixed-fused", "deepseek_v3-bf16", "gpt_oss-bf16", "mixtral-bf16", "kimi_k25-int4_g32", "llama-f32-tied")


def described(name: str) -> families.Description:
    return families.read_family(GOLDEN / name)[0]


def read_raw(directory) -> tuple[dict, dict]:
    """adapter_config.json, and the tensors without the prefix of their names."""
    tensors = load_file(directory / peft.WEIGHTS)
    return json.loads((directory / peft.CONFIG).read_text()), {key.removeprefix("base_model.model."): t for key, t in tensors.items()}


def rewrite(directory, change=lambda config: None, tensors=lambda tensors: tensors) -> None:
    config = json.loads((directory / peft.CONFIG).read_text())
    change(config)
    (directory / peft.CONFIG).write_text(json.dumps(config))
    save_file(tensors(load_file(directory / peft.WEIGHTS)), directory / peft.WEIGHTS)


def assert_same(found: Adapter, wanted: Adapter) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted)):
        assert a.dtype == np.float32 and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("options", [{}, {"rank_stabilized": True}, {"shared_a": True}, {"router": 0, "mlp": 0}, {"experts": 0, "head": 0}])
@pytest.mark.parametrize("layout", peft.LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_an_exported_adapter_comes_back_to_the_bit(name, layout, options, tmp_path):
    model, spec = described(name), spec_of(**options)
    adapter = random_adapter(model, spec)
    if layout == "per-expert" and model.family is families.GPT_OSS:
        with pytest.raises(ValueError, match="layout: found 'per-expert', need 'fused'.*GptOss"):
            peft.save(tmp_path / "out", model, adapter, spec, layout, "base")
        return
    rows = peft.save(tmp_path / "out", model, adapter, spec, layout, "base")
    back, found = peft_read.read(tmp_path / "out", model, spec)
    assert_same(back, adapter)
    assert found is spec
    assert {group for group, *_ in rows} == {g for g, r in spec.ranks if r and (g not in ("experts", "router") or model.spec.experts)} - (
        {"mlp"} if name in ("gpt_oss-bf16", "mixtral-bf16") else set()
    )
    if layout == "per-expert" and not spec.shared_a:
        assert sum(row[-1] for row in rows) == lora.count(adapter)
    inferred = peft_read.read(tmp_path / "out", model)[1]
    for group in {group for group, *_ in rows}:
        assert dict(inferred.ranks)[group] == dict(spec.ranks)[group]
        assert dict(inferred.alphas)[group] == pytest.approx(dict(spec.alphas)[group], rel=1e-12)


def deltas(adapter: Adapter, spec: AdapterSpec, run: int, field: str) -> np.ndarray:
    """scale A B of all layers of a run [n, (E,) out, in], f64."""
    pair = adapter.layers[run][field]
    return np.swapaxes(spec.scale(field) * (pair.a.astype(np.float64) @ pair.b), -1, -2)


@pytest.mark.parametrize("stabilized", [False, True])
@pytest.mark.parametrize("layout", ["fused", "fused-0.18"])
@pytest.mark.parametrize("name", ["mixtral-bf16", "gpt_oss-bf16"])
def test_fused_pairs_are_what_peft_adds_to_a_parameter(name, layout, stabilized, tmp_path):
    """By the formulas of `ParamWrapper.get_delta_weight`, in which B has the expert fastest (unsloth-zoo 1269, Automodel 3592)."""
    model, spec = described(name), spec_of(rank_stabilized=stabilized)
    adapter, experts = random_adapter(model, spec), model.spec.experts
    peft.save(tmp_path / "out", model, adapter, spec, layout, "base")
    config, tensors = read_raw(tmp_path / "out")
    transposed = model.family.interleaved  # parameters are [E, in, out]
    for module, fields in (("experts.base_layer", ("gate", "up")), ("experts", ("down",))):
        leaf = "down_proj" if fields == ("down",) else "gate_up_proj"
        rank = config["rank_pattern"].get(f"mlp.experts.{leaf}", config["r"])
        alpha = config["alpha_pattern"].get(f"mlp.experts.{leaf}", config["lora_alpha"])
        a, b = (tensors[f"model.layers.1.mlp.{module}.lora_{ab}.weight"].astype(np.float64) for ab in "AB")
        a, b = a.reshape(experts, rank, -1), b.reshape(len(b), rank, experts)
        # Before 0.19 every parameter was taken for [E, in, out].
        order = "eio" if transposed or layout == "fused-0.18" else "eoi"
        found = np.einsum(f"ore,eri->{order}", b, a) * alpha / (np.sqrt(rank) if stabilized else rank)
        parts = [deltas(adapter, spec, 0, field)[1] for field in fields]
        wanted = np.stack(parts, 2).reshape(experts, -1, model.spec.d_model) if transposed and len(parts) == 2 else np.concatenate(parts, 1)
        np.testing.assert_allclose(found, wanted.swapaxes(1, 2) if transposed else wanted, rtol=1e-12, atol=1e-12)


def test_per_expert_pairs_are_named_as_released_checkpoints_name_experts(tmp_path):
    model = described("mixtral-bf16")
    adapter = random_adapter(model, SPEC)
    peft.save(tmp_path / "out", model, adapter, SPEC, "per-expert", "base")
    config, tensors = read_raw(tmp_path / "out")
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    for name, field in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
        a, b = (tensors[f"model.layers.1.block_sparse_moe.experts.2.{name}.lora_{ab}.weight"].astype(np.float64) for ab in "AB")
        np.testing.assert_allclose(b @ a * 8 / 4, deltas(adapter, SPEC, 0, field)[1, 2], rtol=1e-12)


def test_the_parameters_of_experts_are_counted():
    """2 layers, 4 experts of width 32 in a model of width 32, rank 4: three matrices of 4 * (32 + 32) each (ktransformers 2146)."""
    spec = spec_of(attention=0, mlp=0, router=0, head=0)
    assert lora.count(random_adapter(described("mixtral-bf16"), spec)) == 2 * 4 * 3 * 4 * (32 + 32)


def test_one_pair_for_gate_and_up_of_a_rank_is_read_as_two(tmp_path):
    """As peft trains it: gate and up share an A."""
    model, spec = described("mixtral-bf16"), spec_of(attention=0, mlp=0, router=0, head=0)
    adapter = random_adapter(model, spec)
    stack = adapter.layers[0]
    adapter = Adapter((stack | {"up": Lora(stack["gate"].a, stack["up"].b)},))
    peft.save(tmp_path / "out", model, adapter, spec, "fused", "base")

    def one(tensors):
        for key in [key for key in tensors if "base_layer" in key]:
            t = tensors[key].reshape(4, 8, -1) if "lora_A" in key else tensors[key].reshape(-1, 8, 4)
            tensors[key] = t[:, :4].reshape(16, -1) if "lora_A" in key else (t[:, :4] + t[:, 4:]).reshape(-1, 16)
        return tensors

    rewrite(tmp_path / "out", lambda c: c.update(rank_pattern={}, alpha_pattern={}), one)
    assert_same(peft_read.read(tmp_path / "out", model, spec)[0], adapter)


@pytest.mark.parametrize("layout", ["fused", "fused-0.18"])
@pytest.mark.parametrize("width", [16, 32])
def test_square_experts_are_told_apart_by_their_other_parameter(layout, width, tmp_path):
    """gate_up_proj [E, 32, 32], or down_proj [E, 32, 32]: shapes of one of them do not tell in from out."""
    model, spec = described("mixtral-bf16"), spec_of(attention=0, mlp=0, router=0, head=0)
    model = dataclasses.replace(model, spec=dataclasses.replace(model.spec, d_expert=width))
    assert any(pair.inputs == pair.width for pair in peft.pairs(model, layout) if pair.experts)
    adapter = random_adapter(model, spec)
    peft.save(tmp_path / "out", model, adapter, spec, layout, "base")
    assert_same(peft_read.read(tmp_path / "out", model, spec)[0], adapter)


def adapter_of(tmp_path, layout="per-expert", name="mixtral-bf16"):
    model = described(name)
    peft.save(tmp_path / "out", model, random_adapter(model, SPEC), SPEC, layout, "base")
    return tmp_path / "out", model


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(lora_alpha=0), "lora_alpha: found '0', need a finite number above 0"),
        (dict(lora_alpha=float("nan")), "lora_alpha: found 'nan'"),
        (dict(lora_alpha="8"), "lora_alpha: found"),
        (dict(r=0), "r: found '0', need an integer"),
        (dict(r=True), "r: found 'True'"),
        (dict(r=5), r"q_proj.*|gate_proj.*|w1.lora_A.*found shape .*adapter_config.json gives it rank 5"),
        (dict(rank_pattern={"self_attn.q_proj": -1}), "rank_pattern: found"),
        (dict(rank_pattern={"(a+)+b": 3}), r"rank_pattern: found '\(a\+\)\+b', need the ends of names"),
        (dict(alpha_pattern={"self_attn.q_proj": 3}), "found alpha .*, need .* in all of attention"),
        (dict(peft_type="LOHA"), "peft_type: found 'LOHA', need 'LORA'"),
        (dict(bias="all"), "bias: found 'all', need 'none'"),
        (dict(use_dora=True), "use_dora: found 'True'"),
        (dict(modules_to_save=["lm_head"]), "modules_to_save: found"),
        (dict(init_lora_weights="pissa"), "init_lora_weights: found 'pissa'"),
        (dict(use_new_trick={"a": 1}), "use_new_trick: found .*, need nothing: it is not implemented"),
        (dict(use_rslora=True), r"adapter\.rank_stabilized: found False, need True"),
        (dict(lora_alpha=9), r"adapter\.experts\.alpha: found 8\.0, need 9"),
    ],
)
def test_settings_that_do_not_fit_are_refused(change, message, tmp_path):
    directory, model = adapter_of(tmp_path)
    rewrite(directory, lambda config: config.update(change))
    with pytest.raises(ValueError, match=message):
        peft_read.read(directory, model, SPEC)


@pytest.mark.parametrize(
    "pattern,hit",
    [
        ("q_proj", True),
        ("q_proj$", True),
        ("self_attn.q_proj", True),
        (r".*\.q_proj", True),
        (r"^.*\.self_attn\.q_proj$", True),
        (".*.proj", True),
        (r".*\.proj", False),
        ("proj", False),
        ("^q_proj$", False),
        ("^self_attn.q_proj", False),
        ("model.layers.0.self_attn.q_proj", "layer 0"),
        (r"^model\.layers\.0\.self_attn\.q_proj$", "layer 0"),
        ("^layers.0.self_attn.q_proj", False),
        (".layers.0.self_attn.q_proj", None),
        ("^^q_proj", None),
    ],
)
def test_a_pattern_means_what_it_means_to_peft(pattern, hit, tmp_path):
    """By `get_pattern_key` of peft; None: refused."""
    layers, names = ("model.layers.0", "model.layers.1"), ("q_proj", "k_proj")
    paths = [f"{layer}.self_attn.{name}" for layer in layers for name in names] + ["q_proj", "lm_head"]
    config = {"r": 4, "lora_alpha": 8, "rank_pattern": {pattern: 3}}
    (tmp_path / peft.CONFIG).write_text(json.dumps(config))
    if hit is None:
        with pytest.raises(ValueError, match="rank_pattern: found .*, need the ends of names"):
            peft_read._read_config(tmp_path / peft.CONFIG)
        return
    found = peft_read._read_config(tmp_path / peft.CONFIG)
    fits = {path: found.ranks[0][0].fits(path) for path in paths}
    assert fits == {path: bool(re.match(rf"(.*\.)?({pattern})$", path)) for path in paths}
    assert fits["model.layers.0.self_attn.q_proj"] == bool(hit) and fits["model.layers.1.self_attn.q_proj"] == (hit is True)


def test_the_first_pattern_that_fits_is_taken(tmp_path):
    directory, model = adapter_of(tmp_path)
    group = {"alpha_pattern": {r"^q_proj$": 5, "self_attn.q_proj$": 6, "self_attn.q_proj": 7}}
    rewrite(directory, lambda config: config.update(alpha_pattern=group["alpha_pattern"] | config["alpha_pattern"]))
    assert dict(peft_read.read(directory, model)[1].alphas)["attention"] == 6


@pytest.mark.parametrize("zero", ["a", "b"])
@pytest.mark.parametrize("layout", peft.LAYOUTS)
def test_an_adapter_that_learned_nothing_is_not_written(layout, zero, tmp_path):
    model = described("mixtral-bf16")
    adapter = random_adapter(model, SPEC)
    zeroed = lambda pair: pair.replace(**{zero: np.zeros_like(getattr(pair, zero))})
    adapter = jax.tree.map(zeroed, adapter, is_leaf=lambda x: isinstance(x, Lora))
    with pytest.raises(
        ValueError, match="the adapter changes nothing: " + {"a": "of every pair, A or B is zero", "b": "every B is zero"}[zero]
    ):
        peft.save(tmp_path / "out", model, adapter, SPEC, layout, "base")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layout", peft.LAYOUTS)
def test_keys_that_do_not_fit_are_listed(layout, tmp_path):
    directory, model = adapter_of(tmp_path, layout)
    whole = load_file(directory / peft.WEIGHTS)
    for tensors, message in (
        (
            whole | {"base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight": np.zeros((3, 32), np.float32)},
            r"1 unknown keys(.|\n)*layers\.7",
        ),
        ({k: v for k, v in whole.items() if "layers.1.self_attn.v_proj" not in k}, r"2 missing keys(.|\n)*layers\.1\.self_attn\.v_proj"),
        ({k: v for k, v in whole.items() if "experts" not in k or "layers.0" in k}, r"missing keys(.|\n)*layers\.1"),
        ({k.removeprefix("base_model.model."): v for k, v in whole.items()}, r"begin with 'base_model\.model\.', found others"),
        ({k.replace("lora_A.weight", "lora_A.default.weight"): v for k, v in whole.items()}, r"unknown keys(.|\n)*default"),
        ({k: v.astype(np.int32) for k, v in whole.items()}, "found I32, need BF16"),
        ({k: v * np.float32(np.nan) for k, v in whole.items()}, "holds NaN or Inf"),
        ({k: v.reshape(-1) for k, v in whole.items()}, "found shape"),
        ({k: np.zeros_like(v) if "lora_B" in k else v for k, v in whole.items()}, "changes no logit"),
        ({}, "missing keys|unknown keys|changes no logit|found"),
    ):
        save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, directory / peft.WEIGHTS)
        with pytest.raises(ValueError, match=message):
            peft_read.read(directory, model, SPEC)


@pytest.mark.parametrize(
    "spec,message",
    [
        (spec_of(experts=2), r"adapter\.experts\.rank: found 2, need 4"),
        (spec_of(head=0), r"adapter\.head\.rank: found 0, need 1"),
        (dataclasses.replace(SPEC, alphas=tuple((g, 1.5) for g, _ in SPEC.alphas)), r"adapter\.attention\.alpha: found 1\.5, need 6"),
        (spec_of(shared_a=True), r"adapter\.shared_a: found true, but"),
    ],
)
def test_an_adapter_of_other_ranks_than_the_config_is_refused(spec, message, tmp_path):
    directory, model = adapter_of(tmp_path, "fused")
    with pytest.raises(ValueError, match=message):
        peft_read.read(directory, model, spec)


def test_other_files_are_refused(tmp_path):
    directory, model = adapter_of(tmp_path)
    (directory / peft.WEIGHTS).rename(directory / "adapter_model.bin")
    with pytest.raises(ValueError, match="adapter_model.bin, which may run code"):
        peft_read.read(directory, model, SPEC)
    (directory / peft.WEIGHTS).write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match="need a whole safetensors file"):
        peft_read.read(directory, model, SPEC)
    (directory / peft.CONFIG).write_text("[" * 100_000)
    with pytest.raises(ValueError, match="need a JSON"):
        peft_read.read(directory, model, SPEC)


def test_nothing_is_overwritten(tmp_path):
    directory, model = adapter_of(tmp_path)
    with pytest.raises(ValueError, match="nothing is overwritten"):
        peft.save(directory, model, random_adapter(model, SPEC), SPEC, "fused", "base")

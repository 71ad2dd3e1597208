"""What a run needs of each device's memory, told before anything is loaded: arithmetic on shapes, no device, no weights.

    python launch.py --mode=plan --config=experiments/kimi_k2_thinking.py

Weights, adapters, optimizer and cache are exact: the shapes of the very arrays that a run places, split by the very shardings. What a
program keeps in between is an estimate: `COPIES` of its large activations, `MATRIX` of its largest weight, and `SPARE` on top. On small
shapes of Qwen3-MoE that is 1.1 to 1.7 times what XLA's compiler for CPU reports of an update (tests/test_plan.py holds it above 1), and
1.4 times of a rollout. Other families were not compiled for it, and an accelerator's compiler may differ: it is no promise there.
"""

import dataclasses
import os
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType
from ml_collections import ConfigDict
from rich import box
from rich.console import Console
from rich.table import Table

from rl_adapter import config as configs
from rl_adapter import config_check, engine, lora, microbatch, quant
from rl_adapter import mesh as meshes
from rl_adapter import model as models
from rl_adapter.hub import codecs, families, load
from rl_adapter.hub.codecs import Codec, Quantization, Source, compressed_tensors, floats, fp8, mxfp4
from rl_adapter.hub.files import DTYPES, Entry, weight_files
from rl_adapter.sampling import Sampling
from rl_adapter.types import Base, Numerics, PyTree, Spec

GB = 10**9
H200 = 141 * GB  # as its data sheet says
SHARE = 0.75  # of a device's memory that JAX takes, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise
SPARE = 0.25  # of the temporaries
MATRIX = 3  # copies in 32 bits of a matrix while it is multiplied
COPIES = 4  # of an activation that are there at once, forward and backward
LARGEST_SHARE = 0.95  # of a device's memory: the driver, and the program itself, want some


@dataclasses.dataclass(frozen=True)
class Need:
    """Bytes of one device. Rollout and update come in turns, so a run needs the larger of the two totals."""

    weights: int
    adapters: int
    optimizer: int  # its moments
    cache: int  # of the rollout: keys and values of prompts and completions
    sampling: int  # temporaries of the rollout
    training: int  # temporaries of the update, gradients among them

    @property
    def held(self) -> int:
        return self.weights + self.adapters + self.optimizer

    @property
    def rollout(self) -> int:
        return self.held + self.cache + self.sampling

    @property
    def update(self) -> int:
        return self.held + self.training

    @property
    def total(self) -> int:
        return max(self.rollout, self.update)


# --- the base, by shapes -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Blank:
    """Stands in for the tensors of files that are not there: one matrix, as its codec expects it, of ones."""

    entries: dict[str, Entry]
    shape: tuple[int, int]  # of the matrix

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def read(self, name: str, index: tuple = ()) -> np.ndarray:
        entry = self.entries[name]
        if name.endswith("_shape"):
            return np.array(self.shape)
        return np.ascontiguousarray(np.broadcast_to(np.ones((), DTYPES[entry.dtype]), entry.shape)[index])


def abstract_base(
    described: families.Description, quantization: Quantization | None, quantize, config: dict, tensors=None, context: int = 0
) -> Base:
    """The base as `load.load` would make it, of `jax.ShapeDtypeStruct`s.

    Args:
        quantize: what matrices take that are stored as floats: linear, head, router.
        config: its `quantization_config` tells which matrices are packed, where there are no files.
        tensors: of a checkpoint whose files are there; their headers tell then, and one slice of each field is read.
        context: positions of the rotary table.

    Raises:
        ValueError: a tensor is missing, or what the config says is not enough to tell how the weights lie.
    """
    spec, forms, parts = described.spec, load.forms_of(quantize), {}
    has = (lambda name: False) if tensors is None else tensors.__contains__

    def add(run: int | None, name: str, shape: tuple[int, ...], lead: tuple[int, ...], source: Source) -> None:
        put = lambda field, tree: parts.update({(run, field): _stacked(tree, lead)})
        if len(shape) == 1:
            return put(name, jax.ShapeDtypeStruct(shape, jnp.float32))
        codec, held = _holder(described, quantization, config, tensors, name, source, shape)
        kept = codec is not floats.FLOAT
        if name in load.DERIVED:
            mla = spec.mla
            for field, (k, n) in zip(load.DERIVED[name], ((mla.nope, mla.kv_rank), (mla.kv_rank, mla.v))):
                parts[run, field] = _stacked(_floats_as("fixed16", k, n), (*lead, spec.heads))
        elif name == "embed" and not kept:
            put(name, jax.ShapeDtypeStruct(shape, DTYPES[held.entries[source.name].dtype] if source.name in held else jnp.bfloat16))
        elif not kept:
            try:
                put(name, _floats_as(forms(name), *shape[::-1]))
            except ValueError as error:  # the form does not divide the features
                field = name if name in ("head", "router") else "linear"
                raise ValueError(f"quantize.{field}: found {forms(name)!r}, need a form that fits {source.name} ({error})") from None
        elif not (name == "embed" and spec.tie_embeddings):  # else the head's columns are read
            put(name, codec.read(source, shape, held, quantization))

    for name, shape in families.top(spec).items():
        add(None, name, shape, (), families.source(described, name, has=has))
    for run, (first, count, sparse) in enumerate(spec.stacks):
        for name, shape in families.fields(described, sparse).items():
            each = families.per_expert(name)
            source = families.source(described, name, first, 0 if each else None, has=has)
            add(run, name, shape, (count, spec.experts) if each else (count,), source)
    table = jax.ShapeDtypeStruct((context, len(spec.rope.frequencies)), jnp.float32)
    return load.assemble(len(spec.stacks), parts).replace(rope=(table, table))


def _stacked(tree: PyTree, lead: tuple[int, ...]) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype), tree)


def _floats_as(form: str, k: int, n: int) -> quant.Weight:
    """A float matrix [k, n] once it is quantized; one column tells, as columns come last."""
    one = quant.quantize(np.zeros((k, 1), np.float32), form)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*x.shape[:-1], n), x.dtype), one)


def _holder(described, quantization, config, tensors, name: str, source: Source, shape) -> tuple[Codec, "Blank"]:
    """The codec of a matrix, and tensors that it can read the matrix from."""
    if tensors is not None:
        codec = codecs.find(source, tensors, quantization)
        if problems := codecs.problems(codec.expected(source, shape, tensors, quantization), tensors):
            raise ValueError("; ".join(problems))
        return codec, tensors
    held = Blank({}, shape)
    if quantization is None or not _is_packed(described, quantization, config, name, source):
        return floats.FLOAT, held
    if quantization.method not in ("fp8", "mxfp4", "compressed-tensors") or len(set(quantization.schemes)) != 1:
        found = f"{quantization.method!r} with {len(quantization.schemes)} schemes"
        raise ValueError(f"quantization_config: found {found}, from which alone no plan can be made; need the checkpoint's files")
    kind = quantization.schemes[0].format
    codec = {
        "fp8": fp8.BLOCKS,
        "mxfp4": mxfp4.EXPERTS,
        compressed_tensors.PACKED: compressed_tensors.INT4,
        compressed_tensors.INT: compressed_tensors.EIGHT,
        compressed_tensors.FLOAT: compressed_tensors.EIGHT,
        compressed_tensors.NVFP4: compressed_tensors.FP4,
        compressed_tensors.MXFP4: compressed_tensors.FP4,
    }[kind]
    entry = lambda shape, dtype: Entry(shape, dtype, pathlib.Path(), np.zeros(0, np.uint8))
    held.entries[source.name] = entry(shape, "I8" if kind == compressed_tensors.INT else "F8_E4M3")
    for tensor, (shapes, dtypes) in codec.expected(source, shape, held, quantization).items():
        held.entries[tensor] = entry(tuple(shapes[0]), dtypes[0])
    return codec, held


def _is_packed(described, quantization: Quantization, config: dict, name: str, source: Source) -> bool:
    """Whether the release keeps a matrix in low precision, as far as its config tells. A router and an embedding are no Linear."""
    if name in ("embed", "router"):
        return False
    if quantization.method == "mxfp4":
        return families.per_expert(name)
    module, settings = source.name.removesuffix(".weight"), config["quantization_config"]
    if quantization.method == "fp8":
        return name != "head" and not any(part in module for part in settings.get("modules_to_not_convert") or ())
    return not any(_matches(rule, module) for rule in settings.get("ignore") or ())


def _matches(rule: str, module: str) -> bool:
    if not isinstance(rule, str) or not rule.startswith("re:"):
        return rule == module
    pattern = rule.removeprefix("re:")
    # An untrusted expression may take exponential time: one that could is refused.
    if len(pattern) > 200 or sum(map(pattern.count, "*+{")) > 4 or re.search(r"\)[*+?{]", pattern):
        raise ValueError(f"quantization_config.ignore: found {rule[:100]!r}, need a simpler expression, or the checkpoint's files")
    try:
        return re.match(pattern, module) is not None
    except re.error as error:
        raise ValueError(f"quantization_config.ignore: found {rule!r}, need a regular expression ({error})") from None


# --- bytes -------------------------------------------------------------------------------------------------------------------------


def on_device(tree: PyTree, shardings: PyTree) -> int:
    """Bytes of one device's part of a tree of shapes."""
    local = lambda x, s: int(np.prod(s.shard_shape(x.shape), dtype=np.int64)) * jnp.dtype(x.dtype).itemsize
    return sum(map(local, jax.tree.leaves(tree), jax.tree.leaves(shardings)))


def abstract_mesh(config: ConfigDict, devices: int) -> AbstractMesh:
    """The run's mesh, of devices that need not be there; data 0 takes all of `devices` (0: those present) that the other two leave.

    Raises:
        ValueError: a run on so many devices would refuse the mesh. Without a number nothing is known of them but the mesh.
    """
    m = config.mesh
    if not 0 <= devices <= 1024:
        raise ValueError(f"--devices: found {devices}, need 0 (those that are present) to 1024")
    data = m.data or (devices or jax.device_count()) // (m.expert * m.model)
    if devices and not 0 < data * m.expert * m.model <= devices:
        raise ValueError(f"mesh: data x expert x model = {data} x {m.expert} x {m.model} needs more than --devices={devices}")
    data = max(1, data)
    return AbstractMesh((data, m.expert, m.model), ("data", "expert", "model"), axis_types=(AxisType.Auto,) * 3)


def need(spec: Spec, base: Base, config: ConfigDict, mesh: AbstractMesh) -> Need:
    """What a run of `config` takes of each device of `mesh`."""
    adapter_spec = lora.adapter_spec(config.adapter)
    model = models.Model(spec, adapter_spec, Numerics(config.numerics, config.act_bits, config.cache_bits), None, config.remat)
    r, o, rows, t = config.rollout, config.optimizer, meshes.row_shards(mesh), config.data.max_prompt_tokens
    meshes.check(mesh, spec, prompts=r.prompts // o.minibatches)
    adapter = jax.eval_shape(lambda: lora.init(adapter_spec, base, jax.random.key(0)))
    adapters = on_device(adapter, meshes.adapter_shardings(mesh, adapter))
    examined = -(-min(config.eval.batch, config.eval.examples) // rows) * rows
    laid_out = lambda p, group: engine.layout(engine.from_config(r), rows, p, t, Sampling(group, r.max_new_tokens, (), 0))
    layouts = [laid_out(r.prompts, r.group), laid_out(examined, 1)]
    cache = max(engine.cache_bytes(model, lay) for lay in layouts)
    sampling = max(sampling_temporaries(model, base, mesh, lay, r.group) for lay in layouts)
    # The exact forward pass reads 16-bit copies of the adapter.
    copies = adapters // 2 if model.numeric.exact else 0
    training = training_temporaries(
        model, base, mesh, r.prompts // o.minibatches // rows, r.group, t, r.max_new_tokens, -(-o.microbatch_tokens // rows)
    )
    spare = lambda x: int(x * (1 + SPARE))
    weights = on_device(base, meshes.base_shardings(mesh, base))
    critic = config.advantage.estimator == "gae"
    # Beside the policy's: those that sample behind it, and those of a critic, a reference and a reward model.
    others = r.max_staleness + critic + bool(config.loss.reference) + bool(config.reward.model.weight)
    kept = Need(weights, adapters * (1 + others), 2 * adapters * (1 + critic), cache, 0, 0)
    return dataclasses.replace(kept, sampling=spare(sampling + copies), training=spare(training + 3 * adapters + copies))


def sampling_temporaries(model: models.Model, base: Base, mesh: AbstractMesh, lay: engine.Layout, group: int) -> int:
    """Bytes that a rollout keeps in between on one device, beside its cache: the larger of prefill and a decoding step."""
    spec, rows = model.spec, lay.shards
    tiles, prompts = lay.tiles // rows, lay.prefill // rows
    slots = tiles * lay.lanes
    read = tiles * lay.prompt_pages + slots * lay.own_pages  # pages, of one layer
    keys = engine.cache_bytes(model, dataclasses.replace(lay, pages=read)) / spec.layers
    prefill = _block(spec, 1, lay.budget, prompts * lay.chunk**2, lay.budget * rows / mesh.shape["data"])
    decode = _block(spec, 1, slots, read * lay.page, slots * rows / mesh.shape["data"]) + keys
    logits = 4 * spec.vocab
    keys += lay.steps * slots * (20 + 2 * spec.sparse_layers * spec.experts_per_token)  # what a dispatch gives
    return int(max(prefill + COPIES * logits * prompts * group, decode + COPIES * logits * slots) + _multiplying(base, mesh))


def training_temporaries(
    model: models.Model, base: Base, mesh: AbstractMesh, prompts: int, group: int, t: int, c: int, wanted: int = 0
) -> int:
    """Bytes that the gradient of a microbatch keeps in between on one device, beside the adapter's own; `prompts` of an update are its own,
    and `wanted` tokens of a microbatch."""
    spec, rows = model.spec, meshes.row_shards(mesh)
    tokens, at_once = microbatch.size(prompts, t, group, c, wanted)
    padded = 4 * COPIES * at_once * (t + group * c) * spec.heads * spec.head_dim
    scores = at_once * (t * t + group * c * (t + c))
    block = _block(spec, 1, tokens, scores, tokens * rows / mesh.shape["data"]) + padded
    saved = 4 * spec.layers * tokens * spec.d_model + (0 if model.remat else spec.layers * block)
    logits = 4 * spec.vocab * max(16, 2**20 // spec.vocab)  # a chunk of rows, of which `token_logprobs` takes so many
    return int(saved + block + COPIES * logits + _multiplying(base, mesh))


def _block(spec: Spec, rows: float, tokens: int, scores: int, gathered: float) -> float:
    """Bytes that one block keeps in between: `rows` x `tokens` through its matrices, of which each row has so many `scores` of
    attention, and `gathered` tokens through its experts, to each of which it adds a row a pair."""
    wide = spec.d_model + spec.heads * spec.head_dim + max(spec.d_mlp, spec.d_shared)
    pairs = gathered * spec.experts_per_token * spec.d_model if spec.sparse_layers else 0
    return COPIES * 4 * (rows * tokens * wide + rows * spec.heads * scores + pairs)


def _multiplying(base: Base, mesh: AbstractMesh) -> int:
    """Bytes of a device's part of the largest matrix, of one layer and expert, while it is multiplied: integers or floats, and copies."""
    local = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(s.shard_shape(x.shape), x.dtype), base, meshes.base_shardings(mesh, base))
    weights = filter(quant.is_quantized, jax.tree.leaves(local, is_leaf=quant.is_quantized))
    return int(MATRIX * 4 * max(np.prod(quant.shape(w)[-2:]) for w in weights))


# --- the command -------------------------------------------------------------------------------------------------------------------


def plan(config: ConfigDict, devices: int = 0) -> tuple[Need, AbstractMesh]:
    """What a run of `config` takes of each device. Of the model, `config.json` must be there; its weights need not be."""
    config_check.validate(config)
    mesh = abstract_mesh(config, devices)
    path = configs.model_path(config)
    context = config.context or config.data.max_prompt_tokens + config.rollout.max_new_tokens
    weights = weight_files(path) if path.is_dir() else [path]
    if not weights or not all(map(os.path.isfile, weights)):
        described, settings = families.read_family(path)
        base = abstract_base(described, codecs.read_quantization(settings), config.quantize, settings, None, context)
    else:
        opened = load.open_checkpoint(path)
        described = opened.described
        base = abstract_base(described, opened.quantization, config.quantize, {}, opened.tensors, context)
    if context > described.spec.max_positions:
        raise ValueError(f"context: found {context} tokens, need at most the model's {described.spec.max_positions} positions")
    return need(described.spec, base, config, mesh), mesh


def share() -> float:
    """Of a device's memory that JAX takes."""
    found = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or str(SHARE)
    try:
        if 0 < float(found) <= 1:
            return float(found)
    except ValueError:
        pass
    raise ValueError(f"XLA_PYTHON_CLIENT_MEM_FRACTION: found {found!r}, need a number in (0, 1]")


def verdict(found: Need, memory: int, taken: float) -> str:
    """Whether it fits devices of `memory` bytes, `taken` of which JAX takes."""
    least = found.total / memory
    if least <= taken:
        return f"fits: {found.total / GB:.1f} GB of the {memory * taken / GB:.1f} GB that JAX takes of {memory / GB:.0f} GB"
    if least <= LARGEST_SHARE:
        return f"fits only with XLA_PYTHON_CLIENT_MEM_FRACTION={np.ceil(least * 100) / 100:.2f} or more, of {memory / GB:.0f} GB"
    return f"does not fit: {found.total / GB:.1f} GB of {memory / GB:.0f} GB"


def run(config: ConfigDict, devices: int = 0, memory: int = H200, console: Console | None = None) -> Need:
    """Prints the table of a run's memory, and whether it fits devices of `memory` bytes."""
    found, mesh = plan(config, devices)
    table = Table(title=f"GB of each of {mesh.size} devices, mesh {dict(mesh.shape)}", box=box.SIMPLE)
    table.add_column("")
    for column in ("rollout", "update"):
        table.add_column(column, justify="right")
    show = lambda x: "" if x is None else f"{x / GB:.2f}"
    for name, *both in (
        ("weights", found.weights, found.weights),
        ("adapters", found.adapters, found.adapters),
        ("optimizer", found.optimizer, found.optimizer),
        ("cache", found.cache, None),
        ("activations and gradients (estimate)", found.sampling, found.training),
        ("total", found.rollout, found.update),
    ):
        table.add_row(name, *map(show, both), style="bold" if name == "total" else "")
    console = console or Console()
    console.print(table)
    console.print(verdict(found, memory, share()))
    return found

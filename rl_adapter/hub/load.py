"""From a checkpoint, a directory or a GGUF file, to the frozen base on the mesh.

First everything that can be told without reading weights is checked, and all that is wrong is raised as one error; then tensor after
tensor is read, kept in its packed form or quantized, and written into its place on the devices that hold it. The host never has more
than a few tensors, and no float copy of the model ever exists.
"""

import dataclasses
import json
import os
import pathlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import numpy as np
from jax.sharding import Mesh

from rl_adapter import mesh as meshes
from rl_adapter import quant
from rl_adapter.hub import codecs, families
from rl_adapter.hub.codecs import Codec, Quantization, Source
from rl_adapter.hub.codecs.codec import FLOATS
from rl_adapter.hub.files import Tensors, open_tensors
from rl_adapter.hub.gguf_files import Gguf, open_gguf
from rl_adapter.hub.stream import Stack
from rl_adapter.hub.tokenizer import Tokenizer, load_tokenizer, make_tokenizer, parse_backend
from rl_adapter.types import Base, Layer, PyTree, Spec

THREADS = min(4, os.cpu_count() or 1)  # tensors read ahead
DERIVED = {"kv_b": ("k_up", "v_up")}  # one tensor on disk, two fields of a Layer
MOST_EXPERTS = 2**18  # of all layers
BLOCK = 2**24  # numbers that are quantized at once
OF_LAYER = frozenset(field.name for field in dataclasses.fields(Layer))


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened model: its headers are read, its weights are not."""

    path: pathlib.Path
    described: families.Description
    tensors: Tensors
    quantization: Quantization | None
    gguf: Gguf | None = None

    @property
    def spec(self) -> Spec:
        return self.described.spec

    def tokenizer(self) -> Tokenizer:
        if self.gguf is None:
            return load_tokenizer(self.path, self.spec.vocab)
        config, backend = self.gguf.config, parse_backend(json.dumps(self.gguf.tokenizer), str(self.path))
        stop, pad, bos = (config.get(f"{name}_token_id") for name in ("eos", "pad", "bos"))
        fields = tuple(f"{self.path}: tokenizer{name}" for name in ("", ".ggml.eos_token_id", ".ggml.padding_token_id"))
        return make_tokenizer(backend, self.spec.vocab, stop, pad, bos_id=bos, template=self.gguf.chat_template, fields=fields)


@dataclasses.dataclass(frozen=True)
class Piece:
    """One slice of a field, and the codec that holds it; None: a vector, or an embedding, which stay floats."""

    index: tuple[int, ...]  # in the stack
    source: Source
    codec: Codec | None


@dataclasses.dataclass(frozen=True)
class Field:
    """All slices of one field of one run of layers (run None: of the top)."""

    run: int | None
    name: str
    shape: tuple[int, ...]  # of a slice on disk
    lead: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def label(self) -> str:
        return self.name if self.run is None else f"layers[{self.run}].{self.name}"


@dataclasses.dataclass(frozen=True)
class Loaded:
    spec: Spec
    base: Base
    digest: str
    report: dict  # "bytes": {form: bytes on all devices together}; "kept", "quantized": matrices; "loss": what quantizing cost, by form


def open_checkpoint(path: str | os.PathLike) -> Checkpoint:
    """A directory in Hugging Face layout, or a GGUF file.

    Raises:
        ValueError: config fields that are not implemented, or files that cannot be read.
    """
    path = pathlib.Path(path)
    if path.suffix == ".gguf":
        gguf = open_gguf(path)
        return Checkpoint(path, families.describe(gguf.config, str(path)), gguf.tensors, None, gguf)
    described, config = families.read_family(path)
    return Checkpoint(path, described, open_tensors(path), codecs.read_quantization(config))


def outline(described: families.Description) -> Base:
    """The shapes [..., in, out] of a base's matrices, for what needs to know no more of them."""
    spec, layers = described.spec, []
    for _, count, sparse in spec.stacks:
        leads = {name: (count, spec.experts) if families.per_expert(name) else (count,) for name in OF_LAYER}
        shapes = families.fields(described, sparse)
        layers.append(Layer(**{n: _shape(*leads[n], *shape[::-1]) for n, shape in shapes.items() if n in OF_LAYER}))
    top = families.top(spec)
    return Base(_shape(*top["embed"]), tuple(layers), _shape(*top["final_norm"]), _shape(*top["head"][::-1]))


def _shape(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.float32)


def load(
    model: Checkpoint | str | os.PathLike, quantize: Mapping[str, str], mesh: Mesh, progress: Callable[[int, int], None] | None = None
) -> Loaded:
    """Reads a model onto the mesh.

    Args:
        model: an opened one, or where one lies: see `open_checkpoint`.
        quantize: form (a key of `quant.FORMS`) that matrices stored as floats take: "linear", "head", "router".
        progress: called with the number of slices done, and of all.

    Raises:
        ValueError: config fields that are not implemented; or all tensors that are missing, unexpected, misshapen, of a wrong
            dtype, or not finite.
    """
    checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model)
    path, forms = checkpoint.path, forms_of(quantize)
    fields, problems = plan(checkpoint)
    _raise(path, problems + check(checkpoint, fields, forms))
    total, done, stacks = sum(len(field.pieces) for field in fields), 0, {}
    counts, loss = Counter(), {}
    shardings = lambda name: lambda tree: meshes.base_shardings(mesh, {name: tree})[name]
    pieces = ((field, piece) for field in fields for piece in field.pieces)
    for (field, piece), future in _ahead(lambda field, piece: _read(checkpoint, field, piece, forms), pieces):
        try:
            parts, cost = future.result()
            for name, part, kept in parts:
                where = (field.run, name)
                if where not in stacks:
                    stacks[where] = Stack(field.lead, shardings(name.removeprefix("bias.")))
                stacks[where].put(piece.index, part)
                counts[kept] += quant.is_quantized(part)
            _add(loss, cost)
        except ValueError as error:
            problems.append(f"{field.label}: {error}")
        done += 1
        if progress:
            progress(done, total)
    _raise(path, problems)
    base, digest, sizes = _finish(checkpoint.spec, stacks)
    report = {"bytes": sizes, "kept": counts[True], "quantized": counts[False], "loss": _summary(loss)}
    return Loaded(checkpoint.spec, base, digest, report)


def _raise(path: str | os.PathLike, problems: list[str]) -> None:
    problems = list(dict.fromkeys(problems))
    if problems:
        more = [f"... and {len(problems) - 100} more"] if len(problems) > 100 else []
        raise ValueError(f"{path}:\n  " + "\n  ".join(problem[:1000] for problem in problems[:100] + more))


def forms_of(quantize: Mapping[str, str]) -> Callable[[str], str]:
    """The form that a field takes where it is stored as floats."""
    if set(quantize) != {"linear", "head", "router"}:
        raise ValueError(f"quantize: found {sorted(quantize)}, need linear, head and router")
    for name, form in quantize.items():
        if form not in quant.FORMS:
            raise ValueError(f"quantize.{name}: found {form!r}, need one of {', '.join(quant.FORMS)}")
    # What of a latent becomes keys and values is turned around, so that no scheme of the file fits it: near-lossless instead.
    return lambda field: {"head": quantize["head"], "router": quantize["router"], "kv_b": "fixed16"}.get(field, quantize["linear"])


def plan(checkpoint: Checkpoint) -> tuple[list[Field], list[str]]:
    """Every field and where its slices lie, and what is wrong with the formats."""
    described, tensors, spec = checkpoint.described, checkpoint.tensors, checkpoint.spec
    # Counts from an untrusted config must not make this loop for hours before a first tensor is found missing.
    have = len(tensors.entries)
    if spec.layers > have:
        raise ValueError(f"{checkpoint.path}: num_hidden_layers: found {spec.layers}, need at most the {have} tensors of the files")
    if spec.sparse_layers * spec.experts > MOST_EXPERTS:
        counts = f"{spec.sparse_layers} layers of {spec.experts} experts"
        raise ValueError(f"{checkpoint.path}: num_experts: found {counts}, need at most {MOST_EXPERTS} in all")
    if spec.sparse_layers and not any(spec.experts in entry.shape for entry in tensors.entries.values()):
        raise ValueError(f"{checkpoint.path}: num_experts: found {spec.experts}, need routers of as many rows, found no such tensor")
    problems, fields = [], []

    def add(run, name, shape, lead, slices: Iterator[tuple[tuple[int, ...], Source]]):
        pieces = []
        for index, source in slices:
            codec = None
            try:
                codec = codecs.find(source, tensors, checkpoint.quantization) if len(shape) == 2 else None
            except ValueError as error:
                problems.append(str(error))
            pieces.append(Piece(index, source, codec))
        fields.append(Field(run, name, shape, lead, tuple(pieces)))

    has = tensors.__contains__
    for name, shape in families.top(spec).items():
        add(None, name, shape, (), iter([((), families.source(described, name, has=has))]))
    for run, (first, count, sparse) in enumerate(spec.stacks):
        for name, shape in families.fields(described, sparse).items():
            lead = (count, spec.experts) if families.per_expert(name) else (count,)
            where = lambda i, e=None: families.source(described, name, first + i, e, has=has)  # noqa: B023
            add(run, name, shape, lead, ((index, where(*index)) for index in np.ndindex(*lead)))
    return fields, problems


def check(checkpoint: Checkpoint, fields: list[Field], forms: Callable[[str], str]) -> list[str]:
    """What is wrong with the tensors' names, shapes and dtypes."""
    tensors, expected, problems = checkpoint.tensors, {}, []
    for field in fields:
        kinds = {id(piece.codec): piece for piece in field.pieces}
        if len(kinds) > 1:
            found = " and ".join(piece.source.name for piece in list(kinds.values())[:2])
            problems.append(f"{field.label}: found more than one format ({found}), need one in all layers and experts")
        for piece in field.pieces:
            try:
                if piece.codec is None:
                    need = {piece.source.name: ([piece.source.whole or field.shape], FLOATS)}
                else:
                    need = piece.codec.expected(piece.source, field.shape, tensors, checkpoint.quantization)
            except ValueError as error:
                problems.append(str(error))
                continue
            expected |= need
            if piece.codec is codecs.floats.FLOAT and field.name not in ("embed", "kv_b"):
                bits, group = quant.FORMS[forms(field.name)]
                if field.shape[1] % (group or (2 if bits == 4 else 1)):
                    need = f"groups for {forms(field.name)}"
                    problems.append(f"{field.label}: found {field.shape[1]} input features, which do not divide into {need}")
    ignored = lambda name: families.ignored(checkpoint.described, name)
    problems += codecs.problems(expected, tensors)
    return problems + [f"{name}: unexpected" for name in tensors.entries if name not in expected and not ignored(name)]


def _ahead(read: Callable, items: Iterator[tuple]) -> Iterator[tuple[tuple, Future]]:
    """(item, future of read(*item)) in order, a few read ahead in threads: NumPy lets go of the interpreter while it unpacks."""
    with ThreadPoolExecutor(THREADS) as pool:
        waiting = deque()
        for item in items:
            waiting.append((item, pool.submit(read, *item)))
            if len(waiting) > THREADS:
                yield waiting.popleft()
        while waiting:  # let go one by one
            yield waiting.popleft()


def _read(checkpoint: Checkpoint, field: Field, piece: Piece, forms) -> tuple[list[tuple[str, PyTree, bool]], dict]:
    """[(field of the base, one slice in the form that it has there, whether it is as it lies on disk)], and what quantizing cost."""
    source, spec, loss = piece.source, checkpoint.spec, {}
    if piece.codec is None:
        value = checkpoint.tensors.read(source.name, source.index).astype(np.float32)
        if not np.isfinite(value).all():
            raise ValueError(f"{source.name}: holds NaN or Inf; a base must be finite")
        return [(field.name, value, True)], loss
    value = piece.codec.read(source, field.shape, checkpoint.tensors, checkpoint.quantization)
    kept = quant.is_quantized(value)
    if field.name == "embed":  # tied to a quantized head, the head's columns are read instead
        return ([] if kept and spec.tie_embeddings else [("embed", value, True)]), loss
    if field.name in DERIVED:
        w = np.asarray(quant.dequantize(value)).T if kept else value.astype(np.float32)
        w = w.reshape(spec.heads, spec.mla.nope + spec.mla.v, spec.mla.kv_rank)
        halves = w[:, : spec.mla.nope], w[:, spec.mla.nope :].swapaxes(1, 2)
        return [(name, _quantize(half, "fixed16", source.name, loss), False) for name, half in zip(DERIVED[field.name], halves)], loss
    return [(field.name, value if kept else _quantize(value.T, forms(field.name), source.name, loss), kept)], loss


def _quantize(w: np.ndarray, form: str, name: str, loss: dict) -> quant.Weight:
    """`quant.quantize` of some columns at a time: it takes several copies in f32, and an output head is large."""
    columns = w.shape[-1]
    step = max(1, BLOCK * columns // max(1, w.size))
    parts = [_quantize_columns(w[..., i : i + step], form, name, loss) for i in range(0, columns, step)]
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *of: np.concatenate(of, -1), *parts)


def _quantize_columns(w: np.ndarray, form: str, name: str, loss: dict) -> quant.Weight:
    """Notes what it costs: squared error and weight, largest error over the largest weight of its column."""
    w = np.asarray(w, np.float32)
    q = quant.quantize(w, form, name)
    codes = q.qvalue if q.form != "int4" else quant.split_nibbles(q.qvalue).astype(np.int8) - 8
    error = np.abs((codes * q.scale[0][..., None, :]).reshape(w.shape) - w)
    columns = np.maximum(np.abs(w).max(-2, keepdims=True), 1e-30)
    seen = loss.setdefault(form, np.zeros(5))
    add = [np.square(error, dtype=np.float64).sum(), np.square(w, dtype=np.float64).sum(), np.count_nonzero(error), w.size]
    seen[:4] += add
    seen[4] = max(seen[4], float((error / columns).max()))
    return q


def _add(loss: dict, more: dict) -> None:
    for form, seen in more.items():
        old = loss.setdefault(form, np.zeros(5))
        loss[form] = np.append(old[:4] + seen[:4], max(old[4], seen[4]))


def _summary(loss: dict) -> dict:
    return {
        form: {
            "matrices_relative_error": float(np.sqrt(error / max(size, 1e-300))),
            "share_not_lossless": float(changed / count),
            "largest_error_of_column_max": float(largest),
        }
        for form, (error, size, changed, count, largest) in loss.items()
    }


def assemble(runs: int, parts: Mapping[tuple[int | None, str], PyTree]) -> Base:
    """A base of so many runs of layers from its fields, by run (None: of the top) and name."""
    layers = []
    for run in range(runs):
        mine = {name: value for (r, name), value in parts.items() if r == run}
        bias = {name.removeprefix("bias."): value for name, value in mine.items() if name.startswith("bias.")}
        layers.append(Layer(**{name: value for name, value in mine.items() if name in OF_LAYER}, bias=bias))
    return Base(parts.get((None, "embed")), tuple(layers), parts[None, "final_norm"], parts[None, "head"])


def _finish(spec: Spec, stacks: dict[tuple[int | None, str], Stack]) -> tuple[Base, str, dict[str, int]]:
    arrays, hashes, sizes = {}, {}, Counter()
    for where in list(stacks):
        arrays[where], hashes[where] = stacks.pop(where).finish()
        value = arrays[where]
        form = value.form if quant.is_quantized(value) else value.dtype.name
        sizes[form] += sum(x.nbytes for x in jax.tree.leaves(value))

    base, digests = (assemble(len(spec.stacks), parts) for parts in (arrays, hashes))
    named = jax.tree_util.tree_leaves_with_path(digests)
    return base, quant.join_digests({jax.tree_util.keystr(path): digest for path, digest in named}), dict(sizes)

"""Copies of bases as they lie on a mesh, in Orbax's format: restoring one is reading, with nothing to unpack or to quantize.

    <digest>/arrays      the leaves by name, split as they were on the mesh; any mesh can read them
    <digest>/copy.json   how the leaves make a base, and the SHA-256 of each file of `arrays`
    <fingerprint>.json   of a source and options: the digest of what they load as
    .<digest>.<random>   a copy in the making; one that a killed process left may be deleted

A source is told by a cheap fingerprint: names, sizes, times and samples of the files that are loaded, all of its config, the options,
and the code that reads it. Whatever of it changes, the copy is not used. A copy is believed only if each of its files is what was
written: one more pass over bytes that must be read anyway. The digest of the arrays themselves would have to gather them on the host.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from rl_adapter import mesh as meshes
from rl_adapter import quant
from rl_adapter.files import write_atomically
from rl_adapter.hub.files import read_json, weight_files
from rl_adapter.hub.load import Checkpoint, Loaded, assemble, load, open_checkpoint
from rl_adapter.types import Base, PyTree

SAMPLES, SAMPLE = 64, 4096  # of a file: how many, and of how many bytes
ARRAYS, COPY = "arrays", "copy.json"
_HUB = pathlib.Path(__file__).parent


def load_prepared(
    directory: str | os.PathLike,
    model: Checkpoint | str | os.PathLike,
    quantize: Mapping[str, str],
    mesh: Mesh,
    progress: Callable[[int, int], None] | None = None,
) -> Loaded:
    """`load.load` from the copy in `directory` where there is one; else from the source, of which a copy is then kept.

    Raises:
        ValueError: what `restore` and `load.load` raise; or, before anything is read, a copy is needed that cannot be kept.
    """
    checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model)
    loaded = restore(directory, checkpoint, quantize, mesh)
    if loaded is None:
        _check_writable(pathlib.Path(directory))
        key = fingerprint(checkpoint.path, quantize)  # before it is read, should it change meanwhile
        loaded = load(checkpoint, quantize, mesh, progress)
        save(directory, key, loaded, checkpoint.path)
    return loaded


def save(directory: str | os.PathLike, key: str, loaded: Loaded, source: str | os.PathLike) -> None:
    """Keeps a copy of what a source loaded as.

    Args:
        directory: of all copies; made where it is missing. Two sources that load as one base share a copy.
        key: the source's `fingerprint`.
        loaded: what is kept.
        source: where it lies, for whoever reads the record.
    """
    directory = pathlib.Path(directory).absolute()
    copy = directory / loaded.digest
    if not (copy / COPY).is_file():
        made = directory / f".{loaded.digest}.{uuid.uuid4().hex}"  # another process may be making the same copy
        made.mkdir(parents=True)
        try:
            with _checkpointer() as checkpointer:
                checkpointer.save(made / ARRAYS, ocp.args.PyTreeSave(_named(loaded.base)))
            description = {"runs": len(loaded.base.layers), "fields": list(_describe(loaded.base)), "files": _hashes(made / ARRAYS)}
            write_atomically(made / COPY, json.dumps(description))
            _put(made, copy)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    # Of the copy that lies there: the other process's where that was first.
    record = {"digest": loaded.digest, "copy": _sha256(copy / COPY), "report": loaded.report, "source": str(source)}
    write_atomically(directory / f"{key}.json", json.dumps(record, indent=1))


def restore(directory: str | os.PathLike, model: Checkpoint | str | os.PathLike, quantize: Mapping[str, str], mesh: Mesh) -> Loaded | None:
    """What a model loads as, from its copy, straight to the devices; None if there is no copy of this source with these options.

    Raises:
        ValueError: the copy, or what is recorded of it, is damaged. Loading the source instead would hide that a disk fails.
    """
    directory = pathlib.Path(directory).absolute()
    checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model)
    index = directory / f"{fingerprint(checkpoint.path, quantize)}.json"
    if not os.path.isfile(index):  # pathlib's raises where a name is too long
        return None
    record = _read_record(index)
    copy = directory / record["digest"]
    if not copy.is_dir():  # somebody deleted it
        return None
    try:
        if _sha256(copy / COPY) != record["copy"]:
            raise ValueError(f"{COPY} is not what was written")
        description = read_json(copy / COPY)
        found, need = _hashes(copy / ARRAYS), description["files"]
        if found != need:
            raise ValueError(f"not what was written: {', '.join(sorted(n for n in found | need if found.get(n) != need.get(n)))}")
        shapes = assemble(description["runs"], {(f["run"], f["name"]): _shapes(f) for f in description["fields"]})
        place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        wanted = _named(jax.tree.map(place, shapes, meshes.base_shardings(mesh, shapes)))
        how = ocp.checkpoint_utils.construct_restore_args(wanted)
        with _checkpointer() as checkpointer:
            leaves = checkpointer.restore(copy / ARRAYS, ocp.args.PyTreeRestore(wanted, restore_args=how))
        base = jax.tree.structure(shapes).unflatten([leaves[name] for name in _named(shapes)])
    except Exception as error:  # whatever a damaged file makes of Orbax, TensorStore or JSON
        raise ValueError(
            f"{copy}: the prepared copy of {checkpoint.path} is damaged; delete it. Found {type(error).__name__}: {error}"
        ) from None
    return Loaded(checkpoint.spec, base, record["digest"], record["report"])


def fingerprint(path: str | os.PathLike, quantize: Mapping[str, str]) -> str:
    """Of a source that is not read: with 64 samples a file, since other weights may have the same names, sizes and times."""
    path = pathlib.Path(path)
    files = [path] if path.is_file() else [path / "config.json", *weight_files(path)]
    h = hashlib.sha256(json.dumps(dict(quantize), sort_keys=True).encode())
    for file in files:
        stat = file.stat()
        h.update(f"\n{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        if file.suffix == ".json":
            h.update(file.read_bytes())
            continue
        with file.open("rb") as opened:
            for i in range(SAMPLES):
                opened.seek(stat.st_size * i // SAMPLES)
                h.update(opened.read(SAMPLE))
    # The code too: what it makes of the same files may change.
    for module in (*sorted(_HUB.rglob("*.py")), pathlib.Path(quant.__file__)):
        h.update(module.read_bytes())
    return h.hexdigest()


def _check_writable(directory: pathlib.Path) -> None:
    """Makes the directory of copies where it is missing; an error found after the load would cost all of it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(dir=directory).cleanup()
    except (OSError, ValueError) as error:
        raise ValueError(f"prepared: found {str(directory)!r}, need a directory that can be written ({error})") from None


def _put(made: pathlib.Path, copy: pathlib.Path) -> None:
    """Gives a finished copy its name, unless one of that name was finished first."""
    try:
        made.rename(copy)
    except OSError:
        if (copy / COPY).is_file():
            return
        shutil.rmtree(copy)  # what is left of a damaged one
        made.rename(copy)


def _read_record(path: pathlib.Path) -> dict[str, Any]:
    counts = lambda x: isinstance(x, dict) and all(type(n) is int and n >= 0 for n in x.values())
    sha256 = lambda x: isinstance(x, str) and re.fullmatch("[0-9a-f]{64}", x) is not None
    need = {
        "digest": sha256,
        "copy": sha256,
        "report": lambda x: (
            isinstance(x, dict)
            and counts(x.get("bytes"))
            and counts({name: x.get(name) for name in ("kept", "quantized")})
            and isinstance(x.get("loss"), dict)
        ),
    }
    try:
        record = read_json(path)
        if wrong := [name for name, holds in need.items() if not holds(record.get(name))]:
            raise ValueError(f"{path}: {wrong[0]}: found {str(record.get(wrong[0]))[:80]!r}, need what `save` writes")
    except ValueError as error:
        raise ValueError(f"{error}; this record of a prepared copy is damaged: delete it") from None
    return record


def _checkpointer() -> ocp.Checkpointer:
    # Codes do not compress: it would cost time alone. To share the writing of replicated arrays, programs would be compiled.
    arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry))


def _named(tree: PyTree) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _describe(base: Base) -> Iterator[dict[str, Any]]:
    """Every field as JSON: its place, its form, and shape and dtype of its parts. `_shapes` is the inverse."""
    whole = {(None, name): getattr(base, name) for name in ("embed", "final_norm", "head")}
    for run, layer in enumerate(base.layers):
        whole |= {(run, field.name): getattr(layer, field.name) for field in dataclasses.fields(layer) if field.name != "bias"}
        whole |= {(run, f"bias.{name}"): value for name, value in layer.bias.items()}
    shape = lambda x: None if x is None else [list(x.shape), x.dtype.name]
    for (run, name), value in whole.items():
        if quant.is_quantized(value):
            parts = {"scale": list(map(shape, value.scale)), "bias": list(map(shape, value.bias)), "order": shape(value.order)}
            yield {"run": run, "name": name, "form": value.form, "codes": shape(value.qvalue), **parts}
        elif value is not None:
            yield {"run": run, "name": name, "form": None, "codes": shape(value)}


def _shapes(field: dict[str, Any]) -> PyTree:
    leaf = lambda s: s and jax.ShapeDtypeStruct(tuple(s[0]), s[1])
    if field["form"] is None:
        return leaf(field["codes"])
    scales, bias = map(leaf, field["scale"]), next(map(leaf, field["bias"]), None)
    return quant.weight(field["form"], leaf(field["codes"]), *scales, bias=bias, order=leaf(field["order"]))


def _sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hashes(directory: pathlib.Path) -> dict[str, str]:
    files = sorted(p for p in directory.rglob("*") if p.is_file())
    with concurrent.futures.ThreadPoolExecutor() as pool:  # hashing lets go of the interpreter
        return {p.relative_to(directory).as_posix(): digest for p, digest in zip(files, pool.map(_sha256, files))}

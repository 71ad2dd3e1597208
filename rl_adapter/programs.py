"""Programs that outlive their process: compiled once for a machine and a version of this package, then loaded without being traced.

`jit` is `jax.jit`; once `keep` was called, which `launch.py` does, what it compiles is kept on disk, whole. (JAX's own cache is asked
only after tracing and lowering, which take longer than to read the program.)

A program is found again by all that it is made from: this package's source, the versions of what it calls, the machine and its devices,
JAX's settings, static arguments, and shapes, types and places of the arrays. A static argument that may mean something else in another
process, such as a closure, is no key: such a program is not kept. Who changes functions of this package in a running process (a test, a
notebook) must not call `keep`.
"""

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import os
import pathlib
import pickle
import platform
import sys
import time
import warnings
from collections.abc import Callable, Hashable
from importlib import metadata
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from rl_adapter import runtime
from rl_adapter.files import private_directory, write_atomically

_PACKAGES = "jax", "jaxlib", "flax", "optax", "numpy"
UNUSED = 30 * 24 * 3600  # seconds after which what was not used goes: of every version of the source some are left
_directory: pathlib.Path | None = None  # where programs are kept; None: nowhere


def keep(directory: str | os.PathLike | None) -> None:
    """Keep in `directory` what is compiled from now on, and load from there what is; None: no more.

    Loading runs what a file says (pickle, and machine code), so the directory is made the user's own, and files of others are not read.
    """
    global _directory
    _directory = None
    if directory is None:
        return
    try:
        _directory = private_directory(directory)
        for path in _directory.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process may do the same
                if time.time() - path.stat().st_mtime > UNUSED:
                    path.unlink()
    except OSError as error:  # a read-only home costs compilations, no more
        warnings.warn(f"{directory}: compiled programs are not kept ({error})", stacklevel=2)


def jit(function: Callable | None = None, *, static_argnames: tuple[str, ...] = (), donate_argnames: tuple[str, ...] = ()) -> Callable:
    """`jax.jit`, also as a decorator, whose programs are kept."""
    if function is None:
        return functools.partial(jit, static_argnames=static_argnames, donate_argnames=donate_argnames)
    return functools.update_wrapper(_Jitted(function, static_argnames, donate_argnames), function)


class _Jitted:
    def __init__(self, function: Callable, static: tuple[str, ...], donated: tuple[str, ...]):
        self._jitted = jax.jit(function, static_argnames=static, donate_argnames=donated, keep_unused=True)
        self._name, self._signature, self._static = f"{function.__module__}.{function.__qualname__}", inspect.signature(function), static
        self._programs: dict[Hashable, Callable] = {}
        self.lower = self._jitted.lower

    def __call__(self, *args, **kwargs):
        if _directory is None:
            return self._jitted(*args, **kwargs)
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        static = {name: given.pop(name) for name in self._static}
        leaves, tree = jax.tree.flatten(given)
        if any(isinstance(x, jax.core.Tracer) for x in leaves):  # within another program
            return self._jitted(*args, **kwargs)
        key = tree, tuple(static.values()), tuple(map(_array, leaves))
        if key not in self._programs:
            self._programs[key] = self._program(static, given, key)
        return self._programs[key](**given)

    def _program(self, static: dict[str, Any], given: dict[str, Any], key: tuple) -> Callable:
        tree, _, arrays = key
        try:
            made_from = _text((self._name, str(tree), static, arrays))
        except TypeError:
            made_from = " at 0x"
        if " at 0x" in made_from:  # an address is another one in each process
            return functools.partial(self._jitted, **static)
        link, lowered = self._path("traced", made_from, _source()), None
        if (module := _text_of(link)) is None:
            lowered = self._jitted.lower(**static, **given)
            # Of the program itself, with what goes in and comes out, which another source may give too. (No argument is left out of its
            # text, though none may read it: else which one that is would not be told.)
            module = _digest(lowered.as_text(), str(lowered.out_tree), str(tree), *map(str, arrays))
            _save(link, module.encode())
        path = self._path("program", module)
        try:
            return _read(path, jax.tree.structure(((), given)))
        except FileNotFoundError:
            pass
        except Exception as error:  # of whatever kind: a file that is no good costs a compilation, no more
            warnings.warn(f"{path}: found what cannot be loaded, so it is made again ({type(error).__name__}: {error})", stacklevel=3)
        lowered = lowered or self._jitted.lower(**static, **given)
        with _from_scratch():
            compiled = lowered.compile()
        try:
            _save(path, _packed(compiled))
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError):
            pass  # a backend, or a program, that cannot be kept
        return compiled

    def _path(self, kind: str, *of: str) -> pathlib.Path:
        return _directory / f"{self._name}-{_digest(_process(), *of)}.{kind}"


@contextlib.contextmanager
def _from_scratch():
    """What XLA has read from JAX's cache it cannot write again: on CPU, functions would be missing."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def _save(path: pathlib.Path, data: bytes) -> None:
    try:
        write_atomically(path, data, private=True)
    except OSError as error:
        warnings.warn(f"{path}: not kept ({error})", stacklevel=4)


def _text_of(path: pathlib.Path) -> str | None:
    try:
        os.utime(path)
        return path.read_text(errors="replace")
    except OSError:
        return None


def _packed(compiled: jax.stages.Compiled) -> bytes:
    payload, _, out_tree = serialize_executable.serialize(compiled)
    devices = [device.id for device in compiled.runtime_executable().local_devices()]
    # No pickle takes a structure of our own types; it takes a tree of that structure.
    data = pickle.dumps((payload, out_tree.unflatten(range(out_tree.num_leaves)), devices))
    return hashlib.sha256(data).digest() + data


def _read(path: pathlib.Path, in_tree: jax.tree_util.PyTreeDef) -> jax.stages.Compiled:
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_uid != os.geteuid():
            raise PermissionError("found another user's file, need one's own")
        digest, data = file.read(32), file.read()
    os.utime(path)
    if hashlib.sha256(data).digest() != digest:
        raise ValueError("found bytes of another digest")
    payload, out, devices = pickle.loads(data)
    there = {device.id: device for device in jax.devices()}
    with runtime.counted():
        return serialize_executable.deserialize_and_load(
            payload, in_tree, jax.tree.structure(out), execution_devices=[there[i] for i in devices]
        )


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def _array(x: Any) -> Hashable:
    """What a program depends on of an argument."""
    if isinstance(x, jax.Array):
        return x.shape, x.dtype, x.aval.weak_type, _place(x.sharding, x.shape) if x.committed else ""
    return (x.shape, x.dtype) if isinstance(x, np.ndarray | np.generic) else type(x)


@functools.lru_cache(maxsize=4096)
def _place(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> str:
    """What each device has of an array: shardings that are spelt differently may mean the same."""
    return f"{sharding.memory_kind} {[(d.id, str(index)) for d, index in sharding.devices_indices_map(shape).items()]}"


def _text(x: Any) -> str:
    """All that tells a value from others, the same in every process; TypeError where that is not known."""
    if x is None or isinstance(x, bool | int | float | str | np.dtype):
        return repr(x)
    if isinstance(x, tuple | list):
        return f"({', '.join(map(_text, x))})"
    if isinstance(x, dict):
        return f"{{{', '.join(f'{_text(k)}: {_text(v)}' for k, v in x.items())}}}"
    if isinstance(x, type):
        return f"{x.__module__}.{x.__qualname__}"
    if isinstance(x, Mesh):
        return f"Mesh {x.shape_tuple} {x.axis_types} {[d.id for d in x.devices.flat]}"
    if dataclasses.is_dataclass(x):
        return f"{_text(type(x))} {_text({f.name: getattr(x, f.name) for f in dataclasses.fields(x)})}"
    raise TypeError(f"found {type(x)}, which may mean something else in another process")


def _process() -> str:
    """What all programs of this process depend on."""
    settings = {k: str(v) for k, v in jax.config.values.items() if "cache" not in k}
    flags = {name: os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
    return _text((_machine(), settings, flags))


@functools.cache
def _machine() -> str:
    packages = {name: metadata.version(name) for name in _PACKAGES}
    cpu = pathlib.Path("/proc/cpuinfo")  # XLA compiles for all that a processor can do
    lines = cpu.read_text().splitlines() if cpu.exists() else [platform.processor()]
    features = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    devices = [(d.id, d.device_kind, d.client.platform_version) for d in jax.devices()]
    return _text((packages, sys.version, platform.machine(), features, devices))


@functools.cache
def _source() -> str:
    """This package as it is: a trace may depend on any of it."""
    package, source = pathlib.Path(__file__).parent, hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        source.update(f"{path.relative_to(package)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return source.hexdigest()

"""Process-wide settings of JAX. Call `setup` once, before the first array: backends read these when they start."""

import contextlib
import os
import pathlib
import time

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_compiled, _compile_s = 0, 0.0


def _on_event(event: str, seconds: float, **_) -> None:
    global _compiled, _compile_s  # JAX offers only process-wide listeners, which cannot be removed
    if event == _COMPILE_EVENT:
        _compiled += 1
        _compile_s += seconds


jax.monitoring.register_event_duration_secs_listener(_on_event)


@contextlib.contextmanager
def counted():
    """Loading a program in this context counts as JAX's reading one from its cache does."""
    started = time.monotonic()
    yield
    _on_event(_COMPILE_EVENT, time.monotonic() - started)


def compilations() -> int:
    """Programs compiled, or read from a cache, so far in this process. A step that adds some has recompiled."""
    return _compiled


def compile_seconds() -> float:
    """Seconds that these took so far."""
    return _compile_s


def cache_dir() -> pathlib.Path:
    """Where compiled programs are kept: $RL_ADAPTER_CACHE, or ~/.cache/rl_adapter/xla."""
    return pathlib.Path(os.environ.get("RL_ADAPTER_CACHE") or pathlib.Path.home() / ".cache" / "rl_adapter" / "xla")


def setup(devices: int = 0) -> None:
    """Turns on the persistent compilation cache and fixes the number of devices.

    Args:
      devices: how many devices to run on; 0 leaves the backend's own number. On CPU they are virtual: threads of one
        process. An accelerator's number cannot be changed here, only checked.
    """
    if not 0 <= devices <= 1024:
        raise ValueError(f"--devices: found {devices}, need 0 (the backend's own number) to 1024")
    jax.config.update("jax_compilation_cache_dir", str(cache_dir()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    if not devices:
        return
    # An older way to ask for the same; JAX refuses the two together.
    xla_flags = os.environ.get("XLA_FLAGS", "").split()
    os.environ["XLA_FLAGS"] = " ".join(f for f in xla_flags if not f.startswith("--xla_force_host_platform_device_count"))
    try:
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:  # a backend runs already (a notebook, a test): fine if it has as many
        pass
    if jax.device_count() != devices:
        found = f"{jax.device_count()} {jax.default_backend()} devices"
        raise ValueError(f"--devices: found {found}, need {devices}; choose accelerators by CUDA_VISIBLE_DEVICES or TPU_VISIBLE_CHIPS")

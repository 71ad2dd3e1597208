"""Settings that must precede the import of JAX: CPU, 8 virtual devices, a cache of compiled programs."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
_flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in f]
os.environ["XLA_FLAGS"] = " ".join([*_flags, "--xla_force_host_platform_device_count=8"])

import pytest  # noqa: E402

from rl_adapter import programs, runtime  # noqa: E402

runtime.setup()


@pytest.fixture(autouse=True)
def no_kept_programs():
    """Where a test has run launch.py, the next one may change what programs are made of."""
    yield
    programs.keep(None)

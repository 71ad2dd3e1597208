"""Settings that must precede the import of JAX: CPU, 8 virtual devices, a cache of compiled programs."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
_flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in f]
os.environ["XLA_FLAGS"] = " ".join([*_flags, "--xla_force_host_platform_device_count=8"])

from rl_adapter import runtime  # noqa: E402

runtime.setup()

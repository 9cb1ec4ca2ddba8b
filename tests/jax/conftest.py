"""Nothing here runs without JAX; shard_map gets four devices of one CPU."""

import os

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
pytest.importorskip("jax", reason="JAX is not installed: pip install 'cupy-flash[jax]'")

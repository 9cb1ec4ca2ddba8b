"""Before JAX is imported: shard_map gets four devices of one CPU."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# why no optimisation: LLVM takes half of the time, for programs that run once. examples/ have it.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
)

"""Every instruction on the GPU: the bodies of tests/primitives.py, from cubins of both compilers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupy_flash import UnsupportedError
from cupy_flash.check import check
from cupy_flash.check.places import find
from cupy_flash.check.primitives import primitives_of
from cupy_flash.cubins import locate
from cupy_flash.device import driver
from cupy_flash.device.tensor_map import TensorMap, encode
from cupy_flash.plan import catalog
from tests.gpu.probes import cubin
from tests.primitives import *  # noqa: F403  (its tests run here)
from tests.primitives import Map
from tests.simulator.units import pack

pytestmark = pytest.mark.gpu

# The first architecture that has what a kernel is made of.
NEEDS = {"warp": 90, "copies": 80, "matrices": 90, "products": 89, "products_f64": 90,
         "products_scaled": 120,
         "warpgroup_products": 90, "boxes": 90, "turns": 90, "same_bits": 75}  # fmt: skip


class Gpu:
    """The current GPU as `tests.primitives.Machine`."""

    def __init__(self, cupy: Any, cuda: int) -> None:
        self.cupy, self.cuda = cupy, cuda
        self.arch = catalog.architecture(driver.arch(0))

    def launch(self, name: str, threads: int, shared: int, /, blocks: int = 1, **fields: object) -> None:
        needed, capability = NEEDS[name], self.arch.capability
        if capability < needed or (needed == 90 and capability != 90):
            pytest.skip(f"{name} is made of instructions of sm_{needed}; this GPU is {self.arch.name}")
        try:
            path = cubin(name, self.arch.targets[-1], self.cuda)
        except UnsupportedError as error:
            pytest.skip(f"python -m tests.gpu.probes {self.arch.targets[-1]} has not been run: {error}")
        arrays = [f.array if isinstance(f, Map) else f for f in fields.values()]
        held = {id(x): (x, self._on_device(x)) for x in arrays if isinstance(x, np.ndarray)}

        def address(array: np.ndarray) -> int:
            return int(held[id(array)][1].data.ptr)

        encoded = {
            key: encode(TensorMap(*f[1:]), address(f.array)) if isinstance(f, Map) else f
            for key, f in fields.items()
        }
        struct = pack(address, **encoded).tobytes()
        params = struct + bytes(-len(struct) % 64)
        kernel = self.cupy.RawModule(path=str(path)).get_function("kernel")
        if shared > 48 * 1024:
            kernel.max_dynamic_shared_size_bytes = shared
        by_value = np.frombuffer(params, dtype=f"V{len(params)}")
        kernel((blocks,), (threads,), (by_value,), shared_mem=shared)
        self.cupy.cuda.runtime.deviceSynchronize()
        for host, device in held.values():
            if host.flags.writeable:
                host.reshape(-1).view(np.uint8)[...] = device.get()

    def _on_device(self, array: np.ndarray) -> Any:
        return self.cupy.asarray(array.reshape(-1).view(np.uint8))


@pytest.fixture(params=[12, 13])
def machine(request: pytest.FixtureRequest, cupy: Any) -> Gpu:
    if request.param not in locate.usable_sets(driver.driver_version()):
        pytest.skip(f"the driver does not load cubins of CUDA {request.param}")
    return Gpu(cupy, request.param)


def test_what_a_check_begins_with(cupy: Any) -> None:
    """The primitives of this GPU's kernels, from the cubin that a user has."""
    del cupy
    found = check(cases=primitives_of(find("gpu")[0]), with_speed=False)
    assert len(found.outcomes) >= 6
    assert {x.state for x in found.outcomes} == {"right"}, found.screen()

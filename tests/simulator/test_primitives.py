"""Every simulated instruction against NumPy: the bodies of tests/primitives.py under every schedule."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_flash.device import simulator
from tests.primitives import *  # noqa: F403  (its tests run here)
from tests.primitives import Map
from tests.simulator.units import SIMULATED, aligned, pack, unit

pytestmark = SIMULATED

# What products compute does not depend on a schedule.
SCHEDULED = ("test_warp", "test_copies", "test_matrices", "test_boxes", "test_bulk_copies", "test_turns")


class Simulated:
    """The simulator as `tests.primitives.Machine`."""

    def launch(self, name: str, threads: int, shared: int, /, blocks: int = 1, **fields: object) -> None:
        encoded = {key: _encode(value) if isinstance(value, Map) else value for key, value in fields.items()}
        struct = pack(**encoded).tobytes()
        params = struct + bytes(-len(struct) % 64)
        simulator.load(unit(name)).launch((blocks, 1, 1), (threads, 1, 1), shared, params, 0)


def _encode(tensor: Map) -> bytes:
    return simulator.encode_tensor_map(tensor.array.ctypes.data, *tensor[1:])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "machine" in metafunc.fixturenames:
        scheduled = metafunc.function.__name__ in SCHEDULED
        metafunc.parametrize(
            "machine", ("late", "early", "random") if scheduled else ("late",), indirect=True
        )


@pytest.fixture
def machine(request: pytest.FixtureRequest):
    with simulator.schedule(request.param, seed=3):
        yield Simulated()


@pytest.mark.parametrize("policy", ["late", "early", "random"])
def test_a_block_that_waits_for_later_ones_is_reported(policy: str) -> None:
    """A GPU runs as many blocks at a time as it has room for; they might all be waiting."""
    counters = {name: np.zeros(1, np.uint32) for name in ("numbers", "turns", "chain")}
    sums, x = aligned((4,), np.float32), aligned((8, 4), np.float32)
    params = pack(**counters, sums=sums, x=x)
    kernel = simulator.load(unit("turns", "BACKWARDS"))
    report = r"(?s)deadlock.*turn \d of blocks at \S*turns.cu:\d+"
    with simulator.schedule(policy), pytest.raises(simulator.KernelFailed, match=report):
        kernel.launch((8, 1, 1), (1, 1, 1), 16, params.tobytes(), 0)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"pointer": 8}, "multiple of 16"),
        ({"strides": (100,)}, "multiples of 16"),
        ({"box": (64, 300)}, "1 to 256"),
        ({"box": (128, 8)}, "swizzle 128"),
        ({"swizzle": 16}, "swizzle 16"),
        ({"shape": (64,)}, "rank"),
    ],
)
def test_tensor_maps_are_refused(change: dict[str, object], complaint: str) -> None:
    good = {
        "pointer": 64,
        "dtype": "float16",
        "shape": (64, 8),
        "strides": (128,),
        "box": (64, 8),
        "swizzle": 128,
    }
    simulator.encode_tensor_map(**good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=complaint):
        simulator.encode_tensor_map(**{**good, **change})  # type: ignore[arg-type]

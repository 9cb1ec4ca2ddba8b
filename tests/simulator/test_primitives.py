"""Every simulated instruction against NumPy: the bodies of tests/primitives.py under every schedule."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_flash.device import simulator
from cupy_flash.device.tensor_map import TensorMap
from tests.primitives import *  # noqa: F403  (its tests run here)
from tests.primitives import Map, copy_box
from tests.simulator.units import SIMULATED, aligned, pack, unit

pytestmark = SIMULATED

# What products compute does not depend on a schedule.
SCHEDULED = ("test_warp", "test_copies", "test_matrices", "test_boxes", "test_bulk_copies",
             "test_turns")  # fmt: skip


class Simulated:
    """The simulator as `tests.primitives.Machine`."""

    def launch(self, name: str, threads: int, shared: int, /, blocks: int = 1, **fields: object) -> None:
        encoded = {key: _encode(value) if isinstance(value, Map) else value for key, value in fields.items()}
        struct = pack(**encoded).tobytes()
        params = struct + bytes(-len(struct) % 64)
        simulator.load(unit(name)).launch((blocks, 1, 1), (threads, 1, 1), shared, params, 0)


def _encode(tensor: Map) -> bytes:
    return simulator.encode_tensor_map(TensorMap(*tensor[1:]), tensor.array.ctypes.data)


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


def copy_part(corner: tuple[int, ...], dtype: type, swizzle: int, store: bool) -> None:
    """Copy a box of 64 bytes and 8 rows of a tensor twice as large."""
    rank, item = len(corner), np.dtype(dtype).itemsize
    tensor = aligned((2,) * (rank - 2) + (16, 128 // item), dtype)
    box = (64 // item, 8) + (1,) * (rank - 2)
    described = Map(tensor, np.dtype(dtype).name, tensor.shape[::-1], tensor.strides[-2::-1], box, swizzle)
    copy_box(Simulated(), described, corner, np.zeros(512, np.uint8), store)


@pytest.mark.parametrize("swizzle", [0, 64])
@pytest.mark.parametrize(("rank", "axis"), [(rank, axis) for rank in (2, 3, 4, 5) for axis in range(rank)])
def test_a_store_before_the_tensor_is_refused(rank: int, axis: int, swizzle: int) -> None:
    """A GPU drops what is past the end, and loads zeros on either side."""
    least = (8, *[1] * (rank - 1))  # in float16 the first coordinate goes by eights
    corner = tuple(-n if i == axis else 0 for i, n in enumerate(least))
    copy_part(least, np.float16, swizzle, True)
    copy_part(corner, np.float16, swizzle, False)
    report = rf"bulk store at \S*boxes.cu:\d+ of a box at \({', '.join(map(str, corner))}\).* no negative"
    with pytest.raises(simulator.KernelFailed, match=report):
        copy_part(corner, np.float16, swizzle, True)


@pytest.mark.parametrize("swizzle", [0, 64])
@pytest.mark.parametrize("rank", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("dtype", "column"),
    [(np.float32, 2), (np.float32, 30), (np.float32, -3), (np.float16, 4), (np.uint8, 8), (np.uint8, 137)],
)
@pytest.mark.parametrize("store", [False, True])
def test_a_box_that_begins_between_16_bytes_is_refused(
    dtype: type, column: int, rank: int, swizzle: int, store: bool
) -> None:
    corner = (column, *[0] * (rank - 1))
    what = "no negative" if store and column < 0 else "16 bytes"
    report = rf"bulk {'store' if store else 'load'} at \S*boxes.cu:\d+ of a box at \({column}, .*{what}"
    with pytest.raises(simulator.KernelFailed, match=report):
        copy_part(corner, dtype, swizzle, store)

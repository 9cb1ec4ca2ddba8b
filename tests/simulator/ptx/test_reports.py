"""What only the PTX shows the simulator: plain stores, and the lines of both worlds in a report."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cupy_flash.cubins import nvrtc
from cupy_flash.device import simulator
from tests.simulator.ptx.backend import kernels_from_ptx
from tests.simulator.ptx.conftest import need
from tests.simulator.test_primitives import copy_part
from tests.simulator.units import SIMULATED, aligned, attention_error, pack, unit

pytestmark = [*SIMULATED, pytest.mark.sampled(4)]


def store_plainly(*faults: str) -> np.ndarray:
    to = aligned((128,), np.float32, np.nan)
    kernel = simulator.load(unit("plain_stores", *faults))
    kernel.launch((1, 1, 1), (128, 1, 1), 512, pack(to=to).tobytes(), 0)
    return to


@pytest.mark.parametrize("cuda", nvrtc.TOOLKITS)
def test_plain_stores_need_a_fence_too(cuda: int) -> None:
    """Of the sources st_shared alone is seen; of the PTX whatever the compiler made of them."""
    need(cuda)
    np.testing.assert_array_equal(store_plainly("FAULT_NO_FENCE"), np.arange(128))
    with kernels_from_ptx(cuda, "sm_90a"):
        np.testing.assert_array_equal(store_plainly(), np.arange(128))
        place = r"\S+\.ptx:\d+ \(.*plain_stores.cu:\d+\)"
        report = rf"bulk store at {place} reads .* which thread \d+ wrote without fence"
        with pytest.raises(simulator.KernelFailed, match=report):
            store_plainly("FAULT_NO_FENCE")


@pytest.mark.parametrize("cuda", nvrtc.TOOLKITS)
@pytest.mark.parametrize(("corner", "store"), [((8, -1), True), ((4, 0), True), ((4, 0), False)])
def test_corners_that_a_gpu_refuses(cuda: int, corner: tuple[int, int], store: bool) -> None:
    need(cuda)
    place = rf"bulk {'store' if store else 'load'} at \S+\.ptx:\d+ \(.*boxes.cu:\d+\)"
    with kernels_from_ptx(cuda, "sm_90a"):
        copy_part((8, 1), np.float16, 0, store)
        with pytest.raises(simulator.KernelFailed, match=rf"{place} of a box at \({corner[0]}, "):
            copy_part(corner, np.float16, 0, store)


def test_reports_have_the_lines_of_the_sources() -> None:
    need(13)
    with kernels_from_ptx(13, "sm_90a"), pytest.raises(simulator.KernelFailed) as caught:
        attention_error("hopper", "FAULT_EXPECTS_TOO_MUCH")
    where = r"hopper_forward\S*\.ptx:\d+ \(prim/bulk.cuh:\d+ < hopper_forward.cu:\d+"
    assert re.search(rf"(?s)deadlock.*mbarrier at \d+, parity 0 at {where}", str(caught.value))

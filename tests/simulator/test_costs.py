"""The cost counters, on accesses whose cost is known, and the costs of the kernels."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_flash.device import simulator
from tests.simulator.cost_cases import CASES, golden_path, golden_text
from tests.simulator.units import SIMULATED, aligned, pack, unit

pytestmark = [*SIMULATED, pytest.mark.sampled(64)]


def counts_of(stride: int, bytes_: int) -> dict[str, int]:
    """One access of each kind by a warp, lanes `stride` bytes apart."""
    data = aligned((4096,), np.float32)
    params = pack(data=data, stride=stride, bytes=bytes_).tobytes()
    with simulator.costs() as launches:
        simulator.load(unit("accesses")).launch((1, 1, 1), (32, 1, 1), 16384, params, 0)
    return launches[0][1]


@pytest.mark.parametrize(
    ("stride", "bytes_", "least", "taken"),
    [
        (4, 4, 1, 1),      # neighbours
        (8, 4, 1, 2),      # every second bank twice
        (128, 4, 1, 32),   # all in one bank
        (0, 4, 1, 1),      # one word for all
        (132, 4, 1, 1),    # a padded column
        (16, 16, 4, 4),
        (128, 16, 4, 32),  # a column of 16-byte chunks, not swizzled
        (144, 16, 4, 4),   # the same, padded
    ],
)  # fmt: skip
def test_bank_conflicts(stride: int, bytes_: int, least: int, taken: int) -> None:
    counts = counts_of(stride, bytes_)
    assert (counts["shared_loads"], counts["shared_load_cycles"]) == (least, taken)
    assert (counts["shared_stores"], counts["shared_store_cycles"]) == (least, taken)
    assert (counts["copy_stores"], counts["copy_store_cycles"]) == (least, taken)


@pytest.mark.parametrize(("stride", "cycles"), [(16, 1), (32, 2), (128, 8), (144, 1), (0, 1)])
def test_bank_conflicts_of_ldmatrix(stride: int, cycles: int) -> None:
    counts = counts_of(stride, 16)
    assert (counts["matrix_loads"], counts["matrix_load_cycles"]) == (4, 4 * cycles)
    assert (counts["matrix_stores"], counts["matrix_store_cycles"]) == (4, 4 * cycles)


@pytest.mark.parametrize(
    ("stride", "bytes_", "sectors"), [(4, 4, 4), (32, 4, 32), (16, 16, 16), (0, 4, 1), (64, 16, 32)]
)
def test_coalescing(stride: int, bytes_: int, sectors: int) -> None:
    counts = counts_of(stride, bytes_)
    assert counts["global_load_bytes"] == 2 * 32 * bytes_  # ld_global and cp.async
    assert counts["global_load_sectors"] == 2 * sectors
    assert counts["global_store_bytes"] == 32 * bytes_
    assert counts["global_store_sectors"] == sectors


def test_work_of_a_known_kernel() -> None:
    counts = counts_of(16, 16)
    assert counts["mma_flops"] == 2 * 16 * 8 * 16
    assert counts["exps"] == 32
    assert counts["barriers"] == 32
    assert counts["shuffles"] == 1
    assert counts["atomics"] == 32


@pytest.mark.parametrize("name", CASES)
def test_costs_are_the_golden_ones(name: str) -> None:
    assert golden_text(name) == golden_path(name).read_text(), "if meant: python scripts/update_golden.py"

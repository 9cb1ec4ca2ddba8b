"""What the simulator says of kernels that a GPU would hang on or get wrong without a word."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cupy_flash.device import simulator
from tests.simulator.units import KERNELS, SIMULATED, aligned, attention_error, pack, unit

pytestmark = [*SIMULATED, pytest.mark.sampled(4)]

TOLERANCE = 2e-3


def run_fault(mode: int) -> np.ndarray:
    out = aligned((128,), np.float32, 1.0)
    params = pack(out=out, mode=mode).tobytes()
    simulator.load(unit("faults")).launch((1, 1, 1), (128, 1, 1), 2048, params, 0)
    return out


def lines_of(mode: int) -> set[int]:
    """Lines of faults.cu that a report of this mode may name: from its `case` to the next."""
    lines = (KERNELS / "faults.cu").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if f"case {mode}:" in line)
    last = next(
        i
        for i in range(first + 1, len(lines))
        if "case " in lines[i] or "default" in lines[i] or not lines[i]
    )
    return set(range(first + 1, last + 1))


@pytest.mark.parametrize("policy", ["late", "early", "random"])
@pytest.mark.parametrize(
    ("mode", "says"),
    [
        (1, "deadlock"),
        (2, "diverged"),
        (3, "barrier 3"),
        (4, "deadlock"),
        (6, "after threads have exited|deadlock"),
        (7, "invalid memory access"),
        (9, "division by zero"),
        (10, "stack overflow"),
        (11, "not aligned to 16"),
        (12, "past the end"),
        (16, "part of a warp"),
        (17, "deadlock|barrier|exited"),
        (18, "not aligned to 16"),
        (20, "not initialised"),
        (21, "mbar_init_fence"),
        (23, "more arrivals"),
        (24, "deadlock"),
        (25, "without fence.proxy.async"),
        (27, "multiples of 16"),
        (28, "not initialised"),
    ],
)
def test_reports_name_the_line(mode: int, says: str, policy: str) -> None:
    with simulator.schedule(policy), pytest.raises(simulator.KernelFailed, match=says) as caught:
        run_fault(mode)
    report = str(caught.value)
    assert "faults" in report
    assert "thread" in report
    named = {int(line) for line in re.findall(r"faults\.cu:(\d+)", report)}
    if mode != 10:
        assert named & lines_of(mode), report


@pytest.mark.parametrize(
    ("mode", "says"),
    [(13, "cp.async in flight"), (22, "bulk loads in flight"), (26, "bulk stores in flight")],
)
def test_copies_in_flight_at_exit(mode: int, says: str) -> None:
    with simulator.schedule("late"), pytest.raises(simulator.KernelFailed, match=says):
        run_fault(mode)


def test_endless_loop_ends() -> None:
    with (
        simulator.schedule("late", time_limit=1),
        pytest.raises(simulator.KernelFailed, match="still running") as caught,
    ):
        run_fault(8)
    assert "faults.cu:" in str(caught.value)


def test_missing_barrier_shows() -> None:
    assert not np.array_equal(run_fault(5), np.arange(128) ^ 1)


def test_memory_and_registers_start_poisoned() -> None:
    assert np.isnan(run_fault(14)).all()
    assert (run_fault(15) < -1e30).all()


def test_simulator_goes_on_after_a_failure() -> None:
    for mode in (1, 7, 2):
        with pytest.raises(simulator.KernelFailed):
            run_fault(mode)
    assert attention_error("ampere") < TOLERANCE


@pytest.mark.parametrize(
    ("grid", "block", "shared", "says"),
    [
        ((1, 70000, 1), (128, 1, 1), 2048, "grid"),
        ((1, 1, 1), (256, 1, 1), 2048, "takes up to 128"),
        ((1, 1, 1), (128, 1, 1), 233472, "shared memory"),
        ((1, 1, 1), (128, 1, 1), 64, "shared memory struct has 2048 bytes, the launch 64"),
    ],
)
def test_launches_that_a_gpu_refuses(grid, block, shared: int, says: str) -> None:
    params = pack(out=np.zeros(128, np.float32), mode=0).tobytes()
    with pytest.raises(simulator.KernelFailed, match=says):
        simulator.load(unit("faults")).launch(grid, block, shared, params, 0)


def test_shared_memory_of_the_simulated_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_FLASH_DRIVER", "simulator:sm_75")
    params = pack(out=np.zeros(128, np.float32), mode=0).tobytes()
    with pytest.raises(simulator.KernelFailed, match="sm_75"):
        simulator.load(unit("faults")).launch((1, 1, 1), (128, 1, 1), 70000, params, 0)


# ---- planted bugs in whole kernels


@pytest.mark.parametrize("policy", ["late", "early", "random"])
@pytest.mark.parametrize("family", ["ampere", "hopper"])
def test_sound_kernels_pass(family: str, policy: str) -> None:
    for seed in range(4 if policy == "random" else 1):
        with simulator.schedule(policy, seed + 1):
            assert attention_error(family) < TOLERANCE


@pytest.mark.parametrize("family", ["ampere", "hopper"])
def test_whole_kernel_on_the_schedule_of_the_environment(family: str) -> None:
    """What the mutants run."""
    assert attention_error(family, seqlen=320) < TOLERANCE


FAULTS = {
    "ampere": ["FAULT_NO_WAIT", "FAULT_NO_BARRIER", "FAULT_SWIZZLE"],
    "hopper": [
        "FAULT_NO_FULL_WAIT", "FAULT_NO_EMPTY_WAIT", "FAULT_EXPECTS_TOO_MUCH", "FAULT_NO_WGMMA_WAIT",
        "FAULT_NO_WGMMA_FENCE", "FAULT_EARLY_RELEASE", "FAULT_NO_PROXY_FENCE", "FAULT_NO_STORE_BARRIER",
        "FAULT_NO_STORE_WAIT", "FAULT_NO_INIT_FENCE", "FAULT_NO_INIT_BARRIER",
    ],
}  # fmt: skip


def found(family: str, fault: str, policy: str) -> bool:
    try:
        with simulator.schedule(policy):
            return not attention_error(family, fault) < TOLERANCE
    except simulator.KernelFailed as failure:
        report = str(failure)
    return f"{family}_forward.cu:" in report or "in flight" in report


@pytest.mark.parametrize(("family", "fault"), [(f, x) for f, faults in FAULTS.items() for x in faults])
def test_planted_bugs_are_found(family: str, fault: str) -> None:
    assert found(family, fault, "late") or found(family, fault, "early")


def test_wrong_swizzle_of_a_tensor_map_shows() -> None:
    assert not attention_error("hopper", swizzle_k=0) < TOLERANCE

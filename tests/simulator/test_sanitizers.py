"""AddressSanitizer, UBSan and ThreadSanitizer on kernels: planted bugs are reported with their line."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.simulator import sanitized
from tests.simulator.units import KERNELS, SIMULATED

pytestmark = [*SIMULATED, pytest.mark.slow]

_FAULT = """
import numpy as np
from cupy_flash.device import simulator
from tests.simulator.units import pack, unit
out = np.zeros(256, np.float32)
kernel = simulator.load(unit("memory_faults"))
for mode, blocks in {cases}:
    for policy in ("late", "early"):
        with simulator.schedule(policy):
            params = pack(out=out, mode=mode).tobytes()
            kernel.launch((blocks, 1, 1), (128, 1, 1), 2048, params, 0)
"""
_SOUND = """
from cupy_flash.device import simulator
from tests.simulator.units import attention_error
for family in ("ampere", "hopper"):
    for policy in ("late", "early"):
        with simulator.schedule(policy):
            assert attention_error(family, *{faults}, heads=2, seqlen=192) < 2e-3
"""


def line_of(mode: int, kernel: str = "memory_faults") -> set[int]:
    lines = (KERNELS / f"{kernel}.cu").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if f"case {mode}:" in line)
    last = next(i for i in range(first + 1, len(lines)) if "case " in lines[i] or "default" in lines[i])
    return set(range(first + 1, last + 1))


def lines_named(done: subprocess.CompletedProcess[str], kernel: str = "memory_faults") -> set[int]:
    return {int(line) for line in re.findall(rf"{kernel}\.cu:(\d+)", done.stderr)}


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        (1, "heap-buffer-overflow"),
        (2, "index 140 out of bounds"),
        (3, "out of bounds"),
        (4, "shift exponent 140"),
        (5, "heap-buffer-overflow"),
    ],
)
def test_address_sanitizer_names_the_line(mode: int, says: str) -> None:
    done = sanitized.run("address", _FAULT.format(cases=[(mode, 1)]))
    assert done.returncode, done.stderr[-3000:]
    assert says in done.stderr, done.stderr[-3000:]
    assert lines_named(done) & line_of(mode), done.stderr[-3000:]


def test_thread_sanitizer_names_the_line() -> None:
    races = [(6, 1), (7, 1), (8, 2), (10, 1), (11, 1), (15, 16)]
    done = sanitized.run("thread", _FAULT.format(cases=races))  # it goes on after a report
    assert done.returncode == 66, done.stderr[-3000:]
    assert "data race" in done.stderr, done.stderr[-3000:]
    silent = [mode for mode, _ in races if not lines_named(done) & line_of(mode)]
    assert not silent, done.stderr[-3000:]


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_sound_code_is_silent(sanitizer: str) -> None:
    cases = [(9, 2), (12, 2), (13, 2), (14, 1)]
    done = sanitized.run(sanitizer, _FAULT.format(cases=cases) + _SOUND.format(faults=()))
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("family", "fault"),
    [("ampere", "FAULT_NO_BARRIER"), ("hopper", "FAULT_NO_FULL_WAIT"), ("hopper", "FAULT_EARLY_RELEASE")],
)
def test_races_in_whole_kernels(family: str, fault: str) -> None:
    """On the early schedule, where these bugs may give right results."""
    code = f"""
from cupy_flash.device import simulator
from tests.simulator.units import attention_error
with simulator.schedule("early"):
    attention_error("{family}", "{fault}", seqlen=320)
"""
    done = sanitized.run("thread", code)
    assert done.returncode == 66, done.stderr[-3000:]
    assert lines_named(done, f"{family}_forward"), done.stderr[-3000:]

"""Runs Python in a process whose simulated kernels are built with gcc's sanitizers.

A sanitizer has to be in a process from its start, so Python is started with its library preloaded.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_OPTIONS = {
    # why no leak check: Python's own memory is not the subject
    "address": ("ASAN_OPTIONS", "detect_leaks=0:verify_asan_link_order=0", "libasan.so"),
    # why equal addresses too: all cases of a test share a tile, and a race may be where one was told before
    "thread": (
        "TSAN_OPTIONS",
        "exitcode=66:report_signal_unsafe=0:history_size=4:suppress_equal_addresses=0",
        "libtsan.so",
    ),
}


# why no numbers: the same cases have them without a sanitizer. NumPy's temporaries would take a quarter of
# the time, for each is mapped anew and has shadows.
_NO_NUMBERS = """
from cupy_flash import testing
testing.assert_within_budget = lambda *arrays, **options: None
testing.error_budget_with_kv_cache = lambda *arrays, **options: []
"""

# What is run of packed sequences: two, and no second time with other rows that are not numbers.
PACKED: dict[str, Any] = {"lengths": ((5, 70), (64, 131)), "poisoned": (0,)}


def _library(name: str) -> str:
    found = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True)
    return found.stdout.strip()


def schedules(sanitizer: str) -> tuple[str, ...]:
    """SCHEDULES of the code to run. Of addresses one: without a race they do not depend on the schedule."""
    return ("early",) if sanitizer == "address" else ("late", "early")


def hostile(sanitizer: str) -> tuple[int, ...]:
    """Entries of tables and lengths that lead outside. For races one: the others differ in addresses."""
    return (-(2**31), -1, 2**31 - 1, 33) if sanitizer == "address" else (33,)


def run(sanitizer: str, code: str, timeout: int = 600) -> subprocess.CompletedProcess[str]:
    """Run Python code; it fails if a sanitizer reports anything.

    Parameters
    ----------
    sanitizer : {"address", "thread"}
        "address" includes undefined behaviour. "thread" is a race detector for CUDA threads.
    code : str
        Run from the root of the tree.
    timeout : int
        Seconds.
    """
    variable, options, library = _OPTIONS[sanitizer]
    environment = {
        **os.environ,
        variable: options,
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "LD_PRELOAD": f"{_library(library)} {_library('libstdc++.so')}",
        "CUPY_FLASH_SIMULATOR_SANITIZE": sanitizer,
        "OPENBLAS_NUM_THREADS": "1",
    }
    code = f"{_NO_NUMBERS}SCHEDULES = {schedules(sanitizer)}\n{code}"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)


_CASES = """
import os
os.environ["CUPY_FLASH_DRIVER"] = "simulator:{arch}"
from cupy_flash.device import simulator
from tests.checks import Device
from tests.kv_cases import check
from {module} import CASES
for policy in SCHEDULES:
    with simulator.schedule(policy):
        for name in {names}:
            check(CASES[name][1], Device("{arch}"))
"""


def run_cases(sanitizer: str, arch: str, module: str, names: tuple[str, ...]) -> None:
    """Check some cases over a cache, of the CASES of a module of tests, on a simulated architecture."""
    done = run(sanitizer, _CASES.format(arch=arch, module=module, names=names))
    assert done.returncode == 0, done.stderr[-3000:]

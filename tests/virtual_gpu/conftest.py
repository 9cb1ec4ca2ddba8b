"""Wheels, kernels, and the count of what ran on the virtual GPU."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from tests.paths import ROOT
from tests.virtual_gpu import build, wheels
from tests.virtual_gpu.process import Outcome, run_tests

# What runs inside of such a process is not for the one that starts them.
collect_ignore: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("tests.virtual_gpu.plugin"):
        collect_ignore.extend(["inside", "alone"])


def cannot(reason: str) -> NoReturn:
    """Skip, and say why; where nothing may be left out, fail."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason} (a skip where CI is not true)", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def site() -> Callable[[wheels.Wheel], Path]:
    """The folder of a wheel of CuPy."""
    if reason := build.unavailable():
        cannot(reason)

    def installed(wheel: wheels.Wheel) -> Path:
        try:
            return wheels.install(wheel)
        except wheels.Unreachable as error:
            cannot(f"pip reaches no index: {str(error).strip().splitlines()[-1]}")

    return installed


@pytest.fixture(scope="session")
def cubins() -> None:
    """The kernels that the tests launch, compiled as far as they are not."""
    command = [sys.executable, "scripts/build_cubins.py"]
    with build.alone("cubins"):
        for options in (["--arch", "sm_80"], ["--arch", "sm_90a", "--only", "*_f16_*"],
                        ["--arch", "sm_90a", "--only", "*fp8_sm90*"],
                        ["--arch", "sm_90a", "--only", "flash_*ward_f64_*"],
                        ["--arch", "sm_90a", "--only", "simple_backward_d[es]*_f64_d512_any_*"],
                        ["--arch", "sm_90a", "--only", "simple_statistics_*_bf16_*"],
                        ["--arch", "sm_90a", "--only", "check_primitives"],
                        ["--arch", "sm_120", "--only", "*fp8_e4m3*"]):  # fmt: skip
            done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
            assert not done.returncode, done.stderr


@pytest.fixture
def on_virtual_gpu(
    site: Callable[[wheels.Wheel], Path], cubins: None, record_property: Callable[[str, object], None]
) -> Callable[..., Outcome]:
    """`run_tests` with a wheel; what it reported is counted at the end of the session."""

    def run(wheel: wheels.Wheel, *arguments: str, **options: object) -> Outcome:
        outcome = run_tests(site(wheel), *arguments, **options)  # type: ignore[arg-type]
        if outcome.report and not outcome.status:
            record_property("virtual_gpu", outcome.report)
        return outcome

    return run


@pytest.fixture
def on_virtual_gpu_alone(
    cubins: None, record_property: Callable[[str, object], None]
) -> Callable[..., Outcome]:
    """`run_tests` without CuPy."""
    if reason := build.unavailable():
        cannot(reason)
    pytest.importorskip("torch", reason="torch is not installed")

    def run(*arguments: str, **options: object) -> Outcome:
        outcome = run_tests(None, *arguments, **options)  # type: ignore[arg-type]
        if outcome.report and not outcome.status:
            record_property("virtual_gpu", outcome.report)
        return outcome

    return run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Which CuPys ran how many tests, kernels and mutants."""
    tests: collections.Counter[str] = collections.Counter()
    kernels: dict[str, set[str]] = collections.defaultdict(set)
    mutants: list[str] = []
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "virtual_gpu_mutant":
                mutants.append(value)
            elif name == "virtual_gpu":
                cupy = f"CuPy {value['cupy'] or '(none)'} for CUDA {value['cuda']}"
                tests[cupy] += value["outcomes"].get("passed", 0)
                kernels[cupy] |= set(value["kernels"])
    if tests or mutants:
        terminalreporter.section("virtual GPU")
        for cupy, passed in sorted(tests.items()):
            terminalreporter.write_line(
                f"{cupy}: {passed} tests passed, {len(kernels[cupy])} kernels launched"
            )
        terminalreporter.write_line(f"mutants of driver.py, cuda.py and run.py caught: {len(mutants)}")

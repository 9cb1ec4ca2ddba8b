"""A pytest plugin: the suites of the simulator with the PTX of the kernels in place of their sources.

    python -m pytest -p tests.simulator.ptx.plugin -n 2 tests/simulator

It takes hours: for a night. PTX is made by the newest NVRTC that knows the target; --ptx-cuda 12: by 12.9.
The tests of tests/simulator/ptx choose their builds themselves, and do all that they can with the plugin.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulator.ptx.backend import kernels_from_ptx

NAME = __name__
# What looks into the build of a source, or asks a sanitizer, which translated kernels are not made for; what
# runs faults.cu, which has functions that are called; what wants words that a source says.
NOT_FROM_PTX = (
    "test_sanitizers", "test_mutants", "test_oracle", "test_aarch64", "sanitize", "asan", "tsan",
    "test_reports_name_the_line", "test_copies_in_flight_at_exit", "test_endless_loop_ends",
    "test_missing_barrier_shows", "test_memory_and_registers_start_poisoned",
    "test_simulator_goes_on_after_a_failure", "test_launches_that_a_gpu_refuses",
    "test_a_block_that_waits_for_later_ones_is_reported",
)  # fmt: skip


def need(config: pytest.Config) -> None:
    """Skip a test that is for a night."""
    if not config.pluginmanager.has_plugin(NAME):
        pytest.skip(f"takes long: python -m pytest -p {NAME} ...")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--ptx-cuda`."""
    parser.addoption(
        "--ptx-cuda", type=int, choices=(12, 13), default=13, help="the NVRTC that makes the PTX"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what runs no kernel that could be made from PTX."""
    for item in items:
        if any(word in item.nodeid for word in NOT_FROM_PTX):
            item.add_marker(pytest.mark.skip(reason="not of kernels that are made from PTX"))


@pytest.fixture(autouse=True)
def _from_ptx(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make every kernel of a test of the simulator from its PTX, and count them."""
    folder = "tests/simulator/"
    if folder not in request.node.nodeid or f"{folder}ptx/" in request.node.nodeid:
        yield
        return
    with kernels_from_ptx(request.config.getoption("--ptx-cuda")) as used:
        yield
    for variant, build in used:
        request.node.user_properties.append(
            ("counted: variants run from their PTX", f"{variant.name} {build}")
        )

"""python -m pytest -p tests.virtual_gpu.plugin [--virtual-gpu sm_80,sm_80] tests/gpu: on virtual GPUs."""

from __future__ import annotations

import collections
import importlib
import json
from pathlib import Path

import pytest

from tests.virtual_gpu import install


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--virtual-gpu", default="sm_80", help="architectures of the devices: %(default)s")
    parser.addoption("--virtual-gpu-alone", action="store_true", help="without CuPy")
    parser.addoption("--virtual-gpu-report", type=Path, metavar="FILE", help="where counts go, as JSON")


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before any conftest can import cupy."""
    asked = early_config.known_args_namespace
    (install.install_alone if asked.virtual_gpu_alone else install.install)(*asked.virtual_gpu.split(","))


def pytest_configure(config: pytest.Config) -> None:
    import cupy_flash

    found = Path(cupy_flash.__file__).resolve().parents[1]
    if found != config.rootpath.resolve():
        raise pytest.UsageError(f"cupy_flash is that of {found}, the tests are those of {config.rootpath}")
    config.pluginmanager.register(Report(config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what a simulated GPU would need hours for, and torch, whose own CUDA is not redirected."""
    if config.option.virtual_gpu_alone:
        return
    large = [item for item in items if item.get_closest_marker("full_size")]
    config.hook.pytest_deselected(items=large)
    items[:] = [item for item in items if item not in large]
    for item in items:
        if item.get_closest_marker("torch"):
            item.add_marker(pytest.mark.skip(reason="this torch sees no GPU: its runtime is its own"))


def pytest_runtest_teardown() -> None:
    """Let a kernel that failed fail one test, and not all that come after it."""
    install.library().virtual_gpu_recover()


class Report:
    """Counts tests by their outcome and launches by their kernel."""

    def __init__(self, config: pytest.Config) -> None:
        self.file: Path | None = config.option.virtual_gpu_report
        self.alone: bool = config.option.virtual_gpu_alone
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.skipped: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1
        if report.skipped and isinstance(report.longrepr, tuple):
            self.skipped[report.nodeid] = report.longrepr[2]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        ours, kernels = install.library(), install.launched
        content = {
            "cupy": "" if self.alone else importlib.import_module("cupy").__version__,
            "cuda": install.cuda_major(),
            "outcomes": dict(self.outcomes),
            "skipped": self.skipped,
            "launches": ours.virtual_gpu_launched(),
            "simulated": ours.virtual_gpu_simulated(),
            "kernels": kernels,  # and bytes of the struct of each, which are those of its cubin's table
        }
        if self.file:
            self.file.write_text(json.dumps(content))
        terminalreporter.write_line(
            f"CuPy {content['cupy'] or 'absent'} (CUDA {content['cuda']}) on a virtual GPU: "
            f"{content['launches']} launches, {content['simulated']} of {len(kernels)} kernels of cupy_flash "
            "by the simulator"
        )

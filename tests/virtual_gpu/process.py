"""Tests in a process of their own, with CuPy on a virtual GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.paths import ROOT

LIMIT_S = 900


class Outcome(NamedTuple):
    """What a process reported.

    Attributes
    ----------
    status : int
        Of pytest: 0 if all passed, 1 if some failed.
    output : str
    report : dict
        As `plugin.Report` writes it; empty if the process died.
    """

    status: int
    output: str
    report: dict[str, Any]


def environment(site: Path | None, tree: Path = ROOT) -> dict[str, str]:
    """The environment of a Python without site: CuPy is that of a folder, cupy_flash that of a checkout.

    Without a folder there is no CuPy.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("CUPY_", "CUPY_FLASH_", "PYTEST_", "PYTHONPATH"))
    }
    folders = (site, tree, sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    return {**kept, "PYTHONPATH": os.pathsep.join(str(x) for x in folders if x)}


def run_tests(
    site: Path | None,
    *arguments: str,
    devices: str = "sm_80",
    tree: Path = ROOT,
    extra: Mapping[str, str] | None = None,
) -> Outcome:
    """Run pytest with these arguments on virtual GPUs.

    Parameters
    ----------
    site : Path or None
        Folder with CuPy, of `wheels.install`; None: the driver alone.
    *arguments : str
    devices : str
        Architectures, separated by commas.
    tree : Path
        The checkout whose cupy_flash runs.
    extra : mapping of str to str, optional
        Variables of the environment.
    """
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        command = [
            # why -S: an editable installation of another checkout would come before PYTHONPATH
            sys.executable, "-S", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist",
            "-p", "tests.virtual_gpu.plugin", "--virtual-gpu", devices, "--virtual-gpu-report", str(report),
            *(() if site else ("--virtual-gpu-alone",)), *arguments,
        ]  # fmt: skip
        done = subprocess.run(
            command, cwd=tree, env={**environment(site, tree), **(extra or {})}, timeout=LIMIT_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        content = json.loads(report.read_text()) if report.is_file() else {}
    return Outcome(done.returncode, done.stdout, content)

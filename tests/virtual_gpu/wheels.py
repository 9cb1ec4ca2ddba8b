"""The wheels of CuPy that the virtual GPU is put under, each in a folder of its own in the user's cache."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.virtual_gpu.build import alone, cache

# What pip says of an index that it cannot reach, and of nothing else.
_UNREACHABLE = ("connection broken by", "Max retries exceeded", "Temporary failure in name resolution")


class Unreachable(RuntimeError):
    """pip reaches no index."""


class Wheel(NamedTuple):
    """A release of CuPy for a CUDA major."""

    cuda: int
    version: str

    @property
    def package(self) -> str:
        return f"cupy-cuda{self.cuda}x"

    def __str__(self) -> str:
        return f"{self.package}-{self.version}"


# The oldest that pyproject.toml allows and the newest that there is, of both CUDA majors.
WHEELS = (Wheel(12, "13.4.0"), Wheel(12, "14.2.0"), Wheel(13, "13.6.0"), Wheel(13, "14.2.0"))


def install(wheel: Wheel) -> Path:
    """Download a wheel and what it needs, unless that has been done.

    Returns
    -------
    Path
        A folder for sys.path; its NumPy is one that this CuPy allows.

    Raises
    ------
    Unreachable
        There is no index.
    RuntimeError
        pip fails in another way.
    """
    python = f"{platform.python_implementation().lower()}{sys.version_info.major}{sys.version_info.minor}"
    folder = cache() / f"{wheel}-{python}"
    with alone(folder.name):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=cache()) as scratch:
                _download(wheel, Path(scratch) / "made")
                (Path(scratch) / "made").rename(folder)
    return folder


def _download(wheel: Wheel, folder: Path) -> None:
    options = ["--quiet", "--disable-pip-version-check", "--only-binary", ":all:", "--target", str(folder)]
    command = [sys.executable, "-m", "pip", "install", *options, f"{wheel.package}=={wheel.version}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        unreachable = any(sign in done.stderr for sign in _UNREACHABLE)
        raise (Unreachable if unreachable else RuntimeError)(f"{' '.join(command)}\n{done.stderr}")

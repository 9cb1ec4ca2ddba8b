#!/usr/bin/env python3
"""Prove the wheels of scripts/build_wheels.py: install, use and remove them in clean environments.

For each Python: the core computes on NumPy; both CUDA packages install and uninstall in either order
without harm; every cubin has its manifest's SHA-256; a damaged one is refused by name.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = tuple(f"python3.{minor}" for minor in range(10, 15))

FIRST_RESULT = """
import numpy as np, cupy_flash
q = np.ones((1, 2, 64, 32), np.float32)
assert cupy_flash.attention(q, q, q, causal=True).shape == q.shape
"""
SETS = """
import json
from cupy_flash import cubins
found = [s for s in cubins.available(verify=True) if s.origin != "user cache"]
print(json.dumps([[s.origin, s.target, s.kernels, s.problem] for s in found]))
"""


class Environment:
    """A clean virtual environment."""

    def __init__(self, base: str, folder: Path) -> None:
        subprocess.run([base, "-m", "venv", str(folder)], check=True)
        self.folder = folder
        self.python = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"

    def run(self, *arguments: str) -> tuple[str, float]:
        """What a command of this Python prints, and its seconds. It sees nothing of the checkout."""
        start = time.perf_counter()
        ours = ("PYTHON", "CUPY_FLASH_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        done = subprocess.run(
            [str(self.python), *arguments], capture_output=True, text=True, cwd=self.folder, env=environment
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
        return done.stdout, time.perf_counter() - start

    def pip(self, *arguments: str) -> float:
        """Run pip; its seconds."""
        return self.run("-m", "pip", "--disable-pip-version-check", "--quiet", *arguments)[1]

    def sets(self) -> set[str]:
        """Packages whose cubins are all whole."""
        rows = json.loads(self.run("-c", SETS)[0])
        broken = [row for row in rows if row[3] or not row[2]]
        assert not broken, broken
        return {row[0] for row in rows}


def check(base: str, core: Path, data: list[Path], folder: Path) -> None:
    """Take one Python through everything."""
    environment = Environment(base, folder)
    version = environment.run("-c", "import platform; print(platform.python_version())")[0].strip()
    environment.pip("install", "numpy", "threadpoolctl")
    seconds = environment.pip("install", str(core))
    first = min(environment.run("-c", FIRST_RESULT)[1] for _ in range(3))
    info = environment.run("-m", "cupy_flash", "info")[1]
    print(f"Python {version}: core in {seconds:.1f} s, first result after {first:.2f} s, info {info:.2f} s")
    assert environment.sets() == set()
    names = {wheel: "-".join(wheel.name.split("-")[0].split("_")) for wheel in data}
    for order in itertools.permutations(data):
        for wheel in order:
            # why without dependencies: CuPy is a gigabyte when installed, and cannot run here.
            seconds = environment.pip("install", "--no-deps", str(wheel))
            print(f"Python {version}: {names[wheel]} in {seconds:.1f} s")
        assert environment.sets() == set(names.values())
        for position, wheel in enumerate(order, 1):
            environment.pip("uninstall", "--yes", names[wheel])
            assert environment.sets() == {names[rest] for rest in order[position:]}
        environment.run("-c", FIRST_RESULT)
    for wheel in data:
        environment.pip("install", "--no-deps", str(wheel))
        damage(environment, names[wheel])
        environment.pip("install", "--no-deps", "--force-reinstall", str(wheel))
        environment.sets()
    environment.pip("uninstall", "--yes", "cupy-flash", *names.values())
    left = [path for path in folder.rglob("cupy_flash*") if path.is_dir()]
    assert not left, left


def damage(environment: Environment, name: str) -> None:
    """Cut a cubin short: it must be named as broken, with the command that mends it."""
    package = name.replace("-", "_")
    cubin = next(environment.folder.rglob(f"{package}/_cubins/*/*/*.cubin"))
    cubin.write_bytes(cubin.read_bytes()[:100])
    rows = json.loads(environment.run("-c", SETS)[0])
    (problem,) = [row[3] for row in rows if row[3]]
    assert str(cubin) in problem, problem
    assert f"Try: pip install --force-reinstall {name}" in problem, problem


def works(python: str) -> bool:
    """Whether a command is a Python; version managers leave names behind that are none."""
    return (
        bool(shutil.which(python)) and not subprocess.run([python, "-c", ""], capture_output=True).returncode
    )


def main() -> int:
    """Check the wheels of a folder with every Python that is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheels", type=Path, default=ROOT / "dist", metavar="DIR")
    parser.add_argument("--python", action="append", metavar="COMMAND",
                        help="may repeat (default: those of 3.10 to 3.14 that are there)")  # fmt: skip
    arguments = parser.parse_args()
    (core,) = arguments.wheels.glob("cupy_flash-*.whl")
    data = sorted(arguments.wheels.glob("cupy_flash_cuda*.whl"))
    pythons = arguments.python or [name for name in PYTHONS if works(name)] or [sys.executable]
    for base in pythons:
        with tempfile.TemporaryDirectory() as folder:
            check(base, core, data, Path(folder).resolve() / "environment")
    print(f"{1 + len(data)} wheels hold with {', '.join(pythons)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Check the wheels of scripts/build_wheels.py: install, use and remove them in clean environments.

First it checks metadata by twine, and which wheels pip selects on each platform. Then, for each Python: the
library installs the CPU core of this platform from the same folder, and computes on NumPy arrays; both CUDA
packages install and uninstall in either order; every cubin has the SHA-256 of its manifest; a damaged cubin
is refused by name; a truncated wheel changes nothing; and installation, import and explain are fast.

Limits are in CPU time, which hardly depends on other work on the machine; wall-clock time is also printed.
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
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MINORS = range(10, 15)
PLACEHOLDER = "https://github.com/OWNER"

# Platforms of docs/install.md, by pip's names; the last two have no CPU core.
PLATFORMS = (
    "manylinux2014_x86_64", "manylinux2014_aarch64", "macosx_11_0_arm64", "win_amd64",
    "musllinux_1_2_x86_64", "win_arm64",
)  # fmt: skip

# Seconds of CPU time.
INSTALL = 10.0  # the core and one CUDA package, from local files
FIRST = 0.5  # from before the import to the first result on NumPy arrays
INFO = 1.0  # python -m cupy_flash info, with both CUDA packages

FIRST_RESULT = """
import os, time
clock, start = time.perf_counter(), os.times()
import numpy as np, cupy_flash
q = np.ones((1, 2, 64, 32), np.float32)
assert cupy_flash.attention(q, q, q, causal=True).shape == q.shape
end = os.times()
print(time.perf_counter() - clock, end.user + end.system - start.user - start.system)
"""
COMPUTES = """
from cupy_flash.cpu import choose
found = choose.core()
print("NumPy" if isinstance(found, str) else found[1].origin)
"""
SETS = """
import json
from cupy_flash.cubins import locate
found = [s for s in locate.available(verify=True) if s.origin != "user cache"]
print(json.dumps([[s.origin, s.target, s.kernels, s.problem] for s in found]))
"""


class Spent(NamedTuple):
    """Seconds of wall clock and of CPU time."""

    clock: float
    processor: float

    def __add__(self, other: Spent) -> Spent:  # type: ignore[override]
        return Spent(self.clock + other.clock, self.processor + other.processor)

    def __str__(self) -> str:
        return f"{self.clock:.2f} s ({self.processor:.2f} s of a processor)"


def quickest(runs: Iterable[Spent], limit: float, what: str) -> Spent:
    """The fastest run, which must not exceed the limit."""
    best = min(runs, key=lambda run: run.processor)
    if best.processor > limit:
        raise SystemExit(f"{what} took {best}; the limit is {limit} s of a processor")
    return best


class Environment:
    """A clean virtual environment."""

    def __init__(self, base: str, folder: Path) -> None:
        subprocess.run([base, "-m", "venv", str(folder)], check=True)
        self.folder = folder
        self.python = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"

    def run(self, *arguments: str, fails: bool = False) -> tuple[str, Spent]:
        """Run this Python without access to the checkout; return output and time."""
        ours = ("PYTHON", "CUPY_FLASH_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        environment["XDG_CACHE_HOME"] = str(self.folder / "cache")
        clock, before = time.perf_counter(), os.times()
        done = subprocess.run(
            [str(self.python), *arguments], capture_output=True, text=True, cwd=self.folder, env=environment
        )
        after = os.times()
        spent = Spent(time.perf_counter() - clock, sum(after[2:4]) - sum(before[2:4]))
        if bool(done.returncode) != fails:
            raise SystemExit(
                f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
            )
        return done.stdout, spent

    def pip(self, *arguments: str, fails: bool = False) -> Spent:
        """Run pip, and time it."""
        return self.run("-m", "pip", "--disable-pip-version-check", "--quiet", *arguments, fails=fails)[1]

    def first_result(self) -> Spent:
        """Time from the start of the import to a result, in a new process."""
        return Spent(*map(float, self.run("-c", FIRST_RESULT)[0].split()))

    def sets(self) -> set[str]:
        """Packages with cubins, all of which must be undamaged."""
        rows = json.loads(self.run("-c", SETS)[0])
        broken = [row for row in rows if row[3] or not row[2]]
        assert not broken, broken
        return {row[0] for row in rows}


def check(base: str, core: Path, data: list[Path], folder: Path) -> str:
    """Run all checks with one Python; return its version."""
    environment = Environment(base, folder)
    version = environment.run("-c", "import platform; print(platform.python_version())")[0].strip()
    environment.pip("install", "numpy", "threadpoolctl")
    # Dependencies come from its folder instead of an index; it needs no others.
    installed = environment.pip("install", "--no-index", "--find-links", str(core.parent), str(core))
    first = quickest((environment.first_result() for _ in range(3)), FIRST, "the first result")
    computes = environment.run("-c", COMPUTES)[0].strip()
    package = next(folder.rglob("cupy_flash_cpu"))
    assert computes == ("cupy-flash-cpu" if (package / "_core").is_dir() else "NumPy"), computes
    print(
        f"Python {version}: core installed in {installed}, first result after {first}, by {computes}",
        flush=True,
    )
    assert environment.sets() == set()
    names = {wheel: "-".join(wheel.name.split("-")[0].split("_")) for wheel in data}
    for order in itertools.permutations(data):
        for wheel in order:
            # why without dependencies: CuPy takes a gigabyte, and cannot run here.
            spent = installed + environment.pip("install", "--no-deps", str(wheel))
            print(f"Python {version}: core and {names[wheel]} installed in {spent}", flush=True)
            quickest([spent], INSTALL, "installing")
        assert environment.sets() == set(names.values())
        for position, wheel in enumerate(order, 1):
            environment.pip("uninstall", "--yes", names[wheel])
            assert environment.sets() == {names[rest] for rest in order[position:]}
        environment.run("-c", FIRST_RESULT)
    for wheel in data:
        environment.pip("install", "--no-deps", str(wheel))
        damage(environment, names[wheel])
        environment.pip("install", "--no-deps", "--force-reinstall", str(wheel))
        truncated = folder / wheel.name
        truncated.write_bytes(wheel.read_bytes()[:-1000])
        environment.pip("install", "--no-deps", "--force-reinstall", str(truncated), fails=True)
    assert environment.sets() == set(names.values())
    explain = (environment.run("-m", "cupy_flash", "info")[1] for _ in range(3))
    print(f"Python {version}: info in {quickest(explain, INFO, 'info')}", flush=True)
    environment.pip("uninstall", "--yes", "cupy-flash", "cupy-flash-cpu", *names.values())
    left = [path for path in folder.rglob("cupy_flash*") if path.is_dir()]
    assert not left, left
    return version


def damage(environment: Environment, name: str) -> None:
    """Truncate a cubin: the error must name it, with the command that fixes it."""
    package = name.replace("-", "_")
    cubin = next(environment.folder.rglob(f"{package}/_cubins/*/*/*.cubin"))
    cubin.write_bytes(cubin.read_bytes()[:100])
    rows = json.loads(environment.run("-c", SETS)[0])
    (problem,) = [row[3] for row in rows if row[3]]
    assert str(cubin) in problem, problem
    assert f"Try: pip install --force-reinstall {name}" in problem, problem


def check_descriptions(files: list[Path]) -> None:
    """Check descriptions and metadata by the rules of package indexes."""
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True)
    if "No module named twine" in done.stderr:
        raise SystemExit("twine is not installed.\nTry: pip install twine")
    if done.returncode:
        raise SystemExit(f"{done.stdout}{done.stderr}")
    for wheel in (file for file in files if file.suffix == ".whl"):
        with zipfile.ZipFile(wheel) as archive:
            (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            if f"{PLACEHOLDER}/" in archive.read(metadata).decode():
                print(
                    f"{wheel.name} names {PLACEHOLDER} as the owner: see CONTRIBUTING.md before publishing it"
                )


def tagged(folder: Path) -> list[tuple[str, str]]:
    """Package and platform of each wheel in a folder."""
    parts = [wheel.stem.split("-") for wheel in folder.glob("*.whl")]
    return sorted((one[0], one[-1]) for one in parts)


def check_platforms(wheels: Path) -> None:
    """Check that pip finds every package on each platform, with a platform wheel of the CPU core if any."""
    packages = sorted({package for package, _ in tagged(wheels)})
    tags = {tag for _, tag in tagged(wheels)}
    local = ["--quiet", "--no-deps", "--no-index", "--find-links", str(wheels), "--only-binary=:all:"]
    for platform in PLATFORMS:
        with tempfile.TemporaryDirectory() as folder:
            wanted = [*packages, "--platform", platform, "--dest", folder]
            command = [sys.executable, "-m", "pip", "download", *local, *wanted]
            done = subprocess.run(command, capture_output=True, text=True)
            taken = tagged(Path(folder))
        core = platform if platform in tags else "any"
        if done.returncode or taken != [(x, core if x == "cupy_flash_cpu" else "any") for x in packages]:
            raise SystemExit(f"pip on {platform} takes {taken}\n{done.stderr}")
        print(f"pip on {platform} takes all packages; the CPU core is for {core}")


def pythons() -> list[str]:
    """A command for each installed Python version, on PATH or in pyenv's folder."""
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = []
    for minor in MINORS:
        candidates = [
            f"python3.{minor}",
            *map(str, sorted(kept.glob(f"3.{minor}.*/bin/python"), reverse=True)),
        ]
        found += [command for command in candidates if works(command)][:1]
    return found or [sys.executable]


def works(python: str) -> bool:
    """Whether a command runs Python; version managers have shims that do not."""
    return (
        bool(shutil.which(python)) and not subprocess.run([python, "-c", ""], capture_output=True).returncode
    )


def main() -> int:
    """Check the wheels of a folder with every installed Python."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheels", type=Path, default=ROOT / "dist", metavar="DIR")
    parser.add_argument("--python", action="append", metavar="COMMAND",
                        help="may repeat (default: those of 3.10 to 3.14 that are there)")  # fmt: skip
    arguments = parser.parse_args()
    check_descriptions(sorted(arguments.wheels.glob("cupy_flash*")))
    check_platforms(arguments.wheels)
    (core,) = arguments.wheels.glob("cupy_flash-*.whl")
    data = sorted(arguments.wheels.glob("cupy_flash_cuda*.whl"))
    commands = arguments.python or pythons()
    versions = []
    for base in commands:
        with tempfile.TemporaryDirectory() as folder:
            versions.append(check(base, core, data, Path(folder).resolve() / "environment"))
    print(f"{2 + len(data)} wheels hold with Python {', '.join(versions)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

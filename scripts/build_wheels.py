#!/usr/bin/env python3
"""Build a release: cupy-flash (wheel and sdist), cupy-flash-cuda12x and -cuda13x, cupy-flash-cpu by platform.

Every build is isolated: pip downloads scikit-build-core and NVRTC. Builds are reproducible. It needs PyPA's
build: pip install '.[dev]'. At the end it prints the table of sizes and times for docs/install.md, and
failures.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import budgets  # noqa: E402

from cupy_flash.cubins import locate  # noqa: E402
from cupy_flash.plan import families  # noqa: E402
from cupy_flash.version import __version__  # noqa: E402

# pip's platform tags of the CPU core. why manylinux2014: zig links against its C library.
# none: a wheel without a library, for all other platforms.
PLATFORM_TAGS = {
    "none": "any",
    "linux-x86_64": "manylinux2014_x86_64",
    "linux-aarch64": "manylinux2014_aarch64",
    "macos-aarch64": "macosx_11_0_arm64",
    "windows-x86_64": "win_amd64",
}


def store_of(package: str, platform: str) -> Path:
    """The folder in which CMakeLists.txt keeps the compiled files of a package, so that a build resumes."""
    if platform:
        return ROOT / "build" / "cpu_release" / platform
    return ROOT / "build" / "cubins" / package.removeprefix("cupy-flash-").removesuffix("x")


def build_release(out: Path) -> None:
    """Build the sdist of cupy-flash, and the wheel from it, which shows that the sdist is complete."""
    environment = {"CUPY_FLASH_RELEASE": "1"}
    run([sys.executable, "-m", "build", "--outdir", str(out), str(ROOT)], extra_environ=environment)


class Failed(RuntimeError):
    """A command of a build failed; the message has its error."""


def run(cmd: Sequence[str], cwd: str | None = None, extra_environ: Mapping[str, str] | None = None) -> None:
    """Run a command of a build: print its output at once, and raise Failed with its error if it fails.

    why: errors of scripts/build_cubins.py are followed by output of CMake, which runs it.
    """
    said: list[str] = []
    with subprocess.Popen(
        cmd, cwd=cwd, env={**os.environ, **(extra_environ or {})}, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            said.append(line.rstrip())
    if process.returncode:
        raise Failed(reason(said) or f"{cmd} ended with {process.returncode}")


def reason(said: Sequence[str]) -> str:
    """The errors of a failed build in one line: lines that start with "error:", and indented ones below."""
    found, within = [], False
    for line in said:
        within = line.startswith("error: ") or (within and line.startswith("  "))
        if within:
            found.append(line.removeprefix("error: ").strip())
    return " ".join(found or [line for line in said if line][-1:])


class Packages(contextlib.ExitStack):
    """Builds wheels, in one isolated environment per package.

    why not one per platform: its compiler has 19,520 files.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[Path, tuple[Any, Any]] = {}

    def build(self, project: Path, out: Path, settings: Mapping[str, str]) -> None:
        """Build a wheel; print its output, including the progress bar."""
        import build.env

        if project not in self._known:
            environment = self.enter_context(build.env.DefaultIsolatedEnv())
            builder = build.ProjectBuilder.from_isolated_env(environment, project, runner=run)
            environment.install(builder.build_system_requires)
            self._known[project] = environment, builder
        environment, builder = self._known[project]
        environment.install(builder.get_requires_for_build("wheel", settings))
        repack(Path(builder.build("wheel", out, settings)))


def repack(wheel: Path) -> None:
    """Compress the files of a wheel as far as deflate can, which takes 1.8 % off one with cubins."""
    smaller = wheel.with_suffix(".tmp")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(smaller, "w") as new:
        for file in old.infolist():
            new.writestr(file, old.read(file), zipfile.ZIP_DEFLATED, 9)
    smaller.replace(wheel)


class Wheel(NamedTuple):
    """Figures of a wheel with cubins for the table; sizes are compressed, as in the wheel.

    Attributes
    ----------
    name : str
    bytes : int
    parts : dict of str to int
        Bytes of every target, of every family of kernels, and of every part of `budgets.part_of`.
    sizes : dict of (str, str) to int
        Installed bytes by (target, family).
    cubins : int
        Number of cubins.
    seconds : (float, float)
        Wall-clock and CPU time of the build.
    """

    name: str
    bytes: int
    parts: dict[str, int]
    sizes: dict[tuple[str, str], int]
    cubins: int
    seconds: tuple[float, float]


def measure(wheel: Path, seconds: tuple[float, float]) -> Wheel:
    """Add up the contents of a wheel."""
    parts: dict[str, int] = collections.defaultdict(int)
    sizes: dict[tuple[str, str], int] = collections.defaultdict(int)
    count = 0
    with zipfile.ZipFile(wheel) as archive:
        for file in archive.infolist():
            path = Path(file.filename)
            if path.suffix == ".cubin":
                count += 1
                target = path.parent.name
                family, part = kind_of(target)[path.stem]
                for name in filter(None, (target, family, part)):
                    parts[name] += file.compress_size
                sizes[target, family] += file.file_size
    name = wheel.name.split("-")[0].replace("_", "-")
    return Wheel(name, wheel.stat().st_size, parts, sizes, count, seconds)


def excess(wheel: Wheel) -> list[str]:
    """Describe the budgets that a wheel exceeds, one line each, with a hint."""
    found = budgets.excess(wheel.sizes) + budgets.excess_of_parts(wheel.parts)
    if wheel.bytes > budgets.WHEEL_BYTES:
        found.append(
            f"it has {wheel.bytes / 1e6:.2f} MB, over the budget of {budgets.WHEEL_BYTES / 1e6:.2f} MB. "
            "Try: fewer variants, or another WHEEL_BYTES in scripts/budgets.py"
        )
    return [f"{wheel.name}: {line}" for line in found]


@functools.lru_cache(maxsize=64)
def kind_of(target: str) -> dict[str, tuple[str, str]]:
    """The family of every variant of a target, and its `budgets.part_of`."""
    every = families.names(target).items()
    return {variant.name: (family, budgets.part_of(variant)) for variant, family in every}


def table(wheels: Sequence[Wheel]) -> list[str]:
    """The sizes and times as a Markdown table, with one column per wheel."""
    every = {part for wheel in wheels for part in wheel.parts}
    targets = sorted((part for part in every if part.startswith("sm_")), key=locate.capability)
    rows = [["MB in the wheel", *(f"`{wheel.name}`" for wheel in wheels)], ["---"] * (1 + len(wheels))]
    for part in (*targets, *sorted(every - set(targets))):
        rows.append([part, *(f"{w.parts[part] / 1e6:.1f}" if part in w.parts else "" for w in wheels)])
    rows.append(["**whole wheel**", *(f"**{wheel.bytes / 1e6:.1f}**" for wheel in wheels)])
    rows.append(["cubins", *(str(wheel.cubins) for wheel in wheels)])
    for number, what in enumerate(("minutes to build", "processor minutes")):
        rows.append([what, *(f"{wheel.seconds[number] / 60:.1f}" for wheel in wheels)])
    return [f"| {' | '.join(row)} |" for row in rows]


def main() -> int:
    """Build the requested wheels; the exit status is 1 if one fails or exceeds its budget."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuda", type=int, choices=(12, 13), action="append",
                        help="data package to build; may repeat (default: both)")  # fmt: skip
    parser.add_argument("--cpu", choices=[name for name in PLATFORM_TAGS if name != "none"], action="append",
                        help="platform of the CPU core; may repeat (default: all)")  # fmt: skip
    parser.add_argument("--arch", action="append", metavar="SM",
                        help="such as sm_80 or sm_90a; may repeat (default: all of a release)")  # fmt: skip
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="DIR")
    parser.add_argument("--fresh", action="store_true",
                        help="compile everything, so that the times are those of a first build")  # fmt: skip
    arguments = parser.parse_args()
    try:
        import build.env
    except ImportError:
        print("PyPA's build is not installed.\nTry: pip install build", file=sys.stderr)
        return 1

    steps: list[tuple[str, Path, dict[str, str]]] = [("cupy-flash", ROOT, {})]
    given = arguments.cuda or arguments.cpu
    for platform in ["none", *(arguments.cpu or [])] if given else PLATFORM_TAGS:
        settings = {"wheel.tags": f"py3-none-{PLATFORM_TAGS[platform]}"}
        if platform == "none":  # nothing to compile, so that no compiler is downloaded
            settings |= {"wheel.cmake": "false", "build.requires": "scikit-build-core"}
        else:
            settings["cmake.define.CUPY_FLASH_CPU"] = platform
        steps.append((f"cupy-flash-cpu {platform}", ROOT / "packages" / "cpu", settings))
    for cuda in (arguments.cuda or []) if given else [12, 13]:
        archs = ";".join(arguments.arch or [])
        settings = {"cmake.define.CUPY_FLASH_ARCHS": archs} if archs else {}
        steps.append((f"cupy-flash-cuda{cuda}x", ROOT / "packages" / f"cuda{cuda}x", settings))
    made, failures = [], []
    with Packages() as packages:
        for number, (name, project, settings) in enumerate(steps, 1):
            package, _, platform = name.partition(" ")
            if arguments.fresh:
                shutil.rmtree(store_of(package, platform), ignore_errors=True)
            print(f"[{number}/{len(steps)}] {name}", flush=True)
            clock, before = time.perf_counter(), os.times()
            try:
                if project == ROOT:
                    build_release(arguments.out)
                else:
                    packages.build(project, arguments.out, settings)
            except (
                Failed,
                subprocess.CalledProcessError,
                build.BuildException,
                build.BuildBackendException,
            ) as error:
                cause = error.exception if isinstance(error, build.BuildBackendException) else error
                failures.append(f"{name} was not built: {cause}")
                print(failures[-1], file=sys.stderr, flush=True)
                continue
            after = os.times()
            seconds = time.perf_counter() - clock, sum(after[2:4]) - sum(before[2:4])
            tag = PLATFORM_TAGS.get(platform, "any")
            wheel = arguments.out / f"{package.replace('-', '_')}-{__version__}-py3-none-{tag}.whl"
            if not platform:  # the table has wheels with cubins only
                made.append(measure(wheel, seconds))
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
            print(
                f"[{number}/{len(steps)}] {wheel.name}, sha256 {digest}, took {seconds[0]:.0f} s", flush=True
            )
    failures += [line for wheel in made for line in excess(wheel)]
    print("", *table(made), sep="\n", flush=True)
    print(*failures, sep="\n", end="\n" * bool(failures), file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Build a release: cupy-flash (wheel and sdist), cupy-flash-cuda12x and cupy-flash-cuda13x.

Every build is isolated: pip fetches scikit-build-core and NVRTC. The same sources give the same bytes.
Needs PyPA's build: pip install 'cupy-flash[dev]'.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import importlib.util
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUDGET_BYTES = 60_000_000  # of one wheel with cubins


def build(project: Path, out: Path, *options: str) -> None:
    """Run one isolated build; its output, with the compilation's progress bar, goes to ours."""
    # why none: the core wheel is Python and CUDA sources. The data packages do not look at the switch.
    environment = {**os.environ, "CUPY_FLASH_CUBINS": "none"}
    command = [sys.executable, "-m", "build", "--outdir", str(out), *options, str(project)]
    subprocess.run(command, check=True, env=environment)


def sizes(wheel: Path) -> dict[tuple[str, str], list[int]]:
    """(target, kernel family) -> [cubins, bytes, compressed bytes] of a wheel."""
    found: dict[tuple[str, str], list[int]] = collections.defaultdict(lambda: [0, 0, 0])
    with zipfile.ZipFile(wheel) as archive:
        for file in archive.infolist():
            path = Path(file.filename)
            if path.suffix == ".cubin":
                row = found[path.parent.name, path.name.split("_")[0]]
                for column, value in enumerate((1, file.file_size, file.compress_size)):
                    row[column] += value
    return found


def report(wheel: Path) -> bool:
    """Print a wheel's size by target and family; whether it keeps to the budget."""
    total = wheel.stat().st_size
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    print(f"{wheel.name}: {total / 1e6:.2f} MB, sha256 {digest}")
    rows = sizes(wheel)
    for (target, family), (count, plain, packed) in sorted(rows.items()):
        print(
            f"  {target:8} {family:8} {count:4} cubins {plain / 1e6:7.2f} MB, zipped {packed / 1e6:6.2f} MB"
        )
    if rows and total > BUDGET_BYTES:
        print(f"  over the budget of {BUDGET_BYTES / 1e6:.0f} MB", file=sys.stderr)
        return False
    return True


def main() -> int:
    """Build what the arguments ask for; the exit status is 1 if a wheel is over its budget."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuda", type=int, choices=(12, 13), action="append",
                        help="data package to build; may repeat (default: both)")  # fmt: skip
    parser.add_argument("--arch", action="append", metavar="SM",
                        help="such as sm_80 or sm_90a; may repeat (default: all of a release)")  # fmt: skip
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="DIR")
    arguments = parser.parse_args()
    if importlib.util.find_spec("build") is None:
        print("PyPA's build is not installed.\nTry: pip install build", file=sys.stderr)
        return 1

    # The wheel of the core is built from the sdist, which proves that the sdist is complete.
    steps = [("cupy-flash", ROOT, list[str]())]
    for cuda in arguments.cuda or [12, 13]:
        options = ["--wheel"]
        if arguments.arch:
            options += ["-C", f"cmake.define.CUPY_FLASH_ARCHS={';'.join(arguments.arch)}"]
        steps.append((f"cupy-flash-cuda{cuda}x", ROOT / "packages" / f"cuda{cuda}x", options))
    for number, (name, project, options) in enumerate(steps, 1):
        print(f"[{number}/{len(steps)}] {name}", flush=True)
        start = time.perf_counter()
        try:
            build(project, arguments.out, *options)
        except subprocess.CalledProcessError:
            print(f"{name} was not built; its output is above", file=sys.stderr)
            return 1
        print(f"[{number}/{len(steps)}] {name} took {time.perf_counter() - start:.0f} s", flush=True)
    names = {name.replace("-", "_") for name, *_ in steps}
    wheels = [w for w in sorted(arguments.out.glob("*.whl")) if w.name.split("-")[0] in names]
    kept = [report(wheel) for wheel in wheels]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())

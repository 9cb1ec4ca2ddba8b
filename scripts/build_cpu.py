#!/usr/bin/env python3
"""Compile the CPU core: kernels_cpu in, <out>/<platform>/<isa>.so and manifest.json out.

It uses the system's compiler (at least g++ 12 or clang++ 15), or that of pip install ziglang, which also
compiles for other platforms.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cupy_flash.cpu.core.build import ZIG_TARGETS, BuildFailed, build, compiler_of, libraries_of  # noqa: E402
from cupy_flash.cpu.core.isa import host, runnable  # noqa: E402
from cupy_flash.cpu.core.sources import parts  # noqa: E402
from cupy_flash.store import file_to_write  # noqa: E402


def main() -> int:
    """Build the requested libraries; the exit status is 1 if one could not be built."""
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])  # None under -OO
    parser.add_argument("--platform", action="append", metavar="NAME",
                        help=f"default: this machine; with zig any of {', '.join(ZIG_TARGETS)}")  # fmt: skip
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--isa", action="append", help="such as v3; may repeat (default: all of the platform)")
    which.add_argument("--native", action="store_true", help="only the best that this CPU runs")
    parser.add_argument("--compiler", help="a command, or zig (default: $CXX, g++, clang++, zig)")
    parser.add_argument("--if-possible", action="store_true",
                        help="where there is no compiler, or no core for this machine, say so")  # fmt: skip
    parser.add_argument(
        "--list", type=file_to_write, metavar="FILE", help="write the folders built, one per line"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "cpu", metavar="DIR")
    arguments = parser.parse_args()
    folders: list[str] = []
    failed = False
    try:
        compiler = compiler_of(arguments.compiler)
        for platform in arguments.platform or [host().platform]:
            start = time.perf_counter()
            every = libraries_of(platform)
            isas = [isa for isa in every if arguments.isa is None or isa.name in arguments.isa]
            unknown = {*(arguments.isa or ())} - {isa.name for isa in every}
            if every and unknown:
                raise BuildFailed(f"{platform} has no instruction set {' or '.join(sorted(unknown))}.\n"
                                  f"Try: --isa {every[-1].name}")  # fmt: skip
            isas = list(runnable()[:1]) if arguments.native else isas
            made = build(platform, arguments.out, compiler, isas)
            for path in made:
                print(f"  {path.stem:5} {path.stat().st_size / 1e3:6.0f} KB")
            print(f"{platform}: {len(made)} of {sum(len(parts(isa)) for isa in isas)} libraries compiled in "
                  f"{time.perf_counter() - start:.1f} s by {compiler.version}")  # fmt: skip
            folders.append(platform)
    except BuildFailed as error:
        failed = not arguments.if_possible
        print("error: " * failed + str(error).replace("\n", "\n  "), file=sys.stderr)
    if arguments.list:
        arguments.list.write_text("".join(f"{folder}\n" for folder in folders), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

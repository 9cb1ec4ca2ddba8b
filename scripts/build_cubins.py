#!/usr/bin/env python3
"""Compile the kernels ahead of time: catalog in, <out>/cuda<major>/<target>/*.cubin and manifest.json out.

It needs no GPU and no CUDA toolkit; NVRTC comes from PyPI: pip install 'cupy-flash[compiler12]' (or 13).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cupy_flash import build  # noqa: E402
from cupy_flash.errors import Unsupported  # noqa: E402


def main() -> int:
    """Build what the arguments ask for; the exit status is 1 if anything was refused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuda", type=int, choices=(12, 13), action="append",
                        help="CUDA major of the cubins; may repeat (default: 12)")  # fmt: skip
    parser.add_argument("--arch", action="append", metavar="SM",
                        help="such as sm_80 or sm_90a; may repeat (default: all of a release)")  # fmt: skip
    parser.add_argument("--only", default="*", metavar="PATTERN", help="variants by name")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "cubins", metavar="DIR")
    parser.add_argument("--jobs", type=int, metavar="N", help="default: all processors")
    parser.add_argument("--list", type=Path, metavar="FILE", help="write the folders built, one per line")
    arguments = parser.parse_args()

    folders: list[Path] = []
    for cuda in arguments.cuda or [12]:
        start = time.perf_counter()
        archs = arguments.arch or build.targets(cuda)
        try:
            made = build.build(cuda, archs, arguments.out, only=arguments.only, jobs=arguments.jobs)
        except (build.BuildFailed, Unsupported) as error:
            print(error, file=sys.stderr)
            return 1
        files = [file for folder in made for file in folder.glob("*.cubin")]
        size = sum(file.stat().st_size for file in files) / 1e6
        print(f"CUDA {cuda}: {len(files)} cubins, {size:.1f} MB, for {', '.join(f.name for f in made)} "
              f"in {time.perf_counter() - start:.1f} s")  # fmt: skip
        folders += made
    if arguments.list:
        lines = [folder.relative_to(arguments.out).as_posix() for folder in folders]
        arguments.list.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

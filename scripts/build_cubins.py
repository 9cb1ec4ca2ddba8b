#!/usr/bin/env python3
"""Compile the kernels ahead of time: catalog in, <out>/cuda<major>/<target>/*.cubin and manifest.json out.

It needs no GPU and no CUDA toolkit; NVRTC comes from PyPI: pip install '.[compiler12]' (or 13).
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cupy_flash.cubins import build, locate  # noqa: E402
from cupy_flash.errors import UnsupportedError  # noqa: E402
from cupy_flash.plan import families  # noqa: E402
from cupy_flash.store import file_to_write  # noqa: E402


def table(built: build.Built) -> list[str]:
    """Lines with size and compile time of each family in a folder."""
    entries = json.loads((built.folder / locate.MANIFEST).read_text(encoding="utf-8"))["cubins"]
    of_family: dict[str, list[str]] = collections.defaultdict(list)
    for variant, family in families.names(built.folder.name).items():
        if variant.name in entries:
            of_family[family].append(variant.name)
    lines = []
    for family, names in sorted(of_family.items()):
        size = sum(entries[name]["bytes"] for name in names)
        spent = [built.compiled[name] for name in names if name in built.compiled]
        cost = f"{len(spent)} compiled in {sum(spent):.0f} s of one processor" if spent else "up to date"
        lines.append(f"  {built.folder.name:8} {family:8} {len(names):4} cubins {size / 1e6:7.2f} MB, {cost}")
    return lines


def _archs(asked: list[str], cuda: int) -> list[str]:
    """Expand native and all in the requested architectures."""
    meant = {"all": build.targets(cuda), "native": build.archs_here()}
    return [arch for name in asked for arch in meant.get(name, (name,))]


def _part(text: str) -> tuple[int, int]:
    """Parse "K/N"."""
    k, n = map(int, text.split("/"))
    if not 0 <= k < n:
        raise ValueError(text)
    return k, n


def _of_part(archs: list[str], only: str, part: tuple[int, int]) -> str | set[str]:
    """The pattern, or for several parts the set of its matching names in one part."""
    k, n = part
    targets = (target for arch in archs for target in build.native_targets(arch))
    names = fnmatch.filter(sorted({v.name for target in targets for v in families.variants(target)}), only)
    if not names:
        hint = "'*_f16_d64_*', or the kernel of a line of python -m cupy_flash explain"
        raise build.BuildFailed(f"no kernel for {', '.join(archs)} is named like {only!r}.\nTry: {hint}")
    return only if n == 1 else {*names[k::n]}


def main() -> int:
    """Build the requested kernels; the exit status is 1 if one was refused."""
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])  # None under -OO
    parser.add_argument("--cuda", type=int, choices=(12, 13), action="append",
                        help="CUDA major of the cubins; may repeat (default: 12)")  # fmt: skip
    parser.add_argument("--arch", action="append", metavar="SM",
                        help="such as sm_80 or sm_90a, or native: the GPUs of this machine; may repeat "
                        "(default, or all: all of a release)")  # fmt: skip
    parser.add_argument("--only", default="*", metavar="PATTERN", help="variants by name")
    parser.add_argument("--part", type=_part, default=(0, 1), metavar="K/N",
                        help="of those every Nth, from the Kth on, counted from 0")  # fmt: skip
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "cubins", metavar="DIR")
    parser.add_argument("--jobs", type=int, metavar="N", help="default: all processors")
    parser.add_argument(
        "--list", type=file_to_write, metavar="FILE", help="write the folders built, one per line"
    )
    arguments = parser.parse_args()

    folders: list[Path] = []
    failures: list[str] = []
    for cuda in arguments.cuda or [12]:
        start = time.perf_counter()
        archs = _archs(arguments.arch or ["all"], cuda)
        if not archs:
            print(
                "no kernels are built: nvidia-smi shows no GPU here that they can be built for",
                file=sys.stderr,
            )
            continue
        try:
            only = _of_part(archs, arguments.only, arguments.part)
            made = build.build(cuda, archs, arguments.out, only=only, jobs=arguments.jobs)
        except (build.BuildFailed, UnsupportedError) as error:
            failures.append(str(error).replace("\n", "\n  "))
            continue
        except KeyboardInterrupt:
            print("interrupted; the same command again goes on from what is finished", file=sys.stderr)
            return 130
        for lines in map(table, made):
            print(*lines, sep="\n")
        files = [file for built in made for file in built.folder.glob("*.cubin")]
        size = sum(file.stat().st_size for file in files) / 1e6
        names = ", ".join(built.folder.name for built in made)
        print(f"CUDA {cuda}: {len(files)} cubins, {size:.1f} MB, for {names} "
              f"in {time.perf_counter() - start:.1f} s")  # fmt: skip
        folders += [built.folder for built in made]
    if arguments.list:
        lines = [f"{folder.relative_to(arguments.out).as_posix()}\n" for folder in folders]
        arguments.list.write_text("".join(lines), encoding="utf-8")
    sys.stdout.flush()
    for failure in failures:  # last, and with a word that build_wheels.py looks for
        print("error:", failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

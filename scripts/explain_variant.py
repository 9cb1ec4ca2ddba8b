#!/usr/bin/env python3
"""Show what a variant became: its macros, registers and shared memory, and the instructions of its SASS.

It compiles nothing: build first with scripts/build_cubins.py. The SASS needs nvdisasm, for example from
pip install nvidia-cuda-nvdisasm.
"""

from __future__ import annotations

import argparse
import collections
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cupy_flash import catalog, cubins, families  # noqa: E402
from cupy_flash.errors import CubinNotFound, Unsupported  # noqa: E402

_INSTRUCTION = re.compile(r"^\s*(?:/\*[0-9a-f]+\*/)?\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)")
_LABEL = re.compile(r"^\s*\.(L_x_\d+):")
_BRANCH = re.compile(r"\bBRA\b.*`\(\.(L_x_\d+)\)")
# Of these the forms differ in what they do, so they are told apart.
_IN_FULL = ("HMMA", "IMMA", "HGMMA", "QGMMA", "LDSM", "MUFU", "LDGSTS", "LDG", "STG", "LDS", "STS")


def disassembler() -> str | None:
    """Path of nvdisasm: on PATH, or in its PyPI package."""
    found = shutil.which("nvdisasm")
    packaged = (Path(entry) / "nvidia" / "cu13" / "bin" / "nvdisasm" for entry in sys.path)
    return found or next((str(path) for path in packaged if path.is_file()), None)


def instructions(sass: str) -> list[tuple[int, str]]:
    """Line number and name of every instruction."""
    found = []
    for number, line in enumerate(sass.splitlines()):
        match = _INSTRUCTION.match(line)
        if match and line.rstrip().endswith((";", "*/")):
            name, form = match.groups()
            found.append((number, name + form if name in _IN_FULL else name))
    return found


def loops(sass: str) -> list[tuple[int, int]]:
    """First and last line of every loop: a label and the last branch back to it."""
    lines = sass.splitlines()
    labels = {m[1]: n for n, line in enumerate(lines) if (m := _LABEL.match(line))}
    ends: dict[int, int] = {}
    for number, line in enumerate(lines):
        match = _BRANCH.search(line)
        start = labels.get(match[1], number) if match else number
        if start < number:
            ends[start] = number
    return sorted(ends.items())


def histogram(found: list[tuple[int, str]]) -> str:
    """Names by how often they occur."""
    counts = collections.Counter(name for _, name in found)
    return "  ".join(f"{name} {count}" for name, count in counts.most_common())


def main() -> int:
    """Print every variant that fits the pattern; the exit status is 1 if there is none."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pattern", help="variants by name, such as 'flash_forward_f16_d128*'")
    parser.add_argument("--arch", default="sm_80")
    parser.add_argument("--loops", action="store_true", help="also each loop that holds tensor-core products")
    parser.add_argument("--sass", action="store_true", help="also the SASS itself")
    arguments = parser.parse_args()
    tool = disassembler()
    try:
        target = catalog.architecture(arguments.arch).target
        chosen = [v for v in families.variants(target) if fnmatch(v.name, arguments.pattern)]
        for variant in chosen:
            cubin = cubins.locate(variant, target)
            print(f"{variant.name}  ({variant.source}, {cubin.target}, {cubin.set})")
            print("  " + "  ".join(f"{name}={value}" for name, value in variant.defines().items()))
            print(f"  {cubin.registers} registers, {cubin.spills} bytes spilled, {cubin.shared_bytes} bytes "
                  f"shared, {cubin.path.stat().st_size} bytes of file")  # fmt: skip
            if tool is None:
                print("  no nvdisasm here: pip install nvidia-cuda-nvdisasm")
                continue
            command = [tool, "-c", str(cubin.path)]
            sass = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found = instructions(sass)
            print(f"  {len(found)} instructions: {histogram(found)}")
            for start, end in loops(sass) if arguments.loops else []:
                inside = [(n, name) for n, name in found if start <= n <= end]
                if any("MMA" in name for _, name in inside):
                    print(f"  loop of {len(inside)}: {histogram(inside)}")
            if arguments.sass:
                print(sass)
    except (CubinNotFound, Unsupported) as error:
        print(error, file=sys.stderr)
        return 1
    if not chosen:
        print(f"no variant for {target} fits {arguments.pattern!r}", file=sys.stderr)
    return 0 if chosen else 1


if __name__ == "__main__":
    sys.exit(main())

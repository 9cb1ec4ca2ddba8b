#!/usr/bin/env python3
"""Show a compiled variant: its macros, registers and shared memory, and the instructions of its SASS.

It needs the cubins of scripts/build_cubins.py.
"""

from __future__ import annotations

import argparse
import collections
import sys
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cupy_flash.cubins import locate, sass  # noqa: E402
from cupy_flash.errors import CubinNotFoundError, UnsupportedError  # noqa: E402
from cupy_flash.plan import catalog, families  # noqa: E402

# Instructions whose forms are counted separately.
_IN_FULL = ("HMMA", "IMMA", "QMMA", "HGMMA", "QGMMA", "LDSM", "MUFU", "LDGSTS", "LDG", "STG", "LDS", "STS")


def histogram(instructions: Iterable[sass.Instruction]) -> str:
    """Names with counts, the most frequent first."""
    counts = collections.Counter(i.name + (i.form if i.name in _IN_FULL else "") for i in instructions)
    return "  ".join(f"{name} {count}" for name, count in counts.most_common())


def main() -> int:
    """Print every variant that fits the pattern; the exit status is 1 if there is none."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pattern", help="variants by name, such as 'flash_forward_f16_d128*'")
    parser.add_argument("--arch", default="sm_80")
    parser.add_argument("--loops", action="store_true", help="also each loop that holds tensor-core products")
    parser.add_argument("--overlap", action="store_true", help="also what runs under products, what not")
    parser.add_argument("--sass", action="store_true", help="also the SASS itself")
    arguments = parser.parse_args()
    try:
        row = catalog.architecture(arguments.arch)
        every = {v: target for target in row.targets for v in families.variants(target)}
        chosen = [v for v in every if fnmatch(v.name, arguments.pattern)]
        for variant in chosen:
            cubin = locate.locate(variant, every[variant])
            print(f"{variant.name}  ({variant.source}, {cubin.target}, {cubin.set})")
            print("  " + "  ".join(f"{name}={value}" for name, value in variant.defines().items()))
            print(f"  {cubin.registers} registers, {cubin.spills} bytes spilled, {cubin.shared_bytes} bytes "
                  f"shared, {cubin.path.stat().st_size} bytes of file")  # fmt: skip
            listing = sass.disassemble(cubin.path)
            print(f"  {len(listing.instructions)} instructions: {histogram(listing.instructions)}")
            if arguments.loops and (whole := sass.shortest_iteration(listing)):
                print(f"  {whole} instructions of a whole block of keys, the shortest way around")
            if arguments.overlap:
                exponentials = sum(i.form.startswith(".EX2") for i in listing.instructions)
                print(f"  {sass.covered(listing)} of {exponentials} exponentials under products, "
                      f"{sass.scattered(listing)} of arithmetic between those of a group")  # fmt: skip
                if found := sass.iteration(listing):
                    print(f"  {found.instructions} instructions of a whole tile: {found.products} products, "
                          f"{found.barriers} barriers; most exponentials between two products "
                          f"{found.exponentials}, instructions {found.stretches[:6]}; "
                          f"{found.doubles} of doubles")  # fmt: skip
            for start, end in listing.loops() if arguments.loops else []:
                inside = listing.instructions[start : end + 1]
                shortest = listing.iteration_length(start, end)
                if shortest and any("MMA" in instruction.name for instruction in inside):
                    print(f"  loop of {len(inside)}, {shortest} if only products "
                          f"are asked for: {histogram(inside)}")  # fmt: skip
            if arguments.sass:
                for instruction in listing.instructions:
                    print(f"    {instruction.address:#06x} {instruction}")
    except (CubinNotFoundError, UnsupportedError) as error:
        print(error, file=sys.stderr)
        return 1
    if not chosen:
        print(f"no variant for {row.name} fits {arguments.pattern!r}", file=sys.stderr)
    return 0 if chosen else 1


if __name__ == "__main__":
    sys.exit(main())

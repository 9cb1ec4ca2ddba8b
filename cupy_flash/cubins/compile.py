"""Compile one variant, refuse a cubin that fails the checks, and write the file."""

from __future__ import annotations

import hashlib
import re
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from ..plan import catalog
from ..store import write_atomically
from . import nvrtc, sass, sources

__all__ = ["Resources", "compile_variant"]

_WGMMA_WARNING = re.compile(r"^.*C75\d\d.*$", re.MULTILINE)


class Resources(NamedTuple):
    """Resources of one kernel, as ptxas reports them; bytes are per thread, shared bytes per block."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    static_shared_bytes: int  # without the dynamic part

    @classmethod
    def of(cls, log: str) -> Resources:
        """Parse a compile log; of several functions the largest number counts."""

        def worst(pattern: str) -> int:
            return max((int(number) for number in re.findall(pattern, log)), default=0)

        return cls(
            registers=worst(r"Used (\d+) registers"),
            stack_bytes=worst(r"(\d+) bytes stack frame"),
            spill_bytes=worst(r"(\d+) bytes spill (?:stores|loads)"),
            static_shared_bytes=worst(r"(\d+) bytes smem"),
        )


def compile_variant(
    compiler: nvrtc.Compiler, variant: catalog.Variant, target: str, directory: Path
) -> tuple[dict[str, Any], list[str], float]:
    """Compile a variant into its file; return its manifest entry, reasons to refuse it, and CPU seconds."""
    start = time.thread_time()
    path = sources.folder() / variant.source
    include = [f"-I{path.parent}", f"-I{path.parent / 'include'}"]
    with tempfile.TemporaryDirectory() as scratch:
        if variant.function:
            include.append(f"-I{sources.write_function(variant.function, Path(scratch))}")
        options = [*sources.options(variant, target), *include]
        cubin, log = compiler.compile(path.read_text(encoding="utf-8"), path.name, options)
    used = Resources.of(log)
    refused = [f"{variant.name} for {target}: {line}" for line in _WGMMA_WARNING.findall(log)]
    # why no limit for score functions: their authors decide how many registers they use.
    allowed = variant.allowed_spill_bytes(target)
    if used.spill_bytes > allowed and not variant.function:
        refused.append(
            f"{variant.name} for {target} spills {used.spill_bytes} bytes at {used.registers} "
            f"registers; its row in the catalog allows {allowed}"
        )
    if variant.products or any(variant.stall_limits):
        refused += [f"{variant.name} for {target}: {reason}" for reason in _sass_faults(cubin, variant, used)]
    if not refused:
        write_atomically(directory / f"{variant.name}.cubin", cubin)
    entry = {
        "sha256": hashlib.sha256(cubin).hexdigest(),
        "bytes": len(cubin),
        "source": sources.digest(variant, target, compiler.toolkit.version[0]),
        "registers": used.registers,
        "spill_bytes": used.spill_bytes,
        "stack_bytes": used.stack_bytes,
        "shared_bytes": used.static_shared_bytes + variant.shared_bytes,
    }
    return entry, refused, time.thread_time() - start


def _sass_faults(cubin: bytes, variant: catalog.Variant, used: Resources) -> list[str]:
    """Faults in the SASS of products and of the registers of warpgroups."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        listing = sass.disassemble(path)
    if not variant.products:
        return _stalls(listing, variant)
    reasons = sass.overwritten(listing)
    reasons += sass.register_faults(listing, used.registers, variant.threads // 128)
    if (found := sass.products(listing)) != dict(variant.products):
        reasons.append(f"its products are {found}, its row asks for {dict(variant.products)}")
    if (covered := sass.covered(listing)) < variant.covered:
        reasons.append(
            f"overlap: {covered} exponentials run under products, its row asks for {variant.covered}"
        )
    return reasons


def _stalls(listing: sass.Listing, variant: catalog.Variant) -> list[str]:
    """Stalls of the tensor cores in the main loop that exceed the limits of the row."""
    iteration = sass.iteration(listing)
    if iteration is None:
        return ["overlap: no loop has products of mma.sync"]
    what = (
        "instructions from one product to the next",
        "exponentials from one product to the next",
        "barriers",
    )
    found = (iteration.stretches[0], iteration.exponentials, iteration.barriers)
    return [
        f"overlap: {count} {name} per iteration of the main loop, its row allows {most}"
        for count, name, most in zip(found, what, variant.stall_limits, strict=True)
        if count > most
    ]

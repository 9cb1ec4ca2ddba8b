"""What ptxas gave each kernel of sm_80, read off the manifest of a build."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cupy_flash.plan import families
from tests.paths import GOLDEN, ROOT

MANIFEST = ROOT / "build" / "cubins" / "cuda12" / "sm_80" / "manifest.json"
GOLDEN_FILE = GOLDEN / "resources_sm80.txt"
RESOURCES = "registers", "spill_bytes", "shared_bytes"


def resources(entries: Mapping[str, Any]) -> list[str]:
    """One line for each kernel: name, registers, bytes spilled, bytes of shared memory."""
    lines = []
    for name, entry in sorted(entries.items()):
        registers, spilled, shared = (entry[key] for key in RESOURCES)
        lines.append(f"{name:<56} {registers:>4} registers {spilled:>4} spilled {shared:>7} shared")
    return lines


def names(lines: Sequence[str]) -> list[str]:
    """Of which kernels the lines are."""
    return [line.split()[0] for line in lines]


def compiled_names() -> list[str]:
    """Of which kernels there must be lines."""
    return sorted(variant.name for variant in families.variants("sm_80"))


def renewed(before: Sequence[str], entries: Mapping[str, Any]) -> list[str]:
    """The lines after a build of these; those of other kernels stay, but for kernels that are gone."""
    lines = dict(zip(names(before), before, strict=True))
    lines |= {line.split()[0]: line for line in resources(entries)}
    return [lines[name] for name in compiled_names() if name in lines]

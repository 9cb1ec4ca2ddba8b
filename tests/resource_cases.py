"""What ptxas gave each kernel of sm_80, read off the manifest of a build."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.paths import GOLDEN, ROOT

MANIFEST = ROOT / "build" / "cubins" / "cuda12" / "sm_80" / "manifest.json"
GOLDEN_FILE = GOLDEN / "resources_sm80.txt"


def resources(entries: Mapping[str, Any]) -> list[str]:
    """One line for each kernel: name, registers, bytes spilled, bytes of shared memory."""
    lines = []
    for name, entry in sorted(entries.items()):
        registers, spilled, shared = (entry[key] for key in ("registers", "spill_bytes", "shared_bytes"))
        lines.append(f"{name:<56} {registers:>4} registers {spilled:>4} spilled {shared:>7} shared")
    return lines

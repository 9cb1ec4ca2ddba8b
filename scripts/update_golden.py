#!/usr/bin/env python3
"""Rewrite the golden files of tests/golden from this checkout, for review of the diff."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests import kernel_tables, plan_cases, resource_cases
from tests.simulator import cost_cases


def main() -> None:
    """Write golden plans, tables and simulated costs of kernels, and resources of compiled kernels."""
    for cases in (plan_cases, kernel_tables, cost_cases):
        for case in cases.CASES:
            path = cases.golden_path(case)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(cases.golden_text(case))
            print(path)
    if resource_cases.MANIFEST.exists():
        built = json.loads(resource_cases.MANIFEST.read_text())["cubins"]
        before = resource_cases.GOLDEN_FILE.read_text().splitlines()
        resource_cases.GOLDEN_FILE.write_text("\n".join(resource_cases.renewed(before, built)) + "\n")
        print(resource_cases.GOLDEN_FILE)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Rewrite the golden files of tests/golden from the tree as it is; the diff is for a reviewer to judge."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests import plan_cases
from tests.simulator import cost_cases


def main() -> None:
    """Write every golden plan and the costs of every kernel in the simulator."""
    for cases in (plan_cases, cost_cases):
        for case in cases.CASES:
            path = cases.golden_path(case)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(cases.golden_text(case))
            print(path)


if __name__ == "__main__":
    main()

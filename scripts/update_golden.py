#!/usr/bin/env python3
"""Rewrite the golden files of tests/golden from the tree as it is; the diff is for a reviewer to judge."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.plan_cases import CASES, golden_path, golden_text


def main() -> None:
    """Write every golden plan."""
    for case in CASES:
        path = golden_path(case)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(golden_text(case))
        print(path)


if __name__ == "__main__":
    main()

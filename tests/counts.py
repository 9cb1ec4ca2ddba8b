"""What a session counts: tests record the property ("counted: <what>", one), the end says how many."""

from __future__ import annotations

import collections
from typing import Any

_PREFIX = "counted: "


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A line for each thing: how many different ones the reports of all workers have."""
    counted: dict[str, set[str]] = collections.defaultdict(set)
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, one in getattr(report, "user_properties", ()):
                if name.startswith(_PREFIX):
                    counted[name.removeprefix(_PREFIX)].add(one)
    for what, ones in sorted(counted.items()):
        terminalreporter.write_line(f"{what}: {len(ones)}")

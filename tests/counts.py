"""What a session counts: tests record the property ("counted: <what>", one), the end says how many.

It also says how long the tests of each folder took, in seconds of the processes that ran them, and writes
what passed for a run that need not repeat it.
"""

from __future__ import annotations

import collections
from typing import Any

_PREFIX = "counted: "


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A line for each thing: how many different ones the reports of all workers have; one for each folder."""
    counted: dict[str, set[str]] = collections.defaultdict(set)
    seconds: dict[str, float] = collections.defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                seconds[report.nodeid.partition("::")[0].rpartition("/")[0]] += report.duration
            for name, one in getattr(report, "user_properties", ()):
                if name.startswith(_PREFIX):
                    counted[name.removeprefix(_PREFIX)].add(one)
    for what, ones in sorted(counted.items()):
        terminalreporter.write_line(f"{what}: {len(ones)}")
    if file := terminalreporter.config.option.write_passed:
        stats = terminalreporter.stats
        passed, *bad = ({x.nodeid for x in stats.get(kind, ())} for kind in ("passed", "failed", "error"))
        file.write_text("".join(f"{name}\n" for name in sorted(passed.difference(*bad))))
    for folder, spent in sorted(seconds.items()):
        terminalreporter.write_line(f"{folder}: {spent:.0f} s")

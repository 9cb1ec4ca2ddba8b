"""Time several ways of doing one thing side by side, and write down where that was."""

from __future__ import annotations

import csv
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from statistics import quantiles
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"

# why: OpenMP workers spin for some milliseconds after their work and would take a core from
# whoever is timed next.
SETTLE_SECONDS = 0.02


class Timing(NamedTuple):
    """Quartiles of a duration in seconds."""

    lower: float
    median: float
    upper: float


LEAST_REPETITIONS = 5


def alternate(
    ways: Mapping[str, Callable[[], object]], repetitions: int, seconds: float
) -> dict[str, Timing]:
    """Time each way in turn, so that all meet the same weather.

    Each timed call follows an untimed one of the same way, so that caches and threads are its own.
    Ends after `repetitions` rounds, or earlier when `seconds` have passed.
    """
    end = time.perf_counter() + seconds
    durations: dict[str, list[float]] = {name: [] for name in ways}
    for done in range(repetitions):
        if done >= LEAST_REPETITIONS and time.perf_counter() > end:
            break
        for name, call in ways.items():
            time.sleep(SETTLE_SECONDS)
            call()
            start = time.perf_counter()
            call()
            durations[name].append(time.perf_counter() - start)
    return {name: Timing(*quantiles(d, n=4, method="inclusive")) for name, d in durations.items()}


def processor() -> str:
    """Return the name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str:
    """Return the checkout's commit, with a + if files differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "cupy_flash", "bench")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine() -> dict[str, str]:
    """Return what a timing depends on besides the code."""
    return {
        "when": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
        "commit": commit(),
        "cpu": processor(),
        "cores": str(os.cpu_count()),
        "load": f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "",
        "python": platform.python_version(),
    }


def append(file: str, rows: list[dict[str, str]]) -> Path:
    """Append rows to a CSV of bench/results; its header is that of its first row ever."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / file
    new = not path.exists()
    with path.open("a", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)
    return path

"""Timing in fresh processes, with bytecode on disk, as for users' programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_TIMED = """
import gc, json, time
us = []
for step in {steps!r}:
    gc.collect()  # else the objects of the step before are looked through in this one
    start = time.process_time()
    exec(step)
    us.append(1e6 * (time.process_time() - start))
print(json.dumps(us))
"""


def environment() -> dict[str, str]:
    """The environment without PYTHONDONTWRITEBYTECODE, which would make every process compile its imports."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def least_us(steps: Sequence[str], repeat: int = 9) -> list[float]:
    """Microseconds of CPU time of each step of a program, the minimum over fresh processes.

    Parameters
    ----------
    steps : sequence of str
        Statements, run in this order in one namespace.
    repeat : int
        Processes, in addition to a first one that writes the bytecode.
    """
    command = [sys.executable, "-c", _TIMED.format(steps=list(steps))]
    runs = []
    for _ in range(repeat + 1):
        done = subprocess.run(
            command, cwd=_ROOT, env=environment(), stdout=subprocess.PIPE, text=True, check=True
        )
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    return [min(us) for us in zip(*runs[1:], strict=True)]

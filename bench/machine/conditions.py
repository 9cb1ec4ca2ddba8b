"""Conditions of a timing: the machine, the versions, the commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

from . import blas
from .place import Place

ROOT = Path(__file__).parents[2]
PACKAGES = ("numpy", "torch", "jax", "flash-attn", "flash_attn_3", "fa3-fwd", "flash-attn-4",
            "flash-attn3-jax", "cupy-cuda12x", "cupy-cuda13x")  # fmt: skip


def processor() -> str:
    """Return the name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str:
    """Return the commit of the checkout, with a + if files have changed."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        measured = ("cupy_flash", "kernels_cu", "kernels_cpu")
        changed = git("status", "--porcelain", "--untracked-files=no", *measured)
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def load() -> str:
    """Load average of the last minute; empty if the system has none."""
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""


def machine() -> dict[str, str]:
    """Columns of time, commit, CPU, load and Python."""
    return {
        "when": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S"),
        "commit": commit(),
        "cpu": processor(),
        "cores": str(os.cpu_count()),
        "load": load(),
        "python": platform.python_version(),
    }


def versions() -> str:
    """Versions of the measured packages, and NumPy's BLAS with its kernel set, which can vary per machine."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join([*found, *blas.names()])


def surroundings(place: Place) -> Mapping[str, str]:
    """Columns that are equal in all rows of a run."""
    return machine() | {"gpu": place.gpu, "driver": place.driver, "versions": versions()}

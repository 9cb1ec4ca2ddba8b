"""Instruction sets that the core is compiled for, and which of them this CPU supports."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import itertools
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ...errors import InvalidArgumentsError

__all__ = [
    "BY_AMX", "FLOATS", "ISAS", "PAIRS", "Isa", "amx_is_permitted", "chosen", "flags_by_numpy", "host",
    "name_of", "runnable", "why_floats",
]  # fmt: skip

OVERRIDE = "CUPY_FLASH_CPU"
# Suffixes of an instruction set in CUPY_FLASH_CPU: how bfloat16 and floats are multiplied.
FLOATS, PAIRS, BY_AMX = "-floats", "-pairs", "-amx"
# CPUs that multiply pairs more slowly than floats, by vendor_id of /proc/cpuinfo. why not by timing: the bits
# of results would differ between runs. Measured: floats are 1.5 to 1.7 times as fast on Emerald Rapids, pairs
# 1.5 to 1.8 times as fast on Zen 4 and 5.
_SLOW_PAIRS = {"GenuineIntel": "pairs are multiplied at half the rate of floats on Intel"}


class Isa(NamedTuple):
    """One instruction set."""

    name: str  # name of its library, and its value of CUPY_FLASH_CPU
    machine: str  # {"x86_64", "aarch64"}
    title: str  # short description for messages
    flags: frozenset[str]  # CPU flags that it needs, as in /proc/cpuinfo
    options: tuple[str, ...]  # options of the compiler
    # Register tile of the product: rows and vectors of accumulators, and floats per vector.
    rows: int
    vectors: int
    lanes: int


_V2 = frozenset(["cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"])
_V3 = _V2 | frozenset(["abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"])
_V4 = _V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])

# NumPy's name of each level, and the features that imply it for a NumPy without level names.
_NUMPY = {
    _V2: ("X86_V2", "SSE42", "POPCNT"),
    _V3: ("X86_V3", "AVX2", "FMA3", "F16C"),
    _V4: ("X86_V4", "AVX512_SKX"),
}

# Best first.
ISAS = (
    Isa(
        "v4",
        "x86_64",
        "x86-64-v4, AVX-512",
        _V4,
        ("-march=x86-64-v4", "-mprefer-vector-width=512"),
        12,
        2,
        16,
    ),
    Isa("v3", "x86_64", "x86-64-v3, AVX2 and FMA", _V3, ("-march=x86-64-v3",), 6, 2, 8),
    Isa("v2", "x86_64", "x86-64-v2, SSE4", _V2, ("-march=x86-64-v2",), 6, 2, 4),
    Isa("neon", "aarch64", "aarch64, NEON", frozenset(), ("-march=armv8-a",), 12, 2, 4),
)


class Host(NamedTuple):
    """The operating system and CPU of this machine."""

    system: str  # "linux", "macos" or "windows"
    machine: str  # "x86_64" or "aarch64"
    flags: frozenset[str]  # instruction set extensions of the CPU, named as in /proc/cpuinfo
    vendor: str = ""  # vendor of the CPU, such as "GenuineIntel"; "" if unknown

    @property
    def platform(self) -> str:
        """Name of the folder of its libraries, such as "linux-x86_64"."""
        return f"{self.system}-{self.machine}"


@functools.cache
def host() -> Host:
    """Describe this machine."""
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(
        platform.machine().lower(), platform.machine().lower()
    )
    system = {"darwin": "macos", "win32": "windows"}.get(sys.platform, sys.platform)
    try:
        said = _cpuinfo()
    except OSError:  # no Linux
        return Host(system, machine, flags_by_numpy(_numpy_features()))
    return Host(system, machine, frozenset(said.get("flags", "").split()), said.get("vendor_id", ""))


def _cpuinfo() -> dict[str, str]:
    """Fields of the first CPU in /proc/cpuinfo."""
    with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
        lines = itertools.takewhile(str.strip, file)
        return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _numpy_features() -> Mapping[str, bool]:
    """CPU features that NumPy has detected. why NumPy: Python itself cannot query them."""
    for name in ("numpy._core._multiarray_umath", "numpy.core._multiarray_umath"):  # since, and before, 2.0
        with contextlib.suppress(ImportError, AttributeError):
            found: Mapping[str, bool] = importlib.import_module(name).__cpu_features__
            return found
    return {}


def flags_by_numpy(features: Mapping[str, bool]) -> frozenset[str]:
    """CPU flags that these features of NumPy imply; none if nothing is known, so that no core runs."""
    flags: frozenset[str] = frozenset()
    for level, (name, *older) in _NUMPY.items():
        # why older names: NumPy before 2.4 has no levels. A CPU with these features has the whole level.
        if features.get(name) or all(map(features.get, older)):
            flags |= level
    return flags


def runnable() -> tuple[Isa, ...]:
    """The instruction sets of this CPU, best first."""
    here = host()
    return tuple(isa for isa in ISAS if isa.machine == here.machine and isa.flags <= here.flags)


@functools.cache
def amx_is_permitted() -> bool:
    """Request permission for the AMX tiles, which Linux 5.16 and newer grants per process."""
    if host().system != "linux":
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


def name_of(override: str) -> str:
    """The instruction set in a value of CUPY_FLASH_CPU, without its suffix."""
    return override.removesuffix(FLOATS).removesuffix(PAIRS).removesuffix(BY_AMX)


def chosen(override: str) -> tuple[Isa, ...]:
    """Instruction sets that may run: all of this CPU, or the one of CUPY_FLASH_CPU; none for "numpy"."""
    here = runnable()
    if not override:
        return here
    if override == "numpy":
        return ()
    for isa in ISAS:
        if isa.name == name_of(override):
            if isa in here:
                return (isa,)
            names = ", ".join(one.name for one in here)
            missing = " ".join(sorted(isa.flags - host().flags)) or f"a {isa.machine} processor"
            raise InvalidArgumentsError(
                f"the environment variable {OVERRIDE} is {override!r}, and this CPU lacks {missing}.",
                hint=f"unset it, or {names or 'numpy'}",
            )
    names = ", ".join(["numpy", *(isa.name for isa in ISAS)])
    raise InvalidArgumentsError(
        f"the environment variable {OVERRIDE} is {override!r}.", hint=f"unset it, or one of {names}"
    )


def why_floats(override: str, decode: bool = False) -> str:
    """Why bfloat16 is multiplied as floats although this CPU can multiply pairs; empty if it uses pairs.

    Decode always uses pairs: it is bound by memory, and pairs need no conversion, which is 1.4 times as fast
    even on a CPU with slow pairs.
    """
    if override.endswith(FLOATS):
        return f"{OVERRIDE} is {override}"
    return "" if decode or override.endswith(PAIRS) else _SLOW_PAIRS.get(host().vendor, "")

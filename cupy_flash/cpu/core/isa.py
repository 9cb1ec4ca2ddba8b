"""Instruction sets that the core is compiled for, and which of them this CPU has."""

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
# What CUPY_FLASH_CPU may say behind an instruction set: how bfloat16 is multiplied.
FLOATS, PAIRS, BY_AMX = "-floats", "-pairs", "-amx"
# CPUs whose products of pairs are slower than those of floats, by what /proc/cpuinfo calls the vendor.
# why not by timing: the bits of results would differ between runs. Measured on Emerald Rapids: floats are 1.5
# to 1.7 times as fast; on Zen 4 and 5 pairs are 1.5 to 1.8 times as fast.
_SLOW_PAIRS = {"GenuineIntel": "pairs are multiplied at half the rate of floats on Intel"}


class Isa(NamedTuple):
    """One instruction set.

    Attributes
    ----------
    name : str
        Of its library, and what CUPY_FLASH_CPU calls it.
    machine : {"x86_64", "aarch64"}
    title : str
        For people.
    flags : frozenset of str
        What it needs of a CPU, as /proc/cpuinfo writes it.
    options : tuple of str
        For the compiler.
    rows, vectors, lanes : int
        The tile of the product: rows and vectors of accumulators, floats of a vector.
    """

    name: str
    machine: str
    title: str
    flags: frozenset[str]
    options: tuple[str, ...]
    rows: int
    vectors: int
    lanes: int


_V2 = frozenset(["cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"])
_V3 = _V2 | frozenset(["abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"])
_V4 = _V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])

# What NumPy calls the levels, and which of its features stand for them where it does not.
_NUMPY = {
    _V2: ("X86_V2", "SSE42", "POPCNT"),
    _V3: ("X86_V3", "AVX2", "FMA3", "F16C"),
    _V4: ("X86_V4", "AVX512_SKX"),
}

# The best first.
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
    """The machine: "linux", "macos" ..., "x86_64", "aarch64" ..., and of its CPU the flags and the vendor."""

    system: str
    machine: str
    flags: frozenset[str]
    vendor: str = ""

    @property
    def platform(self) -> str:
        """The folder of its libraries."""
        return f"{self.system}-{self.machine}"


@functools.cache
def host() -> Host:
    """The machine that runs this."""
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
    """What Linux says of the first CPU."""
    with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
        lines = itertools.takewhile(str.strip, file)
        return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _numpy_features() -> Mapping[str, bool]:
    """What NumPy has found of this CPU. why NumPy: Python cannot ask a CPU."""
    for name in ("numpy._core._multiarray_umath", "numpy.core._multiarray_umath"):  # since, and before, 2.0
        with contextlib.suppress(ImportError, AttributeError):
            found: Mapping[str, bool] = importlib.import_module(name).__cpu_features__
            return found
    return {}


def flags_by_numpy(features: Mapping[str, bool]) -> frozenset[str]:
    """Flags that these features of NumPy's stand for; where nothing is known none, so that nothing is run."""
    flags: frozenset[str] = frozenset()
    for level, (name, *older) in _NUMPY.items():
        # why older ones: before 2.4 NumPy names no levels. What has these of a level has all of it.
        if features.get(name) or all(map(features.get, older)):
            flags |= level
    return flags


def runnable() -> tuple[Isa, ...]:
    """The instruction sets of this CPU, the best first."""
    here = host()
    return tuple(isa for isa in ISAS if isa.machine == here.machine and isa.flags <= here.flags)


@functools.cache
def amx_is_permitted() -> bool:
    """Ask Linux for the tiles of AMX: it gives them, from 5.16 on, to processes that ask."""
    if host().system != "linux":
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


def name_of(override: str) -> str:
    """The instruction set that CUPY_FLASH_CPU names."""
    return override.removesuffix(FLOATS).removesuffix(PAIRS).removesuffix(BY_AMX)


def chosen(override: str) -> tuple[Isa, ...]:
    """What may run: all that this CPU has, or what CUPY_FLASH_CPU asks for, which is nothing for "numpy"."""
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
    """Why bfloat16 is multiplied as floats even if this CPU can multiply pairs; empty if pairs are.

    In decode pairs are 1.4 times as fast there, too: it waits for memory, where pairs lie as they are.
    """
    if override.endswith(FLOATS):
        return f"{OVERRIDE} is {override}"
    return "" if decode or override.endswith(PAIRS) else _SLOW_PAIRS.get(host().vendor, "")

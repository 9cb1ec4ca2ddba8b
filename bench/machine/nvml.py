"""Clocks, power and utilisation of a GPU, from NVML by ctypes.

why not nvidia-ml-py: it wraps the same calls, would have to be optional, and machines with a GPU often
have no access to a package index.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

_SM_CLOCK = 1
_LIBRARIES = ("libnvidia-ml.so.1", "nvml.dll")


class State(NamedTuple):
    """State of a GPU at one moment; None for what the driver does not report."""

    clock_mhz: int | None = None
    watts: float | None = None
    celsius: int | None = None
    busy_percent: int | None = None
    free_bytes: int | None = None

    def __str__(self) -> str:
        parts = [
            f"{value:.0f} {unit}"
            for value, unit in ((self.clock_mhz, "MHz"), (self.watts, "W"), (self.celsius, "C"))
            if value is not None
        ]
        return " ".join(parts) or "clocks unknown"


class _Pair(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _library() -> Any:
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


class Nvml:
    """NVML queries of the GPU at a PCI address; without the library every result is empty.

    Parameters
    ----------
    pci : str
        PCI address as in the CUDA runtime, such as "0000:0F:00.0".
    """

    def __init__(self, pci: str) -> None:
        self._lib = _library()
        self._handle = ctypes.c_void_p()
        if self._lib is None or self._lib.nvmlInit_v2():
            self._lib = None
        elif self._lib.nvmlDeviceGetHandleByPciBusId_v2(pci.encode(), ctypes.byref(self._handle)):
            self._handle = ctypes.c_void_p()

    def driver(self) -> str:
        """The driver's version; empty if unknown."""
        text = ctypes.create_string_buffer(96)
        if self._lib is None or self._lib.nvmlSystemGetDriverVersion(text, ctypes.c_uint(96)):
            return ""
        return text.value.decode()

    def state(self) -> State:
        """Query the state; call this while work is queued, as clocks fall within milliseconds of idling."""
        watts = self._number("nvmlDeviceGetPowerUsage", ctypes.c_uint())
        busy = self._number("nvmlDeviceGetUtilizationRates", _Pair())
        memory = self._number("nvmlDeviceGetMemoryInfo", _Memory())
        clock = self._number("nvmlDeviceGetClockInfo", ctypes.c_uint(), ctypes.c_int(_SM_CLOCK))
        celsius = self._number("nvmlDeviceGetTemperature", ctypes.c_uint(), ctypes.c_int(0))
        return State(
            clock_mhz=clock.value if clock else None,
            watts=watts.value / 1000 if watts else None,
            celsius=celsius.value if celsius else None,
            busy_percent=busy.gpu if busy else None,
            free_bytes=memory.free if memory else None,
        )

    def _number(self, function: str, out: Any, *arguments: Any) -> Any:
        if self._lib is None or not self._handle:
            return None
        failed = getattr(self._lib, function)(self._handle, *arguments, ctypes.byref(out))
        return None if failed else out

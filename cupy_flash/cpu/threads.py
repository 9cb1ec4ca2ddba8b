"""Threads of a call on the CPU: how many, whose pool, and one BLAS thread for the NumPy path."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

try:
    from threadpoolctl import ThreadpoolController
except ModuleNotFoundError:  # a kernel of the Hugging Face hub cannot require it
    ThreadpoolController = None

__all__ = [
    "BlasLimit",
    "allowed",
    "available_cores",
    "limits",
    "on_one_blas_thread",
    "one_blas_thread",
    "team",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Limited(NamedTuple):
    """Functions that read and set the thread limit of a BLAS library."""

    get: Callable[[], int | None]
    set: Callable[[int], object]


def _limited(library: Any) -> _Limited:
    """Return OpenBLAS's own functions, and threadpoolctl's for any other library.

    why: from 3.8 on, threadpoolctl silently ignores all threads but the first one that ever set a limit
    on an OpenBLAS. Here every caller's limit counts.
    """
    dynlib = getattr(library, "dynlib", None)
    if getattr(library, "internal_api", None) == "openblas" and library.threading_layer != "openmp":
        for prefix, suffix in product(("", "scipy_"), ("", "64_", "_64")):
            get, put = (
                getattr(dynlib, f"{prefix}openblas_{verb}_num_threads{suffix}", None)
                for verb in ("get", "set")
            )
            if get is not None and put is not None:
                return _Limited(get, put)
    return _Limited(library.get_num_threads, library.set_num_threads)


class BlasLimit:
    """Limits every BLAS library of the process to one thread while any call of ours runs.

    why: the products of tiles are short, and idle BLAS threads spin between them: on a busy machine that took
    ten times as long as one thread. Callers may overlap: the first one lowers the limit, and the last one
    restores it. OpenMP's limit is per thread, so that each caller restores its own.
    """

    def __init__(self, libraries: list[Any] | None = None) -> None:
        self._given = libraries
        self._lock = threading.Lock()
        self._callers = 0
        self._found: list[int] = []

    @functools.cached_property
    def _libraries(self) -> tuple[list[_Limited], list[_Limited]]:
        """Libraries with one limit per process, and libraries with one limit per thread (OpenMP)."""
        every = self._given
        if every is None and ThreadpoolController is None:
            every = []
        elif every is None:  # finding them takes a millisecond; setting a limit takes a microsecond
            every = ThreadpoolController().select(user_api="blas").lib_controllers
        own = [library for library in every if getattr(library, "threading_layer", None) == "openmp"]
        shared = [library for library in every if library not in own]
        return list(map(_limited, shared)), list(map(_limited, own))

    def threads(self) -> int:
        """Return how many threads the BLAS uses outside of our limit."""
        shared, own = self._libraries
        with self._lock:
            counts = self._found if self._callers else _counts(shared)
        return max(counts + _counts(own), default=available_cores())

    def limits(self) -> tuple[Callable[[], int | None], ...] | None:
        """The functions that tell the limit of each library; None while our own limit hides what they are."""
        shared, own = self._libraries
        return None if self._callers else tuple(library.get for library in shared + own)

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """Keep the BLAS to one thread."""
        shared, own = self._libraries
        found_here = _counts(own)
        _set(own, [1] * len(own))
        with self._lock:
            self._callers += 1
            if self._callers == 1:
                self._found = _counts(shared)
                _set(shared, [1] * len(shared))
        try:
            yield
        finally:
            with self._lock:
                self._callers -= 1
                if self._callers == 0:
                    _set(shared, self._found)
            _set(own, found_here)


def _counts(libraries: list[_Limited]) -> list[int]:
    return [library.get() or 1 for library in libraries]


def _set(libraries: list[_Limited], counts: list[int]) -> None:
    for library, count in zip(libraries, counts, strict=True):
        library.set(count)


_blas = BlasLimit()


def one_blas_thread() -> Any:
    """Return a context manager that limits the BLAS to one thread."""
    return _blas.one_thread()


def on_one_blas_thread(function: _Function) -> _Function:
    """Decorate a function that runs in such a context."""
    limited: _Function = one_blas_thread()(function)
    return limited


def allowed(library: str = "") -> int:
    """Return how many threads a call may use: at most the available cores, and the limit of its library.

    For tensors of torch that is ``torch.set_num_threads``; for other arrays the limit of the BLAS, so that
    ``OPENBLAS_NUM_THREADS``, ``OMP_NUM_THREADS`` and threadpoolctl.threadpool_limits work as they do for
    NumPy.
    """
    peer: int = sys.modules["torch"].get_num_threads() if library == "torch" else _blas.threads()
    return min(available_cores(), peer)


def limits() -> tuple[Callable[[], int | None], ...] | None:
    """As `BlasLimit.limits`."""
    return _blas.limits()


def team(library: str, count: int) -> int:
    """Return the address of GOMP_parallel to run on torch's OpenMP threads; 0 to use the core's own threads.

    why torch's threads: they spin for milliseconds after each of its operations, on the cores that ours need.
    why only with torch's thread count: OpenMP would end or start threads at each call otherwise.
    """
    if library != "torch" or _forked or count != sys.modules["torch"].get_num_threads():
        return 0
    return _of_torch()


# why: a forked child has torch's OpenMP but not its threads, and would wait for them for ever.
_forked = False


@functools.cache
def _of_torch() -> int:
    """The address of GOMP_parallel in the OpenMP that torch is linked to; 0 if it has none."""
    path = Path(str(sys.modules["torch"].__file__)).with_name("lib") / "libtorch_cpu.so"
    try:
        library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):  # another path or system, or a torch without OpenMP
        return 0


@functools.cache
def available_cores() -> int:
    """Return the number of cores that this process may run on, cached at the first call."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _reset_after_fork() -> None:
    """Reset state in a forked child: locks may be held, and the affinity may change."""
    global _blas, _forked
    _blas = BlasLimit()
    available_cores.cache_clear()
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)

"""How many threads a call on the CPU may take, and the BLAS held at one while NumPy's path runs."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

try:
    from threadpoolctl import ThreadpoolController
except ModuleNotFoundError:  # a kernel of the Hugging Face hub may not ask for it
    ThreadpoolController = None

__all__ = ["BlasLimit", "allowed", "available_cores", "one_blas_thread"]


class _Limited(NamedTuple):
    """How to read and set the limit of a BLAS library."""

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
    """The BLAS libraries of the process, held at one thread each while any call of ours runs.

    why: the products of tiles are short, and threads that wait for the next one spin: beside other programs
    they took ten times as long as one thread. Callers may overlap: the first one lowers the limit, the last
    one out restores what was found. What is on OpenMP counts per thread, and whoever lowered it restores it.

    Parameters
    ----------
    libraries : list of threadpoolctl.LibController, optional
        Those that are loaded, by default; without threadpoolctl none.
    """

    def __init__(self, libraries: list[Any] | None = None) -> None:
        self._given = libraries
        self._lock = threading.Lock()
        self._callers = 0
        self._found: list[int] = []

    @functools.cached_property
    def _libraries(self) -> tuple[list[_Limited], list[_Limited]]:
        """Those with one limit for the process, and those with one for each thread."""
        every = self._given
        if every is None and ThreadpoolController is None:
            every = []
        elif every is None:  # finding them takes a millisecond; setting a limit takes a microsecond
            every = ThreadpoolController().select(user_api="blas").lib_controllers
        own = [library for library in every if getattr(library, "threading_layer", None) == "openmp"]
        shared = [library for library in every if library not in own]
        return list(map(_limited, shared)), list(map(_limited, own))

    def threads(self) -> int:
        """Return how many threads the BLAS uses where nobody of ours limits it."""
        shared, own = self._libraries
        with self._lock:
            counts = self._found if self._callers else _counts(shared)
        return max(counts + _counts(own), default=available_cores())

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
    """A context in which the BLAS takes one thread."""
    return _blas.one_thread()


def allowed() -> int:
    """Return how many threads a call may take: no more than there are cores, nor than the BLAS may take.

    why the BLAS: so ``OPENBLAS_NUM_THREADS``, ``OMP_NUM_THREADS`` and threadpoolctl.threadpool_limits mean
    here what they mean for NumPy.
    """
    return min(available_cores(), _blas.threads())


@functools.cache
def available_cores() -> int:
    """Return the number of cores this process may run on, as it was at the first call."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _start_afresh() -> None:
    """Forget what a forked child may find locked, or changed."""
    global _blas
    _blas = BlasLimit()
    available_cores.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh)

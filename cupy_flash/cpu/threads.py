"""Share jobs over threads, with the BLAS kept to one thread each, and hand out their scratch."""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from threadpoolctl import ThreadpoolController

Array = np.ndarray[Any, Any]
Job = Callable[[], None]


class Work(NamedTuple):
    """What is to be done for a problem.

    Attributes
    ----------
    jobs : list of callable
        In any order, by any thread.
    finish : callable, optional
        After all of them.
    """

    jobs: Sequence[Job]
    finish: Job | None = None


# why: waking a second thread costs 50 to 100 us, in which one core does this much arithmetic.
SMALL_FLOPS = 1e7


class BlasLimit:
    """The BLAS libraries of the process, held at one thread each while any call of ours runs.

    Most count their threads per process. Then the first caller lowers the limit and the last one
    out restores what was found, whichever threads they are. Those on OpenMP count per thread.

    Parameters
    ----------
    libraries : list of threadpoolctl.LibController, optional
        Those that are loaded, by default.
    """

    def __init__(self, libraries: list[Any] | None = None) -> None:
        self._given = libraries
        self._lock = threading.Lock()
        self._callers = 0
        self._found: list[int] = []

    @functools.cached_property
    def _libraries(self) -> tuple[list[Any], list[Any]]:
        """Those with one limit for the process, and those with one for each thread."""
        # why: finding the libraries takes a millisecond; setting a limit takes a microsecond.
        given = self._given
        if given is None:
            given = ThreadpoolController().select(user_api="blas").lib_controllers
        per_thread = [x for x in given if getattr(x, "threading_layer", None) == "openmp"]
        return [x for x in given if x not in per_thread], per_thread

    def small_products_are_fast(self) -> bool:
        """Return whether every library is an OpenBLAS that multiplies small matrices without packing them.

        Its kernels for AVX-512 do, up to 10^6 multiplications and for operands that are not transposed.
        """
        kernels = [
            getattr(library, "architecture", None) for libraries in self._libraries for library in libraries
        ]
        return bool(kernels) and all(name in ("SkylakeX", "Cooperlake", "SapphireRapids") for name in kernels)

    def threads(self) -> int:
        """Return how many threads the BLAS uses where nobody of ours limits it."""
        shared, own = self._libraries
        with self._lock:
            counts = self._found if self._callers else _counts(shared)
        return max(counts + _counts(own), default=available_cores())

    def lower_this_thread(self) -> None:
        """Lower what is counted per thread, in a thread that is ours."""
        for library in self._libraries[1]:
            _set(library, 1)

    @contextmanager
    def one_thread_each(self) -> Iterator[None]:
        """Keep the BLAS to one thread in this thread and in those of the pool."""
        shared, own = self._libraries
        found_here = _counts(own)
        self.lower_this_thread()
        with self._lock:
            self._callers += 1
            if self._callers == 1:
                self._found = _counts(shared)
                for library in shared:
                    _set(library, 1)
        try:
            yield
        finally:
            with self._lock:
                self._callers -= 1
                if self._callers == 0:
                    for library, count in zip(shared, self._found, strict=True):
                        _set(library, count)
            for library, count in zip(own, found_here, strict=True):
                _set(library, count)


def _counts(libraries: list[Any]) -> list[int]:
    return [library.get_num_threads() or 1 for library in libraries]


def _set(library: Any, count: int) -> None:
    # why: from 3.8 on, threadpoolctl ignores, in silence, all threads but the first one that ever
    # set a limit on this library. Here every caller's limit counts, so nobody may own it.
    disown = getattr(library, "clear_controlling_thread", None)
    if disown is not None:
        disown(force=True)
    library.set_num_threads(count)
    if disown is not None:
        disown(force=True)


class _Pool:
    """One executor for the process, started at the first large problem."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._size = 0

    def get(self, size: int) -> ThreadPoolExecutor:
        with self._lock:
            if self._executor is None or self._size < size:
                # An outgrown executor finishes what it has and ends with its last reference.
                self._executor = ThreadPoolExecutor(size, "cupy_flash", _blas.lower_this_thread)
                self._size = size
            return self._executor


_blas = BlasLimit()
_pool = _Pool()


def _start_afresh() -> None:
    """Forget locks and threads that a forked child does not have."""
    global _blas, _pool
    _blas, _pool = BlasLimit(), _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh)


def available_cores() -> int:
    """Return the number of cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def worker_count(flops: float) -> int:
    """Return how many threads a problem of so many operations is shared over.

    No more than the BLAS itself was allowed, so that ``OPENBLAS_NUM_THREADS``, ``OMP_NUM_THREADS``
    and ``threadpoolctl.threadpool_limits`` mean here what they mean for NumPy.
    """
    if flops < SMALL_FLOPS:
        return 1
    return min(available_cores(), _blas.threads())


@functools.cache
def small_products_are_fast() -> bool:
    """Return whether products of up to 10^6 multiplications are worth cutting larger ones into."""
    return _blas.small_products_are_fast()


def run(jobs: Sequence[Job], workers: int) -> None:
    """Run every job once, in the calling thread and up to `workers` - 1 others.

    Jobs are taken in order by whoever is free, so they must not write to the same places.
    """
    workers = min(workers, len(jobs))
    waiting = deque(jobs)
    if workers <= 1:
        _drain(waiting)
        return
    with _blas.one_thread_each():
        executor = _pool.get(workers - 1)
        helpers = [executor.submit(_drain, waiting) for _ in range(workers - 1)]
        try:
            _drain(waiting)
        finally:
            # A helper that never started (the pool serves another caller) has nothing left to do.
            started = [helper for helper in helpers if not helper.cancel()]
            for helper in started:
                helper.exception()
        for helper in started:
            helper.result()


def carry_out(work: Work, workers: int) -> None:
    """Run the jobs, then what is left."""
    run(work.jobs, workers)
    if work.finish is not None:
        work.finish()


def _drain(waiting: deque[Job]) -> None:
    """Take and run jobs until none is left; an error leaves none for the others."""
    # Scores of -inf, empty rows (0/0) and overflowing inputs are defined below, not exceptional.
    with np.errstate(all="ignore"):
        try:
            while True:
                try:
                    job = waiting.popleft()
                except IndexError:
                    return
                job()
        except BaseException:
            waiting.clear()
            raise


_local = threading.local()

# why: tiles are reused between calls, or each would be paid for in page faults; copies of a whole
# head's keys would be held for ever.
KEPT_BYTES = 1 << 22


def scratch(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return this thread's uninitialised array of that name, the same memory each time if small."""
    buffers: dict[str, Array] = _local.__dict__
    count = 1
    for extent in shape:
        count *= extent
    size = count * dtype.itemsize
    if size > KEPT_BYTES:
        return np.empty(shape, dtype)
    buffer = buffers.get(name)
    if buffer is None or buffer.size < size:
        buffer = buffers[name] = np.empty(size, np.uint8)
    return buffer[:size].view(dtype).reshape(shape)

"""Share jobs over threads, with the BLAS kept to one thread each, and hand out their scratch."""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

Array = np.ndarray[Any, Any]
Job = Callable[[], None]

# why: waking a second thread costs 50 to 100 us, in which one core does this much arithmetic.
SMALL_FLOPS = 1e7


class _Blas:
    """The BLAS libraries of the process, held at one thread while any call of ours runs.

    The limit is one number per process, so calls from several user threads share it: the first one
    in lowers it, the last one out restores what it found.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._threads_found = 1

    @functools.cached_property
    def _controller(self) -> ThreadpoolController:
        # why: finding the libraries takes a millisecond; setting their limit takes microseconds.
        return ThreadpoolController().select(user_api="blas")

    def threads(self) -> int:
        """Return how many threads the BLAS may use when nobody of ours limits it."""
        with self._lock:
            return self._threads_found if self._users else self._threads_now()

    def _threads_now(self) -> int:
        counts = [library["num_threads"] for library in self._controller.info()]
        return max(counts, default=available_cores())

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._threads_found = self._threads_now()
                self._limit = self._controller.limit(limits=1)
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._limit.restore_original_limits()


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
                self._executor = ThreadPoolExecutor(size, thread_name_prefix="cupy_flash")
                self._size = size
            return self._executor


_blas = _Blas()
_pool = _Pool()


def _start_afresh() -> None:
    """Forget locks and threads that a forked child does not have."""
    global _blas, _pool
    _blas, _pool = _Blas(), _Pool()


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


def run(jobs: Sequence[Job], workers: int) -> None:
    """Run every job once, in the calling thread and up to `workers` - 1 others.

    Jobs are taken in order by whoever is free, so they must not write to the same places.
    """
    workers = min(workers, len(jobs))
    waiting = deque(jobs)
    if workers <= 1:
        _drain(waiting)
        return
    with _blas:
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


def scratch(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return this thread's uninitialised array of that name: the same memory each time."""
    buffers: dict[str, Array] = _local.__dict__
    count = 1
    for extent in shape:
        count *= extent
    size = count * dtype.itemsize
    buffer = buffers.get(name)
    if buffer is None or buffer.size < size:
        buffer = buffers[name] = np.empty(size, np.uint8)
    return buffer[:size].view(dtype).reshape(shape)

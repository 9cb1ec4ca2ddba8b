"""Share jobs over threads, with the BLAS kept to one thread each, and hand out their scratch."""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from queue import SimpleQueue
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


# why: waking a second thread costs 50 to 100 us, and some NumPy calls of two threads 30 us more, as one waits
# for the interpreter. With less arithmetic than this, 0.6 ms of one core, two take up to twice as long.
SMALL_FLOPS = 6e7


class _Limited(NamedTuple):
    """How to read and set the limit of a BLAS library."""

    get: Callable[[], int | None]
    set: Callable[[int], object]


def _limited(library: Any) -> _Limited:
    """Return OpenBLAS's own functions, and threadpoolctl's for any other library.

    why: from 3.8 on, threadpoolctl ignores, in silence, all threads but the first one that ever set a limit
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
    def _controllers(self) -> list[Any]:
        # why: finding the libraries takes a millisecond; setting a limit takes a microsecond.
        if self._given is not None:
            return self._given
        controllers: list[Any] = ThreadpoolController().select(user_api="blas").lib_controllers
        return controllers

    @functools.cached_property
    def _libraries(self) -> tuple[list[_Limited], list[_Limited]]:
        """Those with one limit for the process, and those with one for each thread."""
        per_thread = [getattr(x, "threading_layer", None) == "openmp" for x in self._controllers]
        limited = list(zip(map(_limited, self._controllers), per_thread, strict=True))
        return [x for x, own in limited if not own], [x for x, own in limited if own]

    def small_products_are_fast(self) -> bool:
        """Return whether every library is an OpenBLAS that multiplies small matrices without packing them.

        Its kernels for AVX-512 do, up to 10^6 multiplications and for operands that are not transposed.
        """
        kernels = [getattr(library, "architecture", None) for library in self._controllers]
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
            library.set(1)

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
                    library.set(1)
        try:
            yield
        finally:
            with self._lock:
                self._callers -= 1
                if self._callers == 0:
                    for library, count in zip(shared, self._found, strict=True):
                        library.set(count)
            for library, count in zip(own, found_here, strict=True):
                library.set(count)


def _counts(libraries: list[_Limited]) -> list[int]:
    return [library.get() or 1 for library in libraries]


class _GivenUp(Exception):
    """The call that a thread works for has failed or was interrupted."""


class _Shared:
    """Jobs that the caller and helpers take in turn.

    Attributes
    ----------
    given_up : bool
        Whether nobody is to go on; `scratch` looks at it for every tile.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.given_up = False
        self._waiting = deque(jobs)
        self._changed = threading.Condition(threading.Lock())
        self._helpers = 0
        self._open = True
        self._error: BaseException | None = None

    def lead(self, helpers: int) -> None:
        """Take jobs with so many helpers until none is left, and raise what went wrong.

        An error ends it within the time of a tile, and so does an interrupt of the caller at any point here;
        no helper computes on.
        """
        try:
            _pool.hand_out(self.help, helpers)
            self._take()
            self._wait()
        except _GivenUp:
            self._wait()
        except BaseException:
            self._give_up()
            self._wait()
            raise
        if self._error is not None:
            raise self._error

    def help(self) -> None:
        """Take jobs until none is left."""
        with self._changed:
            if not self._open:
                return
            self._helpers += 1
        error: BaseException | None = None
        try:
            self._take()
        except _GivenUp:
            pass
        except BaseException as raised:
            error = raised
        with self._changed:
            self._error = self._error or error
            self._helpers -= 1
            self._changed.notify()

    def _take(self) -> None:
        _work.of = self
        try:
            _drain(self._waiting)
        except BaseException:
            self._give_up()
            raise
        finally:
            _work.of = None

    def _give_up(self) -> None:
        self.given_up = True
        self._waiting.clear()

    def _wait(self) -> None:
        """Wait for the helpers that have begun. May be interrupted and begun again."""
        with self._changed:
            # A helper that never started (the pool serves another caller) has nothing left to do.
            self._open = False
            while self._helpers:
                self._changed.wait()


class _Work(threading.local):
    """What this thread works for: a call that is shared, or none."""

    of: _Shared | None = None


_work = _Work()


class _Pool:
    """Threads that wait for something to do, started when they are first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # why no ThreadPoolExecutor: when the caches hold something else, to submit to it and to wait for the
        # result takes 0.3 ms, this 0.05.
        self._tasks: SimpleQueue[Job] = SimpleQueue()
        self._size = 0

    def hand_out(self, task: Job, times: int) -> None:
        """Let so many threads do it, or fewer if they are busy until it is of no use."""
        with self._lock:
            while self._size < times:
                threading.Thread(target=self._serve, name=f"cupy_flash_{self._size}", daemon=True).start()
                self._size += 1
        for _ in range(times):
            self._tasks.put(task)

    def _serve(self) -> None:
        _blas.lower_this_thread()
        with np.errstate(all="ignore"):
            while True:
                self._tasks.get()()


_blas = BlasLimit()
_pool = _Pool()


def _start_afresh() -> None:
    """Forget locks and threads that a forked child does not have."""
    global _blas, _pool
    _blas, _pool = BlasLimit(), _Pool()
    available_cores.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh)


@functools.cache
def available_cores() -> int:
    """Return the number of cores this process may run on, as it was at the first call."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def worker_count(flops: float, small: float = SMALL_FLOPS) -> int:
    """Return how many threads a problem of so many operations is shared over: one below `small`.

    No more than the BLAS itself was allowed, so that ``OPENBLAS_NUM_THREADS``, ``OMP_NUM_THREADS``
    and ``threadpoolctl.threadpool_limits`` mean here what they mean for NumPy.
    """
    if flops < small:
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
    carry_out(Work(jobs), workers)


def carry_out(work: Work, workers: int) -> None:
    """Run the jobs, as `run` does, then what is left."""
    helpers = min(workers, len(work.jobs)) - 1
    # Scores of -inf, empty rows (0/0) and overflowing inputs are defined, not exceptional.
    with np.errstate(all="ignore"):
        if helpers > 0:
            shared = _Shared(work.jobs)
            with _blas.one_thread_each():
                shared.lead(helpers)
        elif workers > 1:  # one large job: the BLAS shares its products
            _drain(deque(work.jobs))
        else:
            # why: threads of the BLAS would spin for 0.1 s and take a core from a larger problem after this.
            with _blas.one_thread_each():
                _drain(deque(work.jobs))
        if work.finish is not None:
            work.finish()


def _drain(waiting: deque[Job]) -> None:
    """Take and run jobs until none is left."""
    while True:
        try:
            job = waiting.popleft()
        except IndexError:
            return
        job()


_local = threading.local()

# why: tiles are reused between calls, or each would be paid for in page faults; copies of a whole
# head's keys would be held for ever. 4 MB of keys that decoding copies, and a page that they begin within.
KEPT_BYTES = 5 << 20


def scratch(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return this thread's uninitialised array of that name, the same memory each time if small.

    It ends a job whose call has been given up. why here: every tile asks for some.
    """
    shared = _work.of
    if shared is not None and shared.given_up:
        raise _GivenUp
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

"""progress(): callbacks that receive the completed fraction of a call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeAlias

from ..errors import InvalidArgumentsError

__all__ = ["CALLBACK", "Tell", "callback_of_process", "part_of", "progress", "reporting"]

# A callback; it receives the completed fraction of the call, from 0 to 1.
Tell: TypeAlias = Callable[[float], Any]

# The callback for calls of this thread: True for a tqdm bar, a function, or None for no report.
CALLBACK: ContextVar[Any] = ContextVar("cupy_flash progress", default=None)
_OPEN: list[Any] = []  # of all threads, the most recent last
# The callbacks that the current calls are made by.
_TELLING: ContextVar[tuple[Any, ...]] = ContextVar("cupy_flash progress that is told", default=())


@contextmanager
def progress(tell: Tell | None = None) -> Iterator[None]:
    """Report the progress of each call on a CPU, while the context is open.

    Parameters
    ----------
    tell : callable, optional
        Receives the completed fraction of the call, from 0 to 1: about ten times a second, and 1.0 at the
        end. If it raises, the call stops. Calls that it makes itself are not reported. Threads that share
        the context call it at the same time. Default: a tqdm bar.

    Raises
    ------
    InvalidArgumentsError
        ``tell`` is not callable, or tqdm is not installed.

    Notes
    -----
    It applies to calls of this thread, including ``cupy_flash.torch`` and backward passes, and to JAX
    programs, which run on their own threads. A call on a GPU returns before it is done and reports
    nothing.

    Examples
    --------
    >>> import numpy as np, cupy_flash
    >>> q = k = v = np.ones((1, 1, 256, 64), np.float32)
    >>> with cupy_flash.progress(lambda share: None):
    ...     o = cupy_flash.attention(q, k, v)
    """
    if tell is None:
        _bar_class()
    elif not callable(tell):
        raise InvalidArgumentsError(
            f"progress() is given {tell!r}.", hint="progress(), or progress(f), f(completed fraction)"
        )
    given: Any = True if tell is None else _not_reentrant(tell)
    before = CALLBACK.set(given)
    _OPEN.append(given)
    try:
        yield
    finally:
        _OPEN.remove(given)
        CALLBACK.reset(before)


def _not_reentrant(tell: Tell) -> Callable[..., None]:
    """Wrap a callback so that calls that it makes itself are not reported to it, which would never end."""
    telling: list[float] = []  # in all threads

    def once(share: float, *, of_library: bool = False) -> None:
        inside = _TELLING.get()
        # why not the context alone: programs of JAX that `tell` runs are on threads that know nothing of it
        if once in inside or (of_library and telling):
            return
        before = _TELLING.set((*inside, once))
        telling.append(share)
        try:
            tell(share)
        finally:
            telling.remove(share)
            _TELLING.reset(before)

    return once


def callback_of_process() -> Any:
    """The callback for a call on a thread that a library started: CALLBACK, or the most recent one open."""
    given, latest = CALLBACK.get(), _OPEN[-1:]  # why one look: another thread may close its context meanwhile
    if given is not None or not latest:
        return given
    return True if latest[0] is True else partial(latest[0], of_library=True)


@contextmanager
def part_of(tell: Tell | None, start: float, stop: float) -> Iterator[None]:
    """Report calls inside as the part of a larger call between fractions `start` and `stop`."""
    before = CALLBACK.set(None if tell is None else lambda share: tell(start + (stop - start) * share))
    try:
        yield
    finally:
        CALLBACK.reset(before)


def _bar_class() -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError:
        raise InvalidArgumentsError(
            "progress() shows a bar of tqdm, which is not installed.",
            hint="pip install tqdm; or progress(print)",
        ) from None
    return tqdm


@contextmanager
def reporting(given: Any) -> Iterator[Tell | None]:
    """Yield the callback for a running call, or None; report 1.0 at the end unless the call failed."""
    if given is None:
        yield None
        return
    if given is not True:
        yield given
        given(1.0)
        return
    # why disable: a program without a console, such as under pythonw, has no stderr to draw on.
    hidden = sys.stderr is None
    with _bar_class()(total=1.0, bar_format="{l_bar}{bar}| {elapsed}<{remaining}", disable=hidden) as bar:

        def move(share: float) -> None:
            bar.update(share - bar.n)

        yield move
        move(1.0)

"""Threads beside the caller's, for long calls: a signal is seen between bytecodes of the main thread only.

Where no thread can be made (a limit of processes, an interpreter that ends) the caller's computes.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

__all__ = ["run_aside"]

_Task = tuple[Callable[[], None], threading.Event]

# Of threads that have nothing to do. why kept: to start one, and to get memory for its jobs, takes 0.2 ms.
_idle: deque[SimpleQueue[_Task]] = deque()
if hasattr(os, "register_at_fork"):  # a child has the queues, but not the threads
    os.register_at_fork(after_in_child=_idle.clear)


def run_aside(compute: Callable[[], None]) -> threading.Event:
    """Run in another thread, or in the caller's before this returns if there is none.

    Parameters
    ----------
    compute : callable
        It lives no longer than it runs.

    Returns
    -------
    threading.Event
        Set when it is done, however it ended.
    """
    done = threading.Event()
    try:
        queue = _idle.pop()
    except IndexError:
        queue = SimpleQueue()
        try:
            threading.Thread(target=_serve, args=(queue,), name="cupy_flash", daemon=True).start()
        except RuntimeError:
            compute()
            done.set()
            return done
    queue.put((compute, done))
    return done


def _serve(queue: SimpleQueue[_Task]) -> None:
    while True:
        compute, done = queue.get()
        try:
            compute()
            del compute  # and the arrays that it holds
            _idle.append(queue)  # before anyone hears of it, who may call again
        finally:
            done.set()

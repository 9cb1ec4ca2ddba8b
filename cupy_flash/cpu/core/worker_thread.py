"""Worker threads for long calls, so that Ctrl-C works: Python handles signals only between bytecodes.

If no thread can be started (a process limit, interpreter shutdown), the caller's thread computes.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

__all__ = ["run_in_worker"]

_Task = tuple[Callable[[], None], threading.Event]

# Queues of idle threads. why kept: starting a thread, and memory for its jobs, take 0.2 ms.
_idle: deque[SimpleQueue[_Task]] = deque()
if hasattr(os, "register_at_fork"):  # a child has the queues, but not the threads
    os.register_at_fork(after_in_child=_idle.clear)


def run_in_worker(compute: Callable[[], None]) -> threading.Event:
    """Run a function in a worker thread, or in the caller's thread if none can be started.

    The event is set when it has returned or raised. The worker then drops its reference to it.
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
            _idle.append(queue)  # before the event is set: the waiting caller may call again at once
        finally:
            done.set()

"""Count calls of torch's own functions that this library computed, and fallbacks to torch by reason."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Calls", "counted", "left_to_torch", "ran_backward", "ran_forward", "reason_of", "sdpa_calls"]

# The limit of distinct reasons: reasons contain values of calls, so there may be arbitrarily many.
_MOST_REASONS = 64
_OTHERS = "other reasons"


@dataclasses.dataclass
class Calls:
    """Calls that this library computed in place of torch, and those that it left to torch's own kernels."""

    # Number of calls that this library computed, in any thread.
    forward: int = 0
    backward: int = 0
    # Number of calls that torch's own kernels computed, by reason.
    fallbacks: dict[str, int] = dataclasses.field(default_factory=dict)

    def report(self) -> str:
        """These numbers as text: a line for this library, and one for each reason of a fallback."""
        lines = [f"cupy_flash  {self.forward} forward, {self.backward} backward"]
        lines += [f"torch       {count}: {reason}" for reason, count in self.fallbacks.items()]
        return "\n".join(lines)


_lock = threading.Lock()
_since_import = Calls()
_open: list[Calls] = [_since_import]


def sdpa_calls() -> Calls:
    """Calls that this library computed in place of torch since ``cupy_flash.torch`` was imported.

    Returns
    -------
    Calls
        ``forward`` and ``backward``: calls that this library computed. ``fallbacks``: number of calls left to
        torch's own kernels, by reason. ``report()``: all of it as text. The object keeps counting.

    Notes
    -----
    It counts calls through ``activate_flash_attention_impl("cupy_flash")``, `use_in_sdpa` and
    `sdpa_with_fallback`, except those of `sdpa_with_fallback` in a compiled program.
    """
    return _since_import


@contextmanager
def counted() -> Iterator[Calls]:
    """Count the calls inside the context, in all threads."""
    calls = Calls()
    with _lock:
        _open.append(calls)
    try:
        yield calls
    finally:
        with _lock:
            # why not remove(): it would remove another object with equal counts.
            _open[:] = [x for x in _open if x is not calls]


def ran_forward() -> None:
    """Count a forward pass of this library."""
    with _lock:
        for calls in _open:
            calls.forward += 1


def ran_backward() -> None:
    """Count a backward pass of this library."""
    with _lock:
        for calls in _open:
            calls.backward += 1


def left_to_torch(reason: str) -> None:
    """Count a call that torch's own kernel is about to compute."""
    with _lock:
        for calls in _open:
            kept = reason in calls.fallbacks or len(calls.fallbacks) < _MOST_REASONS
            name = reason if kept else _OTHERS
            calls.fallbacks[name] = calls.fallbacks.get(name, 0) + 1


def reason_of(error: Exception) -> str:
    """The first line of an error of this library: the reason, without the table and the hint."""
    return str(error).partition("\n")[0]

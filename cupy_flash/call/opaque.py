"""Public functions that compilers of Python call as a whole: what they do to memory is nothing to trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["opaque"]

P = ParamSpec("P")
R = TypeVar("R")


def opaque(
    function: Callable[P, R], why: str = "cupy_flash.torch has functions for compiled programs"
) -> Callable[P, R]:
    """Have torch.compile call a function instead of reading it, at no cost to any other caller.

    torch reads what it finds as ``_torchdynamo_inline`` in place of a function. It really imports what that
    imports, so that torch is told what not to read, and stops at what it finds there: there is a break in the
    program, and the function itself is called. Where a program may not break, torch says why.
    """

    def stop(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    def read_by_torch(*args: P.args, **kwargs: P.kwargs) -> R:
        from . import untraced  # noqa: F401

        return stop(*args, **kwargs)

    stop._torchdynamo_disable = True  # type: ignore[attr-defined]
    stop._torchdynamo_disable_msg = why  # type: ignore[attr-defined]
    function._torchdynamo_inline = read_by_torch  # type: ignore[attr-defined]
    return function

"""What is wrong with a function, and the line of it where that is."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import FrameType

from ..errors import InvalidArguments

__all__ = ["read_outside", "refused"]

_HERE = str(Path(__file__).resolve().parent)


def refused(headline: str, hint: str, line: tuple[str, int] | None = None) -> InvalidArguments:
    """An error that shows a line of the function: that which is being run, or this one (file, number)."""
    file, number = line or _line_of_caller()
    text = linecache.getline(file, number).strip()
    return InvalidArguments(headline, reasons=[(f"{Path(file).name}:{number}", text)], hint=hint)


def read_outside(name: str, argument: int, axis: int, index: int, shape: tuple[int, ...]) -> InvalidArguments:
    """A function reads an argument of this shape where it has no element."""
    return InvalidArguments(
        f"bound[{argument}] has shape {shape}, and {name} reads element {index} of axis {axis}.",
        hint=f"np.clip(index, 0, {shape[axis] - 1}), also in a branch that np.where does not take",
    )


def _line_of_caller() -> tuple[str, int]:
    """The innermost line that is neither of this package nor of a library that called it back."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        foreign = {"numpy", "torch"} & {*str(frame.f_globals.get("__name__", "")).split(".")[:1]}
        if not file.startswith(_HERE) and not foreign:
            return file, frame.f_lineno
        frame = frame.f_back
    return "?", 0

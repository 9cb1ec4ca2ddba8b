"""Errors in a user's function, with the line where they occur."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any

from ..errors import InvalidArgumentsError, UnsupportedError
from .ranges import TooLarge

__all__ = ["CLIPPED", "captured", "captured_in_frame", "integer_overflow", "read_outside", "refused"]

CLIPPED = "np.clip(index, 0, size - 1), also in a branch that np.where does not take"
_FOREIGN = ("cupy", "jax", "numpy", "torch")
_HERE = str(Path(__file__).parent)


def refused(headline: str, hint: str, line: tuple[str, int] | None = None) -> InvalidArgumentsError:
    """An error that shows a line of the function: `line` (file, number), or the one being executed."""
    file, number = line or _line_of_caller()
    text = linecache.getline(file, number).strip()
    return InvalidArgumentsError(headline, reasons=[(f"{Path(file).name}:{number}", text)], hint=hint)


def read_outside(
    name: str, argument: int, axis: int, index: int, shape: tuple[int, ...]
) -> InvalidArgumentsError:
    """The error for an index outside an argument."""
    return InvalidArgumentsError(
        f"arguments[{argument}] has shape {shape}, and {name} reads element {index} of axis {axis}.",
        hint=CLIPPED.replace("size - 1", str(shape[axis] - 1)),
    )


def integer_overflow(name: str, found: TooLarge, bits: int, more: str = "") -> UnsupportedError:
    """The error for an integer of a function that may exceed the bits it is computed in.

    `more` is appended to the hint.
    """
    return UnsupportedError(
        f"{name}: {found.expression} can be {found.value}, and integers have {bits} bits there.",
        hint=f"% or // before the operation that exceeds them, or a float, such as 1.0 * j{more}; of a mask "
        "cupy_flash.block_mask, whose integers have 64 bits",
    )


def captured(array: Any) -> InvalidArgumentsError:
    """The error for a function that reads this array, which is not one of its arguments."""
    frame = _caller()
    name = next((name for name, x in _names(frame) if x is array), None)
    what = f"an array of type {type(array).__name__}" if name is None else f"{name}, an array"
    return _captured(what, name or "table", frame)


def captured_in_frame(error: BaseException | None = None) -> InvalidArgumentsError | None:
    """`captured`, with an array found by inspecting the frame; None if no array seems to be read.

    `error` is the exception that ended the function; default: the function is still running.
    """
    frame, by_library = (_caller(), False) if error is None else _caller_of(error)
    name = next((name for name, x in _names(frame) if _is_array(type(x))), None)
    if name is None:
        return _captured("an array", "table", frame) if by_library else None
    return _captured(f"{name}, an array", name, frame)


def _is_array(kind: type) -> bool:
    # why the module: traced values have a shape too
    return hasattr(kind, "shape") and not kind.__module__.startswith(__package__ or "")


def _captured(what: str, name: str, frame: FrameType | None) -> InvalidArgumentsError:
    line = None if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    return refused(
        f"the function reads {what} that is no argument of it: it would be a constant.",
        f"a parameter {name} behind j, and a call that binds it: f({name})",
        line,
    )


def _names(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """The names that a function uses, with their values."""
    if frame is None:
        return
    code, known = frame.f_code, {**frame.f_globals, **frame.f_locals}
    for name in (*code.co_freevars, *code.co_varnames, *code.co_names):
        if name in known:
            yield name, known[name]


def _caller() -> FrameType | None:
    """The innermost frame of user code, not of this package or of a library that called back."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_user_code(frame):
        frame = frame.f_back
    return frame


def _caller_of(error: BaseException) -> tuple[FrameType | None, bool]:
    """The innermost frame of user code in a traceback, and whether a library raised the error."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    users = [frame for frame in frames if _is_user_code(frame)]
    return (users[-1], frames[-1] is not users[-1]) if users else (None, False)


def _is_user_code(frame: FrameType) -> bool:
    foreign = str(frame.f_globals.get("__name__", "")).partition(".")[0] in _FOREIGN
    return not frame.f_code.co_filename.startswith(_HERE) and not foreign


def _line_of_caller() -> tuple[str, int]:
    frame = _caller()
    return ("?", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)

"""Score functions in a call: checks of their bound arrays, and the graph traced for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..errors import InvalidArgumentsError
from ..program.errors import integer_overflow
from ..program.function import Program
from ..program.graph import Argument, Body, Graph
from ..program.ranges import OF_DTYPE, Range, too_large
from .arrays import CPU, ArrayView
from .operands import FLOATS, Views, cast, wrong
from .public_names import public_name, type_phrase

__all__ = ["argument_views", "body_of", "check_integers", "function_operands", "learned_by",
           "learned_elements", "learned_of"]  # fmt: skip

_NAME = "bound"
_DTYPES = (*FLOATS, "int32", "int8", "uint8", "bool")
_MOST_AXES = 4


def argument_views(views: Mapping[str, ArrayView]) -> Views:
    """The bound arguments among the arrays of a call, in order."""
    return {name: view for name, view in views.items() if name.startswith(_NAME)}


def learned_of(function: Body | None) -> list[str]:
    """Names of the learned arguments, which have a gradient."""
    return [] if function is None else [f"{_NAME}[{number}]" for number in function.learned]


def learned_elements(function: Body | None, views: Views) -> int:
    """Total number of elements of the learned arguments."""
    return sum(math.prod(views[name].shape) for name in learned_of(function))


def learned_by(score: Program | None) -> tuple[str, ...]:
    """Names of the learned arguments of a function that is not traced yet."""
    return () if score is None else tuple([f"{_NAME}[{number}]" for number in score.learned])


def function_operands(score: Any, raw: Views, views: Views) -> Body | None:
    """Check a score function and its arguments, add the arguments to `views`, and trace the function."""
    given = argument_views(raw)
    if score is None:
        if given:
            raise wrong("arguments are given, and no function.", raw, "score=cupy_flash.score(...)")
        return None
    if not isinstance(score, Program):
        hint = "score=cupy_flash.score(f), made once, where f is your function"
        raise InvalidArgumentsError(f"score is {type_phrase(score)}.", hint=hint)
    views |= given
    return body_of(score, raw)


def check_integers(
    function: Body | None, sizes: tuple[int, int, int, int], bits: int, views: Mapping[str, ArrayView]
) -> None:
    """Refuse a function whose integers would overflow in `bits`; it reads arguments only in main memory.

    `sizes` are the extents of batch, heads of q, queries and keys.
    """
    if not isinstance(function, Graph):
        return
    given = [views[f"{_NAME}[{number}]"] for number in range(len(function.arguments))]
    # why dtypes first: most functions fit whatever their arguments hold, and this answer is cached.
    found = too_large(function, bits, sizes, tuple([OF_DTYPE.get(x.dtype, (0, 0)) for x in given]))
    if found is not None:
        found = too_large(function, bits, sizes, tuple([_held(x) for x in given]))
    if found is not None:
        numpy = "; or the environment variable CUPY_FLASH_CPU=numpy, for 64 bits" if bits < 64 else ""
        raise integer_overflow(function.name, found, bits, numpy)


def _held(x: ArrayView) -> Range:
    """The range of the elements of integers in main memory; else that of the dtype, (0, 0) for floats."""
    if x.dtype not in OF_DTYPE or x.device != CPU:
        return OF_DTYPE.get(x.dtype, (0, 0))
    elements = x.numpy()
    return int(elements.min()), int(elements.max())


def body_of(score: Program, raw: Views) -> Body:
    """Check the arguments of a score function, which are among `raw`, and trace it."""
    given = argument_views(raw)
    for name, view in given.items():
        if view.dtype not in _DTYPES:
            wider = cast(name, view, "int32" if "int" in view.dtype else "float32")
            raise wrong(
                f"{public_name(name)} has dtype {view.dtype}.",
                raw,
                f"{wider}; or one of {', '.join(_DTYPES)}",
            )
        if len(view.shape) > _MOST_AXES:
            raise wrong(f"{public_name(name)} has {len(view.shape)} axes.", raw, f"at most {_MOST_AXES}")
        if 0 in view.shape:
            raise wrong(
                f"{public_name(name)} has shape {view.shape}, and no element.",
                raw,
                "an array of one at least",
            )
    return score.traced([Argument(view.dtype, len(view.shape)) for view in given.values()])

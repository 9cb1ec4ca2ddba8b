"""A score function as a call has it: its graph for the arrays that are given."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..errors import InvalidArguments
from ..program.function import Program
from ..program.graph import Argument, Body
from .arrays import ArrayView
from .operands import FLOATS, Views, cast, wrong

__all__ = ["argument_views", "body_of", "function_operands", "learned_by", "learned_elements",
           "learned_of"]  # fmt: skip

_NAME = "bound"
_DTYPES = (*FLOATS, "int32", "int8", "uint8", "bool")
_MOST_AXES = 4


def argument_views(views: Mapping[str, ArrayView]) -> Views:
    """The arguments among the arrays of a call, in their order."""
    return {name: view for name, view in views.items() if name.startswith(_NAME)}


def learned_of(function: Body | None) -> list[str]:
    """Names of the arguments whose gradient is wanted."""
    return [] if function is None else [f"{_NAME}[{number}]" for number in function.learned]


def learned_elements(function: Body | None, views: Views) -> int:
    """How many elements these have."""
    return sum(math.prod(views[name].shape) for name in learned_of(function))


def learned_by(score: Program | None) -> tuple[str, ...]:
    """The same of a function that has not been traced."""
    return () if score is None else tuple([f"{_NAME}[{number}]" for number in score.learned])


def function_operands(score: Any, raw: Views, views: Views) -> Body | None:
    """Check a score function and its arguments, put these into views, and trace it.

    Parameters
    ----------
    score : Program or None
        As the caller gave it.
    raw, views : dict of str to ArrayView
        As of `describe`.

    Raises
    ------
    InvalidArguments
        It is no such function, its arguments are none that it takes, or what tracing raises.
    """
    given = argument_views(raw)
    if score is None:
        if given:
            raise wrong(f"{_NAME} is given, and no score.", raw, "score=cupy_flash.score(...)")
        return None
    if not isinstance(score, Program):
        hint = "score=cupy_flash.score(f), made once, where f is your function"
        raise InvalidArguments(f"score is a {type(score).__name__}.", hint=hint)
    views |= given
    return body_of(score, raw)


def body_of(score: Program, raw: Views) -> Body:
    """Check the arguments of a score function among these arrays, and trace it."""
    given = argument_views(raw)
    for name, view in given.items():
        if view.dtype not in _DTYPES:
            wider = cast(name, view, "int32" if "int" in view.dtype else "float32")
            raise wrong(f"{name} has dtype {view.dtype}.", raw, f"{wider}; or one of {', '.join(_DTYPES)}")
        if len(view.shape) > _MOST_AXES:
            raise wrong(f"{name} has {len(view.shape)} axes.", raw, f"at most {_MOST_AXES}")
        if 0 in view.shape:
            raise wrong(f"{name} has shape {view.shape}, and no element.", raw, "an array of one at least")
    return score.traced([Argument(view.dtype, len(view.shape)) for view in given.values()])

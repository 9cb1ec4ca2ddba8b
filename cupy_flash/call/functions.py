"""A score function as a call has it: its graph for the arrays that are given."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..errors import InvalidArgumentsError
from ..program.errors import beyond
from ..program.function import Program
from ..program.graph import Argument, Body, Graph
from ..program.ranges import OF_DTYPE, Range, too_large
from .arrays import CPU, ArrayView
from .operands import FLOATS, Views, cast, wrong
from .spelling import kind_of, spelled

__all__ = ["argument_views", "body_of", "check_integers", "function_operands", "learned_by",
           "learned_elements", "learned_of"]  # fmt: skip

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
    InvalidArgumentsError
        It is no such function, its arguments are none that it takes, or what tracing raises.
    """
    given = argument_views(raw)
    if score is None:
        if given:
            raise wrong("arguments are given, and no function.", raw, "score=cupy_flash.score(...)")
        return None
    if not isinstance(score, Program):
        hint = "score=cupy_flash.score(f), made once, where f is your function"
        raise InvalidArgumentsError(f"score is {kind_of(score)}.", hint=hint)
    views |= given
    return body_of(score, raw)


def check_integers(
    function: Body | None, sizes: tuple[int, int, int, int], bits: int, views: Mapping[str, ArrayView]
) -> None:
    """Refuse integers that would wrap, where looking at arguments is free: in main memory.

    Parameters
    ----------
    function : Body or None
    sizes : (int, int, int, int)
        Batch, heads of q, queries, keys.
    bits : int
        In which they are computed.
    views : mapping of str to ArrayView
        The arguments, among others.
    """
    if not isinstance(function, Graph):
        return
    given = [views[f"{_NAME}[{number}]"] for number in range(len(function.arguments))]
    # why first: most functions fit whatever their arguments hold, and this is remembered
    found = too_large(function, bits, sizes, tuple([OF_DTYPE.get(x.dtype, (0, 0)) for x in given]))
    if found is not None:
        found = too_large(function, bits, sizes, tuple([_held(x) for x in given]))
    if found is not None:
        numpy = "; or the environment variable CUPY_FLASH_CPU=numpy, for 64 bits" if bits < 64 else ""
        raise beyond(function.name, found, bits, numpy)


def _held(x: ArrayView) -> Range:
    """The least and the greatest element of integers; of others 0."""
    if x.dtype not in OF_DTYPE or x.device != CPU:
        return OF_DTYPE.get(x.dtype, (0, 0))
    elements = x.numpy()
    return int(elements.min()), int(elements.max())


def body_of(score: Program, raw: Views) -> Body:
    """Check the arguments of a score function among these arrays, and trace it."""
    given = argument_views(raw)
    for name, view in given.items():
        if view.dtype not in _DTYPES:
            wider = cast(name, view, "int32" if "int" in view.dtype else "float32")
            raise wrong(
                f"{spelled(name)} has dtype {view.dtype}.", raw, f"{wider}; or one of {', '.join(_DTYPES)}"
            )
        if len(view.shape) > _MOST_AXES:
            raise wrong(f"{spelled(name)} has {len(view.shape)} axes.", raw, f"at most {_MOST_AXES}")
        if 0 in view.shape:
            raise wrong(
                f"{spelled(name)} has shape {view.shape}, and no element.", raw, "an array of one at least"
            )
    return score.traced([Argument(view.dtype, len(view.shape)) for view in given.values()])

"""Checks of plain values, which refuse arrays and objects with odd methods as flag, number or name."""

from __future__ import annotations

import operator
from collections.abc import Container
from typing import Any

import numpy as np

from ..errors import InvalidArgumentsError

__all__ = ["flag", "integer", "length", "of_integers", "one_of", "pair"]


def flag(value: Any, name: str) -> bool:
    """The value as a bool; other types are refused, as their truth value would be a guess."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    owner, dot, field = name.rpartition(".")
    good = f"{owner}._replace({field}=True) or False" if dot else f"{name}=True or {name}=False"
    raise InvalidArgumentsError(f"{name} is {value!r}.", hint=good)


def integer(value: Any) -> int | None:
    """The value as an int; None if it is not an integer, as booleans and arrays are not."""
    if isinstance(value, (bool, np.bool_, np.ndarray)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def length(value: Any, name: str) -> int:
    """The value as a length, an int that int32 holds; others are refused."""
    number = integer(value)
    if number is None or not 0 <= number < 2**31:
        raise InvalidArgumentsError(f"{name} is {value!r}.", hint=f"{name}= an integer from 0 to 2**31 - 1")
    return number


def one_of(value: Any, names: Container[str]) -> bool:
    """Whether a value is one of these names; `in` alone would compare an array element by element."""
    return isinstance(value, str) and value in names


def pair(window: Any) -> tuple[Any, Any]:
    """The two bounds of a window, unchecked; None means open on both sides."""
    if window is None:
        return None, None
    if isinstance(window, (tuple, list)) and len(window) == 2:
        return window[0], window[1]
    width = integer(window)
    width = 128 if width is None or width < 0 else width
    raise InvalidArgumentsError(
        f"window is {window!r}, not a pair (left, right).",
        hint=f"window=({width}, 0) for the query's key and {width} before it, "
        f"or window=({width}, {width}) for {width} on either side",
    )


def of_integers(x: Any) -> bool:
    """Whether the first number in nested lists is an integer: offsets, lengths and tables are int32."""
    first = x
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    return first is not x and type(first) is int

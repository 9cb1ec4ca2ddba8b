"""Trace a function: run it once on values that record each operation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .errors import captured_in_frame, refused
from .graph import POSITIONS, Argument, Graph
from .tape import Elements, Tape, Value

__all__ = ["trace"]


def trace(
    function: Callable[..., Any],
    masks: bool,
    arguments: tuple[Argument, ...],
    names: Sequence[str],
    learned: tuple[int, ...],
    name: str,
    line: tuple[str, int],
) -> Graph:
    """The graph of a function.

    Parameters
    ----------
    function : callable
        Called with the score (unless it masks), batch, head, query, key, and the arguments.
    masks : bool
        Whether it returns which pairs are kept; the score of others is -inf.
    arguments : tuple of Argument
    names : sequence of str
        Names of the arguments.
    learned : tuple of int
    name : str
        Name of the function, for messages.
    line : (str, int)
        File and line where it begins, for errors about the whole function.

    Raises
    ------
    InvalidArgumentsError
        It does something that cannot be traced; the line is shown.
    """
    tape = Tape()
    s = tape.add("s", "float")
    given: list[Any] = [tape.add(position, "int") for position in POSITIONS]
    for number, (argument, called) in enumerate(zip(arguments, names, strict=True)):
        if argument.rank:
            given.append(Elements(tape, number, argument, called))
        else:
            given.append(tape.add("load", argument.kind, (), number))
    try:
        result = function(*given) if masks else function(s, *given)
    except IndexError as error:  # from a library that does not call __index__
        raise captured_in_frame(error) or error from None
    wanted = "a condition" if masks else "a number"
    if isinstance(result, (bool, int, float, np.generic)):
        result = tape.constant(result)
    if not isinstance(result, Value):
        raise refused(
            f"{name} returns a value of type {type(result).__name__}, not {wanted}.", f"return {wanted}", line
        )
    kind = tape.nodes[result.at].kind
    if masks != (kind == "bool"):
        hint = (
            "a comparison, such as i >= j" if masks else "cupy_flash.mask(...), or np.where(keep, s, -np.inf)"
        )
        raise refused(f"{name} returns a value of kind {kind}, not {wanted}.", hint, line)
    score = tape.apply("where", result, s, -math.inf) if masks else tape.converted(result, "float")
    return Graph(*tape.pruned((score.at,)), arguments, learned, name)

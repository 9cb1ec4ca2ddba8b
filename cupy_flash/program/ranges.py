"""Interval arithmetic for the integers of a function, from positions and arguments to its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from textwrap import shorten
from typing import NamedTuple, TypeAlias

from .graph import POSITIONS, Graph, Node

__all__ = ["OF_DTYPE", "Range", "TooLarge", "too_large", "wide_nodes"]

# The smallest and the largest value.
Range: TypeAlias = tuple[int, int]

_INT32 = (-(2**31), 2**31 - 1)
OF_DTYPE: dict[str, Range] = {"int32": _INT32, "int8": (-128, 127), "uint8": (0, 255), "bool": (0, 1)}
_INFIX = {
    "add": "+", "subtract": "-", "multiply": "*", "floor_divide": "//", "remainder": "%", "less": "<",
    "less_equal": "<=", "greater": ">", "greater_equal": ">=", "equal": "==", "not_equal": "!=",
    "logical_and": "&", "logical_or": "|", "true_divide": "/",
}  # fmt: skip


class TooLarge(NamedTuple):
    """An integer of a function that may overflow."""

    expression: str  # the expression, as Python text
    value: int  # its possible value with the largest magnitude


def _product(a: Range, b: Range) -> Range:
    corners = [x * y for x in a for y in b]
    return min(corners), max(corners)


def _quotient(a: Range, b: Range) -> Range:
    divisors = [d for d in (*b, -1, 1) if d and b[0] <= d <= b[1]]
    corners = [x // d for x in a for d in divisors] + [0] * (b[0] <= 0 <= b[1])
    return min(corners), max(corners)


def _remainder(a: Range, b: Range) -> Range:
    if a[0] >= 0 and b[0] > a[1]:
        return a
    high = max(0, b[1] - 1)
    return min(0, b[0] + 1), min(high, a[1]) if a[0] >= 0 <= b[0] else high


def _magnitude(a: Range) -> Range:
    return (0 if a[0] <= 0 <= a[1] else min(map(abs, a))), max(map(abs, a))


_OF: dict[str, Callable[..., Range]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "subtract": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "multiply": _product,
    "floor_divide": _quotient,
    "remainder": _remainder,
    "negative": lambda a: (-a[1], -a[0]),
    "absolute": _magnitude,
    "minimum": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "maximum": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "where": lambda _, a, b: (min(a[0], b[0]), max(a[1], b[1])),
    "to_int": lambda a: a,
}


def _of_node(
    node: Node, operands: list[Range | None], positions: Sequence[Range], held: Sequence[Range] | None
) -> Range | None:
    """The range of an integer; None if it depends on arguments of unknown range (`held` is None)."""
    if node.kind == "bool":
        return 0, 1
    if node.op in POSITIONS:
        return positions[POSITIONS.index(node.op)]
    if node.op == "constant":
        return int(node.value or 0), int(node.value or 0)
    if node.op == "load":
        return None if held is None else held[int(node.value or 0)]
    return None if None in operands else _OF[node.op](*operands)


@lru_cache(maxsize=1024)
def too_large(
    graph: Graph, bits: int, sizes: tuple[int, int, int, int], held: tuple[Range, ...] | None = None
) -> TooLarge | None:
    """The first integer of a function that may overflow this many bits; None if there is none.

    Parameters
    ----------
    graph : Graph
    bits : int
    sizes : (int, int, int, int)
        Extents of batch, heads of q, queries and keys.
    held : tuple of Range, optional
        Range of the elements of each argument. Without it, only integers computed from positions are checked.
    """
    positions = [(0, max(0, n - 1)) for n in sizes]
    found: list[Range | None] = []
    for at, node in enumerate(graph.nodes):
        if node.kind == "float":
            found.append(None)
            continue
        own = _of_node(node, [found[x] for x in node.operands], positions, held)
        found.append(own)
        if own is not None and not -(2 ** (bits - 1)) <= own[0] <= own[1] < 2 ** (bits - 1):
            return TooLarge(shorten(_text(graph, at), 80, placeholder=" ..."), max(own, key=abs))
    return None


@lru_cache(maxsize=256)
def wide_nodes(graph: Graph) -> frozenset[int]:
    """The nodes that kernels compute in 64 bits: integers computed from elements of arguments.

    why not others: integers computed from positions fit 32 bits, as calls are refused otherwise.
    """
    anything = [(0, _INT32[1])] * len(POSITIONS)
    held = [OF_DTYPE.get(x.dtype, _INT32) for x in graph.arguments]
    found: list[Range | None] = []
    alone: list[Range | None] = []  # ranges of values computed from positions alone
    wide = set()
    for at, node in enumerate(graph.nodes):
        if node.kind == "float":
            found.append(None)
            alone.append(None)
            continue
        of_positions = _of_node(node, [alone[x] for x in node.operands], anything, None)
        own = _of_node(node, [found[x] for x in node.operands], anything, held)
        assert own is not None
        if of_positions is not None:
            own = of_positions = (max(own[0], _INT32[0]), min(own[1], _INT32[1]))
        elif not _INT32[0] <= own[0] <= own[1] <= _INT32[1]:
            wide.add(at)
        found.append(own)
        alone.append(of_positions)
    return frozenset(wide)


def _text(graph: Graph, at: int) -> str:
    """A value as Python text."""
    node = graph.nodes[at]
    operands = [_text(graph, x) for x in node.operands]
    if node.op in ("s", *POSITIONS):
        return node.op
    if node.op == "constant":
        return repr(node.value)
    if node.op == "load":
        return f"arguments[{node.value}]" + (f"[{', '.join(operands)}]" if operands else "")
    if node.op in ("to_int", "to_float"):
        return operands[0]
    if node.op in _INFIX:
        inner = [
            f"({text})" if graph.nodes[x].op in _INFIX else text
            for x, text in zip(node.operands, operands, strict=True)
        ]
        return f" {_INFIX[node.op]} ".join(inner)
    sign = {"negative": "-", "logical_not": "~", "absolute": "abs"}.get(node.op, f"np.{node.op}")
    return f"{sign}({', '.join(operands)})"

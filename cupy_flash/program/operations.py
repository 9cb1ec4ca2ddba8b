"""The operations of score functions: kinds, NumPy function, C text and derivative of each.

A derivative function gets the gradient g of the result, the result y and the operands, and returns the
gradient of each operand, or None. It uses `where` and Python operators on traced values, so that
differentiating a graph is tracing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

__all__ = ["OPERATIONS", "UFUNCS", "Operation"]


class Operation(NamedTuple):
    """One operation."""

    # {"same", "int", "float", "compare", "logic", "where"}: conversion of the operands, and kind of the
    # result. same: all of the widest kind, bool counting as int; int: integers only; float: floats;
    # compare: the widest kind, with a bool as result; logic: bools; where: a bool and two of the widest
    # kind.
    rule: str
    numpy: Callable[..., Any]
    c: str  # C expression with operands {0}, {1}, {2}
    derivative: Callable[..., tuple[Any, ...]] | None = None

    @property
    def operands(self) -> int:
        """Number of operands."""
        return self.c.count("{")


def _where(condition: Any, a: Any, b: Any) -> Any:
    return np.where(condition, a, b)  # traced values


def _used(g: Any, gradient: Any) -> Any:
    """A gradient that may divide by 0, in a branch that np.where may not have taken."""
    # why not wherever g is 0: a finite gradient is then 0 anyway, but its own derivative need not be.
    no_number = ~(abs(gradient) < np.inf)
    return _where((g == 0) & no_number, 0.0, gradient)


def _divided(g: Any, gradient: Any, b: Any) -> Any:
    """A gradient that divides by b, which may be 0 unless it is a nonzero constant."""
    node = b.tape.nodes[b.at]
    return gradient if node.op == "constant" and node.value else _used(g, gradient)


# Gradients at a kink: 0 for abs at 0; for equal operands, minimum and maximum pass it to the first.
OPERATIONS = {
    "add": Operation("same", np.add, "plus({0}, {1})", lambda g, y, a, b: (g, g)),
    "subtract": Operation("same", np.subtract, "minus({0}, {1})", lambda g, y, a, b: (g, -g)),
    "multiply": Operation("same", np.multiply, "times({0}, {1})", lambda g, y, a, b: (g * b, g * a)),
    "true_divide": Operation(
        "float",
        np.true_divide,
        "{0} / {1}",
        lambda g, y, a, b: (_divided(g, g / b, b), _divided(g, -g * y / b, b)),
    ),
    "floor_divide": Operation("int", np.floor_divide, "floor_quotient({0}, {1})"),
    "remainder": Operation("int", np.remainder, "floor_remainder({0}, {1})"),
    "negative": Operation("same", np.negative, "opposite({0})", lambda g, y, a: (-g,)),
    "absolute": Operation(
        "same",
        np.absolute,
        "magnitude({0})",
        lambda g, y, a: (_where(a > 0, g, _where(a < 0, -g, 0.0)),),
    ),
    "minimum": Operation(
        "same",
        np.minimum,
        "least_of({0}, {1})",
        lambda g, y, a, b: (_where(a <= b, g, 0.0), _where(a <= b, 0.0, g)),
    ),
    "maximum": Operation(
        "same",
        np.maximum,
        "greatest_of({0}, {1})",
        lambda g, y, a, b: (_where(a >= b, g, 0.0), _where(a >= b, 0.0, g)),
    ),
    "exp": Operation("float", np.exp, "exponential({0})", lambda g, y, a: (_used(g, g * y),)),
    "log": Operation("float", np.log, "natural_log({0})", lambda g, y, a: (_used(g, g / a),)),
    "tanh": Operation("float", np.tanh, "tanh_of({0})", lambda g, y, a: (g * (1 - y * y),)),
    "sqrt": Operation("float", np.sqrt, "square_root({0})", lambda g, y, a: (_used(g, g / (2 * y)),)),
    "less": Operation("compare", np.less, "{0} < {1}"),
    "less_equal": Operation("compare", np.less_equal, "{0} <= {1}"),
    "greater": Operation("compare", np.greater, "{0} > {1}"),
    "greater_equal": Operation("compare", np.greater_equal, "{0} >= {1}"),
    "equal": Operation("compare", np.equal, "{0} == {1}"),
    "not_equal": Operation("compare", np.not_equal, "{0} != {1}"),
    "logical_and": Operation("logic", np.logical_and, "{0} && {1}"),
    "logical_or": Operation("logic", np.logical_or, "{0} || {1}"),
    "logical_not": Operation("logic", np.logical_not, "!{0}"),
    "where": Operation(
        "where",
        np.where,
        "{0} ? {1} : {2}",
        lambda g, y, c, a, b: (None, _where(c, g, 0.0), _where(c, 0.0, g)),
    ),
}

# Names of NumPy, torch and other libraries for the operations, which a traced value supports.
UFUNCS = {name: name for name in OPERATIONS} | {
    "bitwise_and": "logical_and", "bitwise_or": "logical_or", "invert": "logical_not",
    "bitwise_not": "logical_not", "abs": "absolute", "fabs": "absolute", "neg": "negative",
    "sub": "subtract", "mul": "multiply", "div": "true_divide", "divide": "true_divide",
    "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal", "eq": "equal",
    "ne": "not_equal", "mod": "remainder",
}  # fmt: skip

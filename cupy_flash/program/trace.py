"""Trace: run the function once on values that write down what is done to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .errors import refused
from .graph import POSITIONS, Argument, Graph, Node
from .operations import OPERATIONS, UFUNCS

__all__ = ["Tape", "Value", "trace"]

_WIDTH = {"bool": 0, "int": 1, "float": 2}
_BRANCH = "np.where(condition, a, b) for if and the conditional expression; & | ~ for and, or, not"


class Tape:
    """The nodes of a graph while it is made; equal ones are one."""

    def __init__(self, nodes: Sequence[Node] = ()) -> None:
        self.nodes = list(nodes)
        # why types and signs: True, 1 and 1.0 are equal, and so are 0.0 and -0.0.
        self._known = {self._key(node): at for at, node in enumerate(self.nodes)}

    @staticmethod
    def _key(node: Node) -> tuple[Any, ...]:
        return (*node, type(node.value), repr(node.value))

    def add(self, op: str, kind: str, operands: tuple[int, ...] = (), value: Any = None) -> Value:
        """The value of a node, a new one if there is none like it."""
        node = Node(op, kind, operands, value)
        at = self._known.setdefault(self._key(node), len(self.nodes))
        if at == len(self.nodes):
            self.nodes.append(node)
        return Value(self, at)

    def constant(self, x: Any) -> Value:
        """A number of Python or NumPy."""
        if isinstance(x, (bool, np.bool_)):
            return self.add("constant", "bool", value=bool(x))
        if isinstance(x, (int, np.integer)):
            if not -(2**31) <= int(x) < 2**31:
                raise refused(f"the number {x} is beyond 32 bits, which positions have.", f"{x}.0, a float")
            return self.add("constant", "int", value=int(x))
        return self.add("constant", "float", value=float(x))

    def value(self, x: Any) -> Value:
        """What stands in an expression, as a value of this tape."""
        if isinstance(x, Value):
            if x.tape is not self:
                raise refused(
                    "a value of another function, or of another call, is used.", "arguments, in score_args="
                )
            return x
        if isinstance(x, (bool, int, float, np.bool_, np.integer, np.floating)):
            return self.constant(x)
        if isinstance(x, np.ndarray) and x.ndim == 0 and x.dtype.kind in "biuf":
            return self.constant(x[()])
        raise refused(
            f"a {type(x).__name__} stands in an expression.",
            "an argument of the function, given in score_args=, and an element of it"
            if hasattr(x, "shape")
            else "numbers, and what is made of the arguments of the function",
        )

    def converted(self, x: Value, kind: str) -> Value:
        """A value as a wider kind."""
        node = self.nodes[x.at]
        if node.kind == kind:
            return x
        if node.op == "constant":
            return self.constant(float(node.value or 0) if kind == "float" else int(node.value or 0))
        return self.add(f"to_{kind}", kind, (x.at,))

    def apply(self, op: str, *operands: Any) -> Value:
        """An operation on values, converted as its rule has it."""
        values = [self.value(x) for x in operands]
        kinds = [self.nodes[x.at].kind for x in values]
        rule = OPERATIONS[op].rule
        widest = max(kinds[1:] if rule == "where" else kinds, key=_WIDTH.__getitem__)
        of = {"float": "float", "logic": "bool", "int": "int"}.get(rule) or widest
        if rule == "same" and of == "bool":
            of = "int"
        if (rule == "int" and "float" in kinds) or (rule == "logic" and set(kinds) != {"bool"}):
            what = "integers" if rule == "int" else "conditions"
            raise refused(
                f"{op} is of {what}; here it is of {' and '.join(kinds)}.",
                "a / b for floats" if rule == "int" else "a comparison, such as a != 0",
            )
        if rule == "where":
            if kinds[0] != "bool":
                raise refused(
                    f"the condition of where is of kind {kinds[0]}.", "a comparison, such as a != 0"
                )
            values[1:] = [self.converted(x, of) for x in values[1:]]
        else:
            values = [self.converted(x, of) for x in values]
        simple = self._simplified(op, values)
        if simple is not None:
            return simple
        return self.add(op, "bool" if rule == "compare" else of, tuple(x.at for x in values))

    def _simplified(self, op: str, values: list[Value]) -> Value | None:
        """What needs no node: gradients are full of ones and zeros."""
        first, *rest = (self.nodes[x.at] for x in values)
        last = rest[-1] if rest else first
        if op == "add" and _is(last, 0):
            return values[0]
        if op == "add" and _is(first, 0):
            return values[1]
        if op in ("multiply", "true_divide") and _is(last, 1):
            return values[0]
        if op == "multiply" and _is(first, 1):
            return values[1]
        # why not of any zero: 0 times what is infinite is no number; a gradient that nobody passes on is none.
        if op == "negative" and _is(first, 0):
            return values[0]
        if op == "where" and values[1].at == values[2].at:
            return values[1]
        return None


def _is(node: Node, number: int) -> bool:
    return node.op == "constant" and node.value == number and not math.copysign(1, node.value or 0) < 0


class Value:
    """A value of a function that is being traced. It stands where a number does, but has none."""

    __slots__ = ("at", "tape")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tape: Tape, at: int) -> None:
        self.tape, self.at = tape, at

    # ---- what NumPy, and libraries with its protocols, do to it

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Value:
        return self._call(ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}",
                          inputs, options)  # fmt: skip

    def __array_function__(self, function: Any, _types: Any, args: Any, options: Any) -> Value:
        return self._call(function.__name__, args, options)

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, args: Any = (), options: Any = None) -> Value:
        """As `__array_function__`."""
        own: Value = next(x for x in args if isinstance(x, Value))
        return own._call(function.__name__.strip("_"), args, options or {})

    def _call(self, name: str, operands: Any, options: Any) -> Value:
        if name in ("clip", "clamp") and not options and len(operands) == 3:
            x, low, high = operands
            above = x if low is None else self.tape.apply("maximum", x, low)
            return above if high is None else self.tape.apply("minimum", above, high)
        if name == "square" and not options:
            return self.tape.apply("multiply", operands[0], operands[0])
        if options or name not in UFUNCS:
            raise refused(
                f"{name} is not known to score functions{' with such options' * bool(options)}.",
                "+ - * / // %, comparisons, & | ~, np.where, exp, log, tanh, sqrt, abs, minimum, maximum, clip",
            )
        return self.tape.apply(UFUNCS[name], *operands)

    # ---- operators

    def __add__(self, other: Any) -> Value:
        return self.tape.apply("add", self, other)

    def __radd__(self, other: Any) -> Value:
        return self.tape.apply("add", other, self)

    def __sub__(self, other: Any) -> Value:
        return self.tape.apply("subtract", self, other)

    def __rsub__(self, other: Any) -> Value:
        return self.tape.apply("subtract", other, self)

    def __mul__(self, other: Any) -> Value:
        return self.tape.apply("multiply", self, other)

    def __rmul__(self, other: Any) -> Value:
        return self.tape.apply("multiply", other, self)

    def __truediv__(self, other: Any) -> Value:
        return self.tape.apply("true_divide", self, other)

    def __rtruediv__(self, other: Any) -> Value:
        return self.tape.apply("true_divide", other, self)

    def __floordiv__(self, other: Any) -> Value:
        return self.tape.apply("floor_divide", self, other)

    def __rfloordiv__(self, other: Any) -> Value:
        return self.tape.apply("floor_divide", other, self)

    def __mod__(self, other: Any) -> Value:
        return self.tape.apply("remainder", self, other)

    def __rmod__(self, other: Any) -> Value:
        return self.tape.apply("remainder", other, self)

    def __pow__(self, power: Any) -> Value:
        if isinstance(power, float) and power == 0.5:
            return self.tape.apply("sqrt", self)
        if not isinstance(power, int) or not 1 <= power <= 8:
            raise refused(f"a power of {power!r}.", "x ** 2, to 8; np.sqrt(x); or np.exp(p * np.log(x))")
        product = self
        for _ in range(power - 1):
            product = product * self
        return product

    def __neg__(self) -> Value:
        return self.tape.apply("negative", self)

    def __pos__(self) -> Value:
        return self

    def __abs__(self) -> Value:
        return self.tape.apply("absolute", self)

    def __lt__(self, other: Any) -> Value:
        return self.tape.apply("less", self, other)

    def __le__(self, other: Any) -> Value:
        return self.tape.apply("less_equal", self, other)

    def __gt__(self, other: Any) -> Value:
        return self.tape.apply("greater", self, other)

    def __ge__(self, other: Any) -> Value:
        return self.tape.apply("greater_equal", self, other)

    def __eq__(self, other: Any) -> Value:  # type: ignore[override]
        return self.tape.apply("equal", self, other)

    def __ne__(self, other: Any) -> Value:  # type: ignore[override]
        return self.tape.apply("not_equal", self, other)

    def __and__(self, other: Any) -> Value:
        return self.tape.apply("logical_and", self, other)

    def __rand__(self, other: Any) -> Value:
        return self.tape.apply("logical_and", other, self)

    def __or__(self, other: Any) -> Value:
        return self.tape.apply("logical_or", self, other)

    def __ror__(self, other: Any) -> Value:
        return self.tape.apply("logical_or", other, self)

    def __invert__(self) -> Value:
        return self.tape.apply("logical_not", self)

    # ---- what a value without a number cannot do

    def __bool__(self) -> bool:
        raise refused("the function branches in Python on a value that it gets.", _BRANCH)

    def _no_number(self, *_: Any) -> Any:
        raise refused(
            "Python asks for the number of a value that has none while the function is traced.",
            "NumPy's functions for those of math; arrays that are indexed, as arguments, given in score_args=",
        )

    __int__ = __float__ = __complex__ = __index__ = __round__ = __trunc__ = __floor__ = __ceil__ = _no_number
    __iter__ = __len__ = __getitem__ = __array__ = _no_number


class _Elements:
    """An argument with axes: what the function may do is take elements."""

    __slots__ = ("_argument", "_name", "_number", "_tape")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tape: Tape, number: int, argument: Argument, name: str) -> None:
        self._tape, self._number, self._argument, self._name = tape, number, argument, name

    def __getitem__(self, index: Any) -> Value:
        indices = index if isinstance(index, tuple) else (index,)
        rank = self._argument.rank
        if len(indices) != rank:
            raise refused(
                f"{self._name} has {rank} axes, and {len(indices)} indices.", "one index for each axis"
            )
        values = []
        for one in indices:
            if isinstance(one, slice) or one is None or one is Ellipsis:
                raise refused(f"{self._name} is indexed by {one!r}.", "one integer for each axis")
            value = self._tape.value(one)
            node = self._tape.nodes[value.at]
            if node.kind != "int" or (node.op == "constant" and (node.value or 0) < 0):
                raise refused(
                    f"{self._name} is indexed by {node.value if node.op == 'constant' else 'a ' + node.kind}.",
                    "integers of at least 0: positions, elements of int32 arguments, and what // and % make",
                )
            values.append(value.at)
        return self._tape.add("load", self._argument.kind, tuple(values), self._number)

    def __getattr__(self, name: str) -> Any:
        raise refused(
            f"{self._name}.{name}: an argument is known by its elements only, when a function is traced.",
            f"{self._name}[h, i]; sizes as numbers, or as an argument of shape ()",
        )

    def _whole(self, *_: Any, **__: Any) -> Any:
        raise refused(
            f"{self._name} has {self._argument.rank} axes, and stands for a number.",
            f"an element of it, such as {self._name}[h]",
        )

    __array_ufunc__ = __array_function__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _whole
    __truediv__ = __rtruediv__ = __floordiv__ = __mod__ = __lt__ = __le__ = __gt__ = __ge__ = _whole
    __eq__ = __ne__ = __and__ = __or__ = __neg__ = __abs__ = __bool__ = __iter__ = __len__ = _whole  # type: ignore[assignment]


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
        Takes the score, unless it masks, batch, head, query, key, and the arguments.
    masks : bool
        It says which pairs are kept; the score of others is -inf.
    arguments : tuple of Argument
    names : sequence of str
        Of the arguments.
    learned : tuple of int
    name : str
        Of the function, for people.
    line : (str, int)
        Where it begins, for errors about all of it.

    Raises
    ------
    InvalidArguments
        It does what no graph can hold; the line is shown.
    """
    tape = Tape()
    s = tape.add("s", "float")
    given: list[Any] = [tape.add(position, "int") for position in POSITIONS]
    for number, (argument, called) in enumerate(zip(arguments, names, strict=True)):
        if argument.rank:
            given.append(_Elements(tape, number, argument, called))
        else:
            given.append(tape.add("load", argument.kind, (), number))
    result = function(*given) if masks else function(s, *given)
    wanted = "a condition" if masks else "a number"
    if isinstance(result, (bool, int, float, np.generic)):
        result = tape.constant(result)
    if not isinstance(result, Value):
        raise refused(f"{name} returns a {type(result).__name__}, not {wanted}.", f"return {wanted}", line)
    kind = tape.nodes[result.at].kind
    if masks != (kind == "bool"):
        hint = "a comparison, such as i >= j" if masks else "cupy_flash.mask(...), or np.where(keep, s, -np.inf)"
        raise refused(f"{name} returns a value of kind {kind}, not {wanted}.", hint, line)
    if masks:
        result = tape.apply("where", result, s, -math.inf)
    else:
        result = tape.converted(result, "float")
    return pruned(Graph(tuple(tape.nodes), (result.at,), arguments, learned, name))


def pruned(graph: Graph) -> Graph:
    """The graph without what no output needs."""
    needed, waiting = set(graph.outputs), list(graph.outputs)
    while waiting:
        for operand in graph.nodes[waiting.pop()].operands:
            if operand not in needed:
                needed.add(operand)
                waiting.append(operand)
    kept = sorted(needed)
    number = {old: new for new, old in enumerate(kept)}
    nodes = tuple(
        graph.nodes[old]._replace(operands=tuple(number[x] for x in graph.nodes[old].operands))
        for old in kept
    )
    outputs = tuple(number[x] for x in graph.outputs)
    return Graph(nodes, outputs, graph.arguments, graph.learned, graph.name)

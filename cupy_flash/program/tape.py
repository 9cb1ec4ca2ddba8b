"""The values that a function gets while it is traced, and the graph that records their operations.

A `Value` represents an unknown number. Each operation on it adds a node to its `Tape`, which checks
operations and kinds, and simplifies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .errors import captured, captured_in_frame, refused
from .graph import Argument, Node
from .operations import OPERATIONS, UFUNCS

__all__ = ["Elements", "Tape", "Value"]

_BRANCH = "np.where(condition, a, b) for if and the conditional expression; & | ~ for and, or, not"


def _kind_of(dtype: Any) -> str:
    """The kind of a dtype of any library."""
    name = dtype.__name__ if isinstance(dtype, type) else str(dtype)
    for kind in ("float", "int", "bool"):
        if kind in name.lower():
            return kind
    raise refused(f"a value is cast to {dtype!r}.", "a dtype of floats, integers or booleans")


# Functions composed of other operations, by their names in NumPy and torch.
_MADE: dict[str, Callable[[Any], Any]] = {
    "square": lambda x: x * x,
    "exp2": lambda x: np.exp(x * math.log(2)),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
}
_CASTS = {"float": "float", "half": "float", "bfloat16": "float", "double": "float", "int": "int",
          "long": "int", "bool": "bool"}  # fmt: skip


def _operator(op: str) -> Callable[..., Value]:
    """A method that applies an operation to a value and the other operands."""
    return lambda value, *others: value.tape.apply(op, value, *others)


def _reflected(op: str) -> Callable[..., Value]:
    """A method that applies an operation to another operand and a value."""
    return lambda value, other: value.tape.apply(op, other, value)


class Value:
    """A traced value, which represents an unknown number."""

    __slots__ = ("at", "tape")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tape: Tape, at: int) -> None:
        self.tape, self.at = tape, at

    # ---- protocols of NumPy and torch

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Value:
        return self._call(ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}",
                          inputs, options)  # fmt: skip

    def __array_function__(self, function: Any, _types: Any, args: Any, options: Any) -> Value:
        return self._call(function.__name__, args, options)

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, args: Any = (), options: Any = None) -> Value:
        """As `__array_function__`, for torch."""
        own = next((x for x in args if isinstance(x, Value)), None)
        name = function.__name__.strip("_")
        if own is None or name == "getitem":  # it is an index of a tensor
            raise captured(args[0])
        # why: torch's silu passes on its option inplace
        given = {key: x for key, x in (options or {}).items() if (key, x) != ("inplace", False)}
        return own._call(name, args, given)

    def _call(self, name: str, operands: Any, options: Any) -> Value:
        if name in ("clip", "clamp") and not options and len(operands) == 3:
            x, low, high = operands
            above = x if low is None else self.tape.apply("maximum", x, low)
            return above if high is None else self.tape.apply("minimum", above, high)
        if name in _MADE and not options and len(operands) == 1:
            made: Value = _MADE[name](operands[0])
            return made
        if name in _CASTS and not options and len(operands) == 1:
            return self.tape.converted(operands[0], _CASTS[name], exactly=True)
        if name in ("to", "type", "astype") and not options and len(operands) == 2:
            return self.tape.converted(operands[0], _kind_of(operands[1]), exactly=True)
        if name in ("new_zeros", "new_ones") and not any((*operands[1:], options.get("size", ()))):
            dtype = options.get("dtype")
            kind = self.dtype if dtype is None else _kind_of(dtype)
            return self.tape.converted(self.tape.constant(name == "new_ones"), kind, exactly=True)
        known = name in UFUNCS
        if options or not known or len(operands) != OPERATIONS[UFUNCS[name]].operands:
            raise refused(
                f"{name} is not known to score functions{' with such arguments' * known}.",
                "+ - * / // %, comparisons, & | ~, np.where, exp, exp2, log, tanh, sigmoid, silu, sqrt, abs, "
                "minimum, maximum",
            )
        return self.tape.apply(UFUNCS[name], *operands)

    @property
    def shape(self) -> tuple[()]:
        """The shape of a number."""
        return ()

    @property
    def dtype(self) -> str:
        """The kind of the value, for ``x.to(y.dtype)``; the number of bits is not known yet."""
        return self.tape.nodes[self.at].kind

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols that other libraries look up
            raise AttributeError(name)
        return lambda *others, **options: self._call(name, (self, *others), options)  # why: torch's methods

    # ---- operators

    __add__, __radd__ = _operator("add"), _reflected("add")
    __sub__, __rsub__ = _operator("subtract"), _reflected("subtract")
    __mul__, __rmul__ = _operator("multiply"), _reflected("multiply")
    __truediv__, __rtruediv__ = _operator("true_divide"), _reflected("true_divide")
    __floordiv__, __rfloordiv__ = _operator("floor_divide"), _reflected("floor_divide")
    __mod__, __rmod__ = _operator("remainder"), _reflected("remainder")
    __and__, __rand__ = _operator("logical_and"), _reflected("logical_and")
    __or__, __ror__ = _operator("logical_or"), _reflected("logical_or")
    __lt__, __le__ = _operator("less"), _operator("less_equal")
    __gt__, __ge__ = _operator("greater"), _operator("greater_equal")
    __eq__, __ne__ = _operator("equal"), _operator("not_equal")  # type: ignore[assignment]
    __neg__, __abs__, __invert__ = _operator("negative"), _operator("absolute"), _operator("logical_not")

    def __pow__(self, power: Any) -> Value:
        if isinstance(power, float) and power == 0.5:
            return self.tape.apply("sqrt", self)
        if not isinstance(power, int) or not 1 <= power <= 8:
            raise refused(f"a power of {power!r}.", "x ** 2, to 8; np.sqrt(x); or np.exp(p * np.log(x))")
        product = self
        for _ in range(power - 1):
            product = product * self
        return product

    def __pos__(self) -> Value:
        return self

    # ---- not possible while tracing

    def __bool__(self) -> bool:
        raise refused("the function branches in Python on a value that it gets.", _BRANCH)

    def _no_number(self, *_: Any) -> Any:
        # why captured_in_frame: NumPy calls __index__ for an index, and does not say of which array.
        raise captured_in_frame() or refused(
            "the function converts a traced value to a Python number: it has none yet.",
            "NumPy's functions for those of math; arrays as arguments, bound by a call: f(array)",
        )

    __int__ = __float__ = __complex__ = __index__ = __round__ = __trunc__ = __floor__ = __ceil__ = _no_number
    __iter__ = __len__ = __getitem__ = __array__ = _no_number


class Elements:
    """A traced argument with axes; the function can only read its elements."""

    __slots__ = ("_argument", "_first", "_name", "_number", "_tape")
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self, tape: Tape, number: int, argument: Argument, name: str, first: tuple[int, ...] = ()
    ) -> None:
        self._tape, self._number, self._argument, self._name = tape, number, argument, name
        self._first = first  # indices of the leading axes

    def __getitem__(self, index: Any) -> Any:
        indices = index if isinstance(index, tuple) else (index,)
        rank = self._argument.rank
        if len(self._first) + len(indices) > rank:
            raise refused(
                f"{self._name} has {rank} axes, and {len(self._first) + len(indices)} indices.",
                "one index for each axis",
            )
        values = [*self._first]
        for one in indices:
            if isinstance(one, slice) or one is None or one is Ellipsis:
                raise refused(f"{self._name} is indexed by {one!r}.", "one integer for each axis")
            value = self._tape.value(one)
            node = self._tape.nodes[value.at]
            if node.kind != "int" or (node.op == "constant" and (node.value or 0) < 0):
                by = node.value if node.op == "constant" else f"a {node.kind}"
                raise refused(
                    f"{self._name} is indexed by {by}.",
                    "integers of at least 0: positions, elements of int32 arguments, and what // and % make",
                )
            values.append(value.at)
        if len(values) < rank:  # table[h][i] is table[h, i]
            return Elements(self._tape, self._number, self._argument, self._name, tuple(values))
        return self._tape.add("load", self._argument.kind, tuple(values), self._number)

    def __getattr__(self, name: str) -> Any:
        raise refused(
            f"{self._name}.{name}: an argument is known by its elements only, when a function is traced.",
            f"{self._name}[h, i]; sizes as numbers, or as an argument of shape ()",
        )

    def _whole(self, *_: Any, **__: Any) -> Any:
        indexed = f", {len(self._first)} of which have an index" if self._first else ""
        raise refused(
            f"{self._name} has {self._argument.rank} axes{indexed}, and stands for a number.",
            f"an element of it, such as {self._name}[h]",
        )

    __array_ufunc__ = __array_function__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = (
        _whole
    )
    __truediv__ = __rtruediv__ = __floordiv__ = __mod__ = __lt__ = __le__ = __gt__ = __ge__ = _whole
    __eq__ = __ne__ = __and__ = __or__ = __neg__ = __abs__ = __bool__ = __iter__ = __len__ = _whole


# ------------------------------------------------------------------------------------------------- the graph

# Kind of the operands by rule; for other rules the widest kind of the operands.
_OF_RULE = {"float": "float", "logic": "bool", "int": "int"}


def _key(node: Node) -> tuple[Any, ...]:
    """The identity of a node. why type and repr: True, 1 and 1.0 compare equal, and so do 0.0 and -0.0."""
    return (*node, type(node.value), repr(node.value)) if node.op == "constant" else node


class Tape:
    """The nodes of a graph under construction, without duplicates."""

    def __init__(self, nodes: Sequence[Node] = ()) -> None:
        self.nodes = list(nodes)
        self._known = {_key(node): at for at, node in enumerate(self.nodes)}

    def add(self, op: str, kind: str, operands: tuple[int, ...] = (), value: Any = None) -> Value:
        """The value of a node, which is added unless an equal one exists."""
        node = Node(op, kind, operands, value)
        nodes = self.nodes
        at = self._known.setdefault(_key(node) if op == "constant" else node, len(nodes))
        if at == len(nodes):
            nodes.append(node)
        return Value(self, at)

    def constant(self, x: Any) -> Value:
        """A constant from a Python or NumPy number."""
        if isinstance(x, (bool, np.bool_)):
            return self.add("constant", "bool", value=bool(x))
        if isinstance(x, (int, np.integer)):
            if not -(2**31) <= int(x) < 2**31:
                raise refused(f"the number {x} is beyond 32 bits, which positions have.", f"{x}.0, a float")
            return self.add("constant", "int", value=int(x))
        return self.add("constant", "float", value=float(x))

    def pruned(self, outputs: Sequence[int]) -> tuple[tuple[Node, ...], tuple[int, ...]]:
        """The nodes that these outputs need, renumbered, and the new numbers of the outputs."""
        nodes, needed = self.nodes, set(outputs)
        for at in range(max(outputs), -1, -1):  # a node comes after its operands
            if at in needed:
                needed.update(nodes[at].operands)
        number = {old: new for new, old in enumerate(sorted(needed))}
        kept = []
        for old in number:
            node = nodes[old]
            if node.operands:
                op, kind, operands, value = node
                node = Node(op, kind, tuple([number[x] for x in operands]), value)
            kept.append(node)
        return tuple(kept), tuple([number[x] for x in outputs])

    def joined(self, nodes: Sequence[Node]) -> list[int]:
        """Add the nodes of another graph, unless equal ones exist; return their numbers here."""
        numbers: list[int] = []
        for op, kind, operands, value in nodes:
            numbers.append(self.add(op, kind, tuple([numbers[x] for x in operands]), value).at)
        return numbers

    def value(self, x: Any) -> Value:
        """An operand of an expression as a value of this tape."""
        if isinstance(x, Value):
            if x.tape is not self:
                raise refused(
                    "a value of another function, or of another call, is used.",
                    "arguments, bound by a call: f(array)",
                )
            return x
        if isinstance(x, (bool, int, float, np.bool_, np.integer, np.floating)):
            return self.constant(x)
        if isinstance(x, Elements):
            x._whole()
        if isinstance(x, np.ndarray) and x.ndim == 0 and x.dtype.kind in "biuf":
            return self.constant(x[()])
        if hasattr(x, "shape"):
            raise captured(x)
        raise refused(
            f"an expression has an operand of type {type(x).__name__}.",
            "numbers, and expressions of the arguments of the function",
        )

    def converted(self, x: Value, kind: str, exactly: bool = False) -> Value:
        """A value converted to a wider kind; with `exactly`, to any kind."""
        node = self.nodes[x.at]
        if node.kind == kind:
            return x
        if exactly and kind == "bool":
            return self.apply("not_equal", x, 0)
        if exactly and node.kind == "float":
            raise refused("a float is cast to an integer.", "a comparison of it; or integers from the start")
        if node.op == "constant":
            return self.constant(float(node.value or 0) if kind == "float" else int(node.value or 0))
        return self.add(f"to_{kind}", kind, (x.at,))

    def apply(self, op: str, *operands: Any) -> Value:
        """Apply an operation to values, converted by its rule."""
        values = [self.value(x) for x in operands]
        kinds = [self.nodes[x.at].kind for x in values]
        rule = OPERATIONS[op].rule
        met = kinds[1:] if rule == "where" else kinds
        widest = "float" if "float" in met else "int" if "int" in met else "bool"
        of = _OF_RULE.get(rule) or widest
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
        return self.add(op, "bool" if rule == "compare" else of, tuple([x.at for x in values]))

    def _simplified(self, op: str, values: list[Value]) -> Value | None:
        """The result if it needs no node, else None; gradients have many ones and zeros."""
        if op == "where":
            return values[1] if values[1].at == values[2].at else None
        nodes = [self.nodes[x.at] for x in values]
        first, last = nodes[0], nodes[-1]
        if first.op != "constant" and last.op != "constant":
            return None
        if op == "add" and _is(last, 0):
            return values[0]
        if op == "add" and _is(first, 0):
            return values[1]
        if op in ("multiply", "true_divide") and _is(last, 1):
            return values[0]
        if op == "multiply" and _is(first, 1):
            return values[1]
        # why not 0 * x: it is NaN if x is infinite.
        if op == "negative" and _is(first, 0):
            return values[0]
        return None


def _is(node: Node, number: int) -> bool:
    return node.op == "constant" and node.value == number and not math.copysign(1, node.value or 0) < 0

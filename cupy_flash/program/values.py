"""What a function gets while it is traced: values without a number, which write down what is done."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import captured, captured_here, refused
from .operations import OPERATIONS, UFUNCS

if TYPE_CHECKING:
    from .graph import Argument
    from .tape import Tape

__all__ = ["Elements", "Value"]

_BRANCH = "np.where(condition, a, b) for if and the conditional expression; & | ~ for and, or, not"


def _kind_of(dtype: Any) -> str:
    """The kind of a value of a dtype of any library."""
    name = dtype.__name__ if isinstance(dtype, type) else str(dtype)
    for kind in ("float", "int", "bool"):
        if kind in name.lower():
            return kind
    raise refused(f"a value is cast to {dtype!r}.", "a dtype of floats, integers or booleans")


# What is made of the operations that there are, by the names of NumPy and of torch.
_MADE: dict[str, Callable[[Any], Any]] = {
    "square": lambda x: x * x,
    "exp2": lambda x: np.exp(x * math.log(2)),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
}
_CASTS = {"float": "float", "half": "float", "bfloat16": "float", "double": "float", "int": "int",
          "long": "int", "bool": "bool"}  # fmt: skip


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
        own = next((x for x in args if isinstance(x, Value)), None)
        name = function.__name__.strip("_")
        if own is None or name == "getitem":  # it stands among the indices of a tensor
            raise captured(args[0])
        # why: torch's silu hands on where it would write
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
        """That of a number."""
        return ()

    @property
    def dtype(self) -> str:
        """The kind of the value, for ``x.to(y.dtype)``; of how many bits is not known yet."""
        return self.tape.nodes[self.at].kind

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols that others look for
            raise AttributeError(name)
        return lambda *others, **options: self._call(name, (self, *others), options)  # as torch spells it

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
        # why looked for: NumPy asks so for an index, and does not say of which array.
        raise captured_here() or refused(
            "Python asks for the number of a value that has none while the function is traced.",
            "NumPy's functions for those of math; arrays as arguments, bound by a call: f(array)",
        )

    __int__ = __float__ = __complex__ = __index__ = __round__ = __trunc__ = __floor__ = __ceil__ = _no_number
    __iter__ = __len__ = __getitem__ = __array__ = _no_number


class Elements:
    """An argument with axes: what the function may do is take elements."""

    __slots__ = ("_argument", "_first", "_name", "_number", "_tape")
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self, tape: Tape, number: int, argument: Argument, name: str, first: tuple[int, ...] = ()
    ) -> None:
        self._tape, self._number, self._argument, self._name = tape, number, argument, name
        self._first = first  # of its axes that have an index

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

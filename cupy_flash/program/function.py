"""`Program`: a user's function, with a graph for each combination of argument kinds."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import InvalidArgumentsError
from .errors import CLIPPED, refused
from .graph import POSITIONS, Argument, Body
from .template import Template, check_text, only_in_python, refuse_gradients
from .trace import trace

__all__ = ["Bound", "Program", "widened", "with_mask"]


def widened(x: Any) -> Any:
    """An array with integers widened to int64, so that NumPy does not overflow in narrow ones."""
    kind = getattr(getattr(x, "dtype", None), "kind", "")
    return x.astype(np.int64) if kind in ("i", "u") and x.dtype.itemsize < 8 else x


def _parameters(function: Callable[..., Any]) -> tuple[list[str], bool]:
    """Names of the positional parameters, and whether there may be more."""
    if inspect.isfunction(function) and not hasattr(function, "__wrapped__"):  # 5x faster than signature()
        code = function.__code__
        return list(code.co_varnames[: code.co_argcount]), bool(code.co_flags & inspect.CO_VARARGS)
    every = inspect.signature(function).parameters.values()
    plain = [p.name for p in every if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return plain, any(p.kind is p.VAR_POSITIONAL for p in every)


def _found(module: str, name: str) -> Any:
    """An attribute of a module; for unpickling."""
    return getattr(importlib.import_module(module), name)


class Program:
    """A function of a score and its position, or of a position alone; traced when first used.

    Parameters
    ----------
    function : callable or str
        Called with s, b, h, i, j and its arguments; without s if it masks. A str is C text.
    masks : bool
        Whether it returns which pairs are kept, instead of a score.
    learned : sequence of str
        Names of the arguments that need a gradient.

    Attributes
    ----------
    function, masks
        As given.
    name : str
        Its name in messages.
    """

    __slots__ = (
        "__weakref__", "_bodies", "_learned", "_line", "_names", "_others", "_rest", "function", "masks",
        "name",
    )  # fmt: skip

    def __init__(self, function: Callable[..., Any] | str, masks: bool, learned: Sequence[str]) -> None:
        own = POSITIONS if masks else ("s", *POSITIONS)
        maker = "mask" if masks else "score"
        hint = f"cupy_flash.{maker}(lambda {', '.join(own)}: ...)"
        self.function, self.masks = function, masks
        self._names: tuple[str, ...] = ()
        self._learned: tuple[int, ...] = ()
        self._others: dict[tuple[int, ...], Program] = {}
        self._bodies: dict[tuple[Argument, ...], Body] = {}
        if isinstance(function, str):
            check_text(function, maker)
            if learned:
                raise refuse_gradients()
            self.name, self._line, self._rest = f"{maker} in C", ("?", 0), True
            return
        if not callable(function):
            raise InvalidArgumentsError(
                f"{maker}() is given a value of type {type(function).__name__}.", hint=hint
            )
        try:
            plain, self._rest = _parameters(function)
        except (TypeError, ValueError):
            raise InvalidArgumentsError(f"{function!r} has no readable signature.", hint=hint) from None
        self.name = getattr(function, "__name__", type(function).__name__)
        code = getattr(function, "__code__", None)
        self._line = (code.co_filename, code.co_firstlineno) if code else ("?", 0)
        if len(plain) < len(own) and not self._rest:
            taken = ", ".join(plain)
            raise InvalidArgumentsError(
                f"{self.name} takes ({taken}), not ({', '.join(own)}, ...).", hint=hint
            )
        self._names = tuple(plain[len(own) :])
        named = (learned,) if isinstance(learned, str) else tuple(learned)
        for name in named:
            if name not in self._names:
                known = ", ".join(self._names) or "none"
                raise InvalidArgumentsError(
                    f"learned names {name!r}; the arguments of {self.name} are {known}.",
                    hint="names of parameters behind j",
                )
        self._learned = tuple(map(self._names.index, named))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it by name if a decorator has replaced its function; else by its parts."""
        module, name = (getattr(self.function, x, "") for x in ("__module__", "__name__"))
        if name and getattr(sys.modules.get(module), name, None) is self:
            return _found, (module, name)
        return type(self), (self.function, self.masks, [self._names[n] for n in self._learned])

    @property
    def learned(self) -> tuple[int, ...]:
        """Numbers of the arguments that need a gradient."""
        return self._learned

    def learning(self, numbers: tuple[int, ...]) -> Program:
        """The same function with these arguments learned; the same object at each call."""
        made = self._others.get(numbers)
        if made is None:
            if numbers and isinstance(self.function, str):
                raise refuse_gradients()
            made = self._others[numbers] = Program(self.function, self.masks, ())
            made._learned = numbers
        return made

    def __call__(self, *arguments: Any) -> Bound:
        """Bind the arrays that the function takes after j, for ``score=`` or ``mask=`` of a call."""
        return Bound(self, arguments)

    def names(self, count: int) -> tuple[str, ...]:
        """The names of its first `count` arguments."""
        return (*self._names, *(f"argument {n}" for n in range(len(self._names), count)))[:count]

    def traced(self, arguments: Sequence[Argument]) -> Body:
        """The function compiled for arguments of these kinds: a graph, or C text."""
        key = tuple(arguments)
        body = self._bodies.get(key)
        if body is None:
            body = self._bodies[key] = self._traced(key)
        return body

    def _traced(self, key: tuple[Argument, ...]) -> Body:
        if isinstance(self.function, str):
            return Template(self.function, "mask" if self.masks else "score", key)
        self.check_count(len(key))
        learned, names = self._learned, self.names(len(key))
        for number in learned:
            if not key[number].differentiable:
                raise InvalidArgumentsError(
                    f"{names[number]} is learned and has dtype {key[number].dtype}.",
                    hint="a floating dtype, or learned without it",
                )
        return trace(self.function, self.masks, key, names, learned, self.name, self._line)

    def check_count(self, count: int) -> None:
        """Refuse too many or too few arguments after j."""
        wanted = len(self._names)
        if count < wanted or (count > wanted and not self._rest):
            missing = ", ".join(self._names) or "none"
            raise InvalidArgumentsError(
                f"{self.name} takes {wanted} argument{'s' * (wanted != 1)} behind j ({missing}); "
                f"{count} {'is' if count == 1 else 'are'} bound.",
                hint=f"f({missing if wanted else ''}), where f is what cupy_flash.score or mask made",
            )

    def in_python(self) -> Callable[..., Any]:
        """The Python function; one of C text has none, and is refused."""
        if isinstance(self.function, str):
            raise only_in_python("this asks NumPy")
        return self.function

    def on_arrays(self, s: Any, b: Any, h: Any, i: Any, j: Any, *arguments: Any) -> Any:
        """Call the function on arrays that broadcast, as the reference does."""
        function, arguments = self.in_python(), tuple(map(widened, arguments))
        try:
            if not self.masks:
                return function(s, b, h, i, j, *arguments)
            return np.where(function(b, h, i, j, *arguments), s, -np.inf)
        except IndexError as error:  # why: NumPy does not clamp indices
            raise refused(f"{self.name}: {error}.", CLIPPED, self._line) from None

    def __repr__(self) -> str:
        return f"cupy_flash.{'mask' if self.masks else 'score'}({self.name})"


class Bound(NamedTuple):
    """A function with the arrays that it takes after j: the result of calling a `Program`."""

    program: Program
    arguments: tuple[Any, ...]  # one array for each parameter after j


@functools.lru_cache(maxsize=256)
def with_mask(first: Program, count: int, mask: Program) -> Program:
    """Combine a score or mask function with `count` arguments and one more mask function, neither in C.

    why cached: each `Program` is traced once, so a new one at each call would be traced each time.
    """
    mine, other = first.in_python(), mask.in_python()

    def cut(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        of_each = arguments[:count], arguments[count:]
        for program, own in zip((first, mask), of_each, strict=True):
            program.check_count(len(own))
        return of_each

    def masked(s: Any, b: Any, h: Any, i: Any, j: Any, *arguments: Any) -> Any:
        of_mine, of_other = cut(arguments)
        return np.where(other(b, h, i, j, *of_other), mine(s, b, h, i, j, *of_mine), -np.inf)

    def mask_by_both(b: Any, h: Any, i: Any, j: Any, *arguments: Any) -> Any:
        of_mine, of_other = cut(arguments)
        return mine(b, h, i, j, *of_mine) & other(b, h, i, j, *of_other)

    made = Program(mask_by_both if first.masks else masked, first.masks, ())
    made.name = f"{first.name} and {mask.name}"
    made._learned = first.learned
    return made

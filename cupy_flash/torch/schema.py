"""Options as arguments of torch's operators, by their declaration.

why not torch's infer_schema: it reads annotations of one function, knows no Literal, and has no kind for a
window or an alignment.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, SupportsFloat, get_args, get_origin

from ..call.checks import flag
from ..call.options import declared, types
from ..call.spelling import spelled
from ..call.values import finite_number

__all__ = ["Argument", "arguments_of", "array_names", "schema"]

_KINDS = {bool: "bool", int: "SymInt", float: "float", SupportsFloat: "float", str: "str"}


class Argument(NamedTuple):
    """One argument of an operator.

    Attributes
    ----------
    kind : str
        As schemas spell it, such as "float?".
    name : str
    """

    kind: str
    name: str

    def of(self, value: Any) -> Any:
        """A value as torch takes it, NumPy's numbers as Python's; what is no flag or number is refused."""
        if value is None or self.kind.startswith(("SymInt", "str")):
            return value
        if self.kind.startswith("bool"):
            return flag(value, spelled(self.name))
        # why not all of them: in a program a number may be a symbol, of which only its type is asked.
        return float(value) if isinstance(value, (int, float)) else finite_number(value, spelled(self.name))


def arguments_of(options: Any, instead: dict[str, str]) -> tuple[Argument, ...]:
    """The arguments that options become which are no arrays.

    Parameters
    ----------
    options : class
        Of `call.options`.
    instead : dict of str to str
        Options that no kind of argument can hold, and the arguments that stand for them.
    """
    spelled = [
        instead[name] if name in instead else f"{_kind(hint)} {name}"
        for name, hint in types(options).items()
        if not declared(options)[name].array
    ]
    return tuple(Argument(*part.split()) for text in spelled for part in text.split(","))


def _kind(hint: Any) -> str:
    """A type as schemas spell it."""
    optional = [x for x in get_args(hint) if x is not type(None)] if get_origin(hint) is not Literal else []
    (one,) = optional or [hint]
    of = type(get_args(one)[0]) if get_origin(one) is Literal else one
    return _KINDS[of] + "?" * bool(optional)


def array_names(options: Any) -> tuple[str, ...]:
    """The options that are arrays, or the arrays that they consist of."""
    arrays = ((name, option) for name, option in declared(options).items() if option.array)
    return tuple(part for name, option in arrays for part in option.parts or (name,))


def schema(tensors: Iterable[str], arguments: Iterable[Argument]) -> str:
    """Arguments as an operator's definition lists them; tensors with their kinds."""
    return ", ".join([*tensors, *(f"{kind} {name}" for kind, name in arguments)])

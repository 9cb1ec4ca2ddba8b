"""Arguments of torch's operators, derived from the declarations of options.

why not torch's infer_schema: it reads the annotations of one function, does not support Literal, and has no
type for a window or an alignment.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, SupportsFloat, get_args, get_origin

from ..call.checks import flag
from ..call.options import declared, types
from ..call.public_names import public_name
from ..call.values import finite_number

__all__ = ["Argument", "arguments_of", "array_names", "schema"]

_KINDS = {bool: "bool", int: "SymInt", float: "float", SupportsFloat: "float", str: "str"}


class Argument(NamedTuple):
    """One argument of an operator."""

    kind: str  # its type in the schema, such as "float?"
    name: str  # its name in the schema

    def of(self, value: Any) -> Any:
        """The value converted for torch, NumPy's numbers to Python's; refuse other types of value."""
        if (value is None and self.kind != "bool") or self.kind.startswith(("SymInt", "str")):
            return value
        if self.kind.startswith("bool"):
            return flag(value, public_name(self.name))
        # why not finite_number for all: under torch.compile a number may be symbolic, without a value.
        return (
            float(value) if isinstance(value, (int, float)) else finite_number(value, public_name(self.name))
        )


def arguments_of(options: Any, instead: dict[str, str]) -> tuple[Argument, ...]:
    """The arguments of the operator for options that are not arrays.

    Parameters
    ----------
    options : class
        A class of `call.options`.
    instead : dict of str to str
        Arguments that replace options for which schemas have no type, by the name of the option.
    """
    texts = [
        instead[name] if name in instead else f"{_kind(hint)} {name}"
        for name, hint in types(options).items()
        if not declared(options)[name].array
    ]
    return tuple(Argument(*part.split()) for text in texts for part in text.split(","))


def _kind(hint: Any) -> str:
    """The type of a schema for a type annotation."""
    optional = [x for x in get_args(hint) if x is not type(None)] if get_origin(hint) is not Literal else []
    (one,) = optional or [hint]
    of = type(get_args(one)[0]) if get_origin(one) is Literal else one
    return _KINDS[of] + "?" * bool(optional)


def array_names(options: Any) -> tuple[str, ...]:
    """Names of the options that are arrays; for compound options, names of their parts."""
    arrays = ((name, option) for name, option in declared(options).items() if option.array)
    return tuple(part for name, option in arrays for part in option.parts or (name,))


def schema(tensors: Iterable[str], arguments: Iterable[Argument]) -> str:
    """The argument list of an operator's schema; `tensors` already have their types."""
    return ", ".join([*tensors, *(f"{kind} {name}" for kind, name in arguments)])

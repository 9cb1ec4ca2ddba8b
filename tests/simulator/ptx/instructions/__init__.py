"""What every PTX instruction means, as C++ that calls the runtime: a handler each, a module for a group.

A handler is found by the whole opcode; what no pattern matches is unknown, and so is a form of an instruction
that its handler does not name. The groups of the pattern are the handler's last arguments.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.simulator.ptx.reader import Instruction, Unknown

if TYPE_CHECKING:
    from tests.simulator.ptx.writer import Writer

__all__ = ["instruction", "write"]

_Handler = Callable[..., None]
_HANDLERS: list[tuple[re.Pattern[str], _Handler]] = []


def instruction(pattern: str) -> Callable[[_Handler], _Handler]:
    """Handle the opcodes that match; dots stand for themselves."""

    def register(handler: _Handler) -> _Handler:
        # why: a dot in an opcode is never "any character"
        _HANDLERS.append((re.compile(pattern.replace(".", r"\.")), handler))
        return handler

    return register


@functools.cache
def _handler(opcode: str) -> tuple[_Handler, tuple[Any, ...]]:
    found = [(handler, match.groups()) for p, handler in _HANDLERS if (match := p.fullmatch(opcode))]
    if len(found) != 1:
        names = ", ".join(handler.__name__ for handler, _ in found) or "no instruction of ours"
        raise Unknown(f"{opcode} is {names}")
    return found[0]


def write(writer: Writer, i: Instruction) -> None:
    """Write the C++ of an instruction.

    Raises
    ------
    Unknown
        There is no handler, or it does not know these operands.
    """
    handler, groups = _handler(i.opcode)
    try:
        handler(writer, i, *groups)
    except (ValueError, KeyError, IndexError) as error:
        raise Unknown(f"{i.opcode} {', '.join(i.operands)}: {error}") from error


for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)

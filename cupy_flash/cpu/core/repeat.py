"""Calls that differ from an earlier one only in addresses, repeated without Python's bytecode.

The builtin functions that `repeating` makes are those of kernels_cpu/repeat.cpp.
"""

from __future__ import annotations

import ctypes
import functools
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np

from ..threads import team
from .family import LONG_FLOPS, Core, workers
from .locate import Library, load
from .params import CALL

__all__ = ["PYTHON", "REPEAT", "Condition", "Way", "repeating"]

REPEAT = np.dtype([("view_of", "<u8"), ("entry", "<u8"), ("elements", "<i8", 3), ("call", CALL)], align=True)
# Functions of Python's stable ABI, by the fields of the struct Python.
PYTHON = {
    "retain": "Py_IncRef", "release": "Py_DecRef", "type_of": "PyObject_Type",
    "compare": "PyObject_RichCompareBool", "item": "PyTuple_GetItem", "length": "PyTuple_Size",
    "bytes": "PyBytes_AsString", "integer": "PyLong_AsLongLong", "call": "PyObject_CallObject",
    "call_with": "PyObject_CallFunctionObjArgs", "forget_error": "PyErr_Clear",
    "release_lock": "PyEval_SaveThread", "take_lock": "PyEval_RestoreThread",
}  # fmt: skip


class Condition(NamedTuple):
    """A function and its arguments, and the result that it must have."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    result: Hashable

    @classmethod
    def now(cls, function: Callable[..., Any], *arguments: Any) -> Condition:
        """The condition that a function has the same result as now."""
        return cls(function, arguments, function(*arguments))


class Way(NamedTuple):
    """How a call is compared with an earlier one, and its result allocated."""

    view_of: int  # address of a function: DLPack's description of a tensor
    elements: tuple[int, ...]  # of q, k and v
    type: type  # of q, k and v
    options: tuple[Hashable, ...]
    are_alike: Callable[..., bool]  # whether q, k and v are of the same kinds, at any addresses
    conditions: tuple[Condition, ...]
    allocate: Callable[..., Any]  # o
    layout: tuple[Any, ...]  # its arguments
    elements_before: Callable[..., int]  # the first one of a tensor, in its memory


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache
def _method(library: Library) -> int:
    """The address of the method in a library, which knows this Python's functions; 0 if it lacks some."""
    try:
        functions = [_address(getattr(ctypes.pythonapi, x)) for x in PYTHON.values()]
    except AttributeError:  # not CPython
        return 0
    entry = load(library).cupy_flash_repeat
    entry.argtypes, entry.restype = [ctypes.c_void_p], ctypes.c_void_p
    return int(entry((ctypes.c_void_p * (2 + len(functions)))(id(None), id(True), *functions)))


def repeating(core: Core, owner: str, way: Way) -> Callable[..., Any] | None:
    """A builtin function that repeats a call of the core; None if it cannot.

    Its arguments are q, k, v and the options; its result is o, or None for any other call.

    Parameters
    ----------
    core : Core
    owner : str
        The library of the arrays.
    way : Way
    """
    if len(core.entries) > 1 or core.function is not None or core.work > LONG_FLOPS:
        return None
    method = _method(core.library)
    if not method:
        return None
    many = workers(core.work, owner)
    filled = core.params.filled(defaultdict(int), 0, many, team(owner, many) if many > 1 else 0)
    repeat = np.zeros((), REPEAT)
    repeat["view_of"], repeat["elements"] = way.view_of, way.elements
    repeat["entry"] = _address(core.entries[0])
    repeat["call"] = np.frombuffer(filled, CALL)[0]
    new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
    made: Callable[..., Any] = new(("PyCFunction_NewEx", ctypes.pythonapi))(
        method, (repeat.tobytes(), *way[2:]), None
    )
    return made

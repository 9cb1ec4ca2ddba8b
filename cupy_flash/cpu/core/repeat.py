"""Calls that differ from an earlier one only in addresses, repeated without Python's bytecode.

The builtin functions that `repeating` makes are those of kernels_cpu/repeat.cpp.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np

from ...call.describe import MAX_SEQLEN
from ...call.given import Options
from ..threads import allowed, team
from .family import LONG_FLOPS, SMALL_FLOPS, Core
from .locate import Library, load
from .params import CALL, offset

__all__ = ["PYTHON", "REPEAT", "Added", "Condition", "Way", "keys_of", "repeating"]

REPEAT = np.dtype(
    [("view_of", "<u8"), ("entry", "<u8"), ("shapes", "<i8", (3, 4)), ("strides", "<i8", 4)]
    + [(name, "<i8") for name in ("least_keys", "most_keys", "most_keys_alone")]
    + [("added_shape", "<i8", 4), ("axes", "<i4", 4)]
    + [(name, "<i4") for name in ("offset_per_key", "rank", "added", "added_rank")]
    + [("added_place", "<i8"), ("call", CALL)],
    align=True,
)
# Functions of Python's stable ABI, by the fields of the struct Python.
PYTHON = {
    "retain": "Py_IncRef", "release": "Py_DecRef", "type_of": "PyObject_Type",
    "compare": "PyObject_RichCompareBool", "item": "PyTuple_GetItem", "length": "PyTuple_Size",
    "attribute": "PyObject_GetAttrString", "pointer": "PyCapsule_GetPointer",
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


class Added(NamedTuple):
    """A mask or bias of a call."""

    name: str
    at: int  # its place among the options
    shape: tuple[int, ...]
    dtype: Any

    @classmethod
    def of(cls, name: str, array: Any, given: tuple[Any, ...]) -> Added:
        """An array that is among the options of a call."""
        at = next(i for i, x in enumerate(given) if x is array)
        return cls(name, at, tuple(array.shape), array.dtype)


class Way(NamedTuple):
    """How a call is compared with an earlier one, and its result allocated."""

    view_of: int | None  # address of a function: DLPack's description of a tensor; None for NumPy arrays
    layout: str  # "bhsd" or "bshd", the axes of q, k and v; of fewer axes the last ones
    shapes: tuple[tuple[int, ...], ...]  # of q, k and v
    strides: tuple[int, ...]  # of q, in elements
    any_keys: bool  # whether calls with other numbers of keys are the same but for them
    from_end: bool  # whether the last query is at the last key, and not the first one where it was
    added: Added | None
    # Objects that it compares and calls, in this order:
    type: type  # of q, k and v
    dtype: Any  # their attribute, the same object for arrays of that dtype
    options: tuple[Hashable, ...]
    # Whether what their library adds to a shape and a dtype is as it was, such as a device; None if nothing.
    are_alike: Callable[..., bool] | None
    conditions: tuple[Condition, ...]
    allocate: Callable[..., Any]  # o
    result: tuple[Any, ...]  # its arguments
    # The first one of a tensor, in its memory; None where arrays always have theirs.
    elements_before: Callable[..., Any] | None

    @property
    def objects(self) -> tuple[Any, ...]:
        """The objects."""
        return (*self[self._fields.index("type") :], None if self.added is None else self.added.dtype)


def keys_of(options: Options) -> tuple[bool, bool]:
    """`Way.any_keys` and `Way.from_end` of a call with these options."""
    # why align: without it, lengths have to be equal
    any_keys = options.align is not None or not (options.causal or options.window)
    return any_keys, options.align == "bottom_right"


# Makes a builtin function of a method, its first argument, and no module.
_NEW = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)


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
    return int(entry((ctypes.c_void_p * (3 + len(functions)))(id(None), id(True), id(tuple), *functions)))


def repeating(core: Core, owner: str, way: Way) -> Callable[..., Any] | None:
    """A builtin function that repeats a call of the core; None if it cannot.

    Its arguments are q, k, v and the options, among them a mask or bias; its result is o, or None for any
    other call.

    Parameters
    ----------
    core : Core
    owner : str
        The library of the arrays.
    way : Way
    """
    if len(core.entries) > 1 or core.function is not None or core.work > LONG_FLOPS:
        return None
    if way.added is not None and not 1 <= len(way.added.shape) <= 4:
        return None
    method = _method(core.library)
    if not method:
        return None
    p, many = core.problem, allowed(owner)
    repeat = np.zeros((), REPEAT)
    own_view = load(core.library).cupy_flash_view_of_array
    repeat["view_of"] = _address(own_view) if way.view_of is None else way.view_of
    repeat["entry"] = _address(core.entries[0])
    rank = len(way.strides)
    axes = way.layout[-rank:] if rank > 2 else "sd"
    repeat["axes"] = [axes.find(axis) for axis in "bhsd"]
    repeat["rank"], repeat["strides"][:rank] = rank, way.strides
    repeat["shapes"][:, :rank] = way.shapes
    repeat["shapes"][1:, axes.index("s")] = -1  # compared with `least_keys` and `most_keys`
    if way.added is not None:
        shape = [*way.added.shape]
        if way.any_keys and shape[-1] == p.seqlen_k > 1:
            shape[-1] = -1
        repeat["added"], repeat["added_rank"] = 3 + way.added.at, len(shape)
        repeat["added_shape"][: len(shape)], repeat["added_place"] = shape, offset(way.added.name)
    repeat["most_keys_alone"] = math.ceil(SMALL_FLOPS * p.seqlen_k / core.work) - 1
    long = min(int(LONG_FLOPS * p.seqlen_k / core.work), MAX_SEQLEN)
    repeat["least_keys"], repeat["most_keys"] = (1, long) if way.any_keys else (p.seqlen_k, p.seqlen_k)
    repeat["offset_per_key"] = way.from_end
    filled = core.params.filled(defaultdict(int), 0, many, team(owner, many) if many > 1 else 0)
    repeat["call"] = np.frombuffer(filled, CALL)[0]
    made: Callable[..., Any] = _NEW(("PyCFunction_NewEx", ctypes.pythonapi))(
        method, (repeat.tobytes(), *way.objects), None
    )
    return made

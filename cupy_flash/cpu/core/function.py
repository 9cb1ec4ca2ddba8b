"""Score functions for the compiled core: the structs of kernels_cpu/function.h, filled for a problem."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ...call.arrays import ArrayView, numpy_address
from ...call.problem import Problem
from ...errors import InvalidArgumentsError
from ...program.errors import read_outside
from ...program.graph import Graph
from ...program.machine import MOST_REGISTERS, Machine, machine, only_masks
from ...program.ranges import too_large
from .locate import Library, load
from .params import offset

__all__ = ["ARRAY", "FUNCTION", "INSTRUCTION", "PROGRAM", "STORED", "FunctionCall", "refusals"]

INSTRUCTION = np.dtype(
    [("op", "<i4"), ("reach", "<i4"), ("to", "<i4"), ("from", "<i4", 5), ("array", "<i4"), ("unused", "<i4"),
     ("value", "<f8")]
)  # fmt: skip
PROGRAM = np.dtype([("code", "<u8"), ("count", "<i8", 3), ("registers", "<i8", 3)])
ARRAY = np.dtype(
    [("data", "<u8"), ("gradient", "<u8"), ("strides", "<i8", 4), ("gradient_strides", "<i8", 4),
     ("extents", "<i8", 4), ("sums", "<i8"), ("axes", "<i4"), ("type", "<i4"), ("gradient_type", "<i4"),
     ("far", "<i4")]
)  # fmt: skip
FUNCTION = np.dtype(
    [("run", "<u8"), ("value", PROGRAM), ("slope", PROGRAM), ("arrays", "<u8"), ("sums", "<u8"),
     ("sums_each", "<i8"), ("slices", "<i8"), ("array_count", "<i8"), ("reads", "<i4"),
     ("array", "<i4"), ("axis", "<i4"), ("index", "<i4"), ("hides", "<i4"), ("keeps", "<i4")]
)  # fmt: skip
_POINTER = struct.Struct("<Q")
_ARRAYS, _SUMS = offset("arrays", FUNCTION), offset("sums", FUNCTION)
_DATA, _GRADIENT = offset("data", ARRAY), offset("gradient", ARRAY)
# In the order of kernels_cpu/function.h.
STORED = ("float32", "float16", "bfloat16", "float64", "int32", "int8", "uint8", "bool")
_STRIP, _TILE_KEYS = 16, 144
_KEEPS = ("", "scores", "made")

# Jobs with gradient sums of their own: at most this number, and if more than one, at most this many bytes.
# why not one per thread: bits would depend on the number of threads.
_MOST_SLICES, _SUMS_BYTES = 64, 32 << 20


def refusals(graph: Graph, sizes: tuple[int, int, int, int]) -> list[str]:
    """Every reason why the core does not support a function for extents (batch, heads_q, queries, keys)."""
    reasons = []
    held = max(sum(part.registers) for part in machine(graph)) + 4
    if held > MOST_REGISTERS:
        reasons.append(f"holds {MOST_REGISTERS} values of a function at a time, and this one needs {held}")
    if large := too_large(graph, 32, sizes):
        reasons.append(f"has integers of 32 bits, and {large.expression} can be {large.value}")
    return reasons


def _reals(part: Machine, panel: int) -> int:
    of_lanes, of_keys, of_pairs = part.registers
    return panel * (2 * _TILE_KEYS + of_lanes + -(-_TILE_KEYS // panel) * of_keys + _STRIP * of_pairs)


def _code(part: Machine) -> np.ndarray[Any, Any]:
    code = np.zeros(max(1, len(part.code)), INSTRUCTION)
    for at, x in enumerate(part.code):
        code[at] = (x.op, x.reach, x.to, (*x.operands, 0, 0, 0, 0, 0)[:5], x.array, 0, x.value)
    return code


class FunctionCall(NamedTuple):
    """The score function of a problem; immutable and thread-safe."""

    graph: Graph
    template: bytes  # a Function struct followed by its FunctionArray structs, without addresses
    # Names of arguments and gradients, and the byte offsets of their addresses.
    places: tuple[tuple[str, int], ...]
    code: tuple[np.ndarray[Any, Any], ...]  # instructions that the Function points to
    learned: bool  # whether an argument is learned
    sums: int  # elements of the gradient sums, for all slices
    reals: int  # elements of scratch memory that a thread needs for a tile

    @classmethod
    def of(
        cls, problem: Problem, views: Mapping[str, ArrayView], library: Library, panel: int
    ) -> FunctionCall:
        """Fill the structs for the function of a problem; panel is the number of queries of a panel."""
        graph = problem.function
        assert isinstance(graph, Graph)
        whole, parts = np.zeros((), FUNCTION), machine(graph)
        entry = "double" if problem.accumulator == "float64" else "float"
        run = getattr(load(library), f"cupy_flash_function_{entry}")
        whole["run"] = ctypes.cast(run, ctypes.c_void_p).value
        code = tuple(_code(part) for part in parts)
        for name, part, text in zip(("value", "slope"), parts, code, strict=True):
            whole[name] = (text.ctypes.data, part.counts, part.registers)
        whole["reads"] = any(argument.rank for argument in graph.arguments)
        whole["hides"] = only_masks(graph)
        whole["keeps"] = _KEEPS.index(parts[0].keeps)
        whole["array_count"] = len(graph.arguments)
        arrays, places, sums = np.zeros(max(1, len(graph.arguments)), ARRAY), [], 0
        for number in range(len(graph.arguments)):
            view, x = views[f"bound[{number}]"].broadcast(), arrays[number]
            axes = len(view.shape)
            x["axes"], x["type"] = axes, STORED.index(view.dtype)
            x["extents"][:axes], x["strides"][:axes] = view.shape, view.strides
            span = sum(abs(step) * (n - 1) for n, step in zip(view.shape, view.strides, strict=True))
            x["far"] = max(span, math.prod(view.shape)) >= 2**31
            start = FUNCTION.itemsize + number * ARRAY.itemsize
            places.append((f"bound[{number}]", start + _DATA))
            gradient = views.get(f"dbound[{number}]")
            if gradient is not None:
                x["gradient_type"] = STORED.index(gradient.dtype)
                x["gradient_strides"][:axes], x["sums"] = gradient.strides, sums
                places.append((f"dbound[{number}]", start + _GRADIENT))
                sums += math.prod(view.shape)
        whole["sums_each"] = sums
        slices = max(1, min(_MOST_SLICES, _SUMS_BYTES // (8 * sums))) if sums else 0
        whole["slices"] = slices
        reals = max(_reals(part, panel) for part in parts)
        template = whole.tobytes() + arrays.tobytes()
        return cls(graph, template, tuple(places), code, sums > 0, sums * slices, reals)

    def filled(self, addresses: Mapping[str, int]) -> FilledFunction:
        """Fill in the addresses of one call."""
        structs = bytearray(self.template)
        for name, place in self.places:
            _POINTER.pack_into(structs, place, addresses[name])
        address = ctypes.addressof(ctypes.c_char.from_buffer(structs))
        _POINTER.pack_into(structs, _ARRAYS, address + FUNCTION.itemsize)
        sums = np.zeros(self.sums) if self.sums else None
        if sums is not None:
            _POINTER.pack_into(structs, _SUMS, numpy_address(sums))
        return FilledFunction(self.graph, structs, address, sums)


class FilledFunction(NamedTuple):
    """The structs of one call and their memory."""

    graph: Graph
    structs: bytearray
    address: int  # address of the Function struct
    sums: np.ndarray[Any, Any] | None  # gradient sums in float64; None without learned arguments

    def outside(self) -> InvalidArgumentsError:
        """The error for a call that read an argument out of range."""
        whole = np.frombuffer(self.structs, FUNCTION, 1)[0]
        argument, axis, index = (int(whole[name]) for name in ("array", "axis", "index"))
        x = np.frombuffer(self.structs, ARRAY, offset=FUNCTION.itemsize)[argument]
        return read_outside(
            self.graph.name, argument, axis, index, tuple(int(n) for n in x["extents"][: x["axes"]])
        )

"""A score function for the compiled core: the structs of kernels_cpu/function.h, filled for a problem."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ...call.arrays import ArrayView
from ...call.problem import Problem
from ...errors import InvalidArguments
from ...program.errors import read_outside
from ...program.graph import Graph
from ...program.machine import MOST_REGISTERS, Machine, hides, machine
from .locate import Library

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
     ("array", "<i4"), ("axis", "<i4"), ("index", "<i4"), ("hides", "<i4"), ("unused", "<i4")]
)  # fmt: skip
# In the order of kernels_cpu/function.h.
STORED = ("float32", "float16", "bfloat16", "float64", "int32", "int8", "uint8", "bool")
_STRIP, _TILE_KEYS = 16, 144

# Jobs that sum gradients of arguments for themselves: at most so many, in at most so many bytes, but for one.
# why not one for each thread: then bits would depend on threads.
_MOST_SLICES, _SUMS_BYTES = 64, 32 << 20


def refusals(graph: Graph) -> list[str]:
    """Every reason why the core cannot compute a function."""
    held = max(sum(part.registers) for part in machine(graph)) + 3
    if held > MOST_REGISTERS:
        return [f"holds {MOST_REGISTERS} values of a function at a time, and this one needs {held}"]
    return []


def _reals(part: Machine, panel: int) -> int:
    of_lanes, of_keys, of_pairs = part.registers
    return panel * (2 * _TILE_KEYS + of_lanes + -(-_TILE_KEYS // panel) * of_keys + _STRIP * of_pairs)


def _code(part: Machine) -> np.ndarray[Any, Any]:
    code = np.zeros(max(1, len(part.code)), INSTRUCTION)
    for at, x in enumerate(part.code):
        code[at] = (x.op, x.reach, x.to, (*x.operands, 0, 0, 0, 0, 0)[:5], x.array, 0, x.value)
    return code


class FunctionCall(NamedTuple):
    """The function of a problem. It never changes, and may be used in several threads.

    Attributes
    ----------
    graph : Graph
    whole, arrays : array
        A Function and its FunctionArrays, without addresses of arguments.
    code : tuple of array
        Which `whole` points to.
    learned : tuple of (int, int)
        Of each learned argument its number and its elements.
    reals : int
        That a thread needs besides.
    """

    graph: Graph
    whole: np.ndarray[Any, Any]
    arrays: np.ndarray[Any, Any]
    code: tuple[np.ndarray[Any, Any], ...]
    learned: tuple[tuple[int, int], ...]
    reals: int

    @classmethod
    def of(
        cls, problem: Problem, views: Mapping[str, ArrayView], library: Library, panel: int
    ) -> FunctionCall:
        """Write down the function of a problem, for panels of so many lanes."""
        graph = problem.function
        assert graph is not None
        whole, parts = np.zeros((), FUNCTION), machine(graph)
        entry = "double" if problem.accumulator == "float64" else "float"
        run = getattr(ctypes.CDLL(str(library.path)), f"cupy_flash_function_{entry}")
        whole["run"] = ctypes.cast(run, ctypes.c_void_p).value
        code = tuple(_code(part) for part in parts)
        for name, part, text in zip(("value", "slope"), parts, code, strict=True):
            whole[name] = (text.ctypes.data, part.counts, part.registers)
        whole["reads"] = any(argument.rank for argument in graph.arguments)
        whole["hides"] = hides(graph)
        whole["array_count"] = len(graph.arguments)
        arrays, learned, sums = np.zeros(max(1, len(graph.arguments)), ARRAY), [], 0
        for number in range(len(graph.arguments)):
            view, x = views[f"score_args[{number}]"].broadcast(), arrays[number]
            axes = len(view.shape)
            x["axes"], x["type"] = axes, STORED.index(view.dtype)
            x["extents"][:axes], x["strides"][:axes] = view.shape, view.strides
            places = sum(abs(step) * (n - 1) for n, step in zip(view.shape, view.strides, strict=True))
            x["far"] = max(places, math.prod(view.shape)) >= 2**31
            gradient = views.get(f"dscore_args[{number}]")
            if gradient is not None:
                x["gradient_type"] = STORED.index(gradient.dtype)
                x["gradient_strides"][:axes], x["sums"] = gradient.strides, sums
                learned.append((number, math.prod(view.shape)))
                sums += learned[-1][1]
        whole["sums_each"] = sums
        whole["slices"] = max(1, min(_MOST_SLICES, _SUMS_BYTES // (8 * sums))) if sums else 0
        reals = max(_reals(part, panel) for part in parts)
        return cls(graph, whole, arrays, code, tuple(learned), reals)

    def filled(self, addresses: Mapping[str, int]) -> FilledFunction:
        """The structs of one call."""
        whole, arrays = self.whole.copy(), self.arrays.copy()
        for number in range(int(whole["array_count"])):
            arrays[number]["data"] = addresses[f"score_args[{number}]"]
        for number, _ in self.learned:
            arrays[number]["gradient"] = addresses[f"dscore_args[{number}]"]
        sums = np.zeros(int(whole["sums_each"] * whole["slices"]))
        whole["arrays"] = arrays.ctypes.data
        whole["sums"] = sums.ctypes.data if len(sums) else 0
        return FilledFunction(self.graph, whole, arrays, sums)


class FilledFunction(NamedTuple):
    """A Function with its memory, as long as a call runs.

    Attributes
    ----------
    graph : Graph
    whole, arrays, sums : array
    """

    graph: Graph
    whole: np.ndarray[Any, Any]
    arrays: np.ndarray[Any, Any]
    sums: np.ndarray[Any, Any]

    def outside(self) -> InvalidArguments:
        """The error of a call that the interpreter has ended."""
        argument, axis, index = (int(self.whole[name]) for name in ("array", "axis", "index"))
        extents = self.arrays[argument]["extents"][: self.arrays[argument]["axes"]]
        return read_outside(self.graph.name, argument, axis, index, tuple(int(n) for n in extents))

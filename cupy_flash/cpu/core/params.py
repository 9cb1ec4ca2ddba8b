"""The params structs of kernels_cpu, and their contents for a problem."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...call.arrays import ArrayView
from ...call.codes import CODE_SCALES
from ...call.problem import Problem
from ..philox import threshold

__all__ = [
    "ABI_VERSION",
    "CALL",
    "NO_MEMORY",
    "OUTSIDE",
    "SECOND_ORDER",
    "STATISTICS",
    "STOP",
    "TENSORS",
    "Params",
    "offset",
]

ABI_VERSION = 7

TYPES = ("float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "int8", "bool", "codes")
STOP, NO_MEMORY, OUTSIDE = 1, 2, 3  # values of the field state

TENSOR = np.dtype(
    [("data", "<u8"), ("batch", "<i8"), ("head", "<i8"), ("row", "<i8"), ("column", "<i8"), ("type", "<i4"),
     ("unused", "<i4")]
)  # fmt: skip
SPANS = np.dtype(
    [("data", "<u8"), ("batch", "<i8"), ("head", "<i8"), ("row", "<i8"), ("column", "<i8"),
     ("intervals", "<i4"), ("by_query", "<i4")]
)  # fmt: skip
BLOCKS = np.dtype(
    [("table", "<u8"), ("batch", "<i8"), ("head", "<i8"), ("row", "<i8"), ("column", "<i8"), ("bits", "<u8"),
     ("log_queries", "<i4"), ("log_keys", "<i4")]
)  # fmt: skip
CODES = np.dtype([("scale", TENSOR), ("zero", TENSOR), ("group", "<i8")])
# Names of arrays in Python and in the struct, in the order of the struct.
TENSORS = {
    "q": "q", "k": "k", "v": "v", "o": "o", "do": "d_o", "dq": "dq", "dk": "dk", "dv": "dv", "lse": "lse",
    "dlse": "dlse", "mask": "mask", "bias": "bias", "dbias": "dbias", "alibi_slopes": "alibi_slopes",
    "sinks": "sinks", "dsinks": "dsinks", "q_scale": "q_scale", "k_scale": "k_scale", "v_scale": "v_scale",
    "new_k": "new_k", "new_v": "new_v", "rotary_cos": "rotary_cos", "rotary_sin": "rotary_sin",
}  # fmt: skip
POINTERS = {"cu_seqlens_q": "starts_q", "cu_seqlens_k": "starts_k", "seqused_k": "used_k",
            "cache_seqlens": "used_k", "block_table": "pages", "seqused_q": "used_q",
            "mask_starts": "starts_mask", "cu_seqlens_k_new": "starts_new", "rotary_seqlens": "rotary_starts",
            "cache_leftpad": "leftpad"}  # fmt: skip
# Fields of the scales and zeros of 4-bit codes.
_CODES = {"k_scale": ("k_codes", "scale"), "k_zero": ("k_codes", "zero"),
          "v_scale": ("v_codes", "scale"), "v_zero": ("v_codes", "zero"),
          "k_block_scale": ("k_codes", "scale"), "v_block_scale": ("v_codes", "scale")}  # fmt: skip
# Names that the core uses for arrays of a call over a cache.
_OF_CACHE = {"k": "new_k", "v": "new_v", "k_cache": "k", "v_cache": "v"}
CALL = np.dtype(
    [(name, TENSOR) for name in TENSORS.values()]
    + [("k_codes", CODES), ("v_codes", CODES)]
    + [("spans", SPANS), ("span_limits", "<u8"), ("lse_unit", "<u8"), ("blocks", BLOCKS)]
    + [("function", "<u8"), ("parallel", "<u8"), ("function_reals", "<i8"), ("dbias_shape", "<i8", 4)]
    + [(name, "<u8") for name in ("starts_q", "starts_k", "used_q", "starts_mask", "used_k")]
    + [("used_step", "<i8"), ("pages", "<u8")]
    + [(name, "<i8") for name in ("page_row", "page_column", "page", "slots", "appended")]
    + [(name, "<u8") for name in ("starts_new", "rotary_starts", "leftpad")]
    + [(name, "<i8") for name in ("batch", "heads_q", "heads_k", "seqlen_q", "seqlen_k", "head_dim",
                                  "head_dim_v", "offset", "left", "right", "rotary", "first_rotated",
                                  "positions")]
    + [("seed", "<u8"), ("scale", "<f8"), ("softcap", "<f8"), ("dropout_scale", "<f8"),
       ("dropout_threshold", "<u4")]
    + [(name, "<i4") for name in ("offset_from_end", "interleaved", "rotate_cache", "spans_at_end",
                                  "reproducible", "wide", "threads", "state")]
    + [(name, "<i8") for name in ("jobs", "done")],
    align=True,
)  # fmt: skip

DIRECTED = np.dtype([("first", TENSOR), ("step", "<i8")])
_DIRECTED = ("q_dot", "k_dot", "v_dot", "bias_dot", "sinks_dot", "o_dot", "lse_dot", "dq", "dk", "dv",
             "dbias", "dsinks")  # fmt: skip
SECOND_ORDER = np.dtype(
    [("call", CALL), *[(name, DIRECTED) for name in _DIRECTED], ("directions", "<i8")], align=True
)

_OF_STATISTICS = ("key_sum", "key_max", "entropy", "top_weights", "top_keys")
STATISTICS = np.dtype(
    [("call", CALL), *[(name, TENSOR) for name in _OF_STATISTICS], ("places", "<i8")], align=True
)

# Axes of an array by its rank, or by its name; the rotary tables are (position, feature).
_AXES = {
    4: ("batch", "head", "row", "column"),
    3: ("batch", "head", "row"),
    2: ("batch", "head"),
    1: ("head",),
}
_AXES_OF = {"rotary_cos": ("row", "column"), "rotary_sin": ("row", "column"), "ragged_mask": ("column",)}
_FAR = 1 << 40  # an unbounded side of the band, and a limit for offsets


class Params:
    """The params of a call without addresses and seed; immutable and thread-safe.

    Parameters
    ----------
    problem : Problem
    views : mapping of str to ArrayView
        Inputs and outputs; only shapes, strides and dtypes are used.
    directions : sequence of mapping of str to ArrayView
        In second order, else empty: tangents and results of each direction, at equal steps in memory.
    function_reals : int
        Elements of scratch memory of the score function for a tile; 0 without one.
    """

    __slots__ = ("_places", "_template")

    def __init__(
        self,
        problem: Problem,
        views: Mapping[str, ArrayView],
        directions: Sequence[Mapping[str, ArrayView]],
        function_reals: int,
    ) -> None:
        p, of_statistics = problem, problem.direction == "statistics"
        whole = np.zeros((), SECOND_ORDER if directions else STATISTICS if of_statistics else CALL)
        call = whole["call"] if directions or of_statistics else whole
        places = _describe_directions(whole, directions) if directions else {}
        if p.function is not None:
            places["function"], call["function_reals"] = offset("function"), function_reals
        for name, view in views.items():
            if name.startswith(("bound", "dbound")):
                continue
            if name in POINTERS:
                places[name] = offset(POINTERS[name])
                continue
            if name == "spans" and p.spans is not None:
                call["spans"] = (0, *view.broadcast().strides, p.spans.intervals, p.spans.by_query)
                places[name] = offset("spans")
                continue
            if name == "blocks" and p.blocks is not None:
                sizes = (p.blocks.queries.bit_length() - 1, p.blocks.keys.bit_length() - 1)
                call["blocks"] = (0, *view.broadcast().strides, 0, *sizes)
                places[name] = offset("blocks")
                continue
            if name == "block_bits":
                places[name] = offset("blocks") + offset("bits", BLOCKS)
                continue
            if p.cache is not None and p.cache.codes and name in CODE_SCALES[p.cache.codes.kind]:
                codes, part = _CODES[name]
                _describe(call[codes][part], view, _AXES[4])
                call[codes]["group"] = (p.head_dim if name[0] == "k" else p.head_dim_v) // view.shape[3]
                places[name] = offset(codes) + offset(part, CODES)
                continue
            if of_statistics and name in _OF_STATISTICS:
                _describe(whole[name], view, _AXES[len(view.shape)])
                places[name] = offset(name, STATISTICS)
                if name == "top_keys":
                    whole["places"] = view.shape[3]
                continue
            field = (
                "mask" if name == "ragged_mask" else TENSORS[_OF_CACHE.get(name, name) if p.cache else name]
            )
            _describe(call[field], view, _AXES_OF.get(name) or _AXES[len(view.shape)])
            places[name] = offset(field)
        if p.cache is not None:
            places.setdefault("cache_seqlens", offset("used_k"))  # one number for all, if there is no array
        used = views.get("seqused_k", views.get("cache_seqlens"))
        call["used_step"] = 0 if used is None else used.strides[0]
        if p.cache is not None:
            call["slots"] = views["k_cache"].shape[0]
            call["appended"], call["rotary"] = p.cache.appended, p.cache.rotary
            call["first_rotated"] = p.cache.first_rotated
            call["spans_at_end"] = p.spans is not None
            call["interleaved"], call["rotate_cache"] = p.cache.interleaved, p.cache.unrotated
            call["positions"] = views["rotary_cos"].shape[0] if p.cache.rotary else 0
            if "block_table" in views:
                call["page"] = p.cache.page or max(1, p.seqlen_k)
                call["page_row"], call["page_column"] = views["block_table"].strides
        for results in (views, *directions[:1]):
            if "dbias" in results:
                call["dbias_shape"] = results["dbias"].shape
        for name in (
            "batch", "heads_q", "heads_k", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "scale",
        ):  # fmt: skip
            call[name] = getattr(p, name)
        if p.packed:  # max_seqlen of the caller may exceed the rows
            call["seqlen_q"] = min(p.seqlen_q, views["q"].shape[2])
            if p.cache is None:
                call["seqlen_k"] = min(p.seqlen_k, views["k"].shape[2])
        call["offset"] = min(max(p.offset, -_FAR), _FAR)
        call["left"], call["right"] = (
            _FAR if side is None else min(side, _FAR) for side in (p.left, p.right)
        )
        call["offset_from_end"] = p.offset_from_end
        call["softcap"] = p.softcap or 0
        call["dropout_scale"] = 1 / (1 - p.dropout)
        call["dropout_threshold"] = threshold(p.dropout)
        call["wide"] = p.accumulator == "float64"
        call["reproducible"] = p.reproducible is not None
        self._places = tuple(places.items())
        self._template = whole.tobytes()

    def filled(self, addresses: Mapping[str, int], seed: int, threads: int, parallel: int = 0) -> bytearray:
        """The struct of one call; parallel is the address of GOMP_parallel, or 0 for the core's threads."""
        call = bytearray(self._template)
        for name, place in self._places:
            _POINTER.pack_into(call, place, addresses[name])
        _INT.pack_into(call, _THREADS, threads)
        if parallel:
            _POINTER.pack_into(call, _PARALLEL, parallel)
        if seed:
            _POINTER.pack_into(call, _SEED, seed)
        return call


def _describe(tensor: np.ndarray[Any, Any], view: ArrayView, axes: tuple[str, ...]) -> None:
    for axis, stride in zip(axes, view.broadcast().strides, strict=True):
        tensor[axis] = stride
    if view.dtype != "int32":  # top_keys of statistics are always int32
        tensor["type"] = TYPES.index("codes" if view.dtype == "uint8" else view.dtype)


def _describe_directions(
    whole: np.ndarray[Any, Any], directions: Sequence[Mapping[str, ArrayView]]
) -> dict[str, int]:
    """Describe the arrays of the directions; return the offsets of the addresses of the first one."""
    whole["directions"] = len(directions)
    second = directions[min(1, len(directions) - 1)]
    for name, view in directions[0].items():
        _describe(whole[name]["first"], view, _AXES[len(view.shape)])
        whole[name]["step"] = (second[name].pointer - view.pointer) // view.item_bytes
    return {name: offset(name, SECOND_ORDER) for name in directions[0]}


def offset(field: str, of: np.dtype[Any] = CALL) -> int:
    """Byte offset of a field in a struct."""
    assert of.fields is not None
    return int(of.fields[field][1])


_POINTER, _INT = struct.Struct("<Q"), struct.Struct("<i")
_THREADS, _PARALLEL = offset("threads"), offset("parallel")
_SEED = offset("seed")
STATE, JOBS, DONE = offset("state"), offset("jobs"), offset("done")

"""The params structs of kernels_cu/include/abi.cuh, field by field, and how a problem fills them."""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

from ..call.arrays import ArrayView
from ..call.codes import CODE_SCALES
from ..call.functions import argument_views
from ..call.problem import Problem
from ..plan.launch import Launch
from ..program.graph import MOST_ARGUMENTS

__all__ = ["LENGTH", "SEED", "Params"]

_POINTER = "<u8"
TENSOR = np.dtype([("data", _POINTER), ("batch", "<i8"), ("head", "<i8"), ("row", "<i8"), ("column", "<i8")])
ROWS = np.dtype([("data", _POINTER), ("batch", "<i8"), ("head", "<i8"), ("row", "<i8")])
SHAPE = np.dtype(
    [(name, "<i4") for name in ("batch", "heads_q", "heads_k", "seqlen_q", "seqlen_k", "head_dim",
                                "head_dim_v", "packed")]
    + [(name, _POINTER) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")]
)  # fmt: skip
SCORE = np.dtype(
    [
        ("scale", "<f8"),
        ("softcap", "<f8"),
        ("bias", TENSOR),
        ("alibi_slopes", _POINTER),
        ("alibi_batch", "<i8"),
        ("alibi_head", "<i8"),
        ("sinks", _POINTER),
        ("sinks_head", "<i8"),
        ("mask", TENSOR),
        ("spans", TENSOR),
        ("offset", "<i8"),
        ("left", "<i8"),
        ("right", "<i8"),
        ("offset_from_end", "<i4"),
        ("bias_type", "<i4"),
        ("span_intervals", "<i4"),
        ("spans_by_query", "<i4"),
        ("dropout_seed", "<u8"),
        ("dropout_scale", "<f8"),
        ("dropout_threshold", "<u4"),
        ("block_count", "<i4"),
        ("blocks", TENSOR),
        ("block_bits", _POINTER),
        ("block_log_queries", "<i4"),
        ("block_log_keys", "<i4"),
    ]
)
# One per array that a score function reads, after SCORE in kernels compiled for a score function.
FUNCTION_ARRAY = np.dtype([("data", _POINTER), ("stride", "<i8", 4), ("extent", "<i8", 4)])
FORWARD = np.dtype(
    [("q", TENSOR), ("k", TENSOR), ("v", TENSOR), ("o", TENSOR), ("lse", ROWS), ("shape", SHAPE),
     ("score", SCORE), ("next_tile", _POINTER), ("head_bits", "<i4"), ("chunks", "<i4"), ("chunk_o", TENSOR),
     ("chunk_rows", TENSOR), ("reach", TENSOR), ("float_o", "<i4"), ("reserved", "<i4")]
)  # fmt: skip
SCALES = np.dtype([("data", _POINTER), ("batch", "<i8"), ("head", "<i8")])
# Fields of float8 kernels after the params of a forward pass.
FP8 = np.dtype(
    [*((name, SCALES) for name in ("q_scale", "k_scale", "v_scale")), ("o_type", "<i4"), ("reserved", "<i4")]
)
# Fields of f16x3 kernels after the params of a pass: float32 as pairs of halves.
F16X3 = np.dtype([(f"{name}_halves", _POINTER) for name in ("q", "k", "v")])
F16X3_GRADIENTS = np.dtype([(f"{name}_halves", _POINTER) for name in ("q", "k", "v", "do")])
UNITS = np.dtype(
    [("scale", _POINTER), ("zero", _POINTER), ("slot", "<i8"), ("head", "<i8"), ("row", "<i8"),
     ("group_bits", "<i4"), ("reserved", "<i4")]
)  # fmt: skip
CACHE = np.dtype(
    [("k", TENSOR), ("v", TENSOR), ("table", _POINTER), ("table_batch", "<i8"), ("table_page", "<i8"),
     ("lengths", _POINTER), ("lengths_batch", "<i8"), ("length", "<i8")]
    + [(name + of, kind) for name in ("k_scale", "v_scale")
       for of, kind in (("", _POINTER), ("_batch", "<i8"), ("_head", "<i8"))]
    + [(name, _POINTER) for name in ("new_starts", "leftpad")]
    + [(name, "<i4") for name in ("slots", "page", "page_shift", "capacity", "appended", "reserved")]
    + [("k_units", UNITS), ("v_units", UNITS)]
)  # fmt: skip
ROTARY = np.dtype(
    [("cos", _POINTER), ("sin", _POINTER), ("first", _POINTER)]
    + [(name, "<i8") for name in ("cos_row", "cos_column", "sin_row", "sin_column")]
    + [
        (name, "<i4")
        for name in ("positions", "rotated", "interleaved", "table_type", "on_read", "first_rotated")
    ]
)
DECODE = np.dtype(
    [(name, TENSOR) for name in ("q", "rotated_q", "k_new", "v_new", "o")]
    + [("lse", ROWS), ("partial_o", _POINTER), ("partial_lse", _POINTER)]
    + [
        ("k_gathered", TENSOR),
        ("v_gathered", TENSOR),
        ("kept", _POINTER),
        ("used", _POINTER),
        ("starts", _POINTER),
    ]
    + [(name, "<i4") for name in ("splits", "reserved")]
    + [("cache", CACHE), ("rotary", ROTARY), ("shape", SHAPE), ("score", SCORE)]
)
BACKWARD = np.dtype(
    [(name, TENSOR) for name in ("q", "k", "v", "o", "d_o", "dq", "dk", "dv", "dbias")]
    + [(name, ROWS) for name in ("lse", "dlse", "delta")]
    + [(name, _POINTER) for name in ("dq_accumulator", "dq_turns", "next_block")]
    + [("dq_wave", "<i4"), ("float_gradients", "<i4"), ("dsinks", _POINTER), ("reach", TENSOR)]
    + [(name, "<i4") for name in ("bias_batch", "bias_heads", "bias_rows", "bias_columns")]
    + [("shape", SHAPE), ("score", SCORE)]
)  # fmt: skip

# Fields of the gradient of an argument of a score function.
ARGUMENT_GRADIENT = np.dtype(
    [("data", _POINTER), ("stride", "<i8", 4), ("first", "<i8"), ("count", "<i8"), ("type", "<i4"),
     ("reserved", "<i4")]
)  # fmt: skip
ARGUMENTS = np.dtype(
    [("call", BACKWARD), ("sums", _POINTER), ("elements", "<i8"), ("slices", "<i8"),
     ("gradients", ARGUMENT_GRADIENT, MOST_ARGUMENTS)]
)  # fmt: skip
SECOND_ORDER = np.dtype(
    [(name, TENSOR) for name in ("q_dot", "k_dot", "v_dot", "bias_dot", "o_dot")]
    + [(name, ROWS) for name in ("lse_dot", "delta_dot")]
    + [("sinks_dot", _POINTER), ("sinks_dot_head", "<i8")]
    + [("call", BACKWARD)]
)
STATISTICS = np.dtype([*((name, ROWS) for name in ("key_sum", "key_max", "entropy")), ("call", BACKWARD)])


OPEN = 1 << 62
_BIAS_TYPES = {"float16": 0, "bfloat16": 1, "float32": 2, "float64": 3}


def _format(dtype: np.dtype[Any], arrays: int = 0) -> str:
    """The struct module's format of a dtype, with `arrays` times `FUNCTION_ARRAY` after a score."""
    if dtype.subdtype is not None:
        kind, shape = dtype.subdtype
        return _format(kind) * int(shape[0])
    if dtype.fields is None:
        code: str = {"<u8": "Q", "<i8": "q", "<i4": "i", "<u4": "I", "<f8": "d"}[dtype.str]
        return code
    text = "".join(_format(field[0], arrays) for field in dtype.fields.values())
    return text + _format(FUNCTION_ARRAY) * arrays if dtype == SCORE else text


Views = Mapping[str, ArrayView]


class PerCall(str):
    """A field that changes from call to call: the address of the view of this name, `SEED` or `LENGTH`."""

    __slots__ = ()


SEED = PerCall("seed")
LENGTH = PerCall("length")  # keys of every sequence in a cache, if it is one integer for all; at least 0
# The value of a field of a struct.
Field: TypeAlias = int | float | PerCall
# Values by the names of fields; a field that is a struct has several.
Own: TypeAlias = dict[str, Field | tuple[Field, ...]]


def _strided(views: Views, name: str, rank: int) -> tuple[Field, ...]:
    view = views.get(name)
    return (0,) * (rank + 1) if view is None else (PerCall(name), *view.strides)


def _broadcast(views: Views, name: str, rank: int = 4) -> tuple[Field, ...]:
    """Address and strides of a mask, bias or scales; an axis of length 1 has stride 0."""
    view = views.get(name)
    return (0,) * (rank + 1) if view is None else (PerCall(name), *view.broadcast().strides)


def _address(views: Views, name: str) -> Field:
    return PerCall(name) if name in views else 0


def _filled(layout: np.dtype[Any], views: Views, own: Own) -> tuple[Field, ...]:
    """The values of a struct in order: those in `own`, and for other fields the view of the field's name."""
    assert layout.fields is not None
    assert own.keys() <= layout.fields.keys()
    fields: list[Field] = []
    for name, (kind, *_) in layout.fields.items():
        if name in own:
            value = own[name]
            fields += value if isinstance(value, tuple) else (value,)
        elif kind == TENSOR:
            fields += _strided(views, name, 4)
        elif kind == ROWS:
            fields += _strided(views, name, 3)
        elif kind == SCALES:
            fields += _broadcast(views, name, 2)
        else:
            assert kind == _POINTER or name == "reserved", f"nothing sets the field {name}"
            fields.append(_address(views, name))
    return tuple(fields)


def _shape(p: Problem, views: Views) -> tuple[Field, ...]:
    sizes = ("batch", "heads_q", "heads_k", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "packed")
    return _filled(SHAPE, views, {name: int(getattr(p, name)) for name in sizes})


def dropout_threshold(dropout: float) -> int:
    """The least Philox word with which an attention weight is kept."""
    return min(round(dropout * 2**32), 2**32 - 1)


def _score(p: Problem, views: Views) -> tuple[Field, ...]:
    slopes, sinks = views.get("alibi_slopes"), views.get("sinks")
    alibi_batch, alibi_head = (0, 0) if slopes is None else slopes.broadcast().strides
    own: Own = {name: _broadcast(views, name) for name in ("bias", "mask", "spans", "blocks")}
    own |= {
        "scale": p.scale,
        "softcap": p.softcap or 0.0,
        "alibi_batch": alibi_batch,
        "alibi_head": alibi_head,
        "sinks_head": 0 if sinks is None else sinks.strides[0],
        "offset": p.offset,
        "left": OPEN if p.left is None else p.left,
        "right": OPEN if p.right is None else p.right,
        "offset_from_end": int(p.offset_from_end),
        "bias_type": _BIAS_TYPES[p.bias_dtype or "float16"],
        "span_intervals": p.spans.intervals if p.spans else 0,
        "spans_by_query": int(p.spans.by_query) if p.spans else 0,
        "dropout_seed": SEED,
        "dropout_scale": 1.0 / (1.0 - p.dropout),
        "dropout_threshold": dropout_threshold(p.dropout),
        "block_count": p.blocks.partial if p.blocks else 0,
        "block_log_queries": p.blocks.queries.bit_length() - 1 if p.blocks else 0,
        "block_log_keys": p.blocks.keys.bit_length() - 1 if p.blocks else 0,
    }
    return (*_filled(SCORE, views, own), *_arguments(p, views))


def _arguments(p: Problem, views: Views) -> tuple[Field, ...]:
    """The arrays that a score function reads, padded to `_arrays`."""
    fields: list[Field] = []
    for name, view in argument_views(views).items():
        none = (0,) * (4 - len(view.shape))
        fields += [PerCall(name), *view.strides, *none, *view.shape, *none]
    return tuple(fields) if fields else (0,) * 9 * _arrays(p)


def _arrays(p: Problem) -> int:
    """Number of arrays in the struct of a score function, at least one."""
    return 0 if p.function is None else max(1, len(p.function.arguments))


def _unrounded(p: Problem) -> int:
    """Whether results of 16-bit inputs are left in the dtype of sums."""
    return int(p.unrounded and p.dtype in ("float16", "bfloat16"))


def _forward(p: Problem, views: Views, launch: Launch) -> tuple[Field, ...]:
    """`next_tile`, `chunk_o`, `chunk_rows` and `reach` are parts of the workspace."""
    parts = views.get("chunk_o")
    own: Own = {
        "shape": _shape(p, views),
        "score": _score(p, views),
        "head_bits": launch.head_bits,
        "chunks": 1 if parts is None or p.packed else parts.shape[0] // p.batch,
        "float_o": _unrounded(p),
    }
    return _filled(FORWARD, views, own)


def _fp8_forward(p: Problem, views: Views, launch: Launch) -> tuple[Field, ...]:
    scales = _filled(FP8, views, {"o_type": _BIAS_TYPES[p.result_dtype]})
    return (*_forward(p, views, launch), *scales)


def _f16x3_forward(p: Problem, views: Views, launch: Launch) -> tuple[Field, ...]:
    """The halves of q, k and v are parts of the workspace."""
    return (*_forward(p, views, launch), *_filled(F16X3, views, {}))


def _backward(p: Problem, views: Views, launch: Launch) -> tuple[Field, ...]:
    """`delta` to `next_block` and `reach` are parts of the workspace."""
    extents = p.bias or (0, 0, 0, 0)
    own: Own = {
        **dict(zip(("bias_batch", "bias_heads", "bias_rows", "bias_columns"), extents, strict=True)),
        "d_o": _strided(views, "do", 4),
        "dbias": _broadcast(views, "dbias"),
        "dq_wave": launch.wave,
        "float_gradients": _unrounded(p),
        "shape": _shape(p, views),
        "score": _score(p, views),
    }
    return _filled(BACKWARD, views, own)


def _f16x3_backward(p: Problem, views: Views, launch: Launch) -> tuple[Field, ...]:
    """The halves of q, k, v and dO are parts of the workspace."""
    return (*_backward(p, views, launch), *_filled(F16X3_GRADIENTS, views, {}))


def _of_arguments(p: Problem, views: Views, launch: Launch) -> tuple[Field, ...]:
    """`argument_sums` is a part of the workspace."""
    gradients: list[Field] = []
    first = 0
    for number in range(MOST_ARGUMENTS):
        view = views.get(f"dbound[{number}]")
        if view is None:
            gradients += (0,) * 9
            continue
        count = math.prod(view.shape)
        none = (0,) * (4 - len(view.shape))
        gradients += [PerCall(f"dbound[{number}]"), *view.strides, *none, first, count,
                      _BIAS_TYPES[view.dtype], 0]  # fmt: skip
        first += count
    slices = views["argument_sums"].shape[0]
    return (*_backward(p, views, launch), _address(views, "argument_sums"), first, slices, *gradients)


def _second_order(p: Problem, views: Views, launch: Launch) -> tuple[Field, ...]:
    """Fields of a derivative in one direction; `delta_dot` is a part of the workspace."""
    sinks = views.get("sinks_dot")
    own: Own = {
        "bias_dot": _broadcast(views, "bias_dot"),
        "sinks_dot_head": 0 if sinks is None else sinks.strides[0],
        "call": _backward(p, views, launch),
    }
    return _filled(SECOND_ORDER, views, own)


def _statistics(p: Problem, views: Views, launch: Launch) -> tuple[Field, ...]:
    return _filled(STATISTICS, views, {"call": _backward(p, views, launch)})


def _scale_arrays(p: Problem, views: Views, name: str) -> tuple[Field, ...]:
    """Scales and zeros of the 4-bit codes of k or v."""
    assert p.cache is not None
    if p.cache.codes is None:
        return (0,) * 7
    group = p.cache.codes.groups["kv".index(name)]
    names = [unit for unit in CODE_SCALES[p.cache.codes.kind] if unit[0] == name]
    zero = PerCall(names[1]) if len(names) == 2 else 0
    return (PerCall(names[0]), zero, *views[names[0]].strides[:3], group.bit_length() - 1, 0)


def _cache(p: Problem, views: Views) -> tuple[Field, ...]:
    assert p.cache is not None
    page = p.cache.page
    return (
        *_strided(views, "k_cache", 4), *_strided(views, "v_cache", 4),
        *_strided(views, "block_table", 2), *_strided(views, "cache_seqlens", 1),
        0 if "cache_seqlens" in views else LENGTH,
        *((0,) * 6 if p.cache.dtype == "int4"
          else (*_broadcast(views, "k_scale", 2), *_broadcast(views, "v_scale", 2))),
        _address(views, "cu_seqlens_k_new"), _address(views, "cache_leftpad"),
        views["k_cache"].shape[0], page, -1 if page & page - 1 else page.bit_length() - 1 if page else 31,
        p.seqlen_k, p.cache.appended, 0,
        *_scale_arrays(p, views, "k"), *_scale_arrays(p, views, "v"),
    )  # fmt: skip


def _rotary(p: Problem, views: Views) -> tuple[Field, ...]:
    assert p.cache is not None
    cos, sin = views.get("rotary_cos"), views.get("rotary_sin")
    if cos is None or sin is None:
        return (0,) * 13
    table_type, first = _BIAS_TYPES[cos.dtype], _address(views, "rotary_seqlens")
    return (PerCall("rotary_cos"), PerCall("rotary_sin"), first, *cos.strides, *sin.strides, cos.shape[0],
            p.cache.rotary, int(p.cache.interleaved), table_type, int(p.cache.unrotated),
            p.cache.first_rotated)  # fmt: skip


def _decode(p: Problem, views: Views, _launch: Launch) -> tuple[Field, ...]:
    """`rotated_q` and `partial_o` to `starts` are parts of the workspace; parts may be chunks of keys."""
    parts, sums = ("chunk_o", "chunk_rows") if "chunk_o" in views else ("partial_o", "partial_lse")
    own: Own = {
        "k_new": _strided(views, "k", 4),
        "v_new": _strided(views, "v", 4),
        "partial_o": _address(views, parts),
        "partial_lse": _address(views, sums),
        "splits": views[parts].shape[0] // (p.batch if parts == "chunk_o" else 1) if parts in views else 1,
        "cache": _cache(p, views),
        "rotary": _rotary(p, views),
        "shape": _shape(p, views),
        "score": _score(p, views),
    }
    return _filled(DECODE, views, own)


# Layout of each struct that a variant can name, and the function that fills it.
_STRUCTS_OF_CALLS: dict[
    str, tuple[tuple[np.dtype[Any], ...], Callable[[Problem, Views, Launch], tuple[Field, ...]]]
] = {
    "ForwardParams": ((FORWARD,), _forward),
    "BackwardParams": ((BACKWARD,), _backward),
    "ArgumentParams": ((ARGUMENTS,), _of_arguments),
    "SecondOrderParams": ((SECOND_ORDER,), _second_order),
    "StatisticsParams": ((STATISTICS,), _statistics),
    "DecodeParams": ((DECODE,), _decode),
    "Fp8ForwardParams": ((FORWARD, FP8), _fp8_forward),
    "F16x3ForwardParams": ((FORWARD, F16X3), _f16x3_forward),
    "F16x3BackwardParams": ((BACKWARD, F16X3_GRADIENTS), _f16x3_backward),
}


@lru_cache(maxsize=64)
def _codes(name: str, arrays: int) -> str:
    """The format of a struct with this many arrays of a score function."""
    return "".join(_format(dtype, arrays) for dtype in _STRUCTS_OF_CALLS[name][0])


class Params:
    """The params struct of all calls of one kind, complete except for the fields that change per call.

    why: only a few words change, and filling in all others takes longer than a launch.

    Parameters
    ----------
    name : str
        Name of the struct, as in abi.cuh.
    problem : Problem
    views : mapping of str to ArrayView
        Views by their names in abi.cuh; addresses are not used.
    launch : Launch
        The first launch of the plan that takes the struct.
    names : mapping of str to str, optional
        Names under which `of` gets addresses, for views of which they differ.
    """

    __slots__ = ("_per_call", "_words")

    def __init__(
        self,
        name: str,
        problem: Problem,
        views: Views,
        launch: Launch,
        names: Mapping[str, str] | None = None,
    ) -> None:
        codes, fill = _codes(name, _arrays(problem)), _STRUCTS_OF_CALLS[name][1]
        fields = fill(problem, views, launch)
        packed = struct.pack("<" + codes, *[0 if isinstance(field, PerCall) else field for field in fields])
        ends = accumulate(struct.calcsize("<" + code) for code in codes)
        per_call = [
            (end // 8 - 1, field) for end, field in zip(ends, fields, strict=True) if type(field) is PerCall
        ]
        # layout: a struct consists of 8-byte words, and every field that changes is one word.
        self._words = array("Q", packed)
        self._per_call = tuple((word, (names or {}).get(field, str(field))) for word, field in per_call)

    @property
    def nbytes(self) -> int:
        """Size of the struct in bytes."""
        return 8 * len(self._words)

    def of(self, numbers: Mapping[str, int]) -> bytes:
        """Return the struct of one call, given its addresses and other numbers by name."""
        words = self._words[:]
        for word, name in self._per_call:
            words[word] = numbers[name]
        return words.tobytes()

"""The params structs of kernels_cu/include/abi.cuh, field by field, and how a problem fills them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .arrays import ArrayView
from .problem import Problem

__all__ = ["ABI_VERSION", "BACKWARD", "FORWARD", "PACK", "STRUCTS", "pack_backward", "pack_forward"]

ABI_VERSION = 1

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
        ("offset", "<i8"),
        ("left", "<i8"),
        ("right", "<i8"),
        ("offset_from_end", "<i4"),
        ("bias_type", "<i4"),
        ("dropout_seed", "<u8"),
        ("dropout_scale", "<f8"),
        ("dropout_threshold", "<u4"),
        ("reserved", "<u4"),
    ]
)
FORWARD = np.dtype(
    [("q", TENSOR), ("k", TENSOR), ("v", TENSOR), ("o", TENSOR), ("lse", ROWS), ("shape", SHAPE),
     ("score", SCORE), ("next_tile", _POINTER), ("head_bits", "<i4"), ("reserved", "<i4")]
)  # fmt: skip
SCALES = np.dtype([("data", _POINTER), ("batch", "<i8"), ("head", "<i8")])
# What a kernel of 8-bit floats takes beside the params of a forward pass.
FP8 = np.dtype(
    [(name, SCALES) for name in ("q_scale", "k_scale", "v_scale")]
    + [(name, "<i4") for name in ("o_type", "reserved")]
)
CACHE = np.dtype(
    [("k", TENSOR), ("v", TENSOR), ("table", _POINTER), ("table_batch", "<i8"), ("table_page", "<i8"),
     ("lengths", _POINTER), ("lengths_batch", "<i8")]
    + [(name + of, kind) for name in ("k_scale", "v_scale")
       for of, kind in (("", _POINTER), ("_batch", "<i8"), ("_head", "<i8"))]
    + [(name, "<i4") for name in ("slots", "page_shift", "capacity", "appended")]
)  # fmt: skip
ROTARY = np.dtype(
    [("cos", _POINTER), ("sin", _POINTER)]
    + [(name, "<i8") for name in ("cos_row", "cos_column", "sin_row", "sin_column")]
    + [(name, "<i4") for name in ("positions", "rotated", "interleaved", "table_type")]
)
DECODE = np.dtype(
    [(name, TENSOR) for name in ("q", "turned_q", "k_new", "v_new", "o")]
    + [("lse", ROWS), ("partial_o", _POINTER), ("partial_lse", _POINTER)]
    + [("k_gathered", TENSOR), ("v_gathered", TENSOR), ("kept", _POINTER), ("used", _POINTER)]
    + [(name, "<i4") for name in ("splits", "reserved")]
    + [("cache", CACHE), ("rotary", ROTARY), ("shape", SHAPE), ("score", SCORE)]
)
BACKWARD = np.dtype(
    [(name, TENSOR) for name in ("q", "k", "v", "o", "d_o", "dq", "dk", "dv", "dbias")]
    + [(name, ROWS) for name in ("lse", "dlse", "delta")]
    + [(name, _POINTER) for name in ("dq_accumulator", "dq_turns", "next_block", "dsinks")]
    + [(name, "<i4") for name in ("bias_batch", "bias_heads", "bias_rows", "bias_columns")]
    + [("shape", SHAPE), ("score", SCORE)]
)  # fmt: skip


def _with_maps(call: np.dtype[Any], *names: str, beside: np.dtype[Any] | None = None) -> np.dtype[Any]:
    """A struct of tensor maps, 128 bytes each, the params of a call, and fields beside them."""
    fields: list[tuple[str, Any]] = [*((name, "V128") for name in names), ("call", call)]
    if beside is not None and beside.fields is not None:
        fields += [(name, field[0]) for name, field in beside.fields.items()]
    packed = np.dtype(fields)
    assert packed.fields is not None
    return np.dtype(
        {
            "names": list(packed.names or ()),
            "formats": [field[0] for field in packed.fields.values()],
            "offsets": [field[1] for field in packed.fields.values()],
            "itemsize": -(-packed.itemsize // 64) * 64,
        }
    )


STRUCTS = {
    "Tensor": TENSOR,
    "Rows": ROWS,
    "Shape": SHAPE,
    "Score": SCORE,
    "ForwardParams": FORWARD,
    "BackwardParams": BACKWARD,
    "Cache": CACHE,
    "Rotary": ROTARY,
    "DecodeParams": DECODE,
    "Scales": SCALES,
    "HopperForwardParams": _with_maps(FORWARD, "q_map", "k_map", "v_map", "o_map"),
    "HopperFp8ForwardParams": _with_maps(FORWARD, "q_map", "k_map", "v_map", "o_map", beside=FP8),
    "HopperBackwardParams": _with_maps(BACKWARD, "q_map", "k_map", "v_map", "do_map"),
}

OPEN = 1 << 62
_BIAS_TYPES = {"float16": 0, "bfloat16": 1, "float32": 2, "float64": 3}
_NO_TENSOR = (0, 0, 0, 0, 0)
_NO_ROWS = (0, 0, 0, 0)


def _format(dtype: np.dtype[Any]) -> str:
    """The struct module's format of a dtype.

    why: struct fills one in 3 us, NumPy field by field in 40.
    """
    if dtype.fields is None:
        return {"<u8": "Q", "<i8": "q", "<i4": "i", "<u4": "I", "<f8": "d"}[dtype.str]
    return "".join(_format(field[0]) for field in dtype.fields.values())


_PACK_FORWARD = struct.Struct("<" + _format(FORWARD))
_PACK_FP8 = struct.Struct("<" + _format(FP8))
_PACK_DECODE = struct.Struct("<" + _format(DECODE))
_PACK_BACKWARD = struct.Struct("<" + _format(BACKWARD))

Views = Mapping[str, ArrayView]


def _tensor(views: Views, name: str) -> tuple[int, ...]:
    view = views.get(name)
    return _NO_TENSOR if view is None else (view.pointer, *view.strides)


def _broadcast(views: Views, name: str) -> tuple[int, ...]:
    """A mask or bias: any axis of length 1 has stride 0."""
    view = views.get(name)
    return _NO_TENSOR if view is None else (view.pointer, *view.broadcast().strides)


def _rows(views: Views, name: str) -> tuple[int, ...]:
    view = views.get(name)
    return _NO_ROWS if view is None else (view.pointer, *view.strides)


def _pointer(views: Views, name: str) -> int:
    view = views.get(name)
    return 0 if view is None else view.pointer


def _shape(p: Problem, views: Views) -> tuple[int, ...]:
    return (
        p.batch, p.heads_q, p.heads_k, p.seqlen_q, p.seqlen_k, p.head_dim, p.head_dim_v, int(p.packed),
        _pointer(views, "cu_seqlens_q"), _pointer(views, "cu_seqlens_k"), _pointer(views, "seqused_k"),
    )  # fmt: skip


def dropout_threshold(dropout: float) -> int:
    """An attention weight is kept if its Philox word is at least this."""
    return min(round(dropout * 2**32), 2**32 - 1)


def _score(p: Problem, views: Views) -> tuple[float, ...]:
    slopes, sinks = views.get("alibi_slopes"), views.get("sinks")
    return (
        p.scale,
        p.softcap or 0.0,
        *_broadcast(views, "bias"),
        _pointer(views, "alibi_slopes"),
        *((0, 0) if slopes is None else slopes.broadcast().strides),
        _pointer(views, "sinks"),
        0 if sinks is None else sinks.strides[0],
        *_broadcast(views, "mask"),
        p.offset,
        OPEN if p.left is None else p.left,
        OPEN if p.right is None else p.right,
        int(p.offset_from_end),
        _BIAS_TYPES[p.bias_dtype or "float16"],
        p.seed,
        1.0 / (1.0 - p.dropout),
        dropout_threshold(p.dropout),
        0,
    )


def pack_forward(p: Problem, views: Views, head_bits: int = 0) -> bytes:
    """ForwardParams of these views (named as in abi.cuh)."""
    return _PACK_FORWARD.pack(
        *_tensor(views, "q"), *_tensor(views, "k"), *_tensor(views, "v"), *_tensor(views, "o"),
        *_rows(views, "lse"), *_shape(p, views), *_score(p, views),
        _pointer(views, "next_tile"), head_bits, 0,
    )  # fmt: skip


def pack_fp8_forward(p: Problem, views: Views, head_bits: int = 0) -> bytes:
    """What a forward pass over 8-bit floats takes behind its tensor maps."""
    scales = (number for name in ("q_scale", "k_scale", "v_scale") for number in _scales(views, name))
    return pack_forward(p, views, head_bits) + _PACK_FP8.pack(*scales, _BIAS_TYPES[p.result_dtype], 0)


def pack_backward(p: Problem, views: Views) -> bytes:
    """BackwardParams of these views; `delta` to `next_block` are parts of the workspace."""
    return _PACK_BACKWARD.pack(
        *_tensor(views, "q"), *_tensor(views, "k"), *_tensor(views, "v"), *_tensor(views, "o"),
        *_tensor(views, "do"), *_tensor(views, "dq"), *_tensor(views, "dk"), *_tensor(views, "dv"),
        *_broadcast(views, "dbias"),
        *_rows(views, "lse"), *_rows(views, "dlse"), *_rows(views, "delta"),
        *(_pointer(views, name) for name in ("dq_accumulator", "dq_turns", "next_block", "dsinks")),
        *(p.bias or (0, 0, 0, 0)),
        *_shape(p, views), *_score(p, views),
    )  # fmt: skip


def _scales(views: Views, name: str) -> tuple[int, ...]:
    view = views.get(name)
    return (0, 0, 0) if view is None else (view.pointer, *view.broadcast().strides)


def _cache(p: Problem, views: Views) -> tuple[int, ...]:
    assert p.cache is not None
    table, lengths = views.get("block_table"), views["cache_seqlens"]
    return (
        *_tensor(views, "k_cache"), *_tensor(views, "v_cache"),
        *((0, 0, 0) if table is None else (table.pointer, *table.strides)),
        lengths.pointer, *lengths.strides,
        *_scales(views, "k_scale"), *_scales(views, "v_scale"),
        views["k_cache"].shape[0],
        p.cache.page.bit_length() - 1 if p.cache.page else 31,
        p.seqlen_k,
        p.cache.appended,
    )  # fmt: skip


def _rotary(p: Problem, views: Views) -> tuple[int, ...]:
    assert p.cache is not None
    cos, sin = views.get("rotary_cos"), views.get("rotary_sin")
    if cos is None or sin is None:
        return (0,) * 10
    table_type = _BIAS_TYPES[cos.dtype]
    return (cos.pointer, sin.pointer, *cos.strides, *sin.strides, cos.shape[0], p.cache.rotary,
            int(p.cache.interleaved), table_type)  # fmt: skip


def pack_decode(p: Problem, views: Views) -> bytes:
    """DecodeParams of these views; `turned_q` and `partial_o` to `used` are parts of the workspace."""
    parts = views.get("partial_o")
    return _PACK_DECODE.pack(
        *_tensor(views, "q"), *_tensor(views, "turned_q"), *_tensor(views, "k"), *_tensor(views, "v"),
        *_tensor(views, "o"), *_rows(views, "lse"),
        _pointer(views, "partial_o"), _pointer(views, "partial_lse"),
        *_tensor(views, "k_gathered"), *_tensor(views, "v_gathered"),
        _pointer(views, "kept"), _pointer(views, "used"),
        1 if parts is None else parts.shape[0], 0,
        *_cache(p, views), *_rotary(p, views), *_shape(p, views), *_score(p, views),
    )  # fmt: skip


# How each struct that a variant can ask for is filled.
PACK: dict[str, Callable[..., bytes]] = {
    "ForwardParams": pack_forward,
    "BackwardParams": pack_backward,
    "DecodeParams": pack_decode,
    "Fp8ForwardParams": pack_fp8_forward,
}

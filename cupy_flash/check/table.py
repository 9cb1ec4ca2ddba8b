"""The cases of a check: COMMON for --quick, and OTHERS."""

from __future__ import annotations

from typing import Any

from ..call.operands import FLOAT8
from .cached import Cached
from .cases import Case, Dense, Packed
from .second_order import SecondOrder

__all__ = ["COMMON", "EVERY", "OTHERS"]

BFLOAT16 = "bfloat16"


def _dense(kind: str, dtype: str, dims: int | tuple[int, int], **options: Any) -> Dense:
    """Make a case; heads, lengths and arrays are its fields, the rest are options of the call."""
    own = {name: options.pop(name) for name in ("heads", "lengths", "arrays") if name in options}
    head_dims = dims if isinstance(dims, tuple) else (dims, dims)
    return Dense(kind=kind, dtype=dtype, head_dims=head_dims, options=options, **own)


def _forward(dtype: str, dims: int | tuple[int, int], **options: Any) -> Dense:
    return _dense("forward", dtype, dims, **options)


def _backward(dtype: str, dims: int | tuple[int, int], **options: Any) -> Dense:
    return _dense("backward", dtype, dims, **options)


WINDOW = {"window": (48, 0)}
CAUSAL = {"causal": True, "align": "top_left"}
APART: Any = ((70, 1, 0, 129), (70, 64, 5, 200))  # queries and keys of sequences

COMMON: tuple[Case, ...] = (
    _forward("float16", 64, causal=True),
    _forward("float16", 128),
    _forward(BFLOAT16, 128, causal=True, heads=(8, 1)),
    _forward("float32", 64, causal=True),
    _forward("float16", 128, **WINDOW),
    _forward("float16", 64, arrays=("bias",)),
    _forward("float16", 64, arrays=("mask",), softcap=5.0),
    _forward(BFLOAT16, 64, causal=True, arrays=("sinks",)),
    _forward("float32", 64, precision="tf32", causal=True),
    Packed(options=CAUSAL),
    _backward("float16", 64, causal=True),
    _backward(BFLOAT16, 128, causal=True),
    _backward("float32", 64),
    _backward("float16", 128, **WINDOW),
    Packed(kind="backward", dtype=BFLOAT16, options=CAUSAL),
    Cached(),
    Cached(dtype=BFLOAT16, page=16),
    Cached(dtype="float32", new=1, rotary=64),
    Cached(stored="int8"),
    Cached(stored="int4", dtype=BFLOAT16, page=16),
)

OTHERS: tuple[Case, ...] = (
    *(_forward("float16", dim, causal=True) for dim in (32, 96, 160, 192, 256)),
    _forward(BFLOAT16, 80),
    _forward(BFLOAT16, 256, heads=(4, 4)),
    _forward("float16", 512),
    _forward(BFLOAT16, 512, causal=True),
    _forward("float16", (192, 128), causal=True),
    _forward("float16", 33),
    _forward("float16", 64, lengths=(1, 333)),
    _forward("float16", 64, lengths=(77, 600), causal=True, align="bottom_right"),
    _forward("float16", 128, lengths=(520, 520), causal=True, heads=(2, 1)),
    _forward("float16", 64, layout="bshd", causal=True),
    _forward("float16", 64, dropout=0.2, seed=11),
    _forward(BFLOAT16, 64, arrays=("alibi_slopes",), causal=True),
    _forward(BFLOAT16, 64, arrays=("spans",)),
    _forward("float16", 64, arrays=("blocks",)),
    _forward("float16", 64, arrays=("score",), causal=True),
    _forward(BFLOAT16, 64, arrays=("mask function",)),
    _forward("float16", 64, reproducible="batch", causal=True),
    _forward("float32", 128),
    _forward("float32", 64, precision="ieee"),
    _forward("float64", 64, causal=True),
    _forward(FLOAT8, 128, causal=True),
    Packed(dtype=BFLOAT16, lengths=APART, options={"causal": True, "align": "bottom_right"}),
    _backward("float16", 32),
    _backward("float16", 96, causal=True),
    _backward(BFLOAT16, 256, causal=True),
    _backward("float16", 512),
    _backward("float16", 64, arrays=("bias", "sinks")),
    _backward(BFLOAT16, 64, arrays=("alibi_slopes",), softcap=5.0, causal=True),
    _backward("float16", 64, arrays=("spans",)),
    _backward("float16", 64, arrays=("score",)),
    _backward("float16", 64, dropout=0.2, seed=11),
    _backward("float16", 128, heads=(8, 1), lengths=(130, 300)),
    _backward("float64", 64, causal=True),
    Cached(dtype=BFLOAT16, heads=(8, 1), room=1200, lengths=(1111, 640)),
    Cached(page=64, queries=3, options={"causal": True}),
    Cached(page=16, new=2, rotary=128),
    Cached(head_dims=(64, 64), sinks=True, options={"softcap": 5.0}),
    Cached(head_dims=(256, 256), options={"window": (100, 0)}),
    Cached(queries=40, options={"causal": True}),
    Cached(prefix=90),
    Cached(dtype=BFLOAT16, prefix=64, queries=3, options={"causal": True}),
    Cached(stored="float8", dtype=BFLOAT16),
    Cached(head_dims=(512, 512), heads=(8, 1), page=64, queries=2, options={"causal": True}),
    Cached(stored="nvfp4"),
    Cached(dtype=BFLOAT16, heads=(16, 1), head_dims=(576, 512), latent=True, page=64),
    Cached(dtype=BFLOAT16, heads=(16, 1), head_dims=(576, 512), latent=True, page=64, new=1, rotary=64),
    SecondOrder("float16", {"causal": True}),
    SecondOrder("float32", {"softcap": 5.0}),
    SecondOrder("float64"),
)

EVERY: tuple[Case, ...] = (*COMMON, *OTHERS)

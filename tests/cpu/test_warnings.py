"""No public call on NumPy arrays warns of what numbers do: what overflows shows in the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_flash
from tests.cases import DTYPES, numpy_dtype
from tests.public import cached, dequantized, nvfp4_parts

pytestmark = [pytest.mark.usefixtures("cpu_family"), pytest.mark.filterwarnings("error")]

Arrays = dict[str, Any]
HEADS, ROWS, KEYS, DIM = 2, 5, 7, 32


def filled(kind: str, shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    """Finite numbers at the ends of a dtype, or ordinary ones."""
    limits, rng = ml_dtypes.finfo(dtype), np.random.default_rng(seed)
    top, tiny = float(limits.max), float(limits.smallest_subnormal)
    made = {
        "largest": lambda: np.full(shape, top),
        "lowest": lambda: np.full(shape, -top),
        "smallest": lambda: np.full(shape, tiny),
        "both ends": lambda: rng.choice([top, -top, tiny, 0, 1], shape),
        "ordinary": lambda: rng.standard_normal(shape),
    }
    return made[kind]().astype(dtype)


# Of q, k, and of everything else.
KINDS = [
    ("largest", "largest", "largest"),
    ("largest", "lowest", "both ends"),
    ("both ends", "both ends", "both ends"),
    ("smallest", "smallest", "smallest"),
    ("ordinary", "ordinary", "largest"),
    ("ordinary", "largest", "ordinary"),
    ("largest", "ordinary", "ordinary"),
]


def given(kinds: tuple[str, str, str], dtype: Any) -> Arrays:
    """What the calls below choose from; numbers beside the arrays are at the ends of theirs."""
    acc = np.float64 if dtype == np.float64 else np.float32
    q, k, other = kinds
    made = {
        "q": filled(q, (1, HEADS, ROWS, DIM), dtype, 0),
        "k": filled(k, (1, HEADS, KEYS, DIM), dtype, 1),
        "v": filled(other, (1, HEADS, KEYS, DIM), dtype, 2),
        "do": filled(other, (1, HEADS, ROWS, DIM), dtype, 3),
        "bias": filled(other, (HEADS, ROWS, KEYS), dtype, 4),
        "new": filled(other, (1, HEADS, 2, DIM), dtype, 5),
        "largest": np.full(HEADS, np.finfo(acc).max, acc),
        "smallest": np.full(HEADS, np.finfo(acc).smallest_subnormal, acc),
        "ends": np.array([np.finfo(acc).max, np.finfo(acc).min], acc),
    }
    angles = np.random.default_rng(6).standard_normal((2 * KEYS + 2, 4)).astype(np.float32)
    made |= {"turns": {"rotary_cos": np.cos(angles), "rotary_sin": np.sin(angles)}}
    return made


def every_pass(x: Arrays, **options: Any) -> None:
    """Forward, backward, tangents and second order."""
    q, k, v, do = (x[name] for name in ("q", "k", "v", "do"))
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
    for dlse in (None, np.full_like(lse, np.finfo(lse.dtype).max)):
        cupy_flash.attention_backward(do, q, k, v, o, lse, dlse=dlse, **options)
    dots = {"dq": q, "dk": k, "dv": v}
    cupy_flash.derivatives.jvp(q, k, v, o, lse, **dots, **options)
    cupy_flash.derivatives.value_and_jvp(q, k, v, **dots, **options)
    cupy_flash.derivatives.hvp(do, q, k, v, o, lse, **dots, **options)
    if "dropout" not in options and "score" not in options:
        cupy_flash.naive_attention(q, k, v, **options)


def packed(x: Arrays) -> None:
    q, k, v, do = (x[name][0].swapaxes(0, 1).copy() for name in ("q", "k", "v", "do"))
    cuts = np.array([0, 1, ROWS], np.int32), np.array([0, 0, KEYS], np.int32)
    o, lse = cupy_flash.attention_varlen(q, k, v, *cuts, return_lse=True)
    cupy_flash.attention_varlen_backward(do, q, k, v, o, lse, *cuts)


def over_cache(x: Arrays, codes: Any = None, scale: str = "", **options: Any) -> None:
    """Reading and appending, with queries that stand before the first key among them."""
    k, v = x["k"], x["v"]
    if codes is not None:
        k, v = (filled("both ends", k.shape, codes, 7) if codes != np.int8 else np.full(k.shape, 127, np.int8)
                for _ in "kv")  # fmt: skip
        options |= {"k_scale": x[scale], "v_scale": x[scale]}
    for new in ({}, {"k": x["new"], "v": x["new"]}):
        for length in (0, KEYS - 2):
            cached(x["q"], k.copy(), v.copy(), cache_seqlens=length, return_lse=True, **new, **options)


def merged(x: Arrays) -> None:
    o = x["q"]
    ends = (
        filled("both ends", o.shape[:-1], x["ends"].dtype, 8),
        filled("lowest", o.shape[:-1], x["ends"].dtype, 8),
    )
    for lse in ends:
        for other in (*ends, np.full_like(lse, -np.inf), np.full_like(lse, np.finfo(lse.dtype).max)):
            cupy_flash.merge(x["q"], lse, x["do"], other)


CALLS: dict[str, Callable[[Arrays], object]] = {
    "plain": every_pass,
    "causal": lambda x: every_pass(x, causal=True, align="bottom_right"),
    "softcap": lambda x: every_pass(x, softcap=5.0),
    "mask": lambda x: every_pass(x, mask=np.eye(ROWS, KEYS, dtype=bool)),
    "bias": lambda x: every_pass(x, bias=x["bias"]),
    "alibi": lambda x: every_pass(x, alibi_slopes=x["largest"], align="top_left"),
    "sinks": lambda x: every_pass(x, sinks=x["ends"]),
    "dropout": lambda x: every_pass(x, dropout=0.3, seed=1),
    "scale": lambda x: every_pass(x, scale=float(np.finfo(np.float32).max)),
    "score": lambda x: every_pass(x, score=cupy_flash.score(lambda s, b, h, i, j: 2 * s + (i - j))),
    "packed": packed,
    "cache": over_cache,
    "cache, rotated": lambda x: over_cache(x, **x["turns"]),
    "cache, rotated as it is read": lambda x: over_cache(x, rotate_cache=True, **x["turns"]),
    "cache, alibi": lambda x: over_cache(x, alibi_slopes=x["largest"]),
    "cache, sinks": lambda x: over_cache(x, sinks=x["ends"]),
    "prefix": lambda x: over_cache(x, prefix_k=x["k"], prefix_v=x["v"]),
    "prefix, rotated": lambda x: over_cache(x, prefix_k=x["k"], prefix_v=x["v"], **x["turns"]),
    "int8": lambda x: over_cache(x, np.int8, "largest"),
    "int8, small": lambda x: over_cache(x, np.int8, "smallest"),
    "float8": lambda x: over_cache(x, ml_dtypes.float8_e4m3fn, "largest"),
    "float8, small": lambda x: over_cache(x, ml_dtypes.float8_e4m3fn, "smallest"),
    "nvfp4": lambda x: dequantized(*nvfp4_parts(x["k"])),
    "merge": merged,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("call", CALLS)
def test_nothing_warns(call: str, dtype: str) -> None:
    for kinds in KINDS:
        CALLS[call](given(kinds, numpy_dtype(dtype)))


def test_values_of_8_bits_do_not_warn() -> None:
    x = filled("both ends", (1, HEADS, KEYS, DIM), ml_dtypes.float8_e4m3fn, 0)
    for end in (np.finfo(np.float32).max, np.finfo(np.float32).smallest_subnormal):
        scale = np.full((1, HEADS), end, np.float32)
        scaled = cupy_flash.QuantizedArray(x, scale)
        cupy_flash.attention(scaled, scaled, scaled, return_lse=True)

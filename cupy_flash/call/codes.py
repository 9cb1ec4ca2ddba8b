"""Codes of 4 bits, of two kinds: groups of features, each with what a code is worth.

layout: feature 2i is the lower half of byte i, 2i + 1 the upper one.

"int4"   a feature is scale * code + zero of its group of 32, 64 or 128
"nvfp4"  a feature is block_scale * E2M1, groups of 16: a code is a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4,
         6, a scale the bits of a float8_e4m3fn
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = [
    "BLOCK",
    "CODE_UNITS",
    "GROUPS",
    "kind_of_codes",
    "packed",
    "packed_e2m1",
    "packed_e4m3",
    "rounded_int8",
    "unpacked",
    "unpacked_e2m1",
]

# What codes of a cache of each kind stand for, by the names of the call.
CODE_UNITS: dict[str, tuple[str, ...]] = {
    "int4": ("k_scale", "k_zero", "v_scale", "v_zero"),
    "nvfp4": ("k_block_scale", "v_block_scale"),
}
BLOCK = 16  # features of a group of E2M1
# Features that share what a code is worth.
GROUPS = {"int4": (32, 64, 128), "nvfp4": (BLOCK,)}

HIGHEST = 15
# The largest zero of a dtype, and what a group may reach up to: twice as much is a float32 too.
LIMITS = {"float16": 65504.0, "float32": 2.0**126}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# float8_e4m3fn: subnormal numbers, then seven bits of exponent and mantissa but the last, which is none.
E4M3 = tuple(b / 512 if b < 8 else (1 + b % 8 / 8) * 2.0 ** (b // 8 - 7) for b in range(127))


def kind_of_codes(given: Mapping[str, Any]) -> str:
    """The kind of codes that a call speaks of, or ""."""
    for kind, name in (("int4", "zero"), ("nvfp4", "block_scale")):
        if given.get(f"k_{name}") is not None or given.get(f"v_{name}") is not None:
            return kind
    return ""


def _cast(xp: Any, x: Any, dtype: str) -> Any:
    return x.to(getattr(xp, dtype)) if xp.__name__ == "torch" else x.astype(dtype)


def _halves(xp: Any, codes: Any) -> Any:
    """Codes in the order of features."""
    return xp.stack([codes & HIGHEST, codes >> 4], -1)


def _bytes(xp: Any, codes: Any, shape: tuple[int, ...]) -> Any:
    """Two codes to a byte, of codes of features of a shape."""
    pairs = _cast(xp, codes, "uint8").reshape(*shape[:-1], -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4


def packed(xp: Any, x: Any, group: int, dtype: str, wide: str) -> tuple[Any, Any, Any]:
    """Codes (..., features / 2) of floats (..., features), and scale and zero (..., groups) in a dtype.

    The lowest of a group is code 0, the highest 15, by scale and zero as they are stored. A NaN is not
    counted, and is code 0; what is beyond the limit of the dtype, infinities too, is stored as the limit.

    Parameters
    ----------
    xp : module
        Of the arrays: numpy, cupy, torch or jax.numpy.
    x : array
    group : int
        Features of a group.
    dtype, wide : str
        Of scale and zero, and of what is computed.
    """
    rows = _cast(xp, x, wide).reshape(*x.shape[:-1], -1, group)
    limit = LIMITS[dtype]
    rows = xp.clip(rows, -limit, limit)
    numbers = rows == rows
    low, high = (
        best(xp.where(numbers, rows, xp.full_like(rows, other)), -1)
        for best, other in ((xp.amin, limit), (xp.amax, -limit))
    )
    low, high = (xp.where(low > high, xp.zeros_like(x), x) for x in (low, high))  # all are NaN
    zero, scale = _cast(xp, low, dtype), _cast(xp, (high - low) / HIGHEST, dtype)
    by, start = (_cast(xp, part, wide)[..., None] for part in (scale, zero))
    some = by > 0
    codes = xp.clip(xp.round((rows - start) / xp.where(some, by, xp.ones_like(by))), 0, HIGHEST)
    codes = xp.where(numbers, codes, xp.zeros_like(codes))
    return _bytes(xp, codes * some, x.shape), scale, zero


def unpacked(xp: Any, codes: Any, scale: Any, zero: Any, dtype: str) -> Any:
    """The floats that codes stand for."""
    pairs = _cast(xp, _halves(xp, codes), dtype).reshape(*scale.shape, -1)
    rows = pairs * _cast(xp, scale, dtype)[..., None] + _cast(xp, zero, dtype)[..., None]
    return rows.reshape(*codes.shape[:-1], -1)


def packed_e2m1(xp: Any, x: Any, wide: str) -> tuple[Any, Any]:
    """Codes (..., features / 2) of floats (..., features), and the bits of block scales (..., groups).

    The largest of a group is 6, by the scale as it is stored; the nearest code, ties to even mantissas. A NaN
    is not counted, and is stored as 0.
    """
    rows = _cast(xp, x, wide).reshape(*x.shape[:-1], -1, BLOCK)
    rows = xp.where(rows == rows, rows, xp.zeros_like(rows))
    sizes = abs(rows)
    scale = _nearest(xp, E4M3, xp.amax(sizes, -1) / E2M1[-1])
    by = _table(xp, E4M3, rows)[_index(xp, scale)][..., None]
    some = by > 0
    codes = _nearest(xp, E2M1, sizes / xp.where(some, by, xp.ones_like(by)))
    codes = (codes + 8 * (rows < 0)) * some
    return _bytes(xp, codes, x.shape), _cast(xp, scale, "uint8")


def packed_e4m3(xp: Any, x: Any) -> Any:
    """The bits of the nearest float8_e4m3fn of floats, ties to even; beyond 448 that."""
    return _cast(xp, _nearest(xp, E4M3, abs(x)) + 128 * xp.signbit(x), "uint8")


def rounded_int8(xp: Any, x: Any) -> Any:
    """The nearest integers from -127 to 127, ties to even."""
    return _cast(xp, xp.clip(xp.round(x), -127, 127), "int8")


def unpacked_e2m1(xp: Any, codes: Any, scale: Any, dtype: str) -> Any:
    """The floats that codes stand for, of bits of block scales."""
    like = _cast(xp, scale, dtype)
    signed = (*E2M1, *(-x for x in E2M1))
    values = _table(xp, signed, like)[_index(xp, _halves(xp, codes))].reshape(*scale.shape, -1)
    # why the last: NaN is a number of float8 too, and a sign is.
    scales = (*E4M3, np.nan, *(-x for x in E4M3), np.nan)
    rows = values * _table(xp, scales, like)[_index(xp, scale)][..., None]
    return rows.reshape(*codes.shape[:-1], -1)


def _index(xp: Any, x: Any) -> Any:
    return _cast(xp, x, "int64") if xp.__name__ == "torch" else x


def _table(xp: Any, numbers: Any, like: Any) -> Any:
    """Numbers as an array beside another one."""
    name = str(like.dtype).removeprefix("torch.")
    made = np.asarray(numbers, name)
    return xp.asarray(made, device=like.device) if xp.__name__ == "torch" else xp.asarray(made)


def _nearest(xp: Any, numbers: tuple[float, ...], x: Any) -> Any:
    """Which of rising numbers is nearest to each of x; of two the one with an even place."""
    name = str(x.dtype).removeprefix("torch.")
    rising = np.asarray(numbers, name)
    between = (rising[:-1] + rising[1:]) / 2
    # What lies half way belongs to the lower one; a little below it, to the upper one.
    between[1::2] = np.nextafter(between[1::2], np.zeros((), name))
    return xp.searchsorted(_table(xp, between, x), x)

"""The two formats of 4-bit codes, which share scales per group of features.

layout: byte i holds feature 2i in its lower 4 bits and feature 2i + 1 in its upper ones.

"int4"   groups of 32, 64 or 128 features: a feature is scale * code + zero
"nvfp4"  groups of 16 features: a feature is block_scale * E2M1; an E2M1 code is a sign and one of 0, 0.5,
         1, 1.5, 2, 3, 4, 6; a block scale is a float8_e4m3fn
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = [
    "BLOCK",
    "CODE_SCALES",
    "GROUPS",
    "kind_of_codes",
    "packed",
    "packed_e2m1",
    "packed_e4m3",
    "rounded_int8",
    "unpacked",
    "unpacked_e2m1",
]

# Names, below the public calls, of the scales and zeros of each format.
CODE_SCALES: dict[str, tuple[str, ...]] = {
    "int4": ("k_scale", "k_zero", "v_scale", "v_zero"),
    "nvfp4": ("k_block_scale", "v_block_scale"),
}
BLOCK = 16  # features per group of E2M1 codes
# Allowed group sizes, in features.
GROUPS = {"int4": (32, 64, 128), "nvfp4": (BLOCK,)}

HIGHEST = 15
# The largest magnitude that `packed` keeps, per dtype of scale and zero. why 2**126: the difference of two
# such values must fit float32.
LIMITS = {"float16": 65504.0, "float32": 2.0**126}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# float8_e4m3fn values from 0 up: subnormals, then exponent and mantissa; the last pattern of the 7 bits is
# NaN and left out.
E4M3 = tuple(b / 512 if b < 8 else (1 + b % 8 / 8) * 2.0 ** (b // 8 - 7) for b in range(127))


def kind_of_codes(given: Mapping[str, Any]) -> str:
    """The 4-bit format that a call uses, by its scales and zeros; "" for none."""
    for kind, name in (("int4", "zero"), ("nvfp4", "block_scale")):
        if given.get(f"k_{name}") is not None or given.get(f"v_{name}") is not None:
            return kind
    return ""


def _cast(xp: Any, x: Any, dtype: str) -> Any:
    return x.to(getattr(xp, dtype)) if xp.__name__ == "torch" else x.astype(dtype)


def _halves(xp: Any, codes: Any) -> Any:
    """Unpack bytes to one code per element, in the order of features."""
    return xp.stack([codes & HIGHEST, codes >> 4], -1)


def _bytes(xp: Any, codes: Any, shape: tuple[int, ...]) -> Any:
    """Pack two codes per byte, for features of this shape."""
    pairs = _cast(xp, codes, "uint8").reshape(*shape[:-1], shape[-1] // 2, 2)
    return pairs[..., 0] | pairs[..., 1] << 4


def packed(xp: Any, x: Any, group: int, dtype: str, wide: str) -> tuple[Any, Any, Any]:
    """Quantise floats (..., features) to int4: codes (..., features / 2), scale and zero (..., groups).

    The lowest value of a group gets code 0 and the highest 15, computed with scale and zero as rounded to
    their dtype. NaN is ignored and gets code 0; values beyond the limit of the dtype, such as infinities, are
    clamped to it.

    Parameters
    ----------
    xp : module
        Namespace of the arrays: numpy, cupy, torch or jax.numpy.
    x : array
    group : int
        Features per group.
    dtype, wide : str
        Dtype of scale and zero, and dtype of the computation.
    """
    rows = _cast(xp, x, wide).reshape(*x.shape[:-1], x.shape[-1] // group, group)
    limit = LIMITS[dtype]
    rows = xp.clip(rows, -limit, limit)
    numbers = rows == rows
    low, high = (
        best(xp.where(numbers, rows, xp.full_like(rows, other)), -1)
        for best, other in ((xp.amin, limit), (xp.amax, -limit))
    )
    low, high = (xp.where(low > high, xp.zeros_like(x), x) for x in (low, high))  # groups of NaN only
    zero, scale = _cast(xp, low, dtype), _cast(xp, (high - low) / HIGHEST, dtype)
    by, start = (_cast(xp, part, wide)[..., None] for part in (scale, zero))
    some = by > 0
    codes = xp.clip(xp.round((rows - start) / xp.where(some, by, xp.ones_like(by))), 0, HIGHEST)
    codes = xp.where(numbers, codes, xp.zeros_like(codes))
    return _bytes(xp, codes * some, x.shape), scale, zero


def unpacked(xp: Any, codes: Any, scale: Any, zero: Any, dtype: str) -> Any:
    """Dequantise int4 codes."""
    pairs = _in_groups(_cast(xp, _halves(xp, codes), dtype), codes, scale)
    rows = pairs * _cast(xp, scale, dtype)[..., None] + _cast(xp, zero, dtype)[..., None]
    return rows.reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def _in_groups(numbers: Any, codes: Any, scale: Any) -> Any:
    """One number per code as (..., groups, features of a group). why no -1: there may be no keys."""
    return numbers.reshape(*scale.shape, 2 * codes.shape[-1] // scale.shape[-1])


def packed_e2m1(xp: Any, x: Any, wide: str) -> tuple[Any, Any]:
    """Quantise floats (..., features) to NVFP4: codes (..., features / 2), block scale bits (..., groups).

    The scale maps the largest magnitude of a group to 6 and is rounded to float8_e4m3fn before the codes are
    computed. Codes round to nearest, ties to even mantissas. NaN is ignored and stored as 0.
    """
    rows = _cast(xp, x, wide).reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    rows = xp.where(rows == rows, rows, xp.zeros_like(rows))
    sizes = abs(rows)
    scale = _nearest(xp, E4M3, xp.amax(sizes, -1) / E2M1[-1])
    by = _table(xp, E4M3, rows)[_index(xp, scale)][..., None]
    some = by > 0
    codes = _nearest(xp, E2M1, sizes / xp.where(some, by, xp.ones_like(by)))
    codes = (codes + 8 * (rows < 0)) * some
    return _bytes(xp, codes, x.shape), _cast(xp, scale, "uint8")


def packed_e4m3(xp: Any, x: Any) -> Any:
    """The bits of floats rounded to float8_e4m3fn, ties to even, clamped to +-448; NaN is NaN."""
    sizes = xp.where(x == x, _nearest(xp, E4M3, abs(x)), len(E4M3))
    return _cast(xp, sizes + 128 * xp.signbit(x), "uint8")


def rounded_int8(xp: Any, x: Any) -> Any:
    """Floats rounded to int8, ties to even, clamped to +-127; NaN is 0."""
    numbers = xp.where(x == x, x, xp.zeros_like(x))
    return _cast(xp, xp.clip(xp.round(numbers), -127, 127), "int8")


def unpacked_e2m1(xp: Any, codes: Any, scale: Any, dtype: str) -> Any:
    """Dequantise E2M1 codes with the bits of their block scales."""
    like = _cast(xp, scale, dtype)
    signed = (*E2M1, *(-x for x in E2M1))
    values = _in_groups(_table(xp, signed, like)[_index(xp, _halves(xp, codes))], codes, scale)
    # why NaN and negative values: any 8 bits may be given as a block scale.
    scales = (*E4M3, np.nan, *(-x for x in E4M3), np.nan)
    rows = values * _table(xp, scales, like)[_index(xp, scale)][..., None]
    return rows.reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def _index(xp: Any, x: Any) -> Any:
    return _cast(xp, x, "int64") if xp.__name__ == "torch" else x


def _table(xp: Any, numbers: Any, like: Any) -> Any:
    """Numbers as an array with the dtype and device of `like`."""
    name = str(like.dtype).removeprefix("torch.")
    made = np.asarray(numbers, name)
    return xp.asarray(made, device=like.device) if xp.__name__ == "torch" else xp.asarray(made)


def _nearest(xp: Any, numbers: tuple[float, ...], x: Any) -> Any:
    """The index of the nearest of ascending numbers for each element of x, ties to even indices."""
    name = str(x.dtype).removeprefix("torch.")
    rising = np.asarray(numbers, name)
    between = (rising[:-1] + rising[1:]) / 2
    # why: searchsorted sends a midpoint to the lower index; nextafter below it selects the upper, even one.
    between[1::2] = np.nextafter(between[1::2], np.zeros((), name))
    return xp.searchsorted(_table(xp, between, x), x)

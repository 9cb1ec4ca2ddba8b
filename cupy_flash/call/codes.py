"""Codes of 4 bits: groups of features, each with what a code is worth and what code 0 is.

layout: feature 2i is the lower half of byte i, 2i + 1 the upper one; a feature is scale * code + zero.
"""

from __future__ import annotations

from typing import Any

__all__ = ["packed", "unpacked"]

HIGHEST = 15


def _cast(xp: Any, x: Any, dtype: str) -> Any:
    return x.to(getattr(xp, dtype)) if xp.__name__ == "torch" else x.astype(dtype)


def packed(xp: Any, x: Any, group: int, dtype: str, wide: str) -> tuple[Any, Any, Any]:
    """Codes (..., features / 2) of floats (..., features), and scale and zero (..., groups) in a dtype.

    The lowest of a group is code 0, the highest 15, by scale and zero as they are stored.

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
    low, high = xp.amin(rows, -1), xp.amax(rows, -1)
    zero, scale = _cast(xp, low, dtype), _cast(xp, (high - low) / HIGHEST, dtype)
    by, start = (_cast(xp, part, wide)[..., None] for part in (scale, zero))
    some = by > 0
    codes = xp.clip(xp.round((rows - start) / xp.where(some, by, xp.ones_like(by))), 0, HIGHEST)
    pairs = _cast(xp, codes * some, "uint8").reshape(*x.shape[:-1], -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4, scale, zero


def unpacked(xp: Any, codes: Any, scale: Any, zero: Any, dtype: str) -> Any:
    """The floats that codes stand for."""
    pairs = _cast(xp, xp.stack([codes & HIGHEST, codes >> 4], -1), dtype).reshape(*scale.shape, -1)
    rows = pairs * _cast(xp, scale, dtype)[..., None] + _cast(xp, zero, dtype)[..., None]
    return rows.reshape(*codes.shape[:-1], -1)

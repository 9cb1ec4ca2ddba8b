"""Caches of 4-bit codes: makers of what `cupy_flash.attention_with_kv_cache` takes with ``k_zero``.

A row of features is cut into groups of 32, 64 or 128, and each is stored by itself: codes from 0 to 15, and
for all of them a scale and a zero, so that a feature is ``scale * code + zero``. Code 0 is the lowest of the
group, 15 the highest. Two codes are a byte, feature 2i its lower half, feature 2i + 1 its upper one:

    codes        uint8               (..., head_dim / 2)
    scale, zero  float16 or float32  (..., head_dim / group)

why groups of features, not of keys: a new key is stored when it comes, in its place, in whatever page, and no
other changes; groups of keys would have to wait in full precision until one is complete. With float16 and
groups of 64 a feature takes 4.5 bits, beside 8 of int8.

Everything here works on NumPy, CuPy, torch and JAX arrays, and gives arrays of the same library.
"""

from __future__ import annotations

from typing import Any

from .call.adopt import adopt
from .call.codes import GROUPS, packed, unpacked
from .call.operands import FLOATS, table_of
from .errors import InvalidArguments
from .merge import namespace

__all__ = ["dequantize", "quantize"]


def quantize(x: Any, *, group: int = 64, dtype: str = "float16") -> tuple[Any, Any, Any]:
    """Store keys or values as codes of 4 bits.

    Parameters
    ----------
    x : array, shape (..., head_dim)
        float16, bfloat16, float32 or float64: a whole cache, say, or pages of one.
    group : {32, 64, 128}
        Features that share a scale and a zero; divides head_dim.
    dtype : {"float16", "float32"}
        Of scale and zero. float16 holds magnitudes up to 65504, float32 up to 2**126: what is larger,
        infinities too, is stored as that. A NaN is stored as the lowest number of its group (0 if all are
        NaN), and the others as they would be without it.

    Returns
    -------
    codes : array of uint8, shape (..., head_dim / 2)
    scale, zero : array, shape (..., head_dim / group)
        The k_cache, k_scale and k_zero of `cupy_flash.attention_with_kv_cache`, or those of values.

    Raises
    ------
    InvalidArguments
        No floats, or groups that do not divide them.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import int4
    >>> codes, scale, zero = int4.quantize(np.arange(32, dtype=np.float32), group=32)
    >>> codes.shape, scale.tolist(), zero.tolist()
    ((16,), [2.06640625], [0.0])
    """
    view = adopt(x, "x")
    if view.dtype not in FLOATS:
        raise InvalidArguments(f"x has dtype {view.dtype}.", table_of({"x": view}), hint="floats")
    if group not in GROUPS["int4"] or not view.shape or view.shape[-1] % group or not view.shape[-1]:
        raise InvalidArguments(
            f"group is {group!r}, for an x of shape {view.shape}.", hint="32, 64 or 128 that divides head_dim"
        )
    if dtype not in ("float16", "float32"):
        raise InvalidArguments(f"dtype is {dtype!r}.", hint='dtype="float16" or "float32"')
    wide = "float64" if view.dtype == "float64" else "float32"
    return packed(namespace(view.library), x, group, dtype, wide)


def dequantize(codes: Any, scale: Any, zero: Any, *, dtype: str = "float32") -> Any:
    """The features that codes of 4 bits stand for, in a dtype.

    Parameters
    ----------
    codes, scale, zero : array
        As `quantize` returns them.
    dtype : str
        Of the result, such as "float32".

    Returns
    -------
    array, shape (..., head_dim)
    """
    return unpacked(namespace(adopt(codes, "codes").library), codes, scale, zero, dtype)

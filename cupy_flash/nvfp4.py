"""NVFP4 caches: makers of what `cupy_flash.attention_with_kv_cache` takes with ``k_block_scale``.

A row of features is cut into groups of 16, and each is stored by itself: E2M1 codes, a sign and one of 0,
0.5, 1, 1.5, 2, 3, 4 and 6, and for all of them a float8_e4m3fn scale. Two codes are a byte, feature 2i its
lower half, feature 2i + 1 its upper one:

    codes        uint8                             (..., head_dim / 2)
    block_scale  bits of float8_e4m3fn, as uint8   (..., head_dim / 16)

The third part of the format, a float32 number for a tensor, is ``k_scale`` of the call, for each key head if
you like: a feature is ``k_scale * block_scale * code``. A feature takes 4.5 bits. Scales lie as features do;
where other libraries interleave those of values by fours of keys, undo that first.

Everything here works on NumPy, CuPy, torch and JAX arrays, and gives arrays of the same library.
"""

from __future__ import annotations

from typing import Any

from .call.adopt import adopt
from .call.codes import BLOCK, packed_e2m1, unpacked_e2m1
from .call.operands import FLOATS, table_of
from .errors import InvalidArguments
from .merge import namespace

__all__ = ["dequantize", "quantize"]


def quantize(x: Any) -> tuple[Any, Any]:
    """Store keys or values as NVFP4.

    Parameters
    ----------
    x : array, shape (..., head_dim)
        float16, bfloat16, float32 or float64, divided by k_scale or v_scale if there is one: a whole cache,
        say, or pages of one. 2688 is the largest number that can be held, and what is larger, infinities too,
        is stored as that; below 0.09, as the largest of a group, scales have fewer bits. E2M1 has no NaN:
        a NaN is stored as 0, and the others of its group as they would be without it.

    Returns
    -------
    codes : array of uint8, shape (..., head_dim / 2)
    block_scale : array of uint8, shape (..., head_dim / 16)
        The k_cache and k_block_scale of `cupy_flash.attention_with_kv_cache`, or those of values.

    Raises
    ------
    InvalidArguments
        No floats, or features that are no groups of 16.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import nvfp4
    >>> codes, block_scale = nvfp4.quantize(np.arange(-8, 8, dtype=np.float32))
    >>> nvfp4.dequantize(codes, block_scale)[:5].tolist()
    [-8.25, -8.25, -5.5, -5.5, -4.125]
    """
    view = adopt(x, "x")
    if view.dtype not in FLOATS:
        raise InvalidArguments(f"x has dtype {view.dtype}.", table_of({"x": view}), hint="floats")
    if not view.shape or view.shape[-1] % BLOCK or not view.shape[-1]:
        raise InvalidArguments(f"x has shape {view.shape}.", hint="a head_dim that is a multiple of 16")
    wide = "float64" if view.dtype == "float64" else "float32"
    return packed_e2m1(namespace(view.library), x, wide)


def dequantize(codes: Any, block_scale: Any, *, dtype: str = "float32") -> Any:
    """The features that NVFP4 stands for, in a dtype.

    Parameters
    ----------
    codes, block_scale : array
        As `quantize` returns them.
    dtype : str
        Of the result: "float16", "float32" or "float64", which hold each of them.

    Returns
    -------
    array, shape (..., head_dim)
    """
    return unpacked_e2m1(namespace(adopt(codes, "codes").library), codes, block_scale, dtype)

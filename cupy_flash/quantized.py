"""KV caches in 8 and 4 bits: functions that make a `cupy_flash.QuantizedCache`.

format   a feature is                          codes                       bits per feature
int8     scale * code                          int8                        8
float8   scale * code                          bits of float8_e4m3fn       8
int4     scale * code + zero, groups of 64     two to a byte, 0 to 15      4.5
nvfp4    scale * block_scale * code, of 16     two to a byte, E2M1         4.5

int8 and float8 have a scale per KV head. int4 cuts a row of features into groups of 32, 64 or 128; code 0 is
the lowest of a group, 15 the highest. NVFP4 cuts it into groups of 16; a code is a sign and one of 0, 0.5, 1,
1.5, 2, 3, 4 and 6, a block scale a float8_e4m3fn. Feature 2i is the lower half of its byte, feature 2i + 1
the upper one.

why groups of features, not of keys: a new key is stored at once and changes no other key; with groups of
keys, new keys would have to wait in full precision until a group is complete.
All functions take NumPy, CuPy, torch and JAX arrays, and return arrays of the same library.
"""

from __future__ import annotations

from typing import Any

from .call.adopt import adopt
from .call.arrays import accumulator_of
from .call.checks import one_of
from .call.codes import (
    BLOCK,
    GROUPS,
    LIMITS,
    packed,
    packed_e2m1,
    packed_e4m3,
    rounded_int8,
    unpacked,
    unpacked_e2m1,
)
from .call.compound import QuantizedCache
from .call.head_scale import in_dtype
from .call.operands import FLOATS, table_of
from .call.outputs import namespace
from .errors import InvalidArgumentsError

__all__ = ["dequantize", "float8", "int4", "int8", "nvfp4"]

_HEADS = {"bhsd": 1, "bshd": 2}
_RESULTS = ("float16", "float32", "float64")


def _floats(x: Any) -> tuple[Any, Any, str]:
    """The view of an array of floats, its array namespace, and the dtype to compute in."""
    view = adopt(x, "x")
    if view.dtype not in FLOATS:
        raise InvalidArgumentsError(f"x has dtype {view.dtype}.", table_of({"x": view}), hint="floats")
    return view, namespace(view.library), accumulator_of(view.dtype)


def _by_head(x: Any, layout: str, largest: float) -> tuple[Any, Any, Any]:
    """The namespace of an array, the array / scale per KV head, and the scale."""
    view, xp, wide = _floats(x)
    if not one_of(layout, _HEADS) or len(view.shape) != 4:
        raise InvalidArgumentsError(
            f"x has shape {view.shape} and layout is {layout!r}.",
            hint='(batch, heads_k, capacity, head_dim) with layout="bhsd", (batch, capacity, heads_k, '
            'head_dim) with "bshd", or pages of them',
        )
    axis = _HEADS[layout]
    limit = LIMITS["float32"]
    rows = xp.clip(in_dtype(x, getattr(xp, wide)), -limit, limit)
    sizes = xp.where(rows == rows, abs(rows), xp.zeros_like(rows))  # NaN has none
    most = in_dtype(xp.amax(sizes, tuple(n for n in range(4) if n != axis)) / largest, xp.float32)
    scale = xp.where(most > 0, most, xp.ones_like(most))
    each = scale.reshape((1, -1, 1, 1) if axis == 1 else (1, 1, -1, 1))
    return xp, rows / each, scale


def int8(x: Any, *, layout: str = "bhsd") -> QuantizedCache:
    """Store keys or values as int8 with a scale per KV head.

    Parameters
    ----------
    x : array, shape (batch, heads_k, capacity, head_dim)
        float16, bfloat16, float32 or float64: for example a cache, or its pages. Magnitudes above 2**126,
        infinities included, are clamped. A NaN is stored as 0 (by `float8` as NaN), and the others of its
        head as if it were absent.
    layout : {"bhsd", "bshd"}
        Layout of x.

    Returns
    -------
    QuantizedCache
        codes int8 of the shape of x, scale float32 (heads_k,): the largest magnitude of a head / 127.

    Raises
    ------
    InvalidArgumentsError
        Not floats, or another rank.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import quantized
    >>> quantized.int8(np.float32([-1, 0.5, 1]).reshape(1, 1, 1, 3)).codes.tolist()
    [[[[-127, 64, 127]]]]
    """
    xp, rows, scale = _by_head(x, layout, 127.0)
    return QuantizedCache(rounded_int8(xp, rows), scale)


def float8(x: Any, *, layout: str = "bhsd") -> QuantizedCache:
    """Store keys or values as float8_e4m3fn with a scale per KV head.

    Parameters
    ----------
    x, layout
        As in `int8`.

    Returns
    -------
    QuantizedCache
        codes uint8, the bits of float8_e4m3fn, of the shape of x; scale float32 (heads_k,): the largest
        magnitude of a head / 448.

    Raises
    ------
    InvalidArgumentsError
        As in `int8`.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import quantized
    >>> made = quantized.float8(np.float32([-448, 1, 0]).reshape(1, 1, 1, 3))
    >>> made.codes.tolist(), made.scale.tolist()
    ([[[[254, 56, 0]]]], [1.0])
    """
    xp, rows, scale = _by_head(x, layout, 448.0)
    return QuantizedCache(packed_e4m3(xp, rows), scale)


def int4(x: Any, *, group: int = 64, dtype: str = "float16") -> QuantizedCache:
    """Store keys or values as 4-bit codes.

    Parameters
    ----------
    x : array, shape (..., head_dim)
        float16, bfloat16, float32 or float64: for example a cache, or its pages.
    group : {32, 64, 128}
        Features that share a scale and a zero; divides head_dim.
    dtype : {"float16", "float32"}
        Dtype of scale and zero. float16 holds magnitudes up to 65504, float32 up to 2**126; larger ones,
        infinities included, are clamped. A NaN is stored as the lowest number of its group (0 if all are
        NaN), and the others as if it were absent.

    Returns
    -------
    QuantizedCache
        codes uint8 (..., head_dim / 2), scale and zero (..., head_dim / group).

    Raises
    ------
    InvalidArgumentsError
        Not floats, or a group that does not divide head_dim.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import quantized
    >>> made = quantized.int4(np.arange(32, dtype=np.float32), group=32)
    >>> made.codes.shape, made.scale.tolist(), made.zero.tolist()
    ((16,), [2.06640625], [0.0])
    """
    view, xp, wide = _floats(x)
    if group not in GROUPS["int4"] or not view.shape or view.shape[-1] % group or not view.shape[-1]:
        raise InvalidArgumentsError(
            f"group is {group!r}, for an x of shape {view.shape}.", hint="32, 64 or 128 that divides head_dim"
        )
    if dtype not in ("float16", "float32"):
        raise InvalidArgumentsError(f"dtype is {dtype!r}.", hint='dtype="float16" or "float32"')
    return QuantizedCache(*packed(xp, x, group, dtype, wide))


def nvfp4(x: Any) -> QuantizedCache:
    """Store keys or values as NVFP4, without a scale of the whole tensor.

    Parameters
    ----------
    x : array, shape (..., head_dim)
        float16, bfloat16, float32 or float64. The largest number is 2688; larger ones, infinities included,
        are clamped. If the largest number of a group is below 0.09, its block scale has fewer bits. E2M1 has
        no NaN: a NaN is stored as 0, and the others of its group as if it were absent. To use a scale of the
        tensor, divide x by it and put it into the result:
        ``made._replace(scale=scale)``.

    Returns
    -------
    QuantizedCache
        codes uint8 (..., head_dim / 2), block_scale uint8 (..., head_dim / 16), the bits of float8_e4m3fn.
        Block scales have the layout of features; if another library interleaved those of values by four keys,
        undo that first.

    Raises
    ------
    InvalidArgumentsError
        Not floats, or a head_dim that is not a multiple of 16.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import quantized
    >>> quantized.dequantize(quantized.nvfp4(np.arange(-8, 8, dtype=np.float32)))[:5].tolist()
    [-8.25, -8.25, -5.5, -5.5, -4.125]
    """
    view, xp, wide = _floats(x)
    if not view.shape or view.shape[-1] % BLOCK or not view.shape[-1]:
        raise InvalidArgumentsError(f"x has shape {view.shape}.", hint="a head_dim that is a multiple of 16")
    codes, block_scale = packed_e2m1(xp, x, wide)
    return QuantizedCache(codes, block_scale=block_scale)


def dequantize(cache: QuantizedCache, *, dtype: str = "float32") -> Any:
    """Dequantise 4-bit codes.

    Parameters
    ----------
    cache : QuantizedCache
        As returned by `int4` or `nvfp4`; a scale of the whole tensor (NVFP4) is ignored.
    dtype : str
        Dtype of the result: "float16", "float32" or "float64".

    Returns
    -------
    array, shape (..., head_dim)

    Raises
    ------
    InvalidArgumentsError
        Another dtype, or 8-bit codes: cast them and multiply by their scale.
    """
    if not one_of(dtype, _RESULTS):
        raise InvalidArgumentsError(f"dtype is {dtype!r}.", hint=f"one of {', '.join(map(repr, _RESULTS))}")
    xp = namespace(adopt(cache.codes, "codes").library)
    if cache.zero is not None:
        return unpacked(xp, cache.codes, cache.scale, cache.zero, dtype)
    if cache.block_scale is not None:
        return unpacked_e2m1(xp, cache.codes, cache.block_scale, dtype)
    raise InvalidArgumentsError(
        "the cache has neither zero nor block_scale.", hint="codes.astype(dtype) * scale"
    )

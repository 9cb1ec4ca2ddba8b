"""The arrays that a call writes: new ones of the caller's library, or the caller's own, checked here."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from ..errors import InvalidArgumentsError
from .arrays import (
    CPU,
    ArrayView,
    contiguous,
    device_name,
    numpy_address,
    numpy_dtype,
    overlap,
    overlaps_itself,
)
from .operands import RESULTS_OF_FLOAT8, table_of
from .public_names import public_name

__all__ = [
    "bump_versions",
    "check_out",
    "check_overlap",
    "empty",
    "finished",
    "namespace",
    "strides_of_new",
    "to_be_apart",
    "workspace_address",
    "zeros",
]

Views = Mapping[str, ArrayView]


def namespace(library: str) -> ModuleType:
    """The array namespace of a library."""
    if library == "jax":
        import jax.numpy

        functions: ModuleType = jax.numpy
        return functions
    return np if library in ("numpy", "dlpack") else sys.modules[library]


def strides_of_new(shape: tuple[int, ...], dtype: str) -> tuple[int, ...]:  # noqa: ARG001  (tests need it)
    """Strides of an array made by `empty`."""
    return contiguous(shape)


def empty(like: ArrayView, shape: tuple[int, ...], dtype: str) -> ArrayView:
    """A new, uninitialised array of the same library and device."""
    device, library = like.device, like.library
    new: Any
    if library == "torch":
        new = like.owner.new_empty(shape, dtype=getattr(sys.modules["torch"], dtype))
        address = new.data_ptr()
    elif device == CPU:
        new = np.empty(shape, numpy_dtype(dtype))
        address = numpy_address(new)
    elif library in ("cupy", "dlpack"):
        import cupy

        with cupy.cuda.Device(device[1]):
            new = cupy.empty(shape, numpy_dtype(dtype))
        address, library = new.data.ptr, "cupy"
    else:
        raise InvalidArgumentsError(
            "JAX arrays on a GPU cannot be written by an eager call.",
            hint="jax.dlpack: pass cupy.from_dlpack(array)",
        )
    strides = strides_of_new(shape, dtype)
    return ArrayView(address, shape, strides, dtype, device, library, False, new)


def zeros(like: ArrayView, shape: tuple[int, ...], dtype: str) -> ArrayView:
    """A new array of the same library and device, zeroed on the library's current stream."""
    view = empty(like, shape, dtype)
    if view.library == "cupy":
        import cupy

        with cupy.cuda.Device(view.device[1]):  # why: CuPy uses the current device's stream
            view.owner[...] = 0
    else:
        view.owner[...] = 0
    return view


def finished(view: ArrayView) -> Any:
    """The array to return to the caller, in the caller's library."""
    if view.library == "jax":
        import jax

        return jax.numpy.asarray(view.owner)
    return view.owner


def check_out(of_float8: bool, raw: Views, shape: tuple[int, ...]) -> None:
    """Refuse an out that cannot hold the result; `of_float8` says whether q, k and v are float8."""
    q, out = raw["q"], raw["out"]
    table = table_of(raw)
    hint = f"out=None, or a new array of shape {shape}"
    if out.shape != shape:
        raise InvalidArgumentsError(f"out has shape {out.shape}, the result {shape}.", table, hint=hint)
    dtypes = RESULTS_OF_FLOAT8 if of_float8 else (q.dtype,)
    if out.dtype not in dtypes:
        result = " or ".join(dtypes)
        raise InvalidArgumentsError(f"out has dtype {out.dtype}, the result {result}.", table, hint=hint)
    if (out.library, out.device) != (q.library, q.device):
        raise InvalidArgumentsError(
            f"out is a {out.library} array on {device_name(out.device)}, "
            f"q a {q.library} array on {device_name(q.device)}.",
            table,
            hint=hint,
        )
    if out.readonly:
        raise InvalidArgumentsError("out is read-only.", table, hint=hint)
    if overlaps_itself(out):
        raise InvalidArgumentsError(f"out overlaps itself: strides {out.strides}.", table, hint=hint)


class Apart(NamedTuple):
    """Two arrays of a call, one of them written, and how far apart they begin if they may share memory."""

    written: str
    other: str
    # Exclusive bounds of the bytes from the begin of `written` to that of `other`.
    least: int
    most: int
    are_caches: bool  # both are written, and neither is out


def to_be_apart(raw: Views, written: Sequence[str]) -> tuple[Apart, ...]:
    """The pairs of arrays that `check_overlap` looks at; they depend on shapes and strides only."""
    reach = {name: (x.extent()[0] - x.pointer, x.extent()[1] - x.pointer) for name, x in raw.items()}
    return tuple(
        Apart(name, other, reach[name][0] - last, reach[name][1] - first, other in written and name != "out")
        for name in written
        for other, (first, last) in reach.items()
        if other not in written[: written.index(name) + 1]
    )


def check_overlap(raw: Views, pairs: Sequence[Apart]) -> None:
    """Refuse an out, or a cache that grows, that shares memory with another array of the call.

    Two caches may be one array, or one of them the first columns of the other.
    """
    for name, other, least, most, are_caches in pairs:
        x, y = raw[name], raw[other]
        if not least < y.pointer - x.pointer < most:
            continue
        if (are_caches and (x.pointer, x.strides) == (y.pointer, y.strides)) or not overlap(x, y):
            continue
        hint = f"out=None, or a new array of shape {x.shape}"
        raise InvalidArgumentsError(
            f"{public_name(name)} overlaps {public_name(other)} in memory.", table_of(raw),
            hint=hint if name == "out" else f"a copy of {public_name(other)}",
        )  # fmt: skip


def bump_versions(raw: Views, names: tuple[str, ...]) -> None:
    """Bump torch's version counters of written arrays, so that autograd refuses to use their old values."""
    for name in names:
        if raw[name].library == "torch":
            sys.modules["torch"].autograd.graph.increment_version(raw[name].owner)


def workspace_address(workspace: ArrayView, q: ArrayView, nbytes: int) -> int:
    """The first 256-byte aligned address in the caller's workspace, which must hold `nbytes` from there."""
    low, high = workspace.extent()
    size = math.prod(workspace.shape) * workspace.item_bytes
    aligned = -(-low // 256) * 256
    table = [("tuning.workspace", workspace.describe())]
    if workspace.device != q.device or workspace.readonly:
        what = "read-only" if workspace.readonly else f"on {device_name(workspace.device)}"
        raise InvalidArgumentsError(
            f"tuning.workspace is {what}.", table, hint="a writable array on the device of q"
        )
    if high - low != size:
        raise InvalidArgumentsError("tuning.workspace is not contiguous.", table, hint="a new array of bytes")
    if high - aligned < nbytes:
        raise InvalidArgumentsError(
            f"tuning.workspace has {size} bytes, the call needs {nbytes} that start at a multiple of 256.",
            table,
            hint=f"{nbytes + 255} bytes, or tuning=None",
        )
    return aligned

"""Checks of the int32 arrays that say where to read: offsets (cu_seqlens), rows in use (seqused), tables."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import InvalidArgumentsError, UnsupportedError
from .adopt import adopt
from .arrays import CPU, ArrayView
from .checks import integer
from .operands import cast
from .public_names import public_name

__all__ = ["check_counts", "counts", "flat_mask", "kept", "longest_length", "offsets", "with_own_tables"]


def offsets(x: Any, name: str, claimed: int | None = None) -> ArrayView:
    """Check dtype, shape and strides of offsets, without reading their values."""
    view = adopt(x, name)
    if view.dtype != "int32" or len(view.shape) != 1 or view.shape[0] < 1:
        fits = len(view.shape) == 1 and view.shape[0]
        raise InvalidArgumentsError(
            f"{name} is {view.shape} {view.dtype}, not (sequences + 1,) int32.",
            hint=cast(name, view, "int32") if fits else _of_lengths(view),
        )
    if view.shape[0] > 1 and view.strides[0] != 1:
        raise InvalidArgumentsError(f"{name} is not contiguous.", hint=f"a copy of {name}")
    if claimed is not None and ((n := integer(claimed)) is None or n < 0):
        raise InvalidArgumentsError(
            f"the longest length of {name} is {claimed!r}.", hint="an integer, at least 0"
        )
    return view


def counts(x: Any, name: str, batch: int) -> ArrayView:
    """Check dtype, shape and strides of an array with one number per sequence, without reading its values."""
    view = adopt(x, name)
    if view.dtype != "int32" or view.shape != (batch,) or (batch > 1 and view.strides[0] != 1):
        raise InvalidArgumentsError(
            f"{public_name(name)} is {view.shape} {view.dtype}, not contiguous ({batch},) int32.",
            hint=cast(name, view, "int32") if view.shape == (batch,) else "one number per sequence",
        )
    return view


def kept(view: ArrayView) -> ArrayView:
    """The same numbers with the same strides in memory of their own, if they are int32 in main memory.

    why: another thread may write to the caller's array between the checks and the last read.
    """
    if view.device != CPU or view.dtype != "int32":
        return view
    low, high = view.extent()
    own = (ctypes.c_char * (high - low))()
    ctypes.memmove(own, low, high - low)
    return view._replace(pointer=ctypes.addressof(own) + view.pointer - low, owner=own)


# Arrays besides offsets that say where the keys of a query are.
_TABLES = (
    "cache_seqlens", "block_table", "cache_batch_idx", "cache_leftpad", "rotary_seqlens", "spans", "blocks",
)  # fmt: skip


def with_own_tables(raw: Mapping[str, ArrayView]) -> dict[str, ArrayView]:
    """The arrays of a call, of which those that say where to read are `kept`."""
    own = dict(raw)
    for name in _TABLES:
        if name in own:
            own[name] = kept(own[name])
    return own


def longest_length(view: ArrayView, name: str, rows: int, claimed: int | None) -> int:
    """The longest length; offsets are read and checked in main memory, or if no length is claimed.

    Parameters
    ----------
    view : ArrayView
        As returned by `offsets`.
    name : str
    rows : int
        Number of rows that the offsets divide.
    claimed : int or None
        The longest length, as the caller claims it. Without it, offsets on a GPU are read back once, which
        waits for the stream.
    """
    if view.device != CPU and claimed is not None:
        return int(claimed)
    values = view.integers()
    lengths = np.diff(values.astype(np.int64))
    if values[0] != 0 or (lengths < 0).any() or values[-1] > rows:
        raise InvalidArgumentsError(
            f"{name} is {values.tolist()}: it must begin with 0, never fall, and end at {rows} at most, "
            "the rows of an array (rows, heads, head_dim).",
            hint=_of_lengths(view),
        )
    actual = int(lengths.max(initial=0))
    if claimed is not None and claimed < actual:
        longest = name.replace("cu_seqlens", "max_seqlen")
        raise InvalidArgumentsError(
            f"the longest length of {name} is {actual}, not {claimed}.", hint=f"{longest}={actual}, or more"
        )
    return actual if claimed is None else int(claimed)


def _of_lengths(view: ArrayView) -> str:
    """An expression, for a hint, that makes offsets from `lengths` in the library of an array."""
    if view.library == "torch":
        return "torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)"
    library = {"cupy": "cupy", "jax": "jax.numpy"}.get(view.library, "numpy")
    return f"{library}.cumsum({library}.array([0, *lengths]), dtype='int32')"


def check_counts(views: Mapping[str, ArrayView], name: str, cut: str, what: str) -> None:
    """Refuse numbers of rows in use beyond the length of their sequence; only in main memory."""
    if views[name].device != CPU:
        return
    used, stored = views[name].numpy(), np.diff(views[cut].numpy().astype(np.int64))
    wrong = np.flatnonzero((used < 0) | (used > stored))
    if wrong.size:
        b = int(wrong[0])
        raise InvalidArgumentsError(
            f"{name}[{b}] is {used[b]}; the sequence has {stored[b]} {what}.",
            hint=f"{what} in use, from 0 to the length that {cut} gives",
        )


def flat_mask(raw: dict[str, ArrayView], queries: Any, keys: Any) -> None:
    """Check a ragged mask for these numbers in use, and add the start of each sequence's mask to `raw`."""
    view = raw["ragged_mask"]
    if view.device != CPU:
        raise UnsupportedError(
            "mask is a RaggedMask, which the CPU path reads: kernels find a mask by strides.",
            hint="mask= of (sequences, heads or 1, max_seqlen_q, max_seqlen_k)",
        )
    if "mask" in raw:
        raise InvalidArgumentsError(
            "mask is a tuple of an array and a RaggedMask, which do not combine.", hint="one of the two"
        )
    starts = np.concatenate([[0], np.cumsum(np.asarray(queries, np.int64) * np.asarray(keys, np.int64))])
    if view.dtype != "bool" or view.shape != (starts[-1],) or (starts[-1] > 1 and view.strides[0] != 1):
        raise InvalidArgumentsError(
            f"mask.bits is {view.shape} {view.dtype}, not contiguous ({starts[-1]},) bool.",
            hint="the masks (queries, keys) of all sequences: numpy.concatenate([m.ravel() for m in masks])",
        )
    if starts[-1] >= 2**31:
        raise UnsupportedError(
            f"mask is a RaggedMask of {starts[-1]} pairs, beyond 31 bits.", hint="several calls"
        )
    raw["mask_starts"] = adopt(starts.astype(np.int32), "mask_starts")

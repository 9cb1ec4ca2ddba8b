"""Packed sequences: one problem of the ordinary kind per sequence, on views of its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ..problem import Problem

Array = np.ndarray[Any, Any]

_QUERY_ROWS = ("q", "o", "do", "dq", "lse", "dlse")
_KEY_ROWS = ("k", "v", "dk", "dv")


def each_sequence(
    path: Callable[[Problem, dict[str, Array]], None], problem: Problem, arrays: dict[str, Array]
) -> None:
    """Run a pass over every sequence; dbias and dsinks are summed over those that share them.

    Parameters
    ----------
    path : callable
        `forward` or `backward` of this package.
    problem : Problem
        With ``packed``.
    arrays : dict of str to array
        As for `path` with a batch of 1 and all rows as one sequence, cu_seqlens_q, cu_seqlens_k and, if
        given, seqused_k.
    """
    starts_q, starts_k = arrays["cu_seqlens_q"], arrays["cu_seqlens_k"]
    # why: the sum over sequences is rounded to the dtype of the bias once, at its end.
    sums = {n: np.zeros(arrays[n].shape, problem.accumulator) for n in ("dbias", "dsinks") if n in arrays}
    for sequence in range(problem.batch):
        rows_q = slice(int(starts_q[sequence]), int(starts_q[sequence + 1]))
        rows_k = slice(int(starts_k[sequence]), int(starts_k[sequence + 1]))
        if "seqused_k" in arrays:
            # Gradients of the rows after these are 0 from the start.
            rows_k = slice(rows_k.start, rows_k.start + int(arrays["seqused_k"][sequence]))
        one = problem._replace(
            packed=False, batch=1, sequence=sequence,
            seqlen_q=rows_q.stop - rows_q.start, seqlen_k=rows_k.stop - rows_k.start,
        )  # fmt: skip
        if problem.offset_from_end:
            one = one._replace(offset=problem.offset + one.seqlen_k - one.seqlen_q, offset_from_end=False)
        views = {name: arrays[name][:, :, rows_q] for name in _QUERY_ROWS if name in arrays}
        views |= {name: arrays[name][:, :, rows_k] for name in _KEY_ROWS if name in arrays}
        if "sinks" in arrays:
            views["sinks"] = arrays["sinks"]
        if "alibi_slopes" in arrays:
            views["alibi_slopes"] = _of_sequence(arrays["alibi_slopes"], sequence)
        for name in ("mask", "bias"):
            if name in arrays:
                views[name] = _pairs_of(arrays[name], sequence, one)
        if "mask" in views:
            one = one._replace(mask=views["mask"].shape)
        if "bias" in views:
            one = one._replace(bias=views["bias"].shape)
        if "dbias" in sums:
            views["dbias"] = np.empty(views["bias"].shape, problem.accumulator)
        if "dsinks" in sums:
            views["dsinks"] = np.empty_like(sums["dsinks"])
        path(one, views)
        with np.errstate(invalid="ignore"):  # as within the passes: an lse of another problem gives inf - inf
            if "dbias" in sums:
                _pairs_of(sums["dbias"], sequence, one)[...] += views["dbias"]
            if "dsinks" in sums:
                sums["dsinks"] += views["dsinks"]
    for name, total in sums.items():
        arrays[name][...] = total


def _of_sequence(x: Array, sequence: int) -> Array:
    return x if x.shape[0] == 1 else x[sequence : sequence + 1]


def _pairs_of(x: Array, sequence: int, one: Problem) -> Array:
    """The part of a mask, bias or dbias that belongs to a sequence, broadcast axes kept."""
    x = _of_sequence(x, sequence)
    rows = slice(None) if x.shape[2] == 1 else slice(one.seqlen_q)
    return x[:, :, rows] if x.shape[3] == 1 else x[:, :, rows, : one.seqlen_k]

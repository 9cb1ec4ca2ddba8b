"""Packed sequences: one problem of the ordinary kind per sequence, on views of its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .backward import backward
from .forward import forward
from .hvp import hvp
from .jvp import jvp

if TYPE_CHECKING:
    from ..call.problem import Problem

Array = np.ndarray[Any, Any]

_QUERY_ROWS = ("q", "o", "do", "dq", "lse", "dlse", "q_dot", "o_dot", "lse_dot")
_KEY_ROWS = ("k", "v", "dk", "dv", "k_dot", "v_dot")


# Those of second order in one direction, whose arrays lie beside the others.
_PASSES: dict[str, Callable[[Problem, dict[str, Array]], None]] = {
    "forward": forward,
    "backward": backward,
    "jvp": lambda one, views: jvp(one, views, [views]),
    "hvp": lambda one, views: hvp(one, views, [views]),
}


def each_sequence(problem: Problem, arrays: dict[str, Array]) -> None:
    """Run a pass over every sequence; dbias and dsinks are summed over those that share them.

    Parameters
    ----------
    problem : Problem
        With ``packed``.
    arrays : dict of str to array
        As for the pass, those of a direction among them, with a batch of 1 and all rows as one sequence,
        cu_seqlens_q, cu_seqlens_k and, if given, seqused_k.
    """
    # why: the sum over sequences is rounded to the dtype of the bias once, at its end.
    summed = [name for name in ("dbias", "dsinks") if name in arrays]
    sums: dict[str, Array] = {n: np.zeros(arrays[n].shape, problem.accumulator) for n in summed}
    compute = _PASSES[problem.direction]
    for n in range(problem.batch):
        one, views = _sequence(problem, arrays, sums, n)
        compute(one, views)
        with np.errstate(invalid="ignore"):  # as in the passes: an lse of another problem gives inf - inf
            if "dbias" in sums:
                _pairs_of(sums["dbias"], n, one)[...] += views["dbias"]
            if "dsinks" in sums:
                sums["dsinks"] += views["dsinks"]
    for name, total in sums.items():
        arrays[name][...] = total


def _sequence(
    problem: Problem, arrays: dict[str, Array], sums: dict[str, Array], sequence: int
) -> tuple[Problem, dict[str, Array]]:
    """One sequence as a problem of its own, and views of what belongs to it."""
    starts_q, starts_k = arrays["cu_seqlens_q"], arrays["cu_seqlens_k"]
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
    views |= {name: arrays[name] for name in ("sinks", "sinks_dot") if name in arrays}
    for name in ("alibi_slopes", "q_scale", "k_scale", "v_scale"):
        if name in arrays:
            views[name] = _of_sequence(arrays[name], sequence)
    for name in ("mask", "bias", "bias_dot"):
        if name in arrays:
            views[name] = _pairs_of(arrays[name], sequence, one)
    if "spans" in arrays and problem.spans is not None:
        rows = one.seqlen_q if problem.spans.by_query else one.seqlen_k
        views["spans"] = _of_sequence(arrays["spans"], sequence)[:, :, :rows]
    if "mask" in views:
        one = one._replace(mask=views["mask"].shape)
    if "bias" in views:
        one = one._replace(bias=views["bias"].shape)
    if "dbias" in sums:
        views["dbias"] = np.empty(views["bias"].shape, problem.accumulator)
    if "dsinks" in sums:
        views["dsinks"] = np.empty_like(sums["dsinks"])
    return one, views


def _of_sequence(x: Array, sequence: int) -> Array:
    return x if x.shape[0] == 1 else x[sequence : sequence + 1]


def _pairs_of(x: Array, sequence: int, one: Problem) -> Array:
    """The part of a mask, bias or dbias that belongs to a sequence, broadcast axes kept."""
    x = _of_sequence(x, sequence)
    rows = slice(None) if x.shape[2] == 1 else slice(one.seqlen_q)
    return x[:, :, rows] if x.shape[3] == 1 else x[:, :, rows, : one.seqlen_k]

"""Packed sequences: one problem of the ordinary kind per sequence, on views of its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from . import threads, tiles
from .backward import prepare as prepare_backward
from .forward import prepare as prepare_forward

if TYPE_CHECKING:
    from ..call.problem import Problem

Array = np.ndarray[Any, Any]

_QUERY_ROWS = ("q", "o", "do", "dq", "lse", "dlse")
_KEY_ROWS = ("k", "v", "dk", "dv")


def each_sequence(problem: Problem, arrays: dict[str, Array]) -> None:
    """Run a pass over every sequence; dbias and dsinks are summed over those that share them.

    Parameters
    ----------
    problem : Problem
        A forward or backward problem with ``packed``.
    arrays : dict of str to array
        As for `forward` and `backward` with a batch of 1 and all rows as one sequence, cu_seqlens_q,
        cu_seqlens_k and, if given, seqused_k.
    """
    # why: the sum over sequences is rounded to the dtype of the bias once, at its end.
    summed = [name for name in ("dbias", "dsinks") if name in arrays]
    sums: dict[str, Array] = {n: np.zeros(arrays[n].shape, problem.accumulator) for n in summed}
    # why: the dbias of a sequence may be as large as everything else, so that there is one at a time.
    alone = "dbias" in sums
    groups = [[n] for n in range(problem.batch)] if alone else [list(range(problem.batch))]
    for group in groups:
        _together([_sequence(problem, arrays, sums, n) for n in group], sums, alone)
    for name, total in sums.items():
        arrays[name][...] = total


def _together(sequences: list[tuple[Problem, dict[str, Array]]], sums: dict[str, Array], alone: bool) -> None:
    """Run a pass over some sequences at once, and add to the sums."""
    # why: the longest first, so that in the end nobody is left with it alone.
    sequences = sorted(sequences, key=lambda one: tiles.flops(one[0]), reverse=True)
    workers = threads.worker_count(sum(tiles.flops(one) for one, _ in sequences))
    works = []
    for one, views in sequences:
        prepare = prepare_forward if one.direction == "forward" else prepare_backward
        works.append(prepare(one, views, workers, alone))
    threads.run([job for work in works for job in work.jobs], workers)
    for (one, views), work in zip(sequences, works, strict=True):
        if work.finish is not None:
            work.finish()
        with np.errstate(invalid="ignore"):  # as in the jobs: an lse of another problem gives inf - inf
            if "dbias" in sums:
                _pairs_of(sums["dbias"], one.sequence, one)[...] += views["dbias"]
            if "dsinks" in sums:
                sums["dsinks"] += views["dsinks"]


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
    if "sinks" in arrays:
        views["sinks"] = arrays["sinks"]
    for name in ("alibi_slopes", "q_scale", "k_scale", "v_scale"):
        if name in arrays:
            views[name] = _of_sequence(arrays[name], sequence)
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
    return one, views


def _of_sequence(x: Array, sequence: int) -> Array:
    return x if x.shape[0] == 1 else x[sequence : sequence + 1]


def _pairs_of(x: Array, sequence: int, one: Problem) -> Array:
    """The part of a mask, bias or dbias that belongs to a sequence, broadcast axes kept."""
    x = _of_sequence(x, sequence)
    rows = slice(None) if x.shape[2] == 1 else slice(one.seqlen_q)
    return x[:, :, rows] if x.shape[3] == 1 else x[:, :, rows, : one.seqlen_k]

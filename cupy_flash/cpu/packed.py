"""Packed sequences: each is computed as a problem of its own, on views of its rows.

Their keys are packed, too, or in a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..call.codes import CODE_SCALES
from ..call.options import AXES_OF, DIFFERENTIABLE, PER_HEAD
from .backward import backward
from .decode import decode
from .forward import forward
from .hvp import hvp
from .jvp import jvp
from .statistics import statistics

if TYPE_CHECKING:
    from ..call.problem import Cache, Problem

Array = np.ndarray[Any, Any]

_QUERY_ROWS = (
    "q", "o", "do", "dq", "lse", "dlse", "q_dot", "o_dot", "lse_dot", "entropy", "top_weights", "top_keys",
)  # fmt: skip
_OF_KEYS = ("key_sum", "key_max")
_KEY_ROWS = ("k", "v", "dk", "dv", "k_dot", "v_dot", *_OF_KEYS)
_GRADIENTS = frozenset(f"d{name}" for name in DIFFERENTIABLE)
# Options with a number per head, and their tangents: those that may differ per sequence, and the others.
_OF_SEQUENCES = tuple(n for name in PER_HEAD if "batch" in AXES_OF[name] for n in (name, f"{name}_dot"))
_SHARED = frozenset(n for name in PER_HEAD if "batch" not in AXES_OF[name] for n in (name, f"{name}_dot"))

# jvp and hvp have one direction here, whose arrays are in the same dict.
_PASSES: dict[str, Callable[[Problem, dict[str, Array]], None]] = {
    "forward": forward,
    "backward": backward,
    "decode": decode,
    "jvp": lambda one, views: jvp(one, views, [views]),
    "hvp": lambda one, views: hvp(one, views, [views]),
    "statistics": statistics,
}


def each_sequence(problem: Problem, arrays: dict[str, Array]) -> None:
    """Run a pass for every sequence, and sum the gradients of shared arrays over the sequences.

    Parameters
    ----------
    problem : Problem
        With ``packed``.
    arrays : dict of str to array
        As for the pass, including those of a direction, with a batch of 1 and all rows as one sequence;
        cu_seqlens_q, cu_seqlens_k and, if given, seqused_q, seqused_k, ragged_mask and mask_starts.
    """
    # why sums: the total over sequences is rounded to the dtype of the bias only once.
    summed = [n for n in arrays if n in _GRADIENTS or n.startswith("dbound")]
    sums: dict[str, Array] = {n: np.zeros(arrays[n].shape, problem.accumulator) for n in summed}
    compute = _PASSES[problem.direction]
    for n in range(problem.batch):
        one, views = _sequence(problem, arrays, sums, n)
        compute(one, views)
        with np.errstate(all="ignore"):  # as in the passes
            if "dbias" in sums:
                _pairs_of(sums["dbias"], n, one)[...] += views["dbias"]
            for name in summed:
                if name != "dbias":
                    sums[name] += views[name]
    with np.errstate(over="ignore"):
        for name, total in sums.items():
            arrays[name][...] = total


def _sequence(
    problem: Problem, arrays: dict[str, Array], sums: dict[str, Array], sequence: int
) -> tuple[Problem, dict[str, Array]]:
    """One sequence as a problem of its own, and views of its arrays."""
    rows_q = _rows(arrays, "cu_seqlens_q", "seqused_q", sequence)
    views = {name: arrays[name][:, :, rows_q] for name in _QUERY_ROWS if name in arrays}
    shared = (n for n in arrays if n in _SHARED or n.startswith("bound"))
    views |= {name: arrays[name] for name in shared}
    for name in (*_OF_SEQUENCES, "q_scale", "k_scale", "v_scale"):
        if name in arrays:
            views[name] = _of_sequence(arrays[name], sequence)
    one = problem._replace(packed=False, batch=1, sequence=sequence, seqlen_q=rows_q.stop - rows_q.start)
    if problem.cache is None:
        rows_k = _rows(arrays, "cu_seqlens_k", "seqused_k", sequence)
        one = one._replace(seqlen_k=rows_k.stop - rows_k.start)
        views |= {name: arrays[name][:, :, rows_k] for name in _KEY_ROWS if name in arrays}
        if problem.offset_from_end:
            one = one._replace(offset=problem.offset + one.seqlen_k - one.seqlen_q, offset_from_end=False)
    else:
        one = one._replace(cache=_in_cache(problem.cache, arrays, views, sequence))
        views |= {name: arrays[name][sequence : sequence + 1] for name in _OF_KEYS if name in arrays}
    for name in ("mask", "bias", "bias_dot"):
        if name in arrays:
            views[name] = _pairs_of(arrays[name], sequence, one)
    if "ragged_mask" in arrays:
        first, stop = arrays["mask_starts"][sequence : sequence + 2]
        own = arrays["ragged_mask"][first:stop]
        views["mask"] = own.reshape(1, 1, one.seqlen_q, len(own) // max(1, one.seqlen_q))
    if "spans" in arrays and problem.spans is not None:
        of_queries = problem.spans.by_query or problem.cache is not None
        rows = one.seqlen_q if of_queries else one.seqlen_k
        views["spans"] = _of_sequence(arrays["spans"], sequence)[:, :, :rows]
    if "blocks" in arrays:
        views |= {"blocks": _of_sequence(arrays["blocks"], sequence), "block_bits": arrays["block_bits"]}
    if "mask" in views:
        one = one._replace(mask=views["mask"].shape)
    if "bias" in views:
        one = one._replace(bias=views["bias"].shape)
    if "dbias" in sums:
        views["dbias"] = np.empty(views["bias"].shape, problem.accumulator)
    views |= {name: np.empty_like(x) for name, x in sums.items() if name != "dbias"}
    return one, views


def _rows(arrays: dict[str, Array], cut: str, used: str, sequence: int) -> slice:
    """Rows of a sequence that are in use; gradients of the others have been set to 0."""
    first, stop = arrays[cut][sequence : sequence + 2].tolist()
    return slice(first, first + int(arrays[used][sequence]) if used in arrays else stop)


def _in_cache(cache: Cache, arrays: dict[str, Array], views: dict[str, Array], sequence: int) -> Cache:
    """Add views of one sequence over a cache: lengths, block table, codes and new keys; return its Cache."""
    of_one = slice(sequence, sequence + 1)
    shared: tuple[str, ...] = ("k_cache", "v_cache", "rotary_cos", "rotary_sin")
    if cache.codes:
        shared = (*shared, *CODE_SCALES[cache.codes.kind])
    views |= {name: arrays[name] for name in shared if name in arrays}
    for name in ("cache_seqlens", "cache_leftpad", "rotary_seqlens", "block_table"):
        if name in arrays:
            views[name] = arrays[name][of_one]
    if "block_table" not in arrays:
        views["block_table"] = np.array([[sequence]], np.int32)
    if not cache.appended:
        return cache
    rows = slice(None)
    if cache.packed:
        rows, of_one = _rows(arrays, "cu_seqlens_k_new", "", sequence), slice(None)
    views |= {name: arrays[name][of_one, :, rows] for name in "kv"}
    return cache._replace(appended=views["k"].shape[2], packed=False)


def _of_sequence(x: Array, sequence: int) -> Array:
    return x if x.shape[0] == 1 else x[sequence : sequence + 1]


def _pairs_of(x: Array, sequence: int, one: Problem) -> Array:
    """The part of a mask, bias or dbias for a sequence; broadcast axes stay."""
    x = _of_sequence(x, sequence)
    rows = slice(None) if x.shape[2] == 1 else slice(one.seqlen_q)
    return x[:, :, rows] if x.shape[3] == 1 else x[:, :, rows, : one.seqlen_k]

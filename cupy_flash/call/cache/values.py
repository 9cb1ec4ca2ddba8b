"""Checks of values in a call over a KV cache: lengths, table entries, padding, positions of rotation."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..arrays import ArrayView
from ..operands import wrong
from ..problem import Problem

__all__ = ["check_lengths", "check_values"]


def check_values(problem: Problem, raw: Mapping[str, ArrayView], length: int | None = None) -> None:
    """Refuse lengths over the capacity, entries outside the cache, and pages that two sequences append to."""
    cache, capacity = problem.cache, problem.seqlen_k
    assert cache is not None
    added = _new_keys(problem, raw)
    lengths = check_lengths(raw, length, capacity, added)
    _check_beginnings(problem, raw, [length + more for length, more in zip(lengths, added, strict=True)])
    name = "block_table" if "block_table" in raw else "cache_batch_idx"
    if name not in raw:
        return
    slots, page = raw["k_cache"].shape[0], cache.page or max(1, capacity)
    table = raw[name].integers().reshape(problem.batch, -1)
    written: dict[int, int] = {}
    for b, length in enumerate(lengths):
        used = -(-(length + added[b]) // page)
        for n, entry in enumerate(table[b, :used].tolist()):
            where = f"block_table[{b}, {n}]" if cache.page else f"block_table[{b}]"
            if not 0 <= entry < slots:
                what = "pages" if cache.page else "slots"
                raise wrong(f"{where} is {entry}; the cache has {slots} {what}.", raw,
                             f"entries from 0 to {slots - 1} for all keys in use")  # fmt: skip
            if added[b] and n >= length // page:
                if entry in written:
                    headline = f"{where} is {entry}, where sequence {written[entry]} appends keys too."
                    raise wrong(headline, raw, "a page of its own for each sequence that grows")
                written[entry] = b


def check_lengths(
    raw: Mapping[str, ArrayView], length: int | None, capacity: int, added: list[int]
) -> list[int]:
    """Refuse lengths beyond the capacity of a sequence; return them. `added` has its new keys."""
    lengths = [length] * len(added) if length is not None else raw["cache_seqlens"].integers().tolist()
    for b, (length, more) in enumerate(zip(lengths, added, strict=True)):
        if length < 0 or length + more > capacity:
            new = f" plus {more} new" if more else ""
            where = f"cache_seqlens[{b}]" if "cache_seqlens" in raw else "cache_seqlens"
            headline = f"{where} is {length}{new}; the capacity is {capacity} keys."
            raise wrong(headline, raw, "lengths before the call, at least 0, and a cache with room")
    return lengths


def _new_keys(problem: Problem, raw: Mapping[str, ArrayView]) -> list[int]:
    """Number of new keys per sequence."""
    assert problem.cache is not None
    if problem.cache.packed:
        added: list[int] = np.diff(raw["cu_seqlens_k_new"].integers()).tolist()
        return added
    return [problem.cache.appended] * problem.batch


def _check_beginnings(problem: Problem, raw: Mapping[str, ArrayView], lengths: list[int]) -> None:
    """Refuse left padding beyond the last key, and rotation positions outside the tables."""
    pads = raw["cache_leftpad"].integers().tolist() if "cache_leftpad" in raw else []
    for b, pad in enumerate(pads):
        if not 0 <= pad <= lengths[b]:
            headline = f"cache_leftpad[{b}] is {pad}; the sequence has {lengths[b]} keys."
            raise wrong(headline, raw, "keys to leave out, from 0 to the length of the sequence")
    if "rotary_seqlens" not in raw:
        return
    queries = [problem.seqlen_q] * problem.batch
    if problem.packed:
        queries = np.diff(raw["cu_seqlens_q"].integers()).tolist()
    positions, added = raw["rotary_cos"].shape[0], _new_keys(problem, raw)
    for b, first in enumerate(raw["rotary_seqlens"].integers().tolist()):
        rows = max(queries[b], added[b])
        if not 0 <= first <= positions - rows:
            headline = f"rotary.seqlens[{b}] is {first}; the tables have {positions} rows for {rows} more."
            raise wrong(headline, raw, "longer tables, or positions from 0 on")

"""Selected keys (`indices`): each query becomes a sequence of its own, with a page for each of its keys.

why no kernel of its own: kernels read tables of pages of any size, and mask keys whose entry is invalid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ...errors import InvalidArgumentsError, UnsupportedError
from ..checks import flag, integer, one_of
from ..codes import CODE_SCALES, kind_of_codes
from ..describe import MAX_SEQLEN
from ..given import CacheCall
from ..head_scale import in_dtype
from ..masks import resolve_band
from ..operands import AXES, Views, cast, check_place, table_of, wrong
from ..public_names import public_name, type_phrase
from .describe import adopt_cache, pack_queries
from .pages import rows_apart
from .rows import Rows, int32_like
from .values import check_lengths

__all__ = ["Selection", "adopt_selection"]

# Options that decide positions, masks and places of keys: the table replaces them all.
_SAID = frozenset((
    "indices", "causal", "window", "block_table", "cache_batch_idx", "cache_leftpad", "cu_seqlens_q",
    "max_seqlen_q", "max_seqlen_k", "seqused_q", "check",
))  # fmt: skip
_ARRAYS = ("indices", "block_table", "cache_batch_idx", "cache_leftpad", "cu_seqlens_q", "seqused_q")
_STORED = "a call before it that stores them: without indices, and with a q of no queries"
_AS_MASK = "indices of the keys that it keeps, and -1 in place of the others"
_TURNED = "q and the keys of the cache rotated before the call"
# Options that have no meaning for keys in any order, or are not supported -> what to do instead.
_REFUSED = {
    "k": _STORED, "v": _STORED, "cu_seqlens_k_new": _STORED, "mask": _AS_MASK, "spans": _AS_MASK,
    "ragged_mask": _AS_MASK, "rotary_cos": _TURNED, "rotary_sin": _TURNED,
    "alibi_slopes": "a mask of the selected keys, and indices=None",
}  # fmt: skip


def adopt_selection(q: Any, cache_seqlens: Any, options: Mapping[str, Any]) -> Views:
    """Adopt the arrays that locate the selected keys, and check how queries are packed."""
    given = {name: options.get(name) for name in ("k_cache", "v_cache", *_ARRAYS, *_scale_arrays(options))}
    given |= {"q": q, "cache_seqlens": cache_seqlens}
    for name in ("q", "cache_seqlens", *_ARRAYS):
        x = given[name]
        if hasattr(type(x), "__dlpack__") and not hasattr(x, "reshape"):
            raise InvalidArgumentsError(
                f"{public_name(name)} is {type_phrase(x)}, together with indices.",
                hint="a NumPy, CuPy, torch or JAX array",
            )
    raw, length = adopt_cache(given)
    cache_call = CacheCall(longest=options.get("max_seqlen_q"), most_keys=options.get("max_seqlen_k"))
    pack_queries(raw, options.get("layout", "bhsd"), cache_call, length)
    return raw


def _scale_arrays(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the scales and zeros of 4-bit codes, which are paged like the codes."""
    return CODE_SCALES.get(kind_of_codes(options), ())


class Selection(NamedTuple):
    """A call over selected keys, converted to a call over pages of one key."""

    # array, shape (rows, heads_q, 1, head_dim), or (rows, 1, heads_q, head_dim) as the layout has it: each
    # query as a sequence of its own.
    q: Any
    lengths: Any  # array of int32, shape (rows,): number of table entries up to the last valid one
    options: dict[str, Any]  # options from `cache_parts`, with the caches
    shape: tuple[int, ...]  # shape of the queries as given: (rows,), or (batch, seqlen_q)
    swapped: bool  # whether the heads axis comes before the rows of a sequence ("bhsd")

    @classmethod
    def of(
        cls, xp: Any, q: Any, cache_seqlens: Any, options: Mapping[str, Any], raw: Views, check: bool = False
    ) -> Selection:
        """Convert a call with indices.

        Parameters
        ----------
        xp : module
            Namespace of the arrays, as in `merge.merge_parts`.
        q, cache_seqlens : array
        options : mapping of str to object
            Options from `cache_parts`, with the caches.
        raw : dict of str to ArrayView
            The views from `adopt_selection`, or stand-ins while tracing.
        check : bool
            Whether to check the values of lengths, tables and indices.

        Raises
        ------
        InvalidArgumentsError, UnsupportedError
        """
        layout = options.get("layout", "bhsd")
        packed = options.get("cu_seqlens_q") is not None
        _check_kinds(options, raw, layout, packed)
        room, apart = _room(options, raw, layout), _rows_apart(options, raw, layout)
        rows = _Queries.of(xp, q, cache_seqlens, options, raw, layout, room)
        indices, (*shape, selected) = options["indices"], raw["indices"].shape
        seen = (indices >= 0) & (indices < rows.length)
        # why 0 for invalid indices: they may hold any int64
        at = in_dtype(xp.where(seen, indices, 0), xp.int32)
        if check:
            batch = shape[0] if not packed else raw["cu_seqlens_q"].shape[0] - 1
            check_lengths(raw, None if "cache_seqlens" in raw else int(cache_seqlens), room, [0] * batch)
            _check_indices(raw, rows.among(indices != -1) & ~seen, rows.length)
        slot, key = rows.sequence, at
        if "block_table" in raw:
            page = raw["k_cache"].shape[1 if layout == "bshd" else 2]
            slot, key = options["block_table"][rows.sequence, at // page], at % page
        elif "cache_batch_idx" in raw:
            slot = options["cache_batch_idx"][rows.sequence]
        if slot is not rows.sequence:
            lies = (slot >= 0) & (slot < raw["k_cache"].shape[0])
            if check:
                _check_indices(raw, rows.among(seen) & ~lies, None)
            seen = seen & lies
        seen = rows.among(seen)
        band = resolve_band(
            flag(options.get("causal", False), "causal"), options.get("window"), "bottom_right", False,
            1, room, packed_alike=True,
        )  # fmt: skip
        if band.right is not None:
            seen = seen & (at - rows.stand <= min(band.right, MAX_SEQLEN))
        if band.left is not None:
            seen = seen & (rows.stand - at <= min(band.left, MAX_SEQLEN))
        if options.get("cache_leftpad") is not None:
            seen = seen & (at >= options["cache_leftpad"][rows.sequence])
        count, kind = math.prod(shape), int32_like(xp, q)
        table = in_dtype(xp.where(seen, slot * apart + key, -1), xp.int32).reshape(count, selected)
        lengths = xp.zeros(count, **kind)
        if selected:
            numbers = xp.where(seen, xp.arange(1, selected + 1, **kind), 0)
            lengths = in_dtype(xp.amax(numbers, -1), xp.int32).reshape(count)
        flat = {name: x for name, x in options.items() if name not in _SAID and name not in _REFUSED}
        for name in ("k_scale", "v_scale"):  # why: scales per (batch, head) become scales per (row, head)
            if len(getattr(flat.get(name), "shape", ())) == 2:
                of_rows = (rows.sequence + xp.zeros((*shape, 1), **kind)).reshape(count)
                flat[name] = flat[name][of_rows]
        flat |= {"block_table": table, "check": False, "single_keys": True}
        swapped = not packed and layout == "bhsd"
        alone = q.swapaxes(1, 2) if swapped else q
        heads, dim = alone.shape[-2:]
        one = (count, 1, heads, dim) if layout == "bshd" else (count, heads, 1, dim)
        return cls(alone.reshape(one), lengths, flat, tuple(shape), swapped)

    def results(self, o: Any, lse: Any = None) -> tuple[Any, Any]:
        """O and LSE in the shapes of the original call."""
        heads = self.q.shape[1] * self.q.shape[2]
        o = o.reshape(*self.shape, heads, o.shape[-1])
        if self.swapped:
            o = _in_new_order(o, 1, 2)
        return o, None if lse is None else _in_new_order(lse.reshape(*self.shape, heads), -1, -2)


def _in_new_order(x: Any, *axes: int) -> Any:
    """Two axes swapped, as a contiguous array, as all results are."""
    swapped = x.swapaxes(*axes)
    if 1 in (x.shape[axes[0]], x.shape[axes[1]]):
        return x.reshape(swapped.shape)
    return swapped.contiguous() if hasattr(swapped, "contiguous") else swapped.copy()


class _Queries(NamedTuple):
    """The sequence, length and position of each query, in shapes that broadcast over indices."""

    # array of int, length also int: the sequence of a query, and the number of keys of that sequence.
    sequence: Any
    length: Any
    stand: Any  # array of int: the position of a query
    inside: Any  # array of bool, or None: whether the query belongs to a sequence; None if all do

    @classmethod
    def of(
        cls,
        xp: Any,
        q: Any,
        cache_seqlens: Any,
        options: Mapping[str, Any],
        raw: Views,
        layout: str,
        room: int,
    ) -> _Queries:
        """The queries of a call; parameters as in `Selection.of`, and `room`, the capacity of a sequence."""
        if "cu_seqlens_q" in raw:
            rows, _ = Rows.of(
                xp, q, options["k_cache"], layout, 0, {**options, "cache_seqlens": cache_seqlens}
            )
            length, stand = (rows.first + rows.used)[rows.sequence], rows.first[rows.sequence] + rows.row
            return cls(*(x[:, None] for x in (rows.sequence, length, stand, rows.inside)))
        length, kind = cache_seqlens, int32_like(xp, q)
        batch, seqlen_q, _ = raw["indices"].shape
        if isinstance(length, (int, np.integer)):
            length = min(max(int(length), 0), room)
        else:
            length = xp.clip(length, 0, room)
            length = length[:, None, None] if length.ndim else length
        stand = length + xp.arange(-seqlen_q, 0, **kind)[:, None]
        return cls(xp.arange(batch, **kind)[:, None, None], length, stand, None)

    def among(self, pairs: Any) -> Any:
        """Pairs (query, index) with those of queries of no sequence masked out."""
        return pairs if self.inside is None else pairs & self.inside


def _room(options: Mapping[str, Any], raw: Views, layout: str) -> int:
    """The capacity of a sequence, in keys."""
    room = raw["k_cache"].shape[1 if layout == "bshd" else 2]
    room *= raw["block_table"].shape[1] if "block_table" in raw else 1
    if not room:
        raise wrong("the capacity of the cache is 0 keys.", raw, "a larger cache, or a table with pages")
    most = options.get("max_seqlen_k")
    if most is not None and ((n := integer(most)) is None or n < 0):
        raise wrong(f"max_seqlen_k is {most!r}.", raw, "an integer, at least 0")
    return room if most is None else min(room, most)


def _rows_apart(options: Mapping[str, Any], raw: Views, layout: str) -> int:
    """The one `rows_apart` of all arrays that the table addresses."""
    names = ("k_cache", "v_cache", *_scale_arrays(options))
    found = {rows_apart(name, raw, layout) for name in names if name in raw}
    if len(found) > 1:
        hint = "k_cache and v_cache that are both contiguous, or both views of one array"
        raise UnsupportedError("k_cache and v_cache have different strides.", table_of(raw), hint=hint)
    return found.pop()


def _check_indices(raw: Views, bad: Any, length: Any) -> None:
    """Refuse the first bad index: beyond its sequence if `length` is given, else outside the cache."""
    if not bool(bad.any()):
        return
    place = np.unravel_index(bad.reshape(-1).tolist().index(True), raw["indices"].shape)
    where = f"indices[{', '.join(map(str, place))}] is {int(raw['indices'].owner[place])}"
    if length is not None:
        keys = length if isinstance(length, int) else int((length + 0 * bad)[place])
        headline = f"{where}; the sequence has {keys} keys."
        raise wrong(headline, raw, "positions in the sequence, and -1 for none")
    what = "pages" if "block_table" in raw else "slots"
    headline = f"{where}, of which block_table leads outside the cache."
    raise wrong(headline, raw, f"entries below {raw['k_cache'].shape[0]}, the number of {what}")


def _check_kinds(options: Mapping[str, Any], raw: Views, layout: str, packed: bool) -> None:
    """Refuse options that indices exclude, and arrays of wrong rank, shape or dtype."""
    for name, instead in _REFUSED.items():
        if options.get(name) is not None:
            raise UnsupportedError(
                f"{public_name(name)} is given together with indices.", table_of(raw), hint=instead
            )
    q, k, indices = (raw[name] for name in ("q", "k_cache", "indices"))
    for name in raw:
        check_place(name, raw)
    ranks = {"q": 3 if packed else 4} | {
        n: 4 for n in ("k_cache", "v_cache", *_scale_arrays(options)) if n in raw
    }
    for name, rank in ranks.items():
        if len(raw[name].shape) != rank:
            headline = (
                f"{public_name(name)} has rank {len(raw[name].shape)}, not {rank}, together with indices."
            )
            raise wrong(headline, raw, "q of rank 4, or 3 with cu_seqlens_q; caches of rank 4")
    if not one_of(layout, AXES):
        raise wrong(f"layout is {layout!r}.", raw, 'layout="bhsd" or layout="bshd"')
    rows = q.shape[:1] if packed else (q.shape[0], q.shape[1 if layout == "bshd" else 2])
    if indices.dtype.removeprefix("torch.") not in ("int32", "int64"):
        headline = f"indices has dtype {indices.dtype}, not int32 or int64."
        raise wrong(headline, raw, cast("indices", indices, "int32"))
    if indices.shape[:-1] != rows or not indices.shape:
        wanted = ", ".join(map(str, rows))
        raise wrong(
            f"indices has shape {indices.shape}, beside queries ({wanted}).", raw, f"({wanted}, keys)"
        )
    batch = raw["cu_seqlens_q"].shape[0] - 1 if packed else q.shape[0]
    shapes: dict[str, tuple[int, ...]] = {
        "cache_seqlens": (batch,),
        "cache_batch_idx": (batch,),
        "cache_leftpad": (batch,),
    }
    if "block_table" in raw:
        shapes["block_table"] = (batch, *raw["block_table"].shape[1:2])
    elif "cache_batch_idx" not in raw and k.shape[0] != batch:
        headline = f"q has a batch of {batch}, the cache {k.shape[0]} slots."
        raise wrong(headline, raw, "block_table= of slots, (batch,), or of pages, (batch, pages)")
    for name, shape in shapes.items():
        if name in raw and (raw[name].shape != shape or raw[name].dtype != "int32"):
            given = f"{raw[name].shape} {raw[name].dtype}"
            headline = f"{public_name(name)} is {given} for a batch of {batch}, together with indices."
            raise wrong(headline, raw, f"{shape} of int32")

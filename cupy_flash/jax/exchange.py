"""Context parallelism inside `jax.shard_map` by all-to-all and all-gather, with ordinary local calls."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..call.blocks import BlockMask
from ..call.compound import Spans, masks_of
from ..call.masks import Band, resolve_band
from ..call.options import PER_HEAD
from ..errors import InvalidArgumentsError, UnsupportedError
from ..parallel.group import at, row_axis
from ..parallel.parts import block_rows, blocks_of_rows, stretches
from .functional import attend_to
from .numbers import next_seed
from .shards import Packed, Shards, padded_half, searchsorted, visible_spans

__all__ = ["Call", "all_gather", "all_to_all"]


class Call(NamedTuple):
    """The call over all devices."""

    axis_name: Any  # the mesh axis
    # Rows of each device.
    queries: Shards
    keys: Shards
    band: Band  # band of the whole sequence; for packed sequences it is in the options
    options: dict[str, Any]  # all options except the seed
    # array of int32, optional: the two words of the seed of the whole call; None without dropout.
    seed: Any = None
    packed: Packed | None = None  # offsets of packed sequences; None for a batch
    longest: int = 0  # longest part of a packed sequence

    @property
    def ranks(self) -> int:
        """Devices along the axis."""
        return int(self.queries.rows.shape[0])

    @property
    def lengths(self) -> tuple[int, int]:
        """Queries and keys of the whole sequence."""
        return self.queries.length, self.keys.length

    def rows_axis(self, q: Any) -> int:
        """Axis of the rows in q, k, v and o; in lse it is the last."""
        return row_axis(self.options.get("layout"), q)

    def attend(self, arrays: dict[str, Any], options: dict[str, Any], numbers: list[int]) -> tuple[Any, Any]:
        """O and LSE of a local call; numbers has the call's number on each device, for its dropout seed."""
        if (seed := next_seed(self.seed, numbers, self.axis_name)) is not None:
            arrays = {**arrays, "seed": seed}
        o, lse = attend_to(arrays, {**options}, return_lse=True)
        return o, lse


def all_to_all(q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any]:
    """O and LSE of this device's rows: exchange rows for heads, attend, and exchange the results back."""
    ranks, options, packed = call.ranks, call.options, call.packed
    rows = call.rows_axis(q)
    heads = -2 if rows == -3 else -3
    for name, x in (("q", q), ("k", k)):
        count = 1 if x.ndim < 3 else x.shape[heads]
        if ranks > 1 and (x.ndim < 3 or count % ranks):
            raise InvalidArgumentsError(
                f"{count} heads of {name} do not divide over {ranks} devices.",
                hint=f'schedule="ring" or "allgather"; or a multiple of {ranks} heads',
            )

    def exchanged(x: Any, split: int, joined: int) -> Any:
        if ranks == 1:
            return x
        return jax.lax.all_to_all(x, call.axis_name, split % x.ndim, joined % x.ndim, tiled=True)

    def own_heads(x: Any, axis: int) -> Any:
        """Slice out the heads of this device."""
        each = x.shape[axis] // ranks
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(call.axis_name) * each, each, axis % x.ndim)

    def cut_heads(x: Any, axis: int) -> Any:
        """Slice out the heads of this device from a mask, which may be broadcast along heads."""
        return x if x.ndim < -axis or x.shape[axis] == 1 else own_heads(x, axis)

    def own_mask(mask: Any) -> Any:
        if type(mask) is tuple:
            return tuple(map(own_mask, mask))
        if isinstance(mask, Spans):
            return Spans(cut_heads(jnp.asarray(mask.bounds), -4))
        if isinstance(mask, BlockMask):
            return mask._replace(table=cut_heads(jnp.asarray(mask.table), -3))
        return None if mask is None else cut_heads(jnp.asarray(mask), -3)

    given = {**options, "mask": own_mask(options.get("mask"))}
    if ranks > 1:
        given |= {n: own_heads(jnp.asarray(x), -1) for n in PER_HEAD if (x := options.get(n)) is not None}
    travelling = (("q", q, call.queries), ("k", k, call.keys), ("v", v, call.keys))
    arrays = {name: side.whole(exchanged(x, heads, rows), rows) for name, x, side in travelling}
    if packed:
        arrays["cu_seqlens_q"] = packed.offsets * ranks
        given |= {"max_seqlen_q": call.longest * ranks, "max_seqlen_k": call.longest * ranks}
    o, lse = call.attend(arrays, given, [*range(ranks)])
    o, lse = call.queries.parts(o, rows), call.queries.parts(lse, -1)
    o, lse = exchanged(o, rows, heads), exchanged(lse, -1, -2)
    return packed.results(o, lse) if packed else (o, lse)


def all_gather(q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any]:
    """O and LSE of this device's rows: every device gathers all keys and values."""
    rows = call.rows_axis(q)

    def gathered(x: Any) -> Any:
        axis = rows % x.ndim
        # why: XLA cannot gather along an axis of length 0.
        return jax.lax.all_gather(x, call.axis_name, axis=axis, tiled=True) if x.shape[axis] else x

    k, v = (call.keys.whole(gathered(x), rows) for x in (k, v))
    if call.packed:
        return call.packed.results(*_of_packed(q, k, v, call, call.packed))
    if call.options.get("alibi_slopes") is not None:
        return _by_range(q, k, v, call)
    return _all_at_once(q, k, v, call)


def _own(table: Any, call: Call) -> Any:
    """The row of a table for this device."""
    return jnp.asarray(table, jnp.int32)[jax.lax.axis_index(call.axis_name)]


def _all_at_once(q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any]:
    """One call for all rows of a device.

    why spans: visible keys differ between devices, but all devices run the same program.
    """
    queries, band = call.queries, call.band
    given = {name: x for name, x in call.options.items() if name not in ("causal", "window", "align")}
    mask, mine = given.pop("mask", None), _own(queries.rows, call)
    masks = [*masks_of(None if mask is None else _of_rows(mask, mine, call))]
    if not ((band.open and queries.divides) or any(isinstance(x, Spans) for x in masks)):
        masks.append(Spans(visible_spans(mine, None, band, call.lengths)))
    given["mask"] = tuple(masks) or None
    return call.attend({"q": q, "k": k, "v": v}, given, [2 * r for r in range(call.ranks)])


def _by_range(q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any]:
    """One call per contiguous range of a device's rows; its position is an array, read at run time.

    why not always: on a GPU the host waits for the stream to read the position.
    """
    queries, axis = call.queries, call.rows_axis(q)
    mask = call.options.get("mask")
    o: Any = None
    lse: Any = None
    for n, (first, places) in enumerate(queries.stretches()):
        start, place = _own(first, call), _own(places, call)
        part = jnp.take(q, place, axis=axis, mode="fill", fill_value=0)
        given = {**call.options, "align": start + call.band.offset}
        if mask is not None:
            given["mask"] = _of_rows(mask, start + jnp.arange(len(place)), call)
        numbers = [2 * r + n for r in range(call.ranks)]
        of_range = call.attend({"q": part, "k": k, "v": v}, given, numbers)
        if o is None:
            o, lse = (
                jnp.zeros_like(x, shape=(*x.shape[: x.ndim + a], q.shape[axis], *x.shape[x.ndim + a + 1 :]))
                for x, a in zip(of_range, (axis, -1), strict=True)
            )
        o, lse = (
            whole.at[at(place, a)].set(x, mode="drop")
            for whole, x, a in zip((o, lse), of_range, (axis, -1), strict=True)
        )
    return o, lse


def _of_packed(q: Any, k: Any, v: Any, call: Call, packed: Packed) -> tuple[Any, Any]:
    """One call for packed sequences; if causal one per half, over the keys up to its end."""
    ranks, longest, offsets = call.ranks, call.longest, packed.offsets
    window, align = call.options.get("window"), call.options.get("align")
    causal = packed.half_offsets is not None
    band = resolve_band(causal, window, align, False, longest, longest, True)
    if not band.open and not (causal and band.offset == 0):
        raise UnsupportedError(
            "a window of packed sequences that is not causal, or not at their own positions, is not "
            "supported for an all-gather inside jax.shard_map.",
            hint='schedule="alltoall"; or causal=True and no integer as align',
        )
    keys = {"k": k, "v": v, "cu_seqlens_k": offsets * ranks}
    given = {**call.options, "max_seqlen_q": longest, "max_seqlen_k": longest * ranks}
    if packed.half_offsets is None:
        return call.attend({"q": q, "cu_seqlens_q": offsets, **keys}, given, [2 * r for r in range(ranks)])
    given |= {"max_seqlen_q": -(-longest // 2), "align": "bottom_right"}
    rank, each = jax.lax.axis_index(call.axis_name), jnp.diff(packed.half_offsets)
    found = []
    for late, rows in enumerate((packed.early, packed.late)):
        end = 2 * ranks - rank if late else rank + 1
        arrays = {"q": jnp.take(q, rows, axis=-3), "cu_seqlens_q": packed.half_offsets, **keys}
        # why the minimum: with an odd number of rows, which gives NaN, two halves may exceed the sequence.
        given["seqused_k"] = jnp.minimum(each * end, jnp.diff(offsets) * ranks).astype(jnp.int32)
        o, lse = call.attend(arrays, given, [2 * r + late for r in range(ranks)])
        found.append((padded_half(o, -3, bool(late), 0, packed), padded_half(lse, -1, bool(late), 0, packed)))
    (o, lse), (late_o, late_lse) = found
    return o + late_o, lse + late_lse


def _of_rows(mask: Any, mine: Any, call: Call) -> Any:
    """Select some queries of a mask of the whole sequence."""
    if type(mask) is tuple:
        return tuple(_of_rows(x, mine, call) for x in mask)
    if isinstance(mask, BlockMask):
        rows = [stretches(r, call.ranks, call.queries.length, call.queries.zigzag) for r in range(call.ranks)]
        size = block_rows(mask, rows, call.queries.length)
        numbers = jnp.minimum(mine[::size], call.queries.length - 1) // size
        return blocks_of_rows(BlockMask(*map(jnp.asarray, mask)), numbers, size)
    if isinstance(mask, Spans):
        return _spans_of_rows(jnp.asarray(mask.bounds), mine, call)
    x = jnp.asarray(mask)
    if x.ndim < 2 or x.shape[-2] == 1:
        return x
    if x.shape[-2] != call.queries.length:
        raise _other_lengths("mask", x, call)
    return jnp.take(x, mine, axis=-2, mode="clip")


def _spans_of_rows(bounds: Any, mine: Any, call: Call) -> Spans:
    """Select some queries of spans, and intersect them with the band. why: a call takes one Spans."""
    (queries, keys), band = call.lengths, call.band
    if bounds.shape[-3:-1] == (queries, 1):
        bounds = jnp.take(bounds, mine, axis=-3, mode="clip")
        limits = visible_spans(mine, None, band, (queries, keys))
    elif bounds.shape[-3:-1] == (1, keys):  # bounds are queries, which are ascending in every part
        bounds = searchsorted(mine, bounds).astype(bounds.dtype)
        from_keys = Band(-band.offset, band.right, band.left)
        limits = visible_spans(jnp.arange(keys), mine, from_keys, (keys, queries)).swapaxes(-3, -2)
    else:
        raise _other_lengths("mask.bounds", bounds, call)
    return Spans(jnp.clip(bounds, limits[..., :1], limits[..., 1:]))


def _other_lengths(name: str, x: Any, call: Call) -> InvalidArgumentsError:
    queries, keys = call.lengths
    return InvalidArgumentsError(
        f"{name} has shape {x.shape}, and the whole sequence {queries} queries and {keys} keys.",
        hint="the mask of the whole sequence, on every device",
    )

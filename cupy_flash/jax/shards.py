"""The rows of a sequence, or of packed sequences, on each device of a `jax.shard_map`."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..call.masks import Band
from ..errors import InvalidArgumentsError
from ..parallel.group import at
from ..parallel.parts import halves, order_of, positions, stretches
from .call import vary_alike

__all__ = ["Packed", "Shards", "padded_half", "searchsorted", "visible_spans"]


def searchsorted(offsets: Any, rows: Any, side: str = "left") -> Any:
    """`jnp.searchsorted`, also of offsets that differ between devices.

    why by sorting: the default fails in JAX 0.10.2 if shard_map has only some of the mesh axes, and in 0.6.1.
    """
    offsets, rows = vary_alike(offsets, rows)
    return jnp.searchsorted(offsets, rows, side=side, method="sort")


class Shards(NamedTuple):
    """Rows of the whole sequence on each device, of queries or of keys."""

    # array of int, shape (devices, rows of a part): positions in the whole sequence; `length` for padding.
    rows: Any
    length: int  # length of the whole sequence
    zigzag: bool  # whether a device holds a part from the front and one from the back

    @classmethod
    def of(cls, ranks: int, rows: int, causal: bool, parts: Any, seqlen: int | None, what: str) -> Shards:
        """Split a sequence into parts of `rows` rows, with padding at the end; what: "queries" or "keys"."""
        length = ranks * rows if seqlen is None else seqlen
        each = [positions(r, ranks, length, causal, parts=parts) for r in range(ranks)]
        zigzag = order_of(parts, causal) == "zigzag"
        if seqlen is None and ranks > 1 and zigzag:
            halves(rows)
        if (most := max(map(len, each))) != rows:
            raise InvalidArgumentsError(
                f"a device holds {rows} {what}; of {length} one holds {most} at most.",
                hint=f"{most} rows on every device, padded at the end",
            )
        padded = [np.pad(x, (0, rows - len(x)), constant_values=length) for x in each]
        return cls(np.stack(padded), length, zigzag)

    @classmethod
    def packed(cls, ranks: int, rows: int, offsets: Any, causal: bool) -> Shards:
        """Split packed sequences; `offsets` has their offsets in the part of each device."""
        row, rank = jnp.arange(rows, dtype=offsets.dtype), jnp.arange(ranks, dtype=offsets.dtype)[:, None]
        n = jnp.clip(searchsorted(offsets, row, "right") - 1, 0, max(offsets.shape[0] - 2, 0))
        start, stop = offsets[n], offsets[jnp.minimum(n + 1, offsets.shape[0] - 1)]
        stretch, late = (stop - start) // 2 if causal else stop - start, False
        if causal:
            late = row - start >= stretch
        number = jnp.where(late, 2 * ranks - 1 - rank, rank)
        place = start * ranks + number * stretch + (row - start) - jnp.where(late, stretch, 0)
        return cls(jnp.where(row < offsets[-1], place, ranks * rows), ranks * rows, causal)

    @property
    def divides(self) -> bool:
        """Whether no part has padding."""
        return bool(self.length == self.rows.size)

    def whole(self, x: Any, axis: int) -> Any:
        """The whole sequence, from the concatenated rows of all devices."""
        rows = self.rows.reshape(-1)
        # why NumPy: XLA would sort constants at compile time.
        order = np.argsort(rows, kind="stable") if isinstance(rows, np.ndarray) else jnp.argsort(rows)
        return jnp.take(x, order[: self.length], axis=axis)

    def own(self, x: Any, axis: int, axis_name: Any) -> Any:
        """The rows of this device, with 0 in padding."""
        if self.divides:
            return x
        there = jnp.asarray(self.rows < self.length)[jax.lax.axis_index(axis_name)]
        return jnp.where(jnp.expand_dims(there, range(1, -axis)), x, 0)

    def parts(self, x: Any, axis: int) -> Any:
        """The concatenated rows of all devices, from the whole sequence; 0 in padding."""
        return jnp.take(x, self.rows.reshape(-1), axis=axis, mode="fill", fill_value=0)

    def stretches(self) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """For each contiguous range of a part: its first row in the whole, and its rows in the part.

        Shapes (devices,) and (devices, rows of the longest range); padded with an index beyond the part.
        """
        ranks, most = self.rows.shape
        each = [stretches(r, ranks, self.length, self.zigzag) for r in range(ranks)]
        found = []
        for n in range(len(each[0])):
            rows = max(len(held[n]) for held in each)
            first = [sum(map(len, held[:n])) for held in each]
            places = [
                np.pad(np.arange(start, start + len(held[n])), (0, rows - len(held[n])), constant_values=most)
                for start, held in zip(first, each, strict=True)
            ]
            found.append((np.array([held[n].start for held in each]), np.stack(places)))
        return found


class Packed(NamedTuple):
    """Offsets of packed sequences in a part, and the rows of their early and late halves."""

    offsets: Any  # array of int32, shape (sequences + 1,): offsets of the sequences
    # array of int32, shape (sequences + 1,), or None: offsets of the halves; None if not causal.
    half_offsets: Any
    # array of int32, shape (rows / 2,), or None: rows of the part in the early and the late halves; None if
    # not causal.
    early: Any
    late: Any

    @classmethod
    def of(cls, offsets: Any, rows: int, causal: bool) -> Packed:
        """Derive the halves, if causal, from the offsets in a part of `rows` rows."""
        if not causal:
            return cls(offsets, None, None, None)
        half_offsets, row = offsets // 2, jnp.arange(rows // 2, dtype=offsets.dtype)
        # Row r of all early halves is r - half_offsets[n] rows after offsets[n]; row r of all late halves is
        # as far after the middle of the sequence.
        n = jnp.clip(searchsorted(half_offsets, row, "right") - 1, 0, max(offsets.shape[0] - 2, 0))
        return cls(
            offsets,
            half_offsets,
            row + half_offsets[n],
            row + half_offsets[jnp.minimum(n + 1, offsets.shape[0] - 1)],
        )

    def results(self, o: Any, lse: Any) -> tuple[Any, Any]:
        """O and LSE of the sequences, and 0 in other rows.

        All are NaN if a sequence has an odd number of rows. why: lengths are unknown while tracing.
        """
        odd = self.offsets % 2 if self.half_offsets is not None else 0
        poison = jnp.where(jnp.any(odd), jnp.nan, 0.0)
        there = jnp.arange(o.shape[0]) < self.offsets[-1]
        # why the cast: adding a float32 scalar would promote bfloat16.
        o = jnp.where(there[:, None, None], o + poison.astype(o.dtype), 0)
        return o, jnp.where(there, lse + poison.astype(lse.dtype), 0)


def padded_half(x: Any, axis: int, late: bool, fill: float, packed: Packed | None) -> Any:
    """Place one half into a part, and fill the other half."""
    other = jnp.full_like(x, fill)
    whole = jnp.concatenate((other, x) if late else (x, other), axis=axis)
    if packed is None:
        return whole
    rows = packed.late if late else packed.early
    return jnp.full_like(whole, fill).at[at(rows, axis)].set(x)


def visible_spans(mine: Any, theirs: Any, band: Band, lengths: tuple[int, int]) -> Any:
    """Spans of the keys that each row of a part sees in the band; empty for padding.

    Parameters
    ----------
    mine, theirs : array of int
        Positions of queries and keys in the whole sequence, ascending; its length for padding. Without
        `theirs` all keys.
    band : Band
        Band of the whole sequence.
    lengths : (int, int)
        Queries and keys of the whole sequence.
    """
    queries, keys = lengths

    def further(by: int) -> Any:
        return mine + min(max(by, -queries), keys)  # clamped to fit into int32, without effect on the result

    def before(row: Any, side: str) -> Any:
        if theirs is None:
            return jnp.clip(row + (side == "right"), 0, keys).astype(jnp.int32)
        return searchsorted(theirs, row, side).astype(jnp.int32)

    starts = jnp.zeros_like(mine, jnp.int32)
    if band.left is not None:
        starts = before(further(band.offset - band.left), "left")
    last = keys - 1 if band.right is None else jnp.minimum(further(band.offset + band.right), keys - 1)
    stops = jnp.broadcast_to(before(last, "right"), mine.shape)
    bounds = jnp.where((mine < queries)[:, None], jnp.stack([starts, stops], -1), 0)
    return bounds[None, None, :, None]

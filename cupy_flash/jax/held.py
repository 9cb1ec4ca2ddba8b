"""Which rows of a sequence, or of packed ones, each device of a `jax.shard_map` holds."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..call.masks import Band
from ..errors import InvalidArgumentsError
from ..parallel.parts import halves, order_of, positions, stretches

__all__ = ["Held", "Packed", "beside", "seen"]


class Held(NamedTuple):
    """Rows of the whole, of queries or of keys.

    Attributes
    ----------
    rows : array of int, shape (devices, rows of a part)
        `length` where a row is none of the whole.
    length : int
        Of the whole.
    zigzag : bool
    """

    rows: Any
    length: int
    zigzag: bool

    @classmethod
    def of(cls, ranks: int, rows: int, causal: bool, parts: Any, seqlen: int | None, what: str) -> Held:
        """Parts of so many rows, those of the whole before the others; what: queries or keys."""
        length = ranks * rows if seqlen is None else seqlen
        each = [positions(r, ranks, length, causal, parts=parts) for r in range(ranks)]
        zigzag = order_of(parts, causal) == "zigzag"
        if seqlen is None and ranks > 1 and zigzag:
            halves(rows)
        if (most := max(map(len, each))) != rows:
            raise InvalidArgumentsError(
                f"a device holds {rows} {what}; of {length} one holds {most} at most.",
                hint=f"{most} rows on every device, those that are none of its own at the end",
            )
        padded = [np.pad(x, (0, rows - len(x)), constant_values=length) for x in each]
        return cls(np.stack(padded), length, zigzag)

    @classmethod
    def packed(cls, ranks: int, rows: int, cut: Any, causal: bool) -> Held:
        """Parts of packed sequences, which begin at `cut` in each of them."""
        row, rank = jnp.arange(rows, dtype=cut.dtype), jnp.arange(ranks, dtype=cut.dtype)[:, None]
        n = jnp.clip(jnp.searchsorted(cut, row, side="right") - 1, 0, max(cut.shape[0] - 2, 0))
        start, stop = cut[n], cut[jnp.minimum(n + 1, cut.shape[0] - 1)]
        stretch, late = (stop - start) // 2 if causal else stop - start, False
        if causal:
            late = row - start >= stretch
        number = jnp.where(late, 2 * ranks - 1 - rank, rank)
        place = start * ranks + number * stretch + (row - start) - jnp.where(late, stretch, 0)
        return cls(jnp.where(row < cut[-1], place, ranks * rows), ranks * rows, causal)

    @property
    def divides(self) -> bool:
        """Whether every row of every part is one of the whole."""
        return bool(self.length == self.rows.size)

    def whole(self, x: Any, axis: int) -> Any:
        """The whole, from the rows of all devices, one after the other."""
        rows = self.rows.reshape(-1)
        # why NumPy: XLA would sort constants while it compiles.
        order = np.argsort(rows, kind="stable") if isinstance(rows, np.ndarray) else jnp.argsort(rows)
        return jnp.take(x, order[: self.length], axis=axis)

    def own(self, x: Any, axis: int, axis_name: Any) -> Any:
        """The rows of this device, with 0 for those that are none of the whole."""
        if self.divides:
            return x
        there = jnp.asarray(self.rows < self.length)[jax.lax.axis_index(axis_name)]
        return jnp.where(jnp.expand_dims(there, range(1, -axis)), x, 0)

    def parts(self, x: Any, axis: int) -> Any:
        """The rows of all devices, from the whole; 0 where there is none."""
        return jnp.take(x, self.rows.reshape(-1), axis=axis, mode="fill", fill_value=0)

    def stretches(self) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """Of each stretch of a part its first row in the whole, and where the part holds its rows.

        Shapes (devices,) and (devices, rows of the longest stretch); past the part where there is none.
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
    """Where packed sequences of a part begin, and where their two stretches are."""

    cut: Any
    cut_half: Any
    early: Any
    late: Any

    @classmethod
    def of(cls, cut: Any, rows: int, causal: bool) -> Packed:
        """From the offsets of a part of so many rows; stretches where it is causal."""
        if not causal:
            return cls(cut, None, None, None)
        cut_half, row = cut // 2, jnp.arange(rows // 2, dtype=cut.dtype)
        # Of the rows of all early stretches, row r is r - cut_half[n] rows behind cut[n]; late ones so far
        # behind the middle.
        n = jnp.clip(jnp.searchsorted(cut_half, row, side="right") - 1, 0, max(cut.shape[0] - 2, 0))
        return cls(cut, cut_half, row + cut_half[n], row + cut_half[jnp.minimum(n + 1, cut.shape[0] - 1)])

    def results(self, o: Any, lse: Any) -> tuple[Any, Any]:
        """O and LSE of the sequences; 0 of other rows.

        NaN where a sequence has an odd number of rows. why: nobody reads them before it runs.
        """
        odd = self.cut % 2 if self.cut_half is not None else 0
        poison = jnp.where(jnp.any(odd), jnp.nan, 0.0)
        there = jnp.arange(o.shape[0]) < self.cut[-1]
        # why the cast: a number of float32 would make sums of bfloat16 wide.
        o = jnp.where(there[:, None, None], o + poison.astype(o.dtype), 0)
        return o, jnp.where(there, lse + poison.astype(lse.dtype), 0)


def beside(x: Any, axis: int, late: bool, fill: float, packed: Packed | None) -> Any:
    """One stretch as a part, the other one filled."""
    other = jnp.full_like(x, fill)
    whole = jnp.concatenate((other, x) if late else (x, other), axis=axis)
    if packed is None:
        return whole
    rows = packed.late if late else packed.early
    return jnp.full_like(whole, fill).at[(..., rows) + (slice(None),) * (-1 - axis)].set(x)


def seen(mine: Any, theirs: Any, band: Band, lengths: tuple[int, int]) -> Any:
    """Bounds of the keys that each row of a part sees; none for what is no row of the whole.

    Parameters
    ----------
    mine, theirs : array of int
        Queries and keys by their rows of the whole, ascending; its length where there is none. No `theirs`:
        all keys.
    band : Band
        Of the whole.
    lengths : (int, int)
        Queries and keys of the whole.
    """
    queries, keys = lengths

    def further(by: int) -> Any:
        return mine + min(max(by, -queries), keys)  # more makes no difference, and may be no int32

    def before(row: Any, side: str) -> Any:
        # why not searched: JAX 0.10.2 fails to, where a shard_map has some of a mesh's axes.
        if theirs is None:
            return jnp.clip(row + (side == "right"), 0, keys).astype(jnp.int32)
        return jnp.searchsorted(theirs, row, side=side).astype(jnp.int32)

    starts = jnp.zeros_like(mine, jnp.int32)
    if band.left is not None:
        starts = before(further(band.offset - band.left), "left")
    last = keys - 1 if band.right is None else jnp.minimum(further(band.offset + band.right), keys - 1)
    stops = jnp.broadcast_to(before(last, "right"), mine.shape)
    bounds = jnp.where((mine < queries)[:, None], jnp.stack([starts, stops], -1), 0)
    return bounds[None, None, :, None]

"""Packed rows of a call over a KV cache: the sequence and the position of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..describe import MAX_SEQLEN
from ..head_scale import in_dtype

__all__ = ["Rows", "int32_like"]


class Rows(NamedTuple):
    """The queries, or the new keys, of all sequences, end to end."""

    # array of int, shape (rows,): the sequence of each row, and its index within the sequence.
    sequence: Any
    row: Any
    inside: Any  # array of bool, shape (rows,): whether the row belongs to a sequence
    first: Any  # array of int32, shape (batch,): position of the first row of each sequence
    used: Any  # array of int32, shape (batch,): number of rows in use per sequence

    @classmethod
    def of(
        cls, xp: Any, q: Any, k_cache: Any, layout: str, before: int, options: Mapping[str, Any]
    ) -> tuple[Rows, Rows | None]:
        """The rows of queries and of new keys (None without) of a call; lengths are not read on the host.

        Parameters
        ----------
        xp : module
            Namespace of the arrays, as in `merge.merge_parts`.
        q, k_cache : array
        layout : {"bhsd", "bshd"}
        before : int
            Number of keys before key 0 of the cache, that is, of a prefix.
        options : mapping of str to object
            Options from `cache_parts`, with cache_seqlens.
        """
        axis = 1 if layout == "bshd" else 2
        kind = int32_like(xp, q)
        table, k = options.get("block_table"), options.get("k")
        room = k_cache.shape[axis] * (1 if table is None else table.shape[1])
        most = options.get("max_seqlen_k")
        room = room if most is None else min(room, most)
        cut = _cut(xp, q, options.get("cu_seqlens_q"), axis, kind)
        used = options.get("seqused_q")
        used = cut[1:] - cut[:-1] if used is None else used
        stored = options["cache_seqlens"] + xp.zeros_like(used)  # an integer holds for all sequences
        length, new = xp.clip(stored, 0, room), None
        if k is not None:
            cut_new = _cut(xp, k, options.get("cu_seqlens_k_new"), axis, kind)
            added = cut_new[1:] - cut_new[:-1]
            new = cls._at(xp, cut_new, _count(k, axis), added, length + before, kind)
            length = xp.clip(length + added, 0, room)
        first = length - used + before
        return cls._at(xp, cut, _count(q, axis), used, first, kind), new

    @classmethod
    def _at(cls, xp: Any, cut: Any, count: int, used: Any, first: Any, kind: dict[str, Any]) -> Rows:
        rows = xp.arange(count, **kind)
        sequence = xp.clip((rows[:, None] >= cut[None, 1:]).sum(-1), 0, max(0, len(used) - 1))
        row = rows - cut[sequence]
        inside = (rows < cut[-1]) & (row >= 0) & (row < used[sequence])
        return cls(sequence, row, inside, first, used)

    def spans(self, xp: Any, keys: int, left: int | None, right: int | None) -> Any:
        """Keys of the prefix that each row sees, as spans by query; empty for rows of no sequence."""
        stand = self.first[self.sequence] + self.row
        start = xp.zeros_like(stand) if left is None else xp.clip(stand - min(left, MAX_SEQLEN), 0, keys)
        stop = xp.zeros_like(stand) + keys
        if right is not None:  # why clamp twice: the sum might overflow int32
            stop = xp.clip(xp.clip(stand + 1, -MAX_SEQLEN, keys) + min(right, MAX_SEQLEN - keys), 0, keys)
        return xp.stack([start, stop * self.inside], -1)[:, None]

    def rotated(self, xp: Any, x: Any, options: Mapping[str, Any], layout: str) -> Any:
        """The rows rotated by their positions, exactly as attention over the cache rotates them."""
        cos: Any = options.get("rotary_cos")
        sin: Any = options.get("rotary_sin")
        if cos is None:
            return x
        given: Any = options.get("rotary_seqlens")
        first = self.first if given is None else given
        at = xp.clip(first[self.sequence] + self.row, 0, len(cos) - 1)
        acc = xp.float64 if x.dtype == xp.float64 else xp.float32
        half, wide = cos.shape[1], in_dtype(x, acc)
        begin = x.shape[-1] - 2 * half if options.get("rotary_last") else 0
        stop = begin + 2 * half
        if layout == "bshd" or len(x.shape) == 3:
            shape = (*x.shape[:-2], 1, half)
        else:
            shape = (x.shape[0], 1, x.shape[2], half)
        c, s = (in_dtype(table[at], acc).reshape(shape) for table in (cos, sin))
        if options.get("rotary_interleaved"):
            a, b = wide[..., begin:stop:2], wide[..., begin + 1 : stop : 2]
        else:
            a, b = wide[..., begin : begin + half], wide[..., begin + half : stop]
        turned = [a * c - b * s, b * c + a * s]
        if options.get("rotary_interleaved"):
            turned = [xp.stack(turned, -1).reshape(*wide.shape[:-1], 2 * half)]
        return in_dtype(xp.concatenate([wide[..., :begin], *turned, wide[..., stop:]], -1), x.dtype)


def int32_like(xp: Any, x: Any) -> dict[str, Any]:
    """Keyword arguments for an int32 array on the device of x, which torch does not default to."""
    return {"dtype": xp.int32, **({"device": x.device} if xp.__name__ == "torch" else {})}


def _count(x: Any, axis: int) -> int:
    """Number of rows, packed or in all sequences of a batch."""
    return int(x.shape[0] * (1 if len(x.shape) == 3 else x.shape[axis]))


def _cut(xp: Any, x: Any, given: Any, axis: int, kind: dict[str, Any]) -> Any:
    """Offsets of the sequences among these rows: the given ones, or those of a dense array."""
    return xp.arange(x.shape[0] + 1, **kind) * x.shape[axis] if given is None else given

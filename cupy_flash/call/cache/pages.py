"""View any cache, of slots or of pages of any size, as pages of one key."""

from __future__ import annotations

from ...errors import UnsupportedError
from ..arrays import ArrayView
from ..operands import Views, lift, table_of
from ..public_names import public_name

__all__ = ["pages_of_one_key", "rows_apart"]

_MOST = 2**31 - 1


def rows_apart(name: str, raw: Views, layout: str) -> int:
    """Distance between two slots or pages of a cache, in rows of a key head.

    A distance that is no whole number of rows is not supported, nor one beyond an int32 table entry.
    """
    view = lift(raw[name], layout, 4)
    (slots, _, keys, _), (slot, _, row, _) = view.shape, view.strides
    if keys <= 1 or slots <= 1:
        return max(1, keys)
    if row <= 0 or slot < 0 or slot % row:
        raise UnsupportedError(
            f"{public_name(name)} has strides {raw[name].strides}: its slots are no whole number of keys "
            "apart.",
            table_of(raw),
            hint=f"a contiguous copy of {public_name(name)}, or indices=None and a mask",
        )
    apart = slot // row
    if (slots - 1) * apart + keys > _MOST:
        raise UnsupportedError("the cache has keys beyond 31 bits.", table_of(raw), hint="several caches")
    return apart


def pages_of_one_key(name: str, raw: Views, layout: str) -> ArrayView:
    """The cache viewed as pages of one key: key j of slot or page n is page ``n * rows_apart + j``.

    The view also has pages for memory between two slots, such as keys of other heads; no table refers to
    them.
    """
    apart, view = rows_apart(name, raw, layout), lift(raw[name], layout, 4)
    (slots, heads, keys, dim), (slot, head, row, column) = view.shape, view.strides
    pages = (slots - 1) * apart + keys if slots and keys else 0
    seen = view._replace(
        shape=(pages, heads, 1, dim), strides=(slot if keys == 1 else row, head, row, column)
    )
    return lift(seen, layout, 4)

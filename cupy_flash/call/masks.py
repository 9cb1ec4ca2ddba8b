"""The band, the positions that a query may attend to, and how causal, window and align define it."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import InvalidArgumentsError
from .checks import integer, one_of, pair

__all__ = ["Band", "resolve_band"]


class Band(NamedTuple):
    """Query i sees key j if ``i + offset - left <= j <= i + offset + right``; None is open."""

    offset: int = 0  # query i is at key position i + offset
    # Keys seen before and after that position, inclusive.
    left: int | None = None
    right: int | None = None

    @property
    def open(self) -> bool:
        """Whether every query sees every key."""
        return self.left is None and self.right is None

    def keys(self, first_query: int, last_query: int, seqlen_k: int) -> tuple[int, int]:
        """Half-open range of keys that at least one of these queries (last_query inclusive) sees."""
        first = 0 if self.left is None else first_query + self.offset - self.left
        stop = seqlen_k if self.right is None else last_query + self.offset + self.right + 1
        first = min(max(first, 0), seqlen_k)
        return first, min(max(stop, first), seqlen_k)

    def pairs(self, seqlen_q: int, seqlen_k: int) -> int:
        """Number of (query, key) pairs inside the band, a measure of work."""
        if self.open:
            return seqlen_q * seqlen_k
        before = 0 if self.left is None else _ramp(self.offset - self.left, seqlen_q, seqlen_k)
        if self.right is None:
            return seqlen_q * seqlen_k - before
        return _ramp(self.offset + self.right + 1, seqlen_q, seqlen_k) - before


def _ramp(first: int, count: int, top: int) -> int:
    """Sum of the `count` integers first, first + 1, ..., each clamped to [0, top]."""
    zeros = min(max(-first, 0), count)
    rising = min(max(top - first, zeros), count)
    return (rising - zeros) * (2 * first + zeros + rising - 1) // 2 + (count - rising) * top


def _bound(value: object, side: str) -> int | None:
    if value is None:
        return None
    bound = integer(value)
    if bound is None:
        raise InvalidArgumentsError(
            f"window's {side} bound is {value!r}, not an integer or None.",
            hint="window=(left, right), for example window=(128, 0)",
        )
    if bound < 0:
        raise InvalidArgumentsError(
            f"window's {side} bound is {bound}; bounds are counts of keys, at least 0.",
            hint="None for an open side, for example window=(128, None)",
        )
    return bound


def resolve_band(
    causal: bool,
    window: tuple[int | None, int | None] | None,
    align: str | int | None,
    alibi: bool,
    seqlen_q: int,
    seqlen_k: int,
    packed_alike: bool | None = None,
    otherwise: str = "",
) -> Band:
    """Make the band of a call; refuse ambiguous alignment, on which other libraries disagree.

    Parameters
    ----------
    causal : bool
        Keep keys at or before the query's position.
    window : (left, right) or None
        Keys kept before and after the query's position, None = open.
    align : {"top_left", "bottom_right"}, int or None
        Key position of query 0: 0, seqlen_k - seqlen_q, or the integer itself.
    alibi : bool
        Whether ALiBi slopes are given: ALiBi depends on positions too.
    seqlen_q, seqlen_k : int
        Lengths; the longest ones of packed sequences.
    packed_alike : bool, optional
        For packed sequences, whether queries and keys have the same offsets. The kernel then adds
        "bottom_right" to the offset, sequence by sequence.
    otherwise : str
        Text appended to the hint about unequal lengths.

    Returns
    -------
    Band

    Raises
    ------
    InvalidArgumentsError
        A negative or non-integer window, an unknown align, or unequal lengths without align.
    """
    left = right = None
    if window is not None:
        before, behind = pair(window)
        left, right = _bound(before, "left"), _bound(behind, "right")
    if causal:
        right = 0
    positional = left is not None or right is not None or alibi
    if align is None:
        if positional and not (seqlen_q == seqlen_k if packed_alike is None else packed_alike):
            what = "causal" if causal else "alibi_slopes" if alibi else "window"
            lengths = f"{seqlen_q} queries and {seqlen_k} keys"
            if packed_alike is not None:
                lengths = "cu_seqlens_k another array than cu_seqlens_q, or with seqused_q or seqused_k,"
            raise InvalidArgumentsError(
                f"{what} with {lengths} is ambiguous: libraries align the two ends differently.",
                hint='align="top_left" (query 0 at key 0, as torch and JAX) or '
                'align="bottom_right" (last query at last key, as flash-attn)' + otherwise,
            )
        offset = 0
    elif one_of(align, ("top_left",)):
        offset = 0
    elif one_of(align, ("bottom_right",)):
        offset = 0 if packed_alike is not None else seqlen_k - seqlen_q
    elif (position := integer(align)) is not None:
        offset = position
        if abs(offset) >= 2**40:
            raise InvalidArgumentsError(f"align is {offset}, beyond any sequence.", hint="align=0")
    else:
        raise InvalidArgumentsError(
            f"align is {align!r}.", hint='align="top_left", "bottom_right" or an integer'
        )
    return Band(offset if positional else 0, left, right)

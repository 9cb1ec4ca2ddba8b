"""Spans: masks as intervals, in memory linear in the length; functions that make a ``mask=`` of attention.

``cupy_flash.Spans(bounds)`` takes an array of int32, of any library, with the axes of a mask and one more for
bounds. One of the axes of queries and keys has length 1, and the intervals run along it:

    (batch or 1, heads_q or 1, 1, seqlen_k, 2 or 4)     by key: the queries that see key j
    (batch or 1, heads_q or 1, seqlen_q, 1, 2 or 4)     by query: the keys that query i sees

The first two axes may be omitted. The last one holds ``start, stop``, twice for two intervals: a pair is
kept if ``start <= i < stop`` (by query: ``start <= j < stop``) in either. Intervals may overlap; one whose
stop is not above its start is empty. Bounds range from 0 to the length of their axis. Others are refused if
they are in main memory; on a GPU the host does not read bounds, and they are clamped.

Spans combine (AND) with every other mask: a pair is kept if spans, causal, window and the other members of a
tuple ``mask=(spans, other)`` all keep it. For packed sequences batch counts sequences, lengths are the
longest ones, and bounds count from the start of each sequence.

FlashMask stores masks by key (the masked queries), and cuDNN by query. This library has both forms
because some masks need few intervals in only one of them: a causal document is one interval in both;
global keys and a window are two by key; a prefix whose end differs by query is one by query.

The functions use NumPy, from lengths on the host. For another library, convert the bounds:
``Spans(torch.from_numpy(made.bounds))``, or use ``jax.numpy.asarray`` or ``cupy.asarray``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .call.checks import length
from .call.compound import Spans
from .errors import InvalidArgumentsError

__all__ = ["documents", "from_mask", "global_and_window", "prefix_lm", "shared_prefix", "tree"]

Array = np.ndarray[Any, Any]


def _counts(values: Any, name: str) -> Array:
    """A sequence of integers of at least 0, as an array."""
    array = np.asarray(values)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu" or (array < 0).any() or array.sum() >= 2**31:
        raise InvalidArgumentsError(
            f"{name} is {values!r}.", hint=f"{name}=[5, 12, 3], integers of at least 0"
        )
    return array.astype(np.int64)


def _by_key(*bounds: Any) -> Spans:
    """Spans by key, from their bounds."""
    return Spans(np.stack(np.broadcast_arrays(*bounds), axis=-1).astype(np.int32)[None])


def documents(lengths: Sequence[int] | Array) -> Spans:
    """Packed documents that do not attend to each other; with ``causal=True`` causal ones.

    Parameters
    ----------
    lengths : sequence of int
        Lengths of the documents, which may be empty. If the arrays are longer, the remaining rows need a
        length too.

    Returns
    -------
    Spans
        bounds of shape (1, sum of lengths, 2)

    Raises
    ------
    InvalidArgumentsError
        Invalid lengths.

    Examples
    --------
    >>> from cupy_flash import spans
    >>> spans.documents([2, 1]).bounds.tolist()
    [[[0, 2], [0, 2], [2, 3]]]
    """
    counts = _counts(lengths, "lengths")
    stops = np.cumsum(counts)
    return _by_key(np.repeat(stops - counts, counts), np.repeat(stops, counts))


def prefix_lm(prefix: int | Sequence[int] | Array, seqlen: int) -> Spans:
    """A prefix LM: every query sees the prefix, and attention is causal after it.

    Parameters
    ----------
    prefix : int or sequence of int
        Keys of the prefix, or one number per batch entry.
    seqlen : int
        Number of queries, and of keys.

    Returns
    -------
    Spans
        bounds of shape (1, seqlen, 2), or (batch, 1, 1, seqlen, 2) for several prefixes

    Raises
    ------
    InvalidArgumentsError
        Invalid numbers, or a prefix longer than the sequence.

    Notes
    -----
    It is causal already: do not also pass ``causal=True``, which would mask the prefix from itself.
    """
    keys = np.arange(length(seqlen, "seqlen"))
    several = np.ndim(prefix) == 1
    lengths = _counts(prefix, "prefix") if several else np.array([length(prefix, "prefix")])
    if (lengths > seqlen).any():
        raise InvalidArgumentsError(
            f"prefix is {prefix!r}, and seqlen {seqlen}.", hint="a prefix of at most seqlen keys"
        )
    first = np.where(keys < lengths[:, None], 0, keys)
    made = np.stack(np.broadcast_arrays(first, len(keys)), axis=-1).astype(np.int32)
    return Spans(made[:, None, None] if several else made)


def shared_prefix(prefix: int, answers: Sequence[int] | Array) -> Spans:
    """A prompt and several answers to it, all causal; each answer sees the prompt and itself (GRPO).

    It is causal already; ``causal=True`` as well changes nothing.

    Parameters
    ----------
    prefix : int
        Tokens of the prompt, which come first.
    answers : sequence of int
        Lengths of the answers, in order.

    Returns
    -------
    Spans
        bounds of shape (1, prefix + sum of answers, 2)

    Raises
    ------
    InvalidArgumentsError
        Invalid numbers.
    """
    prompt, counts = length(prefix, "prefix"), _counts(answers, "answers")
    stops = np.repeat(prompt + np.cumsum(counts), counts)
    keys = np.arange(prompt + len(stops))
    return _by_key(keys, np.concatenate([np.full(prompt, len(keys)), stops]))


def global_and_window(seqlen: int, tokens: int, window: tuple[int | None, int | None]) -> Spans:
    """A sliding window, and global first tokens that see all and are seen by all (Longformer).

    Parameters
    ----------
    seqlen : int
        Number of queries, and of keys.
    tokens : int
        Number of first tokens that are global.
    window : (left, right)
        Keys before and after its own that a query also sees, inclusive; None is open.

    Returns
    -------
    Spans
        bounds of shape (1, seqlen, 4)

    Raises
    ------
    InvalidArgumentsError
        Invalid numbers.

    Notes
    -----
    With ``causal=True`` it is attention sinks and a window (StreamingLLM).

    Examples
    --------
    >>> from cupy_flash import spans
    >>> spans.global_and_window(4, 1, (1, 0)).bounds.tolist()
    [[[0, 4, 0, 1], [1, 3, 0, 1], [2, 4, 0, 1], [3, 4, 0, 1]]]
    """
    keys, first = np.arange(length(seqlen, "seqlen")), length(tokens, "tokens")
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise InvalidArgumentsError(f"window is {window!r}.", hint="window=(left, right), such as (128, 0)")
    left, right = (len(keys) if side is None else length(side, "window") for side in window)
    start = np.where(keys < first, 0, np.maximum(keys - right, 0))
    stop = np.where(keys < first, len(keys), np.minimum(keys + left + 1, len(keys)))
    return _by_key(start, stop, 0, min(first, len(keys)))


def tree(parents: Sequence[int] | Array, prefix: int = 0) -> Spans:
    """Tree attention: tokens in depth-first order, each of which sees its ancestors and itself.

    Parameters
    ----------
    parents : sequence of int
        Token above each token; -1 for a root. Every subtree is contiguous, as in depth-first order.
    prefix : int
        Keys before the tree, which all tokens see and which have no queries here, such as those of a cache.

    Returns
    -------
    Spans
        bounds of shape (1, prefix + tokens, 2)

    Raises
    ------
    InvalidArgumentsError
        Invalid numbers, a parent that does not come before its child, or another order.

    Examples
    --------
    >>> from cupy_flash import spans
    >>> spans.tree([-1, 0, 0, 2]).bounds.tolist()
    [[[0, 4], [1, 2], [2, 4], [3, 4]]]
    """
    above = np.asarray(parents)
    if above.ndim != 1 or (above.size and above.dtype.kind not in "iu"):
        raise InvalidArgumentsError(f"parents is {parents!r}.", hint="parents=[-1, 0, 0, 2]")
    before, count = length(prefix, "prefix"), len(above)
    stop = np.full(count, count)
    path: list[int] = []  # from a root to the previous token
    for token, parent in enumerate(above.tolist()):
        if not -1 <= parent < token:
            raise InvalidArgumentsError(
                f"parents[{token}] is {parent}.", hint="-1 for a root, or a token that comes before"
            )
        while path and path[-1] != parent:
            stop[path.pop()] = token
        if parent >= 0 and not path:
            raise InvalidArgumentsError(
                f"parents[{token}] is {parent}, whose subtree has ended before token {token}.",
                hint="the tokens in depth-first order",
            )
        path.append(token)
    start = np.concatenate([np.zeros(before, np.int64), np.arange(count)])
    return _by_key(start, np.concatenate([np.full(before, count), stop]))


def _intervals(mask: Array) -> Array | None:
    """Up to two runs of True along the last axis, as (..., 2 or 4) bounds; None if any row has more."""
    edges = np.diff(np.pad(mask.astype(np.int8), [(0, 0)] * (mask.ndim - 1) + [(1, 1)]), axis=-1)
    most = int((edges > 0).sum(axis=-1).max(initial=0))
    if most > 2:
        return None
    bounds = np.zeros((*mask.shape[:-1], 2 * max(most, 1)), np.int32)
    for column, rising in enumerate((1, -1) * max(most, 1)):
        at = np.cumsum(edges == rising, axis=-1)
        has = at[..., -1] > column // 2
        bounds[..., column] = np.where(has, (at == column // 2 + 1).argmax(axis=-1), 0)
    return bounds


def from_mask(mask: Any) -> Spans:
    """Spans equivalent to a boolean mask.

    Parameters
    ----------
    mask : array of bool, shape (..., seqlen_q, seqlen_k)
        True where a query may attend; in main memory, and neither of its last two axes broadcast.

    Returns
    -------
    Spans
        bounds of shape (..., 1, seqlen_k, 2 or 4) or (..., seqlen_q, 1, 2 or 4)
        One interval if that is enough, and by key if both forms work.

    Raises
    ------
    InvalidArgumentsError
        Not an array of booleans, or more than two intervals in some row and in some column.
    """
    array = np.asarray(mask)
    if array.dtype != np.bool_ or not 2 <= array.ndim <= 4:
        raise InvalidArgumentsError(
            f"mask has dtype {array.dtype} and {array.ndim} axes.", hint="booleans, (..., seqlen_q, seqlen_k)"
        )
    by_key, by_query = _intervals(array.swapaxes(-1, -2)), _intervals(array)
    if by_key is None and by_query is None:
        raise InvalidArgumentsError(
            "mask has more than two intervals of keys for some query, and of queries for some key.",
            hint="mask= itself",
        )
    if by_query is None or (by_key is not None and by_key.shape[-1] <= by_query.shape[-1]):
        assert by_key is not None
        return Spans(by_key[..., None, :, :])
    return Spans(by_query[..., :, None, :])

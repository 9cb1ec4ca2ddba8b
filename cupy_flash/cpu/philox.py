"""The keep mask of dropout: Philox 4x32-10, a pure function of seed and position of a weight.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
The counter is the position of the weight, so that every tiling and order, forward and backward, CPU
and GPU, keeps the same weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)


def philox4x32(counter: tuple[Array, ...], key: tuple[int, int]) -> tuple[Array, ...]:
    """Return the four 32-bit words of each counter.

    Parameters
    ----------
    counter : tuple of four uint64 arrays
        Counter words, each below 2**32, which broadcast against each other. Broadcasting happens as
        the rounds mix them, so that the first two rounds work on vectors instead of the whole tile.
    key : tuple of two int
        The 64-bit seed as (low word, high word).

    Returns
    -------
    tuple of four uint64 arrays
        Random words, each below 2**32.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = _MULTIPLIERS[0] * c0
        product1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _WORD_BITS) ^ c1 ^ np.uint64(k0),
            product1 & _LOW_WORD,
            (product0 >> _WORD_BITS) ^ c3 ^ np.uint64(k1),
            product0 & _LOW_WORD,
        )
        k0 = (k0 + _WEYL[0]) & 0xFFFFFFFF
        k1 = (k1 + _WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def threshold(dropout: float) -> int:
    """Return the random word below which a weight is dropped, for a dropout probability in [0, 1)."""
    return min(round(dropout * 2**32), 2**32 - 1)


def keep_mask(dropout: float, seed: int, batch: Array, head: Array, query: range, key: range) -> Array:
    """Return which weights of a tile survive dropout.

    Parameters
    ----------
    dropout : float
        Probability that a weight is dropped.
    seed : int
        64-bit seed.
    batch, head : numpy.ndarray
        Batch and query-head indices, integers that broadcast against each other.
    query, key : range
        Query and key positions of the tile, of step one.

    Returns
    -------
    numpy.ndarray
        Booleans of shape ``broadcast(batch, head).shape + (len(query), len(key))``; True = kept.
    """
    first_group = key.start // 4  # one counter serves four neighbouring keys
    groups = np.arange(first_group, -(-key.stop // 4), dtype=np.uint64)
    words = philox4x32(
        (
            groups,
            np.arange(query.start, query.stop, dtype=np.uint64)[:, None],
            np.asarray(head, np.uint64)[..., None, None],
            np.asarray(batch, np.uint64)[..., None, None],
        ),
        (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF),
    )
    limit = np.uint64(threshold(dropout))
    shape = np.broadcast_shapes(np.shape(batch), np.shape(head))
    keep = np.empty((*shape, len(query), len(groups), 4), np.bool_)
    for place, word in enumerate(words):
        np.greater_equal(word, limit, out=keep[..., place])
    skipped = key.start - 4 * first_group
    return keep.reshape(*shape, len(query), -1)[..., skipped : skipped + len(key)]

"""Draws of sizes and bounds: mostly at the edges where blocks, panels, lanes and jobs begin and end."""

from __future__ import annotations

import random
import zlib
from typing import Any

from cupy_flash.testing import STYLES

__all__ = [
    "HEAD_DIMS",
    "KEYS",
    "affordable",
    "aligned",
    "band",
    "blocks",
    "bound",
    "dtype_of",
    "edge",
    "head_dim",
    "heads",
    "length",
    "many",
    "maybe",
    "several",
    "spans",
    "style",
    "style_of",
]

# Keys of a block, of a chunk; queries of panels; lanes; rows of a job, and what is beside each of them.
SIZES = (8, 12, 16, 32, 48, 64, 128, 144, 192, 288)
KEYS = (144, 288, 432, 576, 720)
LARGE = (576, 1024, 1152, 1300)
# Pairs of a query and a key in all heads that most problems have at most.
PAIRS = 250_000
# The first ones are what a large problem can afford.
HEAD_DIMS = (1, 2, 3, 5, 7, 8, 9, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 80, 96, 100, 128, 129)


def maybe(draw: random.Random, share: float, *values: Any) -> Any:
    """One of the values in that share of draws, else None."""
    return draw.choice(values) if draw.random() < share else None


def length(draw: random.Random) -> int:
    """A number of queries or keys: the edge of a block and its neighbours, few, or anything; 0 seldom."""
    way = draw.random()
    if way < 0.02:
        return 0
    if way < 0.2:
        return draw.choice((1, 1, 2, 3, 7))
    if way < 0.7:
        return draw.choice(SIZES) + draw.choice((-1, 0, 0, 1, 1, 2))
    return draw.randint(1, 320)


def edge(draw: random.Random, most: int) -> int:
    """A number of keys beside the end of a block or a chunk."""
    return min(most, draw.choice(KEYS) + draw.choice((-1, 0, 1, 1)))


def several(draw: random.Random) -> tuple[int, int]:
    """Queries and keys: as many, some of each, or few queries over keys of several blocks, which is cheap."""
    way = draw.random()
    if way < 0.3:
        return draw.randint(1, 64), draw.choice(KEYS) + draw.choice((-1, 0, 1, draw.randint(0, 143)))
    if way < 0.6:
        return (length(draw),) * 2
    return length(draw), length(draw)


def dtype_of(draw: random.Random, dtypes: tuple[str, ...]) -> str:
    """A dtype; bfloat16, which has products of its own, twice as often as others."""
    return draw.choice((*dtypes, *("bfloat16",) * ("bfloat16" in dtypes)))


def many(draw: random.Random) -> tuple[int, int]:
    """Queries and keys of a large problem."""
    queries = draw.choice(LARGE) + draw.choice((-1, 0, 1, 7))
    keys = draw.choice((queries, queries, draw.randint(1, 700), draw.choice(LARGE) + draw.randint(-1, 1)))
    return (queries, keys) if draw.random() < 0.8 else (draw.randint(1, 70), draw.choice(LARGE) + 3)


def head_dim(draw: random.Random) -> tuple[int, int]:
    """Of q and k, and of v: half of them alike."""
    own = draw.choice(HEAD_DIMS)
    return own, own if draw.random() < 0.5 else draw.choice(HEAD_DIMS)


def heads(draw: random.Random) -> tuple[int, int]:
    """Of q, and of k and v."""
    of_k = draw.choice((1, 1, 2, 3))
    return of_k * draw.choice((1, 1, 2, 3, 4)), of_k


def affordable(batch: int, heads: tuple[int, int], lengths: tuple[int, int]) -> dict[str, Any]:
    """Fewer sequences, then fewer heads, where FP64 would take most of a second."""
    pairs = lengths[0] * lengths[1]
    if batch * heads[0] * pairs > PAIRS:
        batch = 1
    if heads[0] * pairs > PAIRS:
        heads = (heads[0] // heads[1], 1)
    if heads[0] * pairs > PAIRS:
        heads = (min(heads[0], 2), 1)
    return {"batch": batch, "heads": heads}


def style(draw: random.Random) -> str:
    """How arrays lie in memory: all alike, or each by its name."""
    return draw.choice(("contiguous", "contiguous", "mixed", *STYLES))


def style_of(name: str, given: str) -> str:
    """How the array of this name lies."""
    return STYLES[zlib.crc32(name.encode()) % len(STYLES)] if given == "mixed" else given


def bound(draw: random.Random, keys: int) -> int | None:
    """Of a window."""
    return draw.choice(
        (None, 0, 1, draw.randint(0, 20), draw.randint(0, keys + 5), draw.randint(0, keys + 5))
    )


def band(draw: random.Random, lengths: tuple[int, int]) -> dict[str, Any]:
    """Causal, window, and where the first query stands."""
    queries, keys = lengths
    return {
        "causal": draw.random() < 0.35,
        "window": (bound(draw, keys), bound(draw, keys)) if draw.random() < 0.5 else None,
        "align": draw.choice(
            ("top_left", "bottom_right", "bottom_right", draw.randint(-queries - 3, keys + 3))
        ),
    }


def aligned(draw: random.Random, made: dict[str, Any]) -> dict[str, Any]:
    """Leave align away where it is not needed, sometimes."""
    positional = made["causal"] or made["window"] is not None or made["alibi"] is not None
    if draw.random() < 0.3 and (not positional or made["lengths"][0] == made["lengths"][1]):
        return made | {"align": None}
    return made


def spans(draw: random.Random, share: float) -> tuple[bool, int, str] | None:
    """Spans in that share of draws: by query, intervals, leading axes."""
    kinds = draw.random() < 0.5, draw.randint(1, 2), draw.choice(("", "h", "b1", "bh", "1h"))
    return maybe(draw, share, kinds)


def blocks(draw: random.Random, share: float) -> tuple[int, int, str] | None:
    """Blocks in that share of draws: rows, columns, leading axes."""
    kinds = draw.choice((16, 32, 64)), draw.choice((16, 64, 128)), draw.choice(("", "h", "b1", "bh"))
    return maybe(draw, share, kinds)

"""A projection of the time of causal `ring_attention`, for each schedule.

Bytes are those of docs/parallel.md, which tests count. Rates of kernels are measured on one GPU. Links reach
a share of their data-sheet bandwidth. Computation and messages overlap where the schedules allow it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from cupy_flash.parallel.traffic import sent

SCHEDULES = ("ring", "alltoall", "allgather")
PASSES = ("forward", "backward")


class Links(NamedTuple):
    """Links between GPUs.

    Attributes
    ----------
    node : int
        GPUs per node.
    inside, between : float
        Bandwidth of a GPU, in bytes per second: inside its node, and between nodes.
    reached : float
        Share of that bandwidth that long messages reach.
    seconds : float
        Fixed time of a step: latency of a message, and Python.
    """

    node: int
    inside: float
    between: float
    reached: float = 0.8
    seconds: float = 30e-6


# 18 NVLink 4 links with 25 GB/s each way; a 400 Gb/s network card per GPU.
HOPPER = Links(node=8, inside=450e9, between=50e9)


class Sequence(NamedTuple):
    """One sequence, split into equal parts; elements have 16 bits, sums 32."""

    tokens: int
    heads: int
    heads_k: int
    head_dim: int
    ranks: int

    @property
    def rows(self) -> float:
        """Rows of a part."""
        return self.tokens / self.ranks

    def bytes_of_part(self) -> dict[str, float]:
        """Q, O, L and KV of docs/parallel.md, and KV32."""
        row = 2 * self.head_dim * self.rows
        kv = 2 * row * self.heads_k
        return {
            "Q": row * self.heads,
            "O": row * self.heads,
            "L": 4.0 * self.rows * self.heads,
            "KV": kv,
            "KV32": 2 * kv,
        }

    def flops(self, passes: str) -> float:
        """FLOP of one process, causal."""
        of_all = 4 * self.heads * self.head_dim * self.tokens**2 / 2
        return of_all * (2.5 if passes == "backward" else 1) / self.ranks


# Returns FLOP per second of a pass ("forward", ...) over a square call with this many rows.
Rate = Callable[[str, float], float]


def seconds(schedule: str, passes: str, x: Sequence, rate: Rate, links: Links = HOPPER) -> float | None:
    """Time of a pass; None where heads do not divide over the processes.

    Parameters
    ----------
    schedule, passes : str
    x : Sequence
    rate : callable
        FLOP per second of a pass, by the rows of a square call with as many scores per head.
    links : Links
    """
    part = x.bytes_of_part()
    if schedule == "ring":
        return _ring(passes, x, part, rate, links)
    if schedule == "alltoall":
        if x.heads_k % x.ranks:
            return None
        compute = x.flops(passes) / rate(passes, x.tokens)
    else:  # calls of half a part, over half the keys on average
        compute = x.flops(passes) / rate(passes, math.sqrt(x.rows / 2 * x.tokens / 2))
    return compute + _exchanged(sent(schedule, passes, x.ranks, part), x.ranks, links)


def _ring(passes: str, x: Sequence, part: Mapping[str, float], rate: Rate, links: Links) -> float:
    """Each step computes half of the pairs of a part, while the next keys and earlier sums are sent."""
    work = x.flops(passes) / x.ranks / rate(passes, x.rows * math.sqrt(0.5))
    if x.ranks == 1:
        return work
    link = links.reached * (links.inside if x.ranks <= links.node else links.between)
    sums = part["KV32"] / link if passes == "backward" else 0.0
    travel = part["KV"] / link + sums + links.seconds
    return (x.ranks - 1) * max(work, travel) + work + sums  # nothing overlaps the sums of the last step


def _exchanged(each: float, ranks: int, links: Links) -> float:
    """Time of messages of equal length to all other ranks, without overlap."""
    if ranks == 1:
        return 0.0
    near = min(ranks, links.node) - 1
    share = each / (ranks - 1) / links.reached
    return max(near * share / links.inside, (ranks - 1 - near) * share / links.between) + links.seconds

"""Time of causal attention over a sequence in parts, for each schedule of `ring_attention`: a projection.

Bytes are those of docs/parallel.md, which tests count. Rates of kernels are measured, on one GPU. Links send
a share of what data sheets say. Work and messages overlap where the schedules let them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from cupy_flash.parallel.traffic import sent

SCHEDULES = ("ring", "alltoall", "allgather")
PASSES = ("forward", "backward")


class Links(NamedTuple):
    """What connects GPUs.

    Attributes
    ----------
    node : int
        GPUs of a node.
    inside, between : float
        Bytes per second that a GPU sends inside its node, and out of it.
    reached : float
        Share of that which long messages reach.
    seconds : float
        Of a message however short, and of the Python of a step.
    """

    node: int
    inside: float
    between: float
    reached: float = 0.8
    seconds: float = 30e-6


# 18 links of NVLink 4, of 25 GB/s each way; a network card of 400 Gb/s for each GPU.
HOPPER = Links(node=8, inside=450e9, between=50e9)


class Sequence(NamedTuple):
    """One sequence, its rows in equal parts; elements of 16 bits, sums of 32."""

    tokens: int
    heads: int
    heads_k: int
    head_dim: int
    ranks: int

    @property
    def rows(self) -> float:
        """Of a part."""
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
        """Of one process, causal."""
        of_all = 4 * self.heads * self.head_dim * self.tokens**2 / 2
        return of_all * (2.5 if passes == "backward" else 1) / self.ranks


# FLOP per second of a pass over square calls of so many rows.
Rate = Callable[[str, float], float]


def seconds(schedule: str, passes: str, x: Sequence, rate: Rate, links: Links = HOPPER) -> float | None:
    """Time of a pass; None where heads do not divide over the processes.

    Parameters
    ----------
    schedule, passes : str
    x : Sequence
    rate : callable
        What a call reaches that has as many scores in each head as a square one of so many rows.
    links : Links
    """
    part = x.bytes_of_part()
    if schedule == "ring":
        return _ring(passes, x, part, rate, links)
    if schedule == "alltoall":
        if x.heads_k % x.ranks:
            return None
        compute = x.flops(passes) / rate(passes, x.tokens)
    else:  # a stretch of half a part, over half the keys in the mean
        compute = x.flops(passes) / rate(passes, math.sqrt(x.rows / 2 * x.tokens / 2))
    return compute + _exchanged(sent(schedule, passes, x.ranks, part), x.ranks, links)


def _ring(passes: str, x: Sequence, part: Mapping[str, float], rate: Rate, links: Links) -> float:
    """Steps of two parts each; the next keys, and earlier sums, travel beside the work."""
    work = x.flops(passes) / x.ranks / rate(passes, x.rows * math.sqrt(0.5))
    if x.ranks == 1:
        return work
    link = links.reached * (links.inside if x.ranks <= links.node else links.between)
    sums = part["KV32"] / link if passes == "backward" else 0.0
    travel = part["KV"] / link + sums + links.seconds
    return (x.ranks - 1) * max(work, travel) + work + sums  # the sums of the last step go home alone


def _exchanged(each: float, ranks: int, links: Links) -> float:
    """Time of messages of equal length to all others; nothing runs beside them."""
    if ranks == 1:
        return 0.0
    near = min(ranks, links.node) - 1
    share = each / (ranks - 1) / links.reached
    return max(near * share / links.inside, (ranks - 1 - near) * share / links.between) + links.seconds

"""Progress of a call of the compiled core, from its count of finished jobs."""

from __future__ import annotations

import ctypes

from ...call.problem import Problem
from .params import DONE, JOBS

__all__ = ["Watch", "share_of"]

# Matrix products per tile of each entry point, as weights of its share.
_PRODUCTS = {"forward": 2, "backward": 5, "backward_dbias": 2, "function_sums": 0, "decode": 2, "jvp": 5,
             "forward_jvp": 6, "hvp": 15, "hvp_dbias": 6, "statistics": 1}  # fmt: skip


def share_of(problem: Problem, jobs: int, done: int) -> float:
    """The share of (query, key) pairs in the finished jobs of an entry point.

    why not the share of jobs: in a causal call the last queries see the most keys. The jobs of a key head
    are consecutive, and each is a part of its queries, the last part first.
    """
    p = problem
    heads = p.batch * p.heads_k
    total = p.band.pairs(p.seqlen_q, p.seqlen_k)
    parts = jobs // heads
    # why not statistics: without LSE half of its jobs belong to another pass.
    plain = p.packed or p.cache is not None or p.second_order or p.direction == "statistics"
    if plain or not total or jobs % heads or parts > p.seqlen_q:
        return done / jobs
    head, part = divmod(done, parts)
    rows = p.seqlen_q * (parts - part) // parts
    return (head + 1 - p.band.pairs(rows, p.seqlen_k) / total) / heads


class Watch:
    """Reads the progress of a call that runs in another thread: the core counts jobs in its params struct."""

    def __init__(self, problem: Problem, names: tuple[str, ...], struct: ctypes.Array[ctypes.c_char]) -> None:
        self._problem, self._products = problem, [_PRODUCTS[name] for name in names]
        self._jobs, self._done = (ctypes.c_int64.from_buffer(struct, place) for place in (JOBS, DONE))
        self._begun, self._most = -1, 0.0

    def begin(self) -> None:
        """Start to count the jobs of the next entry point."""
        self._jobs.value = self._done.value = 0
        self._begun += 1

    def share(self) -> float:
        """The finished share of the call; it never falls, in whichever order the counters become visible."""
        begun, jobs, done = self._begun, self._jobs.value, self._done.value
        if begun >= 0 and jobs:
            inside = share_of(self._problem, jobs, min(done, jobs)) * self._products[begun]
            share = (sum(self._products[:begun]) + inside) / sum(self._products)
            self._most = max(self._most, share)
        return self._most

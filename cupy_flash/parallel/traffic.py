"""Bytes that a process sends, used to choose a schedule if the caller names none."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..call.adopt import adopt
from .group import LocalCall
from .parts import Split

__all__ = ["part_of", "sent"]


def part_of(local_call: LocalCall, wanted: tuple[bool, bool], padded: bool = False) -> dict[str, float]:
    """Bytes of the arrays of one part, as needed by `sent`; for parts of several lengths the mean.

    `wanted` says whether any process needs the gradients of k, and of v; `padded`, that all parts have one
    length.
    """
    options, axis, ranks = local_call.options, local_call.row_axis, local_call.link.ranks
    q, k, v = (local_call.arrays[name] for name in "qkv")
    parts = q.shape[axis], k.shape[axis]
    if local_call.cu_seqlens is None and options["seqlen"] is not None and not padded:
        queries, keys_of_all = Split.of(local_call).lengths
        parts = queries / ranks, keys_of_all / ranks
    item = adopt(q, "q").item_bytes
    sums = max(item, 4)
    heads_q, heads_k = (math.prod((*x.shape[:axis], *x.shape[axis + 1 : -1])) for x in (q, k))
    keys = [heads_k * parts[1] * x.shape[-1] for x in (k, v)]
    return {
        "Q": item * heads_q * parts[0] * q.shape[-1],
        "O": item * heads_q * parts[0] * v.shape[-1],
        "L": sums * heads_q * parts[0],
        "KV": item * sum(keys),
        "KV32": sums * sum(x for x, asked_for in zip(keys, wanted, strict=True) if asked_for),
    }


def sent(
    schedule: str,
    direction: str,
    ranks: int,
    part: Mapping[str, float],
    steps: int | None = None,
    kept: bool = False,
) -> float:
    """Bytes that a process sends in one pass.

    Parameters
    ----------
    schedule : {"ring", "alltoall", "allgather"}
    direction : {"forward", "backward"}
    ranks : int
    part : mapping of str to float
        Bytes of one part: Q, O, L (lse), KV, KV32 (gradients of k and v, in the dtype of sums).
    steps : int, optional
        Steps of a ring. Default: one per process; with a window there may be fewer.
    kept : bool
        Whether the backward pass reuses received arrays, as in JAX, which sums gradients in the dtype of k.
    """
    q, o, lse, kv, kv32 = (part[name] for name in ("Q", "O", "L", "KV", "KV32"))
    others, turns = ranks - 1, ranks if steps is None else steps
    of = {
        ("ring", "forward"): (turns - 1) * kv,
        ("ring", "backward"): (turns - 1) * kv + (turns * kv32 if turns > 1 else 0),
        ("alltoall", "forward"): (q + kv + o + lse) * others / ranks,
        ("alltoall", "backward"): (2 * q + 2 * kv + 2 * o + lse) * others / ranks,
        ("allgather", "forward"): others * kv,
        ("allgather", "backward"): others * (kv + kv32),
    }
    if kept:
        of["alltoall", "backward"] = (q + kv + o) * others / ranks
        of["allgather", "backward"] = others * kv
    return of[schedule, direction]

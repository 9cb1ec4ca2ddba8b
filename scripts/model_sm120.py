#!/usr/bin/env python3
"""Predict the two forward kernels of sm_120 before they can be measured: all threads copy, or a warp does.

A model of unit costs, as scripts/model_hopper.py is: one scheduler of a multiprocessor with its two warps. An
instruction takes a cycle of issue, an exponential 8 of MUFU, a product its cycles in a queue for the tensor
cores; memory takes the time of a trip to L2. For comparing schedules, not for promising speed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import NamedTuple

MUFU, SHUFFLE, QUEUE = 8, 30, 2  # cycles; products that wait at the tensor cores
BARRIER, TEST = 30, 20  # of the block with all there; of an mbarrier whose phase has ended
TRIP, LEAVE = 1000, 300  # Q from L2; O through shared memory
CARDS = {"RTX PRO 6000": 16, "GeForce RTX 50": 32}  # cycles of a scheduler for a product m16n8k16


class Kernel(NamedTuple):
    """What SASS says of a kernel: head dim 128, 16 bits, no mask, NVRTC 13.5.

    Attributes
    ----------
    name : str
    rows, keys : int
        Of a warp, and of a block of keys.
    loop : int
        Instructions of a warp and block of keys.
    copies : int
        Those of them that copy, behind two barriers of the block; 0: a warp copies for the others.
    begin, end : int
        Instructions of a tile before its first product, and after its last.
    q_stages : int
        Tiles whose Q there is room for.
    """

    name: str
    rows: int
    keys: int
    loop: int
    copies: int
    begin: int
    end: int
    q_stages: int = 1


KERNELS = (
    Kernel("all threads copy, 128 x 32", 32, 32, 573, 60, 700, 500),
    Kernel("a warp copies, 128 x 64", 16, 64, 479, 0, 250, 450),
    Kernel("a warp copies, 128 x 32", 16, 32, 291, 0, 250, 450, q_stages=2),
)

# One step of a warp: ("issue", n), ("mufu",), ("product",), ("drain",) of products, ("sleep", n),
# ("need", tile) and ("free", tile) of Q.
Step = tuple[object, ...]


def _tile(kernel: Kernel, blocks: int, tile: int) -> Iterator[Step]:
    """What a warp does for a tile with so many blocks of keys."""
    pairs = kernel.rows * kernel.keys
    products, exponentials, shuffles = pairs // 16, pairs // 32 + kernel.rows // 8, kernel.rows // 4
    # Two fifths of the rest are operands and addresses of products; three are maxima, weights and sums.
    others = kernel.loop - 2 * products - exponentials - shuffles - kernel.copies
    half: list[Step] = [("sleep", BARRIER if kernel.copies else TEST), ("issue", kernel.copies // 2)]
    half += [*repeat(("product",), products), ("issue", others // 5), ("drain",)]
    weigh: list[Step] = [("issue", others // 5), *repeat(("sleep", SHUFFLE), shuffles // 2)]
    weigh += chain.from_iterable(
        [("issue", others * 2 // 5 // exponentials), ("mufu",)] for _ in range(exponentials)
    )
    yield from [("need", tile), ("issue", kernel.begin)]
    for _ in range(blocks):
        yield from [*half, *weigh, *half]
    yield from [("issue", kernel.end), ("sleep", LEAVE), ("free", tile)]


def utilisation(kernel: Kernel, cycles: int, order: str, keys: int, tiles: int = 2) -> float:
    """Fraction of the time in which the tensor cores work.

    The two warps of a scheduler are of two blocks of threads, each with tiles of its own; or, where a warp
    copies for the others, of one, which share a tile.

    Parameters
    ----------
    kernel : Kernel
    cycles : int
        Of a product.
    order : {"the same", "in turn"}
        Which of two warps goes first: the one that went last, or the other.
    keys, tiles : int
        Keys of a tile, and tiles.
    """
    blocks = keys // kernel.keys
    programs = [
        list(chain.from_iterable(_tile(kernel, blocks, tile) for tile in range(tiles))) for _ in range(2)
    ]
    at, awake, left, ends = [0, 0], [0, 0], [0, 0], [0, 0]
    freed: list[list[int]] = [[] for _ in range(tiles)]
    now = tensor_free = mufu_free = busy = first = 0
    while at != [len(program) for program in programs]:
        soonest = None
        issued = False
        for w in (first, 1 - first) if order == "the same" else (1 - first, first):
            while at[w] < len(programs[w]):
                if awake[w] > now:
                    soonest = min(soonest or awake[w], awake[w])
                    break
                kind, *rest = programs[w][at[w]]
                n = int(str(rest[0])) if rest else 1
                if kind == "sleep":
                    awake[w] = now + n
                elif kind == "drain":
                    awake[w] = max(now, ends[w])
                elif kind == "need":
                    # why now: a block of threads with one tile fetches its own Q.
                    before = freed[n - kernel.q_stages] if n >= kernel.q_stages else [-TRIP] * 2
                    fetched = [now] * 2 if kernel.copies else before
                    if len(fetched) < 2:
                        soonest = min(soonest or now + 1, now + 1)
                        break
                    awake[w] = max(now, fetched[-1] + TRIP)
                elif kind == "free":
                    freed[n].append(now)
                else:  # takes the cycle of issue
                    full = kind == "product" and tensor_free > now + QUEUE * cycles
                    full = full or (kind == "mufu" and mufu_free > now + MUFU)
                    if issued or full:
                        soonest = min(soonest or now + 1, now + 1)
                        break
                    if kind == "product":
                        tensor_free = ends[w] = max(tensor_free, now) + cycles
                        busy += cycles
                    elif kind == "mufu":
                        mufu_free = max(mufu_free, now) + MUFU
                    if kind != "issue" or n > 0:
                        issued, first = True, w
                    left[w] += 1
                    if left[w] >= n:
                        left[w] = 0
                        at[w] += 1
                    if issued:
                        soonest = now + 1
                        break
                    continue
                at[w] += 1
        now = max(soonest or now + 1, now + 1)
    return busy / max(now, tensor_free)


def main(arguments: Sequence[str]) -> None:
    """Print how much of the time tensor cores work, for tiles of 1024 keys or as many as said."""
    keys = int(arguments[0]) if arguments else 1024
    for kernel in KERNELS:
        shares = (
            utilisation(kernel, cycles, order, keys)
            for cycles in CARDS.values()
            for order in ("the same", "in turn")
        )
        print(f"| {kernel.name} | {' | '.join(f'{share:.2f}' for share in shares)} |")


if __name__ == "__main__":
    main(sys.argv[1:])

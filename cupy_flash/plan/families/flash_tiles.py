"""Tiles of the tensor-core family, as tables. Columns are how much shared memory a block may have.

Each cell was compiled without spilling, by both compilers, but for that of SPILLED_OWN_KEYS. Rows go from
small to large, and the first that a problem's head dims fit is used.
"""

from __future__ import annotations

from typing import NamedTuple

from ..catalog import Arch

__all__ = [
    "BACKWARD", "BACKWARD_WIDE", "BETWEEN_PRODUCTS", "DBIAS", "FORWARD", "FORWARD_OF", "FORWARD_WIDE",
    "HEAD_DIMS", "HESSIAN", "SPILLED_OWN_KEYS", "TANGENT", "BackwardTile", "ForwardTile", "WideForwardTile",
    "column",
]  # fmt: skip

# (head_dim, head_dim_v) classes: of q and k, and of v. Where a row has no cell, the next class is used:
# float32 has none of its own for 192, 128, whose kernels would be 0.4 MB of the 8 of an architecture.
HEAD_DIMS = ((32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))

# Column of an architecture: 163 KiB or more, 99 KiB, or Turing's 64 KiB.
LARGE, MEDIUM, TURING = range(3)


def column(arch: Arch) -> int:
    """Column of these tables for an architecture."""
    if arch.capability < 80:
        return TURING
    return LARGE if arch.shared_bytes >= 163 * 1024 else MEDIUM


class ForwardTile(NamedTuple):
    """A cell of a forward table.

    Attributes
    ----------
    m, n : int
        Queries and keys of a block.
    threads : int
    q_in_registers : int
        1: a warp holds its part of Q in registers; 0: it reads it from shared memory again.
    min_blocks : int
        Blocks per multiprocessor for which registers are capped.
    loops : int
        2: blocks of keys that need masks have a loop of their own; 1: one loop, with a branch.
    chunks : int
        2: chunks of keys are different blocks' only, as no registers are left to unite them; it spilled 80
        bytes on sm_120.
    """

    m: int
    n: int
    threads: int
    q_in_registers: int
    min_blocks: int
    loops: int = 1
    chunks: int = 1


def _row(*cells: tuple[int, ...] | None) -> tuple[ForwardTile | None, ...]:
    """One row; a missing cell is the one to its left."""
    filled = list(cells)
    while len(filled) < 3:
        filled.append(filled[-1])
    return tuple(None if cell is None else ForwardTile(*cell) for cell in filled)


# "band": causal, window, sinks, packed. "any": also mask, bias, ALiBi, softcap, dropout, scale <= 0. float32
# has "any" only, which serves bands too: beside three products the score code is small.
# why no third kind: without a band the main loop has the same instructions, so it would be the same speed.
# why one loop in some: with two, the values that live through both spill: 4 bytes in 128x128 of head dim 64,
# 68 to 96 in 128x64 of 128. The classes 32 and 192 have one because another is 20 to 30 KB each.
FORWARD = {
    ("16-bit", "band"): (  # LARGE                  MEDIUM                     TURING
        _row((128, 128, 128, 1, 2, 1), (128, 128, 128, 1, 2, 1), (64, 64, 128, 1, 2, 1)),
        _row((128, 128, 128, 0, 2, 1), (128, 64, 128, 1, 2, 2), (64, 64, 128, 1, 2, 2)),
        _row((128, 64, 128, 0, 2, 2), (128, 64, 128, 0, 2, 2), (64, 64, 128, 1, 1, 2)),
        _row((128, 64, 128, 0, 2, 1), (128, 32, 128, 0, 2, 2), (128, 32, 256, 1, 1, 2)),
        _row((128, 64, 256, 0, 1, 2), (128, 32, 256, 1, 1, 2), (64, 32, 128, 1, 1, 2)),
        _row((128, 64, 256, 0, 1, 1), (128, 32, 256, 1, 1, 1), (64, 32, 128, 0, 1, 2)),
        _row((128, 64, 256, 0, 1, 2), (128, 32, 256, 0, 1, 2), (64, 16, 128, 0, 1, 2)),
    ),
    ("16-bit", "any"): (
        _row((64, 64, 128, 1, 2), (64, 64, 128, 1, 2), (64, 64, 128, 1, 2)),
        _row((64, 64, 128, 1, 2), (64, 64, 128, 1, 2), (64, 64, 128, 1, 2)),
        _row((64, 64, 128, 1, 2), (64, 64, 128, 1, 2), (64, 32, 128, 1, 1)),
        _row((64, 64, 128, 1, 2), (64, 64, 128, 1, 2), (64, 32, 128, 1, 1)),
        _row((64, 32, 128, 1, 2), (64, 32, 128, 1, 2), (64, 32, 128, 1, 1)),
        _row((64, 32, 128, 1, 2), (64, 32, 128, 1, 2), (64, 32, 128, 0, 1)),
        _row((64, 32, 128, 0, 1), (64, 32, 128, 0, 1), (64, 16, 128, 0, 1)),
    ),
    ("tf32", "any"): (
        _row((128, 32, 128, 0, 2), (128, 32, 128, 0, 2), None),
        _row((128, 32, 128, 0, 2), (128, 32, 128, 0, 2), None),
        _row((64, 32, 128, 0, 2), (64, 32, 128, 0, 2), None),
        _row((64, 32, 128, 0, 2), (128, 32, 256, 0, 1), None),
        _row(None),
        _row((128, 32, 256, 0, 1), (64, 16, 128, 0, 1), None),
        _row((64, 32, 128, 0, 1), (32, 16, 64, 0, 1, 1, 2), None),
    ),
}

# Cells of LARGE that are others on some architecture, by its capability. why: on sm_90, where this family
# takes what Hopper's own kernels cannot, the tile of head dim 128 spills 56 bytes in four warps, with NVRTC
# 12.9, and that of 192 under blocks 76 with Q in registers; on sm_100 that of float32 and 256 spills 24,
# and 16 with half the keys where it unites chunks. On an H200 64 keys are 6 to 8 % faster at float32 and 128
# than two blocks of 32 at once (4096 queries, in one run). There 32 keys in four warps have 342 TFLOP/s at
# 128 and bfloat16 (causal, 8192 keys), 64 in eight 305, and 128 in eight 333.
FORWARD_OF = {
    (90, "16-bit", "band", (128, 128)): ForwardTile(128, 32, 128, 0, 2, 2),
    (90, "16-bit", "any", (192, 192)): ForwardTile(64, 32, 128, 0, 2),
    (90, "tf32", "any", (128, 128)): ForwardTile(64, 64, 128, 0, 1),
    (100, "tf32", "any", (256, 256)): ForwardTile(64, 16, 128, 0, 1, 1, 2),
}


class WideForwardTile(NamedTuple):
    """A cell of `FORWARD_WIDE`: 64 keys, 8 warps.

    Attributes
    ----------
    m : int
        Queries of a block.
    q_steps : int
        Of 16 columns of Q, that are in registers; the others are in shared memory.
    slots : int
        Chunks of K and V in shared memory.
    k_columns : int
        Of a chunk of K; one of V is 16 keys.
    """

    m: int
    q_steps: int
    slots: int
    k_columns: int


# Head dims above those of HEAD_DIMS: flash_forward_wide, whose warps share rows. 16 bits, "band" only.
# why none of 576 for Turing: 64 KiB do not hold Q, two chunks and P.
FORWARD_WIDE: dict[tuple[int, int], tuple[WideForwardTile | None, ...]] = {  # LARGE, MEDIUM, TURING
    (384, 384): tuple(WideForwardTile(*x) for x in ((64, 0, 4, 128), (64, 0, 2, 128), (32, 0, 2, 128))),
    (512, 512): tuple(WideForwardTile(*x) for x in ((64, 0, 4, 128), (64, 8, 2, 128), (32, 8, 2, 128))),
    (576, 512): (WideForwardTile(64, 0, 4, 64), WideForwardTile(64, 8, 2, 64), None),
}


# ---------------------------------------------------------------------- backward


class BackwardTile(NamedTuple):
    """A cell of a backward table.

    Attributes
    ----------
    m, n : int
        Queries and keys of a block.
    threads : int
    slots : int
        How Q and dO are kept while they stream: 0 waiting in registers (no cp.async), 1 two tiles of Q and
        one of dO, 2 two tiles of each.
    v_in_registers : int
        Pass dqkv. 1: a warp holds the rows of V that it reads in registers; 0: V stays in shared memory.
    """

    m: int
    n: int
    threads: int
    slots: int
    v_in_registers: int = 0

    @property
    def exponentials(self) -> int:
        """Of a thread and tile, in pass dqkv."""
        return self.m * self.n // self.threads


# From one product of pass dqkv to the next there may be as many instructions, and half of the exponentials
# or 8. why: before exponentials and dS ran under products there were up to 329, and all of the exponentials.
# Of all kernels that it holds, both compilers make 173 at most (head dim 64 for sm_100, CUDA 13), else 156.
BETWEEN_PRODUCTS = 176


def _cells(*cells: tuple[int, ...] | None) -> tuple[BackwardTile | None, ...]:
    """One row: LARGE, MEDIUM, TURING."""
    return tuple(None if cell is None else BackwardTile(*cell) for cell in cells)


# A block that owns keys: pass dqkv (dQ by atomic additions, or none).
# why V in registers at head dim 256: beside it there is room for 32 keys in 99 KiB, and in Turing's 64 for
# half the threads, whose sums spilled. With 16 queries, 8 n8 columns of S for 8 warps, it takes 32 registers;
# and 64 keys halve the reads of Q and dO and the additions to dQ.
_OWN_KEYS = (  # LARGE             MEDIUM              TURING
    _cells((128, 128, 256, 2), (64, 128, 256, 2), (64, 128, 256, 0)),
    _cells((128, 128, 256, 2), (64, 128, 256, 2), (64, 64, 256, 0)),
    _cells((64, 128, 256, 2), (64, 64, 256, 2), (32, 64, 128, 0)),
    _cells((64, 128, 256, 2), (64, 64, 256, 2, 1), (32, 64, 256, 0)),
    _cells((64, 64, 256, 2), (32, 64, 256, 2), (32, 32, 256, 0)),
    _cells((64, 64, 256, 2), (32, 64, 256, 2, 1), (32, 32, 256, 0)),
    _cells((32, 64, 256, 2), (16, 64, 256, 2, 1), (16, 64, 256, 0, 1)),
)
# Bytes that 16-bit "any" of 192 spills with NVRTC 12.9, by target. why allowed: without V in registers 64
# keys do not fit 99 KiB.
SPILLED_OWN_KEYS = {("16-bit", "any", (192, 192)): (("sm_86", 8),)}
# The same; fewer queries at head dim 64, as the Hopper kernel has them, which shares passes with this one.
_OWN_KEYS_ANY = tuple((row[1], *row[1:]) if n == 1 else row for n, row in enumerate(_OWN_KEYS))
_OWN_KEYS_TF32 = (
    _cells((64, 128, 256, 2), (64, 64, 256, 2), None),
    _cells((64, 64, 256, 2), (32, 64, 256, 2), None),
    _cells((32, 32, 128, 2), (32, 32, 128, 2), None),
    _cells((32, 64, 256, 2), (32, 32, 256, 1), None),
    _cells(None, None, None),
    _cells((32, 32, 256, 2), (16, 32, 128, 1), None),
    _cells((16, 32, 128, 1), (16, 16, 64, 2), None),
)
# A block that owns queries: pass dq of the deterministic way.
# why 4 warps for 32 queries there: two share rows and halve the sums, of which 128 spilled.
_OWN_QUERIES = (
    _cells((128, 64, 256, 2), (128, 64, 256, 2), (64, 64, 128, 0)),
    _cells((128, 64, 256, 2), (128, 64, 256, 2), (64, 64, 128, 0)),
    _cells((128, 64, 256, 2), (128, 64, 256, 2), (64, 32, 128, 0)),
    _cells((128, 32, 256, 2), (128, 32, 256, 2), (64, 32, 128, 0)),
    _cells((64, 32, 128, 2), (64, 32, 128, 2), (32, 32, 64, 0)),
    _cells((64, 32, 128, 2), (64, 32, 128, 2), (32, 32, 64, 0)),
    _cells((64, 16, 128, 2), (64, 16, 128, 2), (32, 32, 128, 0)),
)
_OWN_QUERIES_TF32 = (
    _cells((64, 32, 128, 2), (64, 32, 128, 2), None),
    _cells((64, 32, 128, 2), (64, 32, 128, 2), None),
    _cells((64, 32, 128, 2), (64, 32, 128, 2), None),
    _cells((64, 32, 128, 2), (64, 32, 128, 2), None),
    _cells(None, None, None),
    _cells((64, 16, 128, 2), (32, 16, 64, 2), None),
    _cells((64, 16, 256, 2), (32, 16, 128, 2), None),
)

# (kind, pass, mask) -> rows. float32 and dq have "any" only, which serves bands too: beside three products
# the score code is small, and dq is for the slower of the two ways.
BACKWARD = {
    ("16-bit", "dqkv", "band"): _OWN_KEYS,
    ("16-bit", "dqkv", "any"): _OWN_KEYS_ANY,
    ("16-bit", "dq", "any"): _OWN_QUERIES,
    ("tf32", "dqkv", "any"): _OWN_KEYS_TF32,
    ("tf32", "dq", "any"): _OWN_QUERIES_TF32,
}

# Head dims above those of HEAD_DIMS: (queries, keys) of the passes of flash_backward_wide, by class, in 99
# KiB and more. why no more rows: sums of dK and dV of 32 keys are 128 registers, K and V 64.
BACKWARD_WIDE = {
    (384, 384): {"dkv": (16, 32), "dq": (32, 16)},
    (512, 512): {"dkv": (16, 32), "dq": (32, 16)},
}

# A block that owns a tile of the bias: pass dbias, for every head dim, 64 columns of it at a time.
DBIAS = (128, 64)


# ---------------------------------------------------------------------- tangent

# (queries, keys) by class: a warp owns 16 queries, two threads to a query. Kinds as of FORWARD.
# why 16: with 32 a thread would have 256 sums at head dim 128, and above it 16 are too many.
# why two classes: each of the others would be 0.4 MB of an architecture.
# why 32 keys of "any": with 64 its code is twice as long, and spills at head dim 128 on sm_90.
TANGENT = {
    ("16-bit", "band"): {  # LARGE   MEDIUM
        (64, 64): ((128, 64), (128, 64)),
        (128, 128): ((128, 64), (64, 64)),
    },
    ("16-bit", "any"): {
        (64, 64): ((128, 32), (128, 32)),
        (128, 128): ((128, 32), (128, 32)),
    },
    ("tf32", "any"): {
        (64, 64): ((128, 32), (64, 32)),
        (128, 128): ((64, 32), (64, 16)),
    },
}


# ---------------------------------------------------------------------- hessian

# (queries, keys) of the passes by class: a warp owns 16 of the rows that a block owns. One kind, which serves
# what only scales, caps and shifts scores: others would be a megabyte of an architecture.
# why fewer of the streamed rows with wide heads: a thread holds 128 sums of keys there, and Q, dotQ and dO
# come in two slots beside K, dotK, V and dotV.
# why not float32 above 64: these leave 32 keys in 163 KiB, and none in 99.
HESSIAN = {
    ("16-bit", "dq_dot"): {  # LARGE   MEDIUM
        (64, 64): ((128, 32), (128, 32)),
        (128, 128): ((128, 32), (64, 32)),
    },
    ("16-bit", "dkv_dot"): {
        (64, 64): ((32, 128), (32, 128)),
        (128, 128): ((16, 128), (16, 64)),
    },
    ("tf32", "dq_dot"): {(64, 64): ((64, 32), (64, 32))},
    ("tf32", "dkv_dot"): {(64, 64): ((16, 64), (16, 64))},
}

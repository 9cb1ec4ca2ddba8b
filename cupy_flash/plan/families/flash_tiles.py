"""Tile tables of the tensor-core family. Columns are the shared memory that a block may have.

Every cell compiles without spills with both compilers, except SPILLED_OWN_KEYS. Rows go from small to large
head dims; a problem uses the first one that fits.
"""

from __future__ import annotations

from typing import NamedTuple

from ..catalog import Arch

__all__ = [
    "BACKWARD", "BACKWARD_WIDE", "BETWEEN_PRODUCTS", "DBIAS", "FORWARD", "FORWARD_OF", "FORWARD_WIDE",
    "HEAD_DIMS", "HESSIAN", "SPILLED_OWN_KEYS", "TANGENT", "BackwardTile", "ForwardTile", "WideForwardTile",
    "column",
]  # fmt: skip

# (head_dim, head_dim_v) classes. Without a cell in a row, the next class is used: float32 has no kernels of
# its own for (192, 128), as they would take 0.4 MB of the 8 MB of an architecture.
HEAD_DIMS = ((32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))

# Columns: 163 KiB or more, 99 KiB, or Turing's 64 KiB.
LARGE, MEDIUM, TURING = range(3)


def column(arch: Arch) -> int:
    """The column of these tables for an architecture."""
    if arch.capability < 80:
        return TURING
    return LARGE if arch.shared_bytes >= 163 * 1024 else MEDIUM


class ForwardTile(NamedTuple):
    """A cell of a forward table."""

    # Queries and keys per block.
    m: int
    n: int
    threads: int
    q_in_registers: int  # 1: a warp keeps its rows of Q in registers; 0: it rereads them from shared memory
    min_blocks: int  # blocks per multiprocessor that registers are limited for (__launch_bounds__)
    loops: int = 1  # 2: key blocks that need masks have a loop of their own; 1: one loop with a branch
    # 2: each chunk of keys needs a block of its own, because combining them in registers spilled 80 bytes
    # on sm_120; 1: one block may also combine them.
    chunks: int = 1


def _row(*cells: tuple[int, ...] | None) -> tuple[ForwardTile | None, ...]:
    """One row; a missing cell repeats the one to its left."""
    filled = list(cells)
    while len(filled) < 3:
        filled.append(filled[-1])
    return tuple(None if cell is None else ForwardTile(*cell) for cell in filled)


# "band": causal, window, sinks, packed. "any": also mask, bias, ALiBi, softcap, dropout, scale <= 0. float32
# has only "any", which serves bands too: next to three products the score code is small.
# why no kind without a band: its main loop would have the same instructions and the same speed.
# why one loop in some cells: with two, values that live through both spill: 4 bytes in 128x128 of head dim
# 64, 68 to 96 in 128x64 of 128. The classes 32 and 192 have one loop because a second is 20 to 30 KB of code
# each.
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

# Cells of LARGE that differ on one architecture, by capability.
# why: on sm_90, where this family takes what the hopper family refuses, NVRTC 12.9 spills 56 bytes for head
# dim 128 with four warps, and with Q in registers 76 for 192, under a BlockMask. On sm_100, float32 of 256
# spills 24 bytes, and 16 with half the keys where it combines chunks. On an H200, float32 of 128 is 6 to 8 %
# faster with 64 keys than with two blocks of 32 keys at once (4096 queries, one run). There, bfloat16 of 128
# (causal, 8192 keys) reaches 342 TFLOP/s with 32 keys in four warps, 305 with 64 in eight, and 333 with 128
# in eight.
FORWARD_OF = {
    (90, "16-bit", "band", (128, 128)): ForwardTile(128, 32, 128, 0, 2, 2),
    (90, "16-bit", "any", (192, 192)): ForwardTile(64, 32, 128, 0, 2),
    (90, "tf32", "any", (128, 128)): ForwardTile(64, 64, 128, 0, 1),
    (100, "tf32", "any", (256, 256)): ForwardTile(64, 16, 128, 0, 1, 1, 2),
}


class WideForwardTile(NamedTuple):
    """A cell of `FORWARD_WIDE`: 64 keys, 8 warps."""

    m: int  # queries per block
    q_steps: int  # steps of 16 columns of Q kept in registers; the others are in shared memory
    slots: int  # chunks of K and V in shared memory
    k_columns: int  # columns of a chunk of K; a chunk of V has 16 keys


# Head dims above HEAD_DIMS: flash_forward_wide, whose warps share rows. 16-bit, "band" only.
# why no 576 for Turing: Q, two chunks and P do not fit 64 KiB.
FORWARD_WIDE: dict[tuple[int, int], tuple[WideForwardTile | None, ...]] = {  # LARGE, MEDIUM, TURING
    (384, 384): tuple(WideForwardTile(*x) for x in ((64, 0, 4, 128), (64, 0, 2, 128), (32, 0, 2, 128))),
    (512, 512): tuple(WideForwardTile(*x) for x in ((64, 0, 4, 128), (64, 8, 2, 128), (32, 8, 2, 128))),
    (576, 512): (WideForwardTile(64, 0, 4, 64), WideForwardTile(64, 8, 2, 64), None),
}


# ---------------------------------------------------------------------- backward


class BackwardTile(NamedTuple):
    """A cell of a backward table."""

    # Queries and keys per block.
    m: int
    n: int
    threads: int
    # Buffering of streamed Q and dO: 0: loaded through registers (no cp.async); 1: two tiles of Q and one
    # of dO; 2: two tiles of each.
    slots: int
    # For dqkv. 1: a warp keeps its rows of V in registers; 0: V stays in shared memory.
    v_in_registers: int = 0

    @property
    def exponentials(self) -> int:
        """Exponentials per thread and tile, in dqkv."""
        return self.m * self.n // self.threads


# Limit of the instructions between two products of dqkv; of exponentials there may be half of those of a
# tile, or 8.
# why: before exponentials and dS overlapped with products there were up to 329 instructions, and all of the
# exponentials. Of all kernels checked, both compilers make at most 173 (head dim 64 for sm_100, CUDA 13),
# else 156.
BETWEEN_PRODUCTS = 176


def _cells(*cells: tuple[int, ...] | None) -> tuple[BackwardTile | None, ...]:
    """One row: LARGE, MEDIUM, TURING."""
    return tuple(None if cell is None else BackwardTile(*cell) for cell in cells)


# Blocks that own keys: dqkv (dQ by atomic additions, or none).
# why V in registers at head dim 256: with V in shared memory, 64 keys and two tiles of dO take 100.25 KiB of
# 99, and in Turing's 64 KiB only 32 keys fit, with half the threads, whose accumulators spilled. With 16
# queries, that is 8 n8 columns of S for 8 warps, V takes 32 registers; and 64 keys halve the reads of Q and
# dO and the additions to dQ.
_OWN_KEYS = (  # LARGE             MEDIUM              TURING
    _cells((128, 128, 256, 2), (64, 128, 256, 2), (64, 128, 256, 0)),
    _cells((128, 128, 256, 2), (64, 128, 256, 2), (64, 64, 256, 0)),
    _cells((64, 128, 256, 2), (64, 64, 256, 2), (32, 64, 128, 0)),
    _cells((64, 128, 256, 2), (64, 64, 256, 2, 1), (32, 64, 256, 0)),
    _cells((64, 64, 256, 2), (32, 64, 256, 2), (32, 32, 256, 0)),
    _cells((64, 64, 256, 2), (32, 64, 256, 2, 1), (32, 32, 256, 0)),
    _cells((32, 64, 256, 2), (16, 64, 256, 2, 1), (16, 64, 256, 0, 1)),
)
# Bytes that 16-bit "any" of 192 spills with NVRTC 12.9, by target.
# why allowed: without V in registers, 64 keys and two tiles of dO do not fit 99 KiB.
SPILLED_OWN_KEYS = {("16-bit", "any", (192, 192)): (("sm_86", 8),)}
# The same, with fewer queries at head dim 64, to match the Hopper kernel, which shares passes with this one.
_OWN_KEYS_ANY = tuple((row[1], *row[1:]) if n == 1 else row for n, row in enumerate(_OWN_KEYS))
# (capability, kind, mask, classes) whose dqkv stores gradients of 16 bits only -> classes for float32 ones.
# why: with both, this one spills 4 bytes in its loop with NVRTC 12.9.
ROUNDED_OWN_KEYS = {(90, "16-bit", "any", (128, 128)): (192, 128)}
_OWN_KEYS_TF32 = (
    _cells((64, 128, 256, 2), (64, 64, 256, 2), None),
    _cells((64, 64, 256, 2), (32, 64, 256, 2), None),
    _cells((32, 32, 128, 2), (32, 32, 128, 2), None),
    _cells((32, 64, 256, 2), (32, 32, 256, 1), None),
    _cells(None, None, None),
    _cells((32, 32, 256, 2), (16, 32, 128, 1), None),
    _cells((16, 32, 128, 1), (16, 16, 64, 2), None),
)
# Blocks that own queries: dq of deterministic gradients.
# why 4 warps for 32 queries on Turing: two share rows, which halves the accumulators; 128 per thread spilled.
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

# (kind, pass, mask) -> rows. float32 and dq have only "any", which serves bands too: next to three products
# the score code is small, and dq belongs to the slower, deterministic method.
BACKWARD = {
    ("16-bit", "dqkv", "band"): _OWN_KEYS,
    ("16-bit", "dqkv", "any"): _OWN_KEYS_ANY,
    ("16-bit", "dq", "any"): _OWN_QUERIES,
    ("tf32", "dqkv", "any"): _OWN_KEYS_TF32,
    ("tf32", "dq", "any"): _OWN_QUERIES_TF32,
}

# Head dims above HEAD_DIMS: (queries, keys) of the passes of flash_backward_wide by class, for 99 KiB and
# more.
# why not more: accumulators of dK and dV of 32 keys take 128 registers, K and V 64.
BACKWARD_WIDE = {
    (384, 384): {"dkv": (16, 32), "dq": (32, 16)},
    (512, 512): {"dkv": (16, 32), "dq": (32, 16)},
}

# Blocks that own a tile of the bias: dbias, for every head dim, 64 columns of it at a time.
DBIAS = (128, 64)


# ---------------------------------------------------------------------- tangent

# (queries, keys) by class: a warp owns 16 queries, two threads per query. Kinds as in FORWARD.
# why 16: with 32, a thread would have 256 accumulators at head dim 128; above 128 even 16 are too many.
# why two classes: each further one would take 0.4 MB of an architecture.
# why 32 keys for "any": with 64 its code is twice as long, and spills at head dim 128 on sm_90.
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

# (queries, keys) of the passes by class: a warp owns 16 of the rows of a block. One kind, for scale, softcap
# and ALiBi: more kinds would take a megabyte of an architecture.
# why fewer streamed rows with wide heads: a thread holds 128 accumulators of keys, and two slots of Q, dotQ
# and dO are in shared memory with K, dotK, V and dotV.
# why not float32 above 64: only 32 keys would fit 163 KiB, and none 99 KiB.
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

"""The decode kernels for head dims above 256, over keys and values, or over latents (MLA).

A row of latents is the key of a token, and its first columns are the value.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from ...call.problem import Problem
from ..catalog import Arch, Variant
from ..launch import round_up

__all__ = ["HEAD_DIM_V", "LATENT", "SOURCE", "blocks_held", "kernel", "of_latents", "refusals", "variants"]

SOURCE = "flash_decode_wide.cu"
LATENT, HEAD_DIM, HEAD_DIM_V = 576, 512, 512
_PRODUCTS = {"float16": "f16", "bfloat16": "bf16"}
_STORED = {"int8": "int8", "float8_e4m3fn": "e4m3"}
_WARPS = 8


class Cell(NamedTuple):
    """A cell of the tile table.

    Attributes
    ----------
    rows, keys : int
        Rows of a block, and keys per step.
    key_warps : int
        Warps that share the keys of a step.
    stages : int
        Stages of the ring buffer.
    """

    rows: int
    keys: int
    key_warps: int
    stages: int


# Cells by head dim class: for up to 16 rows, with one block per multiprocessor in 99 KiB, one in 163, or two
# in 227; for up to 32 rows; for more, from 163 KiB on.
# why at most 64 rows: O of 64 rows takes 128 registers of a thread.
# why the same for 8 bits: the ring takes half the memory, and widened K and V are two more tiles.
_CELLS = {
    LATENT: ((Cell(16, 32, 4, 2), Cell(16, 32, 4, 3), Cell(16, 32, 4, 2)),
             Cell(32, 16, 2, 3), Cell(64, 32, 2, 2)),
    HEAD_DIM: ((Cell(16, 16, 2, 4), Cell(16, 32, 4, 4), Cell(16, 16, 2, 4)),
               Cell(32, 16, 2, 3), Cell(64, 16, 2, 5)),
}  # fmt: skip
# 8-bit latents, of which only one tile is widened.
_LATENTS_OF_8_BITS = (
    (Cell(16, 32, 4, 2), Cell(16, 32, 4, 3), Cell(16, 32, 4, 3)), Cell(32, 16, 2, 4), Cell(64, 32, 2, 2)
)  # fmt: skip


def _cells(head_dim: int, stored: str, arch: Arch) -> tuple[Cell, ...]:
    """The cells of an architecture, the fewest rows first."""
    few, more, many = _LATENTS_OF_8_BITS if stored and head_dim == LATENT else _CELLS[head_dim]
    if arch.capability < 80:
        return ()
    if arch.shared_bytes < 163 * 1024:
        return few[0], more
    return few[2 if arch.shared_bytes >= 227 * 1024 else 1], more, many


def _variant(dtype: str, stored: str, head_dim: int, cell: Cell) -> Variant:
    m, n = cell.rows, cell.keys
    row_warps = m // 16
    depth_warps = _WARPS // row_warps // cell.key_warps
    others = max(1, (depth_warps - 1) * row_warps * cell.key_warps)
    # layout: widened K and V, or latents; Q, the ring; P; partial S; maxima and rescale factors; masked keys;
    # parked values.
    widened = 1 if head_dim == LATENT else 2
    tiles = 2 * (m + widened * n) + cell.stages * n if stored else 2 * (m + cell.stages * n)
    shared_bytes = head_dim * tiles + 2 * m * n + 64 * others * n // cell.key_warps
    shared_bytes = round_up(shared_bytes + 4 * m * (cell.key_warps + 1) + cell.stages * n, 128)
    shared_bytes += round_up(16 * m + 24, 128)
    macros = (
        ("CF_LATENT", str(int(head_dim == LATENT))),
        ("CF_KEY_WARPS", str(cell.key_warps)),
        ("CF_STAGES", str(cell.stages)),
    )
    return Variant(
        SOURCE, stored, "DecodeParams", dtype, head_dim, HEAD_DIM_V, (m, n), 32 * _WARPS,
        shared_bytes, macros=macros,
    )  # fmt: skip


def blocks_held(variant: Variant) -> int:
    """Blocks that fit in the registers of a multiprocessor: two of 16 rows, as CF_KERNEL asks."""
    return 2 if variant.tile[0] == 16 else 1


def variants(arch: Arch) -> Iterator[Variant]:
    """The variants compiled for an architecture."""
    for dtype in _PRODUCTS.values():
        for head_dim, stored in product((LATENT, HEAD_DIM), ("", *_STORED.values())):
            yield from (_variant(dtype, stored, head_dim, cell) for cell in _cells(head_dim, stored, arch))


def of_latents(p: Problem) -> bool:
    """Whether values are read from the keys; for narrower latents they are read separately."""
    return p.cache is not None and p.cache.latent and p.head_dim > HEAD_DIM


def kernel(p: Problem, arch: Arch) -> Variant:
    """The kernel for a problem that is not refused: the smallest tile that holds all rows, or the largest."""
    assert p.cache is not None
    rows = p.heads_q // p.heads_k * p.seqlen_q
    head_dim = LATENT if of_latents(p) else HEAD_DIM
    stored = "" if p.cache.dtype == p.dtype else _STORED[p.cache.dtype]
    cells = _cells(head_dim, stored, arch)
    cell = next((cell for cell in cells if rows <= cell.rows), cells[-1])
    return _variant(_PRODUCTS[p.dtype], stored, head_dim, cell)


def refusals(p: Problem, arch: Arch) -> list[str]:
    """Reasons against a head dim above 256 in addition to those of all decode kernels."""
    assert p.cache is not None
    widest, reasons = max(p.head_dim, p.head_dim_v), []
    what = "latents" if of_latents(p) else f"keys of head_dim {widest}"
    stored = p.cache.dtype in (p.dtype, *_STORED)
    if of_latents(p) and (p.head_dim != LATENT or p.head_dim_v > HEAD_DIM_V):
        reasons.append(
            f"reads latents of {LATENT} numbers with values of at most {HEAD_DIM_V}, "
            f"not {p.head_dim} with {p.head_dim_v}"
        )
    elif not of_latents(p) and widest > HEAD_DIM:
        reasons.append(f"head_dim {widest} is above {HEAD_DIM}")
    if arch.capability < 80:
        reasons.append(f"{what} need the asynchronous copies of sm_80")
    if p.dtype not in _PRODUCTS or not stored:
        reasons.append(f"reads {what} of float16 and bfloat16 like q, not {p.cache.dtype} for {p.dtype}")
    if p.spans and of_latents(p):
        reasons.append("does not support Spans over latents")
    if p.reproducible:
        reasons.append(f"splits {what} by the batch and the GPU, and adds in another order than a prompt")
    return reasons

"""The kernels of decode for latents (MLA): a row is the key of a token, and its first columns the value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...call.problem import Problem
from ..catalog import Arch, Variant

__all__ = ["HEAD_DIM", "HEAD_DIM_V", "SOURCE", "blocks_held", "kernel", "refusals", "variants"]

SOURCE = "flash_decode_latent.cu"
HEAD_DIM, HEAD_DIM_V = 576, 512
_PRODUCTS = {"float16": "f16", "bfloat16": "bf16"}
_WARPS = 8


class Cell(NamedTuple):
    """Rows and keys of a step, warps that share its keys, and steps in the ring."""

    rows: int
    keys: int
    key_warps: int
    stages: int


_FEW = Cell(16, 32, 4, 2)  # 96 KB: one block of a multiprocessor where it has 99 KiB, two where it has 227
_FEW_ALONE = Cell(16, 32, 4, 3)  # why: with 163 KiB there is one block either way
_MORE = Cell(32, 16, 2, 3)
_MANY = Cell(64, 32, 2, 2)  # 155 KB


def _cells(arch: Arch) -> tuple[Cell, ...]:
    """By rows. why 64 at most: O of 64 rows takes 128 registers of a thread."""
    if arch.capability < 80:
        return ()
    if arch.shared_bytes < 163 * 1024:
        return _FEW, _MORE
    return _FEW if arch.shared_bytes >= 227 * 1024 else _FEW_ALONE, _MORE, _MANY


def _up(n: int, multiple: int = 128) -> int:
    return -(-n // multiple) * multiple


def _variant(dtype: str, cell: Cell) -> Variant:
    m, n = cell.rows, cell.keys
    row_warps = m // 16
    depth_warps = _WARPS // row_warps // cell.key_warps
    halves = row_warps * cell.key_warps if depth_warps > 1 else 1
    # layout: Q and the ring; P; halves of S; maxima and factors; hidden keys; what is parked.
    shared_bytes = 2 * HEAD_DIM * (m + cell.stages * n) + 2 * m * n + 64 * halves * n // cell.key_warps
    shared_bytes = _up(shared_bytes + 4 * m * (cell.key_warps + 1) + cell.stages * n) + _up(16 * m + 24)
    macros = (("CF_KEY_WARPS", str(cell.key_warps)), ("CF_STAGES", str(cell.stages)))
    return Variant(
        SOURCE, "", "DecodeParams", dtype, HEAD_DIM, HEAD_DIM_V, (m, n), 32 * _WARPS,
        shared_bytes, macros=macros,
    )  # fmt: skip


def blocks_held(variant: Variant) -> int:
    """Blocks that the registers of a multiprocessor hold: CF_KERNEL asks for two of 16 rows."""
    return 2 if variant.tile[0] == _FEW.rows else 1


def variants(arch: Arch) -> Iterator[Variant]:
    """What is compiled for an architecture."""
    for dtype in _PRODUCTS.values():
        yield from (_variant(dtype, cell) for cell in _cells(arch))


def kernel(p: Problem, arch: Arch) -> Variant:
    """The one for a problem that is not refused: the smallest tile that holds all rows, or the largest."""
    rows = p.heads_q // p.heads_k * p.seqlen_q
    cells = _cells(arch)
    cell = next((cell for cell in cells if rows <= cell.rows), cells[-1])
    return _variant(_PRODUCTS[p.dtype], cell)


def refusals(p: Problem, arch: Arch) -> list[str]:
    """Why these kernels, of all of decode, cannot answer a problem over a cache of latents."""
    assert p.cache is not None
    reasons = []
    if p.head_dim != HEAD_DIM or p.head_dim_v > HEAD_DIM_V:
        reasons.append(
            f"reads latents of {HEAD_DIM} numbers with values of at most {HEAD_DIM_V}, "
            f"not {p.head_dim} with {p.head_dim_v}"
        )
    if arch.capability < 80:
        reasons.append("latents need the asynchronous copies of sm_80")
    if p.dtype not in _PRODUCTS or p.cache.dtype != p.dtype:
        reasons.append(f"reads latents of float16 and bfloat16 like q, not {p.cache.dtype} for {p.dtype}")
    if p.spans:
        reasons.append("does not support Spans over latents")
    if p.reproducible:
        reasons.append("splits latents by the batch and the GPU, and adds in another order than a prompt")
    return reasons

"""The wgmma decode kernel over latents (MLA) on Hopper, for more rows than mma.sync keeps up with."""

from __future__ import annotations

from collections.abc import Iterator

from ...call.problem import Problem
from ..catalog import SHORT, Arch, Box, Variant
from ..launch import beyond_band

__all__ = ["LEAST_ROWS", "SOURCE", "kernel", "refusals", "variants"]

SOURCE = "flash_decode_latent_sm90.cu"
_HEAD_DIM, _HEAD_DIM_V = 576, 512
_ROWS, _KEYS, _STAGES = 64, 64, 2

# Least rows per latent for which this kernel is used. Counted, not measured, for 64 rows and 64 keys on an
# H200: loading the keys takes 3600 cycles of a multiprocessor; products and softmax take 2800 by wgmma, and
# 5200 by mma.sync at its measured 227 TFLOP/s.
LEAST_ROWS = 64


def _variant(dtype: str) -> Variant:
    m, n, (d, v) = _ROWS, _KEYS, (_HEAD_DIM, _HEAD_DIM_V)
    # S, by one warpgroup; O, half of the columns by each.
    products = ((f"64x{n}x16", d // 16), (f"64x{v // 2}x16", 2 * n // 16))
    return Variant(
        SOURCE, "", "DecodeParams", dtype, d, v, (m, n), 384,
        # Q, the ring, P. 1024 bytes: barriers, and per row its keys and its rescale factor.
        2 * (m * d + _STAGES * n * d + m * n) + 1024,
        "band",
        macros=(("CF_STAGES", str(_STAGES)),),
        products=tuple(sorted(products)),
        boxes=(Box("k_cache", n, d),),
    )  # fmt: skip


def variants(arch: Arch) -> Iterator[Variant]:
    """The variants compiled for an architecture."""
    if arch.capability == 90:
        yield from (_variant(dtype) for dtype in ("f16", "bf16"))


def kernel(p: Problem) -> Variant:
    """The kernel for a problem that is not refused."""
    return _variant(SHORT[p.dtype])


def refusals(p: Problem, arch: Arch) -> list[str]:
    """Reasons why a problem of latents stays with `decode_wide`."""
    assert p.cache is not None
    rows, reasons = p.heads_q // p.heads_k * p.seqlen_q, []
    if arch.capability != 90:
        reasons.append(f"its code runs on sm_90 only, not on {arch.name}")
    if rows < LEAST_ROWS:
        reasons.append(f"takes {LEAST_ROWS} rows of a latent and more, not {rows}")
    if p.cache.dtype != p.dtype:
        reasons.append(f"reads latents of {p.dtype} like q, not {p.cache.dtype}")
    if p.cache.page not in (0, _KEYS):
        reasons.append(f"reads pages of {_KEYS} keys, not {p.cache.page}")
    if unknown := beyond_band(p):
        reasons.append(f"its inner loop has no {' or '.join(unknown)}")
    if not p.boxes:
        reasons.append("bulk copies take strides above 0 and below 2**40 bytes only (no broadcast axis)")
    if not p.seqlen_k:
        reasons.append("there are no rows for a tensor map to describe")
    return reasons

"""The kernel of decode over latents (MLA) on Hopper, by wgmma: of more rows than mma.sync keeps up with."""

from __future__ import annotations

from collections.abc import Iterator

from ...call.problem import Problem
from ..catalog import SHORT, Arch, Box, Variant

__all__ = ["LEAST_ROWS", "SOURCE", "kernel", "refusals", "variants"]

SOURCE = "flash_decode_latent_sm90.cu"
_HEAD_DIM, _HEAD_DIM_V = 576, 512
_ROWS, _KEYS, _STAGES = 64, 64, 2

# Rows of a latent from which it is taken. Counted, not measured, for 64 rows and 64 keys on an H200: the keys
# come from memory in 3600 cycles of a multiprocessor; products and softmax take 2800 by wgmma, and 5200 by
# mma.sync, at the 227 TFLOP/s that it was measured at.
LEAST_ROWS = 64


def _variant(dtype: str) -> Variant:
    m, n, (d, v) = _ROWS, _KEYS, (_HEAD_DIM, _HEAD_DIM_V)
    # S, of one warpgroup; O, of which both have half of the columns.
    products = ((f"64x{n}x16", d // 16), (f"64x{v // 2}x16", 2 * n // 16))
    return Variant(
        SOURCE, "", "DecodeParams", dtype, d, v, (m, n), 384,
        # Q, the ring, P. 1024 bytes: barriers, and of each row its keys and its factor.
        2 * (m * d + _STAGES * n * d + m * n) + 1024,
        "band",
        macros=(("CF_STAGES", str(_STAGES)),),
        products=tuple(sorted(products)),
        boxes=(Box("k_cache", n, d),),
    )  # fmt: skip


def variants(arch: Arch) -> Iterator[Variant]:
    """What is compiled for an architecture."""
    if arch.capability == 90:
        yield from (_variant(dtype) for dtype in ("f16", "bf16"))


def kernel(p: Problem) -> Variant:
    """The one for a problem that is not refused."""
    return _variant(SHORT[p.dtype])


def refusals(p: Problem, arch: Arch) -> list[str]:
    """Why a problem of latents that `decode_wide` takes stays with it."""
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
    lacks = {"ALiBi": p.alibi, "softcap": p.softcap, "scale <= 0": p.scale <= 0}
    if unknown := [name for name, given in lacks.items() if given]:
        reasons.append(f"its inner loop has no {' or '.join(unknown)}")
    if not p.boxes:
        reasons.append("bulk copies take strides above 0 and below 2**40 bytes only (no broadcast axis)")
    if not p.seqlen_k:
        reasons.append("there are no rows for a tensor map to describe")
    return reasons

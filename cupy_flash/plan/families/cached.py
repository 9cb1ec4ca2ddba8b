"""The forward kernels over a KV cache: for many queries, and for calls that decode refuses.

They read a contiguous cache in the dtype of q in place. Any other cache is first gathered into a workspace of
its capacity.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ...call.arrays import ITEM_BYTES
from ...call.problem import Problem
from ..catalog import SHORT, Arch, Variant
from ..launch import Plan, along_x, blocks_of, laid_out, round_up
from . import decode, decode_latent, flash, hopper, order, simple

__all__ = ["NAME", "plan", "refusals", "variants"]

NAME = "cached"

# Forward families in order of preference; the first that does not refuse is used.
_FORWARD = (hopper, flash, simple)

# Speed of the forward kernels relative to decode, in (query, key) pairs per multiprocessor. Counted, not
# measured: decode blocks that share keys read them from L2, 512 bytes for 16 queries and a key of 128 and 128
# features, which at 24 bytes per cycle is 384 FLOP per cycle; tiles of 64 to 192 queries reach 1000
# (mma.sync) to 2600 (wgmma).
_GAIN = {"hopper": 6.0, "flash": 2.5}
# The same above head dim 256, where decode blocks have up to 64 rows and shared memory is the limit: for 64
# rows and 16 keys, decode takes 1792 cycles of shared memory and 300 of barriers, flash_forward_wide 1300 and
# 215. With wgmma an H200 reaches 516 TFLOP/s; at these 2100 cycles it would reach 230.
_GAIN_WIDE = {"hopper": 2.3, "flash": 1.4}
# The same relative to flash_decode_latent_sm90, which multiplies tiles of 64 x 64 by wgmma, like the forward
# kernel of hopper; flash is as far behind as above.
# why not 1: of two kernels with equal counts, prefer the measured one.
_GAIN_LATENT = {"hopper": 1.1, "flash": 0.6}
# Cost of gathering (one read and one write of the cache), in decode tiles of 16 queries.
_GATHER_TILES = 3
# Dtypes that would round a stored key times its scale. (Decode rounds 4-bit codes too.)
_ROUNDED = ("float16", "bfloat16")
# A larger gathered cache is not worth its memory if decode can read the cache itself.
_MOST_GATHERED_BYTES = 1 << 30


def _gather(dtype: str, stored: str) -> Variant:
    return Variant("flash_gather.cu", stored, "DecodeParams", dtype, 512, 512, (1, 4), 128, 0)


def variants(_arch: Arch) -> Iterator[Variant]:
    """The variants compiled for an architecture, in addition to the forward kernels."""
    for dtype, stored in product(SHORT, ("", *decode.STORED.values())):
        if stored in ("", *decode.CODES) or dtype not in _ROUNDED:
            yield decode.append(SHORT[dtype], stored)
            yield _gather(SHORT[dtype], stored)


def _in_place(p: Problem) -> bool:
    """Whether a forward kernel can read the cache in place."""
    assert p.cache is not None
    c = p.cache
    scattered = c.page or c.indexed or c.leftpad or p.packed
    return c.dtype == p.dtype and not scattered and not c.unrotated


def _writes_mask(p: Problem) -> bool:
    """Whether gathering also writes a mask of valid keys."""
    assert p.cache is not None
    return bool(p.cache.page or p.cache.leftpad)


def _as_forward(p: Problem) -> Problem:
    """The problem of the forward pass over the cache, or over the gathered cache.

    Padding and keys of invalid pages are masked; a sequence with an invalid slot has no keys. why "batch" for
    "prefill": the bits must be the same for every cache, and Hopper's kernels do not read pages.
    """
    mask = (p.batch, 1, 1, p.seqlen_k) if _writes_mask(p) else p.mask
    same = "batch" if p.reproducible == "prefill" else p.reproducible
    return p._replace(direction="forward", cache=None, mask=mask, reproducible=same)


def _gathered_bytes(p: Problem) -> int:
    if _in_place(p):
        return 0
    rows = p.batch * p.heads_k * p.seqlen_k
    return rows * (_columns(p.head_dim, p.dtype) + _columns(p.head_dim_v, p.dtype)) * ITEM_BYTES[p.dtype]


def _columns(head_dim: int, dtype: str) -> int:
    """Columns of a gathered row, rounded up to 16 bytes."""
    return round_up(head_dim, 16 // ITEM_BYTES[dtype])


def _forward_plan(p: Problem, arch: Arch) -> tuple[Plan | None, list[str]]:
    """The plan of the forward pass, and why preferred families refused it; None if all do."""
    forward = _as_forward(p)
    refused: list[str] = []
    for family in _FORWARD:
        if family.NAME in arch.families:
            reasons = family.refusals(forward, arch) + order.refusals(family.NAME, forward, arch)
            if not reasons:
                return family.plan(forward, arch), refused
            refused += [f"{family.NAME}: {reason}" for reason in reasons]
    return None, refused


def _decode_refusals(p: Problem, arch: Arch) -> list[str]:
    """Reasons why decode does not support a problem."""
    if decode.NAME not in arch.families:
        return [f"is not compiled for {arch.name}"]
    return decode.refusals(p, arch)


def _costs(p: Problem, arch: Arch, forward_plan: Plan) -> tuple[float, float]:
    """The costs of this family and of decode, in steps of a decode block."""
    variant, splits = decode.cheapest(p, arch)
    first = forward_plan.launches[0]
    tile, heads = first.variant.tile[0], p.heads_k if first.head_bits else p.heads_q
    keys_per_step = decode.keys_of_step(variant)
    pairs_per_step = variant.tile[0] * keys_per_step * splits.at_once / arch.multiprocessors
    tiles = p.batch * heads * blocks_of(p.seqlen_q << first.head_bits, tile)
    waves = blocks_of(tiles, arch.multiprocessors)
    gains = _GAIN_WIDE if decode.is_wide(p) else _GAIN
    gains = _GAIN_LATENT if variant.source == decode_latent.SOURCE else gains
    steps = tile * decode.keys_seen(p) / (pairs_per_step * gains[forward_plan.family])
    cost = waves * (steps + decode.BLOCK_COST)
    assert p.cache is not None
    if not p.cache.appended and not p.cache.rotary:
        cost += decode.LAUNCH_COST  # flash_append runs only for the lengths
    if not _in_place(p):
        gathered = p.batch * p.heads_k * p.seqlen_k / keys_per_step / splits.at_once
        cost += decode.LAUNCH_COST + _GATHER_TILES * gathered
    return cost, splits.cost


def refusals(problem: Problem, arch: Arch) -> list[str]:
    """All reasons why these kernels do not support a problem, or why decode is preferred."""
    p = problem
    if p.cache is None:
        return ["reads keys from a KV cache only"]
    reasons = []
    if p.cache.splits:
        reasons.append(f"does not split keys, and tuning.splits={p.cache.splits} is asked for")
    if p.spans:
        reasons.append("does not support Spans over a cache")
    reasons += decode.code_refusals(p)
    if p.cache.dtype not in (p.dtype, *decode.CODES) and p.dtype in _ROUNDED:
        reasons.append(f"keys of {p.cache.dtype} times their scale are not exact in {p.dtype}")
    if p.mask and _writes_mask(p):
        reasons.append("needs the mask for padding and unused pages, and a mask is given")
    if p.packed and p.batch * p.seqlen_k >= 2**31:
        reasons.append(f"gathers {p.batch * p.seqlen_k} keys, beyond 31 bits")
    if p.reproducible == "device" and p.cache.rotary:
        reasons.append("rotates by sums of products, which not every device rounds in the same way")
    if reasons:
        return reasons
    forward_plan, refused = _forward_plan(p, arch)
    if forward_plan is None:
        return refused
    if _decode_refusals(p, arch):
        return []
    if p.empty:
        return ["there is nothing to compute"]
    if forward_plan.family not in _GAIN:
        return ["decode uses tensor cores, the simple kernels do not"]
    rows = p.heads_q // p.heads_k * p.seqlen_q
    if rows <= decode.cheapest(p, arch)[0].tile[0]:
        return [f"decode reads every key once for all {rows} rows of a key head"]
    if _gathered_bytes(p) > _MOST_GATHERED_BYTES:
        return [f"gathering the cache takes {_gathered_bytes(p) / 2**20:.4g} MiB"]
    cost, decode_cost = _costs(p, arch, forward_plan)
    if cost >= decode_cost:
        return [f"{forward_plan.family} over the cache costs {cost:.1f}, decode {decode_cost:.1f}"]
    return []


def plan(problem: Problem, arch: Arch) -> Plan:
    """The plan for a problem that is not refused."""
    p = problem
    assert p.cache is not None
    forward_plan, refused = _forward_plan(p, arch)
    assert forward_plan is not None
    launches, parts = decode.steps_before(p)
    stored = "" if p.cache.dtype == p.dtype else decode.STORED[p.cache.dtype]
    # why always append: it writes the keys in use to an array, which forward kernels read; the host does not.
    launches = launches or along_x(decode.append(SHORT[p.dtype], stored), 1)
    parts.append(("used", "int32", (p.batch,)))
    seen = [("k", "k_cache"), ("v", "v_cache"), ("seqused_k", "used")]
    if p.cache.rotary:
        seen.append(("q", "rotated_q"))
    if not _in_place(p):
        rows = (1, p.heads_k, p.batch * p.seqlen_k) if p.packed else (p.batch, p.heads_k, p.seqlen_k)
        parts += [
            ("k_gathered", p.dtype, (*rows, _columns(p.head_dim, p.dtype))),
            ("v_gathered", p.dtype, (*rows, _columns(p.head_dim_v, p.dtype))),
        ]
        seen += [("k", "k_gathered"), ("v", "v_gathered")]
        if p.packed:
            parts.append(("starts", "int32", (p.batch + 1,)))
            seen.append(("cu_seqlens_k", "starts"))
        if _writes_mask(p):
            parts.append(("kept", "bool", (p.batch, 1, 1, p.seqlen_k)))
            seen.append(("mask", "kept"))
        variant = _gather(SHORT[p.dtype], stored)
        launches += along_x(variant, blocks_of(p.batch * p.heads_k * p.seqlen_k, variant.tile[1]))
    launches += [launch._replace(seen=tuple(seen)) for launch in forward_plan.launches]
    parts += [(part.name, part.dtype, part.shape) for part in forward_plan.workspace]
    where = "in place" if _in_place(p) else f"gathered, {_gathered_bytes(p) / 2**20:.4g} MiB"
    line = f"cached    {forward_plan.family} kernels over the cache, {where}"
    instead = _decode_refusals(p, arch)
    if not instead:
        line += "; cost {:.1f}, by decode {:.1f}".format(*_costs(p, arch, forward_plan))
    notes = [line, *forward_plan.notes, *(f"skipped   {reason}" for reason in refused)]
    notes += [f"skipped   {decode.NAME}: {reason}" for reason in instead]
    return Plan(arch.name, NAME, tuple(launches), *laid_out(*parts), forward_plan.zeroed, notes=tuple(notes))

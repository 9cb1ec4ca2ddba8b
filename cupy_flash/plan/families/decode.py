"""The decode kernels: few queries over a KV cache, with split-K and merging of the partial results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...call.arrays import ITEM_BYTES
from ...call.problem import Problem
from ..catalog import SHORT, Arch, Variant
from ..launch import Launch, Plan, along_x, blocks_of, laid_out, round_up, rows_of
from . import decode_latent, decode_wide, flash

__all__ = [
    "BLOCK_COST",
    "CODES",
    "LAUNCH_COST",
    "NAME",
    "ROWS",
    "STEP_KEYS",
    "STORED",
    "Splits",
    "append",
    "cheapest",
    "code_refusals",
    "is_wide",
    "keys_of_step",
    "keys_seen",
    "plan",
    "refusals",
    "split_cost",
    "steps_before",
    "variants",
]

NAME = "decode"

ROWS = 16  # rows of a block: queries x heads of a group
STEP_KEYS = 16  # keys of a warp at a time
HEAD_DIMS = (64, 128, 256)

# Product type by dtype of q; quantised formats of a cache -> step names.
_PRODUCTS = {"float16": "f16", "bfloat16": "bf16", "float32": "tf32x3"}
STORED = {"int8": "int8", "float8_e4m3fn": "e4m3", "int4": "int4", "nvfp4": "nvfp4"}
CODES = ("int4", "nvfp4")
_ITEM = {"f16": 2, "bf16": 2, "tf32x3": 4}


class Cell(NamedTuple):
    """A cell of the tile table.

    Attributes
    ----------
    warps : int
        Warps per block.
    stages : int
        Stages of each warp's ring buffer.
    min_blocks : int
        Blocks that a multiprocessor should hold, which limits the registers of a thread.
    """

    warps: int
    stages: int
    min_blocks: int


# kind -> per head dim class: 163 KiB of shared memory or more, 99 KiB, Turing. Bytes in flight on a
# multiprocessor are at least blocks * warps * (stages - 1) * 32 * head_dim * item: 32 KiB and more in the
# first column (128 KiB for 16 bits and head dim 128 on sm_90), 16 KiB in the second. By Little's law an H200
# needs 26 KiB (4.8 TB/s, 132 multiprocessors, 0.7 us), an A100 11, a GeForce RTX 4090 5.
# why both columns are equal but for one cell: it saves the cubins of a column.
_CELLS = {
    "16-bit": (
        (Cell(4, 4, 3), Cell(4, 4, 3), Cell(4, 1, 3)),
        (Cell(4, 3, 2), Cell(4, 2, 1), Cell(4, 1, 1)),
        (Cell(2, 2, 1), Cell(2, 2, 1), Cell(2, 1, 1)),
    ),
    "8-bit": (
        (Cell(4, 4, 3), Cell(4, 4, 3), Cell(4, 1, 2)),
        (Cell(4, 3, 2), Cell(4, 3, 2), Cell(4, 1, 1)),
        (Cell(2, 2, 1), Cell(2, 2, 1), Cell(2, 1, 1)),
    ),
    "4-bit": (
        (Cell(4, 4, 3), Cell(4, 4, 3), Cell(4, 1, 2)),
        (Cell(4, 4, 2), Cell(4, 4, 2), Cell(4, 1, 1)),
        (Cell(2, 3, 1), Cell(2, 3, 1), Cell(2, 1, 1)),
    ),
    "tf32": (
        (Cell(4, 2, 2), Cell(4, 2, 2), None),
        (Cell(2, 2, 1), Cell(2, 2, 1), None),
        (Cell(1, 2, 1), Cell(1, 2, 1), None),
    ),
}

# The cost model counts steps of a block (STEP_KEYS keys per warp). The first two constants are from
# FlashInfer's pull request 4904, the third is a guess; none is fitted to these kernels yet.
BLOCK_COST = 10.0  # per block, in addition to its steps: start, Q, first copies, merging its warps
_SPLIT_COST = 0.22  # per split, in flash_combine
LAUNCH_COST = 4.0  # per kernel launch, about 3 us, without its work; flash_combine is one
_MOST_SPLITS = 256


def _column(arch: Arch) -> int:
    if arch.capability < 80:
        return 2
    return 0 if arch.shared_bytes >= 163 * 1024 else 1


def _decode(dtype: str, stored: str, head_dim: int, arch: Arch) -> Variant | None:
    """The decode kernel of a head dim class; None if the architecture has none."""
    if arch.capability < 80 and dtype != "f16":
        return None
    kind = {"": "16-bit" if _ITEM[dtype] == 2 else "tf32", **dict.fromkeys(CODES, "4-bit")}.get(
        stored, "8-bit"
    )
    cell = _CELLS[kind][HEAD_DIMS.index(head_dim)][_column(arch)]
    if cell is None:
        return None
    size = _ITEM[dtype]
    # why: per 32 features, NVFP4 has two scales of 2 bytes; int4 a scale of 4 bytes for keys or 2 for values,
    # and a zero of 2.
    code = 0.5 + (5 / 32 if stored == "int4" else 1 / 8)
    stored_size, widened = {"16-bit": (size, 0), "tf32": (size, 0), "4-bit": (code, 0)}.get(kind, (1, size))
    of_warp = int(2 * STEP_KEYS * head_dim * (cell.stages * stored_size + widened))
    # why: sums of Q per group, for the zeros, do not fit in registers.
    of_warp += 1024 if stored == "int4" and head_dim == 256 else 0
    parts = 4 * ROWS * (head_dim + {"tf32": 16, "4-bit": 4}.get(kind, 8))
    # layout: Q; the rings, which O of each warp reuses at the end; row_max and row_sum of each warp; 384
    # bytes of parked values.
    shared_bytes = size * ROWS * head_dim + 384
    shared_bytes += round_up(cell.warps * max(of_warp, parts), 128) + 128 * cell.warps
    macros = (
        ("CF_PRODUCTS", "3" if dtype == "tf32x3" else "1"),
        ("CF_TURING", str(int(arch.capability < 80))),
        ("CF_STAGES", str(cell.stages)),
        ("CF_MIN_BLOCKS", str(cell.min_blocks)),
    )
    tile = (ROWS, STEP_KEYS * cell.warps * cell.stages)
    return Variant(
        "flash_decode.cu", stored, "DecodeParams", dtype, head_dim, head_dim, tile, 32 * cell.warps,
        shared_bytes, macros=macros,
    )  # fmt: skip


def _in_order(dtype: str, head_dim: int, arch: Arch) -> Variant | None:
    """The decode kernel with the summation order of prompts; None if the architecture has none."""
    alone, keys = _decode(dtype, "", head_dim, arch), flash.keys_of_class(dtype, head_dim, arch)
    if alone is None or keys is None:
        return None
    kind = "16-bit" if _ITEM[dtype] == 2 else "tf32"
    stages = _CELLS[kind][HEAD_DIMS.index(head_dim)][_column(arch)].stages  # type: ignore[union-attr]
    warps = keys // STEP_KEYS
    # layout: Q; tiles of K and V; float32 weights; row maxima of warps; 384 bytes of parked values.
    shared_bytes = _ITEM[dtype] * head_dim * (ROWS + 2 * stages * keys) + 4 * ROWS * keys
    shared_bytes += round_up(4 * ROWS * warps, 128) + 384
    macros = (*alone.macros, ("CF_CHUNK_KEYS", str(flash.CHUNK_KEYS)))
    return Variant(
        "flash_decode_in_order.cu", "", "DecodeParams", dtype, head_dim, head_dim, (ROWS, keys), 32 * warps,
        shared_bytes, macros=macros,
    )  # fmt: skip


def append(dtype: str, stored: str) -> Variant:
    """The kernel that rotates q and new keys, and stores new keys and values."""
    dtype = "f32" if dtype == "tf32x3" else dtype
    return Variant("flash_append.cu", stored, "DecodeParams", dtype, 512, 512, (4, 1), 128, 0)


def _combine(dtype: str, head_dim_v: int = HEAD_DIMS[-1]) -> Variant:
    dtype = "f32" if dtype == "tf32x3" else dtype
    width = HEAD_DIMS[-1] if head_dim_v <= HEAD_DIMS[-1] else decode_wide.HEAD_DIM_V
    return Variant("flash_combine.cu", "", "DecodeParams", dtype, width, width, (1, 1), 128, 4 * 4 * width)


def variants(arch: Arch) -> Iterator[Variant]:
    """The variants compiled for an architecture."""
    for dtype in _PRODUCTS.values():
        if arch.capability < 80 and dtype != "f16":
            continue
        yield _combine(dtype)
        if arch.capability >= 80 and _ITEM[dtype] == 2:
            yield _combine(dtype, decode_wide.HEAD_DIM_V)
        for stored in ("", *STORED.values()) if _ITEM[dtype] == 2 else ("",):
            yield append(dtype, stored)
            for head_dim in HEAD_DIMS:
                in_order = None if stored else _in_order(dtype, head_dim, arch)
                yield from (v for v in (_decode(dtype, stored, head_dim, arch), in_order) if v is not None)
    yield from decode_wide.variants(arch)
    yield from decode_latent.variants(arch)


def code_refusals(p: Problem) -> list[str]:
    """Reasons why kernels cannot read the 4-bit codes of a cache."""
    codes = p.cache.codes if p.cache else None
    reasons = []
    if codes and codes.kind == "int4" and codes.scale_dtype != "float16":
        reasons.append(f"reads 4-bit codes with scales of float16, not {codes.scale_dtype}")
    if codes and not codes.same_strides:
        reasons.append(
            "reads scales and zeros of 4-bit codes only with equal strides, those of a key contiguous"
        )
    return reasons


def refusals(problem: Problem, arch: Arch) -> list[str]:
    """All reasons why these kernels do not support a problem."""
    p, reasons = problem, []
    if p.cache is None:
        return ["reads keys from a KV cache only"]
    if p.dtype == "float64":
        reasons.append("multiplies 16-bit and TF32 numbers on tensor cores, not float64")
    if p.precision in ("ieee", "tf32"):
        reasons.append(f"computes float32 as tf32x3, not {p.precision}")
    if arch.capability < 80 and p.dtype in ("bfloat16", "float32"):
        reasons.append(f"{p.dtype} needs the tensor cores of sm_80")
    reasons += code_refusals(p)
    if p.cache.dtype != p.dtype and p.dtype not in ("float16", "bfloat16"):
        reasons.append(f"reads {p.cache.dtype} for queries of float16 and bfloat16, not {p.dtype}")
    if p.packed or p.cache.packed:
        reasons.append("does not support packed queries or packed new keys")
    wide = is_wide(p)
    if not wide and (p.cache.page % STEP_KEYS or p.cache.page & p.cache.page - 1):
        reasons.append(f"needs pages of a power of two of at least {STEP_KEYS} keys, not {p.cache.page}")
    reasons += [f"does not read {name}" for name in p.unread(("mask", "Spans", "ALiBi", "softcap"))]
    if p.mask or p.cache.leftpad:
        reasons.append("does not support a boolean mask or cache_leftpad")
    if p.cache.unrotated:
        reasons.append("does not support rotary.on_read")
    widest = max(p.head_dim, p.head_dim_v)
    if wide:
        reasons += decode_wide.refusals(p, arch)
    if p.spans and p.dtype == "float32" and widest > 128:
        reasons.append(f"does not support Spans for float32 of head_dim {widest}, above 128")
    if not p.aligned:
        reasons.append("rows of q, o and the cache must be contiguous and start on 16-byte boundaries")
    return reasons or _in_order_refusals(p, arch) if p.reproducible else reasons


def is_wide(p: Problem) -> bool:
    """Whether head dims need the kernels for wide heads; narrower latents are ordinary keys."""
    return max(p.head_dim, p.head_dim_v) > HEAD_DIMS[-1]


def _in_order_refusals(p: Problem, arch: Arch) -> list[str]:
    """Reasons why a row would not have the same bits as in a prompt."""
    assert p.cache is not None
    if p.reproducible == "device" or p.cache.dtype != p.dtype or p.spans:
        return ["splits keys by the batch and the GPU, and adds in another order than a prompt"]
    reasons = []
    if p.cache.splits:
        reasons.append(
            f"cuts keys into chunks of {flash.CHUNK_KEYS}, and tuning.splits={p.cache.splits} is asked for"
        )
    if p.alibi and p.seqlen_k > 2**24:
        reasons.append("beyond 2**24 keys a distance of ALiBi is rounded")
    here, there = _kernel(p, arch).tile[1], flash.keys_of_block(p, arch)
    if here != there:
        reasons.append(f"sums over {here} keys at once, a prompt with these head dims over {there}")
    return reasons


# ---------------------------------------------------------------------------------------------- splits


def split_cost(splits: int, blocks: int, steps: int, at_once: int) -> float:
    """The cost of a number of splits, in steps of a block.

    Parameters
    ----------
    splits : int
    blocks : int
        Number of blocks without splitting.
    steps : int
        Steps of a block without splitting.
    at_once : int
        Blocks that the GPU runs at once.
    """
    waves = blocks_of(blocks * splits, at_once)
    merging = LAUNCH_COST + _SPLIT_COST * splits if splits > 1 else 0.0
    return waves * (blocks_of(steps, splits) + BLOCK_COST) + merging


def keys_seen(p: Problem) -> int:
    """Most keys that a tile of queries attends to, for a full cache."""
    if p.left is None:
        return p.seqlen_k
    return min(p.seqlen_k, p.left + p.seqlen_q + min(p.right or 0, p.seqlen_q))


def keys_of_step(variant: Variant) -> int:
    """Keys that a block reads per step."""
    if variant.source in (decode_wide.SOURCE, decode_latent.SOURCE):
        return variant.tile[1]
    return STEP_KEYS * variant.threads // 32


def _blocks_at_once(variant: Variant, arch: Arch) -> int:
    """Blocks that the GPU runs at once, by shared memory; a block reserves 1 KiB in addition to its own."""
    of_multiprocessor = arch.shared_bytes + 1024
    fitting = max(1, of_multiprocessor // (variant.shared_bytes + 1024))
    if variant.source == decode_wide.SOURCE:  # why: registers allow fewer
        fitting = min(fitting, decode_wide.blocks_held(variant))
    return arch.multiprocessors * fitting


class Splits(NamedTuple):
    """The planned split of the keys."""

    parts: int  # number of splits
    steps: int  # steps of a block without splitting
    blocks: int  # number of blocks without splitting
    at_once: int  # blocks that the GPU runs at once
    # Costs with and without splitting, in steps of a block.
    cost: float
    alone: float

    def line(self) -> str:
        """The line that `explain` shows."""
        return (
            f"splits    {self.parts} of {self.steps} steps; {self.blocks * self.parts} thread blocks, "
            f"{self.at_once} at once; cost {self.cost:.1f}, unsplit {self.alone:.1f}"
        )


def _choose_splits(p: Problem, variant: Variant, arch: Arch) -> Splits:
    """The caller's number of splits, or the cheapest one."""
    group = p.heads_q // p.heads_k
    blocks = p.batch * p.heads_k * blocks_of(group * p.seqlen_q, variant.tile[0])
    steps = max(1, blocks_of(keys_seen(p), keys_of_step(variant)))
    at_once = _blocks_at_once(variant, arch)
    assert p.cache is not None
    if p.reproducible:
        chunks = max(1, blocks_of(p.seqlen_k, flash.CHUNK_KEYS))
        costs = {n: split_cost(n, blocks, steps, at_once) for n in (1, chunks)}
        return Splits(chunks, steps, blocks, at_once, costs[chunks], costs[1])
    # why: a split shorter than two full rings costs merging and gains nothing; the kernel makes none.
    stages = int(dict(variant.macros)["CF_STAGES"])
    most = max(1, min(_MOST_SPLITS, steps // (2 * stages)))
    costs = {n: split_cost(n, blocks, steps, at_once) for n in range(1, most + 1)}
    count = p.cache.splits or min(costs, key=lambda n: (costs[n], n))
    return Splits(count, steps, blocks, at_once, split_cost(count, blocks, steps, at_once), costs[1])


def cheapest(problem: Problem, arch: Arch) -> tuple[Variant, Splits]:
    """The kernel for a problem that is not refused, and its splits."""
    variant = _kernel(problem, arch)
    return variant, _choose_splits(problem, variant, arch)


def _kernel(p: Problem, arch: Arch) -> Variant:
    assert p.cache is not None
    if is_wide(p):
        by_wgmma = decode_wide.of_latents(p) and not decode_latent.refusals(p, arch)
        return decode_latent.kernel(p) if by_wgmma else decode_wide.kernel(p, arch)
    stored = "" if p.cache.dtype == p.dtype else STORED[p.cache.dtype]
    head_dim = next(d for d in HEAD_DIMS if max(p.head_dim, p.head_dim_v) <= d)
    dtype = _PRODUCTS[p.dtype]
    variant = _in_order(dtype, head_dim, arch) if p.reproducible else _decode(dtype, stored, head_dim, arch)
    assert variant is not None
    return variant


def steps_before(problem: Problem) -> tuple[list[Launch], list[tuple[str, str, tuple[int, ...]]]]:
    """The launches that append and rotate, and the parts of the workspace that they need."""
    p = problem
    assert p.cache is not None
    parts: list[tuple[str, str, tuple[int, ...]]] = []
    rows = 2 * p.cache.appended * p.heads_k * (1 if p.cache.packed else p.batch)
    if p.cache.rotary:
        batch, heads, queries = rows_of(p)
        rows += batch * heads * queries
        lanes = 32 // ITEM_BYTES[p.dtype]
        parts.append(("rotated_q", p.dtype, (batch, heads, queries, round_up(p.head_dim, lanes))))
    stored = "" if p.cache.dtype == p.dtype else STORED[p.cache.dtype]
    return along_x(append(SHORT[p.dtype], stored), blocks_of(rows, 4)), parts


def plan(problem: Problem, arch: Arch) -> Plan:
    """The plan for a problem that is not refused."""
    p = problem
    launches, parts = steps_before(p)
    if p.empty:
        return Plan(arch.name, NAME, tuple(launches), *laid_out(*parts))
    variant, splits = cheapest(p, arch)
    launches += along_x(variant, splits.blocks * splits.parts)
    rows = p.batch * p.heads_q * p.seqlen_q
    if p.reproducible:
        notes = [f"bits      of a row are its own: in the order of prompts, {variant.tile[1]} keys at once"]
        if splits.parts > 1:
            of_chunks = (splits.parts * p.batch, p.heads_q, p.seqlen_q)
            parts.append(("chunk_o", "float32", (*of_chunks, p.head_dim_v)))
            parts.append(("chunk_rows", "float32", (*of_chunks, 2)))
            launches += along_x(flash.combine_chunks(variant.dtype), rows)
            notes.append(f"chunks    {splits.parts} of {flash.CHUNK_KEYS} keys, one per thread block")
        return Plan(arch.name, NAME, tuple(launches), *laid_out(*parts), notes=tuple(notes))
    if splits.parts > 1:
        shape = (splits.parts, p.batch, p.heads_q, p.seqlen_q)
        parts += [("partial_o", "float32", (*shape, p.head_dim_v)), ("partial_lse", "float32", shape)]
        launches += along_x(_combine(_PRODUCTS[p.dtype], p.head_dim_v), rows)
    notes = [splits.line(), *_latent_notes(p, arch)]
    return Plan(arch.name, NAME, tuple(launches), *laid_out(*parts), notes=tuple(notes))


def _latent_notes(p: Problem, arch: Arch) -> list[str]:
    """Notes on why latents on Hopper are computed by mma.sync."""
    if arch.capability != 90 or not decode_wide.of_latents(p):
        return []
    stem = decode_latent.SOURCE.removesuffix(".cu")
    return [f"skipped   {stem}: {reason}" for reason in decode_latent.refusals(p, arch)]

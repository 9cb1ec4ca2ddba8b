"""Hopper kernels: FP16, BF16, FP8 and float32 (f16x3) by TMA and wgmma, on sm_90 only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from ...call.arrays import ITEM_BYTES
from ...call.operands import FLOAT8
from ...call.problem import Problem
from ..catalog import SHORT, Arch, Box, Variant
from ..launch import Launch, Plan, along_x, beyond_band, blocks_of, class_of, laid_out, round_up, rows_of
from . import f16x3, flash, simple
from .pack_gqa import rows_of_tiles
from .wide import PROMISED, head_dim_refusal, option_refusal

__all__ = ["NAME", "plan", "refusals", "refusals_but_strides", "variants"]

NAME = "hopper"

_DTYPES = ("f16", "bf16")
_MASKS = ("band", "any")
_EXPONENTIALS = {"band": 1, "any": 2, "spans": 1}  # in the code, per score: the weight, and softcap
_STAGES = 2
_SHARED_BYTES = 227 * 1024


# (head_dim, head_dim_v) class -> (queries, keys, turns) per block, for each of _MASKS. "band": causal,
# window, sinks, packed. "any": also softcap, ALiBi, scale <= 0, which need more registers.
# why these: the most keys, in multiples of 16, that neither spill nor make ptxas serialise wgmma, with two
# stages in 227 KiB. At head dim 128, 176 keys would fit; 128 leave room for two stages of Q, and waste less
# beyond the last key. 192 queries (three consumer warpgroups) where a row of O is short enough: a third fewer
# blocks then read K and V from L2. turns (the warp scheduler barrier) only up to 128: above, tensor cores are
# the bottleneck by far, and warpgroups need not be scheduled.
_FORWARD = {
    (64, 64): ((192, 128, True), (192, 112, True)),
    (96, 96): ((192, 112, True), (192, 96, True)),
    (128, 128): ((128, 128, True), (128, 128, True)),
    (192, 128): ((128, 128, False), (128, 128, False)),
    (192, 192): ((128, 112, False), (128, 112, False)),
    (256, 256): ((128, 80, False), (128, 80, False)),
}

# Larger head dims: class -> slots of the ring of flash_forward_wide_sm90, as many as fit. Kind "band", 64
# queries and keys per block.
# why no clusters: two blocks that load each K and V together ran at 147 TFLOP/s, one alone at 515 (an H200,
# bf16, 16 heads of 8192 queries and keys of head dim 512).
_FORWARD_WIDE = {(384, 384): 21, (512, 512): 19, (576, 512): 18}

# Kind "spans": a band, spans and blocks; tiles of one head. Only the common classes for training: other head
# dims use the next class, zero-padded.
# why the tiles of "band": a causal mask then has the same bits as option and as spans.
_SPANS = {classes: _FORWARD[classes][0] for classes in ((64, 64), (128, 128), (192, 128), (256, 256))}
_REACH_THREADS = 256
_REACH_WORD = 32  # query tiles, and key blocks, per thread block of flash_reach

# The same for float8. At head dim 128 products, exponentials and shared memory all take about the same time,
# so that more keys per block, which read Q less often, gain more than for 16 bits.
# why these: multiples of 64, the swizzle unit of V^T. 256 keys at 128 would fit but waste more of a causal
# mask; at 256 the registers left by O allow 128.
_FP8 = {
    (64, 64): ((192, 128), (192, 128)),
    (128, 128): ((128, 192), (128, 128)),
    (256, 256): ((128, 128), (128, 64)),
}

# Most columns for which the forward kernel can also store o as float32, for partial results.
# why not above: the branch costs instructions in the main loop.
_MOST_WITH_FLOATS = 128

# The same for the backward pass, where a block owns keys.
# why these: at head dim 128, dK and dV of 64 keys fill half of a consumer's registers; of the wider classes
# only (192, 128) fits. As many queries as registers allow: more queries read fewer operands.
_BACKWARD = {
    (64, 64): ((128, 128), (64, 128)),
    (96, 96): ((64, 128), (64, 128)),
    (128, 128): ((80, 128), (64, 128)),
    (192, 128): ((64, 128), (64, 128)),
}
# Kind "spans": see _SPANS.
# why 64 queries at head dim 128: with 80 there is no room for the bits of partial tiles that helper warps
# pass on.
_BACKWARD_SPANS = {(64, 64): (128, 128), (128, 128): (64, 128)}
# Scales for which a backward kernel of kind "band" can represent LSE / scale in its four 16-bit numbers.
_SCALES = (2.0**-20, 2.0**20)
# Larger head dims: flash_backward_wide_sm90 computes dK and dV, its warpgroups sharing the keys of a block;
# then flash_backward_wide_dq_sm90 computes dQ, its blocks owning queries.
# why two: atomic additions to dQ would be limited by L2.
_BACKWARD_WIDE = {(256, 256): ((64, 64), (128, 64))}

_IN_TURNS = "dq        summed in turns, by the blocks of the first keys first: the same bits every run"
_IN_WAVES = "dq        summed in turns, in waves of {wave} blocks of a head: the same bits every run"
# Up to this many query heads in the whole batch, sums are ordered in waves.
# why: by counting, waves win up to here, for 1024 to 65536 keys, and lose for more heads; the two were not
# timed against each other on an H200.
_FEW_HEADS = 24
_SECTION_BYTES = 16 << 20  # kL2SectionBytes of hopper/consumers.cuh


def _forward(dtype: str, classes: tuple[int, int], mask: str, unrounded: bool = False) -> Variant:
    """The forward kernel of these classes; above 128 columns a variant of its own leaves o unrounded."""
    floats = unrounded and max(classes) > _MOST_WITH_FLOATS
    cell = _SPANS[classes] if mask == "spans" else _FORWARD[classes][_MASKS.index(mask)]
    (d, v), (m, n, turns) = classes, cell
    # 1024 bytes: the barriers; the tiles before them are aligned to as much.
    keys_bytes, q_bytes = 2 * _STAGES * n * (d + v) + 1024, 2 * m * d
    # why two: the next Q need not wait for the store of O, which uses the memory of its Q.
    q_stages = 2 if keys_bytes + 2 * q_bytes <= _SHARED_BYTES else 1
    # Each product appears twice in the code: in the loop, and for the first S and the last P V outside it.
    shapes = Counter({f"64x{n}x16": 2 * (d // 16)}) + Counter({f"64x{v}x16": 2 * (n // 16)})
    return Variant(
        "flash_forward_sm90.cu",
        "floats" if floats else "",
        "ForwardParams",
        dtype,
        *classes,
        (m, n),
        m * 2 + 128,
        keys_bytes + q_stages * q_bytes,
        mask,
        macros=(
            ("CF_STAGES", str(_STAGES)),
            ("CF_Q_STAGES", str(q_stages)),
            ("CF_TURNS", str(int(turns))),
            *((("CF_STORES_FLOATS", "1"),) if floats else ()),
        ),
        products=tuple(sorted(shapes.items())),
        boxes=(Box("q", 64, d, True), Box("k", n, d), Box("v", n, v), Box("o", 16, v, True)),
    )


def _forward_wide(dtype: str, classes: tuple[int, int], mask: str) -> Variant:
    """The forward kernel of head dims above 256; each of two warpgroups has half of the columns of O."""
    (d, v), (m, n), slots = classes, (64, 64), _FORWARD_WIDE[classes]
    # Q, the ring buffer, P. 1024 bytes: the barriers, and rescale factors of rows.
    shared_bytes = 2 * (m * d + slots * n * 64 + m * n) + 1024
    # S and O += P V of one warpgroup, inside and outside the loop; O += P V of the other inside its loop.
    products = 2 * (d // 16) + 3 * (v // 128) * (n // 16)
    return Variant(
        "flash_forward_wide_sm90.cu",
        "",
        "ForwardParams",
        dtype,
        d,
        v,
        (m, n),
        384,
        shared_bytes,
        mask,
        macros=(("CF_SLOTS", str(slots)),),
        products=((f"64x{n}x16", products),),
        covered=n // 2,
        boxes=(Box("q", m, d, True), Box("k", n, d), Box("v", n, v), Box("o", 16, v, True)),
    )


def _reach(tile: tuple[int, int], of_keys: bool = False) -> Variant:
    """The kernel that classifies tiles under spans and blocks. why f16: one variant serves all dtypes."""
    bounds = 4 * 4 * 2 * _REACH_WORD
    step, params = ("of_keys", "BackwardParams") if of_keys else ("", "ForwardParams")
    return Variant("flash_reach.cu", step, params, "f16", 256, 256, tile, _REACH_THREADS, bounds, "spans")


def _forward_fp8(classes: tuple[int, int], mask: str) -> Variant:
    """The forward kernel for float8. Its code has each product once."""
    (d, v), (m, n) = classes, _FP8[classes][_MASKS.index(mask)]
    keys_bytes = _STAGES * n * (d + 2 * v) + 1024  # K, V and V^T
    part = min(v, 128)  # columns of O that are summed, and stored through the memory of Q, at a time
    q_bytes = m * max(d, 2 * part)
    # why not with three consumer warpgroups: the other warps then have 32 registers, and spill 8 bytes.
    q_stages = 2 if keys_bytes + 2 * q_bytes <= _SHARED_BYTES and m == 128 else 1
    shapes = Counter({f"64x{n}x32": d // 32}) + Counter({f"64x{part}x32": n // 32 * (v // part)})
    return Variant(
        "flash_forward_fp8_sm90.cu",
        "",
        "Fp8ForwardParams",
        "e4m3",
        *classes,
        (m, n),
        m * 2 + 128,
        keys_bytes + q_stages * q_bytes,
        mask,
        macros=(
            ("CF_STAGES", str(_STAGES)),
            ("CF_Q_STAGES", str(q_stages)),
            ("CF_PART_V", str(part)),
            ("CF_TURNS", str(int(d <= 128))),
        ),
        products=tuple(sorted(shapes.items())),
        boxes=(Box("q", 64, d, True), Box("k", n, d), Box("v", n, v), Box("o", 16, v, True)),
    )


def _backward(dtype: str, classes: tuple[int, int], mask: str) -> Variant:
    """The backward kernel, run between the passes delta and dq_convert of flash_backward.cu."""
    spans = mask == "spans"
    (d, v), (m, n) = classes, _BACKWARD_SPANS[classes] if spans else _BACKWARD[classes][_MASKS.index(mask)]
    # why one stage of dO above 128: two do not fit. why 64 bytes of K: see DQHalf in the kernel.
    do_stages, span_of_k = (1, 64) if d > 128 else (_STAGES, 0)
    tiles = 2 * (n * (d + v) + m * (_STAGES * d + do_stages * v) + _STAGES * m * n)
    # LSE and delta: as 16 extra operand columns, one more product for S and dP, or in FP32.
    subtracted = mask != "any" and d + v <= 256
    terms = 32 * m + 128 if subtracted else 8 * _STAGES * round_up(m, 32)
    # dQ in FP32. 384 bytes: the barriers. 1024: the alignment of tiles.
    shared_bytes = tiles + 4 * m * d + round_up(terms + 384, 1024)
    if spans:  # a bit per pair of a partial tile
        shared_bytes += _STAGES * m * n // 8
    # S and dP; dV and dK; dQ, where each warpgroup has half of the queries or of the columns, or more, so
    # that these form whole column blocks.
    shapes = Counter({f"64x{m}x16": (d + v) // 16 + 2 * subtracted})
    # With 80 queries, dQ is computed transposed.
    of_dq = m if m % 64 else d if m == 128 else max(d // 2, 64)
    for columns, products in ((v, m // 16), (d, m // 16), (of_dq, n // 16)):
        shapes[f"64x{columns}x16"] += products
    early_dp = d + v <= 256 and (mask != "any" or d < 128)  # kEarlyDP: dP overlaps with the exponentials of P
    return Variant(
        "flash_backward_sm90.cu",
        "",
        "BackwardParams",
        dtype,
        *classes,
        (m, n),
        384,
        shared_bytes,
        mask,
        products=tuple(sorted(shapes.items())),
        covered=early_dp * _EXPONENTIALS[mask] * m // 2,
        boxes=(Box("q", m, d), Box("k", n, d, span=span_of_k), Box("v", n, v), Box("do", m, v)),
    )


def _backward_wide(dtype: str, classes: tuple[int, int], mask: str) -> Variant:
    """The pass for dK and dV of wide heads: one warpgroup computes S and the other dP, by the same code."""
    d, (m, n) = classes[0], _BACKWARD_WIDE[classes][0]
    pair_tiles = _STAGES + 1 + (mask == "any")  # P and dS; for "any" also weights
    tiles = 2 * (2 * n * d + 2 * _STAGES * m * d + pair_tiles * m * n)
    shapes = Counter({f"64x{m}x16": d // 16}) + Counter({f"64x{d // 2}x16": 2 * (m // 16)})
    return Variant(
        "flash_backward_wide_sm90.cu",
        "",
        "BackwardParams",
        dtype,
        *classes,
        (m, n),
        384,
        tiles + 4 * 2 * _STAGES * m + 1024,
        mask,
        products=tuple(sorted(shapes.items())),
        boxes=(Box("q", m, d), Box("k", n, d), Box("v", n, d), Box("do", m, d)),
    )


def _backward_wide_dq(dtype: str, classes: tuple[int, int], mask: str) -> Variant:
    """The pass for dQ of wide heads; the exponentials of P overlap with dP."""
    (d, v), (m, n) = classes, _BACKWARD_WIDE[classes][1]
    shapes = Counter({f"64x{n}x16": (d + v) // 16}) + Counter({f"64x{d}x16": n // 16})
    return Variant(
        "flash_backward_wide_dq_sm90.cu",
        "",
        "BackwardParams",
        dtype,
        *classes,
        (m, n),
        384,
        2 * (m * (d + v) + n * (_STAGES * d + v)) + 1024,
        mask,
        products=tuple(sorted(shapes.items())),
        covered=_EXPONENTIALS[mask] * n // 2,
        boxes=(Box("q", 64, d), Box("k", n, d), Box("v", n, v), Box("do", 64, v)),
    )


def _dq_convert(of: Variant, arch: Arch) -> Variant:
    """The pass that rounds the dQ accumulator: that of the flash family, with the tiles of this kernel."""
    found = flash.backward("dq_convert", of.dtype, (of.head_dim, of.head_dim_v), "band", arch)
    assert found is not None
    return replace(found, tile=(of.tile[0], of.tile[0]))


def _every_forward(dtype: str, table: Iterable[tuple[int, int]], mask: str) -> Iterator[Variant]:
    for classes in table:
        yield _forward(dtype, classes, mask)
        if max(classes) > _MOST_WITH_FLOATS:
            yield _forward(dtype, classes, mask, unrounded=True)


def variants(arch: Arch) -> Iterator[Variant]:
    """The variants compiled for an architecture."""
    for dtype, mask in product(_DTYPES, _MASKS):
        yield from _every_forward(dtype, _FORWARD, mask)
        for classes in _BACKWARD:
            made = _backward(dtype, classes, mask)
            yield made
            if made.tile[0] % 32:  # the flash family does not have these tiles
                yield _dq_convert(made, arch)
        if mask == "band":
            yield from (_forward_wide(dtype, classes, mask) for classes in _FORWARD_WIDE)
        for classes in _BACKWARD_WIDE:
            yield _backward_wide(dtype, classes, mask)
            yield _backward_wide_dq(dtype, classes, mask)
    for mask in _MASKS:
        yield from (_forward_fp8(classes, mask) for classes in _FP8)
    for dtype in _DTYPES:
        yield from _every_forward(dtype, _SPANS, "spans")
        yield from (_backward(dtype, classes, "spans") for classes in _BACKWARD_SPANS)
    yield from f16x3.variants()
    yield from (_reach(tile) for tile in sorted({cell[:2] for cell in _SPANS.values()}))
    yield from (_reach(tile, of_keys=True) for tile in sorted({*_BACKWARD_SPANS.values()}))


def _mask(problem: Problem) -> str:
    if beyond_band(problem):
        return "any"
    if problem.direction == "backward" and not _SCALES[0] <= problem.scale <= _SCALES[1]:
        return "any"
    return "spans" if problem.spans or problem.blocks else "band"


def _chosen(problem: Problem) -> Variant | None:
    """The kernel for the head dims and options of a problem; None if no class fits."""
    if problem.dtype == "float32":
        return f16x3.chosen(problem)
    mask = _mask(problem)
    if problem.dtype == FLOAT8:
        classes = class_of(_FP8, problem)
        return _forward_fp8(classes, "band" if mask == "spans" else mask) if classes else None
    if problem.direction == "forward":
        if classes := class_of(_SPANS if mask == "spans" else _FORWARD, problem):
            return _forward(SHORT[problem.dtype], classes, mask, problem.unrounded)
        makers: tuple[tuple[Any, Callable[..., Variant]], ...] = ((_FORWARD_WIDE, _forward_wide),)
        mask = "band"  # `refusals` refuses other kinds
    elif mask == "spans" and class_of(_BACKWARD_SPANS, problem):
        makers = ((_BACKWARD_SPANS, _backward),)
    else:
        mask = "band" if mask == "spans" else mask  # `refusals` refuses it; only the tile matters
        makers = ((_BACKWARD, _backward), (_BACKWARD_WIDE, _backward_wide))
    for table, make in makers:
        if classes := class_of(table, problem):
            return make(SHORT[problem.dtype], classes, mask)
    return None


def refusals_but_strides(problem: Problem, arch: Arch) -> list[str]:
    """All reasons against a problem that do not depend on strides and alignment."""
    return refusals(problem._replace(aligned=True, boxes=True), arch)


def refusals(problem: Problem, arch: Arch) -> list[str]:
    """All reasons why these kernels do not support a problem."""
    p, reasons = problem, []
    if p.direction not in ("forward", "backward"):
        return [f"has no kernel for direction {p.direction}"]
    if arch.capability != 90:
        reasons.append(f"its code runs on sm_90 only, not on {arch.name}")
    if p.dtype not in ("float16", "bfloat16", "float32", FLOAT8):
        reasons.append(f"multiplies float16, bfloat16, float32 and {FLOAT8}, not {p.dtype}")
    if p.dtype == "float32":
        reasons += f16x3.refusals(p)
    elif p.dtype == FLOAT8 and p.result_dtype == "float32":
        reasons.append("writes float16 and bfloat16, not float32")
    if p.reproducible == "device":
        reasons.append("multiplies on tensor cores, whose order of sums depends on the architecture")
    elif p.reproducible == "batch" or (p.reproducible and p.direction == "backward"):
        reasons.append("no kernel with the same summation order for decode, or for gradients of one sequence")
    elif p.reproducible and p.dtype == FLOAT8:
        reasons.append(f"the order of sums of {FLOAT8} is not guaranteed")
    hides = p.dtype not in (FLOAT8, "float32") and _mask(p) == "spans"
    if p.direction == "forward" and hides:
        hides = class_of(_SPANS, p) is not None
    if p.direction == "backward" and hides:
        hides = class_of(_BACKWARD_SPANS, p) is not None
        if hides and p.deterministic:
            reasons.append("sums dQ with Spans or a BlockMask in any order")
    if unknown := p.unread(("ALiBi", "softcap", *("Spans", "BlockMask") * bool(hides))):
        reasons.append(f"its inner loop has no {' or '.join(unknown)}")
    if not p.aligned:
        reasons.append("rows of every tensor must be contiguous and start on 16-byte boundaries")
    elif not p.boxes:
        reasons.append("bulk copies take strides above 0 and below 2**40 bytes only (no broadcast axis)")
    if not p.seqlen_k or (p.direction == "backward" and not p.seqlen_q):
        reasons.append("there are no rows for a tensor map to describe")
    if max(p.seqlen_q, p.seqlen_k) >= 2**30:
        reasons.append("sequences must be shorter than 2**30")
    variant = _chosen(p)
    if variant is None:
        if p.dtype != "float32":
            wide = p.direction == "forward" and p.dtype != FLOAT8
            reasons.append(head_dim_refusal(p, max(_FORWARD_WIDE) if wide else None))
        return reasons
    unknown = [*beyond_band(p), *[PROMISED] * bool(p.reproducible)]
    if unknown and variant.kernel == "flash_forward_wide_sm90":
        reasons.append(option_refusal(p, unknown))
    if p.tile not in (None, variant.tile):
        reasons.append(f"tile {p.tile} is not built (built: {variant.tile})")
    return reasons


def _forward_plan(problem: Problem, arch: Arch, variant: Variant) -> Plan:
    """Plan persistent blocks, which load the keys of the next tile during the end of this one.

    Tiles of equal work are assigned statically. With a band or packed sequences the work differs, and an idle
    block takes the next tile from a counter.
    """
    if variant.mask == "spans":
        return _spans_plan(problem, arch, variant)
    rows, line = rows_of_tiles(problem, variant.tile, arch.multiprocessors)
    notes = (line,) if line else ()
    blocks = min(rows.tiles, arch.multiprocessors)
    launches = tuple(launch._replace(head_bits=rows.head_bits) for launch in along_x(variant, blocks))
    same_work = not problem.packed and problem.left is None and problem.right is None
    if rows.tiles <= arch.multiprocessors or same_work:
        return Plan(arch.name, NAME, launches, notes=notes)
    counter = laid_out(("next_tile", "int32", (1,)))
    return Plan(arch.name, NAME, launches, *counter, zeroed=("next_tile",), notes=notes)


def _skips(tile: tuple[int, int]) -> str:
    return f"skips     masked tiles of {tile[0]} queries x {tile[1]} keys"


def _reach_launches(p: Problem, of: Variant) -> tuple[Launch, ...]:
    """The launches that classify the tiles for a kernel of kind "spans"."""
    (m, n), words_of = of.tile, _REACH_WORD
    each = (blocks_of(blocks_of(p.seqlen_q, m), words_of), blocks_of(blocks_of(p.seqlen_k, n), words_of))
    backward = p.direction == "backward"
    return tuple(along_x(_reach(of.tile, of_keys=backward), p.batch * p.heads_q * each[0] * each[1]))


def _spans_plan(problem: Problem, arch: Arch, variant: Variant) -> Plan:
    """Plan a kernel that classifies tiles in two bits each, and the forward kernel, which skips empty ones.

    An idle block takes the next tile, as with a band. why tiles of one head: spans may differ between heads.
    """
    (m, n), p = variant.tile, problem
    pairs, of_queries = p.batch * p.heads_q, blocks_of(p.seqlen_q, m)
    words = blocks_of(blocks_of(p.seqlen_k, n), _REACH_WORD)
    tiles = pairs * of_queries
    launches = (*_reach_launches(p, variant), *along_x(variant, min(tiles, arch.multiprocessors)))
    parts = [("reach", "int32", (p.batch, p.heads_q, of_queries, 2 * words))]
    counter = [("next_tile", "int32", (1,))] if tiles > arch.multiprocessors else []
    notes = (_skips(variant.tile),)
    zeroed = tuple(name for name, _, _ in counter)
    return Plan(arch.name, NAME, launches, *laid_out(*parts, *counter), zeroed=zeroed, notes=notes)


def plan(problem: Problem, arch: Arch) -> Plan:
    """The plan for a problem that is not refused."""
    variant = _chosen(problem)
    assert variant is not None
    n, p = variant.tile[1], problem
    if p.dtype == "float32":
        return f16x3.plan(p, arch)
    if p.direction == "forward":
        return _forward_plan(p, arch, variant)
    classes = (variant.head_dim, variant.head_dim_v)
    before = flash.backward("delta", variant.dtype, classes, "band", arch)
    assert before is not None
    owns_queries, spans = classes in _BACKWARD_WIDE, variant.mask == "spans"
    after = (
        _backward_wide_dq(variant.dtype, classes, variant.mask)
        if owns_queries
        else _dq_convert(variant, arch)
    )
    of_keys = problem.batch * problem.heads_k * blocks_of(problem.seqlen_k, n)
    launches: list[Launch] = [
        *(_reach_launches(p, variant) if spans else ()),
        *along_x(before, p.batch * p.heads_q * blocks_of(p.seqlen_q, before.tile[0])),
        *along_x(variant, of_keys),
        *along_x(after, p.batch * p.heads_q * blocks_of(p.seqlen_q, after.tile[0])),
        *simple.sink_gradients(problem),
    ]
    if owns_queries:
        workspace = laid_out(("delta", p.accumulator, rows_of(p)))
        return Plan(arch.name, NAME, tuple(launches), *workspace)
    reach = (_reach_of_keys(p, variant.tile),) if spans else ()
    wave = _wave(problem, arch) if problem.deterministic else 0
    chains = (2 if wave else 1) if problem.deterministic else 0
    workspace = flash.gradient_workspace(problem, after, chains=chains, more=reach)
    if not problem.deterministic:
        notes = (_skips(variant.tile),) if spans else ()
        return Plan(arch.name, NAME, tuple(launches), *workspace, zeroed=flash.ZEROED, notes=notes)
    # why not zeroed: the first block to add to a tile stores instead, and dq_convert writes zeros for tiles
    # that no block adds to.
    zeroed = tuple(name for name in flash.ZEROED if name != "dq_accumulator")
    in_turns = tuple(launch._replace(wave=wave) for launch in launches)
    note = _IN_WAVES.format(wave=wave) if wave else _IN_TURNS
    return Plan(arch.name, NAME, in_turns, *workspace, zeroed=zeroed, notes=(note,))


def _wave(p: Problem, arch: Arch) -> int:
    """Blocks of a head that run at once and add in an order of their own; 0: one order for all blocks.

    Blocks of a wave start at different tiles and never wait, but each tile of dQ needs two accumulators. With
    one order, the first blocks of a head wait for each other; with many heads, few blocks of a head run at
    once.
    """
    heads = p.batch * p.heads_k
    if p.left is not None or p.batch * p.heads_q > _FEW_HEADS:
        return 0
    # Heads as lpt_key_tile of seqlen.cuh has them in a section.
    elements = _SECTION_BYTES // ITEM_BYTES[p.dtype]
    section = max(elements // (p.head_dim + p.head_dim_v) // max(p.seqlen_q, 1), 1)
    return max(1, arch.multiprocessors // min(section, heads))


def _reach_of_keys(p: Problem, tile: tuple[int, int]) -> tuple[str, str, tuple[int, ...]]:
    """The workspace part with two bits per query tile, for each key block."""
    words = blocks_of(blocks_of(p.seqlen_q, tile[0]), _REACH_WORD)
    return "reach", "int32", (p.batch, p.heads_q, blocks_of(p.seqlen_k, tile[1]), 2 * words)

"""Hopper's own kernels: FP16, BF16 and FP8 by TMA and wgmma, on sm_90 and nothing else."""

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
from ..launch import Launch, Plan, along_x, blocks_of, laid_out, rows_of
from . import f16x3, flash, simple
from .pack_gqa import rows_of_tiles

__all__ = ["NAME", "foreign", "plan", "refusals", "variants"]

NAME = "hopper"

_DTYPES = ("f16", "bf16")
_MASKS = ("band", "any")
_EXPONENTIALS = {"band": 1, "any": 2, "spans": 1}  # in the code, of a pair: its weight, and softcap
_STAGES = 2
_SHARED_BYTES = 227 * 1024


# (head_dim, head_dim_v) class -> (rows, keys, turns) of a block for each of _MASKS. "band": causal, window,
# sinks, packed. "any": also softcap, ALiBi, scale <= 0, which cost registers.
# why these: the most keys that neither spill nor make ptxas serialise the products, in multiples of 16, with
# two stages in 227 KiB; but at head dim 128, where 176 keys would fit, 128, which leave room for two stages
# of Q and reach less beyond the last key. 192 rows, three warpgroups of consumers,
# where a row of O is short enough: K and V are then read from L2 by a third fewer blocks. No turns above 128:
# the tensor cores are the limit by far, and nobody has to be told when to use them.
_FORWARD = {
    (64, 64): ((192, 128, True), (192, 112, True)),
    (96, 96): ((192, 112, True), (192, 96, True)),
    (128, 128): ((128, 128, True), (128, 128, True)),
    (192, 128): ((128, 128, False), (128, 128, False)),
    (192, 192): ((128, 112, False), (128, 112, False)),
    (256, 256): ((128, 80, False), (128, 80, False)),
}

# Head dims above those: flash_forward_wide_sm90, and slots of its ring, as many as fit. Kind "band", 64
# queries and keys of a block. why no clusters: two blocks that load each K and V together ran at 147
# TFLOP/s, where one alone has 515 (an H200, bf16, 16 heads of 8192 queries and keys of head dim 512).
_FORWARD_WIDE = {(384, 384): 21, (512, 512): 19, (576, 512): 18}

# Kind "spans": a band, and spans and blocks, of one head a tile. Of fewer classes, those that people train
# with: other head dims take the next one, with zeros. The tiles of "band", so that causality has the same
# bits however it is said.
_SPANS = {classes: _FORWARD[classes][0] for classes in ((64, 64), (128, 128), (192, 128), (256, 256))}
_REACH_THREADS = 256
_REACH_WORD = 32  # tiles of queries, and blocks of keys, of a block of flash_reach

# The same of 8-bit floats, and stages of V. Here products, exponentials and shared memory all take about the
# same time at head dim 128, so that more keys, which read Q less often, are worth more than at 16 bits.
# why these: multiples of 64, in which V^T is swizzled. 256 keys at 128 would fit and waste more of a causal
# mask; at 256 O leaves registers for 128, and V has one stage so that V^T may have two.
_FP8 = {
    (64, 64): (((192, 128), (192, 128)), 2),
    (128, 128): (((128, 192), (128, 128)), 2),
    (256, 256): (((128, 128), (128, 64)), 1),
}

# The same for the backward pass, whose block owns keys.
# why these: dK and dV of 64 keys fill half of a consumer's registers at head dim 128, and wider ones do not
# fit but for those of 192 and 128. As many queries as they leave room for: the more, the fewer operands are
# read.
_BACKWARD = {
    (64, 64): ((128, 128), (64, 128)),
    (96, 96): ((64, 128), (64, 128)),
    (128, 128): ((80, 128), (64, 128)),
    (192, 128): ((64, 128), (64, 128)),
}
# Kind "spans": see _SPANS. why 64 queries at head dim 128: beside 80 there is no place for what helpers tell
# of a partial tile.
_BACKWARD_SPANS = {(64, 64): (128, 128), (128, 128): (64, 128)}
# Scales for which a backward kernel of kind "band" can hold LSE / scale in its four numbers of 16 bits.
_SCALES = (2.0**-20, 2.0**20)
# Wider: flash_backward_wide_sm90, dK and dV, whose warpgroups share the keys of a block; then
# flash_backward_wide_dq_sm90, dQ, whose block owns queries. why two: additions to dQ would be L2's limit.
_BACKWARD_WIDE = {(256, 256): ((64, 64), (128, 64))}

_IN_TURNS = "dq        summed in turns, by the blocks of the first keys first: the same bits every run"
_IN_WAVES = "dq        summed in turns, in waves of {wave} blocks of a head: the same bits every run"
# So many heads of q, of all batches, take turns in waves. why: counted, waves are ahead up to here, at 1024
# to 65536 keys, and behind of more; on an H200 the two were not timed against each other.
_FEW_HEADS = 24
_SECTION_BYTES = 16 << 20  # kL2SectionBytes of hopper/consumers.cuh


def _classes(table: Iterable[tuple[int, int]], problem: Problem) -> tuple[int, int] | None:
    """The smallest classes of a table that take a problem's head dims; None if there are none."""
    fitting = ((d, v) for d, v in table if problem.head_dim <= d and problem.head_dim_v <= v)
    return next(fitting, None)


def _forward(dtype: str, classes: tuple[int, int], mask: str) -> Variant:
    """The forward kernel of these classes."""
    cell = _SPANS[classes] if mask == "spans" else _FORWARD[classes][_MASKS.index(mask)]
    (d, v), (m, n, turns) = classes, cell
    # 1024 bytes: the barriers, after tiles that start at multiples of as much.
    keys_bytes, q_bytes = 2 * _STAGES * n * (d + v) + 1024, 2 * m * d
    # why: Q of the next tile then need not wait for O of this one, which leaves through its memory.
    q_stages = 2 if keys_bytes + 2 * q_bytes <= _SHARED_BYTES else 1
    # Two copies of each product: in the loop, and of the first S and the last P V outside.
    shapes = Counter({f"64x{n}x16": 2 * (d // 16)}) + Counter({f"64x{v}x16": 2 * (n // 16)})
    return Variant(
        "flash_forward_sm90.cu",
        "",
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
        ),
        products=tuple(sorted(shapes.items())),
        boxes=(Box("q", 64, d, True), Box("k", n, d), Box("v", n, v), Box("o", 16, v, True)),
    )


def _forward_wide(dtype: str, classes: tuple[int, int], mask: str) -> Variant:
    """The same of head dims above 256, where both warpgroups have half of the columns of O."""
    (d, v), (m, n), slots = classes, (64, 64), _FORWARD_WIDE[classes]
    # Q, the ring, P. 1024 bytes: the barriers, and factors of rows.
    shared_bytes = 2 * (m * d + slots * n * 64 + m * n) + 1024
    # S, and O += P V of the one warpgroup, in the loop and outside; that of the other in its loop.
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
    """The kernel that finds out which tiles spans and blocks leave. why f16: one is for all dtypes."""
    bounds = 4 * 4 * 2 * _REACH_WORD
    step, params = ("of_keys", "BackwardParams") if of_keys else ("", "ForwardParams")
    return Variant("flash_reach.cu", step, params, "f16", 256, 256, tile, _REACH_THREADS, bounds, "spans")


def _forward_fp8(classes: tuple[int, int], mask: str) -> Variant:
    """The same of 8-bit floats. Its loop holds one copy of each product."""
    (d, v), (tiles_of_kinds, stages_v) = classes, _FP8[classes]
    m, n = tiles_of_kinds[_MASKS.index(mask)]
    # O, of 16 bits, leaves through the place of Q. V comes in stages_v stages, and V^T in _STAGES.
    keys_bytes = _STAGES * n * d + (stages_v + _STAGES) * n * v + 1024
    # why not beside three warpgroups of consumers: of the 32 registers that they leave the others, 8 bytes
    # are missing.
    two_fit = keys_bytes + 2 * max(m * d, 2 * m * v) <= _SHARED_BYTES
    q_stages = 2 if two_fit and m == 128 else 1
    part = min(v, 128)  # columns of O that are summed at a time
    shapes = Counter({f"64x{n}x32": d // 32}) + Counter({f"64x{part}x32": n // 32 * (v // part)})
    return Variant(
        "flash_forward_fp8_sm90.cu",
        "",
        "Fp8ForwardParams",
        "e4m3",
        *classes,
        (m, n),
        m * 2 + 128,
        keys_bytes + q_stages * max(m * d, 2 * m * v),
        mask,
        macros=(
            ("CF_STAGES", str(_STAGES)),
            ("CF_STAGES_V", str(stages_v)),
            ("CF_Q_STAGES", str(q_stages)),
            ("CF_PART_V", str(part)),
            ("CF_TURNS", str(int(d <= 128))),
        ),
        products=tuple(sorted(shapes.items())),
        boxes=(Box("q", 64, d, True), Box("k", n, d), Box("v", n, v), Box("o", 16, v, True)),
    )


def _backward(dtype: str, classes: tuple[int, int], mask: str) -> Variant:
    """The kernel between the passes delta and dq_convert of flash_backward.cu."""
    spans = mask == "spans"
    (d, v), (m, n) = classes, _BACKWARD_SPANS[classes] if spans else _BACKWARD[classes][_MASKS.index(mask)]
    # why one stage of dO above: two do not fit. And why 64 bytes of K: see DQHalf in the kernel.
    do_stages, span_of_k = (1, 64) if d > 128 else (_STAGES, 0)
    tiles = 2 * (n * (d + v) + m * (_STAGES * d + do_stages * v) + _STAGES * m * n)
    # LSE and delta: 16 columns of an operand, which S and dP are a product longer for, or FP32.
    subtracted = mask != "any" and d + v <= 256
    terms = 32 * m + 128 if subtracted else 8 * _STAGES * -(-m // 32) * 32
    # FP32: dQ. 384 bytes: the barriers. 1024: what tiles are aligned to.
    shared_bytes = tiles + 4 * m * d + -(-(terms + 384) // 1024) * 1024
    if spans:  # a bit of each pair of a partial tile
        shared_bytes += _STAGES * m * n // 8
    # S and dP; dV and dK; dQ, of which each warpgroup has half of the queries or of the columns, or what it
    # takes to have these in whole blocks.
    shapes = Counter({f"64x{m}x16": (d + v) // 16 + 2 * subtracted})
    # Of 80 queries dQ is transposed.
    of_dq = m if m % 64 else d if m == 128 else max(d // 2, 64)
    for columns, products in ((v, m // 16), (d, m // 16), (of_dq, n // 16)):
        shapes[f"64x{columns}x16"] += products
    early_dp = d + v <= 256 and (mask != "any" or d < 128)  # kEarlyDP: dP runs while P is made
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
    """The pass dK and dV of wide heads. S and dP are one product, each warpgroup's own."""
    d, (m, n) = classes[0], _BACKWARD_WIDE[classes][0]
    pair_tiles = _STAGES + 1 + (mask == "any")  # P, dS; weights
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
    """The pass dQ of wide heads: P is made while dP runs."""
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
    """The pass that rounds what a backward kernel sums: the flash family's, for the tiles of these sums."""
    found = flash.backward("dq_convert", of.dtype, (of.head_dim, of.head_dim_v), "band", arch)
    assert found is not None
    return replace(found, tile=(of.tile[0], of.tile[0]))


def variants(arch: Arch) -> Iterator[Variant]:
    """What is compiled for an architecture."""
    for dtype, mask in product(_DTYPES, _MASKS):
        yield from (_forward(dtype, classes, mask) for classes in _FORWARD)
        for classes in _BACKWARD:
            made = _backward(dtype, classes, mask)
            yield made
            if made.tile[0] % 32:  # the flash family has no such tiles
                yield _dq_convert(made, arch)
        if mask == "band":
            yield from (_forward_wide(dtype, classes, mask) for classes in _FORWARD_WIDE)
        for classes in _BACKWARD_WIDE:
            yield _backward_wide(dtype, classes, mask)
            yield _backward_wide_dq(dtype, classes, mask)
    for mask in _MASKS:
        yield from (_forward_fp8(classes, mask) for classes in _FP8)
    for dtype in _DTYPES:
        yield from (_forward(dtype, classes, "spans") for classes in _SPANS)
        yield from (_backward(dtype, classes, "spans") for classes in _BACKWARD_SPANS)
    yield from f16x3.variants()
    yield from (_reach(tile) for tile in sorted({cell[:2] for cell in _SPANS.values()}))
    yield from (_reach(tile, of_keys=True) for tile in sorted({*_BACKWARD_SPANS.values()}))


def _mask(problem: Problem) -> str:
    if problem.alibi or problem.softcap or problem.scale <= 0:
        return "any"
    if problem.direction == "backward" and not _SCALES[0] <= problem.scale <= _SCALES[1]:
        return "any"
    return "spans" if problem.spans or problem.blocks else "band"


def _chosen(problem: Problem) -> Variant | None:
    """The kernel for a problem's head dims and scores; None if no class takes them."""
    if problem.dtype == "float32":
        return f16x3.chosen(problem)
    mask = _mask(problem)
    if problem.dtype == FLOAT8:
        classes = _classes(_FP8, problem)
        return _forward_fp8(classes, "band" if mask == "spans" else mask) if classes else None
    if problem.direction == "forward":
        table = _SPANS if mask == "spans" else _FORWARD
        makers: tuple[tuple[Any, Callable[..., Variant]], ...] = ((table, _forward),)
        if not _classes(table, problem):
            makers, mask = ((_FORWARD_WIDE, _forward_wide),), "band"  # others are refused
    elif mask == "spans" and _classes(_BACKWARD_SPANS, problem):
        makers = ((_BACKWARD_SPANS, _backward),)
    else:
        mask = "band" if mask == "spans" else mask  # refused, but for its tile
        makers = ((_BACKWARD, _backward), (_BACKWARD_WIDE, _backward_wide))
    for table, make in makers:
        if classes := _classes(table, problem):
            return make(SHORT[problem.dtype], classes, mask)
    return None


def foreign(problem: Problem, arch: Arch) -> list[str]:
    """Every reason that is not how arrays lie."""
    return refusals(problem._replace(aligned=True, boxes=True), arch)


def refusals(problem: Problem, arch: Arch) -> list[str]:
    """Every reason why these kernels cannot answer a problem."""
    p, reasons = problem, []
    if p.direction not in ("forward", "backward"):
        return [f"has no kernel for direction {p.direction}"]
    if arch.capability != 90:
        reasons.append(f"its code runs on sm_90 only, not on {arch.name}")
    if p.dtype not in ("float16", "bfloat16", "float32", FLOAT8):
        reasons.append(f"multiplies float16, bfloat16, float32 and {FLOAT8}, not {p.dtype}")
    if p.dtype == "float32":
        reasons += f16x3.refusals(p)
    elif p.result_dtype == "float32":
        reasons += ["writes float16 and bfloat16, not float32"] * (p.dtype == FLOAT8)
    if p.reproducible == "device":
        reasons.append("multiplies on tensor cores, whose sums follow the architecture")
    elif p.reproducible == "batch" or (p.reproducible and p.direction == "backward"):
        reasons.append("no kernel with the same summation order for decode, or for gradients of one sequence")
    elif p.reproducible and p.dtype == FLOAT8:
        reasons.append(f"no order is promised for {FLOAT8} yet")
    hides = p.dtype not in (FLOAT8, "float32") and _mask(p) == "spans"
    if p.direction == "forward" and hides:
        hides = _classes(_SPANS, p) is not None
    if p.direction == "backward" and hides:
        hides = _classes(_BACKWARD_SPANS, p) is not None
        if hides and p.deterministic:
            reasons.append("sums dQ with Spans or a BlockMask in any order")
    inside = {
        "mask": p.mask,
        "bias": p.bias,
        "Spans": p.spans and not hides,
        "BlockMask": p.blocks and not hides,
        "score function": p.function,
        "dropout": p.dropout,
    }
    if unknown := [name for name, given in inside.items() if given]:
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
            reasons.append(flash.beyond(p, max(_FORWARD_WIDE) if wide else None))
        return reasons
    if variant.kernel == "flash_forward_wide_sm90":
        lacks = {"ALiBi": p.alibi, "softcap": p.softcap, "scale <= 0": p.scale <= 0}
        lacks[flash.PROMISED] = bool(p.reproducible)
        if unknown := [name for name, given in lacks.items() if given]:
            reasons.append(flash.absent_in_wide(p, unknown))
    if p.tile not in (None, variant.tile):
        reasons.append(f"tile {p.tile} is not built (built: {variant.tile})")
    return reasons


def _forward_plan(problem: Problem, arch: Arch, variant: Variant) -> Plan:
    """Persistent blocks load the keys of the next tile during the end of this one.

    Tiles of equal work are assigned in advance. With a band or packed sequences their work differs, and
    a block that is done takes the next one.
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
    """What finds out the tiles that a kernel of kind spans skips."""
    (m, n), words_of = of.tile, _REACH_WORD
    each = (blocks_of(blocks_of(p.seqlen_q, m), words_of), blocks_of(blocks_of(p.seqlen_k, n), words_of))
    backward = p.direction == "backward"
    return tuple(along_x(_reach(of.tile, of_keys=backward), p.batch * p.heads_q * each[0] * each[1]))


def _spans_plan(problem: Problem, arch: Arch, variant: Variant) -> Plan:
    """A first kernel classifies the tiles of spans and blocks, with two bits each; empty ones are skipped.

    A block that is done takes the next tile, as with a band. why of one head: spans may differ between heads.
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
    """The kernels for a problem that is not refused."""
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
    # The first block to add to a tile of sums stores; of tiles that none adds to dq_convert makes zeros.
    zeroed = tuple(name for name in flash.ZEROED if name != "dq_accumulator")
    in_turns = tuple(launch._replace(wave=wave) for launch in launches)
    note = _IN_WAVES.format(wave=wave) if wave else _IN_TURNS
    return Plan(arch.name, NAME, in_turns, *workspace, zeroed=zeroed, notes=(note,))


def _wave(p: Problem, arch: Arch) -> int:
    """Blocks of a head that run at once and take turns in an order of their own; 0: one order for all.

    The blocks of a wave begin apart, and wait for nobody, but each tile of dQ has two sums. Under one order
    the first blocks of a head wait for each other; of many heads, few blocks of each run at once.
    """
    heads = p.batch * p.heads_k
    if p.left is not None or p.batch * p.heads_q > _FEW_HEADS:
        return 0
    # As keys_in_sections of seqlen.cuh has them.
    elements = _SECTION_BYTES // ITEM_BYTES[p.dtype]
    section = max(elements // (p.head_dim + p.head_dim_v) // max(p.seqlen_q, 1), 1)
    return max(1, arch.multiprocessors // min(section, heads))


def _reach_of_keys(p: Problem, tile: tuple[int, int]) -> tuple[str, str, tuple[int, ...]]:
    """Two bits of each tile of queries, for each block of keys."""
    words = blocks_of(blocks_of(p.seqlen_q, tile[0]), _REACH_WORD)
    return "reach", "int32", (p.batch, p.heads_q, blocks_of(p.seqlen_k, tile[1]), 2 * words)

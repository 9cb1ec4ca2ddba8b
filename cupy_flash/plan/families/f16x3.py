"""The Hopper kernels for float32 by three products of float16 halves (f16x3); part of `hopper`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ...call.problem import Problem
from ..catalog import Arch, Variant
from ..launch import Plan, along_x, beyond_band, blocks_of, class_of, laid_out, tiles_of
from . import flash, simple
from .pack_gqa import rows_of_tiles

__all__ = ["DTYPE", "chosen", "plan", "refusals", "variants"]

DTYPE = "f16x3"

# (head_dim, head_dim_v) class -> queries and keys per block, stages of K and V.
# why these: the most keys of which two stages fit next to Q, and whose S, P and T fit in registers with O.
_FORWARD = {(64, 64): ((128, 128), 2), (128, 128): ((128, 64), 2)}
# The same for gradients, where a block owns keys: (queries, keys).
# why no larger class: dK, dV and one accumulator, of 64 keys, leave no registers for S, dP and halves of dS.
_BACKWARD = {(64, 64): (64, 128)}
# Least number of rows per key head, that is, heads of a group x queries.
# why: with fewer rows, reading K and V, writing their halves and reading these takes longer than tf32x3.
FEWEST_ROWS = 256
_THREADS_OF_SPLIT = 256
_NOTE = "products  f16x3: three of halves, two for each float; as exact as tf32x3"
_RECORD_END = 128  # bytes after the halves of a tile, see hopper/halves.cuh


def _forward(classes: tuple[int, int]) -> Variant:
    (d, v), ((m, n), stages) = classes, _FORWARD[classes]
    # Each product appears twice in the code: in the loop, and for the first S and the last T outside it.
    shapes = Counter({f"64x{n}x16": 6 * (d // 16)}) + Counter({f"64x{v}x16": 6 * (n // 16)})
    return Variant(
        "flash_forward_f16x3_sm90.cu",
        "",
        "F16x3ForwardParams",
        DTYPE,
        *classes,
        (m, n),
        m * 2 + 128,
        4 * (m * d + stages * n * (d + v)) + 1024,
        "band",
        macros=(("CF_STAGES", str(stages)),),
        products=tuple(sorted(shapes.items())),
    )


def _backward(classes: tuple[int, int]) -> Variant:
    """The backward kernel, run between the passes delta and dq_convert of flash_backward.cu."""
    (d, v), (m, n) = classes, _BACKWARD[classes]
    # K, V, two stages of Q and dO, and dS, as pairs of halves, which are as large as floats; dQ of each
    # warpgroup in FP32. 2048: scales, LSE and delta, the barriers.
    elements = n * (d + v) + 2 * m * (d + v) + n * m + 2 * m * d
    # S and dP; dV and dK; dQ.
    products = 3 * ((d + v) // 16 + 2 * (m // 16) + 64 // 16)
    return Variant(
        "flash_backward_f16x3_sm90.cu",
        "",
        "F16x3BackwardParams",
        DTYPE,
        *classes,
        (m, n),
        384,
        4 * elements + 2048,
        "band",
        products=((f"64x{m}x16", products),),
        covered=m // 2,
    )


def _split(classes: tuple[int, int], *, gradients: bool = False) -> Variant:
    """The kernel that splits floats into halves, for the tiles of the main kernel."""
    tile = _BACKWARD[classes] if gradients else _FORWARD[classes][0]
    threads = _THREADS_OF_SPLIT
    return Variant(
        "flash_split_f16.cu",
        "of_gradients" if gradients else "",
        "F16x3BackwardParams" if gradients else "F16x3ForwardParams",
        DTYPE,
        *classes,
        tile,
        threads,
        threads // 8,
        "band",
    )


def variants() -> Iterator[Variant]:
    """The variants compiled for sm_90."""
    for classes in _FORWARD:
        yield _split(classes)
        yield _forward(classes)
    for classes in _BACKWARD:
        yield _split(classes, gradients=True)
        yield _backward(classes)


def chosen(p: Problem) -> Variant | None:
    """The kernel for the head dims of a problem; None if no class fits."""
    table, made = (_FORWARD, _forward) if p.direction == "forward" else (_BACKWARD, _backward)
    classes = class_of(table, p)
    return made(classes) if classes else None


def refusals(p: Problem) -> list[str]:
    """All reasons against float32 in these kernels, except the length of sequences."""
    reasons = []
    if p.precision not in (None, "tf32x3"):
        reasons.append(f"computes float32 by three products of halves, not as precision={p.precision}")
    if p.reproducible or p.deterministic:
        reasons.append("the order of sums of products of halves is not guaranteed")
    if unknown := beyond_band(p):
        reasons.append(f"its loop over float32 has no {' or '.join(unknown)}")
    variant = chosen(p)
    widest = max(_FORWARD if p.direction == "forward" else _BACKWARD)[0]
    rows = p.seqlen_q * (p.heads_q // p.heads_k if p.heads_k else 1)
    if variant is None:
        reasons.append(f"head_dim {max(p.head_dim, p.head_dim_v)} of float32 is above {widest}")
    elif p.tile is None and rows < FEWEST_ROWS:
        reasons.append(f"{rows} rows share a key, fewer than the {FEWEST_ROWS} from which f16x3 is faster")
    return reasons


def _words(rows: int, columns: int) -> int:
    """32-bit words of a record: the halves of a tile and their scale."""
    return rows * columns + _RECORD_END // 4


def plan(p: Problem, arch: Arch) -> Plan:
    """The plan for a problem that is not refused."""
    return _forward_plan(p, arch) if p.direction == "forward" else _backward_plan(p, arch)


def _forward_plan(p: Problem, arch: Arch) -> Plan:
    """Plan a kernel that splits q, k and v into halves, then persistent blocks as in the hopper family."""
    variant = chosen(p)
    assert variant is not None
    (m, n), d, v = variant.tile, variant.head_dim, variant.head_dim_v
    rows, line = rows_of_tiles(p, variant.tile, arch.multiprocessors)
    groups = p.heads_k if rows.head_bits else p.heads_q
    of_q, of_k = blocks_of(p.seqlen_q << rows.head_bits, m), blocks_of(p.seqlen_k, n)
    blocks = p.batch * (groups * of_q * (m // 64) + 2 * p.heads_k * of_k)
    tiles_q = tiles_of(p, p.seqlen_q << rows.head_bits, p.rows_q << rows.head_bits, m)
    tiles_k = tiles_of(p, p.seqlen_k, p.rows_k, n)
    words = [m // 64 * _words(64, d), _words(n, d), _words(n, v)]
    parts: list[tuple[str, str, tuple[int, ...]]] = [
        ("q_halves", "int32", (tiles_q, groups, words[0])),
        ("k_halves", "int32", (tiles_k, p.heads_k, words[1])),
        ("v_halves", "int32", (tiles_k, p.heads_k, words[2])),
    ]
    launches = (
        *along_x(_split((d, v)), blocks),
        *along_x(variant, min(rows.tiles, arch.multiprocessors)),
    )
    launches = tuple(launch._replace(head_bits=rows.head_bits) for launch in launches)
    notes = (_NOTE, line) if line else (_NOTE,)
    same_work = not p.packed and p.left is None and p.right is None
    if rows.tiles <= arch.multiprocessors or same_work:
        return Plan(arch.name, "hopper", launches, *laid_out(*parts), notes=notes)
    workspace = laid_out(*parts, ("next_tile", "int32", (1,)))
    return Plan(arch.name, "hopper", launches, *workspace, zeroed=("next_tile",), notes=notes)


def _backward_plan(p: Problem, arch: Arch) -> Plan:
    """Plan the split of q, dO, k and v into halves, delta, the gradients, and the conversion of summed dQ."""
    variant = chosen(p)
    assert variant is not None
    (m, n), classes = variant.tile, (variant.head_dim, variant.head_dim_v)
    before, after = (
        flash.backward(step, "tf32x3", classes, "band", arch) for step in ("delta", "dq_convert")
    )
    assert before is not None
    assert after is not None
    assert after.tile[0] == m, "both have the same sums of dQ"
    of_q, of_k = (
        p.batch * p.heads_q * blocks_of(p.seqlen_q, m),
        p.batch * p.heads_k * blocks_of(p.seqlen_k, n),
    )
    launches = (
        *along_x(_split(classes, gradients=True), 2 * (of_q + of_k)),
        *along_x(before, p.batch * p.heads_q * blocks_of(p.seqlen_q, before.tile[0])),
        *along_x(variant, of_k),
        *along_x(after, of_q),
        *simple.sink_gradients(p),
    )
    tiles_q, tiles_k = tiles_of(p, p.seqlen_q, p.rows_q, m), tiles_of(p, p.seqlen_k, p.rows_k, n)
    halves: tuple[tuple[str, str, tuple[int, ...]], ...] = (
        ("q_halves", "int32", (tiles_q, p.heads_q, _words(m, classes[0]))),
        ("k_halves", "int32", (tiles_k, p.heads_k, _words(n, classes[0]))),
        ("v_halves", "int32", (tiles_k, p.heads_k, _words(n, classes[1]))),
        ("do_halves", "int32", (tiles_q, p.heads_q, _words(m, classes[1]))),
    )
    workspace = flash.gradient_workspace(p, after, more=halves)
    return Plan(arch.name, "hopper", launches, *workspace, zeroed=flash.ZEROED, notes=(_NOTE,))

"""The mma.sync kernels: FP16, BF16, TF32 and FP64 products on tensor cores, sm_75 to sm_120."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ...call.operands import FLOAT8
from ...call.problem import Problem
from ...program.graph import Body
from ..catalog import SHORT, Arch, Variant
from ..heads_as_rows import heads_share_keys, problem_of_rows
from ..launch import Launch, Part, Plan, along_x, blocks_of, class_of, laid_out, rows_of, tiles_of
from . import f64, flash_tiles, simple, wide

__all__ = [
    "CHUNK_KEYS",
    "MOST_PARTS_BYTES",
    "NAME",
    "ZEROED",
    "backward",
    "combine_chunks",
    "gradient_workspace",
    "keys_of_block",
    "keys_of_class",
    "of_function",
    "plan",
    "refusals",
    "refusals_but_strides",
    "variants",
]

NAME = "flash"
# Parts of the workspace that atomic additions and counters need zeroed.
ZEROED = ("dq_accumulator", "dq_turns", "next_block", *simple.ZEROED)

# Keys per chunk under reproducible=: the online softmax restarts at each chunk. A multiple of all tiles.
CHUNK_KEYS = 2048
# Most bytes of partial results of chunks computed by different blocks; above it, one block computes all
# chunks of its rows.
MOST_PARTS_BYTES = 64 << 20

_NO_CHUNKS = (("CF_CHUNKS", "0"),)
_IN_PARTS = ("CF_CHUNKS", "2")
_SAME_BITS = "bits      of a row are its own: one kernel, with mask and bias, for all options"

# Bytes of an operand of the products.
_ITEM = {"f16": 2, "bf16": 2, "tf32x3": 4, "tf32": 4}
_STEPS = ("delta", "dqkv", "dq_convert", "dq", "dbias")


def _classes(problem: Problem) -> tuple[int, int] | None:
    """The smallest classes that fit the head dims of a problem; None if there are none."""
    rows = flash_tiles.FORWARD["tf32" if problem.dtype == "float32" else "16-bit", "any"]
    built = (classes for classes, cells in zip(flash_tiles.HEAD_DIMS, rows, strict=True) if any(cells))
    return class_of(built, problem)


def _products(dtype: str) -> tuple[str, str]:
    return "CF_PRODUCTS", "3" if dtype == "tf32x3" else "1"


def _macros(dtype: str, arch: Arch) -> tuple[tuple[str, str], ...]:
    return _products(dtype), ("CF_TURING", str(int(arch.capability < 80)))


def _backward_macros(
    dtype: str, arch: Arch, tile: flash_tiles.BackwardTile | None = None
) -> tuple[tuple[str, str], ...]:
    """The macros of a backward pass; without a tile, of a pass that streams nothing."""
    slots = tile.slots if tile else 0 if arch.capability < 80 else 2
    v_in_registers = tile.v_in_registers if tile else 0
    own = (("CF_SLOTS", str(slots)), ("CF_V_IN_REGISTERS", str(v_in_registers)))
    return (*_macros(dtype, arch), *own)


def _kind(dtype: str) -> str:
    return "16-bit" if _ITEM[dtype] == 2 else "tf32"


def _forward(dtype: str, classes: tuple[int, int], mask: str, arch: Arch) -> Variant | None:
    """The tensor-core forward kernel of these classes; None if the architecture has none."""
    if arch.capability < 80 and dtype != "f16":
        return None
    kind = _kind(dtype)
    mask = "any" if kind == "tf32" else mask
    rows = flash_tiles.FORWARD[kind, mask]
    cell = rows[flash_tiles.HEAD_DIMS.index(classes)][flash_tiles.column(arch)]
    cell = flash_tiles.FORWARD_OF.get((arch.capability, kind, mask, classes), cell)
    if cell is None:
        return None
    elements = cell.m * classes[0] + 2 * cell.n * max(classes)
    macros = (
        *_macros(dtype, arch),
        ("CF_MIN_BLOCKS", str(cell.min_blocks)),
        ("CF_SLOTS", "2"),
        ("CF_Q_IN_REGISTERS", str(cell.q_in_registers)),
        ("CF_LOOPS", str(cell.loops)),
        *(
            (("CF_CHUNKS", str(cell.chunks)), ("CF_CHUNK_KEYS", str(CHUNK_KEYS)))
            if mask == "any" and cell.chunks
            else _NO_CHUNKS
        ),
    )
    # 128 bytes: the ring buffer of K and V starts on a cache line of its own.
    shared_bytes = _ITEM[dtype] * elements + 128
    tile = (cell.m, cell.n)
    kernel = ("flash_forward.cu", "", "ForwardParams")
    return Variant(*kernel, dtype, *classes, tile, cell.threads, shared_bytes, mask, macros)


def keys_of_class(dtype: str, head_dim: int, arch: Arch) -> int | None:
    """Keys per block of the forward kernel for all options ("any"); None if there is no kernel."""
    variant = _forward(dtype, (head_dim, head_dim), "any", arch)
    return variant.tile[1] if variant else None


def keys_of_block(problem: Problem, arch: Arch) -> int:
    """Keys per block of the kernel for a problem whose dtype and head dims are supported."""
    classes = _classes(problem)
    assert classes is not None
    variant = _forward(_dtype(problem), classes, "any", arch)
    assert variant is not None
    return variant.tile[1]


def combine_chunks(dtype: str) -> Variant:
    """The kernel that combines chunks computed by different blocks."""
    dtype = "f32" if _kind(dtype) == "tf32" else dtype
    return Variant("flash_combine_chunks.cu", "", "ForwardParams", dtype, 256, 256, (1, 1), 128, 0)


def backward(step: str, dtype: str, classes: tuple[int, int], mask: str, arch: Arch) -> Variant | None:
    """A pass of the tensor-core backward kernel; None if the architecture has none for these classes.

    Parameters
    ----------
    step : {"delta", "dqkv", "dq_convert", "dq", "dbias"}
        dq_convert has the tile and threads of the dqkv with the same mask; delta and dbias have one variant
        each.
    dtype, classes, arch
        As in `_forward`.
    mask : {"band", "any"}
        For float32, "any" serves both.
    """
    if arch.capability < 80 and dtype != "f16":
        return None
    # why: gradients under "tf32" are computed as "tf32x3"; separate kernels would take a megabyte.
    dtype = "tf32x3" if dtype == "tf32" else dtype
    kind, source = _kind(dtype), ("flash_backward.cu", step, "BackwardParams")
    # Neither the products nor the mask matter for delta and dq_convert.
    stored = "f32" if kind == "tf32" else dtype
    if step == "delta":
        return Variant(*source, stored, 256, 256, (64, 64), 256, 0, macros=_backward_macros(stored, arch))
    if step == "dbias":
        m, n = flash_tiles.DBIAS
        source = ("flash_backward_dbias.cu", "", "BackwardParams")
        shared_bytes = _ITEM[dtype] * 2 * 64 * (m + n)
        return Variant(*source, dtype, 256, 256, (m, n), 256, shared_bytes, macros=_macros(dtype, arch))
    mask = "any" if kind == "tf32" or step == "dq" else mask
    rows = flash_tiles.BACKWARD[kind, "dqkv" if step == "dq_convert" else step, mask]
    cell = rows[flash_tiles.HEAD_DIMS.index(classes)][flash_tiles.column(arch)]
    if cell is None:
        return None
    m, n, threads, slots, v_in_registers = cell
    d, v = classes
    if step == "dq_convert":
        return Variant(*source, stored, d, d, (m, m), threads, 0, macros=_backward_macros(stored, arch))
    if step == "dq":
        elements, numbers = m * (d + v) + 2 * n * max(d, v), 0
    else:
        slots_q, slots_do = (2 if slots else 1), (2 if slots == 2 else 1)
        keys = n * (max(d, v) if v_in_registers else d + v)
        elements = keys + slots_q * m * d + slots_do * m * v + 2 * m * n
        numbers = 4 * m if slots and kind == "16-bit" else 0  # LSE and delta of the query rows
    macros = _backward_macros(dtype, arch, cell)
    if step == "dqkv" and (arch.capability, kind, mask, classes) in flash_tiles.ROUNDED_OWN_KEYS:
        macros += (("CF_STORES_FLOATS", "0"),)
    shared_bytes = _ITEM[dtype] * elements + 4 * numbers
    # why only "band": scores of "any" have a loop of their own; float32 products overlap with nothing.
    under = step == "dqkv" and mask == "band" and arch.capability >= 80
    stall_limits = (flash_tiles.BETWEEN_PRODUCTS, max(cell.exponentials // 2, 8), 2) if under else (0, 0, 0)
    allowed = flash_tiles.SPILLED_OWN_KEYS.get((kind, mask, classes), ()) if step == "dqkv" else ()
    return Variant(
        *source, dtype, d, v, (m, n), threads, shared_bytes, mask, macros, allowed, stall_limits=stall_limits
    )


def _tangent(dtype: str, widest: int, mask: str, arch: Arch) -> Variant | None:
    """The kernel of jvp up to this head dim; None if there is none; dtype and mask as in `backward`."""
    # why: as in `backward`, tangents under "tf32" are computed as "tf32x3".
    dtype = "tf32x3" if dtype == "tf32" else dtype
    kind = _kind(dtype)
    mask = "any" if kind == "tf32" else mask
    cells = flash_tiles.TANGENT[kind, mask]
    classes = next((classes for classes in cells if widest <= classes[0]), None)
    if arch.capability < 80 or classes is None:
        return None
    d, (m, n) = classes[0], cells[classes][flash_tiles.column(arch)]
    macros = (_products(dtype),)
    shared_bytes = _ITEM[dtype] * d * (2 * m + 4 * n)
    kernel = ("flash_tangent.cu", "", "SecondOrderParams")
    return Variant(*kernel, dtype, d, d, (m, n), 2 * m, shared_bytes, mask, macros)


def _hessian(step: str, dtype: str, widest: int, arch: Arch) -> Variant | None:
    """A pass of hvp, "dq_dot" or "dkv_dot", up to this head dim; None if there is none."""
    dtype = "tf32x3" if dtype == "tf32" else dtype
    cells = flash_tiles.HESSIAN[_kind(dtype), step]
    classes = next((classes for classes in cells if widest <= classes[0]), None)
    if arch.capability < 80 or classes is None:
        return None
    d, (m, n) = classes[0], cells[classes][flash_tiles.column(arch)]
    own, streamed = (3 * m * d, 4 * n * d) if step == "dq_dot" else (4 * n * d, 6 * m * d)
    # 16 bytes per row of statistics, in two slots.
    shared_bytes = _ITEM[dtype] * (own + streamed) + (2 * 16 * m if step == "dkv_dot" else 0)
    macros = (_products(dtype),)
    kernel = ("flash_hessian.cu", step, "SecondOrderParams")
    return Variant(
        *kernel, dtype, d, d, (m, n), 2 * (m if step == "dq_dot" else n), shared_bytes, macros=macros
    )


def variants(arch: Arch) -> Iterator[Variant]:
    """The variants compiled for an architecture."""
    yield from (
        combine_chunks(dtype)
        for dtype in ("f16", "bf16", "tf32x3")
        if arch.capability >= 80 or dtype == "f16"
    )
    yield from wide.forward_variants(arch)
    yield from f64.variants(arch)
    for dtype, classes, mask in product(_ITEM, flash_tiles.HEAD_DIMS, ("band", "any")):
        passes = (backward(step, dtype, classes, mask, arch) for step in _STEPS)
        tangent = _tangent(dtype, classes[0], mask, arch)
        hessian = (_hessian(step, dtype, classes[0], arch) for step in ("dq_dot", "dkv_dot"))
        for variant in (_forward(dtype, classes, mask, arch), tangent, *hessian, *passes):
            if variant is not None:
                yield variant
    yield from wide.backward_variants(arch)


def _dtype(problem: Problem) -> str:
    """The product type of a problem."""
    if problem.dtype != "float32":
        return SHORT[problem.dtype]
    return problem.precision or "tf32x3"


def _mask(problem: Problem) -> str:
    """The mask kind of the kernel: "band" scales after the row maximum, so only the scale may change scores.

    why always "any" under `reproducible`: paged keys need a mask where contiguous ones have only a band, and
    "band" may order key blocks by the position of the tile.
    """
    p = problem
    if p.reproducible:
        return "any"
    return "band" if p.scale > 0 and not p.unread(()) else "any"


def refusals_but_strides(problem: Problem, arch: Arch) -> list[str]:
    """Reasons against a problem that do not depend on strides: dtype, precision, head dims, options."""
    p, reasons = problem, []
    if p.reproducible == "device":
        return ["multiplies on tensor cores, whose order of sums depends on the architecture"]
    if p.dtype == "float64":
        return f64.refusals(p, arch)
    if p.dtype == FLOAT8:
        reasons.append(f"multiplies 16-bit, TF32 and FP64 numbers, not {p.dtype}")
    if p.dtype == "float32" and p.precision == "ieee":
        reasons.append("computes float32 on tensor cores as tf32x3 or tf32, not in IEEE arithmetic")
    if arch.capability < 80 and p.dtype in ("bfloat16", "float32"):
        reasons.append(f"{p.dtype} needs the tensor cores of sm_80")
    if (p.spans or p.blocks) and p.direction != "forward" and arch.capability < 80:
        reasons.append("gradients with Spans or a BlockMask need sm_80")
    if p.blocks and p.dtype == "float32":
        reasons.append("does not support a BlockMask in float32: there are too few registers")
    reasons += [f"does not read {name}" for name in p.unread(simple.READ)]
    reasons += simple.function_refusals(p)
    if p.second_order and p.function is not None:
        reasons.append("does not support second derivatives of score functions")
    widest = max(p.head_dim, p.head_dim_v)
    if p.second_order and arch.capability < 80:
        reasons.append("second derivatives need the asynchronous copies of sm_80")
    if p.direction == "hvp":
        reasons += _hessian_refusals(p)
    if p.direction == "jvp" and widest > 128:
        reasons.append(f"does not support tangents of head_dim {widest}, above 128")
    elif _classes(p) is None:
        reasons += wide.refusals(p, arch)
    return reasons


def _hessian_refusals(problem: Problem) -> list[str]:
    """Reasons against hvp."""
    p, reasons = problem, []
    most, widest = (64 if p.dtype == "float32" else 128), max(p.head_dim, p.head_dim_v)
    if widest > most:
        reasons.append(
            f"does not support second derivatives of {p.dtype} with head_dim {widest}, above {most}"
        )
    if unread := p.unread(("score function", "ALiBi", "softcap")):
        reasons.append(f"does not support second derivatives with {' or '.join(unread)}")
    return reasons


def refusals(problem: Problem, arch: Arch) -> list[str]:
    """All reasons why these kernels do not support a problem."""
    p, reasons = problem, refusals_but_strides(problem, arch)
    if not p.in_rows:
        reasons.append("the last axis of every tensor must be contiguous, its rows less than 2 GiB apart")
    if max(p.seqlen_q, p.seqlen_k) >= 2**30:
        reasons.append("sequences must be shorter than 2**30")
    if p.reproducible and p.alibi and max(p.seqlen_q, p.seqlen_k) > 2**24:
        reasons.append("beyond 2**24 keys the rounding of ALiBi distances depends on the tile")
    if reasons:
        return reasons
    variants = _passes(p, arch)
    if p.reproducible and p.seqlen_k > CHUNK_KEYS and _IN_PARTS in variants[0].macros:
        of_rows = problem_of_rows(p) if heads_share_keys(p) else p
        nbytes, most = _parts_bytes(of_rows, variants[0]), MOST_PARTS_BYTES
        if p.packed or nbytes > most:
            reasons.append(
                f"has too few registers to combine chunks of {CHUNK_KEYS} keys at head_dim {p.head_dim} of "
                f"{p.dtype}; partial results in memory, here {nbytes / 2**20:.4g} MiB, are supported up to "
                f"{most >> 20} MiB, if sequences are not packed"
            )
    tiles = {variant.tile for variant in variants}
    if p.tile is not None and p.tile not in tiles:
        reasons.append(f"tile {p.tile} is not built (built: {', '.join(map(str, sorted(tiles)))})")
    return reasons


def _passes(problem: Problem, arch: Arch) -> list[Variant]:
    """The kernels in order, for a problem whose dtype and head dims are supported."""
    classes = _classes(problem)
    dtype, mask = _dtype(problem), _mask(problem)
    found: list[Variant | None]
    if dtype == f64.DTYPE:
        found = [*f64.passes(problem, arch)]
    elif classes is None:
        found = [*wide.passes(problem, arch)]
        if problem.direction == "backward":
            found.insert(0, backward("delta", dtype, flash_tiles.HEAD_DIMS[-1], "band", arch))
    elif problem.direction == "forward":
        found = [_forward(dtype, classes, mask, arch)]
    elif problem.direction == "jvp":
        found = [_tangent(dtype, max(problem.head_dim, problem.head_dim_v), mask, arch)]
    elif problem.direction == "hvp":
        widest = max(problem.head_dim, problem.head_dim_v)
        found = [_hessian(step, dtype, widest, arch) for step in ("dq_dot", "dkv_dot")]
    else:
        steps = ("delta", "dqkv", "dq") if problem.deterministic else ("delta", "dqkv", "dq_convert")
        if problem.unrounded:
            rounded = (arch.capability, _kind(dtype), mask, classes)
            classes = flash_tiles.ROUNDED_OWN_KEYS.get(rounded, classes)
        found = [backward(step, dtype, classes, mask, arch) for step in steps]
    variants = [_with_function(variant, problem.function) for variant in found if variant is not None]
    assert len(variants) == len(found), "every class has a tile"
    return variants


def _with_function(variant: Variant, function: Body | None) -> Variant:
    """The pass with a score function compiled in, if it computes scores."""
    return variant if variant.step in ("delta", "dq_convert") else replace(variant, function=function)


def of_function(function: Body, dtype: str, head_dim: int, arch: Arch) -> list[Variant]:
    """The variants compiled for a score function: the passes that compute scores, if there are any."""
    widths = [d for d, _ in flash_tiles.HEAD_DIMS if head_dim <= d]
    if not widths or dtype == f64.DTYPE or NAME not in arch.families:
        return []
    every = [classes for classes in flash_tiles.HEAD_DIMS if classes[0] == widths[0]]
    found: list[Variant | None] = []
    for products, classes in product(("tf32x3", "tf32") if dtype == "f32" else (dtype,), every):
        passes = (backward(step, products, classes, "any", arch) for step in ("dqkv", "dq", "dbias"))
        found += [_forward(products, classes, "any", arch), *passes]
    return list(dict.fromkeys(_with_function(x, function) for x in found if x is not None))


def plan(problem: Problem, arch: Arch) -> Plan:
    """The plan for a problem that is not refused."""
    if problem.reproducible and heads_share_keys(problem):
        made = plan(problem_of_rows(problem), arch)
        group = problem.heads_q // problem.heads_k
        return made._replace(
            launches=tuple(launch._replace(heads_as_rows=True) for launch in made.launches),
            notes=(
                *made.notes,
                f"rows      {group} heads share a tile (packed GQA): one query each, over the same keys",
            ),
        )
    variants = _passes(problem, arch)
    queries, keys = problem.batch * problem.heads_q, problem.batch * problem.heads_k
    launches: list[Launch] = []
    for variant in variants:
        m, n = variant.tile
        owns_keys = variant.step in ("dqkv", "dkv", "dkv_dot")
        of_keys, of_queries = keys * blocks_of(problem.seqlen_k, n), queries * blocks_of(problem.seqlen_q, m)
        launches += along_x(variant, of_keys if owns_keys else of_queries)
    notes: tuple[str, ...] = (_SAME_BITS,) if problem.reproducible else ()
    if problem.direction == "jvp":
        return Plan(arch.name, NAME, tuple(launches), notes=notes)
    if problem.direction == "hvp":
        before, after = simple.hessian_launches(problem)
        return Plan(
            arch.name, NAME, (*before, *launches, *after), *simple.hessian_workspace(problem), notes=notes
        )
    if problem.direction == "forward":
        parts, chunks = _chunks(problem, variants[0], launches, arch)
        if chunks > 1:
            launches = along_x(variants[0], chunks * launches[0].grid[0])
            launches += along_x(combine_chunks(_dtype(problem)), queries * problem.seqlen_q)
            notes += (f"chunks    {chunks} of {CHUNK_KEYS} keys, one per thread block",)
        return Plan(arch.name, NAME, tuple(launches), *laid_out(*parts), notes=notes)
    if problem.bias and problem.want_dbias:
        batch, heads, rows, columns = problem.bias
        dbias = backward("dbias", _dtype(problem), flash_tiles.HEAD_DIMS[0], "any", arch)
        assert dbias is not None
        dbias = _with_function(dbias, problem.function)
        m, n = dbias.tile
        launches += along_x(dbias, batch * heads * blocks_of(rows, m) * blocks_of(columns, n))
    # why simple: dsinks needs no matrix products.
    launches += [*simple.sink_gradients(problem), *simple.argument_gradients(problem)]
    # why dqkv only: for wide heads one block always owns its dQ, deterministic or not.
    summed = not problem.deterministic and variants[1].step == "dqkv"
    workspace = gradient_workspace(problem._replace(deterministic=not summed), variants[1])
    return Plan(arch.name, NAME, tuple(launches), *workspace, zeroed=ZEROED, notes=notes)


def _parts_bytes(problem: Problem, variant: Variant) -> int:
    """Bytes of the partial results if each chunk is computed by a block of its own."""
    batch, heads, rows = rows_of(problem)
    return 4 * blocks_of(problem.seqlen_k, CHUNK_KEYS) * batch * heads * rows * (variant.head_dim_v + 2)


def _chunks(
    problem: Problem, variant: Variant, launches: list[Launch], arch: Arch
) -> tuple[list[tuple[str, str, tuple[int, ...]]], int]:
    """Workspace of partial results per chunk, and number of blocks per row; the bits do not depend on it."""
    p = problem
    chunks = blocks_of(p.seqlen_k, CHUNK_KEYS)
    if not p.reproducible or chunks < 2 or not launches:
        return [], 1
    batch, heads, rows = rows_of(p)
    filled = launches[0].grid[0] > arch.multiprocessors or _parts_bytes(p, variant) > MOST_PARTS_BYTES
    if (p.packed or filled) and _IN_PARTS not in variant.macros:
        chunks = 1
    shape = (chunks * batch, heads, rows)
    return [
        ("chunk_o", "float32", (*shape, variant.head_dim_v)),
        ("chunk_rows", "float32", (*shape, 2)),
    ], chunks


def gradient_workspace(
    problem: Problem,
    dqkv: Variant,
    chains: int = 0,
    more: tuple[tuple[str, str, tuple[int, ...]], ...] = (),
) -> tuple[tuple[Part, ...], int]:
    """The workspace of gradients, with its total bytes: delta, and the accumulator of dQ in tiles of dqkv.

    `chains` is the number of accumulators per tile of dQ, to which blocks add in a fixed order, with
    counters; 0: added to in any order. Deterministic gradients without chains need no accumulator.
    """
    parts: list[tuple[str, str, tuple[int, ...]]] = [("delta", problem.accumulator, rows_of(problem))]
    if chains or not problem.deterministic:
        # layout: tiles one after the other, each in the register layout of the kernel's warps.
        m = dqkv.tile[0]
        tiles = tiles_of(problem, problem.seqlen_q, problem.rows_q, m)
        sums = (tiles, problem.heads_q, *((chains,) if chains > 1 else ()))
        parts.append(("dq_accumulator", "float32", (*sums, m, dqkv.head_dim)))
    if chains:
        parts += [("dq_turns", "int32", sums), ("next_block", "int32", (1,))]
    return laid_out(*parts, *more, *simple.argument_sums(problem))

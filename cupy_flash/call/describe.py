"""describe: check every argument once, and return an immutable `Problem`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import UnsupportedError
from .adopt import adopt
from .arrays import ArrayView, accumulator_of
from .blocks import block_operands
from .functions import function_operands, learned_elements
from .given import Options, Packing
from .masks import Band, resolve_band
from .operands import (
    AXES,
    FLOAT8,
    FLOATS,
    MAIN,
    RESULTS_OF_FLOAT8,
    SCALES,
    Views,
    aligned,
    check_kinds,
    check_sizes,
    layout_that_fits,
    lift,
    row_operand,
    score_operand,
    table_of,
    wrong,
)
from .options import AXES_OF, PER_HEAD
from .problem import Problem
from .spans import span_operand
from .values import check_options, score_factors

__all__ = ["MAX_SEQLEN", "OFFSETS", "check_seqlen", "describe", "head_operands", "main_views", "problem_of"]

# Arrays that describe packed sequences: offsets, rows in use, starts of masks.
OFFSETS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "seqused_q", "mask_starts")
# why below 2**31: kernels count tiles past the end of a sequence in 32 bits too.
MAX_SEQLEN = 2**31 - 2**16


def _other_layout(views: Views, layout: str | None) -> str:
    """An addition to a hint about unequal lengths, if they are equal in the other layout; else ""."""
    if views["q"].shape[1] != views["k"].shape[1]:
        return ""
    other = layout_that_fits(views, layout)
    return f'; or layout="{other}", if these arrays are {AXES[other]}' if other else ""


def check_seqlen(longest: int, raw: Views) -> None:
    """Refuse a sequence whose positions, and the ends of tiles behind it, are no int32."""
    if longest > MAX_SEQLEN:
        hint = f"at most {MAX_SEQLEN} rows: cupy_flash.merge combines results over parts of the keys"
        raise UnsupportedError(f"a sequence of {longest} is beyond 31 bits.", table_of(raw), hint=hint)


def head_operands(raw: Views, views: Views, batch: int, heads: int, dtype: str) -> tuple[str, ...]:
    """Check the options with one number per head, add their views to `views`, and return their names."""
    given = tuple(name for name in PER_HEAD if name in raw)
    for name in given:
        axes = AXES_OF[name]
        shapes = ((heads,), (batch, heads))[: len(axes)]
        views[name] = row_operand(name, raw, shapes, dtype).lifted(len(axes))
    return given


def main_views(direction: str, raw: Views, layout: str, packed: bool) -> Views:
    """Check kinds and sizes of q, k, v, o and do; their (batch, heads, seq, head_dim) views."""
    q = raw["q"]
    rank = len(q.shape)
    if not 2 <= rank <= 4:
        raise wrong(f"q has rank {rank}.", raw, f"{AXES[layout]}; rank 3 is one batch, rank 2 one head")
    check_kinds(raw, direction)
    views = {n: lift(raw[n], layout, rank) for n in MAIN if n in raw}
    if q.dtype not in FLOATS:
        views = {name: view._replace(dtype=FLOAT8) for name, view in views.items()}
    check_sizes(views, raw, None if packed else layout)
    return views


def problem_of(
    direction: str,
    given: Mapping[str, ArrayView],
    views: Views,
    main: Iterable[str],
    options: Options,
    packing: Packing | None,
    band: Band,
    **own: Any,
) -> Problem:
    """Make the `Problem` of a checked call, from the fields common to all kinds of calls and its `own`.

    `given` has all its adopted arrays; `main` names those whose strides matter. Others as in `describe`.
    """
    dtype = views["q"].dtype
    if options.precision is not None and dtype != "float32":
        headline = f"precision={options.precision!r} is for float32 inputs; these are {dtype}."
        raise wrong(headline, given, "precision=None")
    _, heads, rows, head_dim = views["q"].shape
    read = [views[name] for name in main if name in views]
    scale, softcap = score_factors(options, head_dim, dtype)
    return Problem(
        direction=direction,
        dtype=dtype,
        precision=options.precision,
        heads_q=heads,
        head_dim=head_dim,
        scale=scale,
        softcap=softcap,
        offset=band.offset,
        left=band.left,
        right=band.right,
        packed=packing is not None,
        rows_q=0 if packing is None else rows,
        in_rows=all(x.in_rows() for x in read),
        boxes=all(x.has_tma_strides() for x in read),
        reproducible=None if options.reproducible == "run" else options.reproducible,
        used_q="seqused_q" in given,
        ragged_mask="ragged_mask" in given,
        **own,
    )


def describe(
    direction: str,
    arrays: Mapping[str, Any],
    options: Options,
    want_lse: bool = True,
    packing: Packing | None = None,
    unrounded: bool = False,
) -> tuple[Problem, Views, Views]:
    """Check a call and describe it.

    Parameters
    ----------
    direction : {"forward", "backward"}
    arrays : mapping of str to array
        q, k, v and whichever of mask, ragged_mask, bias, spans, blocks, block_bits, alibi_slopes, sinks,
        q.scale, k.scale, v.scale and bound[0], bound[1] ... are given; for the backward pass also
        do, o, lse and, if given, dlse; the `OFFSETS` of packed sequences, checked.
    options : Options
    want_lse : bool
    packing : Packing, optional
        For packed sequences; q, k, v are then (rows, heads, head_dim).
    unrounded : bool
        As in `Problem`.

    Returns
    -------
    problem : Problem
    views : dict of str to ArrayView
        The inputs as (batch, heads, seq, head_dim), (batch, heads, queries, keys) or
        (batch, heads, queries); spans (1 or batch, 1 or heads, queries or keys, bounds); blocks
        (1 or batch, 1 or heads, queries, keys), in blocks; scales (1 or batch, heads_k);
        ragged_mask, block_bits, bound and offsets unchanged.
    raw : dict of str to ArrayView
        The inputs as the caller gave them, without offsets.

    Raises
    ------
    InvalidArgumentsError
    """
    given = {name: adopt(x, name) for name, x in arrays.items()}
    raw = {name: x for name, x in given.items() if name not in OFFSETS}
    check_options(options)
    q, views = raw["q"], main_views(direction, raw, options.layout, packing is not None)
    rank, float8 = len(q.shape), q.dtype not in FLOATS
    batch, heads_q, seqlen_q, _ = views["q"].shape
    _, heads_k, seqlen_k, head_dim_v = views["v"].shape
    check_seqlen(max(seqlen_q, seqlen_k), raw)
    rows = (batch, heads_q, seqlen_q)[4 - rank :]
    if packing:
        batch, seqlen_q, seqlen_k = packing[:3]
        check_seqlen(max(seqlen_q, seqlen_k), raw)  # why again: the caller may claim more than there are rows
    full = (batch, heads_q, seqlen_q, seqlen_k)
    acc = accumulator_of(q.dtype)
    mask = score_operand("mask", raw, views, full, ("bool",))
    bias = score_operand("bias", raw, views, full, FLOATS)
    if "ragged_mask" in raw:
        if packing is None:
            raise wrong("mask is a RaggedMask, and sequences are not packed.", raw, "a boolean array")
        views["ragged_mask"] = raw["ragged_mask"]
    spans = span_operand(raw, views, full)
    blocks = block_operands(raw, views, full)
    function = function_operands(options.score, raw, views)
    per_head = head_operands(raw, views, batch, heads_q, acc)
    for name in SCALES:
        if name in raw:
            of_heads = row_operand(name, raw, ((heads_k,), (batch, heads_k)), "float32")
            views[name.replace(".", "_")] = of_heads.lifted(2)
    for name in ("lse", "dlse"):
        if name in raw:
            views[name] = row_operand(name, raw, (rows,), acc).lifted(3)

    band = resolve_band(
        bool(options.causal),
        options.window,
        options.align,
        "alibi_slopes" in raw,
        seqlen_q,
        seqlen_k,
        packing.alike if packing else None,
        otherwise=_other_layout(views, None if packing else options.layout),
    )
    problem = problem_of(
        direction,
        given,
        views,
        MAIN,
        options,
        packing,
        band,
        batch=batch,
        heads_k=heads_k,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim_v=head_dim_v,
        offset_from_end=bool(packing) and options.align == "bottom_right",
        rows_k=views["k"].shape[2] if packing else 0,
        mask=mask,
        spans=spans,
        blocks=blocks,
        function=function,
        learned_elements=learned_elements(function, views) if direction == "backward" else 0,
        bias=bias,
        bias_dtype=None if bias is None else raw["bias"].dtype,
        per_head=per_head,
        dropout=float(options.dropout),
        seed=0 if options.seed is None else int(options.seed),
        want_lse=want_lse,
        want_dbias=direction == "backward" and bias is not None,
        deterministic=direction == "backward" and options.reproducible is not None,
        tile=None if options.tile is None else (int(options.tile[0]), int(options.tile[1])),
        aligned=aligned(views, direction),
        of_float8=RESULTS_OF_FLOAT8[0] if float8 else None,
        unrounded=unrounded,
    )
    return problem, {**views, **{name: x for name, x in given.items() if name in OFFSETS}}, raw

"""describe: check every argument, once, and say what is asked for as one immutable value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..errors import InvalidArgumentsError, UnsupportedError
from ..program.graph import Body
from .adopt import adopt
from .arrays import ArrayView
from .blocks import Blocks, block_operands
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
from .spans import Intervals, span_operand
from .values import check_options, finite_number

__all__ = ["MAX_SEQLEN", "OFFSETS", "Cache", "Problem", "describe", "head_operands", "problem_of"]

# Where packed sequences begin and end.
OFFSETS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "seqused_q", "mask_starts")
# why: tiles beyond the end of a sequence are still counted in 32 bits.
MAX_SEQLEN = 2**31 - 2**16


class Codes(NamedTuple):
    """What codes of 4 bits in a cache stand for.

    Attributes
    ----------
    kind : str
        "int4" or "nvfp4".
    units : str
        Dtype of scales and zeros; "uint8" for the bits of those of NVFP4.
    groups : (int, int)
        Features that share a scale and a zero, of keys and of values.
    alike : bool
        Whether scales and zeros lie alike, those of a key next to each other.
    """

    kind: str
    units: str
    groups: tuple[int, int]
    alike: bool


class Cache(NamedTuple):
    """How keys and values lie in a KV cache, and what is done to it before it is read.

    Attributes
    ----------
    dtype : str
        Of the stored keys and values: that of q, "int8", "float8_e4m3fn", or "int4" or "nvfp4", two to
        a byte.
    page : int
        Keys of a page; 0 if each sequence has one slot, in one piece.
    appended : int
        New keys of each sequence, or of all if they are packed.
    rotary : int
        Features that are rotated; 0 for none.
    interleaved : bool
        Whether rotation pairs features 2i and 2i + 1 of those, not i and i + rotary / 2.
    splits : int or None
        Parts that the keys are cut into, if the caller chose.
    indexed : bool
        Whether sequences say which slot is theirs.
    packed : bool
        Whether new keys of all sequences follow each other, cut by offsets.
    leftpad : bool
        Whether sequences say at which key they begin.
    turned_from : bool
        Whether sequences say at which position rotation begins.
    unrotated : bool
        Whether keys are stored as they come, and rotated when they are read.
    codes : Codes or None
        Of "int4" and "nvfp4".
    latent : bool
        Whether values are the first columns of the keys, in the same memory.
    first_rotated : int
        The first feature that is rotated.
    """

    dtype: str
    page: int = 0
    appended: int = 0
    rotary: int = 0
    interleaved: bool = False
    splits: int | None = None
    indexed: bool = False
    packed: bool = False
    leftpad: bool = False
    turned_from: bool = False
    unrotated: bool = False
    codes: Codes | None = None
    latent: bool = False
    first_rotated: int = 0

    def summary(self) -> str:
        """A phrase for people."""
        words = [
            f"cache of {'latents of ' * self.latent}{self.dtype}",
            f"pages of {self.page} keys" if self.page else "contiguous",
        ]
        words += ["slots by block_table"] * self.indexed
        words += [f"{self.appended} new key{'s' * (self.appended != 1)}{', packed' * self.packed}"] * bool(
            self.appended
        )
        words += ["cache_leftpad"] * self.leftpad
        where = " (last)" * bool(self.first_rotated)
        where += " from rotary.seqlens" * self.turned_from + " on read" * self.unrotated
        words += [f"rotary={self.rotary}{where}"] * bool(self.rotary)
        words += [f"tuning.splits={self.splits}"] * bool(self.splits)
        return ", ".join(words)


class Problem(NamedTuple):
    """What is asked: everything that can change a plan, and nothing that lives in memory.

    Attributes
    ----------
    direction : {"forward", "backward", "decode", "jvp", "hvp", "statistics"}
        "decode" is the forward pass over a KV cache; "jvp" and "hvp" are the derivatives of the two passes.
    dtype : str
        Of q, k, v and o.
    precision : {"ieee", "tf32x3", "tf32"} or None
        For float32; None leaves the choice to the plan.
    batch, heads_q, heads_k, seqlen_q, seqlen_k, head_dim, head_dim_v : int
    scale : float
    softcap : float or None
    offset, left, right
        The band, see `masks.Band`.
    offset_from_end : bool
        Aligned bottom-right, each sequence by its own lengths: packed sequences and caches.
    mask, bias : tuple of 4 int, or None
        Their shapes over (batch, heads, queries, keys), 1 where broadcast.
    spans : Intervals or None
    blocks : Blocks or None
    function : Body or None
        What becomes of scores between softcap and bias.
    learned_elements : int
        Of all its arguments whose gradient is wanted, for the backward pass.
    bias_dtype : str or None
    per_head : tuple of str
        Options that are given and hold a number for each head.
    dropout : float
    seed : int
    want_lse, want_dbias, deterministic, packed : bool
    tile : (int, int) or None
        The (query, key) block asked for.
    rows_q, rows_k : int
        Rows of q, and of k, in all packed sequences.
    sequence : int
        Which of the packed sequences this problem is, if it is one; dropout counts it as the batch.
    in_rows : bool
        The last axis of every tensor is contiguous, its rows are less than 2 GiB apart.
    aligned : bool
        Besides, its rows start on 16-byte boundaries.
    boxes : bool
        Strides of every tensor are what the tensor maps of bulk copies can hold.
    cache : Cache or None
        With direction "decode" or "statistics"; seqlen_k is then what a sequence has room for.
    of_float8 : str or None
        Dtype of o if that of q, k and v is float8_e4m3fn.
    reproducible : {"batch", "prefill", "device"} or None
        What the bits of a row must not depend on. Gradients are then deterministic.
    used_q : bool
        Whether packed sequences say how many of their queries are in use.
    ragged_mask : bool
        Whether the masks of packed sequences lie in a row, each (queries, keys).
    unrounded : bool
        Whether o, dq, dk and dv are in the dtype of sums, on a CPU.
    wanted : tuple of str
        With direction "statistics", its results.
    """

    direction: str
    dtype: str
    precision: str | None
    batch: int
    heads_q: int
    heads_k: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    scale: float
    softcap: float | None = None
    offset: int = 0
    left: int | None = None
    right: int | None = None
    offset_from_end: bool = False
    mask: tuple[int, ...] | None = None
    spans: Intervals | None = None
    blocks: Blocks | None = None
    function: Body | None = None
    learned_elements: int = 0
    bias: tuple[int, ...] | None = None
    bias_dtype: str | None = None
    per_head: tuple[str, ...] = ()
    dropout: float = 0.0
    seed: int = 0
    want_lse: bool = True
    want_dbias: bool = False
    deterministic: bool = False
    packed: bool = False
    tile: tuple[int, int] | None = None
    rows_q: int = 0
    rows_k: int = 0
    sequence: int = 0
    in_rows: bool = True
    aligned: bool = True
    boxes: bool = True
    cache: Cache | None = None
    of_float8: str | None = None
    reproducible: str | None = None
    used_q: bool = False
    ragged_mask: bool = False
    unrounded: bool = False
    wanted: tuple[str, ...] = ()

    @property
    def result_dtype(self) -> str:
        """The dtype of o."""
        return self.accumulator if self.unrounded else self.of_float8 or self.dtype

    @property
    def band(self) -> Band:
        """The band of keys that each query sees."""
        return Band(self.offset, self.left, self.right)

    @property
    def accumulator(self) -> str:
        """The dtype of sums, LSE, sinks and ALiBi slopes."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def alibi(self) -> bool:
        """Whether there are slopes of ALiBi."""
        return "alibi_slopes" in self.per_head

    @property
    def sinks(self) -> bool:
        """Whether there are attention sinks."""
        return "sinks" in self.per_head

    @property
    def extents(self) -> tuple[int, int, int, int]:
        """Batch, heads of q, queries and keys: how far the positions of a pair count."""
        return self.batch, self.heads_q, self.seqlen_q, self.seqlen_k

    @property
    def second_order(self) -> bool:
        """Whether it is the derivative of a pass in some directions."""
        return self.direction in ("jvp", "hvp")

    @property
    def empty(self) -> bool:
        """Whether the result has no element, so that nothing has to run."""
        return 0 in (self.batch, self.heads_q, self.seqlen_q)

    def _band(self) -> str:
        """Which keys a query sees, by the options that say so."""
        causal = (self.left, self.right) == (None, 0)
        words = "causal" if causal else f"window=({self.left}, {self.right})"
        if self.cache is not None:  # the last query is at the last key, always
            return words
        if self.offset_from_end:
            return words + ", align=bottom_right"
        return words + f", align={self.offset}" * bool(self.offset)

    def summary(self) -> str:
        """One line for people."""
        heads = f"{self.heads_q}" + (f":{self.heads_k}" if self.heads_k != self.heads_q else "")
        dims = f"{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        features = [
            name
            for name, on in (
                (self._band(), not self.band.open),
                (f"softcap={self.softcap}", self.softcap),
                (f"mask{self.mask}", self.mask),
                ("RaggedMask", self.ragged_mask),
                ("seqused_q", self.used_q),
                (self.spans.summary() if self.spans else "", self.spans),
                (self.blocks.summary() if self.blocks else "", self.blocks),
                (self.function.summary() if self.function else "", self.function),
                (f"bias{self.bias} {self.bias_dtype}", self.bias),
                *((name, True) for name in self.per_head),
                (f"dropout={self.dropout}", self.dropout),
                (f"precision={self.precision}", self.precision),
                ("last axis not contiguous", not self.in_rows),
                ("rows not 16-byte aligned", self.in_rows and not self.aligned),
                ("an axis is broadcast", not self.boxes),
                (self.cache.summary() if self.cache else "", self.cache),
                (f"result in {self.of_float8}", self.of_float8),
                (f"reproducible={self.reproducible or 'run'}", self.reproducible or self.deterministic),
            )
            if on
        ]  # fmt: skip
        return (
            f"{self.direction} {self.dtype} batch={self.batch} heads={heads} "
            f"seqlen={self.seqlen_q}x{self.seqlen_k} head_dim={dims}"
            + ("  " + ", ".join(features) if features else "")
        )


def _other_layout(views: Views, layout: str | None) -> str:
    """What to add to a hint about unequal lengths, if they are equal in the other layout."""
    if views["q"].shape[1] != views["k"].shape[1]:
        return ""
    other = layout_that_fits(views, layout)
    return f'; or layout="{other}", if these arrays are {AXES[other]}' if other else ""


def head_operands(raw: Views, views: Views, batch: int, heads: int, dtype: str) -> tuple[str, ...]:
    """Check the options that hold a number for each head, put their views into views, return their names."""
    given = tuple(name for name in PER_HEAD if name in raw)
    for name in given:
        axes = AXES_OF[name]
        shapes = ((heads,), (batch, heads))[: len(axes)]
        views[name] = row_operand(name, raw, shapes, dtype).lifted(len(axes))
    return given


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
    """A checked call as a problem: what all kinds of calls say alike, and fields of this kind's own.

    given: all its arrays, adopted; main: names of those whose rows are read. Others as of `describe`.
    """
    _, heads, rows, head_dim = views["q"].shape
    read = [views[name] for name in main if name in views]
    return Problem(
        direction=direction,
        dtype=views["q"].dtype,
        precision=options.precision,
        heads_q=heads,
        head_dim=head_dim,
        scale=head_dim**-0.5 if options.scale is None else finite_number(options.scale, "scale"),
        softcap=None if options.softcap is None else float(options.softcap),
        offset=band.offset,
        left=band.left,
        right=band.right,
        packed=packing is not None,
        rows_q=0 if packing is None else rows,
        in_rows=all(x.in_rows() for x in read),
        boxes=all(x.boxable() for x in read),
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
        Of packed sequences: q, k, v are (rows, heads, head_dim).
    unrounded : bool
        As of `Problem`.

    Returns
    -------
    problem : Problem
    views : dict of str to ArrayView
        The inputs as (batch, heads, seq, head_dim), (batch, heads, queries, keys) or
        (batch, heads, queries); spans (1 or batch, 1 or heads, queries or keys, bounds); blocks
        (1 or batch, 1 or heads, queries, keys), in blocks; scales (1 or batch, heads_k);
        ragged_mask, block_bits, bound and offsets as they are.
    raw : dict of str to ArrayView
        The inputs as the caller gave them, without offsets.

    Raises
    ------
    InvalidArgumentsError
    """
    given = {name: adopt(x, name) for name, x in arrays.items()}
    raw = {name: x for name, x in given.items() if name not in OFFSETS}
    check_options(options)
    q = raw["q"]
    rank = len(q.shape)
    if not 2 <= rank <= 4:
        hint = f"{AXES[options.layout]}; rank 3 is one batch, rank 2 one head"
        raise wrong(f"q has rank {rank}.", raw, hint)
    check_kinds(raw, direction)
    float8 = q.dtype not in FLOATS
    views: Views = {n: lift(raw[n], options.layout, rank) for n in MAIN if n in raw}
    if float8:
        views = {name: view._replace(dtype=FLOAT8) for name, view in views.items()}
    check_sizes(views, raw, None if packing else options.layout)
    batch, heads_q, seqlen_q, _ = views["q"].shape
    _, heads_k, seqlen_k, head_dim_v = views["v"].shape
    if max(seqlen_q, seqlen_k) > MAX_SEQLEN:
        raise UnsupportedError(f"a sequence of {max(seqlen_q, seqlen_k)} is beyond 31 bits.", table_of(raw))
    rows = (batch, heads_q, seqlen_q)[4 - rank :]
    if packing:
        batch, seqlen_q, seqlen_k = packing[:3]
    full = (batch, heads_q, seqlen_q, seqlen_k)
    acc = "float64" if q.dtype == "float64" else "float32"
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
    if options.precision is not None and q.dtype != "float32":
        raise InvalidArgumentsError(
            f"precision={options.precision!r} is for float32 inputs; these are {q.dtype}.",
            table_of(raw),
            hint="precision=None",
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

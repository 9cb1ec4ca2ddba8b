"""describe: check every argument, once, and say what is asked for as one immutable value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .arrays import CPU, ArrayView, adopt, device_name
from .checks import flag, integer, one_of
from .errors import InvalidArguments, Unsupported
from .masks import Band, resolve_band

__all__ = ["FLOAT8", "FLOATS", "SCALES", "Cache", "Options", "Problem", "describe"]

FLOATS = ("float16", "bfloat16", "float32", "float64")
# Of q, k and v of a forward pass, with its scales; the result then has one of the 16 or 32-bit dtypes.
FLOAT8 = "float8_e4m3fn"
SCALES = ("q_scale", "k_scale", "v_scale")
RESULTS_OF_FLOAT8 = ("bfloat16", "float16", "float32")
PRECISIONS = ("ieee", "tf32x3", "tf32")
LAYOUTS = ("bhsd", "bshd")
# why: tiles beyond the end of a sequence are still counted in 32 bits.
MAX_SEQLEN = 2**31 - 2**16
# The arrays with a head dim, which share dtype, rank and layout.
_MAIN: tuple[str, ...] = ("q", "k", "v", "o", "do")


class Options(NamedTuple):
    """The options of `attention` that are values, not arrays, as the caller spelled them."""

    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    align: str | int | None = None
    scale: float | None = None
    softcap: float | None = None
    dropout: float = 0.0
    seed: int | None = None
    layout: str = "bhsd"
    precision: str | None = None
    tile: tuple[int, int] | None = None


class Packing(NamedTuple):
    """How sequences lie one after the other on the rows of q and of k.

    Attributes
    ----------
    batch : int
        Sequences.
    seqlen_q, seqlen_k : int
        The longest.
    alike : bool
        Whether queries and keys are cut by the same array.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    alike: bool


class Cache(NamedTuple):
    """How keys and values lie in a KV cache, and what is done to it before it is read.

    Attributes
    ----------
    dtype : str
        Of the stored keys and values: that of q, "int8" or "float8_e4m3fn".
    page : int
        Keys of a page, a power of two; 0 if each sequence has one slot, in one piece.
    appended : int
        New keys of each sequence.
    rotary : int
        Features that are rotated; 0 for none.
    interleaved : bool
        Whether rotation pairs features 2i and 2i + 1, not i and i + rotary / 2.
    splits : int or None
        Parts that the keys are cut into, if the caller chose.
    indexed : bool
        Whether sequences say which slot is theirs.
    """

    dtype: str
    page: int = 0
    appended: int = 0
    rotary: int = 0
    interleaved: bool = False
    splits: int | None = None
    indexed: bool = False

    def summary(self) -> str:
        """A phrase for people."""
        words = [f"cache of {self.dtype}", f"pages of {self.page}" if self.page else "in one piece"]
        words += ["indexed"] * self.indexed
        words += [f"{self.appended} appended"] * bool(self.appended)
        words += [f"rotary={self.rotary}"] * bool(self.rotary)
        words += [f"splits={self.splits}"] * bool(self.splits)
        return ", ".join(words)


class Problem(NamedTuple):
    """What is asked: everything that can change a plan, and nothing that lives in memory.

    Attributes
    ----------
    direction : {"forward", "backward", "decode"}
        "decode" is the forward pass over a KV cache.
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
    bias_dtype : str or None
    alibi, sinks : bool
    dropout : float
    seed : int
    want_lse, want_dbias, deterministic, packed : bool
    tile : (int, int) or None
        The (query, key) block asked for.
    rows_q : int
        Rows of q in all packed sequences.
    sequence : int
        Which of the packed sequences this problem is, if it is one; dropout counts it as the batch.
    in_rows : bool
        The last axis of every tensor is contiguous, its rows are less than 2 GiB apart.
    aligned : bool
        Besides, its rows start on 16-byte boundaries.
    boxes : bool
        Strides of every tensor are what the tensor maps of bulk copies can hold.
    cache : Cache or None
        With direction "decode"; seqlen_k is then what a sequence has room for.
    of_float8 : str or None
        Dtype of o if that of q, k and v is float8_e4m3fn.
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
    bias: tuple[int, ...] | None = None
    bias_dtype: str | None = None
    alibi: bool = False
    sinks: bool = False
    dropout: float = 0.0
    seed: int = 0
    want_lse: bool = True
    want_dbias: bool = False
    deterministic: bool = False
    packed: bool = False
    tile: tuple[int, int] | None = None
    rows_q: int = 0
    sequence: int = 0
    in_rows: bool = True
    aligned: bool = True
    boxes: bool = True
    cache: Cache | None = None
    of_float8: str | None = None

    @property
    def result_dtype(self) -> str:
        """The dtype of o."""
        return self.of_float8 or self.dtype

    @property
    def band(self) -> Band:
        """The band of keys that each query sees."""
        return Band(self.offset, self.left, self.right)

    @property
    def accumulator(self) -> str:
        """The dtype of sums, LSE, sinks and ALiBi slopes."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def empty(self) -> bool:
        """Whether the result has no element, so that nothing has to run."""
        return 0 in (self.batch, self.heads_q, self.seqlen_q)

    def summary(self) -> str:
        """One line for people."""
        heads = f"{self.heads_q}" + (f":{self.heads_k}" if self.heads_k != self.heads_q else "")
        dims = f"{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        features = [
            name
            for name, on in (
                (f"band(offset={self.offset}, left={self.left}, right={self.right})", not self.band.open),
                (f"softcap={self.softcap}", self.softcap),
                (f"mask{self.mask}", self.mask),
                (f"bias{self.bias} {self.bias_dtype}", self.bias),
                ("alibi", self.alibi),
                ("sinks", self.sinks),
                (f"dropout={self.dropout}", self.dropout),
                ("deterministic", self.deterministic),
                (f"precision={self.precision}", self.precision),
                ("last axis not contiguous", not self.in_rows),
                ("rows not 16-byte aligned", self.in_rows and not self.aligned),
                ("an axis is broadcast", not self.boxes),
                (self.cache.summary() if self.cache else "", self.cache),
                (f"to {self.of_float8}", self.of_float8),
            )
            if on
        ]  # fmt: skip
        return (
            f"{self.direction} {self.dtype} batch={self.batch} heads={heads} "
            f"seqlen={self.seqlen_q}x{self.seqlen_k} head_dim={dims}"
            + ("  " + ", ".join(features) if features else "")
        )


Views = dict[str, ArrayView]


def table_of(views: Mapping[str, ArrayView]) -> list[tuple[str, str]]:
    """The inputs as rows of an error's table."""
    return [(name, view.describe()) for name, view in views.items()]


def _wrong(headline: str, views: Mapping[str, ArrayView], hint: str | None = None) -> InvalidArguments:
    return InvalidArguments(headline, table_of(views), hint=hint)


def finite_number(value: Any, name: str) -> float:
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArguments(f"{name} is {value!r}, not a number.", hint=f"{name}=0.125") from None
    if not math.isfinite(number):
        raise InvalidArguments(f"{name} is {value!r}.", hint=f"a finite {name}, or None for the default")
    return number


def check_options(options: Options) -> None:
    """Whatever can be refused without looking at an array."""
    if not one_of(options.layout, LAYOUTS):
        raise InvalidArguments(
            f"layout is {options.layout!r}.",
            hint='layout="bhsd" (batch, heads, seq, head_dim) or layout="bshd"',
        )
    flag(options.causal, "causal")
    if options.precision is not None and not one_of(options.precision, PRECISIONS):
        raise InvalidArguments(
            f"precision is {options.precision!r}.",
            hint='precision="ieee", "tf32x3" or "tf32"; None for the default',
        )
    dropout = finite_number(options.dropout, "dropout")
    if not 0.0 <= dropout < 1.0:
        raise InvalidArguments(
            f"dropout is {dropout}, outside [0, 1).",
            hint="the probability of dropping, e.g. dropout=0.1",
        )
    if dropout and options.seed is None:
        raise InvalidArguments(
            f"dropout is {dropout} but there is no seed, so that no backward pass could draw the same set.",
            hint="seed=0, and a new one for each step",
        )
    seed = options.seed
    if seed is not None and not 0 <= (-1 if (n := integer(seed)) is None else n) < 2**64:
        raise InvalidArguments(f"seed is {seed!r}.", hint="an integer in [0, 2**64)")
    if options.softcap is not None and finite_number(options.softcap, "softcap") <= 0:
        raise InvalidArguments(f"softcap is {options.softcap}, not above 0.", hint="softcap=None for none")
    if options.tile is not None:
        tile = options.tile
        good = isinstance(tile, (tuple, list)) and len(tile) == 2
        if not good or not all((integer(n) or 0) > 0 for n in tile):
            raise InvalidArguments(f"tile is {tile!r}.", hint="tile=(queries, keys), e.g. tile=(64, 64)")


def lift(view: ArrayView, layout: str, rank: int) -> ArrayView:
    """A q-like array as (batch, heads, seq, head_dim)."""
    if layout == "bshd" and rank >= 3:
        view = view.permuted(*range(rank - 3), rank - 2, rank - 3, rank - 1)
    return view.lifted(4)


def lower_shape(shape: tuple[int, ...], layout: str, rank: int) -> tuple[int, ...]:
    """The caller's shape of a (batch, heads, seq, head_dim) result."""
    b, h, s, d = shape
    full = (b, s, h, d) if layout == "bshd" else (b, h, s, d)
    return full[4 - rank :] if rank > 2 else (s, d)


def _check_float8(raw: Views, direction: str) -> bool:
    """Whether q holds 8-bit floats; refuse what may not be meant so, and scales of anything else."""
    dtype = raw["q"].dtype
    given = [name for name in SCALES if name in raw]
    if dtype == "uint8" and len(given) < len(SCALES):
        headline = f"q has dtype uint8, the bits of {FLOAT8} only where q_scale, k_scale and v_scale say so."
        raise _wrong(headline, raw, f"all three scales, or q, k and v as arrays of {FLOAT8}")
    if dtype not in (FLOAT8, "uint8"):
        if given:
            headline = f"{given[0]} is given, but q, k and v are {dtype}."
            hint = f"{given[0]}=None; these are for {FLOAT8}, scale= is the factor on all scores"
            raise _wrong(headline, raw, hint)
        return False
    if direction != "forward":
        raise Unsupported(
            f"{FLOAT8} has no gradient: its 3 bits of mantissa would not hold one.",
            table_of(raw),
            hint="q, k and v times their scales as bfloat16",
        )
    return True


def _check_kinds(raw: Views, direction: str) -> None:
    """Dtypes and ranks of q, k, v, o and do; library and device of everything."""
    q = raw["q"]
    rank = len(q.shape)
    if not _check_float8(raw, direction) and q.dtype not in FLOATS:
        kinds = ", ".join((*FLOATS, FLOAT8))
        raise _wrong(f"q has dtype {q.dtype}; attention is over {kinds}.", raw, "q.astype of one")
    for name, view in raw.items():
        if view.library != q.library:
            headline = f"{name} is a {view.library} array, q a {q.library} array."
            raise _wrong(headline, raw, f"arrays of one library: from_dlpack({name})")
        if view.device != q.device:
            headline = f"{name} is on {device_name(view.device)}, q on {device_name(q.device)}."
            raise _wrong(headline, raw, "all arrays on one device")
        if name in _MAIN:
            if view.dtype != q.dtype:
                headline = f"{name} has dtype {view.dtype}, q has {q.dtype}."
                raise _wrong(headline, raw, f"{name}.astype(q.dtype)")
            if len(view.shape) != rank:
                headline = f"{name} has rank {len(view.shape)}, q {rank}."
                raise _wrong(headline, raw, "the same rank for q, k and v")


def _check_sizes(views: Views, raw: Views) -> None:
    """Sizes of q, k, v, and of o and do; all as (batch, heads, seq, head_dim)."""
    q, k, v = views["q"].shape, views["k"].shape, views["v"].shape
    if q[3] == 0 or v[3] == 0:
        raise _wrong("head_dim is 0.", raw, "at least one feature per head")
    if q[3] != k[3]:
        raise _wrong(f"q has head_dim {q[3]}, k has {k[3]}.", raw, "the same head_dim for q and k")
    if not q[0] == k[0] == v[0]:
        raise _wrong(f"batch sizes {q[0]}, {k[0]}, {v[0]} differ.", raw, "one batch size")
    if k[1] != v[1]:
        raise _wrong(f"k has {k[1]} heads, v has {v[1]}.", raw, "as many heads of v as of k")
    if q[1] % k[1] if k[1] else q[1]:
        headline = f"{q[1]} heads of q are not a multiple of {k[1]} of k."
        raise _wrong(headline, raw, "grouped-query attention needs heads_q = n * heads_k")
    if k[2] != v[2]:
        raise _wrong(f"k has {k[2]} keys, v has {v[2]}.", raw, "one value per key")
    for name in ("o", "do"):
        if name in views and views[name].shape != (q[0], q[1], q[2], v[3]):
            headline = f"{name} has shape {raw[name].shape}."
            raise _wrong(headline, raw, "the shape of the result of attention(q, k, v)")


def _score_operand(
    name: str, raw: Views, views: Views, full: tuple[int, int, int, int], dtypes: tuple[str, ...]
) -> tuple[int, ...] | None:
    """Check a mask or bias, put its (batch, heads, queries, keys) view into views, return its shape."""
    view = raw.get(name)
    if view is None:
        return None
    if view.dtype not in dtypes:
        kinds = "bool, True where a query may attend" if name == "mask" else "a floating dtype"
        hint = "bias= for additive scores" if name == "mask" else "mask= for booleans"
        raise _wrong(f"{name} has dtype {view.dtype}; it is {kinds}.", raw, hint)
    pairs = zip(view.shape[::-1], full[::-1], strict=False)
    if len(view.shape) > 4 or any(n not in (1, m) for n, m in pairs):
        headline = f"{name} of shape {view.shape} does not broadcast to {full}."
        raise _wrong(headline, raw, "(batch, heads, queries, keys), each its length or 1")
    views[name] = view.lifted(4).broadcast()
    return views[name].shape


def row_operand(name: str, raw: Views, shapes: tuple[tuple[int, ...], ...], dtype: str) -> ArrayView:
    """Check lse, dlse, sinks or alibi_slopes."""
    view = raw[name]
    if view.dtype != dtype:
        raise _wrong(f"{name} has dtype {view.dtype}, not {dtype}.", raw, f"{name}.astype({dtype!r})")
    if view.shape not in shapes:
        headline = f"{name} has shape {view.shape}, not {' or '.join(map(str, shapes))}."
        raise _wrong(headline, raw, "see the shapes in help(cupy_flash.attention)")
    return view


def _scale_operand(name: str, raw: Views, batch: int, heads: int) -> ArrayView:
    """Check a scale; its values only in main memory."""
    view = row_operand(name, raw, ((heads,), (batch, heads)), "float32")
    if view.device == CPU:
        values = view.numpy()
        good = np.isfinite(values) & ((values > 0) | (name == "v_scale"))
        if not good.all():
            kind = "finite" if name == "v_scale" else "finite and above 0"
            headline = f"{name} holds {values[~good].flat[0]}, not only numbers that are {kind}."
            raise _wrong(headline, raw, "the largest magnitude of a head / 448, and 1 where that is 0")
    return view.lifted(2)


def _aligned(views: Views, direction: str) -> bool:
    """Whether the rows of every tensor start on 16-byte boundaries, those of results we allocate too."""
    head_dim, head_dim_v = views["q"].shape[3], views["v"].shape[3]
    results = (head_dim_v,) if direction == "forward" else (head_dim, head_dim_v)
    size = max(2, views["q"].item_bytes)  # that of 8-bit floats has 16 bits or more
    return not any(n * size % 16 for n in results) and all(views[n].aligned() for n in _MAIN if n in views)


def describe(
    direction: str,
    arrays: Mapping[str, Any],
    options: Options,
    want_lse: bool = True,
    deterministic: bool = False,
    packing: Packing | None = None,
) -> tuple[Problem, Views, Views]:
    """Check a call and describe it.

    Parameters
    ----------
    direction : {"forward", "backward"}
    arrays : mapping of str to array
        q, k, v and whichever of mask, bias, alibi_slopes, sinks, q_scale, k_scale, v_scale are given; for
        the backward pass also do, o, lse and, if given, dlse.
    options : Options
    want_lse, deterministic : bool
    packing : Packing, optional
        Of packed sequences: q, k, v are (rows, heads, head_dim).

    Returns
    -------
    problem : Problem
    views : dict of str to ArrayView
        The inputs as (batch, heads, seq, head_dim), (batch, heads, queries, keys) or
        (batch, heads, queries); scales (1 or batch, heads_k).
    raw : dict of str to ArrayView
        The inputs as the caller gave them.

    Raises
    ------
    InvalidArguments
    """
    raw = {name: adopt(x, name) for name, x in arrays.items()}
    kinds = [(n, x.shape, x.strides, x.dtype, x.device, x.library, x.pointer % 16) for n, x in raw.items()]
    call = (direction, want_lse, deterministic, packing, options, *map(type, options), *kinds)
    try:
        known = _KNOWN.get(call)
    except TypeError:  # an option that is no key of anything
        return *_described(direction, raw, options, want_lse, deterministic, packing), raw
    if known is None:
        problem, views = _described(direction, raw, options, want_lse, deterministic, packing)
        if raw.keys().isdisjoint(SCALES):  # whose values are checked
            if len(_KNOWN) >= _MOST_KNOWN:
                _KNOWN.clear()
            _KNOWN[call] = problem, tuple((n, x.shape, x.strides, x.dtype) for n, x in views.items())
        return problem, views, raw
    problem, lifted = known
    views = {}
    for name, shape, strides, dtype in lifted:
        x = raw[name]
        views[name] = ArrayView(x.pointer, shape, strides, dtype, x.device, x.library, x.readonly, x.owner)
    return problem, views, raw


# why: programs repeat their calls, and a look at one is twenty times as long as remembering it.
_KNOWN: dict[tuple[Any, ...], tuple[Problem, tuple[tuple[Any, ...], ...]]] = {}
_MOST_KNOWN = 1024


def _described(
    direction: str,
    raw: Views,
    options: Options,
    want_lse: bool,
    deterministic: bool,
    packing: Packing | None,
) -> tuple[Problem, Views]:
    """Check and describe a call of adopted arrays."""
    check_options(options)
    q = raw["q"]
    rank = len(q.shape)
    if not 2 <= rank <= 4:
        axes = (
            "(batch, heads, seq, head_dim)" if options.layout == "bhsd" else "(batch, seq, heads, head_dim)"
        )
        raise _wrong(f"q has rank {rank}.", raw, f"{axes}; rank 3 is one batch, rank 2 one head")
    _check_kinds(raw, direction)
    float8 = q.dtype not in FLOATS
    views: Views = {n: lift(raw[n], options.layout, rank) for n in _MAIN if n in raw}
    if float8:
        views = {name: view._replace(dtype=FLOAT8) for name, view in views.items()}
    _check_sizes(views, raw)
    batch, heads_q, seqlen_q, head_dim = views["q"].shape
    _, heads_k, seqlen_k, head_dim_v = views["v"].shape
    if max(seqlen_q, seqlen_k) > MAX_SEQLEN:
        raise Unsupported(f"a sequence of {max(seqlen_q, seqlen_k)} is beyond 31 bits.", table_of(raw))
    rows = (batch, heads_q, seqlen_q)[4 - rank :]
    if packing:
        batch, seqlen_q, seqlen_k = packing[:3]
    full = (batch, heads_q, seqlen_q, seqlen_k)
    acc = "float64" if q.dtype == "float64" else "float32"
    mask = _score_operand("mask", raw, views, full, ("bool",))
    bias = _score_operand("bias", raw, views, full, FLOATS)
    if "alibi_slopes" in raw:
        slopes = row_operand("alibi_slopes", raw, ((heads_q,), (batch, heads_q)), acc)
        views["alibi_slopes"] = slopes.lifted(2)
    if "sinks" in raw:
        views["sinks"] = row_operand("sinks", raw, ((heads_q,),), acc)
    for name in SCALES:
        if name in raw:
            views[name] = _scale_operand(name, raw, batch, heads_k)
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
    )
    scale = head_dim**-0.5 if options.scale is None else finite_number(options.scale, "scale")
    if options.precision is not None and q.dtype != "float32":
        raise InvalidArguments(
            f"precision={options.precision!r} is for float32 inputs; these are {q.dtype}.",
            table_of(raw),
            hint="precision=None",
        )
    problem = Problem(
        direction=direction,
        dtype=views["q"].dtype,
        precision=options.precision,
        batch=batch,
        heads_q=heads_q,
        heads_k=heads_k,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        scale=scale,
        softcap=None if options.softcap is None else float(options.softcap),
        offset=band.offset,
        left=band.left,
        right=band.right,
        offset_from_end=bool(packing) and options.align == "bottom_right",
        packed=bool(packing),
        rows_q=rows[-1] if packing else 0,
        mask=mask,
        bias=bias,
        bias_dtype=None if bias is None else raw["bias"].dtype,
        alibi="alibi_slopes" in raw,
        sinks="sinks" in raw,
        dropout=float(options.dropout),
        seed=0 if options.seed is None else int(options.seed),
        want_lse=want_lse,
        want_dbias=direction == "backward" and bias is not None,
        deterministic=flag(deterministic, "deterministic"),
        tile=None if options.tile is None else (int(options.tile[0]), int(options.tile[1])),
        in_rows=all(views[name].in_rows() for name in _MAIN if name in views),
        aligned=_aligned(views, direction),
        boxes=all(views[name].boxable() for name in _MAIN if name in views),
        of_float8=RESULTS_OF_FLOAT8[0] if float8 else None,
    )
    return problem, views

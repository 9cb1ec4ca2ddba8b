"""Calls over whole sequences: attention, gradients, tangents, second order, statistics, parts merged."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

import cupy_flash
from cupy_flash import testing
from cupy_flash.cpu.core.isa import OVERRIDE
from cupy_flash.testing import reference
from tests.block_cases import BlockCase
from tests.cases import BROADCASTS, DTYPES, Case
from tests.function_cases import MADE
from tests.public import with_function, with_mask
from tests.span_cases import SpanCase
from tests.statistic_checks import assert_close

from .edges import (
    HEAD_DIMS,
    affordable,
    aligned,
    band,
    blocks,
    dtype_of,
    head_dim,
    heads,
    many,
    maybe,
    several,
    spans,
    style,
    style_of,
)
from .memory import numpy_of

__all__ = [
    "ANYTHING",
    "Dense",
    "MergeOfTwo",
    "SecondOrder",
    "Statistics",
    "assert_of_second_order",
    "largest_score",
    "rows_of_a_key",
]

# Roundings of a result of second order, in units of the largest number of all of them.
SECOND_ORDER_UNITS = {"float64": 1e4}
# What lies where nobody looks.
ANYTHING = (np.nan, np.inf, -np.inf)
WIDE = ("float32", "float64")
_LARGE_SCALES = 100.0, 3.0


def _hashed(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Of short sequences its integers have 32 bits, of others more."""
    return (i * 104_729_003 + j * 15_485_867 + h * 7) % 11 < 8


FUNCTIONS: dict[str, tuple[cupy_flash.ScoreFunction, Callable[..., Any]]] = {
    **MADE,
    "hashed": (cupy_flash.mask(_hashed), lambda *_: ()),
}


@dataclass(frozen=True, kw_only=True)
class Dense(Case):
    """A call of attention and attention_backward with any options at once.

    Attributes
    ----------
    spans : (bool, int, str), optional
        Of `SpanCase`: by query, intervals, leading axes.
    blocks : (int, int, str), optional
        Of `BlockCase`: rows and columns of a block, leading axes.
    function : str, optional
        Of `FUNCTIONS`.
    reproducible : str, optional
    holes : bool
        Whether keys that nobody sees hold NaN and infinities.
    without_sinks : bool
        Whether every second sink is -inf.
    """

    spans: tuple[bool, int, str] | None = None
    blocks: tuple[int, int, str] | None = None
    function: str | None = None
    reproducible: str | None = None
    holes: bool = False
    without_sinks: bool = False

    def _plain(self) -> Case:
        return Case(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Case)})

    def inputs(self) -> dict[str, np.ndarray]:
        """Those of a case, spans, and the table and bits of blocks."""
        made, plain = super().inputs(), self._plain()
        if self.spans is not None:
            made["spans"] = SpanCase(plain, *self.spans).inputs()["spans"]
        if self.blocks is not None:
            found = BlockCase(plain, self.blocks[:2], self.blocks[2]).inputs()
            made |= {name: found[name] for name in ("table", "bits")}
        if self.function is not None:
            arguments = FUNCTIONS[self.function][1](
                np.random.default_rng(zlib.crc32(str(self).encode())), plain
            )
            made |= {f"bound[{n}]": x for n, x in enumerate(arguments)}
        if self.without_sinks and self.sinks:
            made["sinks"][::2] = -np.inf
        if self.holes:
            self._empty(made)
        return made

    def _empty(self, made: dict[str, np.ndarray]) -> None:
        """Put anything where k holds keys that no query of their heads sees."""
        f = reference.forward(*(made[name] for name in "qkv"), testing.Options(**self.options(made)))
        batch, heads, *pairs = f.keep.shape
        seen = f.keep.reshape(batch, heads // f.group, f.group, *pairs).any((2, 3))
        hidden = reference.canonical(made["k"], self.layout)[~seen]
        reference.canonical(made["k"], self.layout)[~seen] = np.resize(ANYTHING, (len(hidden), 1))

    def options(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments, with these arrays."""
        made = super().options(arrays)
        if self.spans is not None:
            made = with_mask(made, cupy_flash.Spans(arrays["spans"]))
        if self.blocks is not None:
            made = with_mask(made, cupy_flash.BlockMask(arrays["table"], arrays["bits"]))
        if self.function is not None:
            taken = [name for name in arrays if name.startswith("bound")]
            made = with_function(made, FUNCTIONS[self.function][0], [arrays[name] for name in taken])
        return made

    @classmethod
    def draw(cls, draw: random.Random, dtypes: tuple[str, ...] = DTYPES) -> Dense:
        """Any, four and more options at once of one in two."""
        drawn = _with_large_scores(draw, _drawn(draw, dtypes))
        # why not of large scores: the gradients of a function's arguments may be as large.
        may_have_one = all(drawn["lengths"]) and drawn["scale"] not in _LARGE_SCALES
        function = maybe(draw, 0.1, *FUNCTIONS, "hashed") if may_have_one else None
        same = maybe(draw, 0.15, "batch", "run", "prefill") if not drawn["dropout"] else None
        return cls(**drawn, function=function, reproducible=same)

    @classmethod
    def draw_plain(cls, draw: random.Random, dtypes: tuple[str, ...]) -> Dense:
        """Any that no kernel refuses."""
        drawn = _drawn(draw, dtypes, large=0.0) | {"spans": None, "blocks": None, "holes": False}
        none = {name: max(1, n) for name, n in zip("qk", drawn["lengths"], strict=True)}
        return cls(**drawn | {"lengths": tuple(none.values()), "style": "contiguous"})

    def check(self, memory: Any) -> None:
        """Compare a forward pass, the same with out=, and the gradients with FP64."""
        host, given, options = self._placed(memory)
        options["reproducible"] = self.reproducible
        qkv = [given[name] for name in "qkv"]
        o, lse = cupy_flash.attention(*qkv, return_lse=True, **options)
        back = cupy_flash.attention_backward(given["do"], *qkv, o, lse, dlse=given.get("dlse"), **options)
        # why a place of its own where the memory has one: a caller's out may have any strides
        again = (
            {"out": memory.out(o.shape, o.dtype, style_of("out", self.style))}
            if hasattr(memory, "out")
            else {}
        )
        second = cupy_flash.attention(*qkv, **again, **options)
        memory.synchronize()
        results = numpy_of({"o": o, "lse": lse, **back._replace(dscore=None)._asdict()})
        self._check_tables(host, back.dscore or ())
        np.testing.assert_array_equal(
            results["o"].astype(float), testing.to_numpy(second).astype(float), "the same call, twice"
        )
        testing.assert_within_budget(
            results, *(host[name] for name in "qkv"), do=host["do"], dlse=host.get("dlse"),
            precision=memory.precision, **self.options(host),
        )  # fmt: skip

    def _check_tables(self, host: Mapping[str, np.ndarray], found: Any) -> None:
        """Compare gradients of what a function reads with NumPy's in FP64: the reference has none."""
        if not found:
            return
        wide = {name: x.astype(np.float64) if x.dtype.kind not in "biu" else x for name, x in host.items()}
        exact = self._tables_of_numpy(wide)
        # why: the sums over all pairs cancel, but not their roundings: of o in 16 bits, which NumPy shows;
        # else of delta, which the pairs of a row share.
        is_wide, units_of = self.dtype in WIDE, testing.budget.UNIT_ROUNDOFF
        do, v = (np.abs(wide[n]).reshape(-1, wide[n].shape[-1]).max(0, initial=0) for n in ("do", "v"))
        moved = self._tables_of_numpy(*((wide, do @ v) if is_wide else (host,)))
        share = units_of[self.dtype] if is_wide else 2
        for x, wanted, near in zip(found, exact, moved, strict=True):
            if x is not None:
                coarse = max((x.dtype.name, self.dtype), key=units_of.__getitem__)
                off, change = (np.abs(y.astype(np.float64) - wanted).max(initial=0) for y in (x, near))
                units = 4096 * units_of[coarse] if coarse in WIDE else 2.0**-4
                allowed = share * change + units * max(1.0, np.abs(wanted).max(initial=0))
                assert off <= allowed, f"dscore is off by {off:.2e}"

    def _tables_of_numpy(self, arrays: Mapping[str, np.ndarray], off_delta: float = 0.0) -> Any:
        """The gradients of what a function reads, by NumPy, from a delta that is off."""
        qkv, options = [arrays[name] for name in "qkv"], self.options(arrays)
        with mock.patch.dict(os.environ, {OVERRIDE: "numpy"}):
            o, lse = cupy_flash.attention(*qkv, return_lse=True, **options)
            dlse = arrays.get("dlse")
            if off_delta:
                dlse = np.full(lse.shape, off_delta) + (0 if dlse is None else dlse)
            back = cupy_flash.attention_backward(arrays["do"], *qkv, o, lse, dlse=dlse, **options)
        return back.dscore

    def _placed(self, memory: Any) -> tuple[dict[str, np.ndarray], dict[str, Any], dict[str, Any]]:
        host = self.inputs()
        given = {name: memory.put(name, x, _style_of(name, self.style)) for name, x in host.items()}
        return host, given, self.options(given)


@dataclass(frozen=True, kw_only=True)
class SecondOrder(Dense):
    """Tangents and the derivative of gradients in a direction, or in several at once.

    Attributes
    ----------
    directions : int
        0: one, without an axis of them.
    tangents : tuple of str
        Of what; the others are 0.
    given_jvp : bool
        Whether the hvp gets what the jvp gave.
    """

    directions: int = 0
    tangents: tuple[str, ...] = ("q", "k", "v", "bias", "sinks")
    given_jvp: bool = False

    @classmethod
    def draw(cls, draw: random.Random, dtypes: tuple[str, ...] = DTYPES) -> SecondOrder:
        """Any; functions have no second order in the core, and none in the reference."""
        drawn = _drawn(draw, dtypes, large=0.02)
        if draw.random() < 0.1:  # of 16 bits smaller: second derivatives grow with its square
            scale = _LARGE_SCALES[drawn["dtype"] not in WIDE]
            drawn |= {"scale": scale, "softcap": None, "values": "normal"}
        some = tuple(name for name in ("q", "k", "v", "bias", "sinks") if draw.random() < 0.8)
        return cls(
            **drawn,
            directions=draw.choice((0, 0, 1, 2, 5)),
            tangents=some if {*some} & {*"qkv"} else ("q",),
            given_jvp=draw.random() < 0.3,
        )

    def check(self, memory: Any) -> None:
        """Compare the three of `cupy_flash.derivatives` with FP64."""
        host, given, options = self._placed(memory)
        rng = np.random.default_rng(1)
        shapes = {name: host[name] for name in self.tangents if name in host}
        axis = (self.directions,) * (self.directions > 0)
        dots = {f"d{n}": rng.standard_normal((*axis, *x.shape)).astype(x.dtype) for n, x in shapes.items()}
        along = {
            name: memory.put(f"tangent {name}", x, style_of(name, self.style)) for name, x in dots.items()
        }
        qkv = [given[name] for name in "qkv"]
        (o, lse), both = cupy_flash.derivatives.value_and_jvp(*qkv, **along, **options)
        inputs = [*qkv, o, lse]
        j = cupy_flash.derivatives.jvp(*inputs, **along, **options)
        known = {"jvp": j} if self.given_jvp else {}
        h = cupy_flash.derivatives.hvp(
            given["do"], *inputs, dlse=given.get("dlse"), **known, **along, **options
        )
        memory.synchronize()
        self._compare(host, dots, [
            numpy_of({"o": j[0], "lse": j[1], **h._asdict()}),
            numpy_of({"o": both[0], "lse": both[1]}),
        ], numpy_of({"o": o, "lse": lse}))  # fmt: skip

    def _compare(
        self, host: Mapping[str, Any], dots: Mapping[str, Any], found: list[Any], forward: Any
    ) -> None:
        options, qkv = self.options(host), [host[name] for name in "qkv"]
        testing.assert_within_budget(forward, *qkv, **options)
        for n in range(max(1, self.directions)):
            own = {name: x[n] if self.directions else x for name, x in dots.items()}
            exact = testing.reference_jvp(*qkv, **own, **options)._asdict()
            exact |= testing.reference_hvp(
                host["do"], *qkv, dlse=host.get("dlse"), **own, **options
            )._asdict()
            sizes = largest_score(host, options), largest_term(host, own, options)
            if self.scale in _LARGE_SCALES:
                # why: a weight has the roundings of its score, and as a factor the tangent of it
                tangent = np.abs(exact["lse"]).max(initial=0)
                sizes = (
                    sizes[0],
                    sizes[1] * (1 + testing.budget.ROUNDINGS_PER_SCORE * sizes[0]) * (1 + tangent),
                )
            for results in found:
                some = {name: x[n] if self.directions else x for name, x in results.items()}
                assert_of_second_order(some, exact, self.dtype, *sizes, rows_of_a_key(host, options))


def assert_of_second_order(
    actual: Mapping[str, Any], exact: Mapping[str, Any], dtype: str, largest: float, terms: float, rows: float
) -> None:
    """Fail unless results of second order are within so many roundings of the largest number of them all.

    A weight e^(S - LSE) has the roundings of its score, in units of it: `largest` is the size of one. A
    gradient has one rounding of its `terms`, which may cancel: of a row with one key nothing is left.
    """
    # why of all results: a gradient of a broadcast bias is a sum of as large terms, and may cancel.
    size = max(1.0, *(np.abs(x).max(initial=0) for x in exact.values() if x is not None))
    wide = "float64" if dtype == "float64" else "float32"
    for name, x in actual.items():
        # why the coarser: o of a short dtype is in sums of float32, too
        coarse = max((x.dtype.name, dtype), key=testing.budget.UNIT_ROUNDOFF.__getitem__)
        units = SECOND_ORDER_UNITS.get(coarse, 64) * testing.budget.UNIT_ROUNDOFF[coarse]
        units += testing.budget.ROUNDINGS_PER_SCORE * largest * testing.budget.UNIT_ROUNDOFF[wide]
        allowed = units * size + testing.budget.UNIT_ROUNDOFF[wide] * terms
        error = np.abs(x.astype(np.float64) - exact[name]).max(initial=0)
        if name in ("dk", "dv", "dbias", "dsinks"):
            # why: errors of a row's LSE and delta are its own, and add up over the rows as a random walk does
            elements = x.size if name == "dsinks" else math.prod(x.shape[:-1])
            of_a_key = rows if name in ("dk", "dv") else 1.0
            allowed *= max(1.0, of_a_key, exact["lse"].size / max(1, elements)) ** 0.5
        assert error <= allowed, f"{name} of second order is off by {error:.2e} of {allowed:.2e}"


def largest_term(arrays: Mapping[str, Any], along: Mapping[str, Any], options: Mapping[str, Any]) -> float:
    """How large what a gradient of q or k adds up is: |do| |v|^T, by the scale and the other operand."""
    f = reference.forward(*(arrays[name] for name in "qkv"), testing.Options(**options))

    def sizes(measure: Callable[[Any], Any], *names: str) -> list[float]:
        found = [np.abs(x.astype(float)) for n in names if (x := {**arrays, **along}.get(n)) is not None]
        seen = [x[np.isfinite(x)] for x in found]  # hidden keys may hold anything
        return [float(measure(x)) for x in seen if x.size]

    pairs = arrays["v"].shape[-1] * sum(sizes(np.mean, "do")) * sum(sizes(np.mean, "v", "dv"))
    return (
        float(np.abs(f.scale).max(initial=0)) * pairs * max(sizes(np.max, "q", "k", "dq", "dk"), default=0.0)
    )


def largest_score(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> float:
    """The largest sum of the absolute terms of a score that is not hidden."""
    f = reference.forward(*(arrays[name] for name in "qkv"), testing.Options(**options))
    size = abs(f.scale) * np.abs(f.q) @ np.abs(f.k).swapaxes(-1, -2) + np.abs(f.added)
    return float(np.where(f.keep & np.isfinite(size), size, 0).max(initial=0))


def rows_of_a_key(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> float:
    """The largest sum of the weights of a key: of how many rows it has what is added up."""
    f = reference.forward(*(arrays[name] for name in "qkv"), testing.Options(**options))
    batch, heads, _, keys = f.p.shape
    return float(f.p.sum(2).reshape(batch, heads // f.group, f.group, keys).sum(2).max(initial=0))


@dataclass(frozen=True, kw_only=True)
class Statistics(Dense):
    """Statistics of the weights.

    Attributes
    ----------
    known : bool
        Whether the call gets the lse.
    places : int
        Keys that are listed of each query.
    """

    known: bool = False
    places: int = 8

    @classmethod
    def draw(cls, draw: random.Random, dtypes: tuple[str, ...] = DTYPES) -> Statistics:
        """Any but dropout, which they do not have."""
        drawn = _with_large_scores(draw, _drawn(draw, dtypes, large=0.02)) | {"dropout": 0.0}
        function = maybe(draw, 0.1, *FUNCTIONS) if all(drawn["lengths"]) else None
        return cls(**drawn, function=function, known=draw.random() < 0.5, places=draw.choice((1, 3, 8, 40)))

    def check(self, memory: Any) -> None:
        """Compare with FP64."""
        host, given, options = self._placed(memory)
        own, exact = (
            {name: x for name, x in o.items() if name not in ("dropout", "seed")}
            for o in (options, self.options(host))
        )
        lse = None
        if self.known:
            lse = cupy_flash.attention(*(given[name] for name in "qkv"), return_lse=True, **options)[1]
        made = cupy_flash.attention_statistics(given["q"], given["k"], lse, top_k=self.places, **own)
        memory.synchronize()
        assert_close(made, host["q"], host["k"], self.places, **exact)


@dataclass(frozen=True, kw_only=True)
class MergeOfTwo(Dense):
    """Keys before a cut, and the others, merged: attention over all of them, sinks with the first part."""

    cut: int = 1

    @classmethod
    def draw(cls, draw: random.Random, dtypes: tuple[str, ...] = DTYPES) -> MergeOfTwo:
        """Of what is exact enough that two roundings of o are none."""
        drawn = _drawn(draw, dtypes, large=0.02) | {
            "dtype": draw.choice(("float32", "float64")), "dropout": 0.0, "spans": None, "blocks": None,
            "rank": 4, "layout": "bhsd", "bias_dtype": None, "batch": draw.randint(1, 2),
        }  # fmt: skip
        return cls(**drawn, cut=draw.randint(0, drawn["lengths"][1]))

    def check(self, memory: Any) -> None:
        """Compare with FP64."""
        host, given, options = self._placed(memory)
        offset = testing.Options(
            causal=self.causal, window=self.window, align=self.align, alibi_slopes=host.get("alibi_slopes")
        ).offset(*self.lengths)
        parts: list[Any] = []
        for keys, moved in ((slice(0, self.cut), 0), (slice(self.cut, None), self.cut)):
            own = options | {"align": offset - moved}
            if moved or keys.start:
                own.pop("sinks", None)
            own |= {n: own[n][..., keys] for n in ("mask", "bias") if n in own and own[n].shape[-1] > 1}
            q, k, v = (given[name] for name in "qkv")
            parts += cupy_flash.attention(q, k[:, :, keys], v[:, :, keys], return_lse=True, **own)
        if self.cut == 0 and "sinks" in options:
            parts[2:] = cupy_flash.attention(q, k, v, return_lse=True, **(options | {"sinks": None}))
        for o, lse in (parts[:2], parts[2:]):  # of a row that saw nothing o may hold anything
            o[...] = np.where(np.isneginf(lse)[..., None], np.nan, o)
        o, lse = cupy_flash.merge(*parts)
        testing.assert_within_budget(
            numpy_of({"o": o, "lse": lse}), *(host[name] for name in "qkv"),
            precision=memory.precision, **self.options(host),
        )  # fmt: skip


def _drawn(draw: random.Random, dtypes: tuple[str, ...], large: float = 0.06) -> dict[str, Any]:
    """Fields of a case, each by itself; then what does not go together is set right."""
    rank = draw.choice((4, 4, 4, 4, 3, 2))
    dims = head_dim(draw)
    is_large = draw.random() < large
    lengths = many(draw) if is_large else several(draw)
    dense = draw.random() < 0.5  # four and more options
    often = 0.4 if dense else 0.12
    made: dict[str, Any] = {
        "dtype": dtype_of(draw, dtypes),
        "batch": 1 if is_large or rank < 4 else draw.choice((1, 1, 2, 3)),
        "heads": (1, 1) if rank == 2 else (draw.choice(((1, 1), (2, 1))) if is_large else heads(draw)),
        "lengths": lengths,
        "head_dims": (draw.choice(HEAD_DIMS[:9]),) * 2 if is_large else dims,
        "mask": maybe(draw, often, *BROADCASTS),
        "bias": maybe(draw, often, *BROADCASTS),
        "bias_dtype": maybe(draw, 0.3, *DTYPES),
        "scale": maybe(draw, often, 0.3, -0.2),
        "softcap": maybe(draw, often, 0.5, 3.0, 20.0),
        "alibi": maybe(draw, often, "h", "bh"),
        "sinks": draw.random() < often,
        "dropout": maybe(draw, 0.02 if is_large else often / 2, 0.1, 0.5) or 0.0,
        "layout": draw.choice(("bhsd", "bshd")),
        "rank": rank,
        "dlse": draw.random() < 0.4,
        "style": style(draw),
        "holes": draw.random() < 0.2,
        "without_sinks": draw.random() < 0.2,
        # why few keys: the budget takes sums of many equal terms for random walks, and each step errs alike
        "values": draw.choice(("normal", "onehot")) if max(lengths) <= 70 else "normal",
        "spans": spans(draw, often / 2),
        "blocks": blocks(draw, often / 3),
        **band(draw, lengths),
    }  # fmt: skip
    made |= affordable(made["batch"], made["heads"], lengths)
    # why: one-hot rows have nearly one o, rounded alike in 16 bits, and dsinks adds its error up over rows
    if made["dtype"] in ("float16", "bfloat16") and made["sinks"]:
        made["values"] = "normal"
    if 0 in lengths:
        made["blocks"] = None  # what makes random blocks has none to choose from
    return aligned(draw, made)


def _with_large_scores(draw: random.Random, made: dict[str, Any]) -> dict[str, Any]:
    """Sometimes with a scale that makes the LSE of many rows too large for weights, which are summed again.

    Not float16, whose gradients overflow, nor with sinks, whose gradients have an error budget of 0 then.
    """
    if made["dtype"] == "float16" or made["sinks"] or draw.random() > 0.05:
        return made
    return made | {"scale": _LARGE_SCALES[0], "softcap": None, "values": "normal"}


def _style_of(name: str, given: str) -> str:
    """How an array may lie: blocks are in one piece."""
    return "contiguous" if name in ("table", "bits") else style_of(name, given)

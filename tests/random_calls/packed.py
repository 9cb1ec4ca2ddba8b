"""Calls over packed sequences, each held to the same sequences in a padded batch."""

from __future__ import annotations

import dataclasses
import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import cupy_flash
from cupy_flash import derivatives, testing
from cupy_flash.testing.reference import keep
from tests.block_cases import BlockCase
from tests.cases import DTYPES, Case, numpy_dtype, unusual
from tests.public import with_function, with_mask
from tests.span_cases import SpanCase
from tests.statistic_checks import assert_close

from .dense import FUNCTIONS, assert_of_second_order, largest_score, largest_term, rows_of_a_key
from .edges import (
    HEAD_DIMS,
    affordable,
    band,
    blocks,
    dtype_of,
    head_dim,
    heads,
    length,
    maybe,
    spans,
    style,
    style_of,
)
from .memory import numpy_of

__all__ = ["Packed", "PackedStatistics"]

OVER_PAIRS = ("bhqk", "1hqk", "b11k", "1111", "b1q1")
ONE_PIECE = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "ragged_mask", "table", "bits")


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A call of attention_varlen and attention_varlen_backward, or of second order.

    Attributes
    ----------
    lengths_q, lengths_k : tuple of int
        Of the sequences.
    spare : int
        Rows of no sequence at the end.
    used_k : bool
        Whether keys end before their rows do (seqused_k).
    used_q : bool
        The same of queries.
    ragged : bool
        Whether there is a mask of all sequences in a row.
    longest : bool
        Whether the call is told the longest lengths.
    spans, blocks, function
        As of `Dense`, over the longest lengths.
    second : bool
        Whether tangents and the derivative of gradients are computed, not gradients.
    """

    dtype: str = "float32"
    heads: tuple[int, int] = (2, 2)
    head_dims: tuple[int, int] = (32, 32)
    lengths_q: tuple[int, ...] = (5,)
    lengths_k: tuple[int, ...] = (5,)
    spare: int = 0
    used_k: bool = False
    used_q: bool = False
    ragged: bool = False
    longest: bool = False
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    align: str | int | None = "bottom_right"
    mask: str | None = None
    spans: tuple[bool, int, str] | None = None
    blocks: tuple[int, int, str] | None = None
    function: str | None = None
    bias: str | None = None
    scale: float | None = None
    softcap: float | None = None
    alibi: str | None = None
    sinks: bool = False
    dropout: float = 0.0
    dlse: bool = False
    style: str = "padded"
    reproducible: str | None = None
    second: bool = False

    def __str__(self) -> str:
        return unusual(self)

    @classmethod
    def draw(cls, draw: random.Random, dtypes: tuple[str, ...] = DTYPES) -> Packed:
        """Any; some sequences are empty, and some calls have one of more than 1024 rows."""
        count = draw.choice((1, 2, 3, 3, 5))
        large = draw.random() < 0.03
        lengths_q = [draw.choice((0, 1, length(draw), length(draw))) for _ in range(count)]
        lengths_k = [draw.choice((0, 1, length(draw), length(draw))) for _ in range(count)]
        if large:
            lengths_q, lengths_k = [1025, 3][:count], [1024, 160][:count]
        if draw.random() < 0.4:
            lengths_k = lengths_q
        longest = (max(lengths_q), max(lengths_k))
        of = affordable(1, (1, 1) if large else heads(draw), (count * longest[0], longest[1]))["heads"]
        second = not large and draw.random() < 0.25
        ragged = not second and draw.random() < 0.15
        often = 0.4 if draw.random() < 0.5 else 0.12
        used_k = draw.random() < 0.3
        alibi = maybe(draw, often, "h", "bh")
        dropout = maybe(draw, often / 2, 0.1, 0.5) or 0.0
        some = not ragged and min(longest) > 0
        return cls(
            dtype=dtype_of(draw, dtypes),
            heads=of,
            head_dims=(draw.choice(HEAD_DIMS[:9]),) * 2 if large else head_dim(draw),
            lengths_q=tuple(lengths_q),
            lengths_k=tuple(lengths_k),
            spare=draw.choice((0, 0, 3)),
            used_k=used_k,
            used_q=not second and draw.random() < 0.15,
            ragged=ragged,
            longest=draw.random() < 0.3,
            **band(draw, longest),
            mask=None if ragged else maybe(draw, often, *OVER_PAIRS),
            spans=spans(draw, often / 2) if some else None,
            blocks=blocks(draw, often / 3) if some else None,
            function=maybe(draw, 0.1, *FUNCTIONS) if some and not second else None,
            # why not with ALiBi: where sequences differ, that is a bias of the padded batch
            bias=None if alibi else maybe(draw, often, *OVER_PAIRS),
            scale=maybe(draw, often, 0.3, -0.2),
            softcap=maybe(draw, often, 0.5, 20.0),
            alibi=alibi,
            sinks=draw.random() < often,
            dropout=dropout,
            dlse=draw.random() < 0.4,
            style=style(draw),
            reproducible=None if dropout or second else maybe(draw, 0.15, "batch", "run", "prefill"),
            second=second,
        )

    def inputs(self) -> dict[str, np.ndarray]:
        """All arrays of the call."""
        rng = np.random.default_rng(zlib.crc32(str(self).encode()))
        dtype, acc = numpy_dtype(self.dtype), "float64" if self.dtype == "float64" else "float32"
        (heads_q, heads_k), (dim, dim_v) = self.heads, self.head_dims
        rows_q, rows_k = (sum(n) + self.spare for n in (self.lengths_q, self.lengths_k))
        shapes = {"q": (rows_q, heads_q, dim), "k": (rows_k, heads_k, dim),
                  "v": (rows_k, heads_k, dim_v), "do": (rows_q, heads_q, dim_v)}  # fmt: skip
        made = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
        if self.dlse:
            made["dlse"] = rng.standard_normal((heads_q, rows_q)).astype(acc)
        batch = len(self.lengths_q)
        for name, lengths in (("q", self.lengths_q), ("k", self.lengths_k)):
            made[f"cu_seqlens_{name}"] = np.cumsum((0, *lengths), dtype=np.int32)
            if getattr(self, f"used_{name}"):
                made[f"seqused_{name}"] = np.int32([rng.integers(0, n + 1) for n in lengths])
        axes = {"b": batch, "h": heads_q, "q": max(self.lengths_q), "k": max(self.lengths_k), "1": 1}
        if self.mask is not None:
            made["mask"] = rng.random([axes[axis] for axis in self.mask]) < 0.7
        if self.bias is not None:
            made["bias"] = rng.standard_normal([axes[axis] for axis in self.bias]).astype(dtype)
        if self.alibi is not None:
            made["alibi_slopes"] = rng.random([axes[axis] for axis in self.alibi]).astype(acc)
        if self.sinks:
            made["sinks"] = rng.standard_normal(heads_q).astype(acc)
        padded = Case(
            dtype=self.dtype, batch=batch, heads=self.heads, lengths=(axes["q"], axes["k"]), head_dims=(1, 1)
        )
        if self.spans is not None:
            made["spans"] = SpanCase(padded, *self.spans).inputs()["spans"]
        if self.blocks is not None:
            found = BlockCase(padded, self.blocks[:2], self.blocks[2]).inputs()
            made |= {name: found[name] for name in ("table", "bits")}
        if self.function is not None:
            made |= {f"bound[{n}]": x for n, x in enumerate(FUNCTIONS[self.function][1](rng, padded))}
        if self.ragged:
            of_q, of_k = self._used(made)
            made["ragged_mask"] = rng.random(int((of_q * of_k).sum())) < 0.7
        return made

    def _used(self, arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Queries and keys in use of each sequence."""
        every = {"q": np.array(self.lengths_q), "k": np.array(self.lengths_k)}
        return every["q"] if "seqused_q" not in arrays else arrays["seqused_q"].astype(int), (
            every["k"] if "seqused_k" not in arrays else arrays["seqused_k"].astype(int)
        )

    def options(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments, with these arrays."""
        taken = ("mask", "bias", "alibi_slopes", "sinks", "seqused_q", "seqused_k")
        made = {name: arrays[name] for name in taken if name in arrays}
        if self.ragged:
            made["mask"] = cupy_flash.RaggedMask(arrays["ragged_mask"])
        made = self._with_masks(made, arrays)
        made |= {name: getattr(self, name) for name in ("causal", "window", "align", "scale", "softcap",
                                                        "dropout", "reproducible")}  # fmt: skip
        if self.longest:
            made |= {"max_seqlen_q": max(self.lengths_q), "max_seqlen_k": max(self.lengths_k)}
        return made | {"seed": 77 if self.dropout else None}

    def _with_masks(self, options: dict[str, Any], arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The options with spans, blocks and the function."""
        if self.spans is not None:
            options = with_mask(options, cupy_flash.Spans(arrays["spans"]))
        if self.blocks is not None:
            options = with_mask(options, cupy_flash.BlockMask(arrays["table"], arrays["bits"]))
        if self.function is not None:
            bound = [x for name, x in arrays.items() if name.startswith("bound")]
            options = with_function(options, FUNCTIONS[self.function][0], bound)
        return options

    def _placed(self, memory: Any, host: Mapping[str, np.ndarray]) -> dict[str, Any]:
        return {
            n: memory.put(n, x, "contiguous" if n in ONE_PIECE else style_of(n, self.style))
            for n, x in host.items()
        }

    def check(self, memory: Any) -> None:
        """Compare both passes with FP64."""
        host = self.inputs()
        given = self._placed(memory, host)
        qkv, cuts = [given[n] for n in "qkv"], [given["cu_seqlens_q"], given["cu_seqlens_k"]]
        options = self.options(given)
        if self.second:
            options.pop("reproducible")
            return self._check_second(memory, host, given, options)
        o, lse = cupy_flash.attention_varlen(*qkv, *cuts, return_lse=True, **options)
        back = cupy_flash.attention_varlen_backward(
            given["do"], *qkv, o, lse, *cuts, dlse=given.get("dlse"), **options
        )
        found = {"o": o, "lse": lse, **back._replace(dscore=None)._asdict()}
        arrays, how = self._in_a_batch(host)
        testing.assert_within_budget(self._results(host, found), precision=memory.precision, **arrays, **how)
        return None

    def _check_second(
        self, memory: Any, host: dict[str, np.ndarray], given: dict[str, Any], options: dict[str, Any]
    ) -> None:
        """Compare tangents and the derivative of gradients, along random tangents of all, with FP64."""
        rng = np.random.default_rng(1)
        named = [name for name in ("q", "k", "v", "bias", "sinks") if name in host]
        dots = {f"d{n}": rng.standard_normal(host[n].shape).astype(host[n].dtype) for n in named}
        along = {n: memory.put(f"tangent {n}", x, style_of(n, self.style)) for n, x in dots.items()} | options
        along |= {n: given[n] for n in ("cu_seqlens_q", "cu_seqlens_k")}
        qkv = [given[n] for n in "qkv"]
        (o, lse), both = derivatives.value_and_jvp(*qkv, **along)
        j = derivatives.jvp(*qkv, o, lse, **along)
        h = derivatives.hvp(given["do"], *qkv, o, lse, dlse=given.get("dlse"), **along)
        arrays, how = self._in_a_batch(host)
        do, dlse = arrays.pop("do"), arrays.pop("dlse")
        tangents = {n: self._padded(host, dots[n], n[1:]) if n[1:] in "qkv" else x for n, x in dots.items()}
        testing.assert_within_budget(self._results(host, {"o": o, "lse": lse}), **arrays, **how)
        exact = testing.reference_jvp(**arrays, **tangents, **how)._asdict()
        exact |= testing.reference_hvp(do, **arrays, dlse=dlse, **tangents, **how)._asdict()
        empty = dots.get("dsinks", 0.0)  # the lse of a row that sees no key is that of its sink
        for found in ({"o": j[0], "lse": j[1], **h._asdict()}, {"o": both[0], "lse": both[1]}):
            made = self._results(host, found, empty)
            sizes = largest_score(arrays, how), largest_term({**arrays, "do": do}, tangents, how)
            assert_of_second_order(made, exact, self.dtype, *sizes, rows_of_a_key(arrays, how))

    # ---- the same in a padded batch

    def _places(self, host: Mapping[str, np.ndarray], which: str) -> tuple[np.ndarray, np.ndarray]:
        """Where each row in use stands in the padded batch (sequence, place), and in the packed one."""
        used = self._used(host)[which == "k"]
        places = np.array([(b, i) for b, n in enumerate(used) for i in range(n)], int).reshape(-1, 2).T
        return places, host[f"cu_seqlens_{which}"][places[0]] + places[1]

    def _padded(self, host: Mapping[str, np.ndarray], x: np.ndarray, name: str) -> np.ndarray:
        """Rows (rows, heads, dim) as (sequences, heads, longest, dim); 0 where there are none."""
        which = "k" if name.lstrip("d") in ("k", "v") else "q"
        (b, i), at = self._places(host, which)
        longest = max(self.lengths_k if which == "k" else self.lengths_q)
        made = np.zeros((len(self.lengths_q), longest, *x.shape[1:]), x.dtype)
        made[b, i] = x[at]
        return made.swapaxes(1, 2)

    def _padded_rows(self, host: Mapping[str, np.ndarray], x: np.ndarray, empty: Any) -> np.ndarray:
        """The same of (heads, rows)."""
        (b, i), at = self._places(host, "q")
        made = np.empty((len(self.lengths_q), self.heads[0], max(self.lengths_q)), x.dtype)
        made[:] = np.reshape(empty, (1, -1, 1))
        made[b, :, i] = x.T[at]
        return made

    def _in_a_batch(self, host: Mapping[str, np.ndarray]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arrays and options of the call of a padded batch."""
        arrays: dict[str, Any] = {n: self._padded(host, host[n], n) for n in ("q", "k", "v")}
        # why not `_padded` of do: its rows are those of q, by whose name they go
        arrays["do"] = self._padded(host, host["do"], "q")
        arrays["dlse"] = self._padded_rows(host, host["dlse"], 0.0) if self.dlse else None
        of_q, of_k = self._used(host)
        options: dict[str, Any] = {
            "scale": self.scale, "softcap": self.softcap, "dropout": self.dropout, "sinks": host.get("sinks"),
            "seed": 77 if self.dropout else None, "mask": self._pairs(host, of_q, of_k),
            "bias": host.get("bias"),
        }  # fmt: skip
        if self.alibi is not None:
            options["bias"] = self._distances(host, of_q, of_k)
        return arrays, options | {"score": self._with_masks({}, host).get("score")}

    def _results(
        self, host: Mapping[str, np.ndarray], found: Mapping[str, Any], empty: Any = None
    ) -> dict[str, np.ndarray]:
        """Results as of a padded batch; those of rows of no sequence have to be 0."""
        made = numpy_of(found)
        for name in made.keys() & {"o", "dq", "dk", "dv"}:
            at = self._places(host, "k" if name in ("dk", "dv") else "q")[1]
            rest = np.delete(made[name], at, axis=0)
            assert not rest.astype(float).any(), f"rows of {name} of no sequence are not 0"
            made[name] = self._padded(host, made[name], "k" if name in ("dk", "dv") else "q")
        if "lse" in made:
            nothing = host["sinks"] if self.sinks else -np.inf
            made["lse"] = self._padded_rows(host, made["lse"], nothing if empty is None else empty)
        return made

    def _pairs(self, host: Mapping[str, np.ndarray], of_q: np.ndarray, of_k: np.ndarray) -> np.ndarray:
        """Which pairs are seen, of the padded batch."""
        full = len(of_q), self.heads[0], max(self.lengths_q), max(self.lengths_k)
        seen, at = np.zeros(full, bool), 0
        mask = keep(testing.Options(mask=(host.get("mask"), self._with_masks({}, host).get("mask"))), full)
        for b, (n, m) in enumerate(zip(of_q.tolist(), of_k.tolist(), strict=True)):
            chosen = testing.Options(causal=self.causal, window=self.window, align=self._align(n, m))
            seen[b, :, :n, :m] = keep(chosen, (1, full[1], n, m))[0] & mask[b, :, :n, :m]
            if self.ragged:
                seen[b, :, :n, :m] &= host["ragged_mask"][at : at + n * m].reshape(n, m)
                at += n * m
        return seen

    def _align(self, queries: int, keys: int) -> int:
        return testing.Options(align=self.align).offset(queries, keys)

    def _distances(self, host: Mapping[str, np.ndarray], of_q: np.ndarray, of_k: np.ndarray) -> np.ndarray:
        """ALiBi of each sequence as a bias."""
        made = np.zeros((len(of_q), self.heads[0], max(self.lengths_q), max(self.lengths_k)))
        slopes = np.broadcast_to(host["alibi_slopes"], made.shape[:2]).astype(float)
        i, j = np.arange(made.shape[2])[:, None], np.arange(made.shape[3])
        for b, (n, m) in enumerate(zip(of_q.tolist(), of_k.tolist(), strict=True)):
            made[b] = -slopes[b][:, None, None] * np.abs(i + self._align(n, m) - j)
        return made


@dataclass(frozen=True, kw_only=True)
class PackedStatistics(Packed):
    """Statistics of the weights of packed sequences; `known` and `places` as of `Statistics`."""

    known: bool = False
    places: int = 8

    @classmethod
    def draw(cls, draw: random.Random, dtypes: tuple[str, ...] = DTYPES) -> PackedStatistics:
        """Any but what they do not have."""
        plain = dataclasses.asdict(Packed.draw(draw, dtypes))
        none = {"dropout": 0.0, "dlse": False, "reproducible": None, "second": False}
        return cls(**plain | none, known=draw.random() < 0.5, places=draw.choice((1, 3, 8, 40)))

    def check(self, memory: Any) -> None:
        """Compare with FP64."""
        host = self.inputs()
        given = self._placed(memory, host)
        options = self.options(given) | {n: given[n] for n in ("cu_seqlens_q", "cu_seqlens_k")}
        lse = None
        if self.known:
            lse = cupy_flash.attention_varlen(*(given[n] for n in "qkv"), return_lse=True, **options)[1]
        for name in ("dropout", "seed", "reproducible"):
            options.pop(name)
        made = cupy_flash.attention_statistics(given["q"], given["k"], lse, top_k=self.places, **options)
        arrays, how = self._in_a_batch(host)
        padded = {}
        for name, x in numpy_of(made._asdict()).items():
            which = "k" if name in ("key_sum", "key_max") else "q"
            (b, i), at = self._places(host, which)
            nothing = -1 if name == "top_keys" else 0
            rest = np.delete(x, at, axis=1)
            assert (rest == nothing).all(), f"{name} has numbers of no sequence"
            longest = max(self.lengths_k if which == "k" else self.lengths_q)
            padded[name] = np.full(
                (len(self.lengths_q), self.heads[0], longest, *x.shape[2:]), nothing, x.dtype
            )
            padded[name][b, :, i] = x[:, at].swapaxes(0, 1)
        own = {n: x for n, x in how.items() if n not in ("dropout", "seed")}
        assert_close(made._replace(**padded), arrays["q"], arrays["k"], self.places, **own)

"""Calls over packed sequences, each held to the same sequences in a padded batch."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import cupy_flash
from bench.machine.blas import one_thread
from cupy_flash import testing
from cupy_flash.testing.reference import keep
from tests.cases import DTYPES, numpy_dtype, unusual

from .edges import HEAD_DIMS, affordable, band, head_dim, heads, length, maybe, style
from .memory import numpy_of

__all__ = ["Packed"]

OVER_PAIRS = ("bhqk", "1hqk", "b11k", "1111", "b1q1")


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A call of attention_varlen and attention_varlen_backward.

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
    bias: str | None = None
    scale: float | None = None
    softcap: float | None = None
    alibi: str | None = None
    sinks: bool = False
    dropout: float = 0.0
    dlse: bool = False
    style: str = "padded"
    reproducible: str | None = None

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
        ragged = draw.random() < 0.15
        often = 0.4 if draw.random() < 0.5 else 0.12
        used_k = draw.random() < 0.3
        alibi = maybe(draw, often, "h", "bh")
        dropout = maybe(draw, often / 2, 0.1, 0.5) or 0.0
        return cls(
            dtype=draw.choice(dtypes),
            heads=of,
            head_dims=(draw.choice(HEAD_DIMS[:9]),) * 2 if large else head_dim(draw),
            lengths_q=tuple(lengths_q),
            lengths_k=tuple(lengths_k),
            spare=draw.choice((0, 0, 3)),
            used_k=used_k,
            used_q=draw.random() < 0.15,
            ragged=ragged,
            longest=draw.random() < 0.3,
            **band(draw, longest),
            mask=None if ragged else maybe(draw, often, *OVER_PAIRS),
            # why not with ALiBi: where sequences differ, that is a bias of the padded batch
            bias=None if alibi else maybe(draw, often, *OVER_PAIRS),
            scale=maybe(draw, often, 0.3, -0.2),
            softcap=maybe(draw, often, 0.5, 20.0),
            alibi=alibi,
            sinks=draw.random() < often,
            dropout=dropout,
            dlse=draw.random() < 0.4,
            style=style(draw),
            reproducible=None if dropout else maybe(draw, 0.15, "batch"),
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
        taken = ("mask", "bias", "alibi_slopes", "sinks", "ragged_mask", "seqused_q", "seqused_k")
        made = {name: arrays[name] for name in taken if name in arrays}
        made |= {name: getattr(self, name) for name in ("causal", "window", "align", "scale", "softcap",
                                                        "dropout", "reproducible")}  # fmt: skip
        if self.longest:
            made |= {"max_seqlen_q": max(self.lengths_q), "max_seqlen_k": max(self.lengths_k)}
        return made | {"seed": 77 if self.dropout else None}

    def check(self, memory: Any) -> None:
        """Compare both passes with FP64."""
        host = self.inputs()
        one_piece = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "ragged_mask")
        given = {n: memory.put(n, x, "contiguous" if n in one_piece else self.style) for n, x in host.items()}
        qkv, cuts = [given[n] for n in "qkv"], [given["cu_seqlens_q"], given["cu_seqlens_k"]]
        options = self.options(given)
        o, lse = cupy_flash.attention_varlen(*qkv, *cuts, return_lse=True, **options)
        back = cupy_flash.attention_varlen_backward(
            given["do"], *qkv, o, lse, *cuts, dlse=given.get("dlse"), **options
        )
        results = numpy_of({"o": o, "lse": lse, **back._asdict()})
        with one_thread():
            self._compare(host, results)

    def _compare(self, host: dict[str, np.ndarray], results: dict[str, np.ndarray]) -> None:
        of_q, of_k = self._used(host)
        cuts = {"q": host["cu_seqlens_q"], "k": host["cu_seqlens_k"]}
        used, longest = {"q": of_q, "k": of_k}, {"q": max(self.lengths_q), "k": max(self.lengths_k)}

        def rows(which: str) -> tuple[np.ndarray, np.ndarray]:
            """Where each row in use stands in the padded batch (sequence, place), and in the packed one."""
            places = [(b, i) for b, n in enumerate(used[which]) for i in range(n)]
            padded = np.array(places, int).reshape(-1, 2).T
            return padded, cuts[which][padded[0]] + padded[1]

        def padded(x: np.ndarray, which: str, fill: Any = 0) -> np.ndarray:
            """Rows (rows, heads, dim) as (sequences, heads, longest, dim); those of no sequence are 0."""
            (b, i), at = rows(which)
            made = np.full((len(of_q), longest[which], *x.shape[1:]), fill, x.dtype)
            made[b, i] = x[at]
            rest = np.delete(x, at, axis=0)
            assert not rest.astype(float).any(), "rows of no sequence are not 0"
            return made.swapaxes(1, 2)

        spaces = {"o": "q", "dq": "q", "dk": "k", "dv": "k"}
        actual = {name: padded(results[name], spaces[name]) for name in spaces}
        inputs = {}
        for name in ("q", "k", "v", "do"):
            which = "q" if name in ("q", "do") else "k"
            (b, i), at = rows(which)
            x = np.zeros((len(of_q), longest[which], *host[name].shape[1:]), host[name].dtype)
            x[b, i] = host[name][at]
            inputs[name] = x.swapaxes(1, 2)
        empty = host["sinks"] if self.sinks else np.full(self.heads[0], -np.inf, results["lse"].dtype)
        actual["lse"] = np.repeat(np.repeat(empty[None, :, None], len(of_q), 0), longest["q"], 2)
        (b, i), at = rows("q")
        actual["lse"][b, :, i] = results["lse"].T[at]
        dlse = None
        if self.dlse:
            dlse = np.zeros(actual["lse"].shape, actual["lse"].dtype)
            dlse[b, :, i] = host["dlse"].T[at]
        actual |= {name: results[name] for name in ("dbias", "dsinks") if name in results}
        options: dict[str, Any] = {
            "scale": self.scale, "softcap": self.softcap, "dropout": self.dropout, "sinks": host.get("sinks"),
            "seed": 77 if self.dropout else None, "mask": self._pairs(host, of_q, of_k),
            "bias": host.get("bias"),
        }  # fmt: skip
        if self.alibi is not None:
            options["bias"] = self._distances(host, of_q, of_k)
        testing.assert_within_budget(
            actual, *(inputs[n] for n in "qkv"), do=inputs["do"], dlse=dlse, **options
        )

    def _pairs(self, host: Mapping[str, np.ndarray], of_q: np.ndarray, of_k: np.ndarray) -> np.ndarray:
        """Which pairs are seen, of the padded batch."""
        full = len(of_q), self.heads[0], max(self.lengths_q), max(self.lengths_k)
        seen, at = np.zeros(full, bool), 0
        mask = np.broadcast_to(host["mask"], full) if "mask" in host else np.ones(full, bool)
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

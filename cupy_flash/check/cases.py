"""Cases of a check: their inputs, their calls, and the comparison of their results with FP64."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.random import default_rng  # why at import: NumPy loads it lazily, which can lose a Ctrl-C

from .. import api, blocks, functions, spans, testing, varlen
from ..call.arrays import numpy_dtype
from ..call.compound import QuantizedArray
from ..call.operands import FLOAT8
from ..testing import Verdict
from .places import Place

__all__ = ["Case", "Dense", "Packed", "drawing"]

# A score with a table per head and distance, and a mask that hides keys of the past at regular distances.
BY_DISTANCE = functions.score(lambda s, _b, h, i, j, table: s + table[h, abs(i - j)])
STRIDED = functions.mask(lambda _b, h, i, j: (j <= i) & ((i - j) % (h + 2) != 1))


class Case(Protocol):
    """One call of the library, and its backward call if it has one."""

    @property
    def kind(self) -> str:
        """One of "primitive", "forward", "backward", "decode", "second order"."""

    def inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Make the inputs, as NumPy arrays."""

    def run(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Call the library with inputs on the device; return results by name."""

    def judge(
        self, host: Mapping[str, Any], results: Mapping[str, np.ndarray], place: Place
    ) -> list[Verdict]:
        """Compare with FP64."""


def drawing(case: Case, seed: int) -> np.random.Generator:
    """The random generator of a case, seeded by the seed and the description of the case."""
    return default_rng((seed, zlib.crc32(str(case).encode())))


def precision_of(dtype: str, asked: str | None, place: Place) -> str | None:
    """The precision for the error budget: the one of the call, or the default of the device."""
    if dtype == FLOAT8:
        return "e4m3" if place.on_gpu else None
    return asked or ("tf32x3" if dtype == "float32" and place.on_gpu else None)


def accumulator(dtype: str) -> str:
    """The dtype of lse, sinks and slopes."""
    return "float64" if dtype == "float64" else "float32"


def named(options: Mapping[str, Any]) -> list[str]:
    """Describe options for the name of a case: "name" if True, else "name=value"."""
    return [name if value is True else f"{name}={value}" for name, value in options.items() if name != "seed"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Dense:
    """A case that calls attention, and attention_backward if kind is "backward"."""

    kind: str = "forward"  # {"forward", "backward"}
    dtype: str = "float16"  # dtype of q, k and v
    # Heads and lengths of q and of k.
    heads: tuple[int, int] = (4, 2)
    lengths: tuple[int, int] = (200, 200)
    head_dims: tuple[int, int] = (64, 64)  # head dims of q and of v
    # Array options: any of bias, mask, spans, blocks, score, mask function, sinks, alibi_slopes.
    arrays: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)  # all other options

    def __str__(self) -> str:
        dims = "/".join(map(str, dict.fromkeys(self.head_dims)))
        words = [f"{self.kind} {self.dtype}", f"head dim {dims}", *named(self.options), *self.arrays]
        if self.heads != (4, 2):
            words.append("heads {}/{}".format(*self.heads))
        if self.lengths != (200, 200):
            words.append("{}x{}".format(*self.lengths))
        return ", ".join(words)

    def inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Make the arrays of the call."""
        (heads_q, heads_k), (queries, keys), (dim, dim_v) = self.heads, self.lengths, self.head_dims
        shapes = {"q": (heads_q, queries, dim), "k": (heads_k, keys, dim), "v": (heads_k, keys, dim_v)}
        if self.kind == "backward":
            shapes["do"] = (heads_q, queries, dim_v)
        dtype = numpy_dtype(self.dtype)
        made = {name: rng.standard_normal((1, *shape)).astype(dtype) for name, shape in shapes.items()}
        if self.options.get("layout") == "bshd":
            made = {name: np.ascontiguousarray(x.swapaxes(1, 2)) for name, x in made.items()}
        if self.dtype == FLOAT8:
            for name in "qkv":
                made[f"{name}_scale"] = np.exp2(rng.uniform(-1, 1, heads_k)).astype(np.float32)
            # why float16: every library has this dtype
            made["out"] = np.zeros((1, heads_q, queries, dim_v), np.float16)
        return made | self._extra(rng)

    def _extra(self, rng: np.random.Generator) -> dict[str, Any]:
        """Make the array options."""
        heads, (queries, keys) = self.heads[0], self.lengths
        acc = accumulator(self.dtype)
        makers: dict[str, Callable[[], dict[str, Any]]] = {
            "bias": lambda: {"bias": rng.standard_normal((1, heads, queries, keys)).astype(
                numpy_dtype(self.dtype))},
            "mask": lambda: {"mask": rng.random((1, 1, queries, keys)) < 0.7},
            "spans": lambda: {"mask": spans.documents([keys // 3, keys // 2, keys - keys // 3 - keys // 2])},
            "blocks": lambda: {"mask": blocks.block_mask(
                lambda _b, _h, i, j: (i >= j) & (i - j < 90), None, None, queries, keys)},
            "score": lambda: {"score": BY_DISTANCE(rng.standard_normal((heads, keys)).astype(acc))},
            "mask function": lambda: {"mask": STRIDED()},
            "sinks": lambda: {"sinks": rng.standard_normal(heads).astype(acc)},
            "alibi_slopes": lambda: {"alibi_slopes": rng.random(heads).astype(acc)},
        }  # fmt: skip
        made: dict[str, Any] = {}
        for name in self.arrays:
            made |= makers[name]()
        return made

    def run(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Call the library."""
        rest, (q, k, v) = _split_qkv(given)
        do, out = rest.pop("do", None), rest.pop("out", None)
        options: dict[str, Any] = {**self.options, **rest}
        o, lse = api.attention(q, k, v, return_lse=True, out=out, **options)
        results = {"o": o, "lse": lse}
        if do is not None:
            results |= api.attention_backward(do, q, k, v, o, lse, **options)._asdict()
        return results

    def judge(
        self, host: Mapping[str, Any], results: Mapping[str, np.ndarray], place: Place
    ) -> list[Verdict]:
        """Compare with FP64."""
        given = {name: x for name, x in host.items() if name != "out"} | self.options
        precision = precision_of(self.dtype, given.pop("precision", None), place)
        given.pop("reproducible", None)
        return testing.error_budget(results, **given, precision=precision)


def _split_qkv(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Split off q, k and v, as QuantizedArray if they have scales; uint8 holds the bits of float8."""
    rest = dict(given)
    qkv = [rest.pop(name) for name in "qkv"]
    scales = [rest.pop(f"{name}_scale", None) for name in "qkv"]
    if scales[0] is not None:
        qkv = [QuantizedArray(x, scale) for x, scale in zip(qkv, scales, strict=True)]
    return rest, qkv


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
    """A case that calls attention_varlen, and attention_varlen_backward if kind is "backward"."""

    # As in `Dense`, but for the lengths.
    kind: str = "forward"
    dtype: str = "float16"
    heads: tuple[int, int] = (4, 2)
    # Numbers of queries and of keys, for each sequence.
    lengths: tuple[tuple[int, ...], tuple[int, ...]] = ((70, 1, 0, 129), (70, 1, 0, 129))
    head_dims: tuple[int, int] = (64, 64)
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [f"{self.kind} {self.dtype}", "packed", f"head dim {self.head_dims[0]}"]
        return ", ".join(words + named(self.options))

    def inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Make the arrays of the call."""
        (heads_q, heads_k), (dim, dim_v), dtype = self.heads, self.head_dims, numpy_dtype(self.dtype)
        rows_q, rows_k = map(sum, self.lengths)
        shapes = {"q": (rows_q, heads_q, dim), "k": (rows_k, heads_k, dim), "v": (rows_k, heads_k, dim_v)}
        if self.kind == "backward":
            shapes["do"] = (rows_q, heads_q, dim_v)
        made = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
        cuts = zip(("cu_seqlens_q", "cu_seqlens_k"), self.lengths, strict=True)
        return made | {name: np.cumsum((0, *lengths), dtype=np.int32) for name, lengths in cuts}

    def run(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Call the library."""
        q, k, v = (given[name] for name in "qkv")
        of_q, of_k = given["cu_seqlens_q"], given["cu_seqlens_k"]
        o, lse = varlen.attention_varlen(q, k, v, of_q, of_k, return_lse=True, **self.options)
        results = {"o": o, "lse": lse}
        if "do" in given:
            gradients = varlen.attention_varlen_backward(
                given["do"], q, k, v, o, lse, of_q, of_k, **self.options
            )
            results |= gradients._asdict()
        return results

    def judge(
        self, host: Mapping[str, Any], results: Mapping[str, np.ndarray], place: Place
    ) -> list[Verdict]:
        """Compare each sequence with FP64."""
        of_keys, verdicts = ("k", "v", "dk", "dv"), []
        cuts = host["cu_seqlens_q"], host["cu_seqlens_k"]
        results = {name: x for name, x in results.items() if x is not None}
        for b in range(len(cuts[0]) - 1):
            rows = [slice(*cut[b : b + 2]) for cut in cuts]

            def own(name: str, x: np.ndarray, rows: list[slice] = rows) -> np.ndarray:
                if name == "lse":
                    return x[None, :, rows[0]]
                part: np.ndarray = x[rows[name in of_keys]].swapaxes(0, 1)[None]
                return part

            given = {name: own(name, host[name]) for name in ("q", "k", "v", "do") if name in host}
            if not given["q"].size:
                continue
            found = {name: own(name, x) for name, x in results.items()}
            precision = precision_of(self.dtype, None, place)
            verdicts += testing.error_budget(found, **given, precision=precision, **self.options)
        return verdicts

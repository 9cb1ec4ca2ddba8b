"""One list of sizes and feature combinations, for every device that can run attention.

A `Case` is a value: what to ask for, and how the arrays lie in memory. It makes its own inputs,
the same ones every time. The tables at the end are what the suites are parametrised over.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_flash.testing import STYLES

SIZES = (1, 7, 63, 64, 65, 127, 777)
HEAD_DIMS = (1, 8, 31, 32, 33, 64, 80, 96, 128, 160, 192, 256, 320, 512)
DTYPES = ("float16", "bfloat16", "float32", "float64")
# Of packed sequences, queries and keys: of one row, of none, of whole tiles and of more than one.
PACKED_LENGTHS = ((5, 64, 0, 70, 1, 130, 3, 64), (9, 64, 12, 0, 200, 131, 64, 257))

# Shapes of mask and bias; letters are axes present with their length, "1" a broadcast axis.
BROADCASTS = ("bhqk", "b11k", "1hqk", "b1q1", "1h11", "1111", "qk", "k", "hq1")


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype of this name, those of ml_dtypes included."""
    if name in ("bfloat16", "float8_e4m3fn"):
        import ml_dtypes  # why here: the soak goes on without it where there is none

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def unusual(case: Any) -> str:
    """The fields of a case that are not as they are by default: its name in a test."""
    parts = [
        f"{f.name}={getattr(case, f.name)}"
        for f in dataclasses.fields(case)
        if getattr(case, f.name) != f.default
    ]
    return " ".join(parts).replace("'", "") or "default"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of attention and attention_backward."""

    dtype: str = "float32"
    batch: int = 2
    heads: tuple[int, int] = (2, 2)  # of q; of k and v
    lengths: tuple[int, int] = (64, 64)  # queries, keys
    head_dims: tuple[int, int] = (32, 32)  # of q and k; of v
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    align: str | int | None = None
    mask: str | None = None  # one of BROADCASTS
    bias: str | None = None  # one of BROADCASTS
    bias_dtype: str | None = None  # None: that of q
    scale: float | None = None
    softcap: float | None = None
    alibi: str | None = None  # "h" or "bh"
    sinks: bool = False
    dropout: float = 0.0
    layout: str = "bhsd"
    rank: int = 4
    dlse: bool = False
    style: str = "padded"  # one of testing.STYLES
    values: str = "normal"  # or "ramp", "onehot"

    def __str__(self) -> str:
        return unusual(self)

    @property
    def accumulator(self) -> np.dtype[Any]:
        """The dtype of lse, sinks and ALiBi slopes."""
        return np.dtype("float64" if self.dtype == "float64" else "float32")

    def inputs(self) -> dict[str, np.ndarray]:
        """Make q, k, v, do and whichever of dlse, mask, bias, alibi_slopes, sinks the case has."""
        draw = np.random.default_rng(zlib.crc32(str(self).encode()))
        dtype, acc = numpy_dtype(self.dtype), self.accumulator
        heads_q, heads_k = self.heads
        seqlen_q, seqlen_k = self.lengths
        head_dim, head_dim_v = self.head_dims
        shapes = {
            "q": (heads_q, seqlen_q, head_dim),
            "k": (heads_k, seqlen_k, head_dim),
            "v": (heads_k, seqlen_k, head_dim_v),
            "do": (heads_q, seqlen_q, head_dim_v),
        }
        made = {
            name: self._arranged(_values(self.values, name, (self.batch, *shape), draw)).astype(dtype)
            for name, shape in shapes.items()
        }
        if self.dlse:
            rows = draw.standard_normal((self.batch, heads_q, seqlen_q)).astype(acc)
            made["dlse"] = rows.reshape(rows.shape[4 - self.rank :])
        lengths = {"b": self.batch, "h": heads_q, "q": seqlen_q, "k": seqlen_k, "1": 1}
        if self.mask is not None:
            mask = draw.random([lengths[axis] for axis in self.mask]) < 0.7
            if mask.ndim == 4 and mask.shape[2] > 1:
                mask[:, :, 0] = False  # the first query of every head sees no key
            made["mask"] = mask
        if self.bias is not None:
            bias = draw.standard_normal([lengths[axis] for axis in self.bias])
            if self.bias.endswith("qk"):
                bias[draw.random(bias.shape) < 0.05] = -np.inf
            made["bias"] = bias.astype(numpy_dtype(self.bias_dtype or self.dtype))
        if self.alibi is not None:
            made["alibi_slopes"] = draw.random([lengths[axis] for axis in self.alibi]).astype(acc)
        if self.sinks:
            made["sinks"] = draw.standard_normal(heads_q).astype(acc)
        return made

    def options(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Make the keyword arguments, with these arrays for mask, bias, slopes and sinks."""
        values = {
            "causal": self.causal,
            "window": self.window,
            "align": self.align,
            "scale": self.scale,
            "softcap": self.softcap,
            "dropout": self.dropout,
            "seed": 0x1234_5678_9ABC if self.dropout else None,
            "layout": self.layout,
        }
        named = ("mask", "bias", "alibi_slopes", "sinks")
        return values | {name: arrays[name] for name in named if name in arrays}

    def _arranged(self, x: np.ndarray) -> np.ndarray:
        """Give a (batch, heads, seq, head_dim) array the rank and layout of the case."""
        if self.rank == 2:
            return x[0, 0]
        x = x.swapaxes(1, 2) if self.layout == "bshd" else x
        return x if self.rank == 4 else x[0]


def _values(kind: str, name: str, shape: tuple[int, ...], draw: np.random.Generator) -> np.ndarray:
    """Random values, or structured ones that a swapped axis or a shifted row shows in."""
    batch, heads, seqlen, dim = shape
    if kind == "normal":
        return draw.standard_normal(shape) * (1.5 if name == "q" else 1.0)
    b, h, s, d = np.indices(shape)
    if kind == "ramp":
        ramp = {"q": s - d, "k": d - s, "v": dim * s + d + 5 * h, "do": s - 2 * d + 3 * b}[name]
        return (ramp + h + b) / max(seqlen, dim, heads + batch)
    assert kind == "onehot"
    return np.where((s + h + 2 * b) % dim == d, 4.0 if name == "q" else 1.0, 0.0)


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield assignments in which every pair of values of every two factors occurs together.

    Greedy: each assignment starts from a pair not yet seen, then takes, factor by factor in
    random order, the value that adds the most pairs not yet seen. The best of ten is kept.
    """
    draw = random.Random(seed)
    names = sorted(factors)
    values = [(name, n) for name in names for n in range(len(factors[name]))]
    # why bits: all tables of cases are drawn whenever tests are collected.
    bit = {value: 1 << n for n, value in enumerate(values)}
    own = {name: sum(bit[value] for value in values if value[0] == name) for name in names}
    missing = {value: sum(bit.values()) & ~own[value[0]] for value in values}  # it was not yet seen with them
    pairs = [(a, b) for a, b in itertools.combinations(values, 2) if missing[a] & bit[b]]

    while pairs:
        best: tuple[int, dict[str, int]] = (0, {})
        for _ in range(10):
            chosen = dict(draw.choice(pairs))
            covered, with_these = 1, sum(bit[value] for value in chosen.items())
            rest = [name for name in names if name not in chosen]
            draw.shuffle(rest)
            for name in rest:
                gains = (
                    ((missing[name, n] & with_these).bit_count(), draw.random(), n)
                    for n in range(len(factors[name]))
                )
                gain, _, chosen[name] = max(gains)
                covered += gain
                with_these |= bit[name, chosen[name]]
            if covered > best[0]:
                best = (covered, chosen)
        together = sum(bit[value] for value in best[1].items())
        for value in best[1].items():
            missing[value] &= ~together
        pairs = [(a, b) for a, b in pairs if missing[a] & bit[b]]
        yield {name: factors[name][n] for name, n in best[1].items()}


# Causal, window and align together: they are one band.
BANDS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"causal": True, "align": "top_left"},
    {"causal": True, "align": "bottom_right"},
    {"causal": True, "align": -3},
    {"window": (5, 2)},
    {"window": (3, None), "align": "top_left"},
    {"window": (None, 0), "align": 9},
    {"causal": True, "window": (4, 8), "align": "bottom_right"},
    {"window": (0, 0), "align": "top_left"},
)

FEATURES: dict[str, Sequence[Any]] = {
    "dtype": DTYPES,
    "band": BANDS,
    "mask": (None, *BROADCASTS),
    "bias": (None, *BROADCASTS),
    "bias_dtype": (None, *DTYPES),
    "scale": (None, 0.3, -0.2),
    "softcap": (None, 1.5, 20.0),
    "alibi": (None, "h", "bh"),
    "sinks": (False, True),
    "dropout": (0.0, 0.25, 0.9),
    "heads": ((2, 2), (4, 2), (3, 1)),
    "layout": ("bhsd", "bshd"),
    "rank": (4, 3, 2),
    "dlse": (False, True),
    "style": STYLES,
    "values": ("normal", "ramp", "onehot"),
}


def feature_cases(
    lengths: Sequence[tuple[int, int]], head_dims: Sequence[tuple[int, int]], **fixed: Sequence[Any]
) -> list[Case]:
    """Make cases that combine every two values of every two features.

    Parameters
    ----------
    lengths, head_dims : sequence of (int, int)
        As in `Case`; features like the others.
    **fixed
        Values of a feature, instead of those of `FEATURES`.
    """
    factors = {**FEATURES, "lengths": lengths, "head_dims": head_dims, **fixed}
    return [_consistent(chosen) for chosen in pairwise(factors)]


def _consistent(chosen: dict[str, Any]) -> Case:
    """Make a case of an assignment, adjusting what the semantics do not allow together."""
    case = Case(**{name: value for name, value in chosen.items() if name != "band"}, **chosen["band"])
    if case.rank == 2:
        case = dataclasses.replace(case, heads=(1, 1))
    if case.rank < 4:
        case = dataclasses.replace(case, batch=1)
    positional = case.causal or case.window is not None or case.alibi is not None
    if positional and case.align is None and case.lengths[0] != case.lengths[1]:
        case = dataclasses.replace(case, align="bottom_right")
    return case


def exact_cases() -> list[Case]:
    """Make small ones in float64, for what is held to differences and formulas."""
    return feature_cases(
        lengths=((3, 3), (1, 4), (5, 2)),
        head_dims=((2, 3), (4, 1)),
        dtype=("float64",),
        bias_dtype=(None,),
        style=("padded",),
    )


def length_cases() -> list[Case]:
    """Make one case per size as queries, as keys and as both, causal and not."""
    pairs = [(n, n) for n in SIZES] + [(n, 65) for n in SIZES] + [(63, n) for n in SIZES]
    pairs += [(777, 1), (1, 777), (127, 7)]
    return [
        Case(lengths=pair, batch=1, causal=causal, align="bottom_right" if causal else None, dtype=dtype)
        for pair in dict.fromkeys(pairs)
        for causal in (False, True)
        for dtype in (("float32", "float16") if max(pair) < 777 else ("float32",))
    ]


def head_dim_cases(head_dims: Sequence[int] = HEAD_DIMS, **fixed: Any) -> list[Case]:
    """Make one case per head dim and dtype, and some whose v has another head dim than q and k."""
    options = {"lengths": (33, 65), "batch": 1, "causal": True, "align": "bottom_right", **fixed}
    pairs = [(n, n) for n in head_dims]
    pairs += list(itertools.pairwise(head_dims))
    pairs += [(b, a) for a, b in zip(head_dims, head_dims[3:], strict=False)]
    return [
        Case(head_dims=pair, dtype=DTYPES[n % 4] if pair[0] != pair[1] else dtype, **options)
        for n, pair in enumerate(pairs)
        for dtype in (DTYPES if pair[0] == pair[1] else DTYPES[:1])
    ]

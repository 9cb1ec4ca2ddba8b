"""Calls on 8-bit floats, with scales of heads."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import cupy_flash
from cupy_flash import testing
from tests.cases import numpy_dtype, unusual
from tests.float8_cases import Float8Case
from tests.public import quantized

from .edges import affordable, band, head_dim, heads, maybe, several, style, style_of
from .memory import numpy_of

__all__ = ["Float8"]

WAYS = ("heads", "batch", "")


@dataclass(frozen=True, kw_only=True)
class Float8:
    """A call of attention on q, k and v of float8_e4m3fn.

    Attributes
    ----------
    scales : (str, str, str)
        As of `Float8Case`.
    result : str, optional
        Dtype of out; None: out is not given.
    """

    batch: int = 2
    heads: tuple[int, int] = (2, 2)
    lengths: tuple[int, int] = (64, 64)
    head_dims: tuple[int, int] = (64, 64)
    scales: tuple[str, str, str] = ("heads", "heads", "heads")
    result: str | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    align: str | int | None = "bottom_right"
    scale: float | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    layout: str = "bhsd"
    style: str = "contiguous"

    dtype = "float8_e4m3fn"  # no field: others have it

    def __str__(self) -> str:
        return unusual(self)

    @classmethod
    def draw(cls, draw: random.Random, _dtypes: tuple[str, ...] = ()) -> Float8:
        """Any with a query and a key."""
        queries, keys = (max(1, n) for n in several(draw))
        return cls(
            **affordable(draw.choice((1, 1, 2)), heads(draw), (queries, keys)),
            lengths=(queries, keys),
            head_dims=head_dim(draw),
            scales=(draw.choice(WAYS), draw.choice(WAYS), draw.choice(WAYS)),
            result=maybe(draw, 0.6, "float16", "bfloat16", "float32"),
            **band(draw, (queries, keys)),
            scale=maybe(draw, 0.3, 0.3, -0.2),
            softcap=maybe(draw, 0.3, 0.5, 20.0),
            alibi=draw.random() < 0.3,
            sinks=draw.random() < 0.3,
            layout=draw.choice(("bhsd", "bshd")),
            style=style(draw),
        )

    def check(self, memory: Any) -> None:
        """Compare with FP64."""
        names = ("causal", "window", "align", "scale", "softcap")
        case = Float8Case(
            batch=self.batch, heads=self.heads, lengths=self.lengths, head_dims=self.head_dims,
            scales=self.scales, layout=self.layout, alibi=self.alibi, sinks=self.sinks,
            options=tuple((name, getattr(self, name)) for name in names),
        )  # fmt: skip
        qkv, options = case.inputs()
        given = [memory.put(n, x, style_of(n, self.style)) for n, x in zip("qkv", qkv, strict=True)]
        placed = {n: memory.put(n, x) if hasattr(x, "dtype") else x for n, x in options.items()}
        plain = {n: x for n, x in placed.items() if not n.endswith("_scale")}
        if self.result is not None:
            shape = (*qkv[0].shape[:-1], self.head_dims[1])
            plain["out"] = memory.out(shape, numpy_dtype(self.result), style_of("out", self.style))
        o, lse = cupy_flash.attention(*quantized(*given, placed), return_lse=True, **plain)
        memory.synchronize()
        testing.assert_within_budget(
            numpy_of({"o": o, "lse": lse}), *qkv, precision=memory.precision, **options
        )

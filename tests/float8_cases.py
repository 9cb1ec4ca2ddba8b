"""Calls on 8-bit floats, and how their results are held to FP64, for every device that computes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import cupy_flash
from cupy_flash import testing
from tests.cases import PACKED_LENGTHS, numpy_dtype
from tests.public import quantized

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


class Float8Case(NamedTuple):
    """A call; scales by ("heads", "batch" or "") of q, k and v."""

    heads: tuple[int, int] = (2, 2)
    lengths: tuple[int, int] = (64, 64)
    head_dims: tuple[int, int] = (64, 64)
    batch: int = 2
    scales: tuple[str, str, str] = ("heads", "batch", "batch")
    result: str | None = None  # dtype of out; None: out is not given
    layout: str = "bhsd"
    style: str = "aligned"
    alibi: bool = False
    sinks: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        """What differs from the default."""
        pairs = zip(self._fields, self, Float8Case(), strict=True)
        return " ".join(f"{name}={value}" for name, value, usual in pairs if value != usual) or "default"

    def inputs(self) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Make q, k and v, and the options."""
        draw = np.random.default_rng(len(str(self)) + sum(self.lengths))
        (hq, hk), (sq, sk), (d, dv) = self.heads, self.lengths, self.head_dims
        shapes = ((hq, sq, d), (hk, sk, d), (hk, sk, dv))
        spread = (2.0, 1.5, 30.0)  # of v: beyond what half of the exponents can hold
        qkv = [
            (draw.standard_normal((self.batch, *shape)) * size).astype(E4M3)
            for shape, size in zip(shapes, spread, strict=True)
        ]
        if self.layout == "bshd":
            qkv = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in qkv]
        options = dict(self.options)
        for name, kind in zip(("q_scale", "k_scale", "v_scale"), self.scales, strict=True):
            if kind:
                scale = np.exp2(draw.uniform(-3, 0, (self.batch, hk))).astype(np.float32)
                options[name] = scale if kind == "batch" else scale[0]
        if "v_scale" in options:
            options["v_scale"][..., 0] *= -1
        if self.alibi:
            options["alibi_slopes"] = draw.random(hq).astype(np.float32)
        if self.sinks:
            options["sinks"] = draw.standard_normal(hq).astype(np.float32)
        return qkv, {**options, "layout": self.layout}


def check(case: Float8Case, precision: str | None) -> None:
    """Compare a call with FP64, of inputs and outputs among NaN."""
    qkv, options = case.inputs()
    held = [testing.hostile(x, style=case.style) for x in qkv]
    out = None
    if case.result is not None:
        shape = (*qkv[0].shape[:3], case.head_dims[1])
        out = testing.dead(shape, numpy_dtype(case.result), style=case.style)
    plain = {name: x for name, x in options.items() if not name.endswith("_scale")}
    o, lse = cupy_flash.attention(
        *quantized(*(x.view for x in held), options),
        return_lse=True,
        out=None if out is None else out.view,
        **plain,
    )
    assert o.dtype == numpy_dtype(case.result or "bfloat16")
    testing.assert_within_budget({"o": o, "lse": lse}, *qkv, precision=precision, **options)
    for x in held:
        x.check_untouched()
    if out is not None:
        assert o is out.view
        out.check_written()


def check_packed(
    precision: str | None,
    head_dim: int = 64,
    *,
    lengths: tuple[tuple[int, ...], tuple[int, ...]] = PACKED_LENGTHS,
    poisoned: tuple[int, ...] = (0, 1),
    **options: Any,
) -> None:
    """Sequences of their own lengths and scales; every other one, and what follows the last, is NaN."""
    cu = [np.cumsum([0, *each]).astype(np.int32) for each in lengths]
    draw = np.random.default_rng(1)
    shapes = ((int(cu[0][-1]) + 3, 4, head_dim), *[(int(cu[1][-1]) + 2, 2, head_dim)] * 2)
    tensors = [draw.standard_normal(shape).astype(E4M3) for shape in shapes]
    scales = {
        f"{name}_scale": np.exp2(draw.uniform(-2, 1, (len(lengths[0]), 2))).astype(np.float32)
        for name in "qkv"
    }
    for parity in poisoned:
        nan = [x.copy() for x in tensors]
        for x, ends in zip(nan, (cu[0], cu[1], cu[1]), strict=True):
            x[ends[-1] :] = np.nan
            for n in range(parity, len(ends) - 1, 2):
                x[ends[n] : ends[n + 1]] = np.nan
        held = [testing.hostile(x, style="aligned") for x in nan]
        out = testing.dead(shapes[0], numpy_dtype("bfloat16"), style="aligned")
        _, lse = cupy_flash.attention_varlen(
            *quantized(*(g.view for g in held), scales), *cu, return_lse=True, out=out.view, **options
        )
        for n in range(1 - parity, len(lengths[0]), 2):
            own = [slice(ends[n], ends[n + 1]) for ends in cu]
            q, k, v = (x[own[i]].swapaxes(0, 1)[None] for x, i in zip(tensors, (0, 1, 1), strict=True))
            part = {"o": out.view[own[0]].swapaxes(0, 1)[None], "lse": lse[:, own[0]][None]}
            of_sequence = {name: scale[n] for name, scale in scales.items()}
            if q.size:
                testing.assert_within_budget(part, q, k, v, precision=precision, **of_sequence, **options)
        out.check_guards()
        assert (out.view[cu[0][-1] :] == testing.dead((1,), out.view.dtype).view).all(), "rows of no sequence"

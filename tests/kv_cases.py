"""Calls of attention_with_kv_cache, for every device: their inputs, and how their results are judged."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

import cupy_flash
from cupy_flash import testing
from cupy_flash.testing.kv_cache import pairs_of, rotate
from tests.cases import numpy_dtype, pairwise, unusual
from tests.checks import Device
from tests.public import over_cache

STORED = {"int8": np.dtype(np.int8), "e4m3": np.dtype(ml_dtypes.float8_e4m3fn)}


@dataclass(frozen=True, kw_only=True)
class KvCase:
    """One call; the batch has an empty, a full and some partly filled sequences."""

    dtype: str = "float16"
    stored: str = "same"  # or a key of STORED
    kind: str = "contiguous"  # or "indexed", "paged"
    page: int = 16
    room: int = 160  # keys of a sequence
    lengths: tuple[int, ...] = (0, 37, 160)  # before the call; cut so that new keys fit
    heads: tuple[int, int] = (4, 2)
    queries: int = 1
    head_dims: tuple[int, int] = (64, 64)
    new: int = 0
    rotary: int = 0
    interleaved: bool = False
    last: bool = False  # features are rotated
    tables: str = "float32"  # dtype of cos and sin, or "same"
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    scale: float | None = None
    alibi: str | None = None  # "h" or "bh"
    sinks: bool = False
    scales: str = "h"  # of a quantised cache: "h" or "bh"
    layout: str = "bhsd"
    splits: int | None = None
    integers: str = "int32"  # of indices
    latent: bool = False  # values are the first columns of keys
    selected: int = 0  # keys that each query names, -1 and some twice among them; 0: all
    prefix: int = 0  # keys that stand before those of the cache: rotation counts from the first of them

    def __str__(self) -> str:
        return unusual(self)

    @property
    def accumulator(self) -> np.dtype[Any]:
        """The dtype of lse, sinks, slopes and scales."""
        return np.dtype("float64" if self.dtype == "float64" else "float32")

    def inputs(self) -> dict[str, np.ndarray]:
        """Make all arrays of the call, by the names of its arguments."""
        draw = np.random.default_rng(zlib.crc32(str(self).encode()))
        dtype, acc, batch = numpy_dtype(self.dtype), self.accumulator, len(self.lengths)
        (heads_q, heads_k), (dim, dim_v) = self.heads, self.head_dims
        pages = self.room // self.page
        slots, rows = {
            "contiguous": (batch, self.room),
            "indexed": (batch + 2, self.room),
            "paged": (batch * pages + 3, self.page),
        }[self.kind]
        stored = STORED.get(self.stored, dtype)
        spread = 40.0 if self.stored == "int8" else 1.0
        made = {"q": self._arranged(1.5 * draw.standard_normal((batch, heads_q, self.queries, dim)), dtype)}
        for name, d in (("k_cache", dim), ("v_cache", dim_v)):
            made[name] = self._arranged(spread * draw.standard_normal((slots, heads_k, rows, d)), stored)
        lengths = [min(n, self.room - self.new) for n in self.lengths]
        made["cache_seqlens"] = np.array(lengths, np.int32)
        if self.kind == "paged":
            made["block_table"] = draw.permutation(slots)[: batch * pages].reshape(batch, -1).astype(np.int32)
        if self.kind == "indexed":
            made["cache_batch_idx"] = draw.permutation(slots)[:batch].astype(np.int32)
        if self.new:
            for name, d in (("k", dim), ("v", dim_v)):
                made[name] = self._arranged(draw.standard_normal((batch, heads_k, self.new, d)), dtype)
        if self.latent:
            for values, keys in (("v_cache", "k_cache"), ("v", "k")):
                if keys in made:
                    made[values] = np.ascontiguousarray(made[keys][..., :dim_v])
        if self.rotary:
            positions = max(self.prefix + self.room + 1, self.queries, self.new)
            angles = draw.random((positions, self.rotary // 2)) * 6
            kind = dtype if self.tables == "same" else np.dtype(self.tables)
            made["rotary_cos"], made["rotary_sin"] = np.cos(angles).astype(kind), np.sin(angles).astype(kind)
        if self.stored != "same":
            shape = (heads_k,) if self.scales == "h" else (batch, heads_k)
            made["k_scale"] = (draw.random(shape) / spread + 0.5 / spread).astype(acc)
            # why powers of two: the result can then be judged in the unit of what is stored
            made["v_scale"] = np.exp2(draw.integers(-3, 2, shape)).astype(acc)
            if self.latent:  # one scale
                unit = np.exp2(draw.integers(-1, 2, shape) - np.rint(np.log2(spread)))
                made["k_scale"] = made["v_scale"] = unit.astype(acc)
        if self.alibi is not None:
            shape = (heads_q,) if self.alibi == "h" else (batch, heads_q)
            made["alibi_slopes"] = draw.random(shape).astype(acc)
        if self.sinks:
            made["sinks"] = draw.standard_normal(heads_q).astype(acc)
        if self.rotary and dtype.itemsize == 2:
            self._settle(made, [self.new] * batch)
        if self.selected:
            shape = (batch, self.queries, self.selected)
            named = draw.integers(-1, made["cache_seqlens"][:, None, None], shape)
            made["indices"] = np.where(draw.random(shape) < 0.8, named, -1).astype(self.integers)
        return made

    def _settle(self, made: Mapping[str, np.ndarray], new: Sequence[int]) -> None:
        """Zero the pairs of q that, rotated, lie between two numbers of its dtype.

        Rotated in float and in double they would be rounded to different ones, which no error of attention
        is, and of many queries some are there. `new`: keys that each sequence appends.
        """
        first, second = pairs_of(self.head_dims[0], self.rotary // 2, self.interleaved, self.last)
        cos, sin = (made[f"rotary_{name}"].astype(np.float64) for name in ("cos", "sin"))
        queries = made["q"].swapaxes(1, 2) if self.layout == "bshd" else made["q"]
        for q, before, appended in zip(queries, made["cache_seqlens"], new, strict=True):
            length = self.prefix + int(before) + appended
            positions = np.arange(length - self.queries, length)
            turned = rotate(q.astype(np.float64), positions, cos, sin, self.interleaved, self.last)
            between = (turned - 2.0**-20).astype(q.dtype) != (turned + 2.0**-20).astype(q.dtype)
            pairs = between[..., first] | between[..., second]
            for part in (first, second):
                q[..., part][pairs] = 0

    def options(self) -> dict[str, Any]:
        """The other arguments."""
        names = ("causal", "window", "softcap", "scale", "layout")
        flags = {"rotary_interleaved": self.interleaved, "rotary_last": self.last}
        return {name: getattr(self, name) for name in names} | flags

    def _arranged(self, x: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
        arranged: np.ndarray = x.swapaxes(1, 2) if self.layout == "bshd" else x
        if dtype == np.int8:
            arranged = np.clip(np.rint(arranged), -127, 127)
        return np.ascontiguousarray(arranged.astype(dtype))


def check(case: KvCase, device: Device, inputs: dict[str, np.ndarray] | None = None, **extra: Any) -> None:
    """Compare a call with FP64: what it returns, what it stores, and that it touches nothing else."""
    inputs = case.inputs() if inputs is None else inputs
    guarded = {
        name: device.hostile(_as_known(x, device), "aligned" if x.ndim == 4 else "padded")
        for name, x in inputs.items()
    }
    views = {name: g.view for name, g in guarded.items()}
    for name in ("cache_seqlens", "block_table", "cache_batch_idx", "indices"):
        if name in views:
            views[name] = device.array(inputs[name])
    options = case.options()
    heads_q, dim_v = case.heads[0], case.head_dims[1]
    rows = (len(inputs["q"]), heads_q, case.queries)
    shape = (rows[0], case.queries, heads_q, dim_v) if case.layout == "bshd" else (*rows, dim_v)
    out = testing.dead(shape, numpy_dtype(case.dtype), style="aligned", xp=device.xp)
    flat = {**views, **options, "splits": case.splits, **extra}
    if case.latent:
        latents = flat["k_cache"]
        flat |= {"k_cache": cupy_flash.LatentCache(latents, dim_v), "v_cache": None, "v": None}
        views["v_cache"] = latents[..., :dim_v]
    o, lse = cupy_flash.attention_with_kv_cache(**over_cache(**flat), out=out.view, return_lse=True)
    assert o is out.view
    out.check_written()
    written = ("k_cache", "v_cache") if case.new else ()
    for name, g in guarded.items():
        if name in written:
            g.check_guards()
        elif inputs[name].ndim == 4:
            g.check_untouched()
    after = {name: testing.to_numpy(views[name]) for name in ("k_cache", "v_cache")}
    after = {name: x.view(inputs[name].dtype) for name, x in after.items()}
    _check_stored(case, inputs, after)
    _check_results(case, {**inputs, **after}, testing.to_numpy(o), testing.to_numpy(lse), device)


def check_one_length(case: KvCase) -> None:
    """Compare the bits that a number gives, which the launch carries, with those of an array of it."""
    for length in (37, case.room - case.new, case.room, -5):
        results = []
        for lengths in (length, np.full(len(case.lengths), length, np.int32)):
            made = case.inputs() | {"cache_seqlens": lengths}
            options = {**case.options(), "check": False, "return_lse": True}
            o, lse = cupy_flash.attention_with_kv_cache(**over_cache(**made, **options))
            results.append((o, lse, made["k_cache"], made["v_cache"]))
        for of_number, of_array in zip(*results, strict=True):
            np.testing.assert_array_equal(of_number, of_array)


def _as_known(x: np.ndarray, device: Device) -> np.ndarray:
    """An array in a dtype that the library knows: float8 as its bits, but for NumPy."""
    return x.view(np.uint8) if x.dtype == STORED["e4m3"] and device.xp is not np else x


def _check_stored(case: KvCase, inputs: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]) -> None:
    """New keys and values are in the cache to within a rounding of FP64, and nothing else has changed."""
    expected = testing.reference_with_kv_cache(**inputs, **case.options())
    for name, wanted in (("k_cache", expected.k_cache), ("v_cache", expected.v_cache)):
        bits = f"u{wanted.itemsize}"
        kept = wanted.view(bits) == inputs[name].view(bits)
        actual, wanted = after[name].astype(np.float64), wanted.astype(np.float64)
        np.testing.assert_array_equal(after[name].view(bits)[kept], inputs[name].view(bits)[kept])
        step = {"int8": np.ones_like(wanted), "e4m3": np.maximum(np.abs(wanted) / 8, 2.0**-9)}.get(
            case.stored, np.maximum(np.abs(wanted), 1) * testing.budget.UNIT_ROUNDOFF[case.dtype] * 4
        )
        assert (np.abs(actual - wanted) <= step).all()


def _check_results(
    case: KvCase, arrays: Mapping[str, np.ndarray], o: np.ndarray, lse: np.ndarray, device: Device
) -> None:
    """Each head of each sequence is within the error budget of attention over what is stored."""
    over = {name: x for name, x in arrays.items() if name not in ("k", "v")}
    over["cache_seqlens"] = arrays["cache_seqlens"] + np.int32(case.new)
    verdicts = testing.error_budget_with_kv_cache(
        o, lse, **over, precision=device.precision(case.dtype), **case.options()
    )
    assert all(verdict.within for verdict in verdicts), "\n".join(map(str, verdicts))


# Causal, window together: they are one band.
BANDS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"window": (50, None)},
    {"causal": True, "window": (33, 7)},
    {"window": (None, 0)},
)
FEATURES: dict[str, Any] = {
    "dtype": ("float16", "bfloat16", "float32"),
    "stored": ("same", "int8", "e4m3"),
    "kind": ("contiguous", "indexed", "paged"),
    "page": (16, 32),
    "heads": ((4, 2), (8, 1), (3, 3)),
    "queries": (1, 3, 17),
    "head_dims": ((64, 64), (64, 32)),
    "new": (0, 1, 5),
    "rotary": (0, 32, 64),
    "interleaved": (False, True),
    "last": (False, True),
    "tables": ("float32", "same"),
    "band": BANDS,
    "softcap": (None, 3.0),
    "scale": (None, -0.1),
    "alibi": (None, "h", "bh"),
    "sinks": (False, True),
    "scales": ("h", "bh"),
    "layout": ("bhsd", "bshd"),
    "splits": (None, 1, 3),
}


def cases(**fixed: Any) -> list[KvCase]:
    """Cases in which every two values of every two features meet; `fixed` replaces values of a feature."""
    chosen = pairwise({**FEATURES, **fixed})
    return [
        KvCase(**{name: value for name, value in one.items() if name != "band"}, **one["band"])
        for one in chosen
    ]

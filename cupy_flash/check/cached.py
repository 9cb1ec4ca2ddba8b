"""Cases of a check: calls over a KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import kv_cache, quantized, testing
from ..call.arrays import numpy_dtype
from ..call.compound import LatentCache, QuantizedCache, Rotary
from ..call.operands import FLOAT8
from ..testing import Verdict
from .cases import accumulator, named, precision_of
from .places import Place

__all__ = ["Cached"]

PARTS = ("scale", "zero", "block_scale")
# The values of a 4-bit code of NVFP4, in units of the block scale.
E2M1 = np.array([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6])


@dataclass(frozen=True, kw_only=True, eq=False)
class Cached:
    """A case that calls attention_with_kv_cache."""

    kind: str = "decode"  # kind of the case in the report
    dtype: str = "float16"  # dtype of q
    # {"same", "int8", "float8", "int4", "nvfp4"}: dtype of the cache; "same" is that of q.
    stored: str = "same"
    # Heads of q and of k; head dims of k and of v.
    heads: tuple[int, int] = (8, 2)
    head_dims: tuple[int, int] = (128, 128)
    queries: int = 1  # queries per sequence
    room: int = 320  # capacity of a sequence, in keys
    lengths: tuple[int, ...] = (0, 37, 318)  # keys in use of each sequence, before the call
    page: int = 0  # keys per page; 0 for a cache without pages
    new: int = 0  # keys to append
    rotary: int = 0  # features to rotate: the first ones, but for latents the last ones, which are not values
    prefix: int = 0  # keys of a shared prefix before those of the cache, which has no pages then
    latent: bool = False  # whether values are the first columns of keys
    sinks: bool = False  # whether the call has attention sinks
    options: dict[str, Any] = field(default_factory=dict)  # all other options

    def __str__(self) -> str:
        dims = "/".join(map(str, dict.fromkeys(self.head_dims)))
        words = [f"{self.kind} {self.dtype}", f"head dim {dims}"]
        words += [f"cache of {self.stored}"] * (self.stored != "same")
        for name in ("page", "new", "rotary", "prefix"):
            words += [f"{name}={getattr(self, name)}"] * bool(getattr(self, name))
        words += [f"queries={self.queries}"] * (self.queries > 1) + ["latents"] * self.latent
        words += ["sinks"] * self.sinks + named(self.options)
        if self.heads != (8, 2):
            words.append("heads {}/{}".format(*self.heads))
        if max(self.lengths) > self.room // 2 >= 500:
            words.append(f"{max(self.lengths)} keys")
        return ", ".join(words)

    def inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Make all arrays of the call, by name."""
        dtype, batch = numpy_dtype(self.dtype), len(self.lengths)
        heads_q, heads_k = self.heads
        pages = self.room // self.page if self.page else 0
        slots, rows = (batch * pages + 2, self.page) if self.page else (batch, self.room)
        made: dict[str, Any] = {
            "q": rng.standard_normal((batch, heads_q, self.queries, self.head_dims[0])).astype(dtype),
            "cache_seqlens": np.array(self.lengths, np.int32),
        }
        for x, dim in zip("kv", self.head_dims, strict=True):
            made |= self._cache(x, (slots, heads_k, rows, dim), rng)
            if self.prefix:
                made[f"prefix_{x}"] = rng.standard_normal((heads_k, self.prefix, dim)).astype(dtype)
            if self.new:
                made[x] = rng.standard_normal((batch, heads_k, self.new, dim)).astype(dtype)
        if self.latent:
            made |= {f"v{x[1:]}": made[x][..., : self.head_dims[1]] for x in ("k", "k_cache") if x in made}
        if self.page:
            table = rng.permutation(slots)[: batch * pages]
            made["block_table"] = table.reshape(batch, pages).astype(np.int32)
        if self.rotary:
            # why quarter turns: rotated numbers are exact, so that rounding cannot differ
            turns = rng.integers(0, 4, (self.room + 1, self.rotary // 2)) * (np.pi / 2)
            made["rotary_cos"] = np.rint(np.cos(turns)).astype(np.float32)
            made["rotary_sin"] = np.rint(np.sin(turns)).astype(np.float32)
        if self.sinks:
            made["sinks"] = rng.standard_normal(heads_q).astype(accumulator(self.dtype))
        return made

    def _cache(self, x: str, shape: tuple[int, ...], rng: np.random.Generator) -> dict[str, Any]:
        """Make a cache and its scales; dequantised 4-bit codes are exact in every dtype of q."""
        name, heads, acc = f"{x}_cache", shape[1], accumulator(self.dtype)
        # why powers of two for values: `error_budget_with_kv_cache` divides results by the scale
        scale = np.exp2(rng.integers(-2, 2, heads)) if x == "v" else rng.uniform(0.5, 1.0, heads)
        if self.stored == "same":
            return {name: rng.standard_normal(shape).astype(numpy_dtype(self.dtype))}
        if self.stored == "int8":
            codes = np.clip(np.rint(40 * rng.standard_normal(shape)), -127, 127).astype(np.int8)
            return {name: codes, f"{x}_scale": (scale / 32).astype(acc)}
        if self.stored == "float8":
            codes = rng.standard_normal(shape).astype(numpy_dtype(FLOAT8))
            return {name: codes, f"{x}_scale": scale.astype(acc)}
        if self.stored == "nvfp4":
            floats = rng.choice(E2M1, shape)
            floats[..., ::16] = 6.0  # the largest of each group sets its block scale
            made = quantized.nvfp4((floats / 4).astype(np.float32))
        else:
            floats = rng.integers(0, 16, shape) - rng.integers(4, 12, (*shape[:-1], 1))
            low = floats.reshape(*shape[:-1], -1, 64).min(-1, keepdims=True)
            floats = floats.reshape(*shape[:-1], -1, 64)
            floats[..., :1], floats[..., 1:2] = low, low + 15  # so that a step is exactly 1 / 8
            made = quantized.int4((np.clip(floats, low, low + 15).reshape(shape) / 8).astype(np.float32))
        parts = zip(PARTS, made[1:], strict=True)
        return {name: made.codes, **{f"{x}_{part}": unit for part, unit in parts if unit is not None}}

    def run(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Call the library; if keys are appended, the caches after the call are results, too."""
        flat = dict(given)
        caches = {"k_cache": flat["k_cache"], "v_cache": flat["v_cache"]}
        for x in "kv":
            units = {part: flat.pop(f"{x}_{part}", None) for part in PARTS}
            if any(unit is not None for unit in units.values()):
                flat[f"{x}_cache"] = QuantizedCache(flat[f"{x}_cache"], **units)
        if self.latent:
            caches["v_cache"] = flat["k_cache"][..., : self.head_dims[1]]
            flat |= {"k_cache": LatentCache(flat["k_cache"], self.head_dims[1]), "v_cache": None, "v": None}
        if self.prefix:
            flat["prefix"] = flat.pop("prefix_k"), flat.pop("prefix_v")
        if self.rotary:
            flat["rotary"] = Rotary(flat.pop("rotary_cos"), flat.pop("rotary_sin"), last=self.latent)
        o, lse = kv_cache.attention_with_kv_cache(**flat, **self.options, return_lse=True)
        return {"o": o, "lse": lse, **(caches if self.new else {})}

    def judge(
        self, host: Mapping[str, Any], results: Mapping[str, np.ndarray], place: Place
    ) -> list[Verdict]:
        """Compare the results, and the stored keys and values, with FP64."""
        arrays, verdicts = dict(host), []
        for x in "kv" if self.prefix else "":  # the reference has the prefix in front of every sequence
            prefix, cache = arrays.pop(f"prefix_{x}"), host[f"{x}_cache"]
            shared = np.broadcast_to(prefix, (len(cache), *prefix.shape))
            arrays[f"{x}_cache"] = np.concatenate([shared, cache], axis=2)
        arrays["cache_seqlens"] = host["cache_seqlens"] + np.int32(self.prefix)
        last = self.latent and bool(self.rotary)
        if self.new:
            wanted = testing.reference_with_kv_cache(**host, rotary_last=last, **self.options)
            for name, exact in (("k_cache", wanted.k_cache), ("v_cache", wanted.v_cache)):
                wrong = int((results[name] != exact).sum())
                verdicts.append(Verdict(name, f"{wrong} stored numbers are wrong" if wrong else ""))
                arrays[name] = results[name]
            arrays["cache_seqlens"] += np.int32(self.new)
        arrays = {name: x for name, x in arrays.items() if name not in ("k", "v")}
        precision = precision_of(self.dtype, None, place)
        return verdicts + testing.error_budget_with_kv_cache(
            results["o"], results["lse"], **arrays, rotary_last=last, **self.options, precision=precision
        )

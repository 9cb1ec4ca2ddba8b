"""A fast path for calls over a KV cache that repeat an earlier one, like the steps of a decoder."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch

from ..api import results_of_forward
from ..call.arrays import CPU, ArrayView
from ..call.cache.describe import adopt_cache
from ..call.cache.values import check_values
from ..call.given import split_of_cache
from ..call.offsets import with_own_tables
from ..dispatch.memo import REPEATED, Prepared, prepared
from ..dispatch.repeat import BOUNDS, CONSTANTS, remember_recent
from .repeat import Recent, is_watched

__all__ = ["OverCache"]

_TENSORS = frozenset(("k", "v", "block_table", "cache_leftpad"))
_OPTIONS = frozenset(("causal", "window", "scale", "softcap", "layout", "precision", "reproducible"))
_MOST_KEYS = 1 << 31
_OWNER = ArrayView._fields.index("owner")


class _PreparedCall(NamedTuple):
    """A prepared call, and the views of its arrays."""

    call: Prepared  # the prepared call, without addresses
    views: dict[str, tuple[Any, ...]]  # the fields of each view except its address and owner, by name

    def run(self, tensors: tuple[Any, ...], length: int | None) -> Any:
        """O, or (O, LSE)."""
        view_of: Any = ArrayView
        raw = {
            name: view_of(x.data_ptr(), *view, x)
            for (name, view), x in zip(self.views.items(), tensors, strict=True)
        }
        if raw["q"].device == CPU:
            raw = with_own_tables(raw)
            check_values(self.call.problem, raw, length)
        return results_of_forward(self.call.run(raw, length=length), None)


class OverCache(NamedTuple):
    """A call whose repetitions may take the fast path."""

    # Tensors: q, k_cache and v_cache, then cache_seqlens if it is an array, then options that are
    # tensors.
    tensors: tuple[Any, ...]
    options: tuple[Hashable, ...]  # the cache key: names, values and types of the options
    length: int | None  # number of keys in use, the same for all sequences; None if cache_seqlens is an array

    @classmethod
    def of(
        cls, q: Any, k_cache: Any, v_cache: Any, cache_seqlens: Any, options: Mapping[str, Any], want_lse: Any
    ) -> OverCache | None:
        """A call of `attention_with_kv_cache`; None if more than addresses and a length can differ."""
        if type(k_cache) is not torch.Tensor or type(v_cache) is not torch.Tensor or is_watched():
            return None
        tensors, given, length = [q, k_cache, v_cache], [type(want_lse), want_lse], None
        if type(cache_seqlens) is int and -_MOST_KEYS <= cache_seqlens < _MOST_KEYS:
            length = cache_seqlens
        else:
            tensors.append(cache_seqlens)
        for name, x in options.items():
            kind = type(x)
            if x is None:
                continue
            if kind is torch.Tensor and name in _TENSORS and (name != "block_table" or x.dim() == 2):
                tensors.append(x)
                given.append(name)
            elif name in _OPTIONS and (
                kind in CONSTANTS or (kind is tuple and name == "window" and BOUNDS.issuperset(map(type, x)))
            ):
                given += name, x, kind, *(map(type, x) if kind is tuple else ())
            else:
                return None
        return cls(tuple(tensors), (length is None, *given), length)

    def repeated(self) -> Any:
        """The result, o or (o, lse), if this call repeats an earlier one; else None."""
        try:
            recent = REPEATED.get(self.options, ())
        except TypeError:  # an option is not hashable
            return None
        for one in recent:
            if one.is_repeated(*self.tensors) and not self._is_of_latents():
                return one.known.run(self.tensors, self.length)
        return None

    def remember(self, flat: Mapping[str, Any], want_lse: bool) -> None:
        """Store a full call for repetitions; `flat` is the result of `cache_parts`."""
        if self._is_of_latents():
            return
        q, k_cache, v_cache, *_ = self.tensors
        arrays, values, cache_call = split_of_cache(
            {name: x for name, x in flat.items() if x is not k_cache and x is not v_cache}
        )
        lengths = self.tensors[3] if self.length is None else self.length
        cache = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": lengths}
        raw, _ = adopt_cache({**cache, **arrays})
        call = prepared("decode", raw, values, want_lse, None, cache_call)
        known = _PreparedCall(call, {name: view[1:_OWNER] for name, view in raw.items()})
        remember_recent(self.options, Recent.of(self.tensors, known, False))

    def _is_of_latents(self) -> bool:
        """Whether the value cache begins at the address of the key cache, as for latents."""
        return bool(self.tensors[1].data_ptr() == self.tensors[2].data_ptr())

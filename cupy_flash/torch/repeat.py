"""Calls that repeat an earlier one on other numbers: straight to what that one found out.

A short call is mostly Python. Where nothing but the addresses of q, k and v can differ from a call that went
the whole way, this looks at no more than that, and takes a third of the time.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch

from ..api import adopted
from ..call.given import Options
from ..call.progress import TOLD
from ..prepare import REPEATED, Prepared, prepared
from ..ready import chosen_by_environment, driver_of
from .eager import are_untouched

__all__ = ["key_of", "remember", "repeated"]

_DEVICES = ("cpu", "cuda")
# Types of options that mean the same for ever.
_CONSTANTS = frozenset((bool, int, float, str))
_OPTIONS = frozenset(
    ("causal", "align", "scale", "softcap", "layout", "precision", "reproducible", "dropout")
)
_MOST_KNOWN = 1024


class _Known(NamedTuple):
    """What a call found out."""

    call: Prepared
    results: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


def key_of(q: Any, k: Any, v: Any, options: Mapping[str, Any], *more: Hashable) -> Hashable | None:
    """What decides how a call goes, but for where its tensors are; None if something else does, too."""
    if torch.compiler.is_compiling():
        return None
    for name, x in options.items():
        if x is not None and (type(x) not in _CONSTANTS or name not in _OPTIONS or (name == "dropout" and x)):
            return None
    if (
        not (type(q) is type(k) is type(v) is torch.Tensor)
        or torch.autograd.forward_ad._current_level >= 0
        or (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
        or not are_untouched(q, k, v)
        or TOLD.get() is not None
    ):
        return None
    device = q.device
    kind = device.type
    if kind not in _DEVICES or torch.is_autocast_enabled(kind):
        return None
    at = kind, device.index or 0
    driver = driver_of(at, "torch")
    try:
        return (
            q.shape, q.stride(), q.dtype, q.data_ptr() % 16,
            k.shape, k.stride(), k.dtype, k.data_ptr() % 16, k.device,
            v.shape, v.stride(), v.dtype, v.data_ptr() % 16, v.device,
            at, driver, chosen_by_environment(driver, at), more, *options.items(),
            *map(type, (*more, *options.values())),  # why: 1 is True, and not taken for it
        )  # fmt: skip
    except RuntimeError:  # no elements in strided memory, which the whole way says
        return None


def repeated(key: Hashable, q: Any, k: Any, v: Any) -> Any:
    """The result of a call with this key, o or (o, lse), if one came before; else None."""
    known: _Known | None = REPEATED.get(key)
    if known is None:
        return None
    addresses = {"q": q.data_ptr(), "k": k.data_ptr(), "v": v.data_ptr()}
    results = []
    for name, shape, dtype in known.results:
        x = q.new_empty(shape, dtype=dtype)
        addresses[name] = x.data_ptr()
        results.append(x)
    known.call.run_at(addresses, (q, k, v, results), "torch")
    return results[0] if len(results) == 1 else tuple(results)


def remember(key: Hashable, q: Any, k: Any, v: Any, options: Options, want_lse: bool) -> None:
    """Remember a call that went the whole way, as one over these arrays, if it can be repeated."""
    call = prepared("forward", adopted(q=q, k=k, v=v), options, want_lse)
    if call.only_addresses_differ:
        if len(REPEATED) >= _MOST_KNOWN:
            REPEATED.clear()
        results = tuple((name, shape, getattr(torch, dtype)) for name, shape, dtype in call.results)
        REPEATED[key] = _Known(call, results)

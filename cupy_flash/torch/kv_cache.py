"""attention_with_kv_cache for torch: the same call, as a single operator under torch.compile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from .. import kv_cache
from ..call.adopt.torch import lost_derivative
from ..call.cache.describe import describe_cache
from ..call.cache.parts import cache_parts
from ..call.checks import pair
from ..call.codes import kind_of_codes
from ..call.compound import LatentCache, QuantizedCache
from ..call.given import split_of_cache
from ..call.options import CacheOptions
from ..call.public_names import public_name
from ..call.signature import takes
from ..errors import InvalidArgumentsError, UnsupportedError
from ..namespace import NAMESPACE
from .eager import is_plain
from .inputs import check_one_device, check_parts, refuse_lost_gradients, scaled, widen
from .ops import library, lse_shape, operators
from .repeat_over_cache import OverCache
from .schema import Argument, arguments_of, array_names, schema
from .shapes import views_of_shapes

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["NAMES", "attention_with_kv_cache"]

Tensor: TypeAlias = torch.Tensor

# Scales and zero points of quantised caches, and the slots that a one-dimensional block_table selects.
_UNITS = ("k_scale", "k_zero", "k_block_scale", "v_scale", "v_zero", "v_block_scale", "cache_batch_idx")
_ARRAYS = ("cache_seqlens", *array_names(CacheOptions), *_UNITS)
_ARGUMENTS = (
    Argument("SymInt?", "length"),  # cache_seqlens as one integer for all sequences
    *arguments_of(
        CacheOptions, {"window": "SymInt? left, SymInt? right", "tuning": "SymInt? splits, bool? check"}
    ),
    Argument("bool", "rotary_interleaved"),
    Argument("bool", "rotate_cache"),
    Argument("bool", "rotary_last"),
    Argument("bool", "return_lse"),
)
_DEFAULTS = {
    "rotary_interleaved": False, "rotate_cache": False, "rotary_last": False, "causal": False,
    "layout": "bhsd", "window": None,
}  # fmt: skip
NAMES = ("q", "k_cache", "v_cache", *_ARRAYS, *(argument.name for argument in _ARGUMENTS))
_TENSORS = ["Tensor q", "Tensor(a!) k_cache", "Tensor(b!) v_cache", *(f"Tensor? {name}" for name in _ARRAYS)]
library.define(f"attention_with_kv_cache({schema(_TENSORS, _ARGUMENTS)}) -> (Tensor, Tensor)")


def _run(*values: Any) -> tuple[Any, Any]:
    given = dict(zip(NAMES, values, strict=True))
    window, length = (given.pop("left"), given.pop("right")), given.pop("length")
    lengths = given.pop("cache_seqlens")
    want_lse, q = given.pop("return_lse"), given.pop("q")
    with torch.no_grad():
        result = kv_cache.attend_over_cache(
            q, length if lengths is None else lengths, {**given, "window": window}, want_lse
        )
    return result if want_lse else (result, result.new_empty(0))


for _device in ("CPU", "CUDA"):
    library.impl("attention_with_kv_cache", _run, _device)


def _count_writes(keys: Any, *values: Any) -> Any:
    """Increment autograd's version counters of written caches, like torch's own operators, also in traces."""
    if values[NAMES.index("k")] is not None:
        for cache in values[1:3]:
            torch.autograd.graph.increment_version(cache)
    return _operator.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *values)


library.impl("attention_with_kv_cache", _count_writes, "ADInplaceOrView", with_keyset=True)


# Arrays of calls whose shapes are checked only with their numbers.
_CHECKED_LATER = ("cu_seqlens_q", "cu_seqlens_k_new", "ragged_mask", "indices", "prefix_k")


def _check_shapes(tensors: dict[str, Any], given: dict[str, Any]) -> None:
    """Refuse what the call with numbers would refuse whatever they are, if all sizes are known."""
    raw = views_of_shapes(tensors, symbolic=False)
    of_latents = "k" in raw and "v" not in raw  # known by their addresses
    if not raw or of_latents or not raw.keys().isdisjoint(_CHECKED_LATER):
        return
    window = given["left"], given["right"]
    values = {name: given[name] for name in NAMES if name not in (*tensors, "length", "left", "right")}
    del values["return_lse"], values["check"]
    describe_cache(raw, *split_of_cache({**values, "window": window})[1:])


@torch.library.register_fake(f"{NAMESPACE}::attention_with_kv_cache", lib=library)
def _shapes(*values: Any) -> tuple[Any, Any]:
    given = dict(zip(NAMES, values, strict=True))
    tensors = {name: given[name] for name in ("q", "k_cache", "v_cache", *_ARRAYS)}
    check_one_device(**tensors)
    if not any(isinstance(x, (torch.SymInt, torch.SymFloat)) for x in values):
        _check_shapes(tensors, given)
    q = given["q"]
    halves = 2 if kind_of_codes(given) else 1  # codes of 4 bits, two to a byte
    o = q.new_empty((*q.shape[:-1], halves * given["v_cache"].shape[-1]))
    if not given["return_lse"]:
        return o, q.new_empty(0)
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    packed = given["cu_seqlens_q"] is not None
    return o, q.new_empty(lse_shape(q, given["layout"], packed), dtype=acc)


@torch.library.register_vmap(f"{NAMESPACE}::attention_with_kv_cache", lib=library)
def _refuse_vmap(*_: Any) -> Any:
    raise UnsupportedError(
        "attention over a cache, which is written in place, has no rule for torch.vmap.",
        hint="one call over a larger batch",
    )


_operator = operators.attention_with_kv_cache.default


@takes(CacheOptions)
def attention_with_kv_cache(
    q: Tensor,
    k_cache: Tensor | QuantizedCache | LatentCache,
    v_cache: Tensor | QuantizedCache | None = None,
    *,
    cache_seqlens: Tensor | int,
    return_lse: bool = False,
    **options: Unpack[CacheOptions],
) -> Any:
    """`cupy_flash.attention_with_kv_cache` for torch, also under torch.compile; without gradients.

    Parameters
    ----------
    q, k_cache, v_cache, cache_seqlens
        As in `cupy_flash.attention_with_kv_cache`. The operator's schema declares writes to the caches.
    {options: As in `cupy_flash.attention_with_kv_cache`.}
    return_lse : bool
        As in `cupy_flash.attention_with_kv_cache`.

    Returns
    -------
    Tensor, or (Tensor, Tensor) with return_lse

    Raises
    ------
    InvalidArgumentsError, UnsupportedError, CubinNotFoundError
        As in `cupy_flash.attention_with_kv_cache`; also tensors that require a gradient.
    """
    call = OverCache.of(q, k_cache, v_cache, cache_seqlens, options, return_lse)
    if call is not None and (known := call.repeated()) is not None:
        return known
    refuse_lost_gradients(scale=options.get("scale"), softcap=options.get("softcap"))
    flat = cache_parts(k_cache, v_cache, options)
    if flat.pop("workspace", None) is not None:
        raise UnsupportedError(
            "tuning has a workspace, and torch manages its own memory.",
            hint="tuning._replace(workspace=None), or cupy_flash.attention_with_kv_cache",
        )
    widen(flat, q)
    if isinstance(flat.get("scale"), torch.Tensor) and flat["scale"].dim():
        layout = "bshd" if flat.get("cu_seqlens_q") is not None else flat.get("layout", "bhsd")
        q, flat["scale"] = scaled(q, flat["scale"], layout), 1.0
    values: dict[str, Any] = dict.fromkeys((*_ARRAYS, *(argument.name for argument in _ARGUMENTS)))
    values |= {**_DEFAULTS, **flat, "return_lse": return_lse, "q": q, "cache_seqlens": cache_seqlens}
    length: Any = cache_seqlens
    # why in two: torch.compile reads this line, and a size is a SymInt where torch.export reads it
    if isinstance(length, (int, torch.SymInt)) or isinstance(length, np.integer):  # noqa: SIM101
        values["length"], values["cache_seqlens"] = length, None
    tensors = {name: values[name] for name in ("q", "k_cache", "v_cache", *_ARRAYS)}
    for name, x in tensors.items():
        if isinstance(x, torch.Tensor) and (lost := lost_derivative(x)):
            raise InvalidArgumentsError(
                f"{public_name(name)} {lost}, and attention over a cache records none.",
                hint=f"{public_name(name)}.detach()" + ", or a call inside torch.no_grad()" * x.requires_grad,
            )
    if is_plain(*tensors.values()):
        results = kv_cache.attend_over_cache(q, cache_seqlens, dict(flat), return_lse)
        if call is not None:
            call.remember(flat, return_lse)
        return results
    if values["k"] is not None and (kind := kind_of_codes(values)):
        raise UnsupportedError(
            "appending to a 4-bit cache in a program: the operator does not declare that scales are written.",
            hint=f"the call outside of it; or cupy_flash.quantized.{kind}(k) stored in the cache, and k=None",
        )
    needed = ("q", "k_cache", "v_cache", "cache_seqlens")
    check_parts(needed if values["length"] is None else needed[:3], **tensors)
    values["left"], values["right"] = pair(values["window"])
    others = [argument.of(values[argument.name]) for argument in _ARGUMENTS]
    o, lse = _operator(*tensors.values(), *others)
    return (o, lse) if return_lse else o

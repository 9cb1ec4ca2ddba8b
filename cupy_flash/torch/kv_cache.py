"""attention_with_kv_cache for torch: the same call, which a compiled program keeps as one operator."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch

from .. import kv_cache
from ..call.signature import takes
from ..errors import InvalidArguments, Unsupported
from .eager import is_plain
from .given import check_tensors, refuse_lost_gradients
from .ops import library, lse_shape

__all__ = ["attention_with_kv_cache"]

Tensor: TypeAlias = torch.Tensor

_OPTIONAL = (
    "cache_seqlens", "block_table", "cache_batch_idx", "k", "v", "rotary_cos", "rotary_sin", "k_scale",
    "v_scale", "alibi_slopes", "sinks",
)  # fmt: skip
_OPTIONS = (
    "SymInt? length, bool rotary_interleaved, bool causal, SymInt? left, SymInt? right, float? scale, "
    "float? softcap, str layout, str? precision, SymInt? splits, bool? check, bool return_lse"
)
_NAMES = ("q", "k_cache", "v_cache", *_OPTIONAL, *(part.split()[-1] for part in _OPTIONS.split(",")))
_DEFINITION = (
    "attention_with_kv_cache(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    + "".join(f"Tensor? {name}, " for name in _OPTIONAL)
    + f"{_OPTIONS}) -> (Tensor, Tensor)"
)
library.define(_DEFINITION)


def _run(*values: Any) -> tuple[Any, Any]:
    given = dict(zip(_NAMES, values, strict=True))
    window, length = (given.pop("left"), given.pop("right")), given.pop("length")
    lengths = given.pop("cache_seqlens")
    want_lse = given["return_lse"]
    with torch.no_grad():
        result = kv_cache.attention_with_kv_cache(
            **given, cache_seqlens=length if lengths is None else lengths, window=window
        )
    return result if want_lse else (result, result.new_empty(0))


for _device in ("CPU", "CUDA"):
    library.impl("attention_with_kv_cache", _run, _device)


@torch.library.register_fake("cupy_flash::attention_with_kv_cache", lib=library)
def _shapes(*values: Any) -> tuple[Any, Any]:
    given = dict(zip(_NAMES, values, strict=True))
    q = given["q"]
    o = q.new_empty((*q.shape[:-1], given["v_cache"].shape[-1]))
    if not given["return_lse"]:
        return o, q.new_empty(0)
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    return o, q.new_empty(lse_shape(q, given["layout"], False), dtype=acc)


@torch.library.register_vmap("cupy_flash::attention_with_kv_cache", lib=library)
def _refuse_vmap(*_: Any) -> Any:
    raise Unsupported(
        "attention over a cache, which is written in place, has no rule for torch.vmap.",
        hint="one call over a larger batch",
    )


_operator = torch.ops.cupy_flash.attention_with_kv_cache.default


@takes()
def attention_with_kv_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | int,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    layout: str = "bhsd",
    precision: str | None = None,
    splits: int | None = None,
    check: bool | None = None,
    return_lse: bool = False,
) -> Any:
    """`cupy_flash.attention_with_kv_cache`, in compiled programs too; without gradients.

    Parameters
    ----------
    q, k_cache, v_cache, cache_seqlens, block_table, cache_batch_idx, k, v, rotary_cos, rotary_sin
        As in `cupy_flash.attention_with_kv_cache`. torch is told that the caches are written.
    rotary_interleaved, k_scale, v_scale, causal, window, scale, softcap, alibi_slopes, sinks, layout
        As in `cupy_flash.attention_with_kv_cache`.
    precision, splits, check, return_lse
        As in `cupy_flash.attention_with_kv_cache`.

    Returns
    -------
    Tensor, or (Tensor, Tensor) with return_lse

    Raises
    ------
    InvalidArguments, Unsupported, CubinNotFound
        As in `cupy_flash.attention_with_kv_cache`; also tensors that require a gradient.
    """
    refuse_lost_gradients(scale=scale, softcap=softcap)
    length: Any = None
    lengths: Any = cache_seqlens
    if isinstance(lengths, int) or isinstance(lengths, np.integer):  # noqa: SIM101  (torch.compile reads it)
        length, lengths = lengths, None
    tensors: dict[str, Any] = {
        "q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": lengths, "block_table": block_table,
        "cache_batch_idx": cache_batch_idx, "k": k, "v": v, "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin, "k_scale": k_scale, "v_scale": v_scale, "alibi_slopes": alibi_slopes,
        "sinks": sinks,
    }  # fmt: skip
    options: dict[str, Any] = {
        "rotary_interleaved": rotary_interleaved, "causal": causal, "scale": scale, "softcap": softcap,
        "layout": layout, "precision": precision, "splits": splits, "check": check, "return_lse": return_lse,
    }  # fmt: skip
    if is_plain(*tensors.values()):
        tensors["cache_seqlens"] = cache_seqlens
        return kv_cache.attention_with_kv_cache(**tensors, window=window, **options)
    needed = ("q", "k_cache", "v_cache", "cache_seqlens") if length is None else ("q", "k_cache", "v_cache")
    check_tensors(needed, **tensors)
    for name, x in tensors.items():
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            raise InvalidArguments(
                f"{name} requires grad, and attention over a cache records none.",
                hint=f"{name}.detach(), or a call inside torch.no_grad()",
            )
    left, right = window or (None, None)
    o, lse = _operator(
        *tensors.values(), length, rotary_interleaved, causal, left, right,
        None if scale is None else float(scale), None if softcap is None else float(softcap),
        layout, precision, splits, check, return_lse,
    )  # fmt: skip
    return (o, lse) if return_lse else o

"""Attention over a KV cache: few new queries, many stored keys, contiguous or paged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from .api import attention, results_of_forward
from .call.adopt import adopt
from .call.arrays import CPU, ITEM_BYTES
from .call.cache.describe import PACKED, adopt_cache, pack_queries
from .call.cache.parts import cache_parts
from .call.cache.selected import Selection, adopt_selection
from .call.cache.values import check_values
from .call.checks import flag
from .call.codes import kind_of_codes
from .call.compound import LatentCache, QuantizedCache
from .call.given import split_of_cache
from .call.head_scale import scaled_over_cache
from .call.offsets import with_own_tables
from .call.opaque import opaque
from .call.options import CacheOptions
from .call.outputs import check_out, check_overlap, namespace, to_be_apart
from .call.progress import CALLBACK
from .call.signature import AnyArray, Array, takes
from .call.values import NO_RUN_OPTIONS, RunOptions
from .dispatch.memo import prepared
from .errors import InvalidArgumentsError
from .shared_prefix import Prefix

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["attend_over_cache", "attention_with_kv_cache"]


@overload
def attention_with_kv_cache(
    q: Array, k_cache: AnyArray | QuantizedCache | LatentCache,
    v_cache: AnyArray | QuantizedCache | None = None, *, cache_seqlens: Any,
    return_lse: Literal[False] = False, out: Array | None = None, **options: Unpack[CacheOptions],
) -> Array: ...  # fmt: skip
@overload
def attention_with_kv_cache(
    q: Array, k_cache: AnyArray | QuantizedCache | LatentCache,
    v_cache: AnyArray | QuantizedCache | None = None, *, cache_seqlens: Any,
    return_lse: Literal[True], out: Array | None = None, **options: Unpack[CacheOptions],
) -> tuple[Array, Any]: ...  # fmt: skip
@overload
def attention_with_kv_cache(
    q: Array, k_cache: AnyArray | QuantizedCache | LatentCache,
    v_cache: AnyArray | QuantizedCache | None = None, *, cache_seqlens: Any,
    return_lse: bool, out: Array | None = None, **options: Unpack[CacheOptions],
) -> Array | tuple[Array, Any]: ...  # fmt: skip
@takes(CacheOptions)
@opaque
def attention_with_kv_cache(
    q: Array,
    k_cache: AnyArray | QuantizedCache | LatentCache,
    v_cache: AnyArray | QuantizedCache | None = None,
    *,
    cache_seqlens: Any,
    return_lse: bool = False,
    out: Any = None,
    **options: Unpack[CacheOptions],
) -> Any:
    """Exact attention of new queries over cached keys and values, after optionally appending new ones.

    The last query of a sequence is at the position of its last key ("bottom_right"): query i of S_q has
    position length - S_q + i, where length is cache_seqlens plus the appended keys. causal, window, ALiBi and
    rotation (unless `Rotary` has seqlens) all count from there.

    Parameters
    ----------
    q : array, shape (batch, heads_q, seqlen_q, head_dim)
        float16, bfloat16, float32 or float64. With cu_seqlens_q (rows, heads_q, head_dim).
    k_cache : array, QuantizedCache or LatentCache, shape (batch, heads_k, capacity, head_dim)
        With a block_table of pages: (pages, heads_k, page, head_dim), pages of any size; with one of slots,
        any number of slots instead of batch. The dtype of q, or float8_e4m3fn without a scale (or uint8 with
        its bits); other formats are a `QuantizedCache`. Written to if k is given.
    v_cache : array or QuantizedCache, optional, shape (batch, heads_k, capacity, head_dim_v)
        Like k_cache. None with a `LatentCache` (MLA), whose first columns are the values; a view of these
        columns is equivalent.
    cache_seqlens : array of int32, shape (batch,), or int
        Keys of each sequence in the cache before this call. On a GPU the host does not read an array, while
        an integer is part of the launch: a captured CUDA graph keeps it.
    layout : {"bhsd", "bshd"}
        As in `attention`; "bshd" caches are (batch, capacity, heads_k, head_dim) or
        (pages, page, heads_k, head_dim).
    {shared: As in `attention`.}
    {options}
    return_lse : bool
        Also return the log-sum-exp of the scores.
    out : array, optional
        Where to write the result.

    Returns
    -------
    o : array, shape (batch, heads_q, seqlen_q, head_dim_v)
        Library, device and dtype of q, layout as given. With packed queries (rows, heads_q, head_dim_v); if
        out is not given, rows of no sequence are 0.
    lse : array, shape (batch, heads_q, seqlen_q)
        Only with return_lse. Natural logarithm, float32 (float64 for float64). With packed queries
        (heads_q, rows).

    Raises
    ------
    InvalidArgumentsError, UnsupportedError, CubinNotFoundError
        As in `attention`.

    Notes
    -----
    Unchecked input has defined results, and never reaches memory outside the cache: lengths are
    clamped to 0 and to the capacity of a sequence, new keys beyond it are dropped, and keys whose table entry
    is outside the cache are masked. Two sequences that append to one page overwrite each other.

    On a GPU the kernels of `attention` compute many queries, after a copy of the keys if these are in
    pages. A kernel that splits the keys computes few queries; `explain` says which one runs.

    The host reads neither lengths nor tables of a GPU, and the grid depends only on capacity and splits, so
    the call can be captured in a CUDA graph and replayed with other contents. Memory that is not given
    comes from the stream-ordered pool of the caller's library. torch keeps a graph's memory for that graph.
    With CuPy, pass ``out`` to a captured call; a workspace that is not given lives as long as the process.

    Examples
    --------
    >>> import numpy as np, cupy_flash
    >>> k_cache, v_cache = np.zeros((2, 1, 8, 128, 64), np.float32)  # room for 128 keys, 8 heads
    >>> q, k, v = np.ones((3, 1, 8, 1, 64), np.float32)
    >>> o = cupy_flash.attention_with_kv_cache(q, k_cache, v_cache, cache_seqlens=5, k=k, v=v)
    >>> o.shape, float(k_cache[0, 0, 5, 0])
    ((1, 8, 1, 64), 1.0)
    """
    every = cache_parts(k_cache, v_cache, options)
    if getattr(every.get("scale"), "shape", None):
        q = scaled_over_cache(q, every)
    return attend_over_cache(q, cache_seqlens, every, return_lse, out)


def attend_over_cache(
    q: Any, cache_seqlens: Any, options: dict[str, Any], return_lse: Any = False, out: Any = None
) -> Any:
    """`attention_with_kv_cache` with options from `cache_parts`: arrays and numbers, nothing compound."""
    whole, own, k_cache, v_cache = options, {}, options["k_cache"], options["v_cache"]
    shared = Prefix.of_cache(q, k_cache, v_cache, options)
    if options.get("indices") is not None:
        return _over_selected_keys(q, cache_seqlens, options, flag(return_lse, "return_lse"), out)
    del options["k_cache"], options["v_cache"]
    if shared is not None:
        whole, options = {**options, "cache_seqlens": cache_seqlens}, shared.behind(options)
        own = dict(options)
    workspace, check = options.pop("workspace", None), options.pop("check", None)
    arrays, values, cache_call = split_of_cache(options)
    cached = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": cache_seqlens}
    raw, length = adopt_cache({**cached, **arrays, "out": out})
    if raw["q"].device == CPU:
        raw = with_own_tables(raw)
    space = None if workspace is None else adopt(workspace, "workspace")
    if space is not None and space.dtype not in ITEM_BYTES:
        raise InvalidArgumentsError(
            f"tuning.workspace has dtype {space.dtype}.", hint="a contiguous array of uint8"
        )
    want_lse = flag(return_lse, "return_lse")
    packing = None
    if cache_call.longest is not None or not PACKED.isdisjoint(raw):
        packing = pack_queries(raw, values.layout, cache_call, length)
    needs_lse = want_lse or shared is not None
    progress = CALLBACK.get()
    run_options = NO_RUN_OPTIONS if progress is None else RunOptions(0, progress)
    call = prepared("decode", raw, values, needs_lse, packing, cache_call)
    if raw["q"].device == CPU if check is None else flag(check, "tuning.check"):
        check_values(call.problem, raw, length)
    if shared is None:
        return results_of_forward(call.run(raw, run_options, space, length), out)
    xp = namespace(raw["q"].library)
    with np.errstate(all="ignore"):  # why: overflow shows in the result, as in other calls
        first = shared.before_cache(xp, attention, q, k_cache, whole)
        if shared.may_hold_queries(q, whole):
            own |= {
                "k_cache": k_cache,
                "v_cache": v_cache,
                "check": False,
                **shared.rotated(xp, q, k_cache, whole),
            }
            rest = attend_over_cache(own.pop("q"), cache_seqlens, own, True, out)
        else:
            rest = results_of_forward(call.run(raw, run_options, space, length), out)
        o, lse = shared.merge(xp, first, rest, q.dtype)
    if out is not None:
        out[...] = o
        o = out
    return (o, lse) if want_lse else o


def _over_selected_keys(q: Any, cache_seqlens: Any, options: dict[str, Any], want_lse: bool, out: Any) -> Any:
    """`attend_over_cache` with indices: each query becomes a sequence of its own."""
    raw = adopt_selection(q, cache_seqlens, options)
    check, xp = options.get("check"), namespace(raw["q"].library)
    look = raw["q"].device == CPU if check is None else flag(check, "tuning.check")
    call = Selection.of(xp, q, cache_seqlens, options, raw, look)
    if out is not None:
        given = {name: x for name, x in raw.items() if name != "indices"} | {"out": adopt(out, "out")}
        halves = 2 if kind_of_codes(options) else 1  # why: an element holds two 4-bit codes
        check_out(False, given, (*raw["q"].shape[:-1], halves * raw["v_cache"].shape[-1]))
        check_overlap(given, to_be_apart(given, ["out"]))
    results = attend_over_cache(call.q, call.lengths, call.options, want_lse)
    o, lse = call.results(*results) if want_lse else call.results(results)
    if out is not None:
        out[...] = o
        o = out
    return (o, lse) if want_lse else o

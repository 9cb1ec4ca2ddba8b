"""attention_statistics: sums of the attention weights by key and by query, without the matrix."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .api import adopted, scaled
from .call import outputs
from .call.arrays import CPU, accumulator_of, device_name
from .call.blocks import check_blocks
from .call.cache.describe import PACKED, adopt_cache, describe_cache, pack_queries
from .call.cache.parts import cache_parts
from .call.cache.values import check_values
from .call.checks import integer, one_of
from .call.compound import LatentCache, unquantized
from .call.describe import describe
from .call.functions import check_integers
from .call.given import split_of_cache
from .call.head_scale import scaled_over_cache
from .call.offsets import with_own_tables
from .call.opaque import opaque
from .call.operands import Views, row_operand, table_of
from .call.options import CacheOptions, StatisticsOptions, declared
from .call.problem import Problem
from .call.progress import CALLBACK
from .call.signature import takes
from .call.spans import check_spans
from .call.values import RunOptions
from .dispatch.backends import driver_of, prepare_backend
from .dispatch.memo import computed_by, prepared
from .errors import InvalidArgumentsError, UnsupportedError
from .varlen import pack, split_dense_or_packed

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "WANTED",
    "AttentionStatistics",
    "attention_statistics",
    "kinds_of_results",
    "refuse_gpus",
    "results_of",
]

WANTED = ("key_sum", "key_max", "entropy", "top_k")
# why a limit: the time is linear in top_k.
MOST_PLACES = 1024
_ONLY_OF_A_CACHE = ("block_table", "cache_leftpad", "rotary")


class AttentionStatistics(NamedTuple):
    """Results of `attention_statistics`; None for those that ``want`` does not name.

    Attributes
    ----------
    key_sum : array or None
        Sum of the weights that a key receives, over all queries.
    key_max : array or None
        Largest weight that a key receives from any query.
    entropy : array or None
        Entropy of the weights of each query, in nats: ``-sum(p log p)`` over the keys.
    top_weights : array or None
        The largest weights of each query, in descending order.
    top_keys : array of int32, or None
        Keys of top_weights, as positions in the sequence; ties go to the lower key. If fewer keys have a
        weight above 0, the rest is -1, with a weight of 0.
    """

    key_sum: Any = None
    key_max: Any = None
    entropy: Any = None
    top_weights: Any = None
    top_keys: Any = None


@takes(StatisticsOptions)
@opaque
def attention_statistics(
    q: Any,
    k: Any,
    lse: Any = None,
    *,
    want: str | Collection[str] = WANTED,
    top_k: int = 8,
    cache_seqlens: Any = None,
    **options: Unpack[StatisticsOptions],
) -> AttentionStatistics:
    """Statistics of the attention weights P = softmax(scores), in memory linear in the sequence length.

    P is that of `attention` before dropout, for each query head. Sinks take part in the softmax but are not
    keys: no result includes their share. The call has no gradient.

    Parameters
    ----------
    q : array, shape (batch, heads_q, seqlen_q, head_dim)
        As in `attention`. To count only some of the queries, pass those, their lse, and their
        positions as align: ``q[..., -32:, :]`` with align="bottom_right". With cu_seqlens_q
        (rows_q, heads_q, head_dim).
    k : array, shape (batch, heads_k, seqlen_k, head_dim)
        As in `attention`; with cu_seqlens_k (rows_k, heads_k, head_dim). With cache_seqlens the k_cache of
        `attention_with_kv_cache`, which may be a `QuantizedCache` or a `LatentCache`.
    lse : array, optional, shape (batch, heads_q, seqlen_q)
        As returned by the forward call with the same options and return_lse=True, which saves a pass over the
        keys. With the lse of a call over more keys, results are shares of the whole.
    want : str, or tuple, list or set of str
        Any of "key_sum", "key_max", "entropy" and "top_k"; "top_k" not on a GPU.
    top_k : int
        Number of keys to list per query, at most 1024; time is linear in it.
    cache_seqlens : array of int32, shape (batch,), or int, optional
        Keys of each sequence in the cache, new ones included. The last query is at the position of the last
        key, as in `attention_with_kv_cache`; bias and score functions are not supported then.
    cu_seqlens_q : array of int32, shape (sequences + 1,), optional
        Packed queries, as in `attention_varlen`, or over a cache as in `attention_with_kv_cache`.
    {options: As in `attention`, `attention_varlen` and `attention_with_kv_cache`.}

    Returns
    -------
    AttentionStatistics
        Arrays of the library of q, float32 (float64 for float64 inputs), for each query head.

        key_sum, key_max: (batch, heads_q, seqlen_k), of packed sequences (heads_q, rows_k), over a cache
        (batch, heads_q, capacity); 0 for a key that no query sees, and for rows not in use.
        entropy: shape of lse; 0 for a query that sees no key.
        top_weights, top_keys: shape of lse, and a last axis of top_k.

    Raises
    ------
    InvalidArgumentsError
        As in `attention`, `attention_varlen` and `attention_with_kv_cache`.
    UnsupportedError
        Spans over a cache; on a GPU top_k, score functions, caches and arrays of JAX.

    Notes
    -----
    Grouped heads are not summed. Eviction from a cache that h query heads share takes
    ``key_sum.reshape(batch, heads_k, h, -1).sum(2)``.

    On a CPU the compiled core runs, or NumPy with ``rotary``. On a GPU simple kernels compute key_sum and
    key_max in one pass and entropy in another, without atomics. Without lse, the kernels of the forward pass
    compute it first.

    References
    ----------
    .. [1] Z. Zhang et al., "H2O", arXiv:2306.14048 (key_sum of all queries).
    .. [2] Y. Li et al., "SnapKV", arXiv:2404.14469 (key_sum of the last queries).

    Examples
    --------
    >>> import numpy as np, cupy_flash
    >>> q = k = v = np.random.default_rng(0).standard_normal((1, 4, 256, 64)).astype(np.float32)
    >>> o, lse = cupy_flash.attention(q, k, v, causal=True, return_lse=True)
    >>> seen = cupy_flash.attention_statistics(q, k, lse, causal=True, want=("key_sum", "entropy"))
    >>> seen.key_sum.shape, bool(np.allclose(seen.key_sum.sum(-1), 256, rtol=1e-4))
    ((1, 4, 256), True)
    """
    names = results_of(want, top_k)
    if cache_seqlens is None:
        problem, views, raw = _described(q, k, lse, options)
    else:
        problem, views, raw = _described_cache(q, k, lse, cache_seqlens, options)
    room = (problem.batch, problem.seqlen_k) if problem.cache else None
    layout = "bshd" if problem.packed else options.get("layout", "bhsd")
    kinds = kinds_of_results(names, int(top_k), raw["q"].shape, raw["k"].shape, raw["q"].dtype, layout, room)
    made = {name: outputs.zeros(raw["q"], *kind) for name, kind in kinds.items()}
    seen = {name: view.lifted(4 if name in _OF_PLACES else 3) for name, view in made.items()}
    every = {**views, **seen}
    counted = problem._replace(direction="statistics", wanted=names)
    backend = prepare_backend(counted, every, driver_of(raw["q"].device, raw["q"].library))
    if "top_keys" in seen:
        seen["top_keys"].numpy()[...] = -1
    computed_by(backend.kernels)
    backend.run(every, RunOptions(progress=CALLBACK.get()))
    return AttentionStatistics(**{name: outputs.finished(view) for name, view in made.items()})


_OF_PLACES = ("top_weights", "top_keys")


def results_of(want: Any, top_k: Any) -> tuple[str, ...]:
    """The requested fields of `AttentionStatistics`; check `want` and `top_k`."""
    if not 1 <= (integer(top_k) or 0) <= MOST_PLACES:
        raise InvalidArgumentsError(
            f"top_k is {top_k!r}.", hint=f"how many keys to list, from 1 to {MOST_PLACES}"
        )
    names = tuple(want) if isinstance(want, (tuple, list, set, frozenset)) else (want,)
    for name in names:
        if not one_of(name, WANTED):
            raise InvalidArgumentsError(f"want has {name!r}.", hint=f"want= some of {', '.join(WANTED)}")
    if not names:
        raise InvalidArgumentsError("want is empty.", hint=f"want= some of {', '.join(WANTED)}")
    return tuple(
        name for name in AttentionStatistics._fields
        if (name if name not in _OF_PLACES else "top_k") in names
    )  # fmt: skip


def kinds_of_results(
    names: tuple[str, ...],
    top_k: int,
    q: tuple[int, ...],
    k: tuple[int, ...],
    dtype: str,
    layout: str,
    room: tuple[int, int] | None,
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each result.

    Parameters
    ----------
    names, top_k
        The requested results.
    q, k : tuple of int
        Shapes as given.
    dtype, layout : str
        Dtype and layout of q; packed rows are "bshd".
    room : (int, int), optional
        For a cache: number of sequences, and capacity of each.
    """

    def rows(shape: tuple[int, ...]) -> tuple[int, ...]:
        outer = shape[:-1]
        return outer if layout == "bhsd" or len(outer) < 2 else (*outer[:-2], outer[-1], outer[-2])

    of_queries = rows(q)
    heads = of_queries[-2:-1]
    # Results by key have the heads of q, not of k.
    of_keys = (room[0], *heads, room[1]) if room else (*rows(k)[:-2], *heads, rows(k)[-1])
    acc = accumulator_of(dtype)
    every = {
        "key_sum": (of_keys, acc),
        "key_max": (of_keys, acc),
        "entropy": (of_queries, acc),
        "top_weights": ((*of_queries, top_k), acc),
        "top_keys": ((*of_queries, top_k), "int32"),
    }
    return {name: every[name] for name in names}


def _described(q: Any, k: Any, lse: Any, options: Any) -> tuple[Problem, Views, Views]:
    """Describe a call over dense or packed keys: the problem, its views in the pass, and arrays as given."""
    for name in _ONLY_OF_A_CACHE:
        if options.pop(name, None) is not None:
            raise InvalidArgumentsError(
                f"{name} is given without cache_seqlens.",
                hint="cache_seqlens=, with the k_cache of attention_with_kv_cache as k",
            )
    arrays, values, packed = split_dense_or_packed(options)
    parts = unquantized(q=q, k=k, v=k)
    q, k, _ = (parts.pop(name) for name in "qkv")
    arrays |= parts
    q, values, _ = scaled(q, values)
    if lse is not None:
        arrays["lse"] = lse
    raw = with_own_tables(adopted(q=q, k=k, **arrays))
    raw["v"] = raw["k"]  # no kernel reads it
    packing = None if packed is None else pack(raw, *packed)
    if lse is None and driver_of(raw["q"].device, raw["q"].library) is not None:
        # why: the forward kernels are the fastest that compute it; the values of v do not matter.
        raw["lse"] = prepared("forward", raw, values, packing=packing).run(raw)["lse"]
    problem, views, given = describe("forward", raw, values, packing=packing)
    check_spans(problem.spans, given)
    check_blocks(problem.blocks, given)
    check_integers(problem.function, problem.extents, 64, given)
    return problem, views, given


def _described_cache(
    q: Any, k: Any, lse: Any, cache_seqlens: Any, options: Any
) -> tuple[Problem, Views, Views]:
    """Describe a call over a cache; results as in `_described`."""
    align = options.pop("align", None)
    if align is not None and not one_of(align, ("bottom_right",)):
        raise InvalidArgumentsError(
            f"align is {align!r}; over a cache the last query of a sequence is at its last key.",
            hint='align="bottom_right"',
        )
    for name in [name for name in options if name not in declared(CacheOptions)]:
        if options.pop(name) is not None:
            raise UnsupportedError(
                f"{name} is not supported over a cache.", hint=f"no {name}, or k and v that are not a cache"
            )
    k = k.latents if isinstance(k, LatentCache) else k
    every = cache_parts(k, k, options)
    q = scaled_over_cache(q, every)
    arrays, values, cache_call = split_of_cache(every)
    raw, length = adopt_cache({"q": q, "cache_seqlens": cache_seqlens, "lse": lse, **arrays})
    raw = with_own_tables(raw)
    raw["v_cache"] = raw["k_cache"]  # no kernel reads it
    packing = None
    if cache_call.longest is not None or not PACKED.isdisjoint(raw):
        packing = pack_queries(raw, values.layout, cache_call, length)
    problem, views = describe_cache(raw, values, cache_call, packing=packing)
    if problem.spans is not None:
        raise UnsupportedError("spans are not supported over a cache here.", hint="mask= a boolean array")
    check_values(problem, raw, length)
    if lse is not None:
        heads, rows = views["q"].shape[1:3]
        shape = (heads, rows) if problem.packed else (problem.batch, heads, rows)
        views["lse"] = row_operand("lse", raw, (shape,), problem.accumulator).lifted(3)
    if length is not None:
        views["cache_seqlens"] = raw["cache_seqlens"] = adopted(
            cache_seqlens=np.full(problem.batch, length, np.int32)
        )["cache_seqlens"]
    return problem, views, {"k": raw["k_cache"], **raw}


def refuse_gpus(raw: Views) -> None:
    """Refuse JAX arrays on a GPU, for which there is no kernel call."""
    q = raw["q"]
    if q.device != CPU:
        raise UnsupportedError(
            f"attention_statistics of JAX arrays has no kernel for GPUs, and q is {device_name(q.device)}.",
            table_of(raw),
            hint="arrays on a CPU, or of CuPy or torch; or for key_sum alone attention_backward with a v of "
            "ones, whose dv it is (docs/recipes.md, Attention weights)",
        )

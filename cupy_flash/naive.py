"""naive_attention: the textbook method with its S x S matrix, to compare results and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .call.arrays import ITEM_BYTES, numpy_dtype
from .call.blocks import PARTIAL, WHOLE, Blocks, check_blocks
from .call.describe import describe
from .call.functions import argument_views, check_integers
from .call.given import split
from .call.head_scale import HeadScale
from .call.opaque import opaque
from .call.operands import lower_shape
from .call.options import NaiveOptions
from .call.problem import Problem
from .call.signature import takes
from .call.spans import check_spans
from .errors import UnsupportedError

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["NaiveResult", "naive_attention", "naive_bytes"]


class NaiveResult(NamedTuple):
    """The result of `naive_attention`.

    Attributes
    ----------
    o : array
        The result, as in `attention`.
    lse : array
        As in `attention`.
    scores_bytes : int
        Bytes of the two S x S matrices (scores and weights) held at once.
    """

    o: Any
    lse: Any
    scores_bytes: int


def naive_bytes(problem: Problem) -> int:
    """Bytes of the score and weight matrices of the textbook method, in the accumulator's dtype."""
    p = problem
    return 2 * p.batch * p.heads_q * p.seqlen_q * p.seqlen_k * ITEM_BYTES[p.accumulator]


@takes(NaiveOptions)
@opaque
@np.errstate(over="ignore", invalid="ignore")
def naive_attention(q: Any, k: Any, v: Any, **options: Unpack[NaiveOptions]) -> NaiveResult:
    """Attention by the textbook method: the whole score matrix, its softmax, its product with v.

    Parameters
    ----------
    q, k, v : array
        As in `attention`; NumPy or CuPy arrays.
    {options: As in `attention`. There is no dropout.}

    Returns
    -------
    NaiveResult

    Raises
    ------
    InvalidArgumentsError
        As in `attention`.
    UnsupportedError
        Arrays of another library.
    """
    arrays, values = split(options)
    by_head = HeadScale.of(values.scale, q, values.layout)
    if by_head is not None:
        q, values = by_head.times(q), values._replace(scale=1.0)
    given = {"q": q, "k": k, "v": v, **arrays}
    problem, views, raw = describe("forward", given, values)
    if problem.of_float8:
        raise UnsupportedError(
            f"naive_attention takes no scales, and {problem.dtype} needs them.",
            hint="q, k and v times their scales as bfloat16 or float32",
        )
    if raw["q"].library == "numpy":
        xp: Any = np
        x = {name: view.numpy() for name, view in views.items()}
    elif raw["q"].library == "cupy":
        import cupy

        xp = cupy
        rank = q.ndim
        x = {name: given[name] for name in views}
        for name in "qkv":
            array = x[name].swapaxes(-2, -3) if values.layout == "bshd" and rank > 2 else x[name]
            x[name] = array.reshape((1,) * (4 - rank) + array.shape)
    else:
        raise UnsupportedError(
            f"naive_attention compares NumPy and CuPy arrays, not {raw['q'].library}.",
            hint="numpy.asarray(q)",
        )
    p = problem
    acc = numpy_dtype(p.accumulator)
    group = p.heads_q // p.heads_k if p.heads_k else 1
    k_all = xp.repeat(x["k"].astype(acc), group, axis=1)
    v_all = xp.repeat(x["v"].astype(acc), group, axis=1)

    s = (x["q"].astype(acc) * acc.type(p.scale)) @ k_all.swapaxes(-1, -2)
    if p.softcap is not None:
        s = acc.type(p.softcap) * xp.tanh(s / acc.type(p.softcap))
    if p.function is not None:
        check_integers(p.function, p.extents, 64, views)
        where = (xp.arange(n, dtype=xp.int64).reshape(-1, *(1,) * (3 - a)) for a, n in enumerate(s.shape))
        arguments = [x[name] for name in argument_views(views)]
        s = xp.broadcast_to(values.score.on_arrays(s, *where, *arguments), s.shape).astype(acc)
    if p.bias is not None:
        s = s + x["bias"].astype(acc)
    position = xp.arange(p.seqlen_q)[:, None] + p.offset
    key = xp.arange(p.seqlen_k)[None, :]
    if p.alibi:
        s = s - x["alibi_slopes"][..., None, None] * abs(position - key).astype(acc)
    keep = xp.ones((p.seqlen_q, p.seqlen_k), bool)
    far = 2**40  # why clamp: window bounds may exceed 64 bits
    if p.left is not None:
        keep &= key >= position - min(p.left, far)
    if p.right is not None:
        keep &= key <= position + min(p.right, far)
    if p.mask is not None:
        keep = keep & x["mask"]
    if p.bias is not None:  # why: a masked key may make the sum NaN
        keep = keep & (x["bias"] != -np.inf)
    if p.spans is not None:
        check_spans(p.spans, raw)
        at = key if p.spans.by_query else position - p.offset
        bounds = xp.expand_dims(x["spans"], 3 if p.spans.by_query else 2)
        inside = (bounds[..., 0::2] <= at[..., None]) & (at[..., None] < bounds[..., 1::2])
        keep = keep & inside.any(axis=-1)
    if p.blocks is not None:
        check_blocks(p.blocks, raw)
        keep = keep & _seen(xp, p.blocks, x["blocks"], x["block_bits"], position - p.offset, key)
    s = xp.where(keep, s, acc.type(-np.inf))

    top = s.max(axis=-1, keepdims=True, initial=-np.inf)
    if p.sinks:
        top = xp.maximum(top, x["sinks"][:, None, None])
    top = xp.where(xp.isneginf(top), acc.type(0), top)
    weights = xp.exp(s - top)
    total = weights.sum(axis=-1, keepdims=True)
    if p.sinks:
        total = total + xp.exp(x["sinks"][:, None, None] - top)
    o = (weights / xp.where(total == 0, acc.type(1), total)) @ v_all
    with np.errstate(divide="ignore"):
        lse = (top + xp.log(total))[..., 0]

    rank, layout = len(raw["q"].shape), values.layout
    if layout == "bshd" and rank > 2:
        o = o.swapaxes(1, 2)
    shape = lower_shape((p.batch, p.heads_q, p.seqlen_q, p.head_dim_v), layout, rank)
    o = o.astype(numpy_dtype(p.dtype)).reshape(shape)
    return NaiveResult(o, lse.reshape(lse.shape[4 - rank :]), naive_bytes(p))


def _seen(xp: Any, blocks: Blocks, table: Any, bits: Any, i: Any, j: Any) -> Any:
    """Which queries i may attend to which keys j, by a block mask."""
    code = table[..., i // blocks.queries, j // blocks.keys]
    if not blocks.partial:
        return code == WHOLE
    byte = bits[xp.maximum(code - PARTIAL, 0), i % blocks.queries, j % blocks.keys // 8]
    return xp.where(code < PARTIAL, code == WHOLE, byte >> (j % 8).astype(byte.dtype) & 1 != 0)

"""The specification: attention and its gradients in plain FP64 NumPy, O(S^2), by the definition.

This file has every rule of the semantics of `cupy_flash.attention`, in the order in which it
applies: positions (`Options.offset`, `keep`), scores (`forward`, `function`), softmax with sinks (`forward`),
dropout (`philox`, `dropout_weights`), gradients (`reference_backward`). It shares no code with the
library, so that a mistake there cannot be repeated here; finite differences check it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..cpu.threads import on_one_blas_thread
from .dual import Dual

__all__ = [
    "Gradients",
    "Options",
    "Reference",
    "Statistics",
    "reference_attention",
    "reference_backward",
    "reference_statistics",
]


class Reference(NamedTuple):
    """Output and log-sum-exp of `reference_attention`.

    Attributes
    ----------
    o : ndarray
        Output, in the layout of q.
    lse : ndarray, shape (batch, heads_q, seqlen_q)
        Log-sum-exp, natural logarithm.
    """

    o: np.ndarray
    lse: np.ndarray


class Gradients(NamedTuple):
    """Gradients of `reference_backward`; dbias and dsinks are None without bias or sinks.

    Attributes
    ----------
    dq, dk, dv : ndarray
        Shapes of q, k, v.
    dbias, dsinks : ndarray or None
        Shapes of bias and sinks.
    """

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dbias: np.ndarray | None
    dsinks: np.ndarray | None


class Statistics(NamedTuple):
    """Results of `reference_statistics`; fields as in `cupy_flash.AttentionStatistics`."""

    key_sum: np.ndarray
    key_max: np.ndarray
    entropy: np.ndarray
    top_weights: np.ndarray
    top_keys: np.ndarray


@dataclass(frozen=True, eq=False, kw_only=True)
class Options:
    """The options of `cupy_flash.attention` that change the result, and the scales of float8 inputs."""

    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    align: str | int | None = None
    mask: Any = None
    bias: Any = None
    scale: float | None = None
    softcap: float | None = None
    score: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    dropout: float = 0.0
    seed: int | None = None
    layout: str = "bhsd"
    q_scale: Any = None
    k_scale: Any = None
    v_scale: Any = None

    def scales(self, heads_k: int) -> tuple[np.ndarray, ...]:
        """Return the dequantisation scales of q, k and v, each (1 or batch, key heads, 1, 1)."""
        given = (self.q_scale, self.k_scale, self.v_scale)
        scales = (np.ones(heads_k) if x is None else np.asarray(x, np.float64) for x in given)
        return tuple(x.reshape(-1, heads_k, 1, 1) for x in scales)

    def masks(self) -> list[Any]:
        """Return the masks of a nested tuple as a flat list; a pair must pass all of them."""
        found, left = [], [self.mask]
        while left:
            x = left.pop()
            if type(x) in (tuple, list):
                left += x
            elif x is not None:
                found.append(x)
        return found

    def offset(self, seqlen_q: int, seqlen_k: int) -> int:
        """Return the key position of query 0; query i is at key position i + offset."""
        if isinstance(self.align, int):
            return self.align
        if seqlen_q == seqlen_k or self.align == "top_left":
            return 0
        if self.align == "bottom_right":
            return seqlen_k - seqlen_q
        if self.causal or self.window is not None or self.alibi_slopes is not None:
            raise ValueError(f"align is needed: seqlen_q {seqlen_q} != seqlen_k {seqlen_k}")
        return 0


class Forward(NamedTuple):
    """All intermediates of the forward pass, as FP64 arrays (batch, heads_q, ...)."""

    q: np.ndarray
    k: np.ndarray  # repeated for grouped heads; for gradients: 0 in place of infinities and NaN
    v: np.ndarray  # repeated for grouped heads
    group: int  # heads of q that share one head of k and v
    scale: float
    capped: np.ndarray  # scores after softcap, before the score function; 0 where hidden
    slope: np.ndarray  # derivative of the score function
    added: np.ndarray  # bias + ALiBi
    keep: np.ndarray  # True where the query may attend to the key
    p: np.ndarray  # softmax
    p_sink: np.ndarray  # softmax weight of the sink, (batch, heads_q, seqlen_q, 1)
    dropout: np.ndarray  # 0 where dropped, 1 / (1 - dropout) where kept
    o: np.ndarray
    lse: np.ndarray


def reference_attention(q: Any, k: Any, v: Any, **options: Any) -> Reference:
    """Compute attention in FP64 from its definition.

    O = dropout(softmax(score(softcap(scale Q K^T)) + bias + ALiBi, masked)) V.

    Parameters
    ----------
    q, k, v : array
        As in `cupy_flash.attention`; any floating dtype, converted to float64.
    **options
        The fields of `Options`, as in `cupy_flash.attention`.

    Returns
    -------
    Reference
        o, in the layout of q, and lse, shape ([[batch,] heads_q,] seqlen_q), float64.
    """
    chosen = Options(**options)
    return results(forward(q, k, v, chosen), np.ndim(q), chosen)


def results(state: Forward, rank: int, chosen: Options) -> Reference:
    """Return o and lse with the rank and layout of q."""
    return Reference(restore(state.o, rank, chosen.layout), restore_rows(state.lse, rank))


def reference_backward(do: Any, q: Any, k: Any, v: Any, *, dlse: Any = None, **options: Any) -> Gradients:
    """Compute the gradients of sum(dO * O) + sum(dLSE * LSE) in FP64.

    Parameters
    ----------
    do : array
        Gradient of the output, shaped like it.
    q, k, v : array
        As in `reference_attention`.
    dlse : array, optional
        Gradient of the log-sum-exp, shaped like it.
    **options
        The fields of `Options`, as in `cupy_flash.attention`.

    Returns
    -------
    Gradients
        Shaped like q, k, v, bias and sinks; float64.
    """
    chosen = Options(**options)
    return gradients(do, dlse, forward(q, k, v, chosen), np.ndim(q), chosen)


@on_one_blas_thread
def gradients(do: Any, dlse: Any, state: Forward, rank: int, chosen: Options) -> Gradients:
    """Compute the gradients from the intermediates of the forward pass."""
    layout = chosen.layout
    do4 = canonical(do, layout).astype(np.float64)
    dlse3 = np.zeros(state.lse.shape) if dlse is None else canonical_rows(dlse).astype(np.float64)

    dp = (do4 @ state.v.swapaxes(-1, -2)) * state.dropout
    delta = (do4 * state.o).sum(axis=-1, keepdims=True) - dlse3[..., None]
    ds = state.p * (dp - delta)
    ds_raw = np.where(ds == 0, 0.0, ds * state.slope)
    if chosen.softcap is not None:
        ds_raw = ds_raw * (1 - (state.capped / chosen.softcap) ** 2)
    dq = state.scale * ds_raw @ state.k
    dk = state.scale * ds_raw.swapaxes(-1, -2) @ state.q
    dv = (state.p * state.dropout).swapaxes(-1, -2) @ do4
    dbias = None if chosen.bias is None else sum_to_shape(ds, np.shape(chosen.bias))
    dsinks = None if chosen.sinks is None else -(state.p_sink * delta).sum(axis=(0, 2, 3))
    return Gradients(
        restore(dq, rank, layout),
        restore(sum_groups(dk, state.group), rank, layout),
        restore(sum_groups(dv, state.group), rank, layout),
        dbias,
        dsinks,
    )


def reference_statistics(q: Any, k: Any, *, top_k: int = 8, **options: Any) -> Statistics:
    """Compute the statistics of `cupy_flash.attention_statistics` in FP64, from the whole matrix P.

    Parameters
    ----------
    q, k : array
        As in `reference_attention`.
    top_k : int
        Keys to list per query.
    **options
        The fields of `Options`; dropout changes nothing.

    Returns
    -------
    Statistics
        key_sum and key_max ([[batch,] heads_q,] seqlen_k), entropy (..., seqlen_q), top_weights and
        top_keys (..., seqlen_q, top_k).
    """
    chosen = Options(**{**options, "dropout": 0.0})
    rank = np.ndim(q)
    p = forward(q, k, np.zeros((*np.shape(k)[:-1], 1)), chosen).p
    key_sum, key_max = p.sum(axis=2), p.max(axis=2, initial=0)
    entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(axis=-1)
    padded = np.concatenate([p, np.zeros((*p.shape[:-1], top_k))], axis=-1)  # there may be fewer keys
    order = np.argsort(-padded, axis=-1, kind="stable")[..., :top_k]  # equal weights: lower key first
    top_weights = np.take_along_axis(padded, order, axis=-1)
    top_keys = np.where(top_weights > 0, order, -1)
    of_rows = (restore_rows(x, rank) for x in (key_sum, key_max, entropy))
    return Statistics(*of_rows, *(x.reshape(x.shape[4 - rank :]) for x in (top_weights, top_keys)))


@on_one_blas_thread
def forward(q: Any, k: Any, v: Any, chosen: Options) -> Forward:
    """Compute every intermediate of the forward pass in FP64."""
    q4, k4, v4 = (canonical(x, chosen.layout).astype(np.float64) for x in (q, k, v))
    batch, heads_q, seqlen_q, head_dim = q4.shape
    seqlen_k = k4.shape[2]
    group = heads_q // k4.shape[1]
    q_scale, k_scale, v_scale = chosen.scales(k4.shape[1])
    q4, k4, v4 = q4 * np.repeat(q_scale, group, axis=1), k4 * k_scale, v4 * v_scale
    k4, v4 = np.repeat(k4, group, axis=1), np.repeat(v4, group, axis=1)
    full = (batch, heads_q, seqlen_q, seqlen_k)
    scale = head_dim**-0.5 if chosen.scale is None else float(chosen.scale)

    with np.errstate(invalid="ignore", over="ignore"):  # masked keys may hold NaN or inf
        capped = scale * (q4 @ k4.swapaxes(-1, -2))
        if chosen.softcap is not None:
            capped = chosen.softcap * np.tanh(capped / chosen.softcap)
        changed, slope = function(chosen, capped)
        added = additive(chosen, full)
        kept = keep(chosen, full) & ~np.isneginf(added) & ~np.isneginf(changed)
        scores = np.where(kept, changed + added, -np.inf)
    # Hidden keys, whatever they hold, have no part in gradients; a visible NaN already makes dS NaN.
    capped, k4 = np.where(kept, capped, 0.0), np.where(np.isfinite(k4), k4, 0.0)

    sink = np.full((batch, heads_q, seqlen_q, 1), -np.inf)
    if chosen.sinks is not None:
        sink[:] = np.asarray(chosen.sinks, np.float64).reshape(1, heads_q, 1, 1)
    extended = np.concatenate([scores, sink], axis=-1)  # the sink is an additional key without a value
    row_max = extended.max(axis=-1, keepdims=True)
    row_max = np.where(np.isneginf(row_max), 0.0, row_max)
    with np.errstate(invalid="ignore"):  # a score or sink of +inf makes NaN of its row
        weights = np.exp(extended - row_max)
    row_sum = weights.sum(axis=-1, keepdims=True)
    weights = weights / np.where(row_sum == 0, 1.0, row_sum)
    p, p_sink = weights[..., :seqlen_k], weights[..., seqlen_k:]
    hidden = np.isneginf(scores)
    p, empty = np.where(hidden, 0.0, p), hidden.all(axis=-1, keepdims=True)  # whatever the sink is
    lse = np.where(empty, sink, row_max + np.log(np.where(row_sum == 0, 1.0, row_sum)))
    dropout = dropout_weights(chosen, full)
    o = (p * dropout) @ v4
    return Forward(q4, k4, v4, group, scale, capped, slope, added, kept, p, p_sink, dropout, o, lse[..., 0])


def called(function: Any, *at: Any) -> Any:
    """Call a score or mask function with its bound arrays on scores and positions."""
    function, bound = function if type(function).__name__ == "Bound" else (function, ())
    arrays = [np.asarray(x) for x in bound]
    arrays = [x.astype(np.float64) if x.dtype.kind not in "iub" else x for x in arrays]
    return function.in_python()(*at, *arrays)


def function(chosen: Options, capped: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the score function of scores (batch, head, i, j), and its derivative with respect to them."""
    if chosen.score is None:
        return capped, np.ones((1, 1, 1, 1))
    positions = np.ogrid[tuple(slice(n) for n in capped.shape)]
    made = called(chosen.score, Dual(capped, np.ones(capped.shape)), *positions)
    value, slope = (made.value, made.slope) if isinstance(made, Dual) else (made, 0.0)
    return np.broadcast_to(value, capped.shape), np.broadcast_to(slope, capped.shape)


def keep(chosen: Options, full: tuple[int, int, int, int]) -> np.ndarray:
    """Return, for all (batch, head, i, j), whether query i may attend to key j."""
    i, j = np.arange(full[2])[:, None], np.arange(full[3])[None, :]
    offset = chosen.offset(full[2], full[3])
    left, right = chosen.window if chosen.window is not None else (None, None)
    kept = np.ones(full, bool)
    if chosen.causal:
        kept &= j - i <= offset
    if left is not None:
        kept &= j - i >= offset - left  # whose bound may be beyond int64
    if right is not None:
        kept &= j - i <= offset + right
    for mask in chosen.masks():
        kind = type(mask).__name__
        if kind == "Spans":
            spans = np.asarray(mask.bounds)  # (..., 1, keys, 2 or 4), or (..., queries, 1, 2 or 4)
            at = (j if spans.shape[-3:-1] == (full[2], 1) else i)[..., None]
            kept &= ((spans[..., 0::2] <= at) & (at < spans[..., 1::2])).any(axis=-1)
        elif kind == "BlockMask":
            table, bits = map(np.asarray, mask)
            every = np.unpackbits(bits, axis=-1, bitorder="little").astype(
                bool
            )  # (n, queries, keys) per block
            rows, columns = every.shape[1:]
            code = table[..., i // rows, j // columns]
            n = np.clip(code - 2, 0, None)
            some = every[n, i % rows, j % columns] if len(every) else False
            kept &= np.where(code < 2, code == 1, some)
        elif kind in ("Bound", "ScoreFunction"):
            kept &= np.asarray(called(mask, *np.ogrid[tuple(slice(n) for n in full)]), bool)
        else:
            kept &= np.asarray(mask)
    return kept


def additive(chosen: Options, full: tuple[int, int, int, int]) -> np.ndarray:
    """Return bias plus ALiBi for all (batch, head, i, j)."""
    added = np.zeros((1, 1, 1, 1))
    if chosen.bias is not None:
        added = added + np.asarray(chosen.bias).astype(np.float64)
    if chosen.alibi_slopes is not None:
        i, j = np.arange(full[2])[:, None], np.arange(full[3])[None, :]
        distance = np.abs(i + chosen.offset(full[2], full[3]) - j)
        slopes = np.asarray(chosen.alibi_slopes, np.float64)  # (heads_q,) or (batch, heads_q)
        added = added - slopes[..., None, None] * distance
    return added


def dropout_weights(chosen: Options, full: tuple[int, int, int, int]) -> np.ndarray:
    """Return 0 for a dropped weight and 1 / (1 - dropout) for a kept one."""
    if not chosen.dropout:
        return np.ones((1, 1, 1, 1))
    batch, heads, seqlen_q, seqlen_k = full
    seed = int(chosen.seed or 0)
    groups_of_four = -(-seqlen_k // 4)
    b, h, i, j4 = np.indices((batch, heads, seqlen_q, groups_of_four), dtype=np.uint64)
    words = np.stack(philox((j4, i, h, b), (seed & 0xFFFFFFFF, seed >> 32)), axis=-1)
    words = words.reshape(batch, heads, seqlen_q, 4 * groups_of_four)[..., :seqlen_k]
    threshold = min(round(chosen.dropout * 2**32), 2**32 - 1)
    return np.where(words >= threshold, 1 / (1 - chosen.dropout), 0.0)


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> list[np.ndarray]:
    """Return the four 32-bit words of Philox 4x32-10 (Salmon et al., SC 2011), as uint64."""
    low = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = (np.asarray(word, np.uint64) for word in counter)
    k0, k1 = key
    for _ in range(10):
        product0, product1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (
            (product1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            product1 & low,
            (product0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            product0 & low,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def canonical(x: Any, layout: str) -> np.ndarray:
    """View an array of rank 2 to 4 as (batch, heads, seqlen, head_dim)."""
    x = np.asarray(x)
    if x.ndim == 2 or layout == "bhsd":
        lifted: np.ndarray = x.reshape((1,) * (4 - x.ndim) + x.shape)
    else:
        lifted = x.reshape((1,) * (4 - x.ndim) + x.shape).swapaxes(1, 2)
    return lifted


def restore(x: np.ndarray, rank: int, layout: str) -> np.ndarray:
    """Undo `canonical`."""
    lifted = x if rank == 2 or layout == "bhsd" else x.swapaxes(1, 2)
    return lifted.reshape(lifted.shape[4 - rank :])


def canonical_rows(x: Any) -> np.ndarray:
    """View a log-sum-exp of rank 1 to 3 as (batch, heads, seqlen_q)."""
    rows: np.ndarray = np.asarray(x)
    return rows.reshape((1,) * (3 - rows.ndim) + rows.shape)


def restore_rows(x: np.ndarray, rank: int) -> np.ndarray:
    """Undo `canonical_rows` for inputs of this rank."""
    return x.reshape(x.shape[4 - rank :])


def sum_groups(x: np.ndarray, group: int) -> np.ndarray:
    """Sum the heads of q that share one head of k and v."""
    batch, heads, seqlen, dim = x.shape
    summed: np.ndarray = x.reshape(batch, heads // group, group, seqlen, dim).sum(axis=2)
    return summed


def sum_to_shape(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sum over the axes along which an array of this shape was broadcast to x."""
    padded = (1,) * (x.ndim - len(shape)) + tuple(shape)
    axes = tuple(axis for axis in range(x.ndim) if padded[axis] == 1)
    return np.asarray(x.sum(axis=axes)).reshape(shape)

"""The naive O(S^2) algorithm in the precision of its inputs, which the error budget is measured by."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..cpu.threads import on_one_blas_thread
from . import reference
from .reference import Options

__all__ = ["NaiveResult", "naive_same_precision"]


class NaiveResult(NamedTuple):
    """Outputs of `naive_same_precision`; the gradients are None without do.

    Attributes
    ----------
    o, lse : ndarray
        Output and log-sum-exp.
    dq, dk, dv, dbias, dsinks : ndarray or None
        Gradients; dbias and dsinks are also None without bias or sinks.
    """

    o: np.ndarray
    lse: np.ndarray
    dq: np.ndarray | None = None
    dk: np.ndarray | None = None
    dv: np.ndarray | None = None
    dbias: np.ndarray | None = None
    dsinks: np.ndarray | None = None


@on_one_blas_thread
def naive_same_precision(
    q: Any,
    k: Any,
    v: Any,
    *,
    do: Any = None,
    dlse: Any = None,
    precision: str | None = None,
    result: Any = None,
    **options: Any,
) -> NaiveResult:
    """Compute attention by the naive algorithm, rounded as in an implementation in the dtype of q.

    Products accumulate in float32 (float64 for float64), the softmax is float32, the
    probabilities and dS are rounded to the dtype before they are multiplied again, as any
    implementation that stores them or feeds them to tensor cores must, and results are rounded
    to the dtype. With ``precision="tf32"`` every operand of a product is rounded to 10 bits, with "e4m3"
    the weights of 8-bit inputs to 3 bits, times 2**8 and before normalisation.

    Parameters
    ----------
    q, k, v, do, dlse : array
        As in `reference_backward`; gradients are computed if do is given.
    precision : {None, "ieee", "tf32x3", "tf32", "e4m3"}, optional
        Precision of float32 products; "e4m3" if the weights of 8-bit inputs are rounded to that.
    result : dtype, optional
        Dtype of o; default is that of q.
    **options
        The fields of `Options`.

    Returns
    -------
    NaiveResult
    """
    chosen = Options(**options)
    stored = np.asarray(q).dtype
    dtype = np.dtype(stored if result is None else result)
    acc = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    rank, layout = np.ndim(q), chosen.layout

    def operand(x: np.ndarray) -> np.ndarray:
        """Round to the operand type of a product; return it in the accumulation type."""
        if dtype != stored:
            return x.astype(acc)
        return round_to_tf32(x) if precision == "tf32" else x.astype(dtype).astype(acc)

    q4, k4, v4 = (operand(reference.canonical(x, layout).astype(acc)) for x in (q, k, v))
    group = q4.shape[1] // k4.shape[1]
    q_scale, k_scale, v_scale = (x.astype(acc) for x in chosen.scales(k4.shape[1]))
    q4, k4, v4 = q4 * np.repeat(q_scale, group, axis=1), k4 * k_scale, v4 * v_scale
    k4, v4 = np.repeat(k4, group, axis=1), np.repeat(v4, group, axis=1)
    full = (*q4.shape[:3], k4.shape[2])
    scale = acc.type(q4.shape[3] ** -0.5 if chosen.scale is None else chosen.scale)
    dropout = reference.dropout_weights(chosen, full).astype(acc)

    with np.errstate(invalid="ignore", over="ignore"):
        capped = (q4 @ k4.swapaxes(-1, -2)) * scale
        if chosen.softcap is not None:
            cap = acc.type(chosen.softcap)
            capped = cap * np.tanh(capped / cap)
        changed, slope = (x.astype(acc) for x in reference.function(chosen, capped))
        added = reference.additive(chosen, full).astype(acc)
        kept = reference.keep(chosen, full) & ~np.isneginf(added) & ~np.isneginf(changed)
        scores = np.where(kept, changed + added, acc.type(-np.inf))
    capped, k4 = np.where(kept, capped, acc.type(0)), np.where(np.isfinite(k4), k4, acc.type(0))
    sink = np.full((1, full[1], 1, 1), -np.inf, acc)
    if chosen.sinks is not None:
        sink[:] = np.asarray(chosen.sinks).astype(acc).reshape(1, -1, 1, 1)
    row_max = np.maximum(scores.max(axis=-1, keepdims=True, initial=-np.inf), sink)
    row_max = np.where(np.isneginf(row_max), acc.type(0), row_max)
    p = np.exp(scores - row_max)
    row_sum = p.sum(axis=-1, keepdims=True) + np.exp(sink - row_max)
    empty = row_sum == 0
    safe_sum = np.where(empty, acc.type(1), row_sum)
    if precision == "e4m3":
        p = (256 * p).astype(stored).astype(acc) / 256
    p = p / safe_sum
    lse = np.where(empty, acc.type(-np.inf), row_max + np.log(safe_sum))
    o = (operand(p * dropout) @ v4).astype(dtype)
    forward = NaiveResult(reference.restore(o, rank, layout), reference.restore_rows(lse[..., 0], rank))
    if do is None:
        return forward

    do4 = operand(reference.canonical(do, layout).astype(acc))
    delta = (do4 * o.astype(acc)).sum(axis=-1, keepdims=True)
    if dlse is not None:
        delta = delta - reference.canonical_rows(dlse).astype(acc)[..., None]
    dp = (do4 @ v4.swapaxes(-1, -2)) * dropout
    ds = operand(p) * (dp - delta)
    ds_raw = np.where(ds == 0, acc.type(0), ds * slope)
    if chosen.softcap is not None:
        ds_raw = ds_raw * (1 - (capped / cap) ** 2)
    dq = (operand(ds_raw) @ k4) * scale
    dk = reference.sum_groups((operand(ds_raw).swapaxes(-1, -2) @ q4) * scale, group)
    dv = reference.sum_groups(operand(p * dropout).swapaxes(-1, -2) @ do4, group)
    dbias = dsinks = None
    if chosen.bias is not None:
        bias = np.asarray(chosen.bias)
        dbias = reference.sum_to_shape(ds, bias.shape).astype(bias.dtype)
    if chosen.sinks is not None:
        p_sink = np.exp(sink - row_max) / safe_sum
        dsinks = -(p_sink * delta).sum(axis=(0, 2, 3))
    dq, dk, dv = (reference.restore(x.astype(dtype), rank, layout) for x in (dq, dk, dv))
    return forward._replace(dq=dq, dk=dk, dv=dv, dbias=dbias, dsinks=dsinks)


def round_to_tf32(x: np.ndarray) -> np.ndarray:
    """Round float32 to the 10-bit mantissa of TF32, ties away from zero as the hardware does."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), rounded.view(np.float32), x)

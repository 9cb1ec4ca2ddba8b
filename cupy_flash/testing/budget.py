"""The error budget: the largest allowed error of a correct result, relative to FP64.

A result is within budget if, both in the largest element and in root mean square,

    |ours - fp64|  <=  2 * |naive in the same precision - fp64|  +  floor.

The naive term adapts to the problem. The floor is needed because the naive error can be small by
chance: few elements may be exact, and its order of summation may be better. The floor is the norm of a
standard deviation ``sigma`` per element, from a first-order propagation of rounding errors through the
formulas, with u the unit roundoff:

- Rounding of P and dS to the input dtype (16-bit and TF32 only) and of O and the gradients to
  their dtype is independent per element: u / sqrt(6) times the size, added in squares (uniform
  within the last place, which is u to 2 u of the size; the mean square over that is u^2 / 6).
- Rounding of O enters delta = rowsum(dO * O), and shifts a whole row of dS. Rows with the same delta round
  equally (one-hot inputs have many): in a gradient that sums over rows, errors add linearly, not in squares.
- Weights of 8-bit inputs are rounded to e4m3 where tensor cores multiply them (precision "e4m3"):
  the same with u = 2^-4, and 2^-18 of a row's largest weight where they are too small for it. The
  row sum and LSE are of the weights before that.
- A sum of n terms in the accumulator has error at most about u * sqrt(n) * sum |terms| (a
  random walk over partial sums that grow as they would with equal signs). A score adds a few u
  of its size for scaling, base change, bias, ALiBi and exp. These are absolute bounds, added
  linearly: far below the first kind for 16-bit types, and for the others still orders of
  magnitude below what a wrong mask or scale does.

For the maximum the floor is 4 sigma; for the RMS over n rows it is (1 + 3 / sqrt(n)) sigma,
because the errors within a row share the errors of its probabilities. n counts rows by their share
of the variance, (sum of it)^2 / sum of its squares: rows of zeros do not count. Rows with the same
log-sum-exp or delta are not independent either: n is at most the number of different ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..cpu.threads import on_one_blas_thread
from . import reference
from .naive import naive_same_precision
from .reference import Options

__all__ = ["Verdict", "assert_within_budget", "error_budget", "to_numpy"]

FORWARD = ("o", "lse")
BACKWARD = reference.Gradients._fields
UNIT_ROUNDOFF = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-24, "float64": 2**-53}
# Roundoff of a weight in e4m3, with 3 bits of mantissa; and half of the least e4m3, 2^-9, relative to 2^8.
E4M3_ROUNDOFF, E4M3_LOST = 2**-4, 2**-18
# Absolute error of tiny values: half of the least float16; for other dtypes, which may be flushed to zero,
# the least normal number.
HALF_SUBNORMAL = {"float16": 2**-25, "bfloat16": 2**-126, "float32": 2**-126, "float64": 2**-1022}
# Unit roundoff of the operands of a product; tf32x3 splits each in two, which leaves 21 bits.
OPERAND_ROUNDOFF = {"tf32": 2**-11, "tf32x3": 2**-21}
# Roundings of a score in addition to its sum: scale, base change, bias, ALiBi, exp (two to three ulp).
ROUNDINGS_PER_SCORE = 6


@dataclass(frozen=True)
class Verdict:
    """Errors of one tensor and its budget, in the largest element and in root mean square.

    Attributes
    ----------
    tensor : str
        Name of the tensor, such as "dq".
    mismatch : str
        Why the values cannot be compared; empty if they can.
    largest, rms : float
        Largest absolute error, and root mean square of the errors.
    largest_allowed, rms_allowed : float
        The budgets for both.
    largest_at : tuple of int
        Index of the element with the largest error.
    naive_largest, naive_rms : float
        The same errors of naive attention in the same precision.
    """

    tensor: str
    mismatch: str
    largest: float = 0.0
    largest_allowed: float = 0.0
    largest_at: tuple[int, ...] = ()
    rms: float = 0.0
    rms_allowed: float = 0.0
    naive_largest: float = 0.0
    naive_rms: float = 0.0

    @property
    def within(self) -> bool:
        """Whether the tensor is within its budget."""
        return not self.mismatch and self.largest <= self.largest_allowed and self.rms <= self.rms_allowed

    @property
    def used(self) -> float:
        """The larger of the two shares of the budget that the tensor uses; above 1 it is outside."""
        if self.mismatch:
            return math.inf
        pairs = ((self.largest, self.largest_allowed), (self.rms, self.rms_allowed))
        return max(error / allowed if allowed else (math.inf if error else 0.0) for error, allowed in pairs)

    def __str__(self) -> str:
        if self.mismatch:
            return f"{self.tensor:7}FAIL  {self.mismatch}"
        return (
            f"{self.tensor:7}{'ok  ' if self.within else 'FAIL'}"
            f"  max {self.largest:.2e} of {self.largest_allowed:.2e}"
            f" (naive {self.naive_largest:.2e}) at {self.largest_at}"
            f"  rms {self.rms:.2e} of {self.rms_allowed:.2e} (naive {self.naive_rms:.2e})"
        )


def to_numpy(x: Any) -> np.ndarray:
    """Copy an array of NumPy, CuPy or torch to a NumPy array of the same dtype."""
    if hasattr(x, "get"):
        return np.asarray(x.get())
    if type(x).__module__.startswith("torch"):
        import torch

        x = x.detach().cpu()
        if x.dtype == torch.bfloat16:
            import ml_dtypes

            bits: np.ndarray = x.view(torch.uint16).numpy()
            return bits.view(ml_dtypes.bfloat16)
        if x.dtype == getattr(torch, "float8_e4m3fn", None):
            import ml_dtypes

            bytes_: np.ndarray = x.view(torch.uint8).numpy()
            return bytes_.view(ml_dtypes.float8_e4m3fn)
        return np.asarray(x.numpy())
    return np.asarray(x)


@on_one_blas_thread
def error_budget(
    actual: Mapping[str, Any] | Any | list[Any],
    q: Any,
    k: Any,
    v: Any,
    *,
    do: Any = None,
    dlse: Any = None,
    precision: str | None = None,
    q_error: Any = None,
    **options: Any,
) -> list[Verdict]:
    """Compare results with FP64, and return how much of the error budget each uses.

    Parameters
    ----------
    actual : mapping or object with attributes, or a list of them
        Any of o, lse and the gradients; missing ones and None are not compared. For a list, FP64 and the
        budget are computed once.
    q, k, v, do, dlse : array
        The inputs; do is needed for gradients.
    precision : {None, "ieee", "tf32x3", "tf32", "e4m3"}, optional
        Precision of float32 products; "e4m3" if weights of 8-bit inputs are rounded to e4m3.
    q_error : array, optional
        Uncertainty of the elements of q, in its shape, as where a rotation in another precision rounds to the
        other neighbour. Only for o and lse.
    **options
        The fields of `Options`, as in `cupy_flash.attention`.

    Returns
    -------
    list of Verdict
        One per compared tensor.
    """
    given = [pair for one in (actual if isinstance(actual, list) else [actual]) for pair in _tensors(one)]
    for name, x in (("q", q), ("k", k), ("v", v)):
        if type(x).__name__ == "QuantizedArray":
            options[f"{name}_scale"] = x.scale
    q, k, v = (to_numpy(x.codes if type(x).__name__ == "QuantizedArray" else x) for x in (q, k, v))
    options |= {name: to_numpy(x) for name, x in options.items() if getattr(x, "ndim", 0)}
    do = None if do is None else to_numpy(do)
    dlse = None if dlse is None else to_numpy(dlse)
    if do is None and any(name in BACKWARD for name, _ in given):
        raise ValueError("gradients cannot be compared without do")
    if do is not None and q_error is not None:
        raise ValueError("q_error is of o and lse, and not of gradients")

    chosen = Options(**options)
    f = reference.forward(q, k, v, chosen)
    exact = reference.results(f, q.ndim, chosen)._asdict()
    if do is not None:
        exact |= reference.gradients(do, dlse, f, q.ndim, chosen)._asdict()
    result = q.dtype
    if q.dtype.itemsize == 1:  # the caller chose the dtype of o
        result = dict(given)["o"].dtype if "o" in dict(given) else np.dtype(np.float32)
    naive = naive_same_precision(q, k, v, do=do, dlse=dlse, precision=precision, result=result, **options)
    sigma = _sigmas(f, q, do, dlse, precision, result.name, chosen, q_error)
    return [
        _compare(name, value, exact[name], getattr(naive, name), *sigma[name])
        if exact[name] is not None
        else Verdict(name, "should be absent")
        for name, value in given
    ]


def assert_within_budget(
    actual: Mapping[str, Any] | Any | list[Any], q: Any, k: Any, v: Any, **how: Any
) -> None:
    """Raise an AssertionError with the numbers of every tensor unless all are within `error_budget`.

    Parameters
    ----------
    actual, q, k, v, **how
        As in `error_budget`.

    Raises
    ------
    AssertionError
    """
    verdicts = error_budget(actual, q, k, v, **how)
    if not verdicts:
        raise AssertionError("nothing to compare: no tensor of actual is named o, lse, dq, ...")
    if not all(verdict.within for verdict in verdicts):
        shapes = f"q {np.shape(q)} k {np.shape(k)} v {np.shape(v)} {getattr(q, 'dtype', '')}"
        lines = "\n".join(f"  {verdict}" for verdict in verdicts)
        raise AssertionError(f"outside the error budget: {shapes}\n{lines}")


def _tensors(actual: Mapping[str, Any] | Any) -> list[tuple[str, np.ndarray]]:
    """Return the tensors that there are, by name, as NumPy arrays."""
    read = actual.get if isinstance(actual, Mapping) else lambda name: getattr(actual, name, None)
    return [(name, to_numpy(read(name))) for name in (*FORWARD, *BACKWARD) if read(name) is not None]


def _compare(
    name: str, actual: np.ndarray, exact: np.ndarray, naive: np.ndarray, sigma: np.ndarray, most_rows: int
) -> Verdict:
    """Compare one tensor: first NaN and infinities, then finite values."""
    if actual.shape != exact.shape:
        return Verdict(name, f"shape {actual.shape}, expected {exact.shape}")
    if actual.dtype != naive.dtype:
        return Verdict(name, f"dtype {actual.dtype}, expected {naive.dtype}")
    actual, naive = actual.astype(np.float64), naive.astype(np.float64)
    for label, is_special in (("nan", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        wrong = is_special(actual) != is_special(exact)
        if wrong.any():
            at = tuple(int(n) for n in np.argwhere(wrong)[0])
            got, expected = actual[at], exact[at]
            return Verdict(name, f"{label} differs in {wrong.sum()} places, first {at}: {got} for {expected}")
    finite = np.isfinite(exact)
    if not finite.any():
        return Verdict(name, "")
    error = np.abs(np.subtract(actual, exact, where=finite, out=np.zeros(exact.shape)))
    yardstick = np.subtract(naive, exact, where=finite, out=np.zeros(exact.shape))
    yardstick = np.abs(np.where(np.isfinite(yardstick), yardstick, 0.0))
    sigma = np.where(finite, sigma, 0.0)
    variance = np.square(sigma / (sigma.max() or 1.0))
    if name in ("o", "dq", "dk", "dv"):
        variance = variance.sum(-1)
    rows = max(1.0, min(most_rows, float(variance.sum() ** 2 / (np.square(variance).sum() or 1.0))))
    at = tuple(int(n) for n in np.unravel_index(np.argmax(error), exact.shape))
    return Verdict(
        name,
        "",
        largest=float(error.max()),
        largest_allowed=float(2 * yardstick.max() + 4 * sigma.max()),
        largest_at=at,
        rms=_rms(error),
        rms_allowed=2 * _rms(yardstick) + (1 + 3 / rows**0.5) * _rms(sigma),
        naive_largest=float(yardstick.max()),
        naive_rms=_rms(yardstick),
    )


def _alike(x: np.ndarray) -> tuple[int, np.ndarray]:
    """Return the number of distinct values, and for each element how often its value occurs."""
    with np.errstate(over="ignore"):
        single = x.astype(np.float32)  # why: equal sums can differ in FP64 by the order of their terms
    different, which, counts = np.unique(single, return_inverse=True, return_counts=True)
    return len(different), counts[which].reshape(x.shape)


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def _sigmas(
    f: reference.Forward,
    q: np.ndarray,
    do: np.ndarray | None,
    dlse: np.ndarray | None,
    precision: str | None,
    dtype: str,
    chosen: Options,
    q_error: Any = None,
) -> dict[str, tuple[np.ndarray, int]]:
    """Return the standard deviation per element of a correct result, and the most independent rows.

    Names: ``*_walk`` is an absolute bound, which adds linearly; ``*_square`` is a variance.
    """
    out = UNIT_ROUNDOFF[dtype]
    acc = UNIT_ROUNDOFF["float64" if dtype == "float64" else "float32"]
    half = q.dtype.name in ("float16", "bfloat16")
    operand = 0.0 if half or dtype == "float64" else OPERAND_ROUNDOFF.get(precision or "", 0.0)
    e4m3 = precision == "e4m3"
    stored = (E4M3_ROUNDOFF if e4m3 else out if half else operand) / 6**0.5  # P and dS as operands
    lost = E4M3_LOST if e4m3 else 0.0
    tiny = HALF_SUBNORMAL[dtype]
    rank, layout = q.ndim, chosen.layout

    def rounded(x: np.ndarray, unit: float = out) -> np.ndarray:
        """Variance of rounding a result."""
        variance: np.ndarray = (unit * x) ** 2 / 6 + tiny**2
        return variance

    def total(walk: np.ndarray, square: np.ndarray) -> np.ndarray:
        sigma: np.ndarray = np.sqrt(walk**2 + square)
        return sigma

    def turned(x: np.ndarray) -> np.ndarray:
        transposed: np.ndarray = x.swapaxes(-1, -2)
        return transposed

    depth_qk = np.sqrt(f.q.shape[-1]) + ROUNDINGS_PER_SCORE
    depth_v = np.sqrt(f.v.shape[-1]) + ROUNDINGS_PER_SCORE
    depth_keys = np.sqrt(f.k.shape[2]) + ROUNDINGS_PER_SCORE
    depth_rows = np.sqrt(f.q.shape[2] * f.group) + ROUNDINGS_PER_SCORE
    scale = abs(f.scale)

    # Scores, log-sum-exp and probabilities.
    with np.errstate(invalid="ignore", over="ignore"):
        size = scale * np.abs(f.q) @ turned(np.abs(f.k)) + np.abs(f.added)
        score_walk = acc * depth_qk * size
        score_walk += operand * scale * np.sqrt((f.q**2) @ turned(f.k**2))
        if q_error is not None:
            score_walk += scale * reference.canonical(np.asarray(q_error), layout) @ turned(np.abs(f.k))
        if chosen.score is not None:
            changed, steep = reference.function(chosen, f.capped)
            score_walk = score_walk * np.abs(steep) + acc * ROUNDINGS_PER_SCORE * np.abs(changed)
    score_walk = np.where(f.keep & np.isfinite(score_walk), score_walk, 0.0)
    different_rows, _ = _alike(f.lse)
    lse_finite = np.where(np.isfinite(f.lse), f.lse, 0.0)[..., None]
    lse_walk = (f.p * score_walk).sum(-1, keepdims=True)
    lse_walk = lse_walk + acc * (np.abs(lse_finite) + depth_keys)
    p_walk = f.p * (score_walk + lse_walk)
    weights = f.p * f.dropout
    weights_walk = p_walk * f.dropout
    absolute_v = np.abs(f.v)
    o_square = stored**2 * (weights**2) @ f.v**2 + rounded(f.o)
    lost_walk = lost * weights.max(-1, keepdims=True, initial=0) * f.keep
    o_walk = (weights_walk + acc * depth_keys * weights + tiny * f.keep + lost_walk) @ absolute_v
    o_sigma = total(o_walk, o_square)
    sigma = {
        "o": (reference.restore(o_sigma, rank, layout), different_rows),
        "lse": (reference.restore_rows(lse_walk[..., 0], rank), different_rows),
    }
    if do is None:
        return sigma

    # Gradients of the scores.
    do4 = reference.canonical(do, layout).astype(np.float64)
    dp = (do4 @ turned(f.v)) * f.dropout
    delta = (do4 * f.o).sum(-1, keepdims=True)
    different_deltas, copies = _alike(delta)
    delta_size = (np.abs(do4) * np.abs(f.o)).sum(-1, keepdims=True)
    if dlse is not None:
        rows = reference.canonical_rows(dlse).astype(np.float64)[..., None]
        delta, delta_size = delta - rows, delta_size + np.abs(rows)
    delta_sigma = np.sqrt((do4**2 * o_sigma**2).sum(-1, keepdims=True)) + acc * depth_v * delta_size
    summed_delta_sigma = delta_sigma * np.sqrt(copies)
    ds = f.p * (dp - delta)
    dp_walk = acc * depth_v * (np.abs(do4) @ turned(absolute_v)) * f.dropout
    dp_walk += operand * np.sqrt((do4**2) @ turned(f.v**2)) * f.dropout
    ds_walk = p_walk * (np.abs(dp) + np.abs(delta)) + f.p * (dp_walk + acc * delta_size)
    slope = np.where(f.p > 0, f.slope, 0.0)
    raw_walk = ds_walk * np.abs(slope) + acc * np.abs(ds) * ROUNDINGS_PER_SCORE * (chosen.score is not None)
    if chosen.softcap is not None:
        cap_slope = 1 - (np.where(f.keep, f.capped, 0.0) / chosen.softcap) ** 2
        raw_walk = raw_walk * cap_slope + np.abs(ds) * 2 * (score_walk / chosen.softcap + acc)
        slope = slope * cap_slope
    raw, row_share = ds * slope, f.p * slope
    raw_walk = raw_walk + tiny * f.keep

    # Gradients of the inputs.
    absolute_k, absolute_q = np.abs(f.k), np.abs(f.q)
    dq_square = (stored**2 * raw**2) @ f.k**2 + (delta_sigma * (row_share @ f.k)) ** 2
    dq_square = scale**2 * dq_square + rounded(f.scale * raw @ f.k)
    dq_walk = scale * (raw_walk + acc * depth_keys * np.abs(raw)) @ absolute_k
    dk_square = turned(stored**2 * raw**2 + (row_share * summed_delta_sigma) ** 2) @ f.q**2
    dk_walk = scale * turned(raw_walk + acc * depth_rows * np.abs(raw)) @ absolute_q
    dv_square = stored**2 * turned(weights**2) @ do4**2
    dv_walk = turned(weights_walk + acc * depth_rows * weights + tiny * f.keep) @ np.abs(do4)

    def grouped(walk: np.ndarray, square: np.ndarray, result: np.ndarray) -> np.ndarray:
        walk, square, result = (reference.sum_groups(x, f.group) for x in (walk, square, result))
        return reference.restore(total(walk, square + rounded(result)), rank, layout)

    sigma["dq"] = reference.restore(total(dq_walk, dq_square), rank, layout), different_rows
    sigma["dk"] = grouped(dk_walk, scale**2 * dk_square, f.scale * turned(raw) @ f.q), different_deltas
    sigma["dv"] = grouped(dv_walk, dv_square, turned(weights) @ do4), different_rows
    if chosen.bias is not None:
        shape = np.shape(chosen.bias)
        unit = UNIT_ROUNDOFF[np.asarray(chosen.bias).dtype.name]
        padded = (1,) * (4 - len(shape)) + shape
        depth = np.sqrt(ds.size / max(1, np.prod(padded))) + ROUNDINGS_PER_SCORE
        walk = reference.sum_to_shape(ds_walk + acc * depth * np.abs(ds), shape)
        shared = f.p * summed_delta_sigma  # one error per row: linear along keys, in squares over rows
        along_keys = shared.sum(-1, keepdims=True) if padded[-1] == 1 else shared
        square = reference.sum_to_shape(along_keys**2, shape)
        square = square + stored**2 * reference.sum_to_shape(ds**2, shape)
        square = square + rounded(reference.sum_to_shape(ds, shape), unit)
        sigma["dbias"] = total(walk, square), different_deltas
    if chosen.sinks is not None:
        axes = (0, 2, 3)
        p_sink_walk = f.p_sink * (lse_walk + acc * ROUNDINGS_PER_SCORE)
        depth = np.sqrt(f.q.shape[0] * f.q.shape[2])
        walk = p_sink_walk * np.abs(delta) + acc * depth * f.p_sink * np.abs(delta)
        square = ((f.p_sink * summed_delta_sigma) ** 2).sum(axes)
        sigma["dsinks"] = total(walk.sum(axes), square), different_deltas
    return sigma

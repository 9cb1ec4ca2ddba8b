"""Errors of results against FP64, which every row of speed has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cupy_flash import testing

from ..machine.blas import one_thread
from ..machine.place import Place
from ..work import Case

_NAMES = {
    "forward": ("o",),
    "backward": ("dq", "dk", "dv"),
    "forward+backward": ("o", "dq", "dk", "dv"),
}


class Accuracy(NamedTuple):
    """Errors of one implementation.

    Attributes
    ----------
    error : float
        The largest error of a result, relative to the largest value of that result.
    of_budget : float
        The largest share of the error budget of `cupy_flash.testing` that a result uses; above 1 it is wrong.
    """

    error: float
    of_budget: float


def measure(prepare: Callable[[Case, dict[str, Any], Place], Any], case: Case, place: Place) -> Accuracy:
    """Run an implementation on the case, reduced to a length of at most 512, and compare with FP64.

    Raises
    ------
    ValueError
        A result has a wrong shape or dtype, or infinities at wrong positions.
    """
    small = case.reduced()
    host = small.inputs(seed=1)
    call = prepare(small, {name: place.put(x) for name, x in host.items()}, place)
    results = dict(zip(_NAMES[small.passes], (testing.to_numpy(x) for x in call()), strict=True))
    precision = "tf32x3" if place.name == "gpu" and small.dtype == "float32" else None
    with one_thread():
        verdicts = small.verdicts(results, host, precision)
    if wrong := [str(verdict) for verdict in verdicts if verdict.mismatch]:
        raise ValueError("; ".join(wrong))
    sizes = (np.abs(results[verdict.tensor].astype(np.float64)).max() for verdict in verdicts)
    errors = (verdict.largest / size for verdict, size in zip(verdicts, sizes, strict=True))
    return Accuracy(max(errors), max(verdict.used for verdict in verdicts))


def of_rows(o: Any, case: Case, inputs: dict[str, Any], rows: int = 32) -> float:
    """Largest relative error of the last rows of the first head of a timed forward result.

    why: the reduced problem does not show mistakes of large ones, such as an offset above 2**31.
    """
    start = case.seqlen - min(rows, case.seqlen)
    q, k, v = (testing.to_numpy(inputs[name][:1, :1]) for name in "qkv")
    options: dict[str, Any] = (
        {"causal": True, "align": case.keys - case.seqlen + start} if case.causal else {}
    )
    exact = testing.reference_attention(q[:, :, start:], k, v, **options).o
    found = testing.to_numpy(o[:1, :1])[:, :, start:].astype(np.float64)
    return float(np.abs(found - exact).max() / np.abs(exact).max())


def most_of_rows(error: float, case: Case) -> float:
    """Largest relative error at full size that can be rounding, from the error of the reduced problem.

    why the root: the mean of random values shrinks as 1 / sqrt(keys), while its rounding error does not. With
    32768 keys the error in float32 is 10 times that with 512, both in torch and in plain NumPy.
    """
    return 10 * error * (case.keys / case.reduced().keys) ** 0.5

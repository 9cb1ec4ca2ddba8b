"""A ring whose parts are results of kernels: adding these up costs no accuracy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash.parallel import parts
from cupy_flash.testing import reference_attention, reference_backward
from tests.communicator import in_threads
from tests.schedule_cases import Case, run_over_mpi
from tests.simulator.units import SIMULATED

pytestmark = SIMULATED
RANKS = 4
CASE = Case(
    (256, 256),
    batch=1,
    heads=(2, 1),
    dims=(64, 64),
    dtype="float16",
    options={"schedule": "ring", "causal": True},
)


def _named(o: Any, gradients: Any) -> dict[str, Any]:
    return {"o": o, "dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}


@functools.cache
def _exact() -> dict[str, Any]:
    q, k, v, do, dlse = (CASE.arrays[name] for name in ("q", "k", "v", "do", "dlse"))
    o = reference_attention(q, k, v, causal=True).o
    return _named(o, reference_backward(do, q, k, v, dlse=dlse, causal=True))


def _errors(results: dict[str, Any]) -> dict[str, float]:
    """Root mean squares."""
    return {name: float(np.sqrt(np.mean((results[name] - x) ** 2))) for name, x in _exact().items()}


def _of_one_call() -> dict[str, Any]:
    q, k, v, do, dlse = (CASE.arrays[name] for name in ("q", "k", "v", "do", "dlse"))
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, causal=True)
    return _named(o, cupy_flash.attention_backward(do, q, k, v, o, lse, dlse=dlse, causal=True))


def _of_ring() -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = in_threads(RANKS, functools.partial(run_over_mpi, CASE))
    return results


def _rounding(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same with results in the dtype of q, as calls of their own have them."""

    def rounded(*arrays: Any, **options: Any) -> Any:
        return function(*arrays, **options, **more)

    more = {"return_lse": True} if function is cupy_flash.attention else {}
    return rounded


@pytest.mark.parametrize("arch", ["sm_61", "sm_80", "sm_90a"])
def test_error_is_that_of_one_call(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the results of each step are rounded, as calls of their own are, it is larger."""
    monkeypatch.setenv("CUPY_FLASH_DRIVER", f"simulator:{arch}")
    one, ring = _errors(_of_one_call()), _of_ring()
    CASE.check(ring)
    added = _errors(CASE.gathered(ring))
    monkeypatch.setattr(parts, "attention", _rounding(cupy_flash.attention))
    monkeypatch.setattr(parts, "attention_backward", _rounding(cupy_flash.attention_backward))
    rounded = _errors(CASE.gathered(_of_ring()))
    for name, error in one.items():
        assert added[name] <= 1.05 * error < rounded[name], (
            f"{name}: {added[name]}, {rounded[name]} of {error}"
        )

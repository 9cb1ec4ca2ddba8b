"""Runs the kernels of a plan in the simulator, on arrays that show every stray read and write."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_flash import abi, plan, problem, run, simulator
from cupy_flash.arrays import ArrayView, adopt, numpy_dtype
from cupy_flash.testing import Guarded, dead, hostile

_BIAS_LIKE = ("mask", "bias", "dbias")


def _lifted(name: str, array: np.ndarray) -> ArrayView:
    """A view as the params structs want it."""
    view = adopt(array, name)
    return view.broadcast() if name in _BIAS_LIKE else view


def _execute(
    direction: str,
    arrays: dict[str, np.ndarray],
    outputs: dict[str, tuple[tuple[int, ...], Any]],
    options: dict[str, Any],
    arch: str,
    style: str,
) -> dict[str, np.ndarray]:
    """Plan and launch; arrays have their full rank. Guards are checked."""
    # why: only the heads, rows and columns of what a caller may lay out as he likes are scattered.
    guarded = {
        name: hostile(array, style="padded" if name in ("alibi_slopes", "sinks") else style)
        for name, array in arrays.items()
    }
    results = {
        name: dead(shape, dtype, style="padded" if name == "dsinks" else style)
        for name, (shape, dtype) in outputs.items()
    }
    asked, views, _ = problem.describe(
        direction, {name: g.view for name, g in guarded.items()}, problem.Options(**options)
    )
    views = {**views, **{name: _lifted(name, g.view) for name, g in results.items()}}
    chosen = plan.choose(asked, arch)
    workspace = simulator.empty(chosen.workspace_bytes)
    kernels = [simulator.load(launch.variant) for launch in chosen.launches]
    run.run(chosen, asked, kernels, views, workspace.pointer, 0)
    for g in guarded.values():
        g.check_untouched()
    for g in results.values():
        g.check_written()
    return {name: np.array(g.view) for name, g in results.items()}


def _inputs(given: dict[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Split arrays from the options that are values."""
    arrays = {name: x for name, x in given.items() if isinstance(x, np.ndarray)}
    return arrays, {name: x for name, x in given.items() if name not in arrays and x is not None}


def accumulator(dtype: Any) -> np.dtype:
    """The dtype of LSE, sinks and slopes."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def forward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, arch: str = "sm_61", style: str = "padded", **given: Any
) -> dict[str, np.ndarray]:
    """Return o and lse of 4-D arrays (batch, heads, seq, dim)."""
    arrays, options = _inputs(given)
    outputs = {
        "o": ((*q.shape[:3], v.shape[3]), q.dtype),
        "lse": (q.shape[:3], accumulator(q.dtype)),
    }
    return _execute("forward", {"q": q, "k": k, "v": v, **arrays}, outputs, options, arch, style)


def backward(
    do: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    o: np.ndarray,
    lse: np.ndarray,
    *,
    arch: str = "sm_61",
    style: str = "padded",
    **given: Any,
) -> dict[str, np.ndarray]:
    """Return dq, dk, dv and, where they are asked for, dbias and dsinks."""
    arrays, options = _inputs(given)
    outputs = {"dq": (q.shape, q.dtype), "dk": (k.shape, k.dtype), "dv": (v.shape, v.dtype)}
    for name in ("bias", "sinks"):
        if name in arrays:
            outputs["d" + name] = (arrays[name].shape, arrays[name].dtype)
    inputs = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse, **arrays}
    return _execute("backward", inputs, outputs, options, arch, style)

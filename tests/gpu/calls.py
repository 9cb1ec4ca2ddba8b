"""A small problem on a GPU, for tests of how calls reach it: its arrays, its calls, and its right results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import cupy_flash
from bench.machine.blas import one_thread
from cupy_flash import testing

OPTIONS: dict[str, Any] = {"causal": True, "align": "top_left"}


def arrays(seed: int = 0) -> list[np.ndarray]:
    """q, k, v, do."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((1, 2, 70, 64)).astype(np.float16) for _ in range(4)]


def on_device(cupy: Any, ordinal: int, *values: np.ndarray) -> list[Any]:
    """Copies on a device, all there when this returns."""
    with cupy.cuda.Device(ordinal):
        copies = [cupy.asarray(x) for x in values]
        cupy.cuda.runtime.deviceSynchronize()
    return copies


def both(q: Any, k: Any, v: Any, do: Any, given_back: Callable[[Any], Any] = lambda x: x) -> dict[str, Any]:
    """O, LSE and the gradients; O and LSE go into the backward pass as `given_back` makes them."""
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **OPTIONS)
    gradients = cupy_flash.attention_backward(do, q, k, v, given_back(o), given_back(lse), **OPTIONS)
    return {"o": o, "lse": lse, "dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}


def check(results: dict[str, Any], seed: int = 0) -> None:
    """Copy results when the current stream of their device has them; compare with FP64."""
    q, k, v, do = arrays(seed)
    with one_thread():
        testing.assert_within_budget(
            {name: _on_host(x) for name, x in results.items()}, q, k, v, do=do, **OPTIONS
        )


def _on_host(x: Any) -> np.ndarray:
    if isinstance(x, np.ndarray):
        return x
    with x.device:
        return x.get()

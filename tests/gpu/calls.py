"""A small problem on a GPU, for tests of how calls reach it: its arrays, its calls, and its right results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import cupy_flash
from cupy_flash import testing
from tests.checks import Device

OPTIONS: dict[str, Any] = {"causal": True, "align": "top_left"}
# Of calls whose heads are all the same, below.
BANDS: dict[str, dict[str, Any]] = {
    "all keys": {},
    "causal": {"causal": True, "align": "top_left"},
    "window": {"window": (300, 0), "align": "top_left"},
}


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


def both_passes(
    q: Any, k: Any, v: Any, do: Any, given_back: Callable[[Any], Any] = lambda x: x
) -> dict[str, Any]:
    """O, LSE and the gradients; O and LSE go into the backward pass as `given_back` makes them."""
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **OPTIONS)
    gradients = cupy_flash.attention_backward(do, q, k, v, given_back(o), given_back(lse), **OPTIONS)
    return {"o": o, "lse": lse, "dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}


def check(results: dict[str, Any], seed: int = 0) -> None:
    """Copy results when the current stream of their device has them; compare with FP64."""
    q, k, v, do = arrays(seed)
    testing.assert_within_budget(
        {name: _on_host(x) for name, x in results.items()}, q, k, v, do=do, **OPTIONS
    )


def _on_host(x: Any) -> np.ndarray:
    if isinstance(x, np.ndarray):
        return x
    with x.device:
        return x.get()


def repeated(
    device: Device, head_dim: int, heads: int, length: int, head_dim_v: int = 0, dtype: str = "float16"
) -> tuple[list[Any], list[np.ndarray]]:
    """q, k, v and dO on the device, all heads the same; and the one head."""
    rng = np.random.default_rng(head_dim)
    widths = (head_dim, head_dim, *[head_dim_v or head_dim] * 2)
    one = [rng.standard_normal((1, 1, length, width)).astype(dtype) for width in widths]
    return [device.array(np.repeat(x, heads, axis=1)) for x in one], one


def check_twenty_times(call: Callable[[], dict[str, Any]], one: list[np.ndarray], **options: Any) -> None:
    """Hold results of heads that are all the same to FP64 once, and to the same bits in every run.

    Parameters
    ----------
    call : callable
        Gives results by name.
    one : list of np.ndarray
        q, k and v of the one head.
    **options
        For the reference.
    """
    first = None
    for _ in range(20):
        result = {name: testing.to_numpy(x) for name, x in call().items()}
        if first is None:
            first = {name: x[:, :1] for name, x in result.items()}
            testing.assert_within_budget(first, *one, **options)
        for name, x in result.items():
            np.testing.assert_array_equal(x, np.broadcast_to(first[name], x.shape), err_msg=name)


def check_forward_twenty_times(
    device: Device, head_dims: tuple[int, int], heads: int, band: str, dtype: str = "float16"
) -> None:
    """Every head gives the same bits in every run, whichever block took its tiles."""
    (q, k, v, _), (*one, _) = repeated(device, head_dims[0], heads, 1500, head_dims[1], dtype)

    def call() -> dict[str, Any]:
        o, lse = cupy_flash.attention(q, k, v, return_lse=True, **BANDS[band])
        return {"o": o, "lse": lse}

    check_twenty_times(call, one, **BANDS[band])


def check_gradients_twenty_times(
    device: Device,
    head_dims: tuple[int, int],
    heads: int,
    band: str,
    dtype: str = "float16",
    length: int = 1500,
) -> None:
    """Every head gives the same bits in every run, in whatever order its blocks came."""
    (q, k, v, do), (*one, one_do) = repeated(device, head_dims[0], heads, length, head_dims[1], dtype)
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **BANDS[band])

    def call() -> dict[str, Any]:
        gradients = cupy_flash.attention_backward(do, q, k, v, o, lse, reproducible="run", **BANDS[band])
        return {name: getattr(gradients, name) for name in ("dq", "dk", "dv")}

    check_twenty_times(call, one, do=one_do, **BANDS[band])

"""The NumPy path beside torch's scaled_dot_product_attention on the CPU, FP32."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log
from typing import Any, NamedTuple

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

import cupy_flash
from cupy_flash import testing

from .timing import Timing, alternate, append, machine

try:
    import torch
except ImportError:
    torch = None


class Shape(NamedTuple):
    batch: int
    heads: int
    seqlen: int
    head_dim: int

    def __str__(self) -> str:
        return f"B{self.batch} H{self.heads} S{self.seqlen} D{self.head_dim}"


SHAPES = (
    Shape(1, 8, 2048, 128),
    Shape(1, 4, 4096, 64),
    Shape(1, 8, 1024, 64),
    Shape(8, 12, 256, 64),
)
QUICK_SHAPES = SHAPES[2:]
PASSES = ("forward", "forward+backward")

Call = Callable[[], tuple[Any, ...]]


def ours(do: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool, passes: str) -> Call:
    def forward() -> tuple[Any, ...]:
        return (cupy_flash.attention(q, k, v, causal=causal),)

    def both() -> tuple[Any, ...]:
        o, lse = cupy_flash.attention(q, k, v, causal=causal, return_lse=True)
        return o, *cupy_flash.attention_backward(do, q, k, v, o, lse, causal=causal)[:3]

    return forward if passes == "forward" else both


def torchs(do: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool, passes: str) -> Call:
    attention = torch.nn.functional.scaled_dot_product_attention
    grad = torch.from_numpy(do.copy())
    inputs = [torch.from_numpy(x.copy()) for x in (q, k, v)]

    def forward() -> tuple[Any, ...]:
        with torch.no_grad():
            return (attention(*inputs, is_causal=causal),)

    def both() -> tuple[Any, ...]:
        o = attention(*inputs, is_causal=causal)
        return o.detach(), *torch.autograd.grad(o, inputs, grad)

    if passes == "forward":
        return forward
    for x in inputs:
        x.requires_grad_()
    return both


def error(results: tuple[Any, ...], do: np.ndarray, *qkv: np.ndarray, causal: bool) -> float:
    """Largest error of o, dq, dk and dv against FP64, over each one's largest value; first head."""
    one = (slice(1), slice(1))
    first = [x[one] for x in qkv]
    exact = [testing.reference_attention(*first, causal=causal).o]
    if len(results) > 1:
        exact += testing.reference_backward(do[one], *first, causal=causal)[:3]
    return max(
        float(np.abs(np.asarray(x)[one] - y).max() / np.abs(y).max())
        for x, y in zip(results, exact, strict=True)
    )


def blas() -> str:
    """Name NumPy's BLAS and the kernels it chose: the same machine may run either of two speeds."""
    return " ".join(
        f"{library['internal_api']} {library['version']} {library.get('architecture', '')}".strip()
        for library in threadpool_info()
        if library["user_api"] == "blas"
    )


def run(quick: bool = False, threads: int | None = None) -> None:
    """Print a table and append it to bench/results/cpu.csv."""
    here = machine() | {"numpy": np.__version__, "blas": blas(), "torch": "absent"}
    if torch is None:
        print("torch is not installed, so there is no peer to compare with: pip install torch")
    else:
        here["torch"] = torch.__version__
        if threads:
            torch.set_num_threads(threads)
    with threadpool_limits(threads, user_api="blas"):
        here["threads"] = str(threads or here["cores"])
        print("  ".join(f"{name} {value}" for name, value in here.items()))
        print(f"{'':41}{'cupy_flash ms':>24}  {'torch ms':>24}  {'ratio':>5}   error, torch's error")
        ratios = []
        rows = []
        for shape in QUICK_SHAPES if quick else SHAPES:
            for causal in (False, True):
                for passes in PASSES:
                    row, ratio = _measure(shape, causal, passes, *((7, 2.0) if quick else (21, 10.0)))
                    rows.append(here | row)
                    ratios.append(ratio)
    if torch is not None:
        mean = exp(sum(map(log, ratios)) / len(ratios))
        print(f"speed over torch's: geometric mean {mean:.2f}, least {min(ratios):.2f}")
    print(f"appended to {append('cpu.csv', rows)}")


def _measure(
    shape: Shape, causal: bool, passes: str, repetitions: int, seconds: float
) -> tuple[dict[str, str], float]:
    """Time one line of the table, print it, and return it with the ratio."""
    random = np.random.default_rng(0)
    do, q, k, v = (random.standard_normal(shape, dtype=np.float32) for _ in range(4))
    ways = {"cupy_flash": ours(do, q, k, v, causal, passes)}
    if torch is not None:
        ways["torch"] = torchs(do, q, k, v, causal, passes)
    errors = {name: error(way(), do, q, k, v, causal=causal) for name, way in ways.items()}
    times = alternate(ways, repetitions, seconds)
    row = {"shape": str(shape), "causal": str(causal), "passes": passes}
    for name in ("cupy_flash", "torch"):
        for quartile in Timing._fields:
            seconds = getattr(times[name], quartile) if name in times else float("nan")
            row[f"{name}_{quartile}_ms"] = f"{seconds * 1e3:.3f}"
        row[f"{name}_error"] = f"{errors.get(name, float('nan')):.1e}"
    ratio = times["torch"].median / times["cupy_flash"].median if torch is not None else float("nan")
    label = f"{shape!s:19} {'causal' if causal else 'full':6} {passes}"
    columns = [_quartiles(times[name]) if name in times else "-" for name in ("cupy_flash", "torch")]
    print(
        f"{label:41}{columns[0]:>24}  {columns[1]:>24}  {ratio:5.2f}   "
        f"{row['cupy_flash_error']}, {row['torch_error']}",
        flush=True,
    )
    return row | {"ratio": f"{ratio:.3f}"}, ratio


def _quartiles(timing: Timing) -> str:
    lower, median, upper = (f"{seconds * 1e3:.1f}" for seconds in timing)
    return f"{median} ({lower}..{upper})"

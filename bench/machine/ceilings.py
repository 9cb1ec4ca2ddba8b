"""Ceilings of this machine, measured in the same run: copy bandwidth and rates of matrix products."""

from __future__ import annotations

import contextlib
import time
from typing import NamedTuple

import numpy as np

from ..work import FLOAT8, Case
from . import cpu_share, timing
from .place import Place


def per_second(flops: float) -> str:
    """Format a rate with its unit."""
    return f"{flops / 1e12:.4g} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:.4g} GFLOP/s"


class Ceilings(NamedTuple):
    """Best measured rates of plain operations.

    Attributes
    ----------
    bytes_per_second : float
        Bandwidth of a large copy; reads and writes both count.
    flops : dict of str to float
        FLOP per second of a large matrix product, by the dtype of attention that it bounds.
    """

    bytes_per_second: float
    flops: dict[str, float]

    def least_seconds(self, case: Case) -> tuple[float, str]:
        """The lower bound of a case's time, and the resource that sets it."""
        matrix = case.flops() / self.flops.get(case.dtype, float("inf"))
        memory = case.traffic() / self.bytes_per_second
        return (matrix, "matrix") if matrix >= memory else (memory, "memory")

    def or_better(self, other: Ceilings) -> Ceilings:
        """Combine two measurements: the higher of each rate."""
        flops = {name: max(rate, other.flops.get(name, 0.0)) for name, rate in self.flops.items()}
        return Ceilings(max(self.bytes_per_second, other.bytes_per_second), other.flops | flops)

    def __str__(self) -> str:
        rates = ", ".join(f"{name} {per_second(rate)}" for name, rate in self.flops.items())
        return f"measured ceilings: copy {self.bytes_per_second / 1e9:.4g} GB/s; matrix product {rates}"


def measure(place: Place, quick: bool = False) -> Ceilings:
    """Measure the ceilings, each as the best of several samples."""
    if place.library == "numpy":
        return _of_cpu(quick)
    return _of_gpu(place, quick)


def _best(call: timing.Call, stopwatch: timing.Stopwatch) -> float:
    """The shortest of 7 samples, or on a busy machine of more, until 5 were calm or 10 s have passed."""
    stopwatch(call)
    end, best, samples, calm = time.monotonic() + 10, float("inf"), 0, 0
    while samples < 7 or (calm < 5 and time.monotonic() < end):
        before = cpu_share.sample()
        best = min(best, stopwatch(call))
        samples += 1
        calm += cpu_share.of_others(before, cpu_share.sample()) <= cpu_share.CALM
    return best


def _of_cpu(quick: bool) -> Ceilings:
    n = 1024 if quick else 2048
    draw = np.random.default_rng(0)
    a, b = (draw.standard_normal((n, n), np.float32) for _ in range(2))
    product = np.empty_like(a)
    source = np.ones(2**26 if quick else 2**28, np.uint8)
    target = np.empty_like(source)
    copy = _best(lambda: np.copyto(target, source), timing.by_clock)
    matrix = _best(lambda: np.matmul(a, b, out=product), timing.by_clock)
    short = matrix  # for bfloat16, for which some CPUs have instructions
    with contextlib.suppress(ImportError):  # torch's BLAS may be faster on this CPU than NumPy's
        import torch

        x, y, out = (torch.from_numpy(array) for array in (a, b, product))
        matrix = min(matrix, _best(lambda: torch.mm(x, y, out=out), timing.by_clock))
        x, y = x.bfloat16(), y.bfloat16()
        short = min(matrix, _best(lambda: torch.mm(x, y), timing.by_clock))
    rate = 2 * n**3 / matrix
    rates = {"float32": rate, "bfloat16": 2 * n**3 / short, "float16": rate}
    return Ceilings(2 * source.nbytes / copy, rates)


def _of_gpu(place: Place, quick: bool) -> Ceilings:
    n = 4096 if quick else 8192
    stopwatch = place.stopwatch()
    square = Case(1, 1, n, n)
    rates = {}
    for dtype in place.dtypes:
        x = place.inputs(square._replace(dtype=dtype))
        a, b = x["q"][0, 0], x["k"][0, 0]
        with _tf32(place):
            seconds = _best(lambda a=a, b=b: a @ b, stopwatch)  # type: ignore[misc]
        rates[dtype] = 2 * n**3 / seconds
    if place.float8:
        # why any: torch's product of 8-bit floats is private, and its interface changes.
        with contextlib.suppress(Exception):
            rates[FLOAT8] = 2 * n**3 / _best(_float8_product(place, square), stopwatch)
    if place.tf32:
        rates["float32"] /= 3  # why: FP32-accurate attention (tf32x3) takes three TF32 products for each
    x = place.inputs(Case(1, 1, 2**18, 1024))  # 1 GiB
    source, target = x["q"], x["k"]
    copy = _best(lambda: target.__setitem__(Ellipsis, source), stopwatch)
    return Ceilings(2 * source.nbytes / copy, rates)


def _float8_product(place: Place, square: Case) -> timing.Call:
    """A matrix product of 8-bit floats, whose second operand has to be column-major."""
    x = place.inputs(square._replace(dtype=FLOAT8))
    a, b = x["q"][0, 0], x["k"][0, 0].t()
    one = place.torch.ones((), device=place.device)
    return lambda: place.torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=place.torch.bfloat16)


class _tf32:  # noqa: N801
    """Allow TF32 in float32 products inside this context, if the GPU has it."""

    def __init__(self, place: Place) -> None:
        self._flags = place.torch.backends.cuda.matmul if place.tf32 else None

    def __enter__(self) -> None:
        if self._flags is not None:
            self._saved, self._flags.allow_tf32 = self._flags.allow_tf32, True

    def __exit__(self, *_: object) -> None:
        if self._flags is not None:
            self._flags.allow_tf32 = self._saved

"""What the host does for a launch, by CuPy and by the driver's own library, over one stand-in for the driver.

Launches do nothing, so what remains is the host's; the stand-in's own part is 0.01 us. Times are of a thread
on its processor, the best of many averages, each way in turn. They say nothing of a GPU or of a real driver.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from tests.paths import ROOT
from tests.virtual_gpu import install, process, wheels

ROUNDS = 300
SECONDS = 1e-3  # of a round

CUPY, LIBRARY = "CuPy", "the driver's own library"
FIRST = "first"
LAUNCH, CALL = "a launch", "attention of one query, torch tensors,"
Way = tuple[str, str]


def measure(wheel: wheels.Wheel, rounds: int = ROUNDS) -> dict[Way, float]:
    """Microseconds of `LAUNCH` and `CALL` by `CUPY` and `LIBRARY`.

    Parameters
    ----------
    wheel : Wheel
        CuPy; downloaded if it is not there.
    rounds : int
        Averages, of which the best counts.
    """
    return {(what, by): us for what, by, us in _in_a_process(wheels.install(wheel), str(rounds))}


def first_call(repeat: int = 5) -> float:
    """Microseconds of the first call of a process on tensors of torch, without CuPy: the least of some.

    It finds the driver, plans, checks and loads the cubin, and launches. The tables of kernels are there.
    """
    us: list[float] = [_in_a_process(None, FIRST) for _ in range(repeat)]
    return min(us)


def _in_a_process(site: Path | None, what: str) -> Any:
    """What a fresh process of this module finds out, with CuPy from a folder, or without it."""
    command = [sys.executable, "-S", "-m", __spec__.name, what]
    done = subprocess.run(command, cwd=ROOT, env=process.environment(site), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def _in_turn(
    ways: dict[Way, Callable[[], object]], before: Callable[[str], None], rounds: int
) -> dict[Way, float]:
    """Microseconds of each way; before a round `before` hears which driver it is of."""
    number, best = {}, dict.fromkeys(ways, float("inf"))
    for turn in range(rounds + 1):
        for (what, by), call in ways.items():
            before(by)
            count = number.get((what, by), 100)
            start = time.thread_time()
            for _ in range(count):
                call()
            seconds = (time.thread_time() - start) / count
            if turn:
                best[what, by] = min(best[what, by], seconds)
            number[what, by] = max(1, round(SECONDS / seconds))
    return {way: 1e6 * seconds for way, seconds in best.items()}


def _plain(tensor: Any) -> Any:
    """The same without torch's way through subclasses, which takes 5 us for each question."""
    import torch

    way = {"__torch_function__": torch._C._disabled_torch_function_impl}
    plain = tensor.as_subclass(type("Tensor", (type(tensor),), way))
    plain.ordinal = tensor.ordinal
    return plain


def _both_ways(rounds: int) -> dict[Way, float]:
    """In a process where CuPy and the driver's library see a virtual GPU."""
    from cupy_flash.device import cuda, driver

    with patch.object(driver.Kernel, "launch", driver.Kernel.launch):  # what compares launches takes time
        install.install("sm_80")
    import torch

    import cupy_flash
    from cupy_flash.dispatch import backends
    from tests.virtual_gpu.alone import gpu

    stand_in = install.library()
    stream = types.SimpleNamespace(cuda_stream=0)
    q, out = map(_plain, gpu.tensors(0, *np.ones((2, 1, 1, 1, 64), np.float16)))
    drivers = {CUPY: driver, LIBRARY: cuda}
    taken: dict[str, list[Any]] = {}

    def take(by: str) -> None:
        backends.gpu_driver = lambda _library: drivers[by]

    def call() -> object:
        return cupy_flash.attention(q, q, q, out=out)

    ways: dict[Way, Callable[[], object]] = {}
    with gpu.on(0), patch.object(torch.cuda, "current_stream", lambda _: stream), \
         patch.object(backends, "gpu_driver", backends.gpu_driver):  # fmt: skip
        stand_in.virtual_gpu_idle(1)
        for by, kernels in ((CUPY, driver.Kernel), (LIBRARY, cuda.Kernel)):
            take(by)

            def noted(kernel: Any, *arguments: Any, by: str = by, launch: Any = kernels.launch) -> None:
                taken[by] = [kernel, *arguments]
                launch(kernel, *arguments)

            before = stand_in.virtual_gpu_launched()
            with patch.object(kernels, "launch", noted):
                call()
            assert stand_in.virtual_gpu_launched() == before + 1, f"{by} does not launch through the stand-in"
            kernel, *arguments = taken[by]
            ways[LAUNCH, by] = lambda launch=kernel.launch, arguments=arguments: launch(*arguments)
            ways[CALL, by] = call
        return _in_turn(ways, take, rounds)


def _first_call() -> float:
    """In a process that has called nothing, and has no CuPy."""
    from cupy_flash.device import cuda

    with patch.object(cuda.Kernel, "launch", cuda.Kernel.launch):
        install.install_alone("sm_80")
    import torch

    import cupy_flash
    from tests.virtual_gpu.alone import gpu

    of_stand_in: list[float] = []

    def found(*of_cubin: Any, find: Callable[..., Any] = install._simulated) -> Any:
        """Which kernel of the simulator a cubin is, which a driver does not ask."""
        start = time.process_time()
        kernel = find(*of_cubin)
        of_stand_in.append(time.process_time() - start)
        return kernel

    stand_in, stream = install.library(), types.SimpleNamespace(cuda_stream=0)
    q, out = map(_plain, gpu.tensors(0, *np.ones((2, 1, 1, 1, 64), np.float16)))
    with gpu.on(0), patch.object(torch.cuda, "current_stream", lambda _: stream), \
         patch.object(install, "_simulated", found):  # fmt: skip
        stand_in.virtual_gpu_idle(1)
        before = stand_in.virtual_gpu_launched()
        start = time.process_time()
        cupy_flash.attention(q, q, q, out=out)
        seconds = time.process_time() - start
        assert stand_in.virtual_gpu_launched() == before + 1
    assert of_stand_in
    return 1e6 * (seconds - sum(of_stand_in))


if __name__ == "__main__":
    if sys.argv[1] == FIRST:
        print(json.dumps(_first_call()))
    else:
        found = _both_ways(int(sys.argv[1]))
        print(json.dumps([[what, by, us] for (what, by), us in found.items()]))

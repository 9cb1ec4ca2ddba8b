"""cost: lower bounds of times on any GPU by the cost model: a projection."""

from __future__ import annotations

import argparse

from ..model import cost_model, counting, rates
from ..model.rates import Gpu
from ..work import FLOAT8, Case


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", action="append", metavar="NAME", help="such as H200 or A100; may repeat")
    parser.add_argument(
        "--count", action="store_true", help="count instructions again, in the simulator (needs g++)"
    )


def _projected(gpu: Gpu) -> list[str]:
    short = "float16" if gpu.arch == "sm_75" else "bfloat16"
    lines = []
    for head_dim in (64, 128, 256):
        for causal in (False, True):
            kinds = [(short, "forward"), (short, "backward")]
            kinds += [(short, "jvp"), (short, "hvp")] if head_dim <= 128 else []
            kinds += [("float64", "forward"), ("float64", "backward")] if "64-bit" in gpu.mma else []
            kinds += [(FLOAT8, "forward")] if "8-bit" in {**gpu.mma, **gpu.wgmma} else []
            for dtype, passes in kinds:
                case = Case(2, 2048 // head_dim, 8192, head_dim, dtype, causal, passes)
                costs = cost_model.of_case(case, gpu.arch, gpu)
                if not costs:
                    continue
                least = sum(cost.overlapped for cost in costs)
                most = sum(cost.summed for cost in costs)
                bound = max(costs, key=lambda cost: cost.overlapped).bound
                lines.append(
                    f"  {case!s:52} {case.flops() / most / 1e12:6.0f} to {case.flops() / least / 1e12:6.0f}"
                    f" TFLOP/s, bound by {bound}: {cost_model.describe(costs)}"
                )
    return lines


def run(chosen: argparse.Namespace) -> int:
    from cupy_flash.device.simulator import SimulatorUnavailable

    gpus = [gpu for gpu in rates.GPUS if not chosen.gpu or any(name in gpu.name for name in chosen.gpu)]
    if not gpus:
        names = ", ".join(gpu.name for gpu in rates.GPUS)
        print(f"no GPU of the table is called {' or '.join(chosen.gpu)}: {names}")
        return 2
    if chosen.count:
        try:
            counted = counting.write(tuple(gpu.arch for gpu in gpus))
        except SimulatorUnavailable as error:
            print(error)
            return 0
        print(f"{counted} kernels counted into {counting.TABLE}")
    print("PROJECTION from counts and published rates; nothing here was measured.")
    print("The first rate is with nothing overlapped, the second with everything.")
    for gpu in gpus:
        print(f"{gpu.name} ({gpu.arch})")
        print("\n".join(_projected(gpu)) or "  no counts: python -m bench cost --count")
    return 0

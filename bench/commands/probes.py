"""probes: basic rates of a GPU and its driver, without our kernels: ceilings, exp, launches, cubins."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..machine import ceilings, conditions
from ..machine import place as places
from ..machine.timing import Timing

# Eight independent chains of ex2 per thread, which hide the latency of each other.
_EXP = r"""
extern "C" __global__ void exp_rate(float* out, int rounds) {
    float x[8];
    for (int i = 0; i < 8; i++) x[i] = 1e-3f * (threadIdx.x + i);
    for (int r = 0; r < rounds; r++)
#pragma unroll
        for (int i = 0; i < 8; i++) asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[i]));
    float sum = 0;
    for (int i = 0; i < 8; i++) sum += x[i];
    if (sum == 123.f) out[0] = sum;
}
"""
# Eight independent chains of products of doubles per warp, of each shape; flops of one product.
_DMMA = r"""
extern "C" __global__ void dmma_rate(double* out, int rounds) {
    double d[8][4] = {};
    double a = 1e-3 * threadIdx.x, b = 1e-3;
    for (int r = 0; r < rounds; r++)
#pragma unroll
        for (int i = 0; i < 8; i++) {
#if defined(M8N8K4)
            asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
                         : "+d"(d[i][0]), "+d"(d[i][1]) : "d"(a), "d"(b));
#elif defined(M16N8K8)
            asm volatile("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64"
                         " {%0,%1,%2,%3}, {%4,%4,%4,%4}, {%5,%5}, {%0,%1,%2,%3};"
                         : "+d"(d[i][0]), "+d"(d[i][1]), "+d"(d[i][2]), "+d"(d[i][3]) : "d"(a), "d"(b));
#else
            asm volatile("fma.rn.f64 %0, %1, %2, %0;" : "+d"(d[i][0]) : "d"(a), "d"(b));
#endif
        }
    double sum = 0;
    for (int i = 0; i < 8; i++) sum += d[i][0] + d[i][1] + d[i][2] + d[i][3];
    if (sum == 123.) out[0] = sum;
}
"""
# FLOP of one instruction, and capabilities with hardware for it: elsewhere it compiles to hundreds of others.
_DMMA_SHAPES = {
    "DFMA": (2 * 32, None),
    "M8N8K4": (2 * 8 * 8 * 4, (80, 90)),
    "M16N8K8": (2 * 16 * 8 * 8, (90,)),
}
_LAUNCH = r"""
struct Params { char bytes[1024]; };
extern "C" __global__ void launch_cost(const __grid_constant__ Params p) {
    if (p.bytes[1000] == 77) *(volatile int*)nullptr = 1;
}
"""
PARAMS_BYTES = 1024


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument(
        "--cubins", type=Path, metavar="DIR", help="holds cuda12/<target> and cuda13/<target>"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")


def _ceilings(place: Any, _cubins: Path | None) -> dict[str, Any]:
    found = ceilings.measure(place)
    state = place.state()
    return {
        "copy GB/s": round(found.bytes_per_second / 1e9, 1),
        **{f"matrix TFLOP/s {name}": round(rate / 1e12, 2) for name, rate in found.flops.items()},
        "state after": str(state),
    }


def _best_seconds(kernel: Any, blocks: int, threads: int, *given: Any) -> float:
    import cupy

    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    kernel((blocks,), (threads,), given)
    best = float("inf")
    for _ in range(5):
        start.record()
        kernel((blocks,), (threads,), given)
        end.record()
        end.synchronize()
        best = min(best, cupy.cuda.get_elapsed_time(start, end) / 1e3)
    return best


def _dmma(place: Any, _cubins: Path | None) -> dict[str, Any]:
    """Rates of float64 with and without tensor cores, by which its kernels are chosen."""
    import cupy

    from cupy_flash.plan.catalog import architecture

    found: dict[str, Any] = {}
    out, rounds, threads = cupy.zeros(1, np.float64), 2000, 256
    blocks, capability = place.multiprocessors * 4, architecture(place.arch()).capability
    for name, (flops, capabilities) in _DMMA_SHAPES.items():
        if capabilities and capability not in capabilities:
            continue
        kernel = cupy.RawModule(code=_DMMA, options=(f"-D{name}",)).get_function("dmma_rate")
        seconds = _best_seconds(kernel, blocks, threads, out, np.int32(rounds))
        rate = blocks * threads // 32 * rounds * 8 * flops / seconds
        found[f"{name} TFLOP/s"] = round(rate / 1e12, 2)
        if clock := place.state().clock_mhz:
            found[f"{name} flops per clock and multiprocessor"] = round(
                rate / (place.multiprocessors * clock * 1e6), 1
            )
    return found


def _exp(place: Any, _cubins: Path | None) -> dict[str, Any]:
    import cupy

    kernel = cupy.RawModule(code=_EXP).get_function("exp_rate")
    out, rounds, threads = cupy.zeros(1, np.float32), 2000, 256
    blocks = place.multiprocessors * 8
    rate = blocks * threads * rounds * 8 / _best_seconds(kernel, blocks, threads, out, np.int32(rounds))
    clock = place.state().clock_mhz
    found = {"G exp/s": round(rate / 1e9, 1)}
    if clock:
        found["exp per clock and multiprocessor"] = round(rate / (place.multiprocessors * clock * 1e6), 2)
    return found


def _launch(_place: Any, _cubins: Path | None) -> dict[str, Any]:
    """Host time of a launch with a params struct by value, and time per launch of back-to-back launches."""
    import cupy

    kernel = cupy.RawModule(code=_LAUNCH, options=("-std=c++17",)).get_function("launch_cost")
    params = np.zeros((), f"V{PARAMS_BYTES}")
    stream = cupy.cuda.get_current_stream()
    kernel((1,), (32,), (params,))
    stream.synchronize()
    seconds = []
    for _ in range(200):
        begun = time.perf_counter()
        kernel((1,), (32,), (params,))
        seconds.append(time.perf_counter() - begun)
    stream.synchronize()
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    for _ in range(1000):
        kernel((1,), (32,), (params,))
    end.record()
    end.synchronize()
    took = Timing.of(seconds)
    return {
        "us to enqueue (quartiles)": [round(x * 1e6, 2) for x in took[:3]],
        "us each, 1000 back to back": round(cupy.cuda.get_elapsed_time(start, end), 3),
    }


def _loading(place: Any, cubins: Path | None) -> dict[str, Any]:
    """Whether the driver loads the cubins of each compiler for this GPU, and the time per cubin."""
    import cupy

    from cupy_flash.plan.catalog import architecture

    if cubins is None:
        return {"cubins": "none given: --cubins DIR"}
    target = architecture(place.arch()).target
    found: dict[str, Any] = {}
    for folder in sorted(cubins.glob(f"cuda1[23]/{target}")):
        seconds, failures = [], []
        for path in sorted(folder.glob("*.cubin")):
            begun = time.perf_counter()
            try:
                cupy.RawModule(path=str(path)).get_function(path.stem)
                seconds.append(time.perf_counter() - begun)
            except Exception as error:  # why any: each is a finding
                failures.append(f"{path.stem}: {error}"[:160])
        name = folder.relative_to(cubins).as_posix()
        median = round(Timing.of(seconds).median * 1e3, 3) if seconds else None
        found[name] = {"loaded": len(seconds), "median ms": median, "refused": failures[:5]}
    return found or {"cubins": f"none for {target} in {cubins}"}


PROBES: dict[str, Callable[[Any, Path | None], dict[str, Any]]] = {
    "dmma": _dmma,
    "ceilings": _ceilings,
    "exp": _exp,
    "launch": _launch,
    "cubins": _loading,
}


def run(chosen: argparse.Namespace) -> int:
    place, sentences = places.find(chosen.device)
    print(*sentences, sep="\n")
    found: dict[str, Any] = dict(conditions.surroundings(place)) | {"arch": place.arch()}
    for name, probe in PROBES.items():
        if place.name == "cpu" and name != "ceilings":
            found[name] = "needs a GPU"
        else:
            try:
                found[name] = probe(place, chosen.cubins)
            except Exception as error:  # why any: a failed probe must not prevent the others
                found[name] = f"failed: {type(error).__name__}: {error}"[:300]
        print(f"{name}: {json.dumps(found[name])}", flush=True)
        if chosen.out:  # after each probe: the next one may crash
            chosen.out.parent.mkdir(parents=True, exist_ok=True)
            chosen.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0

"""A lower bound of the time of kernels on a GPU, per resource, to explain gaps to it.

Counts are from the simulator (costs.csv), those of FP64 arithmetic from SASS (doubles.py); rates are
published (rates.py). Each resource alone gives a time; a kernel that overlaps all of them perfectly takes the
largest, one that overlaps none takes their sum. Neither includes launch, ramp-up and the last wave, waits at
barriers, and instructions that are not counted.
"""

from __future__ import annotations

from typing import NamedTuple

from cupy_flash.errors import UnsupportedError
from cupy_flash.plan.catalog import Variant, architecture
from cupy_flash.plan.launch import Launch

from ..work import Case
from . import counting, doubles, rates
from .rates import Gpu

_SHARED_CYCLES = ("matrix_load_cycles", "matrix_store_cycles", "shared_load_cycles", "shared_store_cycles",
                  "copy_store_cycles")  # fmt: skip
# Additional bytes through shared memory: operands of wgmma, and bulk copies.
_SHARED_BYTES = ("product_bytes", "bulk_load_bytes", "bulk_store_bytes", "bulk_reduce_bytes")
_KINDS = {"e4m3": "8-bit", "f16": "16-bit", "bf16": "16-bit", "f64": "64-bit"}  # else tf32
# why sectors: L2 serves whole sectors, once for all lanes that read the same one.
_SECTORS, _SECTOR = ("global_load_sectors", "global_store_sectors"), 32
_BULK_BYTES = ("bulk_load_bytes", "bulk_store_bytes", "bulk_reduce_bytes")


class Cost(NamedTuple):
    """Seconds for which each resource is busy in one launch."""

    variant: str
    seconds: dict[str, float]

    @property
    def overlapped(self) -> float:
        return max(self.seconds.values(), default=0.0)

    @property
    def in_turns(self) -> float:
        """Time with all overlapped except FP64 products and FP64 arithmetic, which may share a unit."""
        return max(self.overlapped, self.seconds.get("tensor", 0.0) + self.seconds.get("doubles", 0.0))

    @property
    def summed(self) -> float:
        return sum(self.seconds.values())

    @property
    def bound(self) -> str:
        return max(self.seconds, key=lambda name: self.seconds[name])


def _pairs(case: Case, variant: Variant) -> float:
    """Pairs of one head in the tiles that a kernel computes; tiles on the diagonal count whole."""
    m, n = variant.tile
    if not case.causal:
        return float(case.seqlen * case.keys)
    first = case.keys - case.seqlen
    rows = range(0, case.seqlen, m)
    return float(sum(m * n * -(-min(max(first + row + m, 0), case.keys) // n) for row in rows))


def of_launch(case: Case, launch: Launch, counts: counting.Counts, gpu: Gpu) -> Cost:
    """The cost of one launch, from the counts of its kernel."""
    variant = launch.variant
    heads = case.batch * case.heads
    pairs = _pairs(case, variant)

    def total(*names: str) -> float:
        each = (counts.get(name, (0.0, 0.0)) for name in names)
        return sum(heads * (per_row * case.seqlen + per_pair * pairs) for per_row, per_pair in each)

    clocks = gpu.multiprocessors * gpu.gigahertz * 1e9
    kind = _KINDS.get(variant.dtype, "tf32")
    # Hopper kernels use wgmma; their source name has sm90.
    matrix = gpu.wgmma if "sm90" in variant.source else gpu.mma
    moved = _SECTOR * total(*_SECTORS) + total(*_BULK_BYTES)
    seconds = {
        "exp": total("exps") / (rates.EXPS * clocks),
        "shared": (total(*_SHARED_CYCLES) + total(*_SHARED_BYTES) / rates.SHARED_BYTES) / clocks,
        "shuffle": total("shuffles") / (rates.SHUFFLES * clocks),
        "L2": (moved + 4 * total("atomics")) / gpu.l2,
        "HBM": min(case.traffic(), moved) / gpu.hbm,
    }
    if kind in matrix:
        seconds["tensor"] = total("mma_flops") / (matrix[kind] * clocks)
    if issued := doubles.ISSUED.get((architecture(gpu.arch).target, variant.name)):
        seconds["doubles"] = heads * pairs / issued.pairs * 32 * issued.doubles / (gpu.doubles * clocks)
    if "mma_flops" not in counts and "simple" in variant.kernel and "delta" not in variant.kernel:
        seconds["ffma"] = 4 * heads * pairs * case.head_dim / (gpu.ffma * clocks)
    return Cost(variant.name, seconds)


def of_case(case: Case, arch: str, gpu: Gpu) -> list[Cost]:
    """The costs of the launches of a case, and of zeroing workspace before them.

    Empty if no kernel supports the case, or one has no counts.
    """
    target = architecture(arch).target
    mine = (target, case.head_dim)
    counted = {name: counts for (of, name, d), counts in counting.table().items() if (of, d) == mine}
    try:
        plan = case.plan(arch)
    except UnsupportedError:
        return []
    if not all(launch.variant.name in counted for launch in plan.launches):
        return []
    costs = [of_launch(case, launch, counted[launch.variant.name], gpu) for launch in plan.launches]
    zeroed = sum(part.nbytes for part in plan.workspace if part.name in plan.zeroed)
    return [*costs, Cost("zeros", {"HBM": zeroed / gpu.hbm})] if zeroed else costs


def describe(costs: list[Cost]) -> str:
    """Times by resource, summed over all launches."""
    names = dict.fromkeys(name for cost in costs for name in cost.seconds)
    parts = {name: sum(cost.seconds.get(name, 0.0) for cost in costs) for name in names}
    shown = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in shown if seconds > 0)


def compared(case: Case, arch: str, gpu_name: str, measured: float) -> list[str]:
    """Lines to print below a measurement; empty for a GPU or kernel without rates or counts."""
    gpu = rates.known(gpu_name)
    costs = of_case(case, arch, gpu) if gpu is not None else []
    if gpu is None or not costs:
        return []
    least = sum(cost.overlapped for cost in costs)
    bound = max(costs, key=lambda cost: cost.overlapped).bound
    return [
        f"  cost model ({gpu.name}, published rates): {describe(costs)}",
        f"  all overlapped {least * 1e3:.4g} ms, bound by {bound}; measured is {measured / least:.2f} x that",
    ]

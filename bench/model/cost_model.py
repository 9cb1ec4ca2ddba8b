"""The least time of kernels on a GPU, resource by resource, so that a gap has a name.

Counts are the simulator's (costs.csv), of doubles beside products SASS's (doubles.py); rates are published
(rates.py). Each resource alone gives a time; a kernel that overlaps all of them perfectly takes the largest,
one that overlaps nothing their sum. What is in neither: launch, ramp-up and the last wave, waiting at
barriers, instructions that are not counted.
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
# Bytes that go through shared memory beside these: operands that wgmma reads there, bulk copies.
_SHARED_BYTES = ("product_bytes", "bulk_load_bytes", "bulk_store_bytes", "bulk_reduce_bytes")
_KINDS = {"e4m3": "8-bit", "f16": "16-bit", "bf16": "16-bit", "f64": "64-bit"}  # else tf32
# why sectors: L2 serves them whole, and once for lanes that read the same.
_SECTORS, _SECTOR = ("global_load_sectors", "global_store_sectors"), 32
_BULK_BYTES = ("bulk_load_bytes", "bulk_store_bytes", "bulk_reduce_bytes")


class Cost(NamedTuple):
    """Seconds that each resource is busy for one launch."""

    variant: str
    seconds: dict[str, float]

    @property
    def overlapped(self) -> float:
        return max(self.seconds.values(), default=0.0)

    @property
    def in_turns(self) -> float:
        """With everything overlapped but products and other arithmetic of doubles, which one unit may do."""
        return max(self.overlapped, self.seconds.get("tensor", 0.0) + self.seconds.get("doubles", 0.0))

    @property
    def summed(self) -> float:
        return sum(self.seconds.values())

    @property
    def bound(self) -> str:
        return max(self.seconds, key=lambda name: self.seconds[name])


def _pairs(case: Case, variant: Variant) -> float:
    """Pairs in the tiles that a kernel visits, of one head: those on the diagonal count whole."""
    m, n = variant.tile
    if not case.causal:
        return float(case.seqlen * case.keys)
    first = case.keys - case.seqlen
    rows = range(0, case.seqlen, m)
    return float(sum(m * n * -(-min(max(first + row + m, 0), case.keys) // n) for row in rows))


def of_launch(case: Case, launch: Launch, counts: counting.Counts, gpu: Gpu) -> Cost:
    """The cost of one launch, from its kernel's counts."""
    variant = launch.variant
    heads = case.batch * case.heads
    pairs = _pairs(case, variant)

    def total(*names: str) -> float:
        each = (counts.get(name, (0.0, 0.0)) for name in names)
        return sum(heads * (per_row * case.seqlen + per_pair * pairs) for per_row, per_pair in each)

    clocks = gpu.multiprocessors * gpu.gigahertz * 1e9
    kind = _KINDS.get(variant.dtype, "tf32")
    # A Hopper kernel's products are wgmma's; the source says which it is.
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
    """The costs of a case's launches, and of what is zeroed before them.

    Empty if no kernel takes it, or one was not counted.
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
    """Times by resource, of all launches together."""
    names = dict.fromkeys(name for cost in costs for name in cost.seconds)
    parts = {name: sum(cost.seconds.get(name, 0.0) for cost in costs) for name in names}
    shown = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in shown if seconds > 0)


def beside(case: Case, arch: str, gpu_name: str, measured: float) -> list[str]:
    """Lines to print under a measurement; none for a GPU or kernel that the model does not know."""
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

"""choose: from a problem and an architecture to the kernels that answer it. Pure, and needs no GPU."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from .arrays import ITEM_BYTES, ArrayView, contiguous
from .catalog import (
    SHORT,
    SIMPLE_HEAD_DIMS,
    Arch,
    Variant,
    architecture,
    flash_backward,
    flash_classes,
    flash_forward,
    simple,
)
from .errors import Unsupported
from .problem import Problem

__all__ = ["Launch", "Part", "Plan", "choose"]


class Launch(NamedTuple):
    """One kernel of a plan."""

    variant: Variant
    grid: tuple[int, int, int]
    block: tuple[int, int, int]

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory per block."""
        return self.variant.shared_bytes


class Part(NamedTuple):
    """A piece of the workspace: an array that lives for one call, by its name in abi.cuh."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class Plan(NamedTuple):
    """What will run: a value, decided once per problem and architecture.

    Attributes
    ----------
    arch : str
    family : str
        Which family of kernels was chosen.
    launches : tuple of Launch
        In order.
    workspace : tuple of Part
    workspace_bytes : int
    refused : tuple of (str, str)
        Families that were preferred but cannot, each with its reason.
    """

    arch: str
    family: str
    launches: tuple[Launch, ...]
    workspace: tuple[Part, ...] = ()
    workspace_bytes: int = 0
    refused: tuple[tuple[str, str], ...] = ()

    def workspace_views(self, base: int) -> dict[str, ArrayView]:
        """The parts of a workspace that begins at this address."""
        return {
            part.name: ArrayView(
                base + part.offset,
                part.shape,
                contiguous(part.shape),
                part.dtype,
                ("workspace", 0),
                "none",
                False,
                None,
            ).broadcast()
            for part in self.workspace
        }


def _laid_out(*parts: tuple[str, str, tuple[int, ...]]) -> tuple[tuple[Part, ...], int]:
    """Give each (name, dtype, shape) its 256-byte aligned place."""
    placed, offset = [], 0
    for name, dtype, shape in parts:
        placed.append(Part(name, dtype, shape, offset))
        offset += -(-math.prod(shape) * ITEM_BYTES[dtype] // 256) * 256
    return tuple(placed), offset


def _rows(problem: Problem) -> tuple[int, int, int]:
    """Shape of an LSE; packed sequences share one batch."""
    if problem.packed:
        return 1, problem.heads_q, problem.rows_q
    return problem.batch, problem.heads_q, problem.seqlen_q


def _blocks(n: int, block: int) -> int:
    return -(-n // block)


# ---------------------------------------------------------------------------------------------- simple family


def _simple_refusals(problem: Problem, _arch: Arch) -> list[str]:
    reasons = []
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest > SIMPLE_HEAD_DIMS[-1]:
        reasons.append(f"head_dim {widest} is above {SIMPLE_HEAD_DIMS[-1]}")
    if problem.precision in ("tf32", "tf32x3"):
        reasons.append(f"computes in IEEE float32, not {problem.precision}")
    if problem.tile is not None:
        built = {_simple_variant(problem, kernel).tile for kernel in _simple_kernels(problem)}
        if problem.tile not in built:
            tiles = ", ".join(map(str, sorted(built)))
            reasons.append(f"tile {problem.tile} is not built (built: {tiles})")
    return reasons


def _simple_kernels(problem: Problem) -> list[str]:
    if problem.direction == "forward":
        return ["simple_forward"]
    steps = ["delta", "dq", "dkv"]
    steps += ["dbias"] if problem.want_dbias else []
    steps += ["dsinks"] if problem.sinks else []
    return ["simple_backward_" + step for step in steps]


def _simple_variant(problem: Problem, kernel: str) -> Variant:
    widest = max(problem.head_dim, problem.head_dim_v)
    return simple(kernel, SHORT[problem.dtype], min(widest, SIMPLE_HEAD_DIMS[-1]))


def _simple_grid(problem: Problem, variant: Variant) -> int:
    """Blocks of one simple kernel, all on the x axis; the formulas stand in the banners of the .cu files."""
    p, (m, n) = problem, variant.tile
    rows = p.batch * p.heads_q * _blocks(p.seqlen_q, m)
    if variant.kernel == "simple_backward_dkv":
        return p.batch * p.heads_k * _blocks(p.seqlen_k, n)
    if variant.kernel == "simple_backward_dbias":
        b, h, i, j = p.bias or (0, 0, 0, 0)
        return b * h * _blocks(i, m) * _blocks(j, n)
    if variant.kernel == "simple_backward_dsinks":
        return p.heads_q
    return rows


def _launch(variant: Variant, blocks: int) -> list[Launch]:
    """One launch along the x axis; none if there is nothing to do."""
    return [Launch(variant, (blocks, 1, 1), (variant.threads, 1, 1))] if blocks else []


def _simple_plan(problem: Problem, arch: Arch) -> Plan:
    launches: list[Launch] = []
    for kernel in _simple_kernels(problem):
        variant = _simple_variant(problem, kernel)
        launches += _launch(variant, _simple_grid(problem, variant))
    parts: tuple[Part, ...] = ()
    size = 0
    if problem.direction == "backward":
        parts, size = _laid_out(("delta", problem.accumulator, _rows(problem)))
    return Plan(arch.name, "simple", tuple(launches), parts, size)


# ---------------------------------------------------------------------------------------------- flash family


def _flash_dtype(problem: Problem) -> str:
    """What the tensor cores compute in."""
    if problem.dtype != "float32":
        return SHORT[problem.dtype]
    return problem.precision or "tf32x3"


def _flash_mask(problem: Problem) -> str:
    """The kind of kernel: "band" scales after the row maximum, which needs scores that only scale changes."""
    plain = not (problem.mask or problem.bias or problem.alibi or problem.softcap or problem.dropout)
    return "band" if plain and problem.scale > 0 else "any"


def _flash_refusals(problem: Problem, arch: Arch) -> list[str]:
    p, reasons = problem, []
    if p.dtype == "float64":
        reasons.append("tensor cores here compute 16-bit and TF32 products, not float64")
    if p.dtype == "float32" and p.precision == "ieee":
        reasons.append("computes float32 on tensor cores (tf32x3, tf32), not in IEEE arithmetic")
    if arch.capability < 80 and p.dtype in ("bfloat16", "float32"):
        reasons.append(f"{p.dtype} needs the tensor cores of sm_80")
    classes = flash_classes(p.head_dim, p.head_dim_v)
    if classes is None:
        reasons.append(f"head_dim {max(p.head_dim, p.head_dim_v)} is above 256")
    if not p.aligned:
        reasons.append("rows of every tensor must be contiguous and start on 16-byte boundaries")
    if max(p.seqlen_q, p.seqlen_k) >= 2**30:
        reasons.append("sequences must be shorter than 2**30")
    if reasons:
        return reasons
    variants = _flash_variants(p, arch)
    if None in variants:
        size = arch.shared_bytes // 1024
        return [f"{p.direction} with head_dim {p.head_dim} needs more than the {size} KiB of shared memory"]
    tiles = {variant.tile for variant in variants if variant is not None}
    if p.tile is not None and p.tile not in tiles:
        reasons.append(f"tile {p.tile} is not built (built: {', '.join(map(str, sorted(tiles)))})")
    return reasons


def _flash_variants(problem: Problem, arch: Arch) -> list[Variant | None]:
    """The kernels in order; None where the tables have no tile."""
    classes = flash_classes(problem.head_dim, problem.head_dim_v)
    assert classes is not None
    dtype, mask = _flash_dtype(problem), _flash_mask(problem)
    if problem.direction == "forward":
        return [flash_forward(dtype, classes, mask, arch)]
    steps = ("delta", "dkv", "dq") if problem.deterministic else ("delta", "dqkv", "dq_convert")
    return [flash_backward(step, dtype, classes, mask, arch) for step in steps]


def _flash_plan(problem: Problem, arch: Arch) -> Plan:
    variants = [variant for variant in _flash_variants(problem, arch) if variant is not None]
    queries, keys = problem.batch * problem.heads_q, problem.batch * problem.heads_k
    launches: list[Launch] = []
    for variant in variants:
        m, n = variant.tile
        owns_keys = variant.kernel in ("flash_backward_dqkv", "flash_backward_dkv")
        blocks = keys * _blocks(problem.seqlen_k, n) if owns_keys else queries * _blocks(problem.seqlen_q, m)
        launches += _launch(variant, blocks)
    if problem.direction == "forward":
        return Plan(arch.name, "flash", tuple(launches))
    # dbias and dsinks read the same inputs and delta, and have no tensor-core kernels of their own.
    for kernel in _simple_kernels(problem)[3:]:
        variant = _simple_variant(problem, kernel)
        launches += _launch(variant, _simple_grid(problem, variant))
    parts: list[tuple[str, str, tuple[int, ...]]] = [("delta", problem.accumulator, _rows(problem))]
    if not problem.deterministic:
        # layout: one tile of sums after the other, each as the kernel's warps hold it.
        m = variants[0].tile[0]
        of_packed = problem.rows_q // m + problem.batch
        tiles = of_packed if problem.packed else problem.batch * _blocks(problem.seqlen_q, m)
        shape = (tiles, problem.heads_q, m, variants[0].head_dim)
        parts.append(("dq_accumulator", "float32", shape))
    return Plan(arch.name, "flash", tuple(launches), *_laid_out(*parts))


# ---------------------------------------------------------------------------------------------- the choice

# In order of preference: the first family with nothing against it.
FAMILIES = (
    ("flash", _flash_refusals, _flash_plan),
    ("simple", _simple_refusals, _simple_plan),
)


@lru_cache(maxsize=4096)
def choose(problem: Problem, arch: str, multiprocessors: int | None = None) -> Plan:
    """Choose the kernels for a problem.

    Parameters
    ----------
    problem : Problem
    arch : str
        Such as "sm_86" or "sm_90a".
    multiprocessors : int, optional
        Of the GPU at hand; by default those of a typical one.

    Returns
    -------
    Plan

    Raises
    ------
    Unsupported
        No family fits; the error lists each one's reasons.
    """
    row = architecture(arch)
    if multiprocessors:
        row = row._replace(multiprocessors=multiprocessors)
    refused: list[tuple[str, str]] = []
    for family, refusals, plan in FAMILIES:
        reasons = refusals(problem, row)
        if family not in row.families:
            reasons = [f"is not compiled for {row.name}", *reasons]
        if not reasons:
            planned = plan(problem, row)
            blocks = max((launch.grid[0] for launch in planned.launches), default=0)
            if blocks < 2**31:
                return planned._replace(refused=tuple(refused))
            reasons = [f"needs a grid of {blocks} blocks, above 2**31 - 1"]
        refused += [(family, reason) for reason in reasons]
    if problem.tile is not None:
        hint = "tile=None, or one of the built tiles"
    elif problem.precision is not None:
        hint = 'precision=None or precision="ieee"'
    else:
        hint = "NumPy arrays: the CPU path takes any head dim"
    raise Unsupported(
        f"no kernel fits this problem on {row.name}.",
        table=[("problem", problem.summary())],
        reasons=refused,
        hint=hint,
    )

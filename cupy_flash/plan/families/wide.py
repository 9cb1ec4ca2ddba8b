"""The mma.sync kernels for head dims above 256, and what they refuse; part of `flash`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ...call.problem import Problem
from ..catalog import SHORT, Arch, Variant
from ..launch import class_of, round_up
from . import flash_tiles

__all__ = [
    "PROMISED",
    "backward_variants",
    "forward_variants",
    "head_dim_refusal",
    "option_refusal",
    "passes",
    "refusals",
]

PROMISED = "guaranteed order of sums"  # reproducible= needs it
_DTYPES = ("f16", "bf16")
_LEAST = 1e-20  # smallest scale with softcap or ALiBi


def _classes(direction: str, arch: Arch) -> list[tuple[int, int]]:
    """The classes above `flash_tiles.HEAD_DIMS` for which an architecture has kernels."""
    if direction == "forward":
        tables = flash_tiles.FORWARD_WIDE
        return [classes for classes, cells in tables.items() if cells[flash_tiles.column(arch)]]
    return [*flash_tiles.BACKWARD_WIDE] if direction == "backward" and arch.capability >= 80 else []


def _forward(dtype: str, classes: tuple[int, int], arch: Arch) -> Variant | None:
    """The forward kernel of a class above 256; None if the architecture has none."""
    cell = flash_tiles.FORWARD_WIDE[classes][flash_tiles.column(arch)]
    if cell is None or (arch.capability < 80 and dtype != "f16"):
        return None
    (d, v), n, threads = classes, 64, 256
    m, q_steps, slots, k_columns = cell
    # Q, the ring buffer, P; in FP32: maxima of 16 rows per warp, rescale factors. 128 bytes: parked values.
    tiles = 2 * (m * (d - 16 * q_steps) + slots * max(n * k_columns, 16 * v) + m * n)
    shared_bytes = tiles + round_up(4 * (threads // 2 + m), 128) + 128
    return Variant(
        "flash_forward_wide.cu",
        "",
        "ForwardParams",
        dtype,
        d,
        v,
        (m, n),
        threads,
        shared_bytes,
        "band",
        macros=(
            ("CF_TURING", str(int(arch.capability < 80))),
            ("CF_SLOTS", str(slots)),
            ("CF_Q_STEPS", str(q_steps)),
            ("CF_K_COLUMNS", str(k_columns)),
        ),
    )


def _backward(step: str, dtype: str, classes: tuple[int, int]) -> Variant:
    """A backward pass of a class above 256, "dkv" or "dq"."""
    m, n = flash_tiles.BACKWARD_WIDE[classes][step]
    warps, threads = 8, 256
    # Two stages of 64 columns of two matrices per warp; partial S and dP of the warps.
    streams, parts = warps * 2 * 2 * 2 * 64 * min(m, n), warps * 2 * 4 * m * n
    # P and dS, and two stages of LSE and delta.
    own = 2 * (2 * m * n) + 2 * 2 * 4 * m if step == "dkv" else 2 * m * n
    kernel = ("flash_backward_wide.cu", step, "BackwardParams")
    return Variant(*kernel, dtype, *classes, (m, n), threads, streams + parts + own, "band")


def forward_variants(arch: Arch) -> Iterator[Variant]:
    """The forward variants compiled for an architecture."""
    for dtype, classes in product(_DTYPES, flash_tiles.FORWARD_WIDE):
        variant = _forward(dtype, classes, arch)
        if variant is not None:
            yield variant


def backward_variants(arch: Arch) -> Iterator[Variant]:
    """The backward variants compiled for an architecture."""
    if arch.capability >= 80:
        for dtype, classes, step in product(_DTYPES, flash_tiles.BACKWARD_WIDE, ("dkv", "dq")):
            yield _backward(step, dtype, classes)


def passes(problem: Problem, arch: Arch) -> list[Variant]:
    """The kernels in order, for a problem that is not refused; for gradients those after delta."""
    classes, dtype = class_of(_classes(problem.direction, arch), problem), SHORT[problem.dtype]
    assert classes is not None
    if problem.direction == "forward":
        found = _forward(dtype, classes, arch)
        assert found is not None
        return [found]
    return [_backward(step, dtype, classes) for step in ("dkv", "dq")]


def head_dim_refusal(problem: Problem, most: tuple[int, int] | None) -> str:
    """The reason against unsupported head dims; `most` is the widest class that there is."""
    line = f"head_dim {max(problem.head_dim, problem.head_dim_v)} is above 256"
    return line if most is None else f"{line} ({problem.direction}: above {most[0]}, {most[1]} of v)"


def option_refusal(problem: Problem, unknown: list[str]) -> str:
    """The reason against options that the kernels for head dims above 256 do not support."""
    widest = max(problem.head_dim, problem.head_dim_v)
    return f"its kernel for head_dim {widest}, above 256, has no {' or '.join(unknown)}"


def refusals(problem: Problem, arch: Arch) -> list[str]:
    """All reasons why there is no kernel for head dims above 256."""
    p, wide = problem, _classes(problem.direction, arch)
    taken = ("float16",) if arch.capability < 80 else ("float16", "bfloat16")
    if p.dtype not in taken or class_of(wide, p) is None:
        return [head_dim_refusal(p, max(wide) if wide and p.dtype in taken else None)]
    forward = p.direction == "forward"
    inside = {
        # why a mask of keys is supported: gathering a cache with pages or padding makes one
        "mask that differs from query to query": forward and p.mask and p.mask[2] > 1,
        "scale <= 0": forward and p.scale <= 0,
        # why: the kernel divides softcap and ALiBi by the scale, in float32
        f"softcap or ALiBi with a scale of {p.scale}": (
            forward and (p.softcap or p.alibi) and not _LEAST <= abs(p.scale) <= 1 / _LEAST
        ),
        PROMISED: p.reproducible,
    }
    unknown = p.unread(("mask", "ALiBi", "softcap") if forward else ())
    unknown += [name for name, given in inside.items() if given]
    return [option_refusal(p, unknown)] if unknown else []

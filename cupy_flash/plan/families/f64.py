"""The float64 kernels, for the tensor cores of sm_80 and sm_90; part of `flash`."""

from __future__ import annotations

from collections.abc import Iterator

from ...call.problem import Problem
from ..catalog import Arch, Variant
from ..launch import class_of
from . import simple
from .wide import PROMISED

__all__ = ["DTYPE", "passes", "refusals", "variants"]

DTYPE = "f64"
_ITEM_BYTES = 8

# By capability: rows of a product, and (head_dim, head_dim_v) class -> queries and keys per block.
# why only these: other GPUs have no float64 tensor cores, or none faster than their CUDA cores.
# why 32 keys: S and O of a warp's 16 rows take 80 doubles per thread at head dim 128, of at most 127.
# why 128 rows at 128 on sm_90: its shared memory holds Q of eight warps; at 64, two blocks of four warps.
_FORWARD: dict[int, tuple[int, dict[tuple[int, int], tuple[int, int]]]] = {
    80: (8, {(64, 64): (64, 32), (128, 128): (64, 32)}),
    90: (16, {(64, 64): (64, 32), (128, 128): (128, 32)}),
}


# The same for gradients, by pass: both architectures hold 128 rows of two matrices, with eight warps.
# why no larger class: dK and dV of a warp's 16 keys at head dim 128 take all registers of a thread.
_BACKWARD: dict[tuple[int, int], dict[str, tuple[int, int]]] = {(64, 64): {"dkv": (16, 128), "dq": (128, 32)}}


def _forward(classes: tuple[int, int], arch: Arch) -> Variant:
    """The forward kernel of a head dim class."""
    product_rows, tiles = _FORWARD[arch.capability]
    (d, v), (m, n) = classes, tiles[classes]
    shared_bytes = _ITEM_BYTES * (m * d + 2 * n * max(d, v))
    kernel = ("flash_forward_f64.cu", "", "ForwardParams", DTYPE)
    return Variant(*kernel, d, v, (m, n), 2 * m, shared_bytes, "band", _macros(product_rows))


def _backward(step: str, classes: tuple[int, int], arch: Arch) -> Variant:
    """A backward pass of a head dim class, "dkv" or "dq"."""
    (d, v), (m, n) = classes, _BACKWARD[classes][step]
    owned = max(m, n)
    # Two slots: of Q and of dO, or of the larger of V and K.
    streamed = 2 * m * (d + v) if step == "dkv" else 2 * n * max(d, v)
    shared_bytes = _ITEM_BYTES * (owned * (d + v) + streamed)
    kernel = ("flash_backward_f64.cu", step, "BackwardParams", DTYPE)
    macros = _macros(_FORWARD[arch.capability][0])
    return Variant(*kernel, d, v, (m, n), 2 * owned, shared_bytes, "band", macros)


def _macros(product_rows: int) -> tuple[tuple[str, str], ...]:
    return (("CF_PRODUCT_ROWS", str(product_rows)),)


def variants(arch: Arch) -> Iterator[Variant]:
    """The variants compiled for an architecture."""
    if arch.capability in _FORWARD:
        yield from (_forward(classes, arch) for classes in _FORWARD[arch.capability][1])
        yield from (_backward(step, classes, arch) for classes in _BACKWARD for step in _BACKWARD[classes])


def _classes_of(problem: Problem, arch: Arch) -> tuple[int, int] | None:
    """The first class that fits the head dims of a problem; None if none does."""
    return class_of(_FORWARD[arch.capability][1] if problem.direction == "forward" else _BACKWARD, problem)


def passes(problem: Problem, arch: Arch) -> list[Variant]:
    """The kernels in order, for a problem that is not refused."""
    classes = _classes_of(problem, arch)
    assert classes is not None
    if problem.direction == "forward":
        return [_forward(classes, arch)]
    # why simple's delta: it needs no matrix products.
    return [simple.delta(problem), *(_backward(step, classes, arch) for step in _BACKWARD[classes])]


def refusals(problem: Problem, arch: Arch) -> list[str]:
    """All reasons why there is no kernel for a float64 problem."""
    p = problem
    if arch.capability not in _FORWARD:
        on = " and ".join(f"sm_{capability}" for capability in _FORWARD)
        return [f"computes float64 on the tensor cores of {on} only"]
    reasons = []
    if p.direction not in ("forward", "backward"):
        return ["does not support second derivatives of float64"]
    if _classes_of(p, arch) is None:
        most = max(_FORWARD[arch.capability][1] if p.direction == "forward" else _BACKWARD)[0]
        of = "float64" if p.direction == "forward" else "gradients of float64"
        reasons.append(f"head_dim {max(p.head_dim, p.head_dim_v)} is above {most}, of {of}")
    if unknown := [*p.unread(()), *[PROMISED] * bool(p.reproducible)]:
        reasons.append(f"its kernel of float64 has no {' or '.join(unknown)}")
    return reasons

"""The kernels of float64, whose tensor cores sm_80 and sm_90 have: forward only; part of `flash`."""

from __future__ import annotations

from collections.abc import Iterator

from ...call.problem import Problem
from ..catalog import Arch, Variant
from .wide import PROMISED

__all__ = ["DTYPE", "chosen", "refusals", "variants"]

DTYPE = "f64"
_ITEM_BYTES = 8

# By capability: rows of a product, and (head_dim, head_dim_v) class -> queries and keys of a block.
# why only these: others multiply float64 on tensor cores no faster than beside them, or have none.
# why 32 keys: S and O of a warp's 16 rows are 80 doubles of a thread at head dim 128, of 127 at most.
# why 128 rows there on sm_90: its shared memory holds Q of eight warps; of head dim 64 two blocks of four.
_FORWARD: dict[int, tuple[int, dict[tuple[int, int], tuple[int, int]]]] = {
    80: (8, {(64, 64): (64, 32), (128, 128): (64, 32)}),
    90: (16, {(64, 64): (64, 32), (128, 128): (128, 32)}),
}


def variants(arch: Arch) -> Iterator[Variant]:
    """What is compiled for an architecture."""
    product_rows, classes = _FORWARD.get(arch.capability, (0, {}))
    for (d, v), (m, n) in classes.items():
        yield Variant(
            "flash_forward_f64.cu",
            "",
            "ForwardParams",
            DTYPE,
            d,
            v,
            (m, n),
            2 * m,
            _ITEM_BYTES * (m * d + 2 * n * max(d, v)),
            "band",
            macros=(("CF_PRODUCT_ROWS", str(product_rows)),),
        )


def chosen(problem: Problem, arch: Arch) -> Variant | None:
    """The kernel for a problem's head dims; None if no class takes them."""
    p = problem
    fitting = (x for x in variants(arch) if p.head_dim <= x.head_dim and p.head_dim_v <= x.head_dim_v)
    return next(fitting, None)


def refusals(problem: Problem, arch: Arch) -> list[str]:
    """Every reason why there is no kernel for a problem of float64."""
    p = problem
    if arch.capability not in _FORWARD:
        on = " and ".join(f"sm_{capability}" for capability in _FORWARD)
        return [f"computes float64 on the tensor cores of {on} only"]
    reasons = []
    if p.direction != "forward":
        reasons.append("has no gradients of float64")
    if chosen(p, arch) is None:
        most = max(x.head_dim for x in variants(arch))
        reasons.append(f"head_dim {max(p.head_dim, p.head_dim_v)} is above {most}, of float64")
    options = {
        "mask": p.mask,
        "bias": p.bias,
        "Spans": p.spans,
        "BlockMask": p.blocks,
        "score function": p.function,
        "ALiBi": p.alibi,
        "softcap": p.softcap,
        "dropout": p.dropout,
        PROMISED: p.reproducible,
    }
    if unknown := [name for name, given in options.items() if given]:
        reasons.append(f"its kernel of float64 has no {' or '.join(unknown)}")
    return reasons

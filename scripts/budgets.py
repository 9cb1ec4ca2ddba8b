"""Size limits for the kernels of a release, and an estimate of sizes from the compiled part of them."""

from __future__ import annotations

import collections
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cupy_flash.plan import catalog, families  # noqa: E402
from cupy_flash.plan.families import decode_wide, flash  # noqa: E402

WHEEL_BYTES = 60_000_000
# Limit for all kernels of a family for one target. From sm_100 on a cubin has its code twice, the second time
# in a form that the driver compiles for higher minors, so that it has 1.2 to 1.4 times the bytes of sm_80.
# With head dims above 256 sm_120 has 12.05 MB, all compiled; estimates differ from that by 2 %.
FAMILY_BYTES = {flash.NAME: 13_000_000}
# Limit for rarely used kernels, compressed, over all targets of a wheel. Latents are those of MLA.
ABOVE_256, LATENTS = "head dims above 256", "latents"
PART_BYTES = {ABOVE_256: 5_000_000, LATENTS: 3_000_000}
REFERENCE = "sm_80"  # the target with all kernels compiled in CI


def excess(sizes: Mapping[tuple[str, str], float]) -> list[str]:
    """Describe exceeded family budgets, one line each, with a hint.

    Parameters
    ----------
    sizes : dict of (str, str) to float
        Bytes of kernels by (target, family).
    """
    return [
        f"the {family} kernels of {target} take {size / 1e6:.2f} MB, over their budget of "
        f"{FAMILY_BYTES[family] / 1e6:.2f} MB. Try: fewer variants, or another FAMILY_BYTES in "
        "scripts/budgets.py"
        for (target, family), size in sizes.items()
        if size > FAMILY_BYTES.get(family, size)
    ]


def part_of(variant: catalog.Variant) -> str:
    """The key of `PART_BYTES` that a kernel counts towards; empty if none.

    Kernels of the simple family support any head dim without additional cubins, so that they do not count.
    """
    if variant.head_dim == decode_wide.LATENT:
        return LATENTS
    return ABOVE_256 if "_wide" in variant.source else ""


def excess_of_parts(sizes: Mapping[str, float]) -> list[str]:
    """Describe exceeded `PART_BYTES`, one line each, by bytes in a wheel."""
    return [
        f"the kernels of {part} take {sizes[part] / 1e6:.2f} MB, over their budget of {most / 1e6:.2f} MB. "
        "Try: fewer variants, or another PART_BYTES in scripts/budgets.py"
        for part, most in PART_BYTES.items()
        if sizes.get(part, 0) > most
    ]


def estimate(
    target: str, family: str | None, sizes: Mapping[str, int], reference: Mapping[str, int]
) -> float:
    """Estimate the bytes of all kernels of a family for a target from the compiled ones.

    Their bytes are scaled by the ratio of all kernels to the same kernels for `REFERENCE`.

    Parameters
    ----------
    target : str
    family : str, optional
        Default: every family.
    sizes : dict of str to int
        Bytes of the compiled variants of the target.
    reference : dict of str to int
        Bytes of all variants for `REFERENCE`.

    Returns
    -------
    float
        0 if no variant is compiled.
    """
    of_kind = collections.defaultdict(list)
    for variant in families.variants(REFERENCE):
        of_kind[_kind(variant)].append(reference[variant.name])
    usual = statistics.mean(reference.values())
    weights = {
        variant.name: statistics.mean(of_kind.get(_kind(variant), [usual]))
        for variant, of in families.names(target).items()
        if family in (of, None)
    }
    compiled = weights.keys() & sizes.keys()
    if not compiled:
        return 0.0
    return (
        sum(sizes[name] for name in compiled)
        * sum(weights.values())
        / sum(weights[name] for name in compiled)
    )


def _kind(variant: catalog.Variant) -> tuple[object, ...]:
    """The main factors of a kernel's size; tiles and options differ between targets."""
    return variant.source, variant.step, variant.dtype, variant.head_dim, variant.head_dim_v

"""Size limits for the kernels of a release, and an estimate of the sizes from those that are compiled."""

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
# Of the kernels of a family for one target. From sm_100 on a cubin holds its code twice, which is why it has
# 1.2 to 1.4 times the bytes of sm_80; the second one is what the driver makes code for higher minors of.
# Head dims above 256 brought sm_120 to 12.05 MB, all compiled; estimates differ from that by 2 %.
FAMILY_BYTES = {flash.NAME: 13_000_000}
# Of what few people call, compressed, for all targets of a wheel. Latents are keys and values in one (MLA).
ABOVE_256, LATENTS = "head dims above 256", "latents"
PART_BYTES = {ABOVE_256: 5_000_000, LATENTS: 3_000_000}
REFERENCE = "sm_80"  # the target that CI compiles whole


def excess(sizes: Mapping[tuple[str, str], float]) -> list[str]:
    """Budgets that are exceeded, a line for each, with a way out.

    Parameters
    ----------
    sizes : dict of (str, str) to float
        Bytes of a target's kernels of a family.
    """
    return [
        f"the {family} kernels of {target} take {size / 1e6:.2f} MB, over their budget of "
        f"{FAMILY_BYTES[family] / 1e6:.2f} MB. Try: fewer variants, or another FAMILY_BYTES in "
        "scripts/budgets.py"
        for (target, family), size in sizes.items()
        if size > FAMILY_BYTES.get(family, size)
    ]


def part_of(variant: catalog.Variant) -> str:
    """Which of `PART_BYTES` a kernel counts in; empty if in none.

    Those of the simple family take any head dim, and are no more for that.
    """
    if variant.head_dim == decode_wide.LATENT:
        return LATENTS
    return ABOVE_256 if "_wide" in variant.source else ""


def excess_of_parts(sizes: Mapping[str, float]) -> list[str]:
    """The same of `PART_BYTES`, by bytes in a wheel."""
    return [
        f"the kernels of {part} take {sizes[part] / 1e6:.2f} MB, over their budget of {most / 1e6:.2f} MB. "
        "Try: fewer variants, or another PART_BYTES in scripts/budgets.py"
        for part, most in PART_BYTES.items()
        if sizes.get(part, 0) > most
    ]


def estimate(
    target: str, family: str | None, sizes: Mapping[str, int], reference: Mapping[str, int]
) -> float:
    """Bytes of all kernels of a family for a target, of which only some are compiled; None: of every family.

    What is compiled is scaled by what all of them would take for the reference, over what these would.

    Parameters
    ----------
    target : str
    family : str, optional
    sizes : dict of str to int
        Bytes of the variants that are compiled for the target.
    reference : dict of str to int
        Bytes of all variants for `REFERENCE`.

    Returns
    -------
    float
        0 if nothing of it is compiled.
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

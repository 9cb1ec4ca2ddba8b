"""The kernel that `cupy-flash check` compares with known numbers; compiled like all others, never planned."""

from __future__ import annotations

from dataclasses import dataclass

from ..catalog import Variant

__all__ = ["KERNEL", "NAME", "capability", "variant"]

NAME, KERNEL = "primitives", "check_primitives"
_THREADS, _SHARED_BYTES = 128, 11264


@dataclass(frozen=True, slots=True)
class _OfNoProblem(Variant):
    """The only variant of its source, named after it."""

    @property
    def name(self) -> str:
        """The name of the source."""
        return KERNEL


def capability(target: str) -> int:
    """Compute capability x 10 of the primitives that the kernel of a target runs."""
    return int(target.removeprefix("sm_").rstrip("af"))


def variant(target: str) -> Variant:
    """The kernel of a target such as "sm_80" or "sm_90a"."""
    macros = (("CF_CAPABILITY", str(capability(target))),)
    return _OfNoProblem(
        f"{KERNEL}.cu", "", "CheckParams", "f32", 0, 0, (0, 0), _THREADS, _SHARED_BYTES, macros=macros
    )

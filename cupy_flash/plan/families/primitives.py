"""The kernel that `cupy-flash check` compares with known numbers: compiled with all others, never planned."""

from __future__ import annotations

from dataclasses import dataclass

from ..catalog import Variant

__all__ = ["KERNEL", "NAME", "capability", "variant"]

NAME, KERNEL = "primitives", "check_primitives"
_THREADS, _SHARED_BYTES = 128, 11264


@dataclass(frozen=True, slots=True)
class _OfNoProblem(Variant):
    """The one variant of its source."""

    @property
    def name(self) -> str:
        """That of the source."""
        return KERNEL


def capability(target: str) -> int:
    """Whose primitives the kernel of a target runs: compute capability x 10."""
    return int(target.removeprefix("sm_").rstrip("af"))


def variant(target: str) -> Variant:
    """The kernel of a target such as "sm_80" or "sm_90a"."""
    macros = (("CF_CAPABILITY", str(capability(target))),)
    return _OfNoProblem(
        f"{KERNEL}.cu", "", "CheckParams", "f32", 0, 0, (0, 0), _THREADS, _SHARED_BYTES, macros=macros
    )

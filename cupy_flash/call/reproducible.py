"""The option reproducible: its modes, and the options and calls that it refuses."""

from __future__ import annotations

from typing import Any

from ..errors import InvalidArgumentsError, UnsupportedError
from .checks import one_of

__all__ = ["MODES", "check_reproducible", "refuse_reproducible"]

MODES = ("run", "batch", "prefill", "device")


def check_reproducible(mode: Any, *, dropout: float, tile: Any) -> None:
    """Refuse unknown modes, and options under which a row depends on more than its own inputs."""
    if mode is None:
        return
    if not one_of(mode, MODES):
        raise InvalidArgumentsError(
            f"reproducible is {mode!r}.", hint='reproducible="run", "batch", "prefill", "device" or None'
        )
    if mode == "run":
        return
    if dropout:
        raise UnsupportedError(
            f'reproducible="{mode}" with dropout={dropout}: which weights are dropped depends on the number '
            "of a sequence in the batch and of a row in the call.",
            hint="dropout=0.0, or reproducible=None",
        )
    if tile is not None:
        raise UnsupportedError(
            f'reproducible="{mode}" with tuning.tile={tile!r}: the order of sums would depend on the tile.',
            hint="tuning=None, or reproducible=None",
        )


def refuse_reproducible(mode: Any, what: str) -> None:
    """Refuse modes beyond "run" for a kind of call that has no fixed summation order."""
    if mode not in (None, "run"):
        raise UnsupportedError(
            f'reproducible="{mode}" is not supported for {what}.',
            hint='reproducible="run" or None',
        )

"""Compile missing kernels of score functions at their first call, if this process allows it."""

from __future__ import annotations

import threading
from pathlib import Path

from ..errors import CubinNotFoundError, InvalidArgumentsError
from ..log import LOG
from ..plan.catalog import Variant
from . import locate

__all__ = ["COMPILED", "locate_or_compile", "policy"]

POLICIES = ("refuse", "allow")
_policy = POLICIES[0]
_compiling = threading.Lock()
# Folders of the user's cache that this process has compiled into.
COMPILED: set[Path] = set()


def policy(new: str) -> str:
    """Set whether a call compiles missing kernels or raises an error; return the previous setting."""
    global _policy
    if new not in POLICIES:
        raise InvalidArgumentsError(f"policy is {new!r}.", hint='"allow", or "refuse" as at first')
    before, _policy = _policy, new
    return before


def locate_or_compile(variant: Variant, arch: str, driver_version: int | None) -> locate.Cubin:
    """Locate a cubin; compile a missing kernel of a score function, if the policy allows it."""
    try:
        return locate.locate(variant, arch, driver_version)
    except CubinNotFoundError:
        if variant.function is None or _policy != "allow":
            raise
    with _compiling:  # a thread that waited for the lock may find the cubin now
        try:
            return locate.locate(variant, arch, driver_version)
        except CubinNotFoundError:
            # why here: this import loads the compiler
            from .user_cache import kernel_into_cache

            LOG.info("compiling %s for %s", variant.name, arch)
            COMPILED.update(kernel_into_cache(variant, arch, locate.usable_sets(driver_version)))
            return locate.locate(variant, arch, driver_version)

"""Register option values as pytrees: their arrays are leaves, all else is static."""

from __future__ import annotations

from typing import Any

from jax.tree_util import register_pytree_node

from ..call.compound import Rotary
from ..program.function import Bound, Program

__all__: list[str] = []

# why: JAX treats every field of a named tuple as an array, and would trace flags and functions.


def _arrays_of_rotary(given: Rotary) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
    return given[:3], given[3:]


def _arrays_of_function(given: Bound) -> tuple[tuple[Any, ...], Program]:
    return given.arguments, given.program


register_pytree_node(Rotary, _arrays_of_rotary, lambda flags, arrays: Rotary._make((*arrays, *flags)))
register_pytree_node(Bound, _arrays_of_function, lambda program, arrays: Bound(program, tuple(arrays)))

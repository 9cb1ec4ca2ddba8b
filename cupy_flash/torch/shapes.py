"""Checks of a call of which torch computes only the shapes: compiled, exported, or on device meta."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..call.arrays import CPU, ArrayView, dtype_name
from ..call.describe import OFFSETS, head_operands, main_views
from ..call.operands import FLOATS, score_operand

__all__ = ["check_shapes", "views_of_shapes"]


def views_of_shapes(tensors: Mapping[str, Any], symbolic: bool) -> dict[str, ArrayView]:
    """Views without memory of the tensors that are given; {} if a size is unknown.

    Parameters
    ----------
    tensors : mapping of str to Tensor or None
    symbolic : bool
        Whether sizes may be symbols, which become conditions of the program when they are compared. Sizes
        that the program computes itself are unknown either way.
    """
    given = {name: x for name, x in tensors.items() if x is not None}
    symbols = [n for x in given.values() for n in x.shape if isinstance(n, torch.SymInt)]
    if symbols:
        from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

        if not symbolic or free_unbacked_symbols(symbols):
            return {}
    # why addresses that differ: a cache of values at the address of the keys is one of latents
    return {
        name: ArrayView(at, tuple(x.shape), x.stride(), dtype_name(x.dtype) or "", CPU, "torch", False, x)
        for at, (name, x) in enumerate(given.items())
    }


def check_shapes(tensors: Mapping[str, Any], layout: str, longest: tuple[Any, Any]) -> None:
    """Refuse dtypes and shapes that the call with numbers would refuse, except those of spans and blocks."""
    raw = views_of_shapes(tensors, symbolic=True)
    if not raw:
        return
    cut = raw.get("cu_seqlens_q")
    raw = {name: x for name, x in raw.items() if name not in OFFSETS}
    views = main_views("forward", raw, layout, cut is not None)
    batch, heads, queries, _ = views["q"].shape
    keys = views["k"].shape[2]
    if cut is not None:
        batch, (queries, keys) = cut.shape[0] - 1, longest
    if queries is not None and keys is not None:
        full = batch, heads, queries, keys
        score_operand("mask", raw, views, full, ("bool",))
        score_operand("bias", raw, views, full, FLOATS)
    head_operands(raw, views, batch, heads, "float64" if raw["q"].dtype == "float64" else "float32")

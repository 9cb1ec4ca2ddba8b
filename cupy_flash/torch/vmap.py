"""Rules of torch.vmap for operators."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["directions_at_once", "one_by_one"]


def one_by_one(function: Any) -> Any:
    """A rule that calls the operator for each element; batching would gain little for such large calls."""

    def mapped(info: Any, in_dims: tuple[Any, ...], *values: Any) -> tuple[Any, Any]:
        pairs = list(zip(values, in_dims, strict=True))
        if not info.batch_size:  # an element of zeros, for the shapes of the results
            zeros = [x if dim is None else x.new_zeros(x.movedim(dim, 0).shape[1:]) for x, dim in pairs]
            results = tuple([x[None][:0] for x in function(*zeros)])
        else:
            each = ([x if d is None else x.select(d, n) for x, d in pairs] for n in range(info.batch_size))
            parts = zip(*(function(*one) for one in each), strict=True)
            results = tuple([torch.stack(part) for part in parts])
        return results, (0,) * len(results)

    return mapped


def directions_at_once(function: Any, first: int, last: int, has_directions: Any) -> Any:
    """A rule that calls the operator once, with an axis of directions, if only tangents are mapped.

    Parameters
    ----------
    function : operator
    first, last : int
        Half-open range of the arguments that may have a leading axis of directions: the tangents.
    has_directions : callable
        Whether the tangents have that axis already, from the tangents, their mapped axes, and the arguments
        after them.
    """
    otherwise = one_by_one(function)

    def mapped(info: Any, in_dims: tuple[Any, ...], *values: Any) -> tuple[Any, Any]:
        directed, dims = values[first:last], in_dims[first:last]
        others = (*in_dims[:first], *in_dims[last:])
        if any(dim is not None for dim in others) or has_directions(directed, dims, values[last:]):
            looped: tuple[Any, Any] = otherwise(info, in_dims, *values)
            return looped
        moved = [
            x if x is None else x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(directed, dims, strict=True)
        ]
        results = tuple(function(*values[:first], *moved, *values[last:]))
        return results, (0,) * len(results)

    return mapped

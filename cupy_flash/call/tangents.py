"""Checks of the tangents of a call, and their views, one direction after the other."""

from __future__ import annotations

from .arrays import ArrayView
from .operands import Views, cast, check_place, lift, wrong
from .options import AXES_OF, DERIVATIVES, DIFFERENTIABLE

__all__ = ["TANGENTS", "check_tangents", "directions_of", "shape_of_results", "tangent_operand"]

# Names of tangents in calls: "d" and the name of the array.
TANGENTS = DERIVATIVES


def check_tangents(raw: Views, tangents: Views) -> int | None:
    """Check that tangents match the arrays of a call; return the length of their axis of directions, or None.

    Tangents have the names in TANGENTS; "do" and "dlse" are among them if o and lse are given.
    """
    every = {**raw, **tangents}
    if not tangents:
        hint = f"{'=, '.join(TANGENTS[:-1])}= or {TANGENTS[-1]}="
        raise wrong("no tangent is given, so that all derivatives are 0.", every, hint)
    counts: dict[str, int | None] = {}
    for name, view in tangents.items():
        of = name[1:]
        if of not in raw:
            raise wrong(f"{name} is given, but no {of}.", every, f"{of}=..., or {name}=None")
        counts[name] = _count(name, view, of, every)
    first = next(iter(counts))
    for name, count in counts.items():
        if count != counts[first]:
            headline = f"{name} has {_directions(count)}, {first} has {_directions(counts[first])}."
            raise wrong(headline, every, "for all tangents the same axis in front, or none")
    return counts[first]


def _count(name: str, view: ArrayView, of: str, every: Views) -> int | None:
    """Check the tangent of an array; return its number of directions."""
    check_place(name, every, of)
    primal = every[of]
    if view.dtype != primal.dtype:
        headline = f"{name} has dtype {view.dtype}, {of} has {primal.dtype}."
        raise wrong(headline, every, cast(name, view, f"{of}.dtype"))
    if view.shape == primal.shape:
        return None
    if view.shape[1:] == primal.shape and len(view.shape) == len(primal.shape) + 1:
        return view.shape[0]
    headline = f"{name} has shape {view.shape}, {of} has {primal.shape}."
    raise wrong(headline, every, f"the shape of {of}, or with an axis of directions in front")


def _directions(count: int | None) -> str:
    return "no axis of directions" if count is None else f"an axis of {count} directions"


def shape_of_results(count: int | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a result for `count` directions."""
    return shape if count is None else (count, *shape)


def directions_of(views: Views, count: int | None, layout: str, rank: int) -> list[Views]:
    """Views of the tangents and results of each direction, in the axes that the passes use."""
    each = [views] if count is None else [{k: _nth(x, n) for k, x in views.items()} for n in range(count)]
    return [{name: tangent_operand(name, x, layout, rank) for name, x in one.items()} for one in each]


# Number of axes of tangents and results without a feature axis.
_RANKS = {"lse": 3, "lse_dot": 3} | {
    n: len(AXES_OF[name]) for name in DIFFERENTIABLE for n in (f"d{name}", f"{name}_dot")
}


def tangent_operand(name: str, view: ArrayView, layout: str, rank: int) -> ArrayView:
    """View a tangent or result as (batch, heads, seq, head_dim), (batch, heads, queries, keys) and so on."""
    axes = _RANKS.get(name)
    return lift(view, layout, rank) if axes is None else view.lifted(axes)


def _nth(view: ArrayView, n: int) -> ArrayView:
    """Element n along the first axis."""
    return view._replace(
        pointer=view.pointer + n * view.strides[0] * view.item_bytes,
        shape=view.shape[1:],
        strides=view.strides[1:],
    )

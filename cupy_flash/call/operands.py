"""Checks of the arrays of a call: libraries, devices, dtypes, ranks and shapes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..errors import InvalidArgumentsError, UnsupportedError
from .arrays import CPU, ITEM_BYTES, ArrayView, device_name
from .public_names import public_name

__all__ = [
    "AXES",
    "FLOAT8",
    "FLOATS",
    "MAIN",
    "RESULTS_OF_FLOAT8",
    "SCALES",
    "Views",
    "aligned",
    "cast",
    "check_kinds",
    "check_place",
    "check_scales",
    "check_sizes",
    "heads_hint",
    "layout_that_fits",
    "lift",
    "lower_shape",
    "row_operand",
    "score_operand",
    "table_of",
    "wrong",
]

FLOATS = ("float16", "bfloat16", "float32", "float64")
# Dtype of quantised q, k and v, forward only; names of their scales; dtypes that the result may have.
FLOAT8 = "float8_e4m3fn"
SCALES = ("q.scale", "k.scale", "v.scale")
RESULTS_OF_FLOAT8 = ("bfloat16", "float16", "float32")
# Axes of q, k and v by layout.
AXES = {"bhsd": "(batch, heads, seq, head_dim)", "bshd": "(batch, seq, heads, head_dim)"}
# The arrays with a head_dim axis, which share dtype, rank and layout.
MAIN: tuple[str, ...] = ("q", "k", "v", "o", "do")

Views = dict[str, ArrayView]


def table_of(views: Mapping[str, ArrayView]) -> list[tuple[str, str]]:
    """The inputs as rows of an error's table, without arrays that the caller did not pass."""
    no_values = {v for k, v in (("k", "v"), ("k_cache", "v_cache")) if views.get(k) is views.get(v)}
    hidden = {"mask_starts", *no_values}
    return [(public_name(name), view.describe()) for name, view in views.items() if name not in hidden]


def wrong(headline: str, views: Mapping[str, ArrayView], hint: str | None = None) -> InvalidArgumentsError:
    """An error about these inputs."""
    return InvalidArgumentsError(headline, table_of(views), hint=hint)


def cast(name: str, view: ArrayView, dtype: str) -> str:
    """An expression, for a hint, that casts an array to a dtype: one of our names, or like "q.dtype"."""
    name, named = public_name(name), dtype in ITEM_BYTES
    if view.library == "torch":
        return f"{name}.to({'torch.' * named}{dtype})"
    return f"{name}.astype({repr(dtype) if named else dtype})"


def lift(view: ArrayView, layout: str, rank: int) -> ArrayView:
    """The (batch, heads, seq, head_dim) view of q or an array with its axes."""
    if layout == "bshd" and rank >= 3:
        view = view.permuted(*range(rank - 3), rank - 2, rank - 3, rank - 1)
    return view.lifted(4)


def lower_shape(shape: tuple[int, ...], layout: str, rank: int) -> tuple[int, ...]:
    """The shape of a (batch, heads, seq, head_dim) result in the caller's layout and rank."""
    b, h, s, d = shape
    full = (b, s, h, d) if layout == "bshd" else (b, h, s, d)
    return full[4 - rank :] if rank > 2 else (s, d)


def _check_float8(raw: Views, direction: str) -> bool:
    """Whether q is float8; refuse float8 in other directions than "forward", and scales of other dtypes."""
    dtype = raw["q"].dtype
    given = [name for name in SCALES if name in raw]
    if dtype == "uint8" and len(given) < len(SCALES):
        headline = f"q has dtype uint8, the bits of {FLOAT8} only where q, k and v all are a QuantizedArray."
        raise wrong(
            headline, raw, f"QuantizedArray(codes, scale) for all three, or q, k and v as arrays of {FLOAT8}"
        )
    if dtype not in (FLOAT8, "uint8"):
        if given:
            headline = f"{given[0]} is given, but q, k and v are {dtype}."
            hint = (
                f"q, k and v as arrays; a QuantizedArray is of {FLOAT8}, and scale= the factor on all scores"
            )
            raise wrong(headline, raw, hint)
        return False
    if direction != "forward":
        raise UnsupportedError(
            f"{FLOAT8} has no gradient: its 3 bits of mantissa would not hold one.",
            table_of(raw),
            hint="q, k and v times their scales as bfloat16",
        )
    return True


def check_kinds(raw: Views, direction: str) -> None:
    """Check dtypes and ranks of q, k, v, o and do, and library and device of all arrays."""
    q = raw["q"]
    rank = len(q.shape)
    if not _check_float8(raw, direction) and q.dtype not in FLOATS:
        kinds = ", ".join((*FLOATS, FLOAT8))
        real = cast("q", q, "float32")
        hint = '"Complex inputs" in docs/recipes.md' if q.dtype.startswith("complex") else real
        raise wrong(f"q has dtype {q.dtype}; attention is over {kinds}.", raw, hint)
    for name, view in raw.items():
        check_place(name, raw)
        if name in MAIN:
            if view.dtype != q.dtype:
                headline = f"{name} has dtype {view.dtype}, q has {q.dtype}."
                raise wrong(headline, raw, cast(name, view, "q.dtype"))
            if len(view.shape) != rank:
                headline = f"{name} has rank {len(view.shape)}, q {rank}."
                raise wrong(
                    headline, raw, f"the same rank for {', '.join(name for name in raw if name in MAIN)}"
                )


def check_place(name: str, raw: Views, of: str = "q") -> None:
    """Check that an array has the library and device of q, or of another array."""
    view, other = raw[name], raw[of]
    if view.library != other.library:
        headline = f"{public_name(name)} is a {view.library} array, {of} a {other.library} array."
        raise wrong(headline, raw, f"arrays of one library: from_dlpack({public_name(name)})")
    if view.device != other.device:
        headline = (
            f"{public_name(name)} is on {device_name(view.device)}, {of} on {device_name(other.device)}."
        )
        raise wrong(headline, raw, "all arrays on one device")


def layout_that_fits(views: Views, layout: str | None, k: str = "k", v: str = "v") -> str | None:
    """The other layout, if q, k and v agree on heads and keys in it; else None.

    Parameters
    ----------
    views : dict of str to ArrayView
        Views as (batch, heads, seq, head_dim), made with `layout`.
    layout : {"bhsd", "bshd"} or None
        The caller's layout; None if only one is possible, as for packed sequences.
    k, v : str
        Names of keys and values in `views`.
    """
    (_, keys, heads_k, _), (_, values, heads_v, _) = views[k].shape, views[v].shape
    heads_q = views["q"].shape[2]
    if layout is None or keys != values or heads_k != heads_v or heads_k == 0 or heads_q % heads_k:
        return None
    return "bshd" if layout == "bhsd" else "bhsd"


def heads_hint(views: Views, layout: str | None, k: str = "k", v: str = "v") -> str:
    """The hint if heads_q is not a multiple of heads_k; parameters as in `layout_that_fits`."""
    other = layout_that_fits(views, layout, k, v)
    if other:
        return f'heads_q = n * heads_k; or layout="{other}", if these arrays are {AXES[other]}'
    return "heads_q = n * heads_k, as grouped-query attention needs it"


def check_sizes(views: Views, raw: Views, layout: str | None) -> None:
    """Check sizes of q, k, v, o and do, all (batch, heads, seq, head_dim); for layout see `heads_hint`."""
    q, k, v = views["q"].shape, views["k"].shape, views["v"].shape
    if q[3] == 0 or v[3] == 0:
        raise wrong("head_dim is 0.", raw, "at least one feature per head")
    if q[3] != k[3]:
        raise wrong(f"q has head_dim {q[3]}, k has {k[3]}.", raw, "the same head_dim for q and k")
    if not q[0] == k[0] == v[0]:
        raise wrong(f"batch sizes {q[0]}, {k[0]}, {v[0]} differ.", raw, "one batch size: none is broadcast")
    if k[1] != v[1]:
        raise wrong(f"k has {k[1]} heads, v has {v[1]}.", raw, "as many heads of v as of k")
    if q[1] % k[1] if k[1] else q[1]:
        headline = f"{q[1]} heads of q are not a multiple of {k[1]} of k."
        raise wrong(headline, raw, heads_hint(views, layout))
    if k[2] != v[2]:
        raise wrong(f"k has {k[2]} keys, v has {v[2]}.", raw, "one value per key")
    for name in ("o", "do"):
        if name in views and views[name].shape != (q[0], q[1], q[2], v[3]):
            headline = f"{name} has shape {raw[name].shape}."
            raise wrong(headline, raw, "the shape of the result of attention(q, k, v)")


def _mask_hint(view: ArrayView, full: tuple[int, int, int, int]) -> str:
    """The hint for a mask of a wrong dtype: how to make it boolean."""
    additive = "bias= for additive scores; " * (view.dtype in FLOATS)
    cast = "mask.bool()" if view.library == "torch" else "mask.astype(bool)"
    if view.shape == (full[0], full[3]) != full[2:]:
        return f"{additive}{cast}[:, None, None, :], if 1 is a valid key of a sequence and 0 is padding"
    return f"{additive}{cast}, if 1 is a pair that may attend and 0 is masked"


def score_operand(
    name: str, raw: Views, views: Views, full: tuple[int, int, int, int], dtypes: tuple[str, ...]
) -> tuple[int, ...] | None:
    """Check a mask or bias, add its (batch, heads, queries, keys) view to `views`, and return that shape."""
    view = raw.get(name)
    if view is None:
        return None
    if view.dtype not in dtypes:
        kinds = "bool, True where a query may attend" if name == "mask" else "a floating dtype"
        hint = _mask_hint(view, full) if name == "mask" else "mask= for booleans"
        raise wrong(f"{name} has dtype {view.dtype}; it is {kinds}.", raw, hint)
    pairs = zip(view.shape[::-1], full[::-1], strict=False)
    if len(view.shape) > 4 or any(n not in (1, m) for n, m in pairs):
        headline = f"{name} of shape {view.shape} does not broadcast to {full}."
        hint = "(batch, heads, queries, keys), each its length or 1"
        if view.shape == (full[0], full[3]):
            hint = f"{name}[:, None, None, :], if it marks the valid keys of each sequence; or {hint}"
        elif view.shape == (full[0], *full[2:]):
            hint = f"{name}[:, None], if it holds the pairs of each sequence; or {hint}"
        raise wrong(headline, raw, hint)
    views[name] = view.lifted(4).broadcast()
    return views[name].shape


def row_operand(name: str, raw: Views, shapes: tuple[tuple[int, ...], ...], dtype: str) -> ArrayView:
    """Check dtype and shape of lse, dlse, scales, or an array with one number per head."""
    view = raw[name]
    if view.dtype != dtype:
        raise wrong(f"{public_name(name)} has dtype {view.dtype}, not {dtype}.", raw, cast(name, view, dtype))
    if view.shape not in shapes:
        headline = f"{public_name(name)} has shape {view.shape}, not {' or '.join(map(str, shapes))}."
        raise wrong(headline, raw, f"{public_name(name)} of shape {shapes[0]}")
    return view


def check_scales(raw: Mapping[str, ArrayView]) -> None:
    """Refuse scales that are not finite, or not above 0 for q and k; only in main memory."""
    for name in SCALES:
        if name in raw and raw[name].device == CPU:
            values = raw[name].numpy()
            good = np.isfinite(values) & ((values > 0) | (name == "v.scale"))
            if not good.all():
                kind = "finite" if name == "v.scale" else "finite and above 0"
                headline = f"{name} holds {values[~good].flat[0]}, not only numbers that are {kind}."
                raise wrong(headline, raw, "the largest magnitude of a head / 448, and 1 where that is 0")


def aligned(views: Views, direction: str) -> bool:
    """Whether all rows of every tensor start on 16-byte boundaries, those of results we allocate included."""
    head_dim, head_dim_v = views["q"].shape[3], views["v"].shape[3]
    results = (head_dim_v,) if direction == "forward" else (head_dim, head_dim_v)
    size = max(2, views["q"].item_bytes)  # the result of float8 has 16 bits or more
    return not any(n * size % 16 for n in results) and all(views[n].aligned() for n in MAIN if n in views)

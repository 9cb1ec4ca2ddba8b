"""Parts inside `jax.shard_map` by all-to-all and by all-gather: every device makes one ordinary call."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..call.blocks import BlockMask
from ..call.compound import Spans
from ..call.masks import Band, resolve_band
from ..call.options import PER_HEAD
from ..errors import InvalidArgumentsError, UnsupportedError
from ..parallel.parts import halves, positions
from .functional import attention

__all__ = ["Held", "all_gather", "all_to_all"]


class Held(NamedTuple):
    """Which rows of the whole each device holds.

    Attributes
    ----------
    rows : ndarray of int, shape (devices, rows of a part)
        `length` where a row is none of the whole.
    length : int
        Of the whole.
    """

    rows: np.ndarray[Any, Any]
    length: int

    @classmethod
    def of(cls, ranks: int, rows: int, causal: bool, parts: Any, seqlen: int | None) -> Held:
        """Parts of so many rows, those of the whole before the others."""
        length = ranks * rows if seqlen is None else seqlen
        each = [positions(r, ranks, length, causal, parts=parts) for r in range(ranks)]
        if seqlen is None and ranks > 1 and (parts == "zigzag" or (causal and parts is None)):
            halves(rows)
        if (most := max(map(len, each))) != rows:
            raise InvalidArgumentsError(
                f"a device holds {rows} rows; of {length} one holds {most} at most.",
                hint=f"{most} rows on every device, those that are none of its own at the end",
            )
        padded = [np.pad(x, (0, rows - len(x)), constant_values=length) for x in each]
        return cls(np.stack(padded), length)

    def whole(self, x: Any, axis: int) -> Any:
        """The whole, from the rows of all devices, one after the other."""
        return jnp.take(x, np.argsort(self.rows.reshape(-1), kind="stable")[: self.length], axis=axis)

    def parts(self, x: Any, axis: int) -> Any:
        """The rows of all devices, from the whole; 0 where there is none."""
        return jnp.take(x, self.rows.reshape(-1), axis=axis, mode="fill", fill_value=0)


def _axis(q: Any, options: dict[str, Any]) -> int:
    """That of rows; in lse it is the last."""
    return -3 if options.get("layout") == "bshd" and q.ndim > 2 else -2


def all_to_all(
    q: Any, k: Any, v: Any, axis_name: Any, held: Held, causal: bool, options: dict[str, Any]
) -> tuple[Any, Any]:
    """O and LSE of this device's rows: rows are exchanged for heads, and the results back."""
    ranks = held.rows.shape[0]
    rows = _axis(q, options)
    heads = -2 if rows == -3 else -3
    for name, x in (("q", q), ("k", k)):
        count = 1 if x.ndim < 3 else x.shape[heads]
        if ranks > 1 and (x.ndim < 3 or count % ranks):
            raise InvalidArgumentsError(
                f"{count} heads of {name} do not divide over {ranks} devices.",
                hint=f'schedule="ring"; or a multiple of {ranks} heads',
            )

    def exchanged(x: Any, split: int, joined: int) -> Any:
        if ranks == 1:
            return x
        return jax.lax.all_to_all(x, axis_name, split % x.ndim, joined % x.ndim, tiled=True)

    def own_heads(x: Any, axis: int) -> Any:
        """Of an array that has all heads."""
        each = x.shape[axis] // ranks
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axis_name) * each, each, axis % x.ndim)

    def cut(x: Any, axis: int) -> Any:
        """Of a mask, which may be broadcast along its heads."""
        return x if x.ndim < -axis or x.shape[axis] == 1 else own_heads(x, axis)

    def own_mask(mask: Any) -> Any:
        if type(mask) in (tuple, list):
            return tuple(map(own_mask, mask))
        if isinstance(mask, Spans):
            return Spans(cut(jnp.asarray(mask.bounds), -4))
        if isinstance(mask, BlockMask):
            return mask._replace(table=cut(jnp.asarray(mask.table), -3))
        return None if mask is None else cut(jnp.asarray(mask), -3)

    given = {**options, "mask": own_mask(options.get("mask"))}
    if ranks > 1:
        given |= {n: own_heads(jnp.asarray(x), -1) for n in PER_HEAD if (x := options.get(n)) is not None}
    whole = (held.whole(exchanged(x, heads, rows), rows) for x in (q, k, v))
    o, lse = attention(*whole, causal=causal, return_lse=True, **given)
    return exchanged(held.parts(o, rows), rows, heads), exchanged(held.parts(lse, -1), -1, -2)


def all_gather(
    q: Any, k: Any, v: Any, axis_name: Any, held: Held, causal: bool, options: dict[str, Any]
) -> tuple[Any, Any]:
    """O and LSE of this device's rows over all keys, which every device gets.

    why spans: which keys a row sees differs from device to device, and a program is the same on all.
    """
    given = dict(options)
    mask, window = given.pop("mask", None), given.pop("window", None)
    if given.get("alibi_slopes") is not None:
        raise UnsupportedError(
            "alibi_slopes is not supported for an all-gather in JAX.", hint='schedule="alltoall"'
        )
    rows = _axis(q, options)
    k, v = (
        held.whole(jax.lax.all_gather(x, axis_name, axis=rows % x.ndim, tiled=True), rows) for x in (k, v)
    )
    mine = jnp.asarray(held.rows, jnp.int32)[jax.lax.axis_index(axis_name)]
    band = resolve_band(causal, window, None, False, held.length, held.length)
    masks = [] if mask is None else [_of_rows(mask, mine, held.length)]
    if not band.open or held.length < held.rows.size:
        masks.append(_seen(mine, band, held.length))
    o, lse = attention(q, k, v, mask=tuple(masks) or None, return_lse=True, **given)
    # Of a row that sees no key lse is that of the sinks, which must get no gradient of rows that are none.
    return o, jnp.where(mine < held.length, lse, 0) if held.length < held.rows.size else lse


def _seen(mine: Any, band: Band, length: int) -> Spans:
    """The keys of each row that lie in the band; none for what is no row of the whole."""
    starts = jnp.zeros_like(mine) if band.left is None else mine - band.left
    stops = jnp.full_like(mine, length) if band.right is None else mine + band.right + 1
    bounds = jnp.where((mine < length)[:, None], jnp.stack([starts, stops], -1).clip(0, length), 0)
    return Spans(bounds[None, None, :, None])


def _of_rows(mask: Any, mine: Any, length: int) -> Any:
    """What a mask of the whole says of some of its queries."""
    if type(mask) in (tuple, list):
        return tuple(_of_rows(x, mine, length) for x in mask)
    x, axis = (mask.bounds, -3) if isinstance(mask, Spans) else (mask, -2)
    x = jnp.asarray(x)
    if isinstance(mask, Spans) and x.shape[axis] != length:
        raise UnsupportedError(
            "Spans of queries are not supported for an all-gather in JAX.",
            hint='schedule="alltoall", or spans of keys',
        )
    if x.ndim >= -axis and x.shape[axis] != 1:
        x = jnp.take(x, mine, axis=axis, mode="clip")
    return Spans(x) if isinstance(mask, Spans) else x

"""Ring attention inside `jax.shard_map`, by collective permutes, by all-to-all, or by all-gather."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..call.checks import flag, one_of
from ..call.compound import Spans
from ..call.given import Options
from ..call.options import ShardOptions
from ..call.reproducible import refuse_reproducible
from ..call.signature import takes
from ..errors import InvalidArgumentsError, UnsupportedError
from ..merge import united
from ..parallel.parts import check_parts, halves, positions
from .call import alike, backward, forward
from .functional import attention, check

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ring_attention"]


class _Around(NamedTuple):
    """What a call holds fixed; `longest` is of packed sequences."""

    axis_name: Any
    causal: bool
    options: Options
    longest: int | None = None

    def ranks(self) -> int:
        """Devices on the ring."""
        return int(jax.lax.psum(1, self.axis_name))

    def pass_on(self, arrays: Any) -> Any:
        """Arrays of the device before this one."""
        ranks = self.ranks()
        return jax.lax.ppermute(arrays, self.axis_name, [(r, (r + 1) % ranks) for r in range(ranks)])

    def axis(self, x: Any) -> int:
        """The axis of rows in q, k, v and o; in lse it is the last."""
        return -3 if self.options.layout == "bshd" and x.ndim > 2 else -2


class _Packed(NamedTuple):
    """Where packed sequences of a part begin, and where their two stretches are."""

    cut: Any
    cut_half: Any
    early: Any
    late: Any

    @classmethod
    def of(cls, cut: Any, rows: int, causal: bool) -> _Packed:
        """From the offsets of a part of so many rows; stretches where it is causal."""
        if not causal:
            return cls(cut, None, None, None)
        cut_half, row = cut // 2, jnp.arange(rows // 2, dtype=cut.dtype)
        # Of the rows of all early stretches, row r is r - cut_half[n] rows behind cut[n]; late ones so far
        # behind the middle.
        n = jnp.clip(jnp.searchsorted(cut_half, row, side="right") - 1, 0, max(cut.shape[0] - 2, 0))
        return cls(cut, cut_half, row + cut_half[n], row + cut_half[jnp.minimum(n + 1, cut.shape[0] - 1)])

    def poison(self) -> Any:
        """0, or NaN where a sequence has an odd number of rows. why: nobody reads them before it runs."""
        odd = self.cut % 2 if self.cut_half is not None else 0
        return jnp.where(jnp.any(odd), jnp.nan, 0.0)

    def there(self, rows: int) -> Any:
        """Whether each row is of a sequence."""
        return jnp.arange(rows) < self.cut[-1]


def _stretch(x: Any, axis: int, late: bool, packed: _Packed | None) -> Any:
    """One of the two stretches of a part."""
    if packed is not None:
        return jnp.take(x, packed.late if late else packed.early, axis=axis)
    rows = halves(x.shape[axis])[late]
    return jax.lax.slice_in_dim(x, rows.start, rows.stop, axis=axis % x.ndim)


def _beside(x: Any, axis: int, late: bool, fill: float, packed: _Packed | None) -> Any:
    """One stretch as a part, the other one filled."""
    other = jnp.full_like(x, fill)
    whole = jnp.concatenate((other, x) if late else (x, other), axis=axis)
    if packed is None:
        return whole
    rows = packed.late if late else packed.early
    return jnp.full_like(whole, fill).at[(..., rows) + (slice(None),) * (-1 - axis)].set(x)


def _attend(around: _Around, arrays: dict[str, Any], cuts: tuple[Any, Any] | None, causal: bool) -> Any:
    """O and LSE of a pair of parts or stretches."""
    given, longest = _with_cuts(around, arrays, cuts)
    return forward(given, around.options._replace(causal=causal), longest)


def _with_cuts(
    around: _Around, arrays: dict[str, Any], cuts: tuple[Any, Any] | None
) -> tuple[dict[str, Any], tuple[int, int] | None]:
    """Arrays with their offsets, and the longest sequences; queries and keys cut alike have one of them."""
    if cuts is None or around.longest is None:
        return arrays, None
    names = ("cu_seqlens_q",) if cuts[0] is cuts[1] else ("cu_seqlens_q", "cu_seqlens_k")
    longest = [min(around.longest, arrays[name].shape[0]) for name in "qk"]
    return {**arrays, **dict(zip(names, cuts, strict=False))}, (longest[0], longest[1])


def _by_origin(around: _Around, step: int, early: Any, late: Any, operands: Any) -> Any:
    """`early` for keys from nearer the front than this device's, `late` for those from further back.

    why cond: which of them it is differs from device to device, and only one is computed; both are half a
    square.
    """
    return jax.lax.cond(jax.lax.axis_index(around.axis_name) >= step, early, late, *operands)


def _part(around: _Around, step: int, q: Any, k: Any, v: Any, packed: _Packed | None) -> tuple[Any, Any]:
    """O and LSE over the keys that have come `step` devices far."""
    axis = around.axis(q)
    if not around.causal or step == 0:
        cuts = None if packed is None else (packed.cut, packed.cut)
        o, lse = _attend(around, {"q": q, "k": k, "v": v}, cuts, around.causal)
        return o, lse

    def early(q: Any, k: Any, v: Any, packed: _Packed | None) -> tuple[Any, Any]:
        k, v = (_stretch(x, axis, False, packed) for x in (k, v))
        cuts = None if packed is None else (packed.cut, packed.cut_half)
        o, lse = _attend(around, {"q": q, "k": k, "v": v}, cuts, False)
        return o, lse

    def late(q: Any, k: Any, v: Any, packed: _Packed | None) -> tuple[Any, Any]:
        cuts = None if packed is None else (packed.cut_half, packed.cut)
        o, lse = _attend(around, {"q": _stretch(q, axis, True, packed), "k": k, "v": v}, cuts, False)
        return _beside(o, axis, True, 0, packed), _beside(lse, -1, True, -jnp.inf, packed)

    o, lse = _by_origin(around, step, early, late, (q, k, v, packed))
    return o, lse


def _shares(
    around: _Around, step: int, arrays: tuple[Any, ...], packed: _Packed | None
) -> tuple[Any, Any, Any]:
    """What the keys that have come `step` devices far give to the gradients of q, k and v."""
    axis = around.axis(arrays[0])

    def all_of_it(arrays: Any, cuts: Any, causal: bool = False) -> tuple[Any, Any, Any]:
        q, k, v, o, lse, do, dlse = arrays
        given, longest = _with_cuts(around, {"q": q, "k": k, "v": v}, cuts)
        options = around.options._replace(causal=causal)
        grads = backward(given, o, lse, do, dlse, options, longest)
        return grads["q"], grads["k"], grads["v"]

    def early(*given: Any) -> tuple[Any, Any, Any]:
        q, k, v, *rest, packed = given
        k, v = (_stretch(x, axis, False, packed) for x in (k, v))
        cuts = None if packed is None else (packed.cut, packed.cut_half)
        dq, dk, dv = all_of_it((q, k, v, *rest), cuts)
        return dq, *(_beside(x, axis, False, 0, packed) for x in (dk, dv))

    def late(*given: Any) -> tuple[Any, Any, Any]:
        q, k, v, o, lse, do, dlse, packed = given
        q, o, do = (_stretch(x, axis, True, packed) for x in (q, o, do))
        lse, dlse = (_stretch(x, -1, True, packed) for x in (lse, dlse))
        cuts = None if packed is None else (packed.cut_half, packed.cut)
        dq, dk, dv = all_of_it((q, k, v, o, lse, do, dlse), cuts)
        return _beside(dq, axis, True, 0, packed), dk, dv

    if not around.causal or step == 0:
        return all_of_it(arrays, None if packed is None else (packed.cut, packed.cut), around.causal)
    dq, dk, dv = _by_origin(around, step, early, late, (*arrays, packed))
    return dq, dk, dv


def _wide(x: Any) -> Any:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _ring(q: Any, k: Any, v: Any, packed: _Packed | None, around: _Around) -> tuple[Any, Any]:
    swapped = around.axis(q) == -3
    o, lse = _part(around, 0, q, k, v, packed)
    o = _wide(o)
    for step in range(1, around.ranks()):
        k, v = around.pass_on((k, v))
        part, part_lse = _part(around, step, q, k, v, packed)
        o, lse = united(jnp, ((o, lse), (_wide(part), part_lse)), swapped)
    if packed is not None:
        there = packed.there(o.shape[0])
        o = jnp.where(there[:, None, None], o + packed.poison(), 0)
        lse = jnp.where(there, lse + packed.poison(), 0)
    return o.astype(q.dtype), lse


def _ring_forward(q: Any, k: Any, v: Any, packed: _Packed | None, around: _Around) -> tuple[Any, Any]:
    o, lse = _ring(q, k, v, packed, around)
    return (o, lse), (q, k, v, o, lse, packed)


def _ring_backward(around: _Around, saved: Any, cotangents: Any) -> tuple[Any, Any, Any, None]:
    q, k, v, o, lse, packed = saved
    home = (q, k, v)
    sums = [jnp.zeros_like(_wide(x)) for x in home]
    for step in range(around.ranks()):
        shares = _shares(around, step, (q, k, v, o, lse, *cotangents), packed)
        if step + 1 < around.ranks():
            k, v = around.pass_on((k, v))
        sums = [total + share for total, share in zip(sums, shares, strict=True)]
        sums[1:] = around.pass_on(tuple(sums[1:]))
    dq, dk, dv = (x.astype(like.dtype) for x, like in zip(sums, home, strict=True))
    return dq, dk, dv, None


_ring.defvjp(_ring_forward, _ring_backward)


def _all_to_all(q: Any, k: Any, v: Any, axis_name: Any, causal: bool, options: Any) -> tuple[Any, Any]:
    """O and LSE of this device's rows: rows are exchanged for heads, and the results back."""
    ranks = int(jax.lax.psum(1, axis_name))
    rows = -3 if options.get("layout") == "bshd" and q.ndim > 2 else -2
    heads = -2 if rows == -3 else -3
    for name, x in (("q", q), ("k", k)):
        count = 1 if x.ndim < 3 else x.shape[heads]
        if ranks > 1 and (x.ndim < 3 or count % ranks):
            raise InvalidArgumentsError(
                f"{count} heads of {name} do not divide over {ranks} devices.",
                hint=f'schedule="ring"; or a multiple of {ranks} heads',
            )
    order = np.concatenate([positions(r, ranks, ranks * q.shape[rows], causal) for r in range(ranks)])

    def exchanged(x: Any, split: int, joined: int) -> Any:
        if ranks == 1:
            return x
        return jax.lax.all_to_all(x, axis_name, split % x.ndim, joined % x.ndim, tiled=True)

    whole = [jnp.take(exchanged(x, heads, rows), np.argsort(order), axis=rows) for x in (q, k, v)]
    o, lse = attention(*whole, causal=causal, return_lse=True, **options)
    o = exchanged(jnp.take(o, order, axis=rows), rows, heads)
    return o, exchanged(jnp.take(lse, order, axis=-1), -1, -2)


def _all_gather(q: Any, k: Any, v: Any, axis_name: Any, causal: bool, options: Any) -> tuple[Any, Any]:
    """O and LSE of this device's rows over all keys, which every device gets in the order of devices.

    why spans: which keys a row sees differs from device to device, and a program is the same on all.
    """
    ranks = int(jax.lax.psum(1, axis_name))
    rows = -3 if options.get("layout") == "bshd" and q.ndim > 2 else -2
    held = q.shape[rows]
    order = np.stack([positions(r, ranks, ranks * held, causal) for r in range(ranks)])
    k, v = (jax.lax.all_gather(x, axis_name, axis=rows % x.ndim, tiled=True) for x in (k, v))
    mask = None
    if causal:
        k, v = (jnp.take(x, np.argsort(order.reshape(-1)), axis=rows) for x in (k, v))
        stops = 1 + jnp.asarray(order, jnp.int32)[jax.lax.axis_index(axis_name)]
        mask = Spans(jnp.stack([jnp.zeros_like(stops), stops], -1)[None, None, :, None])
    o, lse = attention(q, k, v, mask=mask, return_lse=True, **options)
    return o, lse


@takes(ShardOptions)
def ring_attention(
    q: Any,
    k: Any,
    v: Any,
    axis_name: Any,
    *,
    cu_seqlens: Any = None,
    max_seqlen: int | None = None,
    schedule: Literal["ring", "alltoall", "allgather"] | None = None,
    return_lse: bool = False,
    **options: Unpack[ShardOptions],
) -> Any:
    """`attention` over a sequence of which every device along a mesh axis holds a part, with gradients.

    Parameters
    ----------
    q, k, v : Array
        This device's parts, of one length on all devices: the rows that `cupy_flash.parallel.positions`
        names, in that order. The whole sequence attends to itself.
    axis_name : str
        Of the mesh axis that `jax.shard_map` cuts the sequence along.
    cu_seqlens : Array of int32, shape (sequences + 1,), optional
        Offsets of this device's rows of packed sequences, the same on all devices: q, k and v are then
        (rows, heads, head_dim), the rows that `cupy_flash.parallel.packed_positions` names. They may be
        traced, so that nobody reads them before the program runs: with causal a sequence of which a device
        holds an odd number of rows makes everything NaN.
    max_seqlen : int, optional
        At least the longest of these parts of sequences, static under jit. Default: all rows.
    schedule : {"ring", "alltoall", "allgather"}, optional
        What travels: keys and values in a ring; rows for heads, so that each device attends over whole
        sequences with its share of the heads, and results are as reproducible as those of one; or keys and
        values to all devices at once. Default: "ring".
    {options: As in `attention`.}
    return_lse : bool
        As in `attention`.

    Returns
    -------
    Array, or (Array, Array) with return_lse
        This device's rows.

    Raises
    ------
    InvalidArgumentsError, UnsupportedError
        As in `attention`, while tracing; also an odd number of rows with causal, and heads that do not divide
        over the devices with schedule "alltoall".
    """
    causal = flag(options.pop("causal", False), "causal")
    if not (schedule is None or one_of(schedule, ("ring", "alltoall", "allgather"))):
        raise InvalidArgumentsError(
            f"schedule is {schedule!r}.", hint='schedule="ring", "alltoall" or "allgather"'
        )
    if schedule in ("alltoall", "allgather"):
        if cu_seqlens is not None:
            raise UnsupportedError(
                f'cu_seqlens is not supported with schedule="{schedule}" here.', hint='schedule="ring"'
            )
        if schedule == "allgather":
            refuse_reproducible(options.get("reproducible"), "an all-gather")
        check({"q": q, "k": k, "v": v}, Options(**options))
        axis = -3 if options.get("layout") == "bshd" and q.ndim > 2 else -2
        check_parts(q.shape[axis], k.shape[axis])
        if causal:
            halves(q.shape[axis])
        run = _all_to_all if schedule == "alltoall" else _all_gather
        o, lse = run(q, k, v, axis_name, causal, options)
        return (o, lse) if return_lse else o
    refuse_reproducible(options.get("reproducible"), "a ring")
    given, packed, longest = {"q": q, "k": k, "v": v}, None, None
    if cu_seqlens is None:
        values = Options(**options)
        check(given, values)
    else:
        values = Options(**{**options, "layout": "bshd"})
        longest = q.shape[0] if max_seqlen is None else max_seqlen
        cut = jnp.asarray(cu_seqlens)
        check({**given, "cu_seqlens_q": cut}, values, (longest, longest))
        if causal:
            halves(q.shape[0])
        *_, cut = alike(q, k, v, cut)
        packed = _Packed.of(cut, q.shape[0], causal)
    around = _Around(axis_name, causal, values, longest)
    check_parts(q.shape[around.axis(q)], k.shape[around.axis(k)])
    o, lse = _ring(*alike(q, k, v), packed, around)
    return (o, lse) if return_lse else o

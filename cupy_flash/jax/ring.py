"""Ring attention inside `jax.shard_map`, by collective permutes, by all-to-all, or by all-gather."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from ..call.checks import flag
from ..call.given import Options, split
from ..call.options import PER_HEAD, ShardOptions
from ..call.signature import takes
from ..errors import UnsupportedError
from ..merge import united
from ..parallel.parts import Pair, Whole, check_parts, halves
from ..parallel.schedules import check as check_schedule
from .call import alike, backward, forward, results_of
from .exchange import Held, all_gather, all_to_all
from .functional import check

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ring_attention"]


class _Around(NamedTuple):
    """What a call holds fixed.

    Attributes
    ----------
    longest : int, optional
        Of packed sequences.
    steps : tuple of int
        How far keys have come which some device sees.
    bands : tuple of (Options or None, Options or None), optional
        Of contiguous parts, for each step: how a device calls keys that come from nearer the front, its own
        included, and those from further back. None: it sees none of them.
    """

    axis_name: Any
    causal: bool
    options: Options
    steps: tuple[int, ...]
    longest: int | None = None
    bands: tuple[tuple[Options | None, Options | None], ...] | None = None

    def ranks(self) -> int:
        """Devices on the ring."""
        return int(jax.lax.psum(1, self.axis_name))

    def pass_on(self, arrays: Any, by: int) -> Any:
        """Arrays of the device that is so far before this one."""
        ranks = self.ranks()
        return jax.lax.ppermute(arrays, self.axis_name, [(r, (r + by) % ranks) for r in range(ranks)])

    def of(self, causal: bool) -> Options:
        """The options of one call."""
        return self.options._replace(causal=causal)

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


def _attend(around: _Around, arrays: dict[str, Any], cuts: tuple[Any, Any] | None, options: Options) -> Any:
    """O and LSE of a pair of parts or stretches."""
    given, longest = _with_cuts(around, arrays, cuts)

    def run(given: dict[str, Any], unrounded: bool) -> tuple[Any, Any]:
        o, lse = forward(given, options, longest, unrounded)
        return _wide(o), lse

    o, lse = _unrounded(run, given)
    return o, lse


def _unrounded(run: Callable[..., Any], given: dict[str, Any]) -> Any:
    """What a call returns in the dtype of sums: not rounded to 16 bits before, on a CPU.

    Kernels of GPUs round their results.
    """
    if given["q"].dtype.itemsize > 2:
        return run(given, unrounded=False)
    return jax.lax.platform_dependent(
        given, cpu=functools.partial(run, unrounded=True), default=functools.partial(run, unrounded=False)
    )


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


def _in_band(
    around: _Around,
    step: int,
    call: Callable[..., Any],
    nothing: Callable[..., Any],
    operands: tuple[Any, ...],
) -> Any:
    """A call of contiguous parts, with its options first, or what it gives where nothing is seen."""

    def seen(options: Options | None) -> Callable[..., Any]:
        if options is not None:
            return functools.partial(call, options)
        return lambda *arrays: alike(*nothing(*arrays), over=arrays)

    assert around.bands is not None
    near, far = around.bands[around.steps.index(step)]
    if near == far:
        return seen(near)(*operands)
    return _by_origin(around, step, seen(near), seen(far), operands)


def _part(
    around: _Around, step: int, q: Any, k: Any, v: Any, sinks: Any, packed: _Packed | None
) -> tuple[Any, Any]:
    """O and LSE over the keys that have come `step` devices far; sinks are keys of the first step."""
    axis = around.axis(q)
    own = {} if sinks is None or step else {"sinks": sinks}
    if around.bands is not None:

        def call(options: Options, q: Any, k: Any, v: Any) -> Any:
            return _attend(around, {"q": q, "k": k, "v": v, **own}, None, options)

        def nothing(q: Any, k: Any, v: Any) -> Any:  # noqa: ARG001
            shapes = results_of({"q": q, "v": v}, around.options.layout)
            o, lse = shapes["o"], shapes["lse"]
            return jnp.zeros(o.shape, lse.dtype), jnp.full(lse.shape, -jnp.inf, lse.dtype)

        o, lse = _in_band(around, step, call, nothing, (q, k, v))
        return o, lse
    if not around.causal or step == 0:
        cuts = None if packed is None else (packed.cut, packed.cut)
        o, lse = _attend(around, {"q": q, "k": k, "v": v, **own}, cuts, around.of(around.causal))
        return o, lse

    def early(q: Any, k: Any, v: Any, packed: _Packed | None) -> tuple[Any, Any]:
        k, v = (_stretch(x, axis, False, packed) for x in (k, v))
        cuts = None if packed is None else (packed.cut, packed.cut_half)
        o, lse = _attend(around, {"q": q, "k": k, "v": v}, cuts, around.of(False))
        return o, lse

    def late(q: Any, k: Any, v: Any, packed: _Packed | None) -> tuple[Any, Any]:
        cuts = None if packed is None else (packed.cut_half, packed.cut)
        late_q = _stretch(q, axis, True, packed)
        o, lse = _attend(around, {"q": late_q, "k": k, "v": v}, cuts, around.of(False))
        return _beside(o, axis, True, 0, packed), _beside(lse, -1, True, -jnp.inf, packed)

    o, lse = _by_origin(around, step, early, late, (q, k, v, packed))
    return o, lse


def _shares(
    around: _Around, step: int, arrays: tuple[Any, ...], sinks: Any, packed: _Packed | None
) -> tuple[Any, ...]:
    """What the keys that have come `step` devices far give to the gradients of q, k and v; then of sinks."""
    axis = around.axis(arrays[0])
    own = {} if sinks is None or step else {"sinks": sinks}

    def all_of_it(arrays: Any, cuts: Any, options: Options) -> tuple[Any, ...]:
        q, k, v, o, lse, do, dlse = arrays
        given, longest = _with_cuts(around, {"q": q, "k": k, "v": v, **own}, cuts)

        def run(given: dict[str, Any], unrounded: bool) -> tuple[Any, ...]:
            inputs = {name: x for name, x in given.items() if name not in results}
            o, lse, do, dlse = (given[name] for name in results)
            grads = backward(inputs, o, lse, do, dlse, options, longest, unrounded)
            return tuple(_wide(grads[name]) for name in ("q", "k", "v", *own))

        results = {"o": o, "lse": lse, "do": do, "dlse": dlse}
        shares: tuple[Any, ...] = _unrounded(run, {**given, **results})
        return shares

    def early(*given: Any) -> tuple[Any, ...]:
        q, k, v, *rest, packed = given
        k, v = (_stretch(x, axis, False, packed) for x in (k, v))
        cuts = None if packed is None else (packed.cut, packed.cut_half)
        dq, dk, dv = all_of_it((q, k, v, *rest), cuts, around.of(False))
        return dq, *(_beside(x, axis, False, 0, packed) for x in (dk, dv))

    def late(*given: Any) -> tuple[Any, ...]:
        q, k, v, o, lse, do, dlse, packed = given
        q, o, do = (_stretch(x, axis, True, packed) for x in (q, o, do))
        lse, dlse = (_stretch(x, -1, True, packed) for x in (lse, dlse))
        cuts = None if packed is None else (packed.cut_half, packed.cut)
        dq, dk, dv = all_of_it((q, k, v, o, lse, do, dlse), cuts, around.of(False))
        return _beside(dq, axis, True, 0, packed), dk, dv

    shares: tuple[Any, ...]
    if around.bands is not None:

        def nothing(*arrays: Any) -> tuple[Any, ...]:
            return tuple(jnp.zeros_like(_wide(x)) for x in arrays[:3])

        shares = _in_band(
            around, step, lambda options, *arrays: all_of_it(arrays, None, options), nothing, arrays
        )
        return shares
    if not around.causal or step == 0:
        cuts = None if packed is None else (packed.cut, packed.cut)
        return all_of_it(arrays, cuts, around.of(around.causal))
    shares = _by_origin(around, step, early, late, (*arrays, packed))
    return shares


def _wide(x: Any) -> Any:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _ring(q: Any, k: Any, v: Any, sinks: Any, packed: _Packed | None, around: _Around) -> tuple[Any, Any]:
    swapped, steps = around.axis(q) == -3, around.steps
    o, lse = _part(around, 0, q, k, v, sinks, packed)
    for before, step in itertools.pairwise(steps):
        k, v = around.pass_on((k, v), step - before)
        part, part_lse = _part(around, step, q, k, v, sinks, packed)
        o, lse = united(jnp, ((o, lse), (part, part_lse)), swapped)
    if packed is not None:
        there = packed.there(o.shape[0])
        o = jnp.where(there[:, None, None], o + packed.poison(), 0)
        lse = jnp.where(there, lse + packed.poison(), 0)
    return o.astype(q.dtype), lse


def _ring_forward(
    q: Any, k: Any, v: Any, sinks: Any, packed: _Packed | None, around: _Around
) -> tuple[Any, Any]:
    o, lse = _ring(q, k, v, sinks, packed, around)
    return (o, lse), (q, k, v, o, lse, sinks, packed)


def _ring_backward(around: _Around, saved: Any, cotangents: Any) -> tuple[Any, ...]:
    q, k, v, o, lse, sinks, packed = saved
    home = (q, k, v)
    sums = [jnp.zeros_like(_wide(x)) for x in home]
    dsinks = None
    for step, then in itertools.pairwise((*around.steps, around.ranks())):
        shares = _shares(around, step, (q, k, v, o, lse, *cotangents), sinks, packed)
        if step == 0 and sinks is not None:
            dsinks, shares = shares[-1], shares[:-1]
        if then < around.ranks():
            k, v = around.pass_on((k, v), then - step)
        sums = [total + share for total, share in zip(sums, shares, strict=True)]
        if len(around.steps) > 1:
            sums[1:] = around.pass_on(tuple(sums[1:]), then - step)
    dq, dk, dv = (x.astype(like.dtype) for x, like in zip(sums, home, strict=True))
    return dq, dk, dv, dsinks, None


_ring.defvjp(_ring_forward, _ring_backward)


def _bands(
    ranks: int, rows: int, causal: bool, options: Options, parts: str | None
) -> tuple[tuple[int, ...], tuple[tuple[Options | None, Options | None], ...] | None]:
    """`steps` and `bands` of `_Around`, which are the same for all devices: parts have one length here."""
    given = {"parts": parts, "seqlen": None, "window": options.window, "align": None}
    whole = [Whole(r, ranks, (rows, rows), causal, given) for r in range(ranks)]
    if causal and parts != "contiguous":
        return whole[0].steps, None

    def called(found: Pair | None) -> Options | None:
        if found is None:
            return None
        return options._replace(causal=found.causal, window=found.window, align=found.align)

    near = [called(whole[step].pair(0)) for step in whole[0].steps]
    far = [called(whole[0].pair((ranks - step) % ranks)) for step in whole[0].steps]
    return whole[0].steps, tuple(zip(near, far, strict=True))


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
    parts: Literal["zigzag", "contiguous"] | None = None,
    seqlen: int | None = None,
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
    parts : {"zigzag", "contiguous"}, optional
        Which rows a device holds. Default: zigzag with causal, else contiguous. A ring takes a window over
        contiguous parts only, and with causal they must be named.
    seqlen : int, optional
        Length of the whole sequence where it does not divide. Every part is as long as the longest then: rows
        of no sequence lie behind the others, and their results are 0. Not with a ring. Default: the rows of a
        part times the number of devices.
    mask : array of bool, Spans, BlockMask, or tuple of these, optional
        Of the whole sequence, the same on all devices; not with a ring. An all-gather takes no blocks, and no
        spans of queries.
    sinks : Array, shape (heads_q,), optional
        Of all heads, the same on all devices.
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
    schedule = "ring" if schedule is None else schedule
    plan = {"schedule": schedule, "parts": parts, "seqlen": seqlen}
    check_schedule({**options, **plan}, packed=cu_seqlens is not None)
    if cu_seqlens is not None and schedule != "ring":
        raise UnsupportedError(
            f'cu_seqlens is not supported with schedule="{schedule}" here.', hint='schedule="ring"'
        )
    ranks = int(jax.lax.psum(1, axis_name))
    given, packed, longest = {"q": q, "k": k, "v": v}, None, None
    rows = -3 if options.get("layout") == "bshd" and q.ndim > 2 else -2
    if schedule != "ring":
        arrays, values = split(options)
        # Masks have the shape of the whole, and the call checks them there.
        of_parts = {name: x for name, x in arrays.items() if name in PER_HEAD}
        check({**given, **of_parts}, values._replace(score=None))
        check_parts(q.shape[rows], k.shape[rows])
        held = Held.of(ranks, q.shape[rows], causal, parts, seqlen)
        run = all_to_all if schedule == "alltoall" else all_gather
        o, lse = run(q, k, v, axis_name, held, causal, {**options})
        return (o, lse) if return_lse else o
    if seqlen is not None:
        raise UnsupportedError(
            "seqlen is not supported for a ring in JAX.", hint='schedule="alltoall" or "allgather"'
        )
    sinks = options.pop("sinks", None)
    own = {} if sinks is None else {"sinks": jnp.asarray(sinks)}
    if cu_seqlens is None:
        values = Options(**options)
        check({**given, **own}, values)
        check_parts(q.shape[rows], k.shape[rows])
        steps, bands = _bands(ranks, q.shape[rows], causal, values, parts)
    else:
        values = Options(**{**options, "layout": "bshd"})
        longest = q.shape[0] if max_seqlen is None else max_seqlen
        cut = jnp.asarray(cu_seqlens)
        check({**given, **own, "cu_seqlens_q": cut}, values, (longest, longest))
        check_parts(q.shape[-3], k.shape[-3])
        if causal:
            halves(q.shape[0])
        *_, cut = alike(q, k, v, cut)
        packed = _Packed.of(cut, q.shape[0], causal)
        steps, bands = tuple(range(ranks)), None
    around = _Around(axis_name, causal, values._replace(window=None), steps, longest, bands)
    q, k, v, *of_heads = alike(q, k, v, *own.values())
    o, lse = _ring(q, k, v, of_heads[0] if of_heads else None, packed, around)
    return (o, lse) if return_lse else o

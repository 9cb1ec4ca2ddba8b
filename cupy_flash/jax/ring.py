"""Ring attention inside `jax.shard_map`, by collective permutes, by all-to-all, or by all-gather."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..call.checks import flag
from ..call.given import Options, split
from ..call.masks import Band, resolve_band
from ..call.options import PER_HEAD, ShardOptions
from ..call.signature import takes
from ..errors import InvalidArgumentsError
from ..merge import merge_parts
from ..parallel.group import row_axis
from ..parallel.parts import DenseParts, Pair, check_parts, halves, lengths_of
from ..parallel.schedules import check as check_schedule
from ..parallel.schedules import for_shards
from .call import results_of, vary_alike
from .exchange import Call, all_gather, all_to_all
from .functional import check
from .numbers import accumulator, as_arrays, next_seed, own_promotion, split_seed
from .primitives import attention, gradients, missing, named_results
from .shards import Packed, Shards, padded_half, visible_spans

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ring_attention"]


class _Static(NamedTuple):
    """Static parameters of a call."""

    axis_name: Any
    causal: bool
    options: Options
    steps: tuple[int, ...]  # steps of the ring whose keys some device attends to
    longest: int | None = None  # length of the longest packed sequence
    # For contiguous parts, per step: the options for keys of a part before the device's own, or its own,
    # and for keys of a part after it. None if the device attends to none of them.
    bands: tuple[tuple[Options | None, Options | None], ...] | None = None
    lengths: tuple[int, int] = (0, 0)  # queries and keys of the whole sequence
    band: Band = Band()  # band of the whole sequence

    def ranks(self) -> int:
        """Number of devices on the ring."""
        return int(jax.lax.psum(1, self.axis_name))

    def pass_on(self, arrays: Any, by: int) -> Any:
        """Receive the arrays of the device `by` places before this one."""
        ranks = self.ranks()
        return jax.lax.ppermute(arrays, self.axis_name, [(r, (r + by) % ranks) for r in range(ranks)])

    def of(self, causal: bool) -> Options:
        """The options of one call, with this value of causal."""
        return self.options._replace(causal=causal)

    def optional_arrays(self, step: int, extras: _Extras) -> dict[str, Any]:
        """Optional arrays of the call at this step; sinks count at step 0 only."""
        ranks = self.ranks()
        owners = [(r - step) % ranks for r in range(ranks)]
        found = {"sinks": extras.sinks if step == 0 else None}
        found["seed"] = next_seed(
            extras.seed, [r * ranks + owner for r, owner in enumerate(owners)], self.axis_name
        )
        if extras.rows is not None:
            rank = jax.lax.axis_index(self.axis_name)
            queries, keys = extras.rows
            theirs = keys[jnp.asarray(owners)[rank]]
            found["spans"] = visible_spans(queries[rank], theirs, self.band, self.lengths)
        return {name: x for name, x in found.items() if x is not None}

    def axis(self, x: Any) -> int:
        """The axis of rows in q, k, v and o; in lse it is the last axis."""
        return row_axis(self.options.layout, x)


class _Extras(NamedTuple):
    """Arrays of a call other than q, k and v."""

    sinks: Any = None  # array, optional
    seed: Any = None  # array of int32, optional: seed of the whole sequence, as 32-bit words
    packed: Packed | None = None
    # (array of int32, array of int32), shapes (devices, rows of a part), optional: rows of the queries and of
    # the keys of each device, if devices differ in more than their position: if a length does not divide by
    # the number of devices, or query i is not at the position of key i.
    rows: Any = None


def _half(x: Any, axis: int, late: bool, packed: Packed | None) -> Any:
    """One of the two halves of a zigzag part."""
    if packed is not None:
        return jnp.take(x, packed.late if late else packed.early, axis=axis)
    rows = halves(x.shape[axis])[late]
    return jax.lax.slice_in_dim(x, rows.start, rows.stop, axis=axis % x.ndim)


def _attend(
    static: _Static, arrays: dict[str, Any], offsets: tuple[Any, Any] | None, options: Options
) -> tuple[Any, Any]:
    """O and LSE of a part of queries over a part of keys, or of halves of parts."""
    given, longest = _with_offsets(static, arrays, offsets)
    o, lse = attention(given, options, longest, _has_16_bits(arrays["q"]))
    return _upcast(o), lse


def _has_16_bits(q: Any) -> bool:
    """Whether results have fewer bits than the accumulator."""
    return bool(q.dtype.itemsize == 2)


def _with_offsets(
    static: _Static, arrays: dict[str, Any], offsets: tuple[Any, Any] | None
) -> tuple[dict[str, Any], tuple[int, int] | None]:
    """Arrays with their offsets, and the longest sequences; equal offsets are passed once."""
    if offsets is None or static.longest is None:
        return arrays, None
    names = ("cu_seqlens_q",) if offsets[0] is offsets[1] else ("cu_seqlens_q", "cu_seqlens_k")
    longest = [min(static.longest, arrays[name].shape[0]) for name in "qk"]
    return {**arrays, **dict(zip(names, offsets, strict=False))}, (longest[0], longest[1])


def _by_origin(static: _Static, step: int, early: Any, late: Any, operands: Any) -> Any:
    """Call `early` if the keys precede this device's part in the sequence, else `late`.

    why cond: the branch differs between devices, and each computes only one; both cost half a square.
    """
    return jax.lax.cond(jax.lax.axis_index(static.axis_name) >= step, early, late, *operands)


def _in_band(
    static: _Static,
    step: int,
    call: Callable[..., Any],
    nothing: Callable[..., Any],
    operands: tuple[Any, ...],
) -> Any:
    """A call of contiguous parts, with its options as first argument, or `nothing` if no key is visible."""

    def branch(options: Options | None) -> Callable[..., Any]:
        if options is not None:
            return functools.partial(call, options)
        return lambda *arrays: vary_alike(*nothing(*arrays), over=arrays)

    assert static.bands is not None
    near, far = static.bands[static.steps.index(step)]
    if near == far:
        return branch(near)(*operands)
    return _by_origin(static, step, branch(near), branch(far), operands)


def _part(static: _Static, step: int, q: Any, k: Any, v: Any, extras: _Extras) -> tuple[Any, Any]:
    """O and LSE over the keys that this device holds at a step."""
    axis, packed = static.axis(q), extras.packed
    extra = static.optional_arrays(step, extras)
    if extras.rows is not None:
        return _attend(static, {"q": q, "k": k, "v": v, **extra}, None, static.of(False))
    if static.bands is not None:

        def call(options: Options, q: Any, k: Any, v: Any) -> Any:
            return _attend(static, {"q": q, "k": k, "v": v, **extra}, None, options)

        def nothing(q: Any, k: Any, v: Any) -> Any:  # noqa: ARG001
            shapes = results_of({"q": q, "v": v}, static.options.layout)
            o, lse = shapes["o"], shapes["lse"]
            return jnp.zeros(o.shape, lse.dtype), jnp.full(lse.shape, -jnp.inf, lse.dtype)

        o, lse = _in_band(static, step, call, nothing, (q, k, v))
        return o, lse
    if not static.causal or step == 0:
        offsets = None if packed is None else (packed.offsets, packed.offsets)
        return _attend(static, {"q": q, "k": k, "v": v, **extra}, offsets, static.of(static.causal))

    def early(q: Any, k: Any, v: Any, packed: Packed | None) -> tuple[Any, Any]:
        k, v = (_half(x, axis, False, packed) for x in (k, v))
        offsets = None if packed is None else (packed.offsets, packed.half_offsets)
        return _attend(static, {"q": q, "k": k, "v": v, **extra}, offsets, static.of(False))

    def late(q: Any, k: Any, v: Any, packed: Packed | None) -> tuple[Any, Any]:
        offsets = None if packed is None else (packed.half_offsets, packed.offsets)
        late_q = _half(q, axis, True, packed)
        o, lse = _attend(static, {"q": late_q, "k": k, "v": v, **extra}, offsets, static.of(False))
        return padded_half(o, axis, True, 0, packed), padded_half(lse, -1, True, -jnp.inf, packed)

    o, lse = _by_origin(static, step, early, late, (q, k, v, packed))
    return o, lse


def _partial_gradients(
    static: _Static, step: int, arrays: tuple[Any, ...], extras: _Extras
) -> tuple[Any, ...]:
    """Contributions of a step to the gradients of q, k and v, then of sinks."""
    axis, packed = static.axis(arrays[0]), extras.packed
    extra = static.optional_arrays(step, extras)
    wanted = [name for name in ("q", "k", "v", "sinks") if name in "qkv" or name in extra]

    def gradients_of(arrays: Any, offsets: Any, options: Options) -> tuple[Any, ...]:
        q, k, v, o, lse, do, dlse = arrays
        given, longest = _with_offsets(static, {"q": q, "k": k, "v": v, **extra}, offsets)
        grads = gradients(given, (o, lse, do, dlse), options, longest, _has_16_bits(q))
        return tuple(_upcast(grads[name]) for name in wanted)

    def early(*given: Any) -> tuple[Any, ...]:
        q, k, v, *rest, packed = given
        k, v = (_half(x, axis, False, packed) for x in (k, v))
        offsets = None if packed is None else (packed.offsets, packed.half_offsets)
        dq, dk, dv = gradients_of((q, k, v, *rest), offsets, static.of(False))
        return dq, *(padded_half(x, axis, False, 0, packed) for x in (dk, dv))

    def late(*given: Any) -> tuple[Any, ...]:
        q, k, v, o, lse, do, dlse, packed = given
        q, o, do = (_half(x, axis, True, packed) for x in (q, o, do))
        lse, dlse = (_half(x, -1, True, packed) for x in (lse, dlse))
        offsets = None if packed is None else (packed.half_offsets, packed.offsets)
        dq, dk, dv = gradients_of((q, k, v, o, lse, do, dlse), offsets, static.of(False))
        return padded_half(dq, axis, True, 0, packed), dk, dv

    grads: tuple[Any, ...]
    if extras.rows is not None:
        return gradients_of(arrays, None, static.of(False))
    if static.bands is not None:

        def nothing(*arrays: Any) -> tuple[Any, ...]:
            return tuple(jnp.zeros_like(_upcast(x)) for x in arrays[:3])

        grads = _in_band(
            static, step, lambda options, *arrays: gradients_of(arrays, None, options), nothing, arrays
        )
        return grads
    if not static.causal or step == 0:
        offsets = None if packed is None else (packed.offsets, packed.offsets)
        return gradients_of(arrays, offsets, static.of(static.causal))
    grads = _by_origin(static, step, early, late, (*arrays, packed))
    return grads


def _upcast(x: Any) -> Any:
    return x.astype(accumulator(x.dtype))


_SECOND = ("a ring has first derivatives only, in reverse mode.", 'schedule="alltoall" or "allgather"')


def _first_order_only(one_pass: Callable[..., Any]) -> Any:
    """A pass whose derivative raises our error instead of the one of JAX about callbacks."""
    function = jax.custom_jvp(own_promotion()(one_pass), nondiff_argnums=(0,))

    @function.defjvp
    def _derivative(static: _Static, primals: Any, tangents: Any) -> Any:
        results = function(static, *primals)
        leaves, form = jax.tree.flatten(results)
        return results, jax.tree.unflatten(form, missing(_SECOND, jax.tree.leaves(tangents), leaves) or ())

    return function


@_first_order_only
def _results(static: _Static, q: Any, k: Any, v: Any, extras: _Extras) -> tuple[Any, Any]:
    swapped, steps = static.axis(q) == -3, static.steps
    o, lse = _part(static, 0, q, k, v, extras)
    for before, step in itertools.pairwise(steps):
        k, v = static.pass_on((k, v), step - before)
        part, part_lse = _part(static, step, q, k, v, extras)
        o, lse = merge_parts(jnp, ((o, lse), (part, part_lse)), swapped)
    if extras.packed is not None:
        o, lse = extras.packed.results(o, lse)
    return o.astype(q.dtype), lse


@_first_order_only
def _gradients(static: _Static, saved: Any, cotangents: Any) -> tuple[Any, ...]:
    q, k, v, o, lse, extras = saved
    home = (q, k, v)
    sums = [jnp.zeros_like(_upcast(x)) for x in home]
    dsinks = None
    for step, then in itertools.pairwise((*static.steps, static.ranks())):
        grads = _partial_gradients(static, step, (q, k, v, o, lse, *cotangents), extras)
        if step == 0 and extras.sinks is not None:
            dsinks, grads = grads[-1], grads[:-1]
        if then < static.ranks():
            k, v = static.pass_on((k, v), then - step)
        sums = [total + share for total, share in zip(sums, grads, strict=True)]
        if len(static.steps) > 1:
            sums[1:] = static.pass_on(tuple(sums[1:]), then - step)
    dq, dk, dv = (x.astype(like.dtype) for x, like in zip(sums, home, strict=True))
    return dq, dk, dv, _Extras(dsinks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _ring(q: Any, k: Any, v: Any, extras: _Extras, static: _Static) -> tuple[Any, Any]:
    o, lse = _results(static, q, k, v, extras)
    return o, lse


def _ring_forward(q: Any, k: Any, v: Any, extras: _Extras, static: _Static) -> tuple[Any, Any]:
    o, lse = named_results(*_results(static, q, k, v, extras))
    return (o, lse), (q, k, v, o, lse, extras)


_ring.defvjp(_ring_forward, _gradients)
# why jit: outside of jit the error of JAX about forward mode does not name the cause.
_compiled_ring = jax.jit(_ring, static_argnums=(4,))


def _bands(whole: list[DenseParts], options: Options) -> tuple[tuple[Options | None, Options | None], ...]:
    """`bands` of `_Static`; the same on all devices, because all parts have one length here."""

    def called(found: Pair | None) -> Options | None:
        if found is None:
            return None
        return options._replace(causal=found.causal, window=found.window, align=found.align)

    ranks, steps = len(whole), whole[0].steps
    near = [called(whole[step].pair(0)) for step in steps]
    far = [called(whole[0].pair((ranks - step) % ranks)) for step in steps]
    return tuple(zip(near, far, strict=True))


@own_promotion()
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
    seqlen: int | tuple[int, int] | None = None,
    return_lse: bool = False,
    **options: Unpack[ShardOptions],
) -> Any:
    """`attention` over a sequence that is sharded along a mesh axis, with gradients.

    Parameters
    ----------
    q, k, v : Array
        This device's parts, equally long on all devices: the rows that `cupy_flash.parallel.positions`
        names, in that order. The numbers of queries and of keys may differ.
    axis_name : str
        Mesh axis along which `jax.shard_map` shards the sequence.
    cu_seqlens : Array of int32, shape (sequences + 1,), optional
        Offsets of this device's rows of packed sequences, the same on all devices: q, k and v are then
        (rows, heads, head_dim), the rows that `cupy_flash.parallel.packed_positions` names. They may be
        traced, so that they cannot be checked before the program runs: with causal, if a device holds an odd
        number of rows of a sequence, all results are NaN.
    max_seqlen : int, optional
        At least the longest of these parts of sequences, static under jit. Default: all rows.
    schedule : {"ring", "alltoall", "allgather"}, optional
        What travels: keys and values in a ring; rows for heads, so that each device attends over whole
        sequences with its share of the heads, and results are as reproducible as those of one; or keys and
        values to all devices at once. Default: the ring or the all-to-all, whichever sends fewer bytes in
        both passes, or what takes the options, heads and parts, as `cupy_flash.parallel.explain` says with
        ``shard_map=True``.
    parts : {"zigzag", "contiguous"}, optional
        Which rows a device holds. Default: zigzag with causal, else contiguous. A ring takes a window, and
        causal with unequal lengths, over contiguous parts only, and with causal they must be named.
    seqlen : int, or (int, int) of queries and of keys, optional
        Length of the whole sequence where it does not divide. Every part is as long as the longest then: rows
        of no sequence lie behind the others, and their results are 0. Default: the rows of a part times the
        number of devices.
    mask : array of bool, Spans, BlockMask, or tuple of these, optional
        Of the whole sequence, the same on all devices; not with a ring. In an all-gather each stretch of rows
        that a device holds begins at a multiple of 16 queries where a mask has blocks.
    sinks, alibi_slopes : Array, shape (heads_q,), optional
        Of all heads, the same on all devices; slopes not with a ring. In an all-gather the host reads where
        a device's rows begin, and on a GPU waits for the stream to do so.
    seed : int, Array of int of shape (), or key of `jax.random`, optional
        As in `attention`. Each device drops weights of its own; of one integer, by a ring and an all-to-all
        whose length divides, those that are dropped over torch and MPI.
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
        As in `attention`, while tracing; also an odd number of rows with causal, heads that do not divide
        over the devices with schedule "alltoall", and a second derivative with schedule "ring".
    """
    causal = flag(options.pop("causal", False), "causal")
    plan = {"schedule": schedule, "parts": parts, "seqlen": seqlen}
    check_schedule({**options, **plan}, packed=cu_seqlens is not None)
    try:
        ranks = int(jax.lax.psum(1, axis_name))
    except NameError as error:
        raise InvalidArgumentsError(
            f"axis_name is {axis_name!r}, which is no axis here.",
            hint="the call inside of jax.shard_map, with the name of an axis of its mesh",
        ) from error
    packed, longest = None, None
    given = as_arrays({"q": q, "k": k, "v": v})
    q, k, v = given.values()
    if cu_seqlens is not None:
        options["layout"] = "bshd"
        given |= as_arrays({"cu_seqlens_q": cu_seqlens})
        longest = q.shape[0] if max_seqlen is None else max_seqlen
    axis = row_axis(options.get("layout"), q)
    arrays, values = split(options)
    # Masks have the shape of the whole, and the call checks them there.
    given |= {name: jnp.asarray(x) for name, x in arrays.items() if name in PER_HEAD}
    values = split_seed(given, values._replace(score=None))
    rows, band = (q.shape[axis], k.shape[axis]), Band()
    if longest is None:
        # why another band: the band of the call is one of the whole sequence, as masks are.
        check(given, values._replace(window=None, align="top_left"))
        lengths = (None, None) if seqlen is None else lengths_of(seqlen)
        queries, keys = (
            Shards.of(ranks, n, causal, parts, length, what)
            for n, length, what in zip(rows, lengths, ("queries", "keys"), strict=True)
        )
        alibi = "alibi_slopes" in given
        band = resolve_band(causal, values.window, values.align, alibi, queries.length, keys.length)
    else:
        check(given, values, (longest, longest))
        check_parts(*rows)
        if causal:
            halves(rows[0])
        q, k, v, offsets = vary_alike(q, k, v, given["cu_seqlens_q"])
        queries = keys = Shards.packed(ranks, rows[0], offsets, causal)
        packed = Packed.of(offsets, rows[0], causal)
    shapes = {
        name: np.broadcast_to(np.zeros((), x.dtype), x.shape) for name, x in (("q", q), ("k", k), ("v", v))
    }
    chosen = for_shards(shapes, ranks, causal, {**options, **plan}, packed is not None)
    of_call = {name: x for name, x in options.items() if name != "seed"} | {"causal": causal}
    call = Call(axis_name, queries, keys, band, of_call, given.get("seed"), packed, longest or 0)

    def attend(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        if chosen == "ring":
            return _by_ring(q, k, v, call, values, parts, given.get("sinks"))
        return (all_to_all if chosen == "alltoall" else all_gather)(q, k, v, call)

    # Padding rows are 0, because a weight of 0 times NaN is NaN, in gradients too.
    o, lse = attend(queries.own(q, axis, axis_name), *(keys.own(x, axis, axis_name) for x in (k, v)))
    o, lse = queries.own(o, axis, axis_name), queries.own(lse, -1, axis_name)
    return (o, lse) if flag(return_lse, "return_lse") else o


def _by_ring(
    q: Any, k: Any, v: Any, call: Call, values: Options, parts: str | None, sinks: Any
) -> tuple[Any, Any]:
    """O and LSE of this device's rows."""
    queries, keys, band, causal = call.queries, call.keys, call.band, call.options["causal"]
    steps, bands, rows, longest = tuple(range(call.ranks)), None, None, None
    if call.packed is not None:
        longest = call.longest
    else:
        counts = zip(*((side.rows < side.length).sum(1).tolist() for side in (queries, keys)), strict=True)
        given = {"parts": parts, "seqlen": call.lengths, "window": values.window, "align": values.align}
        whole = [DenseParts(r, call.ranks, each, causal, given) for r, each in enumerate(counts)]
        steps = whole[0].steps
        same_places = queries.length == keys.length and band.offset == 0
        if not (queries.divides and keys.divides and (band.open or same_places)):
            rows = tuple(jnp.asarray(side.rows, jnp.int32) for side in (queries, keys))
        elif not (causal and queries.zigzag):
            bands = _bands(whole, values)
    plain = values._replace(window=None, align=None)
    static = _Static(call.axis_name, causal, plain, steps, longest, bands, call.lengths, band)
    of_all = {name: x for name, x in (("sinks", sinks), ("seed", call.seed)) if x is not None}
    q, k, v, *extra = vary_alike(q, k, v, *of_all.values())
    extras = _Extras(packed=call.packed, rows=rows, **dict(zip(of_all, extra, strict=True)))
    o, lse = _compiled_ring(q, k, v, extras, static)
    return o, lse

"""A fast path for calls that differ from an earlier one only in the addresses of q, k and v.

Python takes most of the time of a short call. A call that differs from an earlier one only in addresses
reuses its prepared kernels, and takes a sixth of the time; so do its gradients. After a linear layer, which
fills the CPU caches with its weights, Python takes up to ten times as long: therefore a single check of all
three tensors finds the most recent calls.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import torch

from ..api import adopted
from ..call.arrays import contiguous
from ..call.given import Options
from ..call.progress import CALLBACK
from ..dispatch.backends import chosen_by_environment, driver_of, environment
from ..dispatch.memo import REPEATED, Prepared, prepared
from ..dispatch.repeat import BOUNDS, CONSTANTS, constants_beside, put, remember_recent
from .call import GRADIENTS, TENSORS, Call, deterministic
from .eager import are_plain_memory, gradients, is_plain, is_transformed, recorded
from .leading import swap_heads_and_rows
from .repeat_in_core import guard, repeating_in_core

__all__ = ["Recent", "is_watched", "remember", "remember_in_core", "repeated"]

_DEVICES = ("cpu", "cuda")
_OPTIONS = frozenset(
    ("causal", "align", "scale", "softcap", "layout", "precision", "reproducible", "dropout")
)
# The arrays of a call other than q, k and v: none.
_NOTHING = (None,) * (len(TENSORS) - 3)


class _PreparedCall:
    """A prepared forward pass, and its prepared backward passes by the kinds of their arrays."""

    __slots__ = ("forward", "gradients", "in_core", "in_rows", "options", "recorded", "return_lse")

    def __init__(
        self, forward: _Pass, options: Options, recorded: bool, return_lse: bool, in_rows: bool
    ) -> None:
        self.forward = forward
        self.recorded = recorded
        self.options = options
        self.return_lse = return_lse
        self.in_rows = in_rows
        self.gradients: dict[Hashable, _Pass] = {}
        self.in_core: Any = None  # a builtin function that repeats it, see `repeat_in_core`


class _Pass(NamedTuple):
    """A prepared forward or backward pass, to be run with new addresses."""

    call: Prepared  # the prepared pass, without addresses
    # Name, shape, strides and dtype of each result.
    results: tuple[tuple[str, tuple[int, ...], tuple[int, ...], torch.dtype], ...]

    def run(self, given: dict[str, int], *tensors: Any) -> list[Any]:
        """The results; `given` has the addresses of the tensors by name, and q is the first tensor."""
        q, results = tensors[0], []
        for name, shape, strides, dtype in self.results:
            x = q.new_empty_strided(shape, strides, dtype=dtype)
            given[name] = x.data_ptr()
            results.append(x)
        self.call.run_at(given, (tensors, results), "torch")
        return results

    def forward(self, q: Any, k: Any, v: Any) -> list[Any]:
        """O, or O and LSE."""
        return self.run({"q": q.data_ptr(), "k": k.data_ptr(), "v": v.data_ptr()}, q, k, v)

    def backward(self, q: Any, k: Any, v: Any, o: Any, lse: Any, do: Any) -> list[Any]:
        """Gradients of q, k and v."""
        given = {
            "q": q.data_ptr(), "k": k.data_ptr(), "v": v.data_ptr(),
            "o": o.data_ptr(), "lse": lse.data_ptr(), "do": do.data_ptr(),
        }  # fmt: skip
        return self.run(given, q, k, v, o, lse, do)


class Recent(NamedTuple):
    """A recent call, with the guard that recognises its repetitions."""

    are_alike: Callable[..., bool]  # torch's guard: whether tensors are like those of the call
    need_gradients: bool  # whether any tensor of the call requires grad
    surroundings: tuple[object, ...]  # as in `_surroundings`
    recorded: bool  # whether autograd recorded the call
    known: Any  # the prepared call

    @classmethod
    def of(cls, tensors: tuple[Any, ...], known: Any, recorded: bool) -> Recent | None:
        """A call with these tensors; None if torch has no guard for them, or they are not aligned."""
        if not _are_aligned(tensors):
            return None
        check = guard(tensors, [[*x.shape] for x in tensors], [[*x.stride()] for x in tensors])
        needing = any(x.requires_grad for x in tensors)
        return None if check is None else cls(check, needing, _surroundings(), recorded, known)

    def is_repeated(self, *tensors: Any) -> bool:
        """Whether an unwatched call with these tensors differs only in addresses."""
        for x in tensors:
            # why: guards read strides, which a strided nested tensor lacks, and the process would crash.
            if isinstance(x, torch.Tensor) and x.is_nested:
                return False
        return (
            self.are_alike(*tensors)
            and (not self.need_gradients or torch.is_grad_enabled() is self.recorded)
            and _are_aligned(tensors)
            and self.surroundings == _surroundings()
        )


def _surroundings() -> tuple[object, ...]:
    """Environment variables that choose the driver and the CPU path, and the number of threads.

    why threads: `repeat_in_core` knows calls with the number of then.
    """
    return *environment(), torch.get_num_threads()


def is_watched() -> bool:
    """Whether a compiler, a transform, forward mode or `progress` observes the call.

    why transforms: torch's guards do not check all modes, such as that of make_fx.
    """
    return (
        torch.compiler.is_compiling()
        or is_transformed()
        or torch.autograd.forward_ad._current_level >= 0
        or CALLBACK.get() is not None
    )


def repeated(
    function: str, q: Any, k: Any, v: Any, options: Mapping[str, Any], *more: Hashable
) -> tuple[Any, tuple[Hashable, ...] | None]:
    """The result of a call that repeats an earlier one, or None; and the key for `remember`, or None."""
    if is_watched():
        return None, None
    kinds = [*map(type, more)]
    for name, x in options.items():
        kind = type(x)
        kinds.append(kind)
        if x is None:
            continue
        if kind is tuple and name == "window" and BOUNDS.issuperset(map(type, x)):
            kinds += map(type, x)
        elif kind not in CONSTANTS or name not in _OPTIONS or (name == "dropout" and x):
            return None, None
    given = (function, more, *options.items(), *kinds)  # why kinds: 1 == True, but they are different options
    for one in REPEATED.get(given, ()):
        if one.is_repeated(q, k, v):
            remember_recent(function, one.known.in_core)
            return _run(one.known, q, k, v), None
    key = _key_of(given, q, k, v)
    known, recent = REPEATED.get(key, (None, None))
    if known is None:
        return None, key
    remember_recent(given, recent)
    remember_recent(function, known.in_core)
    return _run(known, q, k, v), None


def _are_aligned(tensors: tuple[Any, ...]) -> bool:
    """Whether all tensors begin at multiples of 16 bytes; False if any has no memory."""
    joined = 0
    for x in tensors:
        # why: a storage that was resized to 0 is a null pointer, and the process would crash.
        if not x.untyped_storage().nbytes():
            return False
        joined |= x.data_ptr()
    return joined % 16 == 0


def _boundary(x: Any) -> int | None:
    """The address of a tensor modulo 16; None if it has no memory."""
    return x.data_ptr() % 16 if x.untyped_storage().nbytes() else None


def _key_of(given: Hashable, q: Any, k: Any, v: Any) -> tuple[Hashable, ...] | None:
    """The cache key of a call, with the alignment of addresses; None if the call cannot be repeated."""
    device = q.device if type(q) is type(k) is type(v) is torch.Tensor else None
    if (
        device is None
        or not are_plain_memory(q, k, v)
        or device.type not in _DEVICES
        or torch.is_autocast_enabled(device.type)
    ):
        return None
    at = device.type, device.index or 0
    driver = driver_of(at, "torch")
    try:
        return (  # why not by `_kinds`: that would take an eighth of the time of a short call
            given, q.shape, q.stride(), q.dtype, _boundary(q),
            k.shape, k.stride(), k.dtype, _boundary(k), k.device,
            v.shape, v.stride(), v.dtype, _boundary(v), v.device,
            at, driver, chosen_by_environment(driver, at), torch.get_num_threads(),
            torch.is_grad_enabled() and _need_gradients(q, k, v),
        )  # fmt: skip
    except RuntimeError:  # not a strided tensor, which the full call refuses
        return None


def _need_gradients(q: Any, k: Any, v: Any) -> bool:
    return bool(q.requires_grad or k.requires_grad or v.requires_grad)


def _kinds(*tensors: Any) -> tuple[Any, ...] | None:
    """The cache key of a pass without its options: device, kinds and alignment; None without strides."""
    device = tensors[0].device
    at = device.type, device.index or 0
    driver = driver_of(at, "torch")
    kinds = [at, driver, chosen_by_environment(driver, at)]
    add = kinds.extend
    try:
        for x in tensors:
            add((x.shape, x.stride(), x.dtype, _boundary(x), x.device))
    except RuntimeError:  # not strided: sparse, or a batch of gradients
        return None
    return tuple(kinds)


def _run(known: _PreparedCall, q: Any, k: Any, v: Any) -> Any:
    if not known.recorded:  # only addresses of q, k and v are read, whatever the order of their axes
        results = known.forward.forward(q, k, v)
        if known.in_rows:
            return results[0].transpose(1, 2)
        return results[0] if len(results) == 1 else tuple(results)
    if known.in_rows:
        # why: activation checkpoints compare the saved tensors with those of the full call.
        return _record(*swap_heads_and_rows(q, k, v), known).transpose(1, 2)
    return _record(q, k, v, known)


class _Repeated(torch.autograd.Function):
    """A repeated call in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, known: _PreparedCall) -> Any:
        o, lse = known.forward.forward(q, k, v)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.known = known
        ctx.set_materialize_grads(False)
        return (o, lse) if known.return_lse else o

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any = None) -> Any:
        if do is None and dlse is None:
            return (None,) * 4
        q, k, v, o, lse = saved = ctx.saved_tensors
        known = ctx.known
        key = _key_of_gradients(saved, do, dlse)
        if key is not None and (passed := known.gradients.get(key)) is not None:
            return *passed.backward(*saved, do), None
        call = Call((q, k, v, *_NOTHING), known.options)
        grads = gradients(call, do, dlse, o, lse, ctx.needs_input_grad + (False,) * len(GRADIENTS))
        if key is not None:
            raw = adopted(q=q, k=k, v=v, o=o, lse=lse, do=do)
            passed = _prepare_pass("backward", raw, deterministic(known.options), True)
            if passed is not None:
                put(key, passed, known.gradients)
        return *grads[:3], None


_record = recorded(_Repeated)


def _key_of_gradients(saved: tuple[Any, ...], do: Any, dlse: Any) -> Hashable | None:
    """The cache key of a backward pass, or None; of tensors as saved, because hooks may change them."""
    if dlse is not None or not is_plain(*saved, do) or torch.is_grad_enabled() or CALLBACK.get() is not None:
        return None
    kinds = _kinds(*saved, do)
    return kinds and (kinds, torch.are_deterministic_algorithms_enabled())


def remember(
    function: str,
    key: tuple[Hashable, ...],
    q: Any,
    k: Any,
    v: Any,
    options: Options,
    return_lse: bool,
    given: tuple[Hashable, ...],
    in_rows: bool = False,
) -> None:
    """Store a full call for repetitions under `key`, if only addresses can differ.

    given: the options as `repeated_in_core` gets them. in_rows: whether `options` are for q, k, v and o
    transposed to rows before heads.
    """
    with torch.no_grad():  # why: the call has been recorded already
        raw = adopted(**dict(zip("qkv", swap_heads_and_rows(q, k, v) if in_rows else (q, k, v), strict=True)))
    is_recorded = torch.is_grad_enabled() and _need_gradients(q, k, v)
    passed = _prepare_pass("forward", raw, options, is_recorded or return_lse)
    if passed is None:
        return
    known = _PreparedCall(passed, options, is_recorded, return_lse, in_rows)
    recent = Recent.of((q, k, v), known, is_recorded)
    put(key, (known, recent))
    remember_recent(key[0], recent)
    if recent is None or is_recorded or return_lse:
        return
    known.in_core = repeating_in_core((q, k, v), given, options, passed.call, in_rows)
    remember_recent(function, known.in_core)


def remember_in_core(
    function: str,
    qkv: tuple[Any, Any, Any],
    name: str,
    array: Any,
    options: Options,
    given: tuple[Any, ...],
    in_rows: bool = False,
) -> None:
    """Store a full call with a mask or bias, of this name, for repetitions in the core; as `remember`."""
    tensors = *qkv, array
    if is_watched() or constants_beside(array, given) is None or torch.is_autocast_enabled("cpu"):
        return
    if options.dropout:  # with a seed of each call
        return
    for x in tensors:
        if type(x) is not torch.Tensor or x.is_nested or x.layout is not torch.strided:
            return
        if not x.is_cpu or (x.requires_grad and torch.is_grad_enabled()):
            return
    if not (are_plain_memory(*tensors) and _are_aligned(tensors)):
        return
    with torch.no_grad():
        raw = adopted(
            **dict(zip("qkv", swap_heads_and_rows(*qkv) if in_rows else qkv, strict=True)), **{name: array}
        )
    call = prepared("forward", raw, options, False)
    if call.may_repeat_in_core:
        remember_recent(function, repeating_in_core(tensors, given, options, call, in_rows, name))


def _prepare_pass(direction: str, raw: Any, options: Options, want_lse: bool) -> _Pass | None:
    """A prepared pass, or None if more than addresses can differ between such calls."""
    call = prepared(direction, raw, options, want_lse)
    if not call.only_addresses_differ:
        return None
    results = [(name, shape, contiguous(shape), getattr(torch, dtype)) for name, shape, dtype in call.results]
    return _Pass(call, tuple(results))

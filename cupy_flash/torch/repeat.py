"""Calls that repeat an earlier one on other numbers: straight to what that one found out.

A short call is mostly Python. Where nothing but the addresses of q, k and v can differ from a call that went
the whole way, this looks at no more than that, and takes a sixth of the time. So do its gradients. After a
linear layer, whose weights fill the caches, Python takes up to ten times as long: the last calls are found
by one look at all three tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import torch

from ..api import adopted
from ..call.arrays import contiguous
from ..call.given import Options
from ..call.progress import TOLD
from ..dispatch.backends import chosen_by_environment, driver_of, environment
from ..dispatch.memo import REPEATED, Prepared, prepared
from .call import GRADIENTS, TENSORS, Call, deterministic
from .eager import are_untouched, gradients, is_plain, is_transformed, recorded
from .leading import turned

__all__ = ["CONSTANTS", "Recent", "is_watched", "remember", "remember_recent", "repeated"]

_DEVICES = ("cpu", "cuda")
# Types of options that mean the same for ever.
CONSTANTS = frozenset((bool, int, float, str))
_OPTIONS = frozenset(
    ("causal", "align", "scale", "softcap", "layout", "precision", "reproducible", "dropout")
)
_MOST_KNOWN = 1024
_MOST_RECENT = 8  # with the same options
# Whether tensors are of the classes, dtypes, devices, sizes and strides of others, need gradients if those
# did, and are under the same transforms and modes, all in one call: torch.compile guards its programs so.
# The class is not in torch's documentation; without it calls go by `_key_of`.
_guards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)
# Of a call, what is given besides q, k and v.
_NOTHING = (None,) * (len(TENSORS) - 3)


class _Known:
    """What a call found out, and what its gradients did by the kinds of their arrays."""

    __slots__ = ("forward", "gradients", "in_rows", "options", "recorded", "return_lse")

    def __init__(
        self, forward: _Pass, options: Options, recorded: bool, return_lse: bool, in_rows: bool
    ) -> None:
        self.forward = forward
        self.recorded = recorded
        self.options = options
        self.return_lse = return_lse
        self.in_rows = in_rows
        self.gradients: dict[Hashable, _Pass] = {}


class _Pass(NamedTuple):
    """A forward or a backward pass of which only addresses differ."""

    call: Prepared
    results: tuple[tuple[str, tuple[int, ...], tuple[int, ...], torch.dtype], ...]

    def run(self, given: dict[str, int], *tensors: Any) -> list[Any]:
        """The results; given are the addresses of the tensors, of which q is the first."""
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
    """One of the last calls with some options."""

    are_alike: Callable[..., bool]
    need_gradients: bool
    environment: tuple[object, ...]
    recorded: bool
    known: Any

    @classmethod
    def of(cls, tensors: tuple[Any, ...], known: Any, recorded: bool) -> Recent | None:
        """A call over these; None if torch cannot tell others like them, or they are off a boundary."""
        if _guards is None or not _are_aligned(tensors):
            return None
        shapes, strides = [[*x.shape] for x in tensors], [[*x.stride()] for x in tensors]
        try:
            guards = _guards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)
        except TypeError:  # another version of torch's
            return None
        return cls(guards.check, any(x.requires_grad for x in tensors), environment(), recorded, known)

    def is_repeated(self, *tensors: Any) -> bool:
        """Whether a call over these that nobody watches differs in addresses alone."""
        for x in tensors:
            # why: guards ask for strides, which a strided nested tensor has not, and the process would end.
            if isinstance(x, torch.Tensor) and x.is_nested:
                return False
        return (
            self.are_alike(*tensors)
            and (not self.need_gradients or torch.is_grad_enabled() is self.recorded)
            and _are_aligned(tensors)
            and self.environment == environment()
        )


def is_watched() -> bool:
    """Whether a compiler, a transform, forward mode or `progress` looks on.

    why transforms: torch's guards do not see all modes, that of make_fx for one.
    """
    return (
        torch.compiler.is_compiling()
        or is_transformed()
        or torch.autograd.forward_ad._current_level >= 0
        or TOLD.get() is not None
    )


def repeated(
    q: Any, k: Any, v: Any, options: Mapping[str, Any], *more: Hashable
) -> tuple[Any, tuple[Hashable, ...] | None]:
    """The result of a call that repeats an earlier one, or None; and what to `remember` it by, or None."""
    if is_watched():
        return None, None
    for name, x in options.items():
        if x is not None and (type(x) not in CONSTANTS or name not in _OPTIONS or (name == "dropout" and x)):
            return None, None
    # why types: 1 is True, and not taken for it
    given = (more, *options.items(), *map(type, (*more, *options.values())))
    for one in REPEATED.get(given, ()):
        if one.is_repeated(q, k, v):
            return _run(one.known, q, k, v), None
    key = _key_of(given, q, k, v)
    known: _Known | None = REPEATED.get(key)
    return (None, key) if known is None else (_run(known, q, k, v), None)


def _are_aligned(tensors: tuple[Any, ...]) -> bool:
    """Whether tensors begin at multiples of 16 bytes; not if they have lost their memory."""
    joined = 0
    for x in tensors:
        # why: a storage that was resized to 0 is null, and the process would end.
        if not x.untyped_storage().nbytes():
            return False
        joined |= x.data_ptr()
    return joined % 16 == 0


def _boundary(x: Any) -> int | None:
    """Bytes behind a multiple of 16 at which a tensor begins; None if it has no memory."""
    return x.data_ptr() % 16 if x.untyped_storage().nbytes() else None


def _key_of(given: Hashable, q: Any, k: Any, v: Any) -> tuple[Hashable, ...] | None:
    """What decides how a call goes, but for where its tensors are; None if something else does, too."""
    device = q.device if type(q) is type(k) is type(v) is torch.Tensor else None
    if (
        device is None
        or not are_untouched(q, k, v)
        or device.type not in _DEVICES
        or torch.is_autocast_enabled(device.type)
    ):
        return None
    at = device.type, device.index or 0
    driver = driver_of(at, "torch")
    try:
        return (  # why not by `_kinds`: a look at three tensors is an eighth of a short call
            given, q.shape, q.stride(), q.dtype, _boundary(q),
            k.shape, k.stride(), k.dtype, _boundary(k), k.device,
            v.shape, v.stride(), v.dtype, _boundary(v), v.device,
            at, driver, chosen_by_environment(driver, at),
            torch.is_grad_enabled() and _need_gradients(q, k, v),
        )  # fmt: skip
    except RuntimeError:  # no elements in strided memory, which the whole way says
        return None


def _need_gradients(q: Any, k: Any, v: Any) -> bool:
    return bool(q.requires_grad or k.requires_grad or v.requires_grad)


def _kinds(*tensors: Any) -> tuple[Any, ...] | None:
    """What decides how a pass over tensors goes, but for their addresses and options."""
    device = tensors[0].device
    at = device.type, device.index or 0
    driver = driver_of(at, "torch")
    kinds = [at, driver, chosen_by_environment(driver, at)]
    add = kinds.extend
    try:
        for x in tensors:
            add((x.shape, x.stride(), x.dtype, _boundary(x), x.device))
    except RuntimeError:  # no elements in strided memory: sparse, or several directions at once
        return None
    return tuple(kinds)


def _run(known: _Known, q: Any, k: Any, v: Any) -> Any:
    if known.recorded and known.in_rows:
        # why: checkpoints compare what is saved with what the whole way saved.
        return _record(*turned(q, k, v), known).transpose(1, 2)
    if known.recorded:
        return _record(q, k, v, known)
    results = known.forward.forward(q, k, v)
    return results[0] if len(results) == 1 else tuple(results)


class _Repeated(torch.autograd.Function):
    """A repeated call in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, known: _Known) -> Any:
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
            passed = _passed("backward", raw, deterministic(known.options), True, False)
            if passed is not None:
                _put(known.gradients, key, passed)
        return *grads[:3], None


_record = recorded(_Repeated)


def _key_of_gradients(saved: tuple[Any, ...], do: Any, dlse: Any) -> Hashable | None:
    """What decides how gradients go, as `key_of`; hooks may have changed what was saved."""
    if dlse is not None or not is_plain(*saved, do) or torch.is_grad_enabled() or TOLD.get() is not None:
        return None
    kinds = _kinds(*saved, do)
    return kinds and (kinds, torch.are_deterministic_algorithms_enabled())


def remember(
    key: tuple[Hashable, ...],
    q: Any,
    k: Any,
    v: Any,
    options: Options,
    return_lse: bool,
    in_rows: bool = False,
) -> None:
    """Remember a call that went the whole way, as one over these arrays, if it can be repeated.

    in_rows: whether the options are of the arrays, and of results, with rows before heads.
    """
    with torch.no_grad():  # what is recorded has been
        raw = adopted(**dict(zip("qkv", turned(q, k, v) if in_rows else (q, k, v), strict=True)))
    is_recorded = torch.is_grad_enabled() and _need_gradients(q, k, v)
    passed = _passed("forward", raw, options, is_recorded or return_lse, in_rows and not is_recorded)
    if passed is None:
        return
    known = _Known(passed, options, is_recorded, return_lse, in_rows)
    _put(REPEATED, key, known)
    remember_recent(key[0], Recent.of((q, k, v), known, is_recorded))


def remember_recent(given: Hashable, recent: Recent | None) -> None:
    """Put a call before the others with the same options, of which the last few are kept."""
    if recent is not None:
        _put(REPEATED, given, (recent, *REPEATED.get(given, ())[: _MOST_RECENT - 1]))


def _put(memory: dict[Hashable, Any], key: Hashable, found: Any) -> None:
    """Remember it, and nothing else if that would be too much."""
    if len(memory) >= _MOST_KNOWN:
        memory.clear()
    memory[key] = found


def _passed(direction: str, raw: Any, options: Options, want_lse: bool, in_rows: bool) -> _Pass | None:
    """What is known of a pass, if calls like it differ in addresses alone."""
    call = prepared(direction, raw, options, want_lse)
    if not call.only_addresses_differ:
        return None
    results = []
    for name, shape, dtype in call.results:
        strides = contiguous(shape)
        if in_rows and name != "lse":
            shape, strides = ((b, h, s, d) for b, s, h, d in (shape, strides))
        results.append((name, shape, strides, getattr(torch, dtype)))
    return _Pass(call, tuple(results))

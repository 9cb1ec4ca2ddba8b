"""The schedules of context parallelism: `ring`, `alltoall` or `allgather`.

Each is a module with `forward` and `backward`. Both first check the call, allocate all memory and compare the
call with the other processes, and only then send the first message.

If the caller names no schedule, the ring or the all-to-all is chosen, whichever sends fewer bytes in this
pass. The all-gather needs memory for the whole sequence, so it is chosen only if both cannot run. All
processes choose the same, because they count from the arguments that they then compare. Inside
`jax.shard_map` one schedule serves both passes, and is chosen by their total.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..api import Gradients
from ..call.blocks import BlockMask
from ..call.checks import flag, integer, one_of
from ..call.compound import Spans, masks_of
from ..call.options import RingOptions, defaults
from ..call.reproducible import MODES
from ..call.signature import takes
from ..errors import InvalidArgumentsError, UnsupportedError
from . import allgather, alltoall, ring
from .group import LocalCall, at, terms_of
from .parts import lengths_of, order_of, stretches
from .traffic import part_of, sent

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["backward", "check", "explain", "for_shards", "forward"]

_MODULES: dict[str, ModuleType] = {"ring": ring, "alltoall": alltoall, "allgather": allgather}
_NAMES = {"ring": "a ring", "alltoall": "an all-to-all", "allgather": "an all-gather"}
# Options that some schedules do not support; for each schedule, those it supports for whole and for packed
# sequences.
_LIMITED = ("mask", "alibi_slopes", "window", "align", "parts", "seqlen", "reproducible")
_TAKES = {
    "ring": (("window", "align", "parts", "seqlen"), ()),
    "alltoall": (_LIMITED, ("alibi_slopes", "window", "align", "reproducible")),
    "allgather": (("mask", "alibi_slopes", "window", "align", "parts", "seqlen"), ("window", "align")),
}
# Supported masks other than arrays. why no functions: they would get heads and rows within the part.
_MASKS = (Spans, BlockMask)


def _refused(schedule: str, options: dict[str, Any], packed: bool) -> list[tuple[str, str]]:
    """Given options that a schedule does not support: the name of each, and how messages show it."""
    found = []
    for name in _LIMITED:
        x = options.get(name)
        if x is None or (name == "reproducible" and not one_of(x, MODES[1:])):
            continue
        if name not in _TAKES[schedule][packed]:
            found.append((name, f'{name}="{x}"' if name == "reproducible" else name))
        elif name == "mask":
            kinds = [x for x in masks_of(x) if not (hasattr(x, "dtype") or isinstance(x, _MASKS))]
            found += [(name, f"a mask of type {type(x).__name__}") for x in kinds]
    return found


def check(options: dict[str, Any], packed: bool) -> list[str]:
    """The schedules that support the options: the named one, or those to choose from."""
    named = options["schedule"]
    if not (named is None or one_of(named, tuple(_MODULES))):
        raise InvalidArgumentsError(
            f"schedule is {named!r}.", hint='schedule="ring", "alltoall", "allgather" or None'
        )
    supported = [x for x in _MODULES if not _refused(x, options, packed)]
    if found := [x for x in supported if named in (None, x)]:
        return found
    schedule = named or "alltoall"  # it supports the most options
    name, shown = _refused(schedule, options, packed)[0]
    raise UnsupportedError(
        f"{shown} is not supported for {_NAMES[schedule]}{' of packed sequences' * packed}.",
        hint=" or ".join(f'schedule="{x}"' for x in supported) or f"{name}=None",
    )


_Costs = dict[str, float | Exception]


def _costs(local_call: LocalCall, supported: list[str], wanted: tuple[bool, bool]) -> _Costs:
    """Bytes that each schedule sends in this pass, or the reason why it cannot run."""
    steps, unable = _unsupported(local_call, supported)
    part = part_of(local_call, wanted)
    counted = {x: sent(x, local_call.direction, local_call.link.ranks, part, steps) for x in supported}
    return {x: unable.get(x, counted[x]) for x in supported}


def _costs_of_shards(local_call: LocalCall, supported: list[str]) -> _Costs:
    """`_costs` of both passes inside `jax.shard_map`, where parts are padded to one length."""
    options, ranks, arrays = local_call.options, local_call.link.ranks, local_call.arrays
    part = part_of(local_call, (True, True), padded=True)
    if local_call.cu_seqlens is None and options["seqlen"] is not None:
        axis, zigzag = local_call.row_axis, order_of(options["parts"], local_call.causal) == "zigzag"
        rows = [sum(map(len, stretches(0, ranks, n, zigzag))) for n in lengths_of(options["seqlen"])]
        arrays = {name: x[at(slice(0, rows[name != "q"]), axis)] for name, x in arrays.items()}
    steps, unable = _unsupported(local_call._replace(arrays=arrays), supported)
    counted = {
        x: sum(sent(x, direction, ranks, part, steps, kept=True) for direction in ("forward", "backward"))
        for x in supported
    }
    return {x: unable.get(x, counted[x]) for x in supported}


def _unsupported(local_call: LocalCall, supported: list[str]) -> tuple[int, dict[str, Exception]]:
    """Steps of a ring, and the reasons why some schedules cannot run."""
    if len(supported) > 1 and local_call.options["dropout"]:
        raise InvalidArgumentsError(
            "dropout without a schedule, each of which drops other weights.",
            hint=f'schedule="{supported[0]}"',
        )
    found: dict[str, Exception] = {}
    steps = local_call.link.ranks
    if local_call.cu_seqlens is None:
        try:
            steps = len(ring.checked(local_call).parts.steps)
        except InvalidArgumentsError as error:
            if local_call.options["parts"] is None:  # why: no schedule may guess parts
                raise
            found["ring"] = error
    checks = {"alltoall": alltoall.check_heads, "allgather": allgather.check_blocks}
    for name, check_of in checks.items():
        try:
            check_of(local_call)
        except InvalidArgumentsError as error:
            found[name] = error
    return steps, found


def _cheapest(costs: _Costs) -> str:
    """The cheapest schedule; the all-gather only if no other can run."""
    counted = {name: cost for name, cost in costs.items() if not isinstance(cost, Exception)}
    if not counted:
        raise next(cost for cost in costs.values() if isinstance(cost, Exception))
    return min(counted, key=lambda name: (name == "allgather", counted[name]))


def _module(local_call: LocalCall, wanted: tuple[bool, bool] = (True, True)) -> tuple[ModuleType, LocalCall]:
    """The module of the named or chosen schedule, and the call with its name among the options."""
    with local_call.link.agreement.refusals():
        supported = check(local_call.options, local_call.cu_seqlens is not None)
        terms = terms_of(local_call)
        schedule = supported[0] if len(supported) == 1 else _cheapest(_costs(local_call, supported, wanted))
    terms |= {**local_call.terms, "schedule": schedule}
    return _MODULES[schedule], local_call._replace(
        options={**local_call.options, "schedule": schedule}, terms=terms
    )


def for_shards(
    arrays: dict[str, Any], ranks: int, causal: bool, options: dict[str, Any], packed: bool
) -> str:
    """The named schedule, or the one chosen inside `jax.shard_map`, for arrays like the parts."""
    every = {**defaults(RingOptions), **options}
    supported = check(every, packed)
    if len(supported) == 1:
        return supported[0]
    link = SimpleNamespace(rank=0, ranks=ranks)
    return _cheapest(_costs_of_shards(LocalCall(link, arrays, causal, every, packed or None), supported))


@takes(RingOptions)
def explain(
    q: Any, k: Any, v: Any, ranks: int, *, shard_map: bool = False, **options: Unpack[RingOptions]
) -> str:
    """Describe what each schedule of `cupy_flash.torch.ring_attention` sends, and which one is chosen.

    Parameters
    ----------
    q, k, v : array
        Parts of the first process.
    ranks : int
        Number of processes.
    shard_map : bool
        Whether the call is inside `jax.shard_map`, with arrays as long as those of each device. One schedule
        serves both passes there, and gradients send other bytes.
    mask : array of bool, Spans, BlockMask, or tuple of these, optional
        As in `cupy_flash.torch.ring_attention`.
    {options: As in `cupy_flash.torch.ring_attention`.}

    Returns
    -------
    str
        Bytes that a process sends in each pass; inside `jax.shard_map`, in both together.

    Raises
    ------
    InvalidArgumentsError, UnsupportedError
        As in `cupy_flash.torch.ring_attention`.
    """
    if (count := integer(ranks)) is None or count < 1:
        raise InvalidArgumentsError(f"ranks is {ranks!r}.", hint="the number of processes, at least 1")
    every: dict[str, Any] = {**defaults(RingOptions), **options}
    causal, arrays = every.pop("causal"), {"q": q, "k": k, "v": v}
    local_call = LocalCall(SimpleNamespace(rank=0, ranks=count), arrays, causal, every)
    terms_of(local_call)
    supported, lines = check(every, packed=False), []
    if flag(shard_map, "shard_map"):
        found = {"forward and backward": _costs_of_shards(local_call, supported)}
    else:
        passes = (local_call, local_call._replace(arrays={**arrays, "do": q}))
        found = {x.direction: _costs(x, supported, (True, True)) for x in passes}
    for passes_of, costs in found.items():
        lines.append(f"{passes_of}: {_cheapest(costs)}")
        for name, cost in costs.items():
            said = str(cost).partition("\n")[0] if isinstance(cost, Exception) else f"{cost:,.0f} bytes"
            lines.append(f"  {name:<10}{said}")
    return "\n".join(lines)


def forward(local_call: LocalCall) -> tuple[Any, Any]:
    """O and LSE of this process's queries over the keys of all processes."""
    module, local_call = _module(local_call)
    o, lse = module.forward(local_call)
    return o, lse


def backward(local_call: LocalCall, wanted: tuple[bool, bool] = (True, True)) -> Gradients[Any]:
    """Gradients of this process's q, k and v; `wanted` says whether any process needs dk, and dv."""
    module, local_call = _module(local_call, wanted)
    grads: Gradients[Any] = module.backward(local_call, wanted)
    return grads

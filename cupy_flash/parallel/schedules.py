"""What travels between processes that hold parts of a sequence: `ring`, `alltoall` or `allgather`.

Each is a module with `forward` and `backward`, which begin alike: they check the call, take the memory that
they need, agree with the other processes, and send the first message then.

Where the caller names none, the ring or the all-to-all is chosen, whichever sends fewer bytes in this pass.
The all-gather, which takes memory for the whole sequence, is chosen only where both cannot. All processes
choose alike: they count from what they then compare.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..api import Gradients
from ..call.blocks import BlockMask
from ..call.checks import integer, one_of
from ..call.compound import Spans
from ..call.options import RingOptions, defaults
from ..call.reproducible import MODES
from ..call.signature import takes
from ..errors import InvalidArgumentsError, UnsupportedError
from . import allgather, alltoall, ring
from .group import Asked, terms_of
from .traffic import part_of, sent

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["backward", "check", "explain", "forward"]

_MODULES: dict[str, ModuleType] = {"ring": ring, "alltoall": alltoall, "allgather": allgather}
_NAMES = {"ring": "a ring", "alltoall": "an all-to-all", "allgather": "an all-gather"}
# Options that not every schedule takes, and those which one takes of whole and of packed sequences.
_LIMITED = ("mask", "alibi_slopes", "window", "align", "parts", "seqlen", "reproducible")
_TAKES = {
    "ring": (("window", "align", "parts", "seqlen"), ()),
    "alltoall": (_LIMITED, ("alibi_slopes", "window", "align", "reproducible")),
    "allgather": (("mask", "alibi_slopes", "window", "align", "parts", "seqlen"), ()),
}
# Masks beside arrays. Functions count heads and rows of the call that they are in, not those of the whole.
_MASKS: dict[str, tuple[type, ...]] = {"alltoall": (Spans, BlockMask), "allgather": (Spans,)}


def _refused(schedule: str, options: dict[str, Any], packed: bool) -> list[tuple[str, str]]:
    """Options that a schedule does not take: the name of each, and how it is spelled."""
    found = []
    for name in _LIMITED:
        x = options.get(name)
        if x is None or (name == "reproducible" and not one_of(x, MODES[1:])):
            continue
        if name not in _TAKES[schedule][packed]:
            found.append((name, f'{name}="{x}"' if name == "reproducible" else name))
        elif name == "mask":
            kinds = [x for x in _masks(x) if not (hasattr(x, "dtype") or isinstance(x, _MASKS[schedule]))]
            found += [(name, f"a mask of type {type(x).__name__}") for x in kinds]
    return found


def _masks(mask: Any) -> list[Any]:
    """What a mask consists of."""
    return [x for part in mask for x in _masks(part)] if type(mask) in (tuple, list) else [mask]


def check(options: dict[str, Any], packed: bool) -> list[str]:
    """The schedules that take the options: the one that they name, or those that one is chosen of."""
    named = options["schedule"]
    if not (named is None or one_of(named, tuple(_MODULES))):
        raise InvalidArgumentsError(
            f"schedule is {named!r}.", hint='schedule="ring", "alltoall", "allgather" or None'
        )
    able = [x for x in _MODULES if not _refused(x, options, packed)]
    if found := [x for x in able if named in (None, x)]:
        return found
    schedule = named or "alltoall"  # which takes most
    name, spelled = _refused(schedule, options, packed)[0]
    raise UnsupportedError(
        f"{spelled} is not supported for {_NAMES[schedule]}{' of packed sequences' * packed}.",
        hint=" or ".join(f'schedule="{x}"' for x in able) or f"{name}=None",
    )


def _costs(asked: Asked, able: list[str], wanted: tuple[bool, bool]) -> dict[str, float | Exception]:
    """What each schedule sends in this pass, or why it does not take these parts or heads."""
    if len(able) > 1 and asked.options["dropout"]:
        raise InvalidArgumentsError(
            "dropout without a schedule, each of which drops other weights.", hint=f'schedule="{able[0]}"'
        )
    found: dict[str, float | Exception] = {}
    steps, ranks = asked.link.ranks, asked.link.ranks
    if asked.cut is None:
        try:
            steps = len(ring.checked(asked).parts.steps)
        except InvalidArgumentsError as error:
            if asked.options["parts"] is None:  # no schedule may guess it
                raise
            found["ring"] = error
    try:
        alltoall.check_heads(asked)
    except InvalidArgumentsError as error:
        found["alltoall"] = error
    part = part_of(asked, wanted)
    counted = {x: sent(x, asked.direction, ranks, part, steps) for x in able}
    return {x: found.get(x, counted[x]) for x in able}


def _least(costs: dict[str, float | Exception]) -> str:
    """The schedule that is chosen."""
    counted = {name: cost for name, cost in costs.items() if not isinstance(cost, Exception)}
    if not counted:
        raise next(cost for cost in costs.values() if isinstance(cost, Exception))
    return min(counted, key=lambda name: (name == "allgather", counted[name]))


def _module(asked: Asked, wanted: tuple[bool, bool] = (True, True)) -> tuple[ModuleType, Asked]:
    """What the options name, or what is chosen; and the same with its name among them."""
    with asked.link.agreement.refusals():
        able = check(asked.options, asked.cut is not None)
        terms = terms_of(asked)
        schedule = able[0] if len(able) == 1 else _least(_costs(asked, able, wanted))
    terms |= {**asked.terms, "schedule": schedule}
    return _MODULES[schedule], asked._replace(options={**asked.options, "schedule": schedule}, terms=terms)


@takes(RingOptions)
def explain(q: Any, k: Any, v: Any, ranks: int, **options: Unpack[RingOptions]) -> str:
    """Say what each schedule of `cupy_flash.torch.ring_attention` would send, and which one is chosen.

    Parameters
    ----------
    q, k, v : array
        Parts of the first process.
    ranks : int
        Number of processes.
    mask : array of bool, Spans, BlockMask, or tuple of these, optional
        As in `cupy_flash.torch.ring_attention`.
    {options: As in `cupy_flash.torch.ring_attention`.}

    Returns
    -------
    str
        Bytes that a process sends in each pass.

    Raises
    ------
    InvalidArgumentsError, UnsupportedError
        As in `cupy_flash.torch.ring_attention`.
    """
    if (count := integer(ranks)) is None or count < 1:
        raise InvalidArgumentsError(f"ranks is {ranks!r}.", hint="the number of processes, at least 1")
    every: dict[str, Any] = {**defaults(RingOptions), **options}
    causal, arrays = every.pop("causal"), {"q": q, "k": k, "v": v}
    asked = Asked(SimpleNamespace(rank=0, ranks=count), arrays, causal, every)
    terms_of(asked)
    able, lines = check(every, packed=False), []
    for asked_for in (asked, asked._replace(arrays={**arrays, "do": q})):
        costs = _costs(asked_for, able, (True, True))
        lines.append(f"{asked_for.direction}: {_least(costs)}")
        for name, cost in costs.items():
            said = str(cost).partition("\n")[0] if isinstance(cost, Exception) else f"{cost:,.0f} bytes"
            lines.append(f"  {name:<10}{said}")
    return "\n".join(lines)


def forward(asked: Asked) -> tuple[Any, Any]:
    """O and LSE of this process's queries over everybody's keys."""
    module, asked = _module(asked)
    o, lse = module.forward(asked)
    return o, lse


def backward(asked: Asked, wanted: tuple[bool, bool] = (True, True)) -> Gradients[Any]:
    """Gradients of this process's q, k and v; wanted: whether anybody asks for those of k, and of v."""
    module, asked = _module(asked, wanted)
    grads: Gradients[Any] = module.backward(asked, wanted)
    return grads

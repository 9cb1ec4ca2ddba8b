"""What travels between processes that hold parts of a sequence: `ring`, `alltoall` or `allgather`.

Each is a module with `forward` and `backward`, which begin alike: they check the call, take the memory that
they need, agree with the other processes, and send the first message then.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ..api import Gradients
from ..call.blocks import BlockMask
from ..call.checks import one_of
from ..call.compound import Spans
from ..call.reproducible import MODES
from ..errors import InvalidArgumentsError, UnsupportedError
from . import allgather, alltoall, ring
from .group import Asked

__all__ = ["backward", "check", "forward"]

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


def check(options: dict[str, Any], packed: bool) -> str:
    """The schedule that options name, if it takes the others."""
    schedule = "ring" if options["schedule"] is None else options["schedule"]
    if not one_of(schedule, tuple(_MODULES)):
        raise InvalidArgumentsError(
            f"schedule is {schedule!r}.", hint='schedule="ring", "alltoall", "allgather" or None'
        )
    for name, spelled in _refused(schedule, options, packed):
        able = [f'schedule="{x}"' for x in _MODULES if not _refused(x, options, packed)]
        raise UnsupportedError(
            f"{spelled} is not supported for {_NAMES[schedule]}{' of packed sequences' * packed}.",
            hint=" or ".join(able) or f"{name}=None",
        )
    return str(schedule)


def _module(asked: Asked) -> tuple[ModuleType, Asked]:
    """What the options name, and the same with its name among them."""
    with asked.link.agreement.refusals():
        schedule = check(asked.options, asked.cut is not None)
    return _MODULES[schedule], asked._replace(options={**asked.options, "schedule": schedule})


def forward(asked: Asked) -> tuple[Any, Any]:
    """O and LSE of this process's queries over everybody's keys."""
    module, asked = _module(asked)
    o, lse = module.forward(asked)
    return o, lse


def backward(asked: Asked, wanted: tuple[bool, bool] = (True, True)) -> Gradients[Any]:
    """Gradients of this process's q, k and v; wanted: whether anybody asks for those of k, and of v."""
    module, asked = _module(asked)
    grads: Gradients[Any] = module.backward(asked, wanted)
    return grads

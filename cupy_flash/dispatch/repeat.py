"""Short calls on NumPy arrays that repeat an earlier one, compared and run by compiled code.

Python takes most of the time of a short call: 20 us, of which `kernels_cpu/repeat.cpp` saves 18.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..call.arrays import ArrayView, numpy_dtype
from ..call.given import Options
from ..call.progress import CALLBACK
from .backends import VARIABLES, raw_variable
from .memo import REPEATED, Prepared

if TYPE_CHECKING:
    from ..cpu.core.repeat import Condition

__all__ = [
    "BOUNDS", "CONSTANTS", "conditions", "constants_beside", "put", "remember", "remember_recent", "repeated",
]  # fmt: skip

# Types of options that are immutable and compare by value.
CONSTANTS = frozenset((bool, int, float, str))
BOUNDS = CONSTANTS | {type(None)}  # of a window; a tensor of one element can change
_MOST_KNOWN = 1024
_MOST_RECENT = 8  # under a key: with the same options, or of a function and repeated in the core


def repeated(function: str, *given: Any) -> Any:
    """The result of a call with these q, k, v and options that repeats an earlier one; else None.

    function: the name under which `REPEATED` has its recent calls.
    """
    for repeat in REPEATED.get(function, ()):
        o = repeat(*given)
        if o is not None:
            return o
    return None


def remember(
    function: str, call: Prepared, raw: Mapping[str, ArrayView], options: Options, given: tuple[Hashable, ...]
) -> None:
    """Store a call that `may_repeat_in_core`, on NumPy arrays, for repetitions, if nothing else can change.

    given: the arguments of `repeated` after q, k and v, of which one may be a mask or bias; `options` are
    their values.
    """
    more = [name for name in raw if name not in ("q", "k", "v")]
    array = raw[more[0]].owner if more else None
    constants = constants_beside(array, given)
    if constants is None or len(more) > 1:
        return
    if any(type(x.owner) is not np.ndarray or x.pointer % 16 for x in raw.values()):
        return
    from ..cpu.core.repeat import Added, Condition, Way, keys_of  # why here: see `prepare_backend`
    from ..cpu.threads import limits

    counts = limits()
    if counts is None:
        return
    held = (*conditions(), *map(Condition.now, counts))
    key = function, call, constants, tuple(x.result for x in held)
    again = REPEATED.get(key)
    if again is None:
        q, k, v = (raw[name] for name in "qkv")
        added = Added.of(more[0], array, given) if more else None
        (_, shape, dtype), *_ = call.results
        way = Way(
            None, options.layout, (q.shape, k.shape, v.shape), q.strides, *keys_of(options), added,
            np.ndarray, q.owner.dtype, constants, None, held, np.empty, (shape, numpy_dtype(dtype)), None,
        )  # fmt: skip
        again = call.repeating("numpy", way)
        if again is None:
            return
        put(key, again)
    remember_recent(function, again)


def constants_beside(array: Any, given: tuple[Any, ...]) -> tuple[Hashable, ...] | None:
    """The options, and their names, with None for this array; None if any other value can change."""
    found = tuple([None if x is array else x for x in given])
    for x in found:
        if type(x) not in BOUNDS and not (type(x) is tuple and BOUNDS.issuperset(map(type, x))):
            return None
    return found


def conditions() -> list[Condition]:
    """That there is no `progress`, and that the environment chooses the same driver and CPU path."""
    from ..cpu.core.repeat import Condition

    return [Condition.now(CALLBACK.get), *[Condition.now(raw_variable, name) for name in VARIABLES]]


def remember_recent(key: Hashable, recent: Any) -> None:
    """Put a call, if there is one, in front of the recent ones under a key, and drop the oldest of many."""
    if recent is not None:
        others = [x for x in REPEATED.get(key, ()) if x is not recent]
        put(key, (recent, *others[: _MOST_RECENT - 1]))


def put(key: Hashable, found: Any, memory: dict[Hashable, Any] = REPEATED) -> None:
    """Store an entry; clear the cache first if it is full."""
    if len(memory) >= _MOST_KNOWN:
        memory.clear()
    memory[key] = found

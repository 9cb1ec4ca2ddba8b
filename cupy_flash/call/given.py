"""Split the options of a call into arrays by name and one tuple of values.

`options` declares the options and their defaults.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from .compound import functions_of, mask_parts, tuning_of
from .options import DenseOptions, declared

__all__ = ["CacheCall", "Options", "Packing", "split", "split_of_cache"]

_VALUES = {
    "tile" if name == "tuning" else name: option.default
    for name, option in declared(DenseOptions).items()
    if not option.array
}

if TYPE_CHECKING:

    class Options(tuple[Any, ...]):
        """The same for type checkers, with fields of any type, as a caller may pass anything."""

        _fields: tuple[str, ...]

        def __new__(cls, *values: Any, **named: Any) -> Options:
            """Make it from the given options and defaults."""

        def __getattr__(self, name: str) -> Any:
            """The value of an option."""

        def _replace(self, **named: Any) -> Options:
            """A copy with these options replaced."""

else:
    Options = namedtuple("Options", _VALUES, defaults=_VALUES.values())
    Options.__doc__ = "The options of `attention` that are values, not arrays, as the caller spelled them."


_DEFAULTS = Options()


def split(given: Mapping[str, Any]) -> tuple[dict[str, Any], Options]:
    """Split options of `DenseOptions` into the arrays that are not None and the values.

    Arrays of a compound option are named after its parts; bound arrays of functions are ``bound[0]`` and so
    on. The value ``score`` is one program for the score function and all mask functions.
    """
    if not given:  # the common case
        return {}, _DEFAULTS
    arrays: dict[str, Any] = {}
    values = {}
    mask = None
    for name, x in given.items():
        if name in _VALUES:
            values[name] = x
        elif name == "tuning":
            values["tile"] = tuning_of(x, ("tile",)).tile
        elif x is not None:
            if name == "mask" and not hasattr(x, "dtype"):  # why: most masks are one array
                mask = x
                arrays |= mask_parts(x)
            else:
                arrays[name] = x
    if mask is not None or "score" in values:
        values["score"], arguments = functions_of(mask, values.get("score"))
        arrays |= {f"bound[{number}]": x for number, x in enumerate(arguments)}
    return arrays, Options(**values)


class CacheCall(NamedTuple):
    """The values of a call over a KV cache that are not in `Options`."""

    interleaved: bool = False  # whether rotation pairs features 2i and 2i + 1
    unrotated: bool = False  # whether the cache holds unrotated keys, which are rotated on read
    rotates_last: bool = False  # whether the last features are rotated instead of the first
    splits: int | None = None  # number of splits of the keys (split-K)
    longest: int | None = None  # max_seqlen_q: queries of the longest packed sequence
    most_keys: int | None = None  # max_seqlen_k: upper bound of the capacity of a sequence
    # Whether table entries are single keys: the cache is viewed by `pages_of_one_key`.
    single_keys: bool = False


# Names of options -> fields.
_OF_CACHE = {
    "rotary_interleaved": "interleaved", "rotate_cache": "unrotated", "rotary_last": "rotates_last",
    "splits": "splits", "max_seqlen_q": "longest", "max_seqlen_k": "most_keys", "single_keys": "single_keys",
}  # fmt: skip


def split_of_cache(given: Mapping[str, Any]) -> tuple[dict[str, Any], Options, CacheCall]:
    """`split` for options over a cache, already taken apart by `cache_parts`; also returns a `CacheCall`."""
    arrays, values, own = {}, {}, {}
    for name, x in given.items():
        if name in _VALUES:
            values[name] = x
        elif name in _OF_CACHE:
            own[_OF_CACHE[name]] = x
        elif x is not None:
            arrays[name] = x
    return arrays, Options(**values), CacheCall(**own)


class Packing(NamedTuple):
    """Sizes of packed sequences."""

    batch: int  # number of sequences
    # Longest lengths; over a cache seqlen_k is 0.
    seqlen_q: int
    seqlen_k: int
    alike: bool  # whether queries and keys have the same offsets, and neither has rows not in use

"""What a call makes of the options that it was given: arrays by name, and values in one tuple.

Which options there are, and what they are by default, is declared in `options`.
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
        """The same to a checker of types: what a caller spelled may be anything."""

        _fields: tuple[str, ...]

        def __new__(cls, *values: Any, **named: Any) -> Options:
            """The options given, and the defaults of the others."""

        def __getattr__(self, name: str) -> Any:
            """An option."""

        def _replace(self, **named: Any) -> Options:
            """The same, but for these."""

else:
    Options = namedtuple("Options", _VALUES, defaults=_VALUES.values())
    Options.__doc__ = "The options of `attention` that are values, not arrays, as the caller spelled them."


_DEFAULTS = Options()


def split(given: Mapping[str, Any]) -> tuple[dict[str, Any], Options]:
    """Options as a caller gave them: the arrays among them that are not None, and the values.

    Arrays of a compound option go by the names of its parts; those of functions are ``bound[0]`` and so
    on, and the value ``score`` is one program for the score function and all mask functions.

    Parameters
    ----------
    given : mapping of str to object
        Of `DenseOptions`.
    """
    if not given:  # as most calls are
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
            if name == "mask" and not hasattr(x, "dtype"):  # most masks are one array
                mask = x
                arrays |= mask_parts(x)
            else:
                arrays[name] = x
    if mask is not None or "score" in values:
        values["score"], arguments = functions_of(mask, values.get("score"))
        arrays |= {f"bound[{number}]": x for number, x in enumerate(arguments)}
    return arrays, Options(**values)


class CacheCall(NamedTuple):
    """What a call over a KV cache was given besides arrays and `Options`.

    Attributes
    ----------
    interleaved : bool
        Which features a rotation pairs.
    unrotated : bool
        Keys of the cache are rotated when they are read.
    rotates_last : bool
        A rotation turns the last features, not the first.
    splits : int, optional
    longest : int, optional
        Queries of the longest packed sequence, as the caller claims it.
    most_keys : int, optional
        Room of a sequence, if that is to be less than the cache has.
    single_keys : bool
        Entries of the table are keys: the cache is seen as pages of one, as `pages_of_one_key` has it.
    """

    interleaved: bool = False
    unrotated: bool = False
    rotates_last: bool = False
    splits: int | None = None
    longest: int | None = None
    most_keys: int | None = None
    single_keys: bool = False


# Its fields by the names of the options.
_OF_CACHE = {
    "rotary_interleaved": "interleaved", "rotate_cache": "unrotated", "rotary_last": "rotates_last",
    "splits": "splits", "max_seqlen_q": "longest", "max_seqlen_k": "most_keys", "single_keys": "single_keys",
}  # fmt: skip


def split_of_cache(given: Mapping[str, Any]) -> tuple[dict[str, Any], Options, CacheCall]:
    """`split` of options that `cache_parts` has taken apart already, and what is of a cache alone."""
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
    """How sequences lie one after the other on the rows of q and of k.

    Attributes
    ----------
    batch : int
        Sequences.
    seqlen_q, seqlen_k : int
        The longest.
    alike : bool
        Whether queries and keys are cut by the same array.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    alike: bool

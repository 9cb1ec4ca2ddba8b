"""Compound options, made of several arrays or numbers, and how a call splits them into arrays by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..errors import InvalidArgumentsError, UnsupportedError
from ..program.function import Bound, Program, with_mask
from .blocks import BlockMask, foreign_blocks
from .public_names import type_phrase

__all__ = [
    "MASK_PARTS",
    "LatentCache",
    "QuantizedArray",
    "QuantizedCache",
    "RaggedMask",
    "Rotary",
    "Spans",
    "Tuning",
    "functions_of",
    "mask_parts",
    "masks_of",
    "tuning_of",
    "unquantized",
]

# Names, below the public calls, of the arrays that a mask may consist of.
MASK_PARTS = ("mask", "ragged_mask", "spans", "blocks", "block_bits")


class Spans(NamedTuple):
    """A mask as intervals of queries or of keys, in memory linear in the length: see `cupy_flash.spans`.

    Attributes
    ----------
    bounds : array of int32
        (batch or 1, heads_q or 1, 1, seqlen_k, 2 or 4): start and stop of the queries that see each key; or
        (batch or 1, heads_q or 1, seqlen_q, 1, 2 or 4): of the keys that each query sees. The first two axes
        may be left out. Any library: ``Spans(torch.from_numpy(made.bounds))``. In JAX it is a pytree of one
        array.
    """

    bounds: Any


class RaggedMask(NamedTuple):
    """The masks of packed sequences, flattened and end to end, on a CPU.

    Attributes
    ----------
    bits : array of bool, shape (sum of queries * keys,)
        For each sequence the (queries, keys) mask of rows in use, flattened.
    """

    bits: Any


class Rotary(NamedTuple):
    """Rotary position embedding of `attention_with_kv_cache`.

    Attributes
    ----------
    cos, sin : array, shape (positions, rotated / 2)
        float32 or the dtype of q, a row for each key of a sequence's capacity. The first ``rotated``
        features of q and k are rotated by position, or the last.
    seqlens : array of int32, shape (batch,), optional
        Position of the first query and the first new key in the rotation. Default: keys by their position in
        the cache, and the last query by that of the last key.
    interleaved : bool
        Pair features 2i and 2i + 1 (GPT-J) instead of i and i + rotated / 2 (GPT-NeoX, Llama).
    on_read : bool
        The cache holds keys without rotation: each call rotates them by their position as it reads them, and
        new keys are stored unchanged.
    last : bool
        Rotate the last ``rotated`` features, not the first: those after the values of a `LatentCache`.
    """

    cos: Any
    sin: Any
    seqlens: Any = None
    interleaved: bool = False
    on_read: bool = False
    last: bool = False


class Tuning(NamedTuple):
    """Settings that change time and memory of a call, never its result; None leaves them to the planner.

    Attributes
    ----------
    tile : (int, int), optional
        Queries and keys per block.
    splits : int, optional
        Over a KV cache: number of parts into which the keys of each sequence are split (split-K).
    workspace : array, optional
        Over a KV cache on a GPU: memory for partial results and gathered keys, contiguous, of any dtype, so
        that nothing is allocated. If it is too small, the error names the bytes needed. Two streams must not
        use it at the same time.
    check : bool, optional
        Over a KV cache: check lengths and tables before anything runs. Default: only in main memory, where it
        is free; on a GPU it waits for the stream.
    """

    tile: tuple[int, int] | None = None
    splits: int | None = None
    workspace: Any = None
    check: bool | None = None


class QuantizedArray(NamedTuple):
    """Float8 q, k or v of `attention`, with a dequantisation scale per key head.

    Attributes
    ----------
    codes : array of float8_e4m3fn
        Or uint8 with the same bits, if q, k and v all have a scale.
    scale : array of float32, shape (heads_k,) or (batch, heads_k)
        One per key head (for q: of the key head that a query head shares). Those of q and k are above 0.
    """

    codes: Any
    scale: Any


class QuantizedCache(NamedTuple):
    """Keys or values of a KV cache in 8 or 4 bits; `cupy_flash.quantized` makes them.

    Attributes
    ----------
    codes : array
        int8 or float8_e4m3fn (or uint8 with its bits), (batch, heads_k, capacity, head_dim) or pages of
        it; of 4-bit formats uint8, two codes to a byte, (..., head_dim / 2).
    scale : array
        int8 (needed), float8 and NVFP4: float32 (heads_k,) or (batch, heads_k), the dequantisation scale per
        KV head; a key is its stored value times the scale, new keys are divided by it, rounded and clamped to
        the largest stored value. int4: float16 or float32 (..., groups), as zero; on GPUs float16.
    zero : array, optional
        Makes it int4: a feature is ``scale * code + zero`` of its group of 32, 64 or 128, (..., groups).
    block_scale : array of float8_e4m3fn or uint8, optional
        Makes it NVFP4: a feature is ``scale * block_scale * code`` of its group of 16, (..., head_dim / 16).

    Notes
    -----
    Appending writes codes, and with them scale and zero of int4, block_scale of NVFP4, in place.
    """

    codes: Any
    scale: Any = None
    zero: Any = None
    block_scale: Any = None


class LatentCache(NamedTuple):
    """A KV cache of latents (MLA: DeepSeek, Kimi, GLM): a row is the key, its first columns are the value.

    Attributes
    ----------
    latents : array or QuantizedCache
        (batch, heads_k, capacity, head_dim) or pages of it, like any cache; DeepSeek-V3 has one head of 576.
        8-bit latents are a `QuantizedCache` of int8 or float8_e4m3fn, with one scale for keys and values.
    head_dim_v : int
        Number of columns of the value, such as 512.

    Notes
    -----
    Pass it as k_cache, without v_cache and v: a new latent is a key that contains its value.
    """

    latents: Any
    head_dim_v: int


# ------------------------------------------------------------------------------------------------ masks


def masks_of(given: Any) -> Iterator[Any]:
    """The members of a mask: itself, or the members of a tuple, nested or not."""
    if type(given) is tuple:  # why type: a named tuple is one mask
        for member in given:
            yield from masks_of(member)
    elif given is not None:
        yield given


def _kind(mask: Any) -> str:
    if isinstance(mask, Spans):
        return "spans"
    if isinstance(mask, RaggedMask):
        return "ragged_mask"
    return "blocks" if type(mask).__name__ == "BlockMask" else "mask"


def _and(one: Any, other: Any) -> Any:
    """The elementwise AND of two boolean arrays."""
    for mask in (one, other):
        if not str(getattr(mask, "dtype", "")).endswith("bool"):
            of = f"an array of {mask.dtype}" if hasattr(mask, "dtype") else type_phrase(mask)
            raise InvalidArgumentsError(
                f"mask is a tuple with two arrays, of which one is {of}.",
                hint="arrays of bool, True where a query may attend",
            )
    try:
        return one & other
    except Exception as error:  # why any: each library has its own
        raise InvalidArgumentsError(
            f"mask is a tuple with arrays that do not combine: {error}",
            hint="arrays of one library, on one device, whose shapes broadcast",
        ) from error


def mask_parts(given: Any) -> dict[str, Any]:
    """The arrays of a mask, by the names of MASK_PARTS; mask functions are left out."""
    parts: dict[str, Any] = {}
    for mask in masks_of(given):
        if isinstance(mask, (Program, Bound)):
            continue
        kind = _kind(mask)
        if kind in parts and kind != "mask":
            name = type(mask).__name__
            raise UnsupportedError(
                f"mask is a tuple with two of {name}, which do not combine.",
                hint="one of the two as a boolean array or a mask function",
            )
        if kind == "blocks":
            if type(mask) is not BlockMask:
                raise foreign_blocks(mask)
            parts["blocks"], parts["block_bits"] = mask
        elif kind == "mask":
            parts["mask"] = _and(parts["mask"], mask) if "mask" in parts else mask
        else:
            parts[kind] = mask[0]
    return parts


def functions_of(mask: Any, score: Any) -> tuple[Program | None, tuple[Any, ...]]:
    """One program for the score function and all mask functions of a call, and its arguments."""
    program, arguments = None, ()
    if score is not None:
        program, arguments = _bound(score)
        if program.masks:
            raise InvalidArgumentsError(
                "score is a mask function.", hint="mask= for it; score= changes scores"
            )
    for given in masks_of(mask):
        if isinstance(given, (Program, Bound)):
            one, more = _bound(given)
            if not one.masks:
                raise InvalidArgumentsError(
                    f"mask is {one!r}.", hint="score= for it; mask= takes cupy_flash.mask(f)"
                )
            program = one if program is None else with_mask(program, len(arguments), one)
            arguments = (*arguments, *more)
    return program, arguments


def _bound(given: Any) -> tuple[Program, tuple[Any, ...]]:
    """The program and bound arrays of a score or mask function."""
    if isinstance(given, Bound):
        return given.program, given.arguments
    if isinstance(given, Program):
        return given, ()
    raise InvalidArgumentsError(
        f"score is {type_phrase(given)}.",
        hint="score=cupy_flash.score(f), made once, where f is your function",
    )


# ---------------------------------------------------------------------------------------- tuning, float8


def tuning_of(given: Any, taken: tuple[str, ...]) -> Tuning:
    """The caller's tuning; refuse other types, and fields that the call does not take (not in `taken`)."""
    if given is None:
        return Tuning()
    if not isinstance(given, Tuning):
        raise InvalidArgumentsError(
            f"tuning is {type_phrase(given)}.", hint="tuning=cupy_flash.Tuning(tile=(64, 64))"
        )
    for name, x in zip(Tuning._fields, given, strict=True):
        if x is not None and name not in taken:
            where = "attention over a KV cache" if name != "tile" else "attention over whole sequences"
            raise InvalidArgumentsError(
                f"tuning has {name}, which is for {where}.", hint=f"tuning._replace({name}=None)"
            )
    return given


def unquantized(**named: Any) -> dict[str, Any]:
    """Arrays by name, each `QuantizedArray` split into its codes, NAME, and its scale, NAME.scale."""
    apart: dict[str, Any] = {}
    for name, x in named.items():
        if type(x) is QuantizedArray:
            apart[name], apart[f"{name}.scale"] = x
        else:
            apart[name] = x
            if type(x) is QuantizedCache:
                hint = f"cupy_flash.QuantizedArray({name}.codes, {name}.scale), of float8_e4m3fn"
                raise InvalidArgumentsError(f"{name} is a QuantizedCache.", hint=hint)
    return apart

"""Test batch invariance on this machine: the bits of a row do not depend on what else is computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..api import attention, attention_backward
from ..errors import InvalidArgumentsError, UnsupportedError
from ..kv_cache import attention_with_kv_cache
from ..varlen import attention_varlen, attention_varlen_backward
from .budget import to_numpy

__all__ = ["SameBits", "same_bits"]

Host = np.ndarray[Any, Any]
# One comparison: a name and two arrays of the same shape.
Compared = tuple[str, Host, Host]


class SameBits(NamedTuple):
    """The result of `same_bits`; prints as text.

    Attributes
    ----------
    compared : int
        Number of compared results.
    differences : tuple of str
        Results that differ, each with the first different element.
    refused : tuple of str
        Comparisons that the library does not support, with its reason.
    """

    compared: int
    differences: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether at least one result was compared, and none differs."""
        return self.compared > 0 and not self.differences

    def __str__(self) -> str:
        lines = [f"{self.compared} results compared, {len(self.differences)} differ"]
        lines += [f"differs: {line}" for line in self.differences]
        lines += [f"refused: {line}" for line in self.refused]
        return "\n".join(lines)


class _Sequence(NamedTuple):
    """Inputs of one sequence, each (heads, seq, head_dim)."""

    q: Host
    k: Host
    v: Host
    do: Host

    @property
    def length(self) -> int:
        """Number of queries, which is that of keys."""
        return int(self.q.shape[1])


class _Case(NamedTuple):
    """Data of all comparisons: sequences, conversions to the device, options, and results computed alone."""

    sequences: list[_Sequence]
    integers: Callable[[Host], Any]  # copies an int32 array to the device
    array: Callable[[Host], Any]  # copies a float32 array to the device, in the dtype under test
    options: dict[str, Any]
    alone: list[tuple[Host, Host]]  # o (heads, seq, head_dim) and lse (heads, seq) per sequence

    def packed(self, name: str) -> Any:
        """The arrays of all sequences, end to end: (rows, heads, head_dim)."""
        return self.array(np.concatenate([getattr(s, name).swapaxes(0, 1) for s in self.sequences]))

    def cuts(self) -> Host:
        """cu_seqlens of the packed sequences."""
        return np.cumsum([0, *(s.length for s in self.sequences)], dtype=np.int32)

    def longest(self) -> int:
        """Index of the longest sequence."""
        return max(range(len(self.sequences)), key=lambda n: self.sequences[n].length)


def same_bits(
    array: Callable[[Host], Any] = np.asarray,
    *,
    cast: Callable[[Any], Any] | None = None,
    lengths: Sequence[int] = (1, 9, 10, 64, 65, 145, 300),
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    chunks: Sequence[int] = (1, 9, 10, 64),
    pages: Sequence[int] = (16, 64),
    seed: int = 0,
    reproducible: str | None = "batch",
    **options: Any,
) -> SameBits:
    """Compare causal attention of random sequences, computed in several ways, bit for bit.

    Each sequence alone is compared with: all sequences packed (o, lse and gradients), batches of two, its
    prompt in chunks, and its last token in decode, over a cache with and without pages, in a batch with
    sequences of other lengths.

    Parameters
    ----------
    array : callable
        Converts a NumPy array of float32 or int32 to the library and device under test, such as
        ``cupy.asarray`` or ``lambda x: torch.from_numpy(x).cuda()``.
    cast : callable, optional
        Converts such an array of float32 to the dtype under test, such as ``torch.Tensor.bfloat16``.
    lengths : sequence of int
        Lengths of the sequences.
    heads : (int, int)
        Heads of q, and heads of k and v.
    head_dim : int
    chunks : sequence of int
        Queries per chunk of the longest sequence; its first, last and one random chunk are computed.
    pages : sequence of int
        Keys per page, powers of two of at least 16.
    seed : int
        Seed of all random numbers.
    reproducible : {"batch", "prefill", "device"} or None
        "prefill" also compares decode, which differs on Hopper; None shows what differs without the option.
    **options
        Other options that `cupy_flash.attention`, `cupy_flash.attention_varlen` and
        `cupy_flash.attention_with_kv_cache` share.

    Returns
    -------
    SameBits

    Raises
    ------
    InvalidArgumentsError
        As `cupy_flash.attention`.

    Examples
    --------
    >>> from cupy_flash.testing import same_bits
    >>> print(same_bits(lengths=(5, 20), pages=(16,)))  # doctest: +SKIP
    17 results compared, 0 differ
    """
    if not lengths or min(lengths) < 1:
        raise InvalidArgumentsError(f"lengths is {lengths!r}.", hint="lengths=(1, 10, 300)")
    if not options.setdefault("causal", True):
        raise InvalidArgumentsError(f"causal is {options['causal']!r}.", hint="causal=True: chunks need it")
    rng = np.random.default_rng(seed)
    sequences = []
    for length in lengths:
        q, do = rng.standard_normal((2, heads[0], length, head_dim), np.float32)
        k, v = rng.standard_normal((2, heads[1], length, head_dim), np.float32)
        sequences.append(_Sequence(q, k, v, do))
    options["reproducible"] = reproducible
    case = _Case(sequences, array, array if cast is None else lambda x: cast(array(x)), options, [])
    for s in sequences:
        o, lse = attention(*(case.array(x[None]) for x in (s.q, s.k, s.v)), return_lse=True, **options)
        case.alone.append((to_numpy(o)[0], to_numpy(lse)[0]))

    compared, differences, refused = 0, [], []
    comparisons = [("packed", _packed(case)), ("in a batch", _in_batches(case)),
                   ("chunks", _in_chunks(case, chunks, rng))]  # fmt: skip
    comparisons += [("decode", _by_decode(case, page, rng)) for page in (0, *pages)]
    comparisons += [("gradients", _gradients(case))]
    for what, found in comparisons:
        try:
            for name, actual, expected in found:
                compared += 1
                if (line := _difference(actual, expected)) is not None:
                    differences.append(f"{name}: {line}")
        except UnsupportedError as error:
            refused.append(f"{what}: {str(error).splitlines()[0]}")
    return SameBits(compared, tuple(differences), tuple(refused))


def _difference(actual: Host, expected: Host) -> str | None:
    """Describe the first element with different bits; None if all are equal."""
    assert actual.shape == expected.shape
    kind = f"u{actual.itemsize}"
    bits = [np.ascontiguousarray(x).view(kind) for x in (actual, expected)]
    places = np.argwhere(bits[0] != bits[1])
    if not len(places):
        return None
    at = tuple(places[0].tolist())
    return f"{len(places)} of {actual.size} differ, at {at} {actual[at]} instead of {expected[at]}"


def _packed(case: _Case) -> Iterator[Compared]:
    """All sequences packed, against each alone."""
    cuts = case.cuts()
    on_device = case.integers(cuts)
    q, k, v = map(case.packed, "qkv")
    made = attention_varlen(q, k, v, on_device, on_device, return_lse=True, **case.options)
    o, lse = map(to_numpy, made)
    for n, (alone_o, alone_lse) in enumerate(case.alone):
        rows = slice(cuts[n], cuts[n + 1])
        yield f"packed, o of sequence {n}", o[rows].swapaxes(0, 1), alone_o
        yield f"packed, lse of sequence {n}", lse[:, rows], alone_lse


def _in_batches(case: _Case) -> Iterator[Compared]:
    """The longest sequence, first and second in a batch with another sequence, against itself alone."""
    n = case.longest()
    s = case.sequences[n]
    other = _Sequence(*(-x[:, ::-1] for x in s))
    for place, pair in enumerate(((s, other), (other, s))):
        q, k, v = (case.array(np.stack([getattr(x, name) for x in pair])) for name in "qkv")
        o = to_numpy(attention(q, k, v, **case.options))
        yield f"number {place} of a batch of 2, o of sequence {n}", o[place], case.alone[n][0]


def _in_chunks(case: _Case, chunks: Sequence[int], rng: np.random.Generator) -> Iterator[Compared]:
    """Chunks of the prompt of the longest sequence, against the whole prompt."""
    n = case.longest()
    s, (o, lse) = case.sequences[n], case.alone[n]
    for chunk in chunks:
        starts = range(0, s.length, chunk)
        for first in sorted({0, int(rng.choice(starts)), starts[-1]}):
            end = min(first + chunk, s.length)
            q, k, v = s.q[None, :, first:end], s.k[None, :, :end], s.v[None, :, :end]
            made = attention(*map(case.array, (q, k, v)), align=first, return_lse=True, **case.options)
            for name, actual, expected in zip(("o", "lse"), map(to_numpy, made), (o, lse), strict=True):
                where = f"chunk of {chunk} from {first}, {name} of sequence {n}"
                yield where, actual[0], expected[:, first:end]


def _by_decode(case: _Case, page: int, rng: np.random.Generator) -> Iterator[Compared]:
    """The last token of each sequence over one cache, in shuffled pages, or without pages if page is 0."""
    lengths = np.array([s.length for s in case.sequences], np.int32)
    step = math.lcm(page or 1, 16)
    room = -(-int(lengths.max()) // step) * step
    caches = [np.zeros((len(lengths), getattr(case.sequences[0], x).shape[0], room,
                        case.sequences[0].k.shape[2]), np.float32) for x in "kv"]  # fmt: skip
    for n, s in enumerate(case.sequences):
        for cache, x in zip(caches, (s.k, s.v), strict=True):
            cache[n, :, : s.length] = x
    more: dict[str, Any] = {}
    if page:
        each = room // page
        table = rng.permutation(len(lengths) * each).astype(np.int32).reshape(len(lengths), each)
        caches = [_in_pages(cache, table, page) for cache in caches]
        more["block_table"] = case.integers(table)
    q = case.array(np.stack([s.q[:, -1:] for s in case.sequences]))
    k, v = map(case.array, caches)
    used = case.integers(lengths)
    made = attention_with_kv_cache(q, k, v, cache_seqlens=used, return_lse=True, **more, **case.options)
    o, lse = map(to_numpy, made)
    where = f"decode over pages of {page}" if page else "decode"
    for n, (alone_o, alone_lse) in enumerate(case.alone):
        yield f"{where}, o of sequence {n}", o[n], alone_o[:, -1:]
        yield f"{where}, lse of sequence {n}", lse[n], alone_lse[:, -1:]


def _gradients(case: _Case) -> Iterator[Compared]:
    """Gradients of all sequences packed, against those of each alone."""
    cuts = case.cuts()
    on_device = case.integers(cuts)
    q, k, v, do = (case.packed(name) for name in ("q", "k", "v", "do"))
    o, lse = attention_varlen(q, k, v, on_device, on_device, return_lse=True, **case.options)
    packed = attention_varlen_backward(do, q, k, v, o, lse, on_device, on_device, **case.options)
    for n, s in enumerate(case.sequences):
        q, k, v, do = (case.array(x[None]) for x in s)
        o, lse = attention(q, k, v, return_lse=True, **case.options)
        alone = attention_backward(do, q, k, v, o, lse, **case.options)
        for name in ("dq", "dk", "dv"):
            rows = to_numpy(getattr(packed, name))[cuts[n] : cuts[n + 1]].swapaxes(0, 1)
            yield f"packed, {name} of sequence {n}", rows, to_numpy(getattr(alone, name))[0]


def _in_pages(cache: Host, table: Host, page: int) -> Host:
    """Cut a cache (sequences, heads, capacity, head_dim) into pages, placed by a block table."""
    sequences, heads, room, width = cache.shape
    pages = cache.reshape(sequences, heads, room // page, page, width).swapaxes(1, 2)
    made = np.empty((table.size, heads, page, width), cache.dtype)
    made[table.reshape(-1)] = pages.reshape(table.size, heads, page, width)
    return made

"""A checked call as an immutable value: `Problem`, with a `Cache` for calls over a KV cache."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from ..program.graph import Body
from .arrays import accumulator_of
from .blocks import Blocks
from .masks import Band
from .spans import Intervals

__all__ = ["Cache", "Codes", "Problem"]


class Codes(NamedTuple):
    """The 4-bit format of a cache."""

    kind: str  # "int4" or "nvfp4"
    scale_dtype: str  # dtype of scales and zeros; for "nvfp4" "uint8", the bits of its block scales
    groups: tuple[int, int]  # features per scale and zero, for keys and for values
    same_strides: bool  # whether scales and zeros have the same strides, with the groups of a key contiguous


class Cache(NamedTuple):
    """The layout and format of a KV cache, and what a call appends and rotates."""

    # Dtype of the stored keys and values: that of q, "int8", "float8_e4m3fn", or "int4" or "nvfp4", two
    # codes to a byte.
    dtype: str
    page: int = 0  # keys per page; 0 if each sequence has one contiguous slot
    appended: int = 0  # new keys per sequence, or of all sequences together if they are packed
    rotary: int = 0  # number of rotated features; 0 without rotation
    interleaved: bool = False  # whether rotation pairs features 2i and 2i + 1 instead of i and i + rotary / 2
    # Number of splits of the keys (split-K) asked for; None leaves it to the planner.
    splits: int | None = None
    indexed: bool = False  # whether the call gives the slot of each sequence
    packed: bool = False  # whether new keys are packed: all sequences end to end, with offsets
    leftpad: bool = False  # whether the call gives the left padding of each sequence
    # Whether the call gives the position at which the rotation of each sequence starts.
    rotary_seqlens: bool = False
    unrotated: bool = False  # whether keys are stored unrotated and rotated on read
    codes: Codes | None = None  # the format of "int4" and "nvfp4"; None for other dtypes
    latent: bool = False  # whether values are the first columns of the keys, in the same memory (MLA)
    first_rotated: int = 0  # index of the first rotated feature

    def summary(self) -> str:
        """A short description for messages."""
        words = [
            f"cache of {'latents of ' * self.latent}{self.dtype}",
            f"pages of {self.page} keys" if self.page else "contiguous",
        ]
        words += ["slots by block_table"] * self.indexed
        words += [f"{self.appended} new key{'s' * (self.appended != 1)}{', packed' * self.packed}"] * bool(
            self.appended
        )
        words += ["cache_leftpad"] * self.leftpad
        where = " (last)" * bool(self.first_rotated)
        where += " from rotary.seqlens" * self.rotary_seqlens + " on read" * self.unrotated
        words += [f"rotary={self.rotary}{where}"] * bool(self.rotary)
        words += [f"tuning.splits={self.splits}"] * bool(self.splits)
        return ", ".join(words)


class Problem(NamedTuple):
    """A checked call: everything that can change the plan, without the data."""

    # {"forward", "backward", "decode", "jvp", "hvp", "statistics"}: "decode" is the forward pass over a KV
    # cache; "jvp" and "hvp" are the directional derivatives of the forward and of the backward pass.
    direction: str
    dtype: str  # dtype of q, k, v and o
    # {"ieee", "tf32x3", "tf32"} or None: for float32; None leaves the choice to the planner.
    precision: str | None
    batch: int
    heads_q: int
    heads_k: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    scale: float
    softcap: float | None = None
    # The band, see `masks.Band`.
    offset: int = 0
    left: int | None = None
    right: int | None = None
    # Whether align is "bottom_right" by the lengths of each sequence: packed sequences and caches.
    offset_from_end: bool = False
    # Shapes over (batch, heads, queries, keys), 1 where broadcast; None if not given.
    mask: tuple[int, ...] | None = None
    spans: Intervals | None = None
    blocks: Blocks | None = None
    # The traced score function and mask functions, applied between softcap and bias.
    function: Body | None = None
    # Elements of all learned arguments of the function, for the backward pass; else 0.
    learned_elements: int = 0
    # Shapes over (batch, heads, queries, keys), 1 where broadcast; None if not given.
    bias: tuple[int, ...] | None = None
    bias_dtype: str | None = None
    per_head: tuple[str, ...] = ()  # names of the given options that have one number per head
    dropout: float = 0.0
    seed: int = 0
    want_lse: bool = True
    want_dbias: bool = False
    deterministic: bool = False
    packed: bool = False
    tile: tuple[int, int] | None = None  # queries and keys of a tile, if the call asks for one
    # Rows of q, and of k, in all packed sequences together; 0 if not packed.
    rows_q: int = 0
    rows_k: int = 0
    # Number of the packed sequence that this problem was taken from; dropout counts it as the batch.
    sequence: int = 0
    # Whether the last axis of every tensor is contiguous and consecutive rows are less than 2 GiB apart.
    in_rows: bool = True
    aligned: bool = True  # whether, in addition, all rows start on 16-byte boundaries
    boxes: bool = True  # whether a TMA tensor map can hold the strides of every tensor
    # For "decode" and "statistics" over a cache; seqlen_k is then the capacity of a sequence.
    cache: Cache | None = None
    of_float8: str | None = None  # dtype of o if q, k and v are float8_e4m3fn; else None
    # {"batch", "prefill", "device"} or None: the guarantee about bits beyond "run". Gradients are then
    # deterministic too.
    reproducible: str | None = None
    # Whether the call gives the number of queries in use per packed sequence (seqused_q).
    used_q: bool = False
    # Whether the mask is a `RaggedMask`: the (queries, keys) masks of all sequences end to end.
    ragged_mask: bool = False
    unrounded: bool = False  # whether o, dq, dk and dv keep the accumulator dtype
    wanted: tuple[str, ...] = ()  # for "statistics", the names of its results

    @property
    def result_dtype(self) -> str:
        """The dtype of o."""
        return self.accumulator if self.unrounded else self.of_float8 or self.dtype

    @property
    def band(self) -> Band:
        """The band of positions that queries attend to."""
        return Band(self.offset, self.left, self.right)

    @property
    def accumulator(self) -> str:
        """The dtype of accumulation, LSE, sinks and ALiBi slopes."""
        return accumulator_of(self.dtype)

    @property
    def alibi(self) -> bool:
        """Whether ALiBi slopes are given."""
        return "alibi_slopes" in self.per_head

    @property
    def sinks(self) -> bool:
        """Whether attention sinks are given."""
        return "sinks" in self.per_head

    @property
    def score_options(self) -> dict[str, object]:
        """Options that change scores or weights beyond scale, band and sinks, by their names in messages.

        why: a new option is a line here, and each kernel refuses it until its family lists it as read.
        """
        return {
            "mask": self.mask,
            "bias": self.bias,
            "Spans": self.spans,
            "BlockMask": self.blocks,
            "score function": self.function,
            "ALiBi": self.alibi,
            "softcap": self.softcap,
            "dropout": self.dropout,
        }

    def unread(self, read: Collection[str]) -> list[str]:
        """The given ones of `score_options` that are not in `read`."""
        return [name for name, given in self.score_options.items() if given and name not in read]

    @property
    def extents(self) -> tuple[int, int, int, int]:
        """The extents of the (batch, head, query, key) indices."""
        return self.batch, self.heads_q, self.seqlen_q, self.seqlen_k

    @property
    def second_order(self) -> bool:
        """Whether this is a directional derivative, "jvp" or "hvp"."""
        return self.direction in ("jvp", "hvp")

    @property
    def empty(self) -> bool:
        """Whether the result has no elements, so that nothing has to run."""
        return 0 in (self.batch, self.heads_q, self.seqlen_q)

    def _band(self) -> str:
        """The band, written as options."""
        causal = (self.left, self.right) == (None, 0)
        words = "causal" if causal else f"window=({self.left}, {self.right})"
        if self.cache is not None:  # over a cache the last query is always at the last key
            return words
        if self.offset_from_end:
            return words + ", align=bottom_right"
        return words + f", align={self.offset}" * bool(self.offset)

    def summary(self) -> str:
        """One-line description for messages and logs."""
        heads = f"{self.heads_q}" + (f":{self.heads_k}" if self.heads_k != self.heads_q else "")
        dims = f"{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        features = [
            name
            for name, on in (
                (self._band(), not self.band.open),
                (f"softcap={self.softcap}", self.softcap),
                (f"mask{self.mask}", self.mask),
                ("RaggedMask", self.ragged_mask),
                ("seqused_q", self.used_q),
                (self.spans.summary() if self.spans else "", self.spans),
                (self.blocks.summary() if self.blocks else "", self.blocks),
                (self.function.summary() if self.function else "", self.function),
                (f"bias{self.bias} {self.bias_dtype}", self.bias),
                *((name, True) for name in self.per_head),
                (f"dropout={self.dropout}", self.dropout),
                (f"precision={self.precision}", self.precision),
                ("last axis not contiguous", not self.in_rows),
                ("rows not 16-byte aligned", self.in_rows and not self.aligned),
                ("an axis is broadcast", not self.boxes),
                (self.cache.summary() if self.cache else "", self.cache),
                (f"result in {self.of_float8}", self.of_float8),
                (f"reproducible={self.reproducible or 'run'}", self.reproducible or self.deterministic),
            )
            if on
        ]  # fmt: skip
        return (
            f"{self.direction} {self.dtype} batch={self.batch} heads={heads} "
            f"seqlen={self.seqlen_q}x{self.seqlen_k} head_dim={dims}"
            + ("  " + ", ".join(features) if features else "")
        )

"""Types of the public functions: an array of any library, and the options that several of them take."""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypedDict, TypeVar

__all__ = [
    "AnyArray",
    "Array",
    "CacheOptions",
    "DenseOptions",
    "PackedOptions",
    "RecordedOptions",
    "RecordedPackedOptions",
    "ScoreOptions",
]


class AnyArray(Protocol):
    """What arrays of every library have, and lists and numbers do not."""

    @property
    def shape(self) -> Any:
        """Sizes of the axes."""

    @property
    def ndim(self) -> int:
        """Number of axes."""

    @property
    def dtype(self) -> Any:
        """Kind of its elements."""


# What goes in comes out: a NumPy array, a torch tensor, a JAX array ...
Array = TypeVar("Array", bound=AnyArray)


class ScoreOptions(TypedDict, total=False):
    """Options of `attention` that every way to call it takes."""

    causal: bool
    window: tuple[int | None, int | None] | None
    scale: float | None
    softcap: float | None
    alibi_slopes: Any
    sinks: Any
    precision: Literal["ieee", "tf32x3", "tf32"] | None


class _SequenceOptions(ScoreOptions, total=False):
    """Those that attention over whole sequences takes too."""

    align: Literal["top_left", "bottom_right"] | int | None
    mask: Any
    bias: Any
    dropout: float
    seed: int | None


class _EagerOptions(_SequenceOptions, total=False):
    """Those that only calls without gradients take."""

    tile: tuple[int, int] | None
    q_scale: Any
    k_scale: Any
    v_scale: Any


class DenseOptions(_EagerOptions, total=False):
    """Options of `attention` but for what decides its result's type."""

    layout: Literal["bhsd", "bshd"]


class PackedOptions(_EagerOptions, total=False):
    """The same of `attention_varlen`."""

    max_seqlen_q: int | None
    max_seqlen_k: int | None
    seqused_k: Any


class RecordedOptions(_SequenceOptions, total=False):
    """The same where gradients are recorded, by torch or JAX."""

    layout: Literal["bhsd", "bshd"]
    deterministic: bool


class RecordedPackedOptions(_SequenceOptions, total=False):
    """The same of packed sequences."""

    max_seqlen_q: int | None
    max_seqlen_k: int | None
    seqused_k: Any
    deterministic: bool


class CacheOptions(ScoreOptions, total=False):
    """The same of `attention_with_kv_cache`."""

    block_table: Any
    cache_batch_idx: Any
    k: Any
    v: Any
    rotary_cos: Any
    rotary_sin: Any
    rotary_interleaved: bool
    k_scale: Any
    v_scale: Any
    layout: Literal["bhsd", "bshd"]
    splits: int | None
    workspace: Any
    check: bool | None

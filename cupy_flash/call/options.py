"""The options of every call, each declared once.

A class of options lists what one call takes. Each field is an option: its name, its type, and an `Option`
that holds everything else. `signature.takes` derives signatures, keywords for type checkers, docstring rows
and the refusal of unknown names from these classes; adapters use them to pass options on; `given` splits the
options of a call into arrays and values. The tables at the end drive the checks and views of arrays, their
gradients, sums and sharding. An option with a gradient also has a tangent, in `_Tangents`, and a field of
`Gradients` for type checkers.
"""

# why no annotations from __future__: this module reads the types and their metadata at run time.
import functools
from typing import Annotated, Any, Literal, NamedTuple, SupportsFloat, TypeAlias, TypedDict, get_args

from ..program.function import Bound, Program
from .compound import MASK_PARTS, Rotary, Tuning

__all__ = [
    "AXES_OF",
    "DERIVATIVES",
    "DIFFERENTIABLE",
    "PARAMETERS",
    "PER_HEAD",
    "WITH_GRADIENT",
    "BandOptions",
    "CacheOptions",
    "CompiledOptions",
    "ConfigOptions",
    "DenseOptions",
    "GradientOptions",
    "NaiveOptions",
    "Option",
    "PackedGradientOptions",
    "PackedOptions",
    "RecordedOptions",
    "RecordedPackedOptions",
    "RecordedPrefixOptions",
    "RecordedRaggedOptions",
    "RingGradientOptions",
    "RingOptions",
    "SecondGradientOptions",
    "ShardOptions",
    "StatisticsOptions",
    "TangentOptions",
    "declared",
    "defaults",
    "types",
]


class Option(NamedTuple):
    """Everything declared about an option, except its name and type."""

    default: Any
    kind: str  # the type as shown in docstrings
    text: str  # the description shown in docstrings
    array: bool = False  # whether the option is an array, not a plain value
    # The axes of the array, out of batch, heads, queries and keys; empty if not declared. The batch axis
    # may be left out. An array with a keys axis broadcasts: axes may have length 1, and leading ones may be
    # missing.
    axes: tuple[str, ...] = ()
    gradient: bool = False  # whether the array has a gradient
    # Names of the arrays that a compound option is split into; empty if it is one array or a value.
    parts: tuple[str, ...] = ()


def _array(kind: str, text: str, axes: tuple[str, ...] = (), *, gradient: bool = False) -> Option:
    return Option(None, kind, text, array=True, axes=axes, gradient=gradient)


_PAIRS = ("batch", "heads", "queries", "keys")


class _Causal(TypedDict, total=False):
    causal: Annotated[bool, Option(False, "bool", "A query sees keys at or before its position only.")]


class _Band(_Causal, total=False):
    window: Annotated[
        tuple[int | None, int | None] | None,
        Option(
            None,
            "(left, right), optional",
            "A query sees ``left`` keys before and ``right`` keys after its position, inclusive; None is "
            "open.",
        ),
    ]


class _Aligned(_Band, total=False):
    align: Annotated[
        Literal["top_left", "bottom_right"] | int | None,
        Option(
            None,
            '{"top_left", "bottom_right"} or int, optional',
            "Key position of query 0: 0, seqlen_k - seqlen_q, or the given number. Required by causal, "
            "window and alibi_slopes if the lengths differ.",
        ),
    ]


class _Scores(TypedDict, total=False):
    # why SupportsFloat: NumPy scalars are not Python numbers, and tensors of one element are accepted too.
    scale: Annotated[
        SupportsFloat | None,
        Option(
            None,
            "float or array, optional",
            "Default head_dim ** -0.5. Calls of dense and packed arrays and over a cache also take an array "
            "of one number per head, (heads_q,) or, if sequences are not packed, (batch, heads_q), "
            "float32 (float64 for float64 inputs): q is multiplied by it, and rounded to its own dtype.",
        ),
    ]
    softcap: Annotated[
        SupportsFloat | None,
        Option(None, "float, optional", "scores become softcap * tanh(scores / softcap)."),
    ]


class _Rows(TypedDict, total=False):
    """Arrays with one number per head."""

    alibi_slopes: Annotated[
        Any,
        _array(
            "array, shape (heads_q,) or (batch, heads_q), optional",
            "float32 (float64 for float64 inputs); adds ``-slope * |query position - key position|``.",
            ("batch", "heads"),
        ),
    ]
    sinks: Annotated[
        Any,
        _array(
            "array, shape (heads_q,), optional",
            "float32 (float64 for float64 inputs); adds exp(sink) to the denominator of the softmax.",
            ("heads",),
            gradient=True,
        ),
    ]


class _Mask(TypedDict, total=False):
    mask: Annotated[
        Any,
        Option(
            None,
            "array of bool, Spans, BlockMask, mask function, or tuple of these, optional",
            "Which keys a query may attend. An array is True where it may and broadcasts to (batch, heads_q, "
            "seqlen_q, seqlen_k). `Spans` are intervals, made by `cupy_flash.spans`; a `BlockMask` is made "
            "by `block_mask`; a function of positions (mask_mod) by `mask`. Masked tiles of spans and blocks "
            "are skipped. A tuple combines masks with AND.",
            array=True,
            axes=_PAIRS,
            parts=MASK_PARTS,
        ),
    ]


class _Pairs(_Mask, total=False):
    bias: Annotated[
        Any,
        _array(
            "array, optional",
            "Added to the scaled scores; any floating dtype; broadcasts like a mask. -inf masks.",
            _PAIRS,
            gradient=True,
        ),
    ]


class _Function(TypedDict, total=False):
    score: Annotated[
        Program | Bound | None,
        Option(
            None,
            "cupy_flash.score(...), optional",
            "A function of each score (score_mod), after softcap and before bias. Bind "
            "its arrays by a call: ``score=f(table)``.",
        ),
    ]


class _Dropout(TypedDict, total=False):
    dropout: Annotated[float, Option(0.0, "float", "Probability of dropping an attention weight, in [0, 1).")]


class _Seed(TypedDict, total=False):
    seed: Annotated[
        int | None,
        Option(
            None,
            "int, optional",
            "Seed of the dropout, required with dropout. Kept weights depend only on seed and position.",
        ),
    ]


class _Layout(TypedDict, total=False):
    layout: Annotated[
        Literal["bhsd", "bshd"],
        Option("bhsd", '{"bhsd", "bshd"}', "Order of the axes of q, k, v and the result; never a copy."),
    ]


class _Precision(TypedDict, total=False):
    precision: Annotated[
        Literal["ieee", "tf32x3", "tf32"] | None,
        Option(
            None,
            '{"ieee", "tf32x3", "tf32"}, optional',
            "For float32 on a GPU: FMA, FP32-accurate on tensor cores, or 10-bit products.",
        ),
    ]


class _Tuning(TypedDict, total=False):
    tuning: Annotated[
        Tuning | None,
        Option(
            None,
            "Tuning, optional",
            "Changes time and memory, never the result: see `Tuning`.",
        ),
    ]


class _Reproducible(TypedDict, total=False):
    reproducible: Annotated[
        Literal["run", "batch", "prefill", "device"] | None,
        Option(
            None,
            '{"run", "batch", "prefill", "device"}, optional',
            'Guarantee about bits. "run": results and gradients have the same bits on every run. '
            '"batch": also batch-invariant: the bits of a row depend only on its query, its keys, values, '
            "bias and sinks, not on other sequences, chunks, pages, threads, or whether it is computed in a "
            "prompt or alone; the gradients of a sequence depend only on that sequence. Calls that cannot "
            'guarantee this are refused. "prefill": as "batch", but calls without a cache may have other '
            "bits than those over one: Hopper's own kernels then compute prompts. "
            '"device": as "batch", with the same bits on every GPU and in the simulator: float32 (with '
            'precision="ieee", which it implies) and float64, with IEEE operations only, no tensor cores.',
        ),
    ]


class _Parts(TypedDict, total=False):
    schedule: Annotated[
        Literal["ring", "alltoall", "allgather"] | None,
        Option(
            None,
            '{"ring", "alltoall", "allgather"}, optional',
            "What travels: keys and values in a ring; heads to one process each, with all rows, which takes "
            "most options but needs heads that divide; or keys and values to all processes at once. Default: "
            "the one of the first two that sends fewer bytes; the third if both cannot.",
        ),
    ]
    parts: Annotated[
        Literal["zigzag", "contiguous"] | None,
        Option(
            None,
            '{"zigzag", "contiguous"}, optional',
            "Which rows a process holds, as `cupy_flash.parallel.positions` names them. Default: zigzag with "
            "causal, else contiguous. Causal with a window or with unequal lengths takes contiguous parts "
            "only, and they must be named.",
        ),
    ]
    seqlen: Annotated[
        int | tuple[int, int] | None,
        Option(
            None,
            "int, or (int, int) of queries and of keys, optional",
            "Length of the whole sequence; needed where it does not divide into parts of equal length. "
            "Default: the rows of a part times the number of processes.",
        ),
    ]


class _LseGradient(TypedDict, total=False):
    dlse: Annotated[Any, _array("array, optional", "Gradient with respect to lse, if the loss uses it.")]


class _Tangents(TypedDict, total=False):
    dq: Annotated[
        Any,
        _array(
            "array, optional",
            "Tangent of q, with its shape and dtype; for several directions, all tangents have an axis of "
            "directions in front. A missing tangent is 0, and saves its products.",
        ),
    ]
    dk: Annotated[Any, _array("array, optional", "Tangent of k, like dq.")]
    dv: Annotated[Any, _array("array, optional", "Tangent of v, like dq.")]
    dbias: Annotated[Any, _array("array, optional", "Tangent of bias, like dq; finite.")]
    dsinks: Annotated[Any, _array("array, optional", "Tangent of sinks, like dq.")]


class _Packing(TypedDict, total=False):
    max_seqlen_q: Annotated[
        int | None,
        Option(
            None,
            "int, optional",
            "The longest sequence of queries. On a GPU, giving it saves reading the offsets back.",
        ),
    ]
    max_seqlen_k: Annotated[
        int | None, Option(None, "int, optional", "The longest sequence of keys, like max_seqlen_q.")
    ]
    seqused_k: Annotated[
        Any,
        _array(
            "array of int32, shape (sequences,), optional",
            "Number of keys in use of each sequence: the first rows of its k and v. "
            '"bottom_right" counts from the last one in use. The host does not read it on a GPU.',
        ),
    ]


class _CuSeqlens(_Packing, total=False):
    cu_seqlens_q: Annotated[
        Any,
        _array(
            "array of int32, shape (sequences + 1,), optional",
            "Packed sequences, as in `attention_varlen`: q is (rows, heads_q, head_dim). With cu_seqlens_k.",
        ),
    ]
    cu_seqlens_k: Annotated[Any, _array("array of int32, optional", "The same for k and v.")]


# Options of every call that reads a KV cache.
_Leftpad: TypeAlias = Annotated[
    Any,
    _array(
        "array of int32, shape (batch,), optional",
        "Left padding: the number of masked keys at the start of each sequence. They count in cache_seqlens "
        "and in positions.",
    ),
]
_Table: TypeAlias = Annotated[
    Any,
    _array(
        "array of int32, shape (batch, pages of the longest sequence) or (batch,), optional",
        "Key j of sequence b is row ``j % page`` of page ``block_table[b, j // page]``. With shape "
        "(batch,), the slot of each sequence in a cache that is not paged; default: its own number.",
    ),
]
_Rotary: TypeAlias = Annotated[
    Rotary | None,
    Option(
        None,
        "Rotary, optional",
        "Rotary position embedding of q, and of k before it is stored: tables of cosines and sines, see "
        "`Rotary`.",
        array=True,
        parts=("rotary_cos", "rotary_sin", "rotary_seqlens"),
    ),
]


class _Ragged(TypedDict, total=False):
    seqused_q: Annotated[
        Any,
        _array(
            "array of int32, shape (sequences,), optional",
            'Number of queries in use, like seqused_k; other rows of the result are 0. "bottom_right" counts '
            "from the last one in use. CPU only.",
        ),
    ]


class _Queries(_Ragged, total=False):
    cu_seqlens_q: Annotated[
        Any,
        _array(
            "array of int32, shape (batch + 1,), optional",
            "Sequence b has rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` of q, which is then "
            "(rows, heads_q, head_dim), and so is the result.",
        ),
    ]
    max_seqlen_q: Annotated[
        int | None,
        Option(None, "int, optional", "The longest one. On a GPU, giving it saves reading the offsets back."),
    ]
    max_seqlen_k: Annotated[
        int | None,
        Option(
            None,
            "int, optional",
            "Upper bound of the keys per sequence, new ones included: the capacity is clamped to it.",
        ),
    ]
    cu_seqlens_k_new: Annotated[
        Any,
        _array(
            "array of int32, shape (batch + 1,), optional",
            "Offsets of each sequence in k and v, which are then (rows, heads_k, head_dim).",
        ),
    ]
    cache_leftpad: _Leftpad
    mask: Annotated[
        Any,
        Option(
            None,
            "array of bool, Spans, RaggedMask, or tuple of these, optional",
            "Which keys a query may attend. An array broadcasts to (batch, heads_q, seqlen_q, capacity of a "
            "sequence). `Spans` are tree attention for speculative decoding: the queries that see each of "
            "the last seqlen_q keys, (..., 1, seqlen_q, 2 or 4); all see the keys before them. "
            "`cupy_flash.spans.tree` makes them. A `RaggedMask` is for packed queries, on a CPU.",
            array=True,
            parts=("mask", "ragged_mask", "spans"),
        ),
    ]


class _Stored(TypedDict, total=False):
    block_table: _Table
    indices: Annotated[
        Any,
        _array(
            "array of int32 or int64, shape (batch, seqlen_q, keys), optional",
            "The keys that each query sees, as positions in its sequence, in any order, the same for all "
            "heads; -1 for none. A key named twice counts twice. causal, window and cache_leftpad mask "
            "keys as well. With packed queries (rows, keys).",
        ),
    ]
    k: Annotated[
        Any,
        _array(
            "array, shape (batch, heads_k, new, head_dim), optional",
            "New keys, stored in the cache, in place, after those in use.",
        ),
    ]
    v: Annotated[
        Any, _array("array, shape (batch, heads_k, new, head_dim_v), optional", "New values, like k.")
    ]
    rotary: _Rotary
    prefix: Annotated[
        tuple[Any, Any] | None,
        Option(
            None,
            "(array, array), optional",
            "Keys (heads_k, prefix, head_dim) and values that every sequence begins with, read once for all "
            "of them, in the dtype of q, and rotated if those of the cache are. Their positions are 0, 1, "
            "..., and keys of the cache follow. Lengths and masks do not count the prefix; causal, window, "
            "rotation and the rows of its tables do.",
            array=True,
            parts=("prefix_k", "prefix_v"),
        ),
    ]


class _Pages(_Ragged, total=False):
    block_table: Annotated[
        Any,
        _array(
            "array of int32, shape (sequences, pages of the longest sequence), optional",
            "Keys and values are paged, as in `attention_with_kv_cache`.",
        ),
    ]


class _Cached(TypedDict, total=False):
    block_table: _Table
    cache_leftpad: _Leftpad
    rotary: _Rotary


class _WholeSequences(_Aligned, _Pairs, _Scores, _Rows, _Dropout, _Seed, total=False):
    """Options common to all calls over whole sequences, that is, without a KV cache."""


class DenseOptions(_WholeSequences, _Function, _Layout, _Precision, _Reproducible, _Tuning, total=False):
    """Options of `attention`, except `return_lse` and `out`, which its overloads name."""


class GradientOptions(_LseGradient, DenseOptions, total=False):
    """Options of `attention_backward`."""


class TangentOptions(
    _Tangents,
    _WholeSequences,
    _Function,
    _CuSeqlens,
    _Layout,
    _Precision,
    _Reproducible,
    _Tuning,
    total=False,
):
    """Options of `derivatives.jvp`."""


class SecondGradientOptions(_LseGradient, TangentOptions, total=False):
    """Options of `derivatives.hvp`."""


class StatisticsOptions(
    _Aligned, _Pairs, _Scores, _Function, _Rows, _CuSeqlens, _Ragged, _Cached, _Layout, total=False
):
    """Options of `attention_statistics`, for dense, packed and cached keys."""


class PackedOptions(
    _Packing, _Pages, _WholeSequences, _Function, _Precision, _Reproducible, _Tuning, total=False
):
    """Options of `attention_varlen`."""


class PackedGradientOptions(
    _Packing,
    _Ragged,
    _LseGradient,
    _WholeSequences,
    _Function,
    _Precision,
    _Reproducible,
    _Tuning,
    total=False,
):
    """Options of `attention_varlen_backward`."""


class RecordedOptions(_Function, _WholeSequences, _Layout, _Precision, _Reproducible, total=False):
    """Options of dense attention with gradients recorded by torch or JAX."""


class RecordedPackedOptions(_Function, _Packing, _WholeSequences, _Precision, _Reproducible, total=False):
    """Options of packed attention with gradients recorded by torch or JAX."""


class RecordedRaggedOptions(
    _Function, _Ragged, _Packing, _WholeSequences, _Precision, _Reproducible, total=False
):
    """`RecordedPackedOptions` and ragged queries and masks."""


class CompiledOptions(_WholeSequences, _Packing, _Ragged, _Layout, _Precision, _Reproducible, total=False):
    """Options of dense and of packed attention, for an operator that serves both."""


class CacheOptions(
    _Stored,
    _Queries,
    _Band,
    _Scores,
    _Rows,
    _Layout,
    _Precision,
    _Reproducible,
    _Tuning,
    total=False,
):
    """Options of `attention_with_kv_cache`."""


class RecordedPrefixOptions(_Causal, _Scores, _Layout, _Precision, _Reproducible, total=False):
    """Options of attention over a shared prefix with gradients recorded."""


class ShardOptions(
    _Aligned, _Mask, _Scores, _Rows, _Dropout, _Seed, _Layout, _Precision, _Reproducible, total=False
):
    """Options of ring attention inside JAX's shard_map."""


class RingOptions(ShardOptions, _Parts, total=False):
    """Options of `ring_attention`."""


class RingGradientOptions(_LseGradient, RingOptions, total=False):
    """Options of the backward pass of `ring_attention`."""


class BandOptions(_Aligned, total=False):
    """Options of `memory_report`."""


class NaiveOptions(_Aligned, _Pairs, _Scores, _Function, _Rows, _Layout, total=False):
    """Options of `naive_attention`."""


class ConfigOptions(_Aligned, _Scores, _Dropout, _Layout, _Precision, _Reproducible, _Tuning, total=False):
    """Options that an `AttentionConfig` holds."""


@functools.cache
def declared(options: Any) -> dict[str, Option]:
    """The options of one of the classes above, by name."""
    return {name: hint.__metadata__[0] for name, hint in options.__annotations__.items()}


def types(options: Any) -> dict[str, Any]:
    """The types of these options, by name."""
    return {name: get_args(hint)[0] for name, hint in options.__annotations__.items()}


def defaults(options: Any) -> dict[str, Any]:
    """The defaults of these options, by name."""
    return {name: option.default for name, option in declared(options).items()}


# why at import: no call looks at declarations. First the options with a gradient, then all arrays of a
# dense call with a gradient.
DIFFERENTIABLE = tuple(name for name, option in declared(DenseOptions).items() if option.gradient)
WITH_GRADIENT = ("q", "k", "v", *DIFFERENTIABLE)
# Names of their gradients, and of their tangents.
DERIVATIVES = tuple(f"d{name}" for name in WITH_GRADIENT)
# Axes by option; options with one number per head; of these, options with a gradient.
AXES_OF = {name: option.axes for name, option in declared(DenseOptions).items() if option.axes}
PER_HEAD = tuple(name for name, axes in AXES_OF.items() if axes[-1] == "heads")
PARAMETERS = tuple(name for name in PER_HEAD if name in DIFFERENTIABLE)

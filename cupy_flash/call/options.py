"""The options of every call, each declared once.

A class of options is what some call takes. A field is an option: its name, its type, and an `Option` with all
else that is to be known of it. Signatures, keywords that checkers of types know, rows of docstrings, the
refusal of unknown names and the way of an option through adapters come from these classes: see
`signature.takes`, `split` and `Options`.
"""

# No annotations from __future__: types are read here, with what is attached to them.
import functools
from collections import namedtuple
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, SupportsFloat, TypedDict, get_args

from ..errors import InvalidArguments
from ..program.function import Program
from .blocks import BlockMask, block_arrays
from .progress import Tell

__all__ = [
    "ARRAYS",
    "DIFFERENTIABLE",
    "BandOptions",
    "CacheOptions",
    "CompiledCacheOptions",
    "CompiledOptions",
    "ConfigOptions",
    "DenseOptions",
    "ExplainOptions",
    "GradientOptions",
    "NaiveOptions",
    "Option",
    "Options",
    "PackedGradientOptions",
    "PackedOptions",
    "PackedSecondGradientOptions",
    "PackedTangentOptions",
    "Packing",
    "RecordedFunctionOptions",
    "RecordedOptions",
    "RecordedPackedFunctionOptions",
    "RecordedPackedOptions",
    "RecordedPrefixOptions",
    "RecordedRaggedFunctionOptions",
    "RecordedRaggedOptions",
    "RecordedRingOptions",
    "RingGradientOptions",
    "RingOptions",
    "SecondGradientOptions",
    "TangentOptions",
    "declared",
    "defaults",
    "split",
    "types",
]


class Option(NamedTuple):
    """What is to be known of an option beside its name and type.

    Attributes
    ----------
    default : object
    kind : str
        Its type as docstrings have it.
    text : str
        Its sentence.
    array : bool
        Whether it is an array; others are values.
    gradient : bool
        Whether gradients reach it.
    several : bool
        Whether it is a tuple of arrays, which go by the names ``name[0]``, ``name[1]`` ...
    parts : tuple of str
        Names that the arrays go by of which it consists, its own if it is one.
    """

    default: Any
    kind: str
    text: str
    array: bool = False
    gradient: bool = False
    several: bool = False
    parts: tuple[str, ...] = ()


def _array(kind: str, text: str, *, gradient: bool = False) -> Option:
    return Option(None, kind, text, array=True, gradient=gradient)


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
            "Key position of query 0: 0, seqlen_k - seqlen_q, or that number. Needed by causal, window "
            "and alibi_slopes if the lengths differ.",
        ),
    ]


class _Scores(TypedDict, total=False):
    # why SupportsFloat: NumPy's numbers are none of Python's, and tensors of one number are taken too.
    scale: Annotated[SupportsFloat | None, Option(None, "float, optional", "Default head_dim ** -0.5.")]
    softcap: Annotated[
        SupportsFloat | None,
        Option(None, "float, optional", "scores become softcap * tanh(scores / softcap)."),
    ]


class _Rows(TypedDict, total=False):
    alibi_slopes: Annotated[
        Any,
        _array(
            "array, shape (heads_q,) or (batch, heads_q), optional",
            "float32 (float64 for float64 inputs); adds ``-slope * |query position - key position|``.",
        ),
    ]
    sinks: Annotated[
        Any,
        _array(
            "array, shape (heads_q,), optional",
            "float32 (float64 for float64 inputs); adds exp(sink) to the denominator of the softmax.",
            gradient=True,
        ),
    ]


class _Pairs(TypedDict, total=False):
    mask: Annotated[
        Any,
        _array(
            "array of bool, optional",
            "True where a query may attend; broadcasts to (batch, heads_q, seqlen_q, seqlen_k).",
        ),
    ]
    bias: Annotated[
        Any,
        _array(
            "array, optional",
            "Added to the scaled scores; any floating dtype; broadcasts like mask. -inf masks.",
            gradient=True,
        ),
    ]
    spans: Annotated[
        Any,
        _array(
            "array of int32, optional",
            "A mask as intervals, start and stop, one or two each: of the queries that see a key, "
            "(..., 1, seqlen_k, 2 or 4), or of the keys that a query sees, (..., seqlen_q, 1, 2 or 4); "
            "broadcasts over batch and heads_q. What no interval reaches is skipped. `cupy_flash.spans` "
            "makes them.",
        ),
    ]
    blocks: Annotated[
        BlockMask | None,
        Option(
            None,
            "BlockMask, optional",
            "A mask by blocks of queries and keys: which are seen, which are not and are skipped, and bits "
            "of those that are seen in part. `block_mask` makes one of a function.",
            array=True,
            parts=("blocks", "block_bits"),
        ),
    ]


class _Function(TypedDict, total=False):
    score: Annotated[
        Program | None,
        Option(
            None,
            "cupy_flash.score(...) or cupy_flash.mask(...), optional",
            "What becomes of each score by a function of your own, after softcap and before bias.",
        ),
    ]
    score_args: Annotated[
        Any,
        Option(
            None,
            "tuple of arrays, optional",
            "What the function of ``score`` takes behind the positions: float16, bfloat16, float32, float64, "
            "int32, int8, uint8 or bool, of up to four axes, any strides.",
            array=True,
            several=True,
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
            "Of the dropout; needed if there is any. The kept set is a function of seed and position only.",
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


class _Tile(TypedDict, total=False):
    tile: Annotated[
        tuple[int, int] | None,
        Option(None, "(int, int), optional", "Queries and keys of a block, instead of the planned ones."),
    ]


class _Progress(TypedDict, total=False):
    progress: Annotated[
        bool | Tell | None,
        Option(
            None,
            "bool or callable, optional",
            "On a CPU: a function that gets the share of the call that is done, from 0 to 1, in the caller's "
            "thread: about ten times a second, and 1.0 at the end. What it raises stops the call. True shows "
            "a bar of tqdm. On a GPU, where a call returns before it is done, anything but None is refused.",
        ),
    ]


class _Reproducible(TypedDict, total=False):
    reproducible: Annotated[
        Literal["batch", "prefill", "device"] | None,
        Option(
            None,
            '{"batch", "prefill", "device"}, optional',
            '"batch": the bits of a row depend on its query, its keys, values, bias and sinks only: not on '
            "other sequences, chunks, pages, threads, or whether it is computed in a prompt or alone. The "
            "gradients of a sequence depend on that sequence only. What cannot keep this is refused. "
            '"prefill": the same, but that calls without a cache may have other bits than those over one: '
            "Hopper's own kernels then compute prompts. "
            '"device": as "batch", and the bits are those of every GPU and of the simulator: float32 (with '
            'precision="ieee", which it implies) and float64, in IEEE operations alone, on no tensor core.',
        ),
    ]


class _Float8(TypedDict, total=False):
    q_scale: Annotated[
        Any,
        _array(
            "array of float32, shape (heads_k,) or (batch, heads_k), optional",
            "Of float8_e4m3fn q: a value is what is stored times the scale of its key head (of a query: "
            "the key head that it shares). Those of q and k are above 0. With all three, uint8 stands for"
            " the bits of float8_e4m3fn. Nothing is quantised here; gradients of 8-bit inputs are "
            "refused.",
        ),
    ]
    k_scale: Annotated[Any, _array("array of float32, optional", "Of float8_e4m3fn k, as q_scale of q.")]
    v_scale: Annotated[Any, _array("array of float32, optional", "Of float8_e4m3fn v, as q_scale of q.")]


class _Backward(TypedDict, total=False):
    deterministic: Annotated[
        bool, Option(False, "bool", "Demand the same bits of the gradients on every run.")
    ]


class _LseGradient(TypedDict, total=False):
    dlse: Annotated[Any, _array("array, optional", "Gradient with respect to lse, if the loss uses it.")]


class _Tangents(TypedDict, total=False):
    dq: Annotated[
        Any,
        _array(
            "array, optional",
            "Tangent of q: its shape and dtype, or with an axis of several directions in front, as all other "
            "tangents then. A missing one is 0, and takes its products away.",
        ),
    ]
    dk: Annotated[Any, _array("array, optional", "Tangent of k, as dq of q.")]
    dv: Annotated[Any, _array("array, optional", "Tangent of v, as dq of q.")]
    dbias: Annotated[Any, _array("array, optional", "Tangent of bias, as dq of q; finite.")]
    dsinks: Annotated[Any, _array("array, optional", "Tangent of sinks, as dq of q.")]


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
        int | None, Option(None, "int, optional", "The longest sequence of keys, as max_seqlen_q of queries.")
    ]
    seqused_k: Annotated[
        Any,
        _array(
            "array of int32, shape (sequences,), optional",
            'Keys in use: sequence b ends after so many of its rows of k and v; "bottom_right" counts from\n'
            "there. On a GPU it is read there only.",
        ),
    ]


class _Ragged(TypedDict, total=False):
    seqused_q: Annotated[
        Any,
        _array(
            "array of int32, shape (sequences,), optional",
            'Queries in use, as seqused_k of keys; other rows of the result are 0. "bottom_right" counts '
            "from the last one in use. On a CPU.",
        ),
    ]
    ragged_mask: Annotated[
        Any,
        _array(
            "array of bool, shape (sum of queries * keys,), optional",
            "The masks of all sequences, each (queries, keys) in use, one after the other. On a CPU.",
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
        Option(
            None, "int, optional", "The longest of them. On a GPU, giving it saves reading the offsets back."
        ),
    ]
    max_seqlen_k: Annotated[
        int | None,
        Option(
            None,
            "int, optional",
            "Keys of the longest sequence at most, new ones included: the room of a sequence is cut to it.",
        ),
    ]
    cu_seqlens_k_new: Annotated[
        Any,
        _array(
            "array of int32, shape (batch + 1,), optional",
            "Rows of each sequence in k and v, which are then (rows, heads_k, head_dim).",
        ),
    ]
    cache_leftpad: Annotated[
        Any,
        _array(
            "array of int32, shape (batch,), optional",
            "Nobody sees the first so many keys of a sequence. They count in cache_seqlens and in positions.",
        ),
    ]
    mask: Annotated[
        Any,
        _array(
            "array of bool, optional",
            "True where a query may attend; broadcasts to (batch, heads_q, seqlen_q, room of a sequence).",
        ),
    ]


class _Tree(TypedDict, total=False):
    spans: Annotated[
        Any,
        _array(
            "array of int32, optional",
            "A tree of drafts: the queries that see each of the last keys, of which there are as many, "
            "(..., 1, seqlen_q, 2 or 4), start and stop; broadcasts over batch and heads_q. All see the keys "
            "before them. `cupy_flash.spans.tree` makes one. On GPUs where flash_decode answers.",
        ),
    ]


class _Stored(TypedDict, total=False):
    block_table: Annotated[
        Any,
        _array(
            "array of int32, shape (batch, pages of the longest sequence), optional",
            "Key j of sequence b is row ``j % page`` of page ``block_table[b, j // page]``.",
        ),
    ]
    cache_batch_idx: Annotated[
        Any,
        _array(
            "array of int32, shape (batch,), optional",
            "Slot of each sequence in a cache that is not paged. Default: its own number.",
        ),
    ]
    k: Annotated[
        Any,
        _array(
            "array, shape (batch, heads_k, new, head_dim), optional",
            "New keys, stored in the cache, in place, after those in use.",
        ),
    ]
    v: Annotated[Any, _array("array, shape (batch, heads_k, new, head_dim_v), optional", "New values, as k.")]
    rotary_cos: Annotated[
        Any,
        _array(
            "array, shape (positions, rotated / 2), optional",
            "Rotate the first features of q and of k (before it is stored) by position; float32 or the "
            "dtype of q, a row for each key that a sequence has room for.",
        ),
    ]
    rotary_sin: Annotated[Any, _array("array, optional", "As rotary_cos.")]
    rotary_seqlens: Annotated[
        Any,
        _array(
            "array of int32, shape (batch,), optional",
            "Position at which the first query and the first new key are rotated. Default: keys where they "
            "are stored, and the last query where the last key is.",
        ),
    ]
    rotary_interleaved: Annotated[
        bool,
        Option(
            False,
            "bool",
            "Pair features 2i and 2i + 1 (GPT-J) instead of i and i + rotated / 2 (GPT-NeoX, Llama).",
        ),
    ]
    rotate_cache: Annotated[
        bool,
        Option(
            False,
            "bool",
            "The cache holds keys that are not rotated: they are when they are read, each by its place, and "
            "new ones are stored as they come.",
        ),
    ]
    k_scale: Annotated[
        Any,
        _array(
            "array of float32, shape (heads_k,) or (batch, heads_k), optional",
            "Of int8 (needed), float8_e4m3fn and NVFP4 caches: a key is its stored value times the scale. "
            "New keys are divided by it, rounded, and cut to the largest stored value. Of 4-bit caches "
            "with k_zero as k_zero.",
        ),
    ]
    v_scale: Annotated[Any, _array("array of float32, optional", "The same of values.")]
    k_zero: Annotated[
        Any,
        _array(
            "array of float16 or float32, shape (batch, heads_k, capacity, groups), optional",
            "Makes k_cache one of 4-bit codes, two to a byte, uint8, (..., head_dim / 2): a feature is "
            "``k_scale * code + k_zero`` of its group of 32, 64 or 128. The first axes are those of the "
            "cache; `cupy_flash.int4` makes all three. Written, like k_scale, if k is given. On GPUs of "
            "float16.",
        ),
    ]
    v_zero: Annotated[Any, _array("array, optional", "The same of values; needed with k_zero.")]
    k_block_scale: Annotated[
        Any,
        _array(
            "array of float8_e4m3fn or uint8, shape (batch, heads_k, capacity, head_dim / 16), optional",
            "Makes k_cache one of NVFP4, E2M1 codes two to a byte, uint8, (..., head_dim / 2): a feature is "
            "``k_scale * k_block_scale * code``, k_scale as of 8-bit caches. uint8 stands for the bits of a "
            "scale; `cupy_flash.nvfp4` makes both. Written, as the cache is, if k is given.",
        ),
    ]
    v_block_scale: Annotated[Any, _array("array, optional", "The same of values; needed with k_block_scale.")]
    splits: Annotated[
        int | None,
        Option(
            None,
            "int, optional",
            "Parts that the keys of each sequence are cut into, instead of the planned number.",
        ),
    ]
    check: Annotated[
        bool | None,
        Option(
            None,
            "bool, optional",
            "Look at lengths and tables before anything runs. Default: where that costs nothing, in main "
            "memory; on a GPU it waits for the stream.",
        ),
    ]


class _Prefix(TypedDict, total=False):
    prefix_k: Annotated[
        Any,
        _array(
            "array, shape (heads_k, prefix, head_dim) or (1, heads_k, prefix, head_dim), optional",
            "Keys that every sequence begins with, read once for all of them, in the dtype of q, rotated if "
            "those of the cache are. They stand at 0, 1, ..., keys of the cache behind them: lengths and "
            "masks do not count them; causal, window, rotation and the rows of its tables do.",
        ),
    ]
    prefix_v: Annotated[Any, _array("array, optional", "Their values, as prefix_k.")]


class _Pages(_Ragged, total=False):
    block_table: Annotated[
        Any,
        _array(
            "array of int32, shape (sequences, pages of the longest sequence), optional",
            "Keys and values lie in pages, as in `attention_with_kv_cache`.",
        ),
    ]


class _Workspace(TypedDict, total=False):
    workspace: Annotated[
        Any,
        Option(
            None,
            "array, optional",
            "Memory for partial results and gathered keys on a GPU, contiguous and of any dtype, so that "
            "nothing is allocated; too small, it is refused with the number of bytes. It must not serve "
            "two streams at a time.",
        ),
    ]


class _Whole(_Aligned, _Pairs, _Scores, _Rows, _Dropout, _Seed, total=False):
    """What every way takes that attends over whole sequences."""


class DenseOptions(
    _Whole, _Function, _Layout, _Precision, _Reproducible, _Tile, _Float8, _Progress, total=False
):
    """Options of `attention`, but for what decides its result's type."""


class GradientOptions(
    _LseGradient,
    _Backward,
    _Whole,
    _Function,
    _Layout,
    _Precision,
    _Reproducible,
    _Tile,
    _Progress,
    total=False,
):
    """Those of `attention_backward`."""


class TangentOptions(_Tangents, _Whole, _Function, _Layout, _Precision, _Tile, total=False):
    """Those of `attention_jvp`."""


class SecondGradientOptions(_LseGradient, TangentOptions, total=False):
    """Those of `attention_hvp`."""


class PackedOptions(
    _Packing, _Pages, _Whole, _Function, _Precision, _Reproducible, _Tile, _Float8, _Progress, total=False
):
    """Those of `attention_varlen`."""


class PackedGradientOptions(
    _Packing,
    _Ragged,
    _LseGradient,
    _Backward,
    _Whole,
    _Function,
    _Precision,
    _Reproducible,
    _Tile,
    _Progress,
    total=False,
):
    """Those of `attention_varlen_backward`."""


class PackedTangentOptions(_Packing, _Tangents, _Whole, _Function, _Precision, _Tile, total=False):
    """Those of `attention_varlen_jvp`."""


class PackedSecondGradientOptions(_LseGradient, PackedTangentOptions, total=False):
    """Those of `attention_varlen_hvp`."""


class RecordedOptions(_Whole, _Layout, _Precision, _Reproducible, _Backward, total=False):
    """Those of attention where gradients are recorded, by torch or JAX."""


class RecordedFunctionOptions(_Function, RecordedOptions, total=False):
    """The same where score functions are recorded too."""


class RecordedPackedOptions(_Packing, _Whole, _Precision, _Reproducible, _Backward, total=False):
    """The same of packed sequences."""


class RecordedPackedFunctionOptions(_Function, RecordedPackedOptions, total=False):
    """The same where score functions are recorded too."""


class RecordedRaggedOptions(_Ragged, RecordedPackedOptions, total=False):
    """The same where queries and masks may be ragged too."""


class RecordedRaggedFunctionOptions(_Function, RecordedRaggedOptions, total=False):
    """The same where score functions are recorded too."""


class CompiledOptions(_Whole, _Packing, _Ragged, _Layout, _Precision, _Reproducible, _Backward, total=False):
    """Both, for an operator that serves either."""


class CacheOptions(
    _Stored,
    _Queries,
    _Tree,
    _Prefix,
    _Workspace,
    _Band,
    _Scores,
    _Rows,
    _Layout,
    _Precision,
    _Reproducible,
    total=False,
):
    """Those of `attention_with_kv_cache`."""


class CompiledCacheOptions(
    _Stored, _Queries, _Tree, _Prefix, _Band, _Scores, _Rows, _Layout, _Precision, _Reproducible, total=False
):
    """The same inside compiled programs, which see to memory themselves."""


class RecordedPrefixOptions(_Causal, _Scores, _Layout, _Precision, _Backward, total=False):
    """Those of attention over a shared prefix where gradients are recorded."""


class RingOptions(_Causal, _Scores, _Layout, _Precision, total=False):
    """Those of a sequence that lies in parts."""


class RingGradientOptions(_LseGradient, _Backward, RingOptions, total=False):
    """Those of its backward pass."""


class RecordedRingOptions(RingOptions, _Backward, total=False):
    """Those of it where gradients are recorded."""


class ExplainOptions(_Backward, DenseOptions, total=False):
    """Those of `explain`."""


class BandOptions(_Aligned, total=False):
    """Those of `memory_report`: which pairs there are."""


class NaiveOptions(_Aligned, _Pairs, _Scores, _Function, _Rows, _Layout, total=False):
    """Those of `naive_attention`."""


class ConfigOptions(_Aligned, _Scores, _Dropout, _Layout, _Precision, _Reproducible, _Tile, total=False):
    """Those that an `AttentionConfig` holds."""


@functools.cache
def declared(options: Any) -> dict[str, Option]:
    """The options of a class above by name."""
    return {name: hint.__metadata__[0] for name, hint in options.__annotations__.items()}


def types(options: Any) -> dict[str, Any]:
    """Their types."""
    return {name: get_args(hint)[0] for name, hint in options.__annotations__.items()}


def defaults(options: Any) -> dict[str, Any]:
    """What those that are not given are."""
    return {name: option.default for name, option in declared(options).items()}


_DENSE = declared(DenseOptions)
# Options that are arrays, of attention over whole sequences, and those of them that gradients reach.
ARRAYS = tuple(part for name, x in _DENSE.items() if x.array and not x.several for part in x.parts or (name,))
DIFFERENTIABLE = tuple(name for name, option in _DENSE.items() if option.gradient)
_SEVERAL = frozenset(name for name, option in _DENSE.items() if option.several)
_BLOCKS = _DENSE["blocks"].parts
_VALUES = {name: option.default for name, option in _DENSE.items() if not option.array}

if TYPE_CHECKING:

    class Options(tuple[Any, ...]):
        """The same to a checker of types: what a caller spelled may be anything."""

        _fields: tuple[str, ...]

        def __new__(cls, *values: Any, **named: Any) -> "Options":
            """The options given, and the defaults of the others."""

        def __getattr__(self, name: str) -> Any:
            """An option."""

        def _replace(self, **named: Any) -> "Options":
            """The same, but for these."""

else:
    Options = namedtuple("Options", _VALUES, defaults=_VALUES.values())
    Options.__doc__ = "The options of `attention` that are values, not arrays, as the caller spelled them."


_DEFAULTS = Options()


def split(given: Mapping[str, Any]) -> tuple[dict[str, Any], Options]:
    """Options as a caller gave them: the arrays among them that are not None, and the values.

    Parameters
    ----------
    given : mapping of str to object
        Of `DenseOptions`.
    """
    if not given:  # as most calls are
        return {}, _DEFAULTS
    arrays: dict[str, Any] = {}
    values = {}
    for name, x in given.items():
        if name in _VALUES:
            values[name] = x
        elif x is not None:
            if name in _SEVERAL:
                arrays |= _numbered(name, x)
            elif name == "blocks":
                arrays |= zip(_BLOCKS, block_arrays(x), strict=True)
            else:
                arrays[name] = x
    return arrays, Options(**values)


def _numbered(name: str, several: Any) -> dict[str, Any]:
    """The arrays of a tuple by the names that they go by."""
    if not isinstance(several, (tuple, list)):
        raise InvalidArguments(
            f"{name} is a {type(several).__name__}, not a tuple of arrays.", hint=f"{name}=(array,)"
        )
    return {f"{name}[{number}]": x for number, x in enumerate(several)}


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

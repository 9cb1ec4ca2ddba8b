"""The public calls: adopt, prepare (describe, choose, locate, load) and run, each once, in that order."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Hashable
from types import GenericAlias
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, overload

import numpy as np

from .call.adopt import adopt
from .call.checks import flag
from .call.compound import QuantizedArray, unquantized
from .call.functions import argument_views
from .call.given import Options, Packing, split
from .call.head_scale import HeadScale
from .call.opaque import opaque
from .call.operands import Views, check_scales
from .call.options import DenseOptions, GradientOptions, declared
from .call.outputs import finished
from .call.signature import Array, documented, takes
from .call.values import split_run_options
from .dispatch.memo import prepared
from .dispatch.repeat import remember, repeated

__all__ = ["Gradients", "adopted", "attention", "attention_backward", "results_of_forward", "run_backward",
           "run_forward", "scaled", "with_scale"]  # fmt: skip

if TYPE_CHECKING:
    from typing_extensions import Unpack

    class Gradients(NamedTuple, Generic[Array]):  # Python 3.10 has no generic named tuples
        """The same for type checkers, with the type of the arrays; options with a gradient are listed."""

        dq: Array
        dk: Array
        dv: Array
        dbias: Any = None
        dsinks: Any = None
        dscore: tuple[Any, ...] | None = None
        dscale: Any = None

else:
    _OPTIONAL = {f"d{name}": option for name, option in declared(DenseOptions).items() if option.gradient}
    Gradients = namedtuple(
        "Gradients",
        ("dq", "dk", "dv", *_OPTIONAL, "dscore", "dscale"),
        defaults=[None] * (len(_OPTIONAL) + 2),
    )
    Gradients.__doc__ = documented(
        """What `attention_backward` returns: arrays of the library, device and dtype of their inputs.

    Attributes
    ----------
    dq, dk, dv : array
        Shapes of q, k, v.
    {options: Of options that were given: their shape and dtype, summed over the axes along which they were
        broadcast; others are None.}
    dscore : tuple of (array or None), or None
        Of the arrays bound to the score function, None for those that are not learned; None itself if
        none is.
    dscale : array or None
        Of a scale of each head: its shape and dtype.
    """,
        _OPTIONAL,
    )
    Gradients.__class_getitem__ = classmethod(GenericAlias)


@overload
def attention(
    q: Array, k: Array, v: Array, *,
    return_lse: Literal[False] = False, out: Array | None = None, **options: Unpack[DenseOptions],
) -> Array: ...  # fmt: skip
@overload
def attention(
    q: Array, k: Array, v: Array, *,
    return_lse: Literal[True], out: Array | None = None, **options: Unpack[DenseOptions],
) -> tuple[Array, Any]: ...  # fmt: skip
@overload
def attention(
    q: Array, k: Array, v: Array, *,
    return_lse: bool, out: Array | None = None, **options: Unpack[DenseOptions],
) -> Array | tuple[Array, Any]: ...  # fmt: skip
@takes(DenseOptions)
@opaque
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_lse: bool = False,
    out: Any = None,
    **options: Unpack[DenseOptions],
) -> Any:
    """Exact attention, softmax(scale q k^T + bias) v, in memory linear in the sequence length.

    Scores pass through, in this order: scale, softcap, the score function, bias, ALiBi, then mask, causal and
    window, then the softmax, then dropout.

    Parameters
    ----------
    q : array, shape (batch, heads_q, seqlen_q, head_dim)
        float16, bfloat16, float32, float64 or float8_e4m3fn; NumPy, CuPy, torch, JAX or any DLPack array,
        any strides. Rank 3 is one batch, rank 2 one head. Float8 inputs may be `QuantizedArray`, with scales.
    k : array, shape (batch, heads_k, seqlen_k, head_dim)
        heads_q is a multiple of heads_k (grouped-query attention).
    v : array, shape (batch, heads_k, seqlen_k, head_dim_v)
        head_dim_v may differ from head_dim.
    {options}
    return_lse : bool
        Also return the log-sum-exp of the scores.
    out : array, optional
        Where to write the result; for float8_e4m3fn inputs bfloat16, float16 or float32.

    Returns
    -------
    o : array, shape (batch, heads_q, seqlen_q, head_dim_v)
        Library, device and dtype of q (bfloat16 for float8_e4m3fn), rank and layout as given.
    lse : array, shape (batch, heads_q, seqlen_q)
        Only with return_lse. Natural logarithm, float32 (float64 for float64).

    Raises
    ------
    InvalidArgumentsError
        The call contradicts itself; nothing was allocated or written.
    UnsupportedError
        No kernel fits; each one's reason is given.
    CubinNotFoundError
        The planned kernel is not installed, or its file is damaged.

    Notes
    -----
    A row that sees no key gives o = 0 and lse = -inf (with sinks: lse = sink). Values of v must be finite
    even where they are masked. Work on a GPU is enqueued on the caller's current stream.

    References
    ----------
    .. [1] T. Dao, "FlashAttention-2", arXiv:2307.08691, Algorithm 1.
    .. [2] M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867.
    .. [3] J. Shah et al., "FlashAttention-3", arXiv:2407.08608, section 3.3 (8-bit floats).

    Examples
    --------
    >>> import numpy as np, cupy_flash
    >>> q = k = v = np.random.default_rng(0).standard_normal((1, 4, 256, 64)).astype(np.float32)
    >>> cupy_flash.attention(q, k, v, causal=True).shape
    (1, 4, 256, 64)
    """
    given: tuple[Any, ...] | None = None
    if type(q) is np.ndarray and return_lse is False and out is None:
        given = (*options, *options.values())
        o = repeated("arrays", q, k, v, *given)
        if o is not None:
            return o
    arrays, values = split(options)
    kinds: tuple[Any, ...] = type(q), type(k), type(v)
    if QuantizedArray in kinds:
        arrays |= unquantized(q=q, k=k, v=v)
        q, k, v = (arrays.pop(name) for name in "qkv")
    if getattr(values.scale, "shape", None):  # a call with a scalar scale skips the array path
        q, values, _ = scaled(q, values)
    return run_forward(adopted(q=q, k=k, v=v, out=out, **arrays), values, return_lse, out, given=given)


@takes(GradientOptions)
@opaque
def attention_backward(
    do: Array, q: Array, k: Array, v: Array, o: Array, lse: Any, **options: Unpack[GradientOptions]
) -> Gradients[Array]:
    """Gradients of `attention`, in memory linear in the sequence length (except dbias itself).

    Parameters
    ----------
    do : array
        Gradient of the loss with respect to o; shape and dtype of o.
    q, k, v : array
        As given to `attention`.
    o, lse : array
        As returned by ``attention(..., return_lse=True)``.
    dlse : array, optional
        Gradient with respect to lse, if the loss uses it.
    {options: As given to `attention`.}

    Returns
    -------
    Gradients
        dq, dk, dv, and the gradient of each given option that has one; dscore if the score function has
        learned arguments.

    Raises
    ------
    InvalidArgumentsError, UnsupportedError, CubinNotFoundError
        As in `attention`.

    References
    ----------
    .. [1] T. Dao, "FlashAttention-2", arXiv:2307.08691, Algorithm 2.
    """
    arrays, values = split(options)
    product, by_head = q, None
    if getattr(values.scale, "shape", None):
        product, values, by_head = scaled(q, values)
    grads = run_backward(adopted(do=do, q=product, k=k, v=v, o=o, lse=lse, **arrays), values)
    return grads if by_head is None else with_scale(grads, q, by_head)


def scaled(q: Any, options: Options) -> tuple[Any, Options, HeadScale | None]:
    """Q times a scale per head, and options with scale 1; both unchanged if the scale is a number."""
    by_head = HeadScale.of(options.scale, q, options.layout)
    if by_head is None:
        return q, options, None
    return by_head.times(q), options._replace(scale=1.0), by_head


def with_scale(grads: Gradients[Any], q: Any, by_head: HeadScale) -> Gradients[Any]:
    """The gradients of q and of a scale per head, from the gradient of their product."""
    dq, dscale = by_head.gradients(grads.dq, q)
    return grads._replace(dq=dq, dscale=dscale)


def adopted(**named: Any) -> Views:
    """Adopt the arrays that are not None, and always the required ones, so that a missing one raises."""
    return {name: adopt(x, name) for name, x in named.items() if x is not None or name in _REQUIRED}


_REQUIRED = frozenset(("q", "k", "v", "o", "do", "lse"))


def run_forward(
    raw: Views,
    options: Options,
    want_lse: bool,
    out: Any = None,
    packing: Packing | None = None,
    unrounded: bool = False,
    given: tuple[Hashable, ...] | None = None,
) -> Any:
    """Run the forward pass; return o, or (o, lse).

    Parameters
    ----------
    raw : dict of str to ArrayView
        The arrays that `describe.describe` takes, and ``out`` if it was given.
    options : Options
    want_lse : bool
    out : array, optional
        The caller's array, to be returned; default: a new one.
    packing : Packing, optional
        For packed sequences, whose offsets are among the arrays.
    unrounded : bool
        Whether o keeps the accumulator dtype.
    given : tuple, optional
        As in `remember`, for calls that it may store.
    """
    want_lse = flag(want_lse, "return_lse")
    options, run_options = split_run_options(options)
    call = prepared("forward", raw, options, want_lse, packing, unrounded=unrounded)
    if call.problem.of_float8:
        check_scales(raw)
    results = call.run(raw, run_options)
    if given is not None and call.may_repeat_in_core:
        remember("arrays", call, raw, options, given)
    return results_of_forward(results, out)


def results_of_forward(results: Views, out: Any) -> Any:
    """The return value of a forward pass: o, or (o, lse)."""
    o = finished(results["o"]) if out is None else out
    return (o, finished(results["lse"])) if "lse" in results else o


def run_backward(
    raw: Views, options: Options, packing: Packing | None = None, unrounded: bool = False
) -> Gradients[Any]:
    """Run the backward pass; parameters as in `run_forward`."""
    options, run_options = split_run_options(options)
    results = prepared("backward", raw, options, True, packing, unrounded=unrounded).run(raw, run_options)
    made = {name: finished(view) for name, view in results.items()}
    if options.score is None:
        return Gradients(**made)
    arguments = tuple([made.pop("d" + name, None) for name in argument_views(raw)])
    return Gradients(**made, dscore=None if all(x is None for x in arguments) else arguments)

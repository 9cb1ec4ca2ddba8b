"""Attention together with its tangents: where both are wanted, one pass is shorter than two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .api import adopted
from .call.opaque import opaque
from .call.operands import Views
from .call.options import Options, PackedTangentOptions, Packing, TangentOptions, split
from .call.outputs import finished
from .call.signature import Array, takes
from .call.values import moment_apart
from .prepare import prepared
from .second_order import compute, described, dots_of, new_results, tangents_of
from .varlen import pack, split_packed

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["attention_varlen_with_jvp", "attention_with_jvp", "run_with_jvp"]


@takes(TangentOptions)
@opaque
def attention_with_jvp(
    q: Array, k: Array, v: Array, **options: Unpack[TangentOptions]
) -> tuple[tuple[Array, Any], tuple[Array, Any]]:
    """Results of `attention` and their tangents, in memory linear in the sequence length (forward mode).

    Parameters
    ----------
    q, k, v : array
        As given to `attention`.
    {options: As given to `attention`.}
    dq, dk, dv, dbias, dsinks : array, optional
        Tangents, as of `attention_jvp`.

    Returns
    -------
    (o, lse) : (array, array)
        As of ``attention(..., return_lse=True)``.
    (do, dlse) : (array, array)
        As of `attention_jvp`.

    Raises
    ------
    InvalidArguments, Unsupported
        As in `attention` and `attention_jvp`.

    Notes
    -----
    In the compiled core of the CPU it is one pass of six products, where `attention` has two and
    `attention_jvp` five. On a GPU and in NumPy it is these two, one after the other.

    Examples
    --------
    >>> import numpy as np, cupy_flash
    >>> q = k = v = np.random.default_rng(0).standard_normal((1, 4, 256, 64)).astype(np.float32)
    >>> (o, lse), (do, dlse) = cupy_flash.attention_with_jvp(q, k, v, dv=np.ones_like(v), causal=True)
    >>> do.shape, bool(np.allclose(do, 1, atol=1e-5))
    ((1, 4, 256, 64), True)
    """
    given, values = split(options)
    tangents = tangents_of(given)
    return run_with_jvp(adopted(q=q, k=k, v=v, **given), tangents, values)


@takes(PackedTangentOptions)
@opaque
def attention_varlen_with_jvp(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    **options: Unpack[PackedTangentOptions],
) -> tuple[tuple[Array, Any], tuple[Array, Any]]:
    """Results of `attention_varlen` and their tangents.

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k
        As given to `attention_varlen`.
    {options: As given to `attention_varlen`.}
    dq, dk, dv, dbias, dsinks : array, optional
        Tangents, as of `attention_varlen_jvp`.

    Returns
    -------
    (o, lse) : (array, array)
        As of ``attention_varlen(..., return_lse=True)``.
    (do, dlse) : (array, array)
        As of `attention_varlen_jvp`.

    Raises
    ------
    InvalidArguments, Unsupported
        As in `attention_varlen` and `attention_varlen_jvp`.

    Notes
    -----
    As of `attention_with_jvp`.
    """
    given, values, packing = split_packed(options)
    tangents = tangents_of(given)
    raw = adopted(q=q, k=k, v=v, **given)
    return run_with_jvp(raw, tangents, values, pack(raw, (cu_seqlens_q, cu_seqlens_k), *packing))


def run_with_jvp(
    raw: Views, tangents: Views, options: Options, packing: Packing | None = None
) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """The results and their tangents; parameters as of `second_order.run_jvp`, without o and lse."""
    timeless, moment = moment_apart(options)
    call = prepared("forward", raw, timeless, True, False, packing)
    results = call.new_results(raw["q"])
    every = {**raw, **results}
    asked = described("jvp", every, tangents, options, packing)
    moved = new_results(asked, {f"d{name}": results[name] for name in ("o", "lse")})
    compute(
        asked, {**dots_of(tangents), **dots_of(moved)}, options.layout, len(raw["q"].shape),
        lambda: call.run(raw, moment, results=results),
    )  # fmt: skip
    o, lse, do, dlse = map(finished, (results["o"], results["lse"], moved["do"], moved["dlse"]))
    return (o, lse), (do, dlse)

"""Implementations of torch's flash operators, for its registry of flash attention implementations.

Every kernel here has the signature of the operator in ATen's native_functions.yaml; arguments that older
versions of torch lack have defaults. A kernel raises UnsupportedError for a call that it does not support:
then torch's own kernel runs, or if torch has none, the error reaches the caller.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch

from .. import api
from ..call.compound import Tuning
from ..errors import UnsupportedError
from ..namespace import NAMESPACE
from ..varlen import attention_varlen, attention_varlen_backward
from .tally import left_to_torch, ran_backward, ran_forward, reason_of

__all__ = ["NAME", "FlashOperators", "has_registry", "register"]

NAME = NAMESPACE
_SDPA = "_scaled_dot_product_flash_attention"


def _refuse(dropout_p: float, **others: Any) -> None:
    """Refuse dropout, and options that no kernel here supports."""
    if dropout_p:
        # why: torch passes its random state in device memory, our seed is a host number.
        raise UnsupportedError(
            "dropout inside torch's flash operators is not replaced.",
            hint="cupy_flash.torch.scaled_dot_product_attention, which draws its own seed",
        )
    for name, x in others.items():
        if x is not None and x is not False:
            raise UnsupportedError(
                f"{name} of torch's flash operators is not replaced.",
                hint="cupy_flash.torch.attention_varlen, which takes alibi_slopes and seqused_k",
            )


def _band(causal: bool, left: int | None, right: int | None) -> dict[str, Any]:
    """Options of the band; a negative side is unbounded, and the alignment is bottom-right as in torch."""
    window = tuple(None if x is None or x < 0 else x for x in (left, right))
    return {"causal": causal, "align": "bottom_right", "window": None if window == (None, None) else window}


def _reproducible() -> Literal["run"] | None:
    return "run" if torch.are_deterministic_algorithms_enabled() else None


def _laid_out(like: Any, x: Any) -> Any:
    """The values of x with the strides of `torch.empty_like(like)`; x itself if it has them."""
    wanted = torch.empty_like(like, device="meta").stride()
    if all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), wanted, strict=True)):
        return x
    return torch.empty_like(like).copy_(x)


def _aux(q: Any) -> tuple[Any, Any, Any]:
    """Random state, offset and debug mask of a call without dropout, as in torch's other implementations."""
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return state, torch.zeros((), dtype=torch.uint64, device=q.device), q.new_empty(0)


def _dense(q: Any, k: Any, v: Any, out: Any = None, **options: Any) -> tuple[Any, Any]:
    """O and LSE; o has the strides of q if the shapes are equal."""
    if out is None and q.shape[-1] == v.shape[-1]:
        out = torch.empty_like(q)
    o, lse = api.attention(q, k, v, out=out, return_lse=True, **options)
    return o, lse


def _dense_backward(do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, **options: Any) -> tuple[Any, ...]:
    return api.attention_backward(do, q, k, v, o, lse, reproducible=_reproducible(), **options)[:3]


def _transposed_backward(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, **options: Any
) -> tuple[Any, ...]:
    """Gradients of (batch, heads, rows, features) tensors, stored with rows before heads."""
    do, q, k, v, o = (x.transpose(1, 2) for x in (do, q, k, v, o))
    return tuple(x.transpose(1, 2) for x in _dense_backward(do, q, k, v, o, lse, layout="bshd", **options))


def _like_inputs(grads: tuple[Any, ...], *inputs: Any) -> tuple[Any, ...]:
    return tuple(_laid_out(x, grad) for x, grad in zip(inputs, grads, strict=True))


# The operators of scaled_dot_product_attention: (batch, heads, rows, features).


def _sdpa(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):  # type: ignore[no-untyped-def]
    _refuse(dropout_p, return_debug_mask=return_debug_mask)
    o, lse = _dense(q, k, v, scale=scale, **_band(is_causal, None, None))
    ran_forward()
    return o, lse, None, None, q.shape[2], k.shape[2], *_aux(q)


def _sdpa_backward(  # type: ignore[no-untyped-def]
    do, q, k, v, o, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, seed, offset, *, scale=None
):
    _refuse(dropout_p)
    # why: models pass views of (batch, rows, heads, features), which need no copy this way.
    run = _transposed_backward if q.transpose(1, 2).is_contiguous() else _dense_backward
    grads = run(do, q, k, v, o, lse, scale=scale, **_band(is_causal, None, None))
    ran_backward()
    return _like_inputs(grads, q, k, v)


# The operators of varlen_attn: packed sequences, and (batch, rows, heads, features).


def _flash(  # type: ignore[no-untyped-def]
    q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
    window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None,
    num_splits=None,
):  # fmt: skip
    o, lse = _attend(
        None, q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, scale,
        window_size_left, window_size_right, seqused_k, alibi_slopes, block_table, num_splits,
    )  # fmt: skip
    return o, lse, *_aux(q)


def _flash_inplace(  # type: ignore[no-untyped-def]
    out, q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
    window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None,
    num_splits=None,
):  # fmt: skip
    return _attend(
        out, q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, scale,
        window_size_left, window_size_right, seqused_k, alibi_slopes, block_table, num_splits,
    )[1]  # fmt: skip


def _attend(  # type: ignore[no-untyped-def]
    out, q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, scale, left,
    right, seqused_k, alibi_slopes, block_table, num_splits,
):  # fmt: skip
    """O and LSE, of packed sequences if cum_seq_q is given; o is written to `out` if that is given."""
    _refuse(dropout_p, return_debug_mask=return_debug_mask, alibi_slopes=alibi_slopes)
    options = {"scale": scale, **_band(is_causal, left, right)}
    if num_splits == 1:  # torch's setting for batch-invariant results
        options["reproducible"] = "batch"
    if cum_seq_q is None:
        if seqused_k is not None or block_table is not None:
            raise UnsupportedError(
                "seqused_k and block_table without offsets of q are not replaced.",
                hint="cupy_flash.torch.attention_with_kv_cache",
            )
        o, lse = _dense(q, k, v, out, layout="bshd", **options)
    else:
        if block_table is not None:
            options["block_table"] = block_table
            if num_splits is not None and num_splits > 1:
                options["tuning"] = Tuning(splits=num_splits)
        if out is None and q.shape[-1] == v.shape[-1] and not q.is_contiguous():
            out = torch.zeros_like(q)  # why zeros: rows after the last offset are not written
        o, lse = attention_varlen(
            q, k, v, cum_seq_q, cum_seq_k, seqused_k=seqused_k, max_seqlen_q=max_q, max_seqlen_k=max_k,
            out=out, return_lse=True, **options,
        )  # fmt: skip
    ran_forward()
    return o, lse


def _flash_backward(  # type: ignore[no-untyped-def]
    do, q, k, v, o, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state, unused, *,
    scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    _refuse(dropout_p)
    options = {"scale": scale, **_band(is_causal, window_size_left, window_size_right)}
    if cum_seq_q is None:
        grads = _dense_backward(do, q, k, v, o, lse, layout="bshd", **options)
    else:
        grads = attention_varlen_backward(
            do, q, k, v, o, lse, cum_seq_q, cum_seq_k, max_seqlen_q=max_q, max_seqlen_k=max_k,
            reproducible=_reproducible(), **options,
        )[:3]  # fmt: skip
    ran_backward()
    return _like_inputs(grads, q, k, v)


# The operators of torch's flash attention on a CPU, which takes masks and aligns top-left.


def _cpu_options(dropout_p: float, is_causal: bool, scale: float | None, mask: Any) -> dict[str, Any]:
    _refuse(dropout_p)
    named: dict[str, Any] = {"causal": is_causal, "align": "top_left", "scale": scale}
    if mask is not None:
        named["mask" if mask.dtype == torch.bool else "bias"] = mask
    return named


def _cpu(q, k, v, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):  # type: ignore[no-untyped-def]
    o, lse = _dense(q, k, v, **_cpu_options(dropout_p, is_causal, scale, attn_mask))
    ran_forward()
    return o, lse.transpose(1, 2).contiguous().transpose(1, 2)  # torch's LSE has rows before heads in memory


def _cpu_backward(do, q, k, v, o, lse, dropout_p, is_causal, *, attn_mask=None, scale=None):  # type: ignore[no-untyped-def]
    options = _cpu_options(dropout_p, is_causal, scale, attn_mask)
    grads = _transposed_backward(do, q, k, v, o, lse, **options)
    ran_backward()
    return grads


# Operators, kernels, dispatch keys. torch has no CPU kernel of the first five; ours enable varlen_attn there.
_KERNELS: tuple[tuple[str, Callable[..., Any], tuple[str, ...]], ...] = (
    (_SDPA, _sdpa, ("CUDA", "CPU")),
    (_SDPA + "_backward", _sdpa_backward, ("CUDA", "CPU")),
    ("_flash_attention_forward", _flash, ("CUDA", "CPU")),
    ("_flash_attention_forward_no_dropout_inplace", _flash_inplace, ("CUDA", "CPU")),
    ("_flash_attention_backward", _flash_backward, ("CUDA", "CPU")),
    (_SDPA + "_for_cpu", _cpu, ("CPU",)),
    (_SDPA + "_for_cpu_backward", _cpu_backward, ("CPU",)),
)


def _with_fallback(name: str, key: str, ours: Callable[..., Any]) -> Callable[..., Any]:
    """Our kernel of an operator, which falls back to torch's current kernel, if there is one."""
    try:
        own = torch.library.get_kernel(f"aten::{name}", key)
    except (AttributeError, RuntimeError):  # torch has no get_kernel, or no such kernel
        own = None

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with torch.no_grad():  # torch records the operator, not what it calls
                return ours(*args, **kwargs)
        except UnsupportedError as error:
            if own is None:
                raise
            left_to_torch(f"{name}: {reason_of(error)}")
        return own.call_boxed(keys, *args, **kwargs)

    return kernel


class FlashOperators:
    """Overrides torch's flash operators until it is removed; torch creates and keeps one per activation."""

    def __init__(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        for name, ours, keys in _KERNELS:
            if not hasattr(torch.ops.aten, name):  # only newer versions of torch have it
                continue
            for key in keys:
                kernel = _with_fallback(name, key, ours)
                with warnings.catch_warnings():
                    # why: the override is intended, and torch warns about it once.
                    warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered")
                    self._library.impl(name, kernel, key, with_keyset=True, allow_override=True)

    def remove(self) -> None:
        """Restore torch's operators."""
        self._library._destroy()


def has_registry() -> bool:
    """Whether this torch has a registry of flash attention implementations, and operators like ours.

    why both: those of torch 2.11, which has the registry, take other arguments.
    """
    has_operators = hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace")
    return has_operators and hasattr(getattr(torch.nn, "attention", None), "register_flash_attention_impl")


def register() -> None:
    """Register the name in torch's registry, if it has one, without activating it."""
    if has_registry():
        torch.nn.attention.register_flash_attention_impl(NAME, register_fn=FlashOperators)

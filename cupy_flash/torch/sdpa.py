"""Run this library in torch's own scaled_dot_product_attention, with fallback to torch's kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from ..errors import InvalidArgumentsError, UnsupportedError
from .eager import are_plain_memory
from .flash_ops import NAME, has_registry, register
from .functional import scaled_dot_product_attention
from .tally import Calls, counted, left_to_torch, ran_backward, ran_forward, reason_of

__all__ = ["sdpa_with_fallback", "use_in_sdpa"]

Tensor: TypeAlias = torch.Tensor

# why not from torch.nn.functional: that name may have been replaced by ours.
_torchs_own = torch._C._nn.scaled_dot_product_attention
_operator = torch.ops.aten.scaled_dot_product_attention.default


def _options(
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> dict[str, Any]:
    """The arguments of torch's function other than query, key and value, by name."""
    return {
        "attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale,
        "enable_gqa": enable_gqa,
    }  # fmt: skip


def _ours_or_fallback(own: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The result of this library, or of torch's function `own` if this library refuses the call."""
    if options["dropout_p"] and args[0].is_cuda and torch.cuda.is_current_stream_capturing():
        # why: the seed is a host number, so each replay would drop the same weights.
        left_to_torch("scaled_dot_product_attention: dropout while a CUDA graph is captured.")
        return own(*args, **options)
    try:
        o = scaled_dot_product_attention(*args, **options)
    except (InvalidArgumentsError, UnsupportedError) as error:
        # why both: torch accepts some calls that are invalid here, and raises its own errors for the rest.
        left_to_torch(f"scaled_dot_product_attention: {reason_of(error)}")
        return own(*args, **options)
    ran_forward()
    if o.requires_grad:
        o.register_hook(lambda _: ran_backward())
    return o


def sdpa_with_fallback(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` in this library, or in torch if this library refuses the call.

    To replace torch's function permanently:
    ``torch.nn.functional.scaled_dot_product_attention = cupy_flash.torch.sdpa_with_fallback``.

    Parameters
    ----------
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        As in `scaled_dot_product_attention`.

    Returns
    -------
    Tensor, shape (..., heads, seqlen_q, head_dim_v)

    Raises
    ------
    CubinNotFoundError
        The kernel is not installed; this does not fall back.
    Exception
        The error of torch's own function, if neither runs the call.

    Notes
    -----
    `sdpa_calls` has the reason of each fallback. Under torch.compile this is `scaled_dot_product_attention`,
    without fallback or counts. Backward passes have no fallback either.
    """
    options = _options(attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if torch.compiler.is_compiling():
        return scaled_dot_product_attention(query, key, value, **options)
    o: Tensor = _ours_or_fallback(_torchs_own, query, key, value, **options)
    return o


def _replacement(query: Tensor, key: Tensor, value: Tensor, *args: Any, **named: Any) -> Any:
    """Replacement of torch's operator, called before torch chooses a backend."""
    tensors, options = (query, key, value), _options(*args, **named)
    if not are_plain_memory(*tensors, options["attn_mask"]):
        # why: torch.compile caches graphs on disk, and does not know that this operator is overridden.
        left_to_torch("scaled_dot_product_attention: torch is tracing, or a mode or subclass sees the call.")
    elif _only_math():
        left_to_torch("scaled_dot_product_attention: the caller allows the math backend only.")
    else:
        return _ours_or_fallback(_operator.decompose, *tensors, **options)
    return _operator.decompose(*tensors, **options)


def _only_math() -> bool:
    """Whether only torch's math backend is allowed, the reference to which callers compare other backends."""
    backends = torch.backends.cuda
    return not (
        backends.flash_sdp_enabled() or backends.mem_efficient_sdp_enabled() or backends.cudnn_sdp_enabled()
    )


class _OperatorOverride:
    """Overrides torch's scaled_dot_product_attention for all of its backends."""

    def __init__(self, device: str) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        # why two: with the backend key alone, autograd would not record the calls inside.
        for key in (device, f"Autograd{device}"):
            self._library.impl("scaled_dot_product_attention", _replacement, key)

    def remove(self) -> None:
        """Restore torch's operator."""
        self._library._destroy()


class _Contexts:
    """The open contexts of all threads: the first one installs the overrides, the last one removes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._before: str | None = None
        self._operator: _OperatorOverride | None = None

    def enter(self) -> None:
        attention = torch.nn.attention
        with self._lock:
            if not self._open:
                self._before = attention.current_flash_attention_impl()
                if self._before != NAME:
                    register()  # again, because other code may have registered the name since
                    attention.activate_flash_attention_impl(NAME)
                self._operator = _OperatorOverride("CUDA")
            self._open += 1

    def leave(self) -> None:
        attention = torch.nn.attention
        with self._lock:
            self._open -= 1
            if self._open or self._operator is None:
                return
            self._operator.remove()
            self._operator = None
            if self._before == NAME or attention.current_flash_attention_impl() != NAME:
                return
            attention.restore_flash_attention_impl()
            if self._before is not None:
                attention.activate_flash_attention_impl(self._before)


_contexts = _Contexts()


@contextmanager
def use_in_sdpa() -> Iterator[Calls]:
    """Run this library as torch.nn.functional.scaled_dot_product_attention in this context, in all threads.

    On a GPU it replaces all of torch's backends, also for masks, float32, head dims above 256 and
    dropout, unless ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`` selects torch's textbook
    computation. On a CPU it replaces only torch's flash backend. It also activates "cupy_flash" like
    ``torch.nn.attention.activate_flash_attention_impl``, so that torch's ``varlen_attn`` runs it.

    Yields
    ------
    Calls
        ``forward`` and ``backward``: number of calls that this library has computed since the context began,
        in any thread. ``fallbacks``: number of calls left to torch's own kernels, by reason. ``report()``:
        all of it as text. Calls of a backend that is not replaced are not counted.

    Raises
    ------
    UnsupportedError
        This torch has no registry of flash attention implementations for operators as of 2.13.

    Notes
    -----
    Under torch.compile only calls for which torch chooses its flash backend run this library. For others,
    compile `cupy_flash.torch.scaled_dot_product_attention`.
    """
    if not has_registry():
        raise UnsupportedError(
            f"torch {torch.__version__} has no register_flash_attention_impl for operators as of 2.13.",
            hint="a newer torch, or cupy_flash.torch.scaled_dot_product_attention by name",
        )
    _contexts.enter()
    try:
        with counted() as calls:
            yield calls
    finally:
        _contexts.leave()

"""Let torch's own scaled_dot_product_attention run this library, through torch's public registration hook."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from .. import api
from ..errors import UnsupportedError

__all__ = ["use_in_sdpa"]

_NAME = "cupy_flash"


@dataclasses.dataclass
class Calls:
    """Calls that this library computed.

    Attributes
    ----------
    forward, backward : int
    """

    forward: int = 0
    backward: int = 0


# Of the contexts that are open.
_counted: list[Calls] = []


def _options(dropout_p: float, is_causal: bool, scale: float | None, mask: Any = None) -> dict[str, Any]:
    """Our options from those of torch's operators."""
    if dropout_p:
        # why: torch hands its random state over as device memory, our seed is a host number.
        raise UnsupportedError(
            "dropout inside torch's scaled_dot_product_attention is not replaced.",
            hint="cupy_flash.torch.scaled_dot_product_attention, which draws its own seed",
        )
    named: dict[str, Any] = {"causal": is_causal, "align": "top_left", "scale": scale}
    if mask is not None:
        named["mask" if mask.dtype == torch.bool else "bias"] = mask.detach()
    return named


def _forward(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    for calls in _counted:
        calls.forward += 1
    return api.attention(q.detach(), k.detach(), v.detach(), return_lse=True, **options)


def _backward(do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, options: dict[str, Any]) -> Any:
    for calls in _counted:
        calls.backward += 1
    reproducible: Literal["run"] | None = "run" if torch.are_deterministic_algorithms_enabled() else None
    tensors = (x.detach() for x in (do, q, k, v, o, lse))
    return api.attention_backward(*tensors, reproducible=reproducible, **options)[:3]


# torch's operators, by their schemas in ATen's native_functions.yaml.


def _cuda(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):  # type: ignore[no-untyped-def]
    o, lse = _forward(q, k, v, _options(dropout_p, is_causal, scale))
    none = torch.empty(0, dtype=torch.int64)
    return o, lse, None, None, q.shape[2], k.shape[2], none, none, q.new_empty(0)


def _cuda_backward(  # type: ignore[no-untyped-def]
    do, q, k, v, o, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, seed, offset, *, scale=None
):
    return _backward(do, q, k, v, o, lse, _options(dropout_p, is_causal, scale))


def _cpu(q, k, v, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):  # type: ignore[no-untyped-def]
    return _forward(q, k, v, _options(dropout_p, is_causal, scale, attn_mask))


def _cpu_backward(do, q, k, v, o, lse, dropout_p, is_causal, *, attn_mask=None, scale=None):  # type: ignore[no-untyped-def]
    return _backward(do, q, k, v, o, lse, _options(dropout_p, is_causal, scale, attn_mask))


class _Registration:
    """Overrides torch's flash operators as long as it lives."""

    def __init__(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        flash = "_scaled_dot_product_flash_attention"
        for name, function, key in (
            (flash, _cuda, "CUDA"),
            (flash + "_backward", _cuda_backward, "CUDA"),
            (flash + "_for_cpu", _cpu, "CPU"),
            (flash + "_for_cpu_backward", _cpu_backward, "CPU"),
        ):
            with warnings.catch_warnings():
                # Overriding is what this class is for; torch warns of it once.
                warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
                self._library.impl(name, function, key, allow_override=True)

    def remove(self) -> None:
        """Give the operators back to torch."""
        self._library._destroy()


@contextmanager
def use_in_sdpa() -> Iterator[Calls]:
    """Inside this context torch.nn.functional.scaled_dot_product_attention runs this library.

    It takes the place of torch's flash backend, and runs whenever torch would choose that one; pin it with
    ``torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION)`` to be sure.

    Yields
    ------
    Calls
        ``forward`` and ``backward``: how many calls this library has computed since the context began, in any
        thread. What torch gave to another backend is not among them.

    Raises
    ------
    UnsupportedError
        This torch has no registration hook (it came with 2.10), or a call inside uses dropout.
    """
    attention = torch.nn.attention
    if not hasattr(attention, "register_flash_attention_impl"):
        raise UnsupportedError(
            f"torch {torch.__version__} has no register_flash_attention_impl.",
            hint="a newer torch, or cupy_flash.torch.scaled_dot_product_attention by name",
        )
    if _NAME not in attention.list_flash_attention_impls():
        attention.register_flash_attention_impl(_NAME, register_fn=_Registration)
    before = attention.current_flash_attention_impl()
    attention.activate_flash_attention_impl(_NAME)
    calls = Calls()
    _counted.append(calls)
    try:
        yield calls
    finally:
        # why not remove(): equal counts are not the same.
        _counted[:] = [x for x in _counted if x is not calls]
        attention.restore_flash_attention_impl()
        if before is not None:
            attention.activate_flash_attention_impl(before)

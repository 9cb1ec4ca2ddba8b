"""A pytest plugin: `flash_attn` and `flash_attn_interface` are this library's, and a CPU is the GPU."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NamedTuple

import torch

import cupy_flash.flash_attn as second
import cupy_flash.flash_attn_3 as third
from cupy_flash.flash_attn import bert_padding, flash_attn_interface
from tests.peers.draw import pytest_generate_tests, pytest_runtest_call

__all__ = ["pytest_generate_tests", "pytest_runtest_call"]


class _Properties(NamedTuple):
    total_memory: int = 80 * 2**30
    multi_processor_count: int = 132


def _rotated(
    x: Any, cos: Any, sin: Any, interleaved: bool = False, inplace: bool = False, seqlen_offsets: Any = 0,
    **_: Any,
) -> Any:  # fmt: skip
    """flash-attn's `apply_rotary_emb`, which needs Triton: RoPE of (batch, sequence, heads, features)."""
    batch, length = x.shape[:2]
    rows = torch.as_tensor(seqlen_offsets).expand(batch)[:, None] + torch.arange(length)
    c, s = cos[rows][:, :, None].float(), sin[rows][:, :, None].float()
    turned, rest = x[..., : 2 * cos.shape[-1]].float(), x[..., 2 * cos.shape[-1] :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    parts = a * c - b * s, a * s + b * c
    joined = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat((joined.to(x.dtype), rest), -1)


def _install() -> None:
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda *_: _Properties()  # type: ignore[assignment]
    interface: Any = flash_attn_interface
    # Names of flash-attn's own that its tests import, and read only where they look at dropped weights.
    interface._get_block_size_n, interface.USE_TRITON_ROCM = None, False
    rotary: Any = ModuleType("flash_attn.layers.rotary")
    rotary.apply_rotary_emb = _rotated
    sys.modules.update({
        "flash_attn": second,
        "flash_attn.flash_attn_interface": interface,
        "flash_attn.bert_padding": bert_padding,
        "flash_attn.layers": ModuleType("flash_attn.layers"),
        "flash_attn.layers.rotary": rotary,
        "flash_attn_interface": third,
    })  # fmt: skip


_install()

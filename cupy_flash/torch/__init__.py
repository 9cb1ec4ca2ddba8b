"""Adapter for torch: autograd, compile, modules, and torch's own names. cupy_flash itself needs no torch.

>>> import torch, cupy_flash.torch
>>> q = k = v = torch.randn(1, 4, 128, 64, requires_grad=True)
>>> cupy_flash.torch.attention(q, k, v, causal=True).sum().backward()
"""

from . import flops as _flops  # noqa: F401  (registers formulas for torch's FLOP counter)
from . import textbook as _textbook  # noqa: F401  (registers a decomposition for torch's exporters)
from .blocks import block_mask
from .context_parallel import context_parallel, context_parallel_unshard
from .flash_ops import register as _register
from .functional import attention, attention_varlen, scaled_dot_product_attention, varlen_attn
from .kv_cache import attention_with_kv_cache
from .module import FlashAttention
from .prefix import attention_with_shared_prefix
from .ring import ring_attention
from .sdpa import sdpa_with_fallback, use_in_sdpa
from .statistics import attention_statistics
from .tally import sdpa_calls

__all__ = [
    "FlashAttention",
    "attention",
    "attention_statistics",
    "attention_varlen",
    "attention_with_kv_cache",
    "attention_with_shared_prefix",
    "block_mask",
    "context_parallel",
    "context_parallel_unshard",
    "ring_attention",
    "scaled_dot_product_attention",
    "sdpa_calls",
    "sdpa_with_fallback",
    "use_in_sdpa",
    "varlen_attn",
]

# torch's convention: an import registers the name, and the user activates it.
_register()

"""The functions of the flash-attn package, by its names, argument order and rules; over torch tensors.

Code written for flash-attn 2 runs after changing one import, on every GPU that this library supports, and on
a CPU.

>>> import torch
>>> from cupy_flash.flash_attn import flash_attn_func
>>> q = k = v = torch.randn(1, 128, 4, 64, requires_grad=True)
>>> flash_attn_func(q, k, v, causal=True).sum().backward()

What is the same: layout (batch, seqlen, heads, head_dim); causal and window aligned to the last key, as since
flash-attn 2.1; a window's -1 is open; softcap 0.0 is none; ALiBi by ``-slope * |distance|``; natural-log LSE
of float32. What differs: more dtypes, head dims and devices; a query that sees no key has an LSE of -inf, not
inf; dropout draws its seed from torch's CPU generator, so that torch.manual_seed repeats it, but keeps other
weights than flash-attn; ``reproducible=`` is an additional keyword, see `cupy_flash.attention`; a wrong call
raises InvalidArgumentsError, a ValueError, or UnsupportedError, a NotImplementedError, where flash-attn
raises RuntimeError.
"""

from .flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

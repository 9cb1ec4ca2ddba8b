"""Exact flash attention for NumPy, CuPy, torch and JAX arrays, from kernels compiled ahead of time.

>>> import numpy as np, cupy_flash
>>> q = k = v = np.ones((1, 8, 1024, 64), np.float32)
>>> o = cupy_flash.attention(q, k, v, causal=True)
"""

from typing import TYPE_CHECKING

from . import derivatives as derivatives
from . import quantized as quantized
from . import spans as spans
from .api import Gradients, attention, attention_backward
from .blocks import BlockMask, block_mask, block_mask_of_lists
from .call.compound import LatentCache, QuantizedArray, QuantizedCache, RaggedMask, Rotary, Spans, Tuning
from .call.progress import progress
from .config import AttentionConfig, FlashAttention, causal_config, default_config
from .errors import CubinNotFoundError, InvalidArgumentsError, UnsupportedError
from .functions import ScoreFunction, mask, score, set_compile_policy
from .kv_cache import attention_with_kv_cache
from .merge import merge
from .naive import NaiveResult, naive_attention
from .report import MemoryReport, explain, memory_report
from .statistics import AttentionStatistics, attention_statistics
from .varlen import attention_varlen, attention_varlen_backward
from .version import __version__

__all__ = [
    "AttentionConfig",
    "AttentionStatistics",
    "BlockMask",
    "CubinNotFoundError",
    "FlashAttention",
    "Gradients",
    "InvalidArgumentsError",
    "LatentCache",
    "MemoryReport",
    "NaiveResult",
    "QuantizedArray",
    "QuantizedCache",
    "RaggedMask",
    "Rotary",
    "ScoreFunction",
    "Spans",
    "Tuning",
    "UnsupportedError",
    "__version__",
    "attention",
    "attention_backward",
    "attention_statistics",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_with_kv_cache",
    "block_mask",
    "block_mask_of_lists",
    "causal_config",
    "default_config",
    "explain",
    "mask",
    "memory_report",
    "merge",
    "naive_attention",
    "progress",
    "score",
    "set_compile_policy",
]

# Names from before 0.1.0 -> their replacement. To be removed in 0.2.
_REMOVED = {
    "CubinNotFound": "CubinNotFoundError",
    "InvalidArguments": "InvalidArgumentsError",
    "Unsupported": "UnsupportedError",
    "attention_hvp": "derivatives.hvp",
    "attention_jvp": "derivatives.jvp",
    "attention_varlen_hvp": "derivatives.hvp(..., cu_seqlens_q=..., cu_seqlens_k=...)",
    "attention_varlen_jvp": "derivatives.jvp(..., cu_seqlens_q=..., cu_seqlens_k=...)",
    "attention_varlen_with_jvp": "derivatives.value_and_jvp(..., cu_seqlens_q=..., cu_seqlens_k=...)",
    "attention_with_jvp": "derivatives.value_and_jvp",
    "int4": "quantized.int4",
    "mpi": "parallel.mpi",
    "nvfp4": "quantized.nvfp4",
    "ring": "parallel",
}


if not TYPE_CHECKING:  # type checkers know the names

    def __getattr__(name: str) -> object:
        if name in _REMOVED:
            raise AttributeError(f"cupy_flash has no {name!r} any more.\nTry: cupy_flash.{_REMOVED[name]}")
        raise AttributeError(f"module 'cupy_flash' has no attribute {name!r}")

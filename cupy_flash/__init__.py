"""Exact flash attention for NumPy, CuPy, torch and JAX arrays, from kernels compiled ahead of time.

>>> import numpy as np, cupy_flash
>>> q = k = v = np.ones((1, 8, 1024, 64), np.float32)
>>> o = cupy_flash.attention(q, k, v, causal=True)
"""

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

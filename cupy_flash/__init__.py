"""Exact flash attention for NumPy, CuPy, torch and JAX arrays, from kernels compiled ahead of time.

>>> import numpy as np, cupy_flash
>>> q = k = v = np.ones((1, 8, 1024, 64), np.float32)
>>> o = cupy_flash.attention(q, k, v, causal=True)
"""

from . import int4 as int4
from . import nvfp4 as nvfp4
from . import spans as spans
from .api import Gradients, attention, attention_backward
from .blocks import BlockMask, block_mask, block_mask_of_lists
from .config import AttentionConfig, FlashAttention, causal_config, default_config
from .errors import CubinNotFound, InvalidArguments, Unsupported
from .functions import ScoreFunction, mask, score
from .kv_cache import attention_with_kv_cache
from .merge import merge
from .naive import NaiveResult, naive_attention
from .report import MemoryReport, explain, memory_report
from .second_order import attention_hvp, attention_jvp, attention_varlen_hvp, attention_varlen_jvp
from .varlen import attention_varlen, attention_varlen_backward
from .version import __version__
from .with_jvp import attention_varlen_with_jvp, attention_with_jvp

__all__ = [
    "AttentionConfig",
    "BlockMask",
    "CubinNotFound",
    "FlashAttention",
    "Gradients",
    "InvalidArguments",
    "MemoryReport",
    "NaiveResult",
    "ScoreFunction",
    "Unsupported",
    "__version__",
    "attention",
    "attention_backward",
    "attention_hvp",
    "attention_jvp",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_varlen_hvp",
    "attention_varlen_jvp",
    "attention_varlen_with_jvp",
    "attention_with_jvp",
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
    "score",
]

"""The library for JAX: attention under jit, grad, vmap, remat, scan and shard_map. Nothing else imports jax.

>>> import jax, jax.numpy as jnp, cupy_flash.jax
>>> q = k = v = jnp.ones((1, 4, 128, 64))
>>> o = jax.jit(lambda q: cupy_flash.jax.attention(q, k, v, causal=True))(q)
"""

from . import trees as trees
from .ffi import export_target
from .flax import attention_fn, ring_attention_fn
from .functional import attention, dot_product_attention
from .kv_cache import attention_with_kv_cache
from .prefix import attention_with_shared_prefix
from .ring import ring_attention
from .statistics import attention_statistics
from .varlen import attention_varlen

__all__ = [
    "attention",
    "attention_fn",
    "attention_statistics",
    "attention_varlen",
    "attention_with_kv_cache",
    "attention_with_shared_prefix",
    "dot_product_attention",
    "export_target",
    "ring_attention",
    "ring_attention_fn",
]

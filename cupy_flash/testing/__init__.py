"""The specification of attention, and tools to test an implementation against it.

`reference_attention` and `reference_backward` are the specification in plain FP64 NumPy, `reference_jvp` and
`reference_hvp` that of second order, `reference_statistics` that of `cupy_flash.attention_statistics`;
`assert_within_budget` compares results with them; `naive_same_precision` defines the error budget of that
comparison; `gradient_check` is for functions without a reference; `hostile` and `dead` make inputs and
outputs that expose stray reads and writes. `same_bits` tests ``reproducible="batch"`` on this machine.
"""

from .budget import Verdict, assert_within_budget, error_budget, to_numpy
from .gradients import gradient_check
from .hostile import DEAD, STYLES, Guarded, dead, hostile
from .kv_cache import CacheReference, error_budget_with_kv_cache, reference_with_kv_cache
from .naive import NaiveResult, naive_same_precision
from .reference import (
    Gradients,
    Options,
    Reference,
    Statistics,
    reference_attention,
    reference_backward,
    reference_statistics,
)
from .same_bits import SameBits, same_bits
from .second_order import reference_hvp, reference_jvp

__all__ = [
    "DEAD",
    "STYLES",
    "CacheReference",
    "Gradients",
    "Guarded",
    "NaiveResult",
    "Options",
    "Reference",
    "SameBits",
    "Statistics",
    "Verdict",
    "assert_within_budget",
    "dead",
    "error_budget",
    "error_budget_with_kv_cache",
    "gradient_check",
    "hostile",
    "naive_same_precision",
    "reference_attention",
    "reference_backward",
    "reference_hvp",
    "reference_jvp",
    "reference_statistics",
    "reference_with_kv_cache",
    "same_bits",
    "to_numpy",
]

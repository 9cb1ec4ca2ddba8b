"""What kernels cost in the simulator, as golden files: a layout that only wastes time is a red diff too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

import cupy_flash
from cupy_flash.call import outputs
from cupy_flash.call.adopt import adopt
from cupy_flash.device import simulator
from tests.cases import numpy_dtype
from tests.simulator.units import aligned

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "costs"


class CostCase(NamedTuple):
    """A problem whose tiles are full, so that the counts are those of the main loop."""

    arch: str
    dtype: str
    head_dim: int
    seqlen: int = 256
    backward: bool = False
    options: tuple[tuple[str, Any], ...] = (("causal", True),)
    head_dim_v: int = 0  # as head_dim
    second: str = ""  # "jvp" or "hvp", with tangents of q, k and v


# Causal documents: tiles as a whole, in part and not at all.
DOCUMENTS = (("mask", cupy_flash.spans.documents([100, 156])), ("causal", True))
CASES = {
    "forward_sm75_f16_d64": CostCase("sm_75", "float16", 64),
    "forward_sm80_f16_d64": CostCase("sm_80", "float16", 64),
    "forward_sm80_bf16_d128": CostCase("sm_80", "bfloat16", 128),
    "forward_sm80_f16_d96": CostCase("sm_80", "float16", 96),
    "forward_sm80_f32_d64_tf32x3": CostCase("sm_80", "float32", 64, options=(("precision", "tf32x3"),)),
    "forward_sm90_f16_d64": CostCase("sm_90a", "float16", 64, 384),
    "forward_sm90_bf16_d128": CostCase("sm_90a", "bfloat16", 128, 1408),
    "forward_sm90_f32_d128_f16x3": CostCase("sm_90a", "float32", 128, 384),
    "forward_sm90_e4m3_d128": CostCase("sm_90a", "float8_e4m3fn", 128, 768),
    "forward_sm120_e4m3_d128": CostCase("sm_120", "float8_e4m3fn", 128),
    "forward_sm120_f16_d256": CostCase("sm_120", "float16", 256),
    "forward_sm80_bf16_d512": CostCase("sm_80", "bfloat16", 512),
    "forward_sm80_f64_d128": CostCase("sm_80", "float64", 128),
    "forward_sm86_f16_d512": CostCase("sm_86", "float16", 512),
    "forward_sm90_bf16_d512": CostCase("sm_90a", "bfloat16", 512),
    "forward_sm90_f64_d64": CostCase("sm_90a", "float64", 64),
    "forward_sm61_f32_d64": CostCase("sm_61", "float32", 64, 128),
    "backward_sm75_f16_d256": CostCase("sm_75", "float16", 256, backward=True),
    "backward_sm80_f16_d64": CostCase("sm_80", "float16", 64, backward=True),
    "backward_sm80_bf16_d128": CostCase("sm_80", "bfloat16", 128, backward=True),
    "backward_sm80_f64_d64": CostCase("sm_80", "float64", 64, backward=True),
    "backward_sm86_f16_d512": CostCase("sm_86", "float16", 512, backward=True),
    "backward_sm90_f16_d64": CostCase("sm_90a", "float16", 64, backward=True),
    "backward_sm90_f32_d64_f16x3": CostCase("sm_90a", "float32", 64, backward=True),
    "backward_sm90_f16_d256": CostCase("sm_90a", "float16", 256, backward=True),
    "backward_sm90_bf16_d128": CostCase("sm_90a", "bfloat16", 128, backward=True),
    "backward_sm90_f16_d64_spans": CostCase("sm_90a", "float16", 64, backward=True, options=DOCUMENTS),
    "backward_sm90_bf16_d128_spans": CostCase("sm_90a", "bfloat16", 128, backward=True, options=DOCUMENTS),
    "backward_sm90_bf16_d192_dv128": CostCase("sm_90a", "bfloat16", 192, backward=True, head_dim_v=128),
    "jvp_sm80_bf16_d128": CostCase("sm_80", "bfloat16", 128, second="jvp"),
    "hvp_sm80_bf16_d128": CostCase("sm_80", "bfloat16", 128, second="hvp"),
    "hvp_sm80_f32_d64_tf32x3": CostCase("sm_80", "float32", 64, second="hvp"),
}  # fmt: skip


def golden_path(name: str) -> Path:
    return GOLDEN / f"{name}.txt"


def _aligned_empty(like: Any, shape: tuple[int, ...], dtype: str) -> Any:
    return adopt(aligned(shape, numpy_dtype(dtype)), "output")


def golden_text(name: str) -> str:
    """Counts of each launch, without those that are zero."""
    case = CASES[name]
    rng = np.random.default_rng(0)
    shape = (1, 1, case.seqlen, case.head_dim)
    shape_v = (*shape[:3], case.head_dim_v or case.head_dim)
    shapes = {"q": shape, "k": shape, "v": shape_v, "o": shape_v, "do": shape_v}
    tensors = {key: aligned(size, numpy_dtype(case.dtype)) for key, size in shapes.items()}
    for tensor in tensors.values():
        tensor[...] = rng.standard_normal(tensor.shape)
    lse = aligned(shape[:3], np.float64 if case.dtype == "float64" else np.float32, 5.0)
    environment = {"CUPY_FLASH_DRIVER": f"simulator:{case.arch}"}
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(outputs, "empty", _aligned_empty),
        simulator.costs() as launches,
    ):
        if case.second:
            do, q, k, v, o = (tensors[key] for key in ("do", "q", "k", "v", "o"))
            along = {"dq": q, "dk": k, "dv": v, **dict(case.options)}
            if case.second == "jvp":
                cupy_flash.derivatives.jvp(q, k, v, o, lse, **along)
            else:
                cupy_flash.derivatives.hvp(do, q, k, v, o, lse, jvp=(o, lse), **along)
        elif case.backward:
            given = [tensors[key] for key in ("do", "q", "k", "v", "o")]
            cupy_flash.attention_backward(*given, lse, **dict(case.options))
        else:
            cupy_flash.attention(*(tensors[key] for key in "qkv"), **dict(case.options))
    blocks = [
        "\n".join([variant, *(f"  {key:22}{n:>12}" for key, n in counts.items() if n)])
        for variant, counts in launches
    ]
    return "\n".join(blocks) + "\n"

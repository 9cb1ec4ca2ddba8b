"""Problems whose plans are kept as golden files: one line of options each, for four architectures."""

from __future__ import annotations

from pathlib import Path

from cupy_flash.call.blocks import Blocks
from cupy_flash.call.problem import Cache, Problem
from cupy_flash.call.spans import Intervals
from cupy_flash.errors import UnsupportedError
from cupy_flash.plan.catalog import architecture
from cupy_flash.plan.choose import choose
from cupy_flash.report import plan_text
from tests.paths import GOLDEN

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_90a", "sm_120")
CACHED = Problem(
    "decode", "float16", None, 1, 64, 8, 1, 32768, 128, 128, 128**-0.5, offset_from_end=True,
    cache=Cache("float16"),
)  # fmt: skip
BASE = Problem("forward", "float16", None, 2, 16, 16, 4096, 4096, 128, 128, 128**-0.5)
GEMMA4 = BASE._replace(dtype="bfloat16", heads_k=4, head_dim=512, head_dim_v=512, scale=1.0, right=0)

CASES = {
    "forward_f16_d128": BASE,
    "forward_f16_d128_causal": BASE._replace(right=0),
    "forward_bf16_d64_gqa_window": BASE._replace(
        dtype="bfloat16", head_dim=64, head_dim_v=64, heads_k=2, left=1023, right=0
    ),
    "forward_f16_d128_gqa_short": BASE._replace(heads_q=64, heads_k=8, seqlen_q=16, right=0, offset=4080),
    "forward_f32_d96_bias": BASE._replace(
        dtype="float32", head_dim=96, head_dim_v=96, bias=(1, 16, 4096, 4096), bias_dtype="float32"
    ),
    "forward_f32_d128_causal": BASE._replace(dtype="float32", right=0),
    "forward_f32_d64_gqa_packed": BASE._replace(
        dtype="float32", head_dim=64, head_dim_v=64, heads_k=2, packed=True, rows_q=6000, rows_k=7000
    ),
    "forward_f32_ieee": BASE._replace(dtype="float32", precision="ieee"),
    "forward_f64_d32": BASE._replace(dtype="float64", head_dim=32, head_dim_v=32),
    "forward_f64_d128_causal_softcap": BASE._replace(dtype="float64", right=0, softcap=30.0),
    "forward_f64_d128_packed": BASE._replace(
        dtype="float64", heads_k=2, right=0, packed=True, rows_q=6000, rows_k=7000
    ),
    "forward_f16_d128_same_bits": BASE._replace(reproducible="batch"),
    "forward_f16_d128_same_bits_few_heads": BASE._replace(reproducible="batch", heads_q=1, heads_k=1),
    "forward_f32_same_bits_on_every_gpu": BASE._replace(dtype="float32", reproducible="device"),
    "forward_f16_d512": BASE._replace(head_dim=512, head_dim_v=512),
    # A full layer of Gemma 4, without padding and with it.
    "forward_bf16_d512_gqa_causal": GEMMA4,
    "forward_bf16_d512_gqa_causal_padded": GEMMA4._replace(mask=(2, 1, 1, 4096)),
    "backward_bf16_d512_gqa_causal": GEMMA4._replace(direction="backward"),
    "backward_bf16_d512_gqa_causal_padded": GEMMA4._replace(direction="backward", mask=(2, 1, 1, 4096)),
    "forward_bf16_d576_dv512_causal": BASE._replace(dtype="bfloat16", head_dim=576, head_dim_v=512, right=0),
    "forward_f16_d512_softcap": BASE._replace(head_dim=512, head_dim_v=512, softcap=30.0),
    "forward_f16_d192_dv128": BASE._replace(head_dim=192),
    "forward_f16_misaligned": BASE._replace(aligned=False),
    "forward_f16_strided": BASE._replace(in_rows=False, aligned=False),
    "forward_f16_dropout": BASE._replace(dropout=0.1),
    "forward_f16_d128_causal_spans": BASE._replace(right=0, spans=Intervals(False, 1, 4096)),
    "forward_bf16_d64_blocks": BASE._replace(
        dtype="bfloat16", head_dim=64, head_dim_v=64, blocks=Blocks(128, 128, 9)
    ),
    "forward_e4m3_d128_causal": BASE._replace(dtype="float8_e4m3fn", of_float8="bfloat16", right=0),
    "forward_e4m3_d64_alibi": BASE._replace(
        dtype="float8_e4m3fn", of_float8="float16", head_dim=64, head_dim_v=64, per_head=("alibi_slopes",)
    ),
    "backward_f16_d128_causal": BASE._replace(direction="backward", right=0),
    "backward_f16_d256": BASE._replace(direction="backward", head_dim=256, head_dim_v=256),
    "backward_f16_d192_dv128": BASE._replace(direction="backward", head_dim=192),
    "backward_f16_d128_deterministic": BASE._replace(direction="backward", deterministic=True),
    "backward_f16_d128_deterministic_few_heads": BASE._replace(
        direction="backward", deterministic=True, batch=1, heads_q=2, heads_k=2, seqlen_q=9000, seqlen_k=9000
    ),
    "backward_f16_d128_causal_spans": BASE._replace(
        direction="backward", right=0, spans=Intervals(False, 1, 4096)
    ),
    "backward_f32_d64_dbias_sinks": BASE._replace(
        direction="backward", dtype="float32", head_dim=64, head_dim_v=64, bias=(1, 1, 4096, 4096),
        bias_dtype="float32", want_dbias=True, per_head=("sinks",),
    ),
    "backward_f32_d64_causal_packed": BASE._replace(
        direction="backward", dtype="float32", head_dim=64, head_dim_v=64, heads_k=2, right=0, packed=True,
        rows_q=6000, rows_k=7000,
    ),
    "backward_bf16_d512_causal_sinks": BASE._replace(
        direction="backward", dtype="bfloat16", head_dim=512, head_dim_v=512, right=0, per_head=("sinks",)
    ),
    "backward_f16_d300_softcap": BASE._replace(
        direction="backward", head_dim=300, head_dim_v=300, softcap=30.0
    ),
    "backward_f64_d64_causal_sinks": BASE._replace(
        direction="backward", dtype="float64", head_dim=64, head_dim_v=64, right=0, per_head=("sinks",)
    ),
    "backward_f64_d300": BASE._replace(direction="backward", dtype="float64", head_dim=300, head_dim_v=300),
    "statistics_f16_d128_causal": BASE._replace(
        direction="statistics", right=0, wanted=("key_sum", "key_max", "entropy")
    ),
    "statistics_f64_d300_key_sum_packed": BASE._replace(
        direction="statistics", dtype="float64", head_dim=300, head_dim_v=300, wanted=("key_sum",),
        packed=True, rows_q=6000, rows_k=7000,
    ),
    "jvp_f16_d128": BASE._replace(direction="jvp"),
    "hvp_bf16_d128_causal_sinks": BASE._replace(
        direction="hvp", dtype="bfloat16", right=0, per_head=("sinks",)
    ),
    "hvp_f32_d64_dbias_sinks": BASE._replace(
        direction="hvp", dtype="float32", head_dim=64, head_dim_v=64, bias=(1, 1, 4096, 4096),
        bias_dtype="float32", want_dbias=True, per_head=("sinks",),
    ),
    "decode_f16_d128_32k": CACHED,
    "decode_f16_d128_32k_same_bits": CACHED._replace(reproducible="batch"),
    "decode_f16_d128_1k_same_bits": CACHED._replace(seqlen_k=1024, reproducible="batch"),
    "decode_bf16_d128_paged_rotary": CACHED._replace(
        dtype="bfloat16", batch=32, seqlen_k=8192, right=0,
        cache=Cache("bfloat16", page=16, appended=1, rotary=128),
    ),
    "decode_e4m3_d64_window": CACHED._replace(
        head_dim=64, head_dim_v=64, left=4095, cache=Cache("float8_e4m3fn", page=64),
    ),
    "decode_bf16_latents": CACHED._replace(
        dtype="bfloat16", batch=4, heads_q=16, heads_k=1, head_dim=576, head_dim_v=512,
        cache=Cache("bfloat16", page=64, appended=1, latent=True),
    ),
    "decode_f16_latents_128_heads": CACHED._replace(
        batch=32, heads_q=128, heads_k=1, seqlen_q=2, right=0, head_dim=576, head_dim_v=512,
        cache=Cache("float16", latent=True),
    ),
    "decode_int8_latents_128_heads": CACHED._replace(
        dtype="bfloat16", batch=32, heads_q=128, heads_k=1, head_dim=576, head_dim_v=512,
        cache=Cache("int8", page=64, latent=True),
    ),
    "decode_bf16_d512_drafts": CACHED._replace(
        dtype="bfloat16", batch=4, heads_q=32, heads_k=4, seqlen_q=4, right=0, head_dim=512, head_dim_v=512,
        cache=Cache("bfloat16", page=16, appended=4),
    ),
    "decode_e4m3_d512": CACHED._replace(
        heads_q=32, heads_k=4, head_dim=512, head_dim_v=512, cache=Cache("float8_e4m3fn", page=64),
    ),
    "cached_bf16_d512_prompt": CACHED._replace(
        dtype="bfloat16", heads_q=32, heads_k=4, seqlen_q=2048, right=0, head_dim=512, head_dim_v=512,
        cache=Cache("bfloat16", appended=2048),
    ),
    "cached_f16_d512_paged_prompt": CACHED._replace(
        heads_q=32, heads_k=4, seqlen_q=512, right=0, head_dim=512, head_dim_v=512,
        cache=Cache("float16", page=16),
    ),
    "cached_f16_d128_prompt": CACHED._replace(
        seqlen_q=512, right=0, cache=Cache("float16", appended=512, rotary=128)
    ),
    "cached_f16_d128_packed": CACHED._replace(packed=True, batch=4, rows_q=9, seqlen_q=5, seqlen_k=1024),
    "cached_bf16_d128_paged_prompt": CACHED._replace(
        dtype="bfloat16", seqlen_q=512, right=0, cache=Cache("bfloat16", page=16)
    ),
    "cached_f32_ieee_paged": CACHED._replace(
        dtype="float32", precision="ieee", cache=Cache("float32", page=16, appended=1)
    ),
    "cached_f64_int8": CACHED._replace(dtype="float64", cache=Cache("int8")),
    "decode_f32_d256": CACHED._replace(
        dtype="float32", head_dim=256, head_dim_v=256, batch=4, seqlen_q=8, cache=Cache("float32", splits=7),
    ),
}  # fmt: skip


def golden_path(case: str) -> Path:
    return GOLDEN / "plans" / f"{case}.txt"


def golden_text(case: str) -> str:
    """What the golden file of a case should hold: each plan once, under the architectures that share it."""
    architectures: dict[str, list[str]] = {}
    for arch in ARCHITECTURES:
        try:
            text = plan_text(CASES[case], choose(CASES[case], arch), located=False)
        except UnsupportedError as error:
            text = str(error)
        text = text.replace(f" on {architecture(arch).name}", "")
        architectures.setdefault(text, []).append(arch)
    return "\n".join(f"== {', '.join(archs)}\n{text}\n" for text, archs in architectures.items())

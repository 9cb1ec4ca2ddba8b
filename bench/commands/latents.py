"""latents: decode over one array of keys and values (MLA), compared with two arrays of the same contents."""

from __future__ import annotations

from typing import Any

import numpy as np

import cupy_flash

from ..machine import timing
from ..measure.session import Session, Settings
from ..work import ITEM, Case

# DeepSeek's: a latent of 512 columns, which are its value, and 64 that are rotated.
COLUMNS, VALUES = 576, 512
# (batch, heads, keys): sizes that exceed the caches of the CPU.
CPU_CACHES = ((4, 16, 16384), (4, 1, 16384), (4, 128, 4096))
GPU_CACHES = ((32, 16, 8192), (32, 128, 8192), (1, 128, 131072))
ONE, TWO = "cupy_flash latents", "cupy_flash keys and values"


def calls(case: Case, place: Any) -> dict[str, timing.Call]:
    """The same call over one array, which is read once, and over two."""
    inputs = place.inputs(case)
    q, keys = inputs["q"], inputs["k"]
    columns = keys[..., :VALUES]
    values = columns.clone() if place.library == "torch" else columns.copy()
    lengths = place.put(np.full(case.batch, case.keys, np.int32))

    def attend(k_cache: Any, v_cache: Any) -> tuple[Any, ...]:
        return (cupy_flash.attention_with_kv_cache(q, k_cache, v_cache, cache_seqlens=lengths),)

    latents = cupy_flash.LatentCache(keys, VALUES)
    return {ONE: lambda: attend(latents, None), TWO: lambda: attend(keys, values)}


def run(settings: Settings) -> None:
    session = Session("latents", settings)
    place = session.place
    on_cpu = place.name == "cpu"
    dtypes = ("float32", "bfloat16") if on_cpu else place.dtypes[:1]
    caches = CPU_CACHES if on_cpu else GPU_CACHES
    suite = [
        Case(batch, heads, 1, COLUMNS, dtype, heads_k=1, seqlen_k=keys)
        for dtype in dtypes
        for batch, heads, keys in (caches[:1] if settings.quick else caches)
    ]
    for case in session.cases(suite, first=lambda _case: ONE):
        ways = {name: (call, place.stopwatch()) for name, call in calls(case, place).items()}
        took = timing.alternate(ways, 5 if settings.quick else 21, 2.0 if settings.quick else 6.0)
        stored = case.batch * case.keys * ITEM[case.dtype]
        read = {ONE: stored * COLUMNS, TWO: stored * (COLUMNS + VALUES)}
        copy = f"{session.ceilings.bytes_per_second / 1e9:.4g}"
        session.append(
            session.row(case, name, **times.row(), copy_gb_per_s=copy,
                        gb_per_s=f"{read[name] / times.median / 1e9:.4g}")
            for name, times in took.items()
        )  # fmt: skip
        gain = took[TWO].median / took[ONE].median
        session.say(f"{case}: {took[ONE]!s} over latents, {gain:.2f} times as fast as over two arrays")

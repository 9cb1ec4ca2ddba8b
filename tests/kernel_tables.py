"""Golden tables of which kernels take which options: a file per direction and dtype."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from cupy_flash.call.blocks import Blocks
from cupy_flash.call.problem import Cache, Codes, Problem
from cupy_flash.call.spans import Intervals
from cupy_flash.errors import UnsupportedError
from cupy_flash.plan import families
from cupy_flash.plan.catalog import Variant, architecture
from cupy_flash.plan.choose import choose
from cupy_flash.program.graph import Body
from tests.paths import GOLDEN
from tests.plan_cases import BASE, CACHED

# Options that some kernels refuse, or take in another kind.
_SPANS = Intervals(False, 1, 4096)
_FAR_ALIBI: dict[str, Any] = {
    "per_head": ("alibi_slopes",), "deterministic": True, "reproducible": "batch", "seqlen_q": 1, "right": 0,
}  # fmt: skip
_OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "bfloat16": {"dtype": "bfloat16"},
    "causal": {"right": 0},
    "sinks": {"per_head": ("sinks",)},
    "scale=0": {"scale": 0.0},
    "scale=1e-30": {"scale": 1e-30},
    "softcap": {"softcap": 30.0},
    "softcap, scale=1e-30": {"softcap": 30.0, "scale": 1e-30},
    "alibi_slopes": {"per_head": ("alibi_slopes",)},
    "alibi_slopes, scale=1e-30": {"per_head": ("alibi_slopes",), "scale": 1e-30},
    "mask of keys": {"mask": (2, 1, 1, 4096)},
    "mask": {"mask": (2, 1, 4096, 4096)},
    "Spans": {"spans": _SPANS},
    "Spans, softcap": {"spans": _SPANS, "softcap": 30.0},
    "Spans, run": {"spans": _SPANS, "deterministic": True},
    "BlockMask": {"blocks": Blocks(128, 128, 9)},
    "bias": {"bias": (2, 16, 4096, 4096), "bias_dtype": "float16"},
    "dropout": {"dropout": 0.1},
    "score": {"function": Body("", (), (), "f")},
    "score, 2**31 learned": {"function": Body("", (), (), "f"), "learned_elements": 2**31},
    "packed": {"packed": True, "rows_q": 6000, "rows_k": 6000},
    "run": {"deterministic": True},
    "batch": {"reproducible": "batch", "deterministic": True},
    "prefill": {"reproducible": "prefill", "deterministic": True},
    "device": {"reproducible": "device", "deterministic": True},
    "unaligned": {"aligned": False},
    "unaligned, prefill": {"aligned": False, "reproducible": "prefill", "deterministic": True},
    "strided": {"aligned": False, "in_rows": False},
    "strided, prefill": {
        "aligned": False, "in_rows": False, "reproducible": "prefill", "deterministic": True,
    },
    "unrounded": {"unrounded": True},
    "tile of 128 x 64": {"tile": (128, 64)},
    "tile of 17 x 19": {"tile": (17, 19)},
    "broadcast": {"boxes": False},
    "broadcast, prefill": {"boxes": False, "reproducible": "prefill", "deterministic": True},
    "no keys": {"seqlen_k": 0},
    "no queries": {"seqlen_q": 0},
    "no heads": {"heads_q": 0, "heads_k": 0},
    "no sequences": {"batch": 0},
    "2**30 - 1 keys": {"seqlen_k": 2**30 - 1},
    "2**30 keys": {"seqlen_k": 2**30},
    "2**30 queries": {"seqlen_q": 2**30, "batch": 1, "heads_q": 1, "heads_k": 1},
    "2**24 keys, ALiBi, batch": {**_FAR_ALIBI, "seqlen_k": 2**24},
    "2**24 + 1 keys, ALiBi, batch": {**_FAR_ALIBI, "seqlen_k": 2**24 + 1},
}  # fmt: skip
_INT4, _NVFP4 = Codes("int4", "float16", (64, 64), True), Codes("nvfp4", "uint8", (16, 16), True)
_CACHES: dict[str, dict[str, Any]] = {
    "": {},
    "512 queries": {"seqlen_q": 512, "right": 0},
    "4 queries": {"seqlen_q": 4, "right": 0},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"cache": {"dtype": "int8"}},
    "int8, bfloat16": {"dtype": "bfloat16", "cache": {"dtype": "int8"}},
    "float8_e4m3fn": {"cache": {"dtype": "float8_e4m3fn"}},
    "int4": {"cache": {"dtype": "int4", "codes": _INT4}},
    "int4, scales of float32": {"cache": {"dtype": "int4", "codes": _INT4._replace(scale_dtype="float32")}},
    "nvfp4": {"cache": {"dtype": "nvfp4", "codes": _NVFP4}},
    "nvfp4, strides differ": {"cache": {"dtype": "nvfp4", "codes": _NVFP4._replace(same_strides=False)}},
    "pages of 8": {"cache": {"page": 8}},
    "pages of 16": {"cache": {"page": 16}},
    "pages of 48": {"cache": {"page": 48}},
    "pages of 64": {"cache": {"page": 64}},
    "pages of 16, mask": {"cache": {"page": 16}, "mask": (1, 1, 1, 32768)},
    "slots": {"cache": {"indexed": True}},
    "cache_leftpad": {"cache": {"leftpad": True}},
    "cache_leftpad, mask": {"cache": {"leftpad": True}, "mask": (1, 1, 1, 32768)},
    "mask": {"mask": (1, 1, 1, 32768)},
    "Spans": {"spans": _SPANS},
    "softcap": {"softcap": 30.0},
    "alibi_slopes": {"per_head": ("alibi_slopes",)},
    "scale=0": {"scale": 0.0},
    "packed": {"packed": True, "rows_q": 8, "batch": 4},
    "packed, 2**31 - 2**15 keys": {"packed": True, "rows_q": 8, "batch": 2**16 - 1},
    "packed, 2**31 keys": {"packed": True, "rows_q": 8, "batch": 2**16},
    "rotary": {"cache": {"rotary": 64}},
    "rotary.on_read": {"cache": {"rotary": 64, "unrotated": True}},
    "rotary, device": {"cache": {"rotary": 64}, "reproducible": "device"},
    "splits": {"cache": {"splits": 2}},
    "splits, batch": {"cache": {"splits": 2}, "reproducible": "batch"},
    "batch": {"reproducible": "batch"},
    "prefill": {"reproducible": "prefill"},
    "device": {"reproducible": "device"},
    "2**24 keys, ALiBi, batch": {**_FAR_ALIBI, "seqlen_k": 2**24},
    "2**24 + 1 keys, ALiBi, batch": {**_FAR_ALIBI, "seqlen_k": 2**24 + 1},
    "unaligned": {"aligned": False},
    "broadcast": {"boxes": False},
    "no keys": {"seqlen_k": 0},
}
# Calls of second order, and statistics, refuse the others before there is a problem.
_NOT_REPRODUCIBLE = {name: changes for name, changes in _OPTIONS.items() if "reproducible" not in changes}
_NARROW = ((64, 64), (128, 128), (192, 128), (256, 256), (512, 512))
# Latents: as decode kernels read them, wider than any, and no wider than ordinary keys.
_LATENTS = ((576, 512), (544, 512), (512, 448))

_DTYPES = {
    "float16": _OPTIONS,
    "float32": _OPTIONS | {f"precision={x}": {"precision": x} for x in ("ieee", "tf32", "tf32x3")},
    "float64": _OPTIONS,
}
_ARCHS = ("sm_75", "sm_80", "sm_90a")

# Golden file -> problem, options, head dims, architectures.
CASES: dict[str, tuple[Problem, dict[str, dict[str, Any]], tuple[tuple[int, int], ...], tuple[str, ...]]] = {
    **{
        f"{direction}_{dtype}": (BASE._replace(direction=direction, dtype=dtype), options, _NARROW, _ARCHS)
        for direction in ("forward", "backward") for dtype, options in _DTYPES.items()
    },
    "forward_float8": (
        BASE._replace(dtype="float8_e4m3fn", of_float8="float16"), _OPTIONS, _NARROW[:4], ("sm_90a", "sm_120")
    ),
    **{
        f"{direction}_{dtype}": (
            BASE._replace(direction=direction, dtype=dtype), _NOT_REPRODUCIBLE, _NARROW[:2], _ARCHS[:2]
        )
        for direction in ("jvp", "hvp") for dtype in ("float16", "float32")
    },
    "statistics_float16": (
        BASE._replace(direction="statistics", wanted=("key_sum", "entropy")),
        _NOT_REPRODUCIBLE
        | {name: {"wanted": (name,)} for name in ("key_max", "top_keys")} | {"over a cache": {"cache": {}}},
        ((64, 64), (512, 512)), ("sm_75", "sm_90a"),
    ),
    **{
        f"decode_{dtype}": (CACHED._replace(dtype=dtype), _CACHES, (*_NARROW[1:], *_LATENTS), _ARCHS)
        for dtype in _DTYPES
    },
}  # fmt: skip


def golden_path(name: str) -> Path:
    return GOLDEN / "kernels" / f"{name}.txt"


def golden_text(name: str) -> str:
    """For each option, head dim and architecture what `_kernel` says."""
    problem, options, head_dims, archs = CASES[name]
    lines = [f"{'':29}" + "  ".join(f"{f'{d}/{v}':{3 * len(archs) - 1}}" for d, v in head_dims)]
    lines += [f"{'':29}" + "  ".join([" ".join(arch[3:5] for arch in archs)] * len(head_dims))]
    for option, changes in options.items():
        cells = []
        for d, v in head_dims:
            p = problem._replace(head_dim=d, head_dim_v=v, **changes)
            if p.cache is not None or "cache" in changes:
                heads = {"heads_k": 1} if (d, v) in _LATENTS else {}
                kept = {"dtype": p.dtype, "latent": bool(heads)} | changes.get("cache", {})
                p = p._replace(cache=Cache(**kept), **heads)
            cells.append(" ".join(_kernel(p, arch) for arch in archs))
        lines.append(f"{option:29}" + "  ".join(cells))
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _kernel(problem: Problem, arch: str) -> str:
    """Initials of the family, and of the mask kind of the kernel with most shared memory; -- if refused."""
    try:
        made = choose(problem, arch)
    except UnsupportedError:
        return "--"
    used = [launch.variant for launch in made.launches]
    assert _compiled(arch).issuperset(variant for variant in used if variant.function is None)
    if not used:
        return f"{made.family[0]}."
    return made.family[0] + max(used, key=lambda variant: variant.shared_bytes).mask[0]


@lru_cache
def _compiled(arch: str) -> frozenset[Variant]:
    return frozenset(x for target in architecture(arch).targets for x in families.variants(target))

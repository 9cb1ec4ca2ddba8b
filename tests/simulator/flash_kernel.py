"""A variant of flash_forward in the simulator: its macros, and a call that shows stray accesses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cupy_flash.device import abi, simulator
from cupy_flash.testing import Guarded, dead, hostile

# dtype of the variant -> (C++ element, NumPy element, products per multiplication, precision of the budget)
DTYPES: Mapping[str, tuple[str, Any, int, str | None]] = {
    "f16": ("__half", np.float16, 1, None),
    "bf16": ("__nv_bfloat16", ml_dtypes.bfloat16, 1, None),
    "tf32x3": ("float", np.float32, 3, "tf32x3"),
    "tf32": ("float", np.float32, 1, "tf32"),
}
BIAS_TYPES = {"float16": 0, "bfloat16": 1, "float32": 2, "float64": 3}


@dataclass(frozen=True)
class FlashForward:
    """A compilation of flash_forward.cu, as `simulator.load` takes it."""

    dtype: str
    head_dims: tuple[int, int]
    mask: str
    tile: tuple[int, int]
    threads: int = 128
    q_in_registers: bool = False
    turing: bool = False
    slots: int = 2
    loops: int = 2

    source = "flash_forward.cu"

    @property
    def name(self) -> str:
        d, dv = self.head_dims
        dims = f"d{d}" if d == dv else f"d{d}x{dv}"
        kind = ("_turing" if self.turing else "") + ("_one_loop" if self.loops == 1 else "")
        return (
            f"flash_forward_{self.dtype}_{dims}_{self.mask}_{self.tile[0]}x{self.tile[1]}_{self.slots}{kind}"
        )

    @property
    def element(self) -> np.dtype[Any]:
        element: np.dtype[Any] = np.dtype(DTYPES[self.dtype][1])
        return element

    @property
    def shared_bytes(self) -> int:
        (m, n), (d, dv) = self.tile, self.head_dims
        return self.element.itemsize * (m * d + self.slots * n * max(d, dv)) + 128

    def defines(self) -> Mapping[str, str]:
        element, _, products, _ = DTYPES[self.dtype]
        values = {
            "CF_ENTRY": self.name,
            "CF_ELEMENT": element,
            "CF_PRODUCTS": products,
            "CF_TURING": int(self.turing),
            "CF_HEAD_DIM": self.head_dims[0],
            "CF_HEAD_DIM_V": self.head_dims[1],
            "CF_MASK": self.mask,
            "CF_BLOCK_M": self.tile[0],
            "CF_BLOCK_N": self.tile[1],
            "CF_THREADS": self.threads,
            "CF_SLOTS": self.slots,
            "CF_Q_IN_REGISTERS": int(self.q_in_registers),
            "CF_LOOPS": self.loops if self.mask == "band" else 1,
            "CF_CHUNKS": int(self.mask == "any"),
            "CF_MIN_BLOCKS": 1,
            "CF_SHARED_BYTES": self.shared_bytes,
        }
        return {name: str(value) for name, value in values.items()}


def _strides(x: np.ndarray) -> list[int]:
    """In elements, 0 along axes of length 1."""
    return [0 if n == 1 else s // x.itemsize for n, s in zip(x.shape, x.strides, strict=True)]


def forward(
    variant: FlashForward,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    cu_seqlens: tuple[np.ndarray, np.ndarray] | None = None,
    **options: Any,
) -> dict[str, np.ndarray]:
    """Launch the variant on arrays (batch, heads, seq, dim); return o and lse.

    Packed arrays have batch 1 and `cu_seqlens` of q and of k. Options are those of the reference.
    """
    batch, heads_q, rows, head_dim = q.shape
    inputs = {
        "q": hostile(q, style="aligned"),
        "k": hostile(k, style="aligned"),
        "v": hostile(v, style="aligned"),
    }
    inputs |= {name: hostile(options[name]) for name in ("mask", "bias") if options.get(name) is not None}
    o = dead((batch, heads_q, rows, v.shape[3]), q.dtype, style="aligned")
    lse = dead((batch, heads_q, rows), np.float32)
    params = np.zeros((), abi.FORWARD)
    for name, guarded in {**{n: inputs[n] for n in "qkv"}, "o": o, "lse": lse}.items():
        params[name] = (guarded.view.ctypes.data, *_strides(guarded.view))
    shape, score = params["shape"], params["score"]
    lengths = (rows, k.shape[2])
    if cu_seqlens is not None:
        batch = len(cu_seqlens[0]) - 1
        lengths = (int(np.diff(cu_seqlens[0]).max()), int(np.diff(cu_seqlens[1]).max()))
        shape["packed"] = 1
        shape["cu_seqlens_q"], shape["cu_seqlens_k"] = (c.ctypes.data for c in cu_seqlens)
    for name, value in zip(
        ("batch", "heads_q", "heads_k", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"),
        (batch, heads_q, k.shape[1], *lengths, head_dim, v.shape[3]),
        strict=True,
    ):
        shape[name] = value
    keep = _fill_score(score, inputs, options, heads_q, head_dim, lengths)
    grid = (-(-lengths[0] // variant.tile[0]) * heads_q * batch, 1, 1)
    simulator.load(variant).launch(grid, (variant.threads, 1, 1), variant.shared_bytes, params.tobytes())
    del keep
    for guarded in inputs.values():
        guarded.check_untouched()
    for guarded in (o, lse):
        if cu_seqlens is None:
            guarded.check_written()
        else:
            guarded.check_guards()
    return {"o": np.array(o.view), "lse": np.array(lse.view)}


def _fill_score(
    score: Any,
    inputs: Mapping[str, Guarded],
    options: Mapping[str, Any],
    heads: int,
    head_dim: int,
    lengths: tuple[int, int],
) -> list[np.ndarray | None]:
    """Fill the Score struct; return the arrays it points to."""
    left, right = options.get("window") or (None, None)
    if options.get("causal"):
        right = 0 if right is None else min(right, 0)
    align = options.get("align")
    score["left"], score["right"] = (abi.OPEN if side is None else side for side in (left, right))
    score["offset"] = (
        align if isinstance(align, int) else (lengths[1] - lengths[0]) * (align == "bottom_right")
    )
    score["scale"] = head_dim**-0.5 if options.get("scale") is None else options["scale"]
    score["softcap"] = options.get("softcap") or 0.0
    for name in ("mask", "bias"):
        if name in inputs:
            view = inputs[name].view
            score[name] = (view.ctypes.data, *_strides(view))
    if "bias" in inputs:
        score["bias_type"] = BIAS_TYPES[inputs["bias"].view.dtype.name]
    slopes, sinks = (options.get(name) for name in ("alibi_slopes", "sinks"))
    if slopes is not None:
        score["alibi_slopes"] = slopes.ctypes.data
        score["alibi_batch"], score["alibi_head"] = (heads if slopes.ndim == 2 else 0), 1
    if sinks is not None:
        score["sinks"], score["sinks_head"] = sinks.ctypes.data, 1
    dropout = options.get("dropout") or 0.0
    score["dropout_seed"], score["dropout_scale"] = options.get("seed") or 0, 1 / (1 - dropout)
    score["dropout_threshold"] = abi.dropout_threshold(dropout)
    return [slopes, sinks]

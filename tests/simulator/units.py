"""Kernels of these tests: small .cu files built for the simulator, and how to run them on arrays."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from cupy_flash.device import simulator
from cupy_flash.device.tensor_map import TensorMap

SIMULATED = [
    pytest.mark.simulator,
    pytest.mark.skipif(shutil.which("g++") is None, reason="the simulator compiles kernels with g++"),
]
KERNELS = Path(__file__).parent / "kernels"


@dataclass(frozen=True)
class Unit:
    """A kernel of these tests, as `simulator.load` takes it."""

    source: str
    macros: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "_".join((Path(self.source).stem, *self.macros)).replace("=", "")

    def defines(self) -> Mapping[str, str]:
        pairs = (macro.partition("=") for macro in self.macros)
        return {name: value for name, _, value in pairs}


def unit(name: str, *macros: str) -> Unit:
    return Unit(str(KERNELS / f"{name}.cu"), macros)


def pack(
    address: Callable[[np.ndarray], int] = lambda array: array.ctypes.data, /, **fields: object
) -> np.ndarray:
    """A params struct in C layout: arrays become pointers, bytes are copied, ints are 32-bit."""

    def member(value: object) -> tuple[object, object]:
        if isinstance(value, np.ndarray):
            return np.uint64, address(value)
        if isinstance(value, bytes):
            return (np.uint64, len(value) // 8), np.frombuffer(value, np.uint64)
        return (np.float32 if isinstance(value, float) else np.int32), value

    members = {name: member(value) for name, value in fields.items()}
    dtype = np.dtype([(name, kind) for name, (kind, _) in members.items()], align=True)  # type: ignore[arg-type]
    struct = np.zeros((), dtype)
    for name, (_, value) in members.items():
        struct[name] = value
    return struct


def aligned(shape: tuple[int, ...], dtype: str | type, fill: float | None = None) -> np.ndarray:
    """An array on a 128-byte boundary, as GPU allocations are."""
    raw = np.zeros(int(np.prod(shape)) * np.dtype(dtype).itemsize + 127, np.uint8)
    start = -raw.ctypes.data % 128
    array = raw[start : raw.size - 127 + start].view(dtype).reshape(shape)
    if fill is not None:
        array[...] = fill
    return array


def naive_causal(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    s = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
    s[:, np.triu(np.ones(s.shape[1:], bool), 1)] = -np.inf
    p = np.exp(s - s.max(-1, keepdims=True))
    return p @ v / p.sum(-1, keepdims=True)


def attention_error(
    family: str, *faults: str, seqlen: int = 256, heads: int = 1, swizzle_k: int = 128
) -> float:
    """Run one of the small attention kernels and compare with float64."""
    rng = np.random.default_rng(0)
    q, k, v = (aligned((heads, seqlen, 64), np.float16) for _ in range(3))
    for x in (q, k, v):
        x[...] = rng.standard_normal(x.shape)
    o = aligned((heads, seqlen, 64), np.float16, np.nan)
    scale = float(np.log2(np.e) / 8)
    kernel = simulator.load(unit(f"{family}_forward", *faults))
    grid = (seqlen // 64, heads, 1)
    if family == "ampere":
        params = pack(q=q, k=k, v=v, o=o, seqlen=seqlen, scale_log2=scale)
        kernel.launch(grid, (128, 1, 1), 5 * 64 * 64 * 2, params.tobytes(), 0)
    else:
        maps = {
            name: simulator.encode_tensor_map(TensorMap(
                "float16", (64, seqlen, heads), (128, seqlen * 128), (64, 64, 1),
                swizzle_k if name == "k" else 128,
            ), x.ctypes.data)
            for name, x in {"q": q, "k": k, "v": v, "o": o}.items()
        }  # fmt: skip
        struct = pack(**maps, scale_log2=scale).tobytes()
        padded = struct + bytes(-len(struct) % 64)
        kernel.launch(grid, (256, 1, 1), 41 * 1024, padded, 0)
    return float(np.abs(o - naive_causal(q, k, v)).max())

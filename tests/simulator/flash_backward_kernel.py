"""The passes of flash_backward in the simulator: their macros, and a call that shows stray accesses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupy_flash.device import abi, simulator
from cupy_flash.testing import dead, hostile
from tests.simulator.flash_kernel import DTYPES, _fill_score, _strides

ROWS = ("lse", "dlse", "delta")


@dataclass(frozen=True)
class FlashBackward:
    """A compilation of flash_backward.cu, as `simulator.load` takes it; `step` is its pass.

    `slots` is as in query_ring.cuh: 0 registers, 1 dO has one slot, 2 Q and dO have two; `v_in_registers` is
    as in flash_tiles.
    """

    dtype: str
    head_dims: tuple[int, int]
    mask: str
    tile: tuple[int, int]
    threads: int = 256
    slots: int = 2
    turing: bool = False
    step: str = "dqkv"
    v_in_registers: bool = False

    source = "flash_backward.cu"

    @property
    def name(self) -> str:
        d, dv = self.head_dims
        dims = f"d{d}" if d == dv else f"d{d}x{dv}"
        kind = "_turing" if self.turing else ""
        return (
            f"flash_backward_{self.step}_{self.dtype}_{dims}_{self.mask}_{self.tile[0]}x{self.tile[1]}"
            f"_{self.slots}{kind}"
        )

    @property
    def element(self) -> np.dtype[Any]:
        element: np.dtype[Any] = np.dtype(DTYPES[self.dtype][1])
        return element

    @property
    def shared_bytes(self) -> int:
        (m, n), (d, dv) = self.tile, self.head_dims
        if self.step == "dqkv":
            queries = m * d * (1 if self.slots == 0 else 2) + m * dv * (2 if self.slots == 2 else 1)
            keys = n * (max(d, dv) if self.v_in_registers else d + dv)
            numbers = 4 * m if self.slots and self.element.itemsize == 2 else 0
            return self.element.itemsize * (keys + queries + 2 * m * n) + 4 * numbers
        if self.step == "dq":
            return self.element.itemsize * (m * (d + dv) + 2 * n * max(d, dv))
        return 0

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
            "CF_PASS": self.step,
            "CF_BLOCK_M": self.tile[0],
            "CF_BLOCK_N": self.tile[1],
            "CF_THREADS": self.threads,
            "CF_SLOTS": self.slots,
            "CF_V_IN_REGISTERS": int(self.v_in_registers),
            "CF_SHARED_BYTES": self.shared_bytes,
        }
        return {name: str(value) for name, value in values.items()}


@dataclass(frozen=True)
class Passes:
    """The launches of one backward pass: fast, or deterministic where `dq` has a tile of its own."""

    keys: FlashBackward
    dq: tuple[tuple[int, int], int] | None = None  # tile and threads

    @property
    def name(self) -> str:
        return self.keys.name.replace("_dqkv_", "_" if self.dq is None else "_deterministic_")

    @property
    def launches(self) -> tuple[FlashBackward, ...]:
        delta = replace(self.keys, step="delta", mask="band")
        if self.dq is None:
            return delta, self.keys, replace(self.keys, step="dq_convert", mask="band")
        tile, threads = self.dq
        return delta, self.keys, replace(self.keys, step="dq", tile=tile, threads=threads)


def backward(
    passes: Passes,
    arrays: Mapping[str, np.ndarray],
    *,
    cu_seqlens: tuple[np.ndarray, np.ndarray] | None = None,
    **options: Any,
) -> dict[str, np.ndarray]:
    """Launch the passes on do, q, k, v, o, lse and perhaps dlse; return dq, dk and dv.

    Packed arrays have batch 1 and `cu_seqlens` of q and of k. Options are those of the reference.
    """
    q, k, v = (arrays[name] for name in "qkv")
    batch, heads_q, rows, head_dim = q.shape
    lengths = (rows, k.shape[2])
    inputs = {name: hostile(x, style="padded" if name in ROWS else "aligned") for name, x in arrays.items()}
    extra = {name: hostile(options[name]) for name in ("mask", "bias") if options.get(name) is not None}
    results = {"d" + name: dead(arrays[name].shape, q.dtype, style="aligned") for name in "qkv"}
    delta = dead((batch, heads_q, rows), np.float32)
    params = np.zeros((), abi.BACKWARD)
    for name, guarded in {**inputs, **results, "delta": delta}.items():
        params["d_o" if name == "do" else name] = (guarded.view.ctypes.data, *_strides(guarded.view))
    shape = params["shape"]
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
    keep = _fill_score(params["score"], extra, options, heads_q, head_dim, lengths)

    m = passes.keys.tile[0]
    tiles = batch * -(-lengths[0] // m) if cu_seqlens is None else rows // m + batch
    sums = np.zeros((tiles, heads_q, m, passes.keys.head_dims[0]), np.float32)
    if passes.dq is None:
        params["dq_accumulator"] = sums.ctypes.data
    for variant in passes.launches:
        m, n = variant.tile
        keys = variant.step == "dqkv"
        blocks = batch * (k.shape[1] * -(-lengths[1] // n) if keys else heads_q * -(-lengths[0] // m))
        simulator.load(variant).launch(
            (blocks, 1, 1), (variant.threads, 1, 1), variant.shared_bytes, params.tobytes()
        )
    del keep, sums
    for guarded in (*inputs.values(), *extra.values()):
        guarded.check_untouched()
    for guarded in results.values():
        if cu_seqlens is None:
            guarded.check_written()
        else:
            guarded.check_guards()
    return {name: np.array(guarded.view) for name, guarded in results.items()}

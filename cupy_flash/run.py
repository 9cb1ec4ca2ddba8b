"""run: launch the kernels of a plan. It takes its outputs, workspace and stream, and allocates nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Protocol

from .abi import PACK
from .arrays import ITEM_BYTES, ArrayView
from .catalog import Box, Variant
from .launch import Plan
from .problem import Problem

__all__ = ["Driver", "Kernel", "Workspace", "run"]

_MAP_ALIGNMENT = 64  # of a struct that holds tensor maps


class Kernel(Protocol):
    """A loaded entry point, of the CUDA driver or of the simulator."""

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        params: bytes,
        stream: int,
    ) -> None:
        """Enqueue the kernel with one params struct by value."""

    def clear(self, pointer: int, nbytes: int, stream: int) -> None:
        """Enqueue setting memory to zero."""

    def encode_tensor_map(
        self,
        pointer: int,
        dtype: str,
        shape: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        swizzle: int,
    ) -> bytes:
        """Describe a tensor to bulk copies; parameters as of `tensor_map.TensorMap`."""


class Workspace(Protocol):
    """Memory for one call; it may be reused once the work enqueued before its release is done."""

    pointer: int


class Driver(Protocol):
    """What runs kernels: the module `driver` on CUDA devices, `simulator` on NumPy arrays."""

    def arch(self, device: int) -> str:
        """Architecture of a device, such as "sm_90"."""

    def multiprocessors(self, device: int) -> int:
        """Number of multiprocessors of a device."""

    def current_stream(self, device: int, library: str) -> int:
        """Handle of the stream on which the caller's library enqueues."""

    def empty(self, nbytes: int, device: int, library: str, stream: int) -> Workspace:
        """Allocate workspace from the pool of this library, for work on this stream."""

    def load(self, variant: Variant, device: int) -> Kernel:
        """Locate and load a variant, once per device."""

    def __hash__(self) -> int:
        """Modules are keys of the cache of loaded plans."""


def run(
    plan: Plan,
    problem: Problem,
    kernels: Sequence[Kernel],
    views: Mapping[str, ArrayView],
    workspace: int,
    stream: int,
) -> None:
    """Launch a plan's kernels in order.

    Parameters
    ----------
    plan : Plan
    problem : Problem
        The one that the plan was chosen for.
    kernels : sequence of Kernel
        One per launch of the plan, loaded.
    views : mapping of str to ArrayView
        Inputs and outputs by the names of abi.cuh.
    workspace : int
        Address of ``plan.workspace_bytes`` bytes, 256-byte aligned; 0 if none are needed.
    stream : int
        CUDA stream handle.
    """
    parts = plan.workspace_views(workspace)
    if parts:
        views = {**views, **parts}
    for part in plan.workspace:
        if part.name in plan.zeroed:
            kernels[0].clear(workspace + part.offset, part.nbytes, stream)
    packed: dict[str, bytes] = {}
    for launch, kernel in zip(plan.launches, kernels, strict=True):
        name = launch.variant.params
        seen = {**views, **{there: views[here] for there, here in launch.seen}} if launch.seen else views
        params = packed.get(name)
        if params is None:
            # Launches of one plan that take the same struct see the same views.
            more = (launch.head_bits,) if launch.head_bits else ()
            params = packed[name] = PACK[name](problem, seen, *more)
        if launch.variant.boxes:
            group = problem.heads_q // problem.heads_k if launch.head_bits else 1
            maps = []
            for box in launch.variant.boxes:
                view = seen[box.view]
                maps.append(
                    _tensor_map(
                        kernel.encode_tensor_map,
                        view.pointer,
                        view.dtype,
                        view.shape,
                        view.strides,
                        box,
                        group if box.grouped else 0,
                        launch.head_bits,
                    )
                )
            params = b"".join((*maps, params))
            params += bytes(-len(params) % _MAP_ALIGNMENT)
        kernel.launch(launch.grid, launch.block, launch.shared_bytes, params, stream)


# why cached here: looked up by what a view is, before anything is computed from it.
@lru_cache(maxsize=4096)
def _tensor_map(
    encode: Callable[..., bytes],
    pointer: int,
    dtype: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: Box,
    group: int = 0,
    head_bits: int = 0,
) -> bytes:
    """The tensor map of an array (batch, heads, rows, columns), for the tiles of swizzled_tile.cuh.

    With a group of so many heads it is of (batch, groups, rows, heads of a group, columns), and a box holds
    2**head_bits heads of each row, or of one row as many as fit.
    """
    size = ITEM_BYTES[dtype]
    extents: tuple[int, ...] = (box.rows, 1, 1)
    if group:
        batch, heads, rows, columns = shape
        shape = (batch, heads // group, rows, group, columns)
        strides = (strides[0], strides[1] * group, strides[2], strides[1], strides[3])
        of_a_row = min(1 << head_bits, box.rows)
        extents = (of_a_row, box.rows // of_a_row, 1, 1)
    # An axis of length 1 has no stride that means anything; one of length 0 is never copied from.
    bytes_apart = [16 if n <= 1 else s * size for n, s in zip(shape[:-1], strides[:-1], strict=True)]
    span = box.span or (128 if box.columns * size % 128 == 0 else 64)
    return encode(
        pointer,
        dtype,
        [max(n, 1) for n in reversed(shape)],
        bytes_apart[::-1],
        (span // size, *extents),
        span,
    )

"""run: launch the kernels of a plan. The caller allocates outputs and workspace, and gives the stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol, TypeAlias

from ..call.arrays import ITEM_BYTES, ArrayView
from ..call.problem import Problem
from ..plan.catalog import Box, Variant
from ..plan.heads_as_rows import problem_of_rows, views_of_rows
from ..plan.launch import Launch, Plan
from .abi import Params
from .tensor_map import TensorMap

__all__ = ["Dim3", "Driver", "Kernel", "Program", "Workspace"]

_MAP_ALIGNMENT = 64  # bytes, of a struct that holds tensor maps


Dim3: TypeAlias = tuple[int, int, int]


class Kernel(Protocol):
    """A loaded kernel, of the CUDA driver or of the simulator.

    Both implementations repeat the full signatures, so that mypy checks them against this protocol.
    """

    def launch(self, grid: Dim3, block: Dim3, shared_bytes: int, params: bytes, stream: int) -> None:
        """Enqueue the kernel.

        Parameters
        ----------
        grid, block : Dim3
            Blocks and threads; an empty grid launches nothing.
        shared_bytes : int
            Dynamic shared memory per block.
        params : bytes
            The params struct, passed by value.
        stream : int
            CUDA stream handle; the simulator has none.
        """

    def clear(self, pointer: int, nbytes: int, stream: int) -> None:
        """Enqueue setting memory to zero."""

    def encode_tensor_map(self, tensor: TensorMap, pointer: int) -> bytes:
        """Encode a tensor map for bulk copies on this device; errors as in `tensor_map.encode`."""


class Workspace(Protocol):
    """Memory for one call; it may be reused once the work enqueued before its release is done."""

    pointer: int  # address, 256-byte aligned; 0 for a workspace of 0 bytes


class Driver(Protocol):
    """A module that runs kernels: `driver` or `cuda` on CUDA devices, `simulator` on NumPy arrays."""

    def arch(self, device: int) -> str:
        """Architecture of a device, such as "sm_90"."""

    def multiprocessors(self, device: int) -> int:
        """Number of multiprocessors of a device."""

    def current_stream(self, device: int, library: str) -> int:
        """Handle of the current stream of the caller's library."""

    def empty(self, nbytes: int, device: int, library: str, stream: int) -> Workspace:
        """Allocate workspace from the pool of this library, for work on this stream."""

    def read(self, pointer: int, nbytes: int, device: int, stream: int) -> bytes:
        """Read device memory after all work on the stream has finished; the host waits."""

    def clear(self, pointer: int, nbytes: int, device: int, stream: int) -> None:
        """Enqueue setting memory to zero."""

    def load(self, variant: Variant, device: int) -> Kernel:
        """Locate and load a variant, once per device."""

    def __hash__(self) -> int:
        """Hash the driver, a key of the cache of loaded plans; modules are hashable."""


class _Map:
    """The tensor map of an array (batch, heads, rows, columns), for the tiles of hopper/swizzled_tile.cuh.

    With `group` heads in a group, the map is of (batch, groups, rows, heads of a group, columns), and a box
    holds 2**head_bits heads of each row, or as many heads of one row as fit.
    """

    __slots__ = ("_kernel", "_map", "name")

    def __init__(
        self, kernel: Kernel, name: str, view: ArrayView, box: Box, group: int = 0, head_bits: int = 0
    ) -> None:
        shape, strides, size = view.shape, view.strides, ITEM_BYTES[view.dtype]
        extents: tuple[int, ...] = (box.rows, 1, 1)
        if group:
            batch, heads, rows, columns = shape
            shape = (batch, heads // group, rows, group, columns)
            strides = (strides[0], strides[1] * group, strides[2], strides[1], strides[3])
            of_a_row = min(1 << head_bits, box.rows)
            extents = (of_a_row, box.rows // of_a_row, 1, 1)
        # The stride of an axis of length 1 is arbitrary; an axis of length 0 is never copied.
        bytes_apart = [16 if n <= 1 else s * size for n, s in zip(shape[:-1], strides[:-1], strict=True)]
        span = box.span or (128 if box.columns * size % 128 == 0 else 64)
        self.name, self._kernel = name, kernel
        self._map = TensorMap(
            view.dtype,
            shape=tuple(max(n, 1) for n in reversed(shape)),
            strides=tuple(reversed(bytes_apart)),
            box=(span // size, *extents),
            swizzle=span,
        )

    # why cached by address: pools reuse the same few addresses, and the driver takes microseconds.
    @lru_cache(maxsize=4096)  # noqa: B019  (programs live as long as their entry in the cache of calls)
    def at(self, pointer: int) -> bytes:
        """The map of the array at this address."""
        return self._kernel.encode_tensor_map(self._map, pointer)


class _Step(NamedTuple):
    """One launch, without addresses.

    Attributes
    ----------
    launch : Launch
    kernel : Kernel
    struct : int
        Index of its params struct in the program.
    maps : tuple of _Map
        Tensor maps, which precede the params.
    padding : bytes
        Zeros that pad a struct with tensor maps to its alignment.
    """

    launch: Launch
    kernel: Kernel
    struct: int
    maps: tuple[_Map, ...]
    padding: bytes


class Program:
    """The launches of a plan for arrays of known shapes and strides. It may run in several threads.

    There is one loaded kernel per launch. Views are inputs and outputs by their names in abi.cuh; only
    shapes, strides and dtypes are used.
    """

    __slots__ = ("_kernels", "_parts", "_steps", "_structs", "_zeroed")

    def __init__(
        self, plan: Plan, problem: Problem, kernels: Sequence[Kernel], views: Mapping[str, ArrayView]
    ) -> None:
        views = {**views, **plan.workspace_views()}
        self._kernels = tuple(kernels)
        self._parts = tuple((part.name, part.offset) for part in plan.workspace)
        # A batch of empty packed sequences launches nothing, so that nothing has to be cleared.
        zeroed = plan.zeroed if kernels else ()
        self._zeroed = tuple((p.offset, p.nbytes) for p in plan.workspace if p.name in zeroed)
        # Launches of one plan that take the same kind of struct have the same views.
        structs: dict[str, Params] = {}
        steps = []
        for launch, kernel in zip(plan.launches, kernels, strict=True):
            variant, names = launch.variant, dict(launch.seen)
            seen = {**views, **{there: views[here] for there, here in names.items()}}
            described = problem
            if launch.heads_as_rows:
                described, seen = (
                    problem_of_rows(problem),
                    views_of_rows(seen, problem.heads_q // problem.heads_k),
                )
            if variant.params not in structs:
                structs[variant.params] = Params(variant.params, described, seen, launch, names)
            group = problem.heads_q // problem.heads_k if launch.head_bits else 1
            maps = tuple(
                _Map(kernel, names.get(box.view, box.view), seen[box.view], box,
                     group if box.grouped else 0, launch.head_bits)
                for box in variant.boxes
            )  # fmt: skip
            padding = bytes(-structs[variant.params].nbytes % _MAP_ALIGNMENT if maps else 0)
            steps.append(_Step(launch, kernel, list(structs).index(variant.params), maps, padding))
        self._structs, self._steps = tuple(structs.values()), tuple(steps)

    def run(self, numbers: dict[str, int], workspace: int, stream: int) -> None:
        """Launch the kernels in order.

        Parameters
        ----------
        numbers : dict of str to int
            Addresses of the views, `abi.SEED` and `abi.LENGTH`; this call adds addresses in the workspace.
        workspace : int
            Address of ``plan.workspace_bytes`` bytes, 256-byte aligned; 0 if none are needed.
        stream : int
            CUDA stream handle.
        """
        for name, offset in self._parts:
            numbers[name] = workspace + offset
        for offset, nbytes in self._zeroed:
            self._kernels[0].clear(workspace + offset, nbytes, stream)
        structs = [struct.of(numbers) for struct in self._structs]
        for launch, kernel, which, maps, end in self._steps:
            params = structs[which]
            if maps:
                params = b"".join((*[x.at(numbers[x.name]) for x in maps], params, end))
            kernel.launch(launch.grid, launch.block, launch.variant.shared_bytes, params, stream)

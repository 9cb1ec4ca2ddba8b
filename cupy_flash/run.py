"""run: launch the kernels of a plan. It takes its outputs, workspace and stream, and allocates nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from .abi import pack_backward, pack_forward
from .arrays import ArrayView
from .plan import Plan
from .problem import Problem

__all__ = ["Kernel", "run"]


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
    parts = plan.workspace_views(problem, workspace)
    pack = pack_forward if problem.direction == "forward" else pack_backward
    params = pack(problem, {**views, **parts} if parts else views)
    for launch, kernel in zip(plan.launches, kernels, strict=True):
        kernel.launch(launch.grid, launch.block, launch.shared_bytes, params, stream)

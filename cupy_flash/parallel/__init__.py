"""Attention over one sequence split over several processes (context parallelism).

`schedules` selects `ring`, `alltoall` or `allgather` for a call. Each has a forward and a backward pass, and
sends messages through a `group.Link`, which an adapter provides: `cupy_flash.torch`, or `mpi`.
"""

from .parts import packed_positions, positions
from .schedules import explain

__all__ = ["explain", "packed_positions", "positions"]

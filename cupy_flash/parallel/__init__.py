"""Attention over a sequence that several processes hold in parts (context parallelism).

`schedules` says which of `ring`, `alltoall` and `allgather` a call runs: each is a forward and a backward
pass, whose messages go through a `group.Link` that an adapter makes: `cupy_flash.torch`, or `mpi`.
"""

from .parts import packed_positions, positions
from .schedules import explain

__all__ = ["explain", "packed_positions", "positions"]

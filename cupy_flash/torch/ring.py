"""Ring attention over torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from .. import ring
from ..call.options import RecordedRingOptions, defaults
from ..call.reproducible import refuse_reproducible
from ..call.signature import takes
from ..errors import UnsupportedError
from .given import refuse_lost_gradients
from .ops import first_derivative_only, refuse_forward_mode

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ring_attention"]


class _Link:
    """Point-to-point sends within a process group."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        ends = ((self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks)
        self._next, self._before = ends if group is None else (dist.get_global_rank(group, r) for r in ends)

    def pass_on(self, arrays: tuple[Any, ...]) -> Callable[[], tuple[Any, ...]]:
        sent = [x.contiguous() for x in arrays]
        received = [torch.empty_like(x) for x in sent]
        sends = [dist.P2POp(dist.isend, x, self._next, self.group) for x in sent]
        receives = [dist.P2POp(dist.irecv, x, self._before, self.group) for x in received]
        works = dist.batch_isend_irecv(sends + receives)

        def arrived() -> tuple[Any, ...]:
            ring.all_done(work.wait for work in works)
            return tuple(received)

        return arrived

    def wide(self, x: Any) -> Any:
        return x.to(torch.promote_types(x.dtype, torch.float32), copy=True)

    def narrow(self, x: Any, like: Any) -> Any:
        return x.to(like.dtype)

    def beside(self, rows: np.ndarray[Any, Any], like: Any) -> Any:
        return torch.from_numpy(rows).to(like.device)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: Any,
        k: Any,
        v: Any,
        group: Any,
        causal: bool,
        options: dict[str, Any],
        cut: Any,
    ) -> tuple[Any, Any]:
        o, lse = ring.forward(_Link(group), q, k, v, causal, options, cut)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.rest = group, causal, options, cut
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any) -> Any:
        group, causal, options, cut = ctx.rest
        q, k, v, o, lse = saved = ctx.saved_tensors
        # why even without a gradient: the other processes wait for this one's keys.
        do = torch.zeros_like(o) if do is None else do
        if options["reproducible"] is None and torch.are_deterministic_algorithms_enabled():
            options = {**options, "reproducible": "run"}
        with torch.no_grad():
            grads = ring.backward(_Link(group), do, q, k, v, o, lse, dlse, causal, options, cut)
        return *first_derivative_only(grads[:3], (do, dlse, *saved)), None, None, None, None


@takes(RecordedRingOptions)
def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: Any = None,
    cu_seqlens: torch.Tensor | None = None,
    return_lse: bool = False,
    **options: Unpack[RecordedRingOptions],
) -> Any:
    """Ring attention: `attention` over a sequence split over the processes of a group, with gradients.

    Parameters
    ----------
    q, k, v : Tensor
        This process's parts, of one length in all processes: the rows `cupy_flash.ring.positions` names, in
        that order. The whole sequence attends to itself.
    group : ProcessGroup, optional
        Default: all processes. Every one of them makes the call, and runs its backward pass.
    cu_seqlens : Tensor of int32, shape (sequences + 1,), optional
        Offsets of this process's rows of packed sequences, the same in all processes: q, k and v are then
        (rows, heads, head_dim), the rows that `cupy_flash.ring.packed_positions` names. They are read back,
        which waits for the stream.
    {options: As in `attention`.}
    return_lse : bool
        As in `attention`.

    Returns
    -------
    Tensor, or (Tensor, Tensor) with return_lse
        This process's rows.

    Raises
    ------
    UnsupportedError
        torch.distributed is not initialised.
    InvalidArgumentsError, CubinNotFoundError
        As in `attention`; also an odd number of rows with causal.
    """
    every: dict[str, Any] = {**defaults(RecordedRingOptions), **options}
    causal = every.pop("causal")
    refuse_reproducible(every["reproducible"], "ring_attention")
    refuse_lost_gradients(**every)
    if not (dist.is_available() and dist.is_initialized()):
        raise UnsupportedError(
            "torch.distributed is not initialised.", hint="torch.distributed.init_process_group"
        )
    refuse_forward_mode(q, k, v)
    if cu_seqlens is not None:
        every["layout"] = "bshd"
    o, lse = _Ring.apply(q, k, v, group, causal, every, cu_seqlens)
    return (o, lse) if return_lse else o

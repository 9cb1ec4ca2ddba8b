"""Ring attention over torch.distributed."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from ..call.checks import flag, one_of
from ..call.options import RingOptions, defaults
from ..call.public_names import type_phrase
from ..call.signature import takes
from ..cpu.core.worker_thread import run_in_worker
from ..errors import InvalidArgumentsError, UnsupportedError
from ..parallel import schedules
from ..parallel.agreement import Agreement
from ..parallel.group import LocalCall, all_done
from .eager import in_batches
from .inputs import cast_by_context, check_tensors, refuse_lost_gradients, widened
from .ops import first_derivative_only, in_forward_mode

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["attend", "link_of", "ring_attention"]


# Devices for whose messages the host waits. On others a stream waits; the current stream is per thread.
_HOSTS = ("cpu",)


class _History:
    """The calls of this process in a group: how many have begun, and which arguments all processes agreed on.

    After an interrupt, such as Ctrl-C, no more calls are possible: the next one would receive messages that
    are still in flight.
    """

    def __init__(self) -> None:
        self.calls, self.known = 0, set[bytes]()
        self._interrupted = False
        self._left: list[Callable[[], None]] = []

    def refuse(self) -> None:
        """Refuse a call after an interrupted one."""
        if self._interrupted:
            raise UnsupportedError(
                "an interrupt ended a call in this group that waited for other processes.",
                hint="torch.distributed.destroy_process_group, then the group again, in all its processes",
            )

    def finish(self, wait: Callable[[], None], device: torch.device) -> None:
        """Wait for messages; for those of a CPU in a worker thread, so that the main one handles signals."""
        if self._interrupted:
            self._left.append(wait)  # why: it keeps the buffers alive, which are still written to
        elif device.type not in _HOSTS or threading.current_thread() is not threading.main_thread():
            wait()
        else:
            self._finish_in_worker(wait)

    def _finish_in_worker(self, wait: Callable[[], None]) -> None:
        errors: list[BaseException] = []

        def wait_and_keep_error() -> None:
            try:
                wait()
            except BaseException as error:
                errors.append(error)

        try:
            done = run_in_worker(wait_and_keep_error)
            # why a timeout: a signal that arrives right before a wait begins is handled when the wait ends.
            while not done.wait(timeout=1.0):
                pass
        except BaseException:
            self._interrupted = True
            raise
        if errors:
            raise errors[0]


_histories: WeakKeyDictionary[Any, _History] = WeakKeyDictionary()


def _all_gather(group: Any, history: _History, x: Any) -> list[Any]:
    """The tensors x of all processes of a group, all of one shape."""
    gathered = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    work = dist.all_gather(gathered, x, group=group, async_op=True)
    history.finish(lambda: all_done([work.wait]), x.device)
    return gathered


def _gather(group: Any, history: _History, device: torch.device, own: bytes) -> list[bytes]:
    """The bytes of all processes of a group, all of one length."""
    mine = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device)
    return [bytes(x.tolist()) for x in _all_gather(group, history, mine)]


class _Link:
    """The communication of one call within a process group."""

    def __init__(
        self, group: Any, device: torch.device, agreement: str | None, forward: int | None = None
    ) -> None:
        self._given = group, device, agreement
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._of_all = dist.get_process_group_ranks(group)
        self.history = history = _histories.setdefault(group, _History())
        history.refuse()
        history.calls += 1
        self._number = history.calls
        # why not every call on a GPU: the host would wait for everything queued there.
        when = agreement or ("call" if device.type == "cpu" else "signature")
        # why no method: a link in a reference cycle keeps its group alive, and the threads of a group that is
        # alive at exit abort the process.
        gather = functools.partial(_gather, group, history, device)
        self.agreement = Agreement(
            None if when == "never" else gather,
            {"number of the call": self._number, "backward of call": forward},
            history.known if when == "signature" else None,
        )

    def returning(self) -> _Link:
        """The link of the backward pass of this call."""
        return _Link(*self._given, self._number)

    def all_gather(self, x: Any) -> list[Any]:
        """The tensors x of all processes, all of one shape."""
        return _all_gather(self.group, self.history, x)

    def pass_on(self, arrays: tuple[Any, ...], into: tuple[Any, ...], by: int) -> Callable[[], None]:
        to, source = (self._of_all[(self.rank + n) % self.ranks] for n in (by, -by))
        sends = [dist.P2POp(dist.isend, x, to, self.group) for x in arrays]
        receives = [dist.P2POp(dist.irecv, x, source, self.group) for x in into]
        works = dist.batch_isend_irecv(sends + receives)
        return lambda: self.history.finish(lambda: all_done(work.wait for work in works), arrays[0].device)

    def contiguous(self, x: Any) -> Any:
        return x.contiguous()

    def reserve(self, like: Any, count: int, wide: bool) -> Any:
        return like.new_empty(count, dtype=self._sum(like) if wide else like.dtype)

    def _sum(self, x: Any) -> torch.dtype:
        return torch.promote_types(x.dtype, torch.float32)

    def upcast(self, x: Any) -> Any:
        return x.to(self._sum(x), copy=True)

    def cast_like(self, x: Any, like: Any) -> Any:
        return x.to(like.dtype)

    def index_array(self, rows: np.ndarray[Any, Any], like: Any) -> Any:
        return torch.from_numpy(rows).to(like.device)


def link_of(group: Any, device: torch.device) -> _Link:
    """The link of a call that sends messages directly, outside of ring attention."""
    return _Link(group, device, None)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: Any,
        k: Any,
        v: Any,
        sinks: Any,
        link: _Link,
        recorded: list[str],
        causal: bool,
        options: dict[str, Any],
        cu_seqlens: Any,
        return_lse: bool,
    ) -> tuple[Any, Any]:
        with_sinks = {**options, "sinks": sinks}
        arrays, terms = {"q": q, "k": k, "v": v}, {"gradients of": recorded}
        o, lse = schedules.forward(LocalCall(link, arrays, causal, with_sinks, cu_seqlens, terms))
        ctx.save_for_backward(q, k, v, sinks, o, lse)
        ctx.rest = link, recorded, causal, options, cu_seqlens, return_lse
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any) -> Any:
        link, recorded, causal, options, cu_seqlens, return_lse = ctx.rest
        link = link.returning()
        with link.agreement.refusals():  # memory may run out here too
            if in_batches(do) or in_batches(dlse):
                raise UnsupportedError(
                    "ring_attention has no gradients of several directions at once.",
                    hint="is_grads_batched=False",
                )
            q, k, v, sinks, o, lse = saved = ctx.saved_tensors
            # why even without gradients: the other processes wait for this one's keys, and exchange dlse.
            do = torch.zeros_like(o) if do is None else do
            dlse = torch.zeros_like(lse) if dlse is None and return_lse else dlse
        if options["reproducible"] is None and torch.are_deterministic_algorithms_enabled():
            options = {**options, "reproducible": "run"}
        with torch.no_grad():
            with_sinks = {**options, "sinks": sinks}
            wanted = "k" in recorded, "v" in recorded
            arrays = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse, "dlse": dlse}
            grads = schedules.backward(LocalCall(link, arrays, causal, with_sinks, cu_seqlens), wanted)
        firsts = (*grads[:3], grads.dsinks)
        return *first_derivative_only(firsts, (do, dlse, *saved), of="ring_attention"), *[None] * 6


def _group(group: Any) -> Any:
    """The process group of an argument; None is all processes."""
    if group is None:
        return dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER or (
        isinstance(group, dist.ProcessGroup) and dist.get_rank(group) < 0
    ):
        raise InvalidArgumentsError(
            f"process {dist.get_rank()} is not in the group.",
            hint="the call in the processes of the group only",
        )
    if not isinstance(group, dist.ProcessGroup):
        is_mesh = type(group).__name__ == "DeviceMesh"
        names = getattr(group, "mesh_dim_names", None) or ("cp",)
        raise InvalidArgumentsError(
            f"group is {type_phrase(group)}, not a process group.",
            hint=f'group=mesh.get_group("{names[-1]}")'
            if is_mesh
            else "one from torch.distributed.new_group",
        )
    return group


def _refuse(every: dict[str, Any], packed: bool) -> None:
    """Refuse options that the schedule does not support, and gradients that would be lost."""
    schedules.check(every, packed)
    refuse_lost_gradients(**{name: x for name, x in every.items() if name != "sinks"})


def _attend(
    q: Any,
    k: Any,
    v: Any,
    group: Any,
    agreement: Any,
    cu_seqlens: Any,
    return_lse: bool,
    every: dict[str, Any],
    check: Callable[[], None] | None = None,
) -> Any:
    """O and LSE; `check` may raise an error, which is reported to the other processes."""
    if not (agreement is None or one_of(agreement, ("call", "signature", "never"))):
        raise InvalidArgumentsError(
            f"agreement is {agreement!r}.", hint='agreement="call", "signature", "never" or None'
        )
    device = q.device if isinstance(q, torch.Tensor) else torch.device("cpu")
    link = _Link(_group(group), device, agreement)
    causal, sinks = every.pop("causal"), every.pop("sinks")
    named = {"q": q, "k": k, "v": v, "sinks": sinks}
    with link.agreement.refusals():
        if check is not None:
            check()
        flag(return_lse, "return_lse")
        _refuse(every, cu_seqlens is not None)
        check_tensors(("q", "k", "v"), **named, alibi_slopes=every["alibi_slopes"])
        if torch._C._are_functorch_transforms_active():
            raise UnsupportedError(
                "ring_attention is not supported inside transforms of torch.func: grad, vjp, jvp, vmap.",
                hint="the call outside of it, then backward(); for vmap one call over a larger batch",
            )
        if in_forward_mode(q, k, v, sinks):
            raise UnsupportedError(
                "ring_attention has no forward-mode derivative.", hint="reverse mode: backward()"
            )
        q, k, v = cast_by_context(q, k, v)
        named = {"q": q, "k": k, "v": v, "sinks": widened(sinks, q)}
    recorded = [name for name, x in named.items() if x is not None and x.requires_grad]
    if not torch.is_grad_enabled():
        recorded = []
    return _Ring.apply(*named.values(), link, recorded, causal, every, cu_seqlens, return_lse)


def attend(*call: Any) -> Any:
    """`_attend` hidden from torch.compile, which would trace the messages into its graph."""
    dynamo = sys.modules.get("torch._dynamo")
    # why twice: after the graph break that leads here, torch.compile would resume inside.
    return (_attend if dynamo is None else dynamo.disable(_attend))(*call)


attend._torchdynamo_disable = True  # type: ignore[attr-defined]
attend._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
    "ring_attention sends messages between its steps, and is not part of a compiled program: fullgraph=False"
)


@takes(RingOptions)
def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: Any = None,
    cu_seqlens: torch.Tensor | None = None,
    agreement: Literal["call", "signature", "never"] | None = None,
    return_lse: bool = False,
    **options: Unpack[RingOptions],
) -> Any:
    """Ring attention: `attention` over a sequence split over the processes of a group, with gradients.

    Parameters
    ----------
    q, k, v : Tensor
        This process's parts: the rows that `cupy_flash.parallel.positions` returns, in that order. Inside
        torch.autocast they are cast.
    group : ProcessGroup, optional
        Default: all processes. Every process must make the call, and run its backward pass.
    cu_seqlens : Tensor of int32, shape (sequences + 1,), optional
        Offsets of this process's rows of packed sequences, the same in all processes: q, k and v are then
        (rows, heads, head_dim), the rows that `cupy_flash.parallel.packed_positions` returns. They are read
        back, which waits for the stream.
    mask : array of bool, Spans, BlockMask, or tuple of these, optional
        Which keys a query may attend to, as in `cupy_flash.attention`: of the whole sequence, equal in all
        processes. With schedule "alltoall" or "allgather"; for a mask with blocks, "allgather" requires that
        each contiguous range of rows of a process begins at a multiple of 16 queries.
    sinks : Tensor, optional
        As in `cupy_flash.torch.attention`.
    agreement : {"call", "signature", "never"}, optional
        When processes compare their arguments, 32 bytes each: before every call, before the first call with
        the same arguments, or never. Default: "call" on a CPU, "signature" on a GPU, where it waits for the
        stream. Without it, processes that differ get wrong results, or the communication library aborts them.
    {options}
    return_lse : bool
        As in `attention`.

    Returns
    -------
    Tensor, or (Tensor, Tensor) with return_lse
        This process's rows. The gradient of sinks is this process's share; sum it over the group.

    Raises
    ------
    UnsupportedError
        torch.distributed is not initialised.
    InvalidArgumentsError, CubinNotFoundError
        As in `attention`; also rows other than `cupy_flash.parallel.positions`, and arguments that differ
        between processes.
    """
    every: dict[str, Any] = {**defaults(RingOptions), **options}
    if not (dist.is_available() and dist.is_initialized()):
        _refuse(every, cu_seqlens is not None)
        raise UnsupportedError(
            "torch.distributed is not initialised.", hint="torch.distributed.init_process_group"
        )
    if cu_seqlens is not None:
        every["layout"] = "bshd"
    o, lse = attend(q, k, v, group, agreement, cu_seqlens, return_lse, every)
    return (o, lse) if return_lse else o

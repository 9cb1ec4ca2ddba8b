"""Ring attention over mpi4py for NumPy and CuPy arrays, given a communicator; imports no MPI.

Run with, say, ``mpiexec -n 4 python script.py``:

    from mpi4py import MPI
    from cupy_flash.parallel.mpi import ring_attention, ring_attention_backward
    from cupy_flash.parallel import positions

    comm = MPI.COMM_WORLD
    mine = positions(comm.rank, comm.size, seqlen, causal=True)
    o, lse = ring_attention(q[:, :, mine], k[:, :, mine], v[:, :, mine], comm, causal=True)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..api import Gradients
from ..call.adopt import adopt
from ..call.arrays import CPU
from ..call.checks import one_of
from ..call.options import RingGradientOptions, RingOptions, defaults
from ..call.public_names import type_phrase
from ..call.signature import takes
from ..errors import InvalidArgumentsError
from . import schedules
from .agreement import Agreement
from .group import LocalCall, all_done

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ring_attention", "ring_attention_backward"]


class _Link:
    """A link that sends bytes, as MPI has no 16-bit floats."""

    def __init__(self, comm: Any, agreement: str) -> None:
        if not hasattr(comm, "Get_rank"):
            raise InvalidArgumentsError(f"comm is {type_phrase(comm)}.", hint="mpi4py.MPI.COMM_WORLD")
        if not one_of(agreement, ("call", "never")):
            raise InvalidArgumentsError(
                f"agreement is {agreement!r}.", hint='agreement="call" or agreement="never"'
            )
        self.comm = comm
        self.rank, self.ranks = comm.Get_rank(), comm.Get_size()
        self.agreement = Agreement(self._gather if agreement == "call" else None)

    def _gather(self, own: bytes) -> list[bytes]:
        everyone = np.empty((self.ranks, len(own)), np.uint8)
        self.comm.Allgather(np.frombuffer(own, np.uint8), everyone)
        return [x.tobytes() for x in everyone]

    def pass_on(self, arrays: tuple[Any, ...], into: tuple[Any, ...], by: int) -> Callable[[], None]:
        if adopt(arrays[0], "k").device != CPU:
            import cupy

            # sync: MPI does not wait for the stream, so its pending writes to the arrays must be done.
            cupy.cuda.get_current_stream().synchronize()
        sent = list(arrays)
        requests = []
        try:
            for tag, (out, place) in enumerate(zip(arrays, into, strict=True)):
                requests.append(self.comm.Irecv(_bytes(place), (self.rank - by) % self.ranks, tag))
                requests.append(self.comm.Isend(_bytes(out), (self.rank + by) % self.ranks, tag))
        except BaseException:
            for request in requests:
                request.Cancel()
            all_done(request.Wait for request in requests)
            raise

        def arrived() -> None:
            all_done(request.Wait for request in requests)
            sent.clear()  # why: MPI reads the arrays until here

        return arrived

    def contiguous(self, x: Any) -> Any:
        return x if x.flags.c_contiguous else x.copy("C")

    def reserve(self, like: Any, count: int, wide: bool) -> Any:
        return type(like)((count,), self._sum(like) if wide else like.dtype)

    def _sum(self, x: Any) -> str:
        return "float64" if x.dtype == "float64" else "float32"

    def upcast(self, x: Any) -> Any:
        return x.astype(self._sum(x))

    def cast_like(self, x: Any, like: Any) -> Any:
        return x.astype(like.dtype, copy=False)

    def index_array(self, rows: np.ndarray[Any, Any], like: Any) -> Any:
        if adopt(like, "q").device == CPU:
            return rows
        import cupy

        return cupy.asarray(rows)


def _bytes(x: Any) -> Any:
    return x.reshape(-1).view(np.uint8)


def _arrays(link: _Link, named: dict[str, Any]) -> dict[str, Any]:
    """Check the arrays of a call; the link allocates others like them."""
    with link.agreement.refusals():
        return {name: _array(x, name) for name, x in named.items()}


def _array(x: Any, name: str) -> Any:
    """A NumPy array, also of a subclass such as memmap, as a plain one; or a CuPy array."""
    if x is None and name == "dlse":
        return None
    adopt(x, name)
    if isinstance(x, np.ndarray):
        return np.asarray(x)
    if type(x).__module__.partition(".")[0] != "cupy":
        raise InvalidArgumentsError(
            f"{name} is {type_phrase(x)}; what goes over MPI is an array of NumPy's or CuPy's.",
            hint=f"numpy.asarray({name}); or ring_attention of cupy_flash.torch or cupy_flash.jax",
        )
    return x


@takes(RingOptions)
def ring_attention(
    q: Any, k: Any, v: Any, comm: Any, *,
    cu_seqlens: Any = None, agreement: Literal["call", "never"] = "call", **options: Unpack[RingOptions],
) -> tuple[Any, Any]:  # fmt: skip
    """Ring attention: `cupy_flash.attention` over a sequence split over the processes of a communicator.

    Parameters
    ----------
    q, k, v : array
        This process's parts: the rows that `cupy_flash.parallel.positions` returns, in that order. NumPy
        arrays, or CuPy arrays with a CUDA-aware MPI.
    comm : mpi4py.MPI.Comm
        Every process of it must make the call. Uses the tags 0 to 6.
    cu_seqlens : array of int32, shape (sequences + 1,), optional
        Offsets of this process's rows of packed sequences, the same in all processes: q, k and v are then
        (rows, heads, head_dim), the rows that `cupy_flash.parallel.packed_positions` returns. Offsets on a
        GPU are read back, which waits for the stream.
    mask : array of bool, Spans, BlockMask, or tuple of these, optional
        Which keys a query may attend, as in `cupy_flash.attention`: the mask of the whole sequence, the same
        in all processes. Needs schedule "alltoall" or "allgather"; with "allgather" and a BlockMask, each
        stretch of rows that a process holds begins at a multiple of 16 queries.
    agreement : {"call", "never"}
        Whether processes compare their arguments before every call, 32 bytes from each. With "never",
        processes whose calls differ get wrong results, or the MPI library aborts.
    {options}

    Returns
    -------
    o, lse : array
        This process's rows.

    Raises
    ------
    InvalidArgumentsError, UnsupportedError, CubinNotFoundError
        As in `cupy_flash.attention`; also rows that are not those of `cupy_flash.parallel.positions`, and
        arguments that are not the same in all processes.
    """
    every: dict[str, Any] = {**defaults(RingOptions), **options}
    if cu_seqlens is not None:
        every["layout"] = "bshd"
    link, causal = _Link(comm, agreement), every.pop("causal")
    arrays = _arrays(link, {"q": q, "k": k, "v": v})
    return schedules.forward(LocalCall(link, arrays, causal, every, cu_seqlens))


@takes(RingGradientOptions)
def ring_attention_backward(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, comm: Any, *,
    cu_seqlens: Any = None, agreement: Literal["call", "never"] = "call", wanted: Sequence[str] = ("k", "v"),
    **options: Unpack[RingGradientOptions],
) -> Gradients[Any]:  # fmt: skip
    """Gradients of `ring_attention`.

    Parameters
    ----------
    do : array
        Gradient of the loss with respect to this process's o.
    q, k, v, comm, cu_seqlens, agreement
        As given to `ring_attention`.
    wanted : sequence of "k" and "v"
        Which of these need a gradient, the same in all processes. Others are not sent, and are None.
    {options: As given to `ring_attention`.}
    o, lse : array
        As returned by `ring_attention`.
    dlse
        As in `cupy_flash.attention_backward`.

    Returns
    -------
    Gradients
        dq, dk and dv of this process's parts; dsinks is its contribution, to be summed over the processes.

    Raises
    ------
    InvalidArgumentsError, UnsupportedError, CubinNotFoundError
        As in `ring_attention`.
    """
    every: dict[str, Any] = {**defaults(RingGradientOptions), **options}
    dlse, causal = every.pop("dlse"), every.pop("causal")
    if not (isinstance(wanted, (tuple, list)) and all(one_of(x, ("k", "v")) for x in wanted)):
        raise InvalidArgumentsError(f"wanted is {wanted!r}.", hint='wanted=("k", "v"), ("v",) or ()')
    keys = "k" in wanted, "v" in wanted
    if cu_seqlens is not None:
        every["layout"] = "bshd"
    link = _Link(comm, agreement)
    arrays = _arrays(link, {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse, "dlse": dlse})
    terms = {"gradients of": [name for name, x in zip("kv", keys, strict=True) if x]}
    return schedules.backward(LocalCall(link, arrays, causal, every, cu_seqlens, terms), keys)

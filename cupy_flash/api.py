"""The calls: adopt, describe, choose, locate and load, run; each verb once, in that order."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import lru_cache
from types import GenericAlias
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, overload

from . import arrays
from .arrays import ArrayView, adopt, finished
from .checks import flag
from .errors import InvalidArguments, Unsupported, names_its_options
from .operands import RESULTS_OF_FLOAT8, lift, lower_shape, table_of
from .options import Options
from .plan import Plan, choose
from .problem import Problem, describe
from .run import Driver, Kernel, run
from .signature import Array, DenseOptions

__all__ = ["Gradients", "attention", "attention_backward"]

if TYPE_CHECKING:
    from typing_extensions import Unpack

    class Gradients(NamedTuple, Generic[Array]):  # Python 3.10 has no generic named tuples
        """The same to a checker of types, which knows their library."""

        dq: Array
        dk: Array
        dv: Array
        dbias: Any = None
        dsinks: Any = None

else:

    class Gradients(NamedTuple):
        """What `attention_backward` returns: arrays of the library, device and dtype of their inputs.

        Attributes
        ----------
        dq, dk, dv : array
            Shapes of q, k, v.
        dbias : array or None
            Shape and dtype of the bias, summed over the axes along which it was broadcast.
        dsinks : array or None
            (heads,).
        """

        dq: Any
        dk: Any
        dv: Any
        dbias: Any = None
        dsinks: Any = None

        __class_getitem__ = classmethod(GenericAlias)


@overload
def attention(
    q: Array, k: Array, v: Array, *,
    return_lse: Literal[False] = False, out: Array | None = None, **options: Unpack[DenseOptions],
) -> Array: ...  # fmt: skip
@overload
def attention(
    q: Array, k: Array, v: Array, *,
    return_lse: Literal[True], out: Array | None = None, **options: Unpack[DenseOptions],
) -> tuple[Array, Any]: ...  # fmt: skip
@overload
def attention(
    q: Array, k: Array, v: Array, *,
    return_lse: bool, out: Array | None = None, **options: Unpack[DenseOptions],
) -> Array | tuple[Array, Any]: ...  # fmt: skip
@names_its_options
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    align: str | int | None = None,
    mask: Any = None,
    bias: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    dropout: float = 0.0,
    seed: int | None = None,
    layout: str = "bhsd",
    precision: str | None = None,
    tile: tuple[int, int] | None = None,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    return_lse: bool = False,
    out: Any = None,
) -> Any:
    """Exact attention, softmax(scale q k^T + bias) v, in memory linear in the sequence length.

    Scores pass through, in this order: scale, softcap, bias, ALiBi, then mask, causal and window, then
    the softmax, then dropout.

    Parameters
    ----------
    q : array, shape (batch, heads_q, seqlen_q, head_dim)
        float16, bfloat16, float32, float64 or float8_e4m3fn; NumPy, CuPy, torch, JAX or any DLPack array,
        any strides. Rank 3 is one batch, rank 2 one head.
    k : array, shape (batch, heads_k, seqlen_k, head_dim)
        heads_q is a multiple of heads_k (grouped-query attention).
    v : array, shape (batch, heads_k, seqlen_k, head_dim_v)
        head_dim_v may differ from head_dim.
    causal : bool
        A query sees keys at or before its position only.
    window : (left, right), optional
        A query sees ``left`` keys before and ``right`` keys after its position, inclusive; None is open.
    align : {"top_left", "bottom_right"} or int, optional
        Key position of query 0: 0, seqlen_k - seqlen_q, or that number. Needed by causal, window and
        alibi_slopes if the lengths differ.
    mask : array of bool, optional
        True where a query may attend; broadcasts to (batch, heads_q, seqlen_q, seqlen_k).
    bias : array, optional
        Added to the scaled scores; any floating dtype; broadcasts like mask. -inf masks.
    scale : float, optional
        Default head_dim ** -0.5.
    softcap : float, optional
        scores become softcap * tanh(scores / softcap).
    alibi_slopes : array, shape (heads_q,) or (batch, heads_q), optional
        float32 (float64 for float64 inputs); adds ``-slope * |query position - key position|``.
    sinks : array, shape (heads_q,), optional
        float32 (float64 for float64 inputs); adds exp(sink) to the denominator of the softmax.
    dropout : float
        Probability of dropping an attention weight, in [0, 1).
    seed : int, optional
        Of the dropout; needed if there is any. The kept set is a function of seed and position only.
    layout : {"bhsd", "bshd"}
        Order of the axes of q, k, v and the result; never a copy.
    precision : {"ieee", "tf32x3", "tf32"}, optional
        For float32 on a GPU: FMA, FP32-accurate on tensor cores, or 10-bit products.
    tile : (int, int), optional
        Queries and keys of a block, instead of the planned ones.
    q_scale, k_scale, v_scale : array of float32, shape (heads_k,) or (batch, heads_k), optional
        Of float8_e4m3fn q, k and v: a value is what is stored times the scale of its key head (of a query:
        the key head that it shares). Those of q and k are above 0. With all three, uint8 stands for the bits
        of float8_e4m3fn. Nothing is quantised here; gradients of 8-bit inputs are refused.
    return_lse : bool
        Also return the log-sum-exp of the scores.
    out : array, optional
        Where to write the result; of float8_e4m3fn inputs as bfloat16, float16 or float32.

    Returns
    -------
    o : array, shape (batch, heads_q, seqlen_q, head_dim_v)
        Library, device and dtype of q (bfloat16 for float8_e4m3fn), rank and layout as given.
    lse : array, shape (batch, heads_q, seqlen_q)
        Only with return_lse. Natural logarithm, float32 (float64 for float64).

    Raises
    ------
    InvalidArguments
        The call contradicts itself; nothing was allocated or written.
    Unsupported
        No kernel fits; each one's reason is given.
    CubinNotFound
        The planned kernel is not installed, or its file is damaged.

    Notes
    -----
    A row that sees no key gives o = 0 and lse = -inf (with sinks: lse = sink). Values of v must be finite
    even where they are masked. Work on a GPU is enqueued on the caller's current stream.

    References
    ----------
    .. [1] T. Dao, "FlashAttention-2", arXiv:2307.08691, Algorithm 1.
    .. [2] M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867.
    .. [3] J. Shah et al., "FlashAttention-3", arXiv:2407.08608, section 3.3 (8-bit floats).

    Examples
    --------
    >>> import numpy as np, cupy_flash
    >>> q = k = v = np.random.default_rng(0).standard_normal((1, 4, 256, 64)).astype(np.float32)
    >>> cupy_flash.attention(q, k, v, causal=True).shape
    (1, 4, 256, 64)
    """
    named = given(q=q, k=k, v=v, mask=mask, bias=bias, alibi_slopes=alibi_slopes, sinks=sinks,
                  q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)  # fmt: skip
    options = Options(causal, window, align, scale, softcap, dropout, seed, layout, precision, tile)
    problem, views, raw = describe("forward", named, options, want_lse=flag(return_lse, "return_lse"))
    return run_forward(problem, views, raw, layout, out)


@names_its_options
def attention_backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Any,
    *,
    dlse: Any = None,
    deterministic: bool = False,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    align: str | int | None = None,
    mask: Any = None,
    bias: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    dropout: float = 0.0,
    seed: int | None = None,
    layout: str = "bhsd",
    precision: str | None = None,
    tile: tuple[int, int] | None = None,
) -> Gradients[Array]:
    """Gradients of `attention`, in memory linear in the sequence length (but for dbias itself).

    Parameters
    ----------
    do : array
        Gradient of the loss with respect to o; shape and dtype of o.
    q, k, v : array
        As given to `attention`.
    o, lse : array
        As returned by ``attention(..., return_lse=True)``.
    dlse : array, optional
        Gradient with respect to lse, if the loss uses it.
    deterministic : bool
        Demand the same bits on every run.
    causal, window, align, mask, bias, scale, softcap, alibi_slopes, sinks, dropout, seed, layout
        As given to `attention`.
    precision, tile
        As in `attention`.

    Returns
    -------
    Gradients
        dq, dk, dv, and dbias and dsinks if bias and sinks were given.

    Raises
    ------
    InvalidArguments, Unsupported, CubinNotFound
        As in `attention`.

    References
    ----------
    .. [1] T. Dao, "FlashAttention-2", arXiv:2307.08691, Algorithm 2.
    """
    named = given(do=do, q=q, k=k, v=v, o=o, lse=lse, dlse=dlse, mask=mask, bias=bias,
                   alibi_slopes=alibi_slopes, sinks=sinks)  # fmt: skip
    options = Options(causal, window, align, scale, softcap, dropout, seed, layout, precision, tile)
    problem, views, raw = describe("backward", named, options, deterministic=deterministic)
    return run_backward(problem, views, raw, layout)


def given(**named: Any) -> dict[str, Any]:
    """The arrays that were given; q, k and v always count as given."""
    return {name: x for name, x in named.items() if x is not None or name in _REQUIRED}


_REQUIRED = frozenset(("q", "k", "v", "o", "do", "lse"))


Views = Mapping[str, ArrayView]


def _allocate(problem: Problem, like: ArrayView, shape: tuple[int, ...], dtype: str) -> ArrayView:
    """A result; rows of packed arrays that belong to no sequence are 0."""
    return (arrays.zeros if problem.packed else arrays.empty)(like, shape, dtype)


def run_forward(
    problem: Problem, views: Views, raw: Views, layout: str, out: Any, workspace: ArrayView | None = None
) -> Any:
    """Plan, allocate and run a described forward pass: o, or (o, lse) if the problem wants it."""
    rank = len(raw["q"].shape)
    shape = lower_shape((*views["q"].shape[:3], problem.head_dim_v), layout, rank)
    if out is not None:
        out_view = adopt(out, "out")
        _check_out(problem, out_view, shape, raw)
        o = lift(out_view, layout, rank)
        problem = problem._replace(
            of_float8=problem.of_float8 and out_view.dtype,
            in_rows=problem.in_rows and o.in_rows(),
            aligned=problem.aligned and o.aligned(),
            boxes=problem.boxes and o.boxable(),
        )
    execute = _prepare(problem, views["q"], workspace)
    if out is None:
        out_view = _allocate(problem, raw["q"], shape, problem.result_dtype)
    outputs = {"o": lift(out_view, layout, rank)}
    if problem.want_lse:
        lse = _allocate(problem, raw["q"], views["q"].shape[4 - rank : 3], problem.accumulator)
        outputs["lse"] = lse.lifted(3)
    execute({**views, **outputs})
    result = finished(out_view) if out is None else out
    return (result, finished(lse)) if problem.want_lse else result


def run_backward(problem: Problem, views: Views, raw: Views, layout: str) -> Gradients[Any]:
    """Plan, allocate and run a described backward pass."""
    rank = len(raw["q"].shape)
    execute = _prepare(problem, views["q"])
    results = {"d" + name: _allocate(problem, raw["q"], raw[name].shape, problem.dtype) for name in "qkv"}
    outputs = {name: lift(view, layout, rank) for name, view in results.items()}
    if problem.want_dbias:
        results["dbias"] = _allocate(problem, raw["q"], raw["bias"].shape, raw["bias"].dtype)
        outputs["dbias"] = results["dbias"].lifted(4)
    if problem.sinks:
        results["dsinks"] = _allocate(problem, raw["q"], raw["sinks"].shape, problem.accumulator)
        outputs["dsinks"] = results["dsinks"]
    execute({**views, **outputs})
    return Gradients(**{name: finished(view) for name, view in results.items()})


def _check_out(
    problem: Problem, out: ArrayView, shape: tuple[int, ...], raw: Mapping[str, ArrayView]
) -> None:
    """Refuse an out that cannot hold the result, or that shares memory with an input or itself."""
    q = raw["q"]
    table = table_of({**raw, "out": out})
    hint = f"out=None, or a new array of shape {shape}"
    if out.shape != shape:
        raise InvalidArguments(f"out has shape {out.shape}, the result {shape}.", table, hint=hint)
    dtypes = RESULTS_OF_FLOAT8 if problem.of_float8 else (q.dtype,)
    if out.dtype not in dtypes:
        result = " or ".join(dtypes)
        raise InvalidArguments(f"out has dtype {out.dtype}, the result {result}.", table, hint=hint)
    if (out.library, out.device) != (q.library, q.device):
        raise InvalidArguments(
            f"out is a {out.library} array on {arrays.device_name(out.device)}, "
            f"q a {q.library} array on {arrays.device_name(q.device)}.",
            table,
            hint=hint,
        )
    if out.readonly:
        raise InvalidArguments("out is read-only.", table, hint=hint)
    for name, view in raw.items():
        if arrays.overlap(out, view):
            raise InvalidArguments(f"out overlaps {name} in memory.", table, hint=hint)
    if arrays.overlaps_itself(out):
        raise InvalidArguments(f"out overlaps itself: strides {out.strides}.", table, hint=hint)


def driver_of(device: tuple[str, int]) -> Driver | None:
    """Who runs kernels on this device: the CUDA driver, the simulator, or nobody (the CPU path)."""
    if device[0] == "cuda":
        from . import driver

        return driver
    chosen = os.environ.get("CUPY_FLASH_DRIVER", "")
    if not chosen:
        return None
    if chosen.partition(":")[0] != "simulator":
        raise InvalidArguments(
            f"the environment variable CUPY_FLASH_DRIVER is {chosen!r}.",
            hint="unset it, or simulator:sm_90a to simulate that architecture",
        )
    from . import simulator

    return simulator


class _OnCpu(NamedTuple):
    """A call prepared for the NumPy path."""

    problem: Problem

    def __call__(self, views: Mapping[str, ArrayView], stream: int | None = None) -> None:  # noqa: ARG002
        # why here: its thread pool would be a fifth of the time that the package takes to import
        from . import cpu

        path = cpu.each_sequence if self.problem.packed else getattr(cpu, self.problem.direction)
        path(self.problem, {name: view.numpy() for name, view in views.items()})


class _OnDevice(NamedTuple):
    """A call prepared for kernels: planned, located and loaded."""

    problem: Problem
    plan: Plan
    kernels: tuple[Kernel, ...]
    driver: Driver
    device: int
    workspace: int | None = None  # address of the caller's; None: from the pool of the caller's library

    def __call__(self, views: Mapping[str, ArrayView], stream: int | None = None) -> None:
        library = views["q"].library
        if stream is None:
            stream = self.driver.current_stream(self.device, library)
        if self.workspace is not None:
            run(self.plan, self.problem, self.kernels, views, self.workspace, stream)
            return
        workspace = self.driver.empty(self.plan.workspace_bytes, self.device, library, stream)
        run(self.plan, self.problem, self.kernels, views, workspace.pointer, stream)


def execute(problem: Problem, views: Views, stream: int | None = None) -> None:
    """Plan and run a described problem whose outputs are among the views.

    Parameters
    ----------
    problem : Problem
    views : mapping of str to ArrayView
        Inputs and outputs, by the names of abi.cuh.
    stream : int, optional
        CUDA stream handle; default is the current one of the caller's library.
    """
    _prepare(problem, views["q"])(views, stream)


def _address_of(workspace: ArrayView, q: ArrayView, nbytes: int) -> int:
    """Where the caller's workspace begins, on a boundary of 256 bytes."""
    low, high = workspace.extent()
    size = math.prod(workspace.shape) * workspace.item_bytes
    aligned = -(-low // 256) * 256
    table = [("workspace", workspace.describe())]
    if workspace.device != q.device or workspace.readonly:
        what = "read-only" if workspace.readonly else f"on {arrays.device_name(workspace.device)}"
        raise InvalidArguments(f"workspace is {what}.", table, hint="an array that can be written, beside q")
    if high - low != size:
        raise InvalidArguments("workspace is not contiguous.", table, hint="a new array of bytes")
    if high - aligned < nbytes:
        raise InvalidArguments(
            f"workspace has {size} bytes, the call needs {nbytes} from a boundary of 256 bytes on.",
            table,
            hint=f"{nbytes + 255} bytes, or workspace=None",
        )
    return aligned


def _prepare(problem: Problem, q: ArrayView, workspace: ArrayView | None = None) -> _OnCpu | _OnDevice:
    """Choose, locate and load: everything that can refuse, before anything is allocated."""
    driver = driver_of(q.device)
    if driver is None:
        if problem.precision in ("tf32", "tf32x3"):
            raise Unsupported(
                f"precision={problem.precision!r} needs tensor cores; NumPy computes in IEEE float32.",
                hint='precision=None or precision="ieee"',
            )
        return _OnCpu(problem)
    device = q.device[1]
    plan = choose(
        problem._replace(seed=0) if problem.seed else problem,
        driver.arch(device),
        driver.multiprocessors(device),
    )
    given = None if workspace is None else _address_of(workspace, q, plan.workspace_bytes)
    return _OnDevice(problem, plan, _load(plan, driver, device), driver, device, given)


@lru_cache(maxsize=1024)
def _load(plan: Plan, driver: Driver, device: int) -> tuple[Kernel, ...]:
    """The kernels of a plan, loaded once per device."""
    return tuple(driver.load(launch.variant, device) for launch in plan.launches)

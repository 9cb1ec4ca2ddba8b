"""Implementations to compare with. All are optional: one that is missing or refuses a case is skipped."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

import cupy_flash
from cupy_flash import testing
from cupy_flash.check.places import as_tensor
from cupy_flash.device import choice, cuda
from cupy_flash.dispatch import backends

from ..machine import timing
from ..machine.place import Place
from ..model.candidates import preferred
from ..work import FLOAT8, Case

# why: by default JAX allocates three quarters of the GPU's memory when it starts, which other peers need.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

Inputs = Mapping[str, Any]
Call = Callable[[], tuple[Any, ...]]


class Skipped(Exception):
    """A peer cannot run a case; the message is a sentence."""


class Peer(NamedTuple):
    """An implementation of attention.

    Attributes
    ----------
    name : str
    prepare : callable
        Makes a call from a case, its inputs and the place; the call returns results as (batch, heads,
        sequence, features): o, or dq dk dv, or all four.
    places : tuple of str
        Any of "cpu" and "gpu".
    matrices : int
        S x S matrices in float32 that it stores at once; 0 for flash attention.
    by_clock : bool
        Whether it runs on a stream of its own, so that the wall clock has to time it instead of events.
    float8 : bool
        Whether it supports 8-bit floats.
    """

    name: str
    prepare: Callable[[Case, Inputs, Place], Call]
    places: tuple[str, ...] = ("cpu", "gpu")
    matrices: int = 0
    by_clock: bool = False
    float8: bool = False

    def stopwatch(self, place: Place) -> timing.Stopwatch:
        if self.by_clock and place.name == "gpu":
            return timing.by_wall(place)
        return place.stopwatch()

    def ready(self, case: Case, inputs: Inputs, place: Place) -> Call:
        """Prepare a case and run it once.

        Raises
        ------
        Skipped
        """
        if case.dtype == FLOAT8 and not self.float8:
            raise Skipped("takes no 8-bit floats")
        needed, free = self.matrices * case.score_bytes(), place.state().free_bytes
        if free is not None and needed > 0.7 * free:
            raise Skipped(f"needs {needed / 1e9:.3g} GB for its S x S matrices, {free / 1e9:.3g} GB are free")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns for each reason why a backend refuses
                call = self.prepare(case, inputs, place)
                call()
                place.synchronize()
        except Skipped:
            raise
        except ImportError as error:
            raise Skipped(f"is not installed ({error})") from error
        except Exception as error:  # why any: every package refuses in its own way, and none may stop the run
            lines = f"{type(error).__name__}: {error}".strip().splitlines()
            raise Skipped(f"does not run this: {lines[0][:200]}") from error
        return call


def first_of(modules: tuple[str, ...], name: str) -> Any:
    """The attribute `name` of the first of these modules that can be imported and has it."""
    missing = ""
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            missing = str(error)
    raise Skipped(f"is not installed ({missing})")


# ---------------------------------------------------------------------- ours


def ours(case: Case, inputs: Inputs, _place: Place, **chosen: Any) -> Call:
    do, q, k, v = (inputs[name] for name in ("do", "q", "k", "v"))
    options = case.options() | chosen

    def forward() -> tuple[Any, ...]:
        return (cupy_flash.attention(q, k, v, **options),)

    def both() -> tuple[Any, ...]:
        o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
        return o, *cupy_flash.attention_backward(do, q, k, v, o, lse, **options)[:3]

    if case.passes == "forward":
        return forward
    if case.passes == "forward+backward":
        return both
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
    return lambda: tuple(cupy_flash.attention_backward(do, q, k, v, o, lse, **options)[:3])


def _deterministic(case: Case, inputs: Inputs, place: Place) -> Call:
    if case.passes != "backward":
        raise Skipped("is about the backward pass alone")
    if place.name == "cpu":
        raise Skipped("is what the CPU path always is")
    return ours(case, inputs, place, reproducible="run")


def _naive(case: Case, inputs: Inputs, place: Place) -> Call:
    """The textbook method in NumPy or CuPy, `cupy_flash.naive_attention`."""
    if case.passes != "forward":
        raise Skipped("has no backward pass")
    q, k, v = (inputs[name] for name in "qkv")
    if place.library == "torch":
        cupy = importlib.import_module("cupy")
        if case.dtype == "bfloat16":
            raise Skipped("is written in CuPy, which has no bfloat16")
        q, k, v = (cupy.from_dlpack(x) for x in (q, k, v))
    return lambda: (cupy_flash.naive_attention(q, k, v, **case.options()).o,)


def _by_numpy(case: Case, inputs: Inputs, place: Place) -> Call:
    """Ours without the compiled core."""
    call = ours(case, inputs, place)

    def by_numpy() -> tuple[Any, ...]:
        before = os.environ.get("CUPY_FLASH_CPU")
        os.environ["CUPY_FLASH_CPU"] = "numpy"
        try:
            return call()
        finally:
            os.environ.pop("CUPY_FLASH_CPU")
            if before is not None:
                os.environ["CUPY_FLASH_CPU"] = before

    return by_numpy


def _by_mma_sync(case: Case, inputs: Inputs, place: Place) -> Call:
    """Ours by the mma.sync kernels, which Ampere and Ada use, on a GPU with wgmma."""
    q, k, v = (inputs[name] for name in "qkv")
    plan = {"direction": "backward" if case.passes == "backward" else "forward", **case.options()}
    if "\nfamily    hopper " not in cupy_flash.explain(q, k, v, **plan):
        raise Skipped("is what cupy_flash is here")
    with preferred("flash"):
        call = ours(case, inputs, place)

    def by_mma_sync() -> tuple[Any, ...]:
        with preferred("flash"):
            return call()

    return by_mma_sync


def _without_cupy(case: Case, inputs: Inputs, place: Place) -> Call:
    """Ours through libcuda, where it would use CuPy."""
    if place.library != "torch":
        raise Skipped("takes arrays of torch and JAX")
    if why := choice.why_without_cupy():
        raise Skipped(f"is what cupy_flash is here: {why}")
    call = ours(case, inputs, place)

    def without_cupy() -> tuple[Any, ...]:
        # why by hand: unittest.mock takes longer than a launch
        by_cupy, backends.gpu_driver = backends.gpu_driver, lambda _library: cuda
        try:
            return call()
        finally:
            backends.gpu_driver = by_cupy

    return without_cupy


# ---------------------------------------------------------------------- torch


def tensors(inputs: Inputs, place: Place) -> list[Any]:
    """q, k, v and do as torch tensors that share the memory."""
    torch = importlib.import_module("torch")
    values = [inputs[name] for name in ("q", "k", "v", "do")]
    if place.library == "numpy":
        return [as_tensor(torch, np.ascontiguousarray(x)) for x in values]
    return [x if place.library == "torch" else torch.from_dlpack(x) for x in values]


def by_autograd(attend: Callable[..., Any], passes: str, tensors: list[Any]) -> Call:
    """The call of a pass through a torch function o = attend(q, k, v)."""
    torch = importlib.import_module("torch")
    *qkv, do = tensors

    def forward() -> tuple[Any, ...]:
        with torch.no_grad():
            return (attend(*qkv),)

    if passes == "forward":
        return forward
    leaves = [x.detach().clone().requires_grad_() for x in qkv]

    def both() -> tuple[Any, ...]:
        o = attend(*leaves)
        return o.detach(), *torch.autograd.grad(o, leaves, do)

    if passes == "forward+backward":
        return both
    o = attend(*leaves)
    return lambda: tuple(torch.autograd.grad(o, leaves, do, retain_graph=True))


def _sdpa(backend: str | None) -> Callable[[Case, Inputs, Place], Call]:
    """torch.nn.functional.scaled_dot_product_attention with one backend.

    why one: torch's default depends on GPU, version and dtype.
    """

    def prepare(case: Case, inputs: Inputs, place: Place) -> Call:
        torch = importlib.import_module("torch")
        attention = torch.nn.functional.scaled_dot_product_attention
        if case.causal and case.seqlen != case.keys:
            raise Skipped("aligns causal queries at the beginning of the keys")
        chosen = {"is_causal": case.causal, "enable_gqa": case.heads != case.key_heads}

        def pinned() -> AbstractContextManager[Any]:
            if backend is None:
                return nullcontext()
            kinds = torch.nn.attention.SDPBackend
            context: AbstractContextManager[Any] = torch.nn.attention.sdpa_kernel([getattr(kinds, backend)])
            return context

        def attend(q: Any, k: Any, v: Any) -> Any:
            with pinned():
                return attention(q, k, v, **chosen)

        return by_autograd(attend, case.passes, tensors(inputs, place))

    return prepare


# Packages and wheels of one version have different names of the module.
FLASH_ATTN_2 = ("flash_attn",)
FLASH_ATTN_3 = ("flash_attn_interface", "flash_attn_3.flash_attn_interface", "fa3_fwd_interface")
FLASH_ATTN_4 = ("flash_attn.cute",)


def _flash_attn(modules: tuple[str, ...]) -> Callable[[Case, Inputs, Place], Call]:
    """flash_attn_func, over (batch, sequence, heads, features)."""

    def prepare(case: Case, inputs: Inputs, place: Place) -> Call:
        function = first_of(modules, "flash_attn_func")

        def attend(q: Any, k: Any, v: Any) -> Any:
            o = function(*(x.transpose(1, 2) for x in (q, k, v)), causal=case.causal)
            return (o[0] if isinstance(o, tuple) else o).transpose(1, 2)

        return by_autograd(attend, case.passes, tensors(inputs, place))

    return prepare


# ---------------------------------------------------------------------- JAX


class Turned:
    """A result as (batch, heads, sequence, features), transposed on access instead of in the timed call."""

    def __init__(self, x: Any) -> None:
        self._x = x

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._x, dtype).swapaxes(1, 2)

    def __getitem__(self, key: Any) -> np.ndarray:
        part: np.ndarray = np.asarray(self)[key]
        return part


def _jax_calls(attend: Callable[..., Any], case: Case, inputs: Inputs, place: Place) -> Call:
    """The call of a pass through a JAX function over (batch, sequence, heads, features)."""
    jax = importlib.import_module("jax")
    if case.dtype == "float64" and not jax.config.jax_enable_x64:
        raise Skipped("computes float64 in float32 here (JAX_ENABLE_X64 is not set)")
    if place.name == "gpu" and jax.default_backend() != "gpu":
        raise Skipped(f"sees no GPU here, only {jax.default_backend()}")

    def turned(x: Any) -> Any:
        host = testing.to_numpy(x) if place.name == "cpu" else None
        array = jax.numpy.asarray(host) if host is not None else jax.dlpack.from_dlpack(x)
        return jax.numpy.swapaxes(array, 1, 2).block_until_ready()

    q, k, v, do = (turned(inputs[name]) for name in ("q", "k", "v", "do"))
    place.synchronize()

    def done(results: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(Turned(x) for x in jax.block_until_ready(results))

    forward = jax.jit(attend)

    def both(q: Any, k: Any, v: Any, do: Any) -> tuple[Any, ...]:
        o, back = jax.vjp(attend, q, k, v)
        return o, *back(do)

    if case.passes == "forward":
        return lambda: done((forward(q, k, v),))
    if case.passes == "forward+backward":
        compiled = jax.jit(both)
        return lambda: done(compiled(q, k, v, do))
    _, back = jax.jit(lambda *x: jax.vjp(attend, *x))(q, k, v)
    backward = jax.jit(lambda back, do: back(do))
    return lambda: done(backward(back, do))


def _jax(implementation: str) -> Callable[[Case, Inputs, Place], Call]:
    def prepare(case: Case, inputs: Inputs, place: Place) -> Call:
        jax = importlib.import_module("jax")
        if case.causal and case.seqlen != case.keys:
            raise Skipped("aligns causal queries at the beginning of the keys")

        def attend(q: Any, k: Any, v: Any) -> Any:
            return jax.nn.dot_product_attention(q, k, v, is_causal=case.causal, implementation=implementation)

        return _jax_calls(attend, case, inputs, place)

    return prepare


def _mosaic(case: Case, inputs: Inputs, place: Place) -> Call:
    """JAX's example of attention in Pallas Mosaic GPU; it takes no scale, so q is scaled first."""
    if case.causal and case.passes != "forward":
        raise Skipped("has no causal backward pass")
    blocks = {"block_q": 64, "block_kv": 128 if case.head_dim <= 128 else 64, "max_concurrent_steps": 2}
    if case.passes != "forward":
        blocks |= dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), 64)
    module = "jax.experimental.pallas.ops.gpu.attention_mgpu"
    attend, tuning = first_of((module,), "attention"), first_of((module,), "TuningConfig")
    how, scale = tuning(**blocks, causal=case.causal), case.head_dim**-0.5
    return _jax_calls(lambda q, k, v: attend(q * scale, k, v, how), case, inputs, place)


def _flash_attn3_jax(case: Case, inputs: Inputs, place: Place) -> Call:
    attend = first_of(("flash_attn3_jax",), "flash_mha")
    return _jax_calls(lambda q, k, v: attend(q, k, v, is_causal=case.causal), case, inputs, place)


# ---------------------------------------------------------------------- all of them

OURS = Peer("cupy_flash", ours, float8=True)
WITHOUT_CUPY = Peer("cupy_flash without CuPy", _without_cupy, ("gpu",))
PEERS = (
    Peer("cupy_flash deterministic", _deterministic, ("gpu",)),
    Peer("cupy_flash mma.sync", _by_mma_sync, ("gpu",)),
    Peer("cupy_flash numpy", _by_numpy, ("cpu",)),
    Peer("torch", _sdpa(None), ("cpu",)),
    Peer("torch cudnn", _sdpa("CUDNN_ATTENTION"), ("gpu",)),
    Peer("torch flash", _sdpa("FLASH_ATTENTION"), ("gpu",)),
    Peer("torch efficient", _sdpa("EFFICIENT_ATTENTION"), ("gpu",)),
    Peer("torch math", _sdpa("MATH"), ("cpu", "gpu"), matrices=4),
    Peer("flash-attn 2", _flash_attn(FLASH_ATTN_2), ("gpu",)),
    # Its scales are optional and default to 1, as ours do.
    Peer("flash-attn 3", _flash_attn(FLASH_ATTN_3), ("gpu",), float8=True),
    Peer("flash-attn 4", _flash_attn(FLASH_ATTN_4), ("gpu",)),
    Peer("jax cudnn", _jax("cudnn"), ("gpu",), by_clock=True),
    Peer("jax mosaic", _mosaic, ("gpu",), by_clock=True),
    Peer("jax xla", _jax("xla"), matrices=4, by_clock=True),
    Peer("flash-attn3-jax", _flash_attn3_jax, ("gpu",), by_clock=True),
    Peer("naive", _naive, matrices=4),
)


def chosen(place: Place, wanted: str | None = None) -> list[Peer]:
    """Ours and the peers of a place; `wanted` selects peers by comma-separated parts of their names."""
    here = [peer for peer in PEERS if place.name in peer.places]
    if wanted is None:
        return [OURS, *here]
    words = [word.strip() for word in wanted.split(",") if word.strip()]
    return [OURS, *(peer for peer in here if any(word in peer.name for word in words))]

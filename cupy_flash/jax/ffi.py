"""A call as a typed foreign function (FFI) of XLA, which exported programs find by name in another process.

why not always: decoding XLA's structs in Python takes twice as long as a callback. The structs are from
xla/ffi/api/c_api.h, version 0.1; XLA supports old versions for a year.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import json
from collections.abc import Callable, Iterator
from ctypes import POINTER, Structure, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from ..call.arrays import CPU
from ..call.given import CacheCall, Options, Packing
from ..errors import UnsupportedError
from ..namespace import NAMESPACE
from .run import Cached, Config, run

__all__ = ["export_target", "exporting", "foreign", "is_exporting", "not_exported"]

TARGET = NAMESPACE
_EXECUTE = 3
_INVALID_ARGUMENT = 3
_METADATA = 1

_HEAD: Any = [("struct_size", c_size_t), ("extension", c_void_p)]


class _Version(Structure):
    _fields_ = [*_HEAD, ("major", c_int), ("minor", c_int)]


class _Metadata(Structure):
    _fields_ = [("struct_size", c_size_t), ("version", _Version), ("traits", c_uint32)]


class _Extension(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("type", c_int), ("next", c_void_p), ("metadata", POINTER(_Metadata)),
    ]  # fmt: skip


class _Buffer(Structure):
    _fields_ = [*_HEAD, ("dtype", c_int), ("data", c_void_p), ("rank", c_int64), ("dims", POINTER(c_int64))]


class _Buffers(Structure):
    _fields_ = [*_HEAD, ("size", c_int64), ("types", c_void_p), ("each", POINTER(POINTER(_Buffer)))]


class _Text(Structure):
    _fields_ = [("start", c_void_p), ("size", c_size_t)]


class _Attributes(Structure):
    _fields_ = [
        *_HEAD,
        ("size", c_int64),
        ("types", c_void_p),
        ("names", c_void_p),
        ("each", POINTER(POINTER(_Text))),
    ]


class _Api(Structure):
    _fields_ = [
        *_HEAD, ("version", _Version), ("internal", c_void_p), ("error_create", c_void_p),
        ("unused_5", c_void_p * 3), ("stream_get", c_void_p), ("unused_9", c_void_p * 12),
        ("device_ordinal_get", c_void_p),
    ]  # fmt: skip


class _Frame(Structure):
    _fields_ = [
        *_HEAD, ("api", POINTER(_Api)), ("context", c_void_p), ("stage", c_int), ("inputs", _Buffers),
        ("outputs", _Buffers), ("attributes", _Attributes),
    ]  # fmt: skip


class _Error(Structure):
    _fields_ = [*_HEAD, ("message", c_char_p), ("code", c_int)]


class _Stream(Structure):
    _fields_ = [*_HEAD, ("context", c_void_p), ("stream", c_void_p)]


class _Ordinal(Structure):
    _fields_ = [*_HEAD, ("context", c_void_p), ("ordinal", c_int32)]


_Handler = ctypes.CFUNCTYPE(c_void_p, POINTER(_Frame))
_OfApi = ctypes.CFUNCTYPE(c_void_p, c_void_p)

_exporting: contextvars.ContextVar[bool] = contextvars.ContextVar("exporting", default=False)


def is_exporting() -> bool:
    """Whether the program being lowered is for export."""
    return _exporting.get()


@contextlib.contextmanager
def exporting(context: Any) -> Iterator[None]:
    """Lower for export in this context, if JAX's lowering context asks for it."""
    token = _exporting.set(bool(context.module_context.lowering_parameters.for_export))
    try:
        yield
    finally:
        _exporting.reset(token)


def not_exported(x: Any, why: str, hint: str) -> Any:
    """The array itself, for a call that only this process can run: exporting the program raises."""
    return _not_exported_p.bind(x, why=why, hint=hint)


def _lower_not_exported(context: Any, x: Any, *, why: str, hint: str) -> Any:
    if context.module_context.lowering_parameters.for_export:
        raise UnsupportedError(why, hint=hint)
    return [x]


_not_exported_p = Primitive("cupy_flash_not_exported")
_not_exported_p.def_impl(lambda x, **_: x)
_not_exported_p.def_abstract_eval(lambda x, **_: x)
batching.defvectorized(_not_exported_p)
mlir.register_lowering(_not_exported_p, _lower_not_exported)


def foreign(config: Config, wire: Any, aliases: dict[int, int]) -> Callable[..., Any]:
    """Return the FFI call, with its static parameters as JSON."""
    if config.options.score is not None:
        raise UnsupportedError(
            "a program with a score function cannot be exported: the function is Python's.",
            hint="a bias or a mask instead of it, or jax.jit in the process that runs it",
        )
    call = jax.ffi.ffi_call(export_target(), wire, vmap_method="broadcast_all", input_output_aliases=aliases)
    # why by name: a later version, with more options, may read it.
    named = config._asdict() | {"options": config.options._asdict()}
    # NumPy scalars may be options, too.
    return functools.partial(call, config=json.dumps(named, default=lambda x: x.item()))


@functools.cache
def export_target() -> str:
    """Register the foreign function of exported programs with XLA, and return its name.

    `jax.export` needs the name in ``disabled_checks``; a process that runs an exported program calls this
    first. Sizes may be symbolic: what is wrong about them then raises when the program runs. Packed sequences
    with symbolic rows need max_seqlen_q and max_seqlen_k.

    Returns
    -------
    str

    Examples
    --------
    >>> import jax, jax.export, jax.numpy as jnp, cupy_flash.jax
    >>> target = jax.export.DisabledSafetyCheck.custom_call(cupy_flash.jax.export_target())
    >>> q = jnp.ones((1, 4, 128, 64))
    >>> exported = jax.export.export(jax.jit(cupy_flash.jax.attention), disabled_checks=[target])(q, q, q)
    >>> exported.call(q, q, q).shape
    (1, 4, 128, 64)
    """
    for platform in ("cpu", "CUDA"):
        jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(_handler(platform == "cpu")), platform)
    return TARGET


@functools.cache
def _handler(on_cpu: bool) -> Any:
    """The foreign function. why cached: XLA keeps its address until the process ends."""

    def handle(frame: Any) -> int | None:
        frame = frame.contents
        if frame.extension:
            extension = _Extension.from_address(frame.extension)
            if extension.type == _METADATA:
                extension.metadata.contents.version.major = 0
                extension.metadata.contents.version.minor = 1
                return None
        if frame.stage != _EXECUTE:
            return None
        try:
            _execute(frame, on_cpu)
        except Exception as error:
            return _failed(frame, f"{type(error).__name__}: {error}")
        return None

    return _Handler(handle)


def _execute(frame: Any, on_cpu: bool) -> None:
    text = frame.attributes.each[0].contents
    config = _config(ctypes.string_at(text.start, text.size))
    # The inputs may be followed by buffers for the outputs.
    counts = (frame.inputs, len(config.names)), (frame.outputs, frame.outputs.size)
    buffers = [some.each[i].contents for some, count in counts for i in range(count)]
    shapes = [tuple(x.dims[: x.rank]) for x in buffers]
    device, stream = (CPU, None) if on_cpu else _place(frame)
    run(config, shapes, [x.data or 0 for x in buffers], device, stream)


@functools.lru_cache(maxsize=1024)
def _config(text: bytes) -> Config:
    """Decode the config of `foreign`."""
    fixed = {name: _as_key(x) for name, x in json.loads(text).items()}
    fixed["options"] = Options(**{name: _as_key(x) for name, x in fixed["options"].items()})
    if fixed["cached"]:
        cached = Cached(*fixed["cached"])
        packing = cached.packing and Packing(*cached.packing)
        fixed["cached"] = cached._replace(call=CacheCall(*cached.call), packing=packing)
    return Config(**fixed)


def _as_key(x: Any) -> Any:
    return tuple(map(_as_key, x)) if isinstance(x, list) else x


def _place(frame: Any) -> tuple[tuple[str, int], int]:
    """The GPU and the stream of a call."""
    api = frame.api.contents
    stream = _Stream(ctypes.sizeof(_Stream), None, frame.context, None)
    ordinal = _Ordinal(ctypes.sizeof(_Ordinal), None, frame.context, 0)
    for function, filled in ((api.stream_get, stream), (api.device_ordinal_get, ordinal)):
        if _OfApi(function)(ctypes.addressof(filled)):
            raise RuntimeError("XLA did not say on which stream of which GPU this runs")
    return ("cuda", int(ordinal.ordinal)), int(stream.stream or 0)


def _failed(frame: Any, message: str) -> int | None:
    """Create an error of XLA."""
    error = _Error(ctypes.sizeof(_Error), None, message.encode(), _INVALID_ARGUMENT)
    made: int | None = _OfApi(frame.api.contents.error_create)(ctypes.addressof(error))
    return made

"""adopt: see an array of any library as pointer, shape, strides, dtype and device, without a copy."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..errors import InvalidArguments, Unsupported

__all__ = ["ArrayView", "adopt", "contiguous", "dtype_name", "empty", "refuse_wrapper", "zeros"]

ITEM_BYTES = {"bool": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4,
              "int8": 1, "uint8": 1, "float8_e4m3fn": 1}  # fmt: skip
CPU = ("cpu", 0)


class ArrayView(NamedTuple):
    """An array of some library, seen without that library.

    Attributes
    ----------
    pointer : int
        Address of element (0, ..., 0).
    shape, strides : tuple of int
        Strides in elements; 0 on a broadcast axis.
    dtype : str
        NumPy's name of the dtype; "bfloat16" for that.
    device : (str, int)
        ("cpu", 0) or ("cuda", ordinal).
    library : str
        "numpy", "cupy", "torch", "jax" or "dlpack".
    readonly : bool
        Whether the owner forbids writing.
    owner : object
        Keeps the memory alive.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: tuple[str, int]
    library: str
    readonly: bool
    owner: Any

    @property
    def item_bytes(self) -> int:
        """Bytes per element."""
        return ITEM_BYTES[self.dtype]

    def permuted(self, *axes: int) -> ArrayView:
        """The same memory with its axes in another order."""
        return self._replace(
            shape=tuple(self.shape[a] for a in axes), strides=tuple(self.strides[a] for a in axes)
        )

    def lifted(self, rank: int) -> ArrayView:
        """The same memory with axes of length 1 in front, up to this rank."""
        extra = rank - len(self.shape)
        if extra <= 0:
            return self
        return self._replace(shape=(1,) * extra + self.shape, strides=(0,) * extra + self.strides)

    def broadcast(self) -> ArrayView:
        """The same memory with stride 0 wherever the length is 1, as the kernels' params want it."""
        strides = tuple(0 if n == 1 else s for n, s in zip(self.shape, self.strides, strict=True))
        return self._replace(strides=strides)

    def extent(self) -> tuple[int, int]:
        """Half-open range of addresses that the elements cover."""
        if 0 in self.shape:
            return self.pointer, self.pointer
        low = high = 0
        for n, s in zip(self.shape, self.strides, strict=True):
            step = (n - 1) * s
            low, high = low + min(step, 0), high + max(step, 0)
        size = self.item_bytes
        return self.pointer + low * size, self.pointer + (high + 1) * size

    def aligned(self) -> bool:
        """Whether copies of 16 bytes can read it row by row.

        Its rows are in one piece, every one starts on a 16-byte boundary, and the step from row to row is
        not negative.
        """
        if not self.in_rows():
            return False
        size = self.item_bytes
        bits = self.pointer
        for n, s in zip(self.shape[:-1], self.strides[:-1], strict=True):
            if n != 1:
                bits |= s * size
        return bits % 16 == 0 and self.strides[-2] >= 0

    def in_rows(self) -> bool:
        """Whether each row is in one piece, and the step from row to row in bytes fits 32 bits."""
        step = self.strides[-2] * self.item_bytes
        return (self.shape[-1] == 1 or self.strides[-1] == 1) and -(2**31) <= step < 2**31

    def boxable(self) -> bool:
        """Whether a tensor map can describe it, if it is `aligned` too.

        No axis stands still or goes backwards, and no step is 2**40 bytes or more.
        """
        return all(
            n <= 1 or 0 < s < 2**40 // self.item_bytes for n, s in zip(self.shape, self.strides, strict=True)
        )

    def numpy(self) -> np.ndarray[Any, Any]:
        """A NumPy array on the same memory; only for device "cpu"."""
        if self.device != CPU:
            raise AssertionError("numpy() of an array on a GPU")
        return numpy_view(self, self.shape, self.byte_strides(), self.dtype)

    def integers(self) -> np.ndarray[Any, Any]:
        """The numbers of an array of integers; on a GPU this waits for the stream."""
        return self.numpy() if self.device == CPU else np.asarray(self.owner.tolist(), np.int64)

    def byte_strides(self) -> tuple[int, ...]:
        """Strides in bytes."""
        size = self.item_bytes
        return tuple(s * size for s in self.strides)

    def describe(self) -> str:
        """Shape and dtype, for tables of inputs."""
        where = "" if self.device == CPU else f" on {device_name(self.device)}"
        return f"{_tuple(self.shape)}  {self.dtype}{where}"


def device_name(device: tuple[str, int]) -> str:
    """A device as people write it: "cpu" or "cuda:0"."""
    return device[0] if device == CPU else f"{device[0]}:{device[1]}"


def _tuple(shape: tuple[int, ...]) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"


_TYPE_STRINGS = {"bool": "|b1", "float16": "<f2", "bfloat16": "<u2", "float32": "<f4",
                 "float64": "<f8", "int32": "<i4", "int8": "|i1", "uint8": "|u1",
                 "float8_e4m3fn": "|u1"}  # fmt: skip
# What NumPy knows through ml_dtypes only.
_EXTENDED = ("bfloat16", "float8_e4m3fn")


class _Memory:
    """Hands a view's memory to NumPy and keeps its owner alive."""

    def __init__(
        self, view: ArrayView, shape: tuple[int, ...], byte_strides: tuple[int, ...], dtype: str
    ) -> None:
        self.owner = view.owner
        self.__array_interface__ = {
            "version": 3,
            "data": (view.pointer or 64, view.readonly),
            "shape": shape,
            "strides": byte_strides,
            "typestr": _TYPE_STRINGS[dtype],
        }


def numpy_view(
    view: ArrayView, shape: tuple[int, ...], byte_strides: tuple[int, ...], dtype: str
) -> np.ndarray[Any, Any]:
    """A NumPy array of this shape at the address of a view, in main memory."""
    array = np.asarray(_Memory(view, shape, byte_strides, dtype))
    return array.view(numpy_dtype(dtype)) if dtype in _EXTENDED else array


@lru_cache(maxsize=64)
def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype of one of our names; those of ml_dtypes from there."""
    if name not in _EXTENDED:
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise Unsupported(
            f"NumPy knows {name} only through ml_dtypes, which is not installed.",
            hint="pip install ml_dtypes",
        ) from None
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype


@lru_cache(maxsize=4096)
def _elements(dtype: np.dtype[Any], strides: tuple[int, ...]) -> tuple[str, tuple[int, ...] | None]:
    """Name of a dtype of this machine's byte order, and strides in elements; None if that cannot be said.

    why cached: both take longer than everything else here, and programs use few layouts.
    """
    size = dtype.itemsize
    odd = dtype.kind != "O" and size and any(s % size for s in strides)
    whole = None if odd or not dtype.isnative else tuple(s // size for s in strides) if size else strides
    return dtype.name, whole


def _no_elements(x: Any, name: str) -> InvalidArguments:
    """Why an array has no strides in elements."""
    if not x.dtype.isnative:
        return _foreign_order(x.dtype, name)
    return InvalidArguments(
        f"{name} has strides {x.strides} that are not multiples of its {x.itemsize}-byte items.",
        hint=f"a contiguous copy, such as {name}.copy()",
    )


def _foreign_order(dtype: np.dtype[Any], name: str) -> InvalidArguments:
    return InvalidArguments(
        f"{name} has the foreign byte order of {dtype.str!r}.",
        hint=f"{name}.astype({name}.dtype.newbyteorder('='))",
    )


def dtype_name(dtype: Any) -> str | None:
    """Our name of a dtype as NumPy, CuPy, torch or JAX write it: numpy.float16, torch.bfloat16, "float32".

    None if it is no dtype.
    """
    if isinstance(dtype, str):
        return dtype
    if dtype is None:  # why: NumPy takes it for float64
        return None
    if type(dtype).__module__ == "torch":
        return _TORCH_DTYPES.get(str(dtype), str(dtype))
    try:
        known: np.dtype[Any] = np.dtype(dtype)
    except TypeError:
        return None
    return str(known.name)


def _address(x: np.ndarray[Any, Any]) -> int:
    address: int = x.__array_interface__["data"][0] if x.size else 0
    return address


def _from_numpy(x: np.ndarray[Any, Any], name: str = "") -> ArrayView:
    dtype, strides = _elements(x.dtype, x.strides)
    if strides is None:
        raise _no_elements(x, name)
    return ArrayView(_address(x), x.shape, strides, dtype, CPU, "numpy", not x.flags.writeable, x)


def _from_cupy(x: Any, name: str = "") -> ArrayView:
    dtype, strides = _elements(x.dtype, x.strides)
    if strides is None:
        raise _no_elements(x, name)
    memory = x.data
    return ArrayView(memory.ptr, x.shape, strides, dtype, ("cuda", memory.device_id), "cupy", False, x)


_TORCH_DTYPES = {"torch.bfloat16": "bfloat16", "torch.float16": "float16", "torch.float32": "float32",
                 "torch.float64": "float64", "torch.bool": "bool", "torch.int32": "int32",
                 "torch.int8": "int8", "torch.uint8": "uint8",
                 "torch.float8_e4m3fn": "float8_e4m3fn"}  # fmt: skip


@lru_cache(maxsize=256)
def _of_torch(dtype: Any, device: Any) -> tuple[str, tuple[str, int]]:
    """A dtype and a device of torch in our words.

    why cached: torch spells them in as much time as everything else here takes.
    """
    if device.type not in ("cpu", "cuda"):
        raise InvalidArguments(f"a torch tensor is on device {device}.", hint='tensor.to("cpu")')
    name = str(dtype)
    return _TORCH_DTYPES.get(name, name), (device.type, device.index or 0)


def _from_torch(x: Any, name: str = "") -> ArrayView:
    if x.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise InvalidArguments(
            f"{name} is a torch tensor that requires grad, and this function records none.",
            hint="cupy_flash.torch.attention, which does; "
            f"or {name}.detach(), or a call inside torch.no_grad()",
        )
    try:
        pointer, shape, strides = x.data_ptr(), tuple(x.shape), x.stride()
    except RuntimeError:  # sparse, nested, or wrapped by a transform of torch.func
        raise _no_memory(x, name) from None
    dtype, device = _of_torch(x.dtype, x.device)
    if x.is_neg():
        raise InvalidArguments(
            f"{name} is a lazy view of torch: its values are those in memory, negated.",
            hint=f"{name}.resolve_neg(), which copies",
        )
    if not pointer and x.numel():
        raise _no_memory(x, name)
    return ArrayView(pointer, shape, strides, dtype, device, "torch", False, x)


def _no_memory(x: Any, name: str) -> InvalidArguments:
    """Why a tensor of torch's own class is not elements in strided memory, and what is."""
    torch = sys.modules["torch"]
    kind, hint = "is a torch tensor without memory", "a tensor of numbers"
    if x.is_nested:
        kind, hint = "is a nested tensor", _PACKED
    elif x.layout is not torch.strided:
        kind, hint = f"has the layout {x.layout}", f"{name}.to_dense()"
    elif x._is_zerotensor():
        kind, hint = "is a lazy tensor of zeros", f"torch.zeros({name}.shape)"
    elif torch._is_functional_tensor(x) or torch._C._functorch.is_functorch_wrapped_tensor(x):
        kind, hint = "is being traced or transformed by torch", _OPERATORS
    return InvalidArguments(f"{name} {kind}.", hint=hint)


_PACKED = "cupy_flash.attention_varlen over its values and offsets"
_OPERATORS = "cupy_flash.torch, whose functions torch can trace and transform"
# What holds the numbers of torch's own wrappers.
_UNWRAPPED = {
    "DTensor": "{}.to_local(), or cupy_flash.torch.ring_attention",
    "FakeTensor": _OPERATORS,
    "FunctionalTensor": _OPERATORS,
    "MaskedTensor": "{}.get_data(), and mask= for what to leave out",
    "NestedTensor": _PACKED,
}


def refuse_wrapper(x: Any, name: str) -> ArrayView:
    """Raise for a tensor that only leads to others."""
    kind = type(x).__name__
    raise InvalidArguments(
        f"{name} is a {kind}, which holds no memory itself.",
        hint=_UNWRAPPED.get(kind, "the torch.Tensor inside of it").format(name),
    )


def _refuse_causal_bias(x: Any, name: str) -> ArrayView:
    align = "top_left" if x.variant.name == "UPPER_LEFT" else "bottom_right"
    raise InvalidArguments(
        f"{name} is a CausalBias, which stands for a pattern and holds no numbers.",
        hint=f'causal=True, align="{align}"; cupy_flash.torch.attention takes it as it is',
    )


def _way_to_see_torch(kind: Any) -> Callable[[Any, str], ArrayView]:
    """The function for tensors of a class: decided by what it is, as an address of nothing can be read."""
    if kind.__module__ == "torch.nn.attention.bias":
        return _refuse_causal_bias
    plain = sys.modules["torch"].Tensor.__torch_dispatch__
    return _from_torch if kind.__torch_dispatch__ is plain else refuse_wrapper


def _refuse_tracer(_x: Any, _name: str) -> ArrayView:
    raise InvalidArguments(
        "a traced JAX array was given to cupy_flash.attention, which is not a JAX primitive.",
        hint="cupy_flash.jax.attention, which is; or call it outside of jit and grad",
    )


def _from_jax(x: Any, _name: str = "") -> ArrayView:
    devices = x.devices()
    device = next(iter(devices))
    if device.platform == "cpu":
        array = np.asarray(x)
        dtype, strides = _elements(array.dtype, array.strides)
        # why: NumPy's interface takes 1 us. JAX has no one address for an array on several devices.
        alone = len(devices) == 1 and not array.flags.owndata
        pointer = x.unsafe_buffer_pointer() if alone else _address(array)
        return ArrayView(pointer, array.shape, strides or (), dtype, CPU, "jax", True, (x, array))
    # why not __cuda_array_interface__: on a bfloat16 array it raises.
    return ArrayView(
        x.unsafe_buffer_pointer(),
        x.shape,
        contiguous(x.shape),
        x.dtype.name,
        ("cuda", device.local_hardware_id or 0),
        "jax",
        True,
        x,
    )


@lru_cache(maxsize=4096)
def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of an array whose last axis lies densest."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def _from_protocol(x: Any, name: str) -> ArrayView:
    """Any other array: through the CUDA array interface or DLPack."""
    try:
        return _spoken(x, name)
    except (InvalidArguments, Unsupported):
        raise
    except ImportError:
        raise Unsupported(
            f"{name} is on a GPU, and arrays there need CuPy, which is not installed.",
            hint="pip install cupy-cuda13x (drivers of CUDA 13) or cupy-cuda12x (older drivers)",
        ) from None
    except Exception as error:
        # why any: the code that fails is another library's
        raise InvalidArguments(
            f"{name} is a {type(x).__name__} whose array protocol fails: {type(error).__name__}: {error}.",
            hint="a NumPy, CuPy, torch or JAX array",
        ) from error


def _spoken(x: Any, name: str) -> ArrayView:
    """What an object says of itself through a protocol."""
    face = getattr(x, "__cuda_array_interface__", None)
    if face is not None:
        return _from_interface(face, x, name)
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        kind, ordinal = x.__dlpack_device__()
        if kind == _DLPACK_CPU:
            return _from_numpy(np.from_dlpack(x), name)._replace(library="dlpack")
        if kind in _DLPACK_CUDA:
            import cupy

            return _from_cupy(cupy.from_dlpack(x), name)._replace(library="dlpack")
        raise InvalidArguments(
            f"{name} is on DLPack device type {kind}:{ordinal}.",
            hint="an array in main memory or on a CUDA GPU",
        )
    raise InvalidArguments(f"{name} is a {type(x).__name__}, not an array.", hint=_array_inside(x, name))


def _array_inside(x: Any, name: str) -> str:
    """How to get the array out of what is none."""
    # why the type: reading values of a lazy object would compute them; of a dictionary it is a method
    if not callable(getattr(type(x), "values", len)):
        return f"{name}.values, the array without its labels"
    if isinstance(x, (list, tuple)) or hasattr(x, "__array__"):
        return f"numpy.asarray({name})"
    return "a NumPy, CuPy, torch or JAX array, or anything with __dlpack__"


_DLPACK_CPU = 1
_DLPACK_CUDA = (2, 13)  # memory of a GPU, and managed memory
_LEGACY_STREAM = 1  # in the CUDA array interface, where 0 would be ambiguous


def _from_interface(face: dict[str, Any], x: Any, name: str) -> ArrayView:
    """An array that tells of itself as version 3 of the CUDA array interface has it, or an older one.

    CuPy asks the address which GPU it is on. Work on the producer's stream is waited for by ours.
    """
    import cupy

    stream = face.get("stream")
    if stream is not None and (isinstance(stream, bool) or not isinstance(stream, int) or stream <= 0):
        raise InvalidArguments(
            f"the __cuda_array_interface__ of {name} has the stream {stream!r}, which stands for none.",
            hint="None if there is nothing to wait for, 1 or 2 for a default stream, or a handle",
        )
    if face.get("mask") is not None:
        return _refuse_rules(x, name)
    dtype = np.dtype(face["typestr"])
    if not dtype.isnative:
        raise _foreign_order(dtype, name)
    pointer, shape = face["data"][0], tuple(face["shape"])
    # why not cupy.asarray: it copies what is not on the current GPU, and stops the host for the stream.
    memory = cupy.cuda.UnownedMemory(pointer, math.prod(shape) * dtype.itemsize, x)
    if memory.device_id < 0:
        raise InvalidArguments(
            f"the __cuda_array_interface__ of {name} has the address {pointer:#x}, which is on no GPU.",
            hint=f"numpy.asarray({name}) if it is in main memory",
        )
    array = cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), face.get("strides"))
    if stream is not None:
        _wait_for(stream, memory.device_id)
    return _from_cupy(array, name)._replace(library="dlpack", readonly=bool(face["data"][1]))


def _wait_for(stream: int, device: int) -> None:
    """Let CuPy's current stream of a GPU wait for what has been enqueued on another one."""
    import cupy

    own = cupy.cuda.get_current_stream(device).ptr
    # why not always: while a graph is recorded from a stream, it may wait for no work from outside.
    if (own or _LEGACY_STREAM) == stream:
        return
    with cupy.cuda.Device(device):
        event = cupy.cuda.Event(disable_timing=True)
        cupy.cuda.runtime.eventRecord(event.ptr, stream)
        cupy.cuda.runtime.streamWaitEvent(own, event.ptr)


def adopt(x: Any, name: str) -> ArrayView:
    """See an array without copying it and without importing a library that the caller did not.

    Parameters
    ----------
    x : array
        NumPy, CuPy, torch or JAX array, an object with ``__dlpack__`` or
        ``__cuda_array_interface__``, or a view already made.
    name : str
        What to call it in an error.

    Returns
    -------
    ArrayView

    Raises
    ------
    InvalidArguments
        Not an array, on an unknown kind of device, or one whose gradient would be lost.
    """
    kind = type(x)
    see = _SEEN.get(kind)
    if see is None:
        see = _SEEN[kind] = _way_to_see(x)
    return see(x, name)


def _refuse_rules(x: Any, name: str) -> ArrayView:
    raise InvalidArguments(
        f"{name} is a {type(x).__name__}, whose rules differ from an array's.",
        hint=f"numpy.asarray({name}), and mask= for what to leave out",
    )


def _way_to_see(x: Any) -> Callable[[Any, str], ArrayView]:
    """The function for all objects of x's type."""
    if isinstance(x, np.ndarray):
        return _refuse_rules if isinstance(x, (np.matrix, np.ma.MaskedArray)) else _from_numpy
    if type(x).__module__.startswith("cupy"):
        return _from_cupy
    torch, jax = (sys.modules.get(name) for name in ("torch", "jax"))
    if torch is not None and isinstance(x, torch.Tensor):
        return _way_to_see_torch(type(x))
    if jax is not None and isinstance(x, jax.core.Tracer):
        return _refuse_tracer
    if jax is not None and isinstance(x, jax.Array):
        return _from_jax
    return _from_protocol


# By type, filled as types come: asking each library in turn takes longer than looking at an array.
_SEEN: dict[type, Callable[[Any, str], ArrayView]] = {
    np.ndarray: _from_numpy,
    ArrayView: lambda view, _: view,
}


def strides_of_new(shape: tuple[int, ...], dtype: str) -> tuple[int, ...]:  # noqa: ARG001  (tests need it)
    """Strides of what `empty` makes."""
    return contiguous(shape)


def empty(like: ArrayView, shape: tuple[int, ...], dtype: str) -> ArrayView:
    """A new array of the same library and device; its memory is not set."""
    device, library = like.device, like.library
    new: Any
    if library == "torch":
        new = like.owner.new_empty(shape, dtype=getattr(sys.modules["torch"], dtype))
        address = new.data_ptr()
    elif device == CPU:
        new = np.empty(shape, numpy_dtype(dtype))
        address = _address(new)
    elif library in ("cupy", "dlpack"):
        import cupy

        with cupy.cuda.Device(device[1]):
            new = cupy.empty(shape, numpy_dtype(dtype))
        address, library = new.data.ptr, "cupy"
    else:
        raise InvalidArguments(
            "JAX arrays on a GPU cannot be written by an eager call.",
            hint="jax.dlpack: pass cupy.from_dlpack(array)",
        )
    strides = strides_of_new(shape, dtype)
    return ArrayView(address, shape, strides, dtype, device, library, False, new)


def zeros(like: ArrayView, shape: tuple[int, ...], dtype: str) -> ArrayView:
    """A new array of the same library and device, filled with 0 on the library's current stream there."""
    view = empty(like, shape, dtype)
    if view.library == "cupy":
        import cupy

        with cupy.cuda.Device(view.device[1]):  # why: CuPy uses the stream of the current device
            view.owner[...] = 0
    else:
        view.owner[...] = 0
    return view


def finished(view: ArrayView) -> Any:
    """The array to hand to the caller: the owner, in the caller's library."""
    if view.library == "jax":
        import jax

        return jax.numpy.asarray(view.owner)
    return view.owner


def overlap(a: ArrayView, b: ArrayView) -> bool:
    """Whether two arrays share memory; True if that is too hard to tell."""
    (a_low, a_high), (b_low, b_high) = a.extent(), b.extent()
    if a_high <= b_low or b_high <= a_low:
        return False
    # Only addresses are looked at: memory of a GPU is not touched.
    first, second = (np.asarray(_Memory(x, x.shape, x.byte_strides(), x.dtype)) for x in (a, b))
    try:
        return bool(np.shares_memory(first, second, max_work=100_000))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(view: ArrayView) -> bool:
    """Whether two elements share memory; exact for strided views without interleaved axes.

    why: an axis whose step is smaller than what the axes inside it span is refused as well, although a
    few such views (interleaved ones) are sound: for an output this is the safe side.
    """
    if 0 in view.shape:
        return False
    span = 1
    for stride, n in sorted((abs(s), n) for s, n in zip(view.strides, view.shape, strict=True) if n > 1):
        if stride < span:
            return True
        span = stride * (n - 1) + span
    return False

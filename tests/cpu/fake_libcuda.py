"""A libcuda that records what it is asked for, of two GPUs without memory."""

from __future__ import annotations

import ctypes
import types
from typing import Any

import pytest

from cupy_flash.device import choice, cuda, libcuda, tensor_map
from cupy_flash.dispatch import backends

# Addresses of the contexts of the GPUs, and of what is allocated.
CONTEXTS = (0x1000, 0x2000)
MEMORY = 1 << 33
ERRORS = {1: "INVALID_VALUE", 2: "OUT_OF_MEMORY", 3: "NOT_INITIALIZED", 100: "NO_DEVICE",
          209: "NO_BINARY_FOR_GPU", 803: "SYSTEM_DRIVER_MISMATCH"}  # fmt: skip


def forget() -> None:
    """Start CUDA anew."""
    for cached in (libcuda.library, cuda.devices, cuda._context, choice.gpu_driver, backends.load):
        cached.cache_clear()
    cuda._loader.kernels.clear()


class FakeLibcuda:
    """As much of the library as is called. `fails` holds the status of each function that is to fail."""

    def __init__(self, version: int = 12080, count: int = 2) -> None:
        self.version, self.count = version, count
        self.log: list[Any] = []
        self.fails: dict[str, int] = {}
        self.current: list[int] = [0]
        self.capturing: set[int] = set()
        self.functions: dict[int, str] = {}
        self.allowed: dict[str, int] = {}
        self.lacks: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu") or name in self.lacks:
            raise AttributeError(name)
        own = getattr(type(self), "do_" + name, None)

        def function(*arguments: Any) -> int:
            if status := self.fails.get(name):
                return status
            assert len(arguments) == len(libcuda._PROTOTYPES[name])
            if own is None:
                self.log.append((name, self.current[-1], *map(plain, arguments)))
                return 0
            return own(self, *arguments) or 0

        made = types.FunctionType(function.__code__, function.__globals__, name, closure=function.__closure__)
        self.__dict__[name] = made  # why: ctypes, too, keeps functions, and what their arguments are
        return made

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def do_cuInit(self, _flags: int) -> int:
        return 0 if self.count else 100

    def do_cuDriverGetVersion(self, out: Any) -> None:
        out._obj.value = self.version

    def do_cuGetErrorName(self, status: int, out: Any) -> int:
        out._obj.value = f"CUDA_ERROR_{ERRORS[status]}".encode() if status in ERRORS else None
        return 0 if status in ERRORS else 1

    def do_cuGetErrorString(self, status: int, out: Any) -> None:
        out._obj.value = b"what it means" if status in ERRORS else None

    def do_cuDeviceGetCount(self, out: Any) -> None:
        out._obj.value = self.count

    def do_cuDeviceGet(self, out: Any, ordinal: int) -> None:
        out._obj.value = 10 + ordinal  # why: a handle need not be the ordinal

    def do_cuDeviceGetName(self, out: Any, _nbytes: int, device: int) -> None:
        out.value = b"GPU %d" % (device - 10)

    def do_cuDeviceTotalMem_v2(self, out: Any, _device: int) -> None:
        out._obj.value = 2**36

    def do_cuDeviceGetAttribute(self, out: Any, which: int, device: int) -> None:
        out._obj.value = {16: 100 + device - 10, 75: 8, 76: 6 * (device - 10)}[which]

    def do_cuDevicePrimaryCtxRetain(self, out: Any, device: int) -> None:
        out._obj.value = CONTEXTS[device - 10]

    def do_cuCtxGetCurrent(self, out: Any) -> None:
        out._obj.value = self.current[-1]

    def do_cuCtxPushCurrent_v2(self, context: int) -> None:
        self.current.append(context)

    def do_cuCtxPopCurrent_v2(self, out: Any) -> None:
        out._obj.value = self.current.pop()

    def do_cuModuleLoadData(self, out: Any, code: bytes) -> None:
        assert type(code) is bytes
        out._obj.value = 5

    def do_cuModuleGetFunction(self, out: Any, module: Any, name: bytes) -> None:
        assert module.value == 5
        out._obj.value = 100 + len(self.functions)
        self.functions[out._obj.value] = name.decode()
        self.log.append(("load", self.current[-1], name.decode()))

    def do_cuFuncSetAttribute(self, function: Any, which: int, value: int) -> None:
        assert which == 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.allowed[self.functions[function.value]] = value

    def do_cuLaunchKernel(self, function: Any, *rest: Any) -> None:
        *sizes, shared, handle, params, extra = rest
        assert extra is None
        assert {type(function), type(handle)} == {ctypes.c_void_p}, "an int is passed as one of 32 bits"
        stream = handle.value or 0
        struct = params[0]
        grid, block = tuple(sizes[:3]), tuple(sizes[3:])
        self.log.append(
            (self.functions[function.value], self.current[-1], grid, block, struct, shared, stream)
        )

    def do_cuStreamIsCapturing(self, stream: int, out: Any) -> None:
        out._obj.value = int(stream in self.capturing)

    def do_cuMemAlloc_v2(self, out: Any, nbytes: int) -> None:
        out._obj.value = MEMORY
        self.log.append(("alloc", self.current[-1], nbytes))

    def do_cuMemAllocAsync(self, out: Any, nbytes: int, stream: int) -> None:
        out._obj.value = MEMORY
        self.log.append(("alloc on", self.current[-1], nbytes, stream))


def plain(value: Any) -> Any:
    """The number in a reference of ctypes."""
    value = getattr(value, "_obj", value)
    return getattr(value, "value", value)


def use(monkeypatch: pytest.MonkeyPatch, fake: FakeLibcuda) -> FakeLibcuda:
    """Make it the library that is loaded."""
    real = ctypes.CDLL

    def loaded(name: Any, *arguments: Any, **options: Any) -> Any:
        return fake if name == tensor_map.LIBRARY else real(name, *arguments, **options)

    monkeypatch.setattr(ctypes, "CDLL", loaded)
    forget()
    return fake

"""A CuPy that records what it is asked for, of two GPUs without memory."""

import math
import types

import numpy as np

from cupy_flash.device import choice, driver
from cupy_flash.dispatch import backends

# layout: the addresses of a GPU's memory begin here, and those of the next one as far behind.
MEMORY = 1 << 40


def forget():
    """Ask CuPy anew for everything."""
    driver._cupy.cache_clear()
    driver.devices.cache_clear()
    driver._loader.kernels.clear()
    choice.gpu_driver.cache_clear()
    backends.load.cache_clear()


class Array:
    """As much of cupy.ndarray as is looked at."""

    __module__ = "cupy"

    def __init__(self, pointer, shape, dtype, strides=None, device=None, numbers=None):
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.size, self.itemsize = math.prod(self.shape), self.dtype.itemsize
        self.strides = strides or np.empty(shape, dtype).strides
        device = pointer // MEMORY - 1 if device is None else device
        self.data = types.SimpleNamespace(ptr=pointer, device_id=device)
        self.numbers = numbers

    def __setitem__(self, where, value):
        self.log(where, value)

    def tolist(self):
        """The numbers, if it has any."""
        return self.numbers


class FakeCuda:
    """As much of cupy as the library touches: two GPUs, the current one being GPU 0."""

    def __init__(self, driver_version=12080, runtime_version=12090, count=2):
        self.current, self.log, self.loads, self.codes = 0, [], [], []
        self.driver_version, self.runtime_version, self.count = driver_version, runtime_version, count
        self.capturing, self.first_stream = set(), 77
        self.fails_to_load = False

    def module(self):
        fake = self

        class CudaError(RuntimeError):
            pass

        class Device:
            def __init__(self, ordinal=None):
                self.ordinal = self.id = fake.current if ordinal is None else ordinal

            def __enter__(self):
                self.before, fake.current = fake.current, self.ordinal

            def __exit__(self, *error):
                fake.current = self.before

        class Function:
            def __init__(self, name):
                self.name, self.ptr, self.max_shared = name, id(self), None
                functions[self.ptr] = self

            def __call__(self, grid, block, arguments, shared_bytes, stream):
                (struct,) = arguments
                fake.log.append(
                    (self.name, fake.current, grid, block, bytes(struct), shared_bytes, stream.ptr)
                )
                assert struct.size == 1
                assert self.max_shared in (None, shared_bytes)

        class Module:
            def load(self, cubin):
                assert type(cubin) is bytes
                if fake.fails_to_load:
                    raise CudaError("CUDA_ERROR_NO_BINARY_FOR_GPU")
                fake.codes.append(cubin)

            def get_function(self, name):
                fake.loads.append((name, fake.current))
                return Function(name)

        functions = {}

        def set_attribute(pointer, attribute, value):
            assert attribute == 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            functions[pointer].max_shared = value

        def properties(ordinal):
            return {
                "name": b"GPU %d" % ordinal, "major": 8, "minor": 6 if ordinal else 0,
                "multiProcessorCount": 100 + ordinal, "totalGlobalMem": 2**30,
            }  # fmt: skip

        def count():
            if not fake.count:
                raise CudaError("cudaErrorNoDevice")
            return fake.count

        def empty(shape, dtype):
            made = Array(MEMORY * (fake.current + 1), shape, dtype)
            made.log = lambda *call: fake.log.append(("set", fake.current, *call))
            return made

        def unowned(pointer, nbytes, owner):
            device = pointer // MEMORY - 1
            return types.SimpleNamespace(pointer=pointer, device_id=device, nbytes=nbytes, owner=owner)

        def ndarray(shape, dtype, memory, strides):
            array = Array(memory.pointer, shape, dtype, strides, numbers=memory.owner.numbers)
            assert memory.nbytes == array.size * array.itemsize
            return array

        def from_dlpack(x):
            fake.log.append(("from_dlpack", *x.__dlpack_device__()))
            return Array(MEMORY, (2,), "f4", device=x.__dlpack_device__()[1])

        def event(*, disable_timing):
            assert disable_timing
            return types.SimpleNamespace(ptr=f"event of {fake.current}")

        class Stream:
            """One of another library, while CuPy takes it for its own."""

            def __init__(self, handle):
                self.handle = handle

            @classmethod
            def from_external(cls, stream):
                return cls(stream.__cuda_stream__()[1])

            def __enter__(self):
                fake.log.append(("on stream", self.handle))

            def __exit__(self, *error):
                fake.log.append(("off stream", self.handle))

        def alloc(nbytes):
            fake.log.append(("alloc", fake.current, nbytes))
            return types.SimpleNamespace(ptr=4096)

        runtime = types.SimpleNamespace(
            is_hip=False, driverGetVersion=lambda: fake.driver_version, getDeviceCount=count,
            runtimeGetVersion=lambda: fake.runtime_version, getDevice=lambda: fake.current,
            getDeviceProperties=properties, CUDARuntimeError=CudaError,
            deviceSynchronize=lambda: fake.log.append(("host waits for device", fake.current)),
            streamIsCapturing=lambda handle: handle in fake.capturing,
            memsetAsync=lambda *call: fake.log.append(("memset", fake.current, *call)),
            memcpyDeviceToHost="to host",
            memcpyAsync=lambda *call: fake.log.append(("copy", fake.current, *call[1:])),
            streamSynchronize=lambda stream: fake.log.append(("host waits for", stream)),
            eventRecord=lambda *call: fake.log.append(("record", fake.current, *call)),
            streamWaitEvent=lambda *call: fake.log.append(("wait", fake.current, *call)),
        )  # fmt: skip
        cupy = types.ModuleType("cupy")
        cupy.ndarray, cupy.from_dlpack = ndarray, from_dlpack
        cupy.empty, cupy.asarray = empty, lambda x: Array(MEMORY * (fake.current + 1), x.shape, x.dtype)
        cupy.cuda = types.SimpleNamespace(
            runtime=runtime, Device=Device, Module=Module,
            driver=types.SimpleNamespace(CUDADriverError=CudaError, funcSetAttribute=set_attribute),
            Event=event, Stream=Stream, ExternalStream=Stream,
            UnownedMemory=unowned, MemoryPointer=lambda memory, _: memory, alloc=alloc,
            get_current_stream=lambda device=None: types.SimpleNamespace(
                ptr=fake.first_stream + (fake.current if device is None else device)
            ),
        )  # fmt: skip
        return cupy

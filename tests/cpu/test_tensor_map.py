"""Tensor maps: what the CUDA driver is asked, by a driver that records, and what is refused before it is."""

import ctypes
import types

import pytest

from cupy_flash.device import driver, simulator, tensor_map

GOOD = tensor_map.TensorMap("bfloat16", (64, 1000, 8, 2), (1024, 128, 1024000), (64, 128, 1, 1), 128)


class FakeDriver:
    """As much of libcuda as is called: it fills the map with its number of calls."""

    def __init__(self, status=0):
        self.status, self.calls, self.context, self.contexts = status, [], None, []

    def cuCtxGetCurrent(self, place):
        place._obj.value = self.context
        return 0

    def cuTensorMapEncodeTiled(self, place, *arguments):
        assert place.value % 64 == 0
        self.contexts.append(self.context)
        self.calls.append([list(x) if isinstance(x, ctypes.Array) else x.value for x in arguments])
        ctypes.memset(place.value, len(self.calls), 128)
        return self.status


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeDriver()
    monkeypatch.setattr(tensor_map, "_driver", lambda: fake)
    tensor_map.encode.cache_clear()
    yield fake
    tensor_map.encode.cache_clear()


def test_what_the_driver_is_asked(cuda):
    assert tensor_map.encode(GOOD, 4096) == b"\1" * 128
    bfloat16, swizzle_128, promote_256 = 9, 3, 3  # as the header cuda.h numbers them
    assert cuda.calls == [
        [bfloat16, 4, 4096, [64, 1000, 8, 2], [1024, 128, 1024000], [64, 128, 1, 1], [1] * 4, 0, swizzle_128,
         promote_256, 0]
    ]  # fmt: skip


def test_a_tensor_is_encoded_once_and_another_again(cuda):
    first = tensor_map.encode(GOOD, 4096)
    assert tensor_map.encode(GOOD._replace(), 4096) is first
    assert tensor_map.encode(GOOD, 8192) != first
    for change in ({"strides": (2048, 128, 1024000)}, {"box": (64, 64, 1, 1)}):
        assert tensor_map.encode(GOOD._replace(**change), 4096) != first
    assert len(cuda.calls) == 4


@pytest.mark.parametrize("encode", [tensor_map.encode, simulator.encode_tensor_map])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, "address 0x1008 is not a multiple of 16"),
        ({"strides": (1024, 120, 1024000)}, "are not multiples of 16"),
        ({"shape": (64, 0, 8, 2)}, "are not 1 to 2"),
        ({"strides": (1024, 128, 1 << 40)}, "are not multiples of 16"),
        ({"strides": (1024, 128, -16)}, "are not multiples of 16"),
        ({"shape": (64, 1000, 8, 2**32 + 1)}, "are not 1 to 2"),
        ({"shape": (8,) * 6, "strides": (16,) * 5, "box": (8,) * 6}, "rank 6 is not 1 to 5"),
        ({"box": (64, 0, 1, 1)}, "is not 1 to 256"),
        ({"box": (64, 257, 1, 1)}, "is not 1 to 256"),
        ({"box": (128, 64, 1, 1)}, "the box is 256 bytes wide, the swizzle 128"),
        ({"box": (60, 64, 1, 1)}, "the box is 120 bytes wide, no multiple of 16"),
        ({"swizzle": 256}, "swizzle 256 is not 0, 32, 64 or 128"),
        ({"shape": (64, 1000)}, "strides or box do not fit the rank"),
        ({"box": (64, 128, 1)}, "strides or box do not fit the rank"),
    ],
)
def test_both_drivers_refuse_the_same_and_say_why(cuda, encode, change, reason):
    with pytest.raises(ValueError, match=reason):
        encode(GOOD._replace(**change), 4096 if change else 4104)
    assert cuda.calls == []


@pytest.mark.parametrize(
    "change",
    [
        {"shape": (2**32,), "strides": (), "box": (64,)},
        {"shape": (64, 1, 1, 1, 1), "strides": (0, 16, 16, (1 << 40) - 16), "box": (64, 256, 1, 1, 1)},
    ],
    ids=["1 axis", "5 axes"],
)
def test_the_largest_and_the_smallest_are_encoded(cuda, change):
    assert tensor_map.encode(GOOD._replace(**change), 4096) == b"\1" * 128


def test_it_is_encoded_in_a_context_of_the_device(cuda, monkeypatch):
    """The driver wants one, and a thread whose first CUDA call this is has none; later calls cost nothing."""
    current, log = [0], []

    class Device:
        def __init__(self, ordinal):
            self.ordinal = ordinal

        def __enter__(self):
            self.before, current[0] = current[0], self.ordinal

        def __exit__(self, *error):
            current[0] = self.before

    def call_of_the_runtime():
        log.append(current[0])
        cuda.context = 4096

    runtime = types.SimpleNamespace(getDevice=lambda: current[0], memGetInfo=call_of_the_runtime)
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime, Device=Device))
    monkeypatch.setattr(driver, "_cupy", lambda: cupy)
    first, second = (driver.Kernel(None, None, ordinal) for ordinal in (0, 1))
    for kernel, pointer in ((first, 4096), (first, 8192), (second, 16384)):
        kernel.encode_tensor_map(GOOD, pointer)
    assert cuda.contexts == [4096] * 3
    assert log == [0, 1]


def test_what_the_driver_refuses_all_the_same(cuda):
    cuda.status = 1
    with pytest.raises(ValueError, match="the driver returns 1 for TensorMap"):
        tensor_map.encode(GOOD, 4096)

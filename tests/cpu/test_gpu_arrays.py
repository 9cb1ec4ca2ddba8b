"""Arrays on a GPU: where results are made, whom a call waits for, and what no memory is needed for."""

import re

import numpy as np
import pytest

import cupy_flash
from cupy_flash import InvalidArgumentsError
from cupy_flash.call.adopt import adopt
from tests.cpu.fake_cupy import MEMORY, Array
from tests.public import cached

GPU_1 = 2 * MEMORY
SMALL = (1, 2, 1, 64)
CACHE = (1, 2, 128, 64)


def on_gpu_1(shape, dtype="f2", pointer=GPU_1):
    return Array(pointer, shape, dtype)


class Foreign:
    """An array of a library that only has the CUDA array interface; GPU 1 unless its address says another."""

    def __init__(self, shape, dtype="<f2", pointer=GPU_1, numbers=None, **changes):
        self.face = {"shape": shape, "typestr": dtype, "data": (pointer, False), "strides": None, **changes}
        self.numbers = numbers

    @property
    def __cuda_array_interface__(self):
        return self.face

    def __len__(self):
        return self.face["shape"][0]


# ---- where results are made


def test_packed_results_are_zeroed_on_their_own_gpu(cuda, located):
    rows, cut = on_gpu_1((70, 2, 64)), on_gpu_1((3,), "i4")
    cupy_flash.attention_varlen(rows, rows, rows, cut, cut, max_seqlen_q=70, max_seqlen_k=70)
    assert cuda.log[0] == ("set", 1, ..., 0)
    assert [entry[0] for entry in cuda.log[1:]] == [located[0][0]]


# ---- lengths


@pytest.mark.parametrize("kind", [on_gpu_1, Foreign])
def test_one_length_needs_no_memory_and_no_kernel(kind, cuda, located):
    """A recorded graph would write to memory that is somebody else's by its replay."""
    cuda.capturing = {77, 78}
    q, cache, out = kind(SMALL), kind(CACHE), kind(SMALL, pointer=GPU_1 + 4096 * 64)
    for length in (5, 9):
        cached(q, cache, cache, cache_seqlens=length, splits=1, out=out)
    launches = [(name, device, stream) for name, device, *_, stream in cuda.log]
    assert launches == [(located[0][0], 1, 78)] * 2
    first, second = (np.frombuffer(entry[4], "u8") for entry in cuda.log)
    changed = first != second
    assert (first[changed].tolist(), second[changed].tolist()) == ([5], [9])


@pytest.mark.parametrize("kind", [on_gpu_1, Foreign])
def test_one_length_beyond_the_cache_is_refused_where_asked(kind, cuda, located):
    q, cache = kind(SMALL), kind(CACHE)
    with pytest.raises(InvalidArgumentsError, match=r"cache_seqlens is 129; .* capacity is 128(.|\n)*Try: "):
        cached(q, cache, cache, cache_seqlens=129, check=True)


def test_lengths_of_a_foreign_array_are_read_where_asked(cuda, located):
    q, cache = Foreign(SMALL), Foreign(CACHE)
    for length in (128, 129):
        given = {"cache_seqlens": Foreign((1,), "<i4", numbers=[length]), "check": True}
        if length == 128:
            cached(q, cache, cache, **given)
        else:
            with pytest.raises(InvalidArgumentsError, match=r"cache_seqlens\[0\] is 129; .* capacity is 128"):
                cached(q, cache, cache, **given)


def test_offsets_of_a_foreign_array_are_read_where_needed(cuda, located):
    rows = Foreign((70, 2, 64))
    cut = Foreign((3,), "<i4", numbers=[0, 30, 70])
    cupy_flash.attention_varlen(rows, rows, rows, cut, cut)
    wrong = Foreign((3,), "<i4", numbers=[0, 30, 71])
    with pytest.raises(InvalidArgumentsError, match="and end at 70 at most"):
        cupy_flash.attention_varlen(rows, rows, rows, wrong, wrong)


# ---- the CUDA array interface


def test_the_address_says_which_gpu(cuda):
    for ordinal in (0, 1):
        view = adopt(Foreign((4, 3), pointer=MEMORY * (ordinal + 1)), "q")
        assert view[:6] == (MEMORY * (ordinal + 1), (4, 3), (3, 1), "float16", ("cuda", ordinal), "dlpack")


def test_what_is_read_only_stays_so(cuda):
    assert adopt(Foreign((4,), data=(GPU_1, True)), "q").readonly
    assert not adopt(Foreign((4,)), "q").readonly


@pytest.mark.parametrize("producer", [1, 2, 99])
def test_our_stream_waits_for_the_producers(producer, cuda):
    """Ours is 78 on GPU 1; the host waits for nothing."""
    adopt(Foreign((4,), stream=producer), "q")
    assert cuda.log == [("record", 1, "event of 1", producer), ("wait", 1, 78, "event of 1")]
    assert cuda.current == 0


def test_there_is_nothing_to_wait_for(cuda):
    adopt(Foreign((4,), stream=None), "q")
    adopt(Foreign((4,), stream=78), "q")
    adopt(Foreign((4,), pointer=MEMORY, stream=77), "q")
    assert cuda.log == []


def test_the_default_stream_need_not_wait_for_itself(cuda, monkeypatch):
    """It is 1 in the protocol and 0 in CuPy."""
    monkeypatch.setattr(cuda, "first_stream", -1)
    adopt(Foreign((4,), stream=1), "q")
    assert cuda.log == []


@pytest.mark.parametrize("stream", [0, -1, True, "1"])
def test_what_is_no_stream(stream, cuda):
    text = rf"__cuda_array_interface__ of q has the stream {re.escape(repr(stream))}(.|\n)*Try: None"
    with pytest.raises(InvalidArgumentsError, match=text):
        adopt(Foreign((4,), stream=stream), "q")


def test_what_would_be_read_wrongly(cuda):
    with pytest.raises(InvalidArgumentsError, match=r"q is a Foreign, whose rules differ(.|\n)*Try: .*mask="):
        adopt(Foreign((4,), mask=Foreign((4,), "|b1")), "q")
    with pytest.raises(InvalidArgumentsError, match=r"foreign byte order of '>f2'(.|\n)*Try: "):
        adopt(Foreign((4,), ">f2"), "q")
    with pytest.raises(
        InvalidArgumentsError, match=r"q has the address 0x1000, which is on no GPU(.|\n)*Try: "
    ):
        adopt(Foreign((4,), pointer=4096), "q")
    with pytest.raises(InvalidArgumentsError, match=r"strides \(7,\) that are not multiples(.|\n)*Try: "):
        adopt(Foreign((4,), strides=(7,)), "q")


# ---- DLPack


class OfDlpack:
    """An array of a library that only has DLPack."""

    def __init__(self, kind):
        self.kind = kind

    def __dlpack_device__(self):
        return self.kind, 1

    def __dlpack__(self, **_):
        raise NotImplementedError


@pytest.mark.parametrize("kind", [2, 13], ids=["device", "managed"])
def test_memory_of_a_gpu_and_managed_memory(kind, cuda):
    assert adopt(OfDlpack(kind), "q").device == ("cuda", 1)
    assert cuda.log == [("from_dlpack", kind, 1)]


def test_other_memory_is_refused(cuda):
    with pytest.raises(InvalidArgumentsError, match=r"q is on DLPack device type 10:1(.|\n)*Try: "):
        adopt(OfDlpack(10), "q")

"""Prepared calls: what is remembered of a call is right for later ones, keeps nothing alive, and is quick."""

import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import cupy_flash
from bench.commands.overhead import NoGpu
from cupy_flash import InvalidArgumentsError
from cupy_flash.device import abi
from cupy_flash.dispatch import memo
from tests.public import cached

HERE = Path(cupy_flash.__file__).parent
COMPUTES = (f"{HERE}/cpu/", np.__path__[0])


class Recorder(NoGpu):
    """Keeps the params of launches."""

    def __init__(self):
        self.launched = []

    def launch(self, _grid, _block, _shared_bytes, params, _stream):
        self.launched.append(params)


@pytest.fixture
def gpu(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(memo, "driver_of", lambda *_: recorder)
    return recorder


@pytest.fixture(autouse=True)
def _nothing_remembered():
    memo.forget()
    yield
    memo.forget()


def ones(*shape, dtype=np.float16):
    return np.ones(shape, dtype)


def calls_of(function):
    """Python functions that run in the second of two equal calls, without those that compute."""
    found = []

    def seen(frame, event, _argument):
        if event == "call" and not frame.f_code.co_filename.startswith(COMPUTES):
            found.append(frame.f_code.co_name)

    function()
    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


Q, ROWS, CUT = ones(2, 8, 128, 128), ones(300, 8, 128), np.array([0, 100, 300], np.int32)
LSE = ones(2, 8, 128, dtype=np.float32)
NEW, CACHE, LENGTHS = ones(2, 8, 1, 128), ones(2, 8, 1024, 128), np.array([5, 7], np.int32)
VALUES = ones(2, 8, 1024, 128)  # memory of its own: keys that are values, too, are latents
UNCHECKED = cupy_flash.Tuning(check=False)
# Most function calls on a GPU, and on the CPU beside its arithmetic; what the fixture's GPU takes is counted.
CALLS = {
    # On the CPU it is repeated in the core, for which a NumPy array looks on this GPU, too.
    "forward": ((48, 4), lambda: cupy_flash.attention(Q, Q, Q, causal=True)),
    # With the two of the tensor map of a result at a new address, as in "packed".
    "forward with lse": ((52, 68), lambda: cupy_flash.attention(Q, Q, Q, causal=True, return_lse=True)),
    "backward": ((71, 90), lambda: cupy_flash.attention_backward(Q, Q, Q, Q, Q, LSE, causal=True)),
    "packed": (
        (88, 122),
        lambda: cupy_flash.attention_varlen(ROWS, ROWS, ROWS, CUT, CUT, max_seqlen_q=200, max_seqlen_k=200),
    ),
    # With the six that copy lengths in main memory, where this GPU's arrays are: of a real one they stay.
    "decode": (
        (71, 89),
        lambda: cupy_flash.attention_with_kv_cache(
            NEW, CACHE, VALUES, cache_seqlens=LENGTHS, k=NEW, v=NEW, tuning=UNCHECKED
        ),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_like_an_earlier_one_takes_few_function_calls(name, gpu):
    """The clock of a shared machine says little; this is what makes a call slow, and it does not vary."""
    (most, _), call = CALLS[name]
    found = calls_of(call)
    assert len(found) <= most, found
    assert gpu.launched


@pytest.mark.parametrize("name", CALLS)
def test_so_does_one_on_the_cpu(name):
    (_, most), call = CALLS[name]
    with threadpool_limits(1, user_api="blas"):  # why: how many jobs fall to this thread of several is luck
        found = calls_of(call)
    assert len(found) <= most, found


def test_each_call_gets_its_own_addresses(gpu):
    q, k, v, other = (ones(1, 2, 5, 64, dtype=np.float64) for _ in range(4))
    for keys in (k, other):
        o = cupy_flash.attention(q, keys, v)
        params = np.frombuffer(gpu.launched[-1], abi.FORWARD)[0]
        addresses = [params[name]["data"] for name in "qkvo"]
        assert addresses == [x.ctypes.data for x in (q, keys, v, o)]
    assert len(memo._KNOWN) == 1


def test_each_call_gets_its_own_seed(gpu):
    q = ones(1, 2, 5, 64, dtype=np.float64)
    for seed in (3, 2**63):
        cupy_flash.attention(q, q, q, dropout=0.5, seed=seed)
        assert np.frombuffer(gpu.launched[-1], abi.FORWARD)[0]["score"]["dropout_seed"] == seed
    assert len(memo._KNOWN) == 1
    for seed in (-1, 2**64, 1.0, True):
        with pytest.raises(InvalidArgumentsError, match="seed"):
            cupy_flash.attention(q, q, q, dropout=0.5, seed=seed)


def test_another_alignment_is_another_call(gpu):
    memory = ones(2 * 8 * 128 * 128 + 8)
    shape = (2, 8, 128, 128)
    aligned, beside = (memory[i : i + Q.size].reshape(shape) for i in (0, 1))
    assert memory.ctypes.data % 16 == 0
    kinds = []
    for q in (aligned, beside, aligned):
        cupy_flash.attention(q, Q, Q)
        kinds.append(len(gpu.launched[-1]))  # with tensor maps or without
    assert kinds[0] == kinds[2] != kinds[1]


def test_what_a_remembered_call_takes_is_refused_of_another_type():
    q = ones(1, 2, 5, 8, dtype=np.float32)
    o, lse = cupy_flash.attention(q, q, q, causal=True, return_lse=True)
    with pytest.raises(InvalidArgumentsError, match="causal is 1"):
        cupy_flash.attention(q, q, q, causal=1)
    cupy_flash.attention_backward(o, q, q, q, o, lse, reproducible="run")
    with pytest.raises(InvalidArgumentsError, match="reproducible is 1"):
        cupy_flash.attention_backward(o, q, q, q, o, lse, reproducible=1)


@pytest.mark.parametrize("wrong", [1.0, True, np.float32(1)])
@pytest.mark.parametrize("option", ["window", "tile"])
def test_what_a_remembered_call_takes_is_refused_of_another_type_within_a_pair(option, wrong):
    def called(first):
        pair = first, 4
        options = {"window": pair} if option == "window" else {"tuning": cupy_flash.Tuning(tile=pair)}
        return cupy_flash.attention(q, q, q, **options)

    q = ones(1, 2, 5, 8, dtype=np.float32)
    called(1)
    with pytest.raises(InvalidArgumentsError, match=option):
        called(wrong)


@pytest.mark.parametrize("change", ["shape", "strides", "dtype", "read-only"])
def test_an_array_of_another_kind_is_looked_at_again(change):
    q, out = (np.zeros((1, 2, 6, 8), np.float32) for _ in range(2))
    cupy_flash.attention(q, q, q, out=out)
    if change == "read-only":
        out.flags.writeable = False
    other = {
        "shape": ones(1, 2, 5, 8, dtype=np.float32),
        "strides": np.lib.stride_tricks.as_strided(out, out.shape, (0, 0, 0, 4)),
        "dtype": ones(1, 2, 6, 8),
        "read-only": out,
    }[change]
    with pytest.raises(InvalidArgumentsError, match="out"):
        cupy_flash.attention(q, q, q, out=other)


def test_out_may_overlap_nothing_in_any_call():
    memory = np.zeros((4, 1, 2, 6, 8), np.float32)
    q, k, v, out = memory
    cupy_flash.attention(q, k, v, out=out)
    for x, name in ((q, "q"), (k, "k"), (v, "v")):
        with pytest.raises(InvalidArgumentsError, match=f"out overlaps {name}"):
            cupy_flash.attention(q, k, v, out=x)


@pytest.mark.parametrize("name", ["q", "k", "v", "v_cache"])
def test_a_cache_that_grows_may_overlap_nothing(name):
    """But it may lie between the rows of the other cache."""
    between, new = np.zeros((2, 2, 4, 17, 8), np.float32), np.zeros((2, 4, 1, 8), np.float32)
    cache = between[:, 0, :, :16]
    for values in (between[:, 1, :, 1:], np.zeros_like(cache)):
        given = {"q": new.copy(), "k_cache": cache, "v_cache": values, "k": new, "v": new}
        cupy_flash.attention_with_kv_cache(**given, cache_seqlens=5)
        given[name] = between[:, 0, :, 1:] if name == "v_cache" else cache[:, :, 4:5]
        with pytest.raises(InvalidArgumentsError, match=rf"k_cache overlaps {name} (?s:.*)\nTry: a copy of"):
            cupy_flash.attention_with_kv_cache(**given, cache_seqlens=5)


class Number:
    """A number that can change, as a tensor can."""

    def __init__(self, value):
        self.value = value

    def __float__(self):
        return self.value


def test_a_number_that_can_change_is_not_remembered():
    q = np.random.default_rng(0).standard_normal((1, 2, 5, 8)).astype(np.float32)
    scale = Number(0.5)
    for value in (0.5, 2.0):
        scale.value = value
        expected = cupy_flash.attention(q, q, q, scale=value)
        assert np.array_equal(cupy_flash.attention(q, q, q, scale=scale), expected)


def test_scales_of_float8_are_looked_at_in_every_call():
    q, scale = ones(1, 2, 5, 16, dtype=np.uint8), ones(2, dtype=np.float32)
    x = cupy_flash.QuantizedArray(q, scale)
    cupy_flash.attention(x, x, x)
    scale[1] = -1
    with pytest.raises(InvalidArgumentsError, match="-1"):
        cupy_flash.attention(x, x, x)


def test_lengths_of_a_cache_are_looked_at_in_every_call():
    lengths = LENGTHS.copy()
    q, cache = (x.astype(np.float32) for x in (NEW, CACHE))
    cached(q, cache, cache, cache_seqlens=lengths)
    lengths[1] = 1025
    with pytest.raises(InvalidArgumentsError, match="1025"):
        cached(q, cache, cache, cache_seqlens=lengths)


def test_nothing_remembered_keeps_an_array_alive():
    q = np.ones((1, 2, 5, 8), np.float32)
    o, lse = cupy_flash.attention(q, q, q, return_lse=True)
    grads = cupy_flash.attention_backward(o, q, q, q, o, lse)
    alive = [weakref.ref(x) for x in (q, o, lse, *grads[:3])]
    del q, o, lse, grads
    gc.collect()
    assert len(memo._KNOWN) == 2
    assert [ref() for ref in alive] == [None] * len(alive)


def test_memory_of_calls_is_bounded(monkeypatch):
    monkeypatch.setattr(memo, "_MOST_KNOWN", 3)
    for length in range(1, 9):
        q = ones(1, 1, length, 4, dtype=np.float32)
        assert np.allclose(cupy_flash.attention(q, q, q), q)
        assert 1 <= len(memo._KNOWN) <= 3


def test_threads_share_what_is_remembered(monkeypatch):
    monkeypatch.setattr(memo, "_MOST_KNOWN", 3)
    wrong = []

    def work():
        for turn in range(60):
            q = np.full((1, 1, 1 + turn % 5, 4), turn, np.float32)
            if not np.allclose(cupy_flash.attention(q, q, q), q):
                wrong.append(turn)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_plan_is_logged_once(gpu, caplog):
    caplog.set_level("DEBUG", "cupy_flash")
    for seed in range(3):
        cupy_flash.attention(Q, Q, Q, dropout=0.1, seed=seed)
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("planned forward float16 batch=2 heads=8")
    assert ": flash_forward_" in said


def test_the_logger_is_silent_until_asked():
    code = "import logging, cupy_flash.log; print(logging.getLogger('cupy_flash').handlers)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "[<NullHandler (NOTSET)>]\n"


def test_kernels_are_listed_while_another_thread_prepares_a_call(monkeypatch):
    class Met:
        @property
        def kernels(self):
            memo._KNOWN[object()] = self
            return ("simple",)

    monkeypatch.setattr(memo, "_KNOWN", {1: Met(), 2: Met()})
    assert memo.kernels()[0] == "simple"

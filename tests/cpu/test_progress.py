"""progress(): who is told how much of a call is done, when, and what stops it."""

from __future__ import annotations

import contextvars
import ctypes
import functools
import io
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import InvalidArgumentsError, derivatives
from cupy_flash.call import progress as of_calls
from cupy_flash.call.problem import Problem
from cupy_flash.cpu import progress as of_numpy
from cupy_flash.cpu.core import family
from cupy_flash.cpu.core import progress as of_core
from cupy_flash.cpu.core.params import DONE, JOBS
from cupy_flash.cpu.core.progress import share_of
from tests.cpu.core_calls import before_jobs

Q = np.random.default_rng(0).standard_normal((1, 2, 3000, 64), np.float32)
CUTS = np.array([0, 500, 3000], np.int32)
ROWS = np.ascontiguousarray(Q[0].swapaxes(0, 1))
BIAS = np.zeros((1, 1, 3000, 3000), np.float32)
OUT, LSE = cupy_flash.attention(Q, Q, Q, causal=True, return_lse=True)

CALLS: dict[str, Callable[[], Any]] = {
    "forward": lambda: cupy_flash.attention(Q, Q, Q, causal=True),
    "backward": lambda: cupy_flash.attention_backward(OUT, Q, Q, Q, OUT, LSE, causal=True).dk,
    "bias": lambda: cupy_flash.attention_backward(OUT, Q, Q, Q, OUT, LSE, bias=BIAS).dbias,
    "packed": lambda: cupy_flash.attention_varlen(ROWS, ROWS, ROWS, CUTS, CUTS, causal=True),
    "statistics": lambda: cupy_flash.attention_statistics(Q, Q, LSE, causal=True, want="key_sum").key_sum,
}
# Those that the core alone counts, and NumPy tells the end of.
FEW = Q[:, :, :400]
RESULTS = OUT[:, :, :400], LSE[:, :, :400]
OTHERS: dict[str, Callable[[], Any]] = {
    "decode": lambda: cupy_flash.attention_with_kv_cache(Q[:, :, :64], Q, Q, cache_seqlens=3000),
    "packed queries over a cache": lambda: cupy_flash.attention_with_kv_cache(
        ROWS[:64],
        Q.repeat(2, 0),
        Q.repeat(2, 0),
        cache_seqlens=np.array([900, 3000], np.int32),
        cu_seqlens_q=np.array([0, 20, 64], np.int32),
        max_seqlen_q=44,
    ),
    "statistics without lse": lambda: cupy_flash.attention_statistics(Q, Q, causal=True, want="entropy"),
    "jvp": lambda: derivatives.jvp(FEW, FEW, FEW, *RESULTS, dq=FEW, causal=True),
    "value_and_jvp": lambda: derivatives.value_and_jvp(FEW, FEW, FEW, dq=FEW, causal=True),
    "hvp": lambda: derivatives.hvp(FEW, FEW, FEW, FEW, *RESULTS, dq=FEW, causal=True),
}


@pytest.fixture(params=["core", "numpy"])
def path(request, monkeypatch):
    """What computes; every call counts as long, and tells at every chance."""
    if request.param == "numpy":
        monkeypatch.setenv("CUPY_FLASH_CPU", "numpy")
        monkeypatch.setattr(of_numpy, "SECONDS", 0.0)
        return request.param
    if "family    core" not in cupy_flash.explain(Q, Q, Q):
        pytest.skip("the core is not compiled here")
    monkeypatch.setattr(family, "SECONDS", 0.001)
    monkeypatch.setattr(family, "LONG_FLOPS", 0.0)
    return request.param


@pytest.mark.parametrize("name", CALLS)
def test_the_share_rises_to_1_in_the_callers_thread(name, path):
    told, threads = [], set()

    def tell(share):
        told.append(share)
        threads.add(threading.get_ident())

    with cupy_flash.progress(tell):
        found = CALLS[name]()
    np.testing.assert_array_equal(found, CALLS[name]())
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert threads == {threading.get_ident()}
    if path == "numpy":  # how often the core is looked at is luck
        assert len(told) > 10
        assert told[0] < 0.2
        assert told[-2] == 1.0, "the last block is the last pair"


@pytest.mark.parametrize("name", CALLS)
def test_the_core_counts_all_of_its_jobs(name, monkeypatch):
    if "family    core" not in cupy_flash.explain(Q, Q, Q):
        pytest.skip("the core is not compiled here")
    monkeypatch.setattr(family, "LONG_FLOPS", 0.0)
    watches, make = [], family.Watch
    monkeypatch.setattr(family, "Watch", lambda *given: watches.append(make(*given)) or watches[-1])
    with cupy_flash.progress(lambda _: None):
        CALLS[name]()
    assert [watch.share() for watch in watches] == [1.0]


def test_a_pass_that_computes_the_lse_is_half_of_statistics_and_nothing_of_gradients(monkeypatch):
    """By the counters of jobs, those done and all of them, as they are when threads begin to take jobs."""
    if "family    core" not in cupy_flash.explain(Q, Q, Q):
        pytest.skip("the core is not compiled here")
    monkeypatch.setattr(family, "LONG_FLOPS", float("inf"))
    structs, counted, compute = [], [], family.Core._run
    monkeypatch.setattr(family.Core, "_run", lambda core, x: structs.append(x) or compute(core, x))

    def look():
        counted.append([ctypes.c_int64.from_buffer(structs[-1], x).value for x in (DONE, JOBS)])

    before_jobs(monkeypatch, look)

    def counters(call, *given, **options):
        counted.clear()
        call(*given, **options)
        return counted[:]

    statistics = functools.partial(cupy_flash.attention_statistics, FEW, FEW, want="entropy")
    ((_, jobs),) = counters(statistics, RESULTS[1])
    first, second = counters(statistics)
    o, lse = cupy_flash.attention(FEW, FEW, FEW, return_lse=True)
    backward = functools.partial(cupy_flash.attention_backward, o, FEW, FEW, FEW, o)
    (begun, panels), *anew = counters(backward, lse + 1e5)  # far from 0, so that a pass computes it anew
    assert anew == counters(backward, lse)
    assert [begun, first, second] == [0, [0, 2 * panels], [jobs, 2 * jobs]]


@pytest.mark.parametrize("name", CALLS)
def test_what_the_function_raises_stops_the_call(name, path):
    told = []

    def tell(share):
        told.append(share)
        if share > 0.1:
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"), cupy_flash.progress(tell):
        CALLS[name]()
    assert sum(share > 0.1 for share in told) == 1
    if path == "numpy":
        assert told[-1] < 0.5
    CALLS[name]()  # nothing is left behind


@pytest.mark.parametrize("outer", CALLS)
def test_the_calls_of_the_function_itself_are_not_told(outer, path):
    told, inside, x = [], [], Q[:, :, :5]

    def tell(share):
        assert not inside, "of its own call"
        told.append(share)
        inside.append(share)
        assert cupy_flash.attention(x, x, x).shape == x.shape
        inside.pop()

    with cupy_flash.progress(tell):
        found = CALLS[outer]()
    np.testing.assert_array_equal(found, CALLS[outer]())
    assert told == sorted(told)
    assert told[-1] == 1.0
    if (outer, path) == ("value_and_jvp", "numpy"):
        assert told[-2] == pytest.approx(2 / 7), "where attention ends and its tangents begin"


def test_a_short_call_tells_its_end():
    told = []
    x = Q[:, :, :5]
    with cupy_flash.progress(told.append):
        cupy_flash.attention(x, x, x)
        assert told[-1] == 1.0
        cupy_flash.attention(x[:, :, :0], x, x)
        assert told[-2:] == [1.0, 1.0]
    cupy_flash.attention(x, x, x)
    assert len(told) == 2, "the context is closed"


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_call_tells_too(name, path):
    """Also those that are made of two: the share of both."""
    told = []
    with cupy_flash.progress(told.append):
        OTHERS[name]()
    assert told == sorted(told)
    assert told[-1] == 1.0
    if (name, path) == ("value_and_jvp", "numpy"):
        assert told[-2] == pytest.approx(2 / 7), "where attention ends and its tangents begin"


def test_calls_of_torch_and_jax_tell():
    """Backward passes, and programs of JAX on their own threads, too."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    import cupy_flash.jax
    import cupy_flash.torch

    x = torch.from_numpy(Q[:, :, :9]).requires_grad_()
    told = []
    with cupy_flash.progress(told.append):
        o = cupy_flash.torch.attention(x, x, x)
        o.sum().backward()
        assert told == [1.0, 1.0]
        jax.block_until_ready(cupy_flash.jax.attention(Q[:, :, :9], Q[:, :, :9], Q[:, :, :9]))
    assert told == [1.0, 1.0, 1.0]


def test_programs_of_jax_that_the_function_runs_are_not_told():
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    import cupy_flash.jax

    told, x = [], Q[:, :, :9]

    def tell(share):
        told.append(share)
        assert len(told) < 4, "of its own call"
        jax.block_until_ready(cupy_flash.jax.attention(x, x, x))

    with cupy_flash.progress(tell):
        cupy_flash.attention(x, x, x)
        jax.block_until_ready(cupy_flash.jax.attention(x, x, x))
    assert told == [1.0, 1.0]


def test_contexts_nest_and_belong_to_their_thread():
    outer, inner, elsewhere = [], [], []
    x = Q[:, :, :5]
    with cupy_flash.progress(outer.append):
        with cupy_flash.progress(inner.append):
            cupy_flash.attention(x, x, x)
        thread = threading.Thread(target=lambda: elsewhere.append(cupy_flash.attention(x, x, x)))
        thread.start()
        thread.join()
    assert (outer, inner, len(elsewhere)) == ([], [1.0], 1)


def test_a_context_may_close_while_a_library_asks_for_its_function(monkeypatch):
    class Closing(list):
        def __bool__(self):
            self.clear()  # as another thread does, after its context was seen
            return True

    monkeypatch.setattr(of_calls, "_OPEN", Closing([True]))
    assert of_calls.callback_of_process() is True


def test_no_thread_keeps_another_from_telling_its_end():
    """A thread in the same context, such as one of asyncio.to_thread, ends while the first one tells."""
    told, x = [], Q[:, :, :5]

    def tell(share):
        told.append(threading.get_ident())
        if len(told) == 1:
            other.start()
            other.join()

    with cupy_flash.progress(tell):
        call = functools.partial(contextvars.copy_context().run, cupy_flash.attention, x, x, x)
        other = threading.Thread(target=call)
        cupy_flash.attention(x, x, x)
    assert told == [threading.get_ident(), other.ident]


def test_a_bar(monkeypatch):
    pytest.importorskip("tqdm", reason="the bar is tqdm's, which is not installed")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with cupy_flash.progress():
        CALLS["forward"]()
    assert "100%|" in sys.stderr.getvalue()
    written = sys.stderr.getvalue()
    CALLS["forward"]()
    assert sys.stderr.getvalue() == written


def test_a_bar_where_there_is_no_stderr(monkeypatch, path):
    """As in programs of pythonw, which have no console: nothing is drawn, and the call returns its result."""
    pytest.importorskip("tqdm", reason="the bar is tqdm's, which is not installed")
    wanted = CALLS["forward"]()
    monkeypatch.setattr(sys, "stderr", None)
    with cupy_flash.progress():
        np.testing.assert_array_equal(CALLS["forward"](), wanted)


def test_a_bar_without_tqdm(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with (
        pytest.raises(InvalidArgumentsError, match=r"not installed(.|\n)*Try: pip install tqdm"),
        cupy_flash.progress(),
    ):
        pass


@pytest.mark.parametrize("wrong", ["bar", 1, 0.5])
def test_what_is_no_function(wrong):
    with (
        pytest.raises(InvalidArgumentsError, match=r"progress\(\) is given (.|\n)*Try: progress\(\), or"),
        cupy_flash.progress(wrong),
    ):
        pass


@pytest.mark.slow
def test_kernels_tell_nothing(monkeypatch):
    """They run on when their call returns; the simulator stands for a GPU here."""
    monkeypatch.setenv("CUPY_FLASH_DRIVER", "simulator:sm_80")
    x, told = Q[:, :, :16], []
    with cupy_flash.progress(told.append):
        cupy_flash.attention(x, x, x)
    assert told == []


def test_calls_with_and_without_are_prepared_once():
    from cupy_flash.dispatch import memo

    memo.forget()
    CALLS["forward"]()
    with cupy_flash.progress(lambda _: None):
        CALLS["forward"]()
    assert len(memo._KNOWN) == 1


def test_jobs_of_the_core_are_weighed_by_their_keys():
    """Of a causal square in two parts the first job of a head has three quarters of its pairs."""
    problem = Problem("forward", "float32", None, 1, 4, 2, 1000, 1000, 8, 8, 1.0, right=0)
    assert share_of(problem, 4, 0) == 0
    assert share_of(problem, 4, 1) == pytest.approx(0.375, abs=1e-3)
    assert share_of(problem, 4, 2) == 0.5
    assert share_of(problem, 4, 3) == pytest.approx(0.875, abs=1e-3)
    assert share_of(problem, 4, 4) == 1
    whole = problem._replace(right=None)
    assert [share_of(whole, 4, done) for done in range(5)] == [0, 0.25, 0.5, 0.75, 1]
    few = whole._replace(seqlen_q=1)  # cut between keys
    assert [share_of(few, 4, done) for done in range(5)] == [0, 0.25, 0.5, 0.75, 1]


def test_a_gradient_of_a_bias_goes_on_where_the_others_end():
    struct = (of_core.ctypes.c_char * family.CALL.itemsize)()
    problem = Problem("backward", "float32", None, 1, 2, 2, 100, 100, 8, 8, 1.0)
    watch = of_core.Watch(problem, ("backward", "backward_dbias"), struct)
    jobs, done = (of_core.ctypes.c_int64.from_buffer(struct, place) for place in (of_core.JOBS, of_core.DONE))
    shares = [watch.share()]
    for _ in range(2):
        watch.begin()
        shares.append(watch.share())
        jobs.value, done.value = 4, 2
        shares.append(watch.share())
        done.value = 9  # a short loop at the end of an entry is counted too
        shares.append(watch.share())
    assert shares == pytest.approx([0, 0, 2.5 / 7, 5 / 7, 5 / 7, 6 / 7, 1])

"""The threads and the memory of the compiled core."""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import cupy_flash
from cupy_flash.cpu import choose, threads
from cupy_flash.cpu.core import family, params
from tests.cpu.core_calls import SIZES, before_jobs, normal, results, run

pytestmark = pytest.mark.usefixtures("core")


# ---- threads

# Where a processor has AMX, bfloat16 is multiplied in registers that each thread has to set up.
of_dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@of_dtypes
def test_bits_do_not_depend_on_threads(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [
        {"causal": True, "bias": normal(1, 1, SIZES[2], SIZES[2])}, {"dropout": 0.3, "seed": 5},
        {"window": (100, 20), "sinks": normal(4)},
    ]  # fmt: skip
    cache, q = normal(1, 2, 5000, 32), normal(1, 4, 1, 32)
    ways = []
    for count in (1, 2, 5):
        monkeypatch.setattr(family, "workers", lambda *_, count=count: count)
        way = [cupy_flash.attention_with_kv_cache(q, cache, cache, cache_seqlens=4900)]
        way += results((1, 1, 2100, 24), heads_k=1, dtype=dtype)
        ways.append(way + [x for options in cases for x in results(dtype=dtype, **options)])
    for way in ways[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(ways[0], way, strict=True))


NO_THREADS = """
#include <errno.h>
#include <pthread.h>
int pthread_create(pthread_t *t, const pthread_attr_t *a, void *(*f)(void *), void *x) { return EAGAIN; }
"""
WITHOUT_THREADS = """
import hashlib, threading
import numpy as np
from cupy_flash.cpu.core import family
from tests.cpu.core_calls import normal, results
import cupy_flash
try:
    threading.Thread(target=print).start()
except RuntimeError:
    pass
else:
    raise AssertionError("a thread was made")
family.LONG_FLOPS = 0.0
family.workers = lambda *_: 3
told = []
cache, q = normal(1, 2, 3000, 32), normal(1, 4, 1, 32)
with cupy_flash.progress(told.append):
    o = cupy_flash.attention(cache, cache, cache)
made = [*results(causal=True), o,
        cupy_flash.attention_with_kv_cache(q, cache, cache, cache_seqlens=2900)]
assert told == [1.0]
print(hashlib.sha256(b"".join(x.tobytes() for x in made)).hexdigest())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a library is preloaded as Linux does it")
def test_a_process_that_can_make_no_threads_computes_in_its_own(tmp_path: Path) -> None:
    """Long calls too, and to the same bits: the limit of a container, say."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler, for a library that refuses threads")
    source, library = tmp_path / "none.c", tmp_path / "none.so"
    source.write_text(NO_THREADS)
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    found = run(WITHOUT_THREADS, LD_PRELOAD=str(library), OPENBLAS_NUM_THREADS="1").stdout
    cache, q = normal(1, 2, 3000, 32), normal(1, 4, 1, 32)
    made = [*results(causal=True), cupy_flash.attention(cache, cache, cache),
            cupy_flash.attention_with_kv_cache(q, cache, cache, cache_seqlens=2900)]  # fmt: skip
    assert found.strip() == hashlib.sha256(b"".join(x.tobytes() for x in made)).hexdigest()


TEAM = """
#include <pthread.h>
#include <unistd.h>
enum { AT_ONCE, OTHERS_FIRST, OTHERS_LATE } order;
int calls;
struct Work { void (*function)(void*); void* of; };
static void* begin(void* x) {
    struct Work* work = x;
    work->function(work->of);
    return 0;
}
void GOMP_parallel(void (*function)(void*), void* of, unsigned threads, unsigned flags) {
    struct Work work = {function, of};
    pthread_t others[64];
    ++calls;
    if (order == OTHERS_LATE) function(of), usleep(1000);
    for (unsigned i = 1; i < threads; ++i) pthread_create(others + i, 0, begin, &work);
    if (order == AT_ONCE) function(of);
    for (unsigned i = 1; i < threads; ++i) pthread_join(others[i], 0);
    if (order == OTHERS_FIRST) function(of);
}
"""
AT_ONCE, OTHERS_FIRST, OTHERS_LATE = range(3)


@pytest.fixture
def team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """A stand-in for the team of an OpenMP, which computes every call; it counts them."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or os.name == "nt":
        pytest.skip("there is no C compiler, for what stands in for an OpenMP")
    source, library = tmp_path / "team.c", tmp_path / "team.so"
    source.write_text(TEAM)
    subprocess.run([compiler, "-shared", "-fPIC", "-pthread", str(source), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    address = ctypes.cast(loaded.GOMP_parallel, ctypes.c_void_p).value
    monkeypatch.setattr(threads, "team", lambda *_: address)
    monkeypatch.setattr(family, "workers", lambda *_: 2)
    return loaded


def _calls(team: ctypes.CDLL) -> int:
    return ctypes.c_int.in_dll(team, "calls").value


def test_bits_do_not_depend_on_whose_threads_compute(
    team: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = []
    ctypes.c_int.in_dll(team, "order").value = AT_ONCE
    for address in (0, ctypes.cast(team.GOMP_parallel, ctypes.c_void_p).value):
        monkeypatch.setattr(threads, "team", lambda *_, address=address: address)
        for count in (2, 5):
            monkeypatch.setattr(family, "workers", lambda *_, count=count: count)
            ways.append([*results(causal=True), *results((1, 1, 2100, 24), heads_k=1, window=(100, 20))])
        assert (_calls(team) > 0) == bool(address)
    for way in ways[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(ways[0], way, strict=True))


def test_after_a_thread_of_a_team_came_late_helpers_compute(team: ctypes.CDLL) -> None:
    """An OpenMP waits for a thread that another program keeps from its core; helpers are not waited for."""
    q = normal(1, 2, 128, 32)

    def calls(count: int) -> int:
        before = _calls(team)
        for _ in range(count):
            cupy_flash.attention(q, q, q, return_lse=True)  # a repeated call would keep its threads
        return _calls(team) - before

    order = ctypes.c_int.in_dll(team, "order")
    order.value = OTHERS_FIRST
    calls(32)  # of which another test may have left some
    assert calls(10) == 10
    order.value = OTHERS_LATE
    assert calls(34) == 2, "one was late, and the next 32 did not ask"
    order.value = OTHERS_FIRST
    assert calls(40) == 8


@of_dtypes
def test_many_callers_of_a_team(dtype: str, team: ctypes.CDLL) -> None:
    """One has it, the others compute alone."""
    ctypes.c_int.in_dll(team, "order").value = OTHERS_FIRST
    test_many_callers_at_once(dtype)
    assert _calls(team) > 0


@of_dtypes
def test_many_callers_at_once(dtype: str) -> None:
    """One has the helpers, the others compute alone; and all get the same."""
    expected = results(dtype=dtype)
    wrong: list[int] = []

    def call() -> None:
        for _ in range(5):
            wrong.extend((a != b).any() for a, b in zip(results(dtype=dtype), expected, strict=True))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not any(caller.is_alive() for caller in callers)
    assert len(wrong) == 4 * 5 * len(expected)
    assert not any(wrong)


def test_a_call_does_not_wait_for_the_threads_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    q = normal(1, 2, 128, 32)

    def call() -> None:
        cupy_flash.attention(q, q, q, return_lse=True)  # not repeated without Python

    other = threading.Thread(target=call)
    waited: list[bool] = []

    def meanwhile() -> None:
        if other.ident is None and begun:
            other.start()
            other.join(5)
            waited.append(other.is_alive())

    begun = False
    before_jobs(monkeypatch, meanwhile)
    begun = True
    call()
    assert waited == [False]


@of_dtypes
def test_more_threads_than_cores(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = results(dtype=dtype)
    monkeypatch.setattr(family, "workers", lambda *_: 16)
    start = time.perf_counter()
    for _ in range(20):
        assert all(np.array_equal(a, b) for a, b in zip(expected, results(dtype=dtype), strict=True))
    assert time.perf_counter() - start < 60


def test_no_more_threads_than_the_blas_was_allowed() -> None:
    with threadpool_limits(1, user_api="blas"):
        assert family.workers(1e12) == 1
    assert family.workers(1e3) == 1, "too small to share"


FORKING = """
import multiprocessing, threading, warnings
import ml_dtypes
import numpy as np
import cupy_flash

warnings.simplefilter("ignore", DeprecationWarning)  # a fork of a process with threads is what is tested
qkv = np.random.default_rng(0).standard_normal((3, *{shape}), np.float32).astype({dtype!r})
expected = cupy_flash.attention(*qkv)

def attend(pipe):
    pipe.send(np.array_equal(cupy_flash.attention(*qkv), expected))

context = multiprocessing.get_context("fork")
def check_in_child():
    ours, theirs = context.Pipe()
    child = context.Process(target=attend, args=(theirs,), daemon=True)
    child.start()
    assert ours.poll(60), "the child hangs"
    assert ours.recv()
    child.join(60)
"""

FORKED = """
done = False
def keep_busy():
    while not done:
        cupy_flash.attention(*qkv)

busy = threading.Thread(target=keep_busy)  # so that some forks find the pool at work, and its locks taken
busy.start()
for _ in range(20):
    check_in_child()
done = True
busy.join()
"""


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this platform")
@of_dtypes
def test_after_fork(dtype: str) -> None:
    """A child has no helpers; it starts its own instead of waiting for them."""
    run(FORKING.format(shape=(2, 4, 384, 32), dtype=dtype) + FORKED)


ASIDE = """
from cupy_flash.cpu.core.family import LONG_FLOPS

assert 4 * 8 * 2560**2 * 64 > LONG_FLOPS
for _ in range(3):
    cupy_flash.attention(*qkv)
assert [thread.name for thread in threading.enumerate()].count("cupy_flash") == 1, "one is kept"
check_in_child()
"""


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this platform")
@of_dtypes
def test_the_thread_of_long_calls(dtype: str) -> None:
    """It is kept for the next one, but not by a forked child, which has no such thread."""
    run(FORKING.format(shape=(1, 8, 2560, 64), dtype=dtype) + ASIDE)


INTERRUPTED = """
import os, signal, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what a shell runs in the background
import numpy as np
import cupy_flash

q, small = np.ones((1, 16, 8192, 64), np.float32), np.ones((1, 8, 256, 64), np.float32)
def interrupt():
    time.sleep(0.3)
    global sent
    sent = time.perf_counter()
    os.kill(os.getpid(), signal.SIGINT)
threads = threading.Thread(target=interrupt)
threads.start()
try:
    {call}
except KeyboardInterrupt:
    took = time.perf_counter() - sent
else:
    raise AssertionError("it was done before")
assert took < {limit}, took
busy = time.process_time()
time.sleep(0.2)
assert time.process_time() - busy < 0.1, "workers go on"
assert np.allclose(cupy_flash.attention(small, small, small), 1)
print(took)
"""


@pytest.mark.parametrize(
    "call",
    ["cupy_flash.attention(q, q, q)",
     "cupy_flash.attention_backward(q, q, q, q, q, np.zeros(q.shape[:3], np.float32))"],
    ids=["forward", "backward"],
)  # fmt: skip
def test_ctrl_c_is_heard(call: str) -> None:
    """Under 0.2 s, on a machine that has nothing else to do; the workers stop and the next call works."""
    busy = os.getloadavg()[0] > 1.5 * (os.cpu_count() or 1)
    run(INTERRUPTED.format(call=call, limit=2.0 if busy else 0.2))


# ---- memory

MEMORY = """
import resource
import numpy as np
import cupy_flash

def pages(resident):
    return int(open("/proc/self/statm").read().split()[resident]) * resource.getpagesize()
q = np.ones((1, 1, 64, 128), np.float32)
small = np.ones((1, 2, 256, 32), np.float32)
cupy_flash.attention(small, small, small)
k = np.ones((1, 1, 100_000, 128), np.float32)
o, lse = cupy_flash.attention(q, k, k, return_lse=True)
before = pages(True)
for _ in range(3):
    cupy_flash.attention_backward(o, q, k, k, o, lse)
assert pages(True) - before < 32 << 20, pages(True) - before
used = pages(False)
dk = 2 * k.nbytes  # what the call returns; the sums that it needs besides are as large
resource.setrlimit(resource.RLIMIT_AS, (used + dk + dk // 2, -1))
try:
    cupy_flash.attention_backward(o, q, k, k, o, lse)
except MemoryError as error:
    assert "no memory for its tiles" in str(error), error
else:
    raise AssertionError("there was memory enough")
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
assert np.isfinite(cupy_flash.attention_backward(o, q, k, k, o, lse).dk).all()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits and counts as Linux has them")
def test_memory_is_given_back_and_its_lack_is_an_error() -> None:
    run(MEMORY)


def test_scratch_is_bounded() -> None:
    """Of a forward pass over very many keys: panels and a block, whatever the lengths."""
    run(
        """
import resource
import numpy as np
import cupy_flash
q = np.ones((1, 1, 32, 64), np.float16)
k = np.ones((1, 1, 2_000_000, 64), np.float16)
small = np.ones((1, 1, 64, 64), np.float16)
cupy_flash.attention(small, small, small)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
cupy_flash.attention(q, k, k)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert grown < 8 << 10, grown  # KB; K in float32 would be 512 MB
"""
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory as Linux counts it")
def test_a_thread_that_ends_gives_its_scratch_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "workers", lambda *_: 1)
    q, k = normal(1, 1, 192, 512), normal(1, 1, 8, 512)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def calls(count: int) -> None:
        for _ in range(count):
            # why return_lse: a repeated call would keep its threads
            thread = threading.Thread(target=lambda: cupy_flash.attention(q, k, k, return_lse=True))
            thread.start()
            thread.join()

    calls(5)
    before = resident()
    calls(50)
    grown = resident() - before
    assert grown < 3 << 20, grown  # 7 MB if each keeps it


@pytest.mark.parametrize("count", [1, 2])
def test_the_last_word_of_a_call_is_its_state(count: int) -> None:
    """A call that is stopped before it begins touches nothing."""
    q = normal(1, 2, 64, 16)
    out = np.full_like(q, 7)
    views = {
        name: cupy_flash.call.adopt.adopt(x, name) for name, x in {"q": q, "k": q, "v": q, "o": out}.items()
    }
    problem = cupy_flash.call.problem.Problem("forward", "float32", None, 1, 2, 2, 64, 64, 16, 16, 0.25)
    found = choose.choose(problem)
    assert found.library is not None
    call = family.Core.of(problem, views, found.library)
    struct = call.params.filled({name: view.pointer for name, view in views.items()}, 0, count)
    buffer = (ctypes.c_char * len(struct)).from_buffer(struct)
    ctypes.c_int32.from_buffer(buffer, params.STATE).value = params.STOP
    assert call.entries[0](ctypes.addressof(buffer)) == params.STOP
    assert (out == 7).all()
    assert signal.getsignal(signal.SIGINT) is not None

"""The NumPy path from inside: memory, tiles visited, interrupts, Philox."""

from __future__ import annotations

import importlib
import multiprocessing
import subprocess
import sys
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

import cupy_flash
from cupy_flash import testing
from cupy_flash.call.problem import Problem
from cupy_flash.cpu import philox, scores, threads, tiles
from tests.checks import Device
from tests.kv_cases import KvCase, check

GRADIENTS = ("dq", "dk", "dv")


@pytest.fixture(autouse=True)
def by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_FLASH_CPU", "numpy")


def problem(seqlen_q: int, seqlen_k: int, **fields) -> Problem:
    sizes = {"batch": 1, "heads_q": 1, "heads_k": 1, "head_dim": 8, "head_dim_v": 8} | fields
    direction = sizes.pop("direction", "forward")
    return Problem(direction, "float32", None, seqlen_q=seqlen_q, seqlen_k=seqlen_k, scale=1.0, **sizes)


def normal(*shape: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def inputs(shape: tuple[int, int, int, int], heads_k: int | None = None, dtype: str = "float32"):
    batch, heads, seqlen, dim = shape
    keys = (batch, heads_k or heads, seqlen, dim)
    return [normal(*s, dtype=dtype, seed=i) for i, s in enumerate((shape, shape, keys, keys))]


def backward(do, q, k, v, **options):
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
    gradients = cupy_flash.attention_backward(do, q, k, v, o, lse, **options)
    return {"o": o, "lse": lse, "dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}


# ---- memory


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"softcap": 5.0}], ids=["plain", "causal", "softcap"]
)
def test_memory_is_linear(options: dict) -> None:
    """At S = 8192 one score matrix is 256 MiB. All arrays of the passes together stay far below."""
    seqlen, dim = 8192, 8
    do, q, k, v = inputs((1, 1, seqlen, dim))
    tracemalloc.start()
    try:
        backward(do, q, k, v, **options)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    linear = 16 * seqlen * dim * q.itemsize  # 4 MiB: results, and copies of what belongs to a head
    of_a_tile = 6 * tiles.ROWS * tiles.KEYS * q.itemsize
    assert peak < linear + of_a_tile < seqlen**2 * q.itemsize / 10


# ---- tiles


@pytest.mark.parametrize("lengths", [(1, 1), (64, 64), (100, 37), (37, 100), (130, 0)])
@pytest.mark.parametrize(
    "band", [(0, None, None), (0, None, 0), (-40, 3, 5), (20, 0, 0), (7, 16, None), (500, 2, 2)]
)
def test_tiles_visited_are_those_of_the_band(lengths: tuple[int, int], band: tuple) -> None:
    offset, left, right = band
    p = problem(*lengths, offset=offset, left=left, right=right, tile=(16, 8))
    i, j = np.arange(lengths[0])[:, None] + offset, np.arange(lengths[1])[None]
    seen = np.ones(lengths, bool)
    if left is not None:
        seen &= j >= i - left
    if right is not None:
        seen &= j <= i + right
    covered = np.zeros(lengths, int)
    for i0, i1, blocks in tiles.visited(p):
        for block in blocks:
            assert (block.i0, block.i1) == (i0, i1)
            assert i1 - i0 <= 16
            assert block.j1 - block.j0 <= 8
            assert seen[i0:i1, block.j0 : block.j1].any(), "a tile without work"
            covered[i0:i1, block.j0 : block.j1] += 1
    assert (covered <= 1).all()
    assert (covered[seen] == 1).all()


def test_keys_outside_the_band_are_not_read() -> None:
    """Infinite values times weights of 0 would be NaN."""
    do, q, k, v = inputs((1, 2, 300, 16))
    k[:, :, 200:] = v[:, :, 200:] = np.inf
    rows = slice(0, 180)
    results = backward(
        do[:, :, rows],
        q[:, :, rows],
        k,
        v,
        window=(50, 20),
        align=0,
        tuning=cupy_flash.Tuning(tile=(60, 200)),
    )
    assert all(np.isfinite(results[name][:, :, :200]).all() for name in results)


def test_masked_tiles_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    _, q, k, v = inputs((1, 1, 256, 16))
    mask = np.zeros((256, 256), bool)
    mask[:64, :64] = mask[128:192, 64:128] = True
    kinds = []
    original = scores.Scores.visible

    def watched(self, *where):
        kinds.append(original(self, *where))
        return kinds[-1]

    monkeypatch.setattr(scores.Scores, "visible", watched)
    cupy_flash.attention(q, k, v, mask=mask, tuning=cupy_flash.Tuning(tile=(64, 64)))
    assert len(kinds) == 16
    assert sum(nothing_left for _, nothing_left in kinds) == 14
    assert sum(tile is None for tile, _ in kinds) == 2, "a mask that hides nothing is not applied"


@pytest.mark.parametrize("tile", [(1, 1), (7, 5), (64, 64), (1000, 1000)])
def test_any_tile_gives_the_same(tile: tuple[int, int]) -> None:
    do, q, k, v = inputs((2, 4, 90, 16), heads_k=2)
    results = backward(do, q, k, v, window=(30, 9), tuning=cupy_flash.Tuning(tile=tile))
    testing.assert_within_budget(results, q, k, v, do=do, window=(30, 9))


def test_operands_are_views_where_blas_can_read_them() -> None:
    acc = np.dtype(np.float32)
    x = normal(2, 3, 40, 16)
    assert scores.operand(x, acc) is x
    packed = normal(2, 40, 3, 16).swapaxes(1, 2)
    assert scores.operand(packed, acc) is packed
    for unreadable in (
        x[..., ::-1],
        x[:, :, ::-1],
        x[..., ::2],
        x.swapaxes(2, 3),
        np.broadcast_to(x[:, :, :1], x.shape),
        x.astype(np.float16),
    ):
        copy = scores.operand(unreadable, acc)
        assert copy.flags.c_contiguous
        assert np.array_equal(copy, unreadable)


# ---- numbers


def test_a_large_sink_does_not_underflow() -> None:
    """With an LSE of 100, exp(18 - 100) is a normal number, exp(-100) is not."""
    do, q, k, v = inputs((1, 1, 100, 16))
    q[...] = k[...] = 2.15
    sinks = np.array([100.0], np.float32)
    o, lse = cupy_flash.attention(q, k, v, sinks=sinks, return_lse=True)
    gradients = cupy_flash.attention_backward(do, q, k, v, o, lse, sinks=sinks)
    exact = testing.reference_backward(do, q, k, v, sinks=sinks)
    assert np.allclose(gradients.dv, exact.dv, rtol=1e-4, atol=0)


def test_masked_nan_keys_do_not_reach_the_output() -> None:
    _, q, k, v = inputs((1, 1, 200, 16))
    expected = cupy_flash.attention(q, k[:, :, :150], v[:, :, :150])
    k[:, :, 150:] = np.nan
    o = cupy_flash.attention(q, k, v, mask=np.arange(200) < 150)
    assert np.allclose(o, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_rounded_once(dtype: str) -> None:
    """Sums are float32, so the result is that of float32 inputs, rounded at the end."""
    narrow = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
    _, q, k, v = (x.astype(narrow) for x in inputs((1, 2, 700, 32)))
    o = cupy_flash.attention(q, k, v)
    wide = cupy_flash.attention(*(x.astype(np.float32) for x in (q, k, v)))
    assert np.array_equal(o, wide.astype(o.dtype))


# ---- over a cache

LONGER_THAN_A_TILE = [
    KvCase(dtype="float32", heads=(6, 3), lengths=(900, 0, 1, 300), room=1008, sinks=True),
    KvCase(dtype="float64", heads=(4, 4), lengths=(700, 512), room=1024, queries=5, causal=True),
    KvCase(dtype="float32", kind="paged", page=64, room=1024, lengths=(1000, 257), stored="int8"),
]


@pytest.mark.parametrize("case", LONGER_THAN_A_TILE, ids=str)
def test_tiles_of_a_cache_unite(case: KvCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("cupy_flash.cpu.decode"), "KEYS", 200)
    check(case, Device("cpu"))


# ---- threads

LARGE = (2, 4, 384, 32)


def test_same_bits_every_time_and_from_many_threads() -> None:
    do, q, k, v = inputs(LARGE)
    bias = normal(1, 1, LARGE[2], LARGE[2])

    def once(_: int) -> list[np.ndarray]:
        o, lse = cupy_flash.attention(q, k, v, bias=bias, return_lse=True)
        return [o, lse, *cupy_flash.attention_backward(do, q, k, v, o, lse, bias=bias)[:4]]

    first = once(0)
    with ThreadPoolExecutor(4) as callers:
        for results in callers.map(once, range(8)):
            assert all(np.array_equal(a, b) for a, b in zip(first, results, strict=True))


def blas_threads() -> list[int]:
    """The limits of NumPy's BLAS; others, such as SciPy's, may come after we looked for what is there."""
    return [library.get() for library in threads._blas._libraries[0]]


def test_blas_limit_is_one_inside_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every pass: threads that spin between short products cost ten times what they give."""
    before, inside = blas_threads(), []
    original = scores.Scores.finish

    def watched(self, *where):
        inside.append((self.problem.direction, blas_threads()))
        original(self, *where)

    do, q, k, v = inputs((1, 1, 64, 8))
    o, lse = cupy_flash.attention(q, k, v, return_lse=True)
    monkeypatch.setattr(scores.Scores, "finish", watched)
    backward(do, q, k, v)
    tangents = cupy_flash.derivatives.jvp(q, k, v, o, lse, dq=q)
    cupy_flash.derivatives.hvp(do, q, k, v, o, lse, dq=q, jvp=tangents)
    cupy_flash.attention_statistics(q, k)
    assert dict(inside).keys() == {"forward", "backward", "jvp", "hvp", "statistics"}
    assert all(limits == [1] * len(before) for _, limits in inside)
    assert blas_threads() == before


class FakeBlas:
    """A BLAS whose limit is per process or per thread, with threadpoolctl's interface."""

    def __init__(self, layer: str, count: int) -> None:
        self.threading_layer, self.count, self.own = layer, count, threading.local()

    def get_num_threads(self) -> int:
        return getattr(self.own, "count", self.count) if self.threading_layer == "openmp" else self.count

    def set_num_threads(self, count: int) -> None:
        if self.threading_layer == "openmp":
            self.own.count = count
        else:
            self.count = count


@pytest.mark.parametrize("layer", ["pthreads", "openmp"])
def test_blas_limit_of_overlapping_callers(layer: str) -> None:
    """The first one out restores nothing that the other one still needs, and the last one all."""
    library = FakeBlas(layer, 6)
    limit = threads.BlasLimit([library])
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))

    def first() -> tuple[int, int]:
        with limit.one_thread():
            first_is_in.set()
            assert second_is_in.wait(30)
            inside = library.get_num_threads()
        first_is_out.set()
        return inside, library.get_num_threads()

    def second() -> tuple[int, int]:
        assert first_is_in.wait(30)
        assert limit.threads() == 6
        with limit.one_thread():
            second_is_in.set()
            assert first_is_out.wait(30)
            inside = library.get_num_threads()
        return inside, library.get_num_threads()

    with ThreadPoolExecutor(2) as callers:
        results = [callers.submit(first), callers.submit(second)]
        assert results[0].result() == (1, 6 if layer == "openmp" else 1)
        assert results[1].result() == (1, 6)


INTERRUPTED = """
import os
import signal
import sys
import threading
import time
import numpy as np
import cupy_flash

def nothing_runs():
    before = time.process_time()
    time.sleep(0.3)
    return time.process_time() - before < 0.15

long = np.zeros((3, 1, 8, 40_000, 64), np.float32)
small = np.random.default_rng(0).standard_normal((3, 1, 8, 512, 64), np.float32)
expected = cupy_flash.attention(*small)
calls = {"attention": lambda: cupy_flash.attention(*long),
         "backward": lambda: cupy_flash.attention_backward(
             long[0], *long, long[0], np.zeros(long.shape[1:4], np.float32))}

def interrupt():
    time.sleep(0.5)
    interrupted.append(time.perf_counter())
    os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
for _ in range(2):
    interrupted = []
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        calls[sys.argv[1]]()
    except KeyboardInterrupt:
        print("seconds", time.perf_counter() - interrupted[0])
    else:
        sys.exit("not interrupted")
    assert nothing_runs(), "threads compute on"
    assert np.array_equal(cupy_flash.attention(*small), expected)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGINT")
@pytest.mark.parametrize("call", ["attention", "backward"])
def test_an_interrupt_ends_a_call_at_once(call: str) -> None:
    """Between two calls of NumPy's; the next call works."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, call], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    seconds = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(seconds) == 2
    assert max(seconds) < 1


FORKED = """
import multiprocessing
import subprocess
import sys
import warnings
import numpy as np
import cupy_flash


warnings.simplefilter("ignore", DeprecationWarning)  # a fork of a process with threads is what is tested
qkv = np.random.default_rng(0).standard_normal((3, 2, 4, 384, 32), np.float32)

def attend(pipe):
    pipe.send(cupy_flash.attention(*qkv).sum())

expected = cupy_flash.attention(*qkv).sum()
context = multiprocessing.get_context("fork")
ours, theirs = context.Pipe()
child = context.Process(target=attend, args=(theirs,), daemon=True)
child.start()
assert ours.poll(60), "the child hangs"
assert ours.recv() == expected
child.kill()
"""


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this platform")
def test_after_fork() -> None:
    """A child computes without the threads of the parent's BLAS."""
    # why a process of its own: other tests load JAX into ours, which warns of every fork.
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


# ---- dropout


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple, key: tuple, words: tuple) -> None:
    """The known-answer tests of the authors' Random123."""
    result = philox.philox4x32(tuple(np.array([c], np.uint64) for c in counter), key)
    assert tuple(int(word[0]) for word in result) == words


def test_keep_mask_of_a_tile_is_a_piece_of_the_whole() -> None:
    batch, head = np.arange(2)[:, None], np.arange(3)
    whole = philox.keep_mask(0.3, 2**63 + 5, batch, head, range(50), range(61))
    assert whole.shape == (2, 3, 50, 61)
    assert abs(whole.mean() - 0.7) < 0.02
    piece = philox.keep_mask(0.3, 2**63 + 5, batch[1:], head[1:], range(9, 20), range(3, 42))
    assert np.array_equal(piece, whole[1:, 1:, 9:20, 3:42])

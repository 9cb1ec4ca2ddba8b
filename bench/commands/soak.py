"""soak: random valid problems against FP64, for minutes or hours, from several threads at once."""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

import cupy_flash
from cupy_flash import testing
from tests.cases import BROADCASTS, Case

from ..machine import place as places
from ..machine.blas import one_thread
from ..measure.session import progress

# Longest first: what a GPU's tiles are made for, and what FP64 on the CPU can follow.
LENGTHS = (1, 7, 63, 64, 65, 127, 128, 129, 300, 517, 777)
HEAD_DIMS = (1, 8, 33, 64, 80, 128, 192, 256)
GROWTH_ALLOWED = 64e6


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--count", type=int, help="end after so many problems")
    parser.add_argument("--threads", type=int, default=3, help="each with a stream of its own on a GPU")
    parser.add_argument("--seed", type=int, default=0, help="of the first thread; a failure tells its own")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")


def problem(draw: random.Random, dtypes: tuple[str, ...]) -> Case:
    """Any valid problem, its features drawn independently."""
    rank = draw.choice((4, 4, 4, 3, 2))
    group, heads_k = draw.randint(1, 4), draw.randint(1, 2)
    batch = draw.randint(1, 2) if rank == 4 else 1
    return Case(
        dtype=draw.choice(dtypes),
        batch=batch,
        heads=(group * heads_k, heads_k) if rank > 2 else (1, 1),
        lengths=(draw.choice(LENGTHS), draw.choice(LENGTHS)),
        head_dims=(draw.choice(HEAD_DIMS),) * 2 if draw.random() < 0.7 else (
            draw.choice(HEAD_DIMS), draw.choice(HEAD_DIMS)),
        causal=draw.random() < 0.4,
        window=draw.choice((None, None, (100, 0), (3, 50), (None, 7), (0, None))),
        align=draw.choice(("top_left", "bottom_right", -40, 300)),
        mask=draw.choice((None, None, None, *BROADCASTS)),
        bias=draw.choice((None, None, None, *BROADCASTS)),
        bias_dtype=draw.choice((None, *dtypes)),
        scale=draw.choice((None, None, 0.3, -0.2)),
        softcap=draw.choice((None, None, 5.0)),
        alibi=draw.choice((None, None, "h", "bh")),
        sinks=draw.random() < 0.3,
        dropout=draw.choice((0.0, 0.0, 0.2)),
        layout=draw.choice(("bhsd", "bshd")),
        rank=rank,
        dlse=draw.random() < 0.4,
    )  # fmt: skip


def check(case: Case, place: places.Place) -> None:
    """Run both passes of a problem twice: within the budget of FP64, and the forward bits the same.

    Raises
    ------
    AssertionError
    """
    host = case.inputs()
    here = {name: place.put(x) for name, x in host.items()}
    qkv = [here[name] for name in "qkv"]
    options = case.options(here)
    o, lse = cupy_flash.attention(*qkv, return_lse=True, **options)
    again = cupy_flash.attention(*qkv, **options)
    back = cupy_flash.attention_backward(here["do"], *qkv, o, lse, dlse=here.get("dlse"), **options)
    place.synchronize()
    np.testing.assert_array_equal(testing.to_numpy(o), testing.to_numpy(again), "the same call twice")
    results: Mapping[str, Any] = {"o": o, "lse": lse, **back._asdict()}
    precision = "tf32x3" if place.name == "gpu" and case.dtype == "float32" else None
    testing.assert_within_budget(
        results, *(host[name] for name in "qkv"), do=host["do"], dlse=host.get("dlse"),
        precision=precision, **case.options(host),
    )  # fmt: skip


class Soak:
    """Threads that check problems until the time, the count or somebody's patience ends."""

    def __init__(self, place: places.Place, seed: int, minutes: float, count: int | None) -> None:
        self.place, self.seed = place, seed
        self.end = time.monotonic() + 60 * minutes
        self.left = count
        self.done, self.failures = 0, []  # type: tuple[int, list[str]]
        self._lock = threading.Lock()
        self.dtypes: tuple[str, ...] = ("float16", "float32", "float64")
        # CuPy has no bfloat16, NumPy not without that package.
        if place.library != "cupy" and importlib.util.find_spec("ml_dtypes") is not None:
            self.dtypes += ("bfloat16",)

    def _take(self) -> bool:
        with self._lock:
            if time.monotonic() > self.end or (self.left is not None and self.left <= 0):
                return False
            if self.left is not None:
                self.left -= 1
            return True

    def work(self, thread: int) -> None:
        draw = random.Random(1_000_003 * thread + self.seed)
        with _stream(self.place):
            while self._take():
                case = problem(draw, self.dtypes)
                try:
                    check(case, self.place)
                except Exception:  # why any: each is a finding
                    report = f"{case}\n{traceback.format_exc(limit=-3)}"
                    with self._lock:
                        self.failures.append(report)
                with self._lock:
                    self.done += 1

    def run(self, threads: int) -> None:
        workers = [threading.Thread(target=self.work, args=(n,), daemon=True) for n in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()


@contextmanager
def _stream(place: places.Place) -> Iterator[None]:
    """A stream of this thread's own on a GPU."""
    context: Any = nullcontext()
    if place.library == "torch":
        context = place.torch.cuda.stream(place.torch.cuda.Stream())
    elif place.library == "cupy":
        context = place.cupy.cuda.Stream(non_blocking=True)
    with context:
        yield


def resident() -> int:
    """Bytes of memory that this process holds; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * 4096


def run(chosen: argparse.Namespace) -> int:
    place, sentences = places.find(chosen.device)
    print(*sentences, sep="\n")
    with one_thread():
        soak, start = Soak(place, chosen.seed, chosen.minutes, chosen.count), time.monotonic()
        held: list[int] = []
        ticker = threading.Thread(target=_watch, args=(soak, chosen.minutes, held), daemon=True)
        ticker.start()
        soak.run(chosen.threads)
    grown = growth(held)
    for failure in soak.failures[:5]:
        print(failure, file=sys.stderr)
    minutes = (time.monotonic() - start) / 60
    where = place.gpu or "CPU"
    print(
        f"soak on {where}: {soak.done} problems in {minutes:.1f} minutes on {chosen.threads} threads, "
        f"{len(soak.failures)} failed; memory grew by {grown / 1e6:.1f} MB"
    )
    if grown > GROWTH_ALLOWED:
        print(f"memory is not flat: more than {GROWTH_ALLOWED / 1e6:.0f} MB")
    return int(bool(soak.failures) or grown > GROWTH_ALLOWED)


def growth(held: list[int]) -> int:
    """How much memory grew, of readings second by second: the last quarter's least over the second's most.

    why: FP64 references of many sizes come and go, so that single readings say little; a leak lifts them all.
    """
    quarter = len(held) // 4
    if quarter < 5:
        return 0
    return max(0, min(held[-quarter:]) - max(held[quarter : 2 * quarter]))


def _watch(soak: Soak, minutes: float, held: list[int]) -> None:
    """Note the memory held each second, behind a progress bar."""
    for _ in progress(list(range(max(1, round(60 * minutes)))), "soak"):
        if time.monotonic() > soak.end:
            return
        time.sleep(1)
        held.append(resident())

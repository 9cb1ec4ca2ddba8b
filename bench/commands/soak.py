"""soak: random valid calls of the whole public API against FP64, with new seeds, for minutes or hours.

On the CPU calls run in a worker process (`tests.random_calls`), with their arrays between guard pages; a call
that fails, crashes or hangs is reduced and printed as a program. On a GPU several threads compute, each on
its own stream.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import random
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from cupy_flash import InvalidArgumentsError, UnsupportedError
from tests.random_calls.dense import Dense
from tests.random_calls.memory import OnDevice

from ..machine import place as places
from ..machine.blas import one_thread
from ..machine.memory import GROWTH_ALLOWED, growth, resident
from ..measure.session import progress

# Most findings to print.
PRINTED = 5


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--count", type=int, help="stop after this many calls")
    parser.add_argument("--seed", type=int, help="default: a random one, which is printed")
    parser.add_argument("--isa", action="append", metavar="NAME",
                        help="library of the CPU core, or numpy; may repeat (default: all)")  # fmt: skip
    parser.add_argument("--dtype", action="append", metavar="NAME", help="may repeat (default: all)")
    parser.add_argument(
        "--call", action="append", metavar="KIND", help="such as Packed; may repeat (default: all)"
    )
    parser.add_argument("--sanitize", choices=("address", "thread"),
                        help="compile the core with this sanitizer first")  # fmt: skip
    parser.add_argument("--threads", type=int, default=3, help="threads on a GPU, each with its own stream")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")


def run(chosen: argparse.Namespace) -> int:
    place, sentences = places.find(chosen.device)
    print(*sentences, sep="\n")
    seed = secrets.randbits(32) if chosen.seed is None else chosen.seed
    print(f"seed {seed}", flush=True)
    if place.library != "numpy":
        return on_gpu(chosen, seed, place)
    from tests.random_calls.hunt import hunt  # why here: GPU machines may lack packages of the CPU path

    return hunt(chosen, seed, tuple(chosen.dtype or dtypes_of(place.library)))


# ---- on a GPU


def dtypes_of(library: str) -> tuple[str, ...]:
    """Dtypes of a library; CuPy has no bfloat16, and NumPy only with ml_dtypes."""
    some = ("float16", "float32", "float64")
    has = library != "cupy" and importlib.util.find_spec("ml_dtypes") is not None
    return (*some, "bfloat16") if has else some


def _kinds() -> tuple[dict[str, Any], dict[str, int]]:
    """Kinds of calls, and their frequencies; only dense ones without ml_dtypes."""
    if importlib.util.find_spec("ml_dtypes") is None:
        return {"Dense": Dense}, {"Dense": 1}
    from tests.random_calls.trial import KINDS, SHARES  # why here: GPU machines may lack what it imports

    return KINDS, SHARES


class Soak:
    """Threads that check problems until a time limit, a count or an interrupt."""

    def __init__(
        self,
        place: Any,
        seed: int,
        minutes: float,
        count: int | None = None,
        dtypes: tuple[str, ...] = (),
        kinds: tuple[str, ...] = (),
    ) -> None:
        self.place, self.seed = place, seed
        self.end = time.monotonic() + 60 * minutes
        self.left = count
        self.done, self.refused, self.failures = 0, 0, []  # type: tuple[int, int, list[str]]
        self._lock = threading.Lock()
        self.dtypes = dtypes or dtypes_of(place.library)
        self._kinds, self._shares = _kinds()
        # why not those: CuPy has no 8-bit floats, and kernels take few of the head dims that are drawn
        self.kinds = kinds or tuple(name for name in self._shares if name != "Float8")

    def _take(self) -> bool:
        with self._lock:
            if time.monotonic() > self.end or (self.left is not None and self.left <= 0):
                return False
            if self.left is not None:
                self.left -= 1
            return True

    def draw(self, random_: random.Random) -> Any:
        """Draw a call that a GPU supports."""
        kind = random_.choices(self.kinds, [self._shares[name] for name in self.kinds])[0]
        call = self._kinds[kind].draw(random_, self.dtypes)
        changed: dict[str, Any] = {}
        if hasattr(call, "function"):
            changed["function"] = None  # it would have to be compiled first
        if isinstance(call, Dense):
            changed["holes"] = False  # on a GPU gradients need finite keys
            if call.bias_dtype not in dtypes_of(self.place.library):
                changed["bias_dtype"] = None
        if getattr(call, "stored", "") == "e4m3" and self.place.library == "cupy":
            changed["stored"] = "int8"  # CuPy has no 8-bit floats
        return dataclasses.replace(call, **changed)

    def work(self, thread: int) -> None:
        random_ = random.Random(1_000_003 * thread + self.seed)
        with _stream(self.place):
            while self._take():
                call, refused, report = self.draw(random_), 0, ""
                try:
                    memory = OnDevice(self.place, call.dtype)
                    call.check(memory)
                    memory.check()
                except (InvalidArgumentsError, UnsupportedError):
                    refused = 1
                except Exception:  # why any: each is a finding
                    report = f"{call!r}\n{traceback.format_exc(limit=-3)}"
                with self._lock:
                    self.done += 1
                    self.refused += refused
                    if report:
                        self.failures.append(report)

    def run(self, threads: int) -> None:
        workers = [threading.Thread(target=self.work, args=(n,), daemon=True) for n in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()


@contextmanager
def _stream(place: Any) -> Iterator[None]:
    """Use a separate stream for this thread on a GPU."""
    context: Any = nullcontext()
    if place.library == "torch":
        context = place.torch.cuda.stream(place.torch.cuda.Stream())
    elif place.library == "cupy":
        context = place.cupy.cuda.Stream(non_blocking=True)
    with context:
        yield


def on_gpu(chosen: argparse.Namespace, seed: int, place: Any) -> int:
    """Draw and check in several threads."""
    with one_thread():
        some = tuple(chosen.dtype or ()), tuple(chosen.call or ())
        soak, start = Soak(place, seed, chosen.minutes, chosen.count, *some), time.monotonic()
        held: list[int] = []
        ticker = threading.Thread(target=_watch, args=(soak, chosen.minutes, held), daemon=True)
        ticker.start()
        soak.run(chosen.threads)
    grown = growth(held)
    for failure in soak.failures[:PRINTED]:
        print(failure, file=sys.stderr)
    minutes = (time.monotonic() - start) / 60
    print(
        f"soak on {place.gpu or 'CPU'}: {soak.done} calls in {minutes:.1f} minutes, "
        f"{soak.refused} refused, {len(soak.failures)} wrong; memory grew by {grown / 1e6:.1f} MB"
    )
    if grown > GROWTH_ALLOWED:
        print(f"memory is not flat: more than {GROWTH_ALLOWED / 1e6:.0f} MB")
    return int(bool(soak.failures) or grown > GROWTH_ALLOWED)


def _watch(soak: Soak, minutes: float, held: list[int]) -> None:
    """Record the resident memory every second, and show a progress bar."""
    for _ in progress(list(range(max(1, round(60 * minutes)))), "soak"):
        if time.monotonic() > soak.end:
            return
        time.sleep(1)
        held.append(resident())

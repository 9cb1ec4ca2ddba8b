"""decode: one query per sequence over a long KV cache, compared with the time to read it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import cupy_flash

from ..machine import blas, timing
from ..machine.place import Place
from ..measure.peers import OURS, Call, Inputs, Peer, chosen, ours
from ..measure.session import Session, Settings
from ..work import Case

# (batch, heads, heads of k, keys): from one long chat to many short ones.
GPU_CACHES = ((32, 64, 8, 8192), (1, 64, 8, 131072), (128, 32, 8, 2048), (8, 32, 32, 8192), (1, 32, 8, 4096))
CPU_CACHES = (
    (1, 32, 8, 8192), (4, 32, 8, 4096), (1, 8, 8, 8192), (8, 32, 8, 1024),
    (1, 32, 8, 32768), (1, 64, 8, 32768), (1, 8, 8, 32768),
)  # fmt: skip
PAGE = 64


def _lengths(case: Case, place: Place) -> Any:
    return place.put(np.full(case.batch, case.keys, np.int32))


def _cached(case: Case, inputs: Inputs, place: Place) -> Call:
    """`attention_with_kv_cache` on a cache that is full."""
    q, k, v = (inputs[name] for name in "qkv")
    lengths = _lengths(case, place)
    return lambda: (cupy_flash.attention_with_kv_cache(q, k, v, cache_seqlens=lengths),)


def _paged(case: Case, inputs: Inputs, place: Place) -> Call:
    """The same keys in shuffled pages."""
    pages = -(-case.keys // PAGE)
    order = np.random.default_rng(0).permutation(case.batch * pages).astype(np.int32)
    table, lengths = place.put(order.reshape(case.batch, pages)), _lengths(case, place)
    k, v = (_in_pages(inputs[name], order, pages) for name in "kv")
    q = inputs["q"]
    return lambda: (cupy_flash.attention_with_kv_cache(q, k, v, cache_seqlens=lengths, block_table=table),)


def _in_pages(x: Any, order: np.ndarray, pages: int) -> Any:
    """(batch, heads, keys, features) as (pages, heads, page, features), page n of the table at order[n]."""
    batch, heads, _, features = x.shape
    cut = x.reshape(batch, heads, pages, PAGE, features).swapaxes(1, 2)
    where = np.argsort(order)
    return cut.reshape(batch * pages, heads, PAGE, features)[where]


def who(place: Place, wanted: str | None) -> list[Peer]:
    """Our calls over a cache, ours without a cache, and the peers."""
    return [
        Peer(OURS.name, _cached),
        Peer("cupy_flash paged", _paged),
        Peer("cupy_flash attention", ours),
        *chosen(place, wanted)[1:],
    ]


def _references(session: Session, case: Case) -> list[dict[str, str]]:
    """Time references for decode: a lower bound, on all threads of the case, and a copy.

    "numpy read" reads every key and value once. "numpy copy" moves as many bytes, half of them written, on
    one thread; the ceiling is the best of a run, but the median of this copy is under the load of its rows.
    """
    workers = session.settings.threads or os.cpu_count() or 1
    inputs = session.place.inputs(case)
    pieces = [piece for name in "kv" for piece in np.array_split(inputs[name].reshape(-1), workers)]
    target = np.empty_like(inputs["k"])
    with ThreadPoolExecutor(workers) as pool, blas.one_thread():
        calls: dict[str, timing.Call] = {
            "numpy read": lambda: tuple(pool.map(lambda piece: piece.dot(piece), pieces)),
            "numpy copy": lambda: np.copyto(target, inputs["k"]),
        }
        ways = {name: (call, session.place.stopwatch()) for name, call in calls.items()}
        took = timing.alternate(ways, 11, 3.0)
    copy = f"{session.ceilings.bytes_per_second / 1e9:.4g}"
    rows = []
    for name, times in took.items():
        rate = f"{case.traffic() / times.median / 1e9:.4g}"
        rows.append(session.row(case, name, **times.row(), gb_per_s=rate, copy_gb_per_s=copy))
    session.append(rows)
    return rows


def run(settings: Settings) -> None:
    session = Session("decode", settings)
    place = session.place
    caches = CPU_CACHES if place.name == "cpu" else GPU_CACHES
    suite = [
        Case(batch, heads, 1, 128, place.dtypes[0], heads_k=heads_k, seqlen_k=keys)
        for batch, heads, heads_k, keys in (caches[:2] if settings.quick else caches)
    ]
    for case in session.cases(suite):
        rows = session.measure(case, who(place, settings.peers))
        if rows and place.name == "cpu":
            rows += _references(session, case)
        for row in rows:
            share = float(row["gb_per_s"]) * 1e9 / session.ceilings.bytes_per_second
            session.say(
                f"  {row['implementation']:24} {row['gb_per_s']:>8} GB/s, {share:.2f} of the best copy"
            )

"""The decode path of NumPy from inside: how keys are cut into parts, and products of few rows."""

from __future__ import annotations

import importlib
import threading
from typing import Any

import numpy as np
import pytest

from cupy_flash.cpu import thin_products, threads
from tests.checks import Device
from tests.kv_cases import KvCase, check


@pytest.fixture(autouse=True)
def by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_FLASH_CPU", "numpy")


decode = importlib.import_module("cupy_flash.cpu.decode")


@pytest.mark.parametrize(("features", "features_v"), [(24, 40), (72, 64)])
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("keys", [1, 255, 256, 700, 1024])
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 6, 7, 8, 9, 17])
def test_products_of_few_rows(
    rows: int,
    keys: int,
    small: bool,
    cached: bool,
    features: int,
    features_v: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever way a product goes, by the rows and features, where keys are and the kernels of the BLAS."""
    monkeypatch.setattr(threads, "small_products_are_fast", lambda: small)
    rng = np.random.default_rng(rows * keys)
    shapes = (2, rows, features), (2, keys, features), (2, keys, features_v)
    q, k, v = (rng.standard_normal(shape, np.float32) for shape in shapes)
    s = np.full((2, rows, keys), np.nan, np.float32)
    thin_products.multiply_by_keys(q, k, s, cached=cached)
    exact = q.astype(np.float64) @ k.swapaxes(1, 2)
    np.testing.assert_allclose(s, exact, atol=2e-5)
    o = np.full((2, rows, features_v), np.nan, np.float32)
    thin_products.add_values(o, s, v, first=True)
    product = s.astype(np.float64) @ v
    np.testing.assert_allclose(o, product, atol=1e-5 * keys)
    thin_products.add_values(o, s, v, first=False)
    np.testing.assert_allclose(o, 2 * product, atol=2e-5 * keys)


CUT = [
    KvCase(dtype="float32", heads=(6, 3), lengths=(5000, 0, 1, 1300), room=5008, sinks=True),
    KvCase(dtype="float64", heads=(4, 4), lengths=(3000, 2048), room=4096, queries=5, causal=True),
    KvCase(dtype="float32", kind="paged", page=64, room=2048, lengths=(2000, 513), stored="int8"),
]


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("case", CUT, ids=str)
def test_every_key_is_in_one_part(case: KvCase, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the results of the parts unite to those of the whole, however many there are."""
    cuts: list[tuple[list[Any], list[int]]] = []
    cut_as_before = decode._parts

    def spied(*given: Any) -> Any:
        cuts.append(cut_as_before(*given))
        return cuts[-1]

    monkeypatch.setattr(decode, "_parts", spied)
    monkeypatch.setattr(decode, "LEAST_PART_BYTES", 1)
    monkeypatch.setattr(threads, "worker_count", lambda _: workers)
    check(case, Device("cpu"))
    assert cuts
    for parts, units in cuts:
        visited: dict[tuple[int, int], list[int]] = {}
        for part in parts:
            for head in range(part.heads.start, part.heads.stop):
                keys = visited.setdefault((part.sequence.batch, head), [])
                keys.extend(range(part.first, part.stop))
        for (batch, _), keys in visited.items():
            assert keys == list(range(len(keys)))
            assert len(keys) == min(case.lengths[batch] + case.new, case.room)
        assert len(visited) == len(case.lengths) * case.heads[1]
        assert (len(parts) > len(units)) == (workers > 1)


def test_parts_shrink() -> None:
    """What is cut last is short, so that no thread waits long for another one."""
    whole = decode.Sequence(0, np.zeros(1, int), None, 65536, 65536, 65536)
    problem = type("", (), {"heads_k": 8})
    parts, units = decode._parts(problem, [whole], [(0, 65536)], 8, 8192, 2)
    lengths = [part.stop - part.first for part in parts]
    assert units == [0]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 65536 * decode.SHARE_OF_REST // 2 // 256 * 256 + 256
    assert lengths[-1] * 8192 <= 1.5 * decode.LEAST_PART_BYTES


def test_a_busy_pool_does_not_hold_up_a_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Helpers that another caller keeps are not waited for, and come too late to take anything."""
    monkeypatch.setattr(threads, "_pool", threads._Pool())  # of one thread, once it is asked for one
    release, inside = threading.Event(), threading.Barrier(3)

    def hold() -> None:
        inside.wait(30)
        release.wait(30)

    first = threading.Thread(target=threads.run, args=([hold, hold], 2))
    first.start()
    inside.wait(30)
    done: list[int] = []
    threads.run([lambda: done.append(threading.get_ident())] * 4, 2)
    assert done == [threading.get_ident()] * 4
    release.set()
    first.join(30)
    assert not first.is_alive()
    assert len(done) == 4

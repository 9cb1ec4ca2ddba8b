"""The compiled core under AddressSanitizer with UBSan, and ThreadSanitizer: ragged shapes of everything.

Everything runs on the best library of this machine, what begins at odd places on every one that it runs.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cupy_flash.cpu import choose
from cupy_flash.cpu.core import isa, sources
from tests import sanitized
from tests.paths import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++"),
    pytest.mark.skipif(not isa.runnable(), reason="the core is not compiled for this CPU"),
]

LOADED = """
import sys, threading
import ml_dtypes
import numpy as np
from pathlib import Path
from cupy_flash.cpu.core import family
import cupy_flash
from cupy_flash import BlockMask, Spans
from tests import sanitized
from tests.public import cached, int4_parts, nvfp4_parts, with_mask

sanitized.use(Path(sys.argv[1]))
family.workers = lambda *_: 3
rng = np.random.default_rng(0)

def normal(*shape, dtype="float32"):
    return rng.standard_normal(shape).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

def masked(spans=None, blocks=None, **own):
    own = own if spans is None else with_mask(own, Spans(spans))
    return own if blocks is None else with_mask(own, BlockMask(*blocks))
"""

EVERYTHING = (
    LOADED
    + """
shapes = [(1, 2, 1, 49, 150, 7, 5), (2, 2, 2, 33, 17, 64, 64), (1, 4, 2, 1, 300, 24, 40),
          (1, 3, 1, 5, 5, 1, 1), (1, 1, 1, 600, 161, 16, 33)]
options = [{}, {"causal": True, "align": "bottom_right"}, {"window": (30, 4), "align": 3, "softcap": 2.0},
           {"dropout": 0.3, "seed": 5}, {"bias": 1, "mask": 1},
           {"sinks": 1, "alibi_slopes": 1, "align": "top_left"},
           {"spans": "keys", "bias": 1}, {"spans": "queries", "causal": True, "align": 2},
           {"blocks": 1, "causal": True, "align": 2},
           # Sums of rows that are formed again.
           {"scale": 1e5}, {"scale": 1e9, "bias": 1, "mask": 1, "sinks": 1, "spans": "keys"}]
for n, (b, hq, hk, sq, sk, d, dv) in enumerate(shapes):
    for m, given in enumerate(options):
        dtype = ("float32", "float64", "float16", "bfloat16")[(n + m) % 4]
        wide = "float64" if dtype == "float64" else "float32"
        made = {"bias": normal(1, hq, sq, sk, dtype=dtype), "mask": rng.random((b, 1, sq, sk)) < 0.6,
                "spans": rng.integers(0, sq + 1, (b, 1, 1, sk, 4)).astype(np.int32)
                if given.get("spans") == "keys" else rng.integers(0, sk + 1, (hq, sq, 1, 2)).astype(np.int32),
                "blocks": (rng.integers(0, 6, (b, 1, -(-sq // 32), -(-sk // 16))).astype(np.int32),
                           rng.integers(0, 256, (4, 32, 2)).astype(np.uint8)),
                "sinks": normal(hq, dtype=wide), "alibi_slopes": normal(hq, dtype=wide)}
        own = masked(**{name: made[name] if name in made else x for name, x in given.items()})
        do, q = normal(b, hq, sq, dv, dtype=dtype), normal(b, hq, sq, d, dtype=dtype)
        k, v = normal(b, hk, sk, d, dtype=dtype), normal(b, hk, sk, dv, dtype=dtype)
        o, lse = cupy_flash.attention(q, k, v, return_lse=True, **own)
        cupy_flash.attention_backward(do, q, k, v, o, lse, dlse=np.zeros_like(lse), **own)
        cupy_flash.derivatives.hvp(
            do, q, k, v, o, lse, dq=np.stack([q, q]), dk=np.stack([k, k]), dlse=np.zeros_like(lse), **own)
        softmax = {name: x for name, x in own.items() if name not in ("dropout", "seed")}
        for known in (None, lse):
            cupy_flash.attention_statistics(q, k, known, top_k=3, **softmax)
# Score functions: every reach, tables read in one piece and not, learned; then pairs that read outside.
relative = cupy_flash.score(
    lambda s, b, h, i, j, t, x: np.where(i + j > 9, s, np.tanh(s)) + t[h, i - j + 299]
    - x[j] * np.exp(-abs(s)) + x[h] * 0.01 * ((i * 7) // (1 + j % 5)), learned=("t", "x"))
for dtype in ("float32", "float64"):
    do, q = normal(1, 4, 40, 16, dtype=dtype), normal(1, 4, 40, 16, dtype=dtype)
    k = normal(1, 2, 300, 16, dtype=dtype)
    for size in (340, 335):
        table = normal(4, size, dtype=dtype)[::-1]
        own = {"score": relative(table, normal(300, dtype=dtype))}
        for hidden in ({}, {"causal": True, "align": 0}, {"mask": rng.random((1, 4, 40, 300)) < 0.5}):
            try:
                o, lse = cupy_flash.attention(q, k, k, return_lse=True, **own, **hidden)
                cupy_flash.attention_backward(do, q, k, k, o, lse, **own, **hidden)
                cupy_flash.attention_statistics(q, k, lse, **own, **hidden)
                assert size == 340
            except cupy_flash.InvalidArgumentsError as error:
                assert size == 335 and "reads element 3" in str(error)
lengths = np.array([0, 5, 5, 38], np.int32)
q, k = normal(38, 4, 24), normal(38, 2, 24)
o, lse = cupy_flash.attention_varlen(q, k, k, lengths, lengths, causal=True, return_lse=True)
cupy_flash.attention_varlen_backward(q, q, k, k, o, lse, lengths, lengths, causal=True)
cupy_flash.attention_statistics(q, k, cu_seqlens_q=lengths, cu_seqlens_k=lengths, causal=True)
pages, table = normal(40, 2, 16, 24), rng.permutation(40).astype(np.int32).reshape(2, 20)
for rows in (1, 3, 1100):
    cupy_flash.attention_statistics(
        normal(2, 4, rows, 24), pages, cache_seqlens=np.array([301, 7], np.int32), block_table=table,
        cache_leftpad=np.array([5, 3], np.int32), causal=True)
for rows in (1, 3, 17):
    for page in (0, 16):
        for stored in ("float32", "int8"):
            pool = normal(40, 2, 16, 24) if page else normal(2, 2, 320, 24)
            table = {"block_table": rng.permutation(40).astype(np.int32).reshape(2, 20)} if page else {}
            pool = (10 * pool).astype(stored)
            units = ("k_scale", "v_scale") if stored == "int8" else ()
            scales = {name: np.full(2, 0.1, np.float32) for name in units}
            angles = normal(320, 5)
            cached(
                normal(2, 4, rows, 24), pool, pool.copy(), causal=True,
                cache_seqlens=np.array([301, 7], np.int32),
                k=normal(2, 2, rows, 24), v=normal(2, 2, rows, 24), rotary_cos=angles, rotary_sin=angles,
                rotary_last=stored == "int8", **table, **scales)
for rows in (1, 3, 17):
    for page in (0, 3, 16):
        for units in ("float16", "float32", "e4m3"):
            slots, size = (220, page) if page else (2, 320)
            codes = {}
            for x, d, group in (("k", 64, 32), ("v", 128, 128)):
                keys = normal(slots, 2, size, d)
                if units == "e4m3":
                    parts, made = ("cache", "block_scale"), nvfp4_parts(keys)
                else:
                    parts, made = ("cache", "scale", "zero"), int4_parts(keys, group=group, dtype=units)
                codes |= {f"{x}_{part}": y for part, y in zip(parts, made)}
            # Every other table leads outside.
            table = rng.permutation(220)[:40].reshape(2, 20).astype(np.int32)
            table[1, 1::2] = rng.choice([-2**31, -1, 220, 2**31 - 1], 10)
            cached(
                normal(2, 4, rows, 64), **codes, causal=True, check=False,
                cache_seqlens=np.array([2**31 - 1, 7], np.int32),
                k=normal(2, 2, rows, 64), v=normal(2, 2, rows, 128),
                **({"block_table": table} if page else {}))
# Ragged in every way, over pages of any size, with what is not checked as wrong as it can be.
cut, added = np.array([0, 40, 49, 50, 50, 53], np.int32), np.array([0, 5, 5, 6, 30, 30], np.int32)
for page, wrong in ((1, -2**31), (5, 2**31 - 1), (16, 200)):
    for rows in (cut, np.arange(6, dtype=np.int32)):
        keys = np.array([wrong, 40, 0, 90, 7], np.int32)
        # Its own pages, or none of the cache: two sequences that append to one page are their caller's race.
        table = rng.permutation(450).reshape(5, 90)
        table = np.where(rng.random(table.shape) < 0.3, rng.choice([-3, 450, 2**31 - 1], table.shape), table)
        table = table.astype(np.int32)
        pool, angles = normal(450, page, 2, 24), normal(50, 5)
        taken = np.clip(keys.astype(np.int64), 0, 90 * page) + np.diff(added)
        flat = np.ones(int((np.diff(rows) * np.minimum(taken, 90 * page)).sum()), bool)
        drafts = np.diff(rows).max()
        tree = {"spans": rng.integers(0, drafts + 1, (5, 1, 1, drafts, 4)).astype(np.int32)}
        for own in ({}, {"ragged_mask": flat}, {"seqused_q": np.minimum(np.diff(rows), 3)}, tree):
            cached(
                normal(rows[-1], 4, 24), pool, pool.copy(), cache_seqlens=keys, block_table=table,
                cu_seqlens_q=rows, cu_seqlens_k_new=added, k=normal(30, 2, 24), v=normal(30, 2, 24),
                rotary_cos=angles, rotary_sin=angles, rotary_seqlens=np.full(5, wrong, np.int32),
                cache_leftpad=np.full(5, wrong, np.int32), layout="bshd", check=False, **own)
# A NaN may have any bits, also such that sums of them carry beyond a sign.
for bits in (np.uint32(0x7fc000c9), np.uint64(0x7ff80000000003ff)):
    x = np.full((1, 2, 40, 8), bits).view(f"float{8 * bits.itemsize}")
    o, lse = cupy_flash.attention(x, x, x, softcap=3.0, return_lse=True)
    assert np.isnan(o).all()
    cupy_flash.attention_backward(x, x, x, x, o, lse, softcap=3.0)
print("clean")
"""
)
# Bounds, intervals, sequences, pads and pages that begin at odd keys, in every dtype; more keys than a block
# of 144, more rows than the 1024 of a job.
ODD = (
    LOADED
    + """
def starts(rows, keys, wide):
    odd = rng.integers(0, keys // 2, (rows, 2)) * 2 + 1
    first, second = np.minimum(odd, keys).T
    return np.stack([first, np.minimum(first + wide, keys), second, np.minimum(second + wide, keys)], -1)

cases = [
    (1301, 1301, {"window": (255, 0), "causal": True}), (1301, 1301, {"window": (101, 17)}),
    (8, 300, {"window": (200, 0), "align": 291}), (100, 701, {"window": (101, 100), "align": "bottom_right"}),
    (33, 500, {"window": (10, 3), "align": 200, "bias": 1, "softcap": 2.0}),
    (33, 301, {"window": (200, 4), "align": 255, "mask": 1, "sinks": 1, "alibi_slopes": 1}),
    (1101, 433, {"spans": starts(1101, 433, 90)[:, None, :2]}),
    (70, 433, {"spans": starts(70, 433, 31)[:, None]}),
    (433, 301, {"spans": starts(301, 433, 101)[None, :, :2]}),
]
for rows, keys, given in cases:
    made = {"bias": normal(1, 2, rows, keys), "mask": rng.random((rows, keys)) < 0.5, "sinks": normal(2),
            "alibi_slopes": normal(2)}
    for dtype in ("bfloat16", "float16", "float32", "float64"):
        if dtype == "float64" and rows > 1000:
            continue
        own = {name: made[name] if name in made else x for name, x in given.items()}
        wide = "float64" if dtype == "float64" else "float32"
        own = {n: x.astype(wide) if n in ("sinks", "alibi_slopes") else x for n, x in own.items()}
        own = masked(**{n: x.astype(np.int32) if n == "spans" else x for n, x in own.items()})
        do, q = normal(1, 2, rows, 16, dtype=dtype), normal(1, 2, rows, 24, dtype=dtype)
        k, v = normal(1, 1, keys, 24, dtype=dtype), normal(1, 1, keys, 16, dtype=dtype)
        o, lse = cupy_flash.attention(q, k, v, return_lse=True, **own)
        cupy_flash.attention_backward(do, q, k, v, o, lse, **own)
        if rows < 1000 and dtype in ("bfloat16", "float64"):
            cupy_flash.derivatives.hvp(do, q, k, v, o, lse, dq=q, dk=k, dv=v, **own)
        cupy_flash.attention_statistics(q, k, lse, **own)
of_q, of_k = np.array([0, 7, 7, 1200], np.int32), np.array([0, 301, 304, 605], np.int32)
for dtype in ("bfloat16", "float32"):
    q, k = normal(1200, 2, 24, dtype=dtype), normal(605, 1, 24, dtype=dtype)
    for own in ({"window": (101, 3), "align": 155}, {"causal": True, "align": "bottom_right"},
                {"seqused_k": np.array([145, 0, 33], np.int32)}):
        o, lse = cupy_flash.attention_varlen(q, k, k, of_q, of_k, return_lse=True, **own)
        cupy_flash.attention_varlen_backward(q, q, k, k, o, lse, of_q, of_k, **own)
for dtype in ("bfloat16", "float16", "float32"):
    for rows in (1, 3, 33):
        for page in (0, 5, 18, 16):
            slots, size = (120, page) if page else (2, 320)
            pool = normal(slots, 2, size, 48, dtype=dtype)
            pages = rng.permutation(120)[:2 * (300 // max(page, 5))].reshape(2, -1).astype(np.int32)
            table = {"block_table": pages} if page else {}
            for own in ({"window": (101, 0)}, {"cache_leftpad": np.array([145, 1], np.int32)},
                        {"cache_leftpad": np.array([37, 45], np.int32), "window": (33, None)}):
                cupy_flash.attention_with_kv_cache(
                    normal(2, 4, rows, 48, dtype=dtype), pool, pool, causal=True,
                    cache_seqlens=np.array([251, 45], np.int32), **table, **own)
print("clean")
"""
)
TOGETHER = (
    LOADED
    + """
q, k = normal(2, 4, 200, 24), normal(2, 2, 200, 24)
cache, one, half = normal(2, 2, 3000, 24), normal(2, 4, 1, 24), normal(2, 2, 200, 24, dtype="bfloat16")
def call():
    for _ in range(10):
        o, lse = cupy_flash.attention(q, k, k, causal=True, return_lse=True)
        cupy_flash.attention_backward(q, q, k, k, o, lse, causal=True)
        cupy_flash.derivatives.hvp(q, q, k, k, o, lse, dq=q, dv=k, causal=True)
        cupy_flash.attention_statistics(q, k, causal=True)
        cupy_flash.attention_with_kv_cache(one, cache, cache, cache_seqlens=2900)
        o, lse = cupy_flash.attention(half, half, half, causal=True, return_lse=True)
        cupy_flash.attention_backward(half, half, half, half, o, lse, causal=True)
callers = [threading.Thread(target=call) for _ in range(3)]
[caller.start() for caller in callers]
[caller.join() for caller in callers]
print("clean")
"""
)


PROGRAMS = {"everything": EVERYTHING, "together": TOGETHER, "odd places": ODD}
BEST, *OTHERS = sources.choices(isa.runnable()) or ["none"]  # of the best one AMX, pairs and floats


def _sanitizer_of(name: str) -> str:
    """Other ways to multiply are in the libraries that are compiled for the best one."""
    return "undefined" if isa.name_of(name) == isa.name_of(BEST) else "address"


CASES = [
    *((program, "undefined", BEST) for program in PROGRAMS),
    *((program, "thread", BEST) for program in ("everything", "together")),
    # why in turn: the narrower ones differ in the width of vectors, and in nothing else that has an address.
    *(
        pytest.param(
            "odd places", _sanitizer_of(name), name, marks=[pytest.mark.in_turn(2)] * (name in ("v2", "v3"))
        )
        for name in OTHERS
    ),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The libraries of an instruction set with a sanitizer, compiled once, whatever products a case takes."""

    @functools.cache
    def folder_of(kind: str, name: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        sanitized.build(kind, folder, [one for one in isa.ISAS if one.name == name])
        return folder

    return lambda kind, name: folder_of(kind, isa.name_of(name))


def test_each_way_to_multiply_has_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "locate", None)
    mine = next(one for one in isa.ISAS if sources.AMX in sources.parts(one))
    for part in sources.parts(mine):
        (tmp_path / f"{sources.library_name(mine, part)}.so").touch()
    sanitized.use(tmp_path)
    used = [choose.locate(mine, part) for part in sources.PRODUCTS.values()]
    assert [library.part for library in used] == [*sources.PRODUCTS.values()]


@pytest.mark.parametrize(("program", "kind", "name"), CASES)
def test_the_core_is_clean(program: str, kind: str, name: str, built: Callable[[str, str], Path]) -> None:
    folder = built(kind, name)
    environment = {**sanitized.surroundings(kind), isa.OVERRIDE: name}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAMS[program], str(folder)], capture_output=True, text=True, timeout=900,
        check=False, env=environment, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert done.stdout.endswith("clean\n")

"""The products of the compiled core: its instructions, pairs of bfloat16, and the loops of decode."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_flash
from cupy_flash import testing
from cupy_flash.call.problem import Cache
from cupy_flash.cpu import choose
from cupy_flash.cpu.core import isa, locate, sources
from cupy_flash.info import info_text
from tests.cpu.core_calls import normal
from tests.plan_cases import BASE

pytestmark = pytest.mark.usefixtures("in_pairs")


@pytest.fixture
def in_pairs(core: locate.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of bfloat16 where this CPU has products of them, also if others are faster."""
    mine = isa.runnable()[0]
    monkeypatch.setenv(isa.OVERRIDE, mine.name + isa.PAIRS * sources.multiplies(mine, sources.BFLOAT16))


# ---- instructions


def loops_of(path: Path) -> list[list[str]]:
    """The bodies of the innermost loops: instructions from the target of a jump back to the jump."""
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", "-M", "intel", str(path)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    lines = re.findall(r"^\s+([0-9a-f]+):\t(.*)$", listing, re.MULTILINE)
    place = {address: n for n, (address, _) in enumerate(lines)}
    found = []
    for n, (_, text) in enumerate(lines):
        jump = re.match(r"j\w+\s+(?:0x)?([0-9a-f]+)", text)
        if jump and jump[1] in place and place[jump[1]] < n:
            body = [text for _, text in lines[place[jump[1]] : n + 1]]
            if not any(text.startswith("j") for text in body[:-1]):
                found.append(body)
    return found


def accumulators(body: list[str], register: str) -> set[str]:
    """The registers that its multiply-adds write; those of a polynomial are few, which it writes again."""
    return {text.split()[1].split(",")[0] for text in body if text.startswith("vfmadd") and register in text}


@pytest.mark.parametrize(
    "name", [one.name for one in isa.ISAS if one.machine == "x86_64" and one.name != "v2"]
)
def test_the_inner_loop_of_the_product_multiplies_and_loads(name: str, core: locate.Library) -> None:
    """A full tile of accumulators: no shuffle, no spill, scalars of A broadcast, vectors of B loaded."""
    path = core.path.with_name(f"{name}.so")
    if not path.exists():
        pytest.skip(f"the library {name} is not built")
    one = next(one for one in isa.ISAS if one.name == name)
    register = "zmm" if one.lanes == 16 else "ymm"
    tiles = [
        body for body in loops_of(path)
        if len(accumulators(body, register)) == one.rows * one.vectors
        and all("ps" in text.split()[0] for text in body if text.startswith("vfmadd"))
    ]  # fmt: skip
    assert len(tiles) >= 2, "A along its rows, and along the depth"
    for body in tiles:
        kinds = [text.split()[0] for text in body]
        vectors = [text for text in body if register in text]
        stored = [text for text in vectors if re.match(r"v?mov\w+\s+\w*\s*(?:PTR )?\[", text)]
        shuffled = [
            k
            for k in kinds
            if re.match(r"vperm|vshuf|vunpck|vinsert|vextract|vblend|vadd|vsub|vpbroadcastd$", k)
        ]
        assert not stored, body
        assert not shuffled, body
        assert not [text for text in body if re.search(r"\[r[sb]p", text)], body
        assert not [kind for kind in kinds if re.match(r"vmov[qd]$|kmov", kind)], "a spill of an offset of A"
        of_memory = [text for text in vectors if "PTR" in text and not text.startswith("vfmadd")]
        broadcast_in_place = [text for text in vectors if text.startswith("vfmadd") and "PTR" in text]
        assert len(of_memory) + len(broadcast_in_place) <= one.rows * 2 + one.vectors * 2, body


def test_the_inner_loop_of_pairs_multiplies_and_loads() -> None:
    """Of the library for AVX512-BF16: two products at once, scalars broadcast from where they lie."""
    mine, path = pairs()
    tiles = [
        body for body in loops_of(path)
        if sum(text.startswith("vdpbf16ps") for text in body) == mine.rows * mine.vectors
    ]  # fmt: skip
    assert len(tiles) >= 2, "A along its rows, and along the depth"
    for body in tiles:
        vectors = [text.split()[0] for text in body if "zmm" in text]
        assert vectors.count("vpbroadcastd") == mine.rows, body
        assert set(vectors) <= {"vdpbf16ps", "vpbroadcastd", "vmovdqu32", "vmovups"}, body
        assert sum(kind.startswith("vmov") for kind in vectors) <= mine.vectors, body


# ---- pairs of bfloat16


def pairs() -> tuple[isa.Isa, Path]:
    """The instruction set and the library whose products are of pairs; skips where there are none."""
    mine = isa.runnable()[0]
    return mine, library_of(sources.BFLOAT16).path


def library_of(part: str) -> locate.Library:
    """That of products of bfloat16; skips where there is none."""
    mine = isa.runnable()[0]
    if not sources.multiplies(mine, part):
        pytest.skip(f"this CPU ({mine.title}) has no products of {part}")
    library = locate.locate(mine, part)
    if library is None:
        pytest.skip(f"the library of {part} is not built")
    return library


PAIRED = BASE._replace(dtype="bfloat16", seqlen_q=64)


@pytest.mark.parametrize(
    "change",
    [{"dtype": "float16"}, {"cache": Cache("int8")}, {"dropout": 0.5},
     {"want_dbias": True, "direction": "backward"}, {"direction": "jvp"},
     {"direction": "statistics"}],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_reals_are_multiplied_where_pairs_would_not_do(change: dict[str, Any]) -> None:
    pairs()
    assert choose.choose(PAIRED).library.part == sources.BFLOAT16
    for same in (
        {"direction": "backward"},
        {"cache": Cache("bfloat16")},
        {"seqlen_q": 1},
        {"reproducible": "batch"},
    ):
        assert choose.choose(PAIRED._replace(**same)).library.part == sources.BFLOAT16
    assert choose.choose(PAIRED._replace(**change)).library.part != sources.BFLOAT16


def test_explain_says_that_products_are_of_pairs() -> None:
    pairs()
    x = np.ones((1, 2, 5, 8), ml_dtypes.bfloat16)
    for direction in ("forward", "backward"):
        assert "pairs of bfloat16" in cupy_flash.explain(x, x, x, direction=direction, reproducible="batch")


def test_without_avx512_bf16_or_its_library_reals_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is an error unless asked for: most CPUs have none, and an older wheel brings none."""
    pairs()
    here = isa.host()
    with monkeypatch.context() as within:
        within.setattr(sources, "host", lambda: here._replace(flags=here.flags - {"avx512_bf16"}))
        with pytest.raises(cupy_flash.InvalidArgumentsError, match="this CPU has no such products"):
            choose.choose(PAIRED)  # asked for by name
        within.delenv(isa.OVERRIDE)
        assert choose.choose(PAIRED).library.part == ""
    found = choose.locate
    monkeypatch.setattr(
        choose, "locate", lambda one, part="": None if part in sources.PRODUCTS.values() else found(one, part)
    )
    assert choose.choose(PAIRED).library.part == ""


@pytest.mark.parametrize(
    ("vendor", "wanted", "part"),
    [
        ("GenuineIntel", "", ""), ("AuthenticAMD", "", sources.BFLOAT16), ("", "", sources.BFLOAT16),
        ("GenuineIntel", isa.PAIRS, sources.BFLOAT16), ("AuthenticAMD", isa.FLOATS, ""),
    ],
)  # fmt: skip
def test_pairs_are_multiplied_where_they_are_fast_or_asked_for(
    vendor: str, wanted: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the vendor, never by timing: results have the same bits in every run."""
    mine, _ = pairs()
    here = isa.host()._replace(vendor=vendor, flags=isa.host().flags - {"amx_tile"})
    monkeypatch.setattr(isa, "host", lambda: here)
    monkeypatch.setattr(sources, "host", lambda: here)
    monkeypatch.setenv(isa.OVERRIDE, mine.name + wanted if wanted else "")
    assert choose.choose(PAIRED).library.part == part
    decode = PAIRED._replace(seqlen_q=1, cache=Cache("bfloat16"))
    assert choose.choose(decode).library.part == ("" if wanted == isa.FLOATS else sources.BFLOAT16)
    assert choose.choose(decode._replace(reproducible="batch")).library.part == part
    assert choose.choose(decode._replace(cache=None)) == choose.choose(decode)
    x = np.ones((1, 2, 12, 8), ml_dtypes.bfloat16)  # fewer rows are decode
    assert ("pairs of bfloat16" in cupy_flash.explain(x, x, x)) == bool(part)
    said = info_text()
    assert ("bfloat16 multiplied in pairs" if part else "bfloat16 multiplied as floats (") in said
    assert part or (f"{isa.OVERRIDE} is {mine.name}-floats" if wanted else "on Intel") in said


# ---- AMX


@pytest.fixture
def unset(in_pairs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this CPU does by itself, if it has AMX."""
    monkeypatch.delenv(isa.OVERRIDE, raising=False)
    library_of(sources.AMX)


@pytest.mark.usefixtures("unset")
def test_amx_multiplies_what_fills_its_tiles() -> None:
    """Not decode, nor what must have its bits, nor few rows, of which decode's loops compute the LSE."""
    for free in ({}, {"direction": "backward"}, {"reproducible": "run"}, {"cache": Cache("bfloat16")}):
        assert choose.choose(PAIRED._replace(**free)).library.part == sources.AMX
    for bound in ({"reproducible": "batch"}, {"reproducible": "prefill"}, {"seqlen_q": 1}, {"dropout": 0.5},
                  {"seqlen_q": 1, "direction": "backward"}, {"dtype": "float16"}):  # fmt: skip
        assert choose.choose(PAIRED._replace(**bound)).library.part != sources.AMX
    x = np.ones((1, 2, 12, 8), ml_dtypes.bfloat16)
    said = cupy_flash.explain(x, x, x, reproducible="run")
    assert "by AMX" in said
    assert "32 queries x 192 keys" in said
    assert "decode" not in said
    assert "bfloat16 multiplied by AMX" in info_text()


@pytest.mark.usefixtures("unset")
def test_without_amx_or_its_permission_others_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of Linux before 5.16, a sandbox that refuses, an older wheel: no error unless asked for."""
    found = choose.locate
    with monkeypatch.context() as within:
        within.setattr(
            choose, "locate", lambda one, part="": None if part == sources.AMX else found(one, part)
        )
        assert choose.choose(PAIRED).library.part != sources.AMX
    monkeypatch.setattr(sources, "amx_is_permitted", lambda: False)
    assert choose.choose(PAIRED).library.part != sources.AMX
    assert "by AMX" not in info_text()
    monkeypatch.setenv(isa.OVERRIDE, isa.runnable()[0].name + isa.BY_AMX)
    with pytest.raises(cupy_flash.InvalidArgumentsError, match="this CPU has no such products"):
        choose.choose(PAIRED)


def test_the_inner_loops_of_amx_load_few_tiles() -> None:
    """Two rows of tiles by two columns: four loads for four products, and nothing goes through memory.

    Of floats in three parts, 14 loads for 24 products: each step loads one operand.
    """
    library = library_of(sources.AMX)
    kinds = "tdpbf16ps", "tileloadd", "tilestored"
    counts = [
        tuple(sum(text.startswith(kind) for text in body) for kind in kinds)
        for body in loops_of(library.path)
    ]
    assert {(4, 4, 0), (24, 14, 0)} <= set(counts)
    assert max(counts) == (24, 14, 0)


@pytest.mark.parametrize("part", sources.PRODUCTS.values())
@pytest.mark.parametrize("features", [(64, 64), (7, 5), (33, 80), (2, 1), (96, 40)], ids=str)
@pytest.mark.parametrize(("keys", "queries"), [(1, 50), (143, 50), (301, 50), (194, 12), (591, 83)], ids=str)
def test_pairs_are_products_of_bfloat16(
    keys: int, queries: int, features: tuple[int, int], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Odd keys and features, a layout among NaN that is not theirs, options: within the error budget."""
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    library_of(part)
    way = next(way for way, of_way in sources.PRODUCTS.items() if of_way == part)
    monkeypatch.setenv(isa.OVERRIDE, isa.runnable()[0].name + way)
    d, dv = features

    def made(*shape: int, seed: int) -> np.ndarray:
        return normal(*shape, seed=seed).astype(bfloat16)

    do, q = made(2, 4, queries, dv, seed=1), made(2, 4, queries, d, seed=2)
    # Keys that lie among others, which are NaN.
    around = np.full((2, keys + 2, 2, d + dv + 3), np.nan, bfloat16)
    k, v = around[:, 1:-1, :, 1 : d + 1].swapaxes(1, 2), around[:, 1:-1, :, d + 2 : -1].swapaxes(1, 2)
    k[:], v[:] = made(2, 2, keys, d, seed=3), made(2, 2, keys, dv, seed=4)
    mask = np.random.default_rng(keys).random((2, 1, queries, keys)) < 0.7
    options: list[dict[str, Any]] = [
        {}, {"causal": True, "align": "bottom_right"}, {"mask": mask, "softcap": 5.0},
        {"window": (20, 3), "align": keys - queries, "sinks": normal(4)},
        {"bias": normal(1, 4, queries, keys), "alibi_slopes": normal(4), "align": "top_left"},
    ]  # fmt: skip
    for own in options:
        assert "products  of " in cupy_flash.explain(q, k, v, **own)
        o, lse = cupy_flash.attention(q, k, v, return_lse=True, **own)
        gradients = cupy_flash.attention_backward(do, q, k, v, o, lse, **own)
        made_of = dict(zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *gradients[:3]), strict=True))
        testing.assert_within_budget(made_of, q, k, v, do=do, **own)


# Left and right bounds whose sum with the first row of some block is odd, and even ones beside them; more
# rows than a job computes at once, and more keys than a block of 144 has.
WINDOWS = [
    ((1665, 1665), {"window": (255, 0), "causal": True}),
    ((1153, 1153), {"window": (256, 0), "causal": True}),
    ((1300, 1300), {"window": (101, 0)}),
    ((1300, 1300), {"window": (301, 17)}),
    ((1152, 1152), {"window": (127, 128)}),
    ((8, 300), {"window": (200, 0), "align": 291}),
    ((100, 701), {"window": (101, 100), "align": "bottom_right"}),
    ((33, 500), {"window": (10, 3), "align": 200}),
]


@pytest.mark.usefixtures("every_library")
@pytest.mark.parametrize(("lengths", "options"), WINDOWS, ids=str)
def test_windows_begin_at_any_key(lengths: tuple[int, int], options: dict[str, Any]) -> None:
    """A window's first key may be the second of a pair, in results and gradients of every instruction set."""
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    queries, keys = lengths
    do, q = (normal(1, 1, queries, 32, seed=s).astype(bfloat16) for s in (1, 2))
    k, v = (normal(1, 1, keys, 32, seed=s).astype(bfloat16) for s in (3, 4))
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
    dq, dk, dv, *_ = cupy_flash.attention_backward(do, q, k, v, o, lse, **options)
    made = {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    testing.assert_within_budget(made, q, k, v, do=do, **options)


@pytest.mark.parametrize("width", [48, 41])
@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
@pytest.mark.parametrize(("way", "part"), sources.PRODUCTS.items())
def test_hidden_keys_stay_hidden_whatever_multiplies_scores(
    way: str, part: str, scale: float, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The factor of scores joins their softmax where that is their only one, and no key comes back by it."""
    library_of(part)
    monkeypatch.setenv(isa.OVERRIDE, isa.runnable()[0].name + way)
    do, q, k, v = (normal(2, 2, 151, width, seed=seed).astype(ml_dtypes.bfloat16) for seed in range(4))
    k[:, :, -1] = 40  # the last key's score is large, and only one query sees it
    o, lse = cupy_flash.attention(q, k, v, scale=scale, causal=True, return_lse=True)
    dq, dk, dv, *_ = cupy_flash.attention_backward(do, q, k, v, o, lse, scale=scale, causal=True)
    made = {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    testing.assert_within_budget(made, q, k, v, do=do, scale=scale, causal=True)


# ---- few queries


@pytest.mark.parametrize("queries", [1, 2, 11])
@pytest.mark.parametrize("features", [(40, 24), (64, 96), (33, 16)], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [{"causal": True, "align": "bottom_right"}, {"window": (40, 3), "align": 150, "softcap": 3.0},
     {"window": (40, 3), "align": 151}, {"window": (299, 2), "align": 300, "scale": 0.3},
     {"alibi_slopes": normal(4), "align": "bottom_right", "sinks": normal(4, seed=1)}],
    ids=["causal", "window", "odd_window", "scale", "alibi"],
)  # fmt: skip
def test_few_queries_take_the_loops_of_decode(
    queries: int, features: tuple[int, int], dtype: Any, options: dict[str, Any]
) -> None:
    """Of one key head; a mask that hides nothing takes those of the panels, and gives the same bits."""
    q, k, v = (
        normal(2, 4, rows, width, seed=seed).astype(dtype)
        for seed, (rows, width) in enumerate([(queries, features[0]), (701, features[0]), (701, features[1])])
    )
    few = cupy_flash.attention(q, k, v, return_lse=True, **options)
    panels = cupy_flash.attention(q, k, v, return_lse=True, mask=np.ones((1, 1), bool), **options)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(few, panels, strict=True))

"""reproducible= on simulated GPUs: bits of rows and of gradients in any batch, and each hazard put back."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_flash
from cupy_flash import UnsupportedError
from cupy_flash.call.describe import describe
from cupy_flash.call.given import Options
from cupy_flash.dispatch import memo
from cupy_flash.plan import families
from cupy_flash.plan.catalog import ARCHITECTURES
from cupy_flash.plan.choose import choose
from cupy_flash.plan.families import decode, flash, flash_tiles
from cupy_flash.testing import same_bits
from tests.checks import Device
from tests.function_cases import ALIBI
from tests.public import cached
from tests.simulator.units import SIMULATED

pytestmark = SIMULATED

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
SMALL: dict[str, Any] = {
    "lengths": (1, 9, 10, 65, 130),
    "chunks": (1, 9, 10, 64),
    "pages": (3, 16),
    "heads": (2, 1),
}


@pytest.fixture
def on(device: Device) -> Iterator[Device]:
    """A simulated GPU whose plans, which a test may change, are forgotten."""
    memo.forget()
    yield device
    memo.forget()


def held(dtype: str, **options: Any) -> Any:
    return same_bits(cast=lambda x: x.astype(DTYPES[dtype]), **{**SMALL, **options})


ROWS = {"sinks": np.array([0.5, -1], np.float32), "alibi_slopes": np.array([0.1, 0.3], np.float32)}
# Architecture, dtype, options.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sm_61 simple": ("sm_61", "float32", {"head_dim": 40, **ROWS}),
    "sm_75 flash": ("sm_75", "float16", {"window": (70, 0)}),
    "sm_80 flash": ("sm_80", "float16", {"softcap": 4.0, **ROWS}),
    "sm_80 tf32x3": ("sm_80", "float32", {"head_dim": 32}),
    "sm_80 simple f64": ("sm_80", "float64", {"head_dim": 24}),
    "sm_75 device": ("sm_75", "float32", {"head_dim": 40, "reproducible": "device", **ROWS}),
    "sm_90a device f64": ("sm_90a", "float64", {"head_dim": 24, "reproducible": "device"}),
    "sm_86 window": ("sm_86", "bfloat16", {"window": (40, 0), "head_dim": 96}),
    "sm_90a": ("sm_90a", "float16", {"head_dim": 128, "lengths": (10, 130), "chunks": (9,)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_rows_and_gradients_in_any_company(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arch, dtype, options = CASES[name]
    monkeypatch.setenv("CUPY_FLASH_DRIVER", f"simulator:{arch}")
    found = held(dtype, **options)
    assert found.same, str(found)
    assert not found.refused


@pytest.mark.slow
@pytest.mark.parametrize("arch", [row.name for row in ARCHITECTURES])
def test_rows_on_every_architecture(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_FLASH_DRIVER", f"simulator:{arch}")
    found = held("float16", lengths=(9, 10, 70), chunks=(9,), head_dim=32)
    assert found.same, str(found)
    assert not found.refused


@pytest.mark.slow
@pytest.mark.parametrize("device", ["sm_80"], indirect=True)
@pytest.mark.parametrize("size", [2047, 2048, 2049])
def test_chunks_of_so_many_tokens(on: Device, size: int) -> None:
    """The first chunk of a prompt and the one behind it; some of the rows, alone."""
    q, k, v = rows("float16", 2060, 32)[:, :, :1]
    options: dict[str, Any] = {"causal": True, "reproducible": "batch"}
    for first, end in ((0, size), (size, 2060)):
        chunk = cupy_flash.attention(q[:, :, first:end], k[:, :, :end], v[:, :, :end], align=first, **options)
        for t in (first, (first + end) // 2, end - 1):
            alone = (q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1])
            row = cupy_flash.attention(*alone, align=t, **options)
            assert row.tobytes() == chunk[:, :, t - first : t - first + 1].tobytes(), f"row {t}"


@pytest.mark.slow
@pytest.mark.parametrize("device", ["sm_80"], indirect=True)
def test_chunks_of_a_long_prompt(on: Device) -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 1, 2100, 32)).astype(np.float16)
    options: dict[str, Any] = {"causal": True, "reproducible": "batch"}
    last = cupy_flash.attention(q[:, :, 2040:], k, v, align=2040, **options)
    for first, end in ((2047, 2048), (2048, 2049), (2047, 2096), (2099, 2100)):
        part = cupy_flash.attention(q[:, :, first:end], k[:, :, :end], v[:, :, :end], align=first, **options)
        assert part.tobytes() == last[:, :, first - 2040 : end - 2040].tobytes()


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Chunks of fewer keys, by which kernels are compiled and planned alike."""
    monkeypatch.setattr(flash, "CHUNK_KEYS", 128)
    return 128


def rows(dtype: str, length: int, head_dim: int) -> Any:
    return (
        np.random.default_rng(0)
        .standard_normal((3, 1, 2, length, head_dim), np.float32)
        .astype(DTYPES[dtype])
    )


# Architecture, dtype, head_dim, options.
CHUNKS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "sm_75": ("sm_75", "float16", 40, {}),
    "sm_80 window": ("sm_80", "float16", 64, {"window": (150, 0)}),
    "sm_80 rows": ("sm_80", "bfloat16", 64, {"softcap": 4.0, **ROWS}),
    "sm_86 tf32x3": ("sm_86", "float32", 32, {}),
    "sm_90a": ("sm_90a", "float16", 128, {}),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "sm_80 window" else pytest.mark.slow)
                                  for name in CHUNKS])  # fmt: skip
@pytest.mark.usefixtures("short_chunks")
def test_decode_of_a_token_is_its_row_of_the_prompt(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that are different blocks', or one's in turn; below, at and beyond their ends."""
    arch, dtype, head_dim, options = CHUNKS[name]
    monkeypatch.setenv("CUPY_FLASH_DRIVER", f"simulator:{arch}")
    q, k, v = rows(dtype, 300, head_dim)
    options = {"causal": True, "return_lse": True, "reproducible": "batch", **options}
    with monkeypatch.context() as within:
        within.setattr(flash, "MOST_PARTS_BYTES", 0)
        memo.forget()
        whole = cupy_flash.attention(q, k, v, **options)
    memo.forget()
    for actual, expected in zip(cupy_flash.attention(q, k, v, **options), whole, strict=True):
        assert actual.tobytes() == expected.tobytes()
    plain = cupy_flash.attention(q, k, v, **{**options, "reproducible": None})
    for actual, expected in zip(whole, plain, strict=True):
        np.testing.assert_allclose(np.float32(actual), np.float32(expected), rtol=0.02, atol=0.004)
    for t in (0, 127, 128, 255, 256, 299):
        token = q[:, :, t : t + 1]
        # A cache with room behind the token, whose chunks nobody sees.
        made = cached(token, k, v, cache_seqlens=t + 1, **options)
        for actual, expected in zip(made, whole, strict=True):
            assert actual.tobytes() == expected[:, :, t : t + 1].tobytes(), f"token {t}"
    memo.forget()


@pytest.mark.parametrize("device", ["sm_80"], indirect=True)
@pytest.mark.parametrize("heads", [(6, 2), (5, 1)])
@pytest.mark.usefixtures("short_chunks")
def test_heads_of_a_group_share_a_tile_in_decode(
    on: Device, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a cache and without one, its chunks different blocks' and one's, beside another length."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, heads[0], 300, 32)).astype(np.float16)
    k, v = rng.standard_normal((2, 2, heads[1], 300, 32)).astype(np.float16)
    options: dict[str, Any] = {"causal": True, "return_lse": True, "softcap": 4.0, "reproducible": "batch"}
    whole = cupy_flash.attention(q, k, v, **options)
    for most, t in product((flash.MOST_PARTS_BYTES, 0), ((0, 299), (127, 128))):
        monkeypatch.setattr(flash, "MOST_PARTS_BYTES", most)
        memo.forget()
        tokens = np.stack([q[b, :, t[b] : t[b] + 1] for b in range(2)])
        used = np.array([x + 1 for x in t], np.int32)
        made = cached(tokens, k, v, cache_seqlens=used, **options)
        for b, (actual, expected) in product(range(2), zip(made, whole, strict=True)):
            assert actual[b].tobytes() == expected[b, :, t[b] : t[b] + 1].tobytes(), f"token {t[b]}"
    alone = cupy_flash.attention(
        q[:, :, 200:201], k, v, align=200, **options
    )  # where it does not see all keys
    for actual, expected in zip(alone, whole, strict=True):
        assert actual.tobytes() == expected[:, :, 200:201].tobytes()


@pytest.mark.parametrize(
    ("options", "shared"),
    [
        ({}, True),
        ({"softcap": 2.0}, True),
        ({"window": (8, 0)}, False),
        ({"sinks": np.zeros(4, np.float32)}, False),
        ({"alibi_slopes": np.ones(4, np.float32)}, False),
    ],
)
def test_heads_share_a_tile_where_only_q_differs(options: dict[str, Any], shared: bool) -> None:
    """Of prompts of one query; over a cache, the kernel of decode has rows of all heads of a group anyway."""
    q, k = np.zeros((1, 4, 1, 64), np.float16), np.zeros((1, 2, 4096, 64), np.float16)
    asked = {"arch": "sm_80", "causal": True, "align": "bottom_right", **options}
    said = [
        cupy_flash.explain(q, x, x, reproducible=mode, **asked)
        for mode, x in (("batch", k), (None, k), ("batch", k.repeat(2, 1)))
    ]
    assert ["2 heads share a tile" in text for text in said] == [shared, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["sm_80", "sm_75"], indirect=True)
@pytest.mark.usefixtures("short_chunks")
def test_chunks_in_any_company(on: Device) -> None:
    """Packed sequences, batches, pages; their chunks are not the same blocks' as those of one alone."""
    found = held("float16", lengths=(10, 127, 129, 300), chunks=(127, 129), pages=(16,), head_dim=32)
    assert found.same, str(found)
    assert not found.refused


@pytest.mark.slow
@pytest.mark.parametrize("device", ["sm_80"], indirect=True)
@pytest.mark.parametrize("keys", [2049, 4097])
def test_the_real_chunks(on: Device, keys: int) -> None:
    """Tokens about the end of 2048 or 4096 keys."""
    q, k, v = rows("float16", keys, 32)[:, :, :1]
    options: dict[str, Any] = {"causal": True, "reproducible": "batch"}
    last = cupy_flash.attention(q[:, :, -3:], k, v, align=keys - 3, **options)
    for back in (1, 2, 3):
        t = keys - back
        made = cached(q[:, :, t : t + 1], k, v, cache_seqlens=t + 1, **options)
        assert made.tobytes() == last[:, :, 3 - back : 4 - back].tobytes(), f"token {t}"
    text = cupy_flash.explain(
        q[:, :, :1], k, v, kv_cache={"cache_seqlens": keys}, arch="sm_80", reproducible="batch"
    )
    assert f"chunks    {-(-keys // 2048)} of 2048 keys, one per thread block" in text


@pytest.mark.slow
@pytest.mark.parametrize("device", ["sm_80", "sm_90a"], indirect=True)
def test_a_neighbours_prompt_of_10_tokens_instead_of_9(on: Device) -> None:
    """What vLLM's issue 51902 saw change."""
    rng = np.random.default_rng(0)
    mine = rng.standard_normal((3, 30, 2, 64), np.float32).astype(np.float16)

    def beside(length: int) -> bytes:
        other = rng.standard_normal((3, length, 2, 64), np.float32).astype(np.float16)
        q, k, v = np.concatenate([other, mine], axis=1)
        cuts = np.array([0, length, length + 30], np.int32)
        o = cupy_flash.attention_varlen(q, k, v, cuts, cuts, causal=True, reproducible="batch")
        return bytes(o[length:].tobytes())

    assert beside(9) == beside(10)


HOPPER: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": (70, 0), "head_dim": 128},
    "any": {"softcap": 4.0, **ROWS},
}


@pytest.mark.slow
@pytest.mark.parametrize("device", ["sm_90a"], indirect=True)
@pytest.mark.parametrize("name", HOPPER)
def test_prompts_on_hopper(on: Device, name: str) -> None:
    """ "prefill": its own kernels, whose tiles begin anywhere; tokens over a cache are another kernel's."""
    options = {"lengths": (10, 130, 330), "chunks": (9, 10, 64), "pages": (16,), **HOPPER[name]}
    found = held("float16", reproducible="prefill", **options)
    assert all(line.startswith("decode") for line in found.differences), str(found)
    assert not found.refused
    x = np.zeros((1, 2, 64, options.get("head_dim", 64)), np.float16)
    text = cupy_flash.explain(x, x, x, arch="sm_90a", causal=True, reproducible="prefill")
    assert "kernel    flash_forward_sm90" in text


@pytest.mark.slow
@pytest.mark.parametrize("device", ["sm_90a"], indirect=True)
def test_a_cache_has_one_order_on_hopper(on: Device) -> None:
    """Chunks of a prompt and tokens over a cache, in one piece and in pages, under "prefill"."""
    q, k, v = rows("float16", 150, 64)
    options: dict[str, Any] = {"causal": True, "reproducible": "prefill"}
    whole = cached(q, k, v, cache_seqlens=150, **options)
    for first, end in ((0, 9), (70, 150), (149, 150)):
        part = cached(q[:, :, first:end], k, v, cache_seqlens=end, **options)
        assert part.tobytes() == whole[:, :, first:end].tobytes()
    pages = [np.ascontiguousarray(x[0, :, :144].reshape(2, 9, 16, 64).swapaxes(0, 1)) for x in (k, v)]
    table = np.arange(9, dtype=np.int32)[None]
    part = cached(q[:, :, 140:144], *pages, cache_seqlens=144, block_table=table, **options)
    assert part.tobytes() == whole[:, :, 140:144].tobytes()


# ---------------------------------------------------------------------------------------------- hazards


def differs(**options: Any) -> list[str]:
    return list(held("float16", pages=(), **options).differences)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["sm_86"], indirect=True)
def test_blocks_that_need_masks_first(on: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that walks over keys in an order that the place of a tile decides."""
    monkeypatch.setattr(flash, "_mask", lambda _problem: "band")
    options = {"window": (70, 0), "lengths": (330,), "chunks": (9,)}
    assert any(line.startswith("chunk") for line in differs(**options))


@pytest.mark.slow
@pytest.mark.parametrize("device", ["sm_80"], indirect=True)
def test_keys_split_by_the_planner(on: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another family for few queries, whose parts follow batch and GPU."""
    monkeypatch.setattr(families.cached, "refusals", lambda _problem, _arch: ["not in this test"])
    for name in ("refusals", "plan"):
        asked = getattr(decode, name)
        monkeypatch.setattr(decode, name, lambda p, arch, f=asked: f(p._replace(reproducible=None), arch))
    assert any(line.startswith("decode") for line in differs(lengths=(65, 130), chunks=()))


@pytest.mark.slow
@pytest.mark.parametrize("device", ["sm_80"], indirect=True)
def test_chunks_of_the_planner(on: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks whose size follows the number of queries, as splits do."""
    q, k, v = rows("float16", 300, 32)
    options: dict[str, Any] = {"causal": True, "reproducible": "batch"}
    whole = cupy_flash.attention(q, k, v, **options)
    monkeypatch.setattr(flash, "CHUNK_KEYS", 128)
    memo.forget()
    token = cached(q[:, :, -1:], k, v, cache_seqlens=300, **options)
    assert token.tobytes() != whole[:, :, -1:].tobytes()


@pytest.mark.parametrize("device", ["sm_80"], indirect=True)
def test_heads_as_rows_of_what_differs_by_query(on: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that share a tile although a window hides keys from their query."""
    q, k, v = rows("float16", 100, 32)
    options: dict[str, Any] = {"causal": True, "window": (20, 0), "reproducible": "batch"}
    whole = cupy_flash.attention(q, k[:, :1], v[:, :1], **options)
    alike = flash.heads_share_keys
    monkeypatch.setattr(flash, "heads_share_keys", lambda p: alike(p._replace(left=None)))
    memo.forget()
    token = cupy_flash.attention(q[:, :, -1:], k[:, :1], v[:, :1], align=99, **options)
    assert token.tobytes() != whole[:, :, -1:].tobytes()


@pytest.mark.parametrize(
    ("device", "mode", "kernel"),
    [("sm_80", "batch", "flash_forward"), ("sm_90a", "prefill", "flash_forward_sm90")],
    indirect=["device"],
)
def test_a_neighbours_maximum_decides_nothing(on: Device, mode: str, kernel: str) -> None:
    """A row of the same warp whose maximum rises far in a later block, where those of others rise a little.

    That it would be seen is a mutant of flash_forward_sm90, whose rows keep a maximum that is exceeded by
    less than kRescaleThresholdLog2; the kernels of "batch" have no such threshold.
    """
    q, k, v = rows("float16", 400, 64)[:, :, :1]
    q = q[:, :, :16]
    far = q.copy()
    far[:, :, 8] = 4 * k[:, :, 300]
    assert f"kernel    {kernel}_" in cupy_flash.explain(q, k, v, arch=on.name, reproducible=mode)
    mine = np.arange(16) != 8
    made = (cupy_flash.attention(x, k, v, return_lse=True, reproducible=mode) for x in (far, q))
    for actual, expected in zip(*made, strict=True):
        assert actual[:, :, mine].tobytes() == expected[:, :, mine].tobytes()
        assert actual[:, :, 8].tobytes() != expected[:, :, 8].tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("device", ["sm_80"], indirect=True)
def test_pages_by_another_kernel(on: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask for keys without a page, where a cache in one piece has none."""
    mask = flash._mask
    monkeypatch.setattr(decode, "refusals", lambda _problem, _arch: ["not in this test"])
    monkeypatch.setattr(flash, "_mask", lambda problem: mask(problem._replace(reproducible=None)))
    found = held("float16", lengths=(130,), chunks=())
    assert any(line.startswith("decode over pages") for line in found.differences)


# ---------------------------------------------------------------------------------------------- plans


def text(arch: str, dtype: str = "float16", head_dim: int = 64, seqlen: int = 64, **options: Any) -> str:
    x = np.zeros((1, 4, seqlen, head_dim), DTYPES[dtype])
    return cupy_flash.explain(x, x, x, arch=arch, **{"reproducible": "batch", **options})


@pytest.mark.parametrize("arch", [row.name for row in ARCHITECTURES])
@pytest.mark.parametrize("head_dim", [32, 96, 128, 192, 256, 300])
def test_one_kernel_whatever_the_options_and_lengths(arch: str, head_dim: int) -> None:
    def kernels(**options: Any) -> list[str]:
        lines = text(arch, head_dim=head_dim, **options).splitlines()
        return [line for line in lines if line.startswith("kernel ")]

    one = kernels()
    assert all(
        kernels(**options) == one
        for options in ({"causal": True}, {"seqlen": 1}, {"seqlen": 4096}, {"mask": np.ones((64, 64), bool)},
                        {"softcap": 2.0}, {"scale": -1.0}, {"window": (8, 8)})
    )  # fmt: skip
    if head_dim <= 256 and one[0].split()[1].startswith("flash"):
        ragged = {"cache_seqlens": 64, "cache_leftpad": np.zeros(1, np.int32)}
        assert one[0] in text(arch, head_dim=head_dim, seqlen=64, kv_cache=ragged).splitlines()


def test_kernels_of_every_option_walk_over_keys_in_one_order() -> None:
    for (kind, mask), rows in flash_tiles.FORWARD.items():
        if mask == "any":
            assert all(cell is None or cell.loops == 1 for row in rows for cell in row), kind
    assert all(cell.loops == 1 for key, cell in flash_tiles.FORWARD_OF.items() if key[2] == "any")


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_gpu_at_hand_and_its_load_decide_nothing(direction: str, arch: str) -> None:
    """Neither multiprocessors nor batch choose a kernel."""

    def kernels(batch: int, multiprocessors: int) -> list[str]:
        x = np.zeros((batch, 4, 96, 64), np.float16)
        given = dict.fromkeys(("q", "k", "v", "o", "do"), x) | {"lse": np.zeros(x.shape[:3], np.float32)}
        asked = given if direction == "backward" else {name: given[name] for name in "qkv"}
        problem, *_ = describe(direction, asked, Options(reproducible="batch"))
        assert problem.deterministic == (direction == "backward")
        return [launch.variant.name for launch in choose(problem, arch, multiprocessors).launches]

    assert kernels(1, 1) == kernels(1, 200) == kernels(64, 16)


def test_what_has_no_registers_for_chunks_lays_them_into_memory() -> None:
    """Of float32 and head dim 256; what is too much for that is refused."""
    x = np.zeros((1, 2, 2049, 256), np.float32)
    for arch in ("sm_86", "sm_100", "sm_120"):
        asked = {"arch": arch, "reproducible": "batch"}
        assert "2 of 2048 keys, one per thread block" in cupy_flash.explain(x, x, x, **asked)
        many = x.repeat(8, 1)
        with pytest.raises(
            UnsupportedError, match="too few registers to combine chunks of 2048 keys at head_dim"
        ):
            cupy_flash.explain(many, many, many, **asked)
    cupy_flash.explain(many, many, many, arch="sm_80", reproducible="batch")


@pytest.mark.slow
@pytest.mark.parametrize("device", ["sm_86"], indirect=True)
@pytest.mark.usefixtures("short_chunks")
def test_chunks_that_are_different_blocks_only(on: Device) -> None:
    q, k, v = rows("float32", 150, 200)
    options: dict[str, Any] = {"causal": True, "return_lse": True, "reproducible": "batch"}
    whole = cupy_flash.attention(q[:, :, 100:], k, v, align=100, **options)
    plain = cupy_flash.attention(q[:, :, 100:], k, v, align=100, causal=True)
    np.testing.assert_allclose(whole[0], plain, rtol=1e-4, atol=1e-5)
    for t in (127, 128, 149):
        token = q[:, :, t : t + 1]
        made = cached(token, k, v, cache_seqlens=t + 1, **options)
        for actual, expected in zip(made, whole, strict=True):
            assert actual.tobytes() == expected[:, :, t - 100 : t - 99].tobytes(), f"token {t}"


@pytest.mark.parametrize(
    ("dtype", "options", "says"),
    [
        ("float16", {}, "has the same bits on every device for float32 and float64, not float16"),
        ("float32", {"precision": "tf32x3"}, "computes in IEEE float32, not tf32x3"),
        ("float32", {"score": ALIBI(np.zeros(4, np.float32))}, "exponentials of score functions differ"),
        ("float32", {"head_dim": 520}, "head_dim 520 is above 512"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("arch", ["sm_61", "sm_90a"])
def test_what_is_not_the_same_everywhere_is_refused(
    arch: str, dtype: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(UnsupportedError, match=says):
        text(arch, dtype, reproducible="device", **options)


def test_a_cache_that_rotates_is_refused_for_every_gpu() -> None:
    x, turn = np.zeros((1, 2, 1, 64), np.float32), np.zeros((64, 8), np.float32)
    cache = np.zeros((1, 2, 64, 64), np.float32)
    asked = {"cache_seqlens": 8, "k": x, "v": x, "rotary": cupy_flash.Rotary(turn, turn)}
    with pytest.raises(UnsupportedError, match="rotates by sums of products"):
        cupy_flash.explain(x, cache, cache, arch="sm_80", reproducible="device", kv_cache=asked)
    cupy_flash.explain(
        x, cache, cache, arch="sm_80", reproducible="device", kv_cache={"cache_seqlens": 8, "k": x, "v": x}
    )


@pytest.mark.parametrize(
    ("arch", "arrays", "says"),
    [
        ("sm_80", lambda x: x[..., ::2], "adds in another order than flash"),
        ("sm_90a", lambda x: x[..., ::2], "adds in another order than flash"),
        ("sm_90a", lambda x: x[..., 1:65], "adds in another order than hopper"),
    ],
)
def test_how_arrays_lie_does_not_choose_another_order(arch: str, arrays: Any, says: str) -> None:
    x = arrays(np.zeros((1, 2, 64, 128), np.float16))
    with pytest.raises(UnsupportedError, match=says) as caught:
        cupy_flash.explain(x, x, x, arch=arch, reproducible="prefill" if "hopper" in says else "batch")
    assert "Try: reproducible=None" in str(caught.value)


def test_what_a_cache_cannot_keep_is_refused() -> None:
    q, codes = np.zeros((1, 2, 1, 64), np.float16), np.zeros((1, 2, 64, 64), np.int8)
    cache: Any = cupy_flash.QuantizedCache(codes, np.ones(2, np.float32))
    with pytest.raises(UnsupportedError, match="splits keys by the batch and the GPU"):
        cupy_flash.explain(
            q, cache, cache, arch="sm_80", reproducible="batch", kv_cache={"cache_seqlens": 64}
        )
    cache = np.zeros((1, 2, 64, 64), np.float16)
    with pytest.raises(UnsupportedError, match=r"tuning\.splits=2 is asked for"):
        cupy_flash.explain(
            q, cache, cache, arch="sm_80", reproducible="batch",
            kv_cache={"cache_seqlens": 64, "tuning": cupy_flash.Tuning(splits=2)},
        )  # fmt: skip

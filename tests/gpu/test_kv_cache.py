"""attention_with_kv_cache on CuPy arrays: the cases of tests/simulator, and a CUDA graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupy_flash import testing
from tests.checks import Device
from tests.kv_cases import KvCase, cases, check
from tests.public import cached
from tests.simulator import test_int4 as int4
from tests.simulator import test_nvfp4 as nvfp4

# CuPy has no bfloat16; float8 goes by its bits.
_WIDE = {"head_dims": ((64, 64), (128, 96), (256, 256)), "rotary": (0, 32, 64)}
CASES = [
    *cases(dtype=("float16",), **_WIDE),
    *cases(dtype=("float32",), stored=("same",), **_WIDE),
    KvCase(lengths=(5000, 1, 4000), room=5120, heads=(8, 1)),
    KvCase(latent=True, head_dims=(576, 512), heads=(16, 1), lengths=(5000, 1, 4000), room=5120, new=1),
    KvCase(
        latent=True,
        head_dims=(576, 512),
        heads=(20, 1),
        queries=2,
        causal=True,
        kind="paged",
        page=64,
        lengths=(2048, 77, 0),
        room=2048,
        new=2,
    ),
    KvCase(latent=True, head_dims=(576, 512), heads=(128, 1), kind="paged", page=7, room=700, splits=3),
    *(
        KvCase(
            latent=True,
            head_dims=(576, 512),
            heads=(heads, 1),
            queries=queries,
            causal=True,
            kind=kind,
            page=64,
            lengths=(4096, 77, 0),
            room=4096,
            new=queries,
            sinks=True,
        )
        for heads, queries, kind in ((64, 1, "paged"), (128, 2, "paged"), (20, 4, "contiguous"))
    ),
    *(
        KvCase(
            latent=True,
            head_dims=(576, 512),
            heads=(heads, 1),
            queries=queries,
            causal=True,
            stored=stored,
            kind=kind,
            page=64,
            lengths=(2048, 77, 0),
            room=2048,
            new=queries,
        )
        for stored, heads, queries, kind in (
            ("int8", 16, 1, "contiguous"),
            ("e4m3", 20, 1, "paged"),
            ("int8", 128, 2, "paged"),
        )
    ),
    KvCase(kind="paged", page=64, lengths=(8192, 77, 3000), room=8192, heads=(32, 4), head_dims=(128, 128)),
    *(
        KvCase(
            head_dims=(512, 512), heads=(16, 2), queries=queries, causal=True, stored=stored, new=1, **more
        )
        for queries, stored, more in (
            (1, "same", {"lengths": (5000, 1, 4000), "room": 5120}),
            (1, "int8", {"kind": "paged", "page": 64, "room": 5120, "lengths": (5000, 77, 0)}),
            (4, "e4m3", {"kind": "paged", "page": 7, "room": 700}),
            (5, "same", {"lengths": (2000, 700, 3), "room": 2048, "kind": "paged", "splits": 3}),
            (130, "same", {"lengths": (2000, 700, 3), "room": 2048, "kind": "paged"}),
        )
    ),
    KvCase(head_dims=(384, 264), heads=(8, 1), kind="indexed", window=(300, None), room=640),
]

pytestmark = pytest.mark.gpu


@pytest.mark.sampled(24)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_parity(case: KvCase, device: Device) -> None:
    check(case, device)


def test_selected_keys(device: Device) -> None:
    """Of latents; each query is a sequence of its own, and has the scales of the one that it was of."""
    case = KvCase(latent=True, head_dims=(576, 512), heads=(16, 1), stored="int8", scales="bh", selected=45,
                  integers="int64", queries=2, causal=True, kind="paged")  # fmt: skip
    check(case, device)


@pytest.mark.parametrize(
    ("of", "name"),
    [
        pytest.param(of, name, id=f"{of.__name__.rpartition('_')[2]} {name}")
        for of in (int4, nvfp4)
        for name, (_, _, kinds, _) in of.CASES.items()
        if kinds.get("dtype") != "bfloat16"  # CuPy has none
    ],
)
def test_four_bits(of: Any, name: str, device: Device) -> None:
    """The cases of the simulator: codes of int4 are subnormal halves, which tensor cores multiply exactly."""
    _, _, kinds, options = of.CASES[name]
    of.check(kinds, options, device)


def test_shared_prefix(device: Device) -> None:
    """As if it lay before every sequence; a window begins in it, and lengths are read on the GPU only."""
    case = KvCase(lengths=(5, 30), room=32, queries=2, heads=(4, 2))
    made = case.inputs()
    rng = np.random.default_rng(0)
    prefix = {f"prefix_{x}": rng.standard_normal((2, 24, 64)).astype(np.float16) for x in "kv"}
    whole = {
        f"{x}_cache": np.concatenate(
            [np.repeat(prefix[f"prefix_{x}"][None], 2, 0), made[f"{x}_cache"]], axis=2
        )
        for x in "kv"
    }
    lengths = made["cache_seqlens"] + np.int32(24)
    expected = testing.reference_with_kv_cache(**made | whole | {"cache_seqlens": lengths}, window=(20, None))
    given = {name: device.array(x) for name, x in (made | prefix).items()}
    o = cached(**given, window=(20, None))
    np.testing.assert_allclose(testing.to_numpy(o).astype(np.float64), expected.o, atol=4e-3)


@pytest.mark.parametrize("value", [-(2**31), -1, 2**31 - 1])
def test_hostile_tables(value: int, device: Device) -> None:
    """Nothing outside the cache is touched, and keys without a place are hidden."""
    case = KvCase(kind="paged", new=3, rotary=32, causal=True, lengths=(16, 37, 150), splits=2)
    made = case.inputs()
    made["block_table"][0, 1] = made["block_table"][1] = made["block_table"][2, 4] = value
    made["cache_seqlens"][...] = (16, value, 150)
    expected = testing.reference_with_kv_cache(**made, **case.options())
    given = {name: device.array(x) for name, x in made.items()}
    o = cached(**given, **case.options(), splits=2)
    np.testing.assert_allclose(testing.to_numpy(o).astype(np.float64), expected.o, atol=4e-3)


def test_cuda_graph(device: Device) -> None:
    """Recorded once, replayed with other lengths and tables: the host reads neither."""
    cupy: Any = device.xp
    case = KvCase(kind="paged", lengths=(70, 3, 100), new=1, rotary=32, causal=True, splits=2)
    made = case.inputs()
    given = {name: device.array(x) for name, x in made.items()}
    out = cupy.empty(made["q"].shape, np.float16)
    workspace = cupy.empty(1 << 20, cupy.uint8)
    call = {**given, **case.options(), "splits": 2, "out": out, "workspace": workspace}
    cached(**call)  # loads the kernels
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        cached(**call)
        graph = stream.end_capture()
        for lengths in ((70, 3, 100), (1, 159, 16)):
            made["cache_seqlens"][...] = lengths
            made["block_table"][...] = made["block_table"][:, ::-1].copy()
            for name, x in made.items():
                given[name].set(x)
            graph.launch(stream)
            stream.synchronize()
            expected = testing.reference_with_kv_cache(**made, **case.options())
            np.testing.assert_allclose(testing.to_numpy(out).astype(np.float64), expected.o, atol=4e-3)

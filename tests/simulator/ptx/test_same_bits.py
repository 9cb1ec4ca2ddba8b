"""reproducible="device": the bits of sources, and of their PTX for every architecture.

Neither PTX nor SASS holds an operation that an architecture rounds in its own way.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash.cubins import nvrtc, sass, sources
from cupy_flash.cubins.compile import compile_variant
from cupy_flash.dispatch import memo
from cupy_flash.plan import families
from cupy_flash.plan.catalog import ARCHITECTURES, SAME_BITS, Variant
from cupy_flash.plan.families import simple
from tests.simulator.ptx import toolchain
from tests.simulator.ptx.backend import Build, kernels_from_ptx
from tests.simulator.ptx.conftest import need
from tests.simulator.units import SIMULATED

pytestmark = SIMULATED

# A compiler for each architecture, in turn, and both where code differs most.
BUILDS = [Build("sm_61", 12), Build("sm_70", 12), Build("sm_75", 13), Build("sm_80", 12), Build("sm_80", 13),
          Build("sm_86", 13), Build("sm_90a", 12), Build("sm_100", 13), Build("sm_120", 12),
          Build("sm_120", 13)]  # fmt: skip
VARIANTS = {v.name: v for v in families.variants("sm_80") if v.dtype in SAME_BITS.values()}


def outcome(dtype: str, head_dim: int, reproducible: str | None = "device") -> dict[str, bytes]:
    """Bits of results, gradients, and a token over pages, with whatever touches a score."""
    rng = np.random.default_rng(head_dim)

    def random(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(dtype)

    q, do = random(1, 2, 70, head_dim), random(1, 2, 70, head_dim)
    k, v = random(1, 1, 75, head_dim), random(1, 1, 75, head_dim)
    rules: dict[str, Any] = {"causal": True, "softcap": 3.0, "sinks": random(2), "reproducible": reproducible}
    rules["precision"] = "ieee" if dtype == "float32" else None
    more = {
        "align": 5,
        "bias": random(1, 2, 70, 75),
        "alibi_slopes": abs(random(2)),
        "mask": rng.random((70, 75)) < 0.9,
    }
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **rules, **more)
    gradients = cupy_flash.attention_backward(do, q, k, v, o, lse, **rules, **more)
    pages = [
        np.ascontiguousarray(np.moveaxis(x[:, :, :64].reshape(1, 16, 4, head_dim), 0, 1)) for x in (k, v)
    ]
    token = cupy_flash.attention_with_kv_cache(
        q[:, :, :1], *(x.repeat(4, 2) for x in pages), cache_seqlens=50,
        block_table=np.arange(16, dtype=np.int32)[None, ::-1].copy(), **rules,
    )  # fmt: skip
    wanted = {name: x for name, x in gradients._asdict().items() if x is not None}
    named = {"o": o, "lse": lse, **wanted, "token": token}
    assert all(np.isfinite(x).all() for x in named.values())
    return {name: x.tobytes() for name, x in named.items()}


def simulated(*args: Any) -> dict[str, bytes]:
    memo.forget()
    return outcome(*args)


CASES = [(one, dtype, 40) for one in BUILDS for dtype in SAME_BITS]
CASES += [(BUILDS[n], dtype, d) for n, (d, dtype) in enumerate(
    (d, dtype) for d in (100, 200, 300) for dtype in SAME_BITS)]  # fmt: skip


# why in turn: what an architecture might round in its own way is looked for in all of them, below.
@pytest.mark.in_turn(2)
@pytest.mark.sampled(13)
@pytest.mark.parametrize(("one", "dtype", "head_dim"), CASES, ids=lambda x: str(x))
def test_source_and_ptx_have_the_same_bits(
    one: Build,
    dtype: str,
    head_dim: int,
    monkeypatch: pytest.MonkeyPatch,
    count: Callable[[str, object], None],
) -> None:
    need(one.cuda)
    monkeypatch.setenv("CUPY_FLASH_DRIVER", "simulator:sm_90a")
    expected = simulated(dtype, head_dim)
    monkeypatch.setenv("CUPY_FLASH_DRIVER", f"simulator:{one.target}")
    with kernels_from_ptx(one.cuda) as used:
        found = outcome(dtype, head_dim)
    assert [name for name in expected if found[name] != expected[name]] == []
    of_scores = {v.name for v, _ in used if "gather" not in v.name and "append" not in v.name}
    assert of_scores <= VARIANTS.keys()
    assert len(of_scores) == 6
    for name in of_scores:
        count("variants whose PTX has the bits of its source", name)


# ---------------------------------------------------------------------------------------------- operations

# Operations of floating point, and what says how they are rounded.
_ARITHMETIC = re.compile(
    r"\b(?:add|sub|mul|mad|fma|div|rcp|sqrt|rsqrt|ex2|lg2|sin|cos|tanh)\.[\w.]*f(?:32|64)\b"
)


def left_to_an_architecture(ptx: str) -> set[str]:
    """Instructions of floating point that are not rounded to nearest, or may be contracted."""
    return {found for found in _ARITHMETIC.findall(ptx) if ".rn.f" not in found or found.startswith("mad")}


def of_each_kernel(number: int) -> list[Variant]:
    """A class of head dims, in turn: classes do the same operations, another number of times."""
    kernels: dict[tuple[str, str, str], list[Variant]] = {}
    for variant in VARIANTS.values():
        kernels.setdefault((variant.source, variant.step, variant.dtype), []).append(variant)
    return [classes[number % len(classes)] for classes in kernels.values()]


def test_every_class_has_its_turn() -> None:
    assert {v.name for number in range(len(BUILDS)) for v in of_each_kernel(number)} == VARIANTS.keys()


@pytest.mark.sampled(10)
@pytest.mark.parametrize("one", BUILDS, ids=str)
def test_ptx_leaves_nothing_to_an_architecture(one: Build) -> None:
    need(one.cuda)
    for variant in of_each_kernel(BUILDS.index(one)):
        text = toolchain.ptx(variant, *one).read_text()
        assert ".ftz" not in text
        assert "approx" not in text
        assert left_to_an_architecture(text) == set(), variant.name
        products = f"fma.rn.{'f64' if variant.dtype == 'ieee64' else 'f32'}"
        assert variant.step == "dsinks" or products in text


@pytest.mark.skipif(sass.disassembler() is None, reason=f"no nvdisasm: pip install {sass.REQUIREMENT}")
@pytest.mark.sampled(5)
@pytest.mark.parametrize("one", [one for one in BUILDS if one.target not in ("sm_61", "sm_70")], ids=str)
def test_sass_approximates_nothing(one: Build, tmp_path: Path) -> None:
    """Reciprocals begin divisions, which IEEE rounds, and a root of no number ends those of no number.

    Of sm_61 and sm_70 nvdisasm 13 reads nothing; PTX of sources without approximations has none either.
    """
    need(one.cuda)
    compiler = nvrtc.Compiler(one.cuda)
    for name in ("simple_forward_ieee32_d64_any_64x64", "simple_backward_dkv_ieee64_d64_any_32x64"):
        _, refused, _ = compile_variant(compiler, VARIANTS[name], one.target, tmp_path)
        assert not refused
        listing = sass.disassemble(tmp_path / f"{name}.cubin")
        special = {x.form for x in listing.instructions if x.name == "MUFU" and x.operands[1] != "-QNAN"}
        assert special <= {".RCP", ".RCP64H"}, f"{name}: {special}"
        fused = "DFMA" if "ieee64" in name else "FFMA"
        assert sum(x.name == fused for x in listing.instructions) > 100


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_one_kernel_on_every_architecture(direction: str) -> None:
    x = np.zeros((1, 2, 64, 40), np.float32)
    texts = [
        cupy_flash.explain(x, x, x, arch=row.name, direction=direction, reproducible="device")
        for row in ARCHITECTURES
    ]
    kernels = [[line for line in text.splitlines() if line.startswith("kernel ")] for text in texts]
    assert kernels.count(kernels[0]) == len(kernels)
    assert all("ieee32" in line for line in kernels[0])


# ---------------------------------------------------------------------------------------------- hazards


def test_contraction_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that may make one operation of two."""
    variant = VARIANTS["simple_backward_dq_ieee32_d64_any_64x64"]
    common = sources.common
    monkeypatch.setattr(
        sources, "common", lambda defines: [x for x in common(defines) if x != "--fmad=false"]
    )
    assert left_to_an_architecture(toolchain.ptx_of(variant, "sm_80", 12))


@pytest.mark.slow
def test_exponentials_of_the_hardware_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = next(v for v in families.variants("sm_80") if v.name == "simple_forward_f32_d64_any_64x64")
    assert any(
        x.startswith("ex2.approx") for x in left_to_an_architecture(toolchain.ptx_of(plain, "sm_80", 12))
    )
    monkeypatch.setenv("CUPY_FLASH_DRIVER", "simulator:sm_61")
    assert simulated("float32", 40)["o"] != simulated("float32", 40, None)["o"]


def test_a_tile_of_an_architecture_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer keys of a block, as for one with little shared memory."""
    monkeypatch.setenv("CUPY_FLASH_DRIVER", "simulator:sm_86")
    expected = simulated("float32", 40)
    floats, doubles = simple._TILES["forward"]
    monkeypatch.setitem(simple._TILES, "forward", (((64, 32, 23040), *floats[1:]), doubles))
    found = simulated("float32", 40)
    memo.forget()
    assert found["o"] != expected["o"]

"""The cost model: counts that theory knows, a table that fits the catalogue, lines beside a measurement."""

from __future__ import annotations

import shutil

import pytest

from bench import __main__ as command
from bench import cost_model, counting, rates
from bench.work import Case
from cupy_flash.families import variants


def test_the_table_is_of_kernels_that_exist() -> None:
    assert counting.table()
    for target, name in counting.table():
        assert name in {variant.name for variant in variants(target)}, "python -m bench cost --count"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_products_are_those_of_theory(head_dim: int) -> None:
    case = Case(1, 1, 4096, head_dim, "bfloat16")
    for passes, products in (("forward", 4), ("backward", 10)):
        names = [launch.variant.name for launch in case._replace(passes=passes).plan("sm_80").launches]
        counted = [counting.table()["sm_80", name].get("mma_flops", (0.0, 0.0)) for name in names]
        assert sum(per_pair for _, per_pair in counted) == pytest.approx(products * head_dim)
        assert sum(per_row for per_row, _ in counted) == pytest.approx(0, abs=1e-3)


def test_one_exp_for_each_pair() -> None:
    case = Case(1, 1, 4096, 64, "bfloat16")
    (launch,) = case.plan("sm_80").launches
    _, per_pair = counting.table()["sm_80", launch.variant.name]["exps"]
    assert 1 <= per_pair < 1.15  # and the rescaling of a row for each tile of keys


@pytest.mark.simulator
@pytest.mark.skipif(shutil.which("g++") is None, reason="the simulator compiles kernels with g++")
def test_counts_are_those_of_the_simulator() -> None:
    found = counting.counted("sm_80", Case(1, 1, 1024, 64, "bfloat16"))
    for name, counts in found.items():
        for counter, pair in counts.items():
            kept = counting.table()["sm_80", name][counter]
            assert pair == pytest.approx(kept, rel=1e-4, abs=1e-6), "python -m bench cost --count"


def test_causal_pairs_are_whole_tiles() -> None:
    case = Case(1, 1, 256, 64, "bfloat16", causal=True)
    (launch,) = case.plan("sm_80").launches
    m, n = launch.variant.tile
    tiles = sum(1 for i in range(0, 256, m) for j in range(0, 256, n) if j < i + m)
    assert cost_model._pairs(case, launch.variant) == tiles * m * n


def test_lines_beside_a_measurement() -> None:
    case = Case(4, 16, 4096, 128, "bfloat16")
    (cost,) = cost_model.of_case(case, "sm_80", rates.known("NVIDIA A100-SXM4-80GB"))
    assert cost.bound == "tensor"
    assert cost.seconds["tensor"] == pytest.approx(case.flops() / 312e12, rel=0.01)
    first, second = cost_model.beside(case, "sm_80", "NVIDIA A100-SXM4-80GB", 2 * cost.overlapped)
    assert "A100, published rates" in first
    assert "bound by tensor; measured is 2.00 x that" in second
    assert cost_model.beside(case, "sm_80", "Unheard-of GPU", 1.0) == []
    assert cost_model.beside(case._replace(dtype="float64"), "sm_80", "A100", 1.0) == []


def test_projections_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["cost", "--gpu", "A100"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("PROJECTION")
    assert "nothing here was measured" in text
    assert command.main(["cost", "--gpu", "Voodoo"]) == 2

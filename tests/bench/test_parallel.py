"""The model of sequences over several GPUs: its bytes are counted, its table is that of docs/parallel.md."""

from __future__ import annotations

import math

import pytest

from bench.commands import agreement
from bench.commands import parallel as command
from bench.measure import results
from bench.model.parallel import HOPPER, PASSES, SCHEDULES, Sequence, seconds
from cupy_flash.parallel.mpi import ring_attention, ring_attention_backward
from cupy_flash.parallel.traffic import sent
from tests.communicator import in_threads
from tests.paths import ROOT
from tests.schedule_cases import Case

MODEL = Sequence(tokens=131_072, heads=64, heads_k=8, head_dim=128, ranks=8)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bytes_are_those_that_are_sent(schedule: str, ranks: int) -> None:
    case = Case((16, 16), heads=(8, 4), dims=(8, 4), dtype="float16", options={"schedule": schedule})

    def counted(comm):
        x, options = case.part(comm.rank, ranks)
        o, lse = ring_attention(x["q"], x["k"], x["v"], comm, **options)
        forward = comm.sent
        ring_attention_backward(x["do"], x["q"], x["k"], x["v"], o, lse, comm, **options)
        keys = x["k"].nbytes + x["v"].nbytes
        part = {"Q": x["q"].nbytes, "O": o.nbytes, "L": lse.nbytes, "KV": keys, "KV32": 2 * keys}
        return part, forward, comm.sent - forward

    for part, *found in in_threads(ranks, counted):
        assert found == [sent(schedule, passes, ranks, part) for passes in PASSES]


def test_a_sequence_has_the_bytes_of_its_arrays() -> None:
    part = MODEL.bytes_of_part()
    assert part["Q"] == 2 * 64 * 16_384 * 128
    assert part["KV"] == 2 * 2 * 8 * 16_384 * 128
    assert part["L"] == 4 * 64 * 16_384


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("passes", PASSES)
def test_time_is_work_and_what_it_does_not_hide(schedule: str, passes: str) -> None:
    def rate(_passes: str, _rows: float) -> float:
        return 1e15

    work = MODEL.flops(passes) / 1e15
    at_once = HOPPER._replace(inside=math.inf, seconds=0.0)
    assert seconds(schedule, passes, MODEL, rate, at_once) == pytest.approx(work)
    assert seconds(schedule, passes, MODEL._replace(ranks=1), rate) == pytest.approx(8 * work)
    slow = HOPPER._replace(inside=1e9, seconds=0.0)
    bytes_alone = sent(schedule, passes, 8, MODEL.bytes_of_part()) / 0.8e9
    found = seconds(schedule, passes, MODEL, rate, slow)
    assert found is not None
    assert bytes_alone < found <= (bytes_alone + work) * 1.001
    # Of two nodes the network between them is the slowest link.
    two = seconds(schedule, passes, MODEL._replace(ranks=16, heads_k=16), rate, slow._replace(between=1e8))
    assert two is not None
    assert two > found


def test_heads_that_do_not_divide_are_left_out() -> None:
    assert seconds("alltoall", "forward", MODEL._replace(ranks=16), command.rate) is None
    assert seconds("allgather", "forward", MODEL._replace(ranks=16), command.rate) is not None


def test_rates_lie_between_those_measured() -> None:
    for passes in PASSES:
        points = dict(command._measured(passes))
        assert {512, 16_384} <= set(points)
        assert command.rate(passes, 1) == points[512] * 1e12
        assert command.rate(passes, 1e9) == points[16_384] * 1e12
        between = sorted((points[1024], points[2048]))
        assert between[0] * 1e12 <= command.rate(passes, 1500) <= between[1] * 1e12


def test_the_page_has_the_table() -> None:
    text = (ROOT / "docs" / "parallel.md").read_text(encoding="utf-8")
    assert command.table() in text, "python -m bench parallel prints the table of docs/parallel.md"


def test_a_comparison_takes_little_of_a_step() -> None:
    """At most 1 % of the newest rows, with one in each pass; the page says what they say."""
    newest: dict[str, float] = {}
    for row in results.read(results.RESULTS / agreement.FILE):
        newest[row["what"]] = float(row["ms"])
    each, step = (newest[what] for what in (agreement.COMPARISON, agreement.STEP))
    assert 0 < 2 * each / step < 0.01
    text = " ".join((ROOT / "docs" / "parallel.md").read_text(encoding="utf-8").split())
    assert f"A comparison took {each:.2f} ms over gloo" in text
    assert f"with two comparisons in it, {step / 1e3:.2f} s (" in text
    assert f"`python -m bench agreement`): {200 * each / step:.2f} %." in text

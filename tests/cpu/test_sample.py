"""The day's sample of large tables: as large as it says, another one each day, and every case comes up."""

from __future__ import annotations

import pytest

from tests.conftest import drawn

CASES = [f"tests/test_x.py::test_features[case {n}]" for n in range(400)]


@pytest.mark.parametrize("part", [2, 4, 8])
def test_a_sample_is_one_in_so_many(part: int) -> None:
    for day in range(1, 29):
        assert 0.6 < part * sum(drawn(case, part, f"2026-11-{day:02}") for case in CASES) / len(CASES) < 1.4


@pytest.mark.parametrize("one_in", [1, 2, 3, 5])
@pytest.mark.parametrize("part", [3, 16, 64])
def test_of_the_cases_beside_the_sample_one_in_so_many_is_drawn(one_in: int, part: int) -> None:
    day = "2026-11-26"
    sample = {case for case in CASES if drawn(case, part, day)}
    more = {case for case in CASES if drawn(case, part, day, one_in)}
    assert sample <= more
    assert 0.7 < one_in * len(more - sample) / (len(CASES) - len(sample)) < 1.3


def test_every_case_comes_up_within_two_months() -> None:
    days = [f"2027-{month:02}-{day:02}" for month in (1, 2) for day in range(1, 29)]
    assert all(any(drawn(case, 4, day) for day in days) for case in CASES)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", range(30))
def test_what_is_not_drawn_is_slow(case: int, request: pytest.FixtureRequest) -> None:
    slow = request.node.get_closest_marker("slow") is not None
    assert slow != drawn(request.node.nodeid, 3, request.config.option.sample)

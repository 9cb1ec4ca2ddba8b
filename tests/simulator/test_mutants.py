"""The table of mutants is complete, nothing survives, and for one kernel it is what the tests show now."""

from __future__ import annotations

import pytest

from tests.simulator import mutate
from tests.simulator.units import SIMULATED

pytestmark = SIMULATED
TABLE = [line.split("\t") for line in mutate.TABLE.read_text().splitlines()]


@pytest.mark.parametrize("name", mutate.SUBJECTS)
def test_table_lists_every_call(name: str) -> None:
    listed = [tuple(row[1:4]) for row in TABLE if row[0] == name]
    found = mutate.mutants(mutate.SUBJECTS[name])
    calls = [(mutant.name, mutant.call, str(mutant.number)) for mutant in found]
    assert listed == calls, f"if meant: python -m tests.simulator.mutate {name}"


def test_nothing_survives() -> None:
    assert not [row for row in TABLE if row[4] == "SURVIVES"]


def test_every_equivalent_has_its_line() -> None:
    listed = {(row[1], row[2], int(row[3])) for row in TABLE if row[4].startswith("equivalent")}
    assert listed == set(mutate.EQUIVALENT)


@pytest.mark.slow
def test_table_of_one_kernel_is_true() -> None:
    name = "simple_forward"
    assert mutate.table(name) == ["\t".join(row) for row in TABLE if row[0] == name]

"""`bench overhead` on a GPU: a row for each way to the driver; without CuPy one, and a sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch

from bench.commands import overhead
from cupy_flash.device import choice, cuda
from tests.virtual_gpu import install


@pytest.fixture(autouse=True)
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call runs once: what it takes here says nothing."""

    def call_us(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        for call in calls.values():
            call()
        return dict.fromkeys(calls, 1.0)

    monkeypatch.setattr(overhead, "_call_us", call_us)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_without_cupy(capsys: pytest.CaptureFixture[str]) -> None:
    launched = install.library().virtual_gpu_launched()
    (row,) = overhead._by_either_driver()
    assert row.what == "attention on a GPU to return, by the driver's own library"
    assert install.library().virtual_gpu_launched() == launched + 1
    assert capsys.readouterr().out.endswith("not installed. A call by CuPy is left out\n")


def test_each_row_is_of_its_own_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the module that calls CuPy, which computes through the same library."""
    taken = []

    class Driver:
        def __getattr__(self, name: str) -> object:
            if name == "current_stream":
                taken.append("CuPy")
            return getattr(cuda, name)

    monkeypatch.setattr(overhead, "driver", Driver())
    rows = overhead._by_either_driver()
    assert [row.what.partition(", by ")[2] for row in rows] == ["CuPy", "the driver's own library"]
    assert taken == ["CuPy"]
    assert choice.gpu_driver("torch") is cuda


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(overhead.Missing, match="torch sees no GPU"):
        overhead._by_either_driver()

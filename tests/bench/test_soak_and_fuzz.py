"""A slice of the fuzz, a slice of the soak, and that both would notice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupy_flash
from bench import __main__ as command
from bench.commands import fuzz, soak
from cupy_flash import Unsupported


def test_three_thousand_calls_with_nonsense(capsys: pytest.CaptureFixture[str]) -> None:
    """Other calls than the 100,000 of `python -m bench fuzz`."""
    assert command.main(["fuzz", "--count", "3000", "--seed", "1000000"]) == 0
    text = capsys.readouterr().out
    assert "something else" not in text
    assert "a result" in text
    assert "InvalidArguments" in text


def test_every_right_call_is_right() -> None:
    """Otherwise the fuzz would look at the first mistake only."""
    for name, arguments in fuzz.GOOD.items():
        getattr(cupy_flash, name)(**arguments)
    missing = [name for name in cupy_flash.__all__ if name.startswith("attention") and name not in fuzz.GOOD]
    assert not missing


def test_the_fuzz_would_notice(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(**_: Any) -> None:
        raise ValueError("from the inside")

    monkeypatch.setattr(fuzz, "call_of", lambda _: (broken, "attention", {}))
    assert command.main(["fuzz", "--count", "5"]) == 1
    assert "5 something else" in (said := capsys.readouterr()).out
    assert "again: python -m bench fuzz --one 0" in said.err


def test_a_dozen_problems_on_threads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak, "LENGTHS", (1, 7, 64, 65))
    assert command.main(["soak", "--count", "12", "--threads", "2", "--device", "cpu", "--minutes", "1"]) == 0
    assert "12 problems" in capsys.readouterr().out


def test_the_soak_would_notice(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(soak, "LENGTHS", (7, 65))
    right = cupy_flash.attention

    def wrong(*arrays: Any, **options: Any) -> Any:
        result = right(*arrays, **options)
        return (
            (result[0] + np.asarray(0.05, result[0].dtype), result[1])
            if options.get("return_lse")
            else result
        )

    monkeypatch.setattr(cupy_flash, "attention", wrong)
    assert command.main(["soak", "--count", "4", "--threads", "1", "--device", "cpu", "--minutes", "1"]) == 1
    assert "0 failed" not in capsys.readouterr().out


def test_a_leak_is_seen_and_weather_is_not() -> None:
    up_and_down = [100 + 50 * (n % 7) for n in range(80)]
    assert soak.growth(up_and_down) == 0
    assert soak.growth([held + 20 * n for n, held in enumerate(up_and_down)]) > 0
    assert soak.growth([1, 2, 3]) == 0


def test_errors_that_refuse_are_ours() -> None:
    assert fuzz.OURS[1] is Unsupported
    assert len(fuzz.OURS) == 3

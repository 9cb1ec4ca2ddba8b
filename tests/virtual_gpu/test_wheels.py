"""tests/gpu and inside/ with the oldest and the newest CuPy of both CUDA majors, on virtual GPUs.

On a push each suite runs with the oldest of one major and the newest of the other, on another push with the
other two. why: what a suite shows of a version of CuPy, it shows of the kernels a second and a third time.
"""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from tests.paths import ROOT
from tests.virtual_gpu.conftest import cannot
from tests.virtual_gpu.process import Outcome
from tests.virtual_gpu.wheels import WHEELS, Wheel

pytestmark = [pytest.mark.slow, pytest.mark.simulator]


class Suite(NamedTuple):
    """Tests that run in one process.

    Attributes
    ----------
    devices : str
        Architectures of the virtual GPUs.
    tests : tuple of str
        For pytest.
    variables : dict of str to str
        Of the environment.
    """

    devices: str
    tests: tuple[str, ...]
    variables: dict[str, str] = {}  # noqa: RUF012  (never changed)


_CALLS = tuple(
    f"tests/gpu/test_{name}.py" for name in ("streams", "devices", "graphs", "memory", "protocols")
)
SUITES = {
    "calls": Suite("sm_80,sm_80", (*_CALLS, "tests/virtual_gpu/inside")),
    "calls with tensor maps": Suite("sm_90,sm_90", _CALLS[:3]),
    "threads with streams of their own": Suite(
        "sm_80", ("tests/gpu/test_streams.py",), {"CUPY_CUDA_PER_THREAD_DEFAULT_STREAM": "1"}
    ),
    "results": Suite(
        "sm_80",
        tuple(
            f"tests/gpu/test_{name}.py"
            for name in ("attention", "flash_f64", "kv_cache", "varlen", "statistics")
        ),
    ),
    "hopper": Suite(
        "sm_90", tuple(f"tests/gpu/test_{name}.py" for name in ("hopper", "flash_f64", "float8"))
    ),
    "8-bit floats": Suite("sm_120", ("tests/gpu/test_float8.py",)),
}
OLDEST = [min((w for w in WHEELS if w.cuda == cuda), key=lambda w: [*map(int, w.version.split("."))])
          for cuda in (12, 13)]  # fmt: skip
# Why a test may be left out on a virtual GPU.
_ALLOWED = re.compile("this GPU is|this GPU has a kernel|this torch sees no GPU|the driver does not load")


def in_turn(word: str) -> list[tuple[Wheel, str]]:
    """What a word draws of wheels and suites."""
    first = zlib.crc32(word.encode())
    return [
        (wheel, suite)
        for n, suite in enumerate(SUITES)
        for wheel in WHEELS
        if (first + n + wheel.cuda + (wheel in OLDEST)) % 2
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "suite" in metafunc.fixturenames:
        option = metafunc.config.option
        rows = in_turn(option.sample) if option.in_turn else [(w, s) for w in WHEELS for s in SUITES]
        metafunc.parametrize(("wheel", "suite"), rows, ids=[f"{wheel}-{suite}" for wheel, suite in rows])


def test_every_wheel_has_its_turn_with_every_suite() -> None:
    today = in_turn("today")
    for suite in SUITES:
        own = [wheel for wheel, each in today if each == suite]
        assert {wheel.cuda for wheel in own} == {12, 13}
        assert {wheel in OLDEST for wheel in own} == {True, False}
    assert {row for day in range(20) for row in in_turn(f"day {day}")} == set(product(WHEELS, SUITES))


def test_suite(
    wheel: Wheel, suite: str, on_virtual_gpu: Callable[..., Outcome], request: pytest.FixtureRequest
) -> None:
    """Of large tables each wheel runs the same sample, another each day: its kernels are compiled once."""
    devices, tests, variables = SUITES[suite]
    sample = request.config.option.sample
    outcome = on_virtual_gpu(
        wheel, "-m", "not slow", "--sample", sample, *tests, devices=devices, extra=variables
    )
    assert outcome.status == 0, f"--sample {sample!r}\n{outcome.output[-6000:]}"
    assert outcome.report["cupy"] == wheel.version
    assert outcome.report["outcomes"]["passed"] > 0
    assert outcome.report["simulated"] > 0
    assert not {name: why for name, why in outcome.report["skipped"].items() if not _ALLOWED.search(why)}


@pytest.mark.parametrize("wheel", [w for w in WHEELS if w.cuda == 13][-1:], ids=str)
def test_primitives(wheel: Wheel, on_virtual_gpu: Callable[..., Outcome]) -> None:
    """Cubins of both compilers: CuPy for CUDA 13 loads either."""
    outcome = on_virtual_gpu(wheel, "tests/gpu/test_primitives.py", devices="sm_90")
    assert outcome.status == 0, outcome.output[-6000:]
    assert outcome.report["simulated"] > 0
    assert not {why for why in outcome.report["skipped"].values() if "instructions of sm_120;" not in why}


def test_oldest_wheels_are_the_oldest_allowed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for wheel in OLDEST:
        (requirement,) = project["optional-dependencies"][f"cuda{wheel.cuda}x"]
        assert wheel.version.startswith(requirement.removeprefix(f"{wheel.package}>="))


@pytest.mark.parametrize(("ci", "ends"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_nothing_is_skipped_in_ci(
    ci: str, ends: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)
    with pytest.raises(ends, match="no index"):
        cannot("pip reaches no index")

"""tests/gpu and inside/ with the oldest and the newest CuPy of both CUDA majors, on virtual GPUs."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
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
        tuple(f"tests/gpu/test_{name}.py" for name in ("attention", "flash_f64", "kv_cache", "varlen")),
    ),
    "hopper": Suite(
        "sm_90", tuple(f"tests/gpu/test_{name}.py" for name in ("hopper", "flash_f64", "float8"))
    ),
    "8-bit floats": Suite("sm_120", ("tests/gpu/test_float8.py",)),
}
# Why a test may be left out on a virtual GPU.
_ALLOWED = re.compile("this GPU is|this GPU has a kernel|this torch sees no GPU|the driver does not load")


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("wheel", WHEELS, ids=str)
def test_suite(
    wheel: Wheel, suite: str, on_virtual_gpu: Callable[..., Outcome], request: pytest.FixtureRequest
) -> None:
    """Of large tables each wheel runs a sample of its own, others each day."""
    devices, tests, variables = SUITES[suite]
    sample = f"{request.config.option.sample} {wheel}"
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
    for cuda in (12, 13):
        (requirement,) = project["optional-dependencies"][f"cuda{cuda}x"]
        oldest = min(
            (w for w in WHEELS if w.cuda == cuda), key=lambda w: tuple(map(int, w.version.split(".")))
        )
        assert oldest.version.startswith(requirement.removeprefix(f"cupy-cuda{cuda}x>="))


@pytest.mark.parametrize(("ci", "ends"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_nothing_is_skipped_in_ci(
    ci: str, ends: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)
    with pytest.raises(ends, match="no index"):
        cannot("pip reaches no index")

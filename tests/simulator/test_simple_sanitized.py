"""The simple kernels, all passes of them, under AddressSanitizer, UBSan and the race detector."""

from __future__ import annotations

import pytest

from tests.simulator import sanitized

pytestmark = [pytest.mark.simulator, pytest.mark.slow]

_BOTH = """
from tests.cases import Case
from tests.checks import Device, run_both
from tests.cpu import test_second_order
from tests.statistic_checks import check_statistics
for dtype in ("float32", "float16"):
    case = Case(dtype=dtype, batch=1, heads=(2, 1), lengths=(70, 130), head_dims=(40, 33), bias="1hq1",
                mask="b11k", sinks=True, alibi="h", dropout=0.2, causal=True, align="bottom_right",
                softcap=3.0)
    run_both(case, Device("sm_61"))
    test_second_order.check(case, Device("sm_61"))
    check_statistics(case, Device("sm_61"))
"""


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_sanitizers_find_nothing(sanitizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_FLASH_DRIVER", "simulator:sm_61")
    done = sanitized.run(sanitizer, _BOTH)
    assert done.returncode == 0, done.stderr[-3000:]

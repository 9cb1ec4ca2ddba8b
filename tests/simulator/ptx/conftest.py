"""What the tests of this folder share: which compilers are there, and what is counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cupy_flash.cubins import nvrtc


def need(cuda: int) -> None:
    """Skip a test where the NVRTC of a CUDA major is missing."""
    if not nvrtc.installed(cuda):
        pytest.skip(f"the NVRTC wheel of CUDA {cuda} is not installed")


@pytest.fixture
def count(record_property: Callable[[str, object], None]) -> Callable[[str, object], None]:
    """count("PTX variants run", name): the end of the session says how many different ones there were."""
    return lambda what, one: record_property(f"counted: {what}", str(one))

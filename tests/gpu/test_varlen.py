"""Packed sequences on CuPy arrays: those of the simulator, and longer ones."""

from __future__ import annotations

import pytest

from tests.checks import Device
from tests.simulator.test_varlen import FEATURES, check_sequences

LENGTHS = (((5, 0, 70, 1), (7, 4, 0, 65)), ((300, 1, 0, 129, 64), (257, 65, 9, 640, 64)))


@pytest.mark.gpu
@pytest.mark.sampled(30)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("head_dim", [33, 64, 96, 128, 256])
@pytest.mark.parametrize("lengths", LENGTHS, ids=["short", "long"])
def test_every_sequence_is_within_the_budget(
    lengths: tuple[tuple[int, ...], tuple[int, ...]],
    head_dim: int,
    feature: str,
    deterministic: bool,
    device: Device,
) -> None:
    check_sequences(device, head_dim, lengths, FEATURES[feature], deterministic)

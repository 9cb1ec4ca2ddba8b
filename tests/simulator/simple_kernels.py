"""What the tests of both simple kernels share: cases of several tiles, and launches below the public API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cupy_flash.call.adopt import adopt
from cupy_flash.call.describe import describe
from cupy_flash.call.given import Options
from cupy_flash.device import abi, run, simulator
from cupy_flash.plan import choose
from tests.cases import Case, feature_cases

# why: test_attention.py has one tile per sequence; here every loop over tiles turns twice or thrice.
FEATURE_CASES = feature_cases(
    lengths=((65, 130), (130, 65), (127, 64), (64, 127), (66, 66)),
    head_dims=((16, 20), (40, 33)),
    heads=((2, 2), (4, 2)),
)

SIZES = (1, 7, 63, 64, 65, 127)
LENGTH_CASES = [
    Case(lengths=(m, n), batch=1, head_dims=(33, 18), causal=causal, align="bottom_right" if causal else None)
    for m in SIZES
    for n in SIZES
    for causal in (False, True)
]

# Every compiled head dim class; 512 needs several slices of V even for one tile of keys.
VARIANT_CASES = [
    Case(
        dtype=dtype,
        lengths=(70, 133),
        batch=1,
        heads=(2, 1),
        head_dims=dims,
        causal=True,
        align="bottom_right",
    )
    for dtype in ("float16", "bfloat16", "float32", "float64")
    for dims in ((64, 64), (24, 128), (200, 72), (260, 512))
]


def launch(
    direction: str,
    inputs: Mapping[str, np.ndarray],
    outputs: Mapping[str, np.ndarray],
    extra: Mapping[str, np.ndarray] | None = None,
    **options: Any,
) -> None:
    """Run the planned kernels on 4-D arrays, with arrays that the public API has no name for."""
    asked, views, _ = describe(direction, inputs, Options(**options))
    given = {name: adopt(x, name) for name, x in {**outputs, **(extra or {})}.items()}
    chosen = choose.choose(asked, "sm_61")
    workspace = simulator.empty(chosen.workspace_bytes)
    kernels = [simulator.load(step.variant) for step in chosen.launches]
    every = {**views, **given}
    numbers = {name: view.pointer for name, view in every.items()} | {abi.SEED: asked.seed}
    run.Program(chosen, asked, kernels, every).run(numbers, workspace.pointer, 0)

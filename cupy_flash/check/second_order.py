"""Cases of a check for second order: tangents of attention, and of its gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import api, derivatives, testing
from ..testing import Verdict
from ..testing.budget import UNIT_ROUNDOFF
from .cases import named
from .places import Place

__all__ = ["SecondOrder"]

SHAPE, SHAPE_K = (1, 4, 130, 64), (1, 2, 130, 64)
OF = "tangent of "
OF_Q, OF_K = ("q", "do", "dq"), ("k", "v", "dk", "dv")
# Allowed error of a result, in unit roundoffs times its largest element. No budget is derived for these:
# the CPU core, and kernels in the simulator with float32 as three TF32 products, use at most a third of it.
UNITS = {"float16": 16, "float32": 256, "float64": 128}


@dataclass(frozen=True, eq=False)
class SecondOrder:
    """A case that calls `derivatives.jvp` and `derivatives.hvp`, with head dim 64."""

    dtype: str
    options: dict[str, Any] = field(default_factory=dict)
    kind: str = "second order"

    def __str__(self) -> str:
        return ", ".join([f"{self.kind} {self.dtype}", f"head dim {SHAPE[-1]}", *named(self.options)])

    def inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Make the arrays of both calls; dq, dk and dv are the tangents."""
        shapes = dict.fromkeys(OF_Q, SHAPE) | dict.fromkeys(OF_K, SHAPE_K)
        return {name: rng.standard_normal(shape).astype(self.dtype) for name, shape in shapes.items()}

    def run(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Call the library."""
        rest = dict(given)
        do, q, k, v = (rest.pop(name) for name in ("do", "q", "k", "v"))
        o, lse = api.attention(q, k, v, return_lse=True, **self.options)
        tangents = derivatives.jvp(q, k, v, o, lse, **rest, **self.options)
        second = derivatives.hvp(do, q, k, v, o, lse, **rest, **self.options)
        results = {"o": tangents[0], "lse": tangents[1], "dq": second.dq, "dk": second.dk, "dv": second.dv}
        return {f"{OF}{name}": x for name, x in results.items()}

    def judge(
        self, host: Mapping[str, Any], results: Mapping[str, np.ndarray], place: Place
    ) -> list[Verdict]:
        """Compare with FP64, relative to the largest element of each result, equally on every device."""
        del place
        rest = {name: x for name, x in host.items() if name != "do"} | self.options
        exact = testing.reference_jvp(**rest)._asdict() | testing.reference_hvp(host["do"], **rest)._asdict()
        bound = UNITS[self.dtype] * UNIT_ROUNDOFF[self.dtype]
        return [_verdict(name, x, exact[name.removeprefix(OF)], bound) for name, x in results.items()]


def _verdict(name: str, actual: np.ndarray, exact: np.ndarray, bound: float) -> Verdict:
    error = np.abs(actual.astype(np.float64) - exact)
    if not np.isfinite(error).all():
        return Verdict(name, "not every number is finite")
    allowed, rms = bound * float(np.abs(exact).max()), float(np.sqrt(np.square(error).mean()))
    return Verdict(name, "", float(error.max()), allowed, rms=rms, rms_allowed=allowed)

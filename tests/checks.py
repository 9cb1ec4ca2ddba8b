"""The bodies of the functional tests, which every device shares.

They call only the public API, hand over inputs inside NaN-filled buffers, let the library write
into outputs pre-filled with a dead value inside such buffers, and compare with FP64 within the
error budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

import cupy_flash
from cupy_flash import testing
from cupy_flash.dispatch import memo
from cupy_flash.plan import families
from tests.cases import Case, numpy_dtype


@dataclass(frozen=True)
class Device:
    """Where a test runs.

    Attributes
    ----------
    name : str
        For messages.
    xp : module
        Whose arrays the API gets.
    float32_precision : str or None
        What float32 products are by default there, for the error budget.
    """

    name: str
    xp: Any = np
    float32_precision: str | None = None

    def array(self, x: np.ndarray) -> Any:
        """Put a NumPy array on the device."""
        return self.xp.asarray(x)

    def arrays(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Put those of some arguments there that are arrays."""
        return {n: self.array(x) if isinstance(x, np.ndarray) else x for n, x in values.items()}

    def hostile(self, x: np.ndarray, style: str) -> testing.Guarded:
        """Put a NumPy array on the device, inside a larger buffer full of NaN."""
        return testing.hostile(x, style=style, xp=self.xp)

    def precision(self, dtype: str) -> str | None:
        """The precision to allow for in the error budget."""
        return self.float32_precision if dtype == "float32" else None


NUMPY = Device("arrays of NumPy")


@contextmanager
def only(*chosen: families.Family) -> Iterator[None]:
    """Plan with these kernel families alone, so that a call fails instead of falling back."""
    with mock.patch.object(families, "FAMILIES", chosen):
        memo.forget()
        try:
            yield
        finally:
            memo.forget()


@contextmanager
def dead_outputs(device: Device, case: Case) -> Iterator[list[testing.Guarded]]:
    """Make every output that the library allocates a guarded one; check them all at the end.

    Its rows are aligned as those of the inputs are, or not at all.
    """
    from cupy_flash.call import outputs
    from cupy_flash.call.adopt import adopt
    from cupy_flash.dispatch import memo

    made: list[testing.Guarded] = []
    style = "aligned" if case.style == "aligned" else "padded"

    def guarded(shape: tuple[int, ...], dtype: str) -> testing.Guarded:
        return testing.dead(shape, numpy_dtype(dtype), style=style, xp=device.xp)

    def guarded_empty(like: Any, shape: tuple[int, ...], dtype: str) -> Any:
        made.append(guarded(shape, dtype))
        return adopt(made[-1].view, "output")

    def guarded_strides(shape: tuple[int, ...], dtype: str) -> tuple[int, ...]:
        return adopt(guarded(shape, dtype).view, "output").strides

    with (
        mock.patch.object(outputs, "empty", guarded_empty),
        mock.patch.object(outputs, "strides_of_new", guarded_strides),
        mock.patch.object(memo, "_KNOWN", {}),  # what is remembered has results of other strides
    ):
        yield made
    for output in made:
        output.check_written()


def check_forward(case: Case, device: Device, **extra: Any) -> None:
    """Compare attention of a case with FP64."""
    inputs = case.inputs()
    _assert_within(_forward(case, device, inputs, extra), inputs, case, device, "qkv")


def check_backward(case: Case, device: Device, **extra: Any) -> testing.Gradients:
    """Compare attention_backward of a case with FP64; o and lse are the rounded exact ones."""
    inputs = case.inputs()
    gradients = _backward(case, device, inputs, extra)
    _assert_within([gradients], inputs, case, device)
    return gradients


def run_both(case: Case, device: Device, **extra: Any) -> None:
    """Compare both directions of a case with FP64, which is computed once."""
    inputs = case.inputs()
    results = [*_forward(case, device, inputs, extra), _backward(case, device, inputs, extra)]
    _assert_within(results, inputs, case, device)


def _forward(
    case: Case, device: Device, inputs: Mapping[str, np.ndarray], extra: Mapping[str, Any]
) -> list[Any]:
    """What attention returns, and what it writes into a given output."""
    guarded = {name: device.hostile(x, case.style) for name, x in inputs.items()}
    views = {name: g.view for name, g in guarded.items()}
    qkv = [views[name] for name in "qkv"]
    with dead_outputs(device, case) as made:
        o, lse = cupy_flash.attention(*qkv, return_lse=True, **case.options(views), **extra)
        out = testing.dead(o.shape, o.dtype, style=case.style, xp=device.xp)
        returned = cupy_flash.attention(*qkv, out=out.view, **case.options(views), **extra)
    assert len(made) == 2, "only o and lse of the first call are allocated"
    out.check_written()
    assert returned is out.view
    for g in guarded.values():
        g.check_untouched()
    return [{"o": o, "lse": lse}, {"o": out.view}]


def _backward(
    case: Case, device: Device, inputs: Mapping[str, np.ndarray], extra: Mapping[str, Any]
) -> testing.Gradients:
    """What attention_backward returns."""
    exact = testing.reference_attention(*(inputs[name] for name in "qkv"), **case.options(inputs))
    forward = {"o": exact.o.astype(inputs["q"].dtype), "lse": exact.lse.astype(case.accumulator)}
    guarded = {name: device.hostile(x, case.style) for name, x in {**inputs, **forward}.items()}
    views = {name: g.view for name, g in guarded.items()}
    with dead_outputs(device, case):
        gradients = cupy_flash.attention_backward(
            *(views[name] for name in ("do", "q", "k", "v", "o", "lse")),
            dlse=views.get("dlse"),
            **case.options(views),
            **extra,
        )
    for g in guarded.values():
        g.check_untouched()
    assert (gradients.dbias is None) == (case.bias is None)
    assert (gradients.dsinks is None) == (not case.sinks)
    return gradients


def _assert_within(
    results: list[Any],
    inputs: Mapping[str, np.ndarray],
    case: Case,
    device: Device,
    names: Sequence[str] = ("q", "k", "v", "do", "dlse"),
) -> None:
    """Hold results to FP64; without do, gradients are not computed for them."""
    testing.assert_within_budget(
        results,
        **{name: inputs[name] for name in names if name in inputs},
        precision=device.precision(case.dtype),
        **case.options(inputs),
    )


Check = Callable[[Case, Device], None]

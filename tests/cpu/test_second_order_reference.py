"""The specification of second order: against central differences, and against the gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import testing
from tests.cases import Case, exact_cases

SMALL = exact_cases()
STEP = 1e-5


def given_to(case: Case) -> tuple[dict[str, Any], dict[str, Any], dict[str, np.ndarray]]:
    """Arrays and options of a case, and a tangent of every array that can have one."""
    arrays = case.inputs()
    draw = np.random.default_rng(1)
    names = [name for name in ("q", "k", "v", "bias", "sinks") if name in arrays]
    tangents = {"d" + name: draw.standard_normal(arrays[name].shape) for name in names}
    return arrays, case.options(arrays), tangents


def moved(
    arrays: dict[str, Any], options: dict[str, Any], tangents: dict[str, np.ndarray], step: float
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """q, k and v, and the options, a step along the tangents."""
    now = {name[1:]: arrays[name[1:]] + step * x for name, x in tangents.items()}
    return [now[name] for name in "qkv"], {**options, **{n: x for n, x in now.items() if n in options}}


def difference(after: Any, before: Any) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        slope = (after - before) / (2 * STEP)
    return np.where(np.isneginf(after), 0.0, slope)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_tangents_match_central_differences(case: Case) -> None:
    arrays, options, tangents = given_to(case)
    o, lse = testing.reference_jvp(arrays["q"], arrays["k"], arrays["v"], **tangents, **options)
    steps = (moved(arrays, options, tangents, step) for step in (STEP, -STEP))
    after, before = (testing.reference_attention(*qkv, **now) for qkv, now in steps)
    np.testing.assert_allclose(o, difference(after.o, before.o), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(lse, difference(after.lse, before.lse), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_tangents_of_gradients_match_central_differences(case: Case) -> None:
    arrays, options, tangents = given_to(case)
    dlse = arrays.get("dlse")
    qkv = (arrays[name] for name in "qkv")
    tangent = testing.reference_hvp(arrays["do"], *qkv, dlse=dlse, **tangents, **options)
    steps = (moved(arrays, options, tangents, step) for step in (STEP, -STEP))
    after, before = (testing.reference_backward(arrays["do"], *x, dlse=dlse, **now) for x, now in steps)
    for name in tangents:
        expected = difference(getattr(after, name), getattr(before, name))
        np.testing.assert_allclose(getattr(tangent, name), expected, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_the_gradient_is_the_transpose_of_the_tangent(case: Case) -> None:
    """<c, J x> = <B c, x>, and <y, H x> = <H y, x>."""
    arrays, options, tangents = given_to(case)
    qkv = [arrays[name] for name in "qkv"]
    dlse = arrays.get("dlse", np.zeros(()))
    o, lse = testing.reference_jvp(*qkv, **tangents, **options)
    gradients = testing.reference_backward(arrays["do"], *qkv, dlse=arrays.get("dlse"), **options)
    assert (arrays["do"] * o).sum() + (dlse * lse).sum() == pytest.approx(
        inner(gradients, tangents), abs=1e-9
    )

    draw = np.random.default_rng(2)
    other = {name: draw.standard_normal(x.shape) for name, x in tangents.items()}
    how = {"dlse": arrays.get("dlse"), **options}
    once = testing.reference_hvp(arrays["do"], *qkv, **tangents, **how)
    twice = testing.reference_hvp(arrays["do"], *qkv, **other, **how)
    assert inner(once, other) == pytest.approx(inner(twice, tangents), abs=1e-9)


def inner(gradients: Any, tangents: dict[str, np.ndarray]) -> float:
    return float(sum((getattr(gradients, name) * x).sum() for name, x in tangents.items()))


def test_score_functions_are_refused() -> None:
    """Their derivatives are not in it, so that it would be wrong without a word."""
    x, options = np.ones((3, 4)), {"score": cupy_flash.score(lambda s, b, h, i, j: 3 * s)()}
    for compute in (testing.reference_jvp, partial(testing.reference_hvp, x)):
        with pytest.raises(ValueError, match="no score functions"):
            compute(x, x, x, dq=x, **options)

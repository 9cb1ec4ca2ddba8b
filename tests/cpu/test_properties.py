"""Attention over random problems, and the identities that hold whatever the problem is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cupy_flash
from cupy_flash import testing
from tests.cases import BROADCASTS, DTYPES, Case
from tests.checks import Device, check_backward, check_forward

pytestmark = pytest.mark.usefixtures("cpu_family")

DEVICE = Device("cpu")

lengths = st.integers(1, 70)
bounds = st.none() | st.integers(0, 80)


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple[str, ...] = DTYPES) -> Case:
    """Any case, sizes and features drawn independently."""
    rank = draw(st.sampled_from((4, 4, 3, 2)))
    group = draw(st.integers(1, 3))
    heads_k = draw(st.integers(1, 2))
    return Case(
        dtype=draw(st.sampled_from(dtypes)),
        batch=draw(st.integers(1, 2)) if rank == 4 else 1,
        heads=(group * heads_k, heads_k) if rank > 2 else (1, 1),
        lengths=(draw(lengths), draw(lengths)),
        head_dims=(draw(st.integers(1, 40)), draw(st.integers(1, 40))),
        causal=draw(st.booleans()),
        window=draw(st.none() | st.tuples(bounds, bounds)),
        align=draw(st.sampled_from(("top_left", "bottom_right")) | st.integers(-80, 80)),
        mask=draw(st.none() | st.sampled_from(BROADCASTS)),
        bias=draw(st.none() | st.sampled_from(BROADCASTS)),
        bias_dtype=draw(st.none() | st.sampled_from(DTYPES)),
        scale=draw(st.none() | st.floats(-0.5, 0.5).map(lambda x: round(x, 3))),
        softcap=draw(st.none() | st.sampled_from((0.5, 3.0, 30.0))),
        alibi=draw(st.sampled_from((None, "h", "bh"))),
        sinks=draw(st.booleans()),
        dropout=draw(st.sampled_from((0.0, 0.0, 0.1, 0.5))),
        layout=draw(st.sampled_from(("bhsd", "bshd"))),
        rank=rank,
        dlse=draw(st.booleans()),
        style=draw(st.sampled_from(testing.STYLES)),
        # why: no ramps: their rounding errors are alike from row to row, which the budget does not assume
        values=draw(st.sampled_from(("normal", "onehot"))),
    )


tiles = st.none() | st.tuples(st.integers(1, 80), st.integers(1, 80))


@given(case=cases(), tile=tiles)
def test_any_forward_is_within_the_budget(case: Case, tile: tuple[int, int] | None) -> None:
    check_forward(case, DEVICE, tuning=cupy_flash.Tuning(tile=tile))


@given(case=cases(), tile=tiles)
def test_any_backward_is_within_the_budget(case: Case, tile: tuple[int, int] | None) -> None:
    check_backward(case, DEVICE, tuning=cupy_flash.Tuning(tile=tile))


# ---- identities, in float64 so that they hold to many digits


def close(a: Any, b: Any) -> None:
    np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


def plain(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
    inputs = case.inputs()
    return inputs["q"], inputs["k"], inputs["v"], case.options(inputs)


doubles = cases(dtypes=("float64",)).filter(lambda case: case.rank == 4 and case.layout == "bhsd")
identity = settings(max_examples=25, suppress_health_check=[HealthCheck.filter_too_much])


@identity
@given(case=doubles, cut=st.integers(0, 70))
def test_merge_of_any_split_is_the_whole(case: Case, cut: int) -> None:
    """Keys below and above the cut, the sinks with the first part, positions moved along."""
    q, k, v, options = plain(case)
    options |= {"dropout": 0.0, "seed": None}
    seqlen_q, seqlen_k = case.lengths
    cut = min(cut, seqlen_k)
    offset = testing.Options(align=case.align).offset(seqlen_q, seqlen_k)

    def part(keys: slice, moved: int, sinks: Any) -> Any:
        chosen = options | {"align": offset - moved, "sinks": sinks}
        for name in ("mask", "bias"):
            if name in chosen and chosen[name].shape[-1] > 1:
                chosen[name] = chosen[name][..., keys]
        return cupy_flash.attention(q, k[:, :, keys], v[:, :, keys], return_lse=True, **chosen)

    merged = cupy_flash.merge(
        *part(slice(0, cut), 0, options.get("sinks")), *part(slice(cut, None), cut, None)
    )
    whole = cupy_flash.attention(q, k, v, return_lse=True, **(options | {"align": offset}))
    close(merged[0], whole[0])
    close(merged[1], whole[1])


@identity
@given(case=doubles, cut=st.integers(0, 70))
def test_queries_are_independent(case: Case, cut: int) -> None:
    """Rows from the cut on, standing where they stood, are the rows of the whole."""
    q, k, v, options = plain(case)
    options |= {"dropout": 0.0, "seed": None}
    cut = min(cut, case.lengths[0])
    offset = testing.Options(align=case.align).offset(*case.lengths)
    whole = cupy_flash.attention(q, k, v, **(options | {"align": offset}))
    options["align"] = offset + cut
    for name in ("mask", "bias"):
        if name in options and options[name].ndim > 1 and options[name].shape[-2] > 1:
            options[name] = options[name][..., cut:, :]
    close(cupy_flash.attention(q[:, :, cut:], k, v, **options), whole[:, :, cut:])


@identity
@given(case=doubles, seed=st.integers(0, 1000))
def test_the_order_of_keys_does_not_matter(case: Case, seed: int) -> None:
    """Without positions and dropout, keys may be permuted with their values, mask and bias."""
    inputs = case.inputs()
    order = np.random.default_rng(seed).permutation(case.lengths[1])
    options: dict[str, Any] = {"scale": case.scale, "softcap": case.softcap}
    moved = dict(options)
    for name in ("mask", "bias"):
        if name in inputs:
            options[name] = moved[name] = inputs[name]
            if inputs[name].shape[-1] > 1:
                moved[name] = inputs[name][..., order]
    q, k, v = (inputs[name] for name in "qkv")
    one = cupy_flash.attention(q, k, v, return_lse=True, **options)
    other = cupy_flash.attention(q, k[:, :, order], v[:, :, order], return_lse=True, **moved)
    close(one[0], other[0])
    close(one[1], other[1])


@identity
@given(case=doubles, shift=st.floats(-1e4, 1e4))
def test_a_shift_of_all_scores_shifts_lse_alone(case: Case, shift: float) -> None:
    q, k, v, options = plain(case)
    options.pop("sinks", None)
    bias = options.get("bias", np.zeros((1, 1)))
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **(options | {"bias": bias.astype(np.float64)}))
    moved = bias.astype(np.float64) + shift
    shifted, shifted_lse = cupy_flash.attention(q, k, v, return_lse=True, **(options | {"bias": moved}))
    close(o, shifted)
    close(np.where(np.isneginf(lse), lse, lse + shift), shifted_lse)


@identity
@given(case=doubles, a=st.floats(-3, 3), b=st.floats(-3, 3))
def test_linear_in_the_values(case: Case, a: float, b: float) -> None:
    q, k, v, options = plain(case)
    other = np.cos(v * 3)
    mixed = cupy_flash.attention(q, k, a * v + b * other, **options)
    close(
        mixed,
        a * cupy_flash.attention(q, k, v, **options) + b * cupy_flash.attention(q, k, other, **options),
    )


@identity
@given(case=doubles)
def test_gradients_of_scores_sum_to_zero_along_keys(case: Case) -> None:
    """The softmax does not feel a shift: dbias of one row is 0 without dlse, and dlse with it."""
    inputs = case.inputs()
    options = case.options(inputs) | {"sinks": None}
    batch, heads, (seqlen_q, seqlen_k) = case.batch, case.heads[0], case.lengths
    full = np.zeros((batch, heads, seqlen_q, seqlen_k))
    options["bias"] = full + options.get("bias", 0.0)
    q, k, v = (inputs[name] for name in "qkv")
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
    dlse = np.sin(np.arange(lse.size, dtype=np.float64)).reshape(lse.shape)
    for given_dlse, expected in ((None, np.zeros_like(lse)), (dlse, np.where(np.isneginf(lse), 0, dlse))):
        gradients = cupy_flash.attention_backward(inputs["do"], q, k, v, o, lse, dlse=given_dlse, **options)
        close(gradients.dbias.sum(-1), expected)


@identity
@given(case=doubles)
def test_batches_and_heads_are_independent(case: Case) -> None:
    """Each (batch, head) alone gives its part of the whole."""
    q, k, v, options = plain(case)
    options |= {"dropout": 0.0, "seed": None}
    whole = cupy_flash.attention(q, k, v, **options)
    full = (case.batch, case.heads[0], *case.lengths)
    group = case.heads[0] // case.heads[1]
    for b in range(case.batch):
        for h in range(case.heads[0]):
            alone = dict(options)
            for name in ("mask", "bias"):
                if name in alone:
                    alone[name] = np.broadcast_to(alone[name], full)[b, h]
            if "alibi_slopes" in alone:
                slopes = np.broadcast_to(alone["alibi_slopes"], full[:2])
                alone["alibi_slopes"] = slopes[b, h : h + 1].copy()
            if "sinks" in alone:
                alone["sinks"] = alone["sinks"][h : h + 1]
            close(cupy_flash.attention(q[b, h], k[b, h // group], v[b, h // group], **alone), whole[b, h])


@settings(max_examples=15)
@given(case=cases(dtypes=("float64",)))
def test_gradients_match_finite_differences(case: Case) -> None:
    """Our own forward is differentiated, not the reference."""
    inputs = case.inputs()
    options = case.options(inputs)
    dlse = inputs.get("dlse")
    q, k, v, do = (inputs[name] for name in ("q", "k", "v", "do"))

    def loss(*qkv: np.ndarray) -> float:
        o, lse = cupy_flash.attention(*qkv, return_lse=True, **options)
        total = float((o * do).sum())
        return total + (float((np.where(np.isneginf(lse), 0, lse) * dlse).sum()) if dlse is not None else 0)

    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
    gradients = cupy_flash.attention_backward(do, q, k, v, o, lse, dlse=dlse, **options)
    testing.gradient_check(loss, (q, k, v), gradients[:3], at_most=6, tolerance=1e-6)


@pytest.mark.parametrize("case", [Case(dtype="float64")])
def test_close_can_fail(case: Case) -> None:
    q, k, v, _ = plain(case)
    with pytest.raises(AssertionError):
        close(cupy_flash.attention(q, k, v), cupy_flash.attention(q, k, v, scale=0.1767766))

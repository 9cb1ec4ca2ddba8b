"""Attention together with its tangents: one pass is faster than two."""

from __future__ import annotations

from typing import Any

from ..call.given import Options, Packing
from ..call.operands import Views
from ..call.outputs import finished
from ..call.progress import CALLBACK
from ..call.values import split_run_options
from ..dispatch.memo import prepared
from .second_order import compute, described, dots_of, new_results

__all__ = ["run_with_jvp"]


def run_with_jvp(
    raw: Views, tangents: Views, options: Options, packing: Packing | None
) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """The results and their tangents; parameters as in `second_order.run_jvp`, without o and lse."""
    timeless, run_options = split_run_options(options)
    call = prepared("forward", raw, timeless, True, packing)
    results = call.new_results(raw["q"])
    every = {**raw, **results}
    derivative = described("jvp", every, tangents, options, packing)
    result_tangents = new_results(derivative, {f"d{name}": results[name] for name in ("o", "lse")})
    compute(
        derivative, {**dots_of(tangents), **dots_of(result_tangents)}, options.layout, len(raw["q"].shape),
        lambda: call.run(raw, run_options._replace(progress=CALLBACK.get()), results=results),
    )  # fmt: skip
    o, lse, do, dlse = map(
        finished, (results["o"], results["lse"], result_tangents["do"], result_tangents["dlse"])
    )
    return (o, lse), (do, dlse)

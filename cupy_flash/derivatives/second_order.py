"""Directional derivatives: tangents of attention (J), and derivatives of its gradients (H)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..api import Gradients
from ..call import outputs
from ..call.adopt import adopt
from ..call.blocks import check_blocks
from ..call.describe import describe
from ..call.functions import check_integers
from ..call.given import Options, Packing
from ..call.offsets import with_own_tables
from ..call.operands import Views, table_of
from ..call.options import WITH_GRADIENT
from ..call.problem import Problem
from ..call.progress import CALLBACK, part_of, reporting
from ..call.reproducible import refuse_reproducible
from ..call.spans import check_spans
from ..call.tangents import TANGENTS, check_tangents, directions_of, shape_of_results
from ..call.values import RunOptions
from ..dispatch.backends import driver_of, prepare_backend, refuse_tensor_cores
from ..dispatch.memo import computed_by
from ..errors import InvalidArgumentsError, UnsupportedError
from ..plan.choose import choose

__all__ = [
    "compute",
    "described",
    "dots_of",
    "hvp_into",
    "jvp_into",
    "new_results",
    "run_hvp",
    "run_jvp",
    "tangents_of",
]


def tangents_of(given: dict[str, Any]) -> Views:
    """Remove the tangents from the array options of a call, and adopt them."""
    return {name: adopt(given.pop(name), name) for name in TANGENTS if name in given}


def run_jvp(raw: Views, tangents: Views, options: Options, packing: Packing | None) -> tuple[Any, Any]:
    """Tangents of o and lse; tangents have the names in `TANGENTS`, and raw has o, lse and offsets too."""
    derivative = described("jvp", raw, tangents, options, packing)
    results = new_results(derivative, {f"d{name}": raw[name] for name in ("o", "lse")})
    jvp_into(results, raw, tangents, options, packing, derivative)
    return outputs.finished(results["do"]), outputs.finished(results["dlse"])


def jvp_into(
    results: Views,
    raw: Views,
    tangents: Views,
    options: Options,
    packing: Packing | None,
    derivative: DerivativeCall | None = None,
    stream: int | None = None,
) -> None:
    """Write the tangents of o and lse to do and dlse; parameters as in `run_jvp` and `compute`."""
    derivative = derivative or described("jvp", raw, tangents, options, packing)
    every = {**dots_of(tangents), **dots_of(results)}
    compute(derivative, every, options.layout, len(raw["q"].shape), stream=stream)


def _adopted_jvp(jvp: Any) -> Views:
    """The tangents of o and lse that the caller passed as jvp=."""
    if not isinstance(jvp, (tuple, list)) or len(jvp) != 2:
        raise InvalidArgumentsError(
            "jvp is not a pair of arrays.", hint="jvp=cupy_flash.derivatives.jvp(...), (do, dlse)"
        )
    return {name: adopt(x, f"jvp[{k}]") for k, (name, x) in enumerate(zip(("do", "dlse"), jvp, strict=True))}


def run_hvp(
    raw: Views,
    tangents: Views,
    options: Options,
    jvp: tuple[Any, Any] | None,
    packing: Packing | None,
) -> Gradients[Any]:
    """Derivatives of the gradients; parameters as in `run_jvp`, with do and dlse among the arrays."""
    derivative = described("hvp", raw, tangents, options, packing)
    results = new_results(derivative, {"d" + name: raw[name] for name in WITH_GRADIENT if name in raw})
    known = None if jvp is None else _adopted_jvp(jvp)
    hvp_into(results, raw, tangents, options, known, packing, derivative)
    return Gradients(**{name: outputs.finished(view) for name, view in results.items()})


def hvp_into(
    results: Views,
    raw: Views,
    tangents: Views,
    options: Options,
    known: Views | None,
    packing: Packing | None,
    derivative: DerivativeCall | None = None,
    stream: int | None = None,
) -> None:
    """Write the derivatives of the gradients, by the names of `Gradients`; `known` has do and dlse of jvp."""
    derivative = derivative or described("hvp", raw, tangents, options, packing)
    if known is None:
        without = {name: x for name, x in raw.items() if name not in ("do", "dlse")}
        known = new_results(derivative, {f"d{name}": raw[name] for name in ("o", "lse")})
        on_cpu = driver_of(raw["q"].device, raw["q"].library) is None
        with reporting(CALLBACK.get() if on_cpu else None) as tell:
            with part_of(tell, 0, _FIRST):
                jvp_into(known, without, tangents, options, packing, stream=stream)
            with part_of(tell, _FIRST, 1):
                hvp_into(results, raw, tangents, options, known, packing, derivative, stream)
        return
    if check_tangents({"o": raw["o"], "lse": raw["lse"]}, known) != derivative.directions:
        raise InvalidArgumentsError(
            "jvp has other directions than the tangents.", table_of({**tangents, **known}), hint="jvp=None"
        )
    every = {**dots_of(tangents), **dots_of(known), **results}
    compute(derivative, every, options.layout, len(raw["q"].shape), stream=stream)


# For progress: the fraction of the products of hvp that computes jvp, 5 of 20; and the fraction of forward
# and jvp that computes forward, 2 of 7.
_FIRST, _FORWARD = 0.25, 2 / 7


class DerivativeCall(NamedTuple):
    """A checked call of a directional derivative."""

    problem: Problem
    views: Views  # views of the arrays, in the axes that the passes use
    directions: int | None  # number of directions; None without an axis of directions


def new_results(derivative: DerivativeCall, like: Views) -> Views:
    """New arrays like these, with an axis of directions if there is one."""
    make = outputs.zeros if derivative.problem.packed else outputs.empty  # rows of no sequence are 0
    return {
        name: make(x, shape_of_results(derivative.directions, x.shape), x.dtype) for name, x in like.items()
    }


def dots_of(tangents: Views) -> Views:
    """Tangents by the names that the passes use, such as q_dot for dq."""
    return {f"{name[1:]}_dot": view for name, view in tangents.items()}


# Tangents whose rows the tensor-core kernels copy.
_IN_ROWS = ("q_dot", "k_dot", "v_dot")


def described(
    direction: str, raw: Views, tangents: Views, options: Options, packing: Packing | None
) -> DerivativeCall:
    """Check and describe a call; every refusal happens here."""
    problem, views, given = describe("backward", with_own_tables(raw), options, packing=packing)
    refuse_reproducible(options.reproducible, f"derivatives.{direction}")
    if direction == "hvp" and problem.function is not None and problem.function.learned:
        raise UnsupportedError(
            "hvp() has no derivatives of dscore, which the score function learns.",
            hint="the score function made without learned=",
        )
    count = check_tangents(given, tangents)
    check_spans(problem.spans, given)
    check_blocks(problem.blocks, given)
    check_integers(problem.function, problem.extents, 64, given)
    along = directions_of(dots_of(tangents), count, options.layout, len(given["q"].shape))[:1]
    in_rows = all(one[name].in_rows() for one in along for name in _IN_ROWS if name in one)
    problem = problem._replace(
        direction=direction,
        want_dbias=problem.want_dbias and direction == "hvp",
        in_rows=problem.in_rows and in_rows,
    )
    device = views["q"].device
    driver = driver_of(device, views["q"].library)
    if driver is None:
        refuse_tensor_cores(problem)
    else:
        choose(problem._replace(seed=0), driver.arch(device[1]), driver.multiprocessors(device[1]))
    return DerivativeCall(problem, views, count)


def compute(
    derivative: DerivativeCall,
    directed: Views,
    layout: str,
    rank: int,
    forward: Callable[[], object] | None = None,
    stream: int | None = None,
) -> None:
    """Compute all directions: on a GPU one after the other, on a CPU at once.

    `forward` writes o and lse; it is called first, unless the pass computes them too.
    `stream` is the CUDA stream handle; default: the library's current stream.
    """
    each = directions_of(directed, derivative.directions, layout, rank)
    q = derivative.views["q"]
    driver = driver_of(q.device, q.library)
    if driver is None:
        _compute_on_cpu(derivative, each, forward)
        return
    if forward is not None:
        forward()
    for one in each:
        every = {**derivative.views, **one}
        backend = prepare_backend(derivative.problem, every, driver)
        computed_by(backend.kernels)
        backend.run(every, RunOptions(derivative.problem.seed), stream=stream)


def _compute_on_cpu(
    derivative: DerivativeCall, each: list[Views], forward: Callable[[], object] | None
) -> None:
    """Compute all directions at once; in NumPy with packed sequences one after the other."""
    # why here: the CPU path takes a fifth of the package's import time.
    from .. import cpu
    from ..cpu.choose import choose as choose_on_cpu

    problem, library = derivative.problem, choose_on_cpu(derivative.problem).library
    if library is not None and each:
        from ..cpu.core.family import Core

        numbers = {name: view.pointer for name, view in {**derivative.views, **each[0]}.items()}
        core = Core.of(problem, derivative.views, library, each, with_forward=forward is not None)
        computed_by(f"core {name}" for name in core.names)
        with reporting(CALLBACK.get()) as tell:
            core.run(numbers, problem.seed, (derivative.views, each), tell, derivative.views["q"].library)
        return
    with reporting(CALLBACK.get()) as tell:
        if forward is not None:
            with part_of(tell, 0, _FORWARD):
                forward()
        computed_by(["NumPy"])
        inputs, directions = _numpy(derivative.views), [_numpy(one) for one in each]
        if problem.packed:
            for one in directions:
                cpu.each_sequence(problem, {**inputs, **one})
        elif directions:
            (cpu.jvp if problem.direction == "jvp" else cpu.hvp)(problem, inputs, directions)


def _numpy(views: Views) -> dict[str, np.ndarray[Any, Any]]:
    return {name: view.numpy() for name, view in views.items()}

"""Second order: tangents of attention (J), and the derivative of its gradients in a direction (H)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .api import Gradients, adopted
from .call import outputs
from .call.adopt import adopt
from .call.blocks import check_blocks
from .call.functions import check_integers
from .call.opaque import opaque
from .call.operands import Views, table_of
from .call.options import (
    Options,
    PackedSecondGradientOptions,
    PackedTangentOptions,
    Packing,
    SecondGradientOptions,
    TangentOptions,
    split,
)
from .call.problem import Problem, describe
from .call.reproducible import refuse_reproducible
from .call.signature import Array, takes
from .call.spans import check_spans
from .call.tangents import TANGENTS, check_tangents, directions_of, shape_of_results
from .device.abi import SEED
from .errors import InvalidArguments, Unsupported
from .plan.choose import choose
from .ready import OnDevice, driver_of, ready, refuse_tensor_cores
from .varlen import pack, split_packed

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "attention_hvp",
    "attention_jvp",
    "attention_varlen_hvp",
    "attention_varlen_jvp",
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


@takes(TangentOptions)
@opaque
def attention_jvp(
    q: Array, k: Array, v: Array, o: Array, lse: Any, **options: Unpack[TangentOptions]
) -> tuple[Array, Any]:
    """Tangents of the results of `attention`, in memory linear in the sequence length (forward mode).

    Parameters
    ----------
    q, k, v : array
        As given to `attention`.
    o, lse : array
        As returned by ``attention(..., return_lse=True)``.
    {options: As given to `attention`.}
    dq, dk, dv, dbias, dsinks : array, optional
        Tangents of q, k, v, bias and sinks, shape and dtype of these; or with an axis of several directions
        in front, which share the weights. A missing one is 0, and its products are not computed. Finite.

    Returns
    -------
    do : array
        Tangent of o: its shape and dtype, with the axis of directions in front if there is one.
    dlse : array
        Tangent of lse; 0 in a row that sees no key.

    Raises
    ------
    InvalidArguments
        As in `attention`; also tangents that do not fit their arrays, or none at all.
    Unsupported
        No kernel fits, on a GPU; each one's reason is given. Also 8-bit floats, which have no derivatives,
        and of `attention_hvp` a score function that learns.

    Notes
    -----
    With S the scores, P = exp(S - lse), D the dropout (1 / (1 - dropout) or 0) and g the softcap,
    which a score function is part of ::

        dS   = g'(scale q k^T) * scale (dq k^T + q dk^T) + dbias
        dlse = rowsum(P * dS) + exp(sinks - lse) dsinks
        do   = (D * P * dS) v + (D * P) dv - dlse * o

    The gradient is its transpose: ``<c, jvp(x)> = <backward(c), x>``.

    Examples
    --------
    >>> import numpy as np, cupy_flash
    >>> q = k = v = np.random.default_rng(0).standard_normal((1, 4, 256, 64)).astype(np.float32)
    >>> o, lse = cupy_flash.attention(q, k, v, causal=True, return_lse=True)
    >>> do, dlse = cupy_flash.attention_jvp(q, k, v, o, lse, dq=np.ones_like(q), causal=True)
    >>> do.shape
    (1, 4, 256, 64)
    """
    given, values = split(options)
    tangents = tangents_of(given)
    return run_jvp(adopted(q=q, k=k, v=v, o=o, lse=lse, **given), tangents, values)


@takes(SecondGradientOptions)
@opaque
def attention_hvp(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Any,
    *,
    jvp: tuple[Any, Any] | None = None,
    **options: Unpack[SecondGradientOptions],
) -> Gradients[Array]:
    """The derivative of `attention_backward` in a direction, in memory linear in the sequence length.

    It is the Hessian of ``sum(do * o) + sum(dlse * lse)`` times the direction: what double backward needs.

    Parameters
    ----------
    do, q, k, v, o, lse : array
        As given to `attention_backward`, with respect to whose do and dlse nothing is differentiated here:
        it is linear in them.
    dlse : array, optional
        As given to `attention_backward`.
    {options: As given to `attention`.}
    dq, dk, dv, dbias, dsinks : array, optional
        The direction, as in `attention_jvp`.
    jvp : (array, array), optional
        What `attention_jvp` returned for this direction; computed here if it is not given.

    Returns
    -------
    Gradients
        Derivatives of dq, dk, dv, and of dbias and dsinks if bias and sinks were given; with the axis of
        directions in front if there is one.

    Raises
    ------
    InvalidArguments, Unsupported
        As in `attention_jvp`.

    Notes
    -----
    A dot is a derivative in the direction; oDot and lseDot are ``jvp``, SDot is dS of `attention_jvp`. With
    T = scale q k^T, S = g(T) + bias, dP = D * (do v^T), delta = rowsum(do * o) - dlse ::

        PDot  = P * (SDot - lseDot)
        dS    = P * (dP - delta)
        dSDot = PDot * (dP - delta) + P * (D * (do vDot^T) - rowsum(do * oDot))
        dT, dTDot = g' dS, g' dSDot + g'' TDot dS

        dqDot = scale (dTDot k + dT kDot)
        dkDot = scale (dTDot^T q + dT^T qDot)
        dvDot = (D * PDot)^T do
        dbiasDot = dSDot, summed as dbias is

    Double backward: with cotangents a, b, c of the dq, dk, dv of `attention_backward`, the gradients of do
    and dlse are ``attention_jvp(dq=a, dk=b, dv=c)``, those of q, k, v ``attention_hvp`` in that direction.
    """
    given, values = split(options)
    tangents = tangents_of(given)
    raw = adopted(do=do, q=q, k=k, v=v, o=o, lse=lse, **given)
    return run_hvp(raw, tangents, values, jvp)


@takes(PackedTangentOptions)
@opaque
def attention_varlen_jvp(
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    **options: Unpack[PackedTangentOptions],
) -> tuple[Array, Any]:
    """Tangents of the results of `attention_varlen`.

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k
        As given to `attention_varlen`.
    o, lse : array
        As returned by ``attention_varlen(..., return_lse=True)``.
    {options: As given to `attention_varlen`.}
    dq, dk, dv, dbias, dsinks : array, optional
        As in `attention_jvp`.

    Returns
    -------
    do, dlse : array
        As of `attention_jvp`; rows past the last offset are 0.

    Raises
    ------
    InvalidArguments, Unsupported
        As in `attention_jvp` and `attention_varlen`.
    """
    given, values, packing = split_packed(options)
    tangents = tangents_of(given)
    raw = adopted(q=q, k=k, v=v, o=o, lse=lse, **given)
    return run_jvp(raw, tangents, values, pack(raw, (cu_seqlens_q, cu_seqlens_k), *packing))


@takes(PackedSecondGradientOptions)
@opaque
def attention_varlen_hvp(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    jvp: tuple[Any, Any] | None = None,
    **options: Unpack[PackedSecondGradientOptions],
) -> Gradients[Array]:
    """The derivative of `attention_varlen_backward` in a direction.

    Parameters
    ----------
    do, q, k, v, o, lse, dlse, cu_seqlens_q, cu_seqlens_k
        As given to `attention_varlen_backward`.
    {options: As given to `attention_varlen`.}
    dq, dk, dv, dbias, dsinks : array, optional
        The direction, as in `attention_jvp`.
    jvp : (array, array), optional
        What `attention_varlen_jvp` returned for this direction; computed here if it is not given.

    Returns
    -------
    Gradients
        As of `attention_hvp`; rows past the last offset, and those of keys not in use, are 0.

    Raises
    ------
    InvalidArguments, Unsupported
        As in `attention_jvp` and `attention_varlen`.
    """
    given, values, packing = split_packed(options)
    tangents = tangents_of(given)
    raw = adopted(do=do, q=q, k=k, v=v, o=o, lse=lse, **given)
    return run_hvp(raw, tangents, values, jvp, pack(raw, (cu_seqlens_q, cu_seqlens_k), *packing))


GRADIENTS = tuple(name[1:] for name in TANGENTS)


def tangents_of(given: dict[str, Any]) -> Views:
    """Take the tangents out of the arrays among the options of a call."""
    return {name: adopt(given.pop(name), name) for name in TANGENTS if name in given}


def run_jvp(raw: Views, tangents: Views, options: Options, packing: Packing | None = None) -> tuple[Any, Any]:
    """Tangents of o and lse.

    Parameters
    ----------
    raw : dict of str to ArrayView
        q, k, v, o, lse and the arrays among the options; the offsets of packed sequences.
    tangents : dict of str to ArrayView
        By the names in `TANGENTS`.
    options : Options
    packing : Packing, optional
        Of packed sequences.
    """
    asked = described("jvp", raw, tangents, options, packing)
    results = new_results(asked, {f"d{name}": raw[name] for name in ("o", "lse")})
    jvp_into(results, raw, tangents, options, packing, asked)
    return outputs.finished(results["do"]), outputs.finished(results["dlse"])


def jvp_into(
    results: Views,
    raw: Views,
    tangents: Views,
    options: Options,
    packing: Packing | None = None,
    asked: Asked | None = None,
    stream: int | None = None,
) -> None:
    """Write the tangents of o and lse, named do and dlse; parameters as of `run_jvp` and `compute`."""
    asked = asked or described("jvp", raw, tangents, options, packing)
    every = {**dots_of(tangents), **dots_of(results)}
    compute(asked, every, options.layout, len(raw["q"].shape), stream=stream)


def _adopted_jvp(jvp: Any) -> Views:
    """The tangents of o and lse that a caller has already."""
    if not isinstance(jvp, (tuple, list)) or len(jvp) != 2:
        raise InvalidArguments("jvp is not a pair of arrays.", hint="jvp=attention_jvp(...), (do, dlse)")
    return {name: adopt(x, f"jvp[{k}]") for k, (name, x) in enumerate(zip(("do", "dlse"), jvp, strict=True))}


def run_hvp(
    raw: Views,
    tangents: Views,
    options: Options,
    jvp: tuple[Any, Any] | None = None,
    packing: Packing | None = None,
) -> Gradients[Any]:
    """Derivatives of the gradients; parameters as of `run_jvp`, with do and dlse among the arrays."""
    asked = described("hvp", raw, tangents, options, packing)
    results = new_results(asked, {"d" + name: raw[name] for name in GRADIENTS if name in raw})
    known = None if jvp is None else _adopted_jvp(jvp)
    hvp_into(results, raw, tangents, options, known, packing, asked)
    return Gradients(**{name: outputs.finished(view) for name, view in results.items()})


def hvp_into(
    results: Views,
    raw: Views,
    tangents: Views,
    options: Options,
    known: Views | None = None,
    packing: Packing | None = None,
    asked: Asked | None = None,
    stream: int | None = None,
) -> None:
    """Write the derivatives of the gradients, by the names of `Gradients`; known: what `run_jvp` gave."""
    asked = asked or described("hvp", raw, tangents, options, packing)
    if known is None:
        without = {name: x for name, x in raw.items() if name not in ("do", "dlse")}
        known = new_results(asked, {f"d{name}": raw[name] for name in ("o", "lse")})
        jvp_into(known, without, tangents, options, packing)
    elif check_tangents({"o": raw["o"], "lse": raw["lse"]}, known) != asked.directions:
        raise InvalidArguments(
            "jvp has other directions than the tangents.", table_of({**tangents, **known}), hint="jvp=None"
        )
    every = {**dots_of(tangents), **dots_of(known), **results}
    compute(asked, every, options.layout, len(raw["q"].shape), stream=stream)


class Asked(NamedTuple):
    """A call that nothing refuses.

    Attributes
    ----------
    problem : Problem
    views : dict of str to ArrayView
        The arrays as the passes see them.
    directions : int or None
        How many, if they have an axis.
    """

    problem: Problem
    views: Views
    directions: int | None


def new_results(asked: Asked, like: Views) -> Views:
    """New results for the directions, each of the kind of an array."""
    make = outputs.zeros if asked.problem.packed else outputs.empty  # rows of no sequence are 0
    return {name: make(x, shape_of_results(asked.directions, x.shape), x.dtype) for name, x in like.items()}


def dots_of(tangents: Views) -> Views:
    """Tangents by the names that the passes have for them."""
    return {f"{name[1:]}_dot": view for name, view in tangents.items()}


# Tangents whose rows kernels of tensor cores copy.
_IN_ROWS = ("q_dot", "k_dot", "v_dot")


def described(
    direction: str, raw: Views, tangents: Views, options: Options, packing: Packing | None
) -> Asked:
    """Everything that can refuse a call."""
    problem, views, given = describe("backward", raw, options, packing=packing)
    refuse_reproducible(options.reproducible, f"attention_{direction}")
    if direction == "hvp" and problem.function is not None and problem.function.learned:
        raise Unsupported(
            "attention_hvp() has no derivatives of dscore_args, which the score function learns.",
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
    driver = driver_of(device)
    if driver is None:
        refuse_tensor_cores(problem)
    else:
        choose(problem._replace(seed=0), driver.arch(device[1]), driver.multiprocessors(device[1]))
    return Asked(problem, views, count)


def compute(
    asked: Asked,
    directed: Views,
    layout: str,
    rank: int,
    forward: Callable[[], object] | None = None,
    stream: int | None = None,
) -> None:
    """Compute: on a GPU one direction after the other, else all at once.

    forward: writes o and lse; called first, where the pass does not compute them along the way.
    stream: of the GPU; default is the current one of the library.
    """
    each = directions_of(directed, asked.directions, layout, rank)
    driver = driver_of(asked.views["q"].device)
    if driver is None:
        _compute_on_cpu(asked, each, forward)
        return
    if forward is not None:
        forward()
    for one in each:
        every = {**asked.views, **one}
        on_device = ready(asked.problem, every, driver)
        assert isinstance(on_device, OnDevice)
        numbers = {name: view.pointer for name, view in every.items()}
        on_device.run({**numbers, SEED: asked.problem.seed}, every["q"].library, stream)


def _compute_on_cpu(asked: Asked, each: list[Views], forward: Callable[[], object] | None) -> None:
    """Compute all directions at once; in NumPy, those of packed sequences one after the other."""
    # why here: the CPU path is a fifth of what the package takes to import
    from . import cpu
    from .cpu.choose import choose as choose_on_cpu

    problem, library = asked.problem, choose_on_cpu(asked.problem).library
    if library is not None and each:
        from .cpu.core.family import Core

        numbers = {name: view.pointer for name, view in {**asked.views, **each[0]}.items()}
        core = Core.of(problem, asked.views, library, each, with_forward=forward is not None)
        core.run(numbers, problem.seed, (asked.views, each))
        return
    if forward is not None:
        forward()
    inputs, directions = _numpy(asked.views), [_numpy(one) for one in each]
    if problem.packed:
        for one in directions:
            cpu.each_sequence(problem, {**inputs, **one})
    elif directions:
        (cpu.jvp if problem.direction == "jvp" else cpu.hvp)(problem, inputs, directions)


def _numpy(views: Views) -> dict[str, np.ndarray[Any, Any]]:
    return {name: view.numpy() for name, view in views.items()}

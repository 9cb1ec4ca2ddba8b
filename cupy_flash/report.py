"""explain and memory_report: what would run, and what it would cost, without running anything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from .api import adopted
from .call.arrays import ITEM_BYTES, ArrayView, dtype_name
from .call.cache.describe import adopt_cache, describe_cache, pack_queries
from .call.cache.parts import cache_parts
from .call.cache.selected import Selection, adopt_selection
from .call.checks import flag, integer, one_of
from .call.compound import unquantized
from .call.describe import describe
from .call.given import Options, split, split_of_cache
from .call.head_scale import HeadScale
from .call.masks import resolve_band
from .call.opaque import opaque
from .call.operands import FLOATS
from .call.options import BandOptions, CacheOptions, DenseOptions, defaults
from .call.outputs import namespace
from .call.problem import Problem
from .call.public_names import type_phrase
from .call.signature import INSTEAD, takes
from .call.values import check_options
from .call.work import flops
from .dispatch.backends import driver_of, refuse_tensor_cores
from .errors import CubinNotFoundError, InvalidArgumentsError, UnsupportedError
from .naive import naive_bytes
from .plan.catalog import architecture
from .plan.choose import Plan, choose

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["MemoryReport", "explain", "memory_report", "plan_text"]


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def plan_text(problem: Problem, plan: Plan, located: bool = True) -> str:
    """A plan as text: the reasons for the family, and each launch with its grid and cubin."""
    row = architecture(plan.arch)
    lines = [f"problem   {problem.summary()}", f"family    {plan.family} on {plan.arch}"]
    lines += [f"skipped   {family}: {reason}" for family, reason in plan.refused]
    lines += plan.notes
    for launch in plan.launches:
        variant = launch.variant
        m, n = variant.tile
        x, y, z = launch.grid
        shared = _size(launch.shared_bytes)
        lines.append(f"kernel    {variant.name}")
        lines.append(f"  tile    {m} queries x {n} keys, head_dim up to {variant.head_dim}")
        lines.append(f"  grid    {x} x {y} x {z} blocks of {launch.block[0]} threads, {shared} shared memory")
        if located:
            lines.append(f"  cubin   {_cubin_line(variant, row.target_of(plan.family))}")
    for part in plan.workspace:
        lines.append(f"workspace {part.name} {part.dtype} {part.shape}")
    if plan.workspace:
        lines.append(f"          {_size(plan.workspace_bytes)} in all")
    return "\n".join(lines)


def _cubin_line(variant: Any, target: str) -> str:
    from .cubins import locate

    try:
        cubin = locate.locate(variant, target)
    except CubinNotFoundError as error:
        return str(error).splitlines()[0]
    return f"{cubin.path} ({cubin.registers} registers, {cubin.spills} bytes spilled, {cubin.set})"


def _cpu_text(problem: Problem, library: str) -> str:
    """The plan of a problem on the CPU as text: the reasons for the family, its tile and threads."""
    # why here: the CPU path takes a fifth of the package's import time.
    from .cpu import choose as on_cpu
    from .cpu import tiles
    from .cpu.core import family

    p, plan = problem, on_cpu.choose(problem)
    lines = [f"problem   {p.summary()}", f"family    {plan.family} on cpu"]
    lines += [f"skipped   {name}: {reason}" for name, reason in plan.refused]
    work = family.work_of(p)
    if plan.isa is not None and plan.library is not None:
        queries, keys = family.tile_of(plan.isa, p, plan.library)
        lines.append(f"kernel    {p.direction} for {plan.isa.title}")
        count = family.workers(work, library)
        lines.append(f"  tile    {queries} queries x {keys} keys, on {count} thread{'s' * (count > 1)}")
        lines.append(f"  library {plan.library.path} ({plan.library.compiler}, {plan.library.origin})")
        lines += family.notes(p, plan.library)
    elif p.empty:
        lines.append("          nothing to compute")
    else:
        tiled = "tiles of keys" if p.cache is not None else "{} queries x {} keys".format(*tiles.tile_of(p))
        lines.append(f"          tiled NumPy: {tiled}")
    return "\n".join(lines)


@takes(DenseOptions)
@opaque
def explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    arch: str | None = None,
    direction: str = "forward",
    kv_cache: Mapping[str, Any] | None = None,
    **options: Unpack[DenseOptions],
) -> str:
    """Show which kernels a call would run, and why not others.

    Parameters
    ----------
    q, k, v : array
        As in `attention`; only shapes, strides and dtypes matter.
    arch : str, optional
        Plan for this architecture, such as "sm_90a", on any machine. Default: for the device of the arrays.
    direction : {"forward", "backward", "statistics"}
        "statistics" is `attention_statistics` with everything except top_k, and with lse.
    {options: As in `attention`.}
    kv_cache : mapping of str to object, optional
        Explain `attention_with_kv_cache` instead, with these of its options, at least cache_seqlens; k and v
        are then the caches. Options that `attention` has too may be given either way.

    Returns
    -------
    str

    Raises
    ------
    InvalidArgumentsError, UnsupportedError
        As in `attention`.
    """
    if not one_of(direction, ("forward", "backward", "statistics")):
        raise InvalidArgumentsError(
            f"direction is {direction!r}.", hint='"forward", "backward" or "statistics"'
        )
    _check_arch(arch)
    counts = direction == "statistics"
    if kv_cache is None:
        arrays, values = split(options)
        given = _detached({**unquantized(q=q, k=k, v=v), **arrays})
        values, notes = _without_head_scale(values, given["q"], values.layout)
        problem, views, _ = describe("forward" if counts else direction, adopted(**given), values)
    else:
        if direction == "backward":
            raise InvalidArgumentsError(
                "attention_with_kv_cache() has no backward pass.",
                hint="kv_cache=None, for attention_backward()",
            )
        problem, views, notes = _describe_cache(q, k, v, options, kv_cache)
    driver = driver_of(views["q"].device, views["q"].library)
    if counts:
        problem = problem._replace(direction=direction, wanted=("key_sum", "key_max", "entropy"))
    if arch is None and driver is None:
        refuse_tensor_cores(problem)
        return "\n".join((_cpu_text(problem, views["q"].library), *notes))
    if arch is None:
        device = views["q"].device[1]
        assert driver is not None
        plan = choose(problem, driver.arch(device), driver.multiprocessors(device))
    else:
        plan = choose(problem, arch)
    return "\n".join((plan_text(problem, plan), *notes))


def _without_head_scale(values: Options, q: Any, layout: str) -> tuple[Options, list[str]]:
    """Options with scale 1 in place of a scale per head, and a note about it."""
    (scale,) = _detached({"scale": values.scale}).values()
    if HeadScale.of(scale, q, layout) is None:
        return values, []
    line = "scale     of each head: q is multiplied by it first, and rounded to its dtype"
    return values._replace(scale=1.0), [line]


def _detached(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays without autograd graphs: nothing is computed, so no gradient can get lost."""
    return {name: x.detach() if getattr(x, "requires_grad", False) else x for name, x in arrays.items()}


def _describe_cache(
    q: Any, k_cache: Any, v_cache: Any, options: Mapping[str, Any], kv_cache: Mapping[str, Any]
) -> tuple[Problem, dict[str, ArrayView], list[str]]:
    """Describe attention over a cache, given options of `attention` and of the cache; and notes."""
    if not isinstance(kv_cache, Mapping):
        raise InvalidArgumentsError(f"kv_cache is {type_phrase(kv_cache)}.", hint="a dictionary of options")
    own = ("cache_seqlens", *defaults(CacheOptions))
    usual = defaults(DenseOptions)
    # why: an option at its default asks for nothing, even one that caches do not have; arrays are never
    # defaults
    shared = {
        name: x
        for name, x in options.items()
        if name in own or (not _absent(x) and (bool(getattr(x, "shape", None)) or x != usual[name]))
    }
    for name in (*kv_cache, *shared):
        if name not in own:
            raise InvalidArgumentsError(
                f"attention_with_kv_cache() has no option {name!r}.",
                hint=INSTEAD.get(name, "of kv_cache: " + ", ".join(own)),
            )
        if name in kv_cache and name in shared:
            raise InvalidArgumentsError(f"{name} is given twice.", hint=f"{name} in kv_cache alone")
    given = {"cache_seqlens": None, **shared, **kv_cache}
    seqlens = given.pop("cache_seqlens")
    flat = cache_parts(k_cache, v_cache, given)
    if flat.get("prefix_k") is not None:
        raise UnsupportedError(
            "a call with a shared prefix is two calls, and explain shows one.",
            hint="kv_cache without a prefix; and explain(all queries in a row, *prefix)",
        )
    for name in ("check", "workspace"):  # they do not affect the plan
        flat.pop(name, None)
    (q,) = _detached({"q": q}).values()
    _, values, _ = split_of_cache(flat)
    packed = flat.get("cu_seqlens_q") is not None
    values, notes = _without_head_scale(values, q, "bshd" if packed else values.layout)
    if flat.get("indices") is not None:
        found = adopt_selection(q, seqlens, flat)
        *rows, keys = found["indices"].shape
        notes.append(f"selected  {keys} keys of each of {math.prod(rows)} queries, as pages of one key")
        selection = Selection.of(namespace(found["q"].library), q, seqlens, flat, found)
        q, seqlens, flat = selection.q, selection.lengths, selection.options
        del flat["check"]
    arrays, _, call = split_of_cache(flat)
    check_options(values)
    # why adopt_cache: it handles an integer, and refuses None by name
    raw, length = adopt_cache(_detached({"q": q, "cache_seqlens": seqlens, **arrays}))
    packing = pack_queries(raw, values.layout, call, length)
    return *describe_cache(raw, values, call, packing=packing), notes


def _absent(x: Any) -> bool:
    return x is None or (isinstance(x, (tuple, list)) and not x)


def _check_arch(arch: Any) -> None:
    if arch is not None and not isinstance(arch, str):
        raise InvalidArgumentsError(f"arch is {arch!r}.", hint='arch="sm_90a", or None for the GPU at hand')


class MemoryReport(NamedTuple):
    """Memory and FLOPs of a problem; prints as a table.

    Attributes
    ----------
    problem : Problem
    naive_bytes : int
        Score and weight matrices of the textbook method.
    flash_bytes : int
        LSE, and the workspace of the backward pass.
    operand_bytes : int
        q, k, v and o, which both methods need (and their gradients).
    flops : int
        FLOPs of the matrix products: 2 per pair and feature of q k^T and of p v, without pairs outside the
        band. The backward pass has three products with the features of q and k, and two with those of v.
    plan : Plan or None
        The plan on the given architecture; None without one.
    """

    problem: Problem
    naive_bytes: int
    flash_bytes: int
    operand_bytes: int
    flops: int
    plan: Plan | None

    def __str__(self) -> str:
        ratio = self.naive_bytes / self.flash_bytes if self.flash_bytes else float("inf")
        lines = [
            f"problem   {self.problem.summary()}",
            f"operands  {_size(self.operand_bytes)}",
            f"naive     {_size(self.naive_bytes)} for the S x S matrices",
            f"flash     {_size(self.flash_bytes)} of extra memory, {ratio:,.1f}x smaller",
            f"work      {self.flops:.4g} FLOP in the matrix products",
        ]
        if self.plan is not None:
            lines += [
                f"tile      {x.variant.tile[0]} x {x.variant.tile[1]}, {_size(x.shared_bytes)} shared memory"
                f"  ({x.variant.name}, {self.plan.arch})"
                for x in self.plan.launches
            ]
        return "\n".join(lines)


@takes(BandOptions)
@opaque
def memory_report(
    batch: int,
    heads: int,
    seqlen: int,
    head_dim: int,
    *,
    heads_k: int | None = None,
    seqlen_k: int | None = None,
    head_dim_v: int | None = None,
    dtype: Any = "float32",
    backward: bool = False,
    arch: str | None = None,
    **options: Unpack[BandOptions],
) -> MemoryReport:
    """Report the memory and FLOPs of a problem, by the naive method and by this library.

    Parameters
    ----------
    batch, heads, seqlen, head_dim : int
        Sizes of q.
    heads_k, seqlen_k, head_dim_v : int, optional
        Sizes of k and v where they differ.
    dtype : {"float16", "bfloat16", "float32", "float64"}
        The name, or a dtype of NumPy, CuPy, torch or JAX.
    {options: As in `attention`.}
    backward : bool
        Report the backward pass instead of the forward pass.
    arch : str, optional
        Also show tiles and shared memory on this architecture.

    Returns
    -------
    MemoryReport

    Raises
    ------
    InvalidArgumentsError, UnsupportedError
        As in `attention`.
    """
    given = Options(**options)
    flag(given.causal, "causal")
    flag(backward, "backward")
    _check_arch(arch)
    name_of_dtype = dtype_name(dtype)
    if name_of_dtype not in FLOATS:
        raise InvalidArgumentsError(f"dtype is {dtype!r}.", hint=f"dtype= one of {', '.join(FLOATS)}")
    seqlen_k = seqlen if seqlen_k is None else seqlen_k
    heads_k = heads if heads_k is None else heads_k
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    sizes = {"batch": batch, "heads": heads, "seqlen": seqlen, "head_dim": head_dim, "heads_k": heads_k,
             "seqlen_k": seqlen_k, "head_dim_v": head_dim_v}  # fmt: skip
    for name, size in sizes.items():
        if not 0 < (integer(size) or 0) < 2**40:
            raise InvalidArgumentsError(f"{name} is {size!r}.", hint=f"an integer {name} of at least 1")
    batch, heads, seqlen, head_dim, heads_k, seqlen_k, head_dim_v = map(int, sizes.values())
    if heads % heads_k:
        raise InvalidArgumentsError(
            f"{heads} heads are not a multiple of heads_k = {heads_k}.",
            hint=f"heads_k={math.gcd(heads, heads_k)}, or another divisor of {heads}",
        )
    band = resolve_band(given.causal, given.window, given.align, False, seqlen, seqlen_k)
    problem = Problem(
        direction="backward" if backward else "forward",
        dtype=name_of_dtype,
        precision=None,
        batch=batch,
        heads_q=heads,
        heads_k=heads_k,
        seqlen_q=seqlen,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        scale=head_dim**-0.5,
        offset=band.offset,
        left=band.left,
        right=band.right,
    )
    p = problem
    plan = None if arch is None else choose(problem, arch)
    item, acc = ITEM_BYTES[p.dtype], ITEM_BYTES[p.accumulator]
    rows = p.batch * p.heads_q * p.seqlen_q
    keys = p.batch * p.heads_k * p.seqlen_k
    features = p.head_dim + p.head_dim_v
    operands = item * features * (rows + keys) * (2 if backward else 1)
    workspace = plan.workspace_bytes if plan else rows * acc if backward else 0
    pairs = p.batch * p.heads_q * band.pairs(p.seqlen_q, p.seqlen_k)
    return MemoryReport(
        problem,
        naive_bytes(p),
        rows * acc + workspace,
        operands,
        flops(p.direction, pairs, p.head_dim, p.head_dim_v),
        plan,
    )

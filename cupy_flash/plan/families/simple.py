"""The simple kernels: any dtype, head dims up to 512, any strides, any architecture, in IEEE arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

from ...call.problem import Problem
from ..catalog import SHORT, Arch, Variant
from ..launch import Launch, Plan, along_x, blocks_of, laid_out, rows_of

__all__ = ["NAME", "plan", "refusals", "sink_gradients", "variants"]

NAME = "simple"

_THREADS = 256
_HEAD_DIMS = (64, 128, 256, 512)

# (queries, keys, shared bytes) for each head dim class, for float and for double accumulators; a single entry
# serves every head dim. For any architecture and any strides; at most 48 KiB, so that nothing has to opt in.
_TILES: dict[str, tuple[tuple[tuple[int, int, int], ...], tuple[tuple[int, int, int], ...]]] = {
    "forward": (
        ((64, 64, 35840), (64, 64, 35840), (64, 64, 35840), (32, 64, 25088)),
        ((64, 32, 33792), (64, 32, 33792), (32, 32, 25088), (16, 32, 20736)),
    ),
    "delta": (((64, 1, 0),), ((64, 1, 0),)),
    "dq": (
        ((64, 64, 35840), (64, 64, 35840), (64, 64, 35840), (32, 64, 25088)),
        ((64, 32, 33792), (64, 32, 33792), (32, 32, 25088), (16, 32, 20736)),
    ),
    "dkv": (
        ((64, 64, 35840), (64, 32, 25088), (64, 32, 25088), (64, 16, 20736)),
        ((32, 64, 33792), (32, 32, 25088), (32, 16, 20736), (32, 16, 20736)),
    ),
    "dbias": (((64, 64, 35840),), ((64, 32, 33792),)),
    "dsinks": (((1, 1, 1024),), ((1, 1, 2048),)),
}


def _variant(step: str, dtype: str, widest: int) -> Variant:
    """The kernel of a pass that takes head dims of so much, at most 512."""
    rows = _TILES[step][dtype == "f64"]
    classes = _HEAD_DIMS[-len(rows) :]
    row = next(n for n, largest in enumerate(classes) if widest <= largest)
    (m, n, shared_bytes), d = rows[row], classes[row]
    if step == "forward":
        kernel = ("simple_forward.cu", "", "ForwardParams")
    else:
        kernel = ("simple_backward.cu", step, "BackwardParams")
    return Variant(*kernel, dtype, d, d, (m, n), _THREADS, shared_bytes)


def variants(_arch: Arch) -> Iterator[Variant]:
    """Everything of this family: the same for every architecture."""
    for step, dtype, head_dim in product(_TILES, SHORT.values(), _HEAD_DIMS):
        yield _variant(step, dtype, head_dim)


def _steps(problem: Problem) -> list[str]:
    if problem.direction == "forward":
        return ["forward"]
    return ["delta", "dq", "dkv", *_of_scores(problem)]


def _of_scores(problem: Problem) -> list[str]:
    """Passes of the gradients of what was added to the scores."""
    return ["dbias"] * problem.want_dbias + ["dsinks"] * problem.sinks


def refusals(problem: Problem, _arch: Arch) -> list[str]:
    """Every reason why these kernels cannot answer a problem."""
    reasons = []
    if problem.dtype not in SHORT:
        return [f"computes with 16-bit and wider inputs, not {problem.dtype}"]
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest > _HEAD_DIMS[-1]:
        reasons.append(f"head_dim {widest} is above {_HEAD_DIMS[-1]}")
    if problem.precision in ("tf32", "tf32x3"):
        reasons.append(f"computes in IEEE float32, not {problem.precision}")
    if problem.tile is not None:
        dtype, taken = SHORT[problem.dtype], min(widest, _HEAD_DIMS[-1])
        built = {_variant(step, dtype, taken).tile for step in _steps(problem)}
        if problem.tile not in built:
            tiles = ", ".join(map(str, sorted(built)))
            reasons.append(f"tile {problem.tile} is not built (built: {tiles})")
    return reasons


def _blocks(problem: Problem, variant: Variant) -> int:
    """Blocks of one kernel, all on the x axis; the formulas stand in the banners of the .cu files."""
    p, (m, n) = problem, variant.tile
    if variant.step == "dkv":
        return p.batch * p.heads_k * blocks_of(p.seqlen_k, n)
    if variant.step == "dbias":
        b, h, i, j = p.bias or (0, 0, 0, 0)
        return b * h * blocks_of(i, m) * blocks_of(j, n)
    if variant.step == "dsinks":
        return p.heads_q
    return p.batch * p.heads_q * blocks_of(p.seqlen_q, m)


def _launches(problem: Problem, steps: Iterable[str]) -> list[Launch]:
    widest, dtype = max(problem.head_dim, problem.head_dim_v), SHORT[problem.dtype]
    chosen = [_variant(step, dtype, widest) for step in steps]
    return [launch for variant in chosen for launch in along_x(variant, _blocks(problem, variant))]


def sink_gradients(problem: Problem) -> list[Launch]:
    """The launches of dsinks, for families that have none: they need delta."""
    return _launches(problem, ["dsinks"] * problem.sinks)


def plan(problem: Problem, arch: Arch) -> Plan:
    """The kernels for a problem that is not refused."""
    launches = tuple(_launches(problem, _steps(problem)))
    if problem.direction == "forward":
        return Plan(arch.name, NAME, launches)
    return Plan(arch.name, NAME, launches, *laid_out(("delta", problem.accumulator, rows_of(problem))))

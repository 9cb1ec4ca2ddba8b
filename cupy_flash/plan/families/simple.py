"""The simple kernels: any dtype, head dims up to 512, any strides, any architecture, in IEEE arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

from ...call.problem import Problem
from ...program.c_text import reads_learnable
from ...program.graph import MOST_ARGUMENTS, Body
from ..catalog import SAME_BITS, SHORT, Arch, Variant
from ..launch import Launch, Part, Plan, along_x, blocks_of, laid_out, rows_of

__all__ = [
    "HEAD_DIMS",
    "NAME",
    "READ",
    "ZEROED",
    "argument_gradients",
    "argument_sums",
    "delta",
    "function_refusals",
    "hessian_launches",
    "hessian_workspace",
    "of_function",
    "plan",
    "refusals",
    "sink_gradients",
    "variants",
]

NAME = "simple"

_THREADS = 256
ZEROED = ("argument_sums",)
# The options of scores that these kernels and those of the flash family read.
READ = ("mask", "bias", "Spans", "BlockMask", "score function", "ALiBi", "softcap", "dropout")
HEAD_DIMS = (64, 128, 256, 512)
_SAME_BITS = (
    "bits      are those of every GPU and of the simulator: IEEE operations in one order, no tensor cores"
)
# Sums for the learned arguments of a score function: each slice has one block and a sum per element.
_MOST_SLICES, _SLICES_BYTES = 256, 64 << 20

# (queries, keys, shared bytes) per head dim class, for float and for double accumulators; a single entry
# serves every head dim. At most 48 KiB, which needs no opt-in on any architecture.
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
# Second order: the tiles of the differentiated passes, or smaller, because registers hold more tiles of
# scores.
_TILES |= {f"{step}_dot": _TILES[step] for step in ("delta", "dbias", "dsinks")} | {
    "jvp": (
        ((64, 64, 35840), (64, 32, 25600), (32, 64, 25088), (32, 64, 25088)),
        _TILES["forward"][1],
    ),
    "dq_dot": (
        ((64, 32, 23040), (64, 32, 25600), (32, 64, 25088), (16, 64, 20736)),
        ((32, 32, 25088), (32, 32, 25088), (32, 32, 25088), (16, 32, 20736)),
    ),
    "dkv_dot": (
        ((64, 32, 25088), (64, 16, 20736), (64, 16, 20736), (64, 16, 20736)),
        ((32, 32, 25088), (32, 16, 20736), (32, 16, 20736), (16, 16, 18688)),
    ),
}

# Statistics: sums over the weights, for any head dim.
_OF_STATISTICS = ("by_key", "by_query")
_TILES |= {"by_key": (((64, 64, 35840),), ((32, 64, 33792),)), "by_query": _TILES["dbias"]}

# Gradients of the learned arguments of a score function; compiled only with a function.
_OF_ARGUMENTS = ("args_sum", "args_reduce")
_TILES |= {"args_sum": _TILES["dbias"], "args_reduce": (((1, 1, 0),), ((1, 1, 0),))}
# Passes that compute scores, and so call the score function.
_WITH_SCORES = ("forward", "dq", "dkv", "dbias")
_OF_SECOND_ORDER = ("jvp", "dq_dot", "dkv_dot", "dbias_dot")
# Passes that are also compiled for the same bits on every GPU.
_FIRST_ORDER = ("forward", "delta", "dq", "dkv", "dbias", "dsinks")

# Spilled bytes by target, the larger of both compilers. dkv_dot of 512: accumulators of 16 keys take 128
# registers of a thread, and a block cannot own fewer keys. dkv_dot of 64: the checks of a BlockMask per pair;
# with half the keys, everything else would be read twice as often.
_SPILLED = {
    ("dkv_dot", "f64", 512): (
        ("sm_70", 16), ("sm_75", 16), ("sm_80", 16), ("sm_86", 16), ("sm_90a", 24), ("sm_100", 24),
    ),
    **dict.fromkeys(product(("dkv_dot",), ("f16", "bf16", "f32"), (64,)), (("sm_70", 24),)),
    **dict.fromkeys(
        product(("dbias_dot",), ("f16", "bf16", "f32"), (512,)), (("sm_61", 184), ("sm_70", 60)),
    ),
}  # fmt: skip


def _variant(step: str, dtype: str, widest: int, function: Body | None = None) -> Variant:
    """The kernel of a pass for head dims up to `widest`, at most 512."""
    rows = _TILES[step][dtype in ("f64", "ieee64")]
    classes = HEAD_DIMS[-len(rows) :]
    row = next(n for n, largest in enumerate(classes) if widest <= largest)
    (m, n, shared_bytes), d = rows[row], classes[row]
    allowed = _SPILLED.get((step, dtype, d), ())
    return Variant(
        *_kernel(step), dtype, d, d, (m, n), _THREADS, shared_bytes, allowed_spills=allowed,
        function=function if step in _WITH_SCORES + _OF_SECOND_ORDER + _OF_ARGUMENTS else None,
    )  # fmt: skip


def of_function(function: Body, dtype: str, head_dim: int, second_order: bool = False) -> list[Variant]:
    """The variants compiled for a score function: passes that compute scores, and those for its arguments."""
    # why all that may be learned: in torch, each call decides which arguments are.
    steps = _WITH_SCORES + _OF_ARGUMENTS * reads_learnable(function)
    steps += _OF_SECOND_ORDER * second_order
    return [_variant(step, dtype, head_dim, function) for step in steps]


def _kernel(step: str) -> tuple[str, str, str]:
    """Source, pass and params struct of a step."""
    if step == "forward":
        return "simple_forward.cu", "", "ForwardParams"
    if step == "jvp":
        return "simple_tangent.cu", "", "SecondOrderParams"
    if step.endswith("_dot"):
        return "simple_hessian.cu", step, "SecondOrderParams"
    if step in _OF_STATISTICS:
        return "simple_statistics.cu", step, "StatisticsParams"
    if step in _OF_ARGUMENTS:
        return "simple_backward_args.cu", step.removeprefix("args_"), "ArgumentParams"
    return "simple_backward.cu", step, "BackwardParams"


def variants(_arch: Arch) -> Iterator[Variant]:
    """All variants of this family, the same for every architecture."""
    steps = [step for step in _TILES if step not in _OF_ARGUMENTS]
    for step, dtype, head_dim in product(steps, SHORT.values(), HEAD_DIMS):
        yield _variant(step, dtype, head_dim)
    for step, dtype, head_dim in product(_FIRST_ORDER, SAME_BITS.values(), HEAD_DIMS):
        yield _variant(step, dtype, head_dim)


def _steps(problem: Problem) -> list[str]:
    if problem.direction in ("forward", "jvp"):
        return [problem.direction]
    if problem.direction == "statistics":
        of_keys = "key_sum" in problem.wanted or "key_max" in problem.wanted
        return ["by_key"] * of_keys + ["by_query"] * ("entropy" in problem.wanted)
    steps = ["delta", "dq", "dkv", *["dbias"] * problem.want_dbias, *["dsinks"] * problem.sinks]
    if problem.direction == "hvp":
        return [f"{step}_dot" for step in steps]
    return [*steps, *_OF_ARGUMENTS * bool(problem.learned_elements)]


def function_refusals(problem: Problem) -> list[str]:
    """Reasons why no kernel supports a score function."""
    function = problem.function
    if function is None:
        return []
    reasons = []
    if problem.learned_elements >= 2**31:
        reasons.append("gives gradients of fewer than 2**31 elements that a score function learns")
    if len(function.arguments) > MOST_ARGUMENTS:
        reasons.append(f"takes at most {MOST_ARGUMENTS} arguments of a score function")
    return reasons


def _computed_in(problem: Problem) -> str:
    return (SAME_BITS if problem.reproducible == "device" else SHORT)[problem.dtype]


def _same_bits_refusals(problem: Problem) -> list[str]:
    """Reasons why there is no kernel with the same bits on every architecture."""
    reasons = []
    if problem.dtype not in SAME_BITS:
        reasons.append(f"has the same bits on every device for float32 and float64, not {problem.dtype}")
    if problem.function:
        reasons.append("the exponentials of score functions differ between architectures")
    return reasons


def _statistics_refusals(problem: Problem) -> list[str]:
    """Reasons why there is no kernel for some statistics."""
    reasons = []
    if problem.cache is not None:
        reasons.append("counts no weights over a cache")
    if problem.function is not None:
        reasons.append("counts no weights of score functions")
    if "top_keys" in problem.wanted:
        reasons.append("lists no largest weights (top_k)")
    return reasons


def refusals(problem: Problem, _arch: Arch) -> list[str]:
    """All reasons why these kernels do not support a problem."""
    reasons = _statistics_refusals(problem) if problem.direction == "statistics" else []
    if problem.dtype not in SHORT:
        return [*reasons, f"computes with 16-bit and wider inputs, not {problem.dtype}"]
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest > HEAD_DIMS[-1]:
        reasons.append(f"head_dim {widest} is above {HEAD_DIMS[-1]}")
    if problem.reproducible == "device":
        reasons += _same_bits_refusals(problem)
    reasons += [f"does not read {name}" for name in problem.unread(READ)]
    reasons += function_refusals(problem)
    if problem.precision in ("tf32", "tf32x3"):
        reasons.append(f"computes in IEEE float32, not {problem.precision}")
    if problem.tile is not None:
        dtype, taken = _computed_in(problem), min(widest, HEAD_DIMS[-1])
        built = {_variant(step, dtype, taken).tile for step in _steps(problem)}
        if problem.tile not in built:
            tiles = ", ".join(map(str, sorted(built)))
            reasons.append(f"tile {problem.tile} is not built (built: {tiles})")
    return reasons


def _blocks(problem: Problem, variant: Variant) -> int:
    """Number of blocks of one kernel, all along x; the banners of the .cu files have the formulas."""
    p, (m, n), step = problem, variant.tile, variant.step.removesuffix("_dot")
    if step == "dkv":
        return p.batch * p.heads_k * blocks_of(p.seqlen_k, n)
    if step == "by_key":
        return p.batch * p.heads_q * blocks_of(p.seqlen_k, n)
    if step == "dbias":
        b, h, i, j = p.bias or (0, 0, 0, 0)
        return b * h * blocks_of(i, m) * blocks_of(j, n)
    if step == "dsinks":
        return p.heads_q
    if step == "sum":
        return _slices(p)
    if step == "reduce":
        return blocks_of(p.learned_elements, _THREADS)
    return p.batch * p.heads_q * blocks_of(p.seqlen_q, m)


def _launches(problem: Problem, steps: Iterable[str]) -> list[Launch]:
    widest, dtype = max(problem.head_dim, problem.head_dim_v), _computed_in(problem)
    chosen = [_variant(step, dtype, widest, problem.function) for step in steps]
    return [launch for variant in chosen for launch in along_x(variant, _blocks(problem, variant))]


def delta(problem: Problem) -> Variant:
    """The kernel for delta, for families without one."""
    return _variant("delta", _computed_in(problem), HEAD_DIMS[-1])


def sink_gradients(problem: Problem) -> list[Launch]:
    """The launches for dsinks, for families without such a kernel; they need delta."""
    return _launches(problem, ["dsinks"] * problem.sinks)


def argument_gradients(problem: Problem) -> list[Launch]:
    """The launches for gradients of learned arguments, for families without such kernels."""
    return _launches(problem, _OF_ARGUMENTS * bool(problem.learned_elements))


def argument_sums(problem: Problem) -> list[tuple[str, str, tuple[int, ...]]]:
    """The part of the workspace that these kernels add to; it must be zeroed."""
    if not problem.learned_elements:
        return []
    return [("argument_sums", "float64", (_slices(problem), problem.learned_elements))]


def _slices(problem: Problem) -> int:
    """Number of blocks that add at once; it depends on the problem alone, as it fixes the summation order."""
    p = problem
    tiles = p.batch * p.heads_q * blocks_of(p.seqlen_q, _TILES["args_sum"][0][0][0])
    return max(1, min(tiles, _MOST_SLICES, _SLICES_BYTES // (8 * p.learned_elements)))


def hessian_launches(problem: Problem) -> tuple[list[Launch], list[Launch]]:
    """The launches before and after the hvp passes with products, for families that have only these."""
    return _launches(problem, ["delta_dot"]), _launches(problem, ["dsinks_dot"] * problem.sinks)


def hessian_workspace(problem: Problem) -> tuple[tuple[Part, ...], int]:
    """The workspace that the first hvp pass writes for the others, and its bytes."""
    return laid_out(*((name, problem.accumulator, rows_of(problem)) for name in ("delta", "delta_dot")))


def plan(problem: Problem, arch: Arch) -> Plan:
    """The plan for a problem that is not refused."""
    launches = tuple(_launches(problem, _steps(problem)))
    notes = (_SAME_BITS,) if problem.reproducible == "device" else ()
    if problem.direction in ("forward", "jvp", "statistics"):
        return Plan(arch.name, NAME, launches, notes=notes)
    if problem.direction == "hvp":
        return Plan(arch.name, NAME, launches, *hessian_workspace(problem), notes=notes)
    workspace = laid_out(("delta", problem.accumulator, rows_of(problem)), *argument_sums(problem))
    return Plan(arch.name, NAME, launches, *workspace, zeroed=ZEROED, notes=notes)

"""The command line, python -m cupy_flash or cupy-flash: info, check, explain, memory, build."""

from __future__ import annotations

import argparse
import errno
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from .call.arrays import numpy_dtype
from .call.operands import FLOAT8, FLOATS
from .call.options import PER_HEAD
from .call.public_names import type_phrase
from .call.reproducible import MODES
from .errors import CubinNotFoundError, InvalidArgumentsError, UnsupportedError
from .explain_cli import BROADCASTS, arguments_of_explain, refuse_without
from .functions import ScoreFunction
from .report import MemoryReport, explain, memory_report
from .version import __version__

# Columns of the support table, and default architectures of explain.
_SHOWN = ("sm_75", "sm_80", "sm_90a", "sm_120")


def _integer(text: str, what: str) -> int:
    """Parse an integer. why not int alone: for a ValueError argparse shows the name of the function."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None


def _bound(text: str) -> int | None:
    return None if text == "open" else _integer(text, "a number of keys, nor open")


def _align(text: str) -> str | int:
    try:
        return int(text)
    except ValueError:
        return text


def _seed(text: str) -> int:
    seed = _integer(text, "an integer")
    if seed < 0:
        raise argparse.ArgumentTypeError(f"{seed} is below 0")
    return seed


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that explain and memory share."""
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8, help="heads of q (default: 8)")
    parser.add_argument("--heads-k", type=int, help="heads of k and v (default: those of q)")
    parser.add_argument("--seqlen", type=int, default=4096, help="number of queries (default: 4096)")
    parser.add_argument("--seqlen-k", type=int, help="number of keys (default: as queries)")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--head-dim-v", type=int, help="head dim of v (default: that of q and k)")
    parser.add_argument("--dtype", default="float16", choices=(*FLOATS, FLOAT8), help="default: float16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--window", nargs=2, type=_bound, metavar=("LEFT", "RIGHT"),
                        help="visible keys before and after a query's position; open: all")  # fmt: skip
    parser.add_argument("--align", type=_align, help="top_left, bottom_right, or the key position of query 0")
    parser.add_argument(
        "--backward", action="store_true", help="the backward pass instead of the forward pass"
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    """Add the other options of attention, and of attention_with_kv_cache."""
    options = parser.add_argument_group("options of attention()")
    options.add_argument("--layout", choices=("bhsd", "bshd"), default="bhsd")
    options.add_argument("--scale", type=float)
    options.add_argument("--softcap", type=float)
    options.add_argument("--dropout", type=float, default=0.0)
    options.add_argument("--precision", choices=("ieee", "tf32x3", "tf32"), help="products of float32 inputs")
    options.add_argument(
        "--reproducible", choices=MODES, help="guarantee of equal bits (docs/reproducible.md)"
    )
    options.add_argument("--tile", nargs=2, type=int, metavar=("QUERIES", "KEYS"))
    arrays = parser.add_argument_group(
        "arrays of attention()",
        "Shapes of --mask and --bias: keys (batch, 1, 1, keys); pairs (1, 1, queries, keys); "
        "heads (1, heads, queries, keys); full (batch, heads, queries, keys). "
        "Inputs of float8_e4m3fn have scales.",
    )
    arrays.add_argument("--mask", choices=BROADCASTS)
    arrays.add_argument("--spans", choices=("key", "query"), help="mask of one interval per key or per query")
    arrays.add_argument(
        "--blocks", type=int, metavar="SIZE", help="mask of blocks of SIZE queries and SIZE keys"
    )
    arrays.add_argument("--bias", choices=BROADCASTS)
    arrays.add_argument("--bias-dtype", help="dtype of the bias (default: that of q)")
    for name in PER_HEAD:
        arrays.add_argument(f"--{name.replace('_', '-')}", action="store_true", help="one number per head")
    _add_function(options)
    cache = parser.add_argument_group("options of attention_with_kv_cache()")
    cache.add_argument(
        "--cache", type=int, metavar="KEYS", help="attend over a KV cache with room for KEYS per sequence"
    )
    cache.add_argument("--page", type=int, metavar="KEYS", help="keys per page of a paged cache")
    cache.add_argument("--cache-dtype", help="int8 or float8_e4m3fn (default: that of q)")
    cache.add_argument("--append", type=int, metavar="KEYS", help="new keys per sequence, appended first")
    cache.add_argument("--rotary", type=int, metavar="FEATURES", help="features per head that RoPE rotates")
    cache.add_argument("--splits", type=int, help="splits of the keys (default: planned)")


def _add_function(parser: argparse._ArgumentGroup) -> None:
    """Add the arguments that name a score function."""
    parser.add_argument("--score", metavar="MODULE:NAME", help="a function made by cupy_flash.score or mask")
    parser.add_argument("--score-arg", action="append", default=[], metavar="DTYPE:AXES",
                        help="dtype and number of axes of each argument, in order: float32:1")  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    own = Path(sys.argv[0]).stem == "cupy-flash"
    parser = argparse.ArgumentParser(
        prog="cupy-flash" if own else "python -m cupy_flash",
        description="Exact flash attention for NumPy, CuPy, torch and JAX: inspect and plan calls.",
    )
    parser.add_argument("--version", action="version", version=f"cupy_flash {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    info = commands.add_parser(
        "info", help="show versions, GPUs and cubins, and what runs calls on this machine"
    )
    info.add_argument("--json", action="store_true", help="for machines")
    info.set_defaults(run=_info)
    check = commands.add_parser(
        "check", help="check results on the GPU or CPU of this machine",
        description="Compare cases of every kind with FP64, and time three calls. The exit status is 0 if "
        "all cases pass, 1 if any fails, and 2 if none could run.",
    )  # fmt: skip
    check.add_argument("--quick", action="store_true", help="only the most common cases, in about 15 s")
    check.add_argument("--seed", type=_seed, default=0, help="seed of the random inputs (default: 0)")
    check.add_argument("--device", choices=("auto", "gpu", "cpu"), default="auto")
    check.add_argument("--report", nargs="?", const="markdown", choices=("markdown", "json"),
                       help="print a report to paste into an issue (default: markdown)")  # fmt: skip
    check.set_defaults(run=_check)
    plan = commands.add_parser("explain", help="show the plan of a call, for any architecture")
    _add_sizes(plan)
    plan.add_argument(
        "--arch", action="append", help=f"such as sm_90a, or cpu; may repeat (default: {', '.join(_SHOWN)})"
    )
    _add_options(plan)
    plan.set_defaults(run=_explain)
    memory = commands.add_parser("memory", help="show the memory of a call, naive and flash, and its FLOP")
    _add_sizes(memory)
    memory.add_argument("--arch", help="show tiles and shared memory on this architecture too")
    memory.add_argument("--json", action="store_true", help="for machines")
    memory.set_defaults(run=_memory)
    build = commands.add_parser("build", help="compile the shipped kernels into the user's cache")
    build.add_argument("--arch", help="architecture, such as sm_90a (default: the GPUs of this machine)")
    build.add_argument(
        "--cuda", type=int, choices=(12, 13), help="CUDA major version (default: by the driver)"
    )
    of_function = build.add_argument_group("kernels of a score function instead")
    _add_function(of_function)
    of_function.add_argument(
        "--dtype", action="append", help="dtype of q, k and v; may repeat (default: float16)"
    )
    of_function.add_argument(
        "--head-dim", action="append", type=int, help="head dim; may repeat (default: 64)"
    )
    of_function.add_argument("--second-order", action="store_true", help="also the kernels of jvp and hvp")
    of_function.add_argument("--out", help="folder to write instead of the cache, for CUPY_FLASH_CUBIN_DIR")
    build.set_defaults(run=_build)
    return parser


# ---------------------------------------------------------------------- commands


def _info(args: argparse.Namespace) -> int:
    from .info import info_text

    print(info_text(as_json=args.json))
    return 0


def _check(args: argparse.Namespace) -> int:
    from .check import check

    try:
        found = check(args.device, quick=args.quick, seed=args.seed)
    except KeyboardInterrupt:
        print("interrupted; nothing is left behind", file=sys.stderr)
        return 130
    shown = {None: found.screen, "markdown": found.as_markdown, "json": found.as_json}
    print(shown[args.report]())
    return found.status


def _explain(args: argparse.Namespace) -> int:
    call = arguments_of_explain(args)
    if args.score is not None:
        function = _function(args.score)(*_stand_ins(args.score_arg))
        if function.program.masks:
            call["mask"] = (*(call["mask"] or ()), function)
        else:
            call["score"] = function
    for arch in args.arch or _SHOWN:
        print(explain(**call, arch=None if arch == "cpu" else arch), end="\n\n")
    return 0


def _memory(args: argparse.Namespace) -> int:
    report = memory_report(
        args.batch,
        args.heads,
        args.seqlen,
        args.head_dim,
        heads_k=args.heads_k,
        seqlen_k=args.seqlen_k,
        head_dim_v=args.head_dim_v,
        dtype=args.dtype,
        causal=args.causal,
        window=args.window,
        align=args.align,
        backward=args.backward,
        arch=args.arch,
    )
    print(_as_json(report) if args.json else report)
    return 0


def _as_json(report: MemoryReport) -> str:
    plan = report.plan
    facts = {**report._asdict(), "problem": report.problem.summary(), "plan": None}
    if plan is not None:
        kernels = [
            {"name": x.variant.name, "tile": x.variant.tile, "grid": x.grid, "shared_bytes": x.shared_bytes}
            for x in plan.launches
        ]
        facts["plan"] = {"arch": plan.arch, "family": plan.family, "kernels": kernels,
                         "workspace_bytes": plan.workspace_bytes}  # fmt: skip
    return json.dumps(facts, indent=2)


def _build(args: argparse.Namespace) -> int:
    from .cubins.build import BuildFailed
    from .cubins.user_cache import into_user_cache
    from .device.choice import build_targets

    refuse_without(args, "score", "score_arg", "dtype", "head_dim", "second_order", "out")
    archs = None if args.arch is None else [args.arch]
    try:
        if args.score is not None:
            folders = _function(args.score).build(
                _stand_ins(args.score_arg), archs=archs, dtypes=args.dtype or ["float16"],
                head_dims=args.head_dim or [64], second_order=args.second_order, cuda=args.cuda,
                out=args.out,
            )  # fmt: skip
        else:
            folders = into_user_cache(*build_targets(archs, args.cuda))
        for folder in folders:
            print(folder)
    except BuildFailed as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command again goes on from what is finished", file=sys.stderr)
        return 130
    return 0


def _function(named: str) -> ScoreFunction:
    """Import the score function MODULE:NAME."""
    module, _, name = named.partition(":")
    sys.path.insert(0, "")  # as python -m does: modules of the current folder
    try:
        if module.startswith("."):
            raise ValueError("it is relative")
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        hint = "--score module:name, where name is made by cupy_flash.score or cupy_flash.mask"
        raise InvalidArgumentsError(f"there is no {named!r}: {error}.", hint=hint) from error
    if not isinstance(found, ScoreFunction):
        raise InvalidArgumentsError(f"{named} is {type_phrase(found)}.", hint="a cupy_flash.ScoreFunction")
    return found


def _stand_ins(kinds: Sequence[str]) -> tuple[np.ndarray, ...]:
    """Arrays with these dtypes and numbers of axes."""
    try:
        pairs = [kind.partition(":") for kind in kinds]
        return tuple(np.zeros((1,) * int(axes), numpy_dtype(dtype)) for dtype, _, axes in pairs)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentsError(f"--score-arg is {error}.", hint="--score-arg float32:1") from error


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    The exit code is 0, 1 for an error of the library, 2 for a wrong command, 130 for ^C, 141 if the reader of
    stdout is gone; check also exits with 1 if something is wrong, and with 2 if nothing could be checked.
    """
    try:
        try:
            args = _parser().parse_args(arguments)
            run: Callable[[argparse.Namespace], int] = args.run
            return run(args)
        finally:
            if sys.stdout is not None:  # None if the shell has closed it
                sys.stdout.flush()
    except (InvalidArgumentsError, UnsupportedError, CubinNotFoundError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # why: at exit Python would flush the buffer, and fail, once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            return 141  # as for a command killed by SIGPIPE
        print(f"the output cannot be written: {error.strerror}.\nTry: a file elsewhere", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

"""python -m cupy_flash: info, explain, memory, build."""

from __future__ import annotations

import argparse
import sys

from .errors import CubinNotFound, InvalidArguments, Unsupported
from .plan import catalog
from .report import memory_report, plan_text
from .version import __version__

# The columns of the support table, and what explain prints when no architecture is named.
_SHOWN = ("sm_75", "sm_80", "sm_90a", "sm_120")


def _problem_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8, help="heads of q")
    parser.add_argument("--heads-k", type=int, help="heads of k and v (default: as q)")
    parser.add_argument("--seqlen", type=int, default=4096, help="queries")
    parser.add_argument("--seqlen-k", type=int, help="keys (default: as queries)")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--align", choices=("top_left", "bottom_right"))
    parser.add_argument("--backward", action="store_true")


def _report(args: argparse.Namespace, arch: str | None) -> str:
    report = memory_report(
        args.batch,
        args.heads,
        args.seqlen,
        args.head_dim,
        heads_k=args.heads_k,
        seqlen_k=args.seqlen_k,
        dtype=args.dtype,
        causal=args.causal,
        align=args.align,
        backward=args.backward,
        arch=arch,
    )
    if args.command == "memory":
        return str(report)
    assert report.plan is not None
    return plan_text(report.problem, report.plan)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code is 0, 1 for an error of ours, 2 for a wrong command, 130 for ^C."""
    parser = argparse.ArgumentParser(prog="python -m cupy_flash", description=f"cupy_flash {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="versions, GPUs, cubin sets, and what would run here")
    info.add_argument("--json", action="store_true", help="for machines")
    explain = commands.add_parser("explain", help="the plan of a problem, for any architecture")
    _problem_arguments(explain)
    explain.add_argument("--arch", action="append", help=f"default: {', '.join(_SHOWN)}")
    memory = commands.add_parser("memory", help="bytes and work of a problem, naive and flash")
    _problem_arguments(memory)
    memory.add_argument("--arch", help="also tiles and shared memory on this architecture")
    build = commands.add_parser("build", help="compile the shipped kernels into the user's cache")
    build.add_argument("--arch", help="default: the GPU of this machine")
    build.add_argument("--cuda", type=int, choices=(12, 13), help="CUDA major (default: by the driver)")
    args = parser.parse_args(arguments)
    try:
        if args.command == "info":
            from .info import info_text

            print(info_text(as_json=args.json))
        elif args.command == "explain":
            for arch in args.arch or _SHOWN:
                catalog.architecture(arch)
                print(_report(args, arch), end="\n\n")
        elif args.command == "memory":
            print(_report(args, args.arch))
        else:
            from .cubins.build import BuildFailed, into_user_cache
            from .cubins.locate import usable_sets

            archs, cudas = [args.arch], usable_sets(None)
            if args.arch is None:
                from .device import driver

                archs = sorted({device.arch for device in driver.devices()})
                cudas = usable_sets(driver.driver_version())
            try:
                for folder in into_user_cache(archs, (args.cuda,) if args.cuda else cudas):
                    print(folder)
            except BuildFailed as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
                return 1
            except KeyboardInterrupt:
                print("interrupted; the same command again goes on from what is finished", file=sys.stderr)
                return 130
    except (InvalidArguments, Unsupported, CubinNotFound) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

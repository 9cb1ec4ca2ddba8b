"""python -m bench: compare the speed of cupy_flash with its peers, on any machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .commands import (
    agreement,
    cold,
    compare,
    cost,
    cpu,
    decode,
    functions,
    fuzz,
    gpu_check,
    latency,
    latents,
    layers,
    lengths,
    memory,
    overhead,
    pages,
    parallel,
    plot,
    probes,
    soak,
    spans,
    tune,
    varlen,
)
from .measure import results
from .measure.session import Settings


class Command(NamedTuple):
    """A subcommand: its help, its function, and its arguments in addition to the common ones."""

    help: str
    run: Callable[..., object]
    arguments: Callable[[argparse.ArgumentParser], None] | None = None
    measures: bool = True


COMMANDS = {
    "forward": Command("speed of the forward pass by length, head dim and dtype", lengths.forward),
    "backward": Command("speed of the backward pass", lengths.backward),
    "decode": Command("one query over long caches, compared with the copy bandwidth", decode.run),
    "latents": Command("decode over one array of latents, compared with keys and values in two", latents.run),
    "varlen": Command("packed sequences, compared with one call per sequence", varlen.run),
    "latency": Command("small problems, from the call to the result", latency.run),
    "cold": Command("import, first and second call in a fresh process", cold.run),
    "memory": Command("bytes at the peak of a call, by length", memory.run),
    "cpu": Command("our core and our NumPy path, compared with torch and JAX on the CPU", cpu.run),
    "layers": Command("attention between torch's linear layers on the CPU, as models call it", layers.run),
    "functions": Command("score functions, compared with torch's flex_attention on the CPU", functions.run),
    "spans": Command("masks as intervals, compared with equivalent masks on the CPU", spans.run),
    "overhead": Command("what a call costs besides its arithmetic", lambda _: overhead.run(), measures=False),
    "agreement": Command("what it costs that processes compare their calls", agreement.run, measures=False),
    "cost": Command(
        "least times by the cost model, for GPUs at hand or not", cost.run, cost.arguments, False
    ),
    "parallel": Command("a sequence over many GPUs, by the model of schedules", parallel.run, measures=False),
    "probes": Command("ceilings, exp, launches, cubins", probes.run, probes.arguments, measures=False),
    "gpu_check": Command(
        "all of it, in one visit to a GPU", gpu_check.run, gpu_check.arguments, measures=False
    ),
    "tune": Command("tiles that a kernel might have, measured", tune.run, tune.arguments, measures=False),
    "soak": Command("random valid problems against FP64", soak.run, soak.arguments, measures=False),
    "fuzz": Command("calls with nonsense among their arguments", fuzz.run, fuzz.arguments, measures=False),
    "compare": Command(
        "ratios of two result files, and whether noise explains them", compare.run, compare.arguments, False
    ),
    "plot": Command("the figures, from measured rows only", plot.run, plot.arguments, measures=False),
    "pages": Command("docs/benchmarks, from measured rows only", pages.run, measures=False),
}


def everything(settings: Settings) -> None:
    """Run all measurements that this machine supports, then draw the figures."""
    for name, command in COMMANDS.items():
        if command.measures and name != "all":
            print(f"== {name}", flush=True)
            command.run(settings)
    overhead.run()
    plot.run(argparse.Namespace(results=settings.results, out=plot.PLOTS))


COMMANDS["all"] = Command("every measurement, one after the other, then the figures", everything)


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="under 2 minutes: fewer cases and repetitions")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    parser.add_argument(
        "--peers", metavar="WORDS", help="libraries to compare with, such as 'torch,jax'; '' for none"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose label contains TEXT")
    parser.add_argument("--results", type=Path, default=results.RESULTS, metavar="DIR",
                        help="or one FILE.csv for everything")  # fmt: skip
    parser.add_argument("--minutes", type=float, help="start no case after this many minutes")
    parser.add_argument("--resume", action="store_true", help="skip cases that the results already have")
    parser.add_argument("--threads", type=int, help="CPU threads of NumPy and torch (default: all cores)")


def main(words: list[str] | None = None) -> int:
    """Run a command line; 2 for a wrong one, else 0, whatever peers or GPUs are missing."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.help, description=command.help)
        if command.measures:
            _common(sub)
        if command.arguments:
            command.arguments(sub)
    arguments = parser.parse_args(words)
    command = COMMANDS[arguments.command]
    if not command.measures:
        result = command.run(arguments)
    else:
        for name in ("minutes", "threads"):
            value = getattr(arguments, name)
            if value is not None and value <= 0:
                parser.error(f"--{name} must be above 0")
        settings = Settings(**{name: getattr(arguments, name) for name in Settings._fields})
        result = command.run(settings, arguments) if command.arguments else command.run(settings)
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    sys.exit(main())

"""python -m bench: time cupy_flash beside its peers."""

from __future__ import annotations

import argparse

from . import cpu, overhead


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    on_cpu = commands.add_parser("cpu", help="the NumPy path beside torch's CPU attention, FP32")
    on_cpu.add_argument("--quick", action="store_true", help="fewer repetitions, small shapes only")
    on_cpu.add_argument("--threads", type=int, default=None, help="of both; all cores by default")
    commands.add_parser("overhead", help="what a call costs besides its arithmetic")
    chosen = parser.parse_args()
    if chosen.command == "cpu":
        cpu.run(quick=chosen.quick, threads=chosen.threads)
    else:
        overhead.run()


if __name__ == "__main__":
    main()

"""plot: the figures of the README, from measured rows only."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from ..measure import results
from ..measure.peers import OURS
from ..measure.results import calm, case, right

PLOTS = Path(__file__).parents[1] / "plots"
Rows = list[dict[str, str]]

# Colour of each implementation in all figures.
_COLOURS = {
    "cupy_flash": "#c1121f",
    "cupy_flash deterministic": "#e07a5f",
    "torch": "#1d3557",
    "torch cudnn": "#2a9d8f",
    "torch flash": "#457b9d",
    "torch efficient": "#8ecae6",
    "torch math": "#8d99ae",
    "jax xla": "#e9a23b",
    "jax cudnn": "#f4a261",
    "flash-attn 2": "#6a4c93",
    "flash-attn 3": "#9b5de5",
    "flash-attn 4": "#c77dff",
    "flash-attn3-jax": "#b08968",
    "naive": "#adb5bd",
    "numpy read": "#74a57f",
    "numpy copy": "#b5ceb0",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, default=results.RESULTS, metavar="DIR")
    parser.add_argument("--out", type=Path, default=PLOTS, metavar="DIR")


def newest(rows: Iterable[dict[str, str]]) -> Rows:
    """The last run of each measurement; a run on a busy machine only if there is no other."""
    kept: dict[tuple[str, ...], dict[str, str]] = {}
    for row in map(results.pooled, results.runs(rows)):
        held = kept.get(results.identity(row))
        if held is None or calm(row) or not calm(held):
            kept[results.identity(row)] = row
    return list(kept.values())


def timed(rows: Rows) -> Rows:
    """Rows with valid times: not on a busy machine, and with correct results."""
    return [row for row in newest(rows) if calm(row) and right(row)]


def of_one_gpu(rows: Rows) -> Rows:
    """Rows of the most frequent GPU, since lines of different GPUs cannot be compared in one panel."""
    most = Counter(row["gpu"] for row in rows).most_common(1)
    return [row for row in rows if row["gpu"] == most[0][0]] if most else []


def of_one_cpu(rows: Rows) -> Rows:
    """Rows of the CPU that ran the most implementations, since bars of different CPUs cannot be compared."""
    ran: dict[str, set[str]] = {}
    for row in rows:
        if row["what"] == "cpu":
            ran.setdefault(row["cpu"], set()).add(row["implementation"])
    most = max(ran, key=lambda cpu: len(ran[cpu]), default="")
    return [row for row in rows if row["cpu"] == most]


def of_first_dtype(rows: Rows) -> Rows:
    return [row for row in rows if row["dtype"] == rows[0]["dtype"]]


def _where(rows: Rows) -> str:
    """Machine and date, for the caption."""
    machines = sorted({row["gpu"] or f"{row['cpu']}, {row['cores']} cores" for row in rows})
    days = sorted({row["when"][:10] for row in rows})
    return f"{', '.join(machines)}; {days[0]}" + (f" to {days[-1]}" if days[-1] != days[0] else "")


def _lines(axes: Any, rows: Rows, x: str, y: str) -> None:
    """Plot one line per implementation."""
    for name in dict.fromkeys(row["implementation"] for row in rows):
        mine = sorted((r for r in rows if r["implementation"] == name and r[y]), key=lambda r: float(r[x]))
        if mine:
            xs = [float(row[x]) for row in mine]
            ys = [float(row[y]) for row in mine]
            style = {"color": _COLOURS.get(name), "lw": 2.2 if name == "cupy_flash" else 1.3}
            axes.plot(xs, ys, marker="o", ms=4, label=name, **style)
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)


# ---------------------------------------------------------------------- figures


def speed(rows: Rows, plt: Any) -> Any:
    """Plot rates by length, with one row of panels per pass and mask, one column per head dim."""
    rows = [row for row in timed(rows) if row["what"] in ("forward", "backward") and not row["heads_k"]]
    rows = of_first_dtype(rows)
    lengths = {row["seqlen"] for row in rows if row["implementation"] == OURS.name}
    if len(lengths) < 2:
        return None
    head_dims = sorted({int(row["head_dim"]) for row in rows})
    kinds = sorted({(row["what"] != "forward", row["causal"]) for row in rows})
    names = dict.fromkeys(row["implementation"] for row in rows)
    figure, grid = plt.subplots(
        len(kinds), len(head_dims), figsize=(3 * len(head_dims), 2.1 * len(kinds) + 0.6),
        squeeze=False, sharex=True, sharey=True,
    )  # fmt: skip
    lines: dict[str, Any] = {}
    for panels, (backward, causal) in zip(grid, kinds, strict=True):
        for axes, head_dim in zip(panels, head_dims, strict=True):
            panel = [
                row
                for row in rows
                if (row["what"] != "forward", row["causal"], int(row["head_dim"]))
                == (backward, causal, head_dim)
            ]
            _lines(axes, panel, "seqlen", "tflops")
            band = ", causal" if causal == "True" else ""
            axes.set_title(f"{'backward' if backward else 'forward'}{band}, head_dim {head_dim}", fontsize=9)
            lines |= {line.get_label(): line for line in axes.get_lines()}
        panels[0].set_ylabel("TFLOP/s")
    lengths = sorted({int(row["seqlen"]) for row in rows})
    grid.flat[0].set_ylim(bottom=0)
    grid.flat[0].set_xticks(lengths, [_thousands(n) for n in lengths])
    for axes in grid[-1]:
        axes.set_xlabel("sequence length")
    shown = [name for name in names if name in lines]
    figure.legend([lines[name] for name in shown], shown, loc="upper center", ncols=len(shown), fontsize=8,
                  bbox_to_anchor=(0.5, 0.965), frameon=False)  # fmt: skip
    # The second line leaves room for the legend.
    figure.suptitle(f"{rows[0]['dtype']}, medians of visits; {_where(rows)}\n ", fontsize=10)
    return figure


def _thousands(n: int) -> str:
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)


def roofline(rows: Rows, plt: Any) -> Any:
    """Plot rates by FLOP per byte, below the ceilings measured in the same runs."""
    rows = [row for row in timed(rows) if row["tflops"] and float(row["matrix_tflops"] or 0)]
    rows = [row for row in rows if row["what"] in ("forward", "backward", "decode")]
    if not rows:
        return None
    rows = of_first_dtype(rows)  # each dtype has its own ceiling
    figure, axes = plt.subplots(figsize=(6.5, 4.2))
    for name in dict.fromkeys(row["implementation"] for row in rows):
        mine = [row for row in rows if row["implementation"] == name]
        axes.scatter(
            [1e3 * float(r["tflops"]) / float(r["gb_per_s"]) for r in mine],
            [float(r["tflops"]) for r in mine],
            s=26 if name == "cupy_flash" else 12, color=_COLOURS.get(name), label=name, alpha=0.8,
            zorder=3 if name == "cupy_flash" else 2,
        )  # fmt: skip
    xs = [1e3 * float(row["tflops"]) / float(row["gb_per_s"]) for row in rows]
    ends = (min(xs) / 1.5, max(xs) * 1.5)
    top = max(float(row["matrix_tflops"]) for row in rows)
    copy = max(float(row["copy_gb_per_s"]) for row in rows)
    slope = copy / 1e3
    knee = min(max(top / slope, ends[0]), ends[1])
    axes.plot(
        [ends[0], knee, ends[1]],
        [min(top, slope * ends[0]), min(top, slope * knee), top],
        color="black",
        lw=1,
        ls="--",
    )
    axes.annotate(f"matrix product {top:.3g} TFLOP/s", (ends[1], top), fontsize=7, va="bottom", ha="right")
    axes.annotate(f"copy {_rate(copy)} GB/s", (ends[0], min(top, slope * ends[0])), fontsize=7, va="bottom")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("FLOP per byte of operands and results")
    axes.set_ylabel("TFLOP/s")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    axes.set_title(f"{rows[0]['dtype']}, under the ceilings measured beside it; {_where(rows)}", fontsize=9)
    return figure


def _rate(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def memory(rows: Rows, plt: Any) -> Any:
    """Plot peak memory in addition to the inputs."""
    rows = [row for row in newest(rows) if row["what"] == "memory" and row["megabytes"]]
    if not rows:
        return None
    kinds = [p for p in ("forward", "forward+backward") if any(r["passes"] == p for r in rows)]
    figure, grid = plt.subplots(1, len(kinds), figsize=(4.6 * len(kinds), 3.6), squeeze=False)
    for axes, passes in zip(grid.flat, kinds, strict=True):
        _lines(axes, [row for row in rows if row["passes"] == passes], "seqlen", "megabytes")
        axes.set_yscale("log")
        axes.set_xlabel("sequence length")
        axes.set_ylabel("MB at the peak, beside the inputs")
        axes.set_title(passes, fontsize=10)
    grid.flat[0].legend(fontsize=7)
    one = rows[0]
    shape = f"B{one['batch']} H{one['heads']} D{one['head_dim']} {one['dtype']} causal"
    figure.suptitle(f"{shape}; {_where(rows)}", fontsize=9)
    return figure


def _cache(row: dict[str, str]) -> str:
    return f"B{row['batch']} H{row['heads']}/{row['heads_k']}\n{row['seqlen_k']} keys"


def decode(rows: Rows, plt: Any) -> Any:
    """Plot the bandwidth of decode, and that of a copy."""
    rows = [row for row in timed(rows) if row["what"] == "decode" and row["gb_per_s"]]
    if not rows:
        return None
    labels = list(dict.fromkeys(map(_cache, rows)))
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    figure, axes = plt.subplots(figsize=(min(10, 1.6 * len(labels) + 2.5), 3.6))
    width = 0.8 / len(names)
    for n, name in enumerate(names):
        mine = {_cache(row): float(row["gb_per_s"]) for row in rows if row["implementation"] == name}
        places = [i + n * width for i, label in enumerate(labels) if label in mine]
        axes.bar(places, [mine[label] for label in labels if label in mine], width, label=name,
                 color=_COLOURS.get(name))  # fmt: skip
    axes.set_xticks([i + 0.4 - width / 2 for i in range(len(labels))], labels, fontsize=8)
    if copies := [float(row["copy_gb_per_s"]) for row in rows if row["gpu"] and row["copy_gb_per_s"]]:
        axes.axhline(max(copies), color="black", lw=1, ls="--", label=f"best copy, {max(copies):.0f} GB/s")
    axes.set_ylabel("GB/s of keys and values")
    axes.margins(y=0.3)  # room for the legend
    axes.legend(fontsize=7, ncols=3, loc="upper left")
    axes.set_title(_where(rows), fontsize=9)
    return figure


def error(rows: Rows, plt: Any) -> Any:
    """Plot the largest error against FP64 by dtype."""
    rows = [row for row in newest(rows) if row["error"] not in ("", "nan")]
    if not rows:
        return None
    passes = [p for p in ("forward", "backward", "forward+backward") if any(r["passes"] == p for r in rows)]
    labels = [
        (dtype, p)
        for dtype in dict.fromkeys(row["dtype"] for row in rows)
        for p in passes
        if any(row["dtype"] == dtype and row["passes"] == p for row in rows)
    ]
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    figure, axes = plt.subplots(figsize=(min(10, 1.7 * len(labels) + 2.5), 3.6))
    for n, name in enumerate(names):
        points = [
            (i + 0.8 * n / len(names), float(row["error"]))
            for i, (dtype, p) in enumerate(labels)
            for row in rows
            if (row["implementation"], row["dtype"], row["passes"]) == (name, dtype, p)
        ]
        if points:
            axes.scatter(*zip(*points, strict=True), s=9, label=name, color=_COLOURS.get(name))
    axes.set_yscale("log")
    axes.set_xticks([i + 0.4 for i in range(len(labels))], [f"{d}\n{p}" for d, p in labels], fontsize=8)
    axes.set_ylabel("largest error / largest value")
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3, axis="y")
    axes.set_title(f"against FP64; {_where(rows)}", fontsize=9)
    return figure


# ---------------------------------------------------------------------- the first picture of the README

_NAMES = {
    "torch": "torch",
    "torch math": "torch, textbook method",
    "jax xla": "JAX",
    "naive": "NumPy, textbook method",
}


_FRONT = "float32"  # the usual dtype in NumPy


def _front_on_gpu(rows: Rows, plt: Any) -> Any:
    """Plot causal attention over 8192 keys and its fastest peers, one panel per pass, grouped by head dim."""
    rows = of_first_dtype([row for row in timed(rows) if row["what"] in ("forward", "backward")])
    rows = [row for row in rows if row["seqlen"] == "8192" and row["causal"] == "True" and not row["heads_k"]]
    if {row["what"] for row in rows} != {"forward", "backward"}:
        return None
    head_dims = sorted({int(row["head_dim"]) for row in rows})
    shown = (OURS.name, "flash-attn 3", "torch cudnn")
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.2), sharey=True)
    for axes, what in zip(panels, ("forward", "backward"), strict=True):
        found = {
            (r["implementation"], int(r["head_dim"])): float(r["tflops"]) for r in rows if r["what"] == what
        }
        names = [name for name in shown if any(who == name for who, _ in found)]
        for place, name in enumerate(names):
            at = [x + (place - (len(names) - 1) / 2) * 0.27 for x in range(len(head_dims))]
            heights = [found.get((name, d), 0.0) for d in head_dims]
            bars = axes.bar(at, heights, width=0.25, color=_COLOURS[name], label=_NAMES.get(name, name))
            axes.bar_label(bars, [f"{height:.0f}" if height else "" for height in heights], fontsize=8)
        axes.set_xticks(range(len(head_dims)), [f"head_dim {d}" for d in head_dims])
        axes.set_title(f"{what.capitalize()}, causal, 8192 keys", loc="left")
        axes.legend(fontsize=8, frameon=False, ncols=3, loc="upper left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3, axis="y")
        axes.set_axisbelow(True)
    panels[0].set_ylabel("TFLOP/s")
    panels[0].set_ylim(top=1.25 * max(float(row["tflops"]) for row in rows))
    panels[1].annotate(f"{rows[0]['dtype']}; {_where(rows)}", (1, -0.2), xycoords="axes fraction", ha="right",
                       fontsize=7)  # fmt: skip
    return figure


def front(rows: Rows, plt: Any) -> Any:
    """Plot the first figure of the README: speed on a GPU; memory and speed relative to torch on a CPU."""
    if rows and rows[0]["gpu"]:
        return _front_on_gpu(rows, plt)
    peaks = [r for r in newest(rows) if (r["what"], r["passes"]) == ("memory", "forward+backward")]
    ratios = beside_torch(of_one_cpu([row for row in rows if row["dtype"] == _FRONT]))
    if not peaks or OURS.name not in ratios:
        return None
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.7), width_ratios=(1.15, 1))
    for name in dict.fromkeys(row["implementation"] for row in peaks):
        mine = sorted((int(r["seqlen"]), float(r["megabytes"])) for r in peaks if r["implementation"] == name)
        bold = 2.6 if name == OURS.name else 1.4
        left.plot(*zip(*mine, strict=True), marker="o", ms=4, lw=bold, color=_COLOURS.get(name),
                  label=f"{_NAMES.get(name, name)}: {_bytes(mine[-1][1])} at {mine[-1][0]}")  # fmt: skip
    left.set_xscale("log", base=2)
    left.set_yscale("log")
    left.set_xticks(lengths := sorted({int(row["seqlen"]) for row in peaks}), lengths)
    left.yaxis.set_major_formatter(lambda megabytes, _: _bytes(megabytes))
    left.set_ylim(top=12 * max(float(row["megabytes"]) for row in peaks))  # room for the legend
    left.set_xlabel("queries and keys")
    one = peaks[0]
    left.set_title(f"Memory of a training step, {one['heads']} heads of {one['head_dim']}", loc="left")
    left.legend(fontsize=8, frameon=False)

    times = {name: [ratio for _, ratio in cases] for name, cases in ratios.items()}
    names = sorted(times, key=lambda name: geometric_mean(times[name]))
    for place, name in enumerate(names):
        least, mean, most = min(times[name]), geometric_mean(times[name]), max(times[name])
        right.barh(place, mean, color=_COLOURS.get(name), height=0.6)
        right.plot([least, most], [place, place], color="black", lw=1)
        right.annotate(f" {mean:.2f}", (most, place), va="center", fontsize=9)
    right.set_yticks(range(len(names)), [_NAMES.get(name, name) for name in names])
    right.axvline(1, color=_COLOURS["torch"], lw=1, ls="--")
    right.set_xlim(0, 1.15 * max(map(max, times.values())))
    right.set_xlabel(f"geometric mean of {len(times[OURS.name])} cases, and their range")
    right.set_title("Speed, torch's own attention = 1", loc="left")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3, axis="y" if axes is left else "x")
    used = [*peaks, *(row for cases in ratios.values() for row, _ in cases)]
    right.annotate(f"{_FRONT}; {_where(used)}", (1, -0.27), xycoords="axes fraction", ha="right", fontsize=7)
    return figure


def beside_torch(rows: Rows) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Rows of `bench cpu` by implementation, each with its speedup over torch in the same run.

    All rows of an implementation are from one run: the newest calm one that timed it and torch.
    """
    runs: dict[str, Rows] = {}
    for row in map(results.pooled, results.runs(r for r in rows if r["what"] == "cpu")):
        if calm(row):
            runs.setdefault(row["when"], []).append(row)
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for _, run in sorted(runs.items(), reverse=True):
        torch = {case(row): float(row["median_ms"]) for row in run if row["implementation"] == "torch"}
        both = [(row, torch[case(row)] / float(row["median_ms"])) for row in run if case(row) in torch]
        for name in {row["implementation"] for row, _ in both} - found.keys():
            found[name] = [(row, times) for row, times in both if row["implementation"] == name]
    return found


def _bytes(megabytes: float) -> str:
    return f"{megabytes / 1e3:.3g} GB" if megabytes >= 1e3 else f"{megabytes:.3g} MB"


FIGURES: dict[str, Callable[[Rows, Any], Any]] = {
    "speed": speed,
    "roofline": roofline,
    "memory": memory,
    "decode": decode,
    "error": error,
    "front": front,
}
# Figures for GPUs only: rows of CPUs are from several machines, and have tables in docs/benchmarks.
OF_GPUS = ("speed", "roofline")


def run(chosen: argparse.Namespace) -> int:
    try:
        import matplotlib as mpl
    except ImportError:
        print("matplotlib is not installed, so nothing is drawn: pip install matplotlib")
        return 0
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "cupy_flash"  # the same rows give the same file
    mpl.rcParams["svg.fonttype"] = "none"  # text as text
    import matplotlib.pyplot as plt

    rows = [row for path in sorted(chosen.results.glob("*.csv")) for row in results.read(path)]
    rows = [row for row in rows if row.get("implementation") and not row.get("note")]
    chosen.out.mkdir(parents=True, exist_ok=True)
    for place in ("gpu", "cpu"):
        here = of_one_gpu([row for row in rows if bool(row["gpu"]) == (place == "gpu")])
        for name, draw in FIGURES.items():
            if place == "cpu" and name in OF_GPUS:
                continue
            figure = draw(here, plt)
            if figure is None:
                print(f"{place} {name}: nothing measured on a calm machine, nothing drawn")
                continue
            figure.tight_layout()
            for kind in ("svg", "png"):
                path = chosen.out / f"{place}_{name}.{kind}"
                figure.savefig(path, dpi=110, metadata={"Date": None} if kind == "svg" else {})
            plt.close(figure)
            print(f"{place} {name}: {chosen.out / f'{place}_{name}'}.svg, .png")
    return 0

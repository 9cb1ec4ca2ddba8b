"""pages: write docs/benchmarks, and the first table of docs/performance.md, from measured rows."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

import cupy_flash

from ..measure import printed, results, tables
from ..measure.results import Row
from ..measure.tables import Comparison, Timed, between, markdown
from . import compare

DOCS = Path(__file__).parents[2] / "docs"
FOLDER, FRONT = DOCS / "benchmarks", DOCS / "performance.md"
# Earlier rows of a CPU measured the NumPy path: the compiled core was added on this day.
COMPILED = "2026-11-23"
COMMAND = "python -m bench pages"
_SHOWN = 4  # cases with a faster peer that are listed before the full table


class Page(NamedTuple):
    """A page of docs/benchmarks: its rows, and how they are compared.

    Attributes
    ----------
    name, title, what : str
        File name, heading, and first sentence.
    files : tuple of str
        Files of bench/results.
    takes : callable
        Whether the page includes a row.
    field : str
        Column to compare; its unit is in `tables.UNITS`.
    group : callable
        Name of the group of a row; comparisons are counted per group.
    rows : callable, optional
        Returns rows from other sources than the CSV files.
    text : str
        Text after the summary.
    more : callable, optional
        Returns Markdown after the tables of runs.
    figures : tuple of (str, str)
        Files of bench/plots, with captions.
    errors : bool
        Whether the tables include errors.
    """

    name: str
    title: str
    what: str
    files: tuple[str, ...]
    takes: Callable[[Row], bool]
    field: str = "tflops"
    group: Callable[[Row], str] = lambda row: row["dtype"]
    rows: Callable[[], Iterable[Row]] = lambda: ()
    text: str = ""
    more: Callable[[], str] | None = None
    figures: tuple[tuple[str, str], ...] = ()
    errors: bool = False

    def timed(self) -> list[Timed]:
        return _timed(self)


@cache
def _timed(page: Page) -> list[Timed]:
    names = [name for name in page.files if name.endswith(".csv")]
    of_files = (row for name in names for row in results.read(results.RESULTS / name))
    return tables.newest([row for row in (*of_files, *page.rows()) if page.takes(row)])


# ---------------------------------------------------------------------- which rows


def _dense(row: Row, *dtypes: str) -> bool:
    return bool(row["gpu"]) and row["dtype"] in dtypes and int(row["head_dim"]) <= 256


def _by_length(row: Row) -> str:
    band = "up to 1024" if int(row["seqlen"]) <= 1024 else "from 2048"
    return f"{row['dtype']}, {band} queries"


def _by_pass(row: Row) -> str:
    return f"{row['dtype']}, {row['passes']}"


def _by_machine(row: Row) -> str:
    return f"{row['dtype']}, {row['passes']}, {tables.machine(row)}"


def _by_company(row: Row) -> str:
    beside = ", between linear layers" if row["what"] == "layers" else ""
    return f"{row['dtype']}{beside}, {tables.machine(row)}"


def _core(row: Row) -> bool:
    return not row["gpu"] and row["when"] >= COMPILED


def _float8_errors() -> str:
    head = ["head dim", "mask", "queries and keys", "RMS error, cupy_flash", "RMS error, flash-attn 3"]
    return f"""## Errors where values have a mean

flash-attn 3 adds all keys in the tensor cores' own sums, which keep about 14 bits; cupy_flash adds them in
float32 every block. RMS error over the RMS of O with 0.5 added to V, on an H200 on 2026-11-27, commit
9dce843 ([precision](../precision.md#8-bit-floats)):

{markdown(head, printed.float8_errors())}"""


def _overhead() -> str:
    """The section on Python overhead, from the newest run."""
    rows = results.read(results.RESULTS / "overhead.csv")
    newest = [row for row in rows if row["when"] == rows[-1]["when"]]
    one = newest[0]
    where = (
        f"{one['cpu']}, {one['cores']} cores, Python {one['python']}, commit {one['commit']}, {one['when']}"
    )
    return f"""## What Python costs

On the processor, without a GPU ({where}), microseconds; the least of many calls.
Imports and first calls are of fresh processes that find their bytecode on disk, in CPU time, the least
of 5 or 9:

{markdown(["what", "us"], [[row["what"], tables.number(row["us"])] for row in newest])}"""


def _counted_memory() -> str:
    """The section on memory, counted by memory_report."""
    lines = []
    for seqlen in (1024, 16384, 131072):
        report = cupy_flash.memory_report(1, 1, seqlen, 128, causal=True, backward=True)
        lines.append(
            [str(seqlen), *(tables.number(str(n / 1e6)) for n in (report.naive_bytes, report.flash_bytes))]
        )
    return f"""## Counted, before anything runs

One head of 128, causal, forward and backward, MB, as `memory_report` and `python -m cupy_flash memory`
count them:

{markdown(["queries and keys", "textbook method", "cupy_flash"], lines)}"""


PAGES = (
    Page(
        "forward", "Forward, 16 bits",
        "The forward pass of float16 and bfloat16 on a GPU, beside flash-attn 3 and torch's backends.",
        ("forward.csv",), lambda row: _dense(row, "bfloat16", "float16"), group=_by_length,
        figures=(
            ("gpu_speed", "TFLOP/s by length, for each pass, mask and head dim, on an H200"),
            ("gpu_roofline", "TFLOP/s against FLOP per byte, below what an H200 can do at best"),
        ),
    ),
    Page(
        "backward", "Backward, 16 bits",
        "The backward pass of float16 and bfloat16 on a GPU, beside torch's backends and "
        "flash-attn3-jax.",
        ("backward.csv",), lambda row: _dense(row, "bfloat16", "float16"), group=_by_length,
        text='`cupy_flash deterministic` is `reproducible="run"`. '
        "flash-attn3-jax is timed by the wall clock, with the launch of its call, a part of its time "
        "at 2048. Where it was wrong, its errors were as large as its results, while the same cut-down "
        "problem passed in other cases.",
    ),
    Page(
        "float8", "Forward, 8-bit floats", "The forward pass of float8_e4m3fn on a GPU, beside flash-attn 3.",
        ("forward.csv",), lambda row: _dense(row, "float8_e4m3fn"), group=_by_length, more=_float8_errors,
    ),
    Page(
        "float32", "float32 on a GPU",
        "Both passes of float32 on a GPU, beside torch's efficient attention, the fastest that torch "
        "has for float32 there.",
        ("forward.csv", "backward.csv", printed.FILE.name), lambda row: _dense(row, "float32"),
        group=_by_pass, rows=printed.beside_efficient, errors=True,
        text="Since 2026-11-27 the forward pass computes three products of float16 (f16x3); the backward "
        "pass computes three of TF32 in every row here, whose errors are larger. Head dims up to 64 have "
        "f16x3 there since 2026-11-29, and no row yet. `cupy_flash deterministic` is "
        '`reproducible="run"`.',
    ),
    Page(
        "head_dim_512", "Head dims above 256",
        "Both passes of head dims 257 to 512 on a GPU, beside torch's efficient attention, the fastest "
        "that torch has there.",
        ("forward.csv", "backward.csv", printed.FILE.name),
        lambda row: bool(row["gpu"]) and int(row["head_dim"]) > 256,
        group=_by_pass, rows=printed.beside_efficient,
        text="flash-attn 3 and torch's cuDNN backend take no head dim above 256.",
    ),
    Page(
        "mma_sync", "Kernels without wgmma",
        "The kernels of the flash family, which GPUs other than Hopper run (mma.sync), on an H200, "
        "beside torch's flash attention, which is built of the same instructions.",
        (printed.FILE.name,), lambda _row: True, group=lambda row: f"16 bits, {row['passes']}",
        rows=printed.beside_flash,
        text="On an H200 the plan takes Hopper's own kernels instead. No GPU that runs these by default has "
        "been timed.",
    ),
    Page(
        "mla", "Decoding over latents (MLA)",
        "One query over a cache of latents of 576, whose first 512 columns are the values, on a GPU.",
        (printed.FILE.name,), lambda _row: True, "gb_per_s", rows=printed.latents,
        text="No peer was timed beside it. A rate in GB/s is of the latents' bytes, each read once for all "
        "heads.",
        more=lambda: "## TFLOP/s\n\n" + tables.of_run(PAGES_BY_NAME["mla"].timed(), "tflops"),
    ),
    Page(
        "decode", "Decoding",
        "One query per sequence over a cache, in GB/s of keys and values, beside torch, flash-attn 3 "
        "and, on CPUs, plain reads and copies of as many bytes.",
        ("decode.csv",), lambda row: bool(row["gpu"]) or _core(row), "gb_per_s", _by_machine,
        figures=(
            ("gpu_decode", "Bandwidth of decoding on an H200, beside torch, flash-attn 3 and a copy"),
            ("cpu_decode", "Bandwidth of decoding on a CPU, beside torch and beside a copy"),
        ),
        text="flash-attn 3 is called by its `flash_attn_func`, which does not split the keys of one sequence "
        "among multiprocessors; its function for caches was not timed. Reads alone may be faster than a "
        "copy. `numpy read` reads the same keys and values on all threads. `cupy_flash "
        "attention` is `attention` over the same keys, without a cache.",
    ),
    Page(
        "varlen", "Packed sequences",
        "Packed sequences of many lengths on a GPU, beside flash-attn 3 and a call for each sequence.",
        ("varlen.csv",), lambda row: bool(row["gpu"]), group=_by_pass,
        text="The backward pass was timed of cupy_flash alone. The column `queries` is the longest sequence, "
        "`batch` how many there are.",
    ),
    Page(
        "host", "Short and first calls",
        "Milliseconds of a short call, from the call to its result and to its return, and of the first "
        "calls of a process (`import`, `first call`, `second call`) on a GPU.",
        ("latency.csv", "cold.csv"), lambda row: bool(row["gpu"]), "median_ms", _by_pass, more=_overhead,
        text="`to result` ends when the result is there, `to return` when Python has the call behind it. "
        "CUDA was started before a first call, and its kernels built.",
    ),
    Page(
        "cpu", "CPUs", "Both passes of the compiled CPU core, beside torch, JAX and cupy_flash's NumPy path.",
        ("cpu.csv", "layers.csv"), _core, group=_by_company,
        text="Calls of `layers` stand between torch's linear layers, as in a model, and only attention is "
        "timed; all others follow calls of their own. On AMD EPYC OpenBLAS takes its kernels `Haswell` where "
        "AVX-512 runs at full rate (Zen 5), and `SkylakeX` where it runs at half rate. There torch's "
        "products are nearer to the limit, and the ratios smaller. bfloat16 is multiplied in "
        "[pairs](../cpu_core.md) on AMD; on Intel by AMX, and as floats where a CPU has none. Threads of "
        "NumPy's OpenBLAS spin for 0.1 s after a product and take a core from what follows; with "
        "`OPENBLAS_THREAD_TIMEOUT=8` set before Python starts they sleep at once.",
    ),
    Page(
        "memory", "Memory", "The bytes at the peak of a call on a CPU, beside its inputs.",
        ("memory.csv",), lambda row: row["when"] >= "2026-11-22", "megabytes", _by_pass, more=_counted_memory,
        figures=(("cpu_memory", "Bytes at the peak of a call by length, beside torch and JAX on the CPU"),),
        text="Beside q, k, v, o and their gradients, attention keeps a number per query and head: the LSE "
        "forward, and the row sums of do · o backward. The textbook method keeps two matrices of "
        "queries x keys. The fast backward pass of the flash kernels also keeps a sum of dq in float32; "
        "with `reproducible=\"run\"` it does not. Hopper's own kernels keep it in both up to head dim 128 "
        "(of q and k 192, with 128 of v), and above in neither: there dq has a pass of its own. On a "
        "CPU a call also keeps the tiles that it works on. These rows are older than the compiled core.",
    ),
)  # fmt: skip
PAGES_BY_NAME = {page.name: page for page in PAGES}


# ---------------------------------------------------------------------- sentences and tables


def _worse(page: Page) -> str:
    return "More bytes than" if page.field == "megabytes" else "Slower than"


def _slower(page: Page, found: Sequence[Comparison]) -> str:
    """List cases in which peers are better, the worst first."""
    worse: dict[str, list[Comparison]] = {}
    for one in found:
        worse.setdefault(one.peer, []).append(one)
    lines = []
    for peer, groups in worse.items():
        count = sum(len(one.ratios) for one in groups)
        cases = sorted((pair for one in groups for pair in one.slower), key=lambda pair: pair[0])
        if cases:
            named = "; ".join(f"{ratio:.2f} at {tables.described(one.ours)}" for ratio, one in cases[:_SHOWN])
            rest = f"; {len(cases) - _SHOWN} more" if len(cases) > _SHOWN else ""
            lines.append(f"- **{_worse(page)} {peer} in {len(cases)} of {count} cases**: {named}{rest}.\n")
    if not found:
        return ""
    return "".join(lines) or "No peer is faster in any case.\n"


def _summary(page: Page, found: Sequence[Comparison]) -> str:
    ratio = "their bytes over ours" if page.field == "megabytes" else "their time over ours"
    head = [
        "cases",
        "peer",
        _worse(page).split()[0].lower() + " in",
        f"{ratio}: least",
        "geometric mean",
        "most",
    ]
    lines = []
    for one in found:
        ratios = [one.ratios[0][0], one.mean, one.ratios[-1][0]]
        lines.append([one.group, one.peer, one.count, *(f"{value:.2f}" for value in ratios)])
    return markdown(head, lines)


def _other_ways(page: Page, timed: Sequence[Timed]) -> str:
    """Speed of our other implementations relative to the plain call."""
    found: dict[tuple[str, str], list[float]] = {}
    for one in timed:
        for name in one.implementations:
            if name in (tables.OURS.name, *one.peers, *tables.REFERENCES):
                continue
            if ratio := one.over(name, page.field):
                found.setdefault((page.group(one.ours), name), []).append(1 / ratio)
    if not found:
        return ""
    lines = [[group, name, str(len(speeds)), between(speeds)] for (group, name), speeds in found.items()]
    head = ["cases", "another way of ours", "count", "its speed over that of the plain call"]
    return f"\n{markdown(head, lines)}"


def _wrong(timed: Sequence[Timed]) -> str:
    """Peers whose results failed the comparison with FP64, whose times are left out."""
    names = dict.fromkeys(name for one in timed for name in one.implementations)
    rows = {
        name: [one.implementations[name].row for one in timed if name in one.implementations]
        for name in names
    }
    wrong = {name: sum(not results.right(row) for row in of) for name, of in rows.items()}
    said = [f"{name} in {wrong[name]} of {len(rows[name])} cases" for name in names if wrong[name]]
    return f"\nFailed the comparison with FP64, and left out: {', '.join(said)}.\n" if said else ""


def _range(rows: Sequence[Row], name: str, digits: int = 0) -> str:
    values = [float(row[name]) for row in rows if row[name]]
    return between(values, digits) if values and max(values) else ""


def _conditions(timed: Sequence[Timed]) -> str:
    """Versions, commit, repetitions and state of the machine in one run."""
    found = [each for one in timed for each in one.implementations.values()]
    visits = [visit for each in found for visit in each.visits]
    row = timed[0].ours
    parts = [f"Driver {row['driver']}" if row["driver"] else "", f"Python {row['python']}", row["versions"],
             f"commit {row['commit']}"]  # fmt: skip
    lines = [", ".join(filter(None, parts)) + "."]
    if samples := _range(visits, "samples"):
        counts = between([len(each.visits) for each in found], 0)
        lines.append(f"Repetitions of a case: {counts}, of {samples} calls each.")
        spreads = [compare.spread(list(each.visits)) for each in found if each.row["lower_ms"]]
        if spreads:
            lines.append(f"They lie {100 * median(spreads):.0f} % apart in the median.")
    for dtype in dict.fromkeys(visit["dtype"] for visit in visits):
        if matrix := _range(
            [v for v in visits if v["dtype"] == dtype], "matrix_tflops", 0 if row["gpu"] else 2
        ):
            lines.append(f"A matrix product of {dtype} reached {matrix} TFLOP/s.")
    for name, said in (("copy_gb_per_s", "A copy moved {} GB/s."), ("clock_mhz", "Clocks ran at {} MHz,"),
                       ("watts", "power at {} W.")):  # fmt: skip
        if found := _range(visits, name):
            lines.append(said.format(found))
    return " ".join(lines)


def _runs(page: Page, timed: Iterable[Timed]) -> str:
    """One section per run, the newest first, with one table per dtype."""
    found: dict[tuple[str, str], list[Timed]] = {}
    for one in timed:
        found.setdefault((one.when, tables.machine(one.ours)), []).append(one)
    sections = []
    for (when, machine), of in sorted(found.items(), reverse=True):
        parts = [f"## {machine}, {when}\n\n{_conditions(of)}\n"]
        for kind in sorted({(one.ours["dtype"], one.ours["passes"], one.ours["what"]) for one in of}):
            alike = [one for one in of if (one.ours["dtype"], one.ours["passes"], one.ours["what"]) == kind]
            parts.append(tables.of_run(alike, page.field, page.errors))
        sections.append("\n".join(parts))
    return "\n".join(sections)


def written(page: Page) -> str:
    """The text of a page."""
    timed = page.timed()
    found = tables.compared(timed, page.group, page.field)
    links = ", ".join(f"[{name}](../../bench/results/{name})" for name in page.files)
    parts = [f"# {page.title}\n\n<!-- Made by `{COMMAND}`; do not edit. -->\n", f"{page.what}\n",
             _slower(page, found)]  # fmt: skip
    if page.text:
        parts.append(f"{page.text}\n")
    if found:
        parts.append(_summary(page, found))
    parts.append(_other_ways(page, timed) + _wrong(timed))
    parts += [f"![{shows}](../../bench/plots/{name}.svg)\n" for name, shows in page.figures]
    parts.append(
        f"This page is made by `{COMMAND}` from {links}. "
        "[How it is measured](../benchmark.md#how-it-is-measured). "
        "A row is of one run, the newest that has this case, and of an older one where only that has a peer: "
        "ratios are never of two runs. Ratios within a few percent of 1 say nothing. Rows that were taken "
        "beside other programs, and rows with a note, are left out.\n"
    )
    parts.append(_runs(page, timed))
    if page.more:
        parts.append(page.more())
    return "\n".join(part for part in parts if part)


# ---------------------------------------------------------------------- the table of docs/performance.md

# The table after the comment, as in docs/limits.md.
_PLACE = re.compile(r"(?<=^<!-- slower -->\n\n)(?:\|.*\n)+", re.MULTILINE)


def slower() -> str:
    """The table of docs/performance.md: all groups with a case in which a peer is better."""
    found = [(page, one) for page in PAGES for one in tables.compared(page.timed(), page.group, page.field)]
    worse = sorted((each for each in found if each[1].slower), key=lambda each: each[1].ratios[0][0])
    head = ["cases", "peer", "our speed over the peer's", "slower in", "slowest at"]
    return markdown(head, [_front_line(page, one) for page, one in worse])


def _front_line(page: Page, one: Comparison) -> list[str]:
    least, where = one.ratios[0]
    range_ = between([least, one.ratios[-1][0]])
    link = f"[{page.title}](benchmarks/{page.name}.md): {one.group}"
    return [link, one.peer, range_, one.count, tables.described(where.ours)]


def front(text: str) -> str:
    """The text of docs/performance.md with the table updated."""
    made = slower()
    return _PLACE.sub(lambda _found: made, text)


def run(_chosen: argparse.Namespace) -> int:
    FOLDER.mkdir(exist_ok=True)
    for page in PAGES:
        (FOLDER / f"{page.name}.md").write_text(written(page), encoding="utf-8")
        print(FOLDER / f"{page.name}.md")
    FRONT.write_text(front(FRONT.read_text(encoding="utf-8")), encoding="utf-8")
    print(FRONT)
    return 0

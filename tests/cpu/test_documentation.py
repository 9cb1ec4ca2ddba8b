"""What README, docs and docstrings say is so: Python runs, commands and paths exist, links lead somewhere."""

import ast
import doctest
import functools
import importlib
import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import geometric_mean, median

import pytest

import cupy_flash
from bench.commands import compare, plot, spans
from bench.measure import results
from cupy_flash.__main__ import main
from cupy_flash.call.signature import REMOVED
from cupy_flash.errors import UnsupportedError
from cupy_flash.plan.catalog import ARCHITECTURES
from cupy_flash.plan.families import FAMILIES, hopper
from tests.paths import ROOT

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md", ROOT / "llms.txt"]
PAGES += sorted(DOCS.glob("*.md"))
TEXT = {page: page.read_text(encoding="utf-8") for page in PAGES}
WIDEST = 90  # characters of a line of code that a page of the site and of a package index shows whole
FENCE = re.compile(r"^```([{\w-]*}?)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
INLINE = re.compile(r"`([^`\n]+)`")
# A path of the checkout: a folder and what follows, or a file with one of our endings.
PATH = re.compile(r"[\w.-]+(/[\w.-]+)+/?|[\w-]+\.(py|cu|cuh|md|toml|txt)")


def blocks(language):
    """(page:line, page, line, text) of the fenced blocks in a language."""
    found = []
    for page, text in TEXT.items():
        for match in FENCE.finditer(text):
            if match[1] == language:
                line = text[: match.start()].count("\n") + 1
                found.append(pytest.param(page, line, match[2], id=f"{page.name}:{line}"))
    return found


def modules(code):
    """Top-level modules that the code imports."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.partition(".")[0]


def commands():
    """Lines of the shell blocks, without their comments."""
    lines = [line for block in blocks("sh") for line in block.values[2].splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def require(code):
    """Skip where something that the code imports is missing."""
    for module in modules(code):
        if module == "cupy":
            require_gpu()
        pytest.importorskip(module, reason=f"the example imports {module}, which is not installed")


def require_gpu():
    from cupy_flash.device import driver

    try:
        driver.devices()
    except UnsupportedError as error:
        pytest.skip(f"the example needs a GPU: {error.args[0].splitlines()[0]}")


# ---------------------------------------------------------------------- examples


@pytest.mark.parametrize(("page", "line", "code"), blocks("python"))
def test_python(page, line, code):
    require(code)
    exec(compile("\n" * line + code, page.name, "exec"), {"__name__": f"{page.stem}_line_{line}"})


def documented_modules():
    """Modules whose docstrings have examples."""
    for path in sorted((ROOT / "cupy_flash").rglob("*.py")):
        if ">>>" in path.read_text(encoding="utf-8"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize(("path", "name"), [pytest.param(*each, id=each[1]) for each in documented_modules()])
def test_docstrings(path, name):
    text = path.read_text(encoding="utf-8")
    require(
        "\n".join(re.findall(r"^(?: *>>> )?((?:import|from) \w+)", text, re.MULTILINE)).replace(
            "from", "import"
        )
    )
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted
    assert not results.failed


@pytest.mark.parametrize(
    "words",
    [c for c in commands() if c[:3] == ["python", "-m", "cupy_flash"] and c[3] != "build"],
    ids=" ".join,
)
def test_commands_of_the_package(words, capsys):
    assert main(words[3:]) == 0
    assert capsys.readouterr().out


def test_commands_of_the_checkout():
    named = {Path(word) for words in commands() for word in words if word.startswith("scripts/")}
    assert Path("scripts/demo") in named
    assert Path("scripts/test") in named
    assert [path for path in named if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_of_code_are_shown_whole(page):
    code = "".join(match[2] for match in FENCE.finditer(TEXT[page]) if match[1] == "python")
    assert [line for line in code.splitlines() if len(line) > WIDEST] == []


# ---------------------------------------------------------------------- tables


@pytest.mark.parametrize("family", [family.NAME for family in FAMILIES])
def test_support_table(family):
    row = re.search(rf"^\| {family} \|.*\| sm_([\d, ]+) \|$", TEXT[DOCS / "support.md"], re.MULTILINE)
    assert row, f"no row for the family {family}"
    compiled = [arch.capability for arch in ARCHITECTURES if family in arch.families]
    assert [int(capability) for capability in row[1].split(",")] == compiled


def test_table_of_speed_is_of_measured_rows():
    """Cells of docs/performance.md, from the run that it names."""
    page = TEXT[DOCS / "performance.md"]
    when = re.search(r"The rows are those of ([\d-]+ [\d:]+) in", page)[1]
    run = [row for row in results.read(results.RESULTS / "cpu.csv") if row["when"].startswith(when)]
    beside = plot.beside_torch([row for row in run if not row["note"]])
    table = {}
    for row, times in beside["cupy_flash"]:
        shape = "B{batch} H{heads} S{seqlen} D{head_dim}".format(**row)
        table.setdefault(shape, []).append((row["passes"] != "forward", row["causal"] == "True", times))
    assert len(table) == 4
    for shape, cells in table.items():
        assert f"\n| {shape} | {' | '.join(f'{times:.2f}' for *_, times in sorted(cells))} |\n" in page
    mean = {name: geometric_mean(times for _, times in rows) for name, rows in beside.items()}
    ours = mean["cupy_flash"]
    jax, plain = ours / mean["jax xla"], ours / mean["cupy_flash numpy"]
    assert f"The geometric mean is {ours:.2f}; JAX takes {jax:.1f} times our time" in page
    assert f"(cpu_core.md) {plain:.1f} times" in page


def test_table_of_speed_at_half_rate_is_of_measured_rows():
    """Of three dtypes, each from the run that docs/performance.md names."""
    page = TEXT[DOCS / "performance.md"]
    named = dict(re.findall(r"(float32|bfloat16|float16) of (?:the run of )?(2026-[\d-]+ [\d:]+)", page))
    means, least = [], []
    for dtype in ("float32", "bfloat16", "float16"):
        when = named[dtype]
        run = [row for row in results.read(results.RESULTS / "cpu.csv")
               if row["when"].startswith(when) and row["dtype"] == dtype and not row["note"]]  # fmt: skip
        table = {}
        for row, times in plot.beside_torch(run)["cupy_flash"]:
            shape = "B{batch} H{heads} S{seqlen} D{head_dim}".format(**row)
            table.setdefault(shape, []).append((row["passes"] != "forward", row["causal"] == "True", times))
        assert len(table) == 6
        for shape, cells in table.items():
            ratios = " | ".join(f"{times:.2f}" for *_, times in sorted(cells))
            assert f"\n| {shape} | {dtype} | {ratios} |\n" in page
        everything = [times for cells in table.values() for *_, times in cells]
        means.append(geometric_mean(everything))
        least.append(min(everything))
    says = "The geometric means are {:.2f}, {:.2f} and {:.2f}, the least cells {:.2f}, {:.2f} and {:.2f}."
    assert says.format(*means, *least) in page


def runs_on_a_gpu():
    """Rows of the runs that docs/performance.md names under "Speed on GPUs": the section, its rows by case.

    A case is its run, command and passes, and its shape, dtype, mask and detail in the order of the rows. Of
    several runs of one the last with all its ways is kept.
    """
    section = TEXT[DOCS / "performance.md"].partition("\n## Speed on GPUs\n")[2].partition("\n## ")[0]
    named = re.findall(r"^\| (\d{4}-[\d-]+ [\d:]+) \| (\w+)", section, re.MULTILINE)
    cases = {}
    for when, what in named:
        rows = [row for row in results.read(results.RESULTS / f"{what}.csv") if row["when"] == when]
        assert rows, f"no rows of {when} in {what}.csv"
        assert all(row["gpu"] == "NVIDIA H200" and not row["note"] for row in rows)
        for visits in results.runs(rows):
            row = results.pooled(visits) | {"visits": visits}
            names = ("what", "passes", "batch", "heads", "heads_k", "seqlen", "seqlen_k", "head_dim", "dtype",
                     "causal", "detail")  # fmt: skip
            cases.setdefault((when, *(row[name] for name in names)), {})[row["implementation"]] = row

    def later(case):
        """Later runs of the same case, with every way that it has."""
        return [other for other in cases if other[1:] == case[1:] and other[0] > case[0]
                and cases[case].keys() <= cases[other].keys()]  # fmt: skip

    return section, {case: of for case, of in cases.items() if not later(case)}


def over(of, name):
    """How many times as fast as another we were, in one run."""
    return float(of[name]["median_ms"]) / float(of["cupy_flash"]["median_ms"])


def peers_of(of):
    """Who else ran a case, and rightly."""
    return [name for name, row in of.items() if not name.startswith("cupy_flash") and plot.right(row)]


def speed_cell(of, name):
    if name not in of:
        return ""
    return f"{float(of[name]['tflops']):.0f}" if plot.right(of[name]) else "wrong"


def speed_lines(cases, what, dtype, lengths, names):
    """Lines of a table of TFLOP/s, ours and those of `names`, and the ratio to the best of all peers."""
    lines = {}
    for of in cases.values():
        row = of["cupy_flash"]
        head_dim, causal, n = int(row["head_dim"]), row["causal"] == "True", int(row["seqlen"])
        if (
            (row["what"], row["dtype"]) == (what, dtype)
            and n in lengths
            and not row["heads_k"]
            and peers_of(of)
        ):
            cells = [speed_cell(of, name) for name in ("cupy_flash", *names)]
            best = min(over(of, name) for name in peers_of(of))
            shown = [str(head_dim), "causal" if causal else "", str(n), *cells, f"{best:.2f}"]
            lines[head_dim, causal, n] = f"| {' | '.join(shown)} |".replace("  ", " ").replace("  ", " ")
    return [line for _, line in sorted(lines.items())]


def between(values, digits=2):
    values = [f"{value:.{digits}f}" for value in (min(values), max(values))]
    return values[0] if values[0] == values[1] else " to ".join(values)


def test_tables_of_gpus_are_of_measured_rows():
    section, cases = runs_on_a_gpu()
    lengths = (2048, 8192, 16384)
    expected = [
        *speed_lines(cases, "forward", "bfloat16", lengths, ("flash-attn 3", "torch cudnn")),
        *speed_lines(cases, "backward", "bfloat16", lengths, ("torch cudnn", "flash-attn3-jax")),
        *speed_lines(cases, "forward", "float8_e4m3fn", lengths[1:], ("flash-attn 3",)),
    ]
    assert re.findall(r"^\| (?:64|128|256) \| (?:causal )?\|.*$", section, re.MULTILINE) == expected
    decoding = []
    for of in cases.values():
        row = of["cupy_flash"]
        if row["what"] == "decode":
            ways = ("cupy_flash", "cupy_flash paged", "torch flash", "flash-attn 3")
            cells = [f"{float(of[name]['gb_per_s']):.0f}" for name in ways]
            share = f"{float(row['gb_per_s']) / float(row['copy_gb_per_s']):.2f}"
            cache = [row[name] for name in ("batch", "heads", "heads_k", "seqlen_k")]
            decoding.append(f"| {' | '.join([*cache, *cells, share])} |")
    assert re.findall(r"^\| (?:\d+ \| ){8}[\d.]+ \|$", section, re.MULTILINE) == decoding
    packed = {}
    for of in cases.values():
        row = of["cupy_flash"]
        if row["what"] == "varlen":
            cells = packed.setdefault(
                tuple(row[name] for name in ("batch", "detail", "seqlen", "heads", "head_dim")), {}
            )
            cells[row["passes"]] = of
    expected = []
    for (batch, rows, longest, heads, head_dim), passes in packed.items():
        of = passes["forward"]
        cells = [batch, rows.removesuffix(" rows"), longest, heads, head_dim, speed_cell(of, "cupy_flash"),
                 speed_cell(of, "flash-attn 3"), f"{over(of, 'flash-attn 3'):.2f}",
                 speed_cell(passes["backward"], "cupy_flash")]  # fmt: skip
        expected.append(f"| {' | '.join(cells)} |")
    assert len(expected) == 3
    assert re.findall(r"^\| (?:\d+ \| ){7}[\d.]+ \| \d+ \|$", section, re.MULTILINE) == expected


def test_runs_of_gpus_are_as_their_table_says():
    section, cases = runs_on_a_gpu()
    for when in dict.fromkeys(case[0] for case in cases):
        rows = [row for case, of in cases.items() if case[0] == when for row in of.values()]
        visits = between([len(row["visits"]) for row in rows], 0)
        calls = between([int(visit["samples"]) for row in rows for visit in row["visits"]], 0)
        assert re.search(rf"^\| {when} \| .* \| {visits} \| {calls} \|$", section, re.MULTILINE), when
        assert all(plot.calm(row) for row in rows)
    everything = [row for of in cases.values() for row in of.values()]
    assert all(row["driver"] == "580.159.04" for row in everything)
    matrix = [float(row["matrix_tflops"]) for row in everything
              if row["dtype"] == "bfloat16" and row["matrix_tflops"]]  # fmt: skip
    copy = [float(row["copy_gb_per_s"]) for row in everything if row["copy_gb_per_s"]]
    visits = [visit for row in everything for visit in row["visits"]]
    clocks = [int(visit["clock_mhz"]) for visit in visits if visit["clock_mhz"]]
    assert f"clocks ran at {between(clocks, 0)} MHz" in " ".join(section.split())
    watts = [int(visit["watts"]) for visit in visits if visit["watts"]]
    assert f"power at {between(watts, 0)} W" in " ".join(section.split())
    spreads = [compare.spread(row["visits"]) for row in everything if row["what"] in ("forward", "backward")]
    tenth = sum(spread > 0.1 for spread in spreads)
    assert (
        f"{100 * median(spreads):.0f} % apart in the median, more than 10 % in {tenth} of {len(spreads)}"
        in " ".join(section.split())
    )
    assert (
        f"a matrix product of bfloat16 reached {between(matrix, 0)} TFLOP/s, a copy {between(copy, 0)} GB/s"
        in section
    )


def test_what_is_said_of_gpus_is_of_measured_rows():
    section, cases = runs_on_a_gpu()
    text = " ".join(section.split())

    def ratios(name, least=0, **fields):
        """Of the cases whose rows have these values, and at least so many queries, where it was right."""
        kept = [of for of in cases.values() if name in of and plot.right(of[name])
                and all(of[name][field] == value for field, value in fields.items())
                and int(of[name]["seqlen"]) >= least]  # fmt: skip
        assert kept
        return [over(of, name) for of in kept]

    third, forward = "flash-attn 3", {"what": "forward", "dtype": "bfloat16"}
    deep = {"what": "forward", "dtype": "float8_e4m3fn"}
    packed = {"what": "varlen", "passes": "forward"}
    first, last = ({"what": what} for what in ("forward", "backward"))
    to_the_best = [
        min(over(of, name) for name in peers_of(of))
        for case, of in cases.items()
        if case[1] == "forward" and case[9] == "bfloat16" and int(case[6]) <= 1024
    ]
    for said, found in (
        ("8-bit floats run at {} of flash-attn 3", ratios(third, **deep)),
        ("from 2048 queries on at {} of flash-attn 3", ratios(third, least=2048, head_dim="64", **forward)),
        ("head dim 128 at {},", ratios(third, least=2048, head_dim="128", **forward)),
        ("head dim 256 at {} of it", ratios(third, least=2048, head_dim="256", **forward)),
        ("up to 1024 queries forward runs at {} of the best peer", to_the_best),
        ("head dim 64 at {} of flash-attn 3's.", ratios(third, head_dim="64", **packed)),
        ("float16, causal, has {} times the speed", ratios("torch cudnn", **first, dtype="float16")),
        ("torch's cuDNN forward and {} times backward", ratios("torch cudnn", **last, dtype="float16")),
        ("efficient attention backward is {}", ratios("torch efficient", **last)),
        ("the least ratio is {}", [min(ratios("torch cudnn", **last))]),
    ):  # fmt: skip
        assert said.format(between(found)) in text, said.format(between(found))
    rates = {(case[1], case[8], case[9], case[10]): f"{float(of['cupy_flash']['tflops']):.0f}"
             for case, of in cases.items() if case[6] == "4096" and case[8] in ("128", "512")}  # fmt: skip
    assert f"float32 forward runs at {rates['forward', '128', 'float32', 'True']} TFLOP/s" in text
    for causal, mask in (("False", ""), ("True", " causal")):
        forward_rate, backward_rate = (
            rates[what, "512", "bfloat16", causal] for what in ("forward", "backward")
        )
        assert f"| 512 |{mask} | 4096 | {forward_rate} | {backward_rate} |" in text.replace("|  |", "| |")
    for said, passes in (
        ("That is {} times as fast forward as a call for each sequence", "forward"),
        ("as a call for each sequence, and {} times backward", "backward"),
    ):
        assert said.format(between(ratios("cupy_flash, one by one", what="varlen", passes=passes), 1)) in text
    cold = {case[-1]: float(of["cupy_flash"]["median_ms"]) for case, of in cases.items() if case[1] == "cold"}
    assert (
        "takes {first call:.0f} ms, the second {second call:.2f}, after imports of {import:.0f} ms".format(
            **cold
        )
        in text
    )
    slower = [1 / ratio for ratio in ratios("cupy_flash deterministic", dtype="bfloat16")]
    assert f'`reproducible="run"` has {between(slower)} of the speed without it' in text
    assert f"it has {between(slower)} of the speed without it" in TEXT[DOCS / "reproducible.md"]
    (of_float32,) = ratios("cupy_flash deterministic", dtype="float32")
    assert f"float32 has {1 / of_float32:.2f} of the speed then" in TEXT[DOCS / "performance.md"]
    assert (
        f"in 16 bits up to head dim 128, at {between(slower)} of the speed" in TEXT[DOCS / "performance.md"]
    )
    in_turns = {True: [], False: []}
    for of in cases.values():
        if (row := of.get("cupy_flash deterministic")) and row["dtype"] in ("bfloat16", "float16"):
            heads = int(row["batch"]) * int(row["heads"])
            in_turns[heads <= hopper._FEW_HEADS].append(1 / over(of, row["implementation"]))
    assert (
        f"an H200 had {between(in_turns[True])} of the fast way's\nspeed in waves, "
        f"{between(in_turns[False])} under one order" in (ROOT / "kernels_cu/README.md").read_text("utf-8")
    )
    front = " ".join(TEXT[ROOT / "README.md"].split())
    assert f"512 and 1024 queries run at {between(to_the_best)} of the best peer" in front
    errors = [f"{error:.1e}" for error in sorted(float(of["cupy_flash"]["error"]) for of in cases.values()
              if of["cupy_flash"]["dtype"] == "float8_e4m3fn")]  # fmt: skip
    said = f"the largest error of o was {errors[0]} to {errors[-1]} of its largest value"
    assert said in TEXT[DOCS / "precision.md"]
    wrong = [of["flash-attn3-jax"] for of in cases.values() if "flash-attn3-jax" in of]
    failed = [row for row in wrong if not plot.right(row)]
    assert f"In {len(failed)} of {len(wrong)} cases flash-attn3-jax" in text
    short = {case[-1]: of for case, of in cases.items() if case[1] == "latency" and case[6] == "64"
             and case[2] == "forward"}  # fmt: skip
    times = [f"{1e3 * float(short['to result'][name]['median_ms']):.0f}"
             for name in ("cupy_flash", "torch flash", "torch cudnn", third)]  # fmt: skip
    assert (
        "takes {} us from the call to its result, torch flash {}, torch cudnn {} and flash-attn 3 {}".format(
            *times
        )
        in text
    )


def timed_on_gpus():
    """Head dims of our own rows in bench/results that are of a GPU, by GPU, file, passes and dtype."""
    found = {}
    for path in sorted(results.RESULTS.glob("*.csv")):
        for row in results.read(path):
            if row.get("gpu") and row["implementation"].startswith("cupy_flash"):
                kind = (row["gpu"], path.name, row["passes"], row["dtype"])
                found.setdefault(kind, set()).add(int(row["head_dim"]))
    return dict(sorted(found.items()))


def test_table_of_what_was_timed_on_gpus_is_of_all_rows():
    section = TEXT[DOCS / "support.md"].partition("\n## What was timed on a GPU\n")[2]
    lines = []
    for (gpu, name, passes, dtype), dims in timed_on_gpus().items():
        cells = [gpu, f"[{name}](../bench/results/{name})", passes, dtype, ", ".join(map(str, sorted(dims)))]
        lines.append(f"| {' | '.join(cells)} |")
    assert re.findall(r"^\| .*\.csv\) .*$", section, re.MULTILINE) == lines
    gpus = {gpu for gpu, *_ in timed_on_gpus()}
    assert gpus == {f"NVIDIA {name}" for name in re.findall(r"on one NVIDIA (\w+)", section)}


# What is false as soon as one kernel has run on a GPU, and been timed.
NOTHING_HAS_RUN = re.compile(
    r"no kernel (here )?has (ever |yet )?run|nothing (here )?has (ever |yet )?run on a GPU"
    r"|no (times?|speeds?) of a GPU (has|have) been measured|Hopper kernels before they can be measured",
    re.IGNORECASE,
)


def test_nothing_says_that_no_kernel_has_run():
    assert timed_on_gpus()
    suffixes = {".md", ".py", ".cu", ".cuh", ".h", ".cpp"}
    folders = ("bench", "cupy_flash", "docs", "examples", "kernels_cpu", "kernels_cu", "scripts", "tests")
    files = [path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"]
    files += [path for folder in folders for path in sorted((ROOT / folder).rglob("*"))
              if path.suffix in suffixes and path != Path(__file__).resolve()]  # fmt: skip
    texts = {path: " ".join(path.read_text("utf-8").split()) for path in files}
    said = {str(path.relative_to(ROOT)): found[0] for path, text in texts.items()
            if (found := NOTHING_HAS_RUN.search(text))}  # fmt: skip
    assert not said


def test_table_of_functions_is_of_measured_rows():
    """Cells of docs/score_functions.md, from the run that it names."""
    page = TEXT[DOCS / "score_functions.md"]
    when = re.search(r"these rows are of ([\d-]+ [\d:]+) in", page)[1]
    run = [row for row in results.read(results.RESULTS / "functions.csv") if row["when"].startswith(when)]
    times = {}
    for row in map(results.pooled, results.runs(run)):
        of = times.setdefault(row["detail"], {})
        of[row["implementation"], row["passes"]] = float(row["median_ms"])
    assert len(times) == 6
    for name, of in times.items():
        ways = [way for way in ("cupy_flash", "cupy_flash blocks") if (way, "forward") in of]
        here = [f"{of[way, 'forward']:.1f}" for way in ways] + [""] * (2 - len(ways))
        compiled, eager = (of[f"flex_attention {how}", "forward"] for how in ("compiled", "eager"))
        over = compiled / min(of[way, "forward"] for way in ways)
        gradients = min(of[way, "forward+backward"] for way in ways)
        cells = [name, *here, f"{compiled:.1f}", f"{eager:.0f}", f"{over:.2f}", f"{gradients:.0f}"]
        assert "| " + " | ".join(cells).replace("  ", " ") + " |\n" in page


def rows_of_spans(page):
    """Rows of bench/results/spans.csv of the run that a page names, a pooled one for each way."""
    when = re.search(r"these rows are of\s([\d-]+ [\d:]+) in\s\[bench/results/spans.csv\]", page)[1]
    rows = [row for row in results.read(results.RESULTS / "spans.csv") if row["when"].startswith(when)]
    return rows, list(map(results.pooled, results.runs(rows)))


def test_numbers_of_spans_are_of_measured_rows():
    """Cells of docs/spans.md, and what it says of its lines."""
    page = TEXT[DOCS / "spans.md"]
    over = spans.ratios(rows_of_spans(page)[0])
    both = ("forward", "backward")
    for label, mask, way in (
        ("causality by key; `causal=True`", "causal", "cupy_flash spans by key"),
        ("causality by query; `causal=True`", "causal", "cupy_flash spans by query"),
        ("32 documents, causal; `attention_varlen`", "32 documents", "cupy_flash spans"),
    ):
        cells = " | ".join(f"{over[mask, passes, way]:.2f}" for passes in both)
        assert f"\n| {label} | {cells} |\n" in page
    documents = [over["32 documents", passes, "cupy_flash spans"] for passes in both]
    assert f"gradients of documents have {1 / documents[1]:.2f} of the packed" in page
    targets = re.search(r"at most ([\d.]+) for causality, and ([\d.]+) for documents", page)
    causal = [
        over["causal", passes, f"cupy_flash spans by {way}"] for passes in both for way in ("key", "query")
    ]
    assert max(causal) <= float(targets[1])
    assert max(documents) <= float(targets[2])
    makers = re.search(r"^\| (`documents`.*) \|$", page, re.MULTILINE)[1].replace("`", "").split(" | ")
    making = {name: over[f"make {name}", "forward", spans.MAKING] for name in makers}
    assert len(making) == sum(name.startswith("make ") for name in spans.MASKS)
    assert 100 * max(making.values()) <= float(re.search(r"the target is at most ([\d.]+) %", page)[1])
    assert f"\n| {' | '.join(f'{100 * share:.2f}' for share in making.values())} |\n" in page


def test_table_of_masks_is_of_measured_rows():
    """Cells of docs/score_functions.md: the gallery as functions, blocks and spans."""
    page = TEXT[DOCS / "score_functions.md"]
    times = {}
    for row in rows_of_spans(page)[1]:
        if row["detail"].startswith("gallery "):
            of = times.setdefault(row["detail"].removeprefix("gallery "), {})
            of[row["passes"], row["implementation"]] = f"{float(row['median_ms']):.1f}"
    assert len(times) == 8
    columns = [
        (passes, f"cupy_flash {way}")
        for passes in ("forward", "backward")
        for way in ("function", "blocks", "spans")
    ]
    for name, of in times.items():
        cells = " | ".join([name, *(of.get(column, "") for column in columns)])
        assert f"| {cells} |".replace("  ", " ") + "\n" in page


def test_table_of_memory_is_what_memory_report_says():
    page = TEXT[DOCS / "performance.md"]
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) (MB|GB) \| ([\d.]+) MB \|$", page, re.MULTILINE)
    assert len(rows) == 3
    for seqlen, naive, unit, ours in rows:
        report = cupy_flash.memory_report(1, 1, int(seqlen), 128, causal=True, backward=True)
        assert float(naive) == pytest.approx(report.naive_bytes / {"MB": 1e6, "GB": 1e9}[unit], rel=0.01)
        assert float(ours) == pytest.approx(report.flash_bytes / 1e6, abs=0.05 if float(ours) >= 1 else 0.005)


def runs_of_words(text):
    """Every three words in a row, or two that stand alone, of what a message does not fill in."""
    for fixed in re.split(r"\.\.\.|\{\}|\n|\S*[\d'=`]\S*", text.lower()):
        words = re.findall(r"[a-z_]+", fixed)
        yield from [tuple(words)] if len(words) == 2 else zip(words, words[1:], words[2:], strict=False)


def text_of(node):
    """The text of a string in the source, {} for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(value.value if isinstance(value, ast.Constant) else "{}" for value in node.values)
    return ""


@functools.cache
def ours():
    """All that the library can say."""
    sources = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "cupy_flash").rglob("*.py")]
    return {run for source in sources for node in ast.walk(source) for run in runs_of_words(text_of(node))}


def first_lines(path):
    """The first lines of the errors that a source raises about machines, files and packages."""
    ours = ("BuildFailed", "CubinNotFoundError", "UnsupportedError")
    calls = (
        node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)
    )
    raised = (call for call in calls if getattr(call.func, "id", "") in ours and call.args)
    return [text for call in raised if (text := text_of(call.args[0]))]


SAID = re.findall(
    r"^\| (?!what is said|error|---|`)([^|]+) \|", TEXT[DOCS / "troubleshooting.md"], re.MULTILINE
)


@pytest.mark.parametrize("said", SAID)
def test_troubleshooting_quotes_what_is_said(said):
    assert set(runs_of_words(said)) & ours()


@pytest.mark.parametrize("module", ["cubins/build", "cubins/locate", "cubins/nvrtc", "device/driver"])
def test_troubleshooting_knows_every_error(module):
    known = {run for said in SAID for run in runs_of_words(said)}
    missing = [
        text
        for text in first_lines(ROOT / "cupy_flash" / f"{module}.py")
        if not set(runs_of_words(text)) & known
    ]
    assert missing == []


# ---------------------------------------------------------------------- the site


def test_every_public_name_is_in_the_reference():
    adapters = TEXT[DOCS / "adapters.md"]
    named = set(re.findall(r"^\.\. auto\w+:: (\S+)", TEXT[DOCS / "api.md"] + adapters, re.MULTILINE))
    public = {f"cupy_flash.{name}" for name in cupy_flash.__all__ if not name.startswith("_")}
    for module in re.findall(r"^## (cupy_flash\.\w+)$", adapters, re.MULTILINE):
        if f".. automodule:: {module}\n   :members:" not in adapters:
            public |= {f"{module}.{name}" for name in exported(Path(importlib.util.find_spec(module).origin))}
    assert public - named == set()


GONE = {*REMOVED, *cupy_flash._REMOVED}


def test_no_name_that_is_gone_is_there():
    assert set(cupy_flash._REMOVED) & set(dir(cupy_flash)) == set()
    for call in (cupy_flash.attention, cupy_flash.attention_varlen, cupy_flash.attention_with_kv_cache):
        assert set(REMOVED) & set(inspect.signature(call).parameters) == set()


def test_every_name_that_is_gone_is_beside_the_new_one():
    before = " ".join(re.findall(r"^\| (.*?) \| ", TEXT[DOCS / "renamed.md"], re.MULTILINE))
    assert GONE - set(re.findall(r"\w+", before)) == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_says_a_name_that_is_gone(page):
    if page.name in ("renamed.md", "coming_from.md"):  # names of others stand there, beside ours
        return
    said = [re.match(r"(?:cupy_flash\.)?(\w+)(?![\w.])", span) for span in INLINE.findall(TEXT[page])]
    assert [name[1] for name in said if name and name[1] in GONE] == []


def exported(path):
    """What a module lists in __all__."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return ast.literal_eval(node.value)
    return []


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    for module in ("sphinx", "furo", "myst_parser", "numpydoc", "sphinx_copybutton", "torch"):
        pytest.importorskip(module, reason=f"the site needs {module}: pip install cupy-flash[docs]")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", str(DOCS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "api.html").is_file()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page):
    broken = []
    for target in LINK.findall(TEXT[page]):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        other = page if not path else page.parent / path
        if not other.exists() or (anchor and anchor not in anchors(whole(other))):
            broken.append(target)
    assert broken == []


def whole(page):
    """Text of a page, with those that it includes."""
    text = page.read_text(encoding="utf-8")
    included = re.findall(r"^```{include} (\S+)$", text, re.MULTILINE)
    return "\n".join([text, *((page.parent / name).read_text(encoding="utf-8") for name in included)])


def anchors(text):
    """Anchors of the headings, as renderers of Markdown make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(FENCE, "", text), re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths(page):
    prose = re.sub(FENCE, "", TEXT[page])
    paths = [word for span in INLINE.findall(prose) for word in span.split() if PATH.fullmatch(word)]
    built = ("build/", ".venv/", "bench/results/")  # made by commands
    assert [path for path in paths if not path.startswith(built) and not (ROOT / path).exists()] == []

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
import warnings
from pathlib import Path

import pytest

import cupy_flash
from bench.commands import pages, spans
from bench.measure import results
from bench.measure.tables import between
from cupy_flash.__main__ import main
from cupy_flash.call.signature import INSTEAD
from cupy_flash.errors import UnsupportedError
from cupy_flash.plan.catalog import ARCHITECTURES
from cupy_flash.plan.families import FAMILIES, hopper
from tests.paths import ROOT

DOCS = ROOT / "docs"
KERNELS = re.compile(r"docs/kernels/|kernels_cu/")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md", ROOT / "llms.txt"]
PAGES += [ROOT / "kernels_cu/README.md", ROOT / "kernels_cu/simulator/README.md", *sorted(DOCS.rglob("*.md"))]
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
        # why not imported here: keras reads its backend from what the example sets before.
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"the example imports {module}, which is not installed")


def require_gpu():
    from cupy_flash.device import driver

    try:
        driver.devices()
    except UnsupportedError as error:
        pytest.skip(f"the example needs a GPU: {error.args[0].splitlines()[0]}")


# ---------------------------------------------------------------------- examples


@pytest.fixture(autouse=True)
def _torchs_own_attention():
    """Pages put this library in the place of torch's function; the next one starts without."""
    yield
    if torch := sys.modules.get("torch"):
        torch.nn.functional.scaled_dot_product_attention = torch._C._nn.scaled_dot_product_attention


@pytest.mark.parametrize(("page", "line", "code"), blocks("python"))
def test_python(page, line, code):
    require(code)
    if page.stem == "use_it_in":  # why: other libraries warn of each other's deprecations
        warnings.simplefilter("default")
    exec(compile("\n" * line + code, page.name, "exec"), {"__name__": f"{page.stem}_line_{line}"})


def test_every_night_the_libraries_of_a_page_are_there():
    """Elsewhere their examples are skipped, as long as nobody has installed them."""
    job = (ROOT / ".github" / "workflows" / "night.yml").read_text().partition("\n  pages:\n")[2]
    codes = [block.values[2] for block in blocks("python") if block.values[0].stem == "use_it_in"]
    of_extras = {"torch", "jax", "equinox", "transformers", "tokenizers", "cupy_flash", "os"}
    needed = {module for code in codes for module in modules(code)} - of_extras
    assert {"diffusers", "trl"} <= needed
    assert not [module for module in needed if not re.search(rf"\b{module}\b", job)]


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
    [
        pytest.param(c, marks=[pytest.mark.slow] * ("check" in c and "--quick" not in c), id=" ".join(c))
        for c in commands()
        if c[:3] == ["python", "-m", "cupy_flash"] and c[3] != "build"
    ],
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


def other_way(timed, name, dtype):
    """Speeds of another way of ours over the plain call's."""
    found = [1 / ratio for one in timed if one.ours["dtype"] == dtype and (ratio := one.over(name, "tflops"))]
    assert found
    return found


def test_what_other_pages_say_of_gpus_is_of_measured_rows():
    """docs/performance.md and the README are held by tests/bench/test_pages.py."""
    timed = pages.PAGES_BY_NAME["backward"].timed()
    slower = other_way(timed, "cupy_flash deterministic", "bfloat16")
    assert f"they run at {between(slower)} of the speed without it" in TEXT[DOCS / "reproducible.md"]
    in_turns = {True: [], False: []}
    for one in timed:
        if ratio := one.over("cupy_flash deterministic", "tflops"):
            heads = int(one.ours["batch"]) * int(one.ours["heads"])
            in_turns[heads <= hopper._FEW_HEADS].append(1 / ratio)
    assert (
        f"an H200 had {between(in_turns[True])} of the fast plan's speed in waves, "
        f"{between(in_turns[False])} under one order"
        in " ".join(TEXT[DOCS / "kernels/backward_sm90.md"].split())
    )
    errors = sorted(float(one.ours["error"]) for one in pages.PAGES_BY_NAME["float8"].timed())
    said = f"the largest error of o was {errors[0]:.1e} to {errors[-1]:.1e} of its largest value"
    assert said in TEXT[DOCS / "precision.md"]


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
    when = re.search(r"The rows are those of ([\d-]+ [\d:]+) in", page)[1]
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
    when = re.search(r"The rows are those of\s([\d-]+ [\d:]+) in\s\[bench/results/spans.csv\]", page)[1]
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
    assert f"gradients of documents run at {1 / documents[1]:.2f} of the packed" in page
    targets = re.search(r"at most ([\d.]+) for causality, and ([\d.]+) for documents", page)
    causal = [
        over["causal", passes, f"cupy_flash spans by {way}"] for passes in both for way in ("key", "query")
    ]
    assert max(causal) <= float(targets[1])
    assert max(documents) <= float(targets[2])
    makers = re.search(r"^\| (`documents`.*) \|$", page, re.MULTILINE)[1].replace("`", "").split(" | ")
    making = {name: over[f"make {name}", "forward", spans.MAKING] for name in makers}
    assert len(making) == sum(name.startswith("make ") for name in spans.MASKS)
    assert 100 * max(making.values()) <= float(re.search(r"target: at most ([\d.]+) %", page)[1])
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


SAID = re.findall(r"^\| (?!message|error|---|`)([^|]+) \|", TEXT[DOCS / "troubleshooting.md"], re.MULTILINE)


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


def test_every_maker_of_spans_is_in_their_table():
    said = dict(re.findall(r"^\| `(\w+)\((.*?)\)` \|", TEXT[DOCS / "spans.md"], re.MULTILINE))
    for name in cupy_flash.spans.__all__:
        parameters = inspect.signature(getattr(cupy_flash.spans, name)).parameters.values()
        bare = [str(one.replace(annotation=inspect.Parameter.empty)) for one in parameters]
        assert said.pop(name, None) == ", ".join(bare)
    assert not said


def test_no_option_is_written_otherwise_too():
    for call in (cupy_flash.attention, cupy_flash.attention_varlen, cupy_flash.attention_with_kv_cache):
        assert set(INSTEAD) & set(inspect.signature(call).parameters) == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_says_an_option_that_is_written_otherwise(page):
    if page.name == "coming_from.md":  # names of others stand there, beside ours
        return
    if KERNELS.search(str(page)):  # `tile/` and `spans` are a folder and a kind of variant there
        return
    said = [re.match(r"(?:cupy_flash\.)?(\w+)(?![\w.])", span) for span in INLINE.findall(TEXT[page])]
    assert [name[1] for name in said if name and name[1] in INSTEAD] == []


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
    # Pages of the kernels name headers as an #include does.
    roots = (ROOT, ROOT / "kernels_cu", ROOT / "kernels_cu/include") if KERNELS.search(str(page)) else (ROOT,)
    gone = [path for path in paths if not any((root / path).exists() for root in roots)]
    assert [path for path in gone if not path.startswith(built)] == []


# Names in the notes on kernels that are no names of ours: metrics and warnings of NVIDIA's tools.
FOREIGN_NAMES = {"stall_wait", "C75xx"}


def test_notes_on_kernels_name_what_exists():
    notes = [*ROOT.glob("docs/kernels/*.md"), ROOT / "kernels_cu/README.md"]
    folders = ("kernels_cu", "cupy_flash", "bench", "tests")
    files = [
        x
        for folder in folders
        for kind in ("cu", "cuh", "h", "py")
        for x in (ROOT / folder).rglob(f"*.{kind}")
    ]
    sources = "\n".join(x.read_text() for x in files)
    for page in notes:
        named = {*re.findall(r"`([A-Za-z_]\w{3,})(?:\(\))?`", page.read_text())} - FOREIGN_NAMES
        assert [name for name in named if name not in sources] == [], page.name

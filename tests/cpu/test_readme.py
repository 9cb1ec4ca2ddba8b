"""What the README says is so: its Python runs, its commands and paths exist, its links lead somewhere."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from cupy_flash.__main__ import main
from cupy_flash.catalog import ARCHITECTURES
from cupy_flash.errors import Unsupported
from cupy_flash.families import CACHE_FAMILIES, FAMILIES
from tests.paths import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
README = PAGES[0].read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
INLINE = re.compile(r"`([^`\n]+)`")
# A path of the checkout: a folder and what follows, or a file with one of our endings.
PATH = re.compile(r"[\w.-]+(/[\w.-]+)+/?|[\w-]+\.(py|cu|cuh|md|toml|txt)")


def blocks(language):
    """(line, text) of the fenced blocks in a language."""
    return [
        (README[: match.start()].count("\n") + 1, match[2])
        for match in FENCE.finditer(README)
        if match[1] == language
    ]


def modules(code):
    """Top-level modules that the code imports."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.partition(".")[0]


def commands():
    """Lines of the shell blocks, without their comments."""
    lines = [line for _, block in blocks("sh") for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.mark.parametrize(
    ("line", "code"), blocks("python"), ids=lambda x: f"line{x}" if isinstance(x, int) else ""
)
def test_python(line, code):
    for module in modules(code):
        if module == "cupy":
            require_gpu()
        pytest.importorskip(module, reason=f"the example imports {module}, which is not installed")
    exec(compile("\n" * line + code, PAGES[0].name, "exec"), {"__name__": f"readme_line_{line}"})


def require_gpu():
    from cupy_flash import driver

    try:
        driver.devices()
    except Unsupported as error:
        pytest.skip(f"the example needs a GPU: {error.args[0].splitlines()[0]}")


@pytest.mark.parametrize(
    "words", [c for c in commands() if c[:3] == ["python", "-m", "cupy_flash"]], ids=" ".join
)
def test_commands_of_the_package(words, capsys):
    assert main(words[3:]) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("family", [family.NAME for family in (*FAMILIES, *CACHE_FAMILIES)])
def test_support_table(family):
    row = re.search(rf"^\| {family} \|.*\| sm_([\d, ]+) \|$", README, re.MULTILINE)
    assert row, f"no row for the family {family}"
    compiled = [arch.capability for arch in ARCHITECTURES if family in arch.families]
    assert [int(capability) for capability in row[1].split(",")] == compiled


def test_commands_of_the_checkout():
    named = {Path(word) for words in commands() for word in words if word.startswith("scripts/")}
    assert Path("scripts/demo") in named
    assert Path("scripts/test") in named
    assert [path for path in named if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page):
    text = page.read_text(encoding="utf-8")
    broken = []
    for target in LINK.findall(text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        other = page if not path else page.parent / path
        if not other.exists() or (anchor and anchor not in anchors(other.read_text(encoding="utf-8"))):
            broken.append(target)
    assert broken == []


def anchors(text):
    """Anchors of the headings, as renderers of Markdown make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(FENCE, "", text), re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths(page):
    prose = re.sub(FENCE, "", page.read_text(encoding="utf-8"))
    paths = [word for span in INLINE.findall(prose) for word in span.split() if PATH.fullmatch(word)]
    built = ("build/", ".venv/", "bench/results/")  # made by commands
    assert [path for path in paths if not path.startswith(built) and not (ROOT / path).exists()] == []

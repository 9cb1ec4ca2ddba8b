"""Words and phrases that must not come back, with what to write instead; docs/style.md has the rules."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cpu.test_documentation import text_of
from tests.cpu.test_headers import HEADERS, banner_of
from tests.cpu.test_headers import SOURCES as KERNELS_CU
from tests.paths import ROOT

# A pattern of lower-case text in which every space is one, and the plain form.
PLAIN = {
    r"\bcompan(y|ies)\b": "batch-invariant; whatever else is in the batch",
    r"\b(beside|of) (another|other|its) neighbours?\b": "in a different batch; other features",
    r"\bwhat says the same\b": "the equivalent call, the equivalent option",
    r"\bprocessor time\b": "CPU time",
    r"\b(medians? of|\d+|two|three|four|five) visits\b": "repetitions",
    r"\bvisits? to a (case|gpu)\b": "a repetition; a run on a GPU",
    r"\b(how|so) many times as fast\b": "speedup over ...",
    r"\b(is|still) in the making\b": "is not released",
    r"\bwhat people (compute|run|use)\b": "other uses; common calls",
    r"\bmeets? every other option\b": "combine (AND) with every other option",
    r"\bwhat no option says\b": "pass a Python function, like score_mod and mask_mod",
    r"\bnobody (sees|looks|vouches|checks)\b": "masked; left padding; not checked",
    r"\btrees? of drafts over\b": "tree attention over",
    r"\bby its place, when\b": "RoPE on read",
    r"\ba (value|key) is what is stored\b": "with a dequantisation scale per key head",
    r"\bstands? for none\b": "is not a valid ...",
    r"\bmend(s|ed|ing)\b": "fix",
    r"\bstrangers?\b": "third parties; untrusted",
    r"(?<![.`])\bunit(e|es|ed|ing)\b": "merge, combine",
    r"\bin silence\b": "silently",
    r"\bbeside the operands\b": "extra memory",
    r"\btimes less\b": "1/n of, n times smaller",
    r"\bmeets a transform\b": "is not supported under torch.func",
    r"\ba sequence room for\b": "a capacity of",
    r"\bof the clock and of processors\b": "wall clock and CPU",
    r"\bto be had\b": "available",
    r"\bpass(ed|es)? over in silence\b": "silently skipped",
    r"\bwhoever\b": "anyone who; the block, thread or caller that",
    r"\bwhere (it|they) lies?\b": "in place",
    r"\bread there only\b": "the host does not read it",
    r"\btime of the processor\b": "CPU time",
    r"\b(that others used|beside other work)\b": "not idle",
    r"\bprograms? of torch\.compile\b": "under torch.compile",
    r"\bstands? on (its|the) last key\b": "is at the position of the last key",
    r"\bheld to fp64\b": "compared with FP64",
    r"\basks? memory for\b": "prefetch",
    r"\brooms\b": "folders",
    r"\btwins?\b": "CPU version",
    r"\bcost sheets?\b": "instruction counts",
    r"\bthe (same )?way out\b": "the epilogue",
    r"\bwhy it looks like this\b": "design decisions; rejected alternatives",
    r"\bthe roof\b": "the roofline bound",
    r"\bforeseen\b": "predicted",
    r"\bbefore it was built\b": "predicted",
    r"\bof late\b": "nothing",
    r"\bas (it|they) lies?\b": "in registers; without a change",
    r"\bsends for\b": "loads; starts the copy of",
    r"\bsomebody else('s)?\b": "another sequence, another block",
    r"\bof use \d": "useful",
    r"\bshare(s|d)? out\b": "divide among",
}
# The same of docstrings and comments only: messages and pages may use some of these words.
DIALECT = {
    r"\bfor people\b": "for messages; one-line description",
    r"\bas of `": "as in `...`",
    r"^(those|that) of\b": "options of ..., the gradients of ...",
    r"\bgoes with 0\.\d": "to be removed in ...",
    r"\bcheckers? of types\b": "type checker",
    r"\b(any|every|no|some)body\b": "the caller, another process, all processes, no caller",
    r"\bcannot answer (a problem|it)\b": "does not support",
    r"\bwhat is compiled for an? (architecture|target)\b": "the variants compiled for ...",
    r"\bno array says it\b": "if it is one integer for all",
    r"\b(of|for|in|by) so many\b": "of this many, n ...",
    r"\bseen (in part|as a whole)\b": "partial; full",
    r"\bnumber for each head\b": "one number per head",
    r"\bwhat is asked\b": "a checked call, the arguments",
    r"\blooked at\b": "read, checked, evaluated",
    r"(?<!`)\bbeside\b(?!`| :)": "with, next to, in addition to",
    r"^what\b": "name it: the inputs of ..., the result of ..., why ...",
    r"\bstands? for\b": "represents, is the code of, is replaced by",
    r"\blies? (anywhere|beside|in|next|on|outside|where)\b": "is in, is next to",
    r"\bholds? fixed\b": "static parameters, constant",
    r"\bhand(s|ed)? over\b": "pass, provide",
    r"\banew\b": "again, from scratch",
}
# One place says what was measured on a GPU.
MEASURED = {r"\bnot yet measured\b": "nothing: docs/support.md has what ran on hardware; link to it"}
# Where the table of that stands, and its numbers.
ELSEWHERE = {"support.md", "performance.md"}

PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "AGENTS.md")),
    ROOT / "llms.txt",
    *(ROOT / folder / "README.md" for folder in ("bench", "examples", "kernels_cpu")),
    *sorted((ROOT / "kernels_cu").rglob("README.md")),
    *sorted((ROOT / "packages").glob("*/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
SOURCES = sorted((ROOT / "cupy_flash").rglob("*.py"))
TOOLS = sorted([*(ROOT / "bench").rglob("*.py"), *(ROOT / "scripts").glob("*.py")])
KERNELS = [*KERNELS_CU.values(), *HEADERS.values()]


def found(text: str, phrases: dict[str, str]) -> list[str]:
    text = " ".join(text.lower().split())
    return [
        f"{match[0]!r}: write {plain!r}" for phrase, plain in phrases.items()
        for match in re.finditer(phrase, text)
    ]  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert found(text, PLAIN if page.name in ELSEWHERE else PLAIN | MEASURED) == []


def test_docstrings_and_messages() -> None:
    said = {}
    for path in SOURCES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
        parts = {id(value) for node in joined for value in node.values}
        texts = (text_of(node) for node in ast.walk(tree) if id(node) not in parts)
        # A text of one word is a name.
        if bad := [
            phrase for text in texts if " " in text.strip() for phrase in found(text, PLAIN | MEASURED)
        ]:
            said[str(path.relative_to(ROOT))] = bad
    assert said == {}


def prose(source: str) -> Iterator[str]:
    """Docstrings, and blocks of comments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""
    block, last = "", 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                yield block
                block = ""
            block, last = f"{block} {token.string.lstrip('# ')}", token.start[0]
    yield block


def test_docstrings_and_comments() -> None:
    refused = PLAIN | MEASURED | DIALECT
    said = {
        str(path.relative_to(ROOT)): bad
        for path in (*SOURCES, *TOOLS)
        if (bad := [x for text in prose(path.read_text(encoding="utf-8")) for x in found(text, refused)])
    }
    assert said == {}


@pytest.mark.parametrize(
    "source",
    [
        '"""A phrase for people."""',
        'def f():\n    """Those of a call."""',
        "x = 1  # what is\n# asked",
        "# checkers\n# of types\n",
        'class A:\n    """What a compiled call\n    holds fixed."""',
        "# codes that stand\n# for floats\n",
    ],
)
def test_prose_is_found(source: str) -> None:
    assert [phrase for text in prose(source) for phrase in found(text, DIALECT)]


def test_names_and_strings_are_no_prose() -> None:
    source = 'def f(beside):\n    """Add to `beside`.\n\n    beside : array\n    """\n    return "for people"'
    assert not [phrase for text in prose(source) for phrase in found(text, DIALECT)]


# The name of a type behind an article: `type_phrase` chooses the right one, and "of type" needs none.
ARTICLE = re.compile(r"\ban? \{[^{}]*__name__\}")


def test_names_of_types_have_no_fixed_article() -> None:
    assert ARTICLE.search('f"mask() is given a {type(x).__name__}."')
    assert [found for path in SOURCES for found in ARTICLE.findall(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_banners_of_kernels(path: Path) -> None:
    assert found(banner_of(path).replace("//", " "), PLAIN | MEASURED) == []


@pytest.mark.parametrize(
    "phrase",
    [
        "in any company",
        "was\nnot yet measured",
        "The parts are united exactly",
        "keys are read where\nthey lie",
        "The headers lie in rooms",
        "P is operand A as it lies",
    ],
)
def test_a_phrase_is_found(phrase: str) -> None:
    assert found(phrase, PLAIN | MEASURED)


def test_code_is_left_alone() -> None:
    assert found("`united` of the module, merge.united, a unit, units, recommend, companion", PLAIN) == []

"""Docstrings of public functions name every option, on every version of Python."""

import inspect

import pytest

import cupy_flash
from cupy_flash.call.options import BandOptions, declared
from cupy_flash.call.signature import documented

WITH_OPTIONS = (
    "attention", "attention_backward", "attention_varlen", "attention_varlen_backward",
    "attention_with_kv_cache", "attention_statistics", "naive_attention", "memory_report", "explain",
)  # fmt: skip


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_every_option_has_its_row(name):
    function = getattr(cupy_flash, name)
    doc = inspect.getdoc(function)
    rows = {x for line in doc.splitlines() if line[:1].isalpha() for x in line.split(" : ")[0].split(", ")}
    assert set(inspect.signature(function).parameters) <= rows
    assert "\n{" not in doc


# why: Python 3.13 removes the indentation of docstrings when it compiles them.
@pytest.mark.parametrize("compiled", [str, inspect.cleandoc], ids=["before 3.13", "from 3.13 on"])
def test_options_come_where_their_placeholder_is(compiled):
    doc = compiled("""Compute.

    Parameters
    ----------
    q : array
        Queries.
    {options}
    align : int
        Ours.
    """)
    made = documented(doc, declared(BandOptions))
    rows = [line for line in made.splitlines() if line[:1].isalpha()]
    assert [row.split()[0] for row in rows] == ["Compute.", "Parameters", "q", "causal", "window", "align"]
    assert "\n    A query sees keys at or before its position only.\n" in made

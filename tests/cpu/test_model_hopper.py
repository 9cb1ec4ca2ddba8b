"""The predictions in kernels_cu/README.md are what the model prints."""

import importlib.util
import re

import pytest

from tests.paths import ROOT

README = (ROOT / "kernels_cu" / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def model():
    spec = importlib.util.spec_from_file_location("model_hopper", ROOT / "scripts" / "model_hopper.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.mark.parametrize("table", ["float8", "predictions", "stores"])
def test_tables_are_those_of_the_model(model, capsys, table):
    model.main([table])
    for line in capsys.readouterr().out.splitlines():
        assert line in README


def test_kernels_reach_what_is_asked_of_them(model):
    """By the model; what it counts of the code is held by test_sass.py."""
    for words, share, least in model.fractions():
        assert share >= least, words


@pytest.mark.slow
def test_predictions_are_those_of_the_model(model, capsys):
    model.main([])
    shares, *tables = re.split(r"^(?:causal|all keys).*\n", capsys.readouterr().out, flags=re.MULTILINE)
    shares, queries = re.split(r"^useful.*\n", shares, flags=re.MULTILINE)
    for line in queries.splitlines():
        assert line in README
    columns = list(zip(*(line.split()[1:] for line in shares.splitlines()[1:]), strict=True))
    for column in columns:
        assert ", ".join(column) in README
    for line in "".join(tables).splitlines():
        keys, _, heads, *fractions = line.split()
        assert f"| {keys} x {heads} | {' | '.join(fractions)} |" in README

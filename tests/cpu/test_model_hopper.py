"""The predictions in kernels_cu/README.md are what the model prints."""

import importlib.util
import re

from tests.paths import ROOT

README = (ROOT / "kernels_cu" / "README.md").read_text(encoding="utf-8")


def test_predictions_are_those_of_the_model(capsys):
    spec = importlib.util.spec_from_file_location("model_hopper", ROOT / "scripts" / "model_hopper.py")
    model = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(model)
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

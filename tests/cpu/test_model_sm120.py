"""The table of warp roles in kernels_cu/README.md is what the model prints."""

import importlib.util

import pytest

from tests.paths import ROOT


@pytest.mark.slow
def test_table_is_that_of_the_model(capsys):
    spec = importlib.util.spec_from_file_location("model_sm120", ROOT / "scripts" / "model_sm120.py")
    model = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(model)
    model.main([])
    readme = (ROOT / "kernels_cu" / "README.md").read_text(encoding="utf-8")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(model.KERNELS)
    for line in lines:
        assert line in readme

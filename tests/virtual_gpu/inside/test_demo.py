"""The GPU branch of scripts/demo, all but products of matrices: they are cuBLAS's, which is not there."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from cupy_flash.dispatch import memo
from tests.paths import ROOT
from tests.virtual_gpu import install


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import demo_train

    yield demo_train
    for name in ("demo_train", "demo_model"):
        del sys.modules[name]


def test_attention_on_the_activations_of_the_model(demo: Any, cupy: Any) -> None:
    """Within the error budget of the GPU's precision, with every array and all other arithmetic CuPy's."""

    class Transformer(demo.Transformer):
        def _linear(self, x: Any, name: str) -> Any:
            return cupy.asarray(x.get() @ self.weights[name].get()), None

    xp = demo.array_library("gpu")
    assert xp is cupy
    sizes = demo.Sizes(vocabulary=9, context=40, layers=1, heads=2, width=64)
    model = Transformer(xp, sizes, demo.SEED)
    text = np.random.default_rng(0).integers(0, sizes.vocabulary, 500).astype(np.int32)
    memo.forget()
    errors = {name: (ours, naive) for name, ours, naive in demo.attention_errors(model, text)}
    assert list(errors) == ["o", "lse", "dq", "dk", "dv"]
    assert any(name.startswith("flash_forward_tf32x3_d32") for name in install.launched)
    assert any(name.startswith("flash_backward_dqkv_tf32x3_d32") for name in install.launched)


def test_an_array_that_the_gpu_makes_is_what_numpy_makes(demo: Any, cupy: Any) -> None:
    """What the demo does to a text before it is numbers for attention."""
    model = {xp: demo.Transformer(xp, demo.Sizes(vocabulary=9, context=40, layers=1), 0) for xp in (np, cupy)}
    text = np.random.default_rng(0).integers(0, 9, (2, 41)).astype(np.int32)
    embedded = {xp: model[xp].embed(xp.asarray(text))[0] for xp in model}
    np.testing.assert_array_equal(embedded[cupy].get(), embedded[np])

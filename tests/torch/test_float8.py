"""8-bit floats of torch: computed without gradients, refused where they would be recorded."""

from __future__ import annotations

import re

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

import cupy_flash
import cupy_flash.torch
from cupy_flash import InvalidArgumentsError, UnsupportedError
from tests.float8_cases import Float8Case
from tests.public import quantized
from tests.torch.versions import LOSES_ERRORS


def test_as_numpy_and_in_bfloat16() -> None:
    qkv, options = Float8Case((4, 2), (70, 90)).inputs()
    wanted = cupy_flash.attention(*quantized(*qkv, options))
    tensors = [torch.from_numpy(x.view(np.uint8)).view(torch.float8_e4m3fn) for x in qkv]
    scales = {name: torch.from_numpy(options[name]) for name in ("q_scale", "k_scale", "v_scale")}
    o = cupy_flash.attention(*quantized(*tensors, scales))
    assert o.dtype == torch.bfloat16
    np.testing.assert_array_equal(o.float().numpy(), wanted.astype(np.float32))


@LOSES_ERRORS
def test_where_gradients_are_recorded() -> None:
    x = torch.ones((1, 1, 8, 16)).to(torch.float8_e4m3fn)
    for function in (cupy_flash.torch.attention, torch.compile(cupy_flash.torch.attention, backend="eager")):
        with pytest.raises(UnsupportedError, match="float8_e4m3fn has no gradient") as caught:
            function(x, x, x)
        assert re.search(r"Try: cupy_flash.attention .*QuantizedArray\(x, scale\)", str(caught.value))
    scaled = cupy_flash.QuantizedArray(x, torch.ones(1))
    with pytest.raises(InvalidArgumentsError, match=r"q is a QuantizedArray(?s:.*)Try: cupy_flash.attention"):
        cupy_flash.torch.attention(scaled, scaled, scaled)
    assert cupy_flash.attention(scaled, scaled, scaled).shape == x.shape

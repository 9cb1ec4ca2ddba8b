"""8-bit floats of JAX: computed by an eager call, refused by the function that has gradients."""

from __future__ import annotations

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'cupy-flash[jax]'")

import jax.numpy as jnp
import numpy as np

import cupy_flash
import cupy_flash.jax
from cupy_flash import UnsupportedError
from tests.float8_cases import Float8Case
from tests.public import quantized


def test_as_numpy_and_in_bfloat16() -> None:
    qkv, options = Float8Case((4, 2), (70, 90)).inputs()
    wanted = cupy_flash.attention(*quantized(*qkv, options))
    arrays = [jnp.asarray(x) for x in qkv]
    scales = {name: jnp.asarray(options[name]) for name in ("q_scale", "k_scale", "v_scale")}
    o = cupy_flash.attention(*quantized(*arrays, scales))
    assert o.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(o).astype(np.float32), wanted.astype(np.float32))


@pytest.mark.parametrize("through", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_where_gradients_are_offered(through) -> None:
    x = jnp.ones((1, 1, 8, 16), jnp.float8_e4m3fn)
    with pytest.raises(UnsupportedError, match="float8_e4m3fn has no gradient") as caught:
        through(cupy_flash.jax.attention)(x, x, x)
    assert "Try: cupy_flash.attention outside of jit, with cupy_flash.QuantizedArray(" in str(caught.value)

"""attention_with_kv_cache on torch tensors: its results beside torch's, and caches written in place."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

import cupy_flash
from cupy_flash import InvalidArguments

pytestmark = pytest.mark.torch

LENGTHS = (5, 63, 0)


def tensors(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (3, 8, 1, 32), "k_cache": (3, 4, 64, 32), "v_cache": (3, 4, 64, 16)}
    shapes |= {"k": (3, 4, 1, 32), "v": (3, 4, 1, 16)}
    made = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    return made | {"cache_seqlens": torch.tensor(LENGTHS, dtype=torch.int32)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_as_torch_over_the_keys_in_use(dtype):
    given = tensors(dtype)
    o = cupy_flash.attention_with_kv_cache(**given, causal=True)
    assert o.dtype == dtype
    for b, length in enumerate(LENGTHS):
        assert torch.equal(given["k_cache"][b, :, length], given["k"][b, :, 0])
        keys, values = (given[name][b, :, : length + 1].float() for name in ("k_cache", "v_cache"))
        wanted = torch_sdpa(given["q"][b].float(), keys, values, enable_gqa=True)
        tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(o[b].float(), wanted, atol=tolerance, rtol=tolerance)


def test_caches_of_8_bits():
    given = tensors(torch.float16)
    scales = torch.full((4,), 0.05)
    eight = {name: given[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    exact = {name: x.half() for name, x in eight.items()}
    o = cupy_flash.attention_with_kv_cache(**{**given, **eight})
    wanted = cupy_flash.attention_with_kv_cache(**{**given, **exact})
    # The new key and value are rounded to e4m3.
    torch.testing.assert_close(o, wanted, atol=0.1, rtol=0.1)
    whole = {name: (given[name] / 0.05).round().clamp(-127, 127).to(torch.int8) for name in eight}
    o = cupy_flash.attention_with_kv_cache(**{**given, **whole}, k_scale=scales, v_scale=scales)
    wanted = cupy_flash.attention_with_kv_cache(**given)
    torch.testing.assert_close(o, wanted, atol=0.05, rtol=0.05)


def test_lengths_as_an_integer_and_as_numpy():
    given = tensors()
    given["cache_seqlens"] = 7
    assert cupy_flash.attention_with_kv_cache(**given).shape == (3, 8, 1, 16)
    given["cache_seqlens"] = np.array(LENGTHS, np.int32)
    with pytest.raises(InvalidArguments, match="cache_seqlens is a numpy array, q a torch array"):
        cupy_flash.attention_with_kv_cache(**given)


def test_a_cache_that_requires_a_gradient_is_refused():
    given = tensors()
    given["v_cache"].requires_grad_()
    with pytest.raises(InvalidArguments, match="requires grad"):
        cupy_flash.attention_with_kv_cache(**given)

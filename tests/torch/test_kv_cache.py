"""attention_with_kv_cache on torch tensors: its results beside torch's, and caches written in place."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

import cupy_flash
import cupy_flash.torch as cf
from cupy_flash import InvalidArgumentsError, LatentCache, QuantizedCache, Rotary, UnsupportedError
from tests.public import cached, dequantized, int4_parts, nvfp4_parts, over_cache
from tests.torch.versions import LOSES_ERRORS

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
    o = cached(**given, causal=True)
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
    o = cached(**{**given, **eight})
    wanted = cached(**{**given, **exact})
    # The new key and value are rounded to e4m3.
    torch.testing.assert_close(o, wanted, atol=0.1, rtol=0.1)
    whole = {name: (given[name] / 0.05).round().clamp(-127, 127).to(torch.int8) for name in eight}
    o = cached(**{**given, **whole}, k_scale=scales, v_scale=scales)
    wanted = cached(**given)
    torch.testing.assert_close(o, wanted, atol=0.05, rtol=0.05)


def test_lengths_as_an_integer_and_as_numpy():
    given = tensors()
    given["cache_seqlens"] = 7
    assert cached(**given).shape == (3, 8, 1, 16)
    given["cache_seqlens"] = np.array(LENGTHS, np.int32)
    with pytest.raises(InvalidArgumentsError, match="cache_seqlens is a numpy array, q a torch array"):
        cached(**given)


def test_a_cache_that_requires_a_gradient_is_refused():
    given = tensors()
    given["v_cache"].requires_grad_()
    with pytest.raises(InvalidArgumentsError, match="requires grad"):
        cached(**given)


@pytest.mark.parametrize("name", ["q", "v_cache"])
def test_no_other_function_is_named_for_a_gradient_over_a_cache(name):
    given = tensors()
    given[name].requires_grad_()
    with pytest.raises(InvalidArgumentsError, match="over a cache records none") as caught:
        cf.attention_with_kv_cache(**given)
    assert str(caught.value).endswith(f"Try: {name}.detach(), or a call inside torch.no_grad()")


def appending(given):
    return [given["k_cache"], given["v_cache"]], lambda: cached(**given)


def appending_codes(given):
    caches = [cupy_flash.quantized.int4(given["k_cache"], group=32) for _ in "kv"]
    new = {"k": given["k"], "v": given["k"], "cache_seqlens": 5}
    parts = [part for cache in caches for part in (cache.codes, cache.scale, cache.zero)]
    return parts, lambda: cupy_flash.attention_with_kv_cache(given["q"], *caches, **new)


def writing_out(given):
    out = torch.empty(3, 8, 1, 16)
    return [out], lambda: cupy_flash.attention(given["q"], given["k_cache"], given["v_cache"], out=out)


@pytest.mark.parametrize("case", [appending, appending_codes, writing_out])
def test_torch_counts_what_is_written(case):
    given = tensors()
    written, call = case(given)
    for _ in range(3):  # the way of a call that repeats another, too
        before = [x._version for x in written]
        call()
        assert all(x._version > n for x, n in zip(written, before, strict=True))
    assert given["q"]._version == 0


def test_a_cache_that_a_gradient_needs_is_not_written_unnoticed():
    given = tensors()
    weight = torch.randn(32, requires_grad=True)
    loss = (given["k_cache"] * weight).sum()  # needs the cache as it is now
    cached(**given)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- a prefix that the batch shares


def prefixed(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    given = tensors(dtype)
    for name, dim in (("k", 32), ("v", 16)):
        given[f"prefix_{name}"] = torch.randn((4, 21, dim), generator=generator).to(dtype)
    return given


def repeated(prefix, own):
    """The prefix before the keys of each sequence."""
    return torch.cat([prefix.expand(own.shape[0], *prefix.shape[-3:]), own], dim=2)


def test_a_shared_prefix_in_plain_and_compiled_programs():
    given = prefixed()
    whole = {name: x.clone() for name, x in given.items() if not name.startswith("prefix_")}
    for name in "kv":
        whole[f"{name}_cache"] = repeated(given[f"prefix_{name}"], whole[f"{name}_cache"])
    whole["cache_seqlens"] = given["cache_seqlens"] + 21
    wanted = cached(**whole, causal=True, return_lse=True)
    step = torch.compile(cf.attention_with_kv_cache, backend="aot_eager", fullgraph=True)
    for call in (cupy_flash.attention_with_kv_cache, cf.attention_with_kv_cache, step):
        for found, x in zip(call(**over_cache(**given), causal=True, return_lse=True), wanted, strict=True):
            torch.testing.assert_close(found, x, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_of_queries_inside_a_shared_prefix(interleaved):
    """Queries that stand before their own keys, and see them, in plain and compiled programs."""
    generator = torch.Generator().manual_seed(3)
    given = prefixed() | {"q": torch.randn((3, 8, 9, 32), generator=generator, dtype=torch.float64)}
    angles = torch.rand((21 + 64, 8), generator=generator, dtype=torch.float64)
    given |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": interleaved}
    whole = {name: x for name, x in given.items() if not name.startswith("prefix_")}
    for name in "kv":
        whole[f"{name}_cache"] = repeated(given[f"prefix_{name}"], given[f"{name}_cache"])
    whole["cache_seqlens"] = given["cache_seqlens"] + 21
    wanted = cached(**whole, return_lse=True)
    step = torch.compile(cf.attention_with_kv_cache, backend="aot_eager", fullgraph=True)
    for call in (cupy_flash.attention_with_kv_cache, cf.attention_with_kv_cache, step):
        for found, x in zip(call(**over_cache(**given), return_lse=True), wanted, strict=True):
            torch.testing.assert_close(found, x, atol=1e-12, rtol=1e-12)
        for name in "kv":
            torch.testing.assert_close(
                given[f"{name}_cache"], whole[f"{name}_cache"][:, :, 21:], atol=1e-12, rtol=1e-12
            )


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_through_a_shared_prefix(causal, layout):
    """Of all inputs, through o and lse: as those of attention over the prefix repeated."""
    generator = torch.Generator().manual_seed(2)
    shapes = [(3, 4, 7, 16), (3, 2, 7, 16), (3, 2, 7, 8), (2, 5, 16), (2, 5, 8)]
    rows = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    ours = [(x.transpose(-2, -3) if layout == "bshd" else x).clone().requires_grad_() for x in rows]
    theirs = [x.clone().requires_grad_() for x in rows]
    of_heads = [torch.linspace(-0.5, 1, 12).double().reshape(3, 4).requires_grad_() for _ in range(2)]
    o, lse = cf.attention_with_shared_prefix(
        *ours, causal=causal, layout=layout, return_lse=True, softcap=4.0, scale=of_heads[0]
    )
    q, k, v, *prefix = theirs
    keys, values = (repeated(x, own) for x, own in zip(prefix, (k, v), strict=True))
    align = 5 if causal else None
    wanted, wanted_lse = cf.attention(
        q, keys, values, causal=causal, align=align, return_lse=True, softcap=4.0, scale=of_heads[1]
    )
    o = o.transpose(1, 2) if layout == "bshd" else o
    torch.testing.assert_close(o, wanted, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(lse, wanted_lse, atol=1e-12, rtol=1e-12)
    for a, b in ((o, lse), (wanted, wanted_lse)):
        (a.square().sum() + b.sin().sum()).backward()
    for x, y in zip(ours, theirs, strict=True):
        grad = x.grad.transpose(-2, -3) if layout == "bshd" else x.grad
        torch.testing.assert_close(grad, y.grad, atol=1e-11, rtol=1e-11)
    torch.testing.assert_close(of_heads[0].grad, of_heads[1].grad, atol=1e-11, rtol=1e-11)


def test_a_shared_prefix_of_other_kinds_is_refused():
    q = torch.ones(2, 2, 3, 8)
    with pytest.raises(InvalidArgumentsError, match="prefix_k has shape"):
        cf.attention_with_shared_prefix(q, q, q, torch.ones(2, 2, 3, 8), torch.ones(2, 3, 8))
    with pytest.raises(InvalidArgumentsError, match="prefix_v is an ndarray, not a torch tensor"):
        cf.attention_with_shared_prefix(q, q, q, torch.ones(2, 3, 8), np.ones((2, 3, 8)))
    with pytest.raises(InvalidArgumentsError, match="no option 'window'"):
        cf.attention_with_shared_prefix(q, q, q, q[0], q[0], window=(1, 1))


@LOSES_ERRORS
def test_a_cache_of_nvfp4_in_plain_and_compiled_programs():
    given, wide = tensors(), {}
    for name in ("k", "v"):
        parts = nvfp4_parts(given[f"{name}_cache"])
        given[f"{name}_cache"], given[f"{name}_block_scale"] = parts
        wide[name] = dequantized(*parts)
    given["v_block_scale"] = given["v_block_scale"].view(torch.float8_e4m3fn)
    new = {name: given.pop(name) for name in ("k", "v")}
    wanted = cached(given["q"], wide["k"], wide["v"], cache_seqlens=given["cache_seqlens"])
    step = torch.compile(cf.attention_with_kv_cache, backend="aot_eager", fullgraph=True)
    for call in (cupy_flash.attention_with_kv_cache, cf.attention_with_kv_cache, step):
        torch.testing.assert_close(call(**over_cache(**given)), wanted, atol=1e-5, rtol=1e-5)
    with pytest.raises(UnsupportedError, match="does not declare that scales are written"):
        torch.compile(cf.attention_with_kv_cache, backend="eager")(**over_cache(**given, **new))
    cf.attention_with_kv_cache(**over_cache(**given, **new))
    row = [part[0, :, 0] for part in nvfp4_parts(new["k"])]
    for part, x in zip(("cache", "block_scale"), row, strict=True):
        assert torch.equal(given[f"k_{part}"][0, :, LENGTHS[0]], x)


@LOSES_ERRORS
def test_a_cache_of_4_bits_in_plain_and_compiled_programs():
    given = tensors()
    codes = dict.fromkeys(("k", "v"))
    for name, group in (("k", 32), ("v", 16)):
        x = given[f"{name}_cache"]
        x = x if group == 32 else torch.cat([x, x], -1)
        given[f"{name}_cache"], given[f"{name}_scale"], given[f"{name}_zero"] = int4_parts(x, group=32)
        codes[name] = dequantized(*(given[f"{name}_{part}"] for part in ("cache", "scale", "zero")))
    new = {"k": given.pop("k"), "v": given["q"][:, :4]}
    del given["v"]
    wanted = cached(given["q"], codes["k"], codes["v"], cache_seqlens=given["cache_seqlens"])
    step = torch.compile(cf.attention_with_kv_cache, backend="aot_eager", fullgraph=True)
    twice = torch.compile(lambda **x: cf.attention_with_kv_cache(**x).flip(-1), backend="aot_eager")
    for call in (cupy_flash.attention_with_kv_cache, cf.attention_with_kv_cache, step):
        torch.testing.assert_close(call(**over_cache(**given)), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(twice(**over_cache(**given)), wanted.flip(-1), atol=1e-5, rtol=1e-5)
    with pytest.raises(UnsupportedError, match="does not declare that scales are written"):
        torch.compile(cf.attention_with_kv_cache, backend="eager")(**over_cache(**given, **new))
    cf.attention_with_kv_cache(**over_cache(**given, **new))
    row = [part[0, :, 0] for part in int4_parts(new["k"], group=32)]
    for part, x in zip(("cache", "scale", "zero"), row, strict=True):
        assert torch.equal(given[f"k_{part}"][0, :, LENGTHS[0]], x)


def test_what_4_bits_cannot_hold_is_stored_as_from_numpy():
    """NaN, infinities and too large numbers among others."""
    x = np.linspace(3, -3, 64, dtype=np.float32)
    for wrong in ((np.nan, np.nan, 1.0), (np.inf, -np.inf, np.nan), (1e30, -1e30, 7e4)):
        x[[0, 9, 40]] = wrong
        of_torch = (*nvfp4_parts(torch.from_numpy(x)), *int4_parts(torch.from_numpy(x), group=32))
        for made, wanted in zip(of_torch, (*nvfp4_parts(x), *int4_parts(x, group=32)), strict=True):
            np.testing.assert_array_equal(made.numpy(), wanted)


@pytest.mark.parametrize("turns", [False, True])
def test_latents_in_plain_and_compiled_programs(turns):
    """A new latent is stored where it belongs, and values are seen in it; the rest may be rotated."""
    torch.manual_seed(0)
    q, kv, new = torch.randn(2, 4, 1, 20), torch.randn(2, 1, 16, 20), torch.randn(2, 1, 1, 20)
    quarters = torch.zeros(16, 4), torch.ones(16, 4)  # rotated numbers are exact
    rotary = Rotary(*quarters, last=True) if turns else None

    def step(cache):
        return cf.attention_with_kv_cache(q, LatentCache(cache, 12), cache_seqlens=7, k=new, rotary=rotary)

    def turned(x):
        return torch.cat((x[..., :12], -x[..., 16:], x[..., 12:16]), -1) if turns else x

    wanted = kv.clone()
    wanted[:, :, 7] = turned(new)[:, :, 0]
    expected = torch_sdpa(
        turned(q), wanted[:, :, :8].expand(2, 4, 8, 20), wanted[:, :, :8, :12].expand(2, 4, 8, 12)
    )
    for run in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        cache = kv.clone()
        torch.testing.assert_close(run(cache), expected)
        assert torch.equal(cache, wanted)


def test_latents_of_8_bits_in_plain_and_compiled_programs():
    """Their one scale is that of keys and of values."""
    torch.manual_seed(0)
    q, new, scale = torch.randn(2, 4, 1, 20), torch.randn(2, 1, 1, 20), torch.tensor([1 / 32])
    codes = torch.randint(-100, 100, (2, 1, 16, 20), dtype=torch.int8)

    def step(codes, scale):
        cache = LatentCache(QuantizedCache(codes, scale), 12)
        return cf.attention_with_kv_cache(q, cache, cache_seqlens=7, k=new)

    wanted = codes.clone()
    wanted[:, :, 7] = (new[:, :, 0] / scale).round().clamp(-127, 127).to(torch.int8)
    kv = wanted[:, :, :8] * scale
    expected = torch_sdpa(q, kv.expand(2, 4, 8, 20), kv[..., :12].expand(2, 4, 8, 12))
    for run in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        cache = codes.clone()
        torch.testing.assert_close(run(cache, scale), expected)
        assert torch.equal(cache, wanted)


def test_selected_keys_in_plain_and_compiled_programs():
    """As torch.topk gives them, int64; what is hidden by the position of a query, and none."""
    torch.manual_seed(0)
    q, kv = torch.randn(2, 4, 3, 20), torch.randn(2, 1, 16, 20)
    lengths = torch.tensor([16, 9], dtype=torch.int32)
    scores = torch.randn(2, 3, 16).masked_fill(torch.arange(16) >= lengths[:, None, None], -torch.inf)
    indices = scores.topk(6).indices
    indices[0, 1, 4] = -1
    seen = torch.zeros(2, 3, 17, dtype=torch.bool).scatter(-1, indices % 17, True)[..., :16]
    seen &= torch.arange(16) <= (lengths[:, None] - 3 + torch.arange(3))[..., None]
    keys = kv.expand(2, 4, 16, 20)
    expected = torch_sdpa(q, keys, keys[..., :12], seen[:, None])

    def step(indices):
        return cf.attention_with_kv_cache(
            q, LatentCache(kv, 12), cache_seqlens=lengths, indices=indices, causal=True
        )

    for run in (step, step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        for given in (indices, indices.int()):
            torch.testing.assert_close(run(given), expected)
            assert run(given).is_contiguous()
    q.requires_grad_()
    with pytest.raises(InvalidArgumentsError, match=r"q .*requires grad"):
        step(indices)

"""Wrong dtypes and shapes are refused where torch computes only shapes, with the error of the call itself."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

import cupy_flash
import cupy_flash.torch as cf
from cupy_flash import InvalidArgumentsError

pytestmark = pytest.mark.torch

Q, K = torch.ones(2, 4, 8, 16), torch.ones(2, 4, 12, 16)
CUTS = torch.tensor([0, 3, 8], dtype=torch.int32)
DENSE = {"q": Q, "k": K, "v": K}
PACKED = {**dict.fromkeys("qkv", torch.ones(8, 4, 16)), "cu_seqlens_q": CUTS, "cu_seqlens_k": CUTS}
LONGEST = {"max_seqlen_q": 5, "max_seqlen_k": 5}
CACHED = {"q": Q, "k_cache": K, "v_cache": K, "cache_seqlens": torch.tensor([3, 4], dtype=torch.int32)}

WRONG = {
    "head dim": (cf.attention, {**DENSE, "k": torch.ones(2, 4, 12, 17)}, {}),
    "heads": (cf.attention, {**DENSE, **dict.fromkeys("kv", torch.ones(2, 3, 12, 16))}, {}),
    "dtype": (cf.attention, {**DENSE, "v": K.half()}, {}),
    "rank": (cf.attention, {**DENSE, "v": K[0]}, {}),
    "mask": (cf.attention, {**DENSE, "mask": torch.ones(8, 13, dtype=torch.bool)}, {}),
    "mask of integers": (cf.attention, {**DENSE, "mask": torch.ones(8, 12, dtype=torch.int32)}, {}),
    "bias": (cf.attention, {**DENSE, "bias": torch.ones(3, 1, 8, 12)}, {}),
    "sinks": (cf.attention, {**DENSE, "sinks": torch.ones(5)}, {}),
    "packed head dim": (cf.attention_varlen, {**PACKED, "k": torch.ones(8, 4, 17)}, {}),
    "packed mask": (
        cf.attention_varlen,
        {**PACKED, "mask": torch.ones(3, 1, 5, 5, dtype=torch.bool)},
        LONGEST,
    ),
    "packed bias": (cf.attention_varlen, {**PACKED, "bias": torch.ones(2, 1, 5, 4)}, LONGEST),
    "cache head dim": (cf.attention_with_kv_cache, {**CACHED, "k_cache": torch.ones(2, 4, 12, 17)}, {}),
    "cache lengths": (cf.attention_with_kv_cache, {**CACHED, "cache_seqlens": CUTS}, {}),
    "cache mask": (cf.attention_with_kv_cache, {**CACHED, "mask": torch.ones(8, 8, dtype=torch.bool)}, {}),
    "new keys": (cf.attention_with_kv_cache, {**CACHED, "k": Q, "v": Q[:, :, 1:]}, {}),
    "cache window": (cf.attention_with_kv_cache, CACHED, {"window": (-1, 0)}),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_the_error_is_that_of_the_call(name):
    function, tensors, options = WRONG[name]
    with pytest.raises(InvalidArgumentsError) as by_numbers:
        function(**tensors, **options)
    with pytest.raises(InvalidArgumentsError) as by_shapes:
        function(**{name: x.to("meta") for name, x in tensors.items()}, **options)
    assert str(by_shapes.value) == str(by_numbers.value)


def test_a_cache_that_is_right_passes():
    on_meta = {name: x.to("meta") for name, x in CACHED.items()}
    new = {"k": Q[:, :, :3].to("meta"), "v": Q[:, :, :3].to("meta")}
    rotary = cupy_flash.Rotary(torch.ones(12, 8, device="meta"), torch.ones(12, 8, device="meta"))
    options = {"causal": True, "window": (3, None), "rotary": rotary, "scale": 0.5}
    assert cf.attention_with_kv_cache(**on_meta, **new, **options).shape == Q.shape
    latents = cupy_flash.LatentCache(torch.ones(2, 1, 12, 16, device="meta"), 8)
    given = {"q": on_meta["q"], "k": new["k"][:, :1], "cache_seqlens": 3}
    assert cf.attention_with_kv_cache(k_cache=latents, **given).shape == (2, 4, 8, 8)


def test_programs_of_symbolic_sizes():
    """Sizes that must be equal become conditions of a program; others stay open, 0 and 1 included."""

    def attend(q, k, mask):
        return cf.attention(q, k, k, mask=mask, causal=True, align="bottom_right")

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    for queries, keys, of_mask in ((8, 8, 8), (9, 12, 12), (12, 9, 1), (1, 30, 30), (2, 0, 0)):
        mask = torch.arange(queries * of_mask).reshape(queries, of_mask) % 3 > 0
        given = torch.randn(2, 4, queries, 16), torch.randn(2, 4, keys, 16), mask
        torch.testing.assert_close(compiled(*given), attend(*given))
    with pytest.raises(Exception, match=r"mask of shape .* does not broadcast"):
        compiled(Q, K, torch.ones(8, 13, dtype=torch.bool))


def test_an_exported_program_keeps_its_sizes_open():
    class Attend(torch.nn.Module):
        def forward(self, q, k, mask):
            return cf.attention(q, k, k, mask=mask)

    queries, keys = map(torch.export.Dim, ("queries", "keys"))
    dynamic = {"q": {2: queries}, "k": {2: keys}, "mask": {0: queries, 1: keys}}
    mask = torch.ones(8, 12, dtype=torch.bool)
    program = torch.export.export(Attend(), (Q, K, mask), dynamic_shapes=dynamic)
    assert all(found.lower == 0 for found in program.range_constraints.values())
    given = torch.randn(2, 4, 30, 16), torch.randn(2, 4, 7, 16), torch.rand(30, 7) > 0.3
    torch.testing.assert_close(program.module()(*given), Attend()(*given))


def test_sizes_that_a_program_computes_pass():
    def attend(q, count):
        keys = count.item()
        torch._check(keys >= 2)
        k = torch.ones(2, 4, keys, 16)
        return cf.attention(q, k, k, mask=torch.ones(1, keys, dtype=torch.bool))

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(Q, torch.tensor(5)), torch.ones_like(Q))

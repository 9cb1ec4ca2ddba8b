"""What is given to cupy_flash.torch and cupy_flash.flash_attn instead of tensors."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

from torch.nn.attention.flex_attention import create_block_mask

import cupy_flash
import cupy_flash.torch as cf
from cupy_flash import InvalidArgumentsError, UnsupportedError, flash_attn, flash_attn_3

pytestmark = pytest.mark.torch


class _Mask:
    """Something of another library."""


# How to make them, and a word of what is said.
SHAPE = (2, 4, 9, 8)
NO_TENSORS = {
    "array": (lambda: np.ones(SHAPE), "an ndarray"),
    "list": (lambda: [1.0], "a list"),
    "none": (lambda: None, "None"),
    "string": (lambda: "q", "a str"),
    "object": (_Mask, "a _Mask"),
    "sparse": (lambda: torch.ones(SHAPE).to_sparse(), "to_dense"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(4, 9, 8)]), "attention_varlen"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(4, 9, 8)], layout=torch.jagged),
        "NestedTensor",
    ),
}


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("what", NO_TENSORS)
def test_what_is_no_tensor_is_refused_by_name(what):
    """By every function, with something to try, and before anything of the object is used."""
    make, said = NO_TENSORS[what]
    wrong, (q, k, v) = make(), torch.randn(3, *SHAPE)
    cuts = torch.tensor([0, 2], dtype=torch.int32)
    calls = {
        "q": lambda: cf.attention(wrong, k, v),
        "v": lambda: cf.attention(q, k, wrong),
        "query": lambda: cf.scaled_dot_product_attention(wrong, k, v),
        "value": lambda: cf.scaled_dot_product_attention(q, k, wrong),
        "qkv": lambda: flash_attn.flash_attn_qkvpacked_func(wrong),
        "kv": lambda: flash_attn.flash_attn_kvpacked_func(q, wrong),
        "key": lambda: cf.varlen_attn(q[0], wrong, v[0], cuts, cuts, 2, 2),
        "k": lambda: flash_attn.flash_attn_func(q, wrong, v),
        "k_cache": lambda: flash_attn.flash_attn_with_kvcache(q, wrong, v),
        "q ": lambda: cf.FlashAttention(cupy_flash.default_config(8))(wrong, k, v),
    }
    if wrong is not None:
        calls |= {
            "mask": lambda: cf.attention(q, k, v, mask=wrong),
            "attn_mask": lambda: cf.scaled_dot_product_attention(q, k, v, wrong),
            "cu_seqlens_q": lambda: cf.attention_varlen(q[0], k[0], v[0], wrong, cuts),
        }
    for name, call in calls.items():
        with pytest.raises(InvalidArgumentsError, match=rf"^{name.strip()} (is|has)(.|\n)*Try: ") as caught:
            call()
        assert said in str(caught.value)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("wrong", [1, None, "no"])
def test_a_flag_is_a_bool(wrong):
    """On every path, as torch's own functions refuse other types."""
    q = torch.randn(SHAPE)
    learned, meta, rows = q.clone().requires_grad_(), q.to("meta"), q[0].transpose(0, 1).contiguous()
    cuts = torch.tensor([0, 2, 9], dtype=torch.int32)
    jagged = torch.nested.nested_tensor([rows, rows[:2]], layout=torch.jagged).transpose(1, 2)
    doubled = cupy_flash.score(lambda s, b, h, i, j: 2 * s)
    calls = [
        ("return_lse", lambda **flag: cf.attention(q, q, q, **flag)),
        ("return_lse", lambda **flag: cf.attention(learned, q, q, **flag)),
        ("return_lse", lambda **flag: cf.attention(meta, meta, meta, **flag)),
        ("return_lse", lambda **flag: cf.attention(q, q, q, score=doubled, **flag)),
        ("return_lse", lambda **flag: cf.attention(jagged, jagged, jagged, **flag)),
        ("return_lse", lambda **flag: cf.attention_varlen(rows, rows, rows, cuts, cuts, **flag)),
        ("return_lse", lambda **flag: cf.attention_with_shared_prefix(q, q, q, q[0], q[0], **flag)),
        ("return_lse", lambda **flag: cf.attention_with_kv_cache(q, q, q, cache_seqlens=9, **flag)),
        ("return_lse", lambda **flag: cf.attention_with_kv_cache(meta, meta, meta, cache_seqlens=9, **flag)),
        ("enable_gqa", lambda **flag: cf.scaled_dot_product_attention(q, q, q, **flag)),
        ("enable_gqa", lambda **flag: cf.scaled_dot_product_attention(jagged, jagged, jagged, **flag)),
        ("enable_gqa", lambda **flag: cf.varlen_attn(rows, rows, rows, cuts, cuts, 7, 7, **flag)),
        ("deterministic", lambda **flag: flash_attn.flash_attn_func(q, q, q, **flag)),
        ("return_attn_probs", lambda **flag: flash_attn.flash_attn_func(q, learned, q, **flag)),
        ("deterministic", lambda **flag: flash_attn_3.flash_attn_func(q, q, q, **flag)),
        ("return_softmax_lse", lambda **flag: flash_attn_3.flash_attn_with_kvcache(q, q, q, **flag)),
    ]
    for name, call in calls:
        call(**{name: True})
        with pytest.raises(InvalidArgumentsError, match=rf"^{name} is {wrong!r}(.|\n)*Try: {name}=True"):
            call(**{name: wrong})


def test_hints_are_in_the_words_of_torch():
    q, k, v = torch.randn(3, *SHAPE)
    cuts = torch.tensor([0, 2])
    calls = {
        r"Try: q\.to\(torch\.float32\)$": lambda: cf.attention(q.int(), k.int(), v.int()),
        r"Try: k\.to\(q\.dtype\)$": lambda: cf.attention(q, k.double(), v),
        r"Try: sinks\.to\(torch\.float32\)$": lambda: cf.attention(q, k, v, sinks=torch.ones(4).double()),
        r"Try: cu_seqlens_q\.to\(torch\.int32\)$": lambda: cf.attention_varlen(q[0], k[0], v[0], cuts, cuts),
        r"Try: cache_seqlens\.to\(torch\.int32\)$": lambda: cf.attention_with_kv_cache(
            q, k, v, cache_seqlens=cuts
        ),
    }
    for hint, call in calls.items():
        with pytest.raises(InvalidArgumentsError, match=hint):
            call()
    with pytest.raises(InvalidArgumentsError, match=r"k\.astype\(q\.dtype\)$"):
        cupy_flash.attention(*(x.numpy() for x in (q, k.double(), v)))


def test_an_option_that_only_plain_calls_have_is_no_misspelt_one():
    q, k, v = torch.randn(3, *SHAPE)
    with pytest.raises(
        InvalidArgumentsError,
        match=r"no option 'out'(.|\n)*Try: cupy_flash.attention\(..., out=...\), which records",
    ):
        cf.attention(q, k, v, out=q)


def test_a_block_mask_is_told_of_options():
    q, k, v = torch.randn(3, *SHAPE)
    blocks = create_block_mask(lambda _b, _h, i, j: i >= j, None, None, 128, 128, device="cpu")
    with pytest.raises(
        InvalidArgumentsError, match=r"attn_mask is a BlockMask(.|\n)*Try: cupy_flash.torch.attention"
    ):
        cf.scaled_dot_product_attention(q, k, v, blocks)
    with pytest.raises(InvalidArgumentsError, match=r"bias is a BlockMask(.|\n)*Try: .*mask=bias"):
        cf.attention(q, k, v, bias=blocks)


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_where_a_number_has_no_gradient_none_is_lost(name):
    """Over a cache nothing is recorded, and a ring records numbers for none of its processes."""
    x = torch.randn(SHAPE)
    learned = {name: torch.tensor(0.5, requires_grad=True)}
    for call in (
        lambda: cf.attention_with_kv_cache(x, x, x, cache_seqlens=1, **learned),
        lambda: cf.ring_attention(x, x, x, **learned),
    ):
        with pytest.raises(UnsupportedError, match=rf"{name} has no gradient\.\nTry: {name}\.detach\(\)"):
            call()

"""What people import from flash-attn 2 besides its functions."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

from cupy_flash.flash_attn import bert_padding, flash_attn_func, flash_attn_interface
from cupy_flash.flash_attn.modules.mha import FlashCrossAttention, FlashSelfAttention, get_alibi_slopes
from tests.torch.test_flash_attn import expected, rows

pytestmark = pytest.mark.torch


def test_the_interface_is_the_package():
    assert flash_attn_interface.flash_attn_func is flash_attn_func


def test_padding_goes_and_comes_back():
    x, w = rows((3, 5, 2, 4), (9, 2, 4))
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1], [1, 0, 0, 0, 1]])
    packed, indices, cuts, longest, used = bert_padding.unpad_input(x, mask)
    assert cuts.dtype == torch.int32
    assert (cuts.tolist(), longest, used.tolist()) == ([0, 3, 7, 9], 4, [3, 4, 2])
    torch.testing.assert_close(packed, x[mask.bool()])
    padded = bert_padding.pad_input(packed * w, indices, 3, 5)
    assert padded.shape == x.shape
    torch.testing.assert_close(padded[mask.bool()], packed * w)
    assert not padded[~mask.bool()].any()
    grad_x, grad_w = torch.autograd.grad(padded.sum(), (x, w))
    torch.testing.assert_close(grad_x[mask.bool()], w)
    assert not grad_x[~mask.bool()].any()
    torch.testing.assert_close(grad_w, packed)


def test_places_that_are_kept_but_not_used():
    (x,) = rows((2, 3, 1))
    mask = torch.tensor([[1, 0, 0], [1, 1, 0]])
    unused = torch.tensor([[0, 1, 0], [0, 0, 0]])
    packed, indices, cuts, longest, used = bert_padding.unpad_input(x, mask, unused)
    assert indices.tolist() == [0, 1, 3, 4]
    assert (cuts.tolist(), longest, used.tolist()) == ([0, 2, 4], 2, [1, 2])
    assert packed.shape == (4, 1)


def test_several_sequences_in_a_row():
    """The example of flash-attn's docstring."""
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    x = torch.arange(18.0).reshape(3, 6, 1)
    packed, indices, cuts, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert indices.tolist() == [*range(5), *range(6, 11), *range(12, 18)]
    assert packed.flatten().tolist() == [float(i) for i in indices]
    assert (cuts.tolist(), longest) == ([0, 2, 5, 8, 10, 16], 6)


@pytest.mark.parametrize("heads", [1, 8, 12])
def test_slopes_are_those_of_the_paper(heads):
    slopes = get_alibi_slopes(heads)
    assert len(slopes) == heads
    if heads == 12:
        assert slopes == pytest.approx(
            [2 ** -(i + 1) for i in range(8)] + [2 ** -(i + 0.5) for i in range(4)]
        )
    else:
        assert slopes == pytest.approx([2 ** (-8 * (i + 1) / heads) for i in range(heads)])


def test_modules_attend():
    qkv, kv = rows((2, 6, 3, 4, 8), (2, 9, 2, 2, 8))
    slopes = torch.tensor(get_alibi_slopes(4))
    attend = FlashSelfAttention(causal=True, softmax_scale=0.3, alibi_slopes=slopes).half()
    assert not attend.state_dict()
    want, _ = expected(*qkv.unbind(2), scale=0.3, causal=True, slopes=slopes.half().double())
    torch.testing.assert_close(attend(qkv.float()).double(), want, rtol=1e-4, atol=1e-5)
    cross = FlashCrossAttention(window_size=(3, 0))
    q = qkv[:, :, 0]
    torch.testing.assert_close(cross(q, kv), expected(q, *kv.unbind(2), window=(3, 0))[0])
    torch.testing.assert_close(cross(q, kv, causal=True), cross(q, kv))
    cuts, cuts_k = (torch.arange(3, dtype=torch.int32) * n for n in (6, 9))
    packed = cross(q.flatten(0, 1), kv.flatten(0, 1), False, cuts, 6, cuts_k, 9)
    torch.testing.assert_close(packed, cross(q, kv).flatten(0, 1))
    plain = FlashSelfAttention()
    torch.testing.assert_close(plain(qkv.flatten(0, 1), None, cuts, 6), plain(qkv).flatten(0, 1))


def test_dropout_is_for_training():
    (qkv,) = rows((1, 40, 3, 2, 8))
    attend = FlashSelfAttention(attention_dropout=0.5)
    torch.testing.assert_close(attend.eval()(qkv), FlashSelfAttention()(qkv))
    assert not torch.equal(attend.train()(qkv), attend.eval()(qkv))

"""attention_statistics on torch tensors: views, gradients that are not recorded, programs, nested options."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

import numpy as np
from torch._subclasses import FakeTensorMode

import cupy_flash
import cupy_flash.torch as cf
from cupy_flash import InvalidArgumentsError, testing

pytestmark = pytest.mark.torch


def tensors(dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(2, n, 40, 32, generator=draw, dtype=dtype) for n in (4, 2)]


def assert_equal(made, wanted):
    for name, x, y in zip(made._fields, made, wanted, strict=True):
        assert isinstance(x, torch.Tensor)
        assert not x.requires_grad
        np.testing.assert_array_equal(x.numpy(), np.asarray(y), err_msg=name)


@pytest.mark.parametrize("way", ["views", "strides", "cast", "needs grad", "compiled"])
def test_as_numpy(way):
    q, k = tensors()
    wanted = cupy_flash.attention_statistics(q.numpy(), k.numpy(), causal=True)
    call = cf.attention_statistics
    if way == "views":
        q, k = (torch.cat([x, x], dim=2)[:, :, 40:] for x in (q, k))
    if way == "strides":
        q, k = (x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for x in (q, k))
    if way == "cast":
        q, k = (x.to(torch.bfloat16) for x in (q, k))
        wanted = cupy_flash.attention_statistics(*(x.float().numpy() for x in (q, k)), causal=True)
    if way == "needs grad":
        q.requires_grad_()
        k.requires_grad_()
    if way == "compiled":
        call = torch.compile(call, backend="eager")
    assert_equal(call(q, k, causal=True), wanted)


def test_of_a_recorded_call():
    """The lse of a call with gradients is taken as it is."""
    q, k = tensors()
    q.requires_grad_()
    o, lse = cf.attention(q, k, k, causal=True, return_lse=True)
    made = cf.attention_statistics(q, k, lse, causal=True)
    exact = testing.reference_statistics(q.detach().numpy(), k.numpy(), causal=True)
    np.testing.assert_allclose(made.key_sum, exact.key_sum, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(made.entropy, exact.entropy, rtol=1e-5, atol=1e-5)
    o.sum().backward()
    assert q.grad is not None


def test_arrays_among_the_options():
    q, k = tensors()
    scale, sinks = torch.linspace(0.1, 0.4, 4, requires_grad=True), torch.ones(4, dtype=torch.bfloat16)
    mask = torch.ones(40, 40, dtype=torch.bool).tril(3)
    made = cf.attention_statistics(q, k, scale=scale, sinks=sinks, mask=mask)
    wanted = cupy_flash.attention_statistics(
        q.numpy(), k.numpy(), scale=scale.detach().numpy(), sinks=np.ones(4, np.float32), mask=mask.numpy()
    )
    assert_equal(made, wanted)


def test_over_pages():
    q, _ = tensors()
    pages = torch.randn(6, 2, 16, 32, generator=torch.Generator().manual_seed(1))
    table, lengths = torch.tensor([[3, 1, 0], [5, 2, 4]]).int(), torch.tensor([33, 48]).int()
    made = cf.attention_statistics(q[:, :, :3], pages, cache_seqlens=lengths, block_table=table)
    wanted = cupy_flash.attention_statistics(
        q[:, :, :3].numpy(), pages.numpy(), cache_seqlens=lengths.numpy(), block_table=table.numpy()
    )
    assert_equal(made, wanted)
    table[1, 2] = 6
    with pytest.raises(InvalidArgumentsError, match=r"block_table\[1, 2\] is 6; the cache has 6 pages"):
        cf.attention_statistics(q[:, :, :3], pages, cache_seqlens=lengths, block_table=table)


def test_refusals():
    q, k = tensors()
    with pytest.raises(InvalidArgumentsError, match="lse is a list"):
        cf.attention_statistics(q, k, [1.0])
    with pytest.raises(InvalidArgumentsError, match="k is a numpy array"):
        cf.attention_statistics(q, k.numpy())
    with pytest.raises(InvalidArgumentsError, match="device meta"):
        cf.attention_statistics(q.to("meta"), k.to("meta"))


def test_a_program_that_is_traced_cannot_hold_them():
    with FakeTensorMode():
        q = torch.ones(1, 2, 5, 8)
        with pytest.raises(
            InvalidArgumentsError, match=r"Try: cupy_flash\.torch.*except attention_statistics"
        ):
            cf.attention_statistics(q, q)

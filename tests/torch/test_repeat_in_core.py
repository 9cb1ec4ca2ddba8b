"""Calls of torch that the core repeats by itself: which do, and that nothing else is taken for them."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

from torch.nn.attention.bias import causal_lower_right

import cupy_flash.torch as cf
from cupy_flash import InvalidArgumentsError, progress
from cupy_flash.dispatch import memo
from cupy_flash.torch import functional, repeat_in_core
from tests.conftest import skip_without_core

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not repeat_in_core._view_of(), reason="this torch has no table of DLPack's functions"),
]


@pytest.fixture(autouse=True)
def by_python(monkeypatch):
    """The calls that the core did not repeat."""
    skip_without_core()
    memo.forget()
    calls = []
    real = functional.repeated
    monkeypatch.setattr(functional, "repeated", lambda *given: (calls.append(len(given)), real(*given))[1])
    yield calls
    memo.forget()


def qkv(*, rows=9, dtype=torch.float32, seed=0, in_rows=False, **options):
    generator = torch.Generator().manual_seed(seed)
    shape = (2, rows, 4, 8) if in_rows else (2, 4, rows, 8)
    made = [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]
    return [x.transpose(1, 2) for x in made] if in_rows else made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("in_rows", [False, True])
def test_torchs_function_is_repeated_in_the_core(dtype, in_rows, by_python):
    cf.scaled_dot_product_attention(*qkv(dtype=dtype, in_rows=in_rows), is_causal=True, scale=0.3)
    by_python.clear()
    for seed in range(1, 3):
        given = qkv(dtype=dtype, in_rows=in_rows, seed=seed)
        o = cf.scaled_dot_product_attention(*given, is_causal=True, scale=float("0.3"))
        assert not by_python
        whole = functional._by_rules_of_torch(*given, None, 0.0, True, 0.3, False)
        assert torch.equal(o, whole)
        assert (o.stride(), o.dtype, o._version, o.is_leaf) == (whole.stride(), dtype, whole._version, True)
        assert o.untyped_storage().resizable()
        by_python.clear()


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True, "align": 1}, {"softcap": 5.0, "layout": "bshd"}, {"window": (3, None)}],
    ids=str,
)
def test_attention_is_repeated_in_the_core(options, by_python):
    cf.attention(*qkv(), **options)
    o = cf.attention(*qkv(seed=1), **options)
    assert len(by_python) == 1
    memo.forget()
    assert torch.equal(o, cf.attention(*qkv(seed=1), **options))


def test_a_call_that_many_others_followed_is_repeated_in_the_core_again(by_python):
    given = [qkv(rows=rows) for rows in range(1, 31)]
    for repetition in range(4):
        for n, one in enumerate(given):
            cf.attention(*one)
            if not repetition:
                continue
            by_python.clear()
            cf.attention(*one)
            assert not by_python, n


def test_the_names_of_options_count(by_python):
    cf.attention(*qkv(), scale=2.0)
    wanted = cf.attention(*qkv(), softcap=2.0)
    for _ in range(2):
        assert torch.equal(cf.attention(*qkv(), softcap=2.0), wanted)
        assert not torch.equal(cf.attention(*qkv(), scale=2.0), wanted)
    assert len(by_python) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "align": "bottom_right"}, {"causal": True, "align": 3}], ids=str
)
def test_a_cache_that_grows_is_repeated_in_the_core(options, dtype, by_python):
    q, *_ = qkv(rows=2, dtype=dtype)
    k, v = torch.randn(2, 2, 4, 700, 8, dtype=dtype).unbind()
    given = [(k[:, :, :n], v[:, :, :n].contiguous()) for n in (5, 1, 2, 6, 7, 143, 144, 145, 600, 700)]
    found = [cf.attention(q, *kv, **options) for kv in given]
    assert len(by_python) == 1
    for o, kv in zip(found, given, strict=True):
        memo.forget()
        assert torch.equal(o, cf.attention(q, *kv, **options))


def added(name, *shape, seed=0, dtype=torch.float32):
    """A mask or a bias."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x > -0.5 if name == "mask" else x.to(dtype)


MASKS = [("mask", torch.float32), ("bias", torch.float32), ("bias", torch.bfloat16)]
SHAPES_OF_MASKS = [(9,), (9, 9), (9, 1), (4, 1, 9), (2, 1, 9, 9), (1, 4, 9, 9), (2, 4, 9, 9), (2, 1, 1, 1)]


@pytest.mark.parametrize(("name", "dtype"), MASKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES_OF_MASKS, ids=str)
@pytest.mark.parametrize("in_rows", [False, True])
def test_torchs_function_with_a_mask_is_repeated_in_the_core(name, dtype, shape, in_rows, by_python):
    kinds = {"dtype": torch.bfloat16 if name == "bias" else dtype, "in_rows": in_rows}
    cf.scaled_dot_product_attention(*qkv(**kinds), added(name, *shape, dtype=dtype))
    by_python.clear()
    for seed in range(1, 3):
        given, mask = qkv(seed=seed, **kinds), added(name, *shape, seed=seed, dtype=dtype)
        o = cf.scaled_dot_product_attention(*given, attn_mask=mask)
        assert not by_python
        whole = functional._by_rules_of_torch(*given, mask, 0.0, False, None, False)
        assert torch.equal(o, whole)
        assert (o.stride(), o.dtype) == (whole.stride(), whole.dtype)


@pytest.mark.parametrize("name", ["mask", "bias"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"layout": "bshd", "scale": 0.3}], ids=str)
def test_attention_with_a_mask_is_repeated_in_the_core(name, options, by_python):
    shape = (2, 9, 4, 8) if "layout" in options else (2, 4, 9, 8)
    given = [x.reshape(shape) for x in qkv()]
    rows = shape[1] if "layout" in options else 9
    one, other = (added(name, 2, 1, rows, rows, seed=seed) for seed in range(2))
    cf.attention(*given, **{name: one}, **options)
    o = cf.attention(*given, **{name: other}, **options)
    assert len(by_python) == 1
    memo.forget()
    assert torch.equal(o, cf.attention(*given, **{name: other}, **options))


@pytest.mark.parametrize("name", ["mask", "bias"])
def test_a_cache_that_grows_with_its_mask_is_repeated_in_the_core(name, by_python):
    """As transformers calls it: a view of a larger mask, expanded over the heads."""
    q, *_ = qkv(rows=1)
    k, v = torch.randn(2, 2, 4, 300, 8).unbind()
    every = added(name, 2, 1, 1, 300).expand(2, 4, 1, 300)
    lengths = 5, 2, 6, 143, 144, 300
    found = [cf.scaled_dot_product_attention(q, k[:, :, :n], v[:, :, :n], every[..., :n]) for n in lengths]
    assert len(by_python) == 2, "of the first call: torch's function asks, and then calls attention"
    for o, n in zip(found, lengths, strict=True):
        memo.forget()
        assert torch.equal(
            o, cf.scaled_dot_product_attention(q, k[:, :, :n], v[:, :, :n], every[..., :n].clone())
        )


def freed_mask(x):
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


OTHER_MASKS = {
    "none": lambda _: None,
    "of other rows": lambda x: x[:, :, :8],
    "of other keys": lambda x: x[..., :8],
    "of one key": lambda x: x[..., :1],
    "of other heads": lambda x: x[:, :2],
    "of fewer axes": lambda x: x[0],
    "of more axes": lambda x: x[None],
    "of no axes": lambda x: x[0, 0, 0, 0],
    "of integers": lambda x: x.to(torch.int32),
    "of floats": lambda x: x.to(torch.float64),
    "between boundaries": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
    "without memory": freed_mask,
    "a parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "that requires grad": lambda x: x.clone().requires_grad_(),
    "sparse": lambda x: x.to_sparse(),
    "zero": lambda x: torch._efficientzerotensor(x.shape),
    "negated": lambda x: torch.complex(x, -x).conj().imag,
    "a NumPy array": lambda x: x.numpy(),
    "a list": lambda x: x.tolist(),
    "on meta": lambda x: x.to("meta"),
    "of torch": lambda _: causal_lower_right(9, 9),
}


@pytest.mark.parametrize("name", ["mask", "bias"])
@pytest.mark.parametrize("other", OTHER_MASKS)
@pytest.mark.parametrize("function", ["attention", "scaled_dot_product_attention"])
def test_other_masks_go_the_whole_way(function, name, other):
    def call(x):
        if function == "attention":
            return cf.attention(*qkv(), **{name: x})
        return cf.scaled_dot_product_attention(*qkv(), x)

    one = added(name, 2, 4, 9, 9)
    for _ in range(2):
        call(one)
    try:
        given = OTHER_MASKS[other](one)
    except (RuntimeError, NotImplementedError):
        pytest.skip("there is no such mask of this dtype")
    results = []
    for _ in range(2):
        try:
            o = call(given)
            results.append(f"{o.requires_grad} {o.detach().tolist()}")
        except Exception as error:
            results.append(f"{type(error)} {error}")
        memo.forget()
    after, alone = results
    assert after == alone


def test_calls_with_a_bias_that_autograd_records_are_not(by_python):
    bias = added("bias", 9, 9).requires_grad_()
    for _ in range(2):
        assert cf.attention(*qkv(), bias=bias).requires_grad
    assert len(by_python) == 2
    with torch.no_grad():
        for _ in range(2):
            assert not cf.attention(*qkv(), bias=bias).requires_grad
    assert len(by_python) == 3
    assert cf.attention(*qkv(), bias=bias).requires_grad


@pytest.mark.parametrize("name", ["mask", "bias"])
def test_calls_with_a_mask_and_dropout_are_not(name, by_python):
    one = {name: added(name, 9, 9)}
    for options in {"dropout": 0.5}, {"dropout": 0.5, "seed": 3}:
        torch.manual_seed(0)
        first, second = (cf.attention(*qkv(), **one, **options) for _ in range(2))
        assert torch.equal(first, second) is ("seed" in options)
    cf.scaled_dot_product_attention(*qkv(), one[name], dropout_p=0.5)
    by_python.clear()
    cf.scaled_dot_product_attention(*qkv(), one[name], dropout_p=0.5)
    assert by_python


@pytest.mark.parametrize("name", ["progress", "a mode", "forward mode", "autocast"])
def test_who_watches_a_call_with_a_mask_sees_it(name, by_python):
    mask = added("mask", 9, 9)
    with surroundings()[name]():
        cf.attention(*qkv(), mask=mask)
    for _ in range(2):
        cf.attention(*qkv(), mask=mask)
    with surroundings()[name]():
        cf.attention(*qkv(), mask=mask)
    assert len(by_python) == 3


def test_unequal_lengths_without_align_are_refused_after_equal_ones():
    q, k, v = qkv()
    for _ in range(2):
        cf.attention(q, k, v, causal=True)
    with pytest.raises(InvalidArgumentsError, match="is ambiguous"):
        cf.attention(q, k[:, :, :-1], v[:, :, :-1], causal=True)
    for _ in range(2):
        cf.attention(q, k, v, window=(2, 2))
    with pytest.raises(InvalidArgumentsError, match="is ambiguous"):
        cf.attention(q, k[:, :, :-1], v[:, :, :-1], window=(2, 2))
    with pytest.raises(InvalidArgumentsError):
        cf.attention(q, k[:, :, :-1], v)


@pytest.mark.parametrize("needing", range(3))
def test_calls_that_autograd_records_are_not(needing, by_python):
    given = qkv()
    given[needing].requires_grad_()
    with torch.no_grad():
        for _ in range(3):
            cf.attention(*given)
    assert len(by_python) == 1
    assert cf.attention(*given).requires_grad
    with torch.inference_mode():
        assert cf.attention(*given).is_inference()


def surroundings():
    from torch.utils.flop_counter import FlopCounterMode

    return {
        "progress": lambda: progress(lambda _: None),
        "a mode": lambda: FlopCounterMode(display=False),
        "forward mode": torch.autograd.forward_ad.dual_level,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    }


@pytest.mark.parametrize("name", ["progress", "a mode", "forward mode", "autocast"])
def test_who_watches_a_call_sees_it(name, by_python):
    for _ in range(2):
        cf.attention(*qkv())
    with surroundings()[name]():
        o = cf.attention(*qkv())
    assert len(by_python) == 2
    assert o.dtype == (torch.bfloat16 if name == "autocast" else torch.float32)


def test_transforms_see_it(by_python):
    given = qkv()
    for _ in range(2):
        cf.attention(*given)
    mapped = torch.func.vmap(lambda q: cf.attention(q, *given[1:]))(torch.stack([given[0]] * 3))
    assert mapped.shape == (3, *given[0].shape)
    assert len(by_python) == 2
    with torch.device("meta"):
        torch.testing.assert_close(cf.attention(*given), mapped[0])


def test_it_keeps_to_the_number_of_threads(by_python):
    before = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            by_python.clear()
            for _ in range(3):
                cf.attention(*qkv(rows=200))
            assert len(by_python) == 1, "the count is a part of the call"
    finally:
        torch.set_num_threads(before)


def test_it_keeps_to_the_environment(by_python, monkeypatch):
    for _ in range(2):
        cf.attention(*qkv())
    monkeypatch.setenv("CUPY_FLASH_CPU", "numpy")
    cf.attention(*qkv())
    assert len(by_python) == 2
    assert "NumPy" in memo.kernels()


def freed(x):
    """A tensor whose storage was freed, as FSDP does."""
    x.untyped_storage().resize_(0)
    return x


ODD = {
    "without memory": freed,
    "a part of freed memory": lambda q: freed(torch.stack([q] * 3)[1]),
    "negated": lambda q: torch.complex(q, -q).conj().imag,
    "zero": lambda q: torch._efficientzerotensor(q.shape),
    "a parameter": torch.nn.Parameter,
    "sparse": lambda q: q.to_sparse(),
    "a NumPy array": lambda q: q.numpy(),
    "none": lambda _: None,
    "on meta": lambda q: q.to("meta"),
}


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("name", ODD)
def test_odd_tensors_go_the_whole_way(name, at, by_python):
    for _ in range(2):
        cf.attention(*qkv())
    given = qkv()
    given[at] = ODD[name](given[at])
    results = []
    for _ in range(2):
        try:
            results.append(cf.attention(*given).detach())
        except Exception as error:
            results.append(str(error))
        memo.forget()
    after, alone = results
    assert str(after) == str(alone)
    assert len(by_python) == 3


def test_a_program_sees_the_operator():
    for _ in range(2):
        cf.attention(*qkv())
    compiled = torch.compile(cf.attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*qkv()), cf.attention(*qkv()))


def test_a_torch_without_the_table_has_the_short_way_of_python(monkeypatch, by_python):
    monkeypatch.setattr(repeat_in_core, "_empty", None)
    repeat_in_core._view_of.cache_clear()
    try:
        for _ in range(3):
            cf.attention(*qkv())
        assert len(by_python) == 3
    finally:
        repeat_in_core._view_of.cache_clear()

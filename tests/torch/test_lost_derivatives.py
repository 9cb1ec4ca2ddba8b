"""No call loses a derivative in silence: of every argument it has the right one, or is refused."""

from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

from torch.utils.flop_counter import FlopCounterMode

import cupy_flash
import cupy_flash.torch as cf
from cupy_flash import InvalidArgumentsError, UnsupportedError

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")]

SQUARED = cupy_flash.score(lambda s, b, h, i, j, t: s * s * t[h])
NEAR = cupy_flash.mask(lambda b, h, i, j: abs(i - j) < 3)
CUTS = torch.tensor([0, 2, 5], dtype=torch.int32)


def drawn(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


ARRAYS = {name: drawn(1, 2, 5, 4) + n for n, name in enumerate("qkv")}
NUMBERS = {name: torch.tensor(x, dtype=torch.float64) for name, x in (("scale", 0.6), ("softcap", 1.5))}
PER_HEAD = {"sinks": drawn(2), "alibi_slopes": drawn(2) ** 2}
EVERY = {**ARRAYS, **NUMBERS, **PER_HEAD}


def packed(q, k, v, **options):
    rows = (x[0].transpose(0, 1) for x in (q, k, v))
    return cf.attention_varlen(*rows, CUTS, CUTS, **options)


def over_cache(q, k, v, cos=None, sin=None, **options):
    rotary = None if cos is None else cupy_flash.Rotary(cos, sin)
    return cf.attention_with_kv_cache(q, k, v, cache_seqlens=5, rotary=rotary, **options)


def dropped(dropout, **given):
    return cf.attention(**given, dropout=dropout, seed=1)


CALLS = {
    "dense": (cf.attention, {**EVERY, "bias": drawn(5, 1)}),
    "a scale for each head": (cf.attention, {**ARRAYS, "scale": PER_HEAD["sinks"]}),
    "dropout": (dropped, {**ARRAYS, "dropout": torch.tensor(0.3)}),
    "mask function": (partial(cf.attention, mask=NEAR), EVERY),
    "mask function, a scale for each head": (partial(cf.attention, mask=NEAR), {**ARRAYS, "scale": drawn(2)}),
    "mask function, dropout": (partial(dropped, mask=NEAR), {**ARRAYS, "dropout": torch.tensor(0.3)}),
    "score function": (
        lambda t, **given: cf.attention(**given, score=SQUARED(t)),
        {**ARRAYS, **NUMBERS, "t": drawn(2)},
    ),
    "packed": (packed, EVERY),
    "packed, mask function": (partial(packed, mask=NEAR), {**ARRAYS, "scale": drawn(2)}),
    "shared prefix": (cf.attention_with_shared_prefix, {
        **ARRAYS, **NUMBERS, "prefix_k": drawn(2, 3, 4), "prefix_v": drawn(2, 3, 4)
    }),
    "cache": (over_cache, EVERY),
    "cache, rotated": (over_cache, {**ARRAYS, "cos": drawn(9, 2), "sin": drawn(9, 2)}),
    "not recorded": (cupy_flash.attention, EVERY),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_every_derivative_is_right_or_refused(name):
    """In reverse mode, with dual tensors, also under a dispatch mode, and under torch.func.jvp."""
    call, given = CALLS[name]
    for argument, x in given.items():
        along = torch.linspace(0.5, 1, x.numel(), dtype=x.dtype).reshape(x.shape)

        def at(y, argument=argument):
            return call(**{**given, argument: y}).sin().sum()

        def reverse(x=x, along=along, argument=argument):
            leaves = {n: y.clone().requires_grad_(n in ("q", argument)) for n, y in given.items()}
            call(**leaves).sin().sum().backward()
            grad = leaves[argument].grad
            return None if grad is None else (grad * along).sum()

        def dual(x=x, along=along, at=at):
            with torch.autograd.forward_ad.dual_level():
                return torch.autograd.forward_ad.unpack_dual(
                    at(torch.autograd.forward_ad.make_dual(x, along))
                ).tangent

        def pushed(x=x, along=along, at=at):
            return torch.func.jvp(at, (x,), (along,))[1]

        def observed(dual=dual):
            with FlopCounterMode(display=False):
                return dual()

        step = 1e-3 if x.dtype == torch.float32 else 1e-6
        wanted = (at(x + step * along) - at(x - step * along)) / (2 * step)
        for derivative in (reverse, dual, observed, pushed):
            try:
                result = derivative()
            except (InvalidArgumentsError, UnsupportedError):
                continue
            assert result is not None, (argument, derivative.__name__)
            torch.testing.assert_close(result.to(wanted.dtype), wanted, rtol=1e-5, atol=1e-6)

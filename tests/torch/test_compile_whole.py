"""torch.compile(fullgraph=True): every function of cupy_flash.torch, in any order, and what they refuse."""

import importlib.util
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask

import cupy_flash
import cupy_flash.torch as cf
from cupy_flash import BlockMask, InvalidArgumentsError, QuantizedCache, UnsupportedError, flash_attn
from tests.paths import ROOT
from tests.torch.versions import LOSES_ERRORS

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
]

Q, K, V = torch.randn(3, 2, 4, 20, 16, generator=torch.Generator().manual_seed(0))
ROWS = Q[0].transpose(0, 1).contiguous()
CUTS = torch.tensor([0, 7, 20], dtype=torch.int32)
LENGTHS = torch.tensor([5, 11], dtype=torch.int32)
OF_NUMPY = cupy_flash.block_mask(lambda b, h, i, j: j <= i, None, None, 20, 20, block=16)
BLOCKS = BlockMask(*map(torch.from_numpy, OF_NUMPY))
CODES, SCALES = torch.zeros(2, 4, 20, 16, dtype=torch.uint8), torch.ones(2, 4, 20, 1)
INT4 = QuantizedCache(CODES, SCALES, SCALES)
CAUSAL, OTHER = causal_lower_right(20, 20), causal_lower_right(3, 4)
LEARNED = torch.ones(4, requires_grad=True)
ONE = torch.ones((), requires_grad=True)
HALF = torch.tensor(0.5)
SLOPED = cupy_flash.score(lambda s, b, h, i, j, slopes: s - slopes[h] * (i - j))
UPPER = cupy_flash.mask(lambda b, h, i, j: j >= i)
WIDE = torch.randn(2, 4, 1, 32)

# Calls of each public function, by its name.
WHOLE = {
    "FlashAttention": [lambda q: cf.FlashAttention(cupy_flash.causal_config(16))(q, K, V)],
    "attention": [
        lambda q: cf.attention(q, K, V, causal=True),
        lambda q: cf.attention(q, K, V, mask=CAUSAL),
        lambda q: cf.attention(q, K, V, mask=BLOCKS, return_lse=True)[1],
        lambda q: cf.attention(q, K, V, scale=HALF, dropout=0.5, seed=1),
    ],
    "attention_varlen": [lambda q: cf.attention_varlen(q[0].transpose(0, 1), ROWS, ROWS, CUTS, CUTS)],
    "attention_with_kv_cache": [
        lambda q: cf.attention_with_kv_cache(q[:, :, :1], K, V, cache_seqlens=LENGTHS),
        lambda q: cf.attention_with_kv_cache(WIDE + q[0, 0, 0, 0], INT4, INT4, cache_seqlens=5),
    ],
    "attention_with_shared_prefix": [
        lambda q: cf.attention_with_shared_prefix(q, K, V, K[0], V[0], causal=True),
        lambda q: cf.attention_with_shared_prefix(
            q.transpose(1, 2), K.transpose(1, 2), V.transpose(1, 2), K[0].transpose(0, 1),
            V[0].transpose(0, 1), layout="bshd", return_lse=True,
        )[1],
    ],
    "scaled_dot_product_attention": [lambda q: cf.scaled_dot_product_attention(q, K[0], V, is_causal=True)],
    "sdpa_with_fallback": [lambda q: cf.sdpa_with_fallback(q, K[0], V, is_causal=True)],
    "varlen_attn": [lambda q: cf.varlen_attn(q[0].transpose(0, 1), ROWS, ROWS, CUTS, CUTS, 13, 13)],
}  # fmt: skip
# What they refuse of what has to be numbers.
OF_NUMBERS = r"window is \(1,\), not a pair", "seed is 'any'"
# What they refuse while a program is made, and the words for it.
REFUSED = [
    ("ring_attention", lambda q: cf.ring_attention(q, q, q), "torch.distributed is not initialised"),
    ("FlashAttention", lambda q: cf.FlashAttention(cupy_flash.default_config(8))(q, q, q), "head_dim 16"),
    ("attention", lambda q: cf.attention(q, q, q, causl=True), "has no option 'causl'"),
    ("attention", lambda q: cf.attention(q, q, q, out=q), "has no option 'out'"),
    ("attention", lambda q: cf.attention(q, q, None), "v is None, not a torch tensor"),
    ("attention", lambda q: cf.attention(q, q, q, blocks=BLOCKS), "has no option 'blocks'"),
    ("attention", lambda q: cf.attention(q, q, q, mask=OF_NUMPY), r"mask\.table is a"),
    ("attention", lambda q: cf.attention(q, q, q, mask=[True]), "mask is a list"),
    ("attention", lambda q: cf.attention(q, q, q, align="right"), "align is 'right'"),
    ("attention", lambda q: cf.attention(q, q, q, causal="no"), "causal is 'no'"),
    ("attention", lambda q: cf.attention(q, q, q, window=(1,)), r"window is \(1,\), not a pair"),
    ("attention", lambda q: cf.attention(q, q, q, scale="wide"), "scale is 'wide'"),
    ("attention", lambda q: cf.attention(q, q, q, dropout=0.5, seed="any"), "seed is 'any'"),
    ("attention", lambda q: cf.attention(q, q, q, dropout=0.5, seed=2**63), "seeds of torch have 63 bits"),
    ("attention", lambda q: cf.attention(q, q, q, scale=torch.ones(2)), r"scale has shape \(2,\)"),
    ("attention", lambda q: cf.attention(q, q, q, mask=OTHER), "CausalBias of 3 queries"),
    ("attention", lambda q: cf.attention(*[q.to(torch.float8_e4m3fn)] * 3), "float8_e4m3fn has no gradient"),
    ("attention", lambda q: cf.attention(q, q, q, alibi_slopes=LEARNED), "alibi_slopes has no gradient"),
    ("attention", lambda q: cf.attention(q, q, q, softcap=ONE), "softcap has no gradient"),
    ("attention_varlen",
     lambda q: cf.attention_varlen(q, q, q, None, CUTS, pages=1), "has no option 'pages'"),
    ("attention_with_kv_cache",
     lambda q: cf.attention_with_kv_cache(q, q, q, cache_seqlens=None), "cache_seqlens is None"),
    ("attention_with_kv_cache",
     lambda q: cf.attention_with_kv_cache(WIDE, INT4, INT4, cache_seqlens=3, k=WIDE, v=WIDE),
     "does not declare that scales are written"),
    ("attention_with_kv_cache",
     lambda q: cf.attention_with_kv_cache(LEARNED, q, q, cache_seqlens=3), "q requires grad"),
    ("attention_with_kv_cache",
     lambda q: cf.attention_with_kv_cache(q, q, q, cache_seqlens=3, window=4), "window is 4, not a pair"),
    ("attention_with_kv_cache",
     lambda q: cf.attention_with_kv_cache(q, q, q, cache_seqlens=3, tuning=cupy_flash.Tuning(check=0)),
     r"tuning\.check is 0"),
    ("attention_with_shared_prefix",
     lambda q: cf.attention_with_shared_prefix(q, K, V, K, V[0]), r"prefix_k has shape \(2, 4, 20, 16\)"),
    ("attention_with_shared_prefix",
     lambda q: cf.attention_with_shared_prefix(q, K, V, K[0], V[0, :, :9]), "prefix_v 9"),
    ("attention_with_shared_prefix",
     lambda q: cf.attention_with_shared_prefix(q, K, V, K[0].double(), V[0]), "prefix_k has dtype"),
    ("scaled_dot_product_attention",
     lambda q: cf.scaled_dot_product_attention(q, q, q, q[0, 0, 0, 0] > q, is_causal=True),
     "attn_mask and is_causal exclude each other"),
    ("scaled_dot_product_attention",
     lambda q: cf.scaled_dot_product_attention(q, q, q, q.double()), "attn_mask has dtype torch.float64"),
    ("scaled_dot_product_attention",
     lambda q: cf.scaled_dot_product_attention(q, q[:, :2], q[:, :2]), "4 heads of query, 2 of key, 2 of"),
    ("scaled_dot_product_attention",
     lambda q: cf.scaled_dot_product_attention(*[q[None]] * 3, HALF.expand(1, 3, 1, 20, 20)),
     r"attn_mask has leading axes \(1, 3\), query"),
    ("varlen_attn", lambda q: cf.varlen_attn(q, q, q, CUTS, CUTS, 9, 9, num_splits=2), "num_splits"),
    ("varlen_attn",
     lambda q: cf.varlen_attn(ROWS, ROWS, ROWS, CUTS, None, 9, 9, block_table=CUTS), "seqused_k"),
    ("flash_attn_func", lambda q: flash_attn.flash_attn_func(q, q, None), "v is None"),
]  # fmt: skip


def whole(function):
    torch._dynamo.reset()
    return torch.compile(function, backend="eager", fullgraph=True)


def check(name):
    for function in WHOLE[name]:
        torch.testing.assert_close(whole(function)(Q), function(Q))


@pytest.fixture(scope="module")
def _a_plain_function_was_compiled():
    """It breaks a program, and tells torch.compile what it is not to read."""
    torch._dynamo.reset()
    torch.compile(lambda q: cupy_flash.attention(q, K, V), backend="eager")(Q)
    assert "cupy_flash.call.untraced" in sys.modules


def test_every_public_function_is_here():
    refused = {name for name, *_ in REFUSED}
    switches = {"sdpa_calls", "use_in_sdpa", "context_parallel", "context_parallel_unshard"}
    others = switches | {"attention_statistics"}  # which breaks a program: NumPy computes it
    assert set(cf.__all__) - others == WHOLE.keys() | refused - {"flash_attn_func"} | {"block_mask"}


@pytest.mark.usefixtures("_a_plain_function_was_compiled")
@pytest.mark.parametrize("name", WHOLE)
def test_after_a_plain_function(name):
    check(name)


ALONE = f"""
from {__name__} import *
for name in WHOLE:
    check(name)
assert "cupy_flash.call.untraced" not in sys.modules
check_transforms()
"""


def check_transforms():
    """torch.compile has a break in its program there, and would read what the operators do behind it."""
    torch._dynamo.reset()
    qkv = [torch.randn(2, 1, 3, 4, dtype=torch.float64) for _ in "qkv"]
    function = torch.func.vmap(torch.func.grad(lambda q, k, v: cf.attention(q, k, v).sum()))
    torch.testing.assert_close(torch.compile(function, backend="aot_eager")(*qkv), function(*qkv))


@pytest.mark.slow
def test_before_a_plain_function():
    """In a process that has compiled none."""
    subprocess.run([sys.executable, "-c", ALONE], cwd=ROOT, check=True)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_vmap_breaks_no_program(backend):
    def function(x):
        return torch.func.vmap(torch.func.vmap(lambda a: cf.attention(a, a, a, causal=True)))(x)

    x = Q[:, None, None].clone().requires_grad_()
    o, expected = torch.compile(function, backend=backend, fullgraph=True)(x), function(x)
    torch.testing.assert_close(o, expected)
    (grad,), (of_x,) = (torch.autograd.grad(each.square().sum(), x) for each in (o, expected))
    torch.testing.assert_close(grad, of_x)


def test_what_is_not_to_be_read_is_there():
    from cupy_flash.call.untraced import UNREAD

    assert all(importlib.util.find_spec(f"cupy_flash.{name}") for name in UNREAD)


@pytest.mark.parametrize("strict", [False, True])
def test_a_shared_prefix_is_exported(strict):
    class Layer(torch.nn.Module):
        def forward(self, q):
            return WHOLE["attention_with_shared_prefix"][0](q)

    exported = torch.export.export(Layer(), (Q,), strict=strict)
    torch.testing.assert_close(exported.module()(Q), Layer()(Q))


@pytest.mark.usefixtures("_a_plain_function_was_compiled")
@pytest.mark.parametrize(
    ("function", "says"),
    [pytest.param(*x[1:], id=x[2], marks=[LOSES_ERRORS] * (x[2] in OF_NUMBERS)) for x in REFUSED],
)
def test_what_is_refused_says_why(function, says):
    words = says.replace("'", r"\\*'")
    # why behind __init__: the line that made the call stands in torch's text, and here the words stand in it.
    with pytest.raises(
        Exception, match=rf"__init__ .*(InvalidArgumentsError|UnsupportedError).*{words}.*\\nTry: "
    ):
        whole(function)(Q)


@LOSES_ERRORS
def test_a_refusal_changes_nothing_for_the_next_program():
    """The functions share a wrapper, whose code torch.compile must not give up."""
    torch._dynamo.reset()
    given = {"q": WIDE, "k_cache": INT4, "v_cache": INT4, "cache_seqlens": LENGTHS}
    with pytest.raises(UnsupportedError, match="does not declare that scales are written"):
        torch.compile(cf.attention_with_kv_cache, backend="eager")(**given, k=WIDE, v=WIDE)
    compiled = torch.compile(cf.attention_with_kv_cache, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(**given), cf.attention_with_kv_cache(**given))


@pytest.mark.usefixtures("_a_plain_function_was_compiled")
@pytest.mark.parametrize(
    ("function", "why"),
    [
        (
            lambda q: cf.attention(q, q, q, score=SLOPED(HALF.expand(4))),
            "a call with a score or mask function",
        ),
        (lambda q: cf.attention(q, q, q, mask=UPPER), "a call with a score or mask function"),
        (
            torch.func.grad(lambda q: cf.attention(q, q, q).sum()),
            "attention inside grad, vjp or jvp",
        ),
        (
            lambda q: cf.attention(q, q, q, mask=cupy_flash.mask(UPPER.function)),
            "a score or mask function is",
        ),
        (lambda q: cf.attention(q, q, q, score=cupy_flash.score(max)), "a score or mask function is made"),
    ],
)
def test_functions_say_why_they_break_a_program(function, why):
    # why a bracket: torch shows the line of the call, too, in which the words stand
    with pytest.raises(torch._dynamo.exc.Unsupported, match=rf"\(reason: {why}.* Try: "):
        whole(function)(Q)


def test_what_makes_blocks_breaks_a_program():
    blocks = create_block_mask(lambda b, h, i, j: j <= i, None, None, 20, 20, device="cpu", BLOCK_SIZE=16)
    with pytest.raises(Exception, match=r"Try: mask=cupy_flash\.torch\.block_mask\(mask\), made before"):
        whole(lambda q: cf.attention(q, q, q, mask=blocks))(Q)


def test_where_a_program_may_break_the_error_is_ours():
    torch._dynamo.reset()
    with pytest.raises(InvalidArgumentsError, match=r"(?s)has no option 'causl'.*Try: causal="):
        torch.compile(lambda q: cf.attention(q, q, q, causl=True), backend="eager")(Q)

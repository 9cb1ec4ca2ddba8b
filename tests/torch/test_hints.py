"""What errors of cupy_flash.torch tell to try, tried: hints that are code are run, others are followed."""

import ast
import contextlib
import functools
import re
import sys
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

import torch.distributed as dist
import torch.masked  # noqa: F811
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import _create_empty_block_mask, create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

import cupy_flash
import cupy_flash.torch as cf
from cupy_flash import errors, flash_attn_3
from cupy_flash.call.adopt.torch import _unsupported_device
from cupy_flash.quantized import int4
from cupy_flash.torch.flash_ops import FlashOperators
from cupy_flash.torch.ops import operator
from cupy_flash.torch.textbook import attention_by_textbook

pytestmark = [
    pytest.mark.torch,
    # torch compiles with, and warns of, its own torch.jit; and of what it calls prototypes.
    pytest.mark.filterwarnings(
        "ignore:.torch.jit:DeprecationWarning",
        "ignore:.*prototype:UserWarning",
        "ignore:.*LeafSpec:FutureWarning",
    ),
]

PACKAGE = Path(cupy_flash.__file__).parent
FILES = (*(PACKAGE / "torch").glob("*.py"), PACKAGE / "call" / "adopt" / "torch.py")
KINDS = {"InvalidArgumentsError", "UnsupportedError", "CubinNotFoundError"}


def made_at(tree):
    """The lines of the calls that make an error, and the hint if it is written there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS:
            yield node.lineno, node.end_lineno


SITES = {
    f"{path.relative_to(PACKAGE)}:{first}": (str(path), first, last)
    for path in FILES
    for first, last in made_at(ast.parse(path.read_text()))
}


@contextlib.contextmanager
def noted(where):
    """Add to a list the places at which errors are made meanwhile."""
    real = errors._Explained.__init__

    def init(self, *args, **kwargs):
        frame = sys._getframe(1)
        for site, (path, first, last) in SITES.items():
            if frame.f_code.co_filename == path and first <= frame.f_lineno <= last:
                where.append(site)
        real(self, *args, **kwargs)

    with mock.patch.object(errors._Explained, "__init__", init):
        yield


@contextlib.contextmanager
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


GENERATOR = torch.Generator().manual_seed(0)
Q, K, V = (torch.randn(2, 4, 9, 8, generator=GENERATOR) for _ in "qkv")
K2 = K[:, :2]
WHOLE = torch.ones(2)
with torch.inference_mode():
    INFERRED = torch.ones(2)
ROWS = tuple(x.transpose(1, 2).flatten(0, 1) for x in (Q, K, V))
CUTS = torch.tensor([0, 9, 18], dtype=torch.int32)
NESTED = tuple(
    torch.nested.nested_tensor_from_jagged(x, offsets=CUTS.long(), max_seqlen=9, min_seqlen=9) for x in ROWS
)
APART = tuple(
    torch.nested.as_nested_tensor([torch.randn(n, 4, 8) for n in (5, 3)], layout=torch.jagged) for _ in "qkv"
)
HOLES = torch.nested.narrow(torch.ones(2, 9, 4, 8), 1, *torch.tensor([[1, 2], [3, 4]]), layout=torch.jagged)
OTHERS = torch.nested.nested_tensor_from_jagged(ROWS[2], offsets=torch.tensor([0, 5, 18]))
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch calls them prototypes
    MASKED = torch.masked.masked_tensor(Q, Q > 0)
    STRIDED = torch.nested.nested_tensor([Q[0], Q[1]])
LEARNED = {name: torch.randn(2, 4, 9, 8, requires_grad=True) for name in "qkv"}
OF_NUMPY = cupy_flash.block_mask(lambda _b, _h, i, j: i >= j, None, None, 9, 9, block=16)
OF_TORCH = create_block_mask(lambda _b, _h, i, j: i >= j, None, None, 9, 9, device="cpu", BLOCK_SIZE=128)
NOTHING = _create_empty_block_mask(Q, K)
SMALL = create_block_mask(lambda _b, _h, i, j: i >= j, None, None, 24, 24, device="cpu", BLOCK_SIZE=8)
SCORE = cupy_flash.score(lambda s, _b, _h, i, j: s - (i - j))
TAUGHT = cupy_flash.score(lambda s, _b, _h, i, j, slope: s - slope * (i - j))
TUNING = cupy_flash.Tuning(tile=(64, 64))


def call(q=Q, k=K, v=V, **given):
    return cf.attention(q, k, v, **given)


def sdpa(query=Q, key=K, value=V, attn_mask=None, **given):
    return cf.scaled_dot_product_attention(query, key, value, attn_mask, **given)


def varlen(q=ROWS[0], k=ROWS[1], v=ROWS[2], cu_seqlens_q=CUTS, cu_seqlens_k=CUTS, **given):
    return cf.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **given)


def torch_varlen(query=ROWS[0], key=ROWS[1], value=ROWS[2], **given):
    return cf.varlen_attn(query, key, value, CUTS, CUTS, 9, 9, **given)


def nested(q=NESTED[0], k=NESTED[1], v=NESTED[2], layout="bshd", **given):
    return cf.attention(q, k, v, layout=layout, **given)


def nested_sdpa(query=NESTED[0], key=NESTED[1], attn_mask=None, **given):
    return sdpa(*(x.transpose(1, 2) for x in (query, key, key)), attn_mask, **given)


def over_cache(q=Q[:, :, :1], k_cache=None, v_cache=None, cache_seqlens=3, **given):
    caches = (K.clone() if x is None else x for x in (k_cache, v_cache))
    return cf.attention_with_kv_cache(q, *caches, cache_seqlens=cache_seqlens, **given)


class Mode(TorchDispatchMode):
    """Sees every operator, as a tracer does."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def seen(function, *args, **given):
    with Mode():
        return function(*args, **given)


def codes_over_cache(**given):
    """A cache of 4-bit codes, to which a program is to append."""
    q, *caches = (x.repeat(1, 1, 1, 4) for x in (Q[:, :, :1], K, V))
    codes = (int4(x, group=32) for x in caches)
    return cf.attention_with_kv_cache(q, *codes, cache_seqlens=3, **given)


def second_of_score(create_graph=True, slope=None):
    slope = torch.ones((), requires_grad=True) if slope is None else slope
    q = Q.clone().requires_grad_()
    o = cf.attention(q, K, V, score=TAUGHT(slope))
    (grad,) = torch.autograd.grad(o.sin().sum(), q, create_graph=create_graph)
    return grad.square().sum().backward() if create_graph else grad


def ring_in_forward_mode():
    with one_process(), torch.autograd.forward_ad.dual_level():
        return cf.ring_attention(torch.autograd.forward_ad.make_dual(Q, Q), K, V)


def derivatives(count):
    """As many derivatives in reverse mode."""
    x = Q.double().requires_grad_()
    y = cf.attention(x, x, x)
    for _ in range(count):
        (y,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
    return y


def ring_of_one(**given):
    with one_process():
        return derivatives_of_ring(**given)


def ring_with(**given):
    with one_process():
        return cf.ring_attention(Q, K, V, **given)


def ring_interrupted():
    """A call after one that Ctrl-C ended."""
    with one_process():
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr("cupy_flash.torch.ring.run_in_worker", mock.Mock(side_effect=KeyboardInterrupt))
            cf.ring_attention(Q, K, V)
        return cf.ring_attention(Q, K, V)


def in_context(
    shape=(1,), mesh=True, buffers=(), buffer_seq_dims=(), heads=4, no_restore_buffers=(), **given
):
    """A call of torch's attention in context_parallel."""
    with one_process():
        whole = dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp")[-len(shape) :])
        cut = {"buffers": buffers, "buffer_seq_dims": buffer_seq_dims}
        with cf.context_parallel(mesh and whole, **cut, no_restore_buffers=no_restore_buffers):
            if "need_weights" in given:
                return torch.nn.MultiheadAttention(8, 1)(Q[0, 0], K[0, 0], K[0, 0], **given)
            k = K[:, :heads]
            return torch.nn.functional.scaled_dot_product_attention(Q, k, k, **given)


def outside_of_the_mesh():
    """A mesh of process 1 in process 0."""
    with one_process():
        mesh = dist.DeviceMesh("cpu", [1], _init_backend=False)
        with cf.context_parallel(mesh, buffers=(), buffer_seq_dims=()):
            pass


def ring_in_a_transform():
    with one_process():
        return torch.func.grad(lambda q: cf.ring_attention(q, K, V).sum())(Q)


def derivatives_of_ring(create_graph=True):
    x = Q.double().requires_grad_()
    (grad,) = torch.autograd.grad(cf.ring_attention(x, x, x).sin().sum(), x, create_graph=create_graph)
    return grad.sum().backward() if create_graph else grad


def ring_in_directions(is_grads_batched):
    with one_process():
        x = Q.clone().requires_grad_()
        o = cf.ring_attention(x, K, V)
        do = torch.ones((2,) * is_grads_batched + o.shape)
        return torch.autograd.grad(o, x, do, is_grads_batched=is_grads_batched)


def of_mesh(**given):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    with one_process():
        mesh = init_device_mesh("cpu", (1,))
        return cf.attention(*(distribute_tensor(x, mesh, [Shard(0)]) for x in (Q, K, V)), **given)


def torchs_flash(dropout=0.0, **given):
    """The operator of packed sequences, as an activation has it."""
    cuts = (None, None) if "seqused_k" in given else (CUTS, CUTS)
    rows = Q.transpose(1, 2) if "seqused_k" in given else ROWS[0]
    ours = FlashOperators()
    try:
        operator = torch.ops.aten._flash_attention_forward
        return operator(rows, rows, rows, *cuts, 20, 20, dropout, False, False, **given)
    finally:
        ours.remove()


def without_hook():
    with mock.patch.object(torch.nn, "attention", object()), cf.use_in_sdpa():
        pass


def module(config):
    return cf.FlashAttention(config)(Q, K, V)


def adopted(q):
    return cupy_flash.attention(q, K, V)


def without_memory():
    x = torch.ones(2, 4, 9, 8)
    x.untyped_storage().resize_(0)
    return x


@torch.fx.wrap
def wrapped(q):
    return cf.attention(q, q, q)


class Wrapped(torch.nn.Module):
    def forward(self, q):
        return 2 * wrapped(q)


class Net(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, q):
        return cf.attention(q, q, q, **self.options)


def exported(**options):
    program = torch.export.export(Net(**options), (Q,))
    return program.run_decompositions({operator: attention_by_textbook})


class Foreign:
    """An array of another library."""

    def __dlpack__(self, **options):
        return Q.__dlpack__(**options)

    def __dlpack_device__(self):
        return Q.__dlpack_device__()


class Elsewhere:
    """What is asked of a tensor on another device."""

    is_meta, device = False, "mps:0"

    def to(self, device):
        return Q.to(device)


def from_elsewhere(q):
    if isinstance(q, Elsewhere):
        raise _unsupported_device(q, "q")
    return adopted(q)


def slopes_in_forward_mode(alibi_slopes):
    """Those that require a gradient stand for those with a tangent, which have one within a level only."""
    with torch.autograd.forward_ad.dual_level():
        x = alibi_slopes.detach()
        if alibi_slopes.requires_grad:
            x = torch.autograd.forward_ad.make_dual(x, x)
        return cf.attention(torch.autograd.forward_ad.make_dual(Q, Q), K, V, alibi_slopes=x)


def loss(q):
    return cf.attention(q, q, q).sum()


def pages(seqused_k=None):
    keys = (x.transpose(1, 2).reshape(2, 9, 4, 8) for x in (K, V))
    table = torch.tensor([[0], [1]], dtype=torch.int32)
    return cf.varlen_attn(ROWS[0], *keys, CUTS, None, 9, 9, block_table=table, seqused_k=seqused_k)


# What is wrong, how many of the hint's ways out are code, and what the words among them mean, done.
CASES = {
    "adopt: requires grad": (lambda q: adopted(q), {"q": LEARNED["q"]}, 1, [lambda: call(**LEARNED)]),
    "adopt: negated": (adopted, {"q": torch.randn(2, 4, 9, 8, dtype=torch.complex64).conj().imag}, 1, []),
    "adopt: meta": (adopted, {"q": Q.to("meta")}, 1, [lambda: call(**{n: Q.to("meta") for n in "qkv"})]),
    "adopt: elsewhere": (from_elsewhere, {"q": Elsewhere()}, 1, []),
    "adopt: sparse": (adopted, {"q": Q.to_sparse()}, 1, []),
    "adopt: zeros": (adopted, {"q": torch._efficientzerotensor(Q.shape)}, 1, []),
    "adopt: nested": (adopted, {"q": NESTED[0]}, 0, [nested, varlen]),
    "adopt: no memory": (adopted, {"q": without_memory()}, 0, [lambda: adopted(Q)]),
    "adopt: masked": (adopted, {"q": MASKED}, 1, []),
    "adopt: causal": (
        lambda **given: cupy_flash.attention(Q, K, V, **given),
        {"mask": causal_upper_left(9, 9)},
        1,
        [lambda: call(mask=causal_upper_left(9, 9))],
    ),
    "block_mask: of another": (
        lambda: cf.block_mask(3),
        {},
        0,
        [lambda: cf.block_mask(OF_TORCH), lambda: call(mask=cf.block_mask(OF_TORCH))],
    ),
    "block_mask: of nothing": (
        lambda mask=NOTHING: call(mask=None if mask is None else cf.block_mask(mask)),
        {},
        1,
        [],
    ),
    "block_mask: sizes": (
        lambda BLOCK_SIZE=8: cf.block_mask(
            create_block_mask(
                lambda _b, _h, i, j: i >= j, None, None, 24, 24, device="cpu", BLOCK_SIZE=BLOCK_SIZE
            )
        ),
        {},
        1,
        [],
    ),
    "align": (
        lambda **given: seen(call, **given),
        {"causal": True, "align": "left"},
        0,
        [lambda: [seen(call, causal=True, align=align) for align in ("top_left", "bottom_right", 0)]],
    ),
    "seed": (lambda seed: seen(call, dropout=0.1, seed=seed), {"seed": 2**63}, 1, []),
    "float8": (
        lambda **given: call(**given),
        {name: Q.to(torch.float8_e4m3fn) for name in "qkv"},
        0,
        [
            lambda: cupy_flash.attention(
                *[cupy_flash.QuantizedArray(Q.to(torch.float8_e4m3fn), torch.ones(4))] * 3
            )
        ],
    ),
    "float8: no gradient": (
        lambda q: flash_attn_3.flash_attn_func(q, *[Q.to(torch.float8_e4m3fn)] * 2),
        {"q": Q.to(torch.float8_e4m3fn).requires_grad_()},
        1,
        [],
    ),
    "no gradient of": (call, {"alibi_slopes": torch.ones(4, requires_grad=True)}, 1, []),
    "sdpa: both": (
        sdpa,
        {"attn_mask": torch.ones(9, 9).bool(), "is_causal": True},
        0,
        [lambda: call(mask=torch.ones(9, 9).bool(), causal=True)],
    ),
    "sdpa: dtype": (sdpa, {"attn_mask": torch.ones(9, 9).int()}, 2, []),
    "nested sdpa: mask": (nested_sdpa, {"attn_mask": torch.ones(9, 9).bool()}, 1, []),
    "nested sdpa: heads": (
        nested_sdpa,
        {"key": torch.nested.nested_tensor_from_jagged(ROWS[1][:, :2], NESTED[0].offsets())},
        1,
        [],
    ),
    "varlen: splits": (torch_varlen, {"num_splits": 2}, 1, []),
    "varlen: heads": (torch_varlen, {"key": ROWS[1][:, :2], "value": ROWS[2][:, :2]}, 1, []),
    "varlen: pages": (pages, {}, 0, [lambda: pages(torch.tensor([9, 9], dtype=torch.int32))]),
    "score: transformed": (
        lambda: torch.vmap(lambda q: cf.attention(q, K[0], V[0], score=SCORE))(Q),
        {},
        0,
        [lambda: call(score=SCORE)],
    ),
    "score: meta": (
        lambda q: call(q=q, score=SCORE) if q.shape != (2, 4, 9, 8) or q.is_meta else q,
        {"q": Q.to("meta")},
        0,
        [lambda: Q.to("meta").new_empty(*Q.shape[:-1], V.shape[-1])],
    ),
    "score: a function": (
        lambda f, score: call(score=score),
        {"f": lambda s, *_: 2 * s, "score": lambda s, *_: 2 * s},
        1,
        [],
    ),
    "score: no gradient of": (
        call,
        {"score": SCORE, "alibi_slopes": torch.ones(4, requires_grad=True)},
        1,
        [],
    ),
    "score: second": (second_of_score, {}, 1, [lambda: second_of_score(slope=torch.ones(()))]),
    "no tensor": (call, {"q": Q.numpy()}, 1, [lambda: cupy_flash.attention(*(x.numpy() for x in (Q, K, V)))]),
    "no tensor: a list": (call, {"q": Q.tolist()}, 1, []),
    "no tensor: a list of integers": (varlen, {"cu_seqlens_q": CUTS.tolist()}, 1, []),
    "no tensor: our blocks": (call, {"mask": OF_NUMPY}, 1, []),
    "no tensor: our spans": (call, {"mask": cupy_flash.spans.prefix_lm(5, 9)}, 1, []),
    "no tensor: bits by sequence": (varlen, {"mask": cupy_flash.RaggedMask(np.ones(2 * 9 * 9, bool))}, 1, []),
    "no tensor: blocks as a bias": (call, {"bias": OF_TORCH}, 1, []),
    "no tensor: of another library": (
        call,
        {"q": Foreign()},
        1,
        [lambda: cupy_flash.attention(*[Foreign()] * 3)],
    ),
    "no tensor: none": (call, {"q": None}, 0, [lambda: call(q=Q)]),
    "no tensor: of torch.fx": (
        lambda: torch.fx.symbolic_trace(Net()),
        {},
        0,
        [lambda: torch.fx.symbolic_trace(Wrapped())(Q), lambda: torch.export.export(Net(), (Q,)).module()(Q)],
    ),
    "sparse": (call, {"k": K.to_sparse()}, 1, []),
    "nested of rows": (sdpa, {"query": STRIDED}, 0, [varlen]),
    "masked": (call, {"q": MASKED}, 1, []),
    "devices: on meta but for one": (call, {"q": Q.to("meta"), "k": K, "v": V.to("meta")}, 1, []),
    "devices: k on meta": (call, {"k": K.to("meta")}, 1, []),
    "causal bias: packed": (varlen, {"mask": causal_lower_right(9, 9)}, 1, []),
    "causal bias: lengths": (call, {"mask": causal_lower_right(5, 9)}, 1, []),
    "causal bias: align": (call, {"mask": causal_lower_right(9, 9), "align": "top_left"}, 1, []),
    "scale": (call, {"scale": torch.ones(9, 1)}, 0, [lambda: call(q=Q * torch.ones(9, 1), scale=1.0)]),
    "cache: no gradient of": (over_cache, {"scale": torch.tensor(0.5, requires_grad=True)}, 1, []),
    "cache: workspace": (over_cache, {"tuning": cupy_flash.Tuning(workspace=torch.zeros(9))}, 1, []),
    "cache: vmap": (
        lambda: torch.vmap(lambda q: over_cache(q, K[:1], V[:1]))(Q[:, None]),
        {},
        0,
        [over_cache],
    ),
    "cache: codes": (
        lambda **given: seen(codes_over_cache, **given),
        {name: x[:, :, :1].repeat(1, 1, 1, 4) for name, x in (("k", K), ("v", V))},
        0,
        [
            lambda: seen(codes_over_cache),
            lambda: codes_over_cache(**{n: x[:, :, :1].repeat(1, 1, 1, 4) for n, x in (("k", K), ("v", V))}),
        ],
    ),
    "cache: requires grad": (lambda q: seen(over_cache, q[:, :, :1]), {"q": LEARNED["q"]}, 1, []),
    "sdpa: rank": (sdpa, {"query": Q[0, 0, 0]}, 0, [sdpa]),
    "sdpa: heads": (sdpa, {"key": K2, "value": K2}, 1, []),
    "sdpa: axes of a mask": (
        sdpa,
        {
            "attn_mask": torch.ones(3, 1, 9, 9).bool()[:, None],
            **dict.fromkeys(("query", "key", "value"), Q[None]),
        },
        0,
        [lambda: sdpa(*[Q[None]] * 3, torch.ones(1, 2, 1, 9, 9).bool())],
    ),
    "module: tuning": (
        lambda tuning=TUNING: cf.FlashAttention(cupy_flash.AttentionConfig(head_dim=8, tuning=tuning)),
        {},
        1,
        [],
    ),
    "module: head_dim": (module, {"config": cupy_flash.default_config(4)}, 1, []),
    "nested: not all": (nested, {"v": ROWS[2]}, 0, [nested, varlen]),
    "nested: strided": (
        nested,
        {"q": STRIDED},
        0,
        [lambda: nested(torch.nested.nested_tensor([*NESTED[0].unbind()], layout=torch.jagged))],
    ),
    "nested: axis": (nested, {"layout": "bhsd"}, 0, [nested]),
    "nested: holes": (lambda q: cf.attention(q, q, q, layout="bshd"), {"q": HOLES}, 1, []),
    "nested: holes, heads first": (lambda q: cf.attention(q, q, q), {"q": HOLES.transpose(1, 2)}, 1, []),
    "nested: lengths": (nested, {"v": OTHERS}, 0, [nested]),
    "nested: in a program": (
        lambda k, v: seen(nested, APART[0], k, v),
        {"k": APART[1], "v": APART[2]},
        1,
        [],
    ),
    "nested: offsets": (
        lambda q, k, v: cf.attention_varlen(q, k, v, CUTS, CUTS),
        dict(zip("qkv", NESTED, strict=True)),
        1,
        [],
    ),
    "ring: forward mode": (ring_in_forward_mode, {}, 0, [lambda: ring_of_one(create_graph=False)]),
    "ring: transform": (ring_in_a_transform, {}, 0, [lambda: ring_of_one(create_graph=False)]),
    "ring: no member": (ring_with, {"group": dist.GroupMember.NON_GROUP_MEMBER}, 0, [ring_with]),
    "ring: no group": (ring_with, {"group": "cp"}, 0, [ring_with]),
    "ring: agreement": (ring_with, {"agreement": True}, 0, [lambda: ring_with(agreement="never")]),
    "ring: interrupted": (ring_interrupted, {}, 0, [ring_with]),
    "ring: directions": (ring_in_directions, {"is_grads_batched": True}, 1, []),
    "ring: second": (ring_of_one, {}, 1, []),
    "ring: not initialised": (
        lambda: cf.ring_attention(Q, K, V),
        {},
        0,
        [lambda: ring_of_one(create_graph=False)],
    ),
    "context: no mesh": (in_context, {"mesh": None}, 0, [in_context]),
    "context: dimensions": (in_context, {"shape": (1, 1)}, 0, [in_context]),
    "context: outside": (outside_of_the_mesh, {}, 0, [in_context]),
    "context: requires grad": (
        in_context,
        {"buffers": [torch.ones(2, requires_grad=True)], "buffer_seq_dims": [0]},
        0,
        [lambda: in_context(buffers=[torch.ones(2)], buffer_seq_dims=[0])],
    ),
    "context: restored": (
        in_context,
        {"no_restore_buffers": [K]},
        0,
        [lambda: in_context(buffers=[WHOLE], buffer_seq_dims=[0], no_restore_buffers=[WHOLE])],
    ),
    "context: axes": (
        in_context,
        {"buffers": [torch.ones(2)]},
        0,
        [lambda: in_context(buffers=[torch.ones(2)], buffer_seq_dims=[0])],
    ),
    "context: no tensor": (in_context, {"buffers": [3], "buffer_seq_dims": [0]}, 0, [in_context]),
    "context: no axis": (
        in_context,
        {"buffers": [torch.ones(2)], "buffer_seq_dims": [1]},
        0,
        [lambda: in_context(buffers=[torch.ones(2)], buffer_seq_dims=[0])],
    ),
    "context: rows": (
        in_context,
        {"buffers": [torch.ones(3)], "buffer_seq_dims": [0]},
        0,
        [lambda: in_context(buffers=[torch.ones(4)], buffer_seq_dims=[0])],
    ),
    "context: lengths": (
        in_context,
        {"buffers": [torch.ones(3), torch.ones(5)], "buffer_seq_dims": [0, 0]},
        0,
        [lambda: in_context(buffers=[torch.ones(4), torch.ones(6)], buffer_seq_dims=[0, 0])],
    ),
    "context: mask": (in_context, {"attn_mask": torch.ones(9, 9).bool()}, 1, []),
    "context: dropout": (in_context, {"dropout_p": 0.5}, 1, []),
    "context: weights": (in_context, {"need_weights": True}, 1, []),
    "context: inference": (
        in_context,
        {"buffers": [INFERRED], "buffer_seq_dims": [0]},
        0,
        [lambda: in_context(buffers=[INFERRED.clone()], buffer_seq_dims=[0])],
    ),
    "context: heads": (in_context, {"heads": 2}, 1, []),
    "flash operators: dropout": (lambda: torchs_flash(0.5), {}, 0, [lambda: sdpa(dropout_p=0.5)]),
    "flash operators: slopes": (
        lambda: torchs_flash(alibi_slopes=torch.ones(4)),
        {},
        0,
        [lambda: varlen(alibi_slopes=torch.ones(4), align="top_left")],
    ),
    "flash operators: lengths without offsets": (
        lambda: torchs_flash(seqused_k=torch.ones(2, dtype=torch.int32)),
        {},
        0,
        [lambda: cf.attention_with_kv_cache(Q[:, :, :1], K, V, cache_seqlens=torch.tensor([5, 9]).int())],
    ),
    "use_in_sdpa: no hook": (without_hook, {}, 0, [sdpa]),
    "tangents: none of": (
        slopes_in_forward_mode,
        {"alibi_slopes": torch.ones(4, requires_grad=True)},
        1,
        [],
    ),
    "third": (lambda: derivatives(3), {}, 0, [lambda: derivatives(2)]),
    "forward of forward": (
        lambda way: way(Q[0, 0, :2]),
        {"way": torch.func.jacfwd(torch.func.jacfwd(loss))},
        1,
        [],
    ),
    "sharded: dropout": (of_mesh, {"dropout": 0.5}, 1, []),
    "textbook": (
        exported,
        {"window": (2, 2), "dropout": 0.5},
        0,
        [lambda: exported(mask=torch.ones(9, 9).tril().bool())],
    ),
}
NAMES = {"torch": torch, "cupy_flash": cupy_flash, "default_config": cupy_flash.default_config}
NAMES |= {"q": Q, "k": K, "v": V, "query": Q, "f": loss}


@functools.cache
def refusal(case):
    """Where the errors of a case are made, and what the one says that comes out."""
    function, given, *_ = CASES[case]
    where = []
    with noted(where), pytest.raises(Exception, match="Try: ") as caught:
        function(**given)
    return where, str(caught.value)


def ways_out(hint):
    """The alternatives of a hint that are code, without what is said of them."""
    for text in re.split(r"; or |; |, or ", hint):
        code = re.split(r",? (?:which|as|for|where|made|if|inside|and)\b|, True |, reverse", text)[0]
        if re.match(r"\w+=", code):
            code = f"dict({code})"
        with contextlib.suppress(SyntaxError):
            if "..." not in code and not isinstance(
                ast.parse(code, mode="eval").body, (ast.Attribute, ast.Constant, ast.Name)
            ):
                yield code


@pytest.mark.parametrize("case", CASES)
def test_a_hint_works(case):
    function, given, codes, means = CASES[case]
    _, said = refusal(case)
    hint = re.search(r"Try: ([^\n]*)", said).group(1)
    found = list(ways_out(hint))
    assert len(found) == codes, (hint, found)
    assert codes or means, "nothing of the hint is tried"
    for code in found:
        value = eval(code, {**NAMES, **given})
        if code.startswith("cupy_flash.torch.attention("):
            continue  # the call itself
        about = [said.split()[0], *re.findall(r"\w+", code), *given]
        name = next(word for word in about if word in given) if given else None
        function(**{**given, **(value if isinstance(value, dict) else {name: value})})
    for mean in means:
        mean()


def test_every_hint_is_tried():
    """Where an error is made that no case reaches, one is missing."""
    reached = {site for case in CASES for site in refusal(case)[0]}
    assert reached == set(SITES)

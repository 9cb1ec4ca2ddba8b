"""The operator in torch's own ones: the results of the library, and what torch.onnx.export makes of it."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

import cupy_flash.torch as cf
from cupy_flash import UnsupportedError
from cupy_flash.torch.call import Call, arguments
from cupy_flash.torch.ops import operator
from cupy_flash.torch.textbook import attention_by_textbook

# torch's exporters warn of what torch itself will leave.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore::DeprecationWarning"),
]

GENERATOR = torch.Generator().manual_seed(0)
Q, K, V = (
    torch.randn(2, heads, rows, dim, generator=GENERATOR)
    for heads, rows, dim in ((4, 5, 8), (2, 7, 8), (2, 7, 6))
)
BIAS = torch.randn(4, 5, 7, generator=GENERATOR)
HIDDEN = torch.rand(2, 1, 5, 7, generator=GENERATOR) < 0.5
HIDDEN[0, 0, 1] = False  # a row that sees no key
CASES = {
    "plain": {},
    "scale and softcap": {"scale": 0.3, "softcap": 2.0},
    "causal": {"causal": True, "align": "bottom_right"},
    "above the keys": {"causal": True, "align": -3},
    "window": {"window": (2, 1), "align": "top_left"},
    "causal window": {"window": (1, 3), "align": 1, "causal": True},
    "bias": {"bias": BIAS},
    "bias of 16 bits": {"bias": BIAS.half()},
    "mask": {"mask": HIDDEN},
    "slopes": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0]), "align": "bottom_right"},
    "slopes of each sequence": {"alibi_slopes": torch.rand(2, 4, generator=GENERATOR), "align": 0},
    "sinks": {"sinks": torch.randn(4, generator=GENERATOR), "mask": HIDDEN},
}


class Net(torch.nn.Module):
    """Attention with its options, of which tensors are inputs of the program."""

    def __init__(self, names, options):
        super().__init__()
        self.names, self.options = names, options

    def forward(self, q, k, v, *tensors):
        given = dict(zip(self.names, tensors, strict=True))
        return cf.attention(q, k, v, return_lse=True, **given, **self.options)


def net(options, qkv):
    tensors = {name: x for name, x in options.items() if isinstance(x, torch.Tensor)}
    others = {name: x for name, x in options.items() if name not in tensors}
    return Net(tuple(tensors), others).eval(), (*qkv, *tensors.values())


def qkv_of(dtype=torch.float32, layout="bhsd", rank=4):
    each = (x[(0,) * (4 - rank)].to(dtype) for x in (Q, K, V))
    return tuple(x.transpose(-3, -2).contiguous() if layout == "bshd" else x for x in each)


VARIANTS = [
    *((case, torch.float32, "bhsd", 4) for case in CASES),
    ("causal", torch.float64, "bshd", 4),
    ("bias", torch.float32, "bshd", 3),
    ("mask", torch.bfloat16, "bhsd", 4),
    ("window", torch.float16, "bhsd", 3),
    ("causal", torch.float32, "bhsd", 2),
]


@pytest.mark.parametrize(("case", "dtype", "layout", "rank"), VARIANTS)
def test_decomposed_programs_give_what_the_library_gives(case, dtype, layout, rank):
    options = {**CASES[case], "layout": layout}
    if rank < 4 and "mask" in options:
        options["mask"] = options["mask"][0]
    module, inputs = net(options, qkv_of(dtype, layout, rank))
    program = torch.export.export(module, inputs)
    assert "cupy_flash.attention" in program.run_decompositions().graph_module.code  # where nobody asks
    program = program.run_decompositions({operator: attention_by_textbook})
    assert "cupy_flash" not in program.graph_module.code
    tolerance = {"rtol": 0, "atol": {torch.float64: 1e-12, torch.float32: 2e-6}.get(dtype, 0.02)}
    for ours, wanted in zip(program.module()(*inputs), module(*inputs), strict=True):
        assert ours.dtype == wanted.dtype
        torch.testing.assert_close(ours, wanted, **tolerance)


@pytest.mark.parametrize("rank", [2, 3])
def test_results_have_the_rank_of_q_where_other_arrays_have_more_axes(rank):
    heads, qkv = 4 if rank == 3 else 1, qkv_of(rank=rank)
    options = {
        "mask": HIDDEN[:1], "bias": BIAS[None, :heads], "alibi_slopes": torch.ones(1, heads), "align": 0,
        "sinks": torch.zeros(heads),
    }  # fmt: skip
    ours = attention_by_textbook(*arguments(Call.of(*qkv, {**options})))
    wanted = cf.attention(*qkv, return_lse=True, **options)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=2e-6)


def test_what_has_no_form_is_refused_by_name():
    cuts = torch.tensor([0, 5], dtype=torch.int32)
    rows = torch.randn(5, 4, 8)

    class Varlen(torch.nn.Module):
        def forward(self, x):
            return cf.attention_varlen(x, x, x, cuts, cuts, max_seqlen_q=5, max_seqlen_k=5)

    dropping, inputs = net({"dropout": 0.5}, (Q, K, V))
    for module, given, name in ((Varlen(), (rows,), "cu_seqlens_q"), (dropping, inputs, "dropout")):
        with pytest.raises(UnsupportedError, match=rf"^{name} cannot be written in(.|\n)*Try: "):
            torch.export.export(module, given).run_decompositions({operator: attention_by_textbook})


def test_shapes_of_symbols_are_those_of_the_operator():
    """Torch would take them from the decomposition, which knows fewer options."""

    class Net(torch.nn.Module):
        def forward(self, x, cuts):
            return cf.attention_varlen(x, x, x, cuts, cuts, causal=True, max_seqlen_q=8, max_seqlen_k=8)

    rows, cuts = torch.randn(8, 4, 8), torch.tensor([0, 8], dtype=torch.int32)
    dynamic = ({0: torch.export.Dim("rows", min=2)}, None)
    program = torch.export.export(Net(), (rows, cuts), dynamic_shapes=dynamic).module()
    more = torch.randn(9, 4, 8)
    assert program(more, cuts).shape == more.shape


@pytest.mark.parametrize(
    "case", ["mask", *(pytest.param(case, marks=pytest.mark.slow) for case in CASES if case != "mask")]
)
def test_onnx(case):
    """Torch's exporter translates it by itself; ONNX's own evaluator computes what the library does."""
    reason = "onnxscript is not installed: pip install onnxscript"
    pytest.importorskip("onnxscript", reason=reason)
    reference = pytest.importorskip("onnx.reference", reason=reason)
    module, inputs = net(CASES[case], (Q, K, V))
    made = torch.onnx.export(module, inputs, dynamo=True, verbose=False).model_proto
    named = dict(zip([x.name for x in made.graph.input], (x.numpy() for x in inputs), strict=True))
    with np.errstate(divide="ignore"):  # the LSE of a row that sees no key
        results = reference.ReferenceEvaluator(made).run(None, named)
    for ours, wanted in zip(results, module(*inputs), strict=True):
        torch.testing.assert_close(torch.from_numpy(ours), wanted, rtol=0, atol=2e-6)


def test_onnx_says_why_not():
    pytest.importorskip("onnxscript", reason="onnxscript is not installed: pip install onnxscript")
    with pytest.raises(Exception, match=r"dropout cannot be written in(.|\n)*Try: ") as caught:
        torch.onnx.export(*net({"dropout": 0.5}, (Q, K, V)), dynamo=True, verbose=False)
    assert isinstance(caught.value, torch.onnx.errors.OnnxExporterError)

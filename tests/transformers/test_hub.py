"""The library as a kernel of the Hugging Face hub, beside the installed one, and a model that names it."""

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here needs the network
torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[transformers]'")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'cupy-flash[transformers]'"
)

from transformers.integrations import hub_kernels

import cupy_flash
import cupy_flash.torch as cf
from tests import hub
from tests.paths import ROOT

pytestmark = [pytest.mark.transformers, pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")]

NAME = "someone/cupy-flash"


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    if not any((ROOT / "build" / "cpu").glob("*/manifest.json")):
        pytest.skip("there is no CPU core in build/cpu: scripts/build_cpu.py --native")
    made, cache = tmp_path_factory.mktemp("hub"), tmp_path_factory.mktemp("cache")
    words = ["--variant", "torch-cpu", "--core", str(ROOT / "build" / "cpu"), "--out", str(made)]
    assert hub.script().main(words) == 0
    return hub.as_in_a_cache(made, cache)


@pytest.fixture(scope="module")
def kernel(repository):
    """The variant, loaded by `kernels` if it is installed, else by the same import by hand."""
    try:
        from kernels import get_local_kernel
    except ImportError:
        return hub.imported(repository / "build" / "torch-cpu")
    return get_local_kernel(repository, backend="cpu")


def given(*shape, seed=0):
    torch.manual_seed(seed)
    return [torch.randn(*shape, requires_grad=True) for _ in range(3)]


def gradients(attention, tensors, **options):
    o = attention(*tensors, causal=True, **options)
    return o, *torch.autograd.grad(o.square().sum(), tensors)


def test_its_modules_and_operators_are_its_own(kernel):
    name = kernel.__name__
    assert name != "cupy_flash"
    assert kernel.torch.attention is not cf.attention
    assert kernel.torch.attention.__module__.startswith(f"{name}.")
    assert getattr(torch.ops, name).attention.default is not torch.ops.cupy_flash.attention.default
    assert {
        schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith(f"{name}::")
    } == {
        f"{name}::attention{rest}"
        for rest in ("", "_backward", "_hvp", "_jvp", "_with_jvp", "_with_kv_cache")
    }
    if hasattr(torch.nn.attention, "list_flash_attention_impls"):
        assert {name, "cupy_flash"} <= set(torch.nn.attention.list_flash_attention_impls())


def test_it_computes_in_its_own_core(kernel):
    tensors = given(2, 4, 40, 32)
    for ours, theirs in zip(
        gradients(kernel.torch.attention, tensors), gradients(cf.attention, tensors), strict=True
    ):
        assert torch.equal(ours, theirs)
    choose = importlib.import_module(f"{kernel.__name__}.cpu.choose")
    (_, found) = choose.core()
    assert found.origin == "cupy-flash"
    assert found.path.is_relative_to(Path(kernel.__file__).parent)


def test_compiled_programs_call_the_operator_of_each(kernel):
    tensors = given(1, 2, 16, 8)
    expected = gradients(cf.attention, tensors)
    for attention in (kernel.torch.attention, cf.attention):
        compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
        for ours, theirs in zip(gradients(compiled, tensors), expected, strict=True):
            torch.testing.assert_close(ours, theirs)
        torch._dynamo.reset()


def test_a_numpy_call_in_a_compiled_program_breaks_it(kernel):
    """It is not read: the modules that torch is told not to read are those of the copy."""
    q, *_ = (x.detach() for x in given(1, 2, 16, 8))
    compiled = torch.compile(lambda x: kernel.attention(x * 1, x, x), backend="aot_eager")
    assert torch.equal(compiled(q), cupy_flash.attention(q, q, q))
    assert f"{kernel.__name__}.call.untraced" in sys.modules
    torch._dynamo.reset()


def test_second_order_has_operators_too(kernel):
    q, k, v = (x.detach() for x in given(1, 2, 16, 8))

    def moved(attention):
        return torch.func.jvp(lambda x: attention(x, k, v, causal=True), (q,), (q,))

    ours, theirs = moved(kernel.torch.attention), moved(cf.attention)
    assert all(map(torch.equal, ours, theirs))


def test_two_versions_live_beside_each_other(kernel, repository, tmp_path):
    script = hub.script()
    script.EXPORTS += "\n__version__ = 'another'\n"
    variant = script.lay_out("torch-cpu", tmp_path, tmp_path, ROOT / "build" / "cpu")
    other = hub.imported(variant)
    assert other.__name__ != kernel.__name__
    assert other.__version__ != kernel.__version__
    tensors = given(1, 2, 16, 8)
    for made in (other.flash_attn_func(*tensors), kernel.flash_attn_func(*tensors)):
        assert torch.equal(made, cf.attention(*tensors, layout="bshd"))


def test_each_registers_under_its_own_name_with_transformers(kernel, monkeypatch):
    """A copy does not take over the models of another one, whichever registers last."""
    for registry in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        monkeypatch.setattr(registry, "_global_mapping", dict(registry._global_mapping))
    copy = importlib.import_module(f"{kernel.__name__}.transformers")
    installed = importlib.import_module("cupy_flash.transformers")
    ours, theirs = installed.register(), copy.register(reproducible="batch")
    assert (ours, theirs) == ("cupy_attn", kernel.__name__.replace("flash", "attn"))
    assert theirs != ours
    functions = transformers.AttentionInterface._global_mapping
    masks = transformers.AttentionMaskInterface._global_mapping
    assert (functions[ours], masks[ours]) == (installed.attention_forward, installed.make_mask)
    assert (functions[theirs].func, masks[theirs]) == (copy.attention_forward, copy.make_mask)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model, tokens = transformers.LlamaForCausalLM(config).eval(), torch.arange(24).reshape(2, 12)
    results = {}
    for name in ("eager", ours, theirs):
        model.set_attn_implementation(name)
        with torch.no_grad():
            results[name] = model(tokens).logits
    for name in (ours, theirs):
        torch.testing.assert_close(results[name], results["eager"], rtol=2e-5, atol=2e-5)


def test_a_model_that_names_it_trains_as_with_eager(kernel, monkeypatch):
    """By transformers' own way from attn_implementation= to the functions, but for the download."""
    asked, calls = [], []

    def get_kernel(name, **options):
        asked.append((name, options["version"], options["allow_all_kernels"]))
        return kernel

    varlen, dense = kernel.flash_attn_varlen_func, kernel.flash_attn_func

    def counted(function):
        def call(q, *args, **options):
            calls.append(function.__name__)
            return function(q, *args, **options)

        call.__signature__ = inspect.signature(function)
        return call

    monkeypatch.setattr(kernel, "flash_attn_varlen_func", counted(varlen))
    monkeypatch.setattr(kernel, "flash_attn_func", counted(dense))
    monkeypatch.setattr(hub_kernels, "get_kernel", get_kernel)
    # why: the kernels that pip finds may be older than the one that transformers wants.
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
    monkeypatch.setattr(transformers.modeling_flash_attention_utils, "_loaded_implementation", None)

    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(97, (2, 24))
    padding = torch.ones_like(tokens)
    padding[1, -5:] = 0

    def trained(mask):
        model.zero_grad()
        labels = tokens if mask is None else tokens.masked_fill(mask == 0, -100)
        loss = model(tokens, labels=labels, attention_mask=mask).loss
        loss.backward()
        return [loss.detach(), *(x.grad.clone() for x in model.parameters())]

    expected = [trained(None), trained(padding)]
    model.set_attn_implementation(NAME, allow_all_kernels=True)
    actual = [trained(None), trained(padding)]
    assert asked == [(NAME, 1, True)]
    assert calls == ["flash_attn_func"] * 2 + ["flash_attn_varlen_func"] * 2
    for ours, theirs in zip(actual, expected, strict=True):
        for x, y in zip(ours, theirs, strict=True):
            torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-6)


def test_kernels_finds_every_file_as_it_was_laid_out(repository, kernel):
    pytest.importorskip("kernels", reason="kernels is not installed: pip install kernels")
    from kernels._rust import Digest, Metadata

    variant = repository / "build" / "torch-cpu"
    metadata = Metadata.read_from_file(variant / "metadata.json")
    assert (metadata.name.python_name, metadata.version, metadata.id) == ("cupy_flash", 1, kernel.__name__)
    metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, variant))


WITHOUT = """
import sys
from pathlib import Path
sys.modules["threadpoolctl"] = None
from tests import hub
import importlib, torch
kernel = hub.imported(Path(sys.argv[1]))
q = torch.randn(1, 8, 2, 16)
print(importlib.import_module(kernel.__name__ + ".cpu.threads").allowed() > 0)
print(kernel.flash_attn_func(q, q, q).shape == q.shape)
"""


@pytest.mark.parametrize("core", ["", "numpy"])
def test_it_needs_no_other_package_than_numpy(repository, core):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUPY_FLASH_CPU": core}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(repository / "build" / "torch-cpu")],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.stdout.split() == ["True", "True"], done.stderr

"""examples/comfyui_node.py, called as ComfyUI calls it: `wrap_attn` of its comfy/ldm/modules/attention.py."""

import copy
import functools
import importlib.util
import logging

import pytest

from tests.paths import ROOT

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

pytestmark = pytest.mark.torch

BATCH, HEADS, QUERIES, KEYS, FEATURES = 2, 4, 7, 9, 8


@pytest.fixture
def node():
    spec = importlib.util.spec_from_file_location("comfyui_node", ROOT / "examples" / "comfyui_node.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Model:
    """A ModelPatcher, as far as nodes that set an option need it."""

    def __init__(self, model_options):
        self.model_options = model_options

    def clone(self):
        return Model(copy.deepcopy(self.model_options))


class Container:
    """What newer versions hand q, k and v over in; an override without a container_function gets tensors."""

    def __init__(self, tensor):
        self.tensor = tensor


def wrap_attn(func):
    """The call of an override: func without this wrapper, and a keyword that says that it was called."""

    @functools.wraps(func)
    def wrapper(*args, **kwargs):
        args = [x.tensor if isinstance(x, Container) else x for x in args]
        options = kwargs.get("transformer_options") or {}
        override = options.get("optimized_attention_override")
        if override is not None and "_inside_attn_wrapper" not in kwargs:
            return override(func, *args, **kwargs, _inside_attn_wrapper=True)
        return func(*args, **kwargs)

    return wrapper


class Theirs:
    """Attention by the rules of ComfyUI's attention_pytorch, which counts its calls."""

    def __init__(self):
        self.calls = []

    def __call__(
        self, q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False,
        **kwargs,
    ):  # fmt: skip
        self.calls.append((mask, attn_precision, skip_reshape, skip_output_reshape, kwargs))
        if not skip_reshape:
            features = q.shape[-1] // heads
            q, k, v = (x.reshape(len(x), x.shape[1], -1, features).transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
        scores = q.double() @ k.double().mT * kwargs.get("scale", q.shape[-1] ** -0.5)
        if mask is not None:
            mask = mask[None] if mask.ndim == 2 else mask
            mask = mask[:, None] if mask.ndim == 3 else mask
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        o = (scores.softmax(-1) @ v.double()).to(v.dtype)
        return o if skip_output_reshape else o.transpose(1, 2).flatten(2)


@pytest.fixture
def patched(node):
    """transformer_options of a model that went through the node."""
    (model,) = node.CupyFlashAttention().patch(Model({"transformer_options": {}}))
    return model.model_options["transformer_options"]


def qkv(skip_reshape, heads_k=HEADS, features=FEATURES):
    torch.manual_seed(0)
    wide = [(QUERIES, HEADS), (KEYS, heads_k), (KEYS, heads_k)]
    tensors = [torch.randn(BATCH, rows, heads, features) for rows, heads in wide]
    return [x.transpose(1, 2) if skip_reshape else x.flatten(2) for x in tensors]


def masks():
    torch.manual_seed(1)
    keep = torch.rand(BATCH, HEADS, QUERIES, KEYS) < 0.7
    keep[..., 0] = True
    added = torch.randn(BATCH, HEADS, QUERIES, KEYS)
    for mask in (keep, added):
        yield from (mask[0, 0], mask[:, 0], mask[:, :1], mask)


@pytest.mark.parametrize("skip_reshape", [False, True])
@pytest.mark.parametrize("skip_output_reshape", [False, True])
@pytest.mark.parametrize("container", [False, True])
def test_equals_theirs(patched, skip_reshape, skip_output_reshape, container):
    theirs = Theirs()
    call = wrap_attn(theirs)
    tensors = qkv(skip_reshape)
    given = [Container(x) for x in tensors] if container else tensors
    shape = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
    for mask in (None, *masks()):
        for options in ({}, {"scale": 0.2, "attn_precision": torch.float32, "low_precision_attention": True}):
            expected = call(*tensors, HEADS, mask, **shape, **options)
            theirs.calls.clear()
            with torch.inference_mode():
                o = call(*given, HEADS, mask, **shape, **options, transformer_options=patched)
            assert not theirs.calls
            torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("skip_reshape", [False, True])
def test_grouped_heads(patched, skip_reshape):
    theirs = Theirs()
    call = wrap_attn(theirs)
    tensors, options = qkv(skip_reshape, heads_k=2), {"skip_reshape": skip_reshape, "enable_gqa": True}
    expected = call(*tensors, HEADS, **options)
    o = call(*tensors, HEADS, **options, transformer_options=patched)
    assert len(theirs.calls) == 1
    torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-5)


REFUSED = {
    "an unknown keyword": {"softcap": 2.0},
    "a mask of another dtype": {"mask": torch.zeros(QUERIES, KEYS, dtype=torch.float16)},
    "a mask of another shape": {"mask": torch.ones(BATCH, 1, QUERIES, 1, KEYS, dtype=torch.bool)},
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_rest_goes_to_theirs_and_is_told_once(patched, caplog, name):
    seen = []

    def theirs(*args, **kwargs):
        seen.append((args, kwargs))
        return "theirs"

    tensors, options = qkv(skip_reshape=True), {"skip_reshape": True, **REFUSED[name]}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert wrap_attn(theirs)(*tensors, HEADS, **options, transformer_options=patched) == "theirs"
    assert len(caplog.records) == 1
    assert "leaves some attention to ComfyUI" in caplog.text
    (q, k, v, heads, mask, precision, skip_reshape, skip_output_reshape), rest = seen[0]
    assert (q, k, v) == tuple(tensors)
    assert (heads, precision, skip_reshape, skip_output_reshape) == (HEADS, None, True, False)
    assert mask is options.get("mask")
    assert rest.pop("_inside_attn_wrapper")
    assert rest.pop("transformer_options") is patched
    assert rest == {key: value for key, value in REFUSED[name].items() if key != "mask"}


def test_the_node(node):
    kind = node.NODE_CLASS_MAPPINGS["CupyFlashAttention"]
    assert node.NODE_DISPLAY_NAME_MAPPINGS.keys() == node.NODE_CLASS_MAPPINGS.keys()
    assert kind.INPUT_TYPES() == {"required": {"model": ("MODEL",)}}
    before = Model({"transformer_options": {"patches": {}}})
    (after,) = getattr(kind(), kind.FUNCTION)(before)
    assert before.model_options == {"transformer_options": {"patches": {}}}
    assert after.model_options["transformer_options"] == {
        "patches": {},
        "optimized_attention_override": node.attend,
    }

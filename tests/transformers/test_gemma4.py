"""Gemma 4 against transformers' eager attention: full layers of head dim 512 between windowed ones."""

import os

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here needs the network
torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[transformers]'")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'cupy-flash[transformers]'"
)
pytest.importorskip("transformers.models.gemma4", reason="this transformers has no Gemma 4")

import cupy_flash.transformers as cf

from .test_transformers import assert_close, both, padding, tokens

pytestmark = [pytest.mark.transformers, pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")]

WINDOW = 6
SIZES = {
    "vocab_size": 97, "vocab_size_per_layer_input": 97, "hidden_size": 32, "hidden_size_per_layer_input": 8,
    "intermediate_size": 48, "max_position_embeddings": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 256, "global_head_dim": 512, "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
# How the models of the family differ: keys that are the values too, in one head; the first layers' again.
KINDS = {
    "k_eq_v": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "shared": {"num_kv_shared_layers": 2},
}


def build(**changes):
    torch.manual_seed(0)
    model = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**{**SIZES, **changes})).eval()
    for parameter in model.parameters():  # spread the scores, so that a wrong mask shows
        parameter.data.mul_(3 if parameter.dim() > 1 else 1)
    # The scale is 1: products of rows of 512 numbers of norm 22 need weights like trained ones, or each query
    # sees one key, and float32 decides which.
    for layer in model.model.layers:
        layer.self_attn.q_norm.weight.data.fill_(layer.self_attn.head_dim**-0.5)
    return model


@pytest.fixture
def layers(monkeypatch):
    """What reached our attention: (head dim, heads of q, heads of k, dtype of the mask)."""
    seen = []

    def attend(module, query, key, value, attention_mask, **options):
        mask = None if attention_mask is None else attention_mask.dtype
        seen.append((query.shape[-1], query.shape[1], key.shape[1], mask))
        return cf.attention_forward(module, query, key, value, attention_mask, **options)

    cf.register()
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, cf.NAME, attend)
    return seen


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_training_step(kind, side, layers):
    model = build(**KINDS[kind]).train()
    keep = torch.ones(2, 13, dtype=torch.long) if side is None else padding(side)
    kept = keep.bool()

    def step(m):
        m.zero_grad()
        logits = m(tokens(), attention_mask=keep, use_cache=False).logits[kept]
        torch.nn.functional.cross_entropy(logits, tokens(seed=2)[kept]).backward()
        return logits, {n: p.grad for n, p in m.named_parameters() if p.grad is not None}

    (eager, eager_grads), (ours, grads) = both(model, step)
    assert_close(ours, eager)
    assert grads.keys() == eager_grads.keys()
    for name, grad in grads.items():
        size = float(eager_grads[name].abs().max())
        torch.testing.assert_close(grad, eager_grads[name], rtol=1e-4, atol=1e-5 * max(1.0, size))
    of_full = 1 if kind == "k_eq_v" else 2
    assert layers == [(256, 4, 2, torch.int8), (512, 4, of_full, torch.uint8)] * 2


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_generation_beyond_the_window(kind, cache, layers):
    model = build(**KINDS[kind])
    options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options |= {} if cache is None else {"cache_implementation": cache}
    eager, ours = both(model, lambda m: m.generate(tokens(), attention_mask=padding("left"), **options))
    assert ours.shape == (2, 13 + 9)
    assert torch.equal(ours, eager)
    assert {head_dim for head_dim, *_ in layers} == {256, 512}


@pytest.mark.parametrize("side", [None, "left", "right"])
@torch.no_grad()
def test_attention_to_all_tokens(side, layers):
    """Of the encoders that are made of it, whose windows look to both sides."""
    model = build(use_bidirectional_attention="all")
    keep = torch.ones(2, 13, dtype=torch.long) if side is None else padding(side)
    eager, ours = both(model, lambda m: m(tokens(), attention_mask=keep, use_cache=False).logits[keep.bool()])
    assert_close(ours, eager)
    assert not {torch.int8, torch.uint8} & {mask for *_, mask in layers}

"""Selected keys of DeepSeek-V3.2 and GLM-5: a layer in absorbed form, and whole models, against eager."""

import os

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here needs the network
torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[transformers]'")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'cupy-flash[transformers]'"
)

from transformers.models.deepseek_v32 import modeling_deepseek_v32 as deepseek
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

import cupy_flash.torch as cf
import cupy_flash.transformers
from cupy_flash import LatentCache, UnsupportedError
from tests.transformers.absorbed import absorbed

pytestmark = [pytest.mark.transformers, pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")]

RANK, ROPE, NOPE, VALUES, HEADS, SELECTED = 48, 8, 16, 24, 4, 5
TINY = {
    "hidden_size": 64, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "kv_lora_rank": RANK,
    "qk_rope_head_dim": ROPE, "qk_nope_head_dim": NOPE, "v_head_dim": VALUES, "q_lora_rank": 24,
    "index_topk": SELECTED, "index_head_dim": 16, "index_n_heads": 2, "max_position_embeddings": 64,
    "vocab_size": 97, "num_hidden_layers": 2, "intermediate_size": 48, "moe_intermediate_size": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "mlp_layer_types": ["dense", "sparse"],
}  # fmt: skip


@torch.no_grad()
def test_absorbed_form_is_the_layer():
    """A prompt, whose first queries see fewer keys than they name, then tokens one by one, and two drafts."""
    config = deepseek.DeepseekV32Config(**TINY, attn_implementation="eager")
    torch.manual_seed(0)
    attention, rotary = deepseek.DeepseekV32Attention(config, 0).eval(), None
    for weight in attention.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    rotary = deepseek.DeepseekV32RotaryEmbedding(config)
    found = []
    attention.indexer.register_forward_hook(lambda _module, _given, indices: found.append(indices))
    latents, length = torch.zeros(2, 1, 32, RANK + ROPE), 0
    cache = transformers.DynamicCache(config=config)
    for tokens in (9, 1, 1, 2):
        hidden = torch.randn(2, tokens, 64)
        rotation = rotary(hidden, torch.arange(length, length + tokens)[None])
        seen = torch.ones(tokens, length + tokens, dtype=torch.bool).tril(length)
        mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None].expand(2, -1, -1, -1)
        expected, _ = attention(hidden, rotation, mask, past_key_values=cache)

        def attend(q, new, stop=length + tokens, rotation=rotation):
            turned = deepseek.apply_rotary_pos_emb_interleave(q[..., RANK:], new[..., RANK:], *rotation)
            q, new = (torch.cat((x[..., :RANK], y), -1) for x, y in zip((q, new), turned, strict=True))
            latents[:, :, stop - q.shape[2] : stop] = new
            return cf.attention_with_kv_cache(
                q, LatentCache(latents, RANK), cache_seqlens=stop, indices=found[-1], causal=True,
                scale=attention.scaling,
            )  # fmt: skip

        actual = absorbed(attention, hidden, attend)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        length += tokens


@pytest.mark.parametrize("model", [deepseek.DeepseekV32ForCausalLM, glm.GlmMoeDsaForCausalLM])
def test_models(model):
    """Logits of padded texts, gradients, and generation, of queries that leave out keys."""
    torch.manual_seed(0)
    made = model(model.config_class(**TINY)).eval()
    tokens = torch.arange(24).reshape(2, 12)
    keep = torch.ones_like(tokens)
    keep[1, :3] = 0
    results = []
    for way in ("eager", cupy_flash.transformers.register()):
        made.set_attn_implementation(way)
        made.zero_grad()
        logits = made(tokens, attention_mask=keep).logits
        logits[keep.bool()].square().mean().backward()
        grads = [x.grad.clone() for name, x in made.named_parameters() if "kv_b_proj" in name]
        with torch.no_grad():
            text = made.generate(
                tokens, attention_mask=keep, max_new_tokens=4, do_sample=False, pad_token_id=0
            )
        results.append((logits[keep.bool()], *grads, text))
    assert len(results[0]) == 4
    for ours, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)
    made.config.index_topk = 12
    for layer in made.model.layers:
        layer.self_attn.indexer.index_topk = 12
    assert not torch.allclose(made(tokens, attention_mask=keep).logits[0], results[1][0][:12], atol=1e-3)


def test_a_mask_that_says_nothing_of_keys():
    q, at = torch.randn(1, 2, 3, 8), torch.zeros(1, 3, 1, dtype=torch.int32)
    for mask, says in ((None, "no mask"), (torch.zeros(1, 1, 3, 3), "a mask of torch.float32")):
        with pytest.raises(UnsupportedError, match=f"indices come with {says}"):
            cupy_flash.transformers.attention_forward(torch.nn.Identity(), q, q, q, mask, indices=at)

"""A layer of DeepSeek-V3 in absorbed form over a cache of latents, against transformers' eager layer."""

import os

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here needs the network
torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[transformers]'")
pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'cupy-flash[transformers]'"
)

from transformers import DynamicCache
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

import cupy_flash.torch as cf
from cupy_flash import LatentCache, Rotary
from tests.transformers.absorbed import absorbed

pytestmark = [pytest.mark.transformers, pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")]

RANK, ROPE, NOPE, VALUES, HEADS = 512, 64, 32, 48, 4  # the latent as of DeepSeek-V3; fewer heads, narrower


def layer():
    config = deepseek.DeepseekV3Config(
        hidden_size=64, num_attention_heads=HEADS, num_key_value_heads=HEADS, kv_lora_rank=RANK,
        qk_rope_head_dim=ROPE, qk_nope_head_dim=NOPE, v_head_dim=VALUES, q_lora_rank=24,
        max_position_embeddings=64, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    made = deepseek.DeepseekV3Attention(config, 0).eval()
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return made, deepseek.DeepseekV3RotaryEmbedding(config)


@torch.no_grad()
def test_absorbed_form_is_the_layer():
    """A prompt, then tokens one by one, and two drafts at once."""
    attention, rotary = layer()
    latents, cache, length = torch.zeros(2, 1, 32, RANK + ROPE), DynamicCache(), 0
    cos, sin = (x[0, :, : ROPE // 2] for x in rotary(latents, torch.arange(32)[None]))
    for tokens in (9, 1, 1, 2):
        hidden = torch.randn(2, tokens, 64)
        rotation = rotary(hidden, torch.arange(length, length + tokens)[None])
        seen = torch.ones(tokens, length + tokens, dtype=torch.bool).tril(length)
        mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None]
        expected, _ = attention(hidden, rotation, mask, past_key_values=cache)

        def attend(q, new, length=length):
            return cf.attention_with_kv_cache(
                q, LatentCache(latents, RANK), k=new, cache_seqlens=length, causal=True,
                rotary=Rotary(cos, sin, interleaved=True, last=True), scale=attention.scaling,
            )  # fmt: skip

        actual = absorbed(attention, hidden, attend)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        length += tokens

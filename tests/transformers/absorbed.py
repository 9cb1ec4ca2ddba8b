"""A layer of DeepSeek's models in absorbed form: kv_b_proj is part of q and of o, and keys are latents."""

import torch


def absorbed(attention, hidden, attend):
    """The layer's output; attend: q and the new latents, (batch, 1, tokens, features), in, O out.

    The last qk_rope_head_dim features of both are not rotated yet.
    """
    batch, tokens = hidden.shape[:2]
    rank, rope, nope = attention.kv_lora_rank, attention.qk_rope_head_dim, attention.qk_nope_head_dim
    heads, values = attention.num_heads, attention.v_head_dim
    q = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(hidden)))
    q = q.view(batch, tokens, heads, nope + rope).transpose(1, 2)
    new, k_rope = attention.kv_a_proj_with_mqa(hidden).split([rank, rope], -1)
    of_keys, of_values = attention.kv_b_proj.weight.view(heads, nope + values, rank).split([nope, values], 1)
    q = torch.cat((torch.einsum("bhtn,hnr->bhtr", q[..., :nope], of_keys), q[..., nope:]), -1)
    o = attend(q, torch.cat((attention.kv_a_layernorm(new), k_rope), -1)[:, None])
    o = torch.einsum("bhtr,hvr->bthv", o, of_values)
    return attention.o_proj(o.reshape(batch, tokens, heads * values))

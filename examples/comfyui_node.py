"""A custom node of ComfyUI: the attention of a diffusion model by this library.

Copy this file into ComfyUI's folder ``custom_nodes``. Put the node "cupy_flash attention" between the loader
of a model and its sampler. What this library refuses goes to the attention that ComfyUI would have run.
"""

import functools
import logging

import cupy_flash.torch
from cupy_flash import InvalidArgumentsError, UnsupportedError

# The keywords of ComfyUI that this node knows. Another one may change the result, so it is not ignored.
KNOWN = {"scale", "enable_gqa", "low_precision_attention", "transformer_options", "_inside_attn_wrapper"}


def attend(
    func, q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False,
    **kwargs,
):  # fmt: skip
    """What ComfyUI calls for each attention; func is its own, with the same arguments."""
    try:
        if unknown := kwargs.keys() - KNOWN:
            raise UnsupportedError(f"the arguments {sorted(unknown)} are not known.")
        rows = q, k, v  # (batch, heads, sequence, features)
        if not skip_reshape:  # (batch, sequence, heads * features)
            rows = [x.unflatten(-1, (-1, q.shape[-1] // heads)).transpose(1, 2) for x in rows]
        o = cupy_flash.torch.scaled_dot_product_attention(
            *rows,
            attn_mask=mask[:, None] if mask is not None and mask.ndim == 3 else mask,
            scale=kwargs.get("scale"),
            enable_gqa=kwargs.get("enable_gqa", False),
        )
    except (InvalidArgumentsError, UnsupportedError) as error:
        tell(str(error).splitlines()[0])
        return func(q, k, v, heads, mask, attn_precision, skip_reshape, skip_output_reshape, **kwargs)
    return o if skip_output_reshape else o.transpose(1, 2).flatten(2)


@functools.cache
def tell(reason):
    """Log each reason once."""
    logging.warning("cupy_flash leaves some attention to ComfyUI: %s", reason)


class CupyFlashAttention:
    """The node: a model in, the same model with this attention out."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "patch", "advanced/model"

    @classmethod
    def INPUT_TYPES(cls):
        """What is wired to the node."""
        return {"required": {"model": ("MODEL",)}}

    def patch(self, model):
        """Set the attention of a copy of the model."""
        model = model.clone()
        model.model_options["transformer_options"]["optimized_attention_override"] = attend
        return (model,)


NODE_CLASS_MAPPINGS = {"CupyFlashAttention": CupyFlashAttention}
NODE_DISPLAY_NAME_MAPPINGS = {"CupyFlashAttention": "cupy_flash attention"}

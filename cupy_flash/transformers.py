"""The library as an attention implementation of transformers, through its public registries.

>>> import cupy_flash.transformers
>>> from transformers import LlamaConfig, LlamaForCausalLM
>>> model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2,
...                                      num_attention_heads=4, num_key_value_heads=2, vocab_size=97))
>>> model.set_attn_implementation(cupy_flash.transformers.register())

A model makes one mask per forward pass and passes it to every layer. Ours is a full (queries, keys) mask only
where necessary; otherwise it is at most one row of keys, and the band stays an option. The mask alone decides
whether a layer is causal, because is_causal is False on many decoder layers:

====================================  ======================================================================
mask                                  what a layer does
====================================  ======================================================================
None                                  attends to every key; raises if the layer says that it is causal
uint8, (batch or 1, 1, 1, keys or 0)  causal, without the keys that are 0 (padding)
int8, (batch or 1, 1, 1, keys or 0)   the same, within the window of the layer's configuration
int32, (1, 1, 1, chunks + 1)          causal in chunks, which begin at these rows of the flattened batch
bool, float                           applies the mask and nothing else: padding of encoders, caches of
                                      fixed size, packed sequences, custom masks of a model or a user
====================================  ======================================================================

The row is empty if there is no padding. A model that computes with its mask raises an error; many models do
that to compute a part of their attention themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging
from transformers.utils.import_utils import is_torchdynamo_exporting, is_tracing

from .call.reproducible import check_reproducible
from .errors import InvalidArgumentsError, UnsupportedError
from .namespace import NAMESPACE
from .torch import attention, attention_varlen

__all__ = ["NAME", "attention_forward", "in_place_of_sdpa", "make_mask", "register"]

Tensor: TypeAlias = torch.Tensor
logger = logging.get_logger(__name__)

# "cupy_attn"; another copy of the library, such as a kernel of the hub, has another name, so that both work
# in one process. why not NAMESPACE: transformers treats a name with "flash" in it as a flash-attn package.
NAME = NAMESPACE.replace("flash", "attn")

# Arguments that models pass to attention and that do not affect it.
_OF_OTHERS = frozenset((
    "cache_position", "logits_to_keep", "num_items_in_batch", "output_attentions", "output_hidden_states",
    "output_router_logits",
    "position_embeddings", "position_ids", "return_dict", "seq_idx", "use_cache",
))  # fmt: skip


# Dtypes of our masks of causal layers: without the layer's window, with it, in chunks.
_BANDS = (torch.uint8, torch.int8, torch.int32)

# Operators that our row masks allow, and operators that our bool masks refuse because a model would use the
# values as numbers.
_VIEWS = frozenset((
    "aten::_to_copy", "aten::alias", "aten::clone", "aten::detach", "aten::expand", "aten::index_select",
    "aten::repeat", "aten::slice", "aten::view",
))  # fmt: skip
_AS_NUMBERS = frozenset((
    "aten::_to_copy", "aten::add", "aten::add_", "aten::baddbmm", "aten::eq", "aten::ge", "aten::gt",
    "aten::le", "aten::lt", "aten::ne",
))  # fmt: skip

# Arguments that continuous batching passes to a cache.
_OF_PAGES = ("block_table", "logits_indices", "logits_processor_args", "read_index", "write_index")


def register(*, reproducible: str | None = None) -> str:
    """Add the attention and its mask to the registries of transformers.

    Parameters
    ----------
    reproducible : {"run", "batch", "prefill", "device"} or None
        As in `cupy_flash.attention`, for the attention of every layer, until the next call of `register`.

    Returns
    -------
    str
        The name for ``attn_implementation=`` and ``model.set_attn_implementation``: "cupy_attn". Another copy
        of the library, such as a kernel of the Hugging Face hub, registers another name.
    """
    AttentionInterface.register(NAME, _with(reproducible, attention_forward))
    AttentionMaskInterface.register(NAME, make_mask)
    return NAME


def _with(reproducible: str | None, forward: Any) -> Any:
    """The attention function to register, bound to `reproducible` if that is given."""
    check_reproducible(reproducible, dropout=0.0, tile=None)
    return forward if reproducible is None else partial(forward, reproducible=reproducible)


@contextmanager
def in_place_of_sdpa(*, reproducible: str | None = None) -> Iterator[None]:
    """Run this library in models with "sdpa" attention inside this context, in all threads.

    For ``generate_batch`` of transformers (continuous batching), which accepts only "sdpa" and the
    flash-attn packages. transformers still makes a mask of all queries and keys of each step there, which
    this library ignores.

    Parameters
    ----------
    reproducible : {"run", "batch", "prefill", "device"} or None
        As in `register`.

    Examples
    --------
    >>> import cupy_flash.transformers
    >>> with cupy_flash.transformers.in_place_of_sdpa():
    ...     pass  # model.set_attn_implementation("sdpa"); model.generate_batch(...)
    """
    registries: tuple[tuple[Any, Any, Any], ...] = (
        (AttentionInterface, ALL_ATTENTION_FUNCTIONS, _with(reproducible, _as_sdpa)),
        (AttentionMaskInterface, ALL_MASK_ATTENTION_FUNCTIONS, make_mask),
    )
    before = [functions["sdpa"] for _, functions, _ in registries]
    for interface, _, ours in registries:
        interface.register("sdpa", ours)
    try:
        yield
    finally:
        for (interface, _, _), function in zip(registries, before, strict=True):
            interface.register("sdpa", function)


def _as_sdpa(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """`attention_forward` with the rule of "sdpa": without a mask, the layer's is_causal decides."""
    if attention_mask is None and options.get("is_causal") is None:
        options["is_causal"] = getattr(module, "is_causal", True)
    return attention_forward(module, query, key, value, attention_mask, **options)


class _Mask(torch.Tensor):
    """A mask of ours on its way to the layers, which refuses arithmetic.

    why: some models request a mask and compute all or a part of their attention themselves. They add it to
    their scores like a mask of "eager", and would attend to the future or to padding. A wrapper subclass,
    because torch.compile accepts those as inputs and outputs.
    """

    mask: Tensor
    model: str

    @staticmethod
    def __new__(cls, mask: Tensor, model: str) -> _Mask:
        wrapper: Any = torch.Tensor._make_wrapper_subclass
        made: _Mask = wrapper(
            cls, mask.shape, strides=mask.stride(), storage_offset=mask.storage_offset(), dtype=mask.dtype,
            device=mask.device,
        )  # fmt: skip
        return made

    def __init__(self, mask: Tensor, model: str) -> None:
        self.mask, self.model = mask, model

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.mask}, {self.model!r})"

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["mask"], self.model

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], model: str, *_: Any) -> _Mask:
        return _Mask(inner["mask"], model)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = (args, kwargs or {})
        ours = next(x for x in tree_leaves(given) if isinstance(x, cls))
        name = function.name().partition(".")[0]
        is_row = ours.dtype != torch.bool
        if name in _VIEWS or not (is_row or name in _AS_NUMBERS):
            args, kwargs = tree_map_only(cls, lambda x: x.mask, given)
            out = function(*args, **kwargs)
            if isinstance(out, torch.Tensor) and out.dtype == ours.dtype:
                return cls(out, ours.model)
            if not is_row and name not in _AS_NUMBERS:
                return out
        raise UnsupportedError(
            f"{ours.model} computes with its attention mask itself ({name}), and would misread ours.",
            hint='attn_implementation="eager"',
        )


def _to_layers(mask: Tensor, config: Any) -> Tensor:
    """The mask in a wrapper that has the model's name; the bare mask under torch.export."""
    if is_torchdynamo_exporting():
        return mask
    return _Mask(mask, type(config).__name__.removesuffix("Config"))


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    device: Any = "cpu",
    **rest: Any,
) -> Tensor | None:
    """The mask of a forward pass, in its most compact form: see the table of the module.

    Parameters
    ----------
    batch_size, q_length, kv_length : int
    q_offset, kv_offset : int, or Tensor with caches of fixed size
        Positions of the first query and the first key.
    mask_function, local_size, allow_is_causal_skip, allow_is_bidirectional_skip
        The pattern: if neither skip is allowed, only mask_function describes it.
    attention_mask : Tensor of bool, shape (batch, keys), optional
        False where a token is padding.
    config, device, **rest
        As transformers passes them to its own mask functions.

    Returns
    -------
    Tensor or None
    """
    chunks = getattr(config, "attention_chunk_size", None)
    # As many keys as a window are all visible to one query; those of a chunk may begin in the chunk before.
    beyond = bool(chunks) and not (isinstance(kv_offset, int) and kv_offset == 0)
    window = local_size is not None and (kv_length > local_size or beyond)
    # Chunks have a local size too, and windows of encoders are counted differently from those of decoders.
    is_band = (
        allow_is_causal_skip
        and (not window or local_size == getattr(config, "sliding_window", None))
        and not (window and chunks)
        and all(isinstance(x, int) for x in (q_offset, kv_offset))
        and q_offset + q_length == kv_offset + kv_length
    )
    if chunks and local_size == chunks and allow_is_causal_skip:
        offsets = _chunks(
            batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask, chunks, device
        )
        if offsets is not None:
            return _to_layers(offsets, config)
    if not is_band and (window or not allow_is_bidirectional_skip):
        written_out: Any = sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, local_size,
            allow_is_causal_skip=False, allow_is_bidirectional_skip=False, device=device, **rest,
        )  # fmt: skip
        return _to_layers(written_out, config)
    keys = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if keys is not None:
        keys = keys[:, kv_offset : kv_offset + kv_length]
        if not is_tracing(keys) and bool(keys.all()):
            keys = None
    if keys is None and not is_band:
        return None
    keys = torch.empty((1, 0), dtype=torch.bool, device=device) if keys is None else keys
    row = keys[:, None, None]
    if is_band:
        row = row.to(torch.int8 if window else torch.uint8)  # why no view: see attention_forward
    return _to_layers(row, config)


def _chunks(
    batch: int, q_length: int, kv_length: int, q_offset: Any, kv_offset: Any, keep: Tensor | None, chunk: int,
    device: Any,
) -> Tensor | None:  # fmt: skip
    """Offsets of the chunks of whole prompts in the flattened batch; None for a part, or padding inside.

    As in transformers, chunks begin at the first token that is not padding; the padding before is also cut
    into chunks.
    """
    from_the_start = all(isinstance(x, int) and x == 0 for x in (q_offset, kv_offset))
    if not from_the_start or q_length != kv_length or q_length <= chunk or torch.compiler.is_compiling():
        return None
    starts = [0] * batch
    if keep is not None:
        if is_tracing(keep) or keep.shape != (batch, kv_length):
            return None
        kept = keep.to("cpu", torch.int8)
        starts = (kept.cumsum(-1) == 0).sum(-1).tolist()
        # why: padding between tokens hides a key from later queries, which offsets cannot express.
        if (kept.diff(dim=-1) == 1).sum(-1).gt(kept.new_tensor(starts).gt(0)).any():
            return None
    cuts = [
        row * q_length + n
        for row, start in enumerate(starts)
        for n in (*range(0, start, chunk), *range(start, q_length, chunk))
    ]
    return torch.tensor([*cuts, batch * q_length], dtype=torch.int32, device=device)[None, None, None]


def _left(module: Any, sliding_window: int | None) -> int:
    """The number of keys before its own position that a query of a windowed layer attends to."""
    window = getattr(getattr(module, "config", None), "sliding_window", None) or sliding_window
    if window is None:
        raise UnsupportedError(
            f"{type(module).__name__} has a windowed mask and no config.sliding_window.",
            hint='attn_implementation="sdpa" for this model, or config.sliding_window set to its width',
        )
    return int(window) - 1


def _causal_without_a_mask(module: Any, query: Tensor, is_causal: bool | None) -> bool:
    """Whether a layer without a mask is causal: the argument of its call, never the attribute of the layer.

    Without a mask "eager" attends to every key, and "sdpa" reads the layer's attribute.
    """
    if is_causal is not None:
        return bool(is_causal)
    if query.shape[2] > 1 and getattr(module, "is_causal", True):
        raise UnsupportedError(
            f"{type(module).__name__} has no mask, and only its is_causal says whether it sees the future.",
            hint='is_causal=True or False in its call, an attention_mask, or attn_implementation="eager"',
        )
    return False


def _selected(mask: Tensor | None, indices: Tensor) -> Tensor:
    """The mask restricted to the indices of each query: still a mask, as layers expand all keys anyway."""
    if mask is None or mask.dtype != torch.bool:
        kind = "no mask" if mask is None else f"a mask of {mask.dtype}"
        raise UnsupportedError(
            f"indices come with {kind}.", hint='a mask of bool; or attn_implementation="eager"'
        )
    named = mask.new_zeros((*indices.shape[:-1], mask.shape[-1]))
    return mask & named.scatter(-1, indices.long(), True)[:, None]


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    cache: Any = None,
    indices: Tensor | None = None,
    reproducible: str | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer, with the signature that transformers calls.

    Parameters
    ----------
    module : Module
        Its config is read.
    query : Tensor, shape (batch, heads, seqlen_q, head_dim)
    key, value : Tensor, shape (batch, heads_k, seqlen_k, head_dim)
        Not repeated for grouped heads.
    attention_mask : Tensor, optional
        See the table of the module; of a floating dtype it is added to the scores.
    dropout : float
        With a seed from torch's CPU generator.
    scaling, softcap : float, optional
    is_causal : bool, optional
        Only read without a mask: a mask decides whether the layer is causal.
    sliding_window : int, optional
        Keys that a query attends to, its own included, if the configuration does not set it.
    s_aux : Tensor, shape (heads,), optional
        Sinks.
    position_bias : Tensor, optional
        Added to the scores.
    cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k : optional
        Packed sequences in a batch of one, unless a mask already describes them.
    cache : PagedAttentionCache, optional
        The cache of continuous batching: stores key and value, and returns those of each sequence, packed.
    indices : Tensor of int, shape (batch, seqlen_q, keys), optional
        The keys that each query selects, among those that a bool mask keeps.
    reproducible : {"run", "batch", "prefill", "device"} or None
        See `register`.
    **others
        Arguments for other parts of a model; anything else raises.

    Returns
    -------
    Tensor, shape (batch, seqlen_q, heads, head_dim)
    None
        Instead of the weights, which are never stored; as with "sdpa", ``output_attentions=True`` warns
        once.

    Raises
    ------
    UnsupportedError
        An argument that changes attention and is not supported; a layer without a mask whose is_causal is
        True or missing, if the call does not pass is_causal.
    """
    if hasattr(cache, "update"):
        lengths = {"cu_seq_lens_k": cu_seq_lens_k, "max_length_k": max_length_k}
        paged = {**lengths, **{name: others.pop(name, None) for name in _OF_PAGES}}
        if paged["block_table"] is not None or cu_seq_lens_q is None:
            raise UnsupportedError(
                f"{NAME} takes a cache of pages by its indices, and packed.", hint="use_block_table=False"
            )
        key, value = cache.update(
            key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=paged
        )
        cu_seq_lens_k, max_length_k = paged["cu_seq_lens_k"], paged["max_length_k"]
        cu_seq_lens_q, cache = cu_seq_lens_q.to(torch.int32), None
        # why a new mask: the offsets and the layer's window already describe what transformers' mask has.
        said = torch.uint8 if sliding_window is None else torch.int8
        attention_mask = _Mask(torch.empty((1, 1, 1, 0), dtype=said, device=query.device), NAME)
    for name, value_given in {"cache": cache, **others}.items():
        if name not in _OF_OTHERS and value_given is not None and value_given is not False:
            raise UnsupportedError(
                f"{NAME} does not take {name} (from {type(module).__name__}).",
                hint=f'{name}=None, or attn_implementation="eager"',
            )
    if others.get("output_attentions"):
        logger.warning_once(
            f"`{NAME}` attention does not support `output_attentions=True`: weights are never stored. "
            "Set the attention to `eager` to get them."
        )
    mask: Any = attention_mask
    ours = isinstance(mask, _Mask) or (mask is not None and is_torchdynamo_exporting())
    mask = mask.mask if isinstance(mask, _Mask) else mask
    mask = mask if indices is None else _selected(mask, indices)
    band = mask.dtype if ours and mask.dtype in _BANDS else None
    options: dict[str, Any] = {
        "causal": _causal_without_a_mask(module, query, is_causal) if mask is None else band is not None,
        "window": (_left(module, sliding_window), None) if band == torch.int8 else None,
        "align": "bottom_right",
        "scale": scaling,
        "softcap": softcap,
        "sinks": None if s_aux is None else s_aux.to(torch.promote_types(s_aux.dtype, torch.float32)),
        "dropout": dropout,
        "reproducible": reproducible,
    }
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if band == torch.int32 and position_bias is None:
        cuts, chunk = mask.flatten(), module.config.attention_chunk_size
        options |= {"max_seqlen_q": chunk, "max_seqlen_k": chunk}
        out = attention_varlen(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cuts, cuts, **options)
        return out.unflatten(0, q.shape[:2]), None
    by_options = mask is None or band is not None
    if band in (torch.uint8, torch.int8):
        # why: ONNX has no view of another dtype, and elsewhere a copy in every layer would take a kernel.
        keys = mask.to(torch.bool) if is_torchdynamo_exporting() else mask.view(torch.bool)
        mask = keys if mask.shape[-1] else None
    if by_options and cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        if mask is not None or position_bias is not None or q.shape[0] != 1:
            raise InvalidArgumentsError(
                "cu_seq_lens_q together with padding, position_bias or several rows of a batch.",
                hint="cu_seq_lens_q=None, or all sequences in one row",
            )
        out = attention_varlen(
            q[0], k[0], v[0], cu_seq_lens_q, cu_seq_lens_k, max_seqlen_q=max_length_q,
            max_seqlen_k=max_length_k, **options,
        )  # fmt: skip
        return out[None], None
    bias = position_bias
    if mask is not None and mask.dtype.is_floating_point:
        bias, mask = mask if bias is None else bias + mask, None
    elif mask is not None and mask.dtype != torch.bool:
        raise UnsupportedError(f"attention_mask has dtype {mask.dtype}.", hint="bool, or float to be added")
    return attention(q, k, v, mask=mask, bias=bias, layout="bshd", **options), None

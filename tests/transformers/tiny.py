"""Models of transformers with every size made small, and what they compute at each position."""

import inspect
import re
from pathlib import Path

import torch
import transformers
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name

LAYERS, WIDTH, VOCABULARY, LENGTH, PREFIX = 2, 32, 99, 11, 8
# More parameters than this are a size that has a name of its own.
MOST = 20_000_000

GENERATORS = (
    "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ",
    "TEXT_RECOGNITION", "TEXT_TO_SPECTROGRAM", "TEXT_TO_WAVEFORM", "CAUSAL_IMAGE_MODELING",
    "TIME_SERIES_PREDICTION",
)  # fmt: skip
HEADS = r"((.*_)?(num_)?(attention|attn)_heads|n_heads?|(.*_)?num_heads)(_per_layer)?"
GROUPS = r"(.*_)?((num_)?(key_value|kv)_(heads?|groups)|n_head_kv|num_attention_groups|multi_query_group_num)"
WIDTHS = (
    "hidden_size|d_model|n_embd|embed_dim|embedding_size|dim|d_embed|embedding_dim|hidden_dim|projection_dim"
    "|emb_dim|model_dim|embed_proj_dim"
)
SIZES = {
    r"(.*_)?vocab_size(_per_layer_input)?|num_embeddings": VOCABULARY,
    r"(.*_)?(head_dim|dim_per_head|d_kv|kv_channels|attention_head_size)|rotary_dim": 8,
    r"qk_rope_head_dim": 4,
    r"(.*_)?(intermediate_(size|dim)|ffn_dim|d_ff|n_inner|ffn_hidden_size|mlp_dim|d_inner)(_mlp)?": 48,
    rf"(.*_)?({WIDTHS})": WIDTH,
    r"(.*_)?(num_)?(hidden_)?layers|(.*_)?n_layers?|.*depth|num_blocks": LAYERS,
    r"max_position_embeddings|n_positions|n_ctx|max_(source|target)_positions|max_seq_len|seq_length": 128,
    r"(num|n)_(local_|routed_)?experts|moe_num_experts": 4,
    r"(num_)?experts_per_tok(en)?|top_k_experts|moe_k|moe_topk|num_selected_experts|moe_top_k": 2,
    r"n_group|topk_group|num_expert_group|n_groups": 1,
    r"(.*_)?lora_rank": 16,
    r"sliding_window|attention_chunk_size|window_size|block_size": 4,
    r"index_topk": 3,
    r"attn_layer_period": 2,
    r"attn_layer_offset": 1,
    r"mamba_d_head": 16,
    r".*(dropout|drop_path_rate|layerdrop|_pdrop|_drop)(_rate|_prob)?": 0,
}  # fmt: skip
# What has no size of its own, and needs one.
NEEDED = r"head_dim|n_routed_experts|num_experts_per_tok|n_group|topk_group"
COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")


def shrunk(sizes):
    """The dictionary of a configuration with every size that has a known name made small."""
    depth = next((sizes[name] for name in COUNTS if isinstance(sizes.get(name), int)), -1)
    heads = next((x for name, x in sizes.items() if re.fullmatch(HEADS, name) and isinstance(x, int)), 0)
    return {name: _shrunk_value(name, value, depth, heads) for name, value in sizes.items()}


def _shrunk_value(name, value, depth, heads):
    if isinstance(value, dict):
        if name == "per_layer_config":
            return {n: shrunk(x) if isinstance(x, dict) else x for n, x in value.items() if int(n) < LAYERS}
        if "rope" in name:
            return _shrunk_rotation(value)
        return shrunk(value) if "model_type" in value or name.endswith("_config") else value
    if isinstance(value, (list, tuple)):
        if name.endswith("token_id"):
            return value[0] % VOCABULARY
        if LAYERS < len(value) == depth:  # one entry for each layer: two layers of different kinds
            kinds = list({str(x): x for x in reversed(value)}.values())
            return [min(x, 48) if type(x) is int else x for x in (kinds + list(value))[:LAYERS]]
        return value
    if value is None and re.fullmatch(NEEDED, name):
        value = 8
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        return value
    if re.fullmatch(GROUPS, name):
        return 4 if value == heads else min(value, 2)
    if re.fullmatch(HEADS, name):
        return min(value, 4)
    if name.endswith("token_id"):
        return value % VOCABULARY
    size = next((size for pattern, size in SIZES.items() if re.fullmatch(pattern, name)), value)
    return type(value)(min(value, size))


def _shrunk_rotation(value):
    """Rotation whose pairs of numbers are split between three axes of positions, where a model does that."""
    nested = {name: _shrunk_rotation(x) if isinstance(x, dict) else x for name, x in value.items()}
    pairs = int(4 * value.get("partial_rotary_factor", 1))
    return nested | {"mrope_section": [pairs - pairs // 2, pairs // 4, pairs // 2 - pairs // 4]}


def model_names(kind):
    """Classes of a type of model, those that generate after those that do not."""
    heads = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").get(kind) for task in GENERATORS]
    names = [modeling_auto.MODEL_MAPPING_NAMES.get(kind), *heads]
    flat = [x for name in names for x in ([name] if isinstance(name, str) else name or [])]
    return list(dict.fromkeys(flat)), any(heads)


def kinds_of_models():
    """Types of models: those that generate, or whose file asks for a causal mask, and all others."""
    found, others = [], []
    for kind in CONFIG_MAPPING:
        names, generates = model_names(kind)
        folder = Path(transformers.__file__).parent / "models" / model_type_to_module_name(kind)
        asks = r"create_\w*causal_mask|create_masks_for_generate"
        if names and (generates or any(re.search(asks, f.read_text()) for f in folder.glob("modeling_*.py"))):
            found.append(kind)
        elif names:
            others.append(kind)
    return found, others


def tiny_config(kind):
    cls = CONFIG_MAPPING[kind]
    # Models of series ask for how far they look ahead.
    horizon = {"prediction_length": 24} if "prediction_length" in inspect.signature(cls).parameters else {}
    sizes = shrunk(cls(**horizon).to_dict())
    if kind in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not sizes.get("is_encoder_decoder"):
        sizes |= {"is_decoder": True} if "is_decoder" in sizes else {}
    return cls.from_dict(sizes)


def tiny_models(kind, reasons):
    """Models of a type, built with eager attention; reasons gets why one could not be."""
    try:
        config = tiny_config(kind)
    except Exception as error:  # whatever a model's own checks raise
        reasons.append(f"{type(error).__name__}: {error}")
        return
    for name in model_names(kind)[0]:
        try:
            cls = getattr(transformers, name)
            with torch.device("meta"):
                size = sum(p.numel() for p in cls._from_config(config).parameters())
            if size > MOST:
                reasons.append(f"{name} has {size / 1e6:.0f} million parameters")
                continue
            torch.manual_seed(0)
            model = cls._from_config(config, attn_implementation="eager").eval().float()
        except Exception as error:
            reasons.append(f"{name}: {type(error).__name__}: {error}")
            continue
        for parameter in model.parameters():  # spread the scores, so that a wrong mask shows
            parameter.data.mul_(3 if parameter.dim() > 1 else 1)
        yield model


def ways_to_call(model):
    """Functions of (tokens, which of them are no padding) that run a model or a part of it, by name."""
    seeded = torch.Generator().manual_seed(6)
    config = model.config
    width = getattr(config, "hidden_size", None) or getattr(config, "d_model", None) or WIDTH
    encoded = torch.randn(2, 7, width, generator=seeded)
    first = tokens()

    def padded(keep, *names):
        return {} if keep is None else dict.fromkeys(names, keep)

    names = inspect.signature(model.forward).parameters
    if {"decoder_input_ids", "encoder_outputs"} <= set(names):
        if "input_ids" in names:
            yield (
                "whole",
                lambda ids, keep: model(
                    input_ids=first,
                    decoder_input_ids=ids,
                    **padded(keep, "attention_mask", "decoder_attention_mask"),
                ),
            )
        yield (
            "after its encoder",
            lambda ids, keep: model(
                encoder_outputs=BaseModelOutput(last_hidden_state=encoded),
                decoder_input_ids=ids,
                **padded(keep, "decoder_attention_mask"),
            ),
        )
    elif "input_ids" in names:
        yield "whole", lambda ids, keep: model(input_ids=ids, **padded(keep, "attention_mask"))
    for name, part in model.named_modules():
        if part is model or not isinstance(part, transformers.PreTrainedModel):
            continue
        names = set(inspect.signature(part.forward).parameters)
        if not {"attention_mask"} < names:
            continue
        for across in ({"encoder_hidden_states": encoded}, {}):
            if across.keys() <= names and "input_ids" in names:
                yield (
                    name,
                    lambda ids, keep, part=part, across=across: part(
                        input_ids=ids, **across, **padded(keep, "attention_mask")
                    ),
                )
            if across.keys() <= names and "inputs_embeds" in names and "decoder" in name:
                table = torch.randn(
                    VOCABULARY, getattr(config, "feature_size", width), generator=seeded.manual_seed(7)
                )
                yield (
                    name,
                    lambda ids, keep, part=part, across=across, table=table: part(
                        inputs_embeds=table[ids], **across, **padded(keep, "attention_mask")
                    ),
                )


def tokens():
    return torch.randint(4, 60, (2, LENGTH), generator=torch.Generator().manual_seed(5))


def per_position(out):
    """What a model says of each position."""
    values = [getattr(out, name, None) for name in ("logits", "last_hidden_state")]
    values += list(out.values()) if hasattr(out, "values") else list(out)
    return next(x for x in values if torch.is_tensor(x) and x.dim() >= 3 and x.shape[1] >= LENGTH)


@torch.no_grad()
def run(call):
    """(tokens as they are, with the last ones changed, with some left out) -> what each position gets."""
    changed, keep = tokens(), torch.ones(2, LENGTH, dtype=torch.long)
    changed[:, PREFIX:] = (changed[:, PREFIX:] + 7) % 50 + 4
    keep[1, PREFIX:] = 0
    return (
        per_position(call(tokens(), None)),
        per_position(call(changed, None)),
        per_position(call(tokens(), keep))[:, :LENGTH][keep.bool()],
    )


def use(model, name):
    """Set the attention of a model and of its parts without the checks of `set_attn_implementation`."""
    for part in model.modules():
        if isinstance(part, transformers.PreTrainedModel):
            part.config._attn_implementation = name

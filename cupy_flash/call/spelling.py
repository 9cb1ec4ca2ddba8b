"""What a caller calls an array that everything below a call has another name for; for messages only."""

from __future__ import annotations

from typing import Any

__all__ = ["SPELLED", "kind_of", "spelled"]

# Parts of compound options, by the names that `compound` gives them: a field of what the caller made.
SPELLED = {
    "mask_starts": "mask.bits",
    "ragged_mask": "mask.bits",
    "spans": "mask.bounds",
    "blocks": "mask.table",
    "block_bits": "mask.bits",
    "rotary_cos": "rotary.cos",
    "rotary_sin": "rotary.sin",
    "rotary_seqlens": "rotary.seqlens",
    "rotary_interleaved": "rotary.interleaved",
    "rotate_cache": "rotary.on_read",
    "rotary_last": "rotary.last",
    "prefix_k": "prefix[0]",
    "prefix_v": "prefix[1]",
    "cache_batch_idx": "block_table",
    "q_scale": "q.scale",
    **{f"{x}_{part}": f"{x}_cache.{part}" for x in "kv" for part in ("scale", "zero", "block_scale")},
    **{name: f"tuning.{name}" for name in ("tile", "splits", "workspace", "check")},
}


def spelled(name: str) -> str:
    """How a caller writes the array or option that goes by this name below a call."""
    if name.startswith("bound["):  # of what f(array, ...) made
        return name.replace("bound", "arguments")
    return SPELLED.get(name, name)


def kind_of(x: Any) -> str:
    """What something is that is no array, in English."""
    if x is None:
        return "None"
    name = type(x).__name__
    vowel = name[0].lower() in "aeiou" or name == "ndarray"
    return f"{'an' if vowel else 'a'} {name}"

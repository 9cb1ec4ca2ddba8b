"""Public names of the arrays and options that internal code names differently; for messages only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["PUBLIC_NAMES", "public_name", "renamed", "type_phrase"]

# Internal names of parts of compound options -> how a caller writes them.
PUBLIC_NAMES = {
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

# Names that are also English words: `renamed` changes them only before "=", and at the start of a message.
_ENGLISH = ("bias", "causal", "dropout", "mask", "scale", "window")


def public_name(name: str) -> str:
    """How a caller writes the array or option with this internal name."""
    if name.startswith("bound["):  # arrays bound by f(array, ...)
        return name.replace("bound", "arguments")
    return PUBLIC_NAMES.get(name, name)


def type_phrase(x: Any) -> str:
    """The type of an object in English, with an article."""
    if x is None:
        return "None"
    name = type(x).__name__
    if name in ("Array", "Tensor"):  # why: of which library, where "an Array, not an array" says nothing
        name = f"{type(x).__module__.partition('.')[0]} {name}"
    vowel = name[0].lower() in "aeiou" or name == "ndarray"
    return f"{'an' if vowel else 'a'} {name}"


def renamed(text: str, names: Mapping[str, str]) -> str:
    """A message with our names replaced by those of another library; `names` are theirs, by ours."""
    for ours, theirs in names.items():
        if ours in _ENGLISH:
            text = re.sub(rf"(?<![\w.]){ours}(?==)|^{ours}(?= is | has | of |'s )", theirs, text)
        else:
            text = re.sub(rf"(?<![\w.]){re.escape(ours)}(?!\w)", theirs, text)
    return text

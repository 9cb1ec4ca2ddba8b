"""Translate option names in our error messages to those of flash-attn, which the caller used."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..call.public_names import renamed
from ..call.signature import TranslateError

__all__ = ["FLASH_ATTN_2", "FLASH_ATTN_3", "errors_in_names_of"]

FLASH_ATTN_2 = {
    "rotary.cos": "rotary_cos",
    "rotary.sin": "rotary_sin",
    "rotary.interleaved": "rotary_interleaved",
    "rotary.seqlens": "cache_seqlens",  # the first rotated position
    "tuning.splits": "num_splits",
    "dropout": "dropout_p",
    "scale": "softmax_scale",
    "window": "window_size",
}
FLASH_ATTN_3 = {
    **FLASH_ATTN_2,
    "rotary.seqlens": "rotary_seqlens",
    "block_table": "page_table",
    **{f"{x}.scale": f"{x}_descale" for x in "qkv"},
    **{f"{x}_cache.scale": f"{x}_descale" for x in "kv"},
}
# A hint with an option that flash-attn does not have.
_LAYOUT = re.compile(r'; or layout="\w+", if these arrays are \([^)]*\)')


def errors_in_names_of(names: Mapping[str, str]) -> TranslateError:
    """Return a function that translates errors to the caller's parameter names, for `signature.takes`.

    Parameters
    ----------
    names : mapping of str to str
        Their names by ours.
    """

    def translate_error(
        error: Exception, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if torch.compiler.is_compiling():  # torch.compile shows the original text anyway
            return
        given = inspect.signature(function).bind_partial(*args, **kwargs).arguments
        slots = {"block_table": "cache_batch_idx"} if _by_slots(given) else {}
        over_cache = "return_softmax_lse" in inspect.signature(function).parameters
        flag = {"return_lse": "return_softmax_lse" if over_cache else "return_attn_probs"}
        error.args = (renamed(_LAYOUT.sub("", str(error)), {**names, **slots, **flag}),)

    return translate_error


def _by_slots(given: Mapping[str, object]) -> bool:
    """Whether the caller gave cache_batch_idx, which we pass on as block_table."""
    tables = given.get("block_table"), given.get("page_table")
    return given.get("cache_batch_idx") is not None and tables == (None, None)

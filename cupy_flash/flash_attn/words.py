"""Translate option names in our error messages to those of flash-attn, which the caller used."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..call.signature import Retell
from ..call.spelling import renamed

__all__ = ["OF_2", "OF_3", "by_their_names"]

OF_2 = {
    "rotary.cos": "rotary_cos",
    "rotary.sin": "rotary_sin",
    "rotary.interleaved": "rotary_interleaved",
    "rotary.seqlens": "cache_seqlens",  # the first rotated position
    "tuning.splits": "num_splits",
    "dropout": "dropout_p",
    "scale": "softmax_scale",
    "window": "window_size",
}
OF_3 = {
    **OF_2,
    "rotary.seqlens": "rotary_seqlens",
    "block_table": "page_table",
    **{f"{x}.scale": f"{x}_descale" for x in "qkv"},
    **{f"{x}_cache.scale": f"{x}_descale" for x in "kv"},
}
# A hint with an option that flash-attn does not have.
_LAYOUT = re.compile(r'; or layout="\w+", if these arrays are \([^)]*\)')


def _said(text: str, words: Mapping[str, str]) -> str:
    text = _LAYOUT.sub("", text)
    return renamed(text, words)


def by_their_names(words: Mapping[str, str]) -> Retell:
    """Return a function that translates errors to the caller's parameter names, for `signature.takes`.

    Parameters
    ----------
    words : mapping of str to str
        Their names by ours.
    """

    def retell(
        error: Exception, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if torch.compiler.is_compiling():  # torch.compile shows the original text anyway
            return
        given = inspect.signature(function).bind_partial(*args, **kwargs).arguments
        slots = {"block_table": "cache_batch_idx"} if _by_slots(given) else {}
        error.args = (_said(str(error), {**words, **slots}),)

    return retell


def _by_slots(given: Mapping[str, object]) -> bool:
    """Whether the caller gave cache_batch_idx, which we pass on as block_table."""
    tables = given.get("block_table"), given.get("page_table")
    return given.get("cache_batch_idx") is not None and tables == (None, None)

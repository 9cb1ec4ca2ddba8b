"""Signatures of public functions: the type of arrays, and the decorator that adds options."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from textwrap import TextWrapper, wrap
from typing import Any, ParamSpec, Protocol, TypeVar

from ..errors import InvalidArgumentsError, UnsupportedError
from ..namespace import PACKAGE
from .options import WITH_GRADIENT, DenseOptions, Option, declared, types

__all__ = ["INSTEAD", "AnyArray", "Array", "TranslateError", "documented", "takes"]

P = ParamSpec("P")
R = TypeVar("R")


class AnyArray(Protocol):
    """Attributes that arrays of every library have, and lists and numbers do not."""

    @property
    def shape(self) -> Any:
        """Sizes of the axes."""

    @property
    def ndim(self) -> int:
        """Number of axes."""

    @property
    def dtype(self) -> Any:
        """Type of the elements."""


# The result has the type of q: a NumPy array, a torch tensor, a JAX array ...
Array = TypeVar("Array", bound=AnyArray)

# Names of options in other libraries -> our name.
_SYNONYMS = {
    "softmax_scale": "scale", "sm_scale": "scale", "is_causal": "causal", "attn_mask": "mask",
    "attn_bias": "bias", "dropout_p": "dropout", "dropout_rate": "dropout", "p": "dropout",
    "window_size": "window", "local_window_size": "window", "sliding_window": "window",
    "logits_soft_cap": "softcap", "learnable_sink": "sinks", "s_aux": "sinks",
    "return_softmax_lse": "return_lse", "return_residual": "return_lse", "tensor_layout": "layout",
    "score_mod": "score", "mask_mod": "mask", "block_mask": "mask", "attention_mask": "mask",
    "return_attn_probs": "return_lse", "alibi": "alibi_slopes",
}  # fmt: skip


# Options that this library writes otherwise, or infers -> what to write instead.
_SCALES = (
    "k_cache=cupy_flash.QuantizedCache(codes, scale, zero, block_scale)"
    "; of attention k=cupy_flash.QuantizedArray(codes, scale)"
)
INSTEAD = {
    "enable_gqa": "the call without it: k and v may have fewer heads than q",
    # why not "mask=...": in torch it is True where a key is hidden
    "key_padding_mask": "mask=~padding[:, None, None, :], where padding is True for keys to leave out",
    "spans": "mask=cupy_flash.Spans(bounds), or a function of cupy_flash.spans",
    "blocks": "mask=, which takes a BlockMask",
    "deterministic": 'reproducible="run"',
    "progress": "with cupy_flash.progress(): ...",
    "q_scale": "q=cupy_flash.QuantizedArray(codes, scale), and k and v alike",
    **dict.fromkeys(("k_scale", "v_scale", "k_zero", "v_zero", "k_block_scale", "v_block_scale"), _SCALES),
    **dict.fromkeys(("rotary_cos", "rotary_sin"), "rotary=cupy_flash.Rotary(cos, sin)"),
    "rotary_seqlens": "rotary=cupy_flash.Rotary(cos, sin, seqlens)",
    "rotary_interleaved": "rotary=cupy_flash.Rotary(cos, sin, interleaved=True)",
    **dict.fromkeys(("prefix_k", "prefix_v"), "prefix=(keys, values)"),
    "cache_batch_idx": "block_table=, which takes slots of shape (batch,) too",
    **{name: f"tuning=cupy_flash.Tuning({name}=...)" for name in ("tile", "splits", "workspace", "check")},
}


# Rewrites the message of an error; gets the error, the function, and the arguments of the call.
TranslateError = Callable[[Exception, Callable[..., Any], tuple[Any, ...], dict[str, Any]], None]


def takes(
    options: Any = None, translate_error: TranslateError | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function take the options of a class in `call.options`, and refuse unknown names with a hint.

    Parameters
    ----------
    options : class, optional
        The function receives those that were given as ``**options``. They are added to its signature, and to
        its docstring in place of ``{options}``, a row per option, or of ``{options: As in ...}``, one row for
        all; options that the docstring describes itself are left out. ``{shared: ...}`` is the place for rows
        of options that `attention` has too, and ``{tangents: ...}`` for those of tangents.
    translate_error : callable, optional
        Rewrites the message of an error, for functions whose options have other names than ours.
    """
    every: dict[str, Option] = declared(options) if options else {}

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        kept = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        # Keyword-only arguments of the function itself, such as return_lse, come last.
        first = [p for p in kept if p.kind is not p.KEYWORD_ONLY or p.default is p.empty]
        last = [p for p in kept if p not in first]
        names = [*(p.name for p in first), *every, *(p.name for p in last)]
        known = frozenset(names)
        optional = [*every, *(p.name for p in kept if p.default is not p.empty)]
        called = function.__qualname__.removesuffix(".__init__")

        def unknown(name: str) -> InvalidArgumentsError:
            hint = _suggestion(name, called, optional)
            return InvalidArgumentsError(f"{called}() has no option {name!r}.", hint=hint)

        by_position = [p.name for p in first if p.kind is not p.KEYWORD_ONLY]
        by_name = names[len(by_position) :]

        def misplaced(x: Any) -> TypeError:
            unlikely = {name for name, option in every.items() if option.array is not hasattr(x, "shape")}
            likely = [f"{name}=..." for name in by_name if name not in unlikely] or by_name
            return TypeError(
                f"{called}() takes only {', '.join(by_position)} by position: options are keyword-only.\n"
                f"Try: {', '.join(likely)}"
            )

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in known:
                    raise unknown(name)
            # why not count before the call: from Python 3.11 on a try block takes no time, and counting does
            try:
                return function(*args, **kwargs)
            except TypeError:
                if by_name and len(args) > len(by_position):
                    raise misplaced(args[len(by_position)]) from None
                raise
            except (InvalidArgumentsError, UnsupportedError) as error:
                if translate_error is not None:
                    translate_error(error, function, args, kwargs)
                raise

        if every:
            kinds = types(options)
            added = [
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=x.default, annotation=kinds[name]
                )
                for name, x in every.items()
            ]
            call.__signature__ = signature.replace(parameters=[*first, *added, *last])  # type: ignore[attr-defined]
            own = {name: hint for name, hint in function.__annotations__.items() if name != "options"}
            call.__annotations__ = {**own, **kinds}
            call.__doc__ = documented(function.__doc__, every)
        return call

    return decorate


def _suggestion(name: str, called: str, names: list[str]) -> str:
    """The hint for an unknown name: the option that it probably means."""
    if name in INSTEAD:
        return INSTEAD[name]
    import difflib  # why here: it takes 6 ms to import, and only errors need it

    # why 0.75: with difflib's default of 0.6, "out" matches "layout"
    near = difflib.get_close_matches(name, names, 1, 0.75)
    ours = _SYNONYMS.get(name, near[0] if near else "")
    if ours in names:
        return f"{ours}=..."
    eager = getattr(sys.modules[PACKAGE], called, None)
    if eager is not None and name in inspect.signature(eager).parameters:
        return f"cupy_flash.{called}(..., {name}=...), which records no gradients"
    return "one of " + ", ".join(names)


# why: torch.compile then calls the function instead of tracing into difflib.
_suggestion._dynamo_marked_constant = True  # type: ignore[attr-defined]

_PLACE = re.compile(r"^\{(options|shared|tangents)(?:: (.+?))?\}$", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^(\w+(?:, \w+)*)(?: : .*)?$", re.MULTILINE)


def documented(doc: str | None, options: dict[str, Option]) -> str | None:
    """A docstring with its placeholders replaced by rows of options."""
    if doc is None:
        return None
    doc = inspect.cleandoc(doc)  # as Python 3.13 and newer have it from the start
    described = {name for row in _ROW.findall(doc) for name in row.split(", ")}
    left = {name: option for name, option in options.items() if name not in described}
    for place in sorted(_PLACE.finditer(doc), key=lambda place: place[1] == "options"):
        of_attention = declared(DenseOptions)
        names = {
            "options": list(left),
            "shared": [name for name, option in left.items() if of_attention.get(name) is option],
            "tangents": [name for name in left if name[0] == "d" and name[1:] in WITH_GRADIENT],
        }[place[1]]
        doc = doc.replace(place[0], _rows({name: left.pop(name) for name in names}, place[2]))
    return doc


def _rows(options: dict[str, Option], text: str | None) -> str:
    """Docstring rows of options: one row each, or rows of many names with one text."""
    if text:
        # why several rows: numpydoc needs the names of a row on one line
        text = " ".join(text.split())
        rows = [(names.rstrip(","), text) for names in wrap(", ".join(options), 106)]
    else:
        rows = [(f"{name} : {x.kind}", x.text) for name, x in options.items()]
    wrapped = TextWrapper(106, initial_indent=" " * 4, subsequent_indent=" " * 4, break_on_hyphens=False)
    return "\n".join(f"{head}\n{wrapped.fill(text)}" for head, text in rows)

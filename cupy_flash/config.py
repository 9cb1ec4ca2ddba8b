"""`AttentionConfig`, options of attention as a value, and `FlashAttention`, a callable that holds one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, ParamSpec, TypeVar, overload

from . import api
from .call.adopt import adopt
from .call.opaque import opaque
from .call.options import ConfigOptions, declared
from .call.public_names import type_phrase
from .call.signature import Array, documented, takes
from .errors import InvalidArgumentsError

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .api import Gradients

__all__ = ["AttentionConfig", "FlashAttention", "causal_config", "default_config"]

P = ParamSpec("P")
T = TypeVar("T")


def _with_options(config: type[T]) -> type[T]:
    """Make a class a frozen dataclass whose fields are head_dim and `ConfigOptions`.

    Its constructor names missing and unknown arguments, with a hint, which Python's TypeError lacks.
    """
    every = declared(ConfigOptions)
    options: list[tuple[str, Any, Any]] = [
        (name, Any, dataclasses.field(default=x.default)) for name, x in every.items()
    ]
    namespace: Any = {"__doc__": documented(config.__doc__, every), "__module__": config.__module__}
    made: Any = dataclasses.make_dataclass(
        config.__name__, [("head_dim", int), *options], bases=(config,), namespace=namespace, frozen=True
    )
    init = takes()(made.__init__)

    @functools.wraps(init)
    def checked(self: T, *args: Any, **given: Any) -> None:
        if not args and "head_dim" not in given:
            raise InvalidArgumentsError(
                f"{made.__name__}() is given no head_dim, the features per head of q and k.",
                hint=f"{made.__name__}({_as_keywords({'head_dim': 64, **given})})",
            )
        init(self, *args, **given)

    made.__init__ = checked
    return made  # type: ignore[no-any-return]


def _as_keywords(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in fields.items())


@_with_options
class AttentionConfig:
    """Options that stay the same from call to call. Fields are options of `attention`.

    Attributes
    ----------
    head_dim : int
        Features per head of q and k; calls with another are refused.
    {options: As in `attention`.}
    """

    if TYPE_CHECKING:  # added by the decorator
        head_dim: int
        __dataclass_fields__: ClassVar[dict[str, Any]]

        def __init__(self, head_dim: int, **options: Unpack[ConfigOptions]) -> None:
            """Set the fields by name."""

        def __getattr__(self, name: str) -> Any:
            """The value of an option."""

    def __post_init__(self) -> None:
        if isinstance(self.head_dim, bool) or not isinstance(self.head_dim, int) or self.head_dim < 1:
            raise InvalidArgumentsError(f"head_dim is {self.head_dim!r}.", hint="an integer of at least 1")

    @property
    def softmax_scale(self) -> Any:
        """The factor on q k^T: ``scale``, also as an array, or head_dim ** -0.5."""
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        return scale if getattr(scale, "shape", ()) else float(scale)

    def with_causal(self, causal: bool = True) -> AttentionConfig:
        """The same configuration, causal or not."""
        return dataclasses.replace(self, causal=causal)

    def with_dropout(self, dropout: float) -> AttentionConfig:
        """The same configuration with this probability of dropping an attention weight."""
        return dataclasses.replace(self, dropout=dropout)

    def options(self) -> dict[str, Any]:
        """The configuration as keyword arguments of `attention`."""
        # why not dataclasses.asdict: it copies arrays, whose gradients would then be those of the copy
        return {name: getattr(self, name) for name in declared(ConfigOptions)}


def default_config(head_dim: int) -> AttentionConfig:
    """Full attention, scale head_dim ** -0.5, no dropout."""
    return AttentionConfig(head_dim)


def causal_config(head_dim: int) -> AttentionConfig:
    """Causal attention, otherwise `default_config`."""
    return AttentionConfig(head_dim, causal=True)


def takes_a_config(init: Callable[P, None]) -> Callable[P, None]:
    """Make the constructor of FlashAttention refuse anything but one `AttentionConfig`."""

    @functools.wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        given = [*args[1:], *kwargs.values()]
        foreign = [name for name in kwargs if name != "config"]
        if not foreign and len(given) == 1 and isinstance(given[0], AttentionConfig):
            return init(*args, **kwargs)
        if foreign:
            headline = f"FlashAttention() has no option {foreign[0]!r}: it takes a configuration."
        elif len(given) != 1:
            headline = f"FlashAttention() takes one configuration, {len(given)} were given."
        else:
            headline = f"config is {type_phrase(given[0])}, not an AttentionConfig."
        fields = {name: kwargs[name] for name in foreign if name in ("head_dim", *declared(ConfigOptions))}
        keywords = _as_keywords({"head_dim": 64, **fields})
        raise InvalidArgumentsError(headline, hint=f"FlashAttention(AttentionConfig({keywords}))")

    return checked


class FlashAttention:
    """Attention under one configuration.

    Parameters
    ----------
    config : AttentionConfig

    Examples
    --------
    >>> import numpy as np, cupy_flash
    >>> flash = cupy_flash.FlashAttention(cupy_flash.causal_config(64))
    >>> q = k = v = np.ones((1, 2, 16, 64), np.float32)
    >>> flash(q, k, v).shape
    (1, 2, 16, 64)
    """

    @takes_a_config
    def __init__(self, config: AttentionConfig) -> None:
        self.config = config

    @overload
    def __call__(
        self, q: Array, k: Array, v: Array, *, return_lse: Literal[False] = False, **arrays_and_flags: Any
    ) -> Array: ...
    @overload
    def __call__(
        self, q: Array, k: Array, v: Array, *, return_lse: Literal[True], **arrays_and_flags: Any
    ) -> tuple[Array, Any]: ...
    @overload
    def __call__(
        self, q: Array, k: Array, v: Array, *, return_lse: bool, **arrays_and_flags: Any
    ) -> Array | tuple[Array, Any]: ...
    @opaque
    def __call__(self, q: Array, k: Array, v: Array, **arrays_and_flags: Any) -> Any:
        """`attention` with the configuration's options.

        Parameters
        ----------
        q, k, v : array
            As in `attention`.
        **arrays_and_flags
            The options of `attention` that the configuration does not hold, return_lse and out.

        Returns
        -------
        array, or (array, array) with return_lse
        """
        return api.attention(q, k, v, **self._merged(q, arrays_and_flags))

    @opaque
    def backward(
        self, do: Array, q: Array, k: Array, v: Array, o: Array, lse: Any, **arrays_and_flags: Any
    ) -> Gradients[Array]:
        """`attention_backward` with the configuration's options.

        Parameters
        ----------
        do, q, k, v, o, lse : array
            As in `attention_backward`.
        **arrays_and_flags
            The options that the configuration does not hold.

        Returns
        -------
        Gradients
        """
        return api.attention_backward(do, q, k, v, o, lse, **self._merged(q, arrays_and_flags))

    def _merged(self, q: Any, given: dict[str, Any]) -> dict[str, Any]:
        shape = adopt(q, "q").shape
        if not shape or shape[-1] != self.config.head_dim:
            raise InvalidArgumentsError(
                f"q has head_dim {shape[-1] if shape else None}, the configuration {self.config.head_dim}.",
                hint=f"default_config({shape[-1] if shape else 64})",
            )
        options = self.config.options()
        held = sorted(options.keys() & given.keys())
        if held:
            raise InvalidArgumentsError(
                f"{held[0]} is held by the configuration and was given again.",
                hint="dataclasses.replace(config, ...) for another value",
            )
        return {**options, **given}

    def __repr__(self) -> str:
        return f"FlashAttention({self.config!r})"

"""Options that are numbers: static values, or arrays, which may be traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..call.checks import integer
from ..call.given import Options
from ..call.head_scale import scale_shape
from ..call.public_names import type_phrase
from ..call.values import finite_number
from ..errors import InvalidArgumentsError, UnsupportedError
from ..parallel.group import seed_step

__all__ = [
    "accumulator",
    "as_arrays",
    "fixed",
    "fixed_options",
    "is_array",
    "next_seed",
    "one_int32",
    "own_promotion",
    "split_numbers",
    "split_scale",
    "split_seed",
    "static_size",
    "symbolic",
    "types_of",
]


def split_numbers(arrays: dict[str, Any], options: Options) -> Options:
    """Move numbers that are JAX arrays, and every seed, from the static options to the arrays."""
    scale, softcap = (_static_number(getattr(options, name), name, arrays) for name in ("scale", "softcap"))
    return split_seed(arrays, _split_align(arrays, options))._replace(scale=scale, softcap=softcap)


def is_array(x: Any) -> bool:
    """Whether something is an array, and not one of NumPy's numbers, which have shapes too."""
    return hasattr(x, "shape") and not isinstance(x, np.generic)


@contextlib.contextmanager
def own_promotion() -> Iterator[None]:
    """Promote dtypes and ranks as this library does, where JAX is set to refuse it in the caller's code."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def accumulator(dtype: Any) -> Any:
    """The dtype in which arrays of this one are added up; that of the LSE and of numbers."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def one_int32(x: Any) -> Any:
    """An array of one integer as int32; what exceeds it becomes the nearest value."""
    if x.dtype == jnp.int32:
        return x
    limits, wanted = jnp.iinfo(x.dtype), jnp.iinfo(jnp.int32)
    inside = jnp.clip(x, max(limits.min, wanted.min), min(limits.max, wanted.max))
    return inside.astype(jnp.int32)


def as_arrays(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments as JAX arrays; what is none is refused by its name."""
    arrays = {}
    for name, x in given.items():
        try:
            arrays[name] = jnp.asarray(x)
        except (TypeError, ValueError):
            if isinstance(x, jax.Array):  # a tracer out of its place, of which JAX says more
                raise
            raise InvalidArgumentsError(
                f"{name} is {type_phrase(x)}, not an array.", hint=f"{name} as a JAX array"
            ) from None
    return arrays


def fixed(x: Any) -> Any:
    """A static, hashable value: a pair as a tuple; NumPy's values and an array of one integer as Python's."""
    if isinstance(x, (list, tuple)):
        return tuple(map(fixed, x))
    if isinstance(x, np.generic):
        return x.item()
    number = integer(x) if isinstance(x, jax.Array) else None
    return x if number is None else number


def symbolic(arrays: Iterable[Any]) -> bool:
    """Whether a size is unknown while tracing, in a program that `jax.export` makes for many sizes."""
    return not all(isinstance(n, int) for x in arrays for n in x.shape)


def static_size(n: Any, what: str, hint: str) -> int:
    """Refuse a symbolic size where the program must know it."""
    if not isinstance(n, int):
        raise UnsupportedError(f"the number of {what} is {n}, symbolic.", hint=hint)
    return n


def fixed_options(arrays: dict[str, Any], options: Options) -> Options:
    """Options after `split_numbers` as static, hashable values; the check of options refuses any other."""
    options = Options(*map(fixed, split_numbers(arrays, options)))
    for name, value in options._asdict().items():
        if any(isinstance(x, jax.core.Tracer) for x in (value, *(value if type(value) is tuple else ()))):
            raise InvalidArgumentsError(
                f"{name} is traced, and which kernel runs depends on its value.",
                hint=f"jax.jit(..., static_argnames={name!r}), or {name} from outside of the traced function",
            )
    return options._replace(dropout=finite_number(options.dropout, "dropout"))


def types_of(values: Iterable[Any]) -> tuple[type, ...]:
    """Types of values and of the parts of pairs: 1 is True and 1.0, and an option takes only one of them."""
    return tuple(type(y) for x in values for y in (x, *(x if isinstance(x, tuple) else ())))


def split_seed(arrays: dict[str, Any], options: Options) -> Options:
    """Move a seed to the arrays, unless its words are there."""
    words = None if options.seed is None or "seed" in arrays else _words(options.seed)
    if words is not None:
        # why int32: our calls have no uint32 arrays.
        arrays["seed"] = jax.lax.bitcast_convert_type(words, jnp.int32)
    # why 0: calls that differ only in the seed have equal options.
    return options._replace(seed=0) if "seed" in arrays else options


def next_seed(seed: Any, numbers: list[int], axis_name: Any) -> Any:
    """The words of the seed of a local call, as in `parallel.group.dropping`; None without a seed.

    numbers: the number of the call on each device.
    """
    if seed is None:
        return None
    steps = np.array([seed_step(number) for number in numbers], np.uint64)
    table = np.stack([steps & 0xFFFFFFFF, steps >> 32], -1).astype(np.uint32)
    low, high = jax.lax.bitcast_convert_type(seed, jnp.uint32)
    step_low, step_high = jnp.asarray(table)[jax.lax.axis_index(axis_name)]
    total = low + step_low
    words = jnp.stack([total, high + step_high + (total < low)])  # JAX may have no 64-bit integers
    return jax.lax.bitcast_convert_type(words, jnp.int32)


def _split_align(arrays: dict[str, Any], options: Options) -> Options:
    """Move an align that is a JAX array to the arrays."""
    align = options.align
    if not isinstance(align, jax.Array):
        return options
    if align.shape or not jnp.issubdtype(align.dtype, jnp.integer):
        raise InvalidArgumentsError(
            f"align is a JAX array of {align.dtype.name} of shape {align.shape}.",
            hint="one integer, the key position of query 0",
        )
    arrays["align"] = one_int32(align)
    return options._replace(align=0)


def split_scale(arrays: dict[str, Any], options: Options) -> Options:
    """Move a scale per head to the arrays, in the shape in which it multiplies q."""
    scale = options.scale
    if not isinstance(scale, jax.Array) or not scale.shape or not jnp.issubdtype(scale.dtype, jnp.floating):
        return options
    shape = scale_shape(scale.shape, arrays["q"].shape, options.layout)
    arrays["scale"] = scale.reshape(shape).astype(accumulator(arrays["q"].dtype))
    return options._replace(scale=None)


def _static_number(value: Any, name: str, arrays: dict[str, Any]) -> float | None:
    """Return a static number; for a JAX array move it to the arrays, and return None."""
    if not isinstance(value, jax.Array):
        return None if value is None else finite_number(value, name)
    if value.shape or not jnp.issubdtype(value.dtype, jnp.floating) | jnp.issubdtype(
        value.dtype, jnp.integer
    ):
        raise InvalidArgumentsError(
            f"{name} is a JAX array of {value.dtype.name} of shape {value.shape}.",
            hint=f"one real number, such as {name}=0.125",
        )
    arrays[name] = value.astype(accumulator(arrays["q"].dtype))
    return None


def _words(seed: Any) -> Any:
    """The two words of a seed, as in `run.READ`; None for an invalid seed, which the option check refuses.

    why also a Python integer: as a static value each new one would recompile.
    """
    if not isinstance(seed, jax.Array):
        number = integer(seed)
        if number is None or not 0 <= number < 2**64:
            return None
        return jnp.asarray(np.array([number & 0xFFFFFFFF, number >> 32], np.uint32))
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key) and not seed.shape:
        return jax.random.bits(seed, (2,), jnp.uint32)
    if seed.dtype == jnp.uint32 and seed.ndim == 1:  # a legacy key, without JAX's dtype for keys
        with contextlib.suppress(TypeError):  # as many words as the default implementation has?
            return jax.random.bits(jax.random.wrap_key_data(seed), (2,), jnp.uint32)
    if seed.shape or not jnp.issubdtype(seed.dtype, jnp.integer):
        raise InvalidArgumentsError(
            f"seed is a JAX array of {seed.dtype.name} of shape {seed.shape}.",
            hint="one integer, or one key: jax.random.key(0)",
        )
    if seed.dtype.itemsize < 4:
        seed = seed.astype(jnp.int32)
    wide = seed.dtype.itemsize == 8
    high = seed >> 32 if wide else seed >> 31 if jnp.issubdtype(seed.dtype, jnp.signedinteger) else 0 * seed
    return jnp.stack([seed, high]).astype(jnp.uint32)

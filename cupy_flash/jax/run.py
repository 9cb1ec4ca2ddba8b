"""A call at run time: turn XLA's buffers into views, and run the call of the library."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..call.arrays import CPU, ITEM_BYTES, ArrayView, contiguous
from ..call.blocks import check_blocks
from ..call.cache.describe import describe_cache
from ..call.cache.values import check_values
from ..call.describe import OFFSETS, describe
from ..call.functions import check_integers
from ..call.given import CacheCall, Options, Packing
from ..call.offsets import check_counts, longest_length
from ..call.problem import Problem
from ..call.progress import callback_of_process
from ..call.spans import check_spans
from ..call.values import RunOptions
from ..device.abi import SEED
from ..device.run import Driver
from ..dispatch.backends import Backend, chosen_by_environment, driver_of, prepare_backend
from ..dispatch.memo import lifted
from ..errors import UnsupportedError
from ..varlen import check_packing, pack

__all__ = ["READ", "Cached", "Config", "described", "read_on_host", "run", "values_of"]

# Options that may be traced: arrays of one number, which the host reads at run time. A seed is two words, the
# low one first, as JAX may have no 64-bit integers.
READ = ("scale", "softcap", "align", "seed")


class Cached(NamedTuple):
    """Additional static parameters of a call over a KV cache."""

    call: CacheCall
    want_lse: bool
    check: bool | None  # tuning.check; None for the default
    packing: Packing | None = None  # packing of the queries; None for a batch
    # For latents, the number of columns of k_cache that are the values, without a v_cache; else None.
    head_dim_v: int | None = None

    def checked(self, device: tuple[str, int]) -> bool:
        """Whether the host checks lengths and tables at run time."""
        if device != CPU and self.check:
            raise UnsupportedError(
                "tuning.check is True on a GPU, where nothing but this call would know lengths and tables.",
                hint="tuning=None, or cupy_flash.attention_with_kv_cache outside of jit",
            )
        return device == CPU and self.check is not False


class Config(NamedTuple):
    """Static parameters of a call in a program."""

    direction: str  # {"forward", "backward", "decode"}
    options: Options
    # Names, dtypes and ranks of the inputs, without axes of vmap.
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    ranks: tuple[int, ...]
    results: tuple[tuple[str, int, str], ...]  # name, rank and dtype of each output
    longest: tuple[int, int] | None = None  # longest lengths of packed sequences; None for a batch
    cached: Cached | None = None  # parameters of a call over a cache; None otherwise
    unrounded: bool = False  # as in `describe.describe`

    def of_buffers(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Ranks and dtypes of inputs and outputs."""
        ranks = (*self.ranks, *(rank for _, rank, _ in self.results))
        return ranks, (*self.dtypes, *(dtype for _, _, dtype in self.results))


def run(
    config: Config,
    shapes: Sequence[tuple[int, ...]],
    pointers: list[int],
    device: tuple[str, int],
    stream: int | None,
) -> None:
    """Run one call per index of the leading axes, which vmap adds, into outputs that XLA allocated.

    Parameters
    ----------
    config : Config
    shapes, pointers
        Shapes and addresses of the inputs and the outputs, with axes of vmap.
    device : (str, int)
    stream : int or None
        CUDA stream handle; None on a CPU.
    """
    ranks, dtypes = config.of_buffers()
    lead = shapes[0][: len(shapes[0]) - ranks[0]]
    own = tuple([shape[len(shape) - rank :] for shape, rank in zip(shapes, ranks, strict=True)])
    for index in range(math.prod(lead)):
        if index:
            steps = (math.prod(shape) * ITEM_BYTES[x] for shape, x in zip(own, dtypes, strict=True))
            pointers = [p + step for p, step in zip(pointers, steps, strict=True)]
        residues = tuple([p % 64 for p in pointers])
        driver = driver_of(device, "jax")
        environment = chosen_by_environment(driver, device)
        read = values_of(
            {
                name: read_on_host(pointers[i], own[i], dtypes[i], device, driver, stream)
                for i, name in enumerate(config.names)
                if name in READ
            }
        )
        seed = read.pop("seed", 0)
        backend, problem, places, numbered = _ready(
            config, own, residues, device, driver, environment, tuple(read.items())
        )
        told = callback_of_process()
        if numbered and told is None:
            numbers = {name: pointers[i] for name, i in numbered}
            numbers[SEED] = seed
            backend.run_at(numbers, None, "jax", stream)
            continue
        views = {name: view._replace(pointer=pointers[i]) for name, (i, view) in places.items()}
        if config.longest and device == CPU:
            check_packing(views, (views["q"].shape[2], views["k"].shape[2]), config.longest)
        if config.cached and device == CPU:
            _check_cuts(views, config.cached.packing)
        check_spans(problem.spans, views)
        check_blocks(problem.blocks, views)
        if backend.integer_bits:
            check_integers(problem.function, problem.extents, backend.integer_bits, views)
        if config.cached and config.cached.checked(device):
            check_values(problem, _as_given(views, problem))
        backend.run(views, RunOptions(seed, told), stream=stream)


def _check_cuts(views: dict[str, ArrayView], packing: Packing | None) -> None:
    """Refuse invalid offsets of queries and of new keys, also without tuning.check."""
    if "cu_seqlens_k_new" in views:
        longest_length(views["cu_seqlens_k_new"], "cu_seqlens_k_new", views["k"].shape[2], None)
    if packing is not None:
        longest_length(views["cu_seqlens_q"], "cu_seqlens_q", views["q"].shape[2], packing.seqlen_q)
        if "seqused_q" in views:
            check_counts(views, "seqused_q", "cu_seqlens_q", "queries")


def _as_given(views: dict[str, ArrayView], problem: Problem) -> dict[str, ArrayView]:
    """The views of a call over a cache by the caller's names."""
    assert problem.cache is not None
    if not problem.cache.indexed:
        return views
    return {"cache_batch_idx" if name == "block_table" else name: x for name, x in views.items()}


def values_of(known: dict[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    """Convert arrays that the host has read to option values."""
    return {
        name: int.from_bytes(x.tobytes(), "little") if name == "seed" else x[0].item()
        for name, x in known.items()
    }


def read_on_host(
    pointer: int,
    shape: tuple[int, ...],
    dtype: str,
    device: tuple[str, int],
    driver: Driver | None,
    stream: int | None,
) -> np.ndarray[Any, Any]:
    """Read an array to the host; on a GPU this waits for the stream."""
    nbytes = math.prod(shape) * ITEM_BYTES[dtype]
    if device == CPU or driver is None or stream is None:
        elements = ctypes.string_at(pointer, nbytes)
    else:
        elements = driver.read(pointer, nbytes, device[1], stream)
    return np.frombuffer(elements, dtype)


# Views that may share the buffer of another one: (view, owner of its buffer).
_OTHERWISE = (
    ("cu_seqlens_k", "cu_seqlens_q"),
    ("block_table", "cache_batch_idx"),
    ("v_cache", "k_cache"),
    ("v", "k"),
)


@functools.lru_cache(maxsize=4096)
def _ready(
    config: Config,
    shapes: tuple[tuple[int, ...], ...],
    residues: tuple[int, ...],
    device: tuple[str, int],
    driver: Driver | None,
    _environment: Hashable,
    read: tuple[tuple[str, float], ...],
) -> tuple[Backend, Problem, dict[str, tuple[int, ArrayView]], tuple[tuple[str, int], ...]]:
    """Return the backend, the problem, and by name the buffer index and a view without an address.

    The last result has (name, buffer index) of the addresses that the backend needs; it is empty if the host
    has to check contents of arrays.

    why cached: a compiled program repeats its calls, and only addresses change.
    """
    buffers = [
        ArrayView(pointer, shape, contiguous(shape), dtype, device, "jax", False, None)
        for shape, dtype, pointer in zip(shapes, config.of_buffers()[1], residues, strict=True)
    ]
    given = {name: x for name, x in zip(config.names, buffers, strict=False) if name not in READ}
    options = config.options._replace(**dict(read))
    problem, views = described(
        config.direction, given, options, config.longest, config.cached, config.unrounded
    )
    for (name, _, _), view in zip(config.results, buffers[len(config.names) :], strict=True):
        if name not in views:  # an updated cache has the buffer, and so the view, of its input
            layout = "bshd" if config.cached and config.cached.packing else options.layout
            views[name] = lifted(name, view, layout)
    places = {name: i for i, name in enumerate((*config.names, *(name for name, _, _ in config.results)))}
    for name, source in _OTHERWISE:
        if name in views:
            places.setdefault(name, places.get(source, 0))
    backend = prepare_backend(problem, views, driver)
    integers = problem.function is not None and backend.integer_bits
    looked_at = config.longest or config.cached or problem.spans or problem.blocks or integers
    numbered = () if looked_at else tuple((name, places[array]) for name, array in backend.addressed)
    return backend, problem, {name: (places[name], view) for name, view in views.items()}, numbered


def described(
    direction: str,
    views: dict[str, ArrayView],
    options: Options,
    longest: tuple[int, int] | None = None,
    cached: Cached | None = None,
    unrounded: bool = False,
) -> tuple[Problem, dict[str, ArrayView]]:
    """Describe a call from views without data: a batch, packed sequences (with longest), or over a cache.

    Without cu_seqlens_k keys have the offsets of queries.
    """
    if cached is not None:
        if cached.head_dim_v:
            keys = views["k_cache"]
            views = {**views, "v_cache": keys._replace(shape=(*keys.shape[:-1], cached.head_dim_v))}
        return describe_cache(views, options, cached.call, cached.want_lse, cached.packing)
    packing = None
    if longest is not None:
        cut_q, used = views["cu_seqlens_q"], views.get("seqused_k")
        cuts = cut_q, views.get("cu_seqlens_k", cut_q)
        views = {name: view for name, view in views.items() if name not in OFFSETS}
        packing = pack(views, cuts, longest, used, traced=True)
    problem, views, _ = describe(direction, views, options, packing=packing, unrounded=unrounded)
    return problem, views

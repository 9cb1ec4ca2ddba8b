"""Time of three standard calls, compared with torch's scaled_dot_product_attention if torch is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .. import api, kv_cache
from ..errors import UnsupportedError
from .places import Place, as_tensor, first_line, torch_gpu, torch_module

__all__ = ["Timing", "speed_of"]


class Shape(NamedTuple):
    """Shapes of the standard calls: dense ones are causal, with as many keys as queries."""

    dtype: str
    dense: tuple[int, int, int, int]  # batch, heads, length, head dim
    decode: tuple[int, int, int, int, int]  # batch, heads of q, heads of k, keys, head dim


ON_GPU = Shape("float16", (2, 16, 4096, 128), (16, 32, 8, 4096, 128))
ON_CPU = Shape("float32", (1, 8, 1024, 64), (4, 32, 8, 1024, 128))
SIMULATED = Shape("float16", (1, 1, 64, 64), (1, 8, 1, 64, 64))


class Timing(NamedTuple):
    """The time of a call."""

    call: str
    ms: float | None  # milliseconds per back-to-back call; None if ours raised an error
    # The same for torch, in the same run; None without torch, or if it raised an error.
    torch_ms: float | None = None
    says: str = ""  # why a time is missing; "" if none is
    failed: bool = False  # whether ours raised an error other than UnsupportedError or a lack of memory

    @property
    def ratio(self) -> float | None:
        """Speedup over torch: its time divided by ours."""
        return self.torch_ms / self.ms if self.torch_ms and self.ms else None


def speed_of(place: Place, quick: bool, tell: Callable[[str], None]) -> list[Timing]:
    """Time the three calls.

    Parameters
    ----------
    place : Place
    quick : bool
        Measure for a tenth of the time.
    tell : callable
        Called with the name of the next call.
    """
    shape = ON_CPU if place.ordinal is None else ON_GPU
    shape = SIMULATED if place.on_gpu and place.ordinal is None else shape
    torch = None if shape is SIMULATED else torch_module() if place.ordinal is None else torch_gpu()
    rng = np.random.default_rng(0)

    def draw(*sizes: int) -> np.ndarray:
        return rng.standard_normal(sizes, np.float32).astype(shape.dtype)

    b, h, s, d = shape.dense
    dense = [draw(b, h, s, d) for _ in range(4)]
    at = f"{shape.dtype}, causal, batch {b}, {h} heads, {s} x {s}, head dim {d}"
    batch, heads, heads_k, keys, dim = shape.decode
    decode = [draw(batch, heads, 1, dim), draw(batch, heads_k, keys, dim), draw(batch, heads_k, keys, dim)]
    calls: list[tuple[str, list[np.ndarray], Callable[..., Any], Callable[..., Any]]] = [
        (f"forward {at}", dense[:3], _forward, _torch_forward),
        (f"backward {at}", dense, _backward, _torch_backward),
        (f"decode {shape.dtype}, batch {batch}, heads {heads}/{heads_k}, {keys} keys, head dim {dim}",
         decode, _decode, _torch_decode),
    ]  # fmt: skip
    found = []
    for name, host, ours, theirs in calls:
        tell(name)
        found.append(_time(name, host, place, torch, ours, theirs, 0.1 if quick else 1.0))
    return found


def _time(
    name: str, host: list[np.ndarray], place: Place, torch: Any,
    ours: Callable[..., Any], theirs: Callable[..., Any], at_least: float,
) -> Timing:  # fmt: skip
    try:
        ms = 1e3 * place.seconds(ours(*map(place.put, host)), at_least)
    except (UnsupportedError, MemoryError) as error:
        return Timing(name, None, says=first_line(error))
    except Exception as error:  # why any: each library has its own error for a failed kernel
        no_memory = type(error).__name__ == "OutOfMemoryError"  # such as torch's, a RuntimeError
        return Timing(name, None, says=first_line(error), failed=not no_memory)
    if torch is None:
        return Timing(name, ms)
    device = "cpu" if place.ordinal is None else f"cuda:{place.ordinal}"
    on_stream = place if place.ordinal is None else place._replace(synchronize=torch.cuda.synchronize)
    try:
        call = theirs(torch, *(as_tensor(torch, x).to(device) for x in host))
        return Timing(name, ms, 1e3 * on_stream.seconds(call, at_least))
    except (RuntimeError, TypeError, AttributeError) as error:  # an older torch, or no memory
        return Timing(name, ms, says=f"torch: {first_line(error)}")


def _forward(q: Any, k: Any, v: Any) -> Callable[[], Any]:
    return lambda: api.attention(q, k, v, causal=True)


def _backward(q: Any, k: Any, v: Any, do: Any) -> Callable[[], Any]:
    o, lse = api.attention(q, k, v, causal=True, return_lse=True)
    return lambda: api.attention_backward(do, q, k, v, o, lse, causal=True)


def _decode(q: Any, k: Any, v: Any) -> Callable[[], Any]:
    keys = int(k.shape[2])
    return lambda: kv_cache.attention_with_kv_cache(q, k, v, cache_seqlens=keys)


def _torch_forward(torch: Any, q: Any, k: Any, v: Any) -> Callable[[], Any]:
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(q, k, v, is_causal=True)


def _torch_backward(torch: Any, q: Any, k: Any, v: Any, do: Any) -> Callable[[], Any]:
    inputs = [x.requires_grad_() for x in (q, k, v)]
    o = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
    return lambda: torch.autograd.grad(o, inputs, do, retain_graph=True)


def _torch_decode(torch: Any, q: Any, k: Any, v: Any) -> Callable[[], Any]:
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(q, k, v, enable_gqa=True)

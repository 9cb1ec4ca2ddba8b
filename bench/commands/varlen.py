"""varlen: packed sequences of unequal lengths, compared with one call per sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

import cupy_flash
from cupy_flash import testing

from ..machine.place import Place
from ..measure import peers
from ..measure.peers import Call, Inputs, Peer
from ..measure.session import Session, Settings
from ..work import ITEM, Case, drawn

# (sequences, upper limit of lengths, heads, head dim)
GPU_SIZES = ((32, 4096, 16, 128), (256, 1024, 16, 128), (64, 8192, 32, 64))
CPU_SIZES = ((16, 512, 8, 64), (8, 1024, 8, 64))


class _Lengths(NamedTuple):
    """Fields of `Packed`, by names of result columns."""

    batch: int
    heads: int
    seqlen: int
    head_dim: int
    dtype: str
    causal: bool
    passes: str
    detail: str


class Packed:
    """Causal packed sequences with as many queries as keys; it has the interface of `Case`.

    Parameters
    ----------
    lengths : tuple of int
    heads, head_dim : int
    dtype : str
    passes : {"forward", "backward"}
    """

    def __init__(
        self, lengths: tuple[int, ...], heads: int, head_dim: int, dtype: str, passes: str = "forward"
    ) -> None:
        self.lengths, self.heads, self.head_dim = lengths, heads, head_dim
        self.dtype, self.passes = dtype, passes

    @cached_property
    def parts(self) -> list[Case]:
        """Each sequence as a problem of its own."""
        return [Case(1, self.heads, n, self.head_dim, self.dtype, True, self.passes) for n in self.lengths]

    def _asdict(self) -> dict[str, Any]:
        detail = f"{sum(self.lengths)} rows"
        longest = max(self.lengths)
        fields = _Lengths(
            len(self.lengths), self.heads, longest, self.head_dim, self.dtype, True, self.passes, detail
        )
        return fields._asdict()

    def __str__(self) -> str:
        return (
            f"{len(self.lengths)} sequences of {min(self.lengths)} to {max(self.lengths)}, "
            f"{sum(self.lengths)} in all, H{self.heads} D{self.head_dim} {self.dtype} causal {self.passes}"
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shape = (sum(self.lengths), self.heads, self.head_dim)
        return dict.fromkeys(("q", "k", "v", "do"), shape)

    def constants(self) -> dict[str, np.ndarray]:
        return {"cuts": np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)}

    def inputs(self, seed: int = 0) -> dict[str, np.ndarray]:
        return drawn(self.shapes(), self.dtype, seed) | self.constants()

    def reduced(self) -> Packed:
        few = tuple(max(1, min(n, 300)) for n in self.lengths[:6])
        return Packed(few, min(self.heads, 2), self.head_dim, self.dtype, self.passes)

    def flops(self) -> float:
        return sum(part.flops() for part in self.parts)

    def traffic(self) -> float:
        tensors = {"forward": 4, "backward": 8}[self.passes]
        return float(tensors * ITEM[self.dtype] * sum(self.lengths) * self.heads * self.head_dim)

    def score_bytes(self) -> int:
        return max(part.score_bytes() for part in self.parts)

    def verdicts(
        self, results: Mapping[str, Any], host: Mapping[str, np.ndarray], precision: str | None
    ) -> list[testing.Verdict]:
        found: list[testing.Verdict] = []
        for start, stop in zip(host["cuts"], host["cuts"][1:], strict=False):
            one = {name: x[start:stop].swapaxes(0, 1)[None] for name, x in host.items() if name != "cuts"}
            mine = {name: x[start:stop].swapaxes(0, 1)[None] for name, x in results.items()}
            q, k, v, do = (one[name] for name in ("q", "k", "v", "do"))
            found += testing.error_budget(mine, q, k, v, do=do, precision=precision, causal=True)
        return found

    def plan(self, arch: str) -> Any:
        """The plan of the longest sequence; packing only changes the grid."""
        longest = max(self.parts, key=lambda part: part.seqlen)
        return longest._replace(batch=len(self.lengths)).plan(arch)


# ---------------------------------------------------------------------- who runs them


def _ours(case: Packed, inputs: Inputs, _place: Place) -> Call:
    do, q, k, v, cuts = (inputs[name] for name in ("do", "q", "k", "v", "cuts"))
    how = {"causal": True, "max_seqlen_q": max(case.lengths), "max_seqlen_k": max(case.lengths)}
    if case.passes == "forward":
        return lambda: (cupy_flash.attention_varlen(q, k, v, cuts, cuts, **how),)
    o, lse = cupy_flash.attention_varlen(q, k, v, cuts, cuts, return_lse=True, **how)
    backward = cupy_flash.attention_varlen_backward
    return lambda: tuple(backward(do, q, k, v, o, lse, cuts, cuts, **how)[:3])


def _each(peer: Peer) -> Callable[[Packed, Inputs, Place], Call]:
    """Call a peer once per sequence, as those without packed sequences require."""

    def prepare(case: Packed, inputs: Inputs, place: Place) -> Call:
        starts = np.concatenate([[0], np.cumsum(case.lengths)])
        calls = []
        for part, start in zip(case.parts, starts, strict=False):
            rows = {
                name: _turned(inputs[name][int(start) : int(start) + part.seqlen])
                for name in ("q", "k", "v", "do")
            }
            calls.append(peer.prepare(part, rows, place))

        def run() -> tuple[Any, ...]:
            results = [call() for call in calls]
            return tuple(_joined([_back(x) for x in parts]) for parts in zip(*results, strict=True))

        return run

    return prepare


def _turned(x: Any) -> Any:
    return x.swapaxes(0, 1)[None]


def _back(x: Any) -> Any:
    return x[0].swapaxes(0, 1)


def _joined(parts: list[Any]) -> Any:
    if type(parts[0]).__module__.startswith("torch"):
        import torch

        return torch.cat(parts)
    if type(parts[0]).__module__.startswith("cupy"):
        import cupy

        return cupy.concatenate(parts)
    return np.concatenate([np.asarray(x) for x in parts])


def _flash_attn(*modules: str) -> Callable[[Packed, Inputs, Place], Call]:
    def prepare(case: Packed, inputs: Inputs, place: Place) -> Call:
        function = peers.first_of(modules, "flash_attn_varlen_func")
        cuts, longest = inputs["cuts"], max(case.lengths)

        def attend(q: Any, k: Any, v: Any) -> Any:
            o = function(
                q, k, v, cu_seqlens_q=cuts, cu_seqlens_k=cuts, max_seqlen_q=longest, max_seqlen_k=longest,
                causal=True,
            )  # fmt: skip
            return o[0] if isinstance(o, tuple) else o

        return peers.by_autograd(attend, case.passes, peers.tensors(inputs, place))

    return prepare


def who(place: Place, wanted: str | None) -> list[Peer]:
    """Peers with packed sequences, and peers that run sequence by sequence."""
    ours, *others = peers.chosen(place, wanted)
    single = [ours, *(peer for peer in others if peer.name in ("torch", "torch cudnn", "torch flash"))]
    packed = [
        Peer("flash-attn 2", _flash_attn(*peers.FLASH_ATTN_2), ("gpu",)),
        Peer("flash-attn 3", _flash_attn(*peers.FLASH_ATTN_3), ("gpu",)),
    ]
    return [
        Peer(ours.name, _ours),
        *(Peer(f"{peer.name}, one by one", _each(peer), by_clock=peer.by_clock) for peer in single),
        *(peer for peer in packed if place.name in peer.places and (wanted is None or peer.name in wanted)),
    ]


def lengths(count: int, longest: int, seed: int = 0) -> tuple[int, ...]:
    """Random lengths, as of sentences and documents: many short ones, few long ones."""
    draw = np.random.default_rng(seed)
    found = np.minimum(longest, longest / 8 * draw.lognormal(0, 0.9, count)).astype(int)
    return tuple(int(n) for n in np.maximum(found, 1))


def run(settings: Settings) -> None:
    session = Session("varlen", settings)
    place = session.place
    sizes = CPU_SIZES if place.name == "cpu" else GPU_SIZES
    suite = [
        Packed(lengths(count, longest), heads, head_dim, place.dtypes[0], passes)
        for passes in ("forward", "backward")
        for count, longest, heads, head_dim in (sizes[:1] if settings.quick else sizes)
    ]
    for case in session.cases(suite):
        session.measure(case, who(place, settings.peers))

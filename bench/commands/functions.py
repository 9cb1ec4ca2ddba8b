"""functions: the gallery of torch's flex_attention as score functions, compared with flex_attention.

Neither compilation nor making block masks is timed; flex_attention has a block mask for each mask function.
Block masks skip tiles, as our blocks do; a function alone is evaluated for every pair.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import cupy_flash
from cupy_flash.check.places import as_tensor
from cupy_flash.functions import ScoreFunction

from ..machine.place import Place
from ..measure import peers
from ..measure.peers import Call, Inputs, Peer, Skipped
from ..measure.session import Session, Settings
from ..work import Case, Named

WINDOW = 256  # visible keys of a query

Arguments = Callable[[int, int], tuple[np.ndarray, ...]]


class Entry(NamedTuple):
    """A function of the gallery.

    Attributes
    ----------
    function : callable
        Takes s, b, h, i, j and the arguments; without s if it is a mask.
    arguments : callable
        Makes the arguments for a number of heads and positions.
    masks : bool
        Whether it is a mask function.
    for_torch : callable, optional
        The same function with torch operators; None if `function` works in torch, too.
    of_heads : bool
        Whether the mask depends on the head.
    """

    function: Callable[..., Any]
    arguments: Arguments = lambda heads, length: ()
    masks: bool = False
    for_torch: Callable[..., Any] | None = None
    of_heads: bool = False

    def made(self) -> ScoreFunction:
        return (cupy_flash.mask if self.masks else cupy_flash.score)(self.function)


def _slopes(heads: int, _length: int) -> tuple[np.ndarray, ...]:
    return (np.exp2(-8 / heads * np.arange(1, heads + 1)).astype(np.float32),)


def _table(heads: int, length: int) -> tuple[np.ndarray, ...]:
    table = np.random.default_rng(0).standard_normal((heads, 2 * length)).astype(np.float32)
    return table, np.array(length - 1, np.int32)


def _documents(_heads: int, length: int) -> tuple[np.ndarray, ...]:
    return ((np.arange(length) * 8 // length).astype(np.int32),)


def _softcap_of_torch(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return 20.0 * (s / 20.0).tanh()


def _away(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    """T5: a bias per bucket of distances, with wider buckets for larger distances."""
    away = abs(i - j)
    return s + table[h, np.where(away < 8, away, np.minimum(8 + (away - 8) // 16, 31))]


def _away_of_torch(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    away = abs(i - j)
    return s + table[h, away.clamp(max=8) + ((away - 8).clamp(min=0) // 16).clamp(max=23)]


def _buckets(heads: int, _length: int) -> tuple[np.ndarray, ...]:
    return (np.random.default_rng(0).standard_normal((heads, 32)).astype(np.float32),)


def _temperature_of_torch(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
    return s * t[h] * (2.0 + i).log()


def prefix(length: int) -> int:
    return length // 4


def widths(heads: int, length: int) -> np.ndarray:
    """Keys that each head sees on either side, including the query's own."""
    return np.maximum(length >> np.arange(1, heads + 1), 16).astype(np.int32)


def _kept(heads: int, length: int) -> tuple[np.ndarray, ...]:
    """A random table of blocks of 64, three fifths of which are visible, including the diagonal."""
    blocks = -(-length // 64)
    kept = np.random.default_rng(0).random((heads, blocks, blocks)) < 0.6
    kept[:, range(blocks), range(blocks)] = True
    return (kept,)


def _natten(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (abs(i // 32 - j // 32) <= 6) & (abs(i % 32 - j % 32) <= 6)


GALLERY = {
    "alibi": Entry(lambda s, b, h, i, j, slope: s - slope[h] * (i - j), _slopes),
    "softcap": Entry(
        lambda s, b, h, i, j: 20.0 * np.tanh(s / 20.0), for_torch=_softcap_of_torch
    ),
    "relative": Entry(lambda s, b, h, i, j, table, middle: s + table[h, i - j + middle], _table),
    "causal": Entry(lambda b, h, i, j: i >= j, masks=True),
    "documents": Entry(lambda b, h, i, j, of: (of[i] == of[j]) & (i >= j), _documents, masks=True),
    "natten": Entry(_natten, masks=True),
    "buckets": Entry(_away, _buckets, for_torch=_away_of_torch),
    "temperature": Entry(
        lambda s, b, h, i, j, t: s * t[h] * np.log(2.0 + i), _slopes, for_torch=_temperature_of_torch
    ),
    "prefix": Entry(
        lambda b, h, i, j, prefix: (j < prefix[b]) | (i >= j),
        lambda _heads, length: (np.array([prefix(length)], np.int32),), masks=True,
    ),
    "window": Entry(lambda b, h, i, j: (i >= j) & (i - j < WINDOW), masks=True),
    "dilated": Entry(lambda b, h, i, j: (abs(i - j) <= 3 * WINDOW) & ((i - j) % 3 == 0), masks=True),
    "widths": Entry(
        lambda b, h, i, j, width: abs(i - j) < width[h],
        lambda heads, length: (widths(heads, length),), masks=True, of_heads=True,
    ),
    "table": Entry(lambda b, h, i, j, kept: kept[h, i // 64, j // 64], _kept, masks=True, of_heads=True),
}  # fmt: skip
# why: flex_attention takes half a minute to compile a function, and more than two minutes for all.
QUICK = tuple(GALLERY)[:6]


class Gallery(Named):
    """A problem with a function of the gallery."""

    def __init__(self, name: str, case: Case) -> None:
        super().__init__(name, case)
        self.entry = GALLERY[name]

    def arguments(self) -> tuple[np.ndarray, ...]:
        return self.entry.arguments(self.case.heads, self.case.seqlen)

    def constants(self) -> dict[str, np.ndarray]:
        return {f"argument {n}": x for n, x in enumerate(self.arguments())}

    def options(self) -> dict[str, Any]:
        bound = self.entry.made()(*self.arguments())
        return {"mask" if self.entry.masks else "score": bound}

    def in_blocks(self) -> Blocks:
        return Blocks(self.name, self.case)


class Blocks(Gallery):
    """A mask function of the gallery, converted to a block mask."""

    def options(self) -> dict[str, Any]:
        length = self.case.seqlen
        heads = self.case.heads if self.entry.of_heads else None
        bound = self.entry.made()(*self.arguments())
        return {"mask": cupy_flash.block_mask(bound, None, heads, length, length)}


# ---------------------------------------------------------------------- who runs them


def _by_blocks(case: Gallery, inputs: Inputs, place: Place) -> Call:
    if not case.entry.masks:
        raise Skipped("says which pairs are seen, no scores")
    return peers.ours(case.in_blocks(), inputs, place)


def _flex(compiled: bool) -> Callable[[Gallery, Inputs, Place], Call]:
    def prepare(case: Gallery, inputs: Inputs, place: Place) -> Call:
        if case.passes != "forward":
            raise Skipped("has no backward pass on a CPU")
        attend, how = _attend(case.name, case.case.heads, case.case.seqlen, compiled)
        return peers.by_autograd(lambda *qkv: attend(*qkv, **how), case.passes, peers.tensors(inputs, place))

    return prepare


# why cached: a case is repeated several times, and compiling a function takes half a minute.
@functools.cache
def _attend(name: str, heads: int, length: int, compiled: bool) -> tuple[Callable[..., Any], dict[str, Any]]:
    """flex_attention, and its keyword arguments for a function of the gallery."""
    torch = importlib.import_module("torch")
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    entry = GALLERY[name]
    function, arguments = (
        entry.for_torch or entry.function,
        [as_tensor(torch, x) if x.ndim else x.item() for x in entry.arguments(heads, length)],
    )
    attend = flex.flex_attention
    if compiled:
        # why: torch would run functions uncompiled after a few recompilations, and compile for dynamic shapes
        # after the second shape, which is slower.
        torch._dynamo.config.recompile_limit = 256
        attend = torch.compile(attend, dynamic=False)
    if not entry.masks:
        return attend, {"score_mod": lambda s, b, h, i, j: function(s, b, h, i, j, *arguments)}
    block_mask = flex.create_block_mask(
        lambda b, h, i, j: function(b, h, i, j, *arguments),
        None, heads if entry.of_heads else None, length, length, device="cpu",
    )  # fmt: skip
    return attend, {"block_mask": block_mask}


def who(wanted: str | None) -> list[Peer]:
    """Ours, and the selected peers."""
    numpy = next(peer for peer in peers.PEERS if peer.name == "cupy_flash numpy")
    others = [
        Peer("cupy_flash blocks", _by_blocks),
        numpy,
        Peer("flex_attention compiled", _flex(True)),
        Peer("flex_attention eager", _flex(False), matrices=4),
    ]
    words = None if wanted is None else [word.strip() for word in wanted.split(",") if word.strip()]
    return [peers.OURS, *(x for x in others if words is None or any(word in x.name for word in words))]


def run(settings: Settings) -> None:
    """Measure on the CPU, and append to bench/results/functions.csv."""
    session = Session("functions", settings._replace(device="cpu"))
    length = 1024 if settings.quick else 2048
    suite: list[Any] = [
        Gallery(name, Case(1, 8, length, 64, passes=passes))
        for passes in ("forward", "forward+backward")
        for name in (QUICK if settings.quick else GALLERY)
    ]
    for case in session.cases(suite):
        session.measure(case, who(settings.peers))

"""functions: what torch's gallery of flex_attention says as score functions, beside flex_attention itself.

Compiling is not timed, nor is making block masks, of which flex_attention has one for each function that
masks. They skip tiles without asking, as our blocks do; a function alone is asked about every pair.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import cupy_flash
from cupy_flash.functions import ScoreFunction

from ..machine.place import Place, tensor_of
from ..measure import peers
from ..measure.peers import Call, Inputs, Peer, Skipped
from ..measure.session import Session, Settings
from ..work import Case, Named

WINDOW = 256  # keys that a query sees

Arguments = Callable[[int, int], tuple[np.ndarray, ...]]


class Entry(NamedTuple):
    """A function of the gallery.

    Attributes
    ----------
    function : callable
        Of s, b, h, i, j and arguments; without s if it masks.
    arguments : callable
        Makes them for so many heads and positions.
    masks : bool
    for_torch : callable, optional
        The same in torch's names.
    of_heads : bool
        It masks each head in its own way.
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
    """T5: distances in buckets, of which the far ones are wide."""
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
    """Keys that each head sees to either side, its own one included."""
    return np.maximum(length >> np.arange(1, heads + 1), 16).astype(np.int32)


def _kept(heads: int, length: int) -> tuple[np.ndarray, ...]:
    """A table of blocks of 64, of which three of five are seen, those of the diagonal among them."""
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
# why: a function that is compiled takes flex_attention half a minute, and all of them more than two.
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
    """The same with a mask by blocks, made of the function."""

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


# why remembered: a case is visited several times, and each function that is compiled takes half a minute.
@functools.cache
def _attend(name: str, heads: int, length: int, compiled: bool) -> tuple[Callable[..., Any], dict[str, Any]]:
    """flex_attention for a function of the gallery, and the keywords that say which."""
    torch = importlib.import_module("torch")
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    entry = GALLERY[name]
    function, arguments = (
        entry.for_torch or entry.function,
        [tensor_of(torch, x) if x.ndim else x.item() for x in entry.arguments(heads, length)],
    )
    attend = flex.flex_attention
    if compiled:
        # why: torch would give up after a few functions and run the rest uncompiled, and compile for any
        # shape after the second one, which is slower.
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
    """Ourselves, and those of the peers that are wanted."""
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

"""Attention over a sequence in parts by all-to-all: every process attends to all rows for some heads.

Rows are exchanged for heads, one ordinary call runs on whole sequences, and the results are exchanged back
[1]_. So every option has its usual meaning, and the bits are those of one process that has only these heads.

.. [1] S. A. Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..api import Gradients, attention, attention_backward
from ..call.blocks import BlockMask
from ..call.compound import Spans
from ..call.describe import describe
from ..call.given import split
from ..call.options import PER_HEAD
from ..errors import InvalidArgumentsError
from ..varlen import attention_varlen, attention_varlen_backward
from .exchange import ToParts, ToWhole, exchange
from .group import LocalCall, Round, at, dropping, own_heads
from .parts import Rows, Split, packed_starts, packed_stretches

__all__ = ["backward", "check_heads", "forward"]

# Arrays with rows of queries; other arrays have rows of keys.
_OF_QUERIES = ("q", "o", "lse", "do", "dlse")


def _heads_axis(local_call: LocalCall) -> int | None:
    """The axis of heads, from the end; None if there is none."""
    return -5 - local_call.row_axis if len(local_call.arrays["q"].shape) > 2 else None


def check_heads(local_call: LocalCall) -> None:
    """Refuse head counts that are not multiples of the number of processes."""
    axis, ranks = _heads_axis(local_call), local_call.link.ranks
    counts = [1 if axis is None else local_call.arrays[name].shape[axis] for name in "qk"]
    for name, heads in zip("qk", counts, strict=True):
        if heads % ranks:
            most = max(n for n in range(1, ranks) if not math.gcd(*counts) % n)
            raise InvalidArgumentsError(
                f"{heads} heads of {name} do not divide over {ranks} processes.",
                hint=f'schedule="ring" or "allgather"; or a multiple of {ranks} heads'
                + (f"; or {most} of the processes" if most > 1 else ""),
            )


class _Call:
    """A checked call: the exchange of its arrays for whole sequences, and the call on these."""

    def __init__(self, local_call: LocalCall) -> None:
        link, arrays, causal, options, cu_seqlens, _ = local_call
        self._link = link
        self.terms = dict(local_call.terms)
        q = arrays["q"]
        self._rows_axis, self._heads_axis = local_call.row_axis, _heads_axis(local_call)
        self._heads = 1 if self._heads_axis is None else q.shape[self._heads_axis]
        check_heads(local_call)
        given = {name: x for name, x in options.items() if name not in ("parts", "seqlen", "schedule")}
        given |= {name: self._own_heads(x) for name in PER_HEAD if (x := given[name]) is not None}
        given["mask"] = self._mask(given["mask"])
        self.how = {"causal": causal, **dropping(given, link.rank)}
        self.cuts: tuple[Any, ...] = ()
        if cu_seqlens is None:
            whole = Split.of(local_call)
            queries, keys = whole.queries, whole.keys
        else:
            starts, _ = packed_starts(cu_seqlens, q, causal)
            self.terms["cu_seqlens"] = starts.tolist()
            queries = keys = packed_stretches(link.ranks, starts, causal)
            self.cuts = (link.index_array((starts * link.ranks).astype(np.int32), q),) * 2
            del self.how["layout"], self.how["mask"]
        self._rows = [Rows(x, lambda rows: link.index_array(rows, q)) for x in (queries, keys)]
        self.there = {
            name: ToWhole(link, x, self._rows[name not in _OF_QUERIES], *self._axes(name))
            for name, x in arrays.items()
            if x is not None
        }
        self.terms["dlse"] = "given" if "dlse" in self.there else "none"  # why: dlse is sent too
        if cu_seqlens is None:
            operands, values = split(self.how)
            operands |= {name: x.whole for name, x in self.there.items()}
            describe(local_call.direction, operands, values)

    def _axes(self, name: str) -> tuple[int, int | None]:
        """The axes of rows and of heads of an array."""
        return (-1, -2) if name in ("lse", "dlse") else (self._rows_axis, self._heads_axis)

    def _share(self, heads: int) -> slice:
        """The heads of this process, out of `heads`."""
        return own_heads(heads, self._link.rank, self._link.ranks)

    def _own_heads(self, x: Any) -> Any:
        """The part for this process's heads of an array with one number per head."""
        return self._link.contiguous(x[..., self._share(x.shape[-1])])

    def _mask(self, mask: Any) -> Any:
        """A mask for the heads of this process."""
        if mask is None or type(mask) is tuple:
            return mask and tuple(map(self._mask, mask))
        if isinstance(mask, Spans):
            return Spans(self._heads_of_process(mask.bounds, -4))
        if isinstance(mask, BlockMask):
            return mask._replace(table=self._heads_of_process(mask.table, -3))
        return self._heads_of_process(mask, -3)

    def _heads_of_process(self, x: Any, axis: int) -> Any:
        """The heads of this process of an array, unless it has none or is broadcast along them."""
        if len(x.shape) < -axis or x.shape[axis] == 1:
            return x
        if x.shape[axis] != self._heads:
            raise InvalidArgumentsError(
                f"mask has {x.shape[axis]} heads, in shape {tuple(x.shape)}, and q has {self._heads}.",
                hint="the mask of all heads, in every process; or one head, which is broadcast",
            )
        return x[at(self._share(x.shape[axis]), axis)]

    def home(self, name: str, like: Any) -> ToParts:
        """The exchange that returns an array like `like`, except for its number of rows, to its owners."""
        whole = self.there["q" if name in ("o", "lse") else name].whole.shape
        if name == "o":
            whole = (*whole[:-1], like.shape[-1])
        if name == "lse":
            whole = (*whole[:-3], whole[-2], whole[-3]) if self._rows_axis == -3 else whole[:-1]
        rows = self._rows[name not in _OF_QUERIES]
        return ToParts(self._link, like, tuple(whole), rows, *self._axes(name), wide=name == "lse")

    def of_all_heads(self, x: Any, like: Any) -> Any:
        """An array with one number per head: those of this process's heads, and 0 for the others."""
        every = self._link.upcast(like)
        every[...] = 0
        every[..., self._share(every.shape[-1])] = x
        return self._link.cast_like(every, like)


def forward(local_call: LocalCall) -> tuple[Any, Any]:
    """As in `ring.forward`."""
    link = local_call.link
    q, _, v = local_call.arrays.values()
    with link.agreement.refusals():
        call = _Call(local_call)
        homes = {"o": call.home("o", v), "lse": call.home("lse", q)}
    link.agreement.reach(call.terms)

    def attend() -> None:
        arrays = [x.arrive() for x in call.there.values()]
        function = attention_varlen if call.cuts else attention
        o, lse = function(*arrays, *call.cuts, return_lse=True, **call.how)
        homes["o"].fill(o)
        homes["lse"].fill(lse)

    with Round(link) as messages:
        exchange(messages, link, [*call.there.values()])
        messages.work(attend)
        exchange(messages, link, [*homes.values()])
    return homes["o"].arrive(), homes["lse"].arrive()


def backward(local_call: LocalCall, wanted: tuple[bool, bool] = (True, True)) -> Gradients[Any]:
    """As in `ring.backward`: a process that fails returns NaN gradients of its heads."""
    link, arrays, options = local_call.link, local_call.arrays, local_call.options
    with link.agreement.refusals():
        call = _Call(local_call)
        given_back = [name for name, x in zip("qkv", (True, *wanted), strict=True) if x]
        homes = {name: call.home(name, arrays[name]) for name in given_back}
    link.agreement.reach(call.terms)
    sinks = options["sinks"]
    dsinks: Any = None

    def differentiate() -> None:
        nonlocal dsinks
        arrays = {name: x.arrive() for name, x in call.there.items()}
        dlse = arrays.pop("dlse", None)
        function = attention_varlen_backward if call.cuts else attention_backward
        grads = function(*arrays.values(), *call.cuts, dlse=dlse, **call.how)
        for name, home in homes.items():
            home.fill(getattr(grads, f"d{name}"))
        dsinks = None if sinks is None else call.of_all_heads(grads.dsinks, sinks)

    with Round(link) as messages:
        exchange(messages, link, [*call.there.values()])
        messages.work(differentiate)
        exchange(messages, link, [*homes.values()])
    arrived = {f"d{name}": home.arrive() for name, home in homes.items()}
    return Gradients(**{"dk": None, "dv": None, **arrived}, dsinks=dsinks)

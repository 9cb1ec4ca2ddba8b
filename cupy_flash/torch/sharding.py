"""Sharding rules of the operators for DTensors: by batch and by heads, so that each device runs its own."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from ..call.options import AXES_OF
from ..errors import UnsupportedError
from .call import ARGUMENTS, GRADIENTS, TENSORS, Call
from .ops import differentiate, operator

__all__ = ["head_first"]


def head_first(call: Call) -> Call:
    """A call of DTensors in the layout "bhsd", for which the rules are written; refuse dropout."""
    if call.options.dropout:
        raise UnsupportedError(
            "dropout over DTensors: it depends on the global position, and a device knows only its own.",
            hint="dropout=0.0, or torch.distributed.tensor.experimental.local_map and a seed for each device",
        )
    is_packed = call.tensors[TENSORS.index("cu_seqlens_q")] is not None
    if call.options.layout == "bhsd" or is_packed or call.tensors[0].dim() == 2:
        return call
    q, k, v, *others = call.tensors
    turned = (x.transpose(-3, -2) for x in (q, k, v))
    # why: torch caches a rule's result by the tensors of a call alone, without its layout.
    return call._replace(tensors=(*turned, *others), options=call.options._replace(layout="bhsd"))


class _Split:
    """A way to shard a call along one axis of a mesh.

    Parameters
    ----------
    kind : {"nothing", "batch", "heads"}
        The axis of the arrays that is sharded.
    specs : dict of str to spec or None
        Specs of the tensors of the call by the names in TENSORS, None for one that is not given.
    """

    def __init__(self, kind: str, specs: dict[str, Any]) -> None:
        self.kind, self.specs = kind, specs
        self.is_packed = specs["cu_seqlens_q"] is not None

    def possible(self) -> bool:
        """Whether every device gets whole sequences, or whole heads of keys with all their query heads."""
        q, k = self.specs["q"], self.specs["k"]
        if self.kind == "batch":
            return bool(not self.is_packed and q.ndim == 4)
        if self.kind == "heads":
            return bool(q.ndim > 2 and k.shape[self._heads(k)] % q.mesh.size() == 0)
        return True

    def _heads(self, x: Any) -> int:
        return 1 if self.is_packed else int(x.ndim) - 3

    def of_rows(self, lse: bool = False) -> Any:
        """The placement of arrays with rows: q, k, v, o, their gradients, and lse."""
        if self.kind == "nothing":
            return Replicate()
        if self.kind == "batch":
            return Shard(0)
        return Shard(self._heads(self.specs["q"]) - (lse and self.is_packed))

    def of(self, name: str) -> Any:
        """The placement of an argument; None if it is not given."""
        x = self.specs[name]
        if x is None:
            return None
        if name in ("q", "k", "v"):
            return self.of_rows()
        axes = AXES_OF.get(name, ())
        if self.kind not in axes:
            return Replicate()
        axis = axes.index(self.kind) + x.ndim - len(axes)  # an array may lack leading axes
        is_shared = axis < 0 or ("keys" in axes and x.shape[axis] == 1)
        return Replicate() if is_shared else Shard(axis)

    def of_gradient(self, name: str) -> Any:
        """The placement of an argument's gradient: a partial sum if the argument is replicated."""
        placed = self.of(name)
        if placed is None:
            return Replicate()
        return Partial() if placed == Replicate() and self.kind != "nothing" else placed


def _ways(tensors: tuple[Any, ...]) -> list[_Split]:
    specs = dict(zip(TENSORS, tensors, strict=True))
    ways = [_Split(kind, specs) for kind in ("batch", "heads", "nothing")]
    return [way for way in ways if way.possible()]


_OTHERS = [None] * len(ARGUMENTS)


def _forward(*values: Any) -> Any:
    return [
        ([way.of_rows(), way.of_rows(lse=True)], [*map(way.of, TENSORS), *_OTHERS])
        for way in _ways(values[: len(TENSORS)])
    ]


def _backward(do: Any, dlse: Any, _o: Any, _lse: Any, *values: Any) -> Any:
    return [
        (
            [way.of_gradient(TENSORS[position]) for position in GRADIENTS],
            [
                None if do is None else way.of_rows(), None if dlse is None else way.of_rows(lse=True),
                way.of_rows(), way.of_rows(lse=True), *map(way.of, TENSORS), *_OTHERS,
            ],
        )
        for way in _ways(values[: len(TENSORS)])
    ]  # fmt: skip


register_sharding(operator)(_forward)
register_sharding(differentiate)(_backward)

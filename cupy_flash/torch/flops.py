"""FLOP formulas of the operators for `torch.utils.flop_counter.FlopCounterMode`: matrix products only.

By torch's convention every pair of a query and a key counts, masked or not; `cupy_flash.memory_report` counts
only pairs that are not masked.
"""

from __future__ import annotations

import math
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from ..call.codes import kind_of_codes
from ..call.tangents import TANGENTS
from .call import NAMES
from .kv_cache import NAMES as CACHE_NAMES
from .ops import operators
from .second_order import directions


def _known(x: Any) -> bool:
    """Whether a tensor has values."""
    return not isinstance(x, FakeTensor) and x.device.type != "meta"


def _lengths(offsets: Any, longest: int | None, rows: int, used: Any = None) -> list[int]:
    """Lengths of packed sequences, in use if given; the longest length for each if they have no values."""
    lengths: list[int] = [rows if longest is None else longest] * (offsets.shape[0] - 1)
    if used is not None and _known(used):
        lengths = used.tolist()
    elif _known(offsets):
        lengths = offsets.diff().tolist()
    return lengths


def _pairs(given: dict[str, Any]) -> int:
    """The number of pairs of a query and a key, over all heads."""
    q, k = given["q"], given["k"]
    if given["cu_seqlens_q"] is not None:
        cut_k = given["cu_seqlens_q"] if given["cu_seqlens_k"] is None else given["cu_seqlens_k"]
        queries = _lengths(given["cu_seqlens_q"], given["max_seqlen_q"], q.shape[0], given["seqused_q"])
        keys = _lengths(cut_k, given["max_seqlen_k"], k.shape[0], given["seqused_k"])
        return int(q.shape[1]) * sum(i * j for i, j in zip(queries, keys, strict=True))
    axis = -3 if given["layout"] == "bshd" and q.dim() > 2 else -2
    return int(math.prod(q.shape[:-1]) * k.shape[axis])


@register_flop_formula(operators.attention, get_raw=True)
def _forward(*values: Any, **_: Any) -> int:
    """FLOPs of Q K^T and P V."""
    given = dict(zip(NAMES, values, strict=True))
    return 2 * _pairs(given) * int(given["q"].shape[-1] + given["v"].shape[-1])


@register_flop_formula(operators.attention_backward, get_raw=True)
def _backward(_do: Any, _dlse: Any, _o: Any, _lse: Any, *values: Any, **_: Any) -> int:
    """FLOPs of Q K^T (recomputed), dO V^T, P^T dO, dS K and dS^T Q."""
    given = dict(zip(NAMES, values, strict=True))
    return 2 * _pairs(given) * int(3 * given["q"].shape[-1] + 2 * given["v"].shape[-1])


def _in_directions(values: tuple[Any, ...], once: tuple[int, int], each: tuple[int, int]) -> int:
    """FLOPs in second order: products over head_dim and head_dim_v, made once and for each direction."""
    tangents, arrays = values[: len(TANGENTS)], values[len(TANGENTS) :]
    given, times = dict(zip(NAMES, arrays, strict=True)), math.prod(directions(tangents, arrays))
    by_qk, by_v = (a + times * b for a, b in zip(once, each, strict=True))
    return 2 * _pairs(given) * int(by_qk * given["q"].shape[-1] + by_v * given["v"].shape[-1])


@register_flop_formula(operators.attention_with_jvp, get_raw=True)
def _with_jvp(*values: Any, **_: Any) -> int:
    """FLOPs of the forward pass, and of dQ K^T, Q dK^T, dP V and P dV."""
    return _in_directions(values, (1, 1), (2, 2))


@register_flop_formula(operators.attention_jvp, get_raw=True)
def _jvp(_o: Any, _lse: Any, *values: Any, **_: Any) -> int:
    """FLOPs of Q K^T (recomputed), and of those four products."""
    return _in_directions(values, (1, 0), (2, 2))


@register_flop_formula(operators.attention_hvp, get_raw=True)
def _hvp(*values: Any, **_: Any) -> int:
    """FLOPs of Q K^T and dO V^T (recomputed), and of the tangents of S, dO V^T, dV, dQ and dK."""
    return _in_directions(values[6:], (1, 1), (6, 2))


@register_flop_formula(operators.attention_with_kv_cache, get_raw=True)
def _over_cache(*values: Any, **_: Any) -> int:
    """FLOPs of Q K^T and P V over the keys in use, or over those that each query selects."""
    given = dict(zip(CACHE_NAMES, values, strict=True))
    q, rows = given["q"], -3 if given["layout"] == "bshd" else -2
    if given["cu_seqlens_q"] is None:
        heads, queries = q.shape[-5 - rows], [q.shape[rows]] * q.shape[0]
    else:
        queries = _lengths(given["cu_seqlens_q"], given["max_seqlen_q"], q.shape[0], given["seqused_q"])
        heads = q.shape[1]
    batch, new, cut_new = len(queries), given["k"], given["cu_seqlens_k_new"]
    if cut_new is None:
        appended = [0 if new is None else new.shape[rows]] * batch
    else:
        appended = _lengths(cut_new, None, new.shape[0])
    room = given["k_cache"].shape[rows]
    if given["block_table"] is not None:
        room *= given["block_table"].shape[1]
    lengths: Any = given["cache_seqlens"]
    if lengths is None:
        lengths = [given["length"]] * batch
    else:
        lengths = lengths.tolist() if _known(lengths) else [room] * batch
    before = 0 if given["prefix_k"] is None else given["prefix_k"].shape[rows]
    keys = [min(max(n, 0) + more, room) + before for n, more in zip(lengths, appended, strict=True)]
    if given["indices"] is not None:
        keys = [given["indices"].shape[-1]] * batch
    halves = 2 if kind_of_codes(given) else 1  # codes of 4 bits
    pairs = heads * sum(i * j for i, j in zip(queries, keys, strict=True))
    return int(2 * pairs * (q.shape[-1] + halves * given["v_cache"].shape[-1]))

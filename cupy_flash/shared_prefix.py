"""A prefix shared by a batch: its keys are read once for all queries, and partial results are merged.

Sources: Hydragen (Juravsky and others, arXiv:2402.05099); cascade inference (flashinfer).

[P1]  the queries of all sequences over the prefix, as rows of one sequence: O1, LSE1
[P2]  the queries of each sequence over its own keys: O2, LSE2
[P3]  merge

Keys of the prefix have positions 0 to P - 1, the own keys of a sequence positions from P on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .call.cache.rows import Rows
from .call.checks import one_of
from .call.codes import kind_of_codes
from .call.compound import Spans
from .call.head_scale import in_dtype, scale_shape, times
from .call.public_names import public_name, type_phrase
from .call.reproducible import refuse_reproducible
from .call.values import LAYOUTS
from .errors import InvalidArgumentsError, UnsupportedError
from .merge import merge_parts

__all__ = ["Prefix", "over_keys"]


class Prefix(NamedTuple):
    """The keys and values that all sequences begin with."""

    # array, shape (1, prefix, heads_k, head_dim).
    k: Any
    v: Any
    layout: str  # {"bhsd", "bshd"}: layout of the queries and of the own keys
    packed: bool  # whether queries are packed

    @classmethod
    def of_cache(cls, q: Any, k_cache: Any, v_cache: Any, options: Mapping[str, Any]) -> Prefix | None:
        """The prefix of a call of `attention_with_kv_cache` with these options; None without one."""
        prefix = options.get("prefix_k"), options.get("prefix_v")
        if prefix[0] is None and prefix[1] is None:
            return None
        _check_options(prefix, options)
        packed = options.get("cu_seqlens_q") is not None
        halves = 2 if kind_of_codes(options) else 1  # why: an element holds two 4-bit codes
        return cls.of(q, k_cache, v_cache, prefix, options.get("layout", "bhsd"), packed, halves)

    def behind(self, options: Mapping[str, Any]) -> Any:
        """The options for the cache alone; its rotation tables start at the row after the prefix."""
        own = {name: x for name, x in options.items() if name not in ("prefix_k", "prefix_v")}
        for name in ("rotary_cos", "rotary_sin"):
            if own.get(name) is not None and own.get("rotary_seqlens") is None:
                own[name] = own[name][self.k.shape[1] :]
        return own

    @classmethod
    def of(
        cls,
        q: Any,
        k: Any,
        v: Any,
        prefix: tuple[Any, Any],
        layout: str,
        packed: bool = False,
        halves: int = 1,
        names: tuple[str, str] = ("prefix[0]", "prefix[1]"),
    ) -> Prefix:
        """Check the keys and values of a prefix, (heads_k, prefix, head_dim) or as in the layout.

        An element of k and v holds `halves` features. `names` are the public names of the two arrays.
        """
        rank = 3 if packed else 4
        for name, x in (("q", q), ("k", k), ("v", v), (names[0], prefix[0]), (names[1], prefix[1])):
            if not (isinstance(getattr(x, "shape", None), tuple) and hasattr(x, "swapaxes")):
                raise InvalidArgumentsError(
                    f"{name} is {type_phrase(x)}, and a shared prefix is an array.",
                    hint="a NumPy, CuPy, torch or JAX array",
                )
        if len(q.shape) != rank or len(k.shape) != 4 or len(v.shape) != 4 or not one_of(layout, LAYOUTS):
            raise InvalidArgumentsError(
                f"q has rank {len(q.shape)}, k {len(k.shape)}, v {len(v.shape)}, and layout is {layout!r}.",
                hint=f'with a shared prefix q of rank {rank}, k and v of 4, layout="bhsd" or "bshd"',
            )
        found = []
        for name, x, own in ((names[0], prefix[0], k), (names[1], prefix[1], v)):
            four = (1, *x.shape) if len(x.shape) == 3 else tuple(x.shape)
            wanted = [1, *own.shape[1:3], halves * own.shape[3]]
            wanted[1 if layout == "bshd" else 2] = -1
            if len(four) != 4 or any(n not in (-1, m) for n, m in zip(wanted, four, strict=True)):
                axes = ", ".join("prefix" if n == -1 else str(n) for n in wanted[1:])
                raise InvalidArgumentsError(
                    f"{name} has shape {tuple(x.shape)} for keys of shape {tuple(own.shape)}.",
                    hint=f"{name} as ({axes}), or that with a batch of 1",
                )
            if x.dtype != q.dtype:
                raise InvalidArgumentsError(
                    f"{name} has dtype {x.dtype}, q {q.dtype}.", hint=f"{name} in the dtype of q"
                )
            x = x.reshape(four)
            found.append(x if layout == "bshd" else x.swapaxes(1, 2))
        if found[0].shape[1] != found[1].shape[1]:
            raise InvalidArgumentsError(
                f"{names[0]} has {found[0].shape[1]} keys, {names[1]} {found[1].shape[1]} values.",
                hint="one value per key",
            )
        return cls(found[0], found[1], layout, packed)

    def attend(self, attention: Callable[..., Any], q: Any, options: Mapping[str, Any]) -> tuple[Any, Any]:
        """[P1] O and LSE over the prefix, in the shapes of attention of q.

        Parameters
        ----------
        attention : callable
            `cupy_flash.attention`, or the function of an adapter.
        q : array
        options : mapping of str to object
            Options of attention.
        """
        rows = q if self.packed or self.layout == "bshd" else q.swapaxes(1, 2)
        grouped, (heads, dim) = rows.shape[:-2], rows.shape[-2:]
        count = math.prod(grouped)
        o, lse = attention(
            rows.reshape(1, count, heads, dim), self.k, self.v, layout="bshd", return_lse=True, **options
        )
        o = o.reshape(*grouped, heads, o.shape[-1])
        if self.packed:
            return o, lse[0]
        lse = lse.reshape(heads, *grouped).swapaxes(0, 1)
        return (o if self.layout == "bshd" else o.swapaxes(1, 2)), lse

    def before_cache(
        self, xp: Any, attention: Callable[..., Any], q: Any, k_cache: Any, options: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """`attend` for queries over a cache, rotated and masked by the positions of their rows.

        Parameters
        ----------
        xp : module
            Namespace of the arrays, as in `merge.merge_parts`.
        attention, q
            As in `attend`.
        k_cache : array
        options : mapping of str to object
            Options of `attention_with_kv_cache` as the caller gave them, checked, with cache_seqlens.
        """
        handed_on = {name: options[name] for name in ("scale", "softcap", "precision") if name in options}
        left, right = options.get("window") or (None, None)
        right = 0 if options.get("causal") else right
        if self.packed or options.get("rotary_cos") is not None or (left, right) != (None, None):
            rows, _ = Rows.of(xp, q, k_cache, self.layout, self.k.shape[1], options)
            q = rows.rotated(xp, q, options, self.layout)
            handed_on["mask"] = Spans(rows.spans(xp, self.k.shape[1], left, right))
        return self.attend(attention, q, handed_on)

    def may_hold_queries(self, q: Any, options: Mapping[str, Any]) -> bool:
        """Whether, by shapes, a query may have a position in the prefix and attend to keys after it.

        The tables from `behind`, which start at the end of the prefix, have no row for such a query.
        """
        if options.get("rotary_cos") is None or options.get("rotary_seqlens") is not None:
            return False
        _, right = options.get("window") or (None, None)
        if options.get("causal") or (right is not None and right <= 0):
            return False
        k, axis = options.get("k"), 1 if self.layout == "bshd" else 2
        if self.packed:
            return options.get("max_seqlen_q") != 1
        return bool(q.shape[axis] > max(1, 0 if k is None else k.shape[axis]))

    def rotated(self, xp: Any, q: Any, k_cache: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        """Queries and new keys, rotated by position, by name; without tables, to rotate them only once.

        Parameters
        ----------
        xp, q, k_cache, options
            As in `before_cache`.
        """
        rows, new = Rows.of(xp, q, k_cache, self.layout, self.k.shape[1], options)
        turned = {"q": rows.rotated(xp, q, options, self.layout), "rotary_cos": None, "rotary_sin": None}
        if new is not None:
            turned["k"] = new.rotated(xp, options["k"], options, self.layout)
        return turned

    def merge(self, xp: Any, first: tuple[Any, Any], rest: tuple[Any, Any], dtype: Any) -> tuple[Any, Any]:
        """[P3] Merge; return O in a dtype, and LSE."""
        o, lse = merge_parts(xp, (first, rest), self.packed or self.layout == "bshd")
        return in_dtype(o, dtype), lse


def over_keys(
    xp: Any, attention: Callable[..., Any], q: Any, k: Any, v: Any, prefix: tuple[Any, Any],
    options: Mapping[str, Any],
) -> tuple[Any, Any]:  # fmt: skip
    """Attention over a shared prefix and the own keys of each sequence, with the gradients of `attention`.

    Parameters
    ----------
    xp : module
        Namespace of the arrays, as in `merge.merge_parts`.
    attention : callable
        As in `Prefix.attend`.
    q, k, v : array
        As in `attention`, of rank 4.
    prefix : (array, array)
        As in `Prefix.of`.
    options : mapping of str to object
        causal, scale, softcap, layout, precision and reproducible, as in `attention`.

    Returns
    -------
    o, lse : array
    """
    refuse_reproducible(options.get("reproducible"), "attention with a shared prefix")
    names = "prefix_k", "prefix_v"  # as in `attention_with_shared_prefix`
    shared = Prefix.of(q, k, v, prefix, options.get("layout", "bhsd"), names=names)
    rest = attention(q, k, v, return_lse=True, **options)  # [P2]
    whole = {name: x for name, x in options.items() if name not in ("causal", "layout")}
    scale: Any = options.get("scale")
    if len(getattr(scale, "shape", ())) == 2 and math.prod(scale.shape) > 1:
        # why: [P1] has the queries of all sequences as one sequence
        shape = scale_shape(tuple(scale.shape), tuple(q.shape), shared.layout)
        q, whole["scale"] = times(q, scale.reshape(shape)), 1.0
    return shared.merge(xp, shared.attend(attention, q, whole), rest, q.dtype)


def _check_options(prefix: tuple[Any, Any], options: Mapping[str, Any]) -> None:
    """Refuse options that have no meaning with a prefix, or are not supported."""
    if prefix[0] is None or prefix[1] is None:
        missing = "keys" if prefix[0] is None else "values"
        raise InvalidArgumentsError(f"prefix has no {missing}.", hint="prefix=(keys, values), or None")
    reasons = {
        "alibi_slopes": "the distance of a query to the prefix differs from sequence to sequence",
        "rotate_cache": "keys of the prefix are read as they are",
        "indices": "they are positions in the cache, and each query would see all of the prefix",
        "reproducible": "the array library merges the parts, and its exp has no guaranteed bits",
    }
    for name, reason in reasons.items():
        x = options.get(name)
        if x is not None and x is not False and not (name == "reproducible" and x == "run"):
            raise UnsupportedError(
                f"{public_name(name)} is given with a shared prefix: {reason}.",
                hint="the prefix in the cache, its pages in the block_table of every sequence",
            )

"""A prefix that a whole batch shares: its keys are read once, for all queries, and the parts merged exactly.

Sources: Hydragen (Juravsky and others, arXiv:2402.05099); cascade inference (flashinfer).

[P1]  the queries of all sequences over the prefix, as rows of one sequence: O1, LSE1
[P2]  those of each sequence over its own keys: O2, LSE2
[P3]  merge

Keys of the prefix stand at positions 0 to P - 1, each one's own from P on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .call.checks import one_of
from .call.codes import kind_of_codes
from .call.compound import Spans
from .call.problem import MAX_SEQLEN
from .call.reproducible import refuse_reproducible
from .call.spelling import kind_of, spelled
from .call.values import LAYOUTS
from .errors import InvalidArgumentsError, UnsupportedError
from .merge import united

__all__ = ["Prefix", "over_keys"]


class Prefix(NamedTuple):
    """Keys and values that all sequences begin with.

    Attributes
    ----------
    k, v : array, shape (1, prefix, heads_k, head_dim)
    layout : {"bhsd", "bshd"}
        Of the queries and of each one's own keys.
    packed : bool
        Whether queries are rows of several sequences.
    """

    k: Any
    v: Any
    layout: str
    packed: bool

    @classmethod
    def of_cache(cls, q: Any, k_cache: Any, v_cache: Any, options: Mapping[str, Any]) -> Prefix | None:
        """That of a call of `attention_with_kv_cache` with these options, if it has one."""
        prefix = options.get("prefix_k"), options.get("prefix_v")
        if prefix[0] is None and prefix[1] is None:
            return None
        _check_options(prefix, options)
        packed = options.get("cu_seqlens_q") is not None
        halves = 2 if kind_of_codes(options) else 1  # two codes of 4 bits to an element
        return cls.of(q, k_cache, v_cache, prefix, options.get("layout", "bhsd"), packed, halves)

    def behind(self, options: Mapping[str, Any]) -> Any:
        """The options of the cache alone, whose keys begin at a later row of the tables of rotation."""
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
        """Check (heads_k, prefix, head_dim) keys and values, as the layout has them, beside those of each.

        An element of k and v holds as many features as `halves` says. names: what the caller calls the two.
        """
        rank = 3 if packed else 4
        for name, x in (("q", q), ("k", k), ("v", v), (names[0], prefix[0]), (names[1], prefix[1])):
            if not (isinstance(getattr(x, "shape", None), tuple) and hasattr(x, "swapaxes")):
                raise InvalidArgumentsError(
                    f"{name} is {kind_of(x)}, beside a shared prefix.",
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
                    f"{name} has shape {tuple(x.shape)} beside own keys of shape {tuple(own.shape)}.",
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
        """[P1] O and LSE over the prefix, in the shapes that attention of q gives them.

        Parameters
        ----------
        attention : callable
            `cupy_flash.attention`, or that of an adapter.
        q : array
        options : mapping of str to object
            Of attention.
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
        """The same for queries over a cache: where each row stands decides its rotation and its band.

        Parameters
        ----------
        xp : module
            Of the arrays, as of `merge.united`.
        attention, q
            As of `attend`.
        k_cache : array
        options : mapping of str to object
            Those of `attention_with_kv_cache`, checked, as the caller gave them, with cache_seqlens.
        """
        handed_on = {name: options[name] for name in ("scale", "softcap", "precision") if name in options}
        left, right = options.get("window") or (None, None)
        right = 0 if options.get("causal") else right
        if self.packed or options.get("rotary_cos") is not None or (left, right) != (None, None):
            rows, _ = _Rows.of(xp, q, k_cache, self, options)
            q = rows.rotated(xp, q, options, self.layout)
            handed_on["mask"] = Spans(rows.spans(xp, self.k.shape[1], left, right))
        return self.attend(attention, q, handed_on)

    def may_hold_queries(self, q: Any, options: Mapping[str, Any]) -> bool:
        """Whether a query may stand inside the prefix and see keys behind it, as far as shapes say.

        Tables that begin at the end of the prefix, those of `behind`, have no row for it.
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
        """Queries and new keys, by name, rotated by where they stand, and no tables for anybody else.

        Parameters
        ----------
        xp, q, k_cache, options
            As of `before_cache`.
        """
        rows, new = _Rows.of(xp, q, k_cache, self, options)
        turned = {"q": rows.rotated(xp, q, options, self.layout), "rotary_cos": None, "rotary_sin": None}
        if new is not None:
            turned["k"] = new.rotated(xp, options["k"], options, self.layout)
        return turned

    def unite(self, xp: Any, first: tuple[Any, Any], rest: tuple[Any, Any], dtype: Any) -> tuple[Any, Any]:
        """[P3] O in a dtype, and LSE."""
        o, lse = united(xp, (first, rest), self.packed or self.layout == "bshd")
        return _cast(o, dtype), lse


def over_keys(
    xp: Any, attention: Callable[..., Any], q: Any, k: Any, v: Any, prefix: tuple[Any, Any],
    options: Mapping[str, Any],
) -> tuple[Any, Any]:  # fmt: skip
    """Attention over a shared prefix and keys of each one's own, with the gradients that `attention` has.

    Parameters
    ----------
    xp : module
        Of the arrays, as of `merge.united`.
    attention : callable
        As of `Prefix.attend`.
    q, k, v : array
        As `attention` takes them, of rank 4.
    prefix : (array, array)
        As of `Prefix.of`.
    options : mapping of str to object
        causal, scale, softcap, layout, precision and reproducible, of `attention`.

    Returns
    -------
    o, lse : array
    """
    refuse_reproducible(options.get("reproducible"), "attention with a shared prefix")
    names = "prefix_k", "prefix_v"  # of `attention_with_shared_prefix`
    shared = Prefix.of(q, k, v, prefix, options.get("layout", "bhsd"), names=names)
    rest = attention(q, k, v, return_lse=True, **options)  # [P2]
    whole = {name: x for name, x in options.items() if name not in ("causal", "layout")}
    return shared.unite(xp, shared.attend(attention, q, whole), rest, q.dtype)


def _check_options(prefix: tuple[Any, Any], options: Mapping[str, Any]) -> None:
    """Refuse what has no meaning with a prefix, or no way."""
    if prefix[0] is None or prefix[1] is None:
        missing = "keys" if prefix[0] is None else "values"
        raise InvalidArgumentsError(f"prefix has no {missing}.", hint="prefix=(keys, values), or None")
    reasons = {
        "alibi_slopes": "the bias of a key of the prefix is another one for each sequence",
        "rotate_cache": "keys of the prefix are read as they are",
        "reproducible": "the array library merges the parts, and its exp has no guaranteed bits",
    }
    for name, reason in reasons.items():
        x = options.get(name)
        if x is not None and x is not False and not (name == "reproducible" and x == "run"):
            raise UnsupportedError(
                f"{spelled(name)} is given with a shared prefix: {reason}.",
                hint="the prefix in the cache, its pages in the block_table of every sequence",
            )


def _cast(x: Any, dtype: Any) -> Any:
    return x.astype(dtype) if hasattr(x, "astype") else x.to(dtype)


class _Rows(NamedTuple):
    """The queries, or the new keys, of all sequences of a batch, one behind the other.

    Attributes
    ----------
    sequence, row : array of int, shape (rows,)
        Of which sequence a row is, and its number there.
    inside : array of bool, shape (rows,)
        Whether it is a row of any.
    first : array of int32, shape (batch,)
        Where the first row of a sequence stands; key 0 of the prefix stands at 0.
    """

    sequence: Any
    row: Any
    inside: Any
    first: Any

    @classmethod
    def of(
        cls, xp: Any, q: Any, k_cache: Any, prefix: Prefix, options: Mapping[str, Any]
    ) -> tuple[_Rows, _Rows | None]:
        """Those of the queries and of the new keys of a call, without reading its lengths on the host."""
        axis = 1 if prefix.layout == "bshd" else 2
        # why: torch makes arrays on the CPU unless told otherwise
        kind = {"dtype": xp.int32, **({"device": q.device} if xp.__name__ == "torch" else {})}
        table, k = options.get("block_table"), options.get("k")
        room = k_cache.shape[axis] * (1 if table is None else table.shape[1])
        most = options.get("max_seqlen_k")
        room = room if most is None else min(room, most)
        cut = _cut(xp, q, options.get("cu_seqlens_q"), axis, kind)
        used = options.get("seqused_q")
        used = cut[1:] - cut[:-1] if used is None else used
        before = options["cache_seqlens"] + xp.zeros_like(used)  # an integer is that of all
        length, new = xp.clip(before, 0, room), None
        if k is not None:
            cut_new = _cut(xp, k, options.get("cu_seqlens_k_new"), axis, kind)
            added = cut_new[1:] - cut_new[:-1]
            new = cls._at(xp, cut_new, _count(k, axis), added, length + prefix.k.shape[1], kind)
            length = xp.clip(length + added, 0, room)
        first = length - used + prefix.k.shape[1]
        return cls._at(xp, cut, _count(q, axis), used, first, kind), new

    @classmethod
    def _at(cls, xp: Any, cut: Any, count: int, used: Any, first: Any, kind: dict[str, Any]) -> _Rows:
        rows = xp.arange(count, **kind)
        sequence = xp.clip((rows[:, None] >= cut[None, 1:]).sum(-1), 0, max(0, len(used) - 1))
        row = rows - cut[sequence]
        inside = (rows < cut[-1]) & (row >= 0) & (row < used[sequence])
        return cls(sequence, row, inside, first)

    def spans(self, xp: Any, keys: int, left: int | None, right: int | None) -> Any:
        """Keys of the prefix that each row sees, as spans by query; none that is no query."""
        stand = self.first[self.sequence] + self.row
        start = xp.zeros_like(stand) if left is None else xp.clip(stand - min(left, MAX_SEQLEN), 0, keys)
        stop = xp.zeros_like(stand) + keys
        if right is not None:  # why cut twice: the sum would not fit 32 bits
            stop = xp.clip(xp.clip(stand + 1, -MAX_SEQLEN, keys) + min(right, MAX_SEQLEN - keys), 0, keys)
        return xp.stack([start, stop * self.inside], -1)[:, None]

    def rotated(self, xp: Any, x: Any, options: Mapping[str, Any], layout: str) -> Any:
        """The rows turned by their positions, as the attention over the cache turns them."""
        cos: Any = options.get("rotary_cos")
        sin: Any = options.get("rotary_sin")
        if cos is None:
            return x
        given: Any = options.get("rotary_seqlens")
        first = self.first if given is None else given
        at = xp.clip(first[self.sequence] + self.row, 0, len(cos) - 1)
        acc = xp.float64 if x.dtype == xp.float64 else xp.float32
        half, wide = cos.shape[1], _cast(x, acc)
        if layout == "bshd" or len(x.shape) == 3:
            shape = (*x.shape[:-2], 1, half)
        else:
            shape = (x.shape[0], 1, x.shape[2], half)
        c, s = (_cast(table[at], acc).reshape(shape) for table in (cos, sin))
        if options.get("rotary_interleaved"):
            a, b = wide[..., : 2 * half : 2], wide[..., 1 : 2 * half : 2]
        else:
            a, b = wide[..., :half], wide[..., half : 2 * half]
        turned = [a * c - b * s, b * c + a * s]
        if options.get("rotary_interleaved"):
            turned = [xp.stack(turned, -1).reshape(*wide.shape[:-1], 2 * half)]
        return _cast(xp.concatenate([*turned, wide[..., 2 * half :]], -1), x.dtype)


def _count(x: Any, axis: int) -> int:
    """Rows of packed sequences, or of all sequences of a batch."""
    return int(x.shape[0] * (1 if len(x.shape) == 3 else x.shape[axis]))


def _cut(xp: Any, x: Any, given: Any, axis: int, kind: dict[str, Any]) -> Any:
    """Where each sequence begins among these rows."""
    return xp.arange(x.shape[0] + 1, **kind) * x.shape[axis] if given is None else given

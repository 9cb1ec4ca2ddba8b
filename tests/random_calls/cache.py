"""Calls over caches of every kind: in one piece, in slots, in pages; of floats, of 8 and of 4 bits."""

from __future__ import annotations

import dataclasses
import random
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import cupy_flash
from cupy_flash import testing
from cupy_flash.testing.kv_cache import (
    Sequence,
    dequantized_int4,
    dequantized_nvfp4,
    rotate,
    rotated_queries,
)
from tests.cases import DTYPES, numpy_dtype
from tests.kv_cases import KvCase
from tests.public import cached, int4_parts, nvfp4_parts, over_cache
from tests.statistic_checks import assert_close

from .dense import ANYTHING
from .edges import KEYS, bound, dtype_of, edge, head_dim, heads, length, maybe
from .memory import numpy_of

__all__ = ["Cached", "CachedStatistics"]

PARTS = {"int4": ("scale", "zero"), "nvfp4": ("block_scale",)}
WRITTEN = tuple(f"{x}_{part}" for x in "kv" for part in ("cache", "scale", "zero", "block_scale"))


@dataclass(frozen=True, kw_only=True)
class Cached(KvCase):
    """A call of attention_with_kv_cache.

    Attributes
    ----------
    stored : str
        Also "int4" and "nvfp4".
    each : tuple of int
        Queries of each sequence, which are packed then; empty: as many of all.
    each_new : tuple of int
        The same of new keys.
    leftpad, outside, tree : bool
        Keys that nobody sees; entries of a table that lead nowhere; spans of the last keys.
    used_q, ragged : bool
        As of `Packed`.
    on_read, moved : bool
        Whether keys are rotated as they are read; whether rotation counts from other positions.
    group : int
        Features of a scale of int4.
    mask : str, optional
        Axes of a mask.
    holes : bool
        Whether keys that are of no sequence hold NaN and infinities.
    reproducible : str, optional
    """

    each: tuple[int, ...] = ()
    each_new: tuple[int, ...] = ()
    leftpad: bool = False
    outside: bool = False
    tree: bool = False
    used_q: bool = False
    ragged: bool = False
    on_read: bool = False
    moved: bool = False
    mask: str | None = None
    holes: bool = False
    units: str = "float32"  # of int4
    group: int = 32
    reproducible: str | None = None

    @classmethod
    def draw(cls, draw: random.Random, dtypes: tuple[str, ...] = DTYPES) -> Cached:
        """Any, of what goes together."""
        batch = draw.choice((1, 2, 3))
        kind = draw.choice(("contiguous", "indexed", "paged", "paged"))
        page = draw.choice((1, 3, 5, 16, 16, 24, 64, 128))
        far = -(-draw.choice((draw.randint(1, 700), *KEYS)) // page) * page
        room = draw.choice((page, 2 * page, 7 * page, far, far, far))
        room = min(room, 900 // page * page) or page
        stored = draw.choice(("same", "same", "same", "same", "int8", "e4m3", "int4", "nvfp4"))
        dtype = dtype_of(draw, dtypes)
        dims = head_dim(draw)
        if stored == "int4":
            dims = draw.choice(((32, 32), (64, 32), (64, 128), (96, 64)))
        if stored == "nvfp4":
            dims = draw.choice(((16, 16), (48, 16), (64, 80), (128, 64)))
        packed = draw.random() < 0.25
        queries = draw.choice((1, 1, 1, 2, 3, 8, 11, 12, 17, length(draw)))
        new = min(room, draw.choice((0, 0, 0, 1, queries, draw.randint(1, 9))))
        if stored == "int4" and dtype != "float32":
            new = 0  # codes that a call makes stand for no numbers of a short dtype
        prefix = stored == "same" and draw.random() < 0.2
        latent = not prefix and stored not in PARTS and dims[1] < dims[0] and draw.random() < 0.25
        # of latents the features behind the values
        turnable = dims[0] - latent * dims[1]
        turns = turnable > 1 and draw.random() < (0.5 if prefix else 0.25)
        rotary = 2 * draw.randint(1, turnable // 2) if turns else 0
        # why short ones: of more queries than keys some stand before the first key
        short = min(room, queries)
        lengths = tuple(
            draw.choice((0, room, draw.randint(0, short), edge(draw, room), draw.randint(0, room)))
            for _ in range(batch)
        )
        own_turns = bool(rotary) and not (prefix or latent)
        on_read = own_turns and draw.random() < 0.3
        counts = [draw.choice((0, min(2, queries), queries, draw.randint(0, queries))) for _ in range(batch)]
        tree = queries <= 17 and not rotary and draw.random() < (0.5 if new == queries else 0.1)
        selects = not (new or prefix or rotary or tree) and draw.random() < 0.25
        each_new = tuple(draw.randint(0, new) for _ in range(batch)) if packed and new else ()
        most = max(counts) if packed else queries
        alike = not new or (each_new == tuple(counts) if packed else new == queries)
        moved = own_turns and not on_read and alike and min(lengths) >= most and draw.random() < 0.5
        used_q = packed and not (rotary or selects or tree or prefix) and draw.random() < 0.2
        ragged = packed and not (selects or tree or prefix) and draw.random() < 0.2
        often = 0.35 if draw.random() < 0.5 else 0.12
        return cls(
            dtype=dtype,
            stored=stored,
            kind=kind,
            page=page,
            room=room,
            lengths=lengths,
            heads=heads(draw),
            queries=queries,
            head_dims=dims,
            new=new,
            rotary=rotary,
            interleaved=draw.random() < 0.5,
            last=latent or draw.random() < 0.5,
            tables=draw.choice(("float32", "same")),
            causal=draw.random() < 0.5,
            window=maybe(draw, 0.3, 1) and (bound(draw, room), bound(draw, room)),
            softcap=maybe(draw, often, 0.5, 20.0),
            scale=maybe(draw, often, 0.3, -0.1),
            alibi=None if prefix or selects else maybe(draw, often, "h", "bh"),
            sinks=draw.random() < often,
            scales=draw.choice(("h", "bh")),
            layout="bshd" if packed else draw.choice(("bhsd", "bshd")),
            splits=maybe(draw, 0.2, 1, 2, 3, 7),
            each=tuple(counts) if packed else (),
            each_new=each_new,
            leftpad=draw.random() < 0.15,
            outside=kind == "paged" and not new and draw.random() < 0.15,
            tree=tree,
            used_q=used_q,
            ragged=ragged,
            on_read=on_read,
            moved=moved,
            group=draw.choice([n for n in (32, 64, 128) if dims[0] % n == 0 == dims[1] % n] or [32]),
            mask=None if tree or packed or selects else maybe(draw, 0.15, "11qk", "bhqk", "b11k"),
            latent=latent,
            selected=draw.choice((1, 7, 16, draw.randint(1, 200))) if selects else 0,
            integers=draw.choice(("int32", "int64")),
            # why not of latents: there those are values, too, which have to be finite
            holes=stored == "same" and not latent and draw.random() < 0.3,
            prefix=draw.randint(1, 150) if prefix else 0,
            units=draw.choice(("float16", "float32")),
            reproducible=maybe(draw, 0.15, "batch", "run", "prefill"),
        )

    # ---- arrays

    def inputs(self) -> dict[str, np.ndarray]:
        """Those of a case, what codes need, masks, and packed rows."""
        plain = KvCase(**{f.name: getattr(self, f.name) for f in dataclasses.fields(KvCase)} | {
            "stored": "same" if self.stored in PARTS else self.stored})  # fmt: skip
        made = plain.inputs()
        rng = np.random.default_rng(zlib.crc32(str(self).encode()))
        batch, (heads_q, heads_k) = len(self.lengths), self.heads
        for x in "kv" if self.stored in PARTS else "":
            keys = made[f"{x}_cache"].astype(np.float32)
            if self.stored == "nvfp4":
                made[f"{x}_cache"], made[f"{x}_block_scale"] = nvfp4_parts(keys)
                shape = (heads_k,) if self.scales == "h" else (batch, heads_k)
                made[f"{x}_scale"] = np.exp2(rng.integers(-2, 2, shape)).astype(self.accumulator)
                continue
            codes, scale, zero = int4_parts(keys, group=self.group, dtype=self.units)
            if self.dtype != "float32":  # numbers of few bits, which every dtype holds
                scale[...], zero[...] = 0.125, rng.integers(-8, 0, zero.shape) / 8
            made |= {f"{x}_cache": codes, f"{x}_scale": scale, f"{x}_zero": zero}
        if self.each:
            if self.rotary and made["q"].dtype.itemsize == 2:
                self._settle(made, self._counts("new").tolist())
            made |= self._packed(made)
        if self.leftpad:
            after = made["cache_seqlens"] + self._counts("new")
            made["cache_leftpad"] = np.int32([rng.integers(0, n + 1) for n in after])
        if self.on_read:  # quarters of a turn, which no dtype rounds
            quarters = rng.integers(0, 4, made["rotary_cos"].shape)
            for name, turned in (("rotary_cos", (1, 0, -1, 0)), ("rotary_sin", (0, 1, 0, -1))):
                made[name] = np.array(turned)[quarters].astype(made[name].dtype)
        if self.moved:
            last = len(made["rotary_cos"]) - max(self.queries, self.new)
            made["rotary_seqlens"] = rng.integers(0, last + 1, batch).astype(np.int32)
        if self.used_q:
            made["seqused_q"] = np.int32([rng.integers(0, n + 1) for n in self._counts("queries")])
        if self.ragged:
            made["ragged_mask"] = rng.random(self._pairs_before(made, batch)) < 0.7
        if self.outside:
            table = made["block_table"]
            lost = rng.random(table.shape) < 0.2
            table[lost] = rng.choice([-(2**31), -1, len(made["k_cache"]), 2**31 - 1], int(lost.sum()))
        axes = {"b": batch, "h": heads_q, "q": self.queries, "k": self.room, "1": 1}
        if self.mask is not None:
            made["mask"] = rng.random([axes[axis] for axis in self.mask]) < 0.7
        if self.tree:
            n = int(self._counts("queries").max(initial=0)) if self.each else self.queries
            lead = rng.choice((1, batch)), rng.choice((1, heads_q))
            made["spans"] = rng.integers(0, n + 1, (*lead, 1, n, rng.choice((2, 4)))).astype(np.int32)
        if self.prefix:
            dtype = numpy_dtype(self.dtype)
            for x, dim in zip("kv", self.head_dims, strict=True):
                shape = (self.prefix, heads_k, dim) if self.layout == "bshd" else (heads_k, self.prefix, dim)
                made[f"prefix_{x}"] = rng.standard_normal(shape).astype(dtype)
        if self.holes:
            self._empty(made)
        return made

    def _empty(self, made: Mapping[str, np.ndarray]) -> None:
        """Put anything where the cache holds keys of no sequence."""
        keys = made["k_cache"] if self.layout == "bshd" else made["k_cache"].swapaxes(1, 2)
        unused = np.ones(keys.shape[:2], bool)
        for b, new in enumerate(self._counts("new")):
            first = int(made["cache_leftpad"][b]) if self.leftpad else 0
            for place in self._places(made, b, first, int(made["cache_seqlens"][b] + new)):
                unused[place] = False
        keys[unused] = np.resize(ANYTHING, (unused.sum(), 1, 1))

    def _counts(self, what: str) -> np.ndarray:
        """Queries, or new keys, of each sequence."""
        if not self.each:
            return np.full(len(self.lengths), getattr(self, what), np.int32)
        each = self.each if what == "queries" else self.each_new
        # why the lesser: a call that is made smaller may have fewer rows than its sequences had
        return np.minimum(np.int32(each or (0,) * len(self.lengths)), np.int32(getattr(self, what)))

    def _queries(self, arrays: Mapping[str, np.ndarray], b: int) -> slice:
        """The rows of packed queries of a sequence that are in use."""
        first, last = arrays["cu_seqlens_q"][b : b + 2].tolist()
        return slice(first, first + int(arrays["seqused_q"][b]) if self.used_q else last)

    def _pairs_before(self, arrays: Mapping[str, np.ndarray], b: int) -> int:
        """Queries times keys, of all sequences before one."""
        keys = arrays["cache_seqlens"] + self._counts("new")
        rows = [self._queries(arrays, c) for c in range(b)]
        return sum((at.stop - at.start) * int(n) for at, n in zip(rows, keys, strict=False))

    def _packed(self, made: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Rows of all sequences, one after the other; q and new keys are (batch, rows, ...) before."""
        queries, new = self._counts("queries"), self._counts("new")
        rows = {n: self._by_rows(made[n]) for n in ("q", "k", "v") if n in made}
        # why the last ones: those stand where the case has made sure that rotation is not between two numbers
        found = {"q": np.concatenate([x[len(x) - n :] for x, n in zip(rows["q"], queries, strict=True)])}
        found["cu_seqlens_q"] = np.cumsum((0, *queries), dtype=np.int32)
        if self.selected:
            found["indices"] = np.concatenate(
                [x[len(x) - n :] for x, n in zip(made["indices"], queries, strict=True)]
            )
        if self.new:
            for name in "kv":
                found[name] = np.concatenate([x[:n] for x, n in zip(rows[name], new, strict=True)])
            found["cu_seqlens_k_new"] = np.cumsum((0, *new), dtype=np.int32)
        return found

    def _by_rows(self, x: np.ndarray) -> np.ndarray:
        """An array as (batch, rows, heads, head_dim), whatever the layout."""
        return x if self.layout == "bshd" else x.swapaxes(1, 2)

    # ---- checks

    def check(self, memory: Any) -> None:
        """Compare with FP64: what is returned, what is stored, and that nothing else is touched."""
        host = self.inputs()
        written = WRITTEN if self.new else ()
        changes = {n for n in written if n in host and host[n].ndim == 4}
        own = {n: x for n, x in host.items() if not (self.latent and n in ("v_cache", "v"))}
        given = {n: memory.put(n, x, self._style(n, x), changes=n in changes) for n, x in own.items()}
        options = self.options() | {
            "rotate_cache": self.on_read,
            "splits": self.splits,
            "reproducible": self.reproducible,
            "check": False if self.outside else None,
        }
        if self.mask is not None:
            options["max_seqlen_k"] = self.room
        latents = {}
        if self.latent:
            latents = {
                "k_cache": cupy_flash.LatentCache(given["k_cache"], self.head_dims[1]),
                "v_cache": None,
            }
            given["v_cache"] = given["k_cache"][..., : self.head_dims[1]]
        o, lse = cached(**given | latents, **options, return_lse=True)
        results = numpy_of({"o": o, "lse": lse})
        after = host | {n: np.array(testing.to_numpy(given[n])) for n in changes}
        if self.new:
            self._compare_stored(host, after)
        self._compare(after, results)

    def _style(self, name: str, x: np.ndarray) -> str:
        """How an array may lie: codes and tables are in one piece."""
        loose = self.stored not in PARTS and x.ndim == 4 and name not in ("mask", "spans")
        return "aligned" if loose else "contiguous"

    def _one(self, arrays: Mapping[str, np.ndarray], b: int) -> dict[str, Any]:
        """The call of one sequence, in the layout bhsd, without masks of any kind."""
        swap = self.layout == "bshd"
        made: dict[str, Any] = {"cache_seqlens": arrays["cache_seqlens"][b : b + 1]}
        for name in ("q", "k", "v"):
            if name not in arrays:
                continue
            cuts = arrays.get({"q": "cu_seqlens_q"}.get(name, "cu_seqlens_k_new"))
            rows = b if cuts is None else slice(*cuts[b : b + 2])
            x = arrays[name][self._queries(arrays, b) if cuts is not None and name == "q" else rows]
            made[name] = (x if cuts is None and not swap else x.swapaxes(0, 1))[None]
        for name in WRITTEN:
            if name in arrays:
                x = arrays[name]
                if x.ndim == 4:
                    made[name] = x.swapaxes(1, 2) if swap else x
                else:
                    made[name] = x[b : b + 1] if x.ndim == 2 else x
        if self.kind == "paged":
            made["block_table"] = arrays["block_table"][b : b + 1]
        else:
            made["cache_batch_idx"] = (
                arrays["cache_batch_idx"][b : b + 1] if self.kind == "indexed" else np.int32([b])
            )
        if self.rotary:
            # why without the first rows: there what stands in a prefix finds its angles
            made |= {name: arrays[name][self.prefix :] for name in ("rotary_cos", "rotary_sin")}
        if self.moved:
            usual = int(arrays["cache_seqlens"][b] + self._counts("new")[b]) - made["q"].shape[2]
            places = np.arange(len(made["rotary_cos"])) + arrays["rotary_seqlens"][b] - usual
            for name in ("rotary_cos", "rotary_sin"):
                made[name] = made[name][np.clip(places, 0, len(places) - 1)]
        if self.sinks:
            made["sinks"] = arrays["sinks"]
        if "alibi_slopes" in arrays:
            slopes = arrays["alibi_slopes"]
            made["alibi_slopes"] = slopes[b] if slopes.ndim == 2 else slopes
        for name in ("causal", "window", "softcap", "scale"):
            made[name] = getattr(self, name)
        return made | {"rotary_interleaved": self.interleaved, "rotary_last": self.last}

    def _floats(self, arrays: Mapping[str, np.ndarray], x: str) -> np.ndarray:
        """What a cache holds, as floats but for the scales of heads."""
        cache = arrays[f"{x}_cache"]
        if self.stored == "int4":
            return dequantized_int4(cache, arrays[f"{x}_scale"], arrays[f"{x}_zero"])
        if self.stored == "nvfp4":
            return dequantized_nvfp4(cache, arrays[f"{x}_block_scale"])
        return cache.astype(np.float64)

    def _compare_stored(self, host: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]) -> None:
        """New rows are within a rounding of FP64's, all others have the bits that they had."""
        for b in range(len(self.lengths)):
            call, now = self._one(host, b), self._one(after, b)
            if self.on_read:  # new keys are stored as they are
                del call["rotary_cos"], call["rotary_sin"]
            expected = testing.reference_with_kv_cache(**call)
            for x in "kv":
                wanted = (expected.k_cache if x == "k" else expected.v_cache).astype(np.float64)
                found, fresh = self._floats(now, x), np.zeros(wanted.shape[:3], bool)
                for slot, row in self._new_places(host, b):
                    fresh[slot, :, row] = True
                with np.errstate(invalid="ignore"):  # of what lies where nobody looks
                    error = np.abs(found - wanted)
                unit = testing.budget.UNIT_ROUNDOFF[self.dtype]
                step = {
                    "int8": np.ones_like(wanted), "e4m3": np.maximum(np.abs(wanted) / 8, 2.0**-9),
                    # One step of a code, where the rounding of a unit decides between two.
                    "int4": np.full_like(wanted, 0.0), "nvfp4": np.maximum(np.abs(wanted) / 2, 0.6),
                }.get(self.stored, np.maximum(np.abs(wanted), 1) * unit * 4)  # fmt: skip
                if self.stored == "int4":
                    steps = now[f"{x}_scale"].astype(float)
                    step = np.repeat(steps, wanted.shape[-1] // steps.shape[-1], -1) * 1.1 + 1e-2
                where = np.broadcast_to(fresh[..., None], wanted.shape)
                assert (error <= step)[where].all(), (
                    f"a new row of {x}_cache is off by {error[where].max():.2e}"
                )
        self._compare_kept(host, after)

    def _places(
        self, arrays: Mapping[str, np.ndarray], b: int, first: int, last: int
    ) -> Iterator[tuple[int, int]]:
        """Where keys of a sequence lie, each its slot or page and its row there; those outside do nowhere."""
        table = {"paged": "block_table", "indexed": "cache_batch_idx"}.get(self.kind)
        own = np.ravel(b if table is None else arrays[table][b]).tolist()
        slots, *rest = arrays["k_cache"].shape
        rows = rest[0 if self.layout == "bshd" else 1]
        for place in range(first, last):
            entry, row = divmod(place, rows)
            if entry < len(own) and 0 <= own[entry] < slots:
                yield own[entry], row

    def _new_places(self, host: Mapping[str, np.ndarray], b: int) -> Iterator[tuple[int, int]]:
        """The same of new keys."""
        before = int(host["cache_seqlens"][b])
        return self._places(host, b, before, before + int(self._counts("new")[b]))

    def _compare_kept(self, host: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]) -> None:
        """Rows that no sequence has appended have the bits that they had."""
        cache = self._one(host, 0)["k_cache"]
        fresh = np.zeros((cache.shape[0], cache.shape[2]), bool)
        for b in range(len(self.lengths)):
            for place in self._new_places(host, b):
                fresh[place] = True
        for name in WRITTEN:
            if name in host and host[name].ndim == 4:
                old, new = self._one(host, 0)[name], self._one(after, 0)[name]
                bits = f"u{old.itemsize}"
                same = np.ascontiguousarray(old).view(bits) == np.ascontiguousarray(new).view(bits)
                kept = np.broadcast_to(~fresh[:, None, :, None], same.shape)
                assert same[kept].all(), f"rows of {name} that are not new have changed"

    def _compare(self, arrays: Mapping[str, np.ndarray], results: Mapping[str, np.ndarray]) -> None:
        """Each head of each sequence is within the error budget of attention over what is stored."""
        for b, new in enumerate(self._counts("new")):
            call = {n: x for n, x in self._one(arrays, b).items() if n not in ("k", "v")}
            call["cache_seqlens"] = call["cache_seqlens"] + np.int32(new)
            if self.selected:
                call["indices"] = self._named(arrays, b)
            sequences = testing.reference_with_kv_cache(**call).sequences
            if not self.selected:  # otherwise each query is a sequence, of the keys that it names
                sequences = [self._whole(arrays, b, sequences[0], call)]
            o, lse = self._rows(results, arrays, b)
            for one in sequences if o.shape[2] else ():
                self._judge(one, o[:, :, one.queries], lse[:, :, one.queries])

    def _named(self, arrays: Mapping[str, np.ndarray], b: int) -> np.ndarray:
        """The keys that the queries of a sequence name, but for those of its padding, (1, queries, keys)."""
        named = arrays["indices"][self._queries(arrays, b) if self.each else b]
        first = arrays["cache_leftpad"][b] if self.leftpad else 0
        return np.where(named < first, -1, named)[None]

    def _whole(
        self, arrays: Mapping[str, np.ndarray], b: int, own: Sequence, call: Mapping[str, Any]
    ) -> Sequence:
        """A sequence with all that its queries see: its masks, and the prefix before it."""
        q, q_error, keys, values = own.q, own.q_error, own.k, own.v
        if self.prefix and self.rotary:
            q, q_error = self._turned(arrays, call)
        if self.on_read:
            angles = (arrays[f"rotary_{name}"].astype(np.float64) for name in ("cos", "sin"))
            keys = rotate(keys[0], np.arange(keys.shape[2]), *angles, self.interleaved, self.last)[None]
        seen = self._seen(arrays, b, keys.shape[2], q.shape[2], own.options["mask"])
        options = own.options | {"mask": seen}
        if self.prefix:
            options["align"] = options["align"] + self.prefix
            front = {x: arrays[f"prefix_{x}"] for x in "kv"}
            front = {n: x.swapaxes(0, 1) if self.layout == "bshd" else x for n, x in front.items()}
            keys = np.concatenate([front["k"][None].astype(float), keys], 2)
            values = np.concatenate([front["v"][None].astype(float), values], 2)
        return own._replace(q=q, q_error=q_error, k=keys, v=values, options=options)

    def _judge(self, own: Sequence, o: np.ndarray, lse: np.ndarray) -> None:
        """Compare results of a sequence, a key head at a time."""
        group = self.heads[0] // self.heads[1]
        dtype = numpy_dtype("float32" if self.stored == "int4" and self.dtype == "float32" else self.dtype)
        default = self.head_dims[0] ** -0.5 if self.scale is None else self.scale
        for head in range(self.heads[1]):
            of_q, at = slice(head * group, (head + 1) * group), slice(head, head + 1)
            mine = dict(own.options)
            mine["scale"] = default * float(own.k_scale[head])
            for name in ("alibi_slopes", "sinks"):
                if mine.get(name) is not None:
                    mine[name] = np.asarray(mine[name])[of_q]
            if "mask" in mine and mine["mask"].shape[1] > 1:
                mine["mask"] = mine["mask"][:, of_q]
            actual = {
                "o": (o[:, of_q].astype(np.float64) / own.v_scale[head]).astype(dtype),
                "lse": lse[:, of_q],
            }
            testing.assert_within_budget(
                actual, own.q[:, of_q].astype(dtype), own.k[:, at].astype(dtype), own.v[:, at].astype(dtype),
                q_error=own.q_error[:, of_q], **mine,
            )  # fmt: skip

    def _turned(
        self, arrays: Mapping[str, np.ndarray], call: Mapping[str, Any]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Queries of a sequence behind a prefix, rotated, and what is uncertain; they may stand inside it."""
        cos, sin = (arrays[f"rotary_{name}"].astype(np.float64) for name in ("cos", "sin"))
        count = call["q"].shape[2]
        places = self.prefix + int(call["cache_seqlens"][0]) - count + np.arange(count)
        q, q_error = rotated_queries(call["q"][0], places, cos, sin, self.interleaved, self.last)
        return q[None], q_error[None]

    def _rows(
        self, results: Mapping[str, np.ndarray], arrays: Mapping[str, np.ndarray], b: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Results of one sequence, (1, heads, queries, head_dim) and (1, heads, queries)."""
        if self.each:
            cut = self._queries(arrays, b)
            return results["o"][cut].swapaxes(0, 1)[None], results["lse"][:, cut][None]
        o = results["o"][b : b + 1]
        return o.swapaxes(1, 2) if self.layout == "bshd" else o, results["lse"][b : b + 1]

    def _seen(
        self, arrays: Mapping[str, np.ndarray], b: int, length: int, queries: int, seen: np.ndarray
    ) -> np.ndarray:
        """Which of the keys of a sequence its queries may see, (1, 1 or heads, 1 or queries, keys)."""
        seen = np.array(seen)
        if self.leftpad:
            seen = seen & (np.arange(length) >= arrays["cache_leftpad"][b])
        if self.mask is not None:
            mask = arrays["mask"]
            seen = seen & mask[b if len(mask) > 1 else 0][None, ..., :length]
        if self.tree:
            spans, rows = arrays["spans"], np.arange(queries)[:, None]
            bounds = spans[b if len(spans) > 1 else 0, :, :, :queries]
            tree = np.zeros((len(bounds), queries, queries), bool)
            for start in range(0, bounds.shape[-1], 2):
                tree |= (bounds[..., start] <= rows) & (rows < bounds[..., start + 1])
            whole = np.ones((1, len(bounds), queries, length), bool)
            shared = min(queries, length)
            whole[0, :, :, length - shared :] = tree[:, :, queries - shared :]
            seen = seen & whole
        if self.ragged:
            first = self._pairs_before(arrays, b)
            bits = arrays["ragged_mask"][first : first + queries * length]
            seen = seen & bits.reshape(1, 1, queries, length)
        if self.prefix:
            front = np.ones((*seen.shape[:-1], self.prefix), bool)
            seen = np.concatenate([front, seen], -1)
        return seen


@dataclass(frozen=True, kw_only=True)
class CachedStatistics(Cached):
    """Statistics of the weights over a cache; `known` and `places` as of `Statistics`."""

    known: bool = False
    places: int = 8

    @classmethod
    def draw(cls, draw: random.Random, dtypes: tuple[str, ...] = DTYPES) -> CachedStatistics:
        """Any but what they do not have."""
        plain = dataclasses.asdict(Cached.draw(draw, dtypes))
        none = {"new": 0, "each_new": (), "prefix": 0, "rotary": 0, "selected": 0, "splits": None}
        none |= {"tree": False, "outside": False, "on_read": False, "moved": False, "reproducible": None}
        return cls(**plain | none, known=draw.random() < 0.5, places=draw.choice((1, 3, 8, 40)))

    def check(self, memory: Any) -> None:
        """Compare each head of each sequence with FP64."""
        host = self.inputs()
        given = {n: memory.put(n, x, self._style(n, x)) for n, x in host.items()}
        options = self.options() | ({"max_seqlen_k": self.room} if self.mask is not None else {})
        call = over_cache(**given, **options)
        lse = None
        if self.known:
            lse = cupy_flash.attention_with_kv_cache(**call, return_lse=True)[1]
        q, k, _ = (call.pop(name) for name in ("q", "k_cache", "v_cache"))
        made = cupy_flash.attention_statistics(q, k, lse, top_k=self.places, **call)
        found = numpy_of(made._asdict())
        for b in range(len(self.lengths)):
            alone = self._one(host, b)
            (own,) = testing.reference_with_kv_cache(**alone).sequences
            own = self._whole(host, b, own, alone)
            length, rows = own.k.shape[2], self._queries(host, b) if self.each else slice(None)
            mine = {}
            for name, x in found.items():
                if name in ("key_sum", "key_max"):
                    assert not x[b, :, length:].any(), f"{name} has numbers of no key"
                    mine[name] = x[b : b + 1, :, :length]
                else:
                    mine[name] = x[None, :, rows] if self.each else x[b : b + 1]
            keys = own.k * own.k_scale[:, None, None]
            assert_close(made._replace(**mine), own.q, keys, self.places, **own.options)

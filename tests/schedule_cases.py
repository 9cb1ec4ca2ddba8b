"""Calls over a sequence in parts: whole arrays, the parts of each process, and what float64 makes of them."""

import dataclasses
import itertools
from typing import Any

import numpy as np

import cupy_flash
from cupy_flash.parallel import packed_positions, positions
from cupy_flash.parallel.mpi import ring_attention, ring_attention_backward
from cupy_flash.testing import assert_within_budget

SCHEDULES = ("ring", "alltoall", "allgather")


@dataclasses.dataclass
class Case:
    """One call: `lengths` are those of packed sequences, else queries and keys are `rows`."""

    rows: tuple[int, int] = (16, 16)
    lengths: tuple[int, ...] = ()
    batch: int = 2
    heads: tuple[int, int] = (4, 4)
    dims: tuple[int, int] = (8, 8)
    dtype: str = "float64"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    extra: tuple[str, ...] = ()  # of sinks, alibi_slopes, and a kind of mask
    seed: int = 0

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        (q_rows, k_rows), (heads_q, heads_k), (dim, dim_v) = self.rows, self.heads, self.dims
        if self.lengths:
            q_rows = k_rows = sum(self.lengths)
        self.bshd = bool(self.lengths) or self.options.get("layout") == "bshd"
        shapes = {
            "q": (heads_q, q_rows, dim), "k": (heads_k, k_rows, dim), "v": (heads_k, k_rows, dim_v),
            "do": (heads_q, q_rows, dim_v), "dlse": (heads_q, q_rows),
        }  # fmt: skip
        self.arrays = {}
        self.accumulator = "float64" if self.dtype == "float64" else "float32"
        for name, shape in shapes.items():
            x = rng.standard_normal(shape if self.lengths else (self.batch, *shape))
            x = x.astype(self.accumulator if name == "dlse" else self.dtype)
            self.arrays[name] = x.swapaxes(-3, -2) if self.bshd and name != "dlse" else x
        self.given = {}
        if "sinks" in self.extra:
            self.given["sinks"] = rng.standard_normal(heads_q).astype(self.accumulator)
        if "alibi_slopes" in self.extra:
            self.given["alibi_slopes"] = rng.random(heads_q).astype(self.accumulator)
        if "alibi_slopes of each sequence" in self.extra:
            self.given["alibi_slopes"] = rng.random((self.batch, heads_q)).astype(self.accumulator)
        for kind in self.extra:
            if kind in MASKS:
                self.given["mask"] = MASKS[kind](rng, self.batch, heads_q, q_rows, k_rows)

    @property
    def one(self):
        """The options of a call of one process."""
        names = ("parts", "schedule", "seqlen", "reproducible", "agreement")
        return {name: x for name, x in self.options.items() if name not in names}

    def held(self, rank, ranks):
        """Rows of queries and of keys that a process holds."""
        causal, parts = self.options.get("causal", False), self.options.get("parts")
        if self.lengths:
            return (packed_positions(rank, ranks, self.lengths, causal),) * 2
        return tuple(positions(rank, ranks, n, causal, parts=parts) for n in self.rows)

    def part(self, rank, ranks):
        """Arrays of a process, contiguous, and its options."""
        found = {}
        for name, x in self.arrays.items():
            rows = self.held(rank, ranks)[name in "kv"]
            found[name] = np.ascontiguousarray(x.take(rows, self._axis(name)))
        options = {**self.options, **self.given}
        if self.lengths:
            options["cu_seqlens"] = (self._cuts() // ranks).astype(np.int32)
            options.pop("layout", None)
        return found, options

    def _axis(self, name):
        return -1 if name in ("lse", "dlse") else -3 if self.bshd else -2

    def _cuts(self):
        return np.concatenate([[0], np.cumsum(self.lengths)])

    def gathered(self, results):
        """The whole of what every process returned; gradients of sinks are added up."""
        whole, ranks = {}, len(results)
        for name in results[0]:
            if results[0][name] is None:
                continue
            if name == "dsinks":
                whole[name] = sum(x[name] for x in results).astype(self.accumulator)
                continue
            axis = self._axis(name)
            order = [self.held(rank, ranks)[name in ("dk", "dv")] for rank in range(ranks)]
            rows = np.concatenate([x[name] for x in results], axis)
            whole[name] = rows.take(np.argsort(np.concatenate(order)), axis)
        return whole

    def check(self, results):
        """Hold what the processes returned to the error budget of one process."""
        whole = self.gathered(results)
        if not self.lengths:
            assert_within_budget(whole, **self.arrays, **self.one, **self.given)
            return
        cuts, of_one = self._cuts(), {name: x for name, x in self.one.items() if name != "layout"}
        for start, stop in itertools.pairwise(cuts):
            if start == stop:
                continue
            rows = slice(start, stop)
            own = {
                name: x[:, rows] if name == "lse" else x[rows]
                for name, x in whole.items()
                if name != "dsinks"
            }
            arrays = {name: x[:, rows] if name == "dlse" else x[rows] for name, x in self.arrays.items()}
            assert_within_budget(own, **arrays, **of_one, **self.given, layout="bshd")
        if "dsinks" in whole:  # of all sequences
            exact = cupy_flash.attention_varlen_backward(
                **self._in_float64(cuts.astype(np.int32)),
                **of_one,
                sinks=self.given["sinks"].astype("float64"),
            ).dsinks
            np.testing.assert_allclose(whole["dsinks"], exact, atol=1e-9 if self.dtype == "float64" else 0.02)

    def _in_float64(self, cuts):
        arrays = {name: x.astype("float64") for name, x in self.arrays.items()}
        given = {"cu_seqlens_q": cuts, "cu_seqlens_k": cuts}
        sinks = self.given["sinks"].astype("float64")
        q, k, v = (arrays[name] for name in "qkv")
        o, lse = cupy_flash.attention_varlen(q, k, v, **given, **self.one, sinks=sinks, return_lse=True)
        return {**arrays, **given, "o": o, "lse": lse}


def _spans_of_queries(rng, batch, heads, q_rows, k_rows):
    bounds = np.sort(rng.integers(0, q_rows + 1, (batch, heads, 1, k_rows, 2)), -1)
    return cupy_flash.Spans(bounds.astype(np.int32))


def _spans_of_keys(rng, batch, heads, q_rows, k_rows):
    bounds = np.sort(rng.integers(0, k_rows + 1, (1, heads, q_rows, 1, 4)), -1)
    return cupy_flash.Spans(bounds.astype(np.int32))


def _blocks(rng, batch, heads, q_rows, k_rows):
    size = int(rng.choice([16, 32, 64]))
    table = rng.integers(0, 4, (1, heads, -(-q_rows // size), -(-k_rows // 32))).astype(np.int32)
    return cupy_flash.BlockMask(table, rng.integers(0, 256, (2, size, 4)).astype(np.uint8))


MASKS = {
    "mask": lambda rng, batch, heads, q_rows, k_rows: rng.random((batch, heads, q_rows, k_rows)) < 0.7,
    "mask of all heads": lambda rng, batch, heads, q_rows, k_rows: rng.random((q_rows, k_rows)) < 0.7,
    "mask of keys": lambda rng, batch, heads, q_rows, k_rows: rng.random((batch, 1, 1, k_rows)) < 0.7,
    "spans of queries": _spans_of_queries,
    "spans of keys": _spans_of_keys,
    "blocks": _blocks,
    "blocks and a mask": lambda *sizes: (_blocks(*sizes), MASKS["mask"](*sizes)),
    "a tuple": lambda *sizes: (_spans_of_keys(*sizes), (MASKS["mask"](*sizes),)),
}


WINDOWS = [(3, 0), (5, None), (2, 4), (None, 6), (9, 9)]


def fixed_cases(ranks):
    """What random calls seldom are: blocks that are cut where stretches begin, and beside other masks."""
    blocks = {"schedule": "allgather", "causal": True, "seqlen": 32 * ranks - 1}
    packed, lengths = {"schedule": "allgather", "causal": True}, [2 * ranks * n for n in (4, 0, 9)]
    rows, more = (32 * ranks - 1,) * 2, {"window": (40, 0), "layout": "bshd", "parts": "contiguous"}
    return [
        Case(rows, batch=1, dtype="float32", options=blocks, extra=("blocks",)),
        Case(rows, batch=1, dtype="float32", options=blocks | more, extra=("blocks and a mask", "sinks")),
        Case(rows, batch=1, dtype="float32", options=blocks, extra=("blocks", "alibi_slopes"), seed=1),
        # Packed sequences, one of them empty, of which a process calls all at once.
        *(
            Case((16, 16), lengths, heads=(4, 2), dtype="float32", options=packed | how)
            for how in ({"window": (6, 0)}, {"window": (3, None), "align": "bottom_right"})
        ),
    ]


def packed_cases(ranks):
    """Packed sequences in an all-gather whose band stands at another key in each: they are called in turn."""
    lengths = [2 * ranks * n for n in (4, 0, 9)]
    bands = [
        {"window": (6, 0)},
        {"window": (3, 5), "align": "top_left"},
        {"window": (None, 4), "align": 7},
        {"causal": True, "align": -5},
        {"causal": True, "align": 6, "window": (3, None)},
    ]
    return [
        Case((16, 16), lengths, heads=(4, 2), options={"schedule": "allgather", **band}, extra=("sinks",))
        for band in bands
    ]


def seeds_of(word, count):
    """Seeds of random cases: those of the day, or of another word of --sample."""
    return np.random.SeedSequence([*word.encode()]).generate_state(count).tolist()


def random_case(rng, ranks, dtypes=("float64", "float32", "float16"), named=False):
    """A call that some schedule takes, uneven lengths, GQA and all options included; named: it says which."""

    def chosen(values, share=1.0):
        return values[rng.integers(len(values))] if rng.random() < share else None

    schedule, causal = str(chosen(SCHEDULES)), bool(rng.integers(2))
    options = {
        "schedule": schedule,
        "causal": causal,
        "softcap": chosen([2.0], 0.3),
        "scale": chosen([0.4], 0.3),
    }
    heads_k = int(rng.integers(1, 3)) * (ranks if schedule == "alltoall" else 1)
    shape = {
        "heads": (heads_k * int(rng.integers(1, 4)), heads_k),
        "dims": (int(chosen([4, 8, 12])), int(chosen([4, 8]))),
        "batch": int(rng.integers(1, 3)),
        "dtype": str(chosen(dtypes)),
        "seed": int(rng.integers(2**31)),
    }
    extra = [chosen(["sinks"], 0.4)]
    options["reproducible"] = chosen(["run"], 0.3)
    if rng.random() < 0.2:
        lengths = tuple(int(n) * 2 * ranks for n in rng.integers(0, 5, rng.integers(1, 4)))
        if sum(lengths):
            options["schedule"] = chosen(["ring", None]) if schedule == "ring" and not named else schedule
            if schedule != "ring":
                options["window"] = chosen(WINDOWS, 0.5)
                options["align"] = chosen(["top_left", "bottom_right", int(rng.integers(-9, 9))], 0.4)
            if named and schedule == "allgather" and not (causal and type(options["align"]) is not int):
                options |= {"window": None, "align": None}
            return Case(lengths=lengths, options=options, extra=tuple(filter(None, extra)), **shape)
    q_rows, k_rows = (int(rng.integers(1, 40)) for _ in "qk")
    options["layout"] = chosen(["bhsd", "bshd"])
    if rng.random() < 0.7:
        k_rows = q_rows
    window = chosen(WINDOWS, 0.4)
    options["window"] = window
    if schedule != "ring":
        extra += [chosen(["alibi_slopes", "alibi_slopes of each sequence"], 0.3), chosen([*MASKS], 0.3)]
        if (
            schedule == "allgather" and extra[-1] and "blocks" in extra[-1]
        ):  # of which a stretch begins with one
            alike = q_rows == k_rows
            q_rows = 32 * ranks - int(rng.integers(ranks))
            k_rows = q_rows if alike else k_rows
    positional = causal or window or any("alibi" in x for x in extra if x)
    if q_rows != k_rows and positional:
        options["align"] = chosen(["top_left", "bottom_right", int(rng.integers(-5, 6))])
    plain = causal and not window and q_rows == k_rows
    options["parts"] = (
        "contiguous" if schedule == "ring" and causal and not plain else chosen(["contiguous"], 0.4)
    )
    if (schedule != "ring" or not (causal or window)) and options["parts"] is None:
        options["parts"] = chosen(["zigzag"], 0.3)
    options["seqlen"] = (q_rows, k_rows)
    if not named and (schedule == "ring" or options["parts"]):
        options["schedule"] = chosen([schedule, None])
    return Case(rows=(q_rows, k_rows), options=options, extra=tuple(filter(None, extra)), **shape)


def run_over_mpi(case, comm):
    """What a process returns of a case."""
    x, options = case.part(comm.rank, comm.Get_size())
    o, lse = ring_attention(x["q"], x["k"], x["v"], comm, **options)
    grads = ring_attention_backward(x["do"], x["q"], x["k"], x["v"], o, lse, comm, dlse=x["dlse"], **options)
    return {"o": o, "lse": lse, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv, "dsinks": grads.dsinks}

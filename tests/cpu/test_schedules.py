"""Schedules beside the ring, and random calls of all of them: processes are threads with a communicator."""

import functools
import re
import threading

import numpy as np
import pytest

import cupy_flash
import cupy_flash.parallel
from cupy_flash import InvalidArgumentsError, UnsupportedError
from cupy_flash.parallel import allgather, alltoall, mpi, partial
from cupy_flash.parallel.mpi import ring_attention, ring_attention_backward
from cupy_flash.testing import reference_attention, reference_backward
from tests.communicator import in_threads
from tests.schedule_cases import (
    SCHEDULES,
    Case,
    fixed_cases,
    packed_cases,
    random_case,
    run_over_mpi,
    seeds_of,
)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_random_calls(ranks, pytestconfig):
    """Against float64; other ones every day, and a failure says which."""
    for seed in seeds_of(pytestconfig.option.sample, 150):
        case = random_case(np.random.default_rng(seed), ranks)
        try:
            case.check(in_threads(ranks, functools.partial(run_over_mpi, case)))
        except Exception as error:
            raise AssertionError(f"random_case(np.random.default_rng({seed}), {ranks}) is {case}") from error


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_fixed_calls(ranks):
    for case in (*fixed_cases(ranks), *packed_cases(ranks)):
        case.check(in_threads(ranks, functools.partial(run_over_mpi, case)))


def check_over_mpi(comm):
    """The same random calls in each process, the results compared in the first one."""
    for seed in range(30):
        case = random_case(np.random.default_rng(seed), comm.size)
        everyone = comm.gather(run_over_mpi(case, comm))
        if comm.rank == 0:
            case.check(everyone)


def test_all_to_all_has_the_bits_of_one_process():
    options = {"schedule": "alltoall", "causal": True, "reproducible": "batch", "window": (7, 0)}
    case = Case((23, 23), heads=(8, 4), dtype="float32", options={**options, "seqlen": 23}, extra=("sinks",))
    ours = case.gathered(in_threads(4, functools.partial(run_over_mpi, case)))
    x, how = case.arrays, {**case.one, **case.given, "reproducible": "batch"}
    if "numpy" in cupy_flash.explain(x["q"], x["k"], x["v"], **case.one):
        pytest.skip("without the CPU core nothing is batch-invariant: scripts/build_cpu.py")
    o, lse = cupy_flash.attention(x["q"], x["k"], x["v"], return_lse=True, **how)
    grads = cupy_flash.attention_backward(x["do"], x["q"], x["k"], x["v"], o, lse, dlse=x["dlse"], **how)
    for name, wanted in {"o": o, "lse": lse, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}.items():
        assert np.array_equal(ours[name], wanted), name


DROPPING = {"dropout": 0.3, "seed": 7}


def dropping(schedule, causal, packed, **more):
    """A call that drops weights; its values tell which: o is what is left of the weights."""
    options = {"schedule": schedule, "causal": causal, **DROPPING, **more}
    shape = {"lengths": (32, 16)} if packed else {"rows": (48, 48)}
    case = Case(**shape, batch=1, heads=(8, 4), dims=(8, 48), options=options)
    rows = np.moveaxis(case.arrays["v"], -3, -2) if packed else case.arrays["v"]
    rows[...] = np.eye(48)
    return case


def test_packed_sequences_that_are_called_in_turn_drop_weights_of_their_own(monkeypatch):
    real, seeds = allgather.attention, []

    def called(*arrays, **options):
        seeds.append(options["seed"])
        return real(*arrays, **options)

    monkeypatch.setattr(allgather, "attention", called)
    options = {"schedule": "allgather", "causal": True, "align": 2, **DROPPING}
    in_threads(3, functools.partial(run_over_mpi, Case(lengths=(12, 24, 12), options=options)))
    assert len({*seeds}) == len(seeds) == 3 * 3 * 2  # processes, sequences, stretches


def loss_of(case, results):
    """What do and dlse are the gradients of."""
    whole = case.gathered(results)
    return sum((case.arrays[d] * whole[name]).sum() for d, name in (("do", "o"), ("dlse", "lse")))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_process_drops_weights_of_its_own(schedule, causal, packed):
    ranks, case = 4, dropping(schedule, causal, packed)
    ours = case.gathered(in_threads(ranks, functools.partial(run_over_mpi, case)))
    again = case.gathered(in_threads(ranks, functools.partial(run_over_mpi, case)))
    case.options |= {"dropout": 0.0}
    whole = case.gathered(in_threads(ranks, functools.partial(run_over_mpi, case)))
    assert all(np.array_equal(ours[name], again[name]) for name in ours)
    np.testing.assert_allclose(ours["lse"], whole["lse"])
    left, weights = (np.moveaxis(x["o"], -2, -3) if packed else x["o"][0] for x in (ours, whole))
    seen = weights > 0
    kept = left[seen] / weights[seen]
    np.testing.assert_allclose(kept[kept > 0], 1 / 0.7)
    assert 0.25 < (kept == 0).mean() < 0.35
    # Where all is seen, no two heads drop alike, nor two processes' rows.
    if not causal and not packed:
        patterns = [(left[h, r : r + 12] == 0).tobytes() for h in range(8) for r in range(0, 48, 12)]
        assert len({*patterns}) == len(patterns)
        across = [(left[h, :12, c : c + 12] == 0).tobytes() for h in range(8) for c in range(0, 48, 12)]
        assert len({*across}) == len(across)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_drop_what_the_call_dropped(schedule, causal, packed):
    ranks, case = 2, dropping(schedule, causal, packed)
    grads = case.gathered(in_threads(ranks, functools.partial(run_over_mpi, case)))
    for name in "qkv":
        x = case.arrays[name].copy()
        step = 1e-5 * np.random.default_rng(1).standard_normal(x.shape)
        losses = []
        for sign in (1, -1):
            case.arrays[name] = x + sign * step
            losses.append(loss_of(case, in_threads(ranks, functools.partial(run_over_mpi, case))))
        case.arrays[name] = x
        wanted = (losses[0] - losses[1]) / 2
        np.testing.assert_allclose((grads[f"d{name}"] * step).sum(), wanted, rtol=1e-5, err_msg=name)


def test_one_process_drops_what_attention_drops():
    for schedule in SCHEDULES:
        case = dropping(schedule, False, False)
        x = case.arrays
        ours = case.gathered(in_threads(1, functools.partial(run_over_mpi, case)))
        assert np.array_equal(ours["o"], cupy_flash.attention(x["q"], x["k"], x["v"], **DROPPING))


def test_dropout_wants_a_schedule_and_one_seed():
    def raised(rank_of, **given):
        def call(comm):
            case = dropping("ring", False, False)
            x, options = case.part(comm.rank, 2)
            options |= given | ({"seed": rank_of(comm.rank)} if rank_of else {})
            with pytest.raises(InvalidArgumentsError) as error:
                ring_attention(x["q"], x["k"], x["v"], comm, **options)
            return str(error.value)

        return in_threads(2, call)[0]

    assert 'Try: schedule="ring"' in raised(None, schedule=None)
    assert "seed" in raised(None, seed=None)
    differ = raised(lambda rank: rank)
    assert "seed" in differ
    assert "process 1" in differ


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_processes_with_other_seeds_are_told(schedule):
    """All of them, in both passes, before anything is sent; the group works on."""

    def call(comm):
        x, one_seed = dropping(schedule, True, False).part(comm.rank, 2)
        other_seeds = one_seed | {"seed": 7 + comm.rank}
        operands = x["q"], x["k"], x["v"]
        told = []
        with pytest.raises(InvalidArgumentsError) as error:
            ring_attention(*operands, comm, **other_seeds)
        told.append(str(error.value))
        assert comm.sent == 0
        o, lse = ring_attention(*operands, comm, **one_seed)
        sent = comm.sent
        with pytest.raises(InvalidArgumentsError) as error:
            ring_attention_backward(x["do"], *operands, o, lse, comm, **other_seeds)
        told.append(str(error.value))
        assert comm.sent == sent
        ring_attention_backward(x["do"], *operands, o, lse, comm, **one_seed)
        return told

    everyone = in_threads(2, call)
    assert everyone[0] == everyone[1]
    for text in everyone[0]:
        assert re.search(
            r"different calls: seed\.\n(.|\n)*seed +7 +process 0\n(.|\n)*seed +8 +process 1\n", text
        ), text
        assert "Try: the same arguments" in text


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("schedule", ["ring", "allgather"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_partial_results_are_not_rounded(dtype, schedule, causal):
    """The error of four processes is that of one; rounded in each step it is 1.13 to 1.43 times that."""
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    options = {"causal": causal, "schedule": schedule}
    case = Case((256, 256), batch=1, dims=(64, 64), dtype=dtype, options=options)
    x, names = case.arrays, ("o", "dq", "dk", "dv")
    exact = reference_attention(x["q"], x["k"], x["v"], causal=causal)._asdict()
    exact |= reference_backward(**x, causal=causal)._asdict()
    o, lse = cupy_flash.attention(x["q"], x["k"], x["v"], causal=causal, return_lse=True)
    grads = cupy_flash.attention_backward(
        x["do"], x["q"], x["k"], x["v"], o, lse, dlse=x["dlse"], causal=causal
    )
    one = {"o": o, **grads._asdict()}
    ours = case.gathered(in_threads(4, functools.partial(run_over_mpi, case)))

    def error(results):
        found = [np.square(results[name].astype(np.float64) - exact[name]).mean() for name in names]
        return np.sqrt(found)

    assert (error(ours) < 1.05 * error(one)).all()


@pytest.mark.parametrize("packed", [False, True])
def test_partial_results_keep_the_dtype_of_sums(packed):
    q = np.ones((4, 2, 8) if packed else (1, 2, 4, 8), np.float16)
    cuts = (np.array([0, 4], np.int32),) * 2 if packed else ()
    attend, differentiate = (
        (partial.attention_varlen, partial.attention_varlen_backward)
        if packed
        else (partial.attention, partial.attention_backward)
    )
    o, lse = attend(q, q, q, *cuts)
    grads = differentiate(q, q, q, q, o.astype(q.dtype), lse, *cuts)
    assert {x.dtype for x in (o, lse, *grads[:3])} == {np.dtype(np.float32)}


def test_an_all_gather_adds_up_gradients_in_the_order_of_processes():
    case = Case(options={"schedule": "allgather"}, dtype="float32", heads=(2, 2), rows=(32, 32))
    results = in_threads(4, functools.partial(run_over_mpi, case))
    shares, x = [], case.arrays
    for rank, result in enumerate(results):
        part, _ = case.part(rank, 4)
        grads = cupy_flash.attention_backward(
            part["do"], part["q"], x["k"], x["v"], result["o"], result["lse"], dlse=part["dlse"]
        )
        shares.append(grads)
    ours = case.gathered(results)
    for name in ("dk", "dv"):
        in_order = functools.reduce(np.add, (getattr(grads, name) for grads in shares))
        assert np.array_equal(ours[name], in_order), name
        reverse = functools.reduce(np.add, (getattr(grads, name) for grads in shares[::-1]))
        assert not np.array_equal(reverse, in_order)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("heads", [(8, 4), (4, 4), (16, 4), (3, 3)])
@pytest.mark.parametrize("options", [{}, {"window": (3, 0), "parts": "contiguous"}], ids=["", "window"])
def test_what_sends_least_is_chosen(ranks, heads, options):
    """In each pass by itself; `explain` counts what is sent, and says the same."""

    def sent(comm, schedule, rows=16):
        how = {"causal": True, "schedule": schedule, **options}
        case = Case((rows, rows), heads=heads, dtype="float16", options=how)
        x, how = case.part(comm.rank, ranks)
        o, lse = ring_attention(x["q"], x["k"], x["v"], comm, **how)
        forward = comm.sent
        ring_attention_backward(x["do"], x["q"], x["k"], x["v"], o, lse, comm, **how)
        told = cupy_flash.parallel.explain(x["q"], x["k"], x["v"], ranks, **how)
        return (forward, comm.sent - forward), told

    able = SCHEDULES if heads[1] % ranks == 0 else ("ring", "allgather")
    counted = {}
    for schedule in able:
        for counts, told in in_threads(ranks, functools.partial(sent, schedule=schedule)):
            counted[schedule] = counts
            assert all(f"{count:,} bytes" in told for count in counts)
    for counts, told in in_threads(ranks, functools.partial(sent, schedule=None)):
        least = [min(counted[x][n] for x in able if x != "allgather") for n in (0, 1)]
        assert [*counts] == least
        chosen = re.findall(r"(?:forward|backward): (\w+)", told)
        assert [counted[x][n] for n, x in enumerate(chosen)] == least
        assert ("do not divide" in told) == (len(able) == 2)


@pytest.mark.parametrize(
    ("schedule", "rows", "options"),
    [*((schedule, (8, 24), {}) for schedule in SCHEDULES),
     ("ring", (8, 8), {"causal": True, "window": (0, 0), "parts": "contiguous"})],
)  # fmt: skip
def test_explain_counts_what_is_sent_of_a_part(schedule, rows, options):
    """More keys than queries; and a window that no other part is in."""
    case = Case(rows, dtype="float16", options={"schedule": schedule, "seqlen": rows, **options})

    def run(comm):
        x, how = case.part(comm.rank, 2)
        o, lse = ring_attention(x["q"], x["k"], x["v"], comm, **how)
        forward = comm.sent
        ring_attention_backward(x["do"], x["q"], x["k"], x["v"], o, lse, comm, **how)
        told = cupy_flash.parallel.explain(x["q"], x["k"], x["v"], 2, **how)
        return [forward, comm.sent - forward], told

    for counts, told in in_threads(2, run):
        assert [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) bytes", told)] == counts


def test_what_cannot_be_done_is_not_chosen():
    mask, few = np.ones((8, 8), bool), np.ones((1, 3, 8, 8), np.float32)

    def chosen(x, **options):
        told = cupy_flash.parallel.explain(x, x, x, 2, causal=True, seqlen=16, **options)
        return re.findall(r"(?:forward|backward): (\w+)", told)

    many = few.repeat(2, 1)
    assert chosen(few) == ["ring"] * 2
    assert chosen(many, mask=mask) == ["alltoall"] * 2
    assert chosen(few, mask=mask) == ["allgather"] * 2
    assert chosen(many, window=(3, 0), parts="zigzag") == ["alltoall"] * 2
    assert chosen(few, window=(3, 0), parts="zigzag") == ["allgather"] * 2
    with pytest.raises(InvalidArgumentsError, match="contiguous parts, which must be named"):
        chosen(many, window=(3, 0))
    with pytest.raises(InvalidArgumentsError, match=r"3 heads of q .* 2 processes"):
        chosen(few, reproducible="batch")
    with pytest.raises(UnsupportedError, match=r"a mask of type .* an all-to-all"):
        chosen(few, mask=cupy_flash.mask(lambda b, h, i, j: i >= j))
    with pytest.raises(UnsupportedError, match=r"a mask of type list .* an all-to-all"):
        chosen(many, mask=[mask, mask])
    blocks = cupy_flash.BlockMask(np.ones((1, 1), np.int32), np.zeros((0, 16, 2), np.uint8))
    assert chosen(many, mask=blocks) == ["alltoall"] * 2
    with pytest.raises(InvalidArgumentsError, match="3 heads of q"):  # and stretches of 4 rows
        chosen(few, mask=blocks)
    with pytest.raises(InvalidArgumentsError, match="ranks is 0"):
        cupy_flash.parallel.explain(few, few, few, 0)


def test_a_block_mask_of_more_keys_than_queries_is_gathered():
    """Three heads do not divide over two processes, and a ring takes no masks."""
    q, k = np.ones((1, 3, 16, 8), np.float32), np.ones((1, 3, 32, 8), np.float32)
    mask = cupy_flash.BlockMask(np.ones((2, 4), np.int32), np.zeros((0, 16, 2), np.uint8))
    assert "forward: allgather" in cupy_flash.parallel.explain(q, k, k, 2, mask=mask)


def test_what_is_sent():
    """All-to-all: what goes out and comes back, but for a process's own share; all-gather: keys to all."""
    for schedule in ("alltoall", "allgather"):
        case = Case((16, 16), heads=(8, 4), dims=(8, 4), dtype="float16", options={"schedule": schedule})

        def sent(comm, case=case):
            x, options = case.part(comm.rank, 4)
            o, lse = ring_attention(x["q"], x["k"], x["v"], comm, **options)
            forward = comm.sent
            ring_attention_backward(x["do"], x["q"], x["k"], x["v"], o, lse, comm, **options)
            return forward, comm.sent - forward, *(y.nbytes for y in (x["q"], x["k"], x["v"], o, lse))

        for forward, backward, q, k, v, o, lse in in_threads(4, sent):
            if schedule == "alltoall":
                assert forward == (q + k + v + o + lse) * 3 // 4
                assert backward == (2 * o + lse + 2 * (q + k + v)) * 3 // 4
            else:
                assert forward == 3 * (k + v)
                assert backward == 3 * (k + v) + 3 * 2 * (k + v)  # float32 is twice as long


@pytest.mark.parametrize("wanted", [("k", "v"), ("v",), ("k",), ()], ids="".join)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_that_nobody_wants_are_not_sent(schedule, wanted):
    """Nor are they returned; others are what they are with all of them."""
    how = {"schedule": schedule, "parts": "contiguous"}
    case = Case((16, 16), heads=(8, 4), dims=(8, 4), dtype="float16", options=how)

    def run(comm):
        x, options = case.part(comm.rank, 4)
        o, lse = ring_attention(x["q"], x["k"], x["v"], comm, **options)
        given = x["do"], x["q"], x["k"], x["v"], o, lse, comm
        counted = []
        for of in (("k", "v"), wanted):
            before = comm.sent
            grads = ring_attention_backward(*given, wanted=of, **options)
            counted.append((comm.sent - before, grads))
        return *counted, {"k": x["k"].nbytes, "v": x["v"].nbytes}

    share = {"ring": 4 * 2, "alltoall": 3 / 4, "allgather": 3 * 2}[schedule]  # float32 is twice as long
    for (all_of_it, every), (less, some), size in in_threads(4, run):
        assert all_of_it - less == share * sum(size[x] for x in "kv" if x not in wanted)
        for name, x in every._asdict().items():
            kept = name[1:] in (*wanted, "q")
            assert np.array_equal(getattr(some, name), x) if kept else getattr(some, name) is None


def test_what_is_wanted_is_the_same_in_all_processes():
    def call(comm):
        q, lse = np.ones((1, 1, 4, 8), np.float32), np.ones((1, 1, 4), np.float32)
        with pytest.raises(InvalidArgumentsError, match="make different calls: gradients of"):
            ring_attention_backward(q, q, q, q, q, lse, comm, wanted=("k",) if comm.rank else ("v",))
        for wrong in ("kv", ("q",), None, (1,)):
            with pytest.raises(InvalidArgumentsError, match="wanted is"):
                ring_attention_backward(q, q, q, q, q, lse, comm, wanted=wrong)
        assert comm.sent == 0

    in_threads(2, call)


REFUSED = [
    # schedule, packed?, options, words, hint
    ("ring", False, {"mask": np.ones((4, 4), bool)}, "mask is not supported for a ring", '"alltoall" or'),
    ("ring", False, {"alibi_slopes": np.ones(2, np.float32)}, "alibi_slopes is not supported", "alltoall"),
    ("ring", False, {"reproducible": "batch"}, 'reproducible="batch" is not .* a ring', "alltoall"),
    ("ring", True, {"window": (1, 0)}, "window is not supported for a ring of packed", "alltoall"),
    ("alltoall", True, {"mask": np.ones((4, 4), bool)}, "mask is not .* all-to-all of packed", "mask=None"),
    ("allgather", True, {"alibi_slopes": np.ones(2, np.float32)}, "alibi_slopes is not", "alltoall"),
    ("allgather", False, {"reproducible": "device"}, 'reproducible="device" is not', "alltoall"),
    (
        "allgather",
        False,
        {"mask": cupy_flash.BlockMask(np.ones((1, 1), np.int32), np.zeros((0, 16, 2), np.uint8))},
        "ranges of queries start at multiples of 4, which are not block boundaries",
        '"alltoall"; or ranges of a multiple of 16 rows',
    ),
    (
        "allgather",
        False,
        {"mask": cupy_flash.BlockMask(np.ones((2, 1), np.int32), np.zeros((0, 16, 2), np.uint8))},
        r"mask.table has shape \(2, 1\) for 8 queries in blocks of 16",
        "mask of the whole sequence",
    ),
    (
        "alltoall",
        False,
        {"mask": cupy_flash.mask(lambda b, h, i, j: i >= j)},
        "a mask of type .* is not supported for an all-to-all",
        "mask=None",
    ),
    ("star", False, {}, "schedule is 'star'", '"alltoall"'),
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "packed", "options", "words", "hint"), REFUSED)
def test_options_that_a_schedule_does_not_take(schedule, packed, options, words, hint):
    def call(comm):
        q = np.ones((4, 2, 8) if packed else (1, 2, 4, 8), np.float32)
        how = {"cu_seqlens": np.array([0, 4], np.int32)} if packed else {}
        with pytest.raises((InvalidArgumentsError, UnsupportedError), match=words) as refused:
            ring_attention(q, q, q, comm, schedule=schedule, **how, **options)
        assert hint in str(refused.value).partition("Try: ")[2]
        assert comm.sent == 0

    in_threads(2, call)


@pytest.mark.parametrize(("heads", "fewer"), [((6, 3), 3), ((6, 6), 3), ((3, 1), None), ((4, 2), 2)])
def test_heads_that_do_not_divide(heads, fewer):
    would = f"multiple of 4 heads; or {fewer} of the processes" if fewer else "multiple of 4 heads$"

    def call(comm):
        q, k = (np.ones((1, n, 4, 8), np.float32) for n in heads)
        with pytest.raises(InvalidArgumentsError, match=r"do not divide over 4 processes\.\nTry: .*" + would):
            ring_attention(q, k, k, comm, schedule="alltoall")
        with pytest.raises(InvalidArgumentsError, match="1 heads of q"):
            ring_attention(q[0, 0], q[0, 0], q[0, 0], comm, schedule="alltoall")
        assert comm.sent == 0
        for schedule in ("ring", "allgather"):
            ring_attention(q, k, k, comm, schedule=schedule)

    in_threads(4, call)


@pytest.mark.parametrize("schedule", ["alltoall", "allgather"])
def test_masks_of_another_sequence_come_before_the_first_message(schedule):
    def call(comm):
        q = np.ones((1, 2, 4, 8), np.float32)  # of 8 in all
        for shape in ((4, 4), (8, 4), (4, 8)):
            with pytest.raises(InvalidArgumentsError, match=r"mask (has|of) shape"):
                ring_attention(q, q, q, comm, schedule=schedule, mask=np.ones(shape, bool))
        with pytest.raises(InvalidArgumentsError, match="8 queries and 4 keys is ambiguous"):
            ring_attention(q.repeat(2, 2), q, q, comm, schedule=schedule, window=(1, 1))
        for heads in (3, 4):
            with pytest.raises(InvalidArgumentsError, match=r"mask (has|of)"):
                ring_attention(q, q, q, comm, schedule=schedule, mask=np.ones((heads, 8, 8), bool))
            bounds = cupy_flash.Spans(np.ones((1, heads, 8, 1, 2), np.int32))
            with pytest.raises(InvalidArgumentsError, match=r"mask(\.bounds)? has"):
                ring_attention(q, q, q, comm, schedule=schedule, mask=bounds)
        q4 = q.repeat(2, 1)
        with pytest.raises(InvalidArgumentsError, match=r"mask (has|of)"):
            ring_attention(q4, q4, q4, comm, schedule=schedule, mask=np.ones((2, 8, 8), bool))
        assert comm.sent == 0
        ring_attention(q, q, q, comm, schedule=schedule, mask=np.ones((8, 8), bool))

    in_threads(2, call)


def test_processes_with_other_schedules_are_told():
    def call(comm):
        q = np.ones((1, 2, 4, 8), np.float32)
        schedule = "allgather" if comm.rank else "alltoall"
        with pytest.raises(InvalidArgumentsError, match="make different calls: schedule"):
            ring_attention(q, q, q, comm, schedule=schedule)
        assert comm.sent == 0
        ring_attention(q, q, q, comm, schedule="ring" if comm.rank else None)

    in_threads(2, call)


def test_gradients_of_lse_travel_from_all_or_none():
    """Only in an all-to-all: in the other schedules those of this process's rows stay here."""

    def call(comm):
        q = np.ones((1, 2, 4, 8), np.float32)
        dlse = np.ones((1, 2, 4), np.float32) if comm.rank else None

        def gradients(schedule):
            ring_attention_backward(q, q, q, q, q, q[..., 0], comm, dlse=dlse, schedule=schedule)

        with pytest.raises(InvalidArgumentsError, match="make different calls: dlse"):
            gradients("alltoall")
        assert comm.sent == 0
        for schedule in ("ring", "allgather"):
            gradients(schedule)

    in_threads(2, call)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize(("module", "at"), [(alltoall, 0), (allgather, 0), (allgather, 1)])
def test_an_exception_leaves_no_message_under_way(monkeypatch, module, at, rank, backward):
    """Others get right results, or NaN where the process that fails owes them something."""
    schedule = module.__name__.rpartition(".")[2]
    case = Case((12, 12), heads=(3, 3), options={"schedule": schedule, "causal": True})
    name = "attention_backward" if backward else "attention"
    real, calls, failing = getattr(module, name), iter(range(9)), set()

    def fails(*args, **kwargs):
        if threading.get_ident() in failing and next(calls) == at:
            raise MemoryError("as if there were too little")
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, fails)

    def call(comm):
        wanted = run_over_mpi(case, comm)
        x, options = case.part(comm.rank, 3)
        failing.add(threading.get_ident()) if comm.rank == rank else None

        def again():
            if not backward:
                return ring_attention(x["q"], x["k"], x["v"], comm, **options)
            given = x["do"], x["q"], x["k"], x["v"], wanted["o"], wanted["lse"]
            return ring_attention_backward(*given, comm, dlse=x["dlse"], **options)[:3]

        names = ("dq", "dk", "dv") if backward else ("o", "lse")
        if comm.rank == rank:
            with pytest.raises(MemoryError):
                again()
        else:
            for name, result in zip(names, again(), strict=True):
                bad = np.isnan(result)
                if schedule == "alltoall":  # the heads of the process that fails
                    assert np.array_equal(bad.any(axis=(0, *range(2, bad.ndim))), np.arange(3) == rank)
                    assert bad[:, rank].all()
                else:  # its share of sums
                    assert bad.all() if name in ("dk", "dv") else not bad.any()
                np.testing.assert_allclose(result[~bad], wanted[name][~bad], atol=1e-12)
        assert not comm.under_way
        for name, result in zip(names, again(), strict=True):
            np.testing.assert_allclose(result, wanted[name], atol=1e-12)
        assert not comm.under_way

    in_threads(3, call)


@pytest.mark.parametrize("schedule", ["alltoall", "allgather"])
def test_memory_is_reserved_before_the_first_message(monkeypatch, schedule):
    """Each of a process's reservations may fail; nothing has been sent then, and all are told."""
    case = Case((8, 8), heads=(2, 2), options={"schedule": schedule, "causal": True})
    real, counts, failing = mpi._Link.reserve, {"left": -1}, set()

    def reserve(self, like, count, wide):
        if threading.get_ident() in failing:
            counts["left"] -= 1
            if counts["left"] == 0:
                raise MemoryError("as if there were too little")
        return real(self, like, count, wide)

    monkeypatch.setattr(mpi._Link, "reserve", reserve)

    def call(comm):
        wanted = run_over_mpi(case, comm)
        x, options = case.part(comm.rank, 2)
        if comm.rank:
            failing.add(threading.get_ident())
        for backward in (False, True):
            for at in range(1, 100):
                if comm.rank:
                    counts["left"] = at
                before, error = comm.sent, None
                try:
                    if backward:
                        given = x["do"], x["q"], x["k"], x["v"], wanted["o"], wanted["lse"]
                        ring_attention_backward(*given, comm, **options)
                    else:
                        ring_attention(x["q"], x["k"], x["v"], comm, **options)
                except (MemoryError, InvalidArgumentsError) as raised:
                    error = raised
                if error is None:
                    break
                assert isinstance(error, MemoryError) == bool(comm.rank)
                assert comm.sent == before
            assert at > 3

    in_threads(2, call)

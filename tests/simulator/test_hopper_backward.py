"""Gradients through the public API by Hopper's own kernel, simulated, under every schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import product
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import testing
from cupy_flash.device import simulator
from cupy_flash.dispatch import memo
from cupy_flash.plan import families
from cupy_flash.plan.catalog import Variant, architecture
from cupy_flash.plan.families import hopper
from tests.cases import PACKED_LENGTHS, Case, feature_cases, numpy_dtype
from tests.checks import Device, check_backward, only
from tests.simulator import sanitized
from tests.simulator.units import SIMULATED, aligned, pack, unit

pytestmark = [
    *SIMULATED,
    pytest.mark.sampled(96),
    pytest.mark.parametrize("device", ["sm_90a"], indirect=True),
]

TAKEN = {
    "dtype": ("float16", "bfloat16"),
    "style": ("aligned",),
    "mask": (None,),
    "bias": (None,),
    "bias_dtype": (None,),
    "dropout": (0.0,),
    "heads": ((2, 2), (4, 2), (3, 1)),
    # why no ramp: in bfloat16 its O, an input here, is rounded so much that dsinks, which is computed from it
    # elsewhere, can leave the budget.
    "values": ("normal", "onehot"),
}
# Tiles that end inside, at and beyond an edge; one, two and more tiles of queries than there are stages.
LENGTHS = ((64, 64), (1, 1), (7, 9), (65, 130), (200, 70), (193, 257), (33, 300), (420, 129))
HEAD_DIMS = (
    (64, 64),
    (40, 24),
    (96, 96),
    (128, 72),
    (72, 128),
    (192, 128),
    (136, 56),
    (256, 256),
    (136, 200),
)
FEATURES = feature_cases(LENGTHS, HEAD_DIMS, **TAKEN)
PLAIN = {"softcap": (None,), "alibi": (None,), "scale": (None, 0.3)}
PLAIN_FEATURES = feature_cases(LENGTHS, HEAD_DIMS, **TAKEN, **PLAIN)
POLICIES = ("late", "early", "random")


@pytest.fixture(autouse=True)
def hopper_only() -> Iterator[None]:
    """Make the plan fail instead of falling back to another family."""
    with only(hopper):
        yield


def under(number: int) -> AbstractContextManager[None]:
    """A schedule for a case: they take turns."""
    return simulator.schedule(POLICIES[number % 3], seed=number)


@pytest.mark.parametrize("number", range(len(FEATURES)), ids=[str(case) for case in FEATURES])
def test_features(number: int, device: Device) -> None:
    with under(number):
        check_backward(FEATURES[number], device)


@pytest.mark.parametrize("number", range(len(PLAIN_FEATURES)), ids=[str(case) for case in PLAIN_FEATURES])
def test_plain_features(number: int, device: Device) -> None:
    with under(number):
        check_backward(PLAIN_FEATURES[number], device)


# Where a tile of queries, one of its two warpgroups or a block of keys of the two wide passes ends.
WIDE_EDGES = tuple(
    Case(
        dtype=("float16", "bfloat16")[number % 2],
        batch=2,
        heads=((2, 1), (2, 2))[number % 2],
        lengths=lengths,
        head_dims=((256, 256), (160, 160), (192, 192), (200, 136))[number % 4],
        align="bottom_right",
        style="aligned",
        **({}, {"causal": True}, {"window": (40, 3)})[number % 3],
    )
    for number, lengths in enumerate(
        ((1, 1), (1, 129), (63, 64), (64, 65), (65, 63), (127, 128), (128, 127), (129, 257), (257, 129))
    )
)


@pytest.mark.parametrize("number", range(len(WIDE_EDGES)), ids=[str(case) for case in WIDE_EDGES])
def test_wide_edges(number: int, device: Device) -> None:
    with under(number):
        check_backward(WIDE_EDGES[number], device)


# One of each kind of code; also what the mutants are tried on.
KINDS = tuple(
    Case(batch=1, heads=(2, 1), align="bottom_right", style="aligned", sinks=True, **case)
    for case in (
        {"dtype": "bfloat16", "head_dims": (128, 128), "lengths": (200, 260), "window": (150, 20)},
        {"dtype": "float16", "head_dims": (64, 64), "lengths": (420, 260), "causal": True},
        {"dtype": "float16", "head_dims": (96, 80), "lengths": (260, 129), "softcap": 5.0, "alibi": "h"},
        {"dtype": "bfloat16", "head_dims": (120, 128), "lengths": (130, 129), "softcap": 9.0, "causal": True},
        {"dtype": "bfloat16", "head_dims": (192, 128), "lengths": (200, 260), "window": (150, 20)},
        {"dtype": "float16", "head_dims": (160, 104), "lengths": (130, 129), "softcap": 5.0, "alibi": "h"},
        {"dtype": "bfloat16", "head_dims": (256, 256), "lengths": (200, 150), "window": (90, 20)},
        {"dtype": "float16", "head_dims": (200, 256), "lengths": (90, 130), "softcap": 5.0, "causal": True},
    )
)


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_kinds(case: Case, device: Device) -> None:
    check_backward(case, device)


@pytest.mark.parametrize("policy", ["early", "random"])
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_kinds_on_schedules(case: Case, policy: str, device: Device) -> None:
    with simulator.schedule(policy, seed=3):
        check_backward(case, device)


# LSE / scale is four numbers of 16 bits: at the end of their range, and beyond it, where kind "any" runs.
# why 16: the LSE of most rows is then one score, and a hundred times what it mostly is.
@pytest.mark.parametrize("scale", [2.0**-21, 2.0**-20, 16.0])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scales(scale: float, dtype: str, device: Device) -> None:
    lengths = {"batch": 1, "heads": (2, 1), "lengths": (90, 130), "head_dims": (128, 128)}
    check_backward(Case(dtype=dtype, style="aligned", scale=scale, **lengths), device)


@pytest.mark.parametrize(("scale", "mask"), [(2.0**-21, "any"), (2.0**-20, "band"), (2.0**21, "any")])
@pytest.mark.usefixtures("device")
def test_scales_that_leave_the_range(scale: float, mask: str) -> None:
    q, k, v = (np.zeros((1, 1, 64, 64), np.float16) for _ in range(3))
    text = cupy_flash.explain(q, k, v, direction="backward", scale=scale)
    assert f"_{mask}_" in text


# ---------------------------------------------------------------------- deterministic

# Where blocks that run side by side get ahead of each other.
INTERLEAVED = (("early", 0), *(("random", seed) for seed in range(3)))
# Many blocks of keys for each tile of queries: two sums are the same in either order.
LONG = tuple(
    Case(batch=1, heads=(2, 1), align="bottom_right", style="aligned", sinks=True, lengths=(130, 650), **case)
    for case in (
        {"dtype": "float16", "head_dims": (64, 64), "causal": True},
        {"dtype": "bfloat16", "head_dims": (96, 96), "window": (400, 30), "softcap": 5.0},
        {"dtype": "float16", "head_dims": (128, 128)},
        {"dtype": "bfloat16", "head_dims": (192, 128), "causal": True},
        {"dtype": "float16", "head_dims": (256, 256), "window": (250, 0)},
    )
)


@pytest.fixture
def in_waves(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Makes plans with waves of so many blocks, or one order for all, where a mask lets them.

    why: a plan's wave is what a GPU runs at once, and more blocks than there are here.
    """

    def of(wave: int) -> None:
        planned = hopper._wave
        monkeypatch.setattr(hopper, "_wave", lambda p, arch: wave if planned(p, arch) else 0)
        memo.forget()

    yield of
    memo.forget()


@pytest.mark.parametrize("wave", [0, 1, 2, 4, 132], ids="wave{}".format)
@pytest.mark.parametrize("case", LONG, ids=str)
def test_deterministic_gradients_repeat_every_bit(
    case: Case, wave: int, in_waves: Callable[[int], None], device: Device
) -> None:
    """Whichever blocks run first, dQ is summed in one order; dK, dV and wide dQ have one owner."""
    in_waves(wave)
    first = check_backward(case, device, reproducible="run")
    for policy, seed in INTERLEAVED:
        with simulator.schedule(policy, seed=seed):
            again = check_backward(case, device, reproducible="run" if case.head_dims != (256, 256) else None)
        for name in ("dq", "dk", "dv", "dsinks"):
            x, y = (np.asarray(getattr(gradients, name)) for gradients in (first, again))
            assert x.tobytes() == y.tobytes(), f"{name} under {policy}, seed {seed}"


@pytest.mark.parametrize("number", range(0, len(FEATURES), 2), ids=[str(case) for case in FEATURES[::2]])
def test_deterministic_features(number: int, in_waves: Callable[[int], None], device: Device) -> None:
    in_waves((132, 0, 2, 1, 3)[number // 2 % 5])
    with under(number // 2):
        check_backward(FEATURES[number], device, reproducible="run")


# Tiles of queries that see no key at all, one block of keys or two, from the first block on or not.
FIRST = tuple(
    Case(batch=2, heads=(2, 1), style="aligned", lengths=lengths, head_dims=head_dims, **case)
    for lengths, head_dims, case in (
        ((330, 150), (128, 128), {"dtype": "float16", "causal": True, "align": "bottom_right"}),
        ((420, 140), (64, 64), {"dtype": "bfloat16", "window": (20, 20), "align": "top_left"}),
        ((130, 270), (96, 96), {"dtype": "float16", "softcap": 5.0}),
        ((200, 260), (192, 128), {"dtype": "bfloat16", "window": (40, 0), "align": "bottom_right"}),
    )
)


@pytest.mark.parametrize(("policy", "wave"), [*zip(POLICIES, (0, 1, 132), strict=True), ("late", 1)])
@pytest.mark.parametrize("case", FIRST, ids=str)
def test_sums_begin_with_what_the_first_block_stores(
    case: Case,
    policy: str,
    wave: int,
    in_waves: Callable[[int], None],
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing but counters is set to zero, and what is in memory before, NaN, reaches no gradient."""
    in_waves(wave)
    cleared: list[int] = []
    clear = simulator.clear

    def count(pointer: int, nbytes: int, *where: int) -> None:
        cleared.append(nbytes)
        clear(pointer, nbytes, *where)

    monkeypatch.setattr(simulator, "clear", count)
    workspace = simulator.Workspace(64)
    assert np.isnan(np.frombuffer(simulator.read(workspace.pointer, 64), np.float32)).all()
    with simulator.schedule(policy, seed=4):
        check_backward(case, device, reproducible="run")
    tiles = case.batch * case.heads[0] * -(-case.lengths[0] // 64)  # at most: a tile has 64 queries or more
    assert len(cleared) == 2, "turns, and the number of the next block"
    assert sum(cleared) <= 4 * (2 * tiles + 1), "of a tile two at most"


@pytest.mark.usefixtures("device")
def test_wide_gradients_are_deterministic_without_asking() -> None:
    """There are no sums in memory whose order could be asked for."""
    q, k, v = (np.zeros((1, 2, 300, 256), np.float16) for _ in range(3))
    plain, asked = (
        cupy_flash.explain(q, k, v, direction="backward", reproducible="run" if deterministic else None)
        for deterministic in (False, True)
    )
    assert "flash_backward_wide_dq_sm90" in plain
    assert "dq_accumulator" not in plain
    assert plain.partition("family")[2] == asked.partition("family")[2]


# Shared with the sanitizers, which run it in a process of their own.
def check_packed(
    dtype: str,
    head_dims: tuple[int, int],
    reproducible: str | None = None,
    *,
    lengths: tuple[tuple[int, ...], tuple[int, ...]] = PACKED_LENGTHS,
    poisoned: tuple[int, ...] = (0, 1),
    **options: Any,
) -> None:
    """Sequences of their own lengths among neighbours full of NaN: the even sequences, then the odd ones."""
    cu = [np.cumsum([0, *each]).astype(np.int32) for each in lengths]
    rng = np.random.default_rng(1)
    element = numpy_dtype(dtype)
    rows = [int(cu[0][-1]) + 3, int(cu[1][-1]) + 2]
    (d, v), (rows_q, rows_k) = head_dims, rows
    shapes = {"q": (rows_q, 4, d), "k": (rows_k, 2, d), "v": (rows_k, 2, v), "do": (rows_q, 4, v)}
    tensors = {name: rng.standard_normal(shape).astype(element) for name, shape in shapes.items()}
    side = {"q": 0, "k": 1, "v": 1, "do": 0, "o": 0}
    o, lse = cupy_flash.attention_varlen(
        *(testing.hostile(tensors[name], style="aligned").view for name in "qkv"),
        *cu,
        return_lse=True,
        **options,
    )
    tensors["o"] = np.asarray(o)
    for parity in poisoned:
        nan = {name: x.copy() for name, x in tensors.items()} | {"lse": np.array(lse)}
        for name, x in nan.items():
            ends, rowwise = cu[side.get(name, 0)], np.moveaxis(x, -1, 0) if name == "lse" else x
            rowwise[ends[-1] :] = np.nan
            for n in range(parity, len(ends) - 1, 2):
                rowwise[ends[n] : ends[n + 1]] = np.nan
        held = [testing.hostile(nan[name], style="aligned") for name in ("do", "q", "k", "v", "o", "lse")]
        gradients = cupy_flash.attention_varlen_backward(
            *(g.view for g in held), *cu, reproducible=reproducible, **options
        )
        for g in held:
            g.check_untouched()
        for n in range(1 - parity, len(lengths[0]), 2):
            own = [slice(ends[n], ends[n + 1]) for ends in cu]
            part = {name: x[own[side[name]]].swapaxes(0, 1)[None] for name, x in tensors.items()}
            got = {f"d{x}": getattr(gradients, f"d{x}")[own[side[x]]].swapaxes(0, 1)[None] for x in "qkv"}
            if part["q"].size and part["k"].size:
                testing.assert_within_budget(got, part["q"], part["k"], part["v"], do=part["do"], **options)
            else:
                assert not any(x.any() for x in got.values())


PACKED: tuple[tuple[str, tuple[int, int], dict[str, Any]], ...] = (
    ("float16", (128, 128), {"causal": True, "align": "bottom_right"}),
    ("bfloat16", (64, 64), {}),
    ("bfloat16", (96, 96), {"window": (60, 10), "align": "top_left", "softcap": 9.0}),
    ("float16", (256, 256), {"causal": True, "align": "bottom_right"}),
    ("bfloat16", (256, 256), {"window": (60, 10), "align": "top_left", "softcap": 9.0}),
    ("float16", (192, 128), {"causal": True, "align": "bottom_right"}),
    ("bfloat16", (192, 128), {"window": (60, 10), "align": "top_left", "softcap": 9.0}),
)


@pytest.mark.parametrize(("dtype", "head_dims", "options"), PACKED)
@pytest.mark.usefixtures("device")
def test_packed(dtype: str, head_dims: tuple[int, int], options: dict[str, Any]) -> None:
    check_packed(dtype, head_dims, **options)


@pytest.mark.parametrize("policy", ["early", "random"])
@pytest.mark.parametrize(("dtype", "head_dims", "options"), PACKED)
@pytest.mark.usefixtures("device")
def test_packed_on_schedules(
    dtype: str, head_dims: tuple[int, int], options: dict[str, Any], policy: str
) -> None:
    with simulator.schedule(policy, seed=5):
        check_packed(dtype, head_dims, **options)


@pytest.mark.parametrize(("policy", "wave"), [*zip(POLICIES, (0, 1, 132), strict=True), ("random", 2)])
@pytest.mark.parametrize(("dtype", "head_dims", "options"), PACKED)
@pytest.mark.usefixtures("device")
def test_packed_deterministic(
    dtype: str,
    head_dims: tuple[int, int],
    options: dict[str, Any],
    policy: str,
    wave: int,
    in_waves: Callable[[int], None],
) -> None:
    in_waves(wave)
    with simulator.schedule(policy, seed=6):
        check_packed(dtype, head_dims, reproducible="run", **options)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.usefixtures("device")
def test_what_sees_nothing_has_no_gradient(deterministic: bool) -> None:
    """Rows without keys, and keys that no query sees, a whole block of them included."""
    q, k, v = (np.random.default_rng(n).standard_normal((1, 1, 400, 64)).astype(np.float16) for n in range(3))
    options: dict[str, Any] = {"window": (3, 3), "align": -260}
    q, k, v = (testing.hostile(x, style="aligned").view for x in (q, k, v))
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
    gradients = cupy_flash.attention_backward(
        q, q, k, v, o, lse, reproducible="run" if deterministic else None, **options
    )
    assert not gradients.dq[0, 0, :257].any()
    for x in (gradients.dk, gradients.dv):
        assert not x[0, 0, 143:].any()
        assert x[0, 0, :143].any()
    testing.assert_within_budget(gradients, q, k, v, do=q, **options)


# bf16 is the same code but for the element.
F16 = [
    variant
    for variant in hopper.variants(architecture("sm_90"))
    if variant.dtype == "f16" and variant.params == "BackwardParams" and variant.products
]


@pytest.mark.parametrize("variant", F16, ids=lambda v: v.name)
@pytest.mark.usefixtures("device")
def test_cost_is_the_theory(variant: Variant) -> None:
    """Products, exponentials, additions and bytes are the least possible; no bank meets a conflict."""
    (m, n), d, dv = variant.tile, variant.head_dim, variant.head_dim_v
    rows, keys, heads = 3 * m, 2 * n, 2
    q, o, do = (aligned((1, heads, rows, width), np.float16, 0.5) for width in (d, dv, dv))
    k, v = (aligned((1, 1, keys, width), np.float16, 0.5) for width in (d, dv))
    lse = aligned((1, heads, rows), np.float32, 5.0)
    options: dict[str, Any] = {"softcap": 3.0} if variant.mask == "any" else {}
    if variant.mask == "spans":
        options["mask"] = cupy_flash.Spans(np.full((1, keys, 2), (0, rows), np.int32))
    with simulator.costs() as counted:
        cupy_flash.attention_backward(do, q, k, v, o, lse, **options)
    cost = dict(counted)[variant.name]
    pairs, tiles = heads * rows * keys, heads * (rows // m) * (keys // n)
    if variant.mask != "any":
        assert cost["exps"] == pairs
    owns_queries, wide = "dq" in variant.kernel, "wide" in variant.kernel
    # Operands of each of two warpgroups.
    if owns_queries:  # S and dP of 64 queries, dQ
        assert cost["mma_flops"] == 2 * pairs * (2 * d + dv)
        operands = (64 + n) * (d + dv) + n * d
    elif wide:  # of one S, of the other dP; half of the columns of dV and dK, and P or dS
        assert cost["mma_flops"] == 2 * pairs * 2 * (d + dv)
        operands = (64 + m) * d + 2 * m * (64 + d // 2)
    else:  # S and dP of 64 keys, dV and dK, dQ of 64 x columns, and where dK has dS from shared memory that
        # Where a warpgroup cannot have half of dQ's columns it computes 64.
        columns_of_dq = d if m == 128 else max(d, 128)
        subtracted = 16 * (variant.mask != "any" and d + dv <= 256)  # columns with LSE, and with delta
        assert cost["mma_flops"] == 2 * pairs * (2 * (d + dv + subtracted) + columns_of_dq)
        of_dq = m if m % 64 else columns_of_dq // (1 if m == 128 else 2)  # of 80 queries it is transposed
        operands = (64 + m) * (d + dv) + m * (d + dv) + n * (64 + of_dq)
        operands += 64 * m * (d + dv > 256) + 2 * m * subtracted
    assert cost["product_bytes"] == 2 * tiles * 2 * operands
    assert cost["bulk_reduce_bytes"] == (0 if wide else 4 * tiles * m * d)
    if not wide:  # in any order no block stores
        assert cost["bulk_store_bytes"] == 0
    if not wide and variant.mask != "spans":  # in turns, which kind spans has not, the first of two does
        with simulator.costs() as counted:
            cupy_flash.attention_backward(do, q, k, v, o, lse, reproducible="run", **options)
        in_turns = dict(counted)[variant.name]
        assert in_turns["bulk_store_bytes"] == in_turns["bulk_reduce_bytes"] == 2 * tiles * m * d
    if owns_queries:
        assert cost["bulk_load_bytes"] == 2 * (heads * rows + tiles * n) * (d + dv)
        # Four lanes have a row.
        assert cost["global_load_bytes"] == 4 * 2 * 4 * heads * rows
        assert cost["global_store_bytes"] == 2 * heads * rows * d
    else:
        assert cost["bulk_load_bytes"] == 2 * (keys + tiles * m) * (d + dv)
        assert cost["global_load_bytes"] == 2 * 4 * tiles * m
        assert cost["global_store_bytes"] == 2 * keys * (d + dv)
    for what in ("shared_load", "shared_store", "matrix_store"):
        assert cost[f"{what}_cycles"] == cost[f"{what}s"], f"bank conflicts in {what}s"


@pytest.mark.parametrize("section_elements", [1, 3000, 9000, 1 << 30])
@pytest.mark.parametrize(("batch", "heads", "tiles"), [(1, 1, 1), (2, 3, 3), (3, 4, 5)])
@pytest.mark.usefixtures("device")
def test_order_of_blocks(section_elements: int, batch: int, heads: int, tiles: int) -> None:
    """Every tile of every head once; within a section of heads that share an L2, first tiles first."""
    count, seqlen_q, dims = batch * heads * tiles, 50, (32, 28)
    out = np.full((count, 3), -1, np.int32)
    fields = [batch, 2 * heads, heads, seqlen_q, 0, *dims, 0]
    shape = np.array(fields, np.int32).tobytes() + bytes(24)
    params = pack(shape=shape, out=out, tiles=tiles, section_elements=section_elements)
    order = simulator.load(unit("work_order", "ORDER_OF_KEYS"))
    order.launch((count, 1, 1), (1, 1, 1), 0, params.tobytes())
    assert len({tuple(work) for work in out.tolist()}) == count
    tile, head, entry = out.T
    assert (set(tile), set(head), set(entry)) == (set(range(tiles)), set(range(heads)), set(range(batch)))
    per_section = min(max(1, section_elements // sum(dims) // seqlen_q), batch * heads)
    section = (entry * heads + head) // per_section
    assert (np.diff(section) >= 0).all(), "sections follow each other"
    assert (np.diff(tile)[np.diff(section) == 0] >= 0).all(), "long tiles first"


# Masks of which plans make waves, with queries that see no key and keys that no query sees; and others.
_NO_LIMIT = 1 << 30
_WAVES = (
    ((1500, 1500), (-_NO_LIMIT, 0)),
    ((700, 1500), (-_NO_LIMIT, 800)),
    ((1500, 700), (-_NO_LIMIT, -800)),
    ((1500, 700), (-_NO_LIMIT, 0)),
    ((700, 1500), (-_NO_LIMIT, 0)),
    ((1500, 1500), (-_NO_LIMIT, 200)),
    ((1100, 1500), (-_NO_LIMIT, _NO_LIMIT)),
    ((1, 1500), (-_NO_LIMIT, 1499)),
)
_ONE_ORDER = (*_WAVES, ((1500, 1500), (-300, 0)), ((1500, 1500), (-300, 200)))
# Of GPUs with 76, 78 and 142 multiprocessors, the last ones shared by two heads.
_OTHER_GPUS = (((600, 18000), (-_NO_LIMIT, _NO_LIMIT)), ((600, 18000), (-_NO_LIMIT, 17400)))
_ORDERS = [(case, 0) for case in _ONE_ORDER] + list(product(_WAVES, (1, 2, 3, 5, 8)))
_ORDERS += product(_OTHER_GPUS, (76, 78, 71))


def steps_in_turns(
    lengths: tuple[int, int], band: tuple[int, int], m: int, n: int, wave: int
) -> list[tuple[int, list[tuple[int, int, int]]]]:
    """Blocks in the order in which they start: their number; tile, chain and blocks before, of each step."""
    tiles, blocks = (-(-length // by) for length, by in zip(lengths, (m, n), strict=True))
    out = np.full((blocks, 1 + tiles, 3), -1, np.int32)
    low, high = band
    seqlens = dict(zip(("seqlen_q", "seqlen_k"), lengths, strict=True))
    params = pack(out=out, tiles=tiles, wave=wave, m=m, n=n, **seqlens, low=low, high=high)
    simulator.load(unit("dq_order")).launch((blocks, 1, 1), (1, 1, 1), 0, params.tobytes())
    return [(first[0], [tuple(step) for step in steps if step[0] >= 0]) for first, *steps in out.tolist()]


@pytest.mark.parametrize(("m", "n"), [(80, 128), (64, 128), (128, 128)])
@pytest.mark.parametrize(("case", "wave"), _ORDERS)
@pytest.mark.usefixtures("device")
def test_order_of_turns(case: tuple[tuple[int, int], tuple[int, int]], m: int, n: int, wave: int) -> None:
    """Each block once; each of its tiles once; whoever adds second to a sum has started second."""
    lengths, band = case
    offsets = np.arange(lengths[1])[None] - np.arange(lengths[0])[:, None]
    kept = (offsets >= band[0]) & (offsets <= band[1])
    blocks = steps_in_turns(lengths, band, m, n, wave)
    assert sorted(block for block, _ in blocks) == list(range(-(-lengths[1] // n)))
    added: Counter[tuple[int, int]] = Counter()
    for block, steps in blocks:
        rows = np.flatnonzero(kept[:, block * n : (block + 1) * n].any(1)) // m
        assert sorted(tile for tile, _, _ in steps) == sorted(set(rows)), (
            "the tiles of which a query sees a key"
        )
        for tile, chain, before in steps:
            assert 0 <= chain < (2 if wave else 1)
            assert before == added[tile, chain]
            added[tile, chain] += 1


def way_of_block(
    place: int, columns: int, rows: int, causal: bool, wave: int
) -> tuple[int, list[tuple[int, int]]]:
    """Of the block that starts as number `place`: its number; tile and chain of each step.

    There are `columns` blocks of 128 keys and `rows` tiles of 80 queries. One order goes back. Under a causal
    mask every other wave goes up from the diagonal, the others back, in the second chain; without a mask
    blocks begin evenly apart, go back, and around.
    """
    number, in_wave = divmod(place, wave or 1)
    up = bool(wave) and causal and number % 2 == 0
    block = number * wave + min((number + 1) * wave, columns) - 1 - place if up else place
    tiles = range(block * 128 // 80 if causal else 0, rows)
    if up:
        return block, [(tile, 0) for tile in tiles]
    if not wave:
        return block, [(tile, 0) for tile in reversed(tiles)]
    home = rows if causal else in_wave * rows // wave
    before = [(tile, 1) for tile in reversed(tiles) if tile < home]
    return block, [*before, *((tile, 0) for tile in reversed(range(home, rows)))]


@pytest.mark.parametrize("wave", [0, 2, 5, 9])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("device")
def test_waves_go_up_and_back(causal: bool, wave: int) -> None:
    blocks = steps_in_turns((1500, 1500), (-_NO_LIMIT, 0 if causal else _NO_LIMIT), 80, 128, wave)
    for place, (block, steps) in enumerate(blocks):
        expected_block, expected = way_of_block(place, len(blocks), -(-1500 // 80), causal, wave)
        assert block == expected_block
        assert [(tile, chain) for tile, chain, _ in steps] == expected


# ---------------------------------------------------------------------- what it leaves to others


EVERY_FAMILY = families.FAMILIES


def refused(**changes: Any) -> str:
    """Why the family passes a call on, which must be answered all the same."""
    shape = changes.pop("shape", (1, 2, 64, 64))
    q, k, v = (changes.pop(name, aligned(shape, np.float16, 0.5)) for name in "qkv")
    families.FAMILIES, only = EVERY_FAMILY, families.FAMILIES
    memo.forget()
    try:
        o, lse = cupy_flash.attention(q, k, v, return_lse=True, **changes)
        gradients = cupy_flash.attention_backward(o, q, k, v, o, lse, **changes)
        assert np.isfinite(gradients.dq).all()
        text = cupy_flash.explain(q, k, v, direction="backward", **changes)
    finally:
        families.FAMILIES = only
    return "; ".join(line.partition("hopper: ")[2] for line in text.splitlines() if "hopper: " in line)


@pytest.mark.usefixtures("device")
def test_refusals() -> None:
    for changes, reason in (
        ({"mask": np.ones((64, 64), bool)}, "its inner loop has no mask"),
        ({"shape": (1, 1, 64, 264)}, "head_dim 264 is above 256"),
        ({"q": aligned((1, 2, 0, 64), np.float16)}, "no rows for a tensor map"),
    ):
        assert reason in refused(**changes)


# ---------------------------------------------------------------------- sanitizers

_START = """
import os
os.environ["CUPY_FLASH_DRIVER"] = "simulator:sm_90a"
from cupy_flash.device import simulator
from tests.simulator import sanitized
from tests.simulator.test_hopper_backward import KINDS, Device, check_backward, check_packed, np
"""
_SANITIZED = {
    "any order": """
with simulator.schedule("early"):
    for case in (KINDS[2], KINDS[4]):
        check_backward(case, Device("sm_90a", np))
check_packed("float16", (64, 64), causal=True, align="bottom_right", **sanitized.PACKED)
""",
    "in turns": """
with simulator.schedule("early"):
    for case in (KINDS[1], KINDS[5], KINDS[7]):
        check_backward(case, Device("sm_90a", np), reproducible="run")
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("order", _SANITIZED)
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
@pytest.mark.usefixtures("device")
def test_sanitizers_find_nothing(sanitizer: str, order: str) -> None:
    """No access out of bounds, no undefined behaviour, no race; padded and packed."""
    done = sanitized.run(sanitizer, _START + _SANITIZED[order])
    assert done.returncode == 0, done.stderr[-3000:]

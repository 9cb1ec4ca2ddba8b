"""Ring attention inside shard_map: four devices that hold parts, beside one that holds the whole."""

import dataclasses
import re
from functools import partial

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'cupy-flash[jax]'")

import jax.numpy as jnp
import numpy as np

import cupy_flash.jax as cf
from cupy_flash import InvalidArgumentsError, Spans, UnsupportedError
from cupy_flash.parallel import explain, packed_positions, positions
from cupy_flash.parallel.traffic import sent
from cupy_flash.spans import documents

from ..communicator import in_threads
from ..schedule_cases import SCHEDULES, Case, fixed_cases, random_case, run_over_mpi, seeds_of

pytestmark = pytest.mark.jax
RANKS = 4


@pytest.fixture
def mesh():
    if len(jax.devices()) < RANKS:
        pytest.skip("needs four devices: XLA_FLAGS=--xla_force_host_platform_device_count=4")
    return jax.sharding.Mesh(np.array(jax.devices()[:RANKS]), ("rows",))


def qkv(seqlen=16, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(2, heads, seqlen, dim) for heads, dim in ((4, 8), (2, 8), (2, 6))]
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize(
    "case",
    [
        {"causal": False},
        {"causal": True, "softcap": 3.0, "scale": 0.4, "layout": "bshd", "reproducible": "run"},
        {"causal": True, "dtype": jnp.bfloat16},
    ],
    ids=str,
)
def test_devices_agree_with_one(mesh, case):
    options = dict(case)
    dtype = options.pop("dtype", jnp.float32)
    arrays, axis = qkv(dtype=dtype), 2
    if options.get("layout") == "bshd":
        arrays, axis = [x.swapaxes(1, 2) for x in arrays], 1
    order = np.concatenate([positions(rank, RANKS, 16, options["causal"]) for rank in range(RANKS)])
    cut = jax.sharding.PartitionSpec(*[None] * axis, "rows")
    lse_cut = jax.sharding.PartitionSpec(None, None, "rows")
    ring = jax.shard_map(
        partial(cf.ring_attention, axis_name="rows", return_lse=True, **options),
        mesh=mesh, in_specs=(cut,) * 3, out_specs=(cut, lse_cut),
    )  # fmt: skip

    def in_parts(*arrays):
        o, lse = ring(*(jnp.take(x, order, axis) for x in arrays))
        home = np.argsort(order)
        return jnp.take(o, home, axis), jnp.take(lse, home, 2)

    def loss(function, *arrays):
        o, lse = function(*arrays)
        return jnp.sin(o.astype(jnp.float32)).sum() + jnp.cos(lse).sum()

    whole = partial(cf.attention, return_lse=True, **options)
    close = partial(np.testing.assert_allclose, rtol=0, atol=0.1 if dtype == jnp.bfloat16 else 5e-6)
    for ours, wanted in zip(jax.jit(in_parts)(*arrays), whole(*arrays), strict=True):
        assert ours.dtype == wanted.dtype
        close(np.asarray(ours, np.float32), np.asarray(wanted, np.float32))
    ours = jax.jit(jax.grad(partial(loss, in_parts), argnums=(0, 1, 2)))(*arrays)
    wanted = jax.grad(partial(loss, whole), argnums=(0, 1, 2))(*arrays)
    for a, b in zip(ours, wanted, strict=True):
        assert a.dtype == dtype
        close(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_parts_that_cannot_be_halved_are_refused(mesh):
    cut = jax.sharding.PartitionSpec(None, None, "rows")
    ring = jax.shard_map(
        partial(cf.ring_attention, axis_name="rows", causal=True), mesh=mesh, in_specs=cut, out_specs=cut
    )
    with pytest.raises(InvalidArgumentsError, match="holds 3 rows"):
        jax.jit(ring)(*qkv(seqlen=12))


def test_what_is_no_array_is_refused_by_its_name(mesh):
    spec = jax.sharding.PartitionSpec("rows")
    with pytest.raises(InvalidArgumentsError, match="k is None, not an array"):
        jax.shard_map(
            lambda q: cf.ring_attention(q, None, q, "rows"), mesh=mesh, in_specs=spec, out_specs=spec
        )(jnp.ones((4, 1, 2, 8)))


def test_what_is_no_axis_is_refused(mesh):
    cut = jax.sharding.PartitionSpec(None, None, "rows")
    words = r"axis_name is 'rows', which is no axis here\.\nTry: the call inside"
    with pytest.raises(InvalidArgumentsError, match=words):
        cf.ring_attention(*qkv(), "rows")  # outside of a shard_map
    for wrong in ("columns", mesh):
        ring = jax.shard_map(
            partial(cf.ring_attention, axis_name=wrong), mesh=mesh, in_specs=cut, out_specs=cut
        )
        with pytest.raises(InvalidArgumentsError, match="which is no axis here"):
            ring(*qkv())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_packed_sequences(mesh, schedule, causal):
    """Of each a device has its share, rows of none behind them; other lengths compile nothing."""
    spare, traces = 2, 0
    rows = jax.sharding.PartitionSpec("rows")
    sinks = jnp.linspace(-1.0, 1.0, 8)
    options = {"causal": causal, "softcap": 3.0, "sinks": sinks, "return_lse": True}
    if schedule == "alltoall":
        options |= {"window": (5, 2), "alibi_slopes": jnp.linspace(0.1, 1.0, 8)}

    @jax.jit
    @partial(
        jax.shard_map, mesh=mesh, in_specs=(rows, rows, rows, jax.sharding.PartitionSpec()),
        out_specs=(rows, jax.sharding.PartitionSpec(None, "rows")),
    )  # fmt: skip
    def ring(q, k, v, cut):
        nonlocal traces
        traces += 1
        how = {"schedule": schedule, "cu_seqlens": cut, "max_seqlen": 16, **options}
        return cf.ring_attention(q, k, v, "rows", **how)

    def loss(function, *arrays):
        o, lse = function(*arrays)
        return jnp.sin(o).sum() + jnp.cos(lse).sum()

    for lengths in ((8, 0, 16, 24), (40, 8, 0, 0)):
        cut = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        order = [packed_positions(rank, RANKS, lengths, causal) for rank in range(RANKS)]
        keys = jax.random.split(jax.random.key(0), 3)
        whole = [
            jax.random.normal(key, (cut[-1], heads, dim))
            for key, (heads, dim) in zip(keys, ((8, 8), (4, 8), (4, 6)), strict=True)
        ]

        def in_parts(*arrays, cut=cut, order=order):
            parts = [
                jnp.concatenate([jnp.pad(x[mine], ((0, spare), (0, 0), (0, 0))) for mine in order])
                for x in arrays
            ]
            o, lse = ring(*parts, cut // RANKS)
            each = cut[-1] // RANKS + spare
            kept = np.concatenate([np.arange(each - spare) + r * each for r in range(RANKS)])
            home = kept[np.argsort(np.concatenate(order))]
            return o[home], lse[:, home]

        by_one = partial(cf.attention_varlen, cu_seqlens_q=cut, cu_seqlens_k=cut, **options)
        for ours, wanted in zip(in_parts(*whole), by_one(*whole), strict=True):
            np.testing.assert_allclose(ours, wanted, atol=5e-6)
        if sum(lengths) == cut[2]:  # once is enough
            continue
        ours, wanted = (
            jax.grad(partial(loss, function), argnums=(0, 1, 2))(*whole) for function in (in_parts, by_one)
        )
        for a, b in zip(ours, wanted, strict=True):
            np.testing.assert_allclose(a, b, atol=5e-6)
    assert traces == 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_packed_parts_that_are_no_zigzag(mesh, schedule):
    """Lengths are values, which a program cannot refuse: nothing is computed of them."""
    rows = jax.sharding.PartitionSpec("rows")
    ring = jax.jit(jax.shard_map(
        lambda q, cut: cf.ring_attention(
            q, q, q, "rows", cu_seqlens=cut, causal=True, schedule=schedule
        ),
        mesh=mesh, in_specs=(rows, jax.sharding.PartitionSpec()), out_specs=rows,
    ))  # fmt: skip
    q = jnp.ones((4 * RANKS, 4, 8))
    assert jnp.isnan(ring(q, jnp.array([0, 1, 4], jnp.int32))).all()
    assert not jnp.isnan(ring(q, jnp.array([0, 2, 4], jnp.int32))).any()
    with pytest.raises(InvalidArgumentsError, match="holds 3 rows"):
        ring(q[: 3 * RANKS], jnp.array([0, 2], jnp.int32))
    with pytest.raises(InvalidArgumentsError, match="cu_seqlens_q is"):
        ring(q, jnp.array([0.0, 2.0]))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("schedule", ["alltoall", "allgather"])
def test_other_schedules(mesh, schedule, causal, layout):
    """Rows are exchanged for heads, or keys go to all: results and gradients are those of one device."""
    axis = 1 if layout == "bshd" else 2
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(2, heads, 16, dim) for heads, dim in ((8, 8), (4, 8), (4, 6))]
    whole = [jax.random.normal(key, shape).swapaxes(axis, 2) for key, shape in zip(keys, shapes, strict=True)]
    order = np.concatenate([positions(rank, RANKS, 16, causal) for rank in range(RANKS)])
    cut = jax.sharding.PartitionSpec(*[None] * axis, "rows")
    options = {"causal": causal, "softcap": 3.0, "layout": layout, "return_lse": True}
    parts = jax.shard_map(
        partial(cf.ring_attention, axis_name="rows", schedule=schedule, **options),
        mesh=mesh, in_specs=(cut,) * 3, out_specs=(cut, jax.sharding.PartitionSpec(None, None, "rows")),
    )  # fmt: skip

    def in_parts(*arrays):
        o, lse = parts(*(jnp.take(x, order, axis) for x in arrays))
        return jnp.take(o, np.argsort(order), axis), jnp.take(lse, np.argsort(order), 2)

    def loss(function, *arrays):
        o, lse = function(*arrays)
        return jnp.sin(o).sum() + jnp.cos(lse).sum()

    by_one = partial(cf.attention, **options)
    for ours, wanted in zip(jax.jit(in_parts)(*whole), by_one(*whole), strict=True):
        np.testing.assert_allclose(ours, wanted, atol=1e-6)
    ours, wanted = (
        jax.jit(jax.grad(partial(loss, function), argnums=(0, 1, 2)))(*whole)
        for function in (in_parts, by_one)
    )
    for a, b in zip(ours, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6)


some_axes = pytest.mark.skipif(
    jax.__version_info__ < (0, 7),
    reason="the compiler of JAX 0.6.1 aborts where a shard_map leaves axes to it",
)


@some_axes
@pytest.mark.parametrize("schedule", ["ring", "alltoall", "allgather"])
def test_some_axes_of_a_mesh(mesh, schedule):
    """A shard_map over the axis of rows leaves that of batches to XLA."""
    mesh = jax.sharding.Mesh(mesh.devices.reshape(2, -1), ("rows", "batches"))
    rows = jax.sharding.PartitionSpec(None, None, "rows")
    parts = jax.shard_map(
        partial(cf.ring_attention, axis_name="rows", causal=True, schedule=schedule),
        mesh=mesh, in_specs=rows, out_specs=rows, axis_names={"rows"},
    )  # fmt: skip
    order = np.concatenate([positions(rank, 2, 16, True) for rank in range(2)])
    whole = qkv()
    o = jax.jit(parts)(*(jnp.take(x, order, 2) for x in whole))
    np.testing.assert_allclose(
        jnp.take(o, np.argsort(order), 2), cf.attention(*whole, causal=True), atol=1e-6
    )


@some_axes
@pytest.mark.parametrize(
    ("packed", "options"),
    [
        (False, {"schedule": "ring", "seqlen": 15, "causal": True}),
        (False, {"schedule": "ring", "align": 3, "causal": True, "parts": "contiguous"}),
        (False, {"schedule": "allgather", "mask": documents([5, 11])}),
        (True, {"schedule": "ring", "cu_seqlens": np.array([0, 2, 8], np.int32), "causal": True}),
        (True, {"schedule": "allgather", "cu_seqlens": np.array([0, 2, 8], np.int32)}),
    ],
    ids=["seqlen", "align", "spans", "packed ring", "packed all-gather"],
)
def test_some_axes_of_a_mesh_give_what_all_of_a_smaller_one_give(mesh, packed, options):
    """Where rows are found by searching in numbers that differ between devices."""
    rows = jax.sharding.PartitionSpec("rows") if packed else jax.sharding.PartitionSpec(None, None, "rows")
    arrays = [jnp.swapaxes(x[0], 0, 1) if packed else x for x in qkv()]
    results = []
    for devices, names in ((mesh.devices[:2], ("rows",)), (mesh.devices.reshape(2, -1), ("rows", "batches"))):
        parts = jax.shard_map(
            partial(cf.ring_attention, axis_name="rows", **options),
            mesh=jax.sharding.Mesh(devices, names), in_specs=rows, out_specs=rows, axis_names={"rows"},
        )  # fmt: skip
        results.append(jax.jit(parts)(*arrays))
    np.testing.assert_array_equal(*results)
    assert results[0].any()


@pytest.mark.parametrize("schedule", ["ring", "alltoall", "allgather"])
def test_no_rows(mesh, schedule):
    rows = jax.sharding.PartitionSpec(None, None, "rows")
    parts = jax.shard_map(
        partial(cf.ring_attention, axis_name="rows", schedule=schedule),
        mesh=mesh,
        in_specs=rows,
        out_specs=rows,
    )
    q = jnp.ones((1, RANKS, 0, 8))
    assert jax.jit(parts)(q, q, q).shape == q.shape


def test_what_a_schedule_does_not_take(mesh):
    rows = jax.sharding.PartitionSpec(None, None, "rows")

    def call(arrays, **given):
        function = partial(cf.ring_attention, axis_name="rows", **given)
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=rows, out_specs=rows))(*arrays)

    def call_packed(**given):
        whole, cut = jax.sharding.PartitionSpec("rows"), jnp.array([0, 4], jnp.int32)
        function = partial(cf.ring_attention, axis_name="rows", cu_seqlens=cut, **given)
        parts = jax.shard_map(function, mesh=mesh, in_specs=whole, out_specs=whole)
        return jax.jit(parts)(*[jnp.ones((16, 4, 8))] * 3)

    with pytest.raises(
        InvalidArgumentsError, match=r"2 heads of k do not divide over 4 devices\.\nTry: .*allgather"
    ):
        call(qkv(), schedule="alltoall")
    with pytest.raises(InvalidArgumentsError, match="schedule is 'star'"):
        call(qkv(), schedule="star")
    with pytest.raises(UnsupportedError, match='reproducible="batch" is not supported for an all-gather'):
        call(qkv(), schedule="allgather", reproducible="batch")
    with pytest.raises(InvalidArgumentsError, match="holds 3 rows"):
        call([x.repeat(2, 1) for x in qkv(seqlen=12)], schedule="alltoall", causal=True)
    with pytest.raises(UnsupportedError, match='reproducible="batch" is not supported for a ring'):
        call(qkv(), schedule="ring", reproducible="batch")
    with pytest.raises(
        UnsupportedError, match=r'mask is not supported for a ring\.\nTry: schedule="alltoall" or'
    ):
        call(qkv(), schedule="ring", mask=jnp.ones((16, 16), bool))
    with pytest.raises(InvalidArgumentsError, match="takes contiguous parts, which must be named"):
        call(qkv(), causal=True, window=(3, 0))
    with pytest.raises(UnsupportedError, match="alibi_slopes is not supported for a ring"):
        call(qkv(), schedule="ring", alibi_slopes=jnp.ones(4))
    with pytest.raises(InvalidArgumentsError, match="there is no seed"):
        call(qkv(), dropout=0.5)
    with pytest.raises(InvalidArgumentsError, match=r'dropout without a schedule(.|\n)*schedule="ring"'):
        call(qkv(), dropout=0.5, seed=1)
    for shape in ((1, 4, 2), (4, 1, 2)):
        with pytest.raises(InvalidArgumentsError, match="the whole sequence 16 queries and 16 keys"):
            call(qkv(), schedule="allgather", mask=Spans(jnp.zeros(shape, jnp.int32)))
    with pytest.raises(InvalidArgumentsError, match=r"mask has shape \(32, 16\), and the whole seq"):
        call(qkv(), schedule="allgather", mask=jnp.ones((32, 16), bool))
    with pytest.raises(InvalidArgumentsError, match="a device holds 4 queries; of 9 one holds 3 at most"):
        call(qkv(), schedule="allgather", seqlen=9)
    with pytest.raises(InvalidArgumentsError, match="a device holds 4 keys; of 20 one holds 5 at most"):
        call(qkv(), seqlen=(16, 20))
    with pytest.raises(InvalidArgumentsError, match="seqlen is 16"):
        call(qkv(), seqlen=16.0)
    fewer = [qkv(8)[0], *qkv()[1:]]
    with pytest.raises(InvalidArgumentsError, match="causal with 8 queries and 16 keys is ambiguous"):
        call(fewer, causal=True, parts="contiguous")
    with pytest.raises(InvalidArgumentsError, match="8 queries and 16 keys takes contiguous parts, which"):
        call(fewer, causal=True, align="bottom_right")
    with pytest.raises(InvalidArgumentsError, match="causal with an offset takes no zigzag"):
        call(qkv(), causal=True, align=3, parts="zigzag", schedule="ring")
    with pytest.raises(InvalidArgumentsError, match="align is 'middle'"):
        call(qkv(), causal=True, align="middle", schedule="allgather")
    with pytest.raises(UnsupportedError, match="window is not supported for a ring of packed sequences"):
        cf.ring_attention(
            *[jnp.ones((4, 4, 8))] * 3, "rows", cu_seqlens=jnp.array([0, 4], jnp.int32), window=(3, 0),
            schedule="ring",
        )  # fmt: skip
    for wrong in ({"window": (3, 0)}, {"causal": True, "align": 2}):
        with pytest.raises(
            UnsupportedError, match="a window of packed sequences that is not causal, or not at"
        ):
            call_packed(schedule="allgather", **wrong)
    with pytest.raises(UnsupportedError, match="mask is not supported for an all-to-all of packed sequences"):
        cf.ring_attention(
            *[jnp.ones((4, 4, 8))] * 3, "rows", cu_seqlens=jnp.array([0, 4], jnp.int32), schedule="alltoall",
            mask=jnp.ones((16, 16), bool),
        )  # fmt: skip


def bytes_sent(program):
    """What the collectives of a program send from one device to others."""
    shares = {"ppermute": 1, "all_gather": RANKS - 1, "all_to_all": 1 - 1 / RANKS}
    shares["reduce_scatter"] = shares["all_to_all"]
    total = 0
    for equation in program.eqns:
        operands = sum(x.aval.size * x.aval.dtype.itemsize for x in equation.invars)
        total += shares.get(equation.primitive.name, 0) * operands
        for parameter in equation.params.values():
            inner = getattr(parameter, "jaxpr", parameter)
            total += bytes_sent(inner) if hasattr(inner, "eqns") else 0
    return total


@pytest.mark.parametrize(
    ("schedule", "window", "steps"),
    [
        ("ring", None, 4),
        ("ring", (8, 0), 2),
        ("ring", (8, 8), 3),
        ("alltoall", None, 4),
        ("allgather", None, 4),
    ],
)
def test_what_is_sent(mesh, schedule, window, steps):
    """What docs/parallel.md says; nothing for the gradients of k and v where nobody wants them."""
    q, k, v = (jnp.ones((1, 4, 8 * RANKS, dim), jnp.float16) for dim in (8, 8, 6))
    do, cut = v, jax.sharding.PartitionSpec(None, None, "rows")
    how = {"axis_name": "rows", "schedule": schedule, "window": window, "parts": "contiguous"}
    attend = jax.shard_map(partial(cf.ring_attention, **how), mesh=mesh, in_specs=cut, out_specs=cut)

    def passes(q, k, v, do):
        return jax.vjp(attend, q, k, v)[1](do)

    def gradient_of_q(q, k, v, do):
        return jax.vjp(lambda q: attend(q, k, v), q)[1](do)

    part = {"Q": 512, "O": 384, "L": 128, "KV": 896, "KV32": 2 * 896}
    forward = sent(schedule, "forward", RANKS, part, steps)
    backward = sent(schedule, "backward", RANKS, part, steps, kept=True)
    assert bytes_sent(jax.make_jaxpr(attend)(q, k, v).jaxpr) == forward
    assert bytes_sent(jax.make_jaxpr(passes)(q, k, v, do).jaxpr) == forward + backward
    lowered = jax.jit(gradient_of_q).lower(q, k, v, do).as_text()
    if schedule == "ring":  # the keys in each pass
        assert lowered.count("stablehlo.collective_permute") == 2 * 2 * (steps - 1)
    assert "reduce_scatter" not in lowered


CHOSEN = [
    # heads, options, what is chosen
    ((8, 8), {}, "alltoall"),
    ((64, 4), {"causal": True}, "ring"),
    ((16, 4), {}, "alltoall"),
    ((16, 4), {"causal": True, "window": (8, 0), "parts": "contiguous"}, "ring"),
    ((8, 8), {"causal": True, "window": (8, 0), "parts": "zigzag"}, "alltoall"),
    ((3, 3), {}, "ring"),
    ((3, 3), {"causal": True, "window": (8, 0), "parts": "zigzag"}, "allgather"),
    ((3, 3), {"mask": np.ones((61, 61), bool), "seqlen": 61}, "allgather"),
    ((64, 4), {"causal": True, "seqlen": 61}, "ring"),
    ((8, 8), {"lengths": (64,)}, "alltoall"),
]


@pytest.mark.parametrize(("heads", "options", "chosen"), CHOSEN)
def test_what_sends_least_is_chosen(mesh, heads, options, chosen):
    """In both passes together; `explain` counts what programs send, and says the same."""
    packed = {name: jnp.array([0, 16], jnp.int32) for name in ("cu_seqlens",) if "lengths" in options}
    options = {name: x for name, x in options.items() if name != "lengths"}
    q, k, v = (
        jnp.ones((1, n, 16 * RANKS, d), jnp.float16)
        for n, d in zip((*heads, heads[1]), (8, 8, 6), strict=True)
    )
    if packed:
        q, k, v = (x[0].swapaxes(0, 1) for x in (q, k, v))
    cut = jax.sharding.PartitionSpec(*["rows"] if packed else [None, None, "rows"])

    def bytes_of(schedule):
        how = {"axis_name": "rows", "schedule": schedule, **packed, **options}
        attend = jax.shard_map(partial(cf.ring_attention, **how), mesh=mesh, in_specs=cut, out_specs=cut)

        def passes(q, k, v):
            o, pull = jax.vjp(attend, q, k, v)
            return pull(o)

        return bytes_sent(jax.make_jaxpr(passes)(q, k, v).jaxpr)

    assert bytes_of(None) == bytes_of(chosen)
    if packed:
        return
    part = [np.zeros((1, x.shape[1], 16, x.shape[3]), np.float16) for x in (q, k, v)]
    told = explain(*part, RANKS, shard_map=True, **options)
    assert told.startswith(f"forward and backward: {chosen}\n")
    counted = dict(re.findall(r"  (\w+) +([\d,]+) bytes", told))
    assert chosen in counted
    for schedule, count in counted.items():
        assert int(count.replace(",", "")) == bytes_of(schedule), schedule


def in_order(mesh, **options):
    """`ring_attention` of whole arrays (batch, heads, rows, features), a part of them on each device."""
    cut = jax.sharding.PartitionSpec(None, None, "rows")
    order = np.concatenate([positions(r, RANKS, 16, options.get("causal", False)) for r in range(RANKS)])
    parts = jax.shard_map(
        partial(cf.ring_attention, axis_name="rows", **options), mesh=mesh, in_specs=cut, out_specs=cut
    )
    return lambda *arrays: parts(*(x[:, :, order] for x in arrays))[:, :, np.argsort(order)]


def results(attend, arrays):
    """O and gradients."""
    o, pull = jax.vjp(attend, *arrays)
    return o, *pull(jnp.cos(o))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_reproducible_bits(mesh, schedule):
    """Of an all-to-all those of one device; of the others the same on every run."""
    arrays = [
        jax.random.normal(key, (3, heads, 16, 8))
        for key, heads in zip(jax.random.split(jax.random.key(2), 3), (8, 4, 4), strict=True)
    ]
    mode = "batch" if schedule == "alltoall" else "run"
    options = {"causal": True, "reproducible": mode}
    attend = jax.jit(partial(results, in_order(mesh, schedule=schedule, **options)))
    first = attend(arrays)
    others = [attend(arrays) for _ in range(3)]
    if schedule == "alltoall":
        others = [results(partial(cf.attention, **options), arrays)]
        # Of one sequence of the batch, too.
        for x, y in zip(attend([x[1:2] for x in arrays]), first, strict=True):
            assert np.array_equal(x, y[1:2])
    for other in others:
        for x, y in zip(first, other, strict=True):
            assert np.array_equal(x, y)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_vmap(mesh, schedule):
    """A call for each, of arrays that all share too; results and gradients."""
    q, k, v = (
        jax.random.normal(key, (2, 1, heads, 16, 8))
        for key, heads in zip(jax.random.split(jax.random.key(3), 3), (8, 4, 4), strict=True)
    )
    attend = partial(results, in_order(mesh, schedule=schedule, causal=True))
    mapped = jax.jit(jax.vmap(lambda q, k: attend((q, k, v[0]))))(q, k)
    for n in range(2):
        wanted = results(partial(cf.attention, causal=True), (q[n], k[n], v[0]))
        for x, y in zip(mapped, wanted, strict=True):
            np.testing.assert_allclose(x[n], y, atol=5e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_second_derivatives(mesh, schedule):
    """Those of one device, in forward mode over reverse; a ring says that it has none."""
    arrays = [jax.random.normal(jax.random.key(n), (1, 4, 8, 4)) for n in range(3)]
    cut = jax.sharding.PartitionSpec(None, None, "rows")
    how = {"axis_name": "rows", "schedule": schedule, "causal": True, "parts": "contiguous"}
    parts = jax.shard_map(partial(cf.ring_attention, **how), mesh=mesh, in_specs=cut, out_specs=cut)

    def curvature(attend):
        def loss(*arrays):
            return jnp.sin(attend(*arrays)).sum()

        return jax.jvp(jax.grad(loss, argnums=(0, 1, 2)), arrays, arrays[::-1])[1]

    if schedule == "ring":
        with pytest.raises(
            UnsupportedError, match=r"first derivatives only, in reverse mode\.\nTry: schedule"
        ):
            curvature(parts)
        with pytest.raises(UnsupportedError, match="first derivatives only"):
            jax.jvp(jax.vjp(parts, *arrays)[1], arrays[:1], arrays[:1])
        with pytest.raises(TypeError, match="forward-mode"):  # JAX's own
            jax.jvp(parts, arrays, arrays)
        return
    wanted = curvature(partial(cf.attention, causal=True))
    for a, b in zip(jax.jit(partial(curvature, parts))(), wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_partial_results_are_not_rounded(mesh, causal):
    """The error of four devices is that of one; rounded in each step it is 1.2 times that and more."""
    keys = jax.random.split(jax.random.key(1), 4)
    q, k, v, do = (jax.random.normal(key, (1, 4, 256, 64), jnp.float16) for key in keys)
    order = np.concatenate([positions(rank, RANKS, 256, causal) for rank in range(RANKS)])
    cut = jax.sharding.PartitionSpec(None, None, "rows")
    ring = jax.shard_map(
        partial(cf.ring_attention, axis_name="rows", causal=causal),
        mesh=mesh, in_specs=(cut,) * 3, out_specs=cut,
    )  # fmt: skip

    def in_parts(*arrays):
        return ring(*(x[:, :, order] for x in arrays))[:, :, np.argsort(order)]

    def results(function, dtype=jnp.float16):
        o, pull = jax.vjp(function, *(x.astype(dtype) for x in (q, k, v)))
        return [np.asarray(x, np.float64) for x in (o, *pull(do.astype(dtype)))]

    by_one = partial(cf.attention, causal=causal)
    exact, one, ours = results(by_one, jnp.float32), results(by_one), results(jax.jit(in_parts))
    for x, y, z in zip(ours, one, exact, strict=True):
        assert np.square(x - z).mean() < 1.05**2 * np.square(y - z).mean()


def random_call(rng):
    """A random call; of every other one all parts have one length."""
    case = random_case(rng, RANKS, ("float32", "float16"), named=True)
    if case.lengths or rng.integers(2):
        return case
    rows = tuple(-(-n // (2 * RANKS)) * 2 * RANKS for n in case.rows)
    return dataclasses.replace(case, rows=rows, options={**case.options, "seqlen": None})


def padded(case, rank):
    """Arrays of a device with rows of none behind its own, so that all have one length."""
    part = case.part(rank, RANKS)[0]
    widths = {name: [(0, 0)] * x.ndim for name, x in part.items()}
    for name, pads in widths.items():
        counts = [len(case.held(r, RANKS)[name in "kv"]) for r in range(RANKS)]
        pads[case._axis(name)] = (0, max(counts) - counts[rank])
    # Nothing may read rows of none.
    return {name: np.pad(x, widths[name], constant_values=np.nan) for name, x in part.items()}


def run(mesh, case):
    """What each device returns of a case, without rows of none; these are 0."""
    axis, of_lse = (0, 1) if case.lengths else (1 if case.bshd else 2, 2)
    cut, cut_lse = (jax.sharding.PartitionSpec(*[None] * n, "rows") for n in (axis, of_lse))
    everywhere = jax.sharding.PartitionSpec()
    given = jax.tree.map(jnp.asarray, case.given)
    sinks, options = given.pop("sinks", None), dict(case.options)
    if case.lengths:
        given["cu_seqlens"] = jnp.asarray(case.part(0, RANKS)[1]["cu_seqlens"])

    def attend(q, k, v, sinks, given):
        return cf.ring_attention(q, k, v, "rows", sinks=sinks, return_lse=True, **options, **given)

    ring = jax.shard_map(attend, mesh=mesh, in_specs=(cut,) * 3 + (everywhere,) * 2, out_specs=(cut, cut_lse))
    parts = [padded(case, rank) for rank in range(RANKS)]
    whole = {
        name: jnp.concatenate([part[name] for part in parts], of_lse if name == "dlse" else axis)
        for name in parts[0]
    }

    @jax.jit
    def passes(q, k, v, do, dlse, sinks, given):
        results, pull = jax.vjp(lambda *arrays: ring(*arrays, given), q, k, v, sinks)
        return (*results, *pull((do, dlse)))

    results = passes(**whole, sinks=sinks, given=given)
    each = [{} for _ in range(RANKS)]
    for name, x in zip(("o", "lse", "dq", "dk", "dv"), results, strict=False):
        of_rows = of_lse if name == "lse" else axis
        for rank, one in enumerate(np.split(np.asarray(x), RANKS, of_rows)):
            own = len(case.held(rank, RANKS)[name in ("dk", "dv")])
            each[rank][name], behind = np.split(one, [own], of_rows)
            assert not behind.any(), "rows of none"
    for rank, one in enumerate(each):  # shard_map has added them up
        one["dsinks"] = None if sinks is None else np.asarray(results[-1]) * (rank == 0)
    return each


# Of a ring of fewer queries than keys.
FEWER = {"causal": True, "parts": "contiguous", "align": "bottom_right"}


def test_random_calls(mesh, pytestconfig):
    """Forward and backward, held to the error budget of one device."""
    # Rows of none have an lse, that of the sinks, and no gradient of it; a window ends at such rows; ALiBi
    # counts from where a stretch begins, of which the last one is short.
    odd, sinks = {"seqlen": 13}, ("sinks",)
    fixed = [
        ({"schedule": "allgather"}, sinks),
        ({"schedule": "ring", "window": (2, 4)}, sinks),
        ({"schedule": "allgather", "causal": True}, ("alibi_slopes",)),
        # Keys that no device sees of its own are none of the ring's first step, whose sinks count.
        ({"schedule": "ring", "causal": True, "parts": "contiguous", "align": -(2**39)}, sinks),
        ({"schedule": "allgather", "causal": True}, ("spans of queries",)),
    ]
    cases = [Case((13, 13), dtype="float32", options=odd | x, extra=extra) for x, extra in fixed]
    cases.append(Case((8, 16), dtype="float32", options=FEWER, extra=sinks))
    seeds = seeds_of(pytestconfig.option.sample, 8)
    cases += fixed_cases(RANKS)
    for case in (*cases, *(random_call(np.random.default_rng(seed)) for seed in seeds)):
        try:
            case.check(run(mesh, case))
        except AssertionError as error:
            raise AssertionError(f"of {case}; of --sample the seeds {seeds}") from error


DROPPED = {
    "a ring": {"schedule": "ring", "causal": True},
    "a ring with a window": {"schedule": "ring", "causal": True, "window": (7, 0), "parts": "contiguous"},
    "a ring of fewer queries": {"schedule": "ring", "rows": (24, 48), **FEWER},
    "a packed ring": {"schedule": "ring", "causal": True, "lengths": (32, 16)},
    "an all-to-all": {"schedule": "alltoall", "causal": True, "seqlen": 45},
    "a packed all-gather": {"schedule": "allgather", "causal": True, "lengths": (32, 16)},
}


@pytest.mark.parametrize("kind", DROPPED)
def test_dropout_drops_what_it_drops_over_mpi(mesh, kind):
    options = {"dropout": 0.3, "seed": 2**64 - 3, **DROPPED[kind]}
    lengths, rows = options.pop("lengths", ()), options.pop("rows", (options.get("seqlen", 48),) * 2)
    case = Case(rows, lengths, batch=1, heads=(8, 4), dtype="float32", options=options)
    over_mpi = case.gathered(in_threads(RANKS, partial(run_over_mpi, case)))
    ours = case.gathered(run(mesh, case))
    for name, wanted in over_mpi.items():
        np.testing.assert_allclose(ours[name], wanted, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("options", [{"schedule": "ring"}, {"schedule": "allgather", "causal": True}])
def test_dropout_where_the_length_does_not_divide(mesh, options):
    """Gradients are those of what the call dropped, by differences; about the share is dropped."""
    options = {"dropout": 0.3, "seed": jax.random.key(3), "seqlen": 21, **options}
    case = Case((21, 21), batch=1, dims=(8, 21), dtype="float32", options=options)
    case.arrays["v"][...] = np.eye(21)  # o is what is left of the weights
    left = case.gathered(run(mesh, case))
    case.options = {**options, "dropout": 0.0}
    weights = case.gathered(run(mesh, case))
    np.testing.assert_allclose(left["lse"], weights["lse"], atol=1e-5)
    kept = left["o"][weights["o"] > 0] / weights["o"][weights["o"] > 0]
    np.testing.assert_allclose(kept[kept > 0], 1 / 0.7, rtol=1e-5)
    assert 0.25 < (kept == 0).mean() < 0.35
    x, scores = case.arrays, weights["o"]
    dropped = (left["o"] > 0) / 0.7
    exact = np.einsum("bhqd,bhkd->bhqk", x["do"], x["v"]) * dropped
    exact = scores * (exact - np.sum(exact * scores, -1, keepdims=True) + x["dlse"][..., None]) * 8**-0.5
    np.testing.assert_allclose(left["dq"], exact @ x["k"], atol=1e-4)
    np.testing.assert_allclose(left["dk"], np.swapaxes(exact, -1, -2) @ x["q"], atol=1e-4)

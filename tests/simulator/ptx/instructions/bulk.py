"""mbarriers, the fence between the proxies, and bulk copies: what sm_90 brought."""

from __future__ import annotations

from tests.simulator.ptx.instructions import instruction
from tests.simulator.ptx.reader import Instruction, Unknown, parts
from tests.simulator.ptx.writer import Writer

_SHARED = ".shared(?:::cta)?.b64"


@instruction(f"mbarrier.init{_SHARED}")
def mbarrier_init(w: Writer, i: Instruction) -> None:
    a, count = i.operands
    w.emit(f"mbarrier_init({w.address(a)}, {w.value(count, 's32')}, {w.site});")


@instruction("fence.mbarrier_init.release.cluster")
def mbarrier_init_fence(w: Writer, i: Instruction) -> None:
    w.emit("mbarrier_init_fence();")


@instruction(f"mbarrier.arrive{_SHARED}")
def mbarrier_arrive(w: Writer, i: Instruction) -> None:
    state, a = i.operands
    _no_state(state)
    w.emit(f"mbarrier_arrive({w.address(a)}, 1, 0, {w.site});")


@instruction(f"mbarrier.arrive.expect_tx{_SHARED}")
def mbarrier_arrive_expect(w: Writer, i: Instruction) -> None:
    state, a, count = i.operands
    _no_state(state)
    w.emit(f"mbarrier_arrive({w.address(a)}, 1, {w.value(count, 's32')}, {w.site});")


def _no_state(operand: str) -> None:
    if operand != "_":
        raise Unknown("the state of an mbarrier")


@instruction(f"mbarrier.try_wait.parity{_SHARED}")
def mbarrier_try_wait(w: Writer, i: Instruction) -> None:
    p, a, parity = i.operands
    w.set(p, "pred", f"mbarrier_try_wait({w.address(a)}, {w.value(parity, 's32')}, {w.site})")


@instruction("fence.proxy.async.shared::cta")
def proxy_fence(w: Writer, i: Instruction) -> None:
    w.emit("proxy_fence();")


@instruction("fence.proxy.async.global")
def proxy_fence_of_global(w: Writer, i: Instruction) -> None:
    """Nothing: global memory has one order in the simulator."""


# ---- boxes of a tensor


def _box(w: Writer, operand: str, rank: str) -> str:
    """[map, {coordinates}], the contiguous axis first."""
    tensor, coordinates = parts(operand[1:-1])
    at = ", ".join(w.values(w.vector(coordinates, int(rank)), "s32"))
    return f"{{{w.value(tensor, 'u64')}, {rank}, {{{at}}}}}"


@instruction("prefetch.tensormap")
def prefetch_map(w: Writer, i: Instruction) -> None:
    w.emit(f"prefetch_map({w.address(i.operands[0])}, {w.site});")


@instruction("cp.async.bulk.tensor.([2345])d.shared::cluster.global.mbarrier::complete_tx::bytes")
def load_box(w: Writer, i: Instruction, rank: str) -> None:
    d, source, mbarrier = i.operands
    w.emit(f"load_box({w.address(d)}, {_box(w, source, rank)}, {w.address(mbarrier)}, {w.site});")


@instruction("cp.async.bulk.tensor.([2345])d.global.shared::cta.bulk_group")
def store_box(w: Writer, i: Instruction, rank: str) -> None:
    target, s = i.operands
    w.emit(f"store_box({_box(w, target, rank)}, {w.address(s)}, {w.site});")


# ---- contiguous bytes


@instruction("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes")
def bulk_load(w: Writer, i: Instruction) -> None:
    d, s, size, mbarrier = i.operands
    w.emit(
        f"bulk_load({w.address(d)}, {w.address(s)}, {w.value(size, 's32')}, {w.address(mbarrier)}, {w.site});"
    )


@instruction("cp(.reduce)?.async.bulk.global.shared::cta.bulk_group(.add.f32)?")
def bulk_store(w: Writer, i: Instruction, reduce: str | None, add: str | None) -> None:
    if bool(reduce) != bool(add):
        raise Unknown("a reduction without its operation, or the other way round")
    d, s, size = i.operands
    arguments = [w.address(d), w.address(s), w.value(size, "s32"), "true" if add else "false", w.site]
    w.emit(f"bulk_store({', '.join(arguments)});")


@instruction("cp.async.bulk.commit_group")
def bulk_commit(w: Writer, i: Instruction) -> None:
    w.emit("bulk_commit();")


@instruction("cp.async.bulk.wait_group(.read)?")
def bulk_wait(w: Writer, i: Instruction, read: str | None) -> None:
    """.read: until shared memory has been read, not yet until what was read is written."""
    (newest,) = i.operands
    w.emit(f"bulk_wait({int(newest)}, {'true' if read else 'false'}, {w.site});")

"""Barriers, votes, shuffles, branches, and what else a warp does together."""

from __future__ import annotations

from tests.simulator.ptx.instructions import instruction
from tests.simulator.ptx.reader import Instruction, Unknown
from tests.simulator.ptx.writer import Writer

# ---- barriers


@instruction("(?:bar|barrier).sync(?:.aligned)?")
def barrier_sync(w: Writer, i: Instruction) -> None:
    """Barrier 0 without a count is that of the block."""
    if i.operands == ("0",):
        w.emit(f"block_barrier({w.site});")
    else:
        number, threads = w.values(i.operands, "s32")
        w.emit(f"barrier({number}, {threads}, true, {w.site});")


@instruction("bar.arrive")
def barrier_arrive(w: Writer, i: Instruction) -> None:
    number, threads = w.values(i.operands, "s32")
    w.emit(f"barrier({number}, {threads}, false, {w.site});")


@instruction("(?:bar|barrier).red.(popc|or|and)(?:.aligned)?.(u32|pred)")
def barrier_vote(w: Writer, i: Instruction, op: str, t: str) -> None:
    d, number, p = i.operands
    if number != "0":
        raise Unknown(f"barrier {number}")
    votes = f"barrier_vote({w.value(p, 'pred')}, {w.site})"
    w.set(d, t, {"popc": votes, "or": f"{votes} != 0", "and": f"{votes} == block_size()"}[op])


@instruction("bar.warp.sync")
def warp_barrier(w: Writer, i: Instruction) -> None:
    w.emit(f"warp_barrier({w.value(i.operands[0], 'b32')}, {w.site});")


@instruction("membar.(?:gl|cta)|fence.(?:acq_rel|sc).(?:gpu|cta)")
def memory_order(w: Writer, i: Instruction) -> None:
    """Nothing: memory has one order in the simulator."""


# ---- votes and shuffles


@instruction("vote.sync.(ballot.b32|any.pred|all.pred)")
def vote(w: Writer, i: Instruction, form: str) -> None:
    d, p, mask = i.operands
    votes = f"ballot({w.value(mask, 'b32')}, {w.value(p, 'pred')}, {w.site})"
    meaning = {"ballot.b32": votes, "any.pred": f"{votes} != 0", "all.pred": f"{votes} == ~0u"}
    w.set(d, form.split(".")[1], meaning[form])


@instruction("shfl.sync.(up|down|bfly|idx).b32")
def shuffle(w: Writer, i: Instruction, mode: str) -> None:
    """d|p: p tells whether the lane that d comes from exists."""
    d, *x = i.operands
    d, _, p = d.partition("|")
    w.emit(f"{{ const auto x = shuffle(Shuffle::{mode}, {', '.join(w.values(x, 'b32'))}, {w.site});")
    w.set(d, "b32", "x.x")
    if p:
        w.set(p, "pred", "x.valid")
    w.emit("}")


@instruction("elect.sync")
def elect(w: Writer, i: Instruction) -> None:
    d, mask = i.operands
    leader, _, p = d.partition("|")
    if leader != "_" or int(mask, 0) % 2**32 != 2**32 - 1:
        raise Unknown("the number of the lane, or a part of a warp")
    w.set(p, "pred", f"elect({w.site})")


@instruction("setmaxnreg.(?:inc|dec).sync.aligned.u32")
def set_registers(w: Writer, i: Instruction) -> None:
    """The warpgroup meets. How many registers it then has is read in the SASS: `sass.register_faults`."""
    w.emit(f"set_registers({w.site});")


# ---- control


@instruction("bra(?:.uni)?")
def branch(w: Writer, i: Instruction) -> None:
    label, polls = w.label(i.operands[0])
    if polls:
        w.emit(f"poll({w.site});")
    w.emit(f"goto {label};")


@instruction("ret|exit")
def end(w: Writer, i: Instruction) -> None:
    w.emit("return;")


@instruction("nanosleep.u32")
def sleep(w: Writer, i: Instruction) -> None:
    w.emit("pause();")


@instruction("pmevent")
def profiler_event(w: Writer, i: Instruction) -> None:
    """Nothing: nobody profiles."""


@instruction("trap")
def trap(w: Writer, i: Instruction) -> None:
    w.emit(f"trap({w.site});")

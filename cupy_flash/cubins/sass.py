"""Checks of SASS, the machine code of cubins: loops, wgmma products, hazards and registers.

why: ptxas before 13.3 can silently let an instruction write registers that a wgmma in flight still reads.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from .. import trust
from ..errors import UnsupportedError

__all__ = [
    "COPIES",
    "REQUIREMENT",
    "Instruction",
    "Iteration",
    "Listing",
    "covered",
    "disassemble",
    "disassembler",
    "iteration",
    "overwritten",
    "products",
    "register_faults",
    "scattered",
    "shortest_iteration",
    "shortest_path",
]  # fmt: skip

REQUIREMENT = "nvidia-cuda-nvdisasm==13.5.37"

_INSTRUCTION = re.compile(
    r"\s+/\*(?P<address>[0-9a-f]+)\*/\s+(?:(?P<guard>@!?U?P\w+)\s+)?"
    r"(?P<name>[A-Z]\w*)(?P<form>(?:\.\w+)*)\s*(?P<operands>.*?)\s*;"
)
_LABEL = re.compile(r"\.(L_x_\d+):")
_TARGET = re.compile(r"`\(\.(L_x_\d+)\)")
_REGISTER = re.compile(r"R(\d+)")
# A kernel with more groups in flight never waits for them: ours keep fewer.
_MOST_GROUPS = 8


class Instruction(NamedTuple):
    """One line of SASS."""

    address: int
    guard: str  # predicate, such as "@!P0"; "" if there is none
    # E.g. "HGMMA" and ".64x128x16.F32.BF16".
    name: str
    form: str
    operands: tuple[str, ...]

    def __str__(self) -> str:
        guard = f"{self.guard} " if self.guard else ""
        return f"{guard}{self.name}{self.form} {', '.join(self.operands)}"


class Listing(NamedTuple):
    """The code of a cubin, which holds one kernel."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]  # index of the instruction that follows each label

    @classmethod
    def of(cls, text: str) -> Listing:
        """Parse the output of ``nvdisasm -c``."""
        instructions: list[Instruction] = []
        labels: dict[str, int] = {}
        for line in text.splitlines():
            if label := _LABEL.match(line):
                labels[label[1]] = len(instructions)
            elif found := _INSTRUCTION.match(line):
                address, guard, name, form, rest = found.groups()
                operands = tuple(operand.strip() for operand in rest.split(",")) if rest else ()
                instructions.append(Instruction(int(address, 16), guard or "", name, form, operands))
        return cls(tuple(instructions), labels)

    def target(self, instruction: Instruction) -> int | None:
        """Index of the target of a branch; None for other instructions."""
        found = _TARGET.search(instruction.operands[-1]) if instruction.operands else None
        return self.labels.get(found[1]) if found else None

    def loops(self) -> list[tuple[int, int]]:
        """Indices of the first and last instruction of every loop: a label and the last branch back to it."""
        ends: dict[int, int] = {}
        for index, instruction in enumerate(self.instructions):
            start = self.target(instruction) if instruction.name == "BRA" else None
            if start is not None and start < index:
                ends[start] = index
        return sorted(ends.items())

    def iteration_length(self, start: int, end: int) -> int:
        """Count the instructions of one iteration of a loop on a whole, unmasked tile.

        That is the path with the most products and 16-byte copies, and among those with the fewest
        instructions, which skips masks and options tested at run time. 0 if no path stays inside the loop:
        ptxas moves unlikely code behind the kernel, from where it branches back.
        """
        paths = {end: (0, 1)}
        for at in range(end - 1, start - 1, -1):
            instruction = self.instructions[at]
            branch = self.target(instruction) if instruction.name == "BRA" else None
            certain = branch is not None and not instruction.guard and len(instruction.operands) == 1
            after = [] if certain else [at + 1]
            if branch is not None and at < branch <= end:
                after.append(branch)
            found = [paths[to] for to in after if to in paths]
            if found:
                done, length = max(found, key=lambda way: (way[0], -way[1]))
                copies = instruction.name == "LDGSTS" and ".ZFILL" not in instruction.form
                paths[at] = (done + ("MMA" in instruction.name or copies), length + 1)
        return paths.get(start, (0, 0))[1]


def disassembler() -> Path | None:
    """Path of nvdisasm in its PyPI package, or on PATH; None if there is none."""
    found = trust.packaged(REQUIREMENT, "nvidia/cu13/bin/nvdisasm") or shutil.which("nvdisasm")
    return Path(found) if found else None


def disassemble(cubin: Path) -> Listing:
    """Disassemble a cubin by nvdisasm."""
    tool = disassembler()
    if tool is None:
        raise UnsupportedError(
            "SASS is read by nvdisasm, which is not installed.", hint=f"pip install {REQUIREMENT}"
        )
    command = [str(tool), "-c", str(cubin)]
    return Listing.of(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


# ---------------------------------------------------------------------- wgmma


def products(listing: Listing) -> dict[str, int]:
    """Count the wgmma instructions of each shape, such as {"64x128x16": 16}."""
    found = Counter(i.form.split(".")[1] for i in listing.instructions if _is_product(i))
    return dict(sorted(found.items()))


def register_faults(listing: Listing, registers: int, warpgroups: int) -> list[str]:
    """Find faults in how warpgroups release and take registers (setmaxnreg).

    A release must leave fewer registers than at launch, and a take must give more. The producer must release
    enough for all consumers, which would wait for ever otherwise.

    Parameters
    ----------
    listing : Listing
    registers : int
        Registers of a thread at launch.
    warpgroups : int
        Warpgroups of a block: one producer, which copies, and consumers, which compute.

    Returns
    -------
    list of str
        Faults; empty if there are none.
    """
    moves = [i for i in listing.instructions if i.name == "USETMAXREG"]
    given = [int(i.operands[-1], 16) for i in moves if i.form.startswith(".DEALLOC")]
    taken = [int(i.operands[-1], 16) for i in moves if i.form.startswith(".TRY_ALLOC")]
    found = [
        f"a warpgroup gives registers back and keeps {n} of {registers}" for n in given if n >= registers
    ]
    found += [f"a warpgroup takes registers and has {n}, from {registers}" for n in taken if n <= registers]
    if moves and not (given and taken):
        found.append(f"registers are only {'given back' if given else 'taken'}")
    elif moves and (warpgroups - 1) * max(taken) + max(given) > warpgroups * registers:
        found.append(
            f"{warpgroups - 1} warpgroups take {max(taken)} registers and one keeps {max(given)}: more than "
            f"{warpgroups} times {registers}"
        )
    return found


def overwritten(listing: Listing) -> list[str]:
    """Find every instruction that writes a register which a wgmma in flight reads or accumulates in.

    It follows all paths through the code, as `_states` describes.
    """
    code = listing.instructions
    found: dict[tuple[int, int], str] = {}
    for index, flight in _states(listing):
        now = code[index]
        written = _written(now)
        for product in (product for group in flight for product in group) if written else ():
            if clash := sorted(written & _operand_registers(code[product])):
                names = ", ".join(f"R{register}" for register in clash)
                found[index, product] = (
                    f"{now.address:#x} {now} writes {names} while the product at "
                    f"{code[product].address:#x} is in flight: {code[product]}"
                )
        if len(flight) > _MOST_GROUPS:
            return [f"{now.address:#x} {now}: more than {_MOST_GROUPS} groups of products in flight"]
    return [found[key] for key in sorted(found)]


def covered(listing: Listing) -> int:
    """Count the exponentials that have a product in flight on every path that leads to them.

    why: for ptxas a wait depends on nothing, so that it may move the wait before the work that should
    overlap with the products.
    """
    exposed = {index for index, flight in _states(listing) if not any(flight)}
    exponentials = {index for index, i in enumerate(listing.instructions) if i.form.startswith(".EX2")}
    return len(exponentials - exposed)


def scattered(listing: Listing) -> int:
    """Count the arithmetic instructions between the products of one group, which delay the products.

    Instructions before the first product of a group are not counted.
    """
    found = waiting = 0
    inside = False
    for now in listing.instructions:
        if _is_product(now):
            found += waiting
            inside, waiting = "gsb0" not in now.operands, 0
        elif inside and now.name in _ARITHMETIC:
            waiting += 1
    return found


def shortest_iteration(listing: Listing) -> int:
    """Count the instructions of the shortest path around the loop of wgmma products.

    That path skips masks and other unlikely code. 0 if no product is in a loop.
    """
    paths = (
        shortest_path(listing, index, index)
        for index, now in enumerate(listing.instructions)
        if _is_product(now)
    )
    return min(filter(None, paths), default=0)


def shortest_path(listing: Listing, first: int, last: int) -> int:
    """Length of the shortest path from one instruction to another or back to itself; 0 if there is none."""
    border: set[tuple[int, _Barriers]] = {(first, frozenset())}
    steps, reached = 0, set(border)
    while border:
        steps += 1
        following: set[tuple[int, _Barriers]] = set()
        for index, barriers in border:
            now = listing.instructions[index]
            if now.name == "BSSY" and (place := listing.target(now)) is not None:
                barriers = frozenset({**dict(barriers), now.operands[0]: place}.items())
            following |= {(after, barriers) for after in _following(listing, index, barriers)}
        if any(index == last for index, _ in following):
            return steps
        border = {place for place in following if place[0] < len(listing.instructions)} - reached
        reached |= border
    return 0


_ARITHMETIC = ("MUFU", "FFMA", "FMUL", "FADD", "FMNMX", "FSEL", "F2FP", "HADD2")


def _states(listing: Listing) -> Iterator[tuple[int, _Flight]]:
    """Yield every instruction with each set of products that can be in flight before it.

    It follows all paths until no new state appears. A state is the products in flight, in committed groups
    and an open one, and where each convergence barrier (BSSY, BSYNC) continues.
    """
    code = listing.instructions
    seen: set[tuple[int, _Flight, _Barriers]] = set()
    paths: list[tuple[int, _Flight, _Barriers]] = [(0, ((),), frozenset())]
    while paths:
        index, flight, barriers = paths.pop()
        while index < len(code) and (index, flight, barriers) not in seen:
            seen.add((index, flight, barriers))
            now = code[index]
            yield index, flight
            if now.name == "BSSY" and (place := listing.target(now)) is not None:
                others = {name: other for name, other in barriers if name != now.operands[0]}
                barriers = frozenset({**others, now.operands[0]: place}.items())
            flight = _after(flight, index, now)
            following = _following(listing, index, barriers)
            if not following or len(flight) > _MOST_GROUPS + 1:
                break
            index, *branches = following
            paths += [(branch, flight, barriers) for branch in branches]


# Products in flight, by index: committed groups, oldest first, then the open group.
_Flight = tuple[tuple[int, ...], ...]
# (convergence barrier, index at which its BSYNC continues)
_Barriers = frozenset[tuple[str, int]]


def _is_product(instruction: Instruction) -> bool:
    return instruction.name in ("HGMMA", "IGMMA", "QGMMA")


def _after(flight: _Flight, index: int, now: Instruction) -> _Flight:
    """Products in flight after an instruction."""
    if _is_product(now):
        *committed, last = flight
        last = (*last, index) if index not in last else last
        return (*committed, last, ()) if "gsb0" in now.operands else (*committed, last)
    if now.name == "WARPGROUP" and now.form.startswith(".DEPBAR"):
        kept = int(now.operands[-1], 16)
        *committed, last = flight
        return (*committed[max(len(committed) - kept, 0) :], last)
    return flight


def _operand_registers(product: Instruction) -> frozenset[int]:
    """Registers of the accumulator of a product, and of its operand A if that is in registers."""
    _, shape, *_ = product.form.split(".")
    accumulator, a, *_ = product.operands
    registers = set(_span(accumulator, int(shape.split("x")[1]) // 2))
    if _REGISTER.fullmatch(a):
        registers |= set(_span(a, 4))
    return frozenset(registers)


def _span(register: str, count: int) -> range:
    first = int(register[1:])
    return range(first, first + count)


# Name prefixes of instructions that write no register R.
_WRITE_NOTHING = (
    "ST", "RED", "BRA", "BRX", "EXIT", "CALL", "RET", "BAR", "WARP", "SYNCS", "DEPBAR", "BSYNC", "BSSY",
    "YIELD", "UTMA", "UBLK", "FENCE", "ERRBAR", "CCTL", "MEMBAR", "NOP", "R2UR", "R2P", "FCHK", "PLOP3",
    "ELECT", "USETMAX", "LDGSTS", "LDGDEPBAR", "ACQBULK", "PREEXIT", "NANOSLEEP", "U",
)  # fmt: skip


def _written(now: Instruction) -> frozenset[int]:
    """Registers that an instruction writes; none for products, which need not be known."""
    if now.name.endswith("SETP") or now.name.startswith(_WRITE_NOTHING) or _is_product(now):
        return frozenset()
    for operand in now.operands[:2]:
        if operand.startswith(("P", "UP")):  # some instructions have a predicate as first result
            continue
        name = operand.split(".")[0]
        return frozenset(_span(name, _width(now))) if _REGISTER.fullmatch(name) else frozenset()
    return frozenset()


def _width(now: Instruction) -> int:
    """Number of registers that an instruction writes."""
    forms = now.form.split(".")
    if now.name == "LDSM":
        return int(forms[-1]) if forms[-1].isdigit() else 1
    if now.name in ("HMMA", "IMMA"):
        return 2 if forms[-1] == "F16" else 4
    if now.name.startswith(("LD", "ATOM")):
        return 4 if "128" in forms else 2 if "64" in forms else 1
    if now.name == "CS2R":
        return 1 if "32" in forms else 2
    wide = "WIDE" in forms or "64" in forms or now.name in ("DADD", "DMUL", "DFMA") or forms[1:2] == ["F64"]
    return 2 if wide else 1


# ---------------------------------------------------------------------- mma.sync

_PRODUCTS = ("HMMA", "DMMA")
_DOUBLES = ("DADD", "DFMA", "DMUL", "DSETP")
_ACCESSES = ("LDGSTS", "LDG", "LDS", "STS", "RED", "REDG", "MUFU", "BAR")
COPIES = ("LDG", "LDGSTS")


class Iteration(NamedTuple):
    """One iteration of a loop."""

    # Counts: all instructions, mma.sync products, and block barriers.
    instructions: int
    products: int
    barriers: int
    # Instructions between one product and the next, around the loop, the longest first. A warp issues in
    # order, so that its tensor core idles during them, unless another warp has products to issue.
    stretches: tuple[int, ...]
    exponentials: int  # the most exponentials between one product and the next
    doubles: int  # FP64 arithmetic instructions other than products


def iteration(listing: Listing, accesses: Collection[str] = _ACCESSES) -> Iteration | None:
    """The iteration of a whole tile in the loop with the most mma.sync products; None if there is none.

    It is the path with the most products, then the most of these accesses, then the fewest instructions:
    it skips masks and code for ragged tiles. An inner loop runs once. With accesses=COPIES it also skips
    masks that read shared memory.
    """
    code = listing.instructions

    def products_of(loop: tuple[int, int]) -> int:
        return sum(i.name in _PRODUCTS for i in code[loop[0] : loop[1] + 1])

    start, end = max(
        listing.loops(), key=lambda loop: (products_of(loop), loop[0] - loop[1]), default=(0, -1)
    )
    if not products_of((start, end)):
        return None
    # For each instruction: the counts of the best path to the end of the loop, and its next instruction.
    best: dict[int, tuple[tuple[int, int, int], int]] = {}
    for index in range(end, start - 1, -1):
        onwards = [n for n in _following(listing, index, frozenset()) if n > index and n in best]
        if onwards or index == end:
            rest, following = max((best[n][0], n) for n in onwards) if index < end else ((0, 0, 0), -1)
            name, form = code[index].name, code[index].form
            own = (int(name in _PRODUCTS), int(name in accesses and ".ZFILL" not in form), -1)
            best[index] = ((own[0] + rest[0], own[1] + rest[1], own[2] + rest[2]), following)
    if start not in best:  # ptxas has moved a part of the loop behind the kernel
        return None
    way, index = [], start
    while index >= 0:
        way.append(code[index])
        index = best[index][1]
    names = [i.name for i in way]
    first = next(index for index, name in enumerate(names) if name in _PRODUCTS)
    stretches: list[list[Instruction]] = []
    for now in way[first:] + way[:first]:
        if now.name in _PRODUCTS:
            stretches.append([])
        else:
            stretches[-1].append(now)
    return Iteration(
        len(way),
        len(stretches),
        names.count("BAR"),
        tuple(sorted(map(len, stretches), reverse=True)),
        max(sum(i.form.startswith(".EX2") for i in stretch) for stretch in stretches),
        sum(name in _DOUBLES for name in names),
    )


# ---------------------------------------------------------------------- where control goes


_ENDS = ("EXIT", "RET", "BRX", "JMX")
_LEADS_ELSEWHERE = (*_ENDS, "BSYNC", "BRA", "CALL")


def _following(listing: Listing, index: int, barriers: _Barriers) -> list[int]:
    """Indices of the instructions that can follow an instruction."""
    now = listing.instructions[index]
    if now.name not in _LEADS_ELSEWHERE:
        return [index + 1]
    onwards = [index + 1] if now.guard else []
    if now.name in _ENDS:
        return onwards
    if now.name == "BSYNC":
        return [*onwards, dict(barriers).get(now.operands[0], index + 1)]
    target = listing.target(now)
    if now.name == "BRA" and target is not None:
        # A uniform branch has its predicate as an operand: BRA.U UP0, `(.L_x_1)
        always = not now.guard and len(now.operands) == 1
        return [target] if always else [index + 1, target]
    if now.name == "CALL" and target is not None:
        return [index + 1, target]
    return [index + 1]

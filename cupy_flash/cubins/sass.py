"""What ptxas made: instructions, loops, wgmma products, what is overwritten under them, registers.

why: ptxas before 13.3 can let an instruction write registers that a running wgmma still reads, silently.
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
    "COPIES", "REQUIREMENT", "Instruction", "Listing", "Turn", "covered", "disassemble", "disassembler",
    "fewest", "fewest_of_a_round", "misallocated", "overwritten", "products", "scattered", "turn",
]  # fmt: skip

REQUIREMENT = "nvidia-cuda-nvdisasm==13.5.37"

_INSTRUCTION = re.compile(
    r"\s+/\*(?P<address>[0-9a-f]+)\*/\s+(?:(?P<guard>@!?U?P\w+)\s+)?"
    r"(?P<name>[A-Z]\w*)(?P<form>(?:\.\w+)*)\s*(?P<operands>.*?)\s*;"
)
_LABEL = re.compile(r"\.(L_x_\d+):")
_TARGET = re.compile(r"`\(\.(L_x_\d+)\)")
_REGISTER = re.compile(r"R(\d+)")
# More groups in flight than any kernel here keeps: something never waits.
_MOST_GROUPS = 8


class Instruction(NamedTuple):
    """One line of SASS.

    Attributes
    ----------
    address : int
    guard : str
        Its predicate, such as "@!P0"; "" if there is none.
    name, form : str
        HGMMA and .64x128x16.F32.BF16.
    operands : tuple of str
    """

    address: int
    guard: str
    name: str
    form: str
    operands: tuple[str, ...]

    def __str__(self) -> str:
        guard = f"{self.guard} " if self.guard else ""
        return f"{guard}{self.name}{self.form} {', '.join(self.operands)}"


class Listing(NamedTuple):
    """The code of a cubin, which holds one kernel.

    Attributes
    ----------
    instructions : tuple of Instruction
    labels : dict of str to int
        Index of the instruction that follows each label.
    """

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]

    @classmethod
    def of(cls, text: str) -> Listing:
        """Read what ``nvdisasm -c`` prints."""
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
        """Where a branch goes; None for what does not branch."""
        found = _TARGET.search(instruction.operands[-1]) if instruction.operands else None
        return self.labels.get(found[1]) if found else None

    def loops(self) -> list[tuple[int, int]]:
        """First and last instruction of every loop: a label and the last branch back to it."""
        ends: dict[int, int] = {}
        for index, instruction in enumerate(self.instructions):
            start = self.target(instruction) if instruction.name == "BRA" else None
            if start is not None and start < index:
                ends[start] = index
        return sorted(ends.items())

    def turn(self, start: int, end: int) -> int:
        """Instructions of a turn of a loop that has nothing to do but products and copies.

        Of all ways through it those with most products and 16-byte copies, of these the one of fewest
        instructions: it meets no mask, nor an option that is asked for at run time. 0 if no way stays inside:
        what is seldom stands behind the kernel, and branches back.
        """
        ways = {end: (0, 1)}
        for at in range(end - 1, start - 1, -1):
            instruction = self.instructions[at]
            branch = self.target(instruction) if instruction.name == "BRA" else None
            certain = branch is not None and not instruction.guard and len(instruction.operands) == 1
            after = [] if certain else [at + 1]
            if branch is not None and at < branch <= end:
                after.append(branch)
            found = [ways[to] for to in after if to in ways]
            if found:
                done, length = max(found, key=lambda way: (way[0], -way[1]))
                copies = instruction.name == "LDGSTS" and ".ZFILL" not in instruction.form
                ways[at] = (done + ("MMA" in instruction.name or copies), length + 1)
        return ways.get(start, (0, 0))[1]


def disassembler() -> Path | None:
    """Path of nvdisasm: in its PyPI package, or on PATH."""
    found = trust.packaged(REQUIREMENT, "nvidia/cu13/bin/nvdisasm") or shutil.which("nvdisasm")
    return Path(found) if found else None


def disassemble(cubin: Path) -> Listing:
    """Read the code of a cubin.

    Raises
    ------
    UnsupportedError
        There is no nvdisasm.
    """
    tool = disassembler()
    if tool is None:
        raise UnsupportedError(
            "SASS is read by nvdisasm, which is not installed.", hint=f"pip install {REQUIREMENT}"
        )
    command = [str(tool), "-c", str(cubin)]
    return Listing.of(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


# ---------------------------------------------------------------------- wgmma


def products(listing: Listing) -> dict[str, int]:
    """How many wgmma instructions there are of each shape, such as {"64x128x16": 16}."""
    found = Counter(i.form.split(".")[1] for i in listing.instructions if _is_product(i))
    return dict(sorted(found.items()))


def misallocated(listing: Listing, registers: int, warpgroups: int) -> list[str]:
    """What is wrong about the registers that warpgroups give back and take (setmaxnreg).

    A warpgroup can only give back what it was launched with, and only take more; and the one that copies must
    leave enough for all others, which would wait for ever.

    Parameters
    ----------
    listing : Listing
    registers : int
        Of a thread, at launch.
    warpgroups : int
        Of a block; one of them copies, the others compute.

    Returns
    -------
    list of str
        Empty if the code is right.
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
    """Every instruction that writes a register which a wgmma in flight reads or accumulates in.

    It follows all paths through the code until no new state turns up. A state is what is in flight, the
    groups that are committed, oldest first, and the one that is still open; and where each barrier of
    reconvergence (BSSY, BSYNC) goes on.

    Returns
    -------
    list of str
        Empty if the code is right.
    """
    code = listing.instructions
    found: dict[tuple[int, int], str] = {}
    for index, flight in _states(listing):
        now = code[index]
        written = _written(now)
        for product in (product for group in flight for product in group) if written else ():
            if clash := sorted(written & _busy(code[product])):
                names = ", ".join(f"R{register}" for register in clash)
                found[index, product] = (
                    f"{now.address:#x} {now} writes {names} while the product at "
                    f"{code[product].address:#x} is in flight: {code[product]}"
                )
        if len(flight) > _MOST_GROUPS:
            return [f"{now.address:#x} {now}: more than {_MOST_GROUPS} groups of products in flight"]
    return [found[key] for key in sorted(found)]


def covered(listing: Listing) -> int:
    """How many exponentials run under a product, on whatever way control comes to them.

    why: ptxas takes a wait for one that depends on nothing, and may move it before the work that was to run
    under the products.
    """
    exposed = {index for index, flight in _states(listing) if not any(flight)}
    exponentials = {index for index, i in enumerate(listing.instructions) if i.form.startswith(".EX2")}
    return len(exponentials - exposed)


def scattered(listing: Listing) -> int:
    """How many instructions of arithmetic stand between products of one group, which wait for them.

    Groups end with their last product; what stands before the first of a group is not counted.
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


def fewest_of_a_round(listing: Listing) -> int:
    """How many instructions the shortest way around the loop of wgmma products takes.

    That is a block without masks and what else is seldom. 0 if products are in no loop.
    """
    ways = (
        fewest(listing, index, index) for index, now in enumerate(listing.instructions) if _is_product(now)
    )
    return min(filter(None, ways), default=0)


def fewest(listing: Listing, first: int, last: int) -> int:
    """The fewest instructions from one to another, which may be the same; 0 if none lead there."""
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
    """Every instruction with all that can be in flight before it, until no new state turns up.

    A state is what is in flight, the groups that are committed, oldest first, and the one that is still open;
    and where each barrier of reconvergence (BSSY, BSYNC) goes on.
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


# Indices of products: committed groups from the oldest on, then the open one.
_Flight = tuple[tuple[int, ...], ...]
# (barrier, where its BSYNC goes on)
_Barriers = frozenset[tuple[str, int]]


def _is_product(instruction: Instruction) -> bool:
    return instruction.name in ("HGMMA", "IGMMA", "QGMMA")


def _after(flight: _Flight, index: int, now: Instruction) -> _Flight:
    """What is in flight after an instruction."""
    if _is_product(now):
        *committed, last = flight
        last = (*last, index) if index not in last else last
        return (*committed, last, ()) if "gsb0" in now.operands else (*committed, last)
    if now.name == "WARPGROUP" and now.form.startswith(".DEPBAR"):
        kept = int(now.operands[-1], 16)
        *committed, last = flight
        return (*committed[max(len(committed) - kept, 0) :], last)
    return flight


def _busy(product: Instruction) -> frozenset[int]:
    """Registers of its accumulator, and of A if A is in registers."""
    _, shape, *_ = product.form.split(".")
    accumulator, a, *_ = product.operands
    registers = set(_span(accumulator, int(shape.split("x")[1]) // 2))
    if _REGISTER.fullmatch(a):
        registers |= set(_span(a, 4))
    return frozenset(registers)


def _span(register: str, count: int) -> range:
    first = int(register[1:])
    return range(first, first + count)


# Instructions without a register of their own to write.
_WRITE_NOTHING = (
    "ST", "RED", "BRA", "BRX", "EXIT", "CALL", "RET", "BAR", "WARP", "SYNCS", "DEPBAR", "BSYNC", "BSSY",
    "YIELD", "UTMA", "UBLK", "FENCE", "ERRBAR", "CCTL", "MEMBAR", "NOP", "R2UR", "R2P", "FCHK", "PLOP3",
    "ELECT", "USETMAX", "LDGSTS", "LDGDEPBAR", "ACQBULK", "PREEXIT", "NANOSLEEP", "U",
)  # fmt: skip


def _written(now: Instruction) -> frozenset[int]:
    """Registers that an instruction writes; those of products are not asked for."""
    if now.name.endswith("SETP") or now.name.startswith(_WRITE_NOTHING) or _is_product(now):
        return frozenset()
    for operand in now.operands[:2]:
        if operand.startswith(("P", "UP")):  # some write a predicate first
            continue
        name = operand.split(".")[0]
        return frozenset(_span(name, _width(now))) if _REGISTER.fullmatch(name) else frozenset()
    return frozenset()


def _width(now: Instruction) -> int:
    """How many registers it writes."""
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


class Turn(NamedTuple):
    """One way round a loop.

    Attributes
    ----------
    instructions, products, barriers : int
        How many there are; products are those of mma.sync, barriers those of the block.
    stretches : tuple of int
        Instructions between one product and the next, round the loop, the longest first. A warp issues in
        order, so that its tensor core waits for them, if no other warp has products just then.
    exponentials : int
        The most between one product and the next.
    doubles : int
        Arithmetic of doubles, without the products.
    """

    instructions: int
    products: int
    barriers: int
    stretches: tuple[int, ...]
    exponentials: int
    doubles: int


def turn(listing: Listing, accesses: Collection[str] = _ACCESSES) -> Turn | None:
    """A whole tile's way round the loop with the most mma.sync products; None if there is none.

    Of all ways it has the most products, then the most of these accesses, then the fewest instructions:
    without masks, and without what is for ragged tiles. A loop inside is passed once. COPIES alone also pass
    by masks that read shared memory.
    """
    code = listing.instructions

    def products_of(loop: tuple[int, int]) -> int:
        return sum(i.name in _PRODUCTS for i in code[loop[0] : loop[1] + 1])

    start, end = max(
        listing.loops(), key=lambda loop: (products_of(loop), loop[0] - loop[1]), default=(0, -1)
    )
    if not products_of((start, end)):
        return None
    # From each instruction to the end: what there is on the best way, and where it goes on.
    best: dict[int, tuple[tuple[int, int, int], int]] = {}
    for index in range(end, start - 1, -1):
        onwards = [n for n in _following(listing, index, frozenset()) if n > index and n in best]
        if onwards or index == end:
            rest, following = max((best[n][0], n) for n in onwards) if index < end else ((0, 0, 0), -1)
            name, form = code[index].name, code[index].form
            own = (int(name in _PRODUCTS), int(name in accesses and ".ZFILL" not in form), -1)
            best[index] = ((own[0] + rest[0], own[1] + rest[1], own[2] + rest[2]), following)
    if start not in best:  # what is seldom stands behind the kernel, and branches back
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
    return Turn(
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
    """Instructions that can come next."""
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
        # A uniform branch has its predicate among the operands: BRA.U UP0, `(.L_x_1)
        always = not now.guard and len(now.operands) == 1
        return [target] if always else [index + 1, target]
    if now.name == "CALL" and target is not None:
        return [index + 1, target]
    return [index + 1]

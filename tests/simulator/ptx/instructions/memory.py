"""Loads, stores, atomics and cp.async."""

from __future__ import annotations

from tests.simulator.ptx.instructions import instruction
from tests.simulator.ptx.reader import Instruction, Unknown
from tests.simulator.ptx.writer import Writer, bits_of

_TYPE = "([subf](?:8|16|32|64))"
_SPACE = "(?:.(global|shared|param|local|const)(?:::cta)?)?"


def _space(name: str | None) -> str:
    """Constants lie where global variables do."""
    return f"Space::{ {None: 'generic', 'const': 'global'}.get(name, name) }".replace(" ", "")


@instruction(f"ld(?:.volatile|.weak|.relaxed.gpu|.acquire.gpu)?{_SPACE}"
             f"(?:.nc|.ca|.cg|.cs|.lu|.cv|.L1::no_allocate)*(?:.v([24]))?.{_TYPE}")  # fmt: skip
def load(w: Writer, i: Instruction, space: str | None, n: str | None, t: str) -> None:
    d, a = i.operands
    word = f"u{bits_of(t)}"
    whole = f"Vector<{word}, {n}>" if n else word
    if space == "param":
        read = f"params.at<{whole}>({w.address(a)})"
    elif space == "local":
        read = f"load_local<{whole}>(local, {w.address(a)})"
    else:
        read = f"load<{whole}>({_space(space)}, {w.address(a)}, {w.site})"
    # why "s": what is narrower than its register is extended by its sign
    element = word if t[0] != "s" else t
    if n is None:
        w.set(d, element, f"({element}){read}" if t[0] == "s" else read)
        return
    w.emit(f"{{ const auto x = {read};")
    for k, member in enumerate(w.vector(d, int(n))):
        w.set(member, element, f"({element})x.x[{k}]")
    w.emit("}")


@instruction(f"st(?:.volatile|.weak|.relaxed.gpu)?{_SPACE}(?:.wb|.cg|.cs|.wt)*(?:.v([24]))?.{_TYPE}")
def store(w: Writer, i: Instruction, space: str | None, n: str | None, t: str) -> None:
    a, d = i.operands
    if space in ("param", "const"):
        raise Unknown(f"a store to {space}")
    word = f"u{bits_of(t)}"
    x = ", ".join(w.values(w.vector(d, int(n or 1)), word))
    whole = f"Vector<{word}, {n}>" if n else word
    value = f"{whole}{{{{{x}}}}}" if n else x
    if space == "local":
        w.emit(f"store_local<{whole}>(local, {w.address(a)}, {value});")
    else:
        w.emit(f"store<{whole}>({_space(space)}, {w.address(a)}, {value}, {w.site});")


_ATOMICS = {"add": "atomic_add", "max": "atomic_max", "min": "atomic_min", "exch": "atomic_exchange"}
_ATOMIC_TYPES = {
    "u32": "u32",
    "b32": "u32",
    "s32": "s32",
    "u64": "u64",
    "b64": "u64",
    "f32": "float",
    "f64": "double",
}


@instruction(f"(atom|red)(?:.relaxed.gpu)?(?:.(global|shared))?.(add|max|min|exch).{_TYPE}")
def atomic(w: Writer, i: Instruction, kind: str, space: str | None, op: str, t: str) -> None:
    """atom has the value before; red has no result."""
    d, a, x = i.operands if kind == "atom" else ("_", *i.operands)
    call = f"{_ATOMICS[op]}<{_ATOMIC_TYPES[t]}>({_space(space)}, {w.address(a)}, {w.value(x, t)}, {w.site})"
    w.set(d, t, call)


@instruction("red.release.gpu.global.add.u32")
def semaphore_release(w: Writer, i: Instruction) -> None:
    a, x = i.operands
    if x != "1":
        raise Unknown("more than one turn")
    w.emit(f"release_turn({w.address(a)}, {w.site});")


@instruction("cp.async.(ca|cg).shared.global")
def copy_async(w: Writer, i: Instruction, cache: str) -> None:
    """So many bytes, of which the last operand says how many exist; the rest comes as zeros."""
    d, a, size, *wanted = i.operands
    if int(size) not in ((16,) if cache == "cg" else (4, 8, 16)):
        raise Unknown(f"{size} bytes")
    exist = w.value(wanted[0], "s32") if wanted else size
    w.emit(f"copy_async({w.address(d)}, {w.address(a)}, {size}, {exist}, {w.site});")


@instruction("cp.async.commit_group")
def copy_async_commit(w: Writer, i: Instruction) -> None:
    w.emit("copy_async_commit();")


@instruction("cp.async.wait_group")
def copy_async_wait(w: Writer, i: Instruction) -> None:
    (newest,) = i.operands
    w.emit(f"copy_async_wait({int(newest)}, {w.site});")

"""What the C++ of a kernel is written with: registers, operands and addresses, and statements that set them.

Registers are local variables. Those that a warpgroup product keeps while it runs are members of arrays: NVVM
gives the products of a chain the same list, and another arrangement is an error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tests.simulator.ptx.reader import Global, Instruction, Kernel, Label, Local, Registers, Unknown, parts

__all__ = ["Writer", "bits_of", "c_type"]

_REGISTER_TYPES = {
    "pred": "bool", "b8": "u8", "u8": "u8", "s8": "u8", "b16": "u16", "u16": "u16", "s16": "u16",
    "b32": "u32", "u32": "u32", "s32": "u32", "f32": "float", "b64": "u64", "u64": "u64", "s64": "u64",
    "f16": "u16", "f64": "double",
}  # fmt: skip
_WIDTH = {"u8": 8, "u16": 16, "u32": 32, "u64": 64, "float": 32, "double": 64}
_FLOATS = {"f32": "float", "f64": "double"}
_EXTENTS = {"tid": "threadIdx", "ctaid": "blockIdx", "ntid": "blockDim", "nctaid": "gridDim"}
_SPECIAL = {
    f"%{name}.{axis}": f"{variable}.{axis}"
    for name, variable in _EXTENTS.items()
    for axis in "xyz"
} | {"%laneid": "lane()"}  # fmt: skip
_NUMBER = re.compile(r"-?(?:0x[0-9a-fA-F]+|\d+)U?")
_FLOAT_BITS = re.compile(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})")
_NUMBERED = re.compile(r"(%[a-z]+)(\d+)")
_ADDRESS = re.compile(r"\[\s*([^+\s\[\]-]+)\s*(?:([+-])\s*(-?\d+))?\s*\]")


def bits_of(t: str) -> int:
    """The width of a PTX type such as "s32"."""
    return int(t.lstrip("busf"))


def c_type(t: str) -> str:
    """The C++ type that a PTX type is computed in; bits are unsigned."""
    return _FLOATS.get(t) or ("s" if t[0] == "s" else "u") + t.lstrip("bus")


class Writer:
    """The C++ of one kernel, as its instructions write it.

    Parameters
    ----------
    kernel : Kernel
    file : str
        The PTX file, for the reports of the simulator.
    """

    def __init__(self, kernel: Kernel, file: str) -> None:
        self.kernel, self.file = kernel, file
        self.line = 0  # of the instruction that is written
        self.statements: list[str] = []
        self.arrays: list[str] = []  # their definitions
        self.locals_size = 0
        self.used: dict[str, str] = {}  # C++ name of a numbered register that is no member -> C++ type
        self.used_globals: dict[str, Global] = {}
        self._numbered: dict[str, str] = {}  # prefix of numbered registers -> C++ type
        self._scopes: list[dict[str, tuple[str, str]]] = [{}]  # others: PTX name -> C++ type and name
        self._members: dict[str, str] = {}  # PTX name -> its place in one of the arrays
        self._locals: dict[str, int] = {}  # name -> where it begins
        self._polled = _polled_labels(kernel)
        self._declare()

    # ---- what handlers write

    def emit(self, statement: str) -> None:
        """Append a statement."""
        self.statements.append(statement)

    def set(self, operand: str, t: str, expression: str) -> None:
        """Assign an expression of the C++ type of `t` to a register; "_" drops it."""
        self.emit(self.assignment(operand, t, expression))

    def assignment(self, operand: str, t: str, expression: str) -> str:
        """The statement of `set`. In a wider register the sign of s32 fills the rest; zeros of u32."""
        if operand == "_":
            return f"(void)({expression});"
        kind, name = self._register(operand)
        target = "bool" if t == "pred" else c_type(t)
        if kind == target:
            return f"{name} = {expression};"
        if "bool" in (kind, target) or _WIDTH[kind] < bits_of(t):
            raise Unknown(f"{operand} is {kind}, set as {t}")
        if kind in _FLOATS.values() or target in _FLOATS.values():
            if _WIDTH[kind] != bits_of(t) or {kind, target} <= set(_FLOATS.values()):
                raise Unknown(f"{operand} is {kind}, set as {t}")
            return f"{name} = bit_cast<{kind}>({expression});"
        wide = f"s{_WIDTH[kind]}" if t[0] == "s" else kind
        return f"{name} = ({kind})({wide})({target})({expression});"

    @property
    def site(self) -> str:
        """The argument of the runtime that tells where in the PTX a call stands."""
        return f"S({self.line})"

    # ---- operands

    def values(self, operands: Sequence[str], t: str) -> list[str]:
        """Every operand as `value`."""
        return [self.value(operand, t) for operand in operands]

    def value(self, operand: str, t: str) -> str:
        """An operand, as a C++ expression of the C++ type of `t`."""
        if t == "pred":
            return self._predicate(operand)
        target = c_type(t)
        if (operand[0] == "%" and operand not in _SPECIAL) or self._declared(operand):
            return self._converted(operand, t)
        if found := _FLOAT_BITS.fullmatch(operand):
            digits = found[1] or found[2]
            if 4 * len(digits) != bits_of(t):
                raise Unknown(f"{operand} as {t}")
            return f"bit_cast<{target}>(0x{digits}{'u' if found[1] else 'ull'})"
        if _NUMBER.fullmatch(operand) and target not in _FLOATS.values():
            number, bits = int(operand.rstrip("U"), 0), bits_of(t)
            if not -(1 << bits - 1) <= number < 1 << bits:
                raise Unknown(f"{operand} does not fit {t}")
            return f"({target})0x{number % (1 << bits):x}ull"
        if operand in _SPECIAL:
            return f"({target}){_SPECIAL[operand]}"
        return f"({target})({self._symbol(operand)})"

    def address(self, operand: str) -> str:
        """What stands in square brackets: a register or a symbol, and an offset."""
        found = _ADDRESS.fullmatch(operand)
        if found is None:
            raise Unknown(f"address {operand}")
        base, sign, offset = found.groups()
        if base[0] != "%" and not self._declared(base):
            return self._symbol(base, int(f"{sign or '+'}{offset or 0}".replace("+-", "-")))
        kind, name = self._register(base)
        # why the type: a 32-bit address plus an offset has 32 bits
        return f"{kind}({name} {sign} ({offset}))" if sign else name

    def vector(self, operand: str, length: int | None = None) -> list[str]:
        """The operands in braces, or the one without."""
        found = parts(operand[1:-1]) if operand[0] == "{" else [operand]
        if length is not None and len(found) != length:
            raise Unknown(f"{operand} has {len(found)} members, not {length}")
        return found

    def array(self, registers: Sequence[str], kind: str) -> str | None:
        """The C++ array whose members are these registers, in order; None if they are members of others."""
        places = [self._members.get(name) for name in registers]
        if not any(places) and len(set(registers)) == len(registers):
            if any(self._register(name)[0] != kind for name in registers):
                raise Unknown(f"registers {registers} are not all {kind}")
            label = self.array_of(kind, len(registers))
            self._members.update({name: f"{label}[{k}]" for k, name in enumerate(registers)})
            return label
        label = (places[0] or "").removesuffix("[0]")
        return label if places == [f"{label}[{k}]" for k in range(len(registers))] else None

    def array_of(self, kind: str, length: int) -> str:
        """A new array that lives as long as the thread."""
        label = f"a{len(self.arrays)}"
        self.arrays.append(f"{kind} {label}[{length}];")
        return label

    def label(self, name: str) -> tuple[str, bool]:
        """The C++ label, and whether what follows it polls memory."""
        return "L_" + name.strip("$%"), name in self._polled

    def _declared(self, name: str) -> bool:
        return any(name in scope for scope in self._scopes)

    def _register(self, name: str) -> tuple[str, str]:
        """C++ type and name."""
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        found = _NUMBERED.fullmatch(name)
        if found is None or found[1] not in self._numbered:
            raise Unknown(f"{name} is no register")
        kind = self._numbered[found[1]]
        if name in self._members:
            return kind, self._members[name]
        self.used[name[1:]] = kind
        return kind, name[1:]

    def _predicate(self, operand: str) -> str:
        if operand[0] == "!":
            return f"!{self._predicate(operand[1:])}"
        kind, name = self._register(operand)
        if kind != "bool":
            raise Unknown(f"{operand} is {kind}, not a predicate")
        return name

    def _converted(self, operand: str, t: str) -> str:
        """A register as another type of its width, or an integer as one of less."""
        kind, name = self._register(operand)
        target = c_type(t)
        if kind == target:
            return name
        floats = _FLOATS.values()
        if kind == "bool" or _WIDTH[kind] < bits_of(t):
            raise Unknown(f"{operand} is {kind}, read as {t}")
        if kind in floats or target in floats:
            if _WIDTH[kind] != bits_of(t):
                raise Unknown(f"{operand} is {kind}, read as {t}")
            return f"bit_cast<{target}>({name})"
        return f"({target}){name}"

    def _symbol(self, name: str, offset: int = 0) -> str:
        """The address of something that has a name, in its state space."""
        if name in ("cf_shared_memory", f"{self.kernel.name}_param_0"):
            return f"u64({offset})"
        if name in self._locals:
            return f"u64({self._locals[name] + offset})"
        if name in self.kernel.globals:
            self.used_globals[name] = self.kernel.globals[name]
            return f"(u64)&{name} + {offset}"
        raise Unknown(f"{name} is not known")

    # ---- declarations

    def _declare(self) -> None:
        """What is known before the first instruction: types, places in local memory, registers in arrays."""
        for item in self.kernel.body:
            if isinstance(item, Registers):
                numbered = (name.split("<")[0] for name in item.names if "<" in name)
                self._numbered.update(dict.fromkeys(numbered, _REGISTER_TYPES[item.type]))
            elif isinstance(item, Local):
                self._locals[item.name] = -(-self.locals_size // item.align) * item.align
                self.locals_size = self._locals[item.name] + item.size
        instructions = [item for item in self.kernel.body if isinstance(item, Instruction)]
        products = [i.operands for i in instructions if i.opcode.startswith("wgmma.mma_async")]
        for accumulators, *_ in products:
            self.array(self.vector(accumulators), "float")
        for _, a, *_ in products:
            if a[0] == "{":
                self.array(self.vector(a), "u32")

    def declare(self, registers: Registers) -> None:
        """Define those that have a name of their own, which are known in this scope."""
        kind = _REGISTER_TYPES[registers.type]
        for name in registers.names:
            if "<" not in name:
                self._scopes[-1][name] = (kind, f"v_{name.strip('%')}")
                self.emit(f"{kind} v_{name.strip('%')};")

    def scope(self, opens: bool) -> None:
        """Begin or end one."""
        if opens:
            self._scopes.append({})
        else:
            self._scopes.pop()
        self.emit("{" if opens else "}")


def _polled_labels(kernel: Kernel) -> set[str]:
    """Labels right before a load that acquires: a branch back asks again for what another block writes."""
    return {
        before.name
        for before, item in zip(kernel.body, kernel.body[1:], strict=False)
        if isinstance(before, Label)
        and isinstance(item, Instruction)
        and item.opcode.startswith("ld.acquire")
    }

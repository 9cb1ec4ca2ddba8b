"""A PTX file to a C++ file: a statement per instruction, which calls the runtime in runtime/ptx.h."""

from __future__ import annotations

from tests.simulator.ptx import instructions
from tests.simulator.ptx.reader import Global, Instruction, Label, Registers, Scope, Unknown, read
from tests.simulator.ptx.writer import Writer

__all__ = ["translate"]


def translate(text: str, file: str) -> str:
    """Translate PTX.

    Parameters
    ----------
    text : str
    file : str
        Its name: calls of the runtime, and errors, say file and line.

    Returns
    -------
    str
        C++ that defines the entry that `cupy_flash.simulator` calls.

    Raises
    ------
    Unknown
        One line for every kind of instruction that is not known.
    """
    try:
        writer = Writer(read(text), file)
        unknown = _write_body(writer)
        if not unknown:
            return "\n".join([*_head(writer), *writer.statements, *_tail(writer)]) + "\n"
    except Unknown as error:
        raise Unknown(f"{file}: {error}") from error
    raise Unknown("\n".join(f"{file}:{line}" for line in unknown))


def _write_body(writer: Writer) -> list[str]:
    """Every item of the kernel; returns what is unknown, the first of each kind."""
    unknown: dict[str, str] = {}
    for item in writer.kernel.body:
        if isinstance(item, Instruction):
            try:
                _write_instruction(writer, item)
            except Unknown as error:
                unknown.setdefault(item.opcode, f"{item.line}: {error}")
        elif isinstance(item, Scope):
            writer.scope(item.opens)
        elif isinstance(item, Label):
            writer.emit(f"{writer.label(item.name)[0]}:;")
        elif isinstance(item, Registers):
            writer.declare(item)
    return list(unknown.values())


def _write_instruction(writer: Writer, i: Instruction) -> None:
    writer.line = i.line
    before = len(writer.statements)
    instructions.write(writer, i)
    if i.guard:
        guarded = " ".join(writer.statements[before:])
        writer.statements[before:] = [f"if ({writer.value(i.guard, 'pred')}) {{ {guarded} }}"]


def _head(writer: Writer) -> list[str]:
    variables: dict[str, list[str]] = {}
    for name, kind in writer.used.items():
        variables.setdefault(kind, []).append(name)
    local = [f"alignas(16) u8 local[{writer.locals_size}];"] if writer.locals_size else []
    return [
        '#include "ptx.h"',
        f'#define S(line) Site{{"{writer.file}", line}}',
        *(_definition(writer.used_globals[name]) for name in sorted(writer.used_globals)),
        f"static void body(const Params<{writer.kernel.param_bytes}>& params) {{",
        *writer.arrays,
        *local,
        *(f"{kind} {', '.join(names)};" for kind, names in sorted(variables.items())),
    ]


def _tail(writer: Writer) -> list[str]:
    kernel = writer.kernel
    sizes = f"{kernel.param_bytes}, {kernel.max_threads}"
    return ["}", f"PTX_KERNEL({kernel.name}, {sizes}, body)"]


def _definition(variable: Global) -> str:
    """A variable of the module; floats as their bits."""
    kind = "u" + variable.type.lstrip("bsuf")
    numbers = [str(int(v[2:], 16) if v[:2].lower() in ("0f", "0d") else int(v, 0)) for v in variable.values]
    written = ", ".join(f"({kind}){number}ull" for number in numbers or ["0"])
    extent = "" if variable.length is None else f"[{variable.length}]"
    return f"alignas({variable.align}) static {kind} {variable.name}{extent} = {{{written}}};"

"""cvt between integers, floats and the narrow formats, and cvta between state spaces."""

from __future__ import annotations

from tests.simulator.ptx.instructions import instruction
from tests.simulator.ptx.reader import Instruction, Unknown
from tests.simulator.ptx.writer import Writer, c_type

_INTEGER = "([su](?:8|16|32|64))"
_ROUNDINGS = {"rzi": "std::trunc", "rni": "std::nearbyint", "rmi": "std::floor", "rpi": "std::ceil"}


@instruction(f"cvt(.sat)?.{_INTEGER}.{_INTEGER}")
def integer_to_integer(w: Writer, i: Instruction, saturated: str | None, to: str, of: str) -> None:
    d, a = i.operands
    x = w.value(a, of)
    w.set(d, to, f"saturated<{c_type(to)}>((s64){x})" if saturated else f"({c_type(to)}){x}")


@instruction(f"cvt.rn.(f32|f64).{_INTEGER}")
def integer_to_float(w: Writer, i: Instruction, to: str, of: str) -> None:
    d, a = i.operands
    w.set(d, to, f"({c_type(to)}){w.value(a, of)}")


@instruction(f"cvt.(rzi|rni|rmi|rpi)(?:.ftz)?.{_INTEGER}.(f32|f64)")
def float_to_integer(w: Writer, i: Instruction, rounding: str, to: str, of: str) -> None:
    d, a = i.operands
    w.set(d, to, f"to_integer<{c_type(to)}>({_ROUNDINGS[rounding]}({w.value(a, of)}))")


@instruction("cvt.(rzi|rni|rmi|rpi)(?:.ftz)?.(f32.f32|f64.f64)")
def float_to_whole(w: Writer, i: Instruction, rounding: str, both: str) -> None:
    d, a = i.operands
    t = both.split(".")[0]
    w.set(d, t, f"{_ROUNDINGS[rounding]}({w.value(a, t)})")


@instruction("cvt(?:.rn)?.(f32.f64|f64.f32)")
def float_to_float(w: Writer, i: Instruction, both: str) -> None:
    d, a = i.operands
    to, of = both.split(".")
    w.set(d, to, f"({c_type(to)}){w.value(a, of)}")


@instruction("cvt.rn.(f16|bf16).(f32|f64)")
def float_to_half(w: Writer, i: Instruction, to: str, of: str) -> None:
    d, a = i.operands
    w.set(d, "b16", f"to_{to}({w.value(a, of)})")


@instruction("cvt.(f32|f64).(f16|bf16)")
def half_to_float(w: Writer, i: Instruction, to: str, of: str) -> None:
    d, a = i.operands
    w.set(d, to, f"({c_type(to)})from_{of}({w.value(a, 'b16')})")


@instruction("cvt.rn.(f16|bf16)x2.f32")
def floats_to_halves(w: Writer, i: Instruction, to: str) -> None:
    """The first source is the upper half."""
    d, *x = i.operands
    high, low = w.values(x, "f32")
    w.set(d, "b32", f"pair(to_{to}({high}), to_{to}({low}))")


@instruction("cvt.rn.satfinite.e4m3x2.f32")
def floats_to_e4m3(w: Writer, i: Instruction) -> None:
    """The first source is the upper byte."""
    d, *x = i.operands
    w.set(d, "b16", f"to_e4m3x2({', '.join(w.values(x, 'f32'))})")


@instruction("cvt.rna.tf32.f32")
def float_to_tf32(w: Writer, i: Instruction) -> None:
    d, a = i.operands
    w.set(d, "b32", f"to_tf32({w.value(a, 'f32')})")


@instruction("cvta(.to)?.(global|shared|param|local|const)(?:::cta)?.u64")
def convert_address(w: Writer, i: Instruction, to: str | None, space: str) -> None:
    """Generic addresses are those of the host; so are global ones. The others are offsets."""
    d, a = i.operands
    x = w.value(a, "u64")
    if space in ("global", "const"):
        w.set(d, "u64", x)
    elif space == "shared":
        w.set(d, "u64", f"{'shared_of_generic' if to else 'generic_of_shared'}({x})")
    elif to:
        raise Unknown(f"to {space}")
    else:
        w.set(d, "u64", f"{x} + (u64){'&params' if space == 'param' else 'local'}")
